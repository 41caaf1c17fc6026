"""What `mimo-tokenizer serve` is told, as one frozen object; `cli.py` fills it from flags and environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Configurations that ship with the server, for `--load-format dummy`.
BUILT_IN_MODELS = {path.stem: path for path in sorted((Path(__file__).parent / "configs").glob("*.json"))}

# An environment variable is this and the flag's name: --device is MIMO_AUDIO_TOKENIZER_DEVICE.
ENVIRONMENT_PREFIX = "MIMO_AUDIO_TOKENIZER_"

DEFAULT_ADDRESS = "127.0.0.1:50051"

MIB = 1 << 20


class TracingError(ValueError):
    """Spans cannot be exported as the environment says; the sentence says why."""


@dataclass(frozen=True)
class ServeConfig:
    """Settings of one server process.

    Attributes:
        model: a folder, a hub id, or for dummy weights also the name of a built-in config or a JSON file.
        revision: branch, tag or commit of a hub id.
        load_format: "safetensors" or "dummy".
        seed: of dummy weights.
        device: as `device.resolve` takes it.
        dtype: as `device.dtype_of` takes it.
        quantize: "none", or "int8" for the linear layers of the decoder's transformer.
        quantize_encoder: whether those of the encoder's are quantized, too.
        threads: that compute on the CPU; None for what is set already.
        address: "unix:///path" or "host:port".
        socket_mode: permissions of a Unix socket.
        tls_cert: certificate and its chain, PEM; with `tls_key`, or both None for no TLS.
        tls_key: its private key, PEM.
        tls_client_ca: CAs, PEM, of which one must have signed a caller's certificate; None for no such need.
        token_file: tokens, one a line, of which a call must carry one; None for no such need.
        health_address: "host:port" where health alone is answered, without TLS and token; None for nowhere.
        max_connections: at a time.
        max_connection_idle_seconds: after which a connection without calls is closed.
        max_connection_age_seconds: after which a connection is closed, when its calls have ended; None for never.
        max_streams_per_connection: calls at a time on one connection.
        max_message_bytes: of one message, request or answer.
        max_audio_seconds: longest recording; None for the model's own limit.
        max_queued_frames: code frames queued or computed at a time, over all calls; None for twice the longest
            recording's.
        max_concurrent_calls: calls of the tokenizer's own methods at a time.
        max_batch_frames: code frames that are computed together; a longer item is computed in steps.
        max_graph_frames: code frames of a batch up to which graphs are recorded, where the device has them; 0 for none.
        device_memory_limit: what the process may use of the device, as `memory.parse_limit` takes it; None for nine
            tenths of what there is.
        batch_invariant: whether an item's answer is the same bits in every batch.
        metrics_address: "host:port" where Prometheus reads the metrics; None for nowhere.
        trace: whether calls are traced, by OpenTelemetry.
        grace_seconds: how long calls in flight may take to finish after SIGTERM.
        log_level: least level that is logged.
        log_format: "text" or "json".
    """

    model: str = "published"
    revision: str | None = None
    load_format: str = "safetensors"
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    quantize: str = "none"
    quantize_encoder: bool = False
    threads: int | None = None
    address: str = DEFAULT_ADDRESS
    socket_mode: int = 0o660
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    token_file: Path | None = None
    health_address: str | None = None
    max_connections: int = 1000
    max_connection_idle_seconds: float = 300.0
    max_connection_age_seconds: float | None = None
    max_streams_per_connection: int = 1024
    max_message_bytes: int = 64 * MIB
    max_audio_seconds: float | None = None
    max_queued_frames: int | None = None
    max_concurrent_calls: int = 128
    max_batch_frames: int = 8192
    max_graph_frames: int = 512
    device_memory_limit: str | None = None
    batch_invariant: bool = False
    metrics_address: str | None = None
    trace: bool = False
    grace_seconds: float = 30.0
    log_level: str = "info"
    log_format: str = "text"

"""The command `mimo-tokenizer`: flags and environment in, exit status out."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
import numpy.typing as npt

from mimo_tokenizer_client import Credentials, ServerInfo, TokenizerClient, TokenizerError

from . import threads
from .config import BUILT_IN_MODELS, DEFAULT_ADDRESS, ENVIRONMENT_PREFIX, MIB, ServeConfig, TracingError
from .model.config import MAX_AUDIO_SECONDS

F = TypeVar("F", bound=Callable[..., Any])

# A command, unlike a program that embeds the client, has a person waiting.
_UNAVAILABLE_SECONDS = 3.0

EXIT_STATUSES = """
\b
Exit status: 0 after SIGTERM or SIGINT; 1 if the server cannot start (checkpoint, address, certificate, token);
2 for wrong flags or a device that is not there; 3 after a device failure: restart it;
130 or 143 at once after a second SIGINT or SIGTERM.
"""


def _option(flag: str, **attributes: Any) -> Callable[[F], F]:
    """A flag, and the environment variable of the same name."""
    name = ENVIRONMENT_PREFIX + flag.removeprefix("--").replace("-", "_").upper()
    return click.option(flag, envvar=name, show_envvar=True, show_default=True, **attributes)


@dataclasses.dataclass(frozen=True)
class _Server:
    """The server that a command is a client of."""

    address: str
    credentials: Credentials


def _server(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say which server and how to be let in; the command gets them as one `server`."""

    @_option("--address", default=DEFAULT_ADDRESS, help="Where the server listens: unix:///path or host:port.")
    @_option(
        "--tls-ca",
        help="Use TLS: PEM file of the authorities that may have signed the server's certificate, or system for those"
        " that gRPC ships.",
    )
    @_option("--tls-client-cert", help="PEM file of the certificate to show to a server that asks for one.")
    @_option("--tls-client-key", help="PEM file of its key.")
    @_option("--tls-server-name", help="Name that the server's certificate has.  [default: the address's host]")
    @_option("--token-file", help="File with the token that the server asks for.")
    @functools.wraps(command)
    def with_server(address: str, **options: Any) -> None:
        names = [field.name for field in dataclasses.fields(Credentials)]
        command(server=_Server(address, Credentials(**{name: options.pop(name) for name in names})), **options)

    return with_server


def _octal(_context: click.Context, _parameter: click.Parameter, text: str) -> int:
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        raise click.BadParameter(f"{text!r} is no octal file mode, such as 660")
    return mode


def _graph_frames(_context: click.Context, _parameter: click.Parameter, frames: int) -> int:
    if 0 < frames < 128:
        raise click.BadParameter(f"{frames} is neither 0 nor at least 128, up to which every batch is filled")
    return frames


class _Seconds(click.FloatRange):
    """A range of seconds; NaN, which compares as neither too few nor too many, is in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read a number."""
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value!r} is no number of seconds", param, ctx)
        return seconds


# More than anybody means, and less than makes a count of frames or calls outgrow its field in GetInfo's answer.
_MAX_COUNT = 2**32 - 1
_DAY = 86_400

_POSITIVE = _Seconds(min=0, min_open=True)
# Whether it is there and what is in it is looked at in one place, and again when it changes.
_FILE = click.Path(dir_okay=False, path_type=Path)
_timeout = click.option("--timeout", type=_POSITIVE, help="Seconds for the call.  [default: grows with the audio]")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="mimo-audio-tokenizer-service", prog_name="mimo-tokenizer")
def cli() -> None:
    """MiMo-Audio's tokenizer: sound to codes and back, served over gRPC by a process pinned to one device."""


@cli.command(epilog=EXIT_STATUSES)
@_option(
    "--model",
    default=None,
    help="Checkpoint: a folder with config.json and model.safetensors, or a Hugging Face hub id. With --load-format"
    f" dummy also a JSON file or one of the built-in configs, {' or '.join(BUILT_IN_MODELS)}, the first if left out.",
)
@_option("--revision", help="Branch, tag or commit of a hub id.")
@_option(
    "--load-format",
    type=click.Choice(["safetensors", "dummy"]),
    default="safetensors",
    help="dummy: seeded random weights, for benchmarks and tests; codes and sound carry no meaning.",
)
@_option("--seed", type=click.IntRange(min=0), default=0, help="Of dummy weights.")
@_option(
    "--device", default="auto", help="cpu, cuda (its first device), cuda:N, or auto: the first accelerator, else cpu."
)
@_option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    help="Of the weights; auto: float32 on cpu, bfloat16 elsewhere. Quantizer and ISTFT are always float32.",
)
@_option(
    "--quantize",
    type=click.Choice(["none", "int8"]),
    default="none",
    help="int8: faster and smaller, but no longer exact; for float32 on cpu. Of the decoder's linear layers; what it"
    " costs is measured at start, logged, and told by info.",
)
@_option(
    "--quantize-encoder",
    is_flag=True,
    help="With --quantize int8: the encoder's linear layers, too. Changes codes.",
)
@_option(
    "--threads",
    type=click.IntRange(1, 1024),
    default=None,
    help="That compute on the CPU.  [default: OMP_NUM_THREADS, or the cores that the process or its container may use]",
)
@_option(
    "--address",
    default=DEFAULT_ADDRESS,
    help="Where to listen: unix:///path (for a sidecar; a stale socket is replaced), or host:port. A host that is not"
    " loopback lets everybody in who reaches it, but for --tls-client-ca or --token-file.",
)
@_option(
    "--socket-mode",
    default="660",
    callback=_octal,
    help="Permissions of a Unix socket, octal.",
)
@_option(
    "--tls-cert",
    type=_FILE,
    help="Serve TLS with this certificate (PEM, its chain behind it). Certificates, keys and tokens are read anew when"
    " their files change.",
)
@_option("--tls-key", type=_FILE, help="Private key of --tls-cert (PEM, without a passphrase).")
@_option(
    "--tls-client-ca",
    type=_FILE,
    help="Mutual TLS: callers must show a certificate that is signed by one of these CAs (PEM).",
)
@_option(
    "--token-file",
    type=_FILE,
    help="Tokens, one a line (# comments), 16 characters or more, of which each call must carry one: metadata"
    " authorization: Bearer TOKEN. Probes that cannot ask at --health-address.",
)
@_option(
    "--health-address",
    default=None,
    help="Where probes that know neither TLS nor Unix sockets ask for health, and can nothing else: host:port, in plain"
    " text.  [default: nowhere]",
)
@_option("--max-connections", type=click.IntRange(1, 1_000_000), default=1000, help="At a time.")
@_option(
    "--max-connection-idle-seconds",
    type=_Seconds(0, _DAY, min_open=True),
    default=300.0,
    help="A connection without calls is closed after this; clients make another when they need it.",
)
@_option(
    "--max-connection-age-seconds",
    type=_Seconds(0, _DAY, min_open=True),
    default=None,
    help="A connection is closed after this, when its calls have ended or an hour later; spreads clients over servers"
    " and has them show their certificates again.  [default: never]",
)
@_option(
    "--max-streams-per-connection",
    type=click.IntRange(1, 1_000_000),
    default=1024,
    help="Calls at a time on one connection; more wait in the client.",
)
@_option(
    "--max-message-mib", type=click.IntRange(1, 1024), default=64, help="Largest message, request or answer, in MiB."
)
@_option(
    "--max-audio-seconds",
    type=_Seconds(min=0, max=MAX_AUDIO_SECONDS, min_open=True),
    default=None,
    help="Longest recording.  [default: the model's]",
)
@_option(
    "--max-queued-frames",
    type=click.IntRange(1, _MAX_COUNT),
    default=None,
    help="Code frames (25 a second) queued at a time.  [default: two of the longest recordings]",
)
@_option("--max-concurrent-calls", type=click.IntRange(1, _MAX_COUNT), default=128, help="Calls in progress at a time.")
@_option(
    "--max-batch-frames",
    type=click.IntRange(1, _MAX_COUNT),
    default=8192,
    help="Code frames that are computed together; what is longer is computed in steps.",
)
@_option(
    "--max-graph-frames",
    type=click.IntRange(0, 1024),
    default=512,
    callback=_graph_frames,
    help="Code frames of a batch up to which CUDA graphs are recorded, for bfloat16 and float16: short batches are"
    " sooner done, and the start takes longer. 0: none.",
)
@_option(
    "--device-memory-limit",
    default=None,
    help="What the server may use of the device's memory (on cpu: of the machine's or container's), weights included:"
    " bytes, 12GiB, 800MiB, or a share, 50% or 0.5.  [default: 90%, or what is free]",
)
@_option(
    "--batch-invariant",
    is_flag=True,
    help="An item's codes and samples are the same bits in every batch; slower, most of all on cpu.",
)
@_option(
    "--metrics-address",
    default=None,
    help="Where Prometheus reads the metrics over HTTP: host:port. Whoever reaches it may.  [default: nowhere]",
)
@_option(
    "--trace",
    is_flag=True,
    help="Trace calls with OpenTelemetry: where to, how many and as which service its own variables say, such as"
    " OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER and OTEL_SERVICE_NAME. Needs the extra [tracing].",
)
@_option(
    "--grace-seconds",
    type=_Seconds(0, _DAY),
    default=30.0,
    help="How long calls may take to finish after SIGTERM.",
)
@_option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    help="debug: a line for each request.",
)
@_option("--log-format", type=click.Choice(["text", "json"]), default="text", help="Of the log on standard error.")
def serve(max_message_mib: int, model: str | None, **flags: Any) -> None:
    """Load the model on one device and serve it until SIGTERM."""
    from .telemetry import configure_logging

    if model is None:
        if flags["load_format"] != "dummy":
            raise click.UsageError("--model is missing: a folder, a hub id, or --load-format dummy for random weights")
        model = "published"
    elif model in BUILT_IN_MODELS and flags["load_format"] != "dummy" and not Path(model).is_dir():
        raise click.UsageError(f"--model: {model} is a built-in config without weights; add --load-format dummy")
    if flags["quantize_encoder"] and flags["quantize"] == "none":
        raise click.UsageError("--quantize-encoder goes with --quantize int8")
    if (flags["tls_cert"] is None) != (flags["tls_key"] is None):
        raise click.UsageError("--tls-cert and --tls-key go together")
    if flags["tls_client_ca"] is not None and flags["tls_cert"] is None:
        raise click.UsageError("--tls-client-ca goes with --tls-cert and --tls-key")
    if flags["tls_cert"] is not None and flags["address"].startswith("unix:"):
        raise click.UsageError("--tls-cert is for host:port; who may use a Unix socket is said by --socket-mode")
    flags["threads"] = threads.prepare(flags["threads"], os.environ)
    # A float32 model is asked for to be exact: no bfloat16 in oneDNN's products, whatever the environment says.
    os.environ |= {"ONEDNN_DEFAULT_FPMATH_MODE": "STRICT", "DNNL_DEFAULT_FPMATH_MODE": "STRICT"}
    # oneDNN keeps what it has made for each shape, a thousand of them by default; here nearly each batch has another.
    # PyTorch keeps another thousand descriptions of them, with 0.3 MiB each.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
    # With it prometheus_client would share its counts with other processes, by way of a folder that need not be there.
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    config = ServeConfig(model=model, max_message_bytes=max_message_mib * MIB, **flags)
    configure_logging(config.log_level, config.log_format)
    try:
        import grpc_health  # noqa: F401
        import prometheus_client  # noqa: F401
        import torch
        import torchaudio  # noqa: F401
        import xxhash  # noqa: F401
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"serving needs {error.name}: pip install 'mimo-audio-tokenizer-service[server]'"
        ) from None
    except (ImportError, OSError, RuntimeError) as error:
        raise click.ClickException(_broken_pair(error)) from None
    if config.trace:
        try:
            from . import tracing  # noqa: F401
        except ModuleNotFoundError as error:
            raise click.ClickException(
                f"--trace needs {error.name}: pip install 'mimo-audio-tokenizer-service[tracing]'"
            ) from None
    from .device import DeviceError, dtype_of, pin, resolve
    from .memory import MemoryLimitError, parse_limit
    from .model.checkpoint import CheckpointError
    from .model.config import ConfigError
    from .model.int8 import QuantizeError, check

    try:
        device = resolve(config.device)
        if config.device_memory_limit is not None:
            pin(device)  # to ask a device for its memory makes a context, which is to be on no other
            parse_limit(config.device_memory_limit, device)
        if config.quantize == "int8":
            check(device, dtype_of(config.dtype, device))
    except DeviceError as error:
        raise click.UsageError(f"--device: {error}") from None
    except MemoryLimitError as error:
        raise click.UsageError(f"--device-memory-limit: {error}") from None
    except QuantizeError as error:
        raise click.UsageError(f"--quantize: {error}") from None
    from .access import AccessError
    from .address import AddressError
    from .server import serve as run

    try:
        status = asyncio.run(run(config))
    except (
        AccessError, AddressError, CheckpointError, ConfigError, MemoryLimitError, QuantizeError, TracingError,
        torch.OutOfMemoryError,
    ) as error:  # fmt: skip
        raise click.ClickException(str(error)) from None
    sys.exit(status)


@cli.command()
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
@_server
@click.option(
    "--num-quantizers", type=click.IntRange(min=1), help="Codebooks wanted, counted from the first. [default: all]"
)
@click.option("--group-size", type=click.IntRange(min=1), help="Pad the frames to a multiple of this. [default: 1]")
@_timeout
def encode(
    source: Path,
    target: Path,
    server: _Server,
    num_quantizers: int | None,
    group_size: int | None,
    timeout: float | None,
) -> None:
    """Encode a sound file (whatever soundfile reads) to an .npz of codes."""
    from . import audio_files

    with _client(server) as client:
        waveform, rate = audio_files.read(source)
        info = client.info()
        started = time.monotonic()
        with _busy(f"encoding {_seconds(waveform, rate)}"):
            codes = client.encode(waveform, rate, num_quantizers=num_quantizers, group_size=group_size, timeout=timeout)
        audio_files.write_codes(target, codes, info, waveform.shape[-1], rate)
    _report(codes, waveform.shape[-1] / rate, time.monotonic() - started, info)
    click.echo(f"wrote {target}")


@cli.command()
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
@_server
@_timeout
def decode(source: Path, target: Path, server: _Server, timeout: float | None) -> None:
    """Decode an .npz of codes to a sound file; refuses codes of another model than the server's."""
    from . import audio_files

    audio_files.format_of(target)
    stored = audio_files.read_codes(source)
    with _client(server, stored.fingerprint) as client:
        info = client.info()
        started = time.monotonic()
        with _busy(f"decoding {stored.codes.shape[1]} frames"):
            samples = client.decode(stored.codes, timeout=timeout)
    audio_files.write(target, samples, info.model.sample_rate)
    _report(stored.codes, len(samples) / info.model.sample_rate, time.monotonic() - started, info)
    click.echo(f"wrote {target}")


@cli.command()
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
@_server
@click.option("--num-quantizers", type=click.IntRange(min=1), help="Codebooks to go through. [default: all]")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Picture of both: waveforms and mel spectrograms."
)
@_timeout
def roundtrip(
    source: Path, target: Path, server: _Server, num_quantizers: int | None, plot: Path | None, timeout: float | None
) -> None:
    """Encode a sound file and decode its codes; what comes back is as long as what went in."""
    from . import audio_files, picture

    audio_files.format_of(target)
    if plot is not None:
        picture.format_of(plot)
    with _client(server) as client:
        waveform, rate = audio_files.read(source)
        info = client.info()
        started = time.monotonic()
        with _busy(f"encoding {_seconds(waveform, rate)}"):
            codes = client.encode(waveform, rate, num_quantizers=num_quantizers, timeout=timeout)
        with _busy(f"decoding {codes.shape[1]} frames"):
            samples = client.decode(codes, timeout=timeout)
    seconds = time.monotonic() - started
    samples = audio_files.fit(samples, -(-waveform.shape[-1] * info.model.sample_rate // rate))
    audio_files.write(target, samples, info.model.sample_rate)
    _report(codes, waveform.shape[-1] / rate, seconds, info)
    click.echo(f"wrote {target}")
    if plot is not None:
        picture.draw(plot, [(source.name, waveform, rate), (target.name, samples, info.model.sample_rate)])
        click.echo(f"wrote {plot}")


@cli.command()
@_server
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(server: _Server, as_json: bool) -> None:
    """Print what the server runs, where, and what it allows."""
    with _client(server) as client:
        facts = dataclasses.asdict(client.info())
    if as_json:
        import json

        click.echo(json.dumps(facts, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for section, values in facts.items():
        for name, value in values.items():
            table.add_row(f"{section}.{name}", str(value))
    Console().print(table)


@cli.command()
@_server
@click.option("--wait", type=_Seconds(0, _DAY), default=0.0, help="Seconds to wait for the server to be ready.")
def health(server: _Server, wait: float) -> None:
    """Exit with 0 if the server is ready, with 1 and a sentence if not; for container health checks."""
    with _client(server) as client:
        if wait:
            client.wait_until_ready(wait)
        elif not client.health():
            raise click.ClickException(
                f"the server at {server.address} is not ready: it is starting or draining, or it is not there"
            )
    click.echo("ready")


@cli.command("top")
@click.argument("address", envvar=f"{ENVIRONMENT_PREFIX}METRICS_ADDRESS", default="127.0.0.1:9100", metavar="[ADDRESS]")
@click.option(
    "--interval",
    type=_Seconds(0.1, _DAY),
    default=2.0,
    show_default=True,
    help="Seconds between readings, of which the rates are.",
)
@click.option("--once", is_flag=True, help="Print what the server has done since its start, and end.")
def live_view(address: str, interval: float, once: bool) -> None:
    """Watch a running server's figures: calls, batches, the device, memory.

    ADDRESS is where it serves its metrics (serve --metrics-address): host:port or a URL. Left out, it is what
    MIMO_AUDIO_TOKENIZER_METRICS_ADDRESS says, or else 127.0.0.1:9100. Where the output is no terminal, it is printed
    anew each time. Ctrl-C ends it.
    """
    from . import top

    try:
        top.run(address, interval, once)
    except KeyboardInterrupt:
        return
    except top.TopError as error:
        raise click.ClickException(str(error)) from None


@cli.command("bench")
@_server
@click.option(
    "--mix",
    default="decode:40ms*8,decode:2s*2,encode:4s*1,decode-vq:1s*1",
    show_default=True,
    help="What is sent: method:duration*weight with commas between, the methods encode, decode and decode-vq. A"
    " duration may be a range to draw lengths from (0.5-4s).",
)
@click.option(
    "--concurrency", type=click.IntRange(1, 10_000), help="Closed loop: callers that each wait.  [default: 8]"
)
@click.option("--rate", type=_Seconds(0, 100_000, min_open=True), help="Open loop: requests a second, at random times.")
@click.option(
    "--max-in-flight",
    type=click.IntRange(1, 100_000),
    default=2000,
    show_default=True,
    help="Open loop: requests at a time, above which one is not sent but counted.",
)
@click.option("--items", type=click.IntRange(min=1), default=1, show_default=True, help="Of each request.")
@click.option("--duration", type=_Seconds(0, _DAY, min_open=True), default=10.0, show_default=True, help="Seconds.")
@click.option("--warm-up", type=_Seconds(0, _DAY), default=2.0, show_default=True, help="Seconds before, not measured.")
@click.option(
    "--timeout", type=_Seconds(0, _DAY, min_open=True), default=30.0, show_default=True, help="Seconds for each call."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of contents, order and times.")
@click.option("--check", is_flag=True, help="Compare each answer with the answer alone; exit with 1 if one differs.")
@click.option("--json", "target", type=click.Path(dir_okay=False, writable=True, allow_dash=True), help="File, or -.")
def bench(
    server: _Server, mix: str, concurrency: int | None, rate: float | None, target: str | None, **options: Any
) -> None:
    """Put load on a running server; print throughput, latencies, batch sizes and rejections.

    Percentiles are of what was answered: read them beside the counts of what was not. Ctrl-C ends it early, with what
    was measured. Exit status: 0 if something was answered, and with --check nothing differed; else 1.
    """
    if concurrency is not None and rate is not None:
        raise click.UsageError("--concurrency is for the closed loop and --rate for the open loop; give one")
    if target not in (None, "-") and not Path(target).absolute().parent.is_dir():
        raise click.UsageError(f"--json: there is no folder {Path(target).absolute().parent}")
    from rich.console import Console

    from . import bench_mix, bench_report
    from .bench import BenchError, Load, run

    try:
        load = Load(bench_mix.parse_mix(mix), concurrency=concurrency or 8, rate=rate, **options)
    except bench_mix.MixError as error:
        raise click.UsageError(f"--mix: {error}") from None
    with _client(server) as client:
        info = client.info()
        try:
            with _busy(f"measuring for {load.warm_up + load.duration:g} s"):
                report = asyncio.run(run(server.address, info, load, server.credentials))
        except (BenchError, bench_mix.MixError) as error:
            raise click.ClickException(str(error)) from None
    bench_report.show(report, Console(stderr=target == "-"))
    if target is not None:
        import json

        try:
            with click.open_file(target, "w") as file:
                click.echo(json.dumps(report.as_dict(), indent=2, allow_nan=False), file=file)
        except OSError as error:
            raise click.ClickException(f"{target}: {error.strerror or error}") from None
    if report.failure is not None:
        raise click.ClickException(report.failure)


# ---------------------------------------------------------------- what the commands share


@contextmanager
def _client(server: _Server, fingerprint: str | None = None) -> Iterator[TokenizerClient]:
    """A client whose errors end the command with one sentence and exit status 1."""
    try:
        with TokenizerClient(
            server.address,
            fingerprint=fingerprint,
            name="mimo-tokenizer",
            unavailable_timeout=_UNAVAILABLE_SECONDS,
            credentials=server.credentials,
        ) as client:
            yield client
    except TokenizerError as error:
        raise click.ClickException(str(error)) from None


@contextmanager
def _busy(what: str) -> Iterator[None]:
    """Show on a terminal that something long is going on, and for how long."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(what, total=None)
        yield


def _seconds(waveform: npt.NDArray[Any], rate: int) -> str:
    return f"{waveform.shape[-1] / rate:.2f} s of sound"


def _report(codes: npt.NDArray[np.uint16], audio_seconds: float, seconds: float, info: ServerInfo) -> None:
    model = info.model
    rows, frames = codes.shape
    bits = sum(float(np.log2(size)) for size in model.codebook_sizes[:rows])
    frame_rate = model.sample_rate / model.samples_per_frame
    click.echo(
        f"{audio_seconds:.2f} s of sound, {frames} frames of {rows} codes ({bits * frame_rate:.0f} bits per second),"
        f" in {seconds:.2f} s: real-time factor {seconds / audio_seconds:.3f}, {model.id} on {info.device.device}"
        f" ({info.device.dtype})"
    )
    if model.random_weights:
        click.echo("The server runs random weights: what it gives is noise until it is started with a checkpoint.")


def _broken_pair(error: Exception) -> str:
    """One sentence about a PyTorch and a torchaudio that do not load together."""
    from importlib.metadata import PackageNotFoundError, version

    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "?"

    return (
        f"torch {of('torch')} and torchaudio {of('torchaudio')} do not load together"
        f" ({str(error).strip().splitlines()[0]}); torchaudio's wheels need a CUDA build of torch, on a CPU too:"
        " pip install 'torch>=2.11' 'torchaudio>=2.11' gets a pair that works"
    )

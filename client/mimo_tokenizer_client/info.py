"""What a server says of itself, as plain Python values."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb

_T = TypeVar("_T")


@dataclass(frozen=True)
class ModelInfo:
    """The loaded model.

    Attributes:
        id: The folder's name or the hub id.
        revision: The hub's commit; empty for a local folder.
        fingerprint: Hash of the config and the weights.
        random_weights: True for seeded random weights, whose codes and sound carry no meaning.
        codebook_sizes: Entries of each codebook, in the order of the rows of a code array.
        d_model: Width of a row of `decode_vq`.
        sample_rate: Samples a second of what `decode` answers; `encode` resamples to it.
        samples_per_frame: Samples that one code frame stands for.
        samples_cut: Samples by which a whole decoded waveform is shorter than frames * samples_per_frame.
        segment_samples: Longer audio is encoded in segments of this many samples, each alone.
        hop_length: Samples between two mel frames.
        stride_size: Mel frames to a step of the encoder.
        avg_pooler: Steps of the encoder to a code frame; the product of the three is samples_per_frame.
    """

    id: str
    revision: str
    fingerprint: str
    random_weights: bool
    codebook_sizes: tuple[int, ...]
    d_model: int
    sample_rate: int
    samples_per_frame: int
    samples_cut: int
    segment_samples: int
    hop_length: int
    stride_size: int
    avg_pooler: int


@dataclass(frozen=True)
class DeviceInfo:
    """The device that the server is pinned to.

    Attributes:
        device: With its index, as "cpu" or "cuda:1".
        name: What the device calls itself.
        dtype: Of the weights, except for the quantizer's: "float32" or "bfloat16".
        quantization: "none" where the weights are used as they are; "int8" where those of the decoder's linear layers
            are quantized, so that answers are no longer exact.
        memory_total: Bytes; 0 where the device does not tell.
        memory_allocated: Bytes; 0 where the device does not tell.
        batch_invariant: True if an answer is the same bits in every batch, not only as exact.
        decode_snr_db: Of decoded sound against the weights as they are, in dB, measured by the server at its start on
            a built-in signal; None where nothing is quantized.
        equal_codes: Share of encoded codes that are the same as with the weights as they are, likewise.
        encoder_quantized: True if the encoder's linear layers are quantized, too.
    """

    device: str
    name: str
    dtype: str
    quantization: str
    memory_total: int
    memory_allocated: int
    batch_invariant: bool
    decode_snr_db: float | None = None
    equal_codes: float | None = None
    encoder_quantized: bool = False


@dataclass(frozen=True)
class MemoryInfo:
    """How the device's memory is divided, in bytes.

    Attributes:
        limit: All that the server may use for weights and computation.
        weights: Of the model.
        fixed: Workspaces of the libraries, what warming up has left allocated, and what small batches are filled up
            with.
        activations: For what is being computed.
        state: For long items between their steps.
    """

    limit: int
    weights: int
    fixed: int
    activations: int
    state: int


@dataclass(frozen=True)
class Limits:
    """What the server allows.

    Attributes:
        max_message_bytes: Of one message, request or answer; the client cuts larger calls by itself.
        max_items: Of one call; the client cuts larger batches by itself.
        max_channels: Of one waveform.
        min_sample_rate: In Hz.
        max_sample_rate: In Hz.
        min_audio_samples: After resampling to the model's rate.
        max_audio_seconds: Of one waveform.
        max_frames: Of one code array.
        max_group_size: Of `encode`.
        max_queued_frames: Frames that may be queued or computed at a time, over all calls.
        max_concurrent_calls: Calls in progress at a time; `info` and `health` are not counted.
        max_batch_frames: Code frames that are computed together; a longer item is computed in steps.
    """

    max_message_bytes: int
    max_items: int
    max_channels: int
    min_sample_rate: int
    max_sample_rate: int
    min_audio_samples: int
    max_audio_seconds: float
    max_frames: int
    max_group_size: int
    max_queued_frames: int
    max_concurrent_calls: int
    max_batch_frames: int


@dataclass(frozen=True)
class ServerInfo:
    """What is loaded, where, and what is allowed.

    Attributes:
        model: The loaded model.
        device: The device it is pinned to.
        limits: What the server allows.
        memory: How the device's memory is divided.
        versions: Name to version: "server", "python", "torch", "torchaudio", "grpcio", "protobuf".
    """

    model: ModelInfo
    device: DeviceInfo
    limits: Limits
    memory: MemoryInfo
    versions: dict[str, str]

    @classmethod
    def from_message(cls, message: pb.GetInfoResponse) -> ServerInfo:
        """Copy the values out of an answer of GetInfo."""
        return cls(
            model=_plain(ModelInfo, message.model),
            device=_plain(DeviceInfo, message.device),
            limits=_plain(Limits, message.limits),
            memory=_plain(MemoryInfo, message.memory),
            versions=dict(message.versions),
        )


def _plain(cls: type[_T], message: Any) -> _T:
    """Copy the fields of a message into the dataclass that has the same ones; absent optional ones are None."""
    values: dict[str, Any] = {}
    for field in fields(cls):  # type: ignore[arg-type]
        value = getattr(message, field.name)
        if message.DESCRIPTOR.fields_by_name[field.name].has_presence and not message.HasField(field.name):
            value = None
        values[field.name] = tuple(value) if hasattr(value, "append") else value
    return cls(**values)

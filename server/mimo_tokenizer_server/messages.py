"""Messages to arrays and back, what is allowed in them, and errors as statuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb

from . import wire
from .config import ServeConfig
from .engine import EngineInfo
from .errors import Reason, RequestError, invalid, too_large

MessageT = TypeVar("MessageT", bound=Message)

MAX_ITEMS = 1024
MAX_CHANNELS = 64
MIN_SAMPLE_RATE = 1_000
MAX_SAMPLE_RATE = 384_000
MAX_GROUP_SIZE = 1024

# Full scale is 1; ten octaves above what anybody sends by mistake (16-bit values as floats), far below what makes the
# mel front end overflow.
MAX_AMPLITUDE = 1e6

# Room in a message for what is no payload: tags, lengths, timings, and statuses of items.
CALL_BYTES = 1024
_ITEM_BYTES = 256
_FAILED_ITEM_BYTES = 1024
# Trailing metadata above about 8 KiB is refused by clients.
_MAX_METADATA_BYTES = 6000

# How many fields beside the items a request has, with a few to spare.
_OTHER_FIELDS = 16

SAMPLE_TYPES: dict[int, npt.DTypeLike] = {pb.SAMPLE_FORMAT_FLOAT32: "<f4", pb.SAMPLE_FORMAT_INT16: "<i2"}
_FORMATS = "SAMPLE_FORMAT_FLOAT32 (1), SAMPLE_FORMAT_INT16 (2)"

STATUS = {
    Reason.INVALID_VALUE: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.WRONG_MODEL: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NOT_READY: grpc.StatusCode.UNAVAILABLE,
    Reason.DEVICE_FAILURE: grpc.StatusCode.UNAVAILABLE,
    Reason.OUT_OF_MEMORY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
    Reason.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
}


@dataclass(frozen=True)
class Limits:
    """What a request may ask for; GetInfo tells them."""

    max_message_bytes: int
    max_audio_seconds: float
    max_frames: int
    max_concurrent_calls: int

    @classmethod
    def of(cls, config: ServeConfig, info: EngineInfo) -> Limits:
        """The limits that follow from flags and model."""
        model = info.config
        seconds = config.max_audio_seconds if config.max_audio_seconds is not None else model.max_audio_seconds
        # Whatever Encode answers, Decode takes: also when it was padded to groups.
        frames = model.audio_code_frames(int(seconds * model.sampling_rate)) + MAX_GROUP_SIZE - 1
        return cls(config.max_message_bytes, seconds, frames, config.max_concurrent_calls)


# ---------------------------------------------------------------- checks


def encode_options(
    request: pb.EncodeRequest | pb.EncodeStreamOpen, info: EngineInfo, prefix: str = ""
) -> tuple[int, int]:
    """(num_quantizers, group_size) of an encode request, with the defaults filled in."""
    books = info.config.num_quantizers
    num_quantizers = request.num_quantizers if request.HasField("num_quantizers") else books
    group_size = request.group_size if request.HasField("group_size") else 1
    if not 1 <= num_quantizers <= books:
        raise invalid(f"{prefix}num_quantizers", num_quantizers, f"1..{books}, the model's codebooks")
    if not 1 <= group_size <= MAX_GROUP_SIZE:
        raise invalid(f"{prefix}group_size", group_size, f"1..{MAX_GROUP_SIZE}")
    return num_quantizers, group_size


def answer_format(requested: int) -> pb.SampleFormat.ValueType:
    if requested == pb.SAMPLE_FORMAT_UNSPECIFIED:
        return pb.SAMPLE_FORMAT_FLOAT32
    if requested not in SAMPLE_TYPES:
        raise invalid("format", requested, _FORMATS)
    return pb.SampleFormat.ValueType(requested)


def check_format(audio: pb.Audio | pb.EncodeStreamOpen, name: str, limits: Limits) -> None:
    if audio.format not in SAMPLE_TYPES:
        raise invalid(f"{name}.format", audio.format, _FORMATS)
    if not MIN_SAMPLE_RATE <= audio.sample_rate <= MAX_SAMPLE_RATE:
        raise invalid(f"{name}.sample_rate", audio.sample_rate, f"{MIN_SAMPLE_RATE}..{MAX_SAMPLE_RATE} Hz")
    if not 1 <= audio.channels <= MAX_CHANNELS:
        raise invalid(f"{name}.channels", audio.channels, f"1..{MAX_CHANNELS}")


def check_audio(audio: pb.Audio, name: str, info: EngineInfo, limits: Limits) -> npt.NDArray[Any]:
    """The samples of `audio`, (samples, channels); a view.

    Raises:
        RequestError: anything about it is not allowed.
    """
    check_format(audio, name, limits)
    dtype = np.dtype(SAMPLE_TYPES[audio.format])
    width = audio.channels * dtype.itemsize
    data = audio.pcm  # each look at it makes a copy
    if not data:
        raise invalid(f"{name}.pcm", "empty", f"at least {_min_seconds(info):.3f} seconds of audio")
    if len(data) % width:
        raise invalid(
            f"{name}.pcm",
            f"{len(data)} bytes",
            f"a multiple of {width} ({audio.channels} channels of {dtype.itemsize} bytes a sample)",
        )
    pcm = np.frombuffer(data, dtype).reshape(-1, audio.channels)
    check_duration(len(pcm), audio.sample_rate, f"{name}.pcm", limits)
    check_length(len(pcm), audio.sample_rate, f"{name}.pcm", info)
    check_finite(pcm, f"{name}.pcm", 0)
    return pcm


def check_duration(samples: int, sample_rate: int, name: str, limits: Limits) -> None:
    if samples > limits.max_audio_seconds * sample_rate:
        raise too_large(name, samples / sample_rate, limits.max_audio_seconds, "seconds")


def check_length(samples: int, sample_rate: int, name: str, info: EngineInfo) -> None:
    if resampled_length(samples, sample_rate, info) < info.config.min_samples:
        raise invalid(
            name,
            f"{samples} samples at {sample_rate} Hz",
            f"at least {info.config.min_samples} samples at {info.config.sampling_rate} Hz"
            f" ({_min_seconds(info):.3f} seconds)",
        )


def check_finite(pcm: npt.NDArray[Any], name: str, first: int) -> None:
    """Refuse NaN, infinity and absurd amplitudes; `first` is the index of pcm[0] in the recording."""
    # Minimum and maximum carry a NaN through, and need no array of their own.
    if pcm.dtype.kind == "i" or not len(pcm) or max(-pcm.min(), pcm.max()) <= MAX_AMPLITUDE:
        return
    sample, channel = divmod(int(np.argmax(~(np.abs(pcm) <= MAX_AMPLITUDE))), pcm.shape[1])
    raise invalid(
        name,
        f"{pcm[sample, channel]:.9g} at sample {first + sample}, channel {channel}",
        f"finite numbers up to {MAX_AMPLITUDE:g}; full scale is 1",
    )


def check_codes(codes: pb.Codes, name: str, info: EngineInfo, limits: Limits) -> npt.NDArray[np.uint16]:
    """The codes as (num_quantizers, frames); a view.

    Raises:
        RequestError: anything about them is not allowed.
    """
    sizes = info.config.codebook_sizes
    if not 1 <= codes.num_quantizers <= len(sizes):
        raise invalid(f"{name}.num_quantizers", codes.num_quantizers, f"1..{len(sizes)}, the model's codebooks")
    if codes.frames == 0:
        raise invalid(f"{name}.frames", 0, f"1..{limits.max_frames}")
    if codes.frames > limits.max_frames:
        raise too_large(f"{name}.frames", codes.frames, limits.max_frames, "frames")
    expected = codes.num_quantizers * codes.frames * 2
    data = codes.data  # each look at it makes a copy
    if len(data) != expected:
        raise invalid(
            f"{name}.data",
            f"{len(data)} bytes",
            f"{expected} bytes ({codes.num_quantizers} quantizers * {codes.frames} frames * 2 bytes)",
        )
    array = np.frombuffer(data, "<u2").reshape(codes.num_quantizers, codes.frames)
    for row, (values, size) in enumerate(zip(array, sizes, strict=False)):
        if int(values.max()) >= size:
            frame = int(np.argmax(values >= size))
            raise invalid(
                f"{name}.data",
                int(values[frame]),
                f"0..{size - 1}",
                sentence=f"{name}: the code in row {row}, frame {frame} is {values[frame]}; codebook {row} has"
                f" 0..{size - 1}",
                row=row,
                frame=frame,
            )
    return array


def check_answer_size(size: int, good: int, failed: int, frames: int, limits: Limits, hint: str) -> None:
    """Refuse a call whose answer, `size` bytes for its `good` items and the statuses of the `failed`, has no room."""
    if size + good * _ITEM_BYTES + failed * _FAILED_ITEM_BYTES + CALL_BYTES > limits.max_message_bytes:
        raise RequestError(
            Reason.TOO_LARGE,
            f"the answer to {frames} frames is {size} bytes; a message has at most {limits.max_message_bytes}: {hint}",
            field="items",
            value=str(size),
            limit=limits.max_message_bytes,
        )


# ---------------------------------------------------------------- messages


def codes_shape(codes: npt.NDArray[Any]) -> pb.Codes:
    """Codes (num_quantizers, frames), but for the data."""
    return pb.Codes(num_quantizers=codes.shape[0], frames=codes.shape[1])


def features_shape(features: npt.NDArray[Any]) -> pb.Features:
    """Features (frames, d_model), but for the data."""
    return pb.Features(frames=features.shape[0], d_model=features.shape[1])


def codes_message(codes: npt.NDArray[Any]) -> pb.Codes:
    rows, frames = codes.shape
    return pb.Codes(num_quantizers=rows, frames=frames, data=codes.tobytes())


def _detail(error: RequestError, request_id: str) -> pb.ErrorDetail:
    detail = pb.ErrorDetail(
        reason=pb.ErrorDetail.Reason.Value(f"REASON_{error.reason.name}"),
        field=error.field,
        value=error.value,
        allowed=error.allowed,
        item=error.item,
        limit=error.limit,
        row=error.row,
        frame=error.frame,
        request_id=request_id,
    )
    if error.retry_after is not None:
        detail.retry_after.CopyFrom(
            Duration(nanos=int(error.retry_after * 1e9) % 10**9, seconds=int(error.retry_after))
        )
    return detail


def item_status(error: RequestError, request_id: str) -> pb.ItemStatus:
    return pb.ItemStatus(code=STATUS[error.reason].value[0], message=str(error), detail=_detail(error, request_id))


def trailing_metadata(
    error: RequestError, item_errors: Sequence[RequestError], request_id: str
) -> tuple[tuple[str, str | bytes], ...]:
    """What goes with a failed call's status: its detail, and the statuses of its items, as many as fit."""
    entries: list[tuple[str, str | bytes]] = [
        ("x-request-id", request_id),
        ("mimo-error-detail-bin", _detail(error, request_id).SerializeToString()),
    ]
    size = 0
    for item_error in item_errors:
        status = item_status(item_error, request_id).SerializeToString()
        size += len(status) + 64
        if size > _MAX_METADATA_BYTES:
            break
        entries.append(("mimo-item-status-bin", status))
    return tuple(entries)


def frames_of(codes: npt.NDArray[np.uint16]) -> int:
    """Frames of codes (num_quantizers, frames)."""
    return int(codes.shape[1])


def resampled_length(samples: int, sample_rate: int, info: EngineInfo) -> int:
    """Samples at the model's rate that `samples` at `sample_rate` become."""
    return -(-samples * info.config.sampling_rate // sample_rate)


def _min_seconds(info: EngineInfo) -> float:
    return info.config.min_samples / info.config.sampling_rate


def parse(kind: type[MessageT], data: bytes) -> MessageT:
    """Parse a request, after a look at how many fields it has: a message of empty items is small, what it becomes not.

    Raises:
        RequestError: it has more items than a call may, or it is no such message.
    """
    try:
        if wire.has_more_fields(data, MAX_ITEMS + _OTHER_FIELDS):
            sentence = f"the call has more than {MAX_ITEMS} items"
            raise RequestError(Reason.TOO_LARGE, sentence, "items", f"over {MAX_ITEMS}", f"1..{MAX_ITEMS}", MAX_ITEMS)
        return kind.FromString(data)
    except DecodeError:
        raise invalid("message", "no message of this method", "what tokenizer.proto says") from None

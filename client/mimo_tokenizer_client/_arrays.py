"""Between what callers hold (arrays of any library, lists) and the raw little-endian bytes of the contract.

Everything here is checked before it is converted, and copied at most once on its way into bytes or out of them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb

from .errors import ErrorDetail, InvalidInput, ServerFault, TooLarge

MAX_CODE = 0xFFFF
MAX_UINT32 = 0xFFFFFFFF

# With more channels than this, and more than samples, an array has its axes the wrong way round.
PLAUSIBLE_CHANNELS = 64

# DLPack device types whose memory the CPU can read: CPU, pinned by CUDA, pinned by ROCm, managed by CUDA.
_HOST_DEVICES = frozenset({1, 3, 11, 13})

_SAMPLE_FORMATS = {np.dtype("<f4"): pb.SAMPLE_FORMAT_FLOAT32, np.dtype("<i2"): pb.SAMPLE_FORMAT_INT16}


class SupportsDLPack(Protocol):
    """An array that lends its memory through DLPack, on whatever device."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the capsule."""


ArrayInput: TypeAlias = npt.ArrayLike | SupportsDLPack


# ---------------------------------------------------------------- in


@dataclass(frozen=True)
class Waveform:
    """A checked waveform.

    Attributes:
        samples: (samples, channels), the order of interleaved PCM, little-endian float32 or int16; mostly a view of
            the caller's memory.
        sample_rate: Samples a second of one channel.
    """

    samples: npt.NDArray[Any]
    sample_rate: int

    @property
    def channels(self) -> int:
        """Number of channels."""
        return int(self.samples.shape[1])

    @property
    def seconds(self) -> float:
        """Duration."""
        return len(self.samples) / self.sample_rate

    @property
    def format(self) -> pb.SampleFormat.ValueType:
        """The sample format on the wire."""
        return _SAMPLE_FORMATS[self.samples.dtype]

    def pieces(self, size: int) -> Iterator[bytes]:
        """Yield the interleaved PCM in pieces of about `size` bytes, each of whole samples."""
        step = max(1, size // (self.channels * self.samples.itemsize))
        for start in range(0, len(self.samples), step):
            yield self.samples[start : start + step].tobytes()


def waveform_from(value: ArrayInput, sample_rate: Any) -> Waveform:
    """Check a waveform.

    Args:
        value: (samples,) or (channels, samples); floating point, which becomes float32, or int16.
        sample_rate: Samples a second of one channel.

    Raises:
        InvalidInput: The shape or the type is another one, there is nothing in it, or the rate is no positive integer.
    """
    rate = integer(sample_rate, "sample_rate", least=1)
    array = _host_array(value, "waveform")
    dtype = array.dtype
    if (dtype.kind == "f" and dtype.itemsize <= 8) or dtype.name == "bfloat16":
        wire: np.dtype[Any] = np.dtype("<f4")
    elif dtype.kind == "i" and dtype.itemsize == 2:
        wire = np.dtype("<i2")
    else:
        raise _invalid(
            f"a waveform must be float16, bfloat16, float32 or float64 with full scale [-1, 1], or int16; this one is "
            f"{dtype}, whose full scale is not known",
            field="waveform",
            value=str(dtype),
            allowed="float16, bfloat16, float32, float64, int16",
        )
    if array.ndim not in (1, 2):
        raise _invalid(
            f"a waveform must have shape (samples,) or (channels, samples); this one has shape {array.shape}",
            field="waveform",
            value=str(array.shape),
            allowed="(samples,) or (channels, samples)",
        )
    if array.size == 0:
        raise _invalid(
            f"the waveform is empty: its shape is {array.shape}",
            field="waveform",
            value=str(array.shape),
            allowed="at least one sample of one channel",
        )
    # A float64 beyond float32 becomes infinity, which the server refuses with the position of the sample.
    with np.errstate(over="ignore"):
        samples = np.atleast_2d(array).T.astype(wire, copy=False)
    waveform = Waveform(samples, rate)
    if waveform.channels > len(samples):
        check_channels(waveform, PLAUSIBLE_CHANNELS)
    return waveform


def check_duration(waveform: Waveform, longest: float) -> None:
    """Refuse a waveform of more than `longest` seconds before it is sent; 0 for no limit.

    Raises:
        TooLarge: It is longer.
    """
    if 0 < longest < waveform.seconds:
        message = f"the waveform is {waveform.seconds:.10g} seconds; the server's limit is {longest:.10g} seconds"
        detail = ErrorDetail(
            reason="TOO_LARGE", field="waveform", value=f"{waveform.seconds:.10g}", allowed=f"at most {longest:.10g}",
            limit=longest,
        )  # fmt: skip
        raise TooLarge(message, detail=detail)


def check_channels(waveform: Waveform, most: int) -> None:
    """Refuse more than `most` channels, which are most often a (samples, channels) array.

    Raises:
        InvalidInput: There are more.
    """
    samples, channels = waveform.samples.shape
    if channels <= most:
        return
    hint = "; is it (samples, channels)? then pass its transpose" if channels > samples else ""
    raise _invalid(
        f"the axes of a waveform are (channels, samples), with at most {most} channels; this one has {channels} "
        f"channels of {samples} samples each{hint}",
        field="waveform",
        value=str((channels, samples)),
        allowed=f"1..{most} channels",
    )


def codes_from(value: ArrayInput) -> npt.NDArray[np.uint16]:
    """Check codes and return them as uint16 (num_quantizers, frames), mostly a view if they are uint16 already.

    Raises:
        InvalidInput: They are not integers, not 2-D, empty, or one does not fit uint16.
    """
    array = _host_array(value, "codes")
    if array.dtype.kind not in "iu":
        raise _invalid(
            f"codes must be integers; these are {array.dtype}",
            field="codes",
            value=str(array.dtype),
            allowed="any integer type",
        )
    if array.ndim != 2 or array.size == 0:
        raise _invalid(
            f"codes must have shape (num_quantizers, frames) and at least one of each; these have shape {array.shape}",
            field="codes",
            value=str(array.shape),
            allowed="(num_quantizers, frames)",
        )
    if not np.can_cast(array.dtype, np.uint16) and (array.min() < 0 or array.max() > MAX_CODE):
        row, frame = (int(i) for i in np.argwhere((array < 0) | (array > MAX_CODE))[0])
        code = int(array[row, frame])
        raise _invalid(
            f"code {code} in row {row}, frame {frame} is outside 0..{MAX_CODE}",
            field="codes",
            value=str(code),
            allowed=f"0..{MAX_CODE}",
            row=row,
            frame=frame,
        )
    return array.astype("<u2", copy=False)


def integer(value: Any, name: str, *, least: int) -> int:
    """Check an integer argument of the size of the contract's uint32.

    Raises:
        InvalidInput: It is not an integer (a bool is none), or outside `least`..2**32 - 1.
    """
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= MAX_UINT32:
        raise _invalid(
            f"{name} must be an integer of at least {least}; it is {value!r}",
            field=name,
            value=repr(value),
            allowed=f"{least}..{MAX_UINT32}",
        )
    return number


def one_per_item(value: Any, count: int, name: str) -> list[Any]:
    """Return `value` once for each of `count` items, or its own `count` values if it is a sequence.

    Raises:
        InvalidInput: It is a sequence of another length.
    """
    if not isinstance(value, Iterable) or isinstance(value, str) or getattr(value, "ndim", None) == 0:
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise _invalid(
            f"{name} has {len(values)} values for {count} items; give one for all or one for each",
            field=name,
            value=str(len(values)),
            allowed=f"1 or {count} values",
        )
    return values


def _host_array(value: Any, name: str) -> npt.NDArray[Any]:
    """Return a numpy array of what `value` holds, in its own memory wherever that is possible.

    Other libraries are met by the methods their arrays share; none is imported.
    """
    if isinstance(value, np.ndarray):
        return value
    try:
        # torch lends neither the memory of a tensor that records gradients, nor bfloat16 to numpy.
        if getattr(value, "requires_grad", False):
            value = value.detach()
        value = _on_host(value)
        if str(getattr(value, "dtype", "")).endswith("bfloat16") and callable(getattr(value, "float", None)):
            value = value.float()
        if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
            return np.from_dlpack(value)
        return np.asarray(value)
    except Exception as error:
        raise _invalid(
            f"{name} of type {type(value).__name__} cannot be read as an array: {error}", field=name
        ) from error


def _on_host(value: Any) -> Any:
    """Copy an array whose memory only its device can read to the host, with its library's own method."""
    if not hasattr(value, "__dlpack_device__") or int(value.__dlpack_device__()[0]) in _HOST_DEVICES:
        return value
    for name, arguments in (("cpu", ()), ("get", ()), ("to", ("cpu",))):
        method = getattr(value, name, None)
        if callable(method):
            return method(*arguments)
    return value  # its __array__, if it has one, is the last resort


def _invalid(
    message: str,
    *,
    field: str,
    value: str = "",
    allowed: str = "",
    row: int | None = None,
    frame: int | None = None,
) -> InvalidInput:
    detail = ErrorDetail(reason="INVALID_VALUE", field=field, value=value, allowed=allowed, row=row, frame=frame)
    return InvalidInput(message, detail=detail)


# ---------------------------------------------------------------- out


def codes_out(pieces: Iterable[pb.Codes]) -> npt.NDArray[np.uint16]:
    """Join codes along their frames into one array (num_quantizers, frames) that owns its memory.

    Raises:
        ServerFault: The bytes do not fit the shape, the pieces do not fit one another, or there are none.
    """
    views = [_shaped(c.data, "<u2", (c.num_quantizers, c.frames)) for c in pieces if c.frames]
    if not views:
        raise ServerFault("the server answered without any codes")
    if len({view.shape[0] for view in views}) > 1:
        raise ServerFault("the server answered with pieces of unlike numbers of quantizers")
    return np.concatenate(views, axis=1, dtype=np.uint16)


def samples_out(pieces: Iterable[bytes]) -> npt.NDArray[np.float32]:
    """Join float32 PCM into one array (samples,) that owns its memory.

    Raises:
        ServerFault: The bytes are no whole number of samples.
    """
    pieces = list(pieces)
    size = sum(map(len, pieces))
    if size % 4:
        raise ServerFault(f"the server answered with {size} bytes, which are no whole number of float32 samples")
    samples = np.empty(size // 4, dtype="<f4")
    # By bytes, because a piece may end inside a sample.
    target = samples.view(np.uint8)
    start = 0
    for piece in pieces:
        target[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
        start += len(piece)
    return samples.astype(np.float32, copy=False)


def features_view(features: pb.Features) -> npt.NDArray[np.float32]:
    """Return a read-only view (frames, d_model) of the answer's bytes.

    Raises:
        ServerFault: The bytes do not fit the shape.
    """
    return _shaped(features.data, "<f4", (features.frames, features.d_model))


def _shaped(data: bytes, dtype: str, shape: tuple[int, int]) -> npt.NDArray[Any]:
    expected = np.dtype(dtype).itemsize * shape[0] * shape[1]
    if len(data) != expected:
        raise ServerFault(f"the server answered with {len(data)} bytes for shape {shape}, which takes {expected}")
    return np.frombuffer(data, dtype).reshape(shape)

"""What `mimo-tokenizer bench` sends: a mix of methods and lengths, and the requests made of it."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_tokenizer_client import ServerInfo

# Distinct items of each entry of a mix, as far as they fit into the bytes. They are made once: making them anew for
# each request would be load on the generator, and --check has to know the answer to each.
POOL_ITEMS = 16
_POOL_BYTES = 64 << 20

_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
_ENTRY = re.compile(
    rf"(?P<method>[a-z-]+):(?P<first>{_NUMBER})(?P<first_unit>ms|s)?(?:-(?P<last>{_NUMBER})(?P<last_unit>ms|s))?"
    rf"(?:\*(?P<weight>{_NUMBER}))?"
)
_UNITS = {"s": 1.0, "ms": 1e-3}
# Far above every server's limit; keeps a number of three hundred digits from becoming infinity.
_MAX_NUMBER = 1e9


class MixError(ValueError):
    """A mix that cannot be read, or that the server will not take; one sentence."""


@dataclass(frozen=True)
class Method:
    """One of the contract's unary methods.

    Attributes:
        rpc: its name in the contract.
        request: class of its requests.
        payload: the bytes of an item of its answer.
        dtype: of the values in them.
    """

    rpc: str
    request: Callable[..., Any]
    payload: Callable[[Any], bytes]
    dtype: str

    @property
    def exact(self) -> bool:
        """Whether two answers are the same only if every value is; vectors and samples may differ by rounding."""
        return np.dtype(self.dtype).kind == "u"


METHODS = {
    "encode": Method("Encode", pb.EncodeRequest, lambda item: item.codes.data, "<u2"),
    "decode": Method("Decode", pb.DecodeRequest, lambda item: item.audio.pcm, "<f4"),
    "decode-vq": Method("DecodeVq", pb.DecodeVqRequest, lambda item: item.features.data, "<f4"),
}


@dataclass(frozen=True)
class Entry:
    """One entry of a mix.

    Attributes:
        text: as it was written.
        method: a key of `METHODS`.
        shortest: seconds of an item, at least.
        longest: seconds of an item, at most.
        weight: share of the requests, relative to the other entries'.
    """

    text: str
    method: str
    shortest: float
    longest: float
    weight: float


def parse_mix(text: str) -> tuple[Entry, ...]:
    """Read a mix: entries `method:duration*weight` with commas between them.

    A duration is one (`40ms`, `2s`) or a range of which lengths are drawn (`0.5-4s`); a weight left out is 1.

    Raises:
        MixError: an entry is none.
    """
    return tuple(_entry(part.strip()) for part in text.split(","))


def _entry(text: str) -> Entry:
    found = _ENTRY.fullmatch(text)
    unit = found and (found["last_unit"] or found["first_unit"])
    if found is None or unit is None:
        raise MixError(
            f"{text!r} is no method:duration*weight, such as decode:0.04s*8, encode:4s or decode:500ms-4s*0.5"
        )
    if found["method"] not in METHODS:
        raise MixError(f"{text!r}: {found['method']!r} is none of the methods {', '.join(METHODS)}")
    first = float(found["first"]) * _UNITS[found["first_unit"] or unit]
    last = float(found["last"]) * _UNITS[unit] if found["last"] else first
    weight = float(found["weight"] or 1)
    if not 0 < first <= last < _MAX_NUMBER:
        raise MixError(f"{text!r}: a duration must be above zero, and a range go from the shorter to the longer")
    if not 0 < weight < _MAX_NUMBER:
        raise MixError(f"{text!r}: a weight must be above zero; leave the entry out instead")
    return Entry(text, found["method"], first, last, weight)


# ---------------------------------------------------------------- items


@dataclass(frozen=True)
class Item:
    """An item of a request, and the seconds of audio that it is or stands for."""

    message: Any
    audio_seconds: float


def make_pool(entry: Entry, info: ServerInfo, rng: np.random.Generator) -> list[Item]:
    """Make distinct items of an entry: sound for `encode`, codes of every codebook for the others.

    The lengths of a range are spread over it evenly, one drawn in each of equal parts, so that a few of them stand for
    the whole range.

    Raises:
        MixError: the server states a limit that they are over.
    """
    make = _sound if entry.method == "encode" else _codes
    longest = _check_length(entry, info)
    count = max(1, min(POOL_ITEMS, _POOL_BYTES // longest))
    parts = (np.arange(count) + rng.random(count)) / count
    return [make(entry.shortest + part * (entry.longest - entry.shortest), info, rng) for part in parts]


def _check_length(entry: Entry, info: ServerInfo) -> int:
    """Bytes of the longest item, once it is known that the server may take it (else they might not fit into memory)."""
    model, limits = info.model, info.limits
    if entry.method == "encode":
        if entry.longest > limits.max_audio_seconds:
            raise MixError(f"{entry.text!r}: the server takes at most {limits.max_audio_seconds:g} s of sound")
        return 4 * round(entry.longest * model.sample_rate) or 4
    frames = _frames(entry.longest, info)
    if frames > limits.max_frames:
        most = limits.max_frames * model.samples_per_frame / model.sample_rate
        raise MixError(f"{entry.text!r}: the server takes at most {limits.max_frames} frames ({most:g} s) of codes")
    return 2 * len(model.codebook_sizes) * frames


def _frames(seconds: float, info: ServerInfo) -> int:
    return max(1, round(seconds * info.model.sample_rate / info.model.samples_per_frame))


def _codes(seconds: float, info: ServerInfo, rng: np.random.Generator) -> Item:
    """Uniformly random codes."""
    model = info.model
    frames = _frames(seconds, info)
    codes = np.stack([rng.integers(0, size, frames, dtype=np.uint16) for size in model.codebook_sizes])
    message = pb.Codes(num_quantizers=len(codes), frames=frames, data=codes.astype("<u2", copy=False).tobytes())
    return Item(message, frames * model.samples_per_frame / model.sample_rate)


def _sound(seconds: float, info: ServerInfo, rng: np.random.Generator) -> Item:
    """A tone of a random pitch in noise, at the model's rate: nothing to resample, nothing silent."""
    rate = info.model.sample_rate
    samples = max(1, round(seconds * rate))
    pcm: npt.NDArray[np.float32] = rng.standard_normal(samples, np.float32) * np.float32(0.05)
    pcm += 0.3 * np.sin(2 * np.pi * rng.uniform(80, 800) / rate * np.arange(samples))
    audio = pb.Audio(
        sample_rate=rate, channels=1, format=pb.SAMPLE_FORMAT_FLOAT32, pcm=pcm.astype("<f4", copy=False).tobytes()
    )
    return Item(audio, samples / rate)


# ---------------------------------------------------------------- requests


@dataclass(frozen=True)
class Request:
    """A request to send.

    Attributes:
        entry: index in the mix.
        items: indices in the entry's pool.
        message: for the method.
        audio_seconds: of each item.
    """

    entry: int
    items: tuple[int, ...]
    message: Any
    audio_seconds: tuple[float, ...]


class Requests:
    """An endless supply of the requests of a mix; the same ones for the same seed.

    Args:
        mix: the entries.
        info: of the server that they are for.
        items: of each request; they are of one entry.
        seed: of lengths, contents and order.

    Raises:
        MixError: the server states a limit that they are over.
    """

    def __init__(self, mix: Sequence[Entry], info: ServerInfo, items: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._rng = random.Random(f"requests {seed}")
        self._cumulated = list(itertools.accumulate(entry.weight for entry in mix))
        self._fingerprint = info.model.fingerprint
        self._count = items
        self.mix = tuple(mix)
        self.pools = [make_pool(entry, info, rng) for entry in mix]
        if items > info.limits.max_items:
            raise MixError(f"{items} items a call: the server takes at most {info.limits.max_items}")
        for entry, pool in zip(mix, self.pools, strict=True):
            size = items * max(item.message.ByteSize() for item in pool)
            if size > info.limits.max_message_bytes:
                raise MixError(
                    f"{entry.text!r}: {items} items a call are {size} bytes;"
                    f" the server takes messages of at most {info.limits.max_message_bytes}"
                )

    def draw(self) -> Request:
        """Make the next request."""
        entry = self._rng.choices(range(len(self.mix)), cum_weights=self._cumulated)[0]
        return self.of(entry, self._rng.choices(range(len(self.pools[entry])), k=self._count))

    def largest(self, entry: int) -> Request:
        """Make the largest request that `draw` may make of an entry."""
        pool = self.pools[entry]
        longest = max(range(len(pool)), key=lambda index: pool[index].audio_seconds)
        return self.of(entry, [longest] * self._count)

    def of(self, entry: int, items: Sequence[int]) -> Request:
        """Make a request of chosen items of an entry's pool."""
        method = self.mix[entry].method
        chosen = [self.pools[entry][index] for index in items]
        messages = [item.message for item in chosen]
        if method == "decode":
            messages = [pb.DecodeItem(codes=codes) for codes in messages]
        message = METHODS[method].request(items=messages, expected_fingerprint=self._fingerprint)
        return Request(entry, tuple(items), message, tuple(item.audio_seconds for item in chosen))

"""Short batches as CUDA graphs, which the device runs as a whole.

Told kernel by kernel, a GPU computes a short batch faster than the host can tell it what to do. A graph is recorded for
one shape, so a batch is filled up to the next of a few sizes, with one more item that nobody wants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .model.attention import has_varlen
from .model.packing import Slots
from .model.tokenizer import MiMoAudioTokenizer

T = TypeVar("T")

# Code frames of the batches that are recorded.
_SIZES = (128, 256, 512, 1024)

# Items of such a batch at the most. Each can have an odd row more when it is encoded, and is padded for its statistics
# when it is decoded.
_MOST_DECODED = 128
_MOST_ENCODED = 32


# Of kernels and strides; for larger ones `Slots` are not known to have room for what is rounded.
_LARGEST_STEP = 9


def can_record(model: MiMoAudioTokenizer) -> bool:
    """Whether the model's attention takes items whose lengths only the device knows, and its convolutions do."""
    stacks = (model.encoder, model.decoder, model.decoder.vocoder)
    config = model.config
    return max(config.kernel_size, config.stride_size, config.avg_pooler) <= _LARGEST_STEP and all(
        has_varlen(stack.head_dim, model.device, model.dtype) for stack in stacks
    )


class Graphs:
    """A model's graphs. To be made, and used, in one thread and in inference mode.

    Args:
        model: with all of its weights; what is recorded reads them where they are.
        most_frames: code frames of a batch up to which graphs are recorded.
    """

    def __init__(self, model: MiMoAudioTokenizer, most_frames: int) -> None:
        sizes = [size for size in _SIZES if size < most_frames] + [most_frames]
        sizes = [size for size in sizes if size <= _SIZES[-1]]
        # The largest first: the others find room in the memory that it has taken.
        pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else (0, 0)
        self._decode = [_Decode(model, size, pool) for size in reversed(sizes)][::-1]
        self._encode = [_Encode(model, size, pool) for size in reversed(sizes)][::-1]

    def decode(self, codes: Sequence[npt.NDArray[np.uint16]]) -> list[Tensor] | None:
        """Waveforms of some items.

        Args:
            codes: (codebooks, frames) of each.

        Returns:
            float32 (samples,) of each, to be read before the next batch; None if there is no graph for so much.
        """
        frames = sum(array.shape[1] for array in codes)
        graph = next((graph for graph in self._decode if graph.frames >= frames), None)
        return graph.run(codes) if graph is not None and len(codes) <= _MOST_DECODED else None

    def encode(self, mels: Sequence[Tensor]) -> Tensor | None:
        """Codes of some segments.

        Args:
            mels: log mel frames of each, float32 (mel frames, n_mels).

        Returns:
            int64 (all codebooks, code frames), those of one after those of another and more behind them, to be read
            before the next batch; None if there is no graph for so much.
        """
        frames = sum(map(len, mels))
        graph = next((graph for graph in self._encode if graph.frames >= frames), None)
        return graph.run(mels) if graph is not None and len(mels) <= _MOST_ENCODED else None


class _Decode:
    """Graphs for batches of up to so many code frames.

    The inverse Fourier transform between the two is none of theirs: PyTorch keeps a limited number of a library's plans
    for it, and a graph would need its own for as long as it lives.
    """

    def __init__(self, model: MiMoAudioTokenizer, frames: int, pool: object) -> None:
        self.frames = frames
        self._head = head = model.decoder.vocoder.head
        self._mel_frames = model.config.samples_per_frame // model.config.hop_length  # of a code frame
        self._books = model.config.num_quantizers
        # Codes, the items' frames, and their codebooks.
        self._input = _zeros(model, self._books * frames + 2 * _slots(_MOST_DECODED), dtype=torch.int32)

        def spectrum() -> tuple[Tensor, Slots]:
            codes, sizes, books = self._parts(self._input)
            spans = Slots(sizes.long(), frames)
            features = model.decode_vq(codes, spans, books.long())
            mel, mel_spans = model.decoder.coarse_mel(features, spans)
            assert isinstance(mel_spans, Slots)
            return model.decoder.vocoder.spectrum(mel, mel_spans), mel_spans

        (self._spectrum, spans), self._replay_spectrum = _record(spectrum, pool)
        self._frames = head.frames(self._spectrum)
        self._waves, self._replay_waves = _record(lambda: head.waves(self._frames, spans), pool)

    def _parts(self, buffer: Any) -> tuple[Any, Any, Any]:
        """Views of a tensor or an array: codes (codebooks, frames), and the slots' frames and codebooks."""
        codes, slots = self._books * self.frames, _slots(_MOST_DECODED)
        return buffer[:codes].reshape(self._books, self.frames), buffer[codes : codes + slots], buffer[codes + slots :]

    def run(self, items: Sequence[npt.NDArray[np.uint16]]) -> list[Tensor]:
        """Waveforms of items that have no more than `frames` in all."""
        host = np.zeros(len(self._input), np.int32)
        codes, sizes, books = self._parts(host)
        start = 0
        for number, item in enumerate(items):
            books[number], sizes[number] = item.shape
            codes[: len(item), start : start + item.shape[1]] = item
            start += item.shape[1]
        _upload(host, self._input)
        self._replay_spectrum()
        self._frames.copy_(self._head.frames(self._spectrum))
        self._replay_waves()
        return self._head.waveforms(self._waves, [item.shape[1] * self._mel_frames for item in items])


class _Encode:
    """A graph for batches of up to so many code frames.

    Attributes:
        frames: mel frames that it takes.
    """

    def __init__(self, model: MiMoAudioTokenizer, code_frames: int, pool: object) -> None:
        config = model.config
        self.frames = code_frames * config.samples_per_frame // config.hop_length
        self._mel = _zeros(model, self.frames, config.n_mels)
        self._sizes = _zeros(model, _slots(_MOST_ENCODED), dtype=torch.int64)

        def codes() -> Tensor:
            return model.encode(self._mel, Slots(self._sizes, self.frames), config.num_quantizers)

        self._codes, self._replay = _record(codes, pool)

    def run(self, mels: Sequence[Tensor]) -> Tensor:
        """Codes of segments that have no more than `frames` in all."""
        sizes = np.zeros(len(self._sizes), np.int64)
        sizes[: len(mels)] = [len(mel) for mel in mels]
        _upload(sizes, self._sizes)
        whole = torch.cat(list(mels))
        self._mel[: len(whole)] = whole
        self._mel[len(whole) :] = 0
        self._replay()
        return self._codes


def _slots(items: int) -> int:
    """Slots for so many items, and for what fills the batch up."""
    return items + 1


def _zeros(model: MiMoAudioTokenizer, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=model.device)


def _upload(values: npt.NDArray[Any], where: Tensor) -> None:
    host = torch.from_numpy(values)
    if where.device.type == "cuda":
        host = host.pin_memory()
    where.copy_(host, non_blocking=True)


def _record(function: Callable[[], T], pool: Any) -> tuple[T, Callable[[], None]]:
    """Record what `function` has a device do.

    Returns:
        What it returns, and a call that does it all again, with its results in the same tensors.
    """
    function()  # libraries prepare themselves at their first call, which cannot be recorded
    graph = torch.cuda.CUDAGraph()
    # Other threads may ask the device for its memory meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = function()
    graph.replay()  # nothing has been computed yet
    return result, graph.replay

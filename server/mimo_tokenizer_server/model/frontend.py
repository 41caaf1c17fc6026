"""Sound to mel segments: a recording cut into the segments that are encoded alone, resampling, and log mel frames.

Where it is cut depends on the recording and not on the pieces in which it arrives. The cutting needs memory for one
segment and no device; what is cut out carries all that its codes depend on, so segments may be computed in any order
and any company, and again.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torchaudio.transforms import MelSpectrogram, Resample

from .config import SEGMENT_MEL_FRAMES, TokenizerConfig

# Floor of the mel magnitudes before the logarithm.
_MEL_FLOOR = 1e-7

# Of torchaudio's sinc_interp_hann, whose defaults these are.
_LOWPASS_WIDTH = 6
_ROLLOFF = 0.99

# torchaudio keeps a filter for each phase of the reduced ratio, all but a few taps of it zero: 37 GB from 383,999 Hz.
# Above this many values (512 KiB, more than any rate in use takes) the taps are worked out where they are needed: a
# filter takes as long to make for a moment of sound as for an hour.
_MAX_KERNEL_VALUES = 1 << 17

# Taps that are worked out together, and what one takes on the way to its weight, in float64.
_TAPS_AT_ONCE = 1 << 20
_BYTES_A_TAP = 40

# Mel frames that are computed together.
_FRAMES_AT_ONCE = 1500

# Outputs that are resampled together, in seconds.
_BLOCK_SECONDS = 5


@dataclass(frozen=True)
class Segment:
    """What the codes of one segment of a recording depend on.

    Attributes:
        pcm: (samples,) float32, or int16 where a sample s stands for s / 32768, at the recording's own rate.
        start: position of pcm[0] in the recording.
        sample_rate: of `pcm`, in Hz.
        first_frame: the segment's first mel frame, in the recording.
        frames: mel frames of the segment.
        end: samples of the whole recording where `pcm` reaches to its end, else None.
    """

    pcm: npt.NDArray[Any]
    start: int
    sample_rate: int
    first_frame: int
    frames: int
    end: int | None


class SegmentCutter:
    """A recording, in pieces, to its segments.

    Args:
        sample_rate: of the recording, in Hz.
        config: gives the model's rate, hop and FFT.
    """

    def __init__(self, sample_rate: int, config: TokenizerConfig) -> None:
        self._rate = sample_rate
        self._config = config
        self._resampler = Resampler(sample_rate, config.sampling_rate)
        self._half = config.nfft // 2
        self._pieces: list[npt.NDArray[Any]] = []
        self._start = 0  # the first sample that is still here
        self._next_frame = 0  # the first of the next segment
        self.samples = 0  # so far

    def push(self, pcm: npt.NDArray[Any]) -> Iterator[Segment]:
        """Take the next samples, (samples, channels) float32 or int16; yield each segment that is complete.

        Channels are mixed by their mean.
        """
        if pcm.shape[1] == 1:
            mono = pcm[:, 0]
        else:
            mono = pcm.mean(axis=1, dtype=np.float32)
            if pcm.dtype.kind == "i":
                mono /= 32768
        self._pieces.append(mono)
        self.samples += len(mono)
        while True:
            low, high = self._covered(self._next_frame, SEGMENT_MEL_FRAMES)
            start, stop = self._resampler.window(max(0, low), high)
            if self.samples < stop:
                return
            yield self._cut(start, stop, SEGMENT_MEL_FRAMES, None)

    def finish(self) -> Iterator[Segment]:
        """Yield what is left, up to the recording's end; the last segment is shorter.

        A last segment too short for a code frame is left out.

        Raises:
            ValueError: the recording is shorter than `TokenizerConfig.min_samples`.
        """
        samples = self._resampler.length(self.samples)
        if samples < self._config.min_samples:
            raise ValueError(f"{samples} samples are fewer than the {self._config.min_samples} that a code frame takes")
        frames = samples // self._config.hop_length + 1
        while self._next_frame < frames:
            count = min(SEGMENT_MEL_FRAMES, frames - self._next_frame)
            low, high = self._covered(self._next_frame, count)
            # Where a frame reaches over the end, the end is reflected.
            low = min(low, samples - 1 - self._half) if high > samples else low
            start, stop = self._resampler.window(max(0, low), min(high, samples))
            segment = self._cut(start, min(stop, self.samples), count, self.samples)
            if self._config.code_frames(count) > 0:
                yield segment

    def _covered(self, first_frame: int, count: int) -> tuple[int, int]:
        """Samples at the model's rate that mel frames cover: frame i is centred on sample i * hop."""
        hop = self._config.hop_length
        return first_frame * hop - self._half, (first_frame + count - 1) * hop + self._half

    def _cut(self, start: int, stop: int, count: int, end: int | None) -> Segment:
        if len(self._pieces) != 1:
            self._pieces = [np.concatenate(self._pieces)]
        signal = self._pieces[0]
        pcm = signal[start - self._start : stop - self._start]
        segment = Segment(pcm, start, self._rate, self._next_frame, count, end)
        self._next_frame += count
        # A hop more than the next segment needs: where the recording ends soon, its end is reflected.
        low = self._covered(self._next_frame, 1)[0] - self._config.hop_length
        keep = min(max(self._start, self._resampler.window(max(0, low), max(1, low + 1))[0]), self.samples)
        rest = signal[keep - self._start :]
        # A view keeps all that it was cut from in memory; copying each time would cost the square of the length.
        self._pieces = [rest.copy() if 2 * rest.nbytes < _size_of_base(rest) else rest]
        self._start = keep
        return segment


def _size_of_base(array: npt.NDArray[Any]) -> int:
    """Bytes that a view keeps in memory."""
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    return base.nbytes


class MelFrontEnd:
    """Log mel spectrogram: magnitudes, log(max(x, 1e-7)).

    Args:
        config: gives rate, FFT, window, hop, bins and their range.
        device: where the spectrogram is computed.
    """

    def __init__(self, config: TokenizerConfig, device: torch.device) -> None:
        self.rate = config.sampling_rate
        self.hop = config.hop_length
        self.half = config.nfft // 2
        self.device = device
        # torchaudio builds window and filter bank on the default device, whoever set it: name it.
        with torch.device("cpu"):
            transform = MelSpectrogram(
                sample_rate=config.sampling_rate,
                n_fft=config.nfft,
                win_length=config.window_size,
                hop_length=config.hop_length,
                f_min=config.fmin,
                f_max=config.fmax,
                n_mels=config.n_mels,
                power=1.0,
                center=False,
            )
        self._transform = transform.to(device=device, dtype=torch.float32)

    def __call__(self, samples: Tensor) -> Tensor:
        """Map ((frames - 1) * hop + n_fft,) float32 samples, already padded, to (frames, n_mels)."""
        mel: Tensor = self._transform(samples)
        return mel.clamp(min=_MEL_FLOOR).log().T

    def segment(self, segment: Segment) -> Tensor:
        """Mel frames of a segment: (frames, n_mels) float32.

        The recording is reflected at its two ends, and only there.
        """
        return _to_the_end(self.segment_steps(segment))

    def segment_steps(self, segment: Segment) -> Generator[float, None, Tensor]:
        """`segment`, in steps of about as much work each; they yield 0, as they are no products."""
        pcm = torch.from_numpy(segment.pcm).to(self.device)
        if pcm.dtype == torch.int16:
            pcm = pcm.float().div_(32768)
        resampler = Resampler(segment.sample_rate, self.rate)
        low = segment.first_frame * self.hop - self.half
        high = (segment.first_frame + segment.frames - 1) * self.hop + self.half
        if segment.end is None or high <= (total := resampler.length(segment.end)):
            samples = yield from resampler.convert_steps(pcm, segment.start, max(0, low), high)
        else:
            first = max(0, min(low, total - 1 - self.half))
            samples = yield from resampler.convert_steps(pcm, segment.start, first, total)
            mirror = samples[total - 1 - self.half - first : total - 1 - first].flip(0)
            samples = torch.cat((samples, mirror))[max(0, low) - first : high - first]
        if low < 0:
            samples = torch.cat((samples[1 : 1 - low].flip(0), samples))
        mels = []
        for start in range(0, segment.frames, _FRAMES_AT_ONCE):
            stop = min(start + _FRAMES_AT_ONCE, segment.frames)
            mels.append(self(samples[start * self.hop : (stop - 1) * self.hop + 2 * self.half]))
            yield 0.0
        return torch.cat(mels) if len(mels) > 1 else mels[0]


def _to_the_end(steps: Generator[float, None, Tensor]) -> Tensor:
    """What a computation in steps returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Tensor = end.value
            return result


class Resampler:
    """Band-limited interpolation from one rate to another; torchaudio's, also where it would not fit.

    Any stretch of the outputs can be had from the inputs around it.

    Args:
        source: samples a second of what is given.
        target: samples a second of what is wanted.

    Attributes:
        is_dense: whether torchaudio's filters are used, which are kept; others are worked out as they are needed, which
            takes forty times as long.
    """

    def __init__(self, source: int, target: int) -> None:
        common = math.gcd(source, target)
        self._source, self._target = source // common, target // common
        # Inputs to either side that an output depends on.
        self._width = math.ceil(_LOWPASS_WIDTH * self._source / (min(self._source, self._target) * _ROLLOFF))
        self.is_dense = self._target * (self._source + 2 * self._width) <= _MAX_KERNEL_VALUES
        if self.is_dense:  # a multiple of the reduced rate: each block's outputs start in phase
            self._block = self._target * max(1, round(_BLOCK_SECONDS * target / self._target))
        else:
            self._block = max(1, _TAPS_AT_ONCE // (2 * self._width + 2))
        self._context = self._source * math.ceil((self._width + 1) / self._source)

    @property
    def filter_bytes(self) -> int:
        """Bytes that the filters take where they are worked out as they are needed."""
        return 0 if self.is_dense else _BYTES_A_TAP * _TAPS_AT_ONCE

    def length(self, samples: int) -> int:
        """Outputs that `samples` inputs give in all."""
        return -(-samples * self._target // self._source)

    def window(self, low: int, high: int) -> tuple[int, int]:
        """The inputs, first and one past the last, that outputs `low` to `high` depend on; may reach past the end."""
        if self._source == self._target:
            return low, high
        start = low // self._target * self._source - self._context
        return max(0, start), -(-high // self._target) * self._source + self._context

    def convert(self, inputs: Tensor, start: int, low: int, high: int) -> Tensor:
        """Outputs `low` to `high`, (high - low,).

        Args:
            inputs: (samples,) float32: all in `window(low, high)` that the signal has.
            start: position of inputs[0] in the signal.
            low: the first output.
            high: one past the last output, at most `length` of the whole signal.
        """
        return _to_the_end(self.convert_steps(inputs, start, low, high))

    def convert_steps(self, inputs: Tensor, start: int, low: int, high: int) -> Generator[float, None, Tensor]:
        """`convert`, in steps of about as much work each; they yield 0, as they are no products."""
        if self._source == self._target:
            return inputs[low - start : high - start]
        blocks = []
        in_phase = low // self._target * self._target if self.is_dense else low
        for first in range(in_phase, high, self._block):
            count = min(self._block, high - first)
            begin, stop = self.window(first, first + count)
            block = inputs[begin - start : stop - start]
            convert = self._convert_dense if self.is_dense else self._convert_sparse
            blocks.append(convert(block, begin, first, count)[max(0, low - first) :])
            yield 0.0
        return torch.cat(blocks) if len(blocks) > 1 else blocks[0]

    def _convert_dense(self, inputs: Tensor, start: int, first: int, count: int) -> Tensor:
        """`count` outputs from `first` on; inputs[0] is input `start` of the signal, in phase."""
        skip = first - start // self._source * self._target
        transform = _transform(self._source, self._target, inputs.device)
        # torchaudio works out the number of outputs on the default device, whoever set it, and in float32, which can
        # make it one too few: give it some silence more.
        with torch.device("cpu"):
            out: Tensor = transform(F.pad(inputs, (0, self._source)))
        return out[skip : skip + count]

    def _convert_sparse(self, inputs: Tensor, start: int, first: int, count: int) -> Tensor:
        """The same sums, over the taps that are not zero."""
        out = torch.empty(count, device=inputs.device)
        taps = torch.arange(2 * self._width + 2, device=inputs.device)
        padded = F.pad(inputs, (self._width, self._width + 2))
        rows = max(1, _TAPS_AT_ONCE // len(taps))
        for row in range(0, count, rows):
            outputs = torch.arange(first + row, first + min(row + rows, count), device=inputs.device)
            nearest, weights = self._taps(outputs)
            index = (nearest - start)[:, None] + taps  # `padded` starts `width` before `inputs`, like the taps
            out[row : row + rows] = (padded[index] * weights).sum(-1)
        return out

    def _taps(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """The input before each output's position, and the weights of the inputs from `width` before it on.

        Hann-windowed sinc (J. O. Smith, Digital Audio Resampling): input u weighs sinc(t) * cos^2(pi t / 12) * c in
        output m, with t = (u / source - m / target) * c * source, |t| <= 6, and c the cut-off, 0.99 * min(1, target
        / source).
        """
        nearest = output * self._source // self._target
        inputs = nearest[:, None] + torch.arange(-self._width, self._width + 2, device=output.device)
        cutoff = _ROLLOFF * min(self._source, self._target) / self._source
        # Whole numbers up to the division: a float would lose the phase within minutes.
        t = (inputs * self._target - output[:, None] * self._source).double() / self._target * cutoff
        t = t.clamp(-_LOWPASS_WIDTH, _LOWPASS_WIDTH)
        weights = torch.sinc(t) * torch.cos(t * (math.pi / _LOWPASS_WIDTH / 2)).square() * cutoff
        return nearest, weights.float()


@lru_cache(maxsize=8)
def _transform(source: int, target: int, device: torch.device) -> Resample:
    with torch.device("cpu"):
        transform = Resample(source, target, lowpass_filter_width=_LOWPASS_WIDTH, rolloff=_ROLLOFF)
    return transform.to(device)

"""Sound to mel segments: resampling, and log mel frames cut into the segments that are encoded alone.

Both work piece by piece with memory for one segment, at positions that depend on the sound and not on the pieces: a
recording gives the same segments however it is cut up on its way here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

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

# Taps that are worked out together (16 MiB of weights).
_TAPS_AT_ONCE = 1 << 22

# Inputs that are resampled together, in seconds.
_BLOCK_SECONDS = 5


class MelFrontEnd:
    """Log mel spectrogram: magnitudes, log(max(x, 1e-7)).

    Args:
        config: gives rate, FFT, window, hop, bins and their range.
        device: where the spectrogram is computed.
    """

    def __init__(self, config: TokenizerConfig, device: torch.device) -> None:
        self.hop = config.hop_length
        self.half = config.nfft // 2
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


class _Signal:
    """A signal that grows at its end and is forgotten at its start; positions are those in the whole signal."""

    def __init__(self) -> None:
        self.start = 0  # the first sample that is still here
        self.stop = 0  # samples so far
        self._pieces: list[Tensor] = []

    def append(self, samples: Tensor) -> None:
        self._pieces.append(samples)
        self.stop += len(samples)

    def read(self, start: int, stop: int | None = None) -> Tensor:
        """Samples from `start` to `stop` or the end; a view."""
        if len(self._pieces) != 1:
            self._pieces = [torch.cat(self._pieces)]
        return self._pieces[0][start - self.start : None if stop is None else stop - self.start]

    def forget(self, before: int) -> None:
        """Let go of the samples before `before`."""
        if before <= self.start:
            return
        rest = self.read(before)
        # A view keeps all that it was cut from in memory; copying each time would cost the square of the length.
        self._pieces = [rest.clone() if 2 * rest.nbytes < rest.untyped_storage().nbytes() else rest]
        self.start = before


class Segmenter:
    """Samples at the model's rate, in pieces, to mel segments of `SEGMENT_MEL_FRAMES`.

    Mel frame i is centred on sample i * hop; the recording is reflected at its two ends, and only there.
    """

    def __init__(self, mel: MelFrontEnd) -> None:
        self._mel = mel
        self._hop = mel.hop
        self._half = mel.half
        self._signal = _Signal()
        self._next_frame = 0  # the first of the next segment

    def push(self, samples: Tensor) -> Iterator[Tensor]:
        """Take the next samples (n,); yield each segment (SEGMENT_MEL_FRAMES, n_mels) that is complete."""
        self._signal.append(samples)
        while self._signal.stop >= self._end_of(self._next_frame + SEGMENT_MEL_FRAMES - 1):
            yield self._segment(SEGMENT_MEL_FRAMES)
            # A hop more than the next segment needs: where the recording ends soon, its end is reflected.
            self._signal.forget(self._next_frame * self._hop - self._half - self._hop)

    def finish(self) -> Iterator[Tensor]:
        """Yield what is left, up to the recording's reflected end: segments (frames, n_mels), the last one shorter.

        Raises:
            ValueError: the samples given in all are too few to reflect.
        """
        samples = self._signal.stop
        if samples <= self._half:
            raise ValueError(f"{samples} samples are fewer than the {self._half + 1} that the mel front end takes")
        frames = samples // self._hop + 1
        mirror = self._signal.read(samples - 1 - self._half, samples - 1).flip(0)
        self._signal.append(mirror)
        while self._next_frame < frames:
            yield self._segment(min(SEGMENT_MEL_FRAMES, frames - self._next_frame))

    def _end_of(self, frame: int) -> int:
        """The sample after the last one that `frame` covers."""
        return frame * self._hop + self._half

    def _segment(self, count: int) -> Tensor:
        """The next `count` mel frames."""
        stop = self._end_of(self._next_frame + count - 1)
        if self._next_frame == 0:
            samples = self._signal.read(0, stop)
            samples = torch.cat((samples[1 : self._half + 1].flip(0), samples))
        else:
            samples = self._signal.read(self._next_frame * self._hop - self._half, stop)
        self._next_frame += count
        return self._mel(samples)


class Resampler:
    """Band-limited interpolation from one rate to another, piece by piece; torchaudio's, also where it would not fit.

    Args:
        source: samples a second of what is given.
        target: samples a second of what is wanted.
    """

    def __init__(self, source: int, target: int) -> None:
        common = math.gcd(source, target)
        self._source, self._target = source // common, target // common
        # Inputs to either side that an output depends on.
        self._width = math.ceil(_LOWPASS_WIDTH * self._source / (min(self._source, self._target) * _ROLLOFF))
        self._dense = self._target * (self._source + 2 * self._width) <= _MAX_KERNEL_VALUES
        # Multiples of the reduced source rate: each block's outputs start in phase.
        self._block = self._source * max(1, round(_BLOCK_SECONDS * source / self._source))
        self._context = self._source * math.ceil((self._width + 1) / self._source)
        self._signal = _Signal()
        self._done = 0  # inputs whose outputs have been given

    def length(self, samples: int) -> int:
        """Outputs that `samples` inputs give in all."""
        return -(-samples * self._target // self._source)

    def push(self, samples: Tensor) -> Iterator[Tensor]:
        """Take the next inputs (n,); yield the outputs of each block that is complete."""
        if self._source == self._target:
            yield samples
            return
        self._signal.append(samples)
        while self._signal.stop >= self._done + self._block + self._context:
            yield self._convert(self._done + self._block)

    def finish(self) -> Iterator[Tensor]:
        """Yield the outputs that are left."""
        while self._done < self._signal.stop:
            yield self._convert(min(self._done + self._block, self._signal.stop))

    def _convert(self, stop: int) -> Tensor:
        """Outputs of the inputs from self._done to `stop`."""
        start = max(0, self._done - self._context)
        inputs = self._signal.read(start, stop + self._context)
        first = self._done // self._source * self._target
        count = self.length(stop) - first
        out = (
            self._convert_dense(inputs, start, first, count)
            if self._dense
            else (self._convert_sparse(inputs, start, first, count))
        )
        self._done = stop
        self._signal.forget(stop - self._context)
        return out

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

"""The whole tokenizer: sound to codes and back, one item at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .config import TokenizerConfig
from .decoder import Decoder
from .encoder import Encoder
from .frontend import MelFrontEnd, Resampler, Segmenter


class MiMoAudioTokenizer(nn.Module):
    """Encoder, quantizer and decoder on one device; inference only.

    Args:
        config: the checkpoint's.
        device: where the weights are allocated, uninitialized: `checkpoint` fills them.
        dtype: of the weights, but for the quantizer's and the ISTFT window, which stay float32.
    """

    def __init__(self, config: TokenizerConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.device = device
        self.dtype = dtype
        with torch.device("meta"):
            self.encoder = Encoder(config)
            self.decoder = Decoder(config)
        self.to(dtype)
        self.encoder.quantizer.to(torch.float32)
        self.decoder.vocoder.head.window.data = self.decoder.vocoder.head.window.data.float()
        self.to_empty(device=device)
        self.requires_grad_(False).eval()
        self.mel = MelFrontEnd(config, device)

    def decode_vq(self, codes: Tensor) -> Tensor:
        """Sum of the codes' codebook vectors: (num_quantizers, frames) to float32 (frames, d_model)."""
        return self.encoder.quantizer.decode(codes)

    def decode(self, codes: Tensor) -> Tensor:
        """Waveform of one item: (num_quantizers, frames) to float32 (frames * samples_per_frame - samples_cut,)."""
        waveform: Tensor = self.decoder(self.decode_vq(codes))
        return waveform


class EncodeState:
    """One recording on its way to codes, in pieces.

    Args:
        tokenizer: the model; all its pieces are encoded by it.
        sample_rate: samples a second of what is given.
        num_quantizers: codebooks wanted, counted from the first.
        group_size: the frame count is padded to a multiple of this by repeating the last frame.
    """

    def __init__(
        self, tokenizer: MiMoAudioTokenizer, sample_rate: int, num_quantizers: int, group_size: int = 1
    ) -> None:
        self._tokenizer = tokenizer
        self._resampler = Resampler(sample_rate, tokenizer.config.sampling_rate)
        self._segmenter = Segmenter(tokenizer.mel)
        self._num_quantizers = num_quantizers
        self._group_size = group_size
        self._frames = 0
        self._samples = 0
        self._last_frame: Tensor | None = None  # (num_quantizers, 1)

    def push(self, samples: Tensor) -> Tensor:
        """Take the next samples, (n,) float32 on the model's device.

        Returns:
            int64 (num_quantizers, frames): the codes of the segments that are complete, often none.
        """
        self._samples += len(samples)
        return self._encode(mel for piece in self._resampler.push(samples) for mel in self._segmenter.push(piece))

    def finish(self) -> Tensor:
        """The codes of what is left, and the padding to a multiple of `group_size`.

        Raises:
            ValueError: the recording is shorter than `TokenizerConfig.min_samples`.
        """

        def rest() -> Iterator[Tensor]:
            for piece in self._resampler.finish():
                yield from self._segmenter.push(piece)
            yield from self._segmenter.finish()

        codes = self._encode(rest())
        # The last segment can be too short for a frame: the one to repeat is then the segment's before.
        if self._last_frame is None:
            samples, least = self._resampler.length(self._samples), self._tokenizer.config.min_samples
            raise ValueError(f"{samples} samples are fewer than the {least} that a code frame takes")
        padding = -self._frames % self._group_size
        return torch.cat((codes, self._last_frame.expand(-1, padding)), dim=1)

    def _encode(self, segments: Iterator[Tensor]) -> Tensor:
        encoder, config = self._tokenizer.encoder, self._tokenizer.config
        codes = [encoder.encode(mel, self._num_quantizers) for mel in segments if config.code_frames(len(mel)) > 0]
        if not codes:
            return torch.empty((self._num_quantizers, 0), dtype=torch.int64, device=self._tokenizer.device)
        joined = torch.cat(codes, dim=1)
        self._frames += joined.shape[1]
        self._last_frame = joined[:, -1:]
        return joined

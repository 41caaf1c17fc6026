"""Coarse mel frames to a waveform, in the manner of Vocos (arXiv 2306.00814): a backbone and an ISTFT head."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import TokenizerConfig
from .packing import Spans, add_overlapping, overlap_add
from .rows import Linear, RowWise, by_tiles
from .transformer import Transformer, row_pieces

# The head's magnitudes are clipped here, as in Vocos, so that one wild frame does not drown the rest.
_MAX_MAGNITUDE = 100.0


class ISTFTHead(RowWise):
    """Log magnitude and phase of each frame, and the inverse short-time Fourier transform; float32 from there on."""

    def __init__(self, dim: int, n_fft: int, hop: int, padding: str) -> None:
        super().__init__()
        self.n_fft = n_fft
        self.hop = hop
        self.hops = -(-n_fft // hop)  # that a frame reaches over
        self.same = padding == "same"
        self.cut = (n_fft - hop if self.same else n_fft) // 2
        self.out = Linear(dim, n_fft + 2)
        self.window = nn.Parameter(torch.empty(n_fft, dtype=torch.float32), requires_grad=False)

    def forward(self, x: Tensor, spans: Spans) -> Tensor:  # type: ignore[override]
        """Map packed (mel frames, dim) to samples: frames * hop of each item's, or one hop less for "center"."""
        pieces = self.waveforms(self.waves(self.frames(self.spectrum(x)), spans), spans.lengths)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def samples(self, frames: int) -> int:
        """Samples that an item of `frames` gives."""
        return (frames if self.same else frames - 1) * self.hop

    def spectrum(self, x: Tensor) -> Tensor:
        """Map (mel frames, dim) to complex64 (mel frames, n_fft / 2 + 1)."""
        log_magnitude, phase = self.out(x).float().chunk(2, dim=-1)
        magnitude = log_magnitude.exp().clamp_(max=_MAX_MAGNITUDE)
        # torch.polar gives the same and, on a CPU, takes three times as long.
        return torch.complex(phase.cos() * magnitude, phase.sin() * magnitude)

    def frames(self, spectrum: Tensor) -> Tensor:
        """The inverse transform of each frame: complex64 (mel frames, n_fft / 2 + 1) to float32 (mel frames, n_fft)."""
        return by_tiles(lambda tile: torch.fft.irfft(tile, self.n_fft), spectrum, self.tile_rows)

    def blocks(self, frames: Tensor) -> Tensor:
        """Window frames in place: (mel frames, n_fft) to (mel frames, hops of a frame, hop)."""
        return self._in_hops(frames.mul_(self.window))

    def waves(self, frames: Tensor, spans: Spans) -> Tensor:
        """Add up the items' frames, with the overhang at their ends.

        Args:
            frames: (spans.total, n_fft); taken.
            spans: the items' mel frames.

        Returns:
            float32 (hops, hop); of an item, hops of a frame, less 1, more than its frames.
        """
        summed, hops = overlap_add(self.blocks(frames), spans)
        item = hops.items(summed.device)
        return summed.div_(self.covered(hops.positions(summed.device), spans.sizes(summed.device)[item]))

    def waveforms(self, waves: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """The items' samples, without the overhang.

        Args:
            waves: (hops, hop), as `waves` gives them.
            lengths: mel frames of each item; there may be more items than are wanted.

        Returns:
            Views of (samples,), `samples` of each item's length; of a "center" item of one frame there are none.
        """
        flat = waves.flatten()
        starts = accumulate(((frames + self.hops - 1) * self.hop for frames in lengths), initial=self.cut)
        return [flat[start:][: self.samples(frames)] for start, frames in zip(starts, lengths, strict=False)]

    def _in_hops(self, frames: Tensor) -> Tensor:
        padded = F.pad(frames, (0, self.hops * self.hop - self.n_fft))
        return padded.view(*frames.shape[:-1], self.hops, self.hop)

    def covered(self, position: Tensor, frames: Tensor | int) -> Tensor:
        """The sum of the squared windows that lie upon a hop.

        Args:
            position: the hop's place in its item, (n,).
            frames: of its item, (n,) or one number for all.

        Returns:
            (n, hop).
        """
        squares = self._in_hops(self.window.square())
        # [first, last] of the frame's hops that lie upon this one: at an item's ends not all of them do.
        sums = squares.new_zeros(self.hops, self.hops, self.hop)
        for hop, square in enumerate(squares):
            sums[: hop + 1, hop:] += square
        first = (position - frames + 1).clamp(min=0)
        return sums[first, position.clamp(max=self.hops - 1)]


class Vocoder(Transformer):
    """A transformer with sliding-window attention, and the ISTFT head."""

    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__(
            config.vocoder_dim,
            config.vocoder_attention_heads,
            config.vocoder_intermediate_dim,
            config.vocoder_num_layers,
            activation=config.activation_function,
            norm=config.ln_type,
            window=config.vocoder_attn_window_size,
            causal=False,
            rope_theta=config.rope_theta,
        )
        self.embeddings = Linear(config.n_mels, config.vocoder_dim, bias=False)
        self.head = ISTFTHead(config.vocoder_dim, config.nfft, config.hop_length, config.vocoder_padding)

    def forward(self, mel: Tensor, spans: Spans) -> Tensor:
        """Map packed (mel frames, n_mels) to float32 samples (samples,)."""
        waveform: Tensor = self.head(self.run_layers(self.embeddings(mel), spans), spans)
        return waveform

    def spectrum(self, mel: Tensor, spans: Spans) -> Tensor:
        """Map packed (mel frames, n_mels) to their spectra, as `ISTFTHead.spectrum` gives them."""
        return self.head.spectrum(self.run_layers(self.embeddings(mel), spans))

    def steps(self, mel: Tensor, flops: float) -> Generator[float, None, Tensor]:
        """`forward` for one item, step by step; see `Transformer.layer_steps`."""
        length, head = len(mel), self.head
        x = mel.new_empty(length, self.dim)
        cost = self.embeddings.flops(1)
        for start, stop in row_pieces(length, cost, flops):
            x[start:stop] = self.embeddings(mel[start:stop])
            yield (stop - start) * cost
        yield from self.layer_steps(x, flops)
        waves = torch.zeros(length + head.hops - 1, head.hop, dtype=torch.float32, device=x.device)
        cost = head.out.flops(1)
        for start, stop in row_pieces(length, cost, flops):
            add_overlapping(waves, start, head.blocks(head.frames(head.spectrum(self.layer_norm(x[start:stop])))))
            yield (stop - start) * cost
        for start, stop in row_pieces(len(waves), 1, torch.inf):
            waves[start:stop] /= head.covered(torch.arange(start, stop, device=x.device), length)
            yield 0.0
        return waves.flatten()[head.cut :][: head.samples(length)]

    def flops(self, length: int) -> float:
        """Floating-point operations of one item: linear layers and attention."""
        return self.embeddings.flops(length) + self.head.out.flops(length) + self.layer_flops(length)

"""Coarse mel frames to a waveform, in the manner of Vocos (arXiv 2306.00814): a backbone and an ISTFT head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import TokenizerConfig
from .transformer import Transformer

# The head's magnitudes are clipped here, as in Vocos, so that one wild frame does not drown the rest.
_MAX_MAGNITUDE = 100.0


class ISTFTHead(nn.Module):
    """Log magnitude and phase of each frame, and the inverse short-time Fourier transform; float32 from there on."""

    def __init__(self, dim: int, n_fft: int, hop: int, padding: str) -> None:
        super().__init__()
        self.n_fft = n_fft
        self.hop = hop
        self.padding = padding
        self.out = nn.Linear(dim, n_fft + 2)
        self.window = nn.Parameter(torch.empty(n_fft, dtype=torch.float32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (mel frames, dim) to samples: frames * hop of them for "same" padding, one hop less for "center"."""
        log_magnitude, phase = self.out(x).float().chunk(2, dim=-1)  # each (frames, n_fft / 2 + 1)
        spectrum = torch.polar(log_magnitude.exp().clamp(max=_MAX_MAGNITUDE), phase)
        frames = torch.fft.irfft(spectrum, self.n_fft) * self.window  # (frames, n_fft)
        cut = (self.n_fft - self.hop if self.padding == "same" else self.n_fft) // 2
        covered = self._overlap_add(self.window.square().expand_as(frames))[cut:-cut]
        return self._overlap_add(frames)[cut:-cut] / covered

    def _overlap_add(self, frames: Tensor) -> Tensor:
        """Map (frames, n_fft) to ((frames - 1) * hop + n_fft,)."""
        length = (len(frames) - 1) * self.hop + self.n_fft
        return F.fold(frames.T.unsqueeze(0), (1, length), (1, self.n_fft), stride=(1, self.hop)).flatten()


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
        self.embeddings = nn.Linear(config.n_mels, config.vocoder_dim, bias=False)
        self.head = ISTFTHead(config.vocoder_dim, config.nfft, config.hop_length, config.vocoder_padding)

    def forward(self, mel: Tensor) -> Tensor:
        """Map (mel frames, n_mels) to float32 samples (samples,)."""
        waveform: Tensor = self.head(self.run_layers(self.embeddings(mel)))
        return waveform

"""The quantizer's output to coarse mel frames, and those to a waveform."""

from __future__ import annotations

from torch import Tensor, nn

from .config import TokenizerConfig
from .transformer import Transformer
from .vocoder import Vocoder


class UpsampleConv(nn.Module):
    """A transposed convolution and a GroupNorm over all channels and frames; the overhang at the end is cut."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(in_channels, out_channels, kernel, stride)
        self.norm = nn.GroupNorm(1, out_channels)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Map (length, in_channels) to (length * stride, out_channels)."""
        frames = len(x) * self.stride
        # The statistics are over the overhang too: the published model normalizes before it cuts.
        out: Tensor = self.norm(self.conv(x.T.unsqueeze(0)))
        return out.squeeze(0)[:, :frames].T


class Decoder(Transformer):
    """Upsampling, a transformer, upsampling to mel frames, and the vocoder."""

    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__(
            config.d_model,
            config.decoder_attention_heads,
            config.decoder_ffn_dim,
            config.decoder_layers,
            activation=config.activation_function,
            norm=config.ln_type,
            window=config.decoder_attn_window_size,
            causal=config.decoder_causal,
            rope_theta=config.rope_theta,
        )
        dim, pool = config.d_model, config.avg_pooler
        self.dconv1 = UpsampleConv(dim, dim, pool, pool) if pool != 1 else None
        self.dconv2 = UpsampleConv(dim, config.n_mels, config.decoder_kernel_size, config.decoder_stride_size)
        self.vocoder = Vocoder(config)

    def coarse_mel(self, features: Tensor) -> Tensor:
        """Map the quantizer's output (code frames, d_model) to (mel frames, n_mels)."""
        x = features.to(self.dconv2.conv.weight.dtype)
        if self.dconv1 is not None:
            x = self.dconv1(x)
        mel: Tensor = self.dconv2(self.run_layers(x))
        return mel

    def forward(self, features: Tensor) -> Tensor:
        """Map the quantizer's output (code frames, d_model) to float32 samples (samples,)."""
        waveform: Tensor = self.vocoder(self.coarse_mel(features))
        return waveform

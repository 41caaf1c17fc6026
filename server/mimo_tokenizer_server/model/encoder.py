"""Mel frames to codes."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .config import TokenizerConfig
from .quantizer import ResidualVectorQuantizer
from .transformer import Transformer, make_norm


class Encoder(Transformer):
    """Two convolutions, a transformer, a strided pooling convolution, and the quantizer."""

    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__(
            config.d_model,
            config.encoder_attention_heads,
            config.encoder_ffn_dim,
            config.encoder_layers,
            activation=config.activation_function,
            norm=config.ln_type,
            window=config.encoder_attn_window_size,
            causal=config.encoder_causal,
            rope_theta=config.rope_theta,
        )
        dim, kernel = config.d_model, config.kernel_size
        self.skip_layer = config.encoder_skip_layer_id
        self.conv1 = nn.Conv1d(config.n_mels, dim, kernel, padding=1)
        self.conv2 = nn.Conv1d(dim, dim, kernel, stride=config.stride_size, padding=1)
        self.pool = config.avg_pooler
        if self.pool != 1:
            self.down_sample_layer = nn.Sequential(nn.Conv1d(dim, dim, self.pool, self.pool, bias=False), nn.GELU())
            self.down_sample_norm = make_norm(config.ln_type, dim)
        self.quantizer = ResidualVectorQuantizer(config.codebook_sizes, dim)

    def features(self, mel: Tensor) -> Tensor:
        """What is quantized.

        Args:
            mel: (mel frames, n_mels) of one segment, alone and unpadded.

        Returns:
            (code frames, d_model), in the dtype of the weights.
        """
        x = mel.to(self.conv1.weight.dtype).T.unsqueeze(0)  # (1, n_mels, mel frames)
        x = F.gelu(self.conv2(F.gelu(self.conv1(x))))  # (1, d_model, mel frames / stride)
        x = self.run_layers(x.squeeze(0).T, skip_from=self.skip_layer)
        if self.pool != 1:
            x = F.pad(x, (0, 0, 0, -len(x) % self.pool))
            x = self.down_sample_layer(x.T.unsqueeze(0)).squeeze(0).T  # (code frames, d_model)
            x = self.down_sample_norm(x)
        return x

    def encode(self, mel: Tensor, num_quantizers: int) -> Tensor:
        """Codes of one segment: (mel frames, n_mels) to int64 (num_quantizers, code frames)."""
        return self.quantizer.encode(self.features(mel).float(), num_quantizers)

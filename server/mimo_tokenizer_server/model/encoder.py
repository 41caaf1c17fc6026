"""Mel frames to codes."""

from __future__ import annotations

from collections.abc import Generator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import TokenizerConfig
from .packing import Spans, item_windows, windows
from .quantizer import ResidualVectorQuantizer
from .rows import Conv1d
from .transformer import Transformer, make_norm, row_pieces


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
        self.kernel = kernel
        self.stride = config.stride_size
        self.conv1 = Conv1d(config.n_mels, dim, kernel, padding=1)
        self.conv2 = Conv1d(dim, dim, kernel, stride=config.stride_size, padding=1)
        self.pool = config.avg_pooler
        if self.pool != 1:
            self.down_sample_layer = nn.Sequential(Conv1d(dim, dim, self.pool, self.pool, bias=False), nn.GELU())
            self.down_sample_norm = make_norm(config.ln_type, dim)
        self.quantizer = ResidualVectorQuantizer(config.codebook_sizes, dim)

    @property
    def least_layers(self) -> int:
        """Layers without which what is skipped would not be kept beside what comes between two others."""
        return 1 if self.skip_layer is None else self.skip_layer + 2

    def _after_conv1(self, frames: int) -> int:
        return frames + 3 - self.kernel

    def _after_conv2(self, frames: int) -> int:
        return (frames + 2 - self.kernel) // self.stride + 1

    def _after_pool(self, frames: int) -> int:
        return -(-frames // self.pool)

    def features(self, mel: Tensor, spans: Spans) -> tuple[Tensor, Spans]:
        """What is quantized.

        Args:
            mel: (mel frames, n_mels), float32; each item a segment.
            spans: the items' mel frames.

        Returns:
            (code frames, d_model), in the dtype of the weights; and the items' code frames.
        """
        x = mel.to(self.conv1.weight.dtype)
        middle = spans.map(self._after_conv1)
        x = F.gelu(self.conv1(windows(x, spans, middle, self.kernel, 1, 1)))
        inner = middle.map(self._after_conv2)
        x = F.gelu(self.conv2(windows(x, middle, inner, self.kernel, self.stride, 1)))
        x = self.run_layers(x, inner, skip_from=self.skip_layer)
        if self.pool == 1:
            return x, inner
        out = inner.map(self._after_pool)
        return self._pooled(windows(x, inner, out, self.pool, self.pool, 0)), out

    def _pooled(self, windows: Tensor) -> Tensor:
        pooled: Tensor = self.down_sample_norm(self.down_sample_layer(windows))
        return pooled

    def encode(self, mel: Tensor, spans: Spans, num_quantizers: int) -> Tensor:
        """Codes of packed segments: (mel frames, n_mels) to int64 (num_quantizers, code frames)."""
        x, _ = self.features(mel, spans)
        return self.quantizer.encode(x.float(), num_quantizers)

    def steps(self, mel: Tensor, num_quantizers: int, flops: float) -> Generator[float, None, Tensor]:
        """`encode` of one segment, step by step; see `Transformer.layer_steps`."""
        x = mel.to(self.conv1.weight.dtype)
        middle = self._after_conv1(len(mel))
        inner = self._after_conv2(middle)
        for conv, rows, stride in ((self.conv1, middle, 1), (self.conv2, inner, self.stride)):
            seen = item_windows(x, rows, self.kernel, stride, 1)
            x = x.new_empty(rows, self.dim)
            cost = _product_flops(conv)
            for start, stop in row_pieces(rows, cost, flops):
                x[start:stop] = F.gelu(conv(seen[start:stop]))
                yield (stop - start) * cost
        del seen
        yield from self.layer_steps(x, flops, skip_from=self.skip_layer)
        frames = self._after_pool(inner)
        codes = torch.empty((num_quantizers, frames), dtype=torch.int64, device=x.device)
        cost = self.quantizer.encode_flops(num_quantizers)
        if self.pool != 1:
            cost += _product_flops(self.down_sample_layer[0])
        for start, stop in row_pieces(frames, cost, flops):
            features: Tensor = self.layer_norm(x[start * self.pool : stop * self.pool])
            if self.pool != 1:
                features = self._pooled(item_windows(features, stop - start, self.pool, self.pool, 0))
            codes[:, start:stop] = self.quantizer.encode(features.float(), num_quantizers)
            yield (stop - start) * cost
        return codes

    def flops(self, mel_frames: int) -> float:
        """Floating-point operations of one segment, with all codebooks."""
        middle = self._after_conv1(mel_frames)
        inner = self._after_conv2(middle)
        outer = self._after_pool(inner)
        total = middle * _product_flops(self.conv1) + inner * _product_flops(self.conv2) + self.layer_flops(inner)
        if self.pool != 1:
            total += outer * _product_flops(self.down_sample_layer[0])
        return total + outer * self.quantizer.encode_flops(len(self.quantizer.sizes))


def _product_flops(conv: nn.Module) -> float:
    """Of one output row."""
    assert isinstance(conv, Conv1d)
    return 2.0 * conv.in_channels * conv.out_channels * conv.kernel_size[0]

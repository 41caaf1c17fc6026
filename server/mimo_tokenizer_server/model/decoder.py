"""The quantizer's output to coarse mel frames, and those to a waveform."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import TokenizerConfig
from .packing import Slots, Spans, add_overlapping, overlap_add, tree_sum
from .rows import RowWise, by_tiles
from .transformer import Transformer, row_pieces
from .vocoder import Vocoder

# Items are padded to one length for their statistics, to so many times as much as they are at most.
_MOST_PADDING = 4


class UpsampleConv(RowWise):
    """A transposed convolution and a GroupNorm over all channels and frames; the overhang at the end is cut."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(in_channels, out_channels, kernel, stride)
        self.norm = nn.GroupNorm(1, out_channels)
        self.channels = out_channels
        self.kernel = kernel
        self.stride = stride
        self.hops = -(-kernel // stride)  # of the stride, that an input's outputs reach over

    def forward(self, x: Tensor, spans: Spans) -> tuple[Tensor, Spans]:  # type: ignore[override]
        """Map packed (rows, in_channels) to (rows * stride, out_channels), and give the items' new rows."""
        summed, hops = overlap_add(self._blocks(x), spans)
        rows = summed.view(-1, self.channels) + self._bias
        held = hops.scaled(self.stride)
        # The statistics are over the overhang too: the published model normalizes before it cuts.
        counted = spans.map(self._length)
        mean, scale = self._statistics(by_tiles(_row_moments, rows, self.tile_rows), held, counted)
        out = spans.scaled(self.stride)
        item = out.items(x.device)
        return self._normalize(held.cut(rows, 0, out), mean[item], scale[item]).to(x.dtype), out

    @property
    def _bias(self) -> Tensor:
        assert self.conv.bias is not None
        return self.conv.bias.float()

    def _length(self, rows: int) -> int:
        return (rows - 1) * self.stride + self.kernel

    def _blocks(self, x: Tensor) -> Tensor:
        """What each input adds to the outputs: (rows, in_channels) to float32 (rows, hops, stride * out_channels)."""
        weight = self.conv.weight.flatten(1)  # (in, out * kernel)
        taps = by_tiles(lambda tile: tile @ weight, x, self.tile_rows)
        taps = taps.view(len(x), self.channels, self.kernel)
        taps = F.pad(taps.mT, (0, 0, 0, self.hops * self.stride - self.kernel))  # (rows, hops * stride, out)
        return taps.float().reshape(len(x), self.hops, self.stride * self.channels)

    def _statistics(self, moments: Tensor, held: Spans, counted: Spans) -> tuple[Tensor, Tensor]:
        """Mean and inverse standard deviation of each item, from those of its rows.

        Chan, Golub and LeVeque (1983): the squares about the common mean are those about the rows' own means, and
        those of these about the common one.

        Args:
            moments: `_row_moments` of packed rows.
            held: where the items stand in them.
            counted: the rows of each that count, from its first.

        Returns:
            Two of (items, 1).
        """
        device = moments.device
        starts, sizes = held.cumulative(device)[:-1, None], counted.sizes(device)[:, None]
        if isinstance(counted, Slots):
            return self._padded_statistics(moments, starts, sizes, _power_of_two(counted.longest))
        widths = [_power_of_two(length) for length in counted.lengths]
        if max(widths) * len(widths) <= _MOST_PADDING * held.total:
            return self._padded_statistics(moments, starts, sizes, max(widths))
        # Short ones beside long ones: those of one width together, or there would be more padding than rows.
        mean, scale = torch.empty_like(starts, dtype=moments.dtype), torch.empty_like(starts, dtype=moments.dtype)
        for width in sorted(set(widths)):
            items = torch.tensor([item for item, other in enumerate(widths) if other == width], device=device)
            mean[items], scale[items] = self._padded_statistics(moments, starts[items], sizes[items], width)
        return mean, scale

    def _padded_statistics(self, moments: Tensor, starts: Tensor, sizes: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """`_statistics` of the items that start at `starts` (items, 1), of `sizes` rows each, at most `width`."""
        place = torch.arange(width, device=moments.device)
        counts = place < sizes  # (items, a power of two)
        index = (starts + place).clamp(max=len(moments) - 1)
        # Filled, not multiplied with zero: what is no number in another item stays there.
        means, squares = moments[index].masked_fill(~counts[..., None], 0).unbind(-1)
        mean = tree_sum(means)[:, None] / sizes
        variance = tree_sum(squares + (means - mean).square() * counts)[:, None] / sizes
        return mean, (variance + self.norm.eps).rsqrt()

    def _normalize(self, rows: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        return torch.addcmul(self.norm.bias.float(), (rows - mean) * scale, self.norm.weight.float())

    def steps(
        self, inputs: Callable[[int, int], Tensor], length: int, dtype: torch.dtype, flops: float
    ) -> Generator[float, None, Tensor]:
        """`forward` for one item, step by step.

        Args:
            inputs: gives the inputs from a row to another.
            length: their number.
            dtype: of the answer.
            flops: of a step, at most, but for a step of one row.

        Yields:
            The floating-point operations of each step.

        Returns:
            (length * stride, out_channels).
        """
        device = self.conv.weight.device
        width = self.stride * self.channels
        # As in `forward`, what has been added up is not rounded before it is normalized.
        kept = dtype if self.hops == 1 else torch.float32
        out = torch.zeros(length + self.hops - 1, width, dtype=kept, device=device)
        cost = self.flops(1)
        for start, stop in row_pieces(length, cost, flops):
            add_overlapping(out, start, self._blocks(inputs(start, stop)))
            yield (stop - start) * cost
        rows = out.view(-1, self.channels)
        moments = torch.empty(len(rows), 2, device=device, dtype=torch.float32)
        for start, stop in row_pieces(len(rows), 1, torch.inf):
            moments[start:stop] = by_tiles(_row_moments, rows[start:stop] + self._bias, self.tile_rows)
            yield 0.0
        mean, scale = self._statistics(moments, Spans([len(rows)]), Spans([self._length(length)]))
        rows = rows[: length * self.stride]
        answer = rows if kept == dtype else torch.empty_like(rows, dtype=dtype)
        for start, stop in row_pieces(len(rows), 1, torch.inf):
            answer[start:stop] = self._normalize(rows[start:stop] + self._bias, mean, scale)
            yield 0.0
        return answer

    def flops(self, length: int) -> float:
        """Floating-point operations of the product."""
        return 2.0 * length * self.conv.in_channels * self.channels * self.kernel


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _row_moments(rows: Tensor) -> Tensor:
    """Mean and variance of each row: (rows, channels) to (rows, 2)."""
    mean = rows.mean(1, keepdim=True)
    return torch.cat((mean, (rows - mean).square().mean(1, keepdim=True)), dim=1)


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
        dim, self.pool = config.d_model, config.avg_pooler
        self.dconv1 = UpsampleConv(dim, dim, self.pool, self.pool) if self.pool != 1 else None
        self.dconv2 = UpsampleConv(dim, config.n_mels, config.decoder_kernel_size, config.decoder_stride_size)
        self.vocoder = Vocoder(config)

    def coarse_mel(self, features: Tensor, spans: Spans) -> tuple[Tensor, Spans]:
        """Map the quantizer's packed output (code frames, d_model) to (mel frames, n_mels), and their spans."""
        x = features.to(self.dconv2.conv.weight.dtype)
        if self.dconv1 is not None:
            x, spans = self.dconv1(x, spans)
        mel: tuple[Tensor, Spans] = self.dconv2(self.run_layers(x, spans), spans)
        return mel

    def forward(self, features: Tensor, spans: Spans) -> Tensor:
        """Map the quantizer's packed output (code frames, d_model) to float32 samples (samples,)."""
        waveform: Tensor = self.vocoder(*self.coarse_mel(features, spans))
        return waveform

    def steps(
        self, features: Callable[[int, int], Tensor], frames: int, flops: float
    ) -> Generator[float, None, Tensor]:
        """`forward` for one item, step by step; see `Transformer.layer_steps`.

        Args:
            features: gives the quantizer's output from a code frame to another.
            frames: code frames.
            flops: of a step, at most, but for a step of one row.
        """
        dtype = self.dconv2.conv.weight.dtype
        if self.dconv1 is not None:
            x = yield from self.dconv1.steps(lambda *rows: features(*rows).to(dtype), frames, dtype, flops)
        else:
            x = torch.empty(frames, self.dim, dtype=dtype, device=self.dconv2.conv.weight.device)
            for start, stop in row_pieces(frames, 1, torch.inf):
                x[start:stop] = features(start, stop)
                yield 0.0
        yield from self.layer_steps(x, flops)
        mel = yield from self.dconv2.steps(partial(self._normed, x), len(x), dtype, flops)
        del x  # the vocoder has no need of it
        return (yield from self.vocoder.steps(mel, flops))

    def _normed(self, x: Tensor, start: int, stop: int) -> Tensor:
        normed: Tensor = self.layer_norm(x[start:stop])
        return normed

    def flops(self, frames: int) -> float:
        """Floating-point operations of one item, with the vocoder's."""
        inner = frames * self.pool
        first = self.dconv1.flops(frames) if self.dconv1 is not None else 0.0
        vocoder = self.vocoder.flops(inner * self.dconv2.stride)
        return first + self.layer_flops(inner) + self.dconv2.flops(inner) + vocoder

"""The pre-norm transformer that encoder, decoder and vocoder share."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import AttentionPlan, Reach, attend_piece, needs_mask, rope_table, rotate
from .packing import Spans
from .rows import Activation, Linear, RMSNorm

_TANH_GELU = partial(F.gelu, approximate="tanh")
# Each with what oneDNN calls it.
_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, str]]] = {
    "gelu": (F.gelu, ("gelu", "none")),
    "gelu_new": (_TANH_GELU, ("gelu", "tanh")),
    "gelu_pytorch_tanh": (_TANH_GELU, ("gelu", "tanh")),
    "relu": (F.relu, ("relu", "")),
    "silu": (F.silu, ("swish", "")),
    "swish": (F.silu, ("swish", "")),
}

# Of one long item, at most so many rows are computed at once, whatever they cost: what lies between a feed-forward's
# two products (40 MiB at the published size in float32) and attention's mask shall stay small beside the item.
_MOST_ROWS = 2048
_MOST_MASK = 1 << 22


def make_norm(kind: str, dim: int) -> nn.Module:
    """A LayerNorm, or an RMSNorm (arXiv 1910.07467), over the last dimension."""
    return nn.LayerNorm(dim) if kind == "LayerNorm" else RMSNorm(dim, eps=1e-6)


def _least_heads(rows: int, x: Tensor) -> int:
    """Heads that keep all of a CPU's threads busy; PyTorch gives each of them a few hundred rows of a head."""
    return -(-torch.get_num_threads() // -(-rows // 256)) if x.device.type == "cpu" else 1


def row_pieces(rows: int, flops_per_row: float, flops: float) -> Iterator[tuple[int, int]]:
    """Cut `rows` into pieces from start to stop, of about `flops` at most and of at least one row."""
    size = int(max(1, min(_MOST_ROWS, flops / flops_per_row)))
    for start in range(0, rows, size):
        yield start, min(start + size, rows)


class Attention(nn.Module):
    """Multi-head self-attention with rotary positions; queries, keys and values come from one product."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.dim = dim
        self.heads = heads
        # The rows are those of q_proj, k_proj and v_proj; the published k_proj has no bias, so its part stays zero.
        self.qkv = Linear(dim, 3 * dim, cuts=(dim, 2 * dim))
        self.out_proj = Linear(dim, dim)

    def forward(self, x: Tensor, rope: Tensor, plan: AttentionPlan) -> Tensor:
        """What is attended to, before the last product: packed rows (rows, dim) to (rows, dim)."""
        if self.qkv.packed:
            q = self.queries(x, rope)
            k, v = self.keys_and_values(x, rope)
        else:
            q, k, v = self.qkv(x).view(len(x), 3, self.heads, -1).unbind(1)  # each (rows, heads, head_dim)
            q, k = rotate(q, rope), rotate(k, rope)
        return plan.attend(q, k, v).flatten(1)

    def queries(self, x: Tensor, rope: Tensor) -> Tensor:
        """Map (rows, dim) to (rows, heads, head_dim)."""
        return rotate(self.qkv.columns(x, 0, self.dim).view(len(x), self.heads, -1), rope)

    def keys_and_values(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Map (rows, dim) to two of (rows, heads, head_dim)."""
        if self.qkv.packed:
            parts = (self.qkv.columns(x, part * self.dim, (part + 1) * self.dim) for part in (1, 2))
            k, v = (part.view(len(x), self.heads, -1) for part in parts)
        else:
            k, v = self.qkv.columns(x, self.dim, 3 * self.dim).view(len(x), 2, self.heads, -1).unbind(1)
        return rotate(k, rope), v


class TransformerLayer(nn.Module):
    """Attention and feed-forward, each normalized before and added to its input."""

    def __init__(self, dim: int, heads: int, ffn_dim: int, activation: str, norm: str) -> None:
        super().__init__()
        self.self_attn_layer_norm = make_norm(norm, dim)
        self.self_attn = Attention(dim, heads)
        self.final_layer_norm = make_norm(norm, dim)
        self.fc1 = Linear(dim, ffn_dim)
        self.fc2 = Linear(ffn_dim, dim)
        self.activation = Activation(*_ACTIVATIONS[activation])

    def forward(self, x: Tensor, rope: Tensor, plan: AttentionPlan) -> Tensor:
        """Map packed rows (rows, dim) to (rows, dim)."""
        return self.rest(x, self.self_attn(self.self_attn_layer_norm(x), rope, plan))

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """What comes after attention: the layer's input and what it attends to, (rows, dim) each, to (rows, dim)."""
        x = self.self_attn.out_proj.added_to(x, attended)
        x = self.fc2.added_to(x, self.fc1.activated(self.final_layer_norm(x), self.activation))
        if x.dtype == torch.float16:  # the one supported type whose range a residual stream can leave
            bound = torch.finfo(x.dtype).max - 1000
            x = x.clamp(-bound, bound)
        return x


class Transformer(nn.Module):
    """A stack of layers over packed items, without the final norm.

    Not a container of its own in the checkpoint: `layers` and `layer_norm` stand directly in encoder, decoder and
    vocoder, which therefore inherit from this class.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        ffn_dim: int,
        depth: int,
        *,
        activation: str,
        norm: str,
        window: tuple[int, int],
        causal: bool,
        rope_theta: float,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer(dim, heads, ffn_dim, activation, norm) for _ in range(depth))
        self.layer_norm = make_norm(norm, dim)
        self.dim = dim
        self.heads = heads
        self.ffn_dim = ffn_dim
        self.head_dim = dim // heads
        self.window = window
        self.causal = causal
        self.rope_theta = rope_theta
        self.one_by_one = False

    def run_layers(self, x: Tensor, spans: Spans, skip_from: int | None = None) -> Tensor:
        """Run all layers and the final norm over packed rows.

        Args:
            x: (spans.total, dim).
            spans: the items; none sees another.
            skip_from: number of the layer, counted from 1, whose output is added to the last layer's.

        Returns:
            (spans.total, dim).
        """
        plan = AttentionPlan(
            spans, self.window, self.causal, self.head_dim, x.device, x.dtype, one_by_one=self.one_by_one
        )
        rope = rope_table(spans.positions(x.device), self.head_dim, self.rope_theta, x.dtype)
        skip: Tensor | None = None
        for number, layer in enumerate(self.layers, start=1):
            x = layer(x, rope, plan)
            if number == skip_from:
                skip = x
        if skip is not None:
            x = x + skip
        normed: Tensor = self.layer_norm(x)
        return normed

    def layer_steps(self, x: Tensor, flops: float, skip_from: int | None = None) -> Generator[float, None, None]:
        """Run all layers over one item in place, without the final norm; beside it stand one layer's keys and values.

        Args:
            x: (length, dim).
            flops: floating-point operations of a step, about and at most, but for a step of one row.
            skip_from: as in `run_layers`.

        Yields:
            The floating-point operations of each step.
        """
        length = len(x)
        reach = Reach(length, self.window, self.causal)
        rope = rope_table(torch.arange(length, device=x.device), self.head_dim, self.rope_theta, x.dtype)
        first = next(row_pieces(length, self._key_value_flops, flops))
        # Of all rows at once they are taken as they come.
        keys = x.new_empty(0 if first == (0, length) else length, self.heads, self.head_dim)
        values = torch.empty_like(keys)
        skip: Tensor | None = None
        for number, layer in enumerate(self.layers, start=1):
            yield from self._one_layer_steps(layer, x, keys, values, rope, reach, flops)
            if number == skip_from:
                skip = x.clone()
        if skip is not None:
            x += skip

    def _one_layer_steps(
        self,
        layer: nn.Module,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        rope: Tensor,
        reach: Reach,
        flops: float,
    ) -> Generator[float, None, None]:
        assert isinstance(layer, TransformerLayer)
        attention, length = layer.self_attn, len(x)
        # Keys and values run ahead of the rows that see them: a row that has been replaced has given its own.
        pending = row_pieces(length, self._key_value_flops, flops)
        filled = start = 0
        while start < length:
            stop = start + self._rows_within(start, reach, flops, x)
            while filled < reach.keys(start, stop)[1]:
                first, filled = next(pending)
                ahead = slice(first, filled)
                pair = attention.keys_and_values(layer.self_attn_layer_norm(x[ahead]), rope[:, ahead])
                if filled - first == length:
                    keys, values = pair
                else:
                    keys[ahead], values[ahead] = pair
                yield (filled - first) * self._key_value_flops
            rows = slice(start, stop)
            queries = attention.queries(layer.self_attn_layer_norm(x[rows]), rope[:, rows])
            yield (stop - start) * self._query_flops
            pieces = []
            of_head = self._attention_flops(start, stop, reach) / self.heads
            for first, last in row_pieces(self.heads, of_head, max(flops, of_head * _least_heads(stop - start, x))):
                heads = (slice(None), slice(first, last))
                pieces.append(attend_piece(queries[heads], keys[heads], values[heads], start, reach))
                yield (last - first) * of_head
            attended = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
            del pieces
            for first, last in row_pieces(stop - start, self._rest_flops, flops):
                rows = slice(start + first, start + last)
                x[rows] = layer.rest(x[rows], attended[first:last].flatten(1))
                yield (last - first) * self._rest_flops
            start = stop

    # Floating-point operations of a layer's parts, for one row where nothing else is said.

    @property
    def _key_value_flops(self) -> float:
        return 4.0 * self.dim**2

    @property
    def _query_flops(self) -> float:
        return 2.0 * self.dim**2

    @property
    def _rest_flops(self) -> float:
        """Of what comes after attention."""
        return 2.0 * self.dim * (self.dim + 2 * self.ffn_dim)

    def _attention_flops(self, start: int, stop: int, reach: Reach) -> float:
        """Of attention, for the rows from `start` to `stop`."""
        return 4.0 * self.dim * reach.seen(start, stop)

    def _rows_within(self, start: int, reach: Reach, flops: float, x: Tensor) -> int:
        """Rows from `start` on that attend at once; at least one.

        Their queries, and of one head the attention, cost at most `flops`, and their mask is small.
        """
        most = min(_MOST_ROWS, reach.length - start)
        if needs_mask(reach, self.head_dim, x.device, x.dtype):
            low, high = reach.keys(start, start + most)
            most = max(1, min(most, _MOST_MASK // (high - low)))

        def cost(rows: int) -> float:
            return max(rows * self._query_flops, self._attention_flops(start, start + rows, reach) / self.heads)

        return max(1, bisect_right(range(1, most + 1), flops, key=cost))

    def layer_flops(self, length: int) -> float:
        """Floating-point operations of all layers for one item: linear layers, and attention to what is seen."""
        of_layer = length * (self._key_value_flops + self._query_flops + self._rest_flops)
        of_layer += self._attention_flops(0, length, Reach(length, self.window, self.causal))
        return len(self.layers) * of_layer

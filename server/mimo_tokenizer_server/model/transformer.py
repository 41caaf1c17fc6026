"""The pre-norm transformer that encoder, decoder and vocoder share."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import AttentionPlan, rope_table, rotate

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


def make_norm(kind: str, dim: int) -> nn.Module:
    """A LayerNorm, or an RMSNorm (arXiv 1910.07467), over the last dimension."""
    return nn.LayerNorm(dim) if kind == "LayerNorm" else nn.RMSNorm(dim, eps=1e-6)


class Attention(nn.Module):
    """Multi-head self-attention with rotary positions; queries, keys and values come from one product."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        # The rows are those of q_proj, k_proj and v_proj; the published k_proj has no bias, so its part stays zero.
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, rope: Tensor, plan: AttentionPlan) -> Tensor:
        """Map (length, dim) to (length, dim)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)  # each (length, heads, head_dim)
        out: Tensor = self.out_proj(plan.attend(rotate(q, rope), rotate(k, rope), v).flatten(1))
        return out


class TransformerLayer(nn.Module):
    """Attention and feed-forward, each normalized before and added to its input."""

    def __init__(self, dim: int, heads: int, ffn_dim: int, activation: str, norm: str) -> None:
        super().__init__()
        self.self_attn_layer_norm = make_norm(norm, dim)
        self.self_attn = Attention(dim, heads)
        self.final_layer_norm = make_norm(norm, dim)
        self.fc1 = nn.Linear(dim, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, dim)
        self.activation = _ACTIVATIONS[activation]

    def forward(self, x: Tensor, rope: Tensor, plan: AttentionPlan) -> Tensor:
        """Map (length, dim) to (length, dim)."""
        x = x + self.self_attn(self.self_attn_layer_norm(x), rope, plan)
        x = x + self.fc2(self.activation(self.fc1(self.final_layer_norm(x))))
        if x.dtype == torch.float16:  # the one supported type whose range a residual stream can leave
            bound = torch.finfo(x.dtype).max - 1000
            x = x.clamp(-bound, bound)
        return x


class Transformer(nn.Module):
    """A stack of layers over one sequence, without the final norm.

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
        self.head_dim = dim // heads
        self.window = window
        self.causal = causal
        self.rope_theta = rope_theta

    def run_layers(self, x: Tensor, skip_from: int | None = None) -> Tensor:
        """Run all layers and the final norm over `x` (length, dim).

        Args:
            x: the sequence.
            skip_from: number of the layer, counted from 1, whose output is added to the last layer's.
        """
        length = x.shape[0]
        plan = AttentionPlan(length, self.window, self.causal, x.device)
        rope = rope_table(length, self.head_dim, self.rope_theta, x.device, x.dtype)
        skip: Tensor | None = None
        for number, layer in enumerate(self.layers, start=1):
            x = layer(x, rope, plan)
            if number == skip_from:
                skip = x
        if skip is not None:
            x = x + skip
        normed: Tensor = self.layer_norm(x)
        return normed

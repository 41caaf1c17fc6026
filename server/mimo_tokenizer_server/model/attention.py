"""Rotary positions and attention over one unpadded sequence, full, causal or in a sliding window."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# A window up to this many keys wide goes through one batched call over all blocks; their mask, (length, block + width)
# in all, stays small. A wider one, or one open to one side, is done block after block.
_WIDEST_BAND = 256
_MIN_BLOCK = 64
_ROWS = 512


def rope_table(length: int, head_dim: int, theta: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of rotary positions 0..length-1.

    RoFormer (arXiv 2104.09864), eq. 34: position m turns dimension pair i by m * theta ** (-2i / head_dim).

    Returns:
        (2, length, 1, head_dim), float32 arithmetic, rounded to `dtype` at the end.
    """
    pair = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    frequency = 1.0 / theta ** (pair / head_dim)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequency  # (length, head_dim / 2)
    angle = torch.cat((angle, angle), dim=-1)
    return torch.stack((angle.cos(), angle.sin())).unsqueeze(2).to(dtype)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn `x` (length, heads, head_dim) by its rows' positions; the pairs are (i, i + head_dim / 2)."""
    first, second = x.chunk(2, dim=-1)
    return x * table[0] + torch.cat((-second, first), dim=-1) * table[1]


class AttentionPlan:
    """How a sequence attends to itself, worked out once a request and shared by all layers.

    Query i sees key j if i - left <= j <= i + right; a negative bound is none, and `causal` sets right to 0.
    Full and causal attention need no mask, a window only masks of (queries of a block, keys of a block): nothing of
    size length x length is ever made.
    """

    def __init__(self, length: int, window: tuple[int, int], causal: bool, device: torch.device) -> None:
        left, right = window
        if causal:
            right = 0
        last = length - 1
        self.length = length
        self.device = device
        self.left = left if 0 <= left < last else last
        self.right = right if 0 <= right < last else last
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor]
        if self.left == last and self.right in (0, last):
            self.attend = self._attend_whole
        elif self.left + self.right <= _WIDEST_BAND:
            self._make_band_mask()
            self.attend = self._attend_band
        else:
            self.attend = self._attend_rows

    def _attend_whole(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of (length, heads, head_dim) queries to all keys, or to those not after them."""
        causal = self.right == 0 and self.length > 1
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # (1, heads, length, head_dim)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).squeeze(0).transpose(0, 1)

    def _make_band_mask(self) -> None:
        width = self.left + self.right
        self.block = min(self.length, max(_MIN_BLOCK, width))
        self.blocks = -(-self.length // self.block)
        # Key c of a block stands `left` before the block's first query.
        key = torch.arange(self.block + width, device=self.device)
        offset = key - torch.arange(self.block, device=self.device)[:, None]
        band = (offset >= 0) & (offset <= width)  # (block, keys)
        position = torch.arange(self.blocks, device=self.device)[:, None] * self.block + key - self.left
        inside = (position >= 0) & (position < self.length)  # (blocks, keys)
        self.mask = (band & inside[:, None]).unsqueeze(1)  # (blocks, 1, block, keys)

    def _attend_band(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Sliding window: each block of queries against its own stretch of keys, all blocks as one batch."""
        tail = self.blocks * self.block - self.length
        queries = F.pad(q, (0, 0, 0, 0, 0, tail)).view(self.blocks, self.block, *q.shape[1:]).transpose(1, 2)
        keys, values = (
            # (blocks, heads, head_dim, keys) -> (blocks, heads, keys, head_dim)
            F.pad(x, (0, 0, 0, 0, self.left, self.right + tail)).unfold(0, self.mask.shape[-1], self.block).mT
            for x in (k, v)
        )
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self.mask)
        return out.transpose(1, 2).flatten(0, 1)[: self.length]

    def _attend_rows(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A wide window, or one open to one side: blocks of queries one after the other."""
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = torch.empty_like(q)
        for start in range(0, self.length, _ROWS):
            stop = min(start + _ROWS, self.length)
            low, high = max(0, start - self.left), min(self.length, stop + self.right)
            offset = (
                torch.arange(low, high, device=self.device) - torch.arange(start, stop, device=self.device)[:, None]
            )
            mask = (offset >= -self.left) & (offset <= self.right)
            out[:, :, start:stop] = F.scaled_dot_product_attention(
                q[:, :, start:stop], k[:, :, low:high], v[:, :, low:high], attn_mask=mask
            )
        return out.squeeze(0).transpose(0, 1)

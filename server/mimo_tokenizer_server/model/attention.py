"""Rotary positions and attention within the items of a packed sequence: full, causal or in a sliding window."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from .packing import Spans

# A window up to this many keys wide goes through one batched call over all blocks; their mask, (rows, block + width)
# in all, stays small. A wider one, or one open to one side, is done block after block.
_WIDEST_BAND = 256
_MIN_BLOCK = 64
_ROWS = 512


def rope_table(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of rotary positions (rows,), as `rotate` takes them.

    RoFormer (arXiv 2104.09864), eq. 34: position m turns dimension pair i by m * theta ** (-2i / head_dim).

    Returns:
        (2, rows, 1, head_dim), the sines of the first half negative; float32 arithmetic, rounded to `dtype` at the end.
    """
    pair = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    frequency = 1.0 / theta ** (pair / head_dim)
    angle = positions.float()[:, None] * frequency  # (rows, head_dim / 2)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).unsqueeze(2).to(dtype)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn `x` (rows, heads, head_dim) by its rows' positions; the pairs are (i, i + head_dim / 2)."""
    cos, sin = table
    half = x.shape[-1] // 2
    turned: Tensor = x * cos
    turned[..., :half].addcmul_(x[..., half:], sin[..., :half])
    turned[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return turned


class Reach:
    """How far a row of an item sees: row i sees row j of `length` if i - left <= j <= i + right.

    Args:
        length: rows of the item, or of the longest of some.
        window: left and right; a negative bound is none.
        causal: sets right to 0.
    """

    def __init__(self, length: int, window: tuple[int, int], causal: bool) -> None:
        left, right = window[0], 0 if causal else window[1]
        last = length - 1
        self.length = length
        self.left = left if 0 <= left < last else last
        self.right = right if 0 <= right < last else last
        self.full = self.left == self.right == last
        # Whether rows see all of their past, and all of their future or nothing of it.
        self.whole = self.left == last and self.right in (0, last)
        self.causal = self.left == last and self.right == 0
        self.band = not self.whole and self.left + self.right <= _WIDEST_BAND

    def seen(self, start: int, stop: int) -> int:
        """Rows that the rows from `start` to `stop` see, summed."""
        before = _ramp(stop, self.left) - _ramp(start, self.left)
        after = _ramp(self.length - start, self.right) - _ramp(self.length - stop, self.right)
        return before + after + stop - start

    def keys(self, start: int, stop: int) -> tuple[int, int]:
        """First row that the rows from `start` to `stop` see, and the first after them that they do not."""
        return max(0, start - self.left), min(self.length, stop + self.right)


def _ramp(stop: int, most: int) -> int:
    """The sum of min(i, most) over i from 0 to before `stop`."""
    rising = min(stop, most)
    return rising * (rising - 1) // 2 + (stop - rising) * most


class AttentionPlan:
    """How the items of a packed sequence attend to themselves, worked out once a batch and shared by all layers.

    Full and causal attention need no mask, a window only masks of (queries of a block, keys of a block): nothing of
    size length x length is ever made.

    Args:
        spans: the items.
        window: rows seen to the left and to the right; a negative bound is none.
        causal: sees nothing to the right.
        head_dim: of queries, keys and values.
        device: where they are.
        dtype: theirs.
        one_by_one: no call that could let an item have an influence on another's order of sums. Flash Attention, by
            varlen_attn, does not: its thread blocks each have rows of one item.
    """

    def __init__(
        self,
        spans: Spans,
        window: tuple[int, int],
        causal: bool,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        one_by_one: bool = False,
    ) -> None:
        self._spans = spans
        self._reach = reach = Reach(spans.longest, window, causal)
        # Functions, not methods of this object: in a circle its tensors would wait for the garbage collector.
        self._attend: Callable[[AttentionPlan, Tensor, Tensor, Tensor], Tensor]
        if one_by_one and len(spans) > 1 and not has_varlen(head_dim, device, dtype):
            self._plans = [AttentionPlan(Spans([n]), window, causal, head_dim, device, dtype) for n in spans.lengths]
            self._attend = AttentionPlan._attend_one_by_one
        elif has_varlen(head_dim, device, dtype):
            self._bounds = spans.cumulative(device)
            self._attend = AttentionPlan._attend_varlen
        elif reach.whole:
            self._attend = AttentionPlan._attend_whole
        elif reach.band:
            self._band = _Band(reach, spans.items(device), 0, spans.total)
            self._attend = AttentionPlan._attend_band
        else:
            self._window = window
            self._causal = causal
            self._attend = AttentionPlan._attend_rows

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Map packed queries, keys and values, (rows, heads, head_dim) each, to (rows, heads, head_dim)."""
        return self._attend(self, q, k, v)

    def _attend_band(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._band.attend(q, k, v)

    def _attend_one_by_one(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        items = zip(self._plans, *(self._spans.split(x) for x in (q, k, v)), strict=True)
        return torch.cat([plan.attend(*item) for plan, *item in items])

    def _attend_varlen(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bounds, longest = self._bounds, self._reach.length
        return _varlen(q, k, v, bounds, bounds, longest, longest, _varlen_window(self._reach))

    def _attend_whole(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of (rows, heads, head_dim) queries to all keys of their item, or to those not after them."""
        outs = []
        start = 0
        for length, run in groupby(self._spans.lengths):
            stop = start + length * len(list(run))
            # Items of one length side by side: (items, heads, length, head_dim).
            queries, keys, values = (x[start:stop].view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
            causal = self._reach.right == 0 and length > 1
            out = F.scaled_dot_product_attention(queries, keys, values, is_causal=causal)
            outs.append(out.transpose(1, 2).flatten(0, 1))
            start = stop
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend_rows(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A wide window, or one open to one side: blocks of queries one after the other."""
        out = torch.empty_like(q)
        for first, length in zip(self._spans.starts, self._spans.lengths, strict=True):
            reach = Reach(length, self._window, self._causal)
            item = slice(first, first + length)
            for start in range(0, length, _ROWS):
                rows = slice(first + start, first + min(start + _ROWS, length))
                out[rows] = attend_piece(q[rows], k[item], v[item], start, reach)
        return out


def attend_piece(q: Tensor, k: Tensor, v: Tensor, start: int, reach: Reach) -> Tensor:
    """Attention of some rows of one item.

    Args:
        q: (rows, heads, head_dim), the item's rows from `start` on.
        k: (length, heads, head_dim), all of the item's; those that the rows do not see may hold anything.
        v: as `k`.
        start: the place of the first row.
        reach: the item's.

    Returns:
        (rows, heads, head_dim).
    """
    stop = start + len(q)
    low, high = reach.keys(start, stop)
    if has_varlen(q.shape[-1], q.device, q.dtype):
        # The kernel lays the last query upon the last key, which is up to `right` rows after it.
        shift = high - stop
        left, right = _varlen_window(reach)
        if not reach.full:
            left, right = left if left < 0 else left + shift, right if right < 0 else right - shift
        queries, keys = Spans([len(q)]).cumulative(q.device), Spans([high - low]).cumulative(q.device)
        return _varlen(q, k[low:high], v[low:high], queries, keys, len(q), high - low, (left, right))
    if reach.band:
        # Only what is seen is given: a value that is no number would show even where it weighs nothing.
        item = torch.zeros(high - low, dtype=torch.int64, device=q.device)
        return _Band(reach, item, start - low, stop - low).attend(q, k[low:high], v[low:high])
    if reach.causal and _has_logsumexp(q.device):
        return _attend_past(q, k[:stop], v[:stop], start)
    mask: Tensor | None = None
    if not reach.full:
        key = torch.arange(low, high, device=q.device)
        offset = key - torch.arange(start, stop, device=q.device)[:, None]
        mask = (offset >= -reach.left) & (offset <= reach.right)
    queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k[low:high], v[low:high]))
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    return out.squeeze(0).transpose(0, 1)


def needs_mask(reach: Reach, head_dim: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `attend_piece` makes a mask of (rows, keys)."""
    without = reach.full or reach.band or (reach.causal and _has_logsumexp(device))
    return not (without or has_varlen(head_dim, device, dtype))


def _attend_past(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """Attention of rows to themselves and to all before them: to either part without a mask, put together after.

    Softmax over both is the sum of the parts' own, weighted by their shares of its denominator (as in Flash Attention,
    arXiv 2205.14135, section 3.1): of two logsumexps the share is the sigmoid of their difference.

    Args:
        q: (rows, heads, head_dim).
        k: (start + rows, heads, head_dim).
        v: as `k`.
        start: rows before them.

    Returns:
        (rows, heads, head_dim).
    """
    queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # (1, heads, ..., head_dim)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, own = flash(queries, keys[:, :, start:], values[:, :, start:], is_causal=True)
    if start:
        past, before = flash(queries, keys[:, :, :start], values[:, :, :start])
        out = torch.lerp(out.float(), past.float(), torch.sigmoid(before - own).unsqueeze(-1)).to(q.dtype)
    answer: Tensor = out.squeeze(0).transpose(0, 1)
    return answer


@cache
def _has_logsumexp(device: torch.device) -> bool:
    """Whether attention on this device also gives its logsumexps, (1, heads, rows), under a name nobody promises."""
    flash = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    if device.type != "cpu" or flash is None:
        return False
    x = torch.zeros(1, 2, 3, 8, device=device)
    _, logsumexp = flash(x, x, x)
    return bool(logsumexp.shape == (1, 2, 3))


class _Band:
    """Sliding window: each block of queries against its own stretch of keys, all blocks as one batch.

    Args:
        reach: how far rows see.
        items: the item of each row of the sequence, (rows,); rows see those of their own.
        start, stop: the rows that attend.
    """

    def __init__(self, reach: Reach, items: Tensor, start: int, stop: int) -> None:
        width = reach.left + reach.right
        rows = stop - start
        self._block = block = min(rows, max(_MIN_BLOCK, width))
        self._blocks = blocks = -(-rows // block)
        # The stretch of keys of all blocks, a part of which can lie outside the sequence.
        first, end = start - reach.left, start + blocks * block + reach.right
        self._low, self._high = max(0, first), min(len(items), end)
        self._front, self._back = self._low - first, end - self._high
        owner = F.pad(items[self._low : self._high], (0, self._back), value=-1)
        # Another number before the sequence than after it, so that every query has a key: itself.
        owner = F.pad(owner, (self._front, 0), value=-2)
        self._keys = keys = block + width
        # Key c of a block stands `left` before the block's first query.
        offset = torch.arange(keys, device=items.device) - torch.arange(block, device=items.device)[:, None]
        band = (offset >= 0) & (offset <= width)  # (block, keys)
        query_owner = owner[reach.left : reach.left + blocks * block].view(blocks, block, 1)
        key_owner = owner.unfold(0, keys, block).unsqueeze(1)  # (blocks, 1, keys)
        self._mask = (band & (query_owner == key_owner)).unsqueeze(1)  # (blocks, 1, block, keys)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Map the attending rows' queries and the sequence's keys and values to (rows, heads, head_dim)."""
        tail = self._blocks * self._block - len(q)
        queries = F.pad(q, (0, 0, 0, 0, 0, tail)).view(self._blocks, self._block, *q.shape[1:]).transpose(1, 2)
        keys, values = (
            # (blocks, heads, head_dim, keys) -> (blocks, heads, keys, head_dim)
            F.pad(x[self._low : self._high], (0, 0, 0, 0, self._front, self._back))
            .unfold(0, self._keys, self._block)
            .mT
            for x in (k, v)
        )
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self._mask)
        return out.transpose(1, 2).flatten(0, 1)[: len(q)]


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_bounds: Tensor,
    k_bounds: Tensor,
    q_longest: int,
    k_longest: int,
    window: tuple[int, int],
) -> Tensor:
    out = varlen_attn(q, k, v, q_bounds, k_bounds, q_longest, k_longest, window_size=window)
    assert isinstance(out, Tensor)  # it gives more only where it is asked to
    return out


def _varlen_window(reach: Reach) -> tuple[int, int]:
    """The bounds as varlen_attn takes them: -1 for none.

    Not for both: newer versions would then go to cuDNN, which plans anew for each batch, and sums in another order
    where a batch's longest item is long.
    """
    last = reach.length - 1
    if reach.full:
        return reach.length, reach.length
    return (
        -1 if reach.left == last and last > 0 else reach.left,
        -1 if reach.right == last and last > 0 else reach.right,
    )


def has_varlen(head_dim: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether varlen_attn runs: Flash Attention, from compute capability 8.0 on, for half precision."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )

"""Items of any lengths in one tensor, row after row and without padding; and operations that stay within an item."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Lengths up to which the roundings of convolutions are looked at; more than any kernel and stride together.
_MOST_ROUNDED = 24


class Spans:
    """Where items stand in a packed sequence.

    Args:
        lengths: rows of each item, each at least 1.

    Attributes:
        lengths: rows of each item.
        starts: first row of each item.
        total: rows of all items.
        longest: rows of the longest item.

    Raises:
        ValueError: there is no item, or one without rows.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"items of {list(self.lengths)} rows cannot be packed; each must have at least 1")
        ends = tuple(accumulate(self.lengths))
        self.starts = (0, *ends[:-1])
        self.total = ends[-1]
        self.longest = max(self.lengths)
        self._tensors: dict[tuple[str, torch.device], Tensor] = {}

    def __len__(self) -> int:
        return len(self.lengths)

    def map(self, function: Callable[[Any], Any]) -> Spans:
        """The same items with other lengths.

        Args:
            function: of a length, or elementwise of a tensor of them.
        """
        return Spans([function(length) for length in self.lengths])

    def scaled(self, factor: int) -> Spans:
        """The same items, each `factor` times as long."""
        return self if factor == 1 else self.map(lambda length: length * factor)

    def split(self, x: Tensor) -> list[Tensor]:
        """Views of the items along dimension 0."""
        return [x[start : start + length] for start, length in zip(self.starts, self.lengths, strict=True)]

    def cut(self, x: Tensor, first: int, kept: Spans) -> Tensor:
        """Of each item in `x`, the rows from `first` on, as many as `kept` says; packed anew."""
        if kept.lengths == self.lengths:
            return x
        pieces = zip(self.starts, kept.lengths, strict=True)
        views = [x[start + first : start + first + length] for start, length in pieces]
        return views[0] if len(views) == 1 else torch.cat(views)

    def sizes(self, device: torch.device) -> Tensor:
        """Rows of each item: int64 (items,)."""
        return self._cached("sizes", device, lambda: to_device(self.lengths, torch.int64, device))

    def cumulative(self, device: torch.device) -> Tensor:
        """Rows before each item, and of all: int32 (items + 1,)."""
        ends = (*self.starts, self.total)
        return self._cached("cumulative", device, lambda: to_device(ends, torch.int32, device))

    def items(self, device: torch.device) -> Tensor:
        """The item that each row belongs to: int64 (total,)."""

        def make() -> Tensor:
            numbers = torch.arange(len(self), device=device)
            # Without its size, a GPU would have to be asked for it.
            return numbers.repeat_interleave(self.sizes(device), output_size=self.total)

        return self._cached("items", device, make)

    def positions(self, device: torch.device) -> Tensor:
        """The place of each row in its item: int64 (total,)."""

        def make() -> Tensor:
            rows = torch.arange(self.total, device=device)
            return rows if len(self) == 1 else rows - self.cumulative(device)[self.items(device)]

        return self._cached("positions", device, make)

    def _cached(self, name: str, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        if (name, device) not in self._tensors:
            self._tensors[name, device] = make()
        return self._tensors[name, device]


class Slots(Spans):
    """Items of which the host knows no lengths: what is computed for some can be recorded, and run for others.

    Args:
        sizes: rows of each item, int64 (slots,) on the device; 0 for a slot that is empty. The last one takes the rows
            that are left, whatever it says.
        total: rows of all.
    """

    def __init__(self, sizes: Tensor, total: int) -> None:
        used = sizes[:-1]
        self.total = self.longest = total
        self._sizes = torch.cat((used, total - used.sum(0, keepdim=True)))
        self._tensors = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def map(self, function: Callable[[Any], Any]) -> Slots:
        """The same items with other lengths; see `Spans.map`. The last slot takes what they may have had more."""
        return Slots(function(self._sizes).clamp(min=0), _most_in_all(function, self.total, len(self)))

    def cut(self, x: Tensor, first: int, kept: Spans) -> Tensor:
        """As `Spans.cut`."""
        starts = self.cumulative(x.device)[kept.items(x.device)]
        return x[starts + kept.positions(x.device) + first]

    def sizes(self, device: torch.device) -> Tensor:
        """As `Spans.sizes`."""
        return self._sizes

    def cumulative(self, device: torch.device) -> Tensor:
        """As `Spans.cumulative`."""
        return self._cached("cumulative", device, lambda: F.pad(self._sizes.cumsum(0), (1, 0)).to(torch.int32))


def _most_in_all(function: Callable[[int], int], total: int, items: int) -> int:
    """The largest sum of a function of some items' lengths, which are `total` in all.

    What is rounded gains most where all items but one are of one length, and short; for what is not, all are the same.
    """
    short = range(_MOST_ROUNDED)
    sums = []
    for length, other in itertools.product(short, short):
        rest = total - (items - 2) * length - other
        if rest >= 0:
            sums.append(sum(max(0, function(n)) * count for n, count in ((length, items - 2), (other, 1), (rest, 1))))
    return max(sums)


def to_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Some numbers on a device."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    # From pageable memory the copy would wait for all that the device has yet to do.
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=True).to(device, non_blocking=True)


def item_windows(x: Tensor, out: int, kernel: int, stride: int, padding: int) -> Tensor:
    """What each output of a convolution over one item looks at; a view of a padded copy, in the weight's order.

    Args:
        x: (rows, channels).
        out: outputs.
        kernel: rows that an output looks at.
        stride: rows from one output to the next.
        padding: zero rows before the item; there are as many after it as are looked at.

    Returns:
        (out, channels, kernel).
    """
    behind = (out - 1) * stride + kernel - padding - len(x)  # negative where rows are left over
    return F.pad(x, (0, 0, padding, behind)).unfold(0, kernel, stride)


def windows(x: Tensor, spans: Spans, out: Spans, kernel: int, stride: int, padding: int) -> Tensor:
    """What each output of a convolution over packed items looks at, in the weight's order.

    Args:
        x: (spans.total, channels).
        spans: the items of its input.
        out: the same items in its output.
        kernel: as for `item_windows`.
        stride: as for `item_windows`.
        padding: as for `item_windows`.

    Returns:
        (out.total, channels, kernel).
    """
    if len(spans) == 1:
        return item_windows(x, out.total, kernel, stride, padding)
    device = x.device
    item = out.items(device)
    row = (out.positions(device) * stride - padding)[:, None] + torch.arange(kernel, device=device)  # within the item
    inside = (row >= 0) & (row < spans.sizes(device)[item][:, None])
    row = row + spans.cumulative(device)[item][:, None]
    zeros = F.pad(x, (0, 0, 0, 1))
    return zeros[row.masked_fill(~inside, spans.total)].mT


def add_overlapping(out: Tensor, first: int, blocks: Tensor) -> None:
    """Add frames that are longer than the hop between them.

    Args:
        out: (hops, width), added to in place.
        first: the hop that the first frame starts at.
        blocks: (frames, hops of a frame, width).
    """
    frames, hops = blocks.shape[:2]
    for hop in range(hops):
        out[first + hop : first + hop + frames] += blocks[:, hop]


def overlap_add(blocks: Tensor, spans: Spans) -> tuple[Tensor, Spans]:
    """Add each item's frames, which are longer than the hop between them.

    Args:
        blocks: (frames, hops of a frame, width).
        spans: the items' frames.

    Returns:
        The sums (hops, width), and the items' hops: of a frame, less 1, more than their frames.
    """
    hops = blocks.shape[1]
    if hops == 1:
        return blocks.squeeze(1), spans
    out_spans = spans.map(lambda frames: frames + hops - 1)
    out = blocks.new_zeros(out_spans.total, blocks.shape[2])
    if len(spans) > 1:
        # Far enough apart for one pass over all: what an item lacks is added to it as zeros.
        apart = blocks.new_zeros(out_spans.total - hops + 1, *blocks.shape[1:])
        device = blocks.device
        row = torch.arange(spans.total, device=device) + spans.items(device) * (hops - 1)
        blocks = apart.index_copy_(0, row, blocks)
    add_overlapping(out, 0, blocks)
    return out, out_spans


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, a power of 2 long, by adding neighbours: zeros at the end do not change a bit."""
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x.squeeze(-1)

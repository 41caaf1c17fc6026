"""Operations on rows. In tiles of a fixed number of rows, a row's answer has the same bits in every batch.

Which kernel a GPU's library chooses, and with it the order of a sum, depends on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def by_tiles(function: Callable[[Tensor], Tensor], rows: Tensor, tile_rows: int | None) -> Tensor:
    """Apply a function of rows.

    Args:
        function: maps (n, ...) to (n, ...), each row by itself.
        rows: (n, ...).
        tile_rows: rows that it is given at once, the last tile filled up with zeros; None for all there are.
    """
    if tile_rows is None or len(rows) in (0, tile_rows):
        return function(rows.contiguous() if tile_rows else rows)
    answers = []
    for start in range(0, len(rows), tile_rows):
        tile = rows[start : start + tile_rows].contiguous()
        if len(tile) < tile_rows:
            tile = torch.cat((tile, tile.new_zeros(tile_rows - len(tile), *tile.shape[1:])))
        answers.append(function(tile))
    return torch.cat(answers)[: len(rows)]


class RowWise(nn.Module):
    """Base of the modules that work row by row; `tile_rows` is set on all of them at once."""

    tile_rows: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, in) to (rows, out)."""
        return by_tiles(super().forward, x, self.tile_rows)


def set_tile_rows(model: nn.Module, tile_rows: int | None) -> None:
    """Have all modules within `model` work in tiles of so many rows.

    Raises:
        ValueError: `tile_rows` is less than 1.
    """
    if tile_rows is not None and tile_rows < 1:
        raise ValueError(f"tile_rows is {tile_rows}; it must be at least 1")
    for module in model.modules():
        if isinstance(module, RowWise):
            module.tile_rows = tile_rows


class Linear(RowWise, nn.Linear):
    """A linear layer."""

    def columns(self, x: Tensor, first: int, stop: int) -> Tensor:
        """The answer's columns from `first` to `stop`: (rows, in) to (rows, stop - first)."""
        weight, bias = self.weight[first:stop], self.bias[first:stop]
        return by_tiles(lambda tile: nn.functional.linear(tile, weight, bias), x, self.tile_rows)


class RMSNorm(RowWise, nn.RMSNorm):
    """Root mean square norm (arXiv 1910.07467)."""


class Activation(RowWise):
    """A function of each value. On a CPU the last values, which fill no vector, may be rounded otherwise."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, channels) to (rows, channels)."""
        return by_tiles(self.function, x, self.tile_rows)


class Conv1d(RowWise, nn.Conv1d):
    """A convolution as a product of its inputs' windows (packing.windows) with its weight."""

    def forward(self, windows: Tensor) -> Tensor:
        """Map (outputs, in_channels, kernel) to (outputs, out_channels)."""
        weight = self.weight.flatten(1)
        return by_tiles(lambda tile: nn.functional.linear(tile, weight, self.bias), windows.flatten(1), self.tile_rows)

"""Operations on rows. In tiles of a fixed number of rows, a row's answer has the same bits in every batch.

Which kernel a GPU's library chooses, and with it the order of a sum, depends on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Protocol

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


class Activation(RowWise):
    """A function of each value. On a CPU the last values, which fill no vector, may be rounded otherwise.

    Args:
        function: of a tensor of any shape.
        fused: what oneDNN calls it, and the variant of it; None for a function that it does not have.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], fused: tuple[str, str] | None = None) -> None:
        super().__init__()
        self.function = function
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, channels) to (rows, channels)."""
        return by_tiles(self.function, x, self.tile_rows)


class Product(Protocol):
    """A linear layer's weight in a library's own order, with its bias."""

    @property
    def nbytes(self) -> int:
        """What the weight takes."""

    def __call__(self, x: Tensor, activation: Activation | None = None, added: Tensor | None = None) -> Tensor:
        """Map (rows, in) to (rows, out), and that by `activation`, or add it to `added`: no more than one of them."""


class Float32Product:
    """A weight in the order in which oneDNN reads it.

    A library otherwise does that in each call, which takes a tenth of the time of a call of some hundred rows and half
    of it for a few. On the processors that were tried, a packed product's rows do not depend on how many there are.

    Args:
        weight: float32 (out, in).
        bias: (out,).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = bias

    @property
    def nbytes(self) -> int:
        """What the weight takes."""
        return self._weight.numel() * self._weight.element_size()

    def __call__(self, x: Tensor, activation: Activation | None = None, added: Tensor | None = None) -> Tensor:
        """Map (rows, in) to (rows, out), and that by `activation`, or add it to `added`: no more than one of them."""
        out: Tensor
        if len(x) == 1:
            # For a single row oneDNN sums in another order.
            added = added if added is None else torch.cat((added, added))
            return self(torch.cat((x, torch.zeros_like(x))), activation, added)[:1]
        if added is not None:
            out = torch.ops.mkldnn._linear_pointwise.binary(x, added, self._weight, self._bias, "add")
            return out
        fused = activation.fused if activation is not None else None
        name, variant = fused or ("none", "")
        out = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, name, [], variant)
        return out if activation is None or fused is not None else activation(out)


class Linear(RowWise, nn.Linear):
    """A linear layer, whose weight can be replaced by products that libraries compute faster.

    Args:
        in_features: columns of its input.
        out_features: columns of its answer.
        bias: whether it adds one.
        cuts: columns of the answer at which one product ends and the next begins.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, cuts: tuple[int, ...] = ()) -> None:
        super().__init__(in_features, out_features, bias)
        self._parts = tuple(pairwise((0, *cuts, out_features)))
        self._by_part: dict[tuple[int, int], Product] = {}

    def pack(self, make: Callable[[Tensor, Tensor | None], Product] = Float32Product) -> None:
        """Replace the weight by products, one for each part between the cuts.

        Args:
            make: makes one of a part's weight (rows, in) and bias (rows,).
        """
        for first, stop in self._parts:
            self.pack_part(first, self.weight.data[first:stop], make)

    def pack_part(
        self, first: int, weight: Tensor, make: Callable[[Tensor, Tensor | None], Product] = Float32Product
    ) -> None:
        """Make one of the products, of a weight from elsewhere; after the last of them the layer's own is let go of.

        Args:
            first: the cut, or 0, that the part begins at.
            weight: (rows up to the next cut, in).
            make: as for `pack`.
        """
        part = next(part for part in self._parts if part[0] == first)
        bias = None if self.bias is None else self.bias.data[slice(*part)]
        self._by_part[part] = make(weight.to(self.weight.dtype).contiguous(), bias)
        if self.packed:
            self.weight.data = self.weight.data.new_empty(0)

    @property
    def packed(self) -> bool:
        """Whether all of the products are there."""
        return len(self._by_part) == len(self._parts)

    @property
    def _products(self) -> list[Product]:
        """In the order of their columns; none where the weight is still needed."""
        return [self._by_part[part] for part in self._parts] if self.packed else []

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, in) to (rows, out)."""
        if not self.packed:
            return super().forward(x)
        parts = [product(x) for product in self._products]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        """`activation` of the answer: (rows, in) to (rows, out)."""
        if len(products := self._products) == 1:
            return products[0](x, activation)
        answer: Tensor = activation(self(x))
        return answer

    def added_to(self, other: Tensor, x: Tensor) -> Tensor:
        """`other` (rows, out) and the answer for `x` (rows, in), added: (rows, out)."""
        if len(products := self._products) == 1:
            return products[0](x, added=other)
        answer: Tensor = other + self(x)
        return answer

    def columns(self, x: Tensor, first: int, stop: int) -> Tensor:
        """The answer's columns from a cut (or 0) to the next (or the end): (rows, in) to (rows, stop - first)."""
        if self.packed:
            return self._by_part[first, stop](x)
        weight, bias = self.weight[first:stop], self.bias[first:stop]
        return by_tiles(lambda tile: nn.functional.linear(tile, weight, bias), x, self.tile_rows)

    def flops(self, rows: int) -> float:
        """Floating-point operations of the product."""
        return 2.0 * rows * self.in_features * self.out_features

    @property
    def packed_bytes(self) -> int:
        """What the products' weights take."""
        return sum(product.nbytes for product in self._products)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this PyTorch, on this processor, has packed products."""
    return device.type == "cpu" and dtype == torch.float32 and _products_work()


@cache
def _products_work() -> bool:
    """Try one: what the operators are called, and what they take, is not promised by anyone."""
    with torch.device("cpu"), torch.inference_mode():
        layer = Linear(32, 8)
        x = torch.arange(96.0).view(3, 32) / 32
        activation = Activation(nn.functional.gelu, ("gelu", "none"))

        def answer() -> Tensor:
            return torch.cat((layer(x), layer.activated(x, activation), layer.added_to(x[:, :8], x)))

        expected = answer()
        try:
            layer.pack()
            return torch.allclose(answer(), expected, rtol=1e-4, atol=1e-5)
        except (AttributeError, NotImplementedError, RuntimeError, TypeError):
            return False


def linear_layers(model: nn.Module) -> list[Linear]:
    """All within `model`."""
    return [module for module in model.modules() if isinstance(module, Linear)]


def pack(model: nn.Module, make: Callable[[Tensor, Tensor | None], Product] = Float32Product) -> None:
    """Pack the linear layers within `model` that are not yet, one by one: there is never more than one weight twice."""
    for layer in linear_layers(model):
        if not layer.packed:
            layer.pack(make)


class RMSNorm(RowWise, nn.RMSNorm):
    """Root mean square norm (arXiv 1910.07467)."""


class Conv1d(RowWise, nn.Conv1d):
    """A convolution as a product of its inputs' windows (packing.windows) with its weight."""

    def forward(self, windows: Tensor) -> Tensor:
        """Map (outputs, in_channels, kernel) to (outputs, out_channels)."""
        weight = self.weight.flatten(1)
        return by_tiles(lambda tile: nn.functional.linear(tile, weight, self.bias), windows.flatten(1), self.tile_rows)

"""The residual vector quantizer (SoundStream, arXiv 2107.03312, algorithm 1); always float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .packing import Spans, to_device
from .rows import RowWise, by_tiles


class ResidualVectorQuantizer(RowWise):
    """Codebooks that each quantize what the ones before left over.

    Args:
        sizes: entries of each codebook.
        dim: length of an entry.
    """

    def __init__(self, sizes: tuple[int, ...], dim: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.dim = dim
        self.codebooks = nn.ParameterList(
            nn.Parameter(torch.empty(size, dim, dtype=torch.float32), requires_grad=False) for size in sizes
        )

    def encode(self, x: Tensor, num_quantizers: int) -> Tensor:
        """Nearest entries by Euclidean distance, the first of equals.

        Args:
            x: (frames, dim), float32; each frame by itself.
            num_quantizers: codebooks to use, counted from the first.

        Returns:
            int64 (num_quantizers, frames).
        """

        def quantize(residual: Tensor) -> Tensor:
            codes = []
            for book in self.codebooks[:num_quantizers]:
                # The squared distance, |x|^2 - 2 x.e + |e|^2, in this order: where two entries are as near as float32
                # can tell, the order of the roundings decides, and this is the order the published codes were made
                # with.
                distance = residual.square().sum(1, keepdim=True) - 2 * residual @ book.T + book.T.square().sum(0)
                nearest = distance.argmin(dim=-1)
                codes.append(nearest)
                residual = residual - book[nearest]
            return torch.stack(codes, dim=1)

        return by_tiles(quantize, x, self.tile_rows).T.contiguous()

    def decode(self, codes: Tensor, spans: Spans | None = None, books: Sequence[int] | Tensor | None = None) -> Tensor:
        """Sum of the codes' entries.

        Args:
            codes: integers (num_quantizers, frames), each within its codebook; fewer rows than codebooks are fine.
            spans: the items' frames; needed with `books`.
            books: codebooks that each item uses, counted from the first, numbers or int64 (items,) on the device; its
                codes for the others are ignored. None for all the rows given.

        Returns:
            float32 (frames, dim).
        """
        out: Tensor = self.codebooks[0][codes[0]]
        least = len(codes)
        device = codes.device
        if isinstance(books, Tensor):
            least = 1
        elif books is not None and min(books) < least:
            least = min(books)
            books = to_device(books, torch.int64, device)
        if spans is not None and isinstance(books, Tensor):
            used = books[spans.items(device)].unsqueeze(1)
        for number in range(1, len(codes)):
            added = out + self.codebooks[number][codes[number]]
            # An item that does not use the codebook keeps its very bits.
            out = added if number < least else torch.where(used > number, added, out)
        return out

    def encode_flops(self, num_quantizers: int) -> float:
        """Floating-point operations of one frame, with the first codebooks."""
        return 2.0 * self.dim * sum(self.sizes[:num_quantizers])

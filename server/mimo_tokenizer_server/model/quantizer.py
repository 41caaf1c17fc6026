"""The residual vector quantizer (SoundStream, arXiv 2107.03312, algorithm 1); always float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ResidualVectorQuantizer(nn.Module):
    """Codebooks that each quantize what the ones before left over.

    Args:
        sizes: entries of each codebook.
        dim: length of an entry.
    """

    def __init__(self, sizes: tuple[int, ...], dim: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.codebooks = nn.ParameterList(
            nn.Parameter(torch.empty(size, dim, dtype=torch.float32), requires_grad=False) for size in sizes
        )

    def encode(self, x: Tensor, num_quantizers: int) -> Tensor:
        """Nearest entries by Euclidean distance, the first of equals.

        Args:
            x: (frames, dim), float32.
            num_quantizers: codebooks to use, counted from the first.

        Returns:
            int64 (num_quantizers, frames).
        """
        residual = x
        codes = []
        for book in self.codebooks[:num_quantizers]:
            # The squared distance, |x|^2 - 2 x.e + |e|^2, in this order: where two entries are as near as float32
            # can tell, the order of the roundings decides, and this is the order the published codes were made with.
            distance = residual.square().sum(1, keepdim=True) - 2 * residual @ book.T + book.T.square().sum(0)
            nearest = distance.argmin(dim=-1)
            codes.append(nearest)
            residual = residual - book[nearest]
        return torch.stack(codes)

    def decode(self, codes: Tensor) -> Tensor:
        """Sum of the codes' entries.

        Args:
            codes: integers (num_quantizers, frames), each within its codebook; fewer rows than codebooks are fine.

        Returns:
            float32 (frames, dim).
        """
        out: Tensor = self.codebooks[0][codes[0]]
        for book, row in zip(self.codebooks[1 : len(codes)], codes[1:], strict=True):
            out = out + book[row]
        return out

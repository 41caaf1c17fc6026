"""The residual vector quantizer against a search in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import tiny_tokenizer
from torch import Tensor

from mimo_tokenizer_server.model.packing import Spans
from mimo_tokenizer_server.model.quantizer import ResidualVectorQuantizer


def _quantizer(sizes: tuple[int, ...], dim: int, seed: int = 0) -> ResidualVectorQuantizer:
    quantizer = ResidualVectorQuantizer(sizes, dim)
    generator = torch.Generator().manual_seed(seed)
    for book in quantizer.codebooks:
        book.data.normal_(generator=generator)
    return quantizer


def _features(frames: int, dim: int, seed: int) -> Tensor:
    return torch.randn(frames, dim, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    dim=st.integers(1, 12),
    frames=st.integers(0, 30),
    seed=st.integers(0, 1000),
)
def test_nearest_entries(sizes: list[int], dim: int, frames: int, seed: int) -> None:
    quantizer = _quantizer(tuple(sizes), dim, seed)
    x = _features(frames, dim, seed + 1)
    codes = quantizer.encode(x, len(sizes))
    assert codes.shape == (len(sizes), frames)
    assert codes.dtype == torch.int64
    residual = x
    for book, row in zip(quantizer.codebooks, codes, strict=True):
        distances = (residual.double()[:, None] - book.double()).square().sum(-1)
        chosen = distances.gather(1, row[:, None])[:, 0]
        # As near as the nearest, or a tie to float32.
        scale = residual.double().square().sum(1) + book[row].double().square().sum(1)
        assert (chosen - distances.min(1).values <= 4 * torch.finfo(torch.float32).eps * scale).all()
        residual = residual - book[row]
    torch.testing.assert_close(quantizer.decode(codes), x - residual, rtol=1e-4, atol=1e-5)


def test_the_first_of_equals() -> None:
    quantizer = _quantizer((8, 8), 4)
    quantizer.codebooks[0].data[5] = quantizer.codebooks[0].data[2]
    quantizer.codebooks[0].data[7] = quantizer.codebooks[0].data[2]
    quantizer.codebooks[1].data[:] = 1.0
    codes = quantizer.encode(quantizer.codebooks[0].data[[7, 5, 2, 3]], 2)
    assert codes.tolist() == [[2, 2, 2, 3], [0, 0, 0, 0]]


def test_fewer_codebooks_give_the_first_rows() -> None:
    quantizer = _quantizer((30, 20, 10, 10), 6)
    x = _features(100, 6, 1)
    codes = quantizer.encode(x, 4)
    for rows in (1, 2, 3):
        assert torch.equal(quantizer.encode(x, rows), codes[:rows])


def test_fewer_rows_are_the_first_codebooks() -> None:
    quantizer = _quantizer((30, 20, 10), 6)
    codes = torch.tensor([[29, 3], [19, 0], [9, 1]])
    books = quantizer.codebooks
    assert torch.equal(quantizer.decode(codes[:1]), books[0][[29, 3]])
    assert torch.equal(quantizer.decode(codes[:2]), books[0][[29, 3]] + books[1][[19, 0]])
    assert torch.equal(quantizer.decode(codes), books[0][[29, 3]] + books[1][[19, 0]] + books[2][[9, 1]])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_codes_of_any_integer_type(dtype: torch.dtype) -> None:
    quantizer = _quantizer((30, 20), 6)
    codes = torch.tensor([[29, 3, 0], [19, 0, 7]])
    assert torch.equal(quantizer.decode(codes.to(dtype)), quantizer.decode(codes))


def test_a_frame_does_not_depend_on_the_others() -> None:
    quantizer = _quantizer((200, 100), 16)
    x = _features(64, 16, 3)
    codes = quantizer.encode(x, 2)
    for frame in (0, 17, 63):
        assert torch.equal(quantizer.encode(x[frame : frame + 1], 2)[:, 0], codes[:, frame])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float32_whatever_the_model_is(dtype: torch.dtype) -> None:
    tokenizer = tiny_tokenizer(dtype)
    codes = torch.stack([torch.arange(16) % size for size in tokenizer.config.codebook_sizes])
    assert all(book.dtype == torch.float32 for book in tokenizer.encoder.quantizer.codebooks)
    spans = Spans([16])
    assert torch.equal(tokenizer.decode_vq(codes, spans), tiny_tokenizer().decode_vq(codes, spans))
    assert tokenizer.decode_vq(codes, spans).dtype == torch.float32


@settings(deadline=None, max_examples=40)
@given(
    items=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=5), seed=st.integers(0, 1000)
)
def test_items_that_use_fewer_codebooks(items: list[tuple[int, int]], seed: int) -> None:
    """Bit for bit what the item's own rows give alone, whatever stands in the rest of them and beside it."""
    quantizer = _quantizer((30, 20, 10, 10), 6, seed)
    for book in quantizer.codebooks:
        book.data[0] = -0.0  # adding a zero to it would change its sign
        book.data[1:].mul_(torch.rand(6, generator=torch.Generator().manual_seed(seed)).round())
    spans, books = Spans([frames for frames, _ in items]), [rows for _, rows in items]
    generator = torch.Generator().manual_seed(seed)
    codes = torch.stack([torch.randint(size, (spans.total,), generator=generator) for size in quantizer.sizes])
    codes = codes[: max(books)] * torch.randint(2, codes[: max(books)].shape, generator=generator)
    together = spans.split(quantizer.decode(codes, spans, books))
    for got, start, frames, rows in zip(together, spans.starts, spans.lengths, books, strict=True):
        alone = quantizer.decode(codes[:rows, start : start + frames])
        assert torch.equal(got, alone)
        assert torch.equal(got.signbit(), alone.signbit())


def test_tiles_give_the_same_codes() -> None:
    quantizer = _quantizer((30, 20, 10), 6)
    x = _features(50, 6, 1)
    codes = quantizer.encode(x, 3)
    for rows in (1, 7, 50, 64):
        quantizer.tile_rows = rows
        assert torch.equal(quantizer.encode(x, 3), codes)

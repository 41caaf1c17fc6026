"""Packed sequences, and the operations that stay within an item, each against a plain computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import CPU
from torch import nn

from mimo_tokenizer_server.model.packing import Slots, Spans, item_windows, overlap_add, tree_sum, windows
from mimo_tokenizer_server.model.rows import (
    Activation,
    Conv1d,
    Float32Product,
    Linear,
    RMSNorm,
    _products_work,
    by_tiles,
    can_pack,
    pack,
    set_tile_rows,
)
from mimo_tokenizer_server.model.transformer import _ACTIVATIONS

_SLOTS = 9

_LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=6)


@given(lengths=_LENGTHS)
def test_spans(lengths: list[int]) -> None:
    spans = Spans(lengths)
    assert spans.lengths == tuple(lengths)
    assert len(spans) == len(lengths)
    assert spans.total == sum(lengths)
    assert spans.starts == tuple(sum(lengths[:item]) for item in range(len(lengths)))
    assert spans.sizes(CPU).tolist() == lengths
    assert spans.cumulative(CPU).tolist() == [*spans.starts, spans.total]
    assert spans.cumulative(CPU).dtype == torch.int32
    assert spans.items(CPU).tolist() == [item for item, length in enumerate(lengths) for _ in range(length)]
    assert spans.positions(CPU).tolist() == [row for length in lengths for row in range(length)]
    assert spans.scaled(3).lengths == tuple(3 * length for length in lengths)
    assert spans.map(lambda length: length + 1).total == spans.total + len(lengths)


@given(lengths=_LENGTHS)
def test_items_are_views(lengths: list[int]) -> None:
    spans = Spans(lengths)
    x = torch.arange(spans.total)
    items = spans.split(x)
    assert torch.equal(torch.cat(items), x)
    assert [len(item) for item in items] == lengths
    assert all(item.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for item in items)


def test_tensors_are_made_once() -> None:
    spans = Spans([2, 3])
    for name in ("sizes", "cumulative", "items", "positions"):
        assert getattr(spans, name)(CPU) is getattr(spans, name)(CPU)
        assert getattr(spans, name)(torch.device("meta")).device.type == "meta"


@pytest.mark.parametrize("lengths", [[], [0], [3, 0, 1], [2, -1]])
def test_items_without_rows_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="cannot be packed"):
        Spans(lengths)


@given(lengths=_LENGTHS, data=st.data())
def test_cut(lengths: list[int], data: st.DataObject) -> None:
    spans = Spans(lengths)
    first = data.draw(st.integers(0, min(lengths) - 1))
    kept = Spans([data.draw(st.integers(1, length - first)) for length in lengths])
    x = torch.arange(spans.total)
    expected = [item[first : first + length] for item, length in zip(spans.split(x), kept.lengths, strict=True)]
    assert torch.equal(spans.cut(x, first, kept), torch.cat(expected))


@settings(deadline=None)
@given(
    lengths=_LENGTHS,
    kernel=st.integers(1, 5),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    seed=st.integers(0, 100),
)
def test_windows_are_a_convolution_of_each_item(
    lengths: list[int], kernel: int, stride: int, padding: int, seed: int
) -> None:
    lengths = [max(length, kernel - 2 * padding) for length in lengths]
    torch.manual_seed(seed)
    conv = Conv1d(3, 4, kernel, stride, padding).requires_grad_(False)
    spans = Spans(lengths)
    out = spans.map(lambda length: (length + 2 * padding - kernel) // stride + 1)
    items = [torch.randn(length, 3) for length in lengths]
    got = out.split(conv(windows(torch.cat(items), spans, out, kernel, stride, padding)))
    for x, part, length in zip(items, got, out.lengths, strict=True):
        expected = F.conv1d(x.T[None], conv.weight, conv.bias, stride, padding)[0].T
        torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(
            conv(item_windows(x, length, kernel, stride, padding)),
            conv(windows(x, Spans([len(x)]), Spans([length]), kernel, stride, padding)),
        )


def test_windows_are_filled_with_zeros_behind() -> None:
    x = torch.arange(1.0, 8)[:, None]
    spans = Spans([4, 3])
    got = windows(x, spans, Spans([2, 1]), 3, 3, 0)
    assert got.squeeze(1).tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 7]]
    assert item_windows(x[:4], 2, 3, 3, 0).squeeze(1).tolist() == [[1, 2, 3], [4, 0, 0]]


@given(lengths=_LENGTHS, hops=st.integers(1, 4), width=st.integers(1, 3))
def test_overlap_add(lengths: list[int], hops: int, width: int) -> None:
    spans = Spans(lengths)
    blocks = torch.arange(spans.total * hops * width).view(spans.total, hops, width) + 1
    got, out = overlap_add(blocks, spans)
    assert out.lengths == tuple(length + hops - 1 for length in lengths)
    for item, part in zip(spans.split(blocks), out.split(got), strict=True):
        expected = torch.zeros(len(item) + hops - 1, width, dtype=torch.int64)
        for frame in range(len(item)):
            expected[frame : frame + hops] += item[frame]
        assert torch.equal(part, expected)


@given(length=st.integers(1, 50), more=st.integers(0, 2))
def test_zeros_behind_a_sum_do_not_change_a_bit(length: int, more: int) -> None:
    x = torch.randn(length, generator=torch.Generator().manual_seed(length))
    size = 1 << (length - 1).bit_length()
    padded = F.pad(x, (0, size - length))
    assert torch.equal(tree_sum(F.pad(padded, (0, size * ((1 << more) - 1)))), tree_sum(padded))
    torch.testing.assert_close(tree_sum(padded), x.sum())


@given(rows=st.integers(0, 30), tile_rows=st.integers(1, 40))
def test_tiles_all_have_one_shape(rows: int, tile_rows: int) -> None:
    seen = []

    def double(tile: torch.Tensor) -> torch.Tensor:
        seen.append(tile.shape)
        return 2 * tile

    x = torch.randn(rows, 3)
    assert torch.equal(by_tiles(double, x, tile_rows), 2 * x)
    assert not rows or set(seen) == {(tile_rows, 3)}
    assert len(seen) == max(1, -(-rows // tile_rows))


def test_all_row_wise_modules_get_their_tiles() -> None:
    model = nn.Sequential(Linear(4, 4), nn.Sequential(RMSNorm(4), Linear(4, 2))).requires_grad_(False)
    x = torch.randn(10, 4)
    expected = model(x)
    set_tile_rows(model, 3)
    assert [module.tile_rows for module in (model[0], model[1][0], model[1][1])] == [3, 3, 3]
    torch.testing.assert_close(model(x), expected)
    set_tile_rows(model, None)
    assert torch.equal(model(x), expected)
    with pytest.raises(ValueError, match="tile_rows is 0"):
        set_tile_rows(model, 0)


def test_columns_of_a_linear_layer() -> None:
    layer = Linear(4, 9).requires_grad_(False)
    x = torch.randn(10, 4)
    for tile_rows in (None, 4):
        layer.tile_rows = tile_rows
        torch.testing.assert_close(layer.columns(x, 2, 7), layer(x)[:, 2:7])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 17, 64])
def test_a_packed_layer_answers_as_before(rows: int, bias: bool) -> None:
    assert can_pack(torch.device("cpu"), torch.float32)
    layer = Linear(40, 96, bias, cuts=(32, 64)).requires_grad_(False)
    x = torch.randn(rows, 40)
    expected = layer(x)
    pack(layer)
    assert layer.weight.numel() == 0
    assert layer.packed_bytes >= 40 * 96 * 4
    torch.testing.assert_close(layer(x), expected)
    for first, stop in ((0, 32), (32, 64), (64, 96)):
        torch.testing.assert_close(layer.columns(x, first, stop), expected[:, first:stop])
    with pytest.raises(KeyError):
        layer.columns(x, 0, 40)


@pytest.mark.parametrize("name", sorted(_ACTIVATIONS))
def test_an_activation_within_a_packed_product(name: str) -> None:
    activation = Activation(*_ACTIVATIONS[name])
    layer = Linear(40, 96).requires_grad_(False)
    x = 3 * torch.randn(9, 40)
    expected = activation(layer(x))
    torch.testing.assert_close(layer.activated(x, activation), expected)
    pack(layer)
    torch.testing.assert_close(layer.activated(x, activation), expected)
    torch.testing.assert_close(layer.activated(x, Activation(activation.function)), expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_a_packed_product_added_to_something(rows: int, bias: bool) -> None:
    layer = Linear(40, 96, bias=bias).requires_grad_(False)
    x, other = torch.randn(rows, 40), torch.randn(rows, 96)
    before = other.clone()
    expected = other + layer(x)
    assert torch.equal(layer.added_to(other, x), expected)
    pack(layer)
    torch.testing.assert_close(layer.added_to(other, x), expected)
    assert torch.equal(other, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_only_float32_on_the_cpu_is_packed(dtype: torch.dtype) -> None:
    assert not can_pack(torch.device("cpu"), dtype)
    assert not can_pack(torch.device("cuda"), torch.float32)


@pytest.mark.parametrize(
    ("method", "stand_in"),
    [
        ("__init__", lambda self, weight, bias: torch.ops.mkldnn.no_such_operator(weight)),
        ("__call__", lambda self, x, activation=None, added=None: torch.zeros(len(x), 8)),
    ],
    ids=["no operator", "wrong answers"],
)
def test_a_pytorch_without_packed_products_does_without(
    monkeypatch: pytest.MonkeyPatch, method: str, stand_in: Callable[..., Any]
) -> None:
    assert _products_work.__wrapped__()
    monkeypatch.setattr(Float32Product, method, stand_in)
    assert not _products_work.__wrapped__()


@given(lengths=_LENGTHS, left=st.integers(0, 20), data=st.data())
def test_slots_are_spans(lengths: list[int], left: int, data: st.DataObject) -> None:
    """In all that is asked of them, but for what the host does not know: where there are more slots than items."""
    sizes = torch.tensor(lengths + [0] * (_SLOTS - len(lengths)))
    slots, spans = Slots(sizes, sum(lengths) + left), Spans(lengths)
    kernel, stride = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 6))
    functions: list[Callable[[Any], Any]] = [
        lambda length: length * stride,
        lambda length: length + kernel - 1,
        lambda length: (length - 1) * stride + stride + kernel,
    ]
    for function in functions:
        mapped, expected = slots.map(function), spans.map(function)
        rest = _SLOTS - len(lengths)
        # What multiplies and adds leaves as much to the last slot as it would have by itself.
        assert mapped.total == expected.total + (rest - 1) * function(0) + function(left)
        assert torch.equal(mapped.sizes(CPU)[: len(lengths)], expected.sizes(CPU))
        assert torch.equal(mapped.cumulative(CPU)[: len(lengths) + 1], expected.cumulative(CPU))
        assert torch.equal(mapped.items(CPU)[: expected.total], expected.items(CPU))
        assert torch.equal(mapped.positions(CPU)[: expected.total], expected.positions(CPU))
        assert len(mapped.items(CPU)) == mapped.total
        x = torch.arange(mapped.total)
        assert torch.equal(mapped.cut(x, 0, slots)[: spans.total], expected.cut(x[: expected.total], 0, spans))


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=_SLOTS - 1), left=st.integers(0, 40), data=st.data())
def test_slots_have_room_for_every_rounding(lengths: list[int], left: int, data: st.DataObject) -> None:
    kernel, stride = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 6))
    sizes = torch.tensor(lengths + [0] * (_SLOTS - len(lengths)))
    slots = Slots(sizes, sum(lengths) + left)
    for function in (lambda n: (n + 2 - kernel) // stride + 1, lambda n: -(-n // stride)):
        mapped = slots.map(function).sizes(CPU)
        assert mapped.min() >= 0
        assert torch.equal(mapped[: len(lengths)], torch.tensor([max(0, function(n)) for n in lengths]))

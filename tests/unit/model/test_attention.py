"""Attention plans against dense masks, and the memory they take; rotary positions."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import CPU, Watch
from torch import Tensor

from mimo_tokenizer_server.model import attention, transformer
from mimo_tokenizer_server.model.attention import AttentionPlan, Reach, attend_piece, rope_table, rotate
from mimo_tokenizer_server.model.packing import Spans
from mimo_tokenizer_server.model.transformer import Transformer

_HEADS, _HEAD_DIM = 2, 8


def _random_qkv(length: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, length, _HEADS, _HEAD_DIM, generator=generator).to(dtype)
    return q, k, v


def _dense(q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], causal: bool) -> Tensor:
    """Softmax attention in float64 under a full mask, made from the definition."""
    left, right = window
    length = len(q)
    query, key = torch.arange(length)[:, None], torch.arange(length)
    seen = torch.ones(length, length, dtype=torch.bool)
    if left >= 0:
        seen &= key >= query - left
    if right >= 0:
        seen &= key <= query + right
    if causal:
        seen &= key <= query
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) / _HEAD_DIM**0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.double())


def _plan(
    lengths: list[int], window: tuple[int, int], causal: bool, dtype: torch.dtype = torch.float32, **options: bool
) -> AttentionPlan:
    return AttentionPlan(Spans(lengths), window, causal, _HEAD_DIM, CPU, dtype, **options)


def _check(length: int, window: tuple[int, int], causal: bool) -> None:
    q, k, v = _random_qkv(length, seed=length)
    got = _plan([length], window, causal).attend(q, k, v)
    assert got.shape == q.shape
    torch.testing.assert_close(got.double(), _dense(q, k, v, window, causal), rtol=1e-5, atol=1e-5)


_BOUND = st.integers(-1, 70) | st.integers(200, 300) | st.integers(500, 900)


@settings(deadline=None, max_examples=80)
@given(
    length=st.integers(1, 140) | st.integers(500, 800),
    window=st.tuples(_BOUND, _BOUND),
    causal=st.booleans(),
)
def test_plan_is_the_dense_mask(length: int, window: tuple[int, int], causal: bool) -> None:
    _check(length, window, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "window", [(-1, -1), (-1, 0), (0, -1), (0, 0), (1, 0), (0, 1), (40, 10), (128, 128), (128, 129), (256, 0), (257, 0)]
)
@pytest.mark.parametrize("length", [1, 2, 3, 11, 63, 64, 65, 128, 129, 511, 512, 513, 1025])
def test_plan_at_the_edges_of_blocks(length: int, window: tuple[int, int], causal: bool) -> None:
    _check(length, window, causal)


@settings(deadline=None, max_examples=40)
@given(length=st.integers(1, 60), past=st.integers(0, 3), causal=st.booleans())
def test_windows_about_as_long_as_the_sequence(length: int, past: int, causal: bool) -> None:
    for bound in {max(0, length - 2 + past), length}:
        for window in ((bound, 0), (0, bound), (bound, bound), (bound, -1), (-1, bound)):
            _check(length, window, causal)


_LENGTHS = st.lists(st.integers(1, 90) | st.integers(500, 700), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60)
@given(lengths=_LENGTHS, window=st.tuples(_BOUND, _BOUND), causal=st.booleans(), one_by_one=st.booleans())
def test_packed_items_see_themselves_alone(
    lengths: list[int], window: tuple[int, int], causal: bool, one_by_one: bool
) -> None:
    q, k, v = _random_qkv(sum(lengths), seed=len(lengths))
    got = _plan(lengths, window, causal, one_by_one=one_by_one).attend(q, k, v).split(lengths)
    items = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    for part, item in zip(got, items, strict=True):
        torch.testing.assert_close(part.double(), _dense(*item, window, causal), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [(-1, -1), (4, 1), (0, 0), (100, 20), (300, 20), (-1, 5)])
def test_what_other_items_hold_changes_no_bit(window: tuple[int, int]) -> None:
    lengths = [40, 40, 1, 700, 40]
    q, k, v = _random_qkv(sum(lengths), seed=0)
    plan = _plan(lengths, window, False)
    before = plan.attend(q, k, v).split(lengths)
    for x in (q, k, v):
        for item in (0, 2, 4):
            x.split(lengths)[item].mul_(1e6)
    after = plan.attend(q, k, v).split(lengths)
    assert torch.equal(after[1], before[1])
    assert torch.equal(after[3], before[3])
    assert not torch.equal(after[0], before[0])


def test_items_of_one_length_are_one_call() -> None:
    q, k, v = _random_qkv(100, seed=0)
    with Watch() as watch:
        _plan([20, 20, 20, 30, 10], (-1, -1), True).attend(q, k, v)
    assert sum(count for name, count in watch.calls.items() if "scaled_dot" in name) == 3
    with Watch() as watch:
        _plan([20, 20, 20, 30, 10], (4, 1), False).attend(q, k, v)
    assert sum(count for name, count in watch.calls.items() if "scaled_dot" in name) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("logsumexp", [True, False], ids=["in two parts", "with a mask"])
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 900), (1, 2), (300, 900), (899, 900)])
def test_causal_pieces(
    start: int, stop: int, logsumexp: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a CPU computes them, and as any device does whose attention gives no logsumexps."""
    assert attention._has_logsumexp(CPU)
    monkeypatch.setattr(attention, "_has_logsumexp", lambda device: logsumexp)
    length = 900
    reach = Reach(length, (-1, -1), True)
    assert attention.needs_mask(reach, _HEAD_DIM, CPU, dtype) is not logsumexp
    q, k, v = _random_qkv(length, seed=5, dtype=dtype)
    got = attend_piece(q[start:stop], k, v, start, reach)
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    expected = _dense(q, k, v, (-1, -1), True)[start:stop]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(1, 140) | st.integers(500, 700),
    window=st.tuples(_BOUND, _BOUND),
    causal=st.booleans(),
    data=st.data(),
)
def test_a_piece_is_those_rows_of_the_whole(
    length: int, window: tuple[int, int], causal: bool, data: st.DataObject
) -> None:
    """And reads no key that it does not see: they hold no numbers."""
    start = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(start + 1, length))
    reach = Reach(length, window, causal)
    q, k, v = _random_qkv(length, seed=length)
    expected = _dense(q, k, v, window, causal)[start:stop]
    low, high = reach.keys(start, stop)
    for x in (k, v):
        x[:low] = torch.nan
        x[high:] = torch.nan
    got = attend_piece(q[start:stop], k, v, start, reach)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@given(length=st.integers(1, 60), window=st.tuples(st.integers(-1, 70), st.integers(-1, 70)), causal=st.booleans())
def test_what_is_seen_is_counted(length: int, window: tuple[int, int], causal: bool) -> None:
    row = torch.arange(length)
    offset = row - row[:, None]
    seen = torch.ones(length, length, dtype=torch.bool)
    if window[0] >= 0:
        seen &= offset >= -window[0]
    if causal or window[1] >= 0:
        seen &= offset <= (0 if causal else window[1])
    reach = Reach(length, window, causal)
    for start in range(0, length, 7):
        for stop in range(start + 1, length + 1, 5):
            assert reach.seen(start, stop) == seen[start:stop].sum()
            columns = seen[start:stop].any(0).nonzero()
            assert reach.keys(start, stop) == (columns.min(), columns.max() + 1)


@pytest.mark.parametrize("window", [(40, 10), (300, 20), (-1, 5), (-1, -1)])
def test_bfloat16_is_finite_and_near(window: tuple[int, int]) -> None:
    q, k, v = _random_qkv(700, seed=1, dtype=torch.bfloat16)
    got = _plan([700], window, False, torch.bfloat16).attend(q, k, v)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), _dense(q, k, v, window, False), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("window", [(40, 10), (300, 20), (-1, 5), (-1, -1)])
def test_what_is_out_of_sight_does_not_matter(window: tuple[int, int]) -> None:
    """Not even infinities and NaN, in rows whose only readers see them."""
    length, right = 1300, window[1]
    if right < 0:
        right = 0
    plan = _plan([length], window, right == 0)
    q, k, v = _random_qkv(length, seed=2)
    before = plan.attend(q, k, v)
    k[900:] = 1e6
    v[900:] = -1e6
    after = plan.attend(q, k, v)
    torch.testing.assert_close(after[: 900 - right], before[: 900 - right], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(after[900:], before[900:])


@pytest.mark.parametrize(
    ("window", "causal", "elements_per_row"),
    [
        ((-1, -1), False, 1),
        ((-1, -1), True, 1),
        ((40, 10), False, 3),
        ((0, 0), False, 3),
        ((128, 128), False, 3),
        ((300, 20), False, 1),
        ((600, 0), True, 1),
    ],
)
def test_nothing_of_length_by_length(window: tuple[int, int], causal: bool, elements_per_row: int) -> None:
    """Of 20,000 rows, no tensor is much larger than the queries, or than a few hundred keys a row."""
    length = 20_000
    q, k, v = (x[:, :1] for x in _random_qkv(length, seed=3))
    with Watch() as watch:
        _plan([length], window, causal).attend(q, k, v)
    assert watch.calls
    allowed = max(length * _HEADS * _HEAD_DIM * 3, length * 256 * elements_per_row)
    assert watch.largest <= allowed, watch.largest_from
    assert watch.largest < length * length // 20


def test_a_window_open_to_one_side_takes_one_block_of_rows() -> None:
    length = 8_000
    q, k, v = (x[:, :1] for x in _random_qkv(length, seed=4))
    with Watch() as watch:
        _plan([length], (-1, 10), False).attend(q, k, v)
    assert watch.largest <= 512 * length, watch.largest_from


def _transformer(depth: int, window: tuple[int, int]) -> Transformer:
    torch.manual_seed(0)
    return Transformer(
        16, 2, 24, depth, activation="gelu", norm="LayerNorm", window=window, causal=False, rope_theta=10000.0
    ).requires_grad_(False)


@pytest.mark.parametrize("window", [(4, 1), (300, 20), (-1, -1)])
def test_one_plan_serves_all_layers(window: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[AttentionPlan] = []

    class Counted(AttentionPlan):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(transformer, "AttentionPlan", Counted)
    stack = _transformer(6, window)
    stack.run_layers(torch.randn(700, 16), Spans([700]))
    assert len(made) == 1


def test_the_mask_of_a_small_window_is_not_made_again_in_each_layer() -> None:
    calls = []
    for depth in (1, 6):
        with Watch() as watch:
            _transformer(depth, (4, 1)).run_layers(torch.randn(700, 16), Spans([700]))
        calls.append({name: watch.calls[name] for name in ("arange", "ge", "le", "bitwise_and", "cos", "sin")})
    assert calls[0]["ge"] > 0
    assert calls[0] == calls[1]


def test_the_constants_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = _random_qkv(900, seed=5)
    band = _plan([900], (100, 50), False).attend(q, k, v)
    monkeypatch.setattr(attention, "_WIDEST_BAND", 0)
    rows = _plan([900], (100, 50), False).attend(q, k, v)
    monkeypatch.setattr(attention, "_ROWS", 37)
    shorter_rows = _plan([900], (100, 50), False).attend(q, k, v)
    torch.testing.assert_close(band, rows, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(shorter_rows, rows, rtol=1e-5, atol=1e-5)


def test_rope_table() -> None:
    table = rope_table(torch.arange(50), 6, 500.0, torch.float32)
    assert table.shape == (2, 50, 1, 6)
    for pair in range(3):
        angle = torch.arange(50).double() * 500.0 ** (-2 * pair / 6)
        for column, sign in ((pair, -1), (pair + 3, 1)):
            torch.testing.assert_close(table[0, :, 0, column].double(), angle.cos(), rtol=0, atol=5e-6)
            torch.testing.assert_close(table[1, :, 0, column].double(), sign * angle.sin(), rtol=0, atol=5e-6)


def test_rope_table_is_rounded_at_the_end() -> None:
    full = rope_table(torch.arange(3000), 64, 10000.0, torch.float32)
    assert torch.equal(rope_table(torch.arange(3000), 64, 10000.0, torch.bfloat16), full.to(torch.bfloat16))


def test_rotation_turns_pairs_half_a_head_apart() -> None:
    x = torch.randn(40, 2, 6, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, rope_table(torch.arange(40), 6, 500.0, torch.float32))
    angle = torch.arange(40).double()[:, None] * 500.0 ** (-2 * torch.arange(3).double() / 6)
    expected = torch.complex(x[..., :3].double(), x[..., 3:].double()) * torch.exp(1j * angle)[:, None]
    torch.testing.assert_close(turned.double(), torch.cat((expected.real, expected.imag), -1), rtol=0, atol=3e-5)


def test_rotation_keeps_length_and_leaves_the_first_position() -> None:
    x = torch.randn(100, 3, 16)
    turned = rotate(x, rope_table(torch.arange(100), 16, 10000.0, torch.float32))
    assert torch.equal(turned[0], x[0])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


@settings(deadline=None, max_examples=40)
@given(query=st.integers(0, 150), key=st.integers(0, 150), shift=st.integers(0, 100))
def test_scores_depend_on_the_distance_alone(query: int, key: int, shift: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 16, generator=generator, dtype=torch.float64)
    table = rope_table(torch.arange(251), 16, 10000.0, torch.float64)

    def score(at: int, of: int) -> float:
        turned_q = rotate(q.expand(251, 1, 16), table)[at, 0]
        turned_k = rotate(k.expand(251, 1, 16), table)[of, 0]
        return float(turned_q @ turned_k)

    assert score(query, key) == pytest.approx(score(query + shift, key + shift), abs=1e-3)


def test_order_matters_to_a_transformer() -> None:
    """Without positions, attention would treat a sequence as a set."""
    stack = _transformer(2, (-1, -1))
    x = torch.randn(30, 16)
    assert not torch.allclose(
        stack.run_layers(x.flip(0), Spans([30])).flip(0), stack.run_layers(x, Spans([30])), atol=1e-3
    )


@pytest.mark.parametrize("skip", [1, 2, 3])
def test_skip_adds_that_layer_s_output(skip: int) -> None:
    stack = _transformer(3, (-1, -1))
    x = torch.randn(20, 16)
    outputs: list[Tensor] = []
    for layer in stack.layers:
        layer.register_forward_hook(lambda module, args, out: outputs.append(out))
    got = stack.run_layers(x, Spans([20]), skip_from=skip)
    torch.testing.assert_close(got, stack.layer_norm(outputs[2] + outputs[skip - 1]))


def test_float16_stays_within_its_range() -> None:
    """Where values leave it, as in the reference: clamped, not infinite."""
    stack = _transformer(2, (-1, -1))
    stack.layers[0].fc2.bias.data.fill_(60_000)
    stack.layers[1].fc2.bias.data.fill_(60_000)
    out = stack.half().run_layers(torch.randn(10, 16).half(), Spans([10]))
    assert out.isfinite().all()


@pytest.mark.parametrize("window", [(-1, -1), (5, 3), (-1, 3), (300, 300)])
def test_a_plan_is_gone_with_its_last_user(window: tuple[int, int]) -> None:
    """Its tensors must not wait for the garbage collector: on a GPU nobody has counted them."""
    plan = AttentionPlan(Spans([700, 3]), window, False, 8, CPU, torch.float32)
    q = torch.randn(703, 2, 8)
    plan.attend(q, q, q)
    gone = weakref.ref(plan)
    gc.disable()
    try:
        del plan
        assert gone() is None
    finally:
        gc.enable()

"""Linear layers in int8: their answers, what rows do to each other, and what quantizing a model costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_helpers import CPU, decode_alone, encode_alone, random_codes, random_mel, tiny_tokenizer
from torch import Tensor, nn

from mimo_tokenizer_server.model import checkpoint, int8
from mimo_tokenizer_server.model.int8 import Int8Product, QuantizeError
from mimo_tokenizer_server.model.rows import Activation, Linear, pack

# Also sizes that fill no vector.
_SIZES = [(1, 1), (7, 5), (33, 17), (48, 16), (130, 257)]


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _snr(signal: Tensor, other: Tensor) -> float:
    """Decibels of `signal` over its difference from `other`."""
    return float(10 * torch.log10(signal.double().square().sum() / (signal.double() - other).square().sum()))


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize(("out", "columns"), _SIZES)
@pytest.mark.parametrize("biased", [True, False])
def test_each_value_is_within_what_rounding_can_do(out: int, columns: int, rows: int, biased: bool) -> None:
    weight, bias = _random(out, columns), _random(out, seed=1) if biased else None
    # Rows, of the input and of the weight, of very different sizes.
    x = _random(rows, columns, seed=2) * 10.0 ** torch.arange(-4, rows - 4)[:, None]
    weight *= 10.0 ** (torch.arange(out) % 5 - 2)[:, None]
    got = Int8Product(weight, bias)(x).double()
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # Half a step of each factor.
    of_x, of_weight = (values.double().abs().amax(1) / 254 for values in (x, weight))
    bound = of_x[:, None] * weight.double().abs().sum(1) + of_weight * x.double().abs().sum(1)[:, None]
    bound += columns * of_x[:, None] * of_weight
    assert ((got - expected).abs() <= 1.0001 * bound + 1e-6 * expected.abs()).all()
    if columns > 1:
        assert not torch.allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("columns", [64, 255, 5120])
def test_the_largest_sums_do_not_overflow(columns: int) -> None:
    """Instructions of processors without VNNI add pairs of products in 16 bits."""
    for sign in (1, -1):
        got = Int8Product(torch.ones(40, columns), None)(torch.full((3, columns), 0.5 * sign))
        torch.testing.assert_close(got, torch.full((3, 40), 0.5 * sign * columns))


@pytest.mark.parametrize(("out", "columns"), _SIZES)
def test_rows_have_the_same_bits_in_every_company(out: int, columns: int) -> None:
    product, x = Int8Product(_random(out, columns), _random(out, seed=1)), _random(150, columns, seed=2)
    together = product(x)
    for size in (1, 2, 7, 64, 140):
        assert torch.equal(torch.cat([product(part) for part in x.split(size)]), together)
    order = torch.randperm(150, generator=torch.Generator().manual_seed(0))
    assert torch.equal(product(x[order]), together[order])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_a_row_that_is_no_number_spoils_no_other(value: float) -> None:
    product, x = Int8Product(_random(48, 16), _random(48, seed=1)), _random(6, 16, seed=2)
    expected = product(x)
    x[3, 5] = value
    got = product(x)
    others = [0, 1, 2, 4, 5]
    assert torch.equal(got[others], expected[others])
    if value != 3e38:
        assert not got[3].isfinite().any()


def test_zeros() -> None:
    bias = _random(48)
    assert torch.equal(Int8Product(_random(48, 16), bias)(torch.zeros(3, 16)), bias.expand(3, 48))
    weight = _random(48, 16)
    weight[7] = 0
    got = Int8Product(weight, None)(_random(3, 16))
    assert (got[:, 7] == 0).all()
    assert got.isfinite().all()


def test_what_is_quantized_is_left_as_it_was() -> None:
    weight, x = _random(33, 17), _random(5, 17, seed=1)
    kept = weight.clone(), x.clone()
    Int8Product(weight, None)(x)
    assert torch.equal(weight, kept[0])
    assert torch.equal(x, kept[1])


def test_a_layer_in_parts() -> None:
    layer = Linear(16, 48, cuts=(16, 32)).requires_grad_(False)
    x = _random(5, 16)
    expected = layer(x)
    held = checkpoint.parameter_bytes(layer)
    layer.pack(Int8Product)
    got = layer(x)
    assert 30 < _snr(expected, got) < 60
    for first in (0, 16, 32):
        assert torch.equal(layer.columns(x, first, first + 16), got[:, first : first + 16])
    assert layer.weight.numel() == 0
    assert checkpoint.parameter_bytes(layer) < held


@pytest.mark.parametrize("function", [F.gelu, F.relu])
def test_a_layer_and_its_activation(function: Callable[[Tensor], Tensor]) -> None:
    layer = Linear(16, 48).requires_grad_(False)
    layer.pack(Int8Product)
    x = _random(5, 16)
    for fused in (("gelu", "none"), None):
        assert torch.equal(layer.activated(x, Activation(function, fused)), function(layer(x)))


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_added_to_something(bias: bool) -> None:
    layer = Linear(16, 48, bias=bias).requires_grad_(False)
    layer.pack(Int8Product)
    x, other = _random(5, 16), _random(5, 48, seed=1)
    before = other.clone()
    assert torch.equal(layer.added_to(other, x), layer(x) + other)
    assert torch.equal(other, before)


def test_weights_take_a_quarter() -> None:
    layer = nn.Sequential(Linear(512, 512))
    before = checkpoint.parameter_bytes(layer)
    pack(layer, Int8Product)
    assert 0.25 < checkpoint.parameter_bytes(layer) / before < 0.27


# ---------------------------------------------------------------- models


@pytest.mark.parametrize("encoder", [False, True])
def test_what_a_model_loses_is_told(encoder: bool) -> None:
    exact, model = tiny_tokenizer(), tiny_tokenizer()
    loss = int8.quantize(model, encoder=encoder)
    assert loss.encoder is encoder
    codes, mel = random_codes(model.config, 100), random_mel(model.config, 800)
    snr = _snr(decode_alone(exact, codes), decode_alone(model, codes))
    assert 15 < snr < 50
    assert abs(loss.decode_snr - snr) < 6
    equal = float((encode_alone(model, mel) == encode_alone(exact, mel)).double().mean())
    if encoder:
        assert 0.5 < equal < 1
        assert abs(loss.equal_codes - equal) < 0.1
    else:
        assert equal == loss.equal_codes == 1


def test_the_vocoder_and_all_that_is_not_asked_for_stay() -> None:
    exact, model = tiny_tokenizer(), tiny_tokenizer()
    int8.quantize(model, encoder=False)
    quantized = {id(layer) for layer in int8.layers(model, encoder=False)}
    assert len(quantized) == 4 * model.config.decoder_layers
    for (name, before), after in zip(exact.named_modules(), model.modules(), strict=True):
        if isinstance(after, Linear):
            assert after.packed == (id(after) in quantized) == name.startswith("decoder.layers."), name
            assert isinstance(before, Linear)
            assert after.packed or torch.equal(before.weight, after.weight)


def test_measured_again_it_is_the_same() -> None:
    losses = [int8.quantize(tiny_tokenizer(), encoder=True) for _ in range(2)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("device", "dtype", "text"),
    [("cpu", torch.bfloat16, "bfloat16 on cpu"), ("cuda:1", torch.float32, "float32 on cuda:1")],
)
def test_what_cannot_be_quantized_is_refused(device: str, dtype: torch.dtype, text: str) -> None:
    int8.check(CPU, torch.float32)
    with pytest.raises(QuantizeError, match=text):
        int8.check(torch.device(device), dtype)


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_a_pytorch_without_the_products_is_told(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def fail(*_: Any) -> None:
        raise error("no such operator\nand more of it")

    monkeypatch.setattr(torch.ops.onednn, "qlinear_pointwise", fail)
    with pytest.raises(QuantizeError, match=r"has no int8 products on this processor: no such operator$"):
        int8.check(CPU, torch.float32)

"""The comparison itself: what it must not let pass."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from comparison import Pair, check_decode, check_encode, count_ties, lively_sound, signal_to_noise
from torch import Tensor


def _quantize(features: Tensor, books: list[Tensor]) -> Tensor:
    rows, residual = [], features
    for book in books:
        rows.append(torch.cdist(residual.double(), book.double()).argmin(1))
        residual = residual - book[rows[-1]]
    return torch.stack(rows)


@pytest.fixture
def quantized() -> tuple[Tensor, list[Tensor], Tensor]:
    """Features, codebooks and codes."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(50, 16, generator=generator)
    books = [torch.randn(40, 16, generator=generator) for _ in range(4)]
    return features, books, _quantize(features, books)


def test_equal_codes_are_no_ties(quantized: tuple[Tensor, list[Tensor], Tensor]) -> None:
    features, books, codes = quantized
    assert count_ties(features, books, codes, codes) == 0
    assert count_ties(features, books, codes, codes[:2]) == 0


@pytest.mark.parametrize("row", [0, 2, 3])
def test_another_code_is_an_error(quantized: tuple[Tensor, list[Tensor], Tensor], row: int) -> None:
    features, books, codes = quantized
    wrong = codes.clone()
    wrong[row, 31] = (wrong[row, 31] + 1) % 40
    with pytest.raises(AssertionError, match=f"frame 31, codebook {row}"):
        count_ties(features, books, codes, wrong)


def test_the_second_nearest_is_an_error(quantized: tuple[Tensor, list[Tensor], Tensor]) -> None:
    features, books, codes = quantized
    second = codes.clone()
    second[0] = torch.cdist(features.double(), books[0].double()).topk(2, largest=False).indices[:, 1]
    with pytest.raises(AssertionError, match="frame 0, codebook 0"):
        count_ties(features, books, codes, second)


def test_a_tie_is_counted_and_what_follows_it_is_not_judged(quantized: tuple[Tensor, list[Tensor], Tensor]) -> None:
    features, books, _ = quantized
    books[1][7] = books[1][3] + 1e-8
    codes = _quantize(features, books)
    frames = ((codes[1] == 3) | (codes[1] == 7)).nonzero().flatten()
    assert len(frames) > 0
    ours = codes.clone()
    ours[1, frames] = 10 - codes[1, frames]
    ours[2:, frames] = 0
    assert count_ties(features, books, codes, ours) == len(frames)


def test_drift_excuses_no_more_than_it_explains(quantized: tuple[Tensor, list[Tensor], Tensor]) -> None:
    """A code that another input's rounding explains is a tie; the same code with half that rounding is an error."""
    features, books, _ = quantized
    books[0][7] = books[0][3] + 1e-2
    codes = _quantize(features, books)
    frame = int(((codes[0] == 3) | (codes[0] == 7)).nonzero()[0])
    ours = codes.clone()
    ours[0, frame] = 10 - codes[0, frame]
    mine, theirs = books[0][ours[0, frame]].double(), books[0][codes[0, frame]].double()
    gap = (features[frame] - mine).square().sum() - (features[frame] - theirs).square().sum()
    assert gap > 1e-4
    drift = torch.zeros_like(features)
    # Along the line between the two entries, as far as makes them equally near.
    drift[frame] = (mine - theirs) * gap / 2 / (mine - theirs).square().sum()
    assert count_ties(features, books, codes, ours, drift) == 1
    for less in (drift / 2, -drift, drift.roll(1, 0), None):
        with pytest.raises(AssertionError, match=f"frame {frame}, codebook 0"):
            count_ties(features, books, codes, ours, less)


def test_shapes_are_compared(quantized: tuple[Tensor, list[Tensor], Tensor]) -> None:
    features, books, codes = quantized
    with pytest.raises(AssertionError):
        count_ties(features, books, codes, codes[:, 1:])


def test_signal_to_noise() -> None:
    signal = torch.ones(1000)
    assert signal_to_noise(signal, signal.clone()) == math.inf
    assert signal_to_noise(signal, signal * 1.01) == pytest.approx(40, abs=0.01)
    with pytest.raises(AssertionError):
        signal_to_noise(signal, torch.full((1000,), torch.nan))


@pytest.mark.parametrize("key", ["encoder.layers.0.self_attn.q_proj.weight", "encoder.conv2.bias"])
def test_a_slightly_other_encoder_is_noticed(pair: Pair, key: str) -> None:
    parameter = pair.reference.get_parameter(key)
    kept = parameter.detach().clone()
    try:
        parameter.data.mul_(1.01)
        with pytest.raises(AssertionError):
            check_encode(pair, lively_sound(200_000, 24_000, seed=3))
    finally:
        parameter.data.copy_(kept)
    assert reference.codebooks(pair.reference)
    check_encode(pair, lively_sound(200_000, 24_000, seed=3))


def test_a_slightly_other_decoder_is_noticed(pair: Pair) -> None:
    parameter = pair.reference.get_parameter("decoder.layers.2.fc2.bias")
    kept = parameter.detach().clone()
    try:
        parameter.data.mul_(1.001)
        with pytest.raises(AssertionError, match="dB"):
            check_decode(pair, 25)
    finally:
        parameter.data.copy_(kept)

"""The inverse short-time Fourier transform and the upsampling, each against a plain computation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import decode_alone, tiny_tokenizer
from torch import Tensor

from mimo_tokenizer_server.model.decoder import UpsampleConv
from mimo_tokenizer_server.model.packing import Spans
from mimo_tokenizer_server.model.vocoder import ISTFTHead


def _head(n_fft: int, hop: int, padding: str, dim: int = 8) -> ISTFTHead:
    torch.manual_seed(0)
    head = ISTFTHead(dim, n_fft, hop, padding).requires_grad_(False)
    head.window.data = torch.hann_window(n_fft)
    return head


def _spectrum(head: ISTFTHead, x: Tensor) -> Tensor:
    """(bins, frames), complex, in float64."""
    log_magnitude, phase = head.out(x).double().chunk(2, dim=-1)
    magnitude = log_magnitude.exp().clamp(max=100)
    return (magnitude * torch.exp(1j * phase)).T


_SHAPES = [(960, 240), (96, 24), (64, 32), (100, 10), (64, 6)]


@pytest.mark.parametrize("frames", [1, 2, 3, 9, 40])
@pytest.mark.parametrize(("n_fft", "hop"), _SHAPES)
def test_same_padding_is_overlap_and_add(n_fft: int, hop: int, frames: int) -> None:
    head = _head(n_fft, hop, "same")
    x = torch.randn(frames, 8)
    got = head(x, Spans([len(x)]))
    pieces = np.fft.irfft(_spectrum(head, x).numpy(), n_fft, axis=0)
    window = np.asarray(torch.hann_window(n_fft, dtype=torch.float64))
    total, covered = np.zeros((frames - 1) * hop + n_fft), np.zeros((frames - 1) * hop + n_fft)
    for frame in range(frames):
        total[frame * hop :][:n_fft] += pieces[:, frame] * window
        covered[frame * hop :][:n_fft] += window**2
    cut = (n_fft - hop) // 2
    assert got.shape == (frames * hop,)
    assert got.dtype == torch.float32
    expected = torch.from_numpy((total / np.maximum(covered, 1e-30))[cut : cut + frames * hop])
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frames", [2, 3, 9, 40])
@pytest.mark.parametrize(("n_fft", "hop"), [*_SHAPES, (65 * 2, 27)])
def test_center_padding_is_pytorch_s(n_fft: int, hop: int, frames: int) -> None:
    head = _head(n_fft, hop, "center")
    x = torch.randn(frames, 8)
    got = head(x, Spans([len(x)]))
    window = torch.hann_window(n_fft, dtype=torch.float64)
    expected = torch.istft(_spectrum(head, x), n_fft, hop, n_fft, window, center=True)
    assert got.shape == ((frames - 1) * hop,)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_stored_window_is_what_is_used() -> None:
    head = _head(64, 16, "same")
    x = torch.randn(12, 8)
    hann = head(x, Spans([len(x)]))
    head.window.data = torch.hamming_window(64)
    assert not torch.allclose(head(x, Spans([len(x)])), hann, atol=1e-3)


def test_wild_magnitudes_are_clipped() -> None:
    head = _head(64, 16, "same")
    head.out.weight.zero_()
    head.out.bias.zero_()
    x = torch.zeros(20, 8)
    head.out.bias[3] = math.log(100)
    loudest = head(x, Spans([len(x)]))
    head.out.bias[3] = 1e4
    assert torch.equal(head(x, Spans([len(x)])), loudest)


def test_no_part_of_the_head_is_below_float32() -> None:
    """The linear layer has the model's type; from there on everything is float32."""
    head = _head(64, 16, "same")
    x = torch.randn(12, 8)
    head.out.to(torch.bfloat16)
    rounded = head.out(x.bfloat16()).float()
    got = head(x.bfloat16(), Spans([12]))
    head.out = torch.nn.Identity()  # type: ignore[assignment]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, head(rounded, Spans([12])))


@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (3, 2), (5, 3), (3, 1), (1, 1), (4, 2)])
@pytest.mark.parametrize("length", [1, 2, 17])
def test_upsampling_normalizes_before_it_cuts(kernel: int, stride: int, length: int) -> None:
    torch.manual_seed(0)
    up = UpsampleConv(6, 4, kernel, stride).requires_grad_(False)
    up.norm.weight.normal_()
    up.norm.bias.normal_()
    x = torch.randn(length, 6)
    got, spans = up(x, Spans([length]))
    assert spans.lengths == (length * stride,)
    # A transposed convolution in so many words.
    whole = torch.zeros((length - 1) * stride + kernel, 4, dtype=torch.float64)
    for step in range(length):
        for tap in range(kernel):
            whole[step * stride + tap] += x[step].double() @ up.conv.weight[:, :, tap].double()
    whole += up.conv.bias.double()
    mean, variance = whole.mean(), whole.var(correction=0)
    expected = (whole - mean) / (variance + up.norm.eps).sqrt() * up.norm.weight.double() + up.norm.bias.double()
    assert got.shape == (length * stride, 4)
    torch.testing.assert_close(got.double(), expected[: length * stride], rtol=1e-4, atol=1e-5)
    if kernel > stride:
        kept = F.group_norm(whole[: length * stride].T[None], 1, eps=up.norm.eps)[0].T
        assert not torch.allclose((got.double() - up.norm.bias) / up.norm.weight, kept, atol=1e-3)


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    shape=st.sampled_from([(2, 2), (3, 2), (5, 3), (3, 1), (1, 1), (7, 2)]),
    seed=st.integers(0, 1000),
)
def test_packed_items_are_normalized_each_by_itself(lengths: list[int], shape: tuple[int, int], seed: int) -> None:
    torch.manual_seed(seed)
    up = UpsampleConv(6, 4, *shape).requires_grad_(False)
    up.norm.weight.normal_()
    spans = Spans(lengths)
    # Each item at a volume of its own, so that a common mean or variance shows.
    items = [torch.randn(length, 6) * 10 ** torch.randn(1) + torch.randn(1) for length in lengths]
    got, out = up(torch.cat(items), spans)
    assert out.lengths == tuple(length * shape[1] for length in lengths)
    for x, part in zip(items, out.split(got), strict=True):
        torch.testing.assert_close(part, up(x, Spans([len(x)]))[0], rtol=1e-5, atol=1e-5)


def test_a_large_mean_costs_no_precision() -> None:
    """The squares are taken about the mean; the difference of two large sums would be lost in rounding."""
    torch.manual_seed(0)
    up = UpsampleConv(6, 40, 3, 2).requires_grad_(False)
    x = torch.randn(300, 6)
    expected, _ = up.double()(x.double(), Spans([300]))
    up.float()
    up.conv.bias.add_(300)
    shifted, _ = up(x, Spans([300]))
    torch.testing.assert_close(shifted.double(), expected, rtol=0, atol=1e-3)


def test_what_is_no_number_in_an_item_stays_there() -> None:
    torch.manual_seed(0)
    up = UpsampleConv(6, 4, 3, 2).requires_grad_(False)
    head = _head(64, 16, "same", dim=4)
    spans, x = Spans([5, 3, 9]), torch.randn(17, 6)
    expected, out = up(x, spans)
    x[5:8] = torch.nan
    got, _ = up(x, spans)
    samples = [length * 16 for length in out.lengths]
    waves, expected_waves = head(got, out).split(samples), head(expected, out).split(samples)
    for item in (0, 2):
        assert torch.equal(out.split(got)[item], out.split(expected)[item])
        assert torch.equal(waves[item], expected_waves[item])
    assert out.split(got)[1].isnan().all()


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    shape=st.sampled_from([*_SHAPES, (130, 27)]),
    padding=st.sampled_from(["same", "center"]),
)
def test_packed_items_have_their_own_edges(lengths: list[int], shape: tuple[int, int], padding: str) -> None:
    if padding == "same" and sum(shape) % 2:
        padding = "center"
    head = _head(*shape, padding)
    items = [torch.randn(length, 8, generator=torch.Generator().manual_seed(length)) for length in lengths]
    got = head(torch.cat(items), Spans(lengths)).split([head.samples(length) for length in lengths])
    for x, part in zip(items, got, strict=True):
        torch.testing.assert_close(part, head(x, Spans([len(x)])), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padding", ["same", "center"])
@pytest.mark.parametrize("frames", [1, 2, 30])
def test_waveform_length(padding: str, frames: int) -> None:
    tokenizer = tiny_tokenizer(vocoder_padding=padding)
    config = tokenizer.config
    codes = torch.zeros(3, frames, dtype=torch.int64)
    waveform = decode_alone(tokenizer, codes)
    assert waveform.shape == (frames * config.samples_per_frame - config.samples_cut,)
    assert waveform.isfinite().all()


def test_a_decoded_item_does_not_know_what_was_decoded_before() -> None:
    tokenizer = tiny_tokenizer()
    generator = torch.Generator().manual_seed(0)
    long, short = (torch.randint(16, (3, frames), generator=generator) for frames in (200, 7))
    alone = decode_alone(tokenizer, short)
    decode_alone(tokenizer, long)
    assert torch.equal(decode_alone(tokenizer, short), alone)

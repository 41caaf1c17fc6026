"""Items of a batch get the answers they get alone."""

from __future__ import annotations

import pytest
import torch
from exactness_helpers import (
    VARIANTS,
    check_codes,
    check_waveform,
    least_code_frames,
    least_mel_frames,
    model,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import decode_alone, encode_alone, random_codes, random_mel

from mimo_tokenizer_server.model.packing import Spans

# Lengths that are alike, next to each other or apart, are computed otherwise than others.
_LENGTHS = st.lists(st.integers(0, 50) | st.sampled_from([20, 21, 300]), min_size=1, max_size=6)


@pytest.mark.parametrize("name", VARIANTS)
def test_encode(name: str) -> None:
    tokenizer = model(name)
    config, least = tokenizer.config, least_mel_frames(tokenizer)

    @settings(deadline=None, max_examples=12)
    @given(lengths=_LENGTHS, rows=st.integers(1, 3), seed=st.integers(0, 1000))
    def check(lengths: list[int], rows: int, seed: int) -> None:
        lengths = [least + length for length in lengths]
        spans = Spans(lengths)
        mel = random_mel(config, spans.total, seed)
        codes = tokenizer.encode(mel, spans, rows)
        features, frames = tokenizer.encoder.features(mel, spans)
        assert codes.shape == (rows, frames.total)
        assert frames.lengths == tuple(config.code_frames(length) for length in lengths)
        items = zip(spans.split(mel), codes.split(frames.lengths, dim=1), frames.split(features), strict=True)
        for item, part, part_features in items:
            check_codes(tokenizer, item, part, part_features)

    check()


@pytest.mark.parametrize("name", VARIANTS)
def test_decode(name: str) -> None:
    tokenizer = model(name)
    config, least = tokenizer.config, least_code_frames(tokenizer)

    @settings(deadline=None, max_examples=12)
    @given(lengths=_LENGTHS, data=st.data(), seed=st.integers(0, 1000))
    def check(lengths: list[int], data: st.DataObject, seed: int) -> None:
        lengths = [least + length for length in lengths]
        spans = Spans(lengths)
        rows = data.draw(st.integers(1, 3))
        books = data.draw(st.none() | st.lists(st.integers(1, rows), min_size=len(spans), max_size=len(spans)))
        codes = random_codes(config, spans.total, seed)[:rows]
        together = tokenizer.decode(codes, spans, books)
        features = spans.split(tokenizer.decode_vq(codes, spans, books))
        samples = [length * config.samples_per_frame - config.samples_cut for length in lengths]
        assert together.shape == (sum(samples),)
        waves = together.split(samples)
        for item, (part, wave) in enumerate(zip(codes.split(lengths, dim=1), waves, strict=True)):
            own = part[: books[item]] if books else part
            assert torch.equal(features[item], tokenizer.decode_vq(own, Spans([own.shape[1]])))
            check_waveform(decode_alone(tokenizer, own), wave)

    check()


@pytest.mark.parametrize("name", VARIANTS)
def test_what_neighbours_hold_changes_no_bit(name: str) -> None:
    """Not even values far beyond any sound's."""
    tokenizer = model(name)
    config = tokenizer.config

    @settings(deadline=None, max_examples=8)
    @given(
        lengths=st.lists(st.integers(20, 90), min_size=2, max_size=5),
        data=st.data(),
        scale=st.sampled_from([0, 1e3, 1e9]),
    )
    def check(lengths: list[int], data: st.DataObject, scale: float) -> None:
        spans = Spans(lengths)
        kept = data.draw(st.integers(0, len(lengths) - 1))
        mel, codes = random_mel(config, spans.total), random_codes(config, spans.total)
        of_item = slice(spans.starts[kept], spans.starts[kept] + lengths[kept])
        other_mel, other_codes = random_mel(config, spans.total, 1) * scale, random_codes(config, spans.total, 1)
        other_mel[of_item] = mel[of_item]
        other_codes[:, of_item] = codes[:, of_item]
        features, frames = tokenizer.encoder.features(mel, spans)
        other_features, _ = tokenizer.encoder.features(other_mel, spans)
        assert torch.equal(frames.split(features)[kept], frames.split(other_features)[kept])
        assert not torch.equal(features, other_features)
        samples = [length * config.samples_per_frame - config.samples_cut for length in lengths]
        waves, other_waves = (tokenizer.decode(x, spans).split(samples) for x in (codes, other_codes))
        assert torch.equal(waves[kept], other_waves[kept])

    check()


@pytest.mark.parametrize("name", VARIANTS)
def test_where_an_item_stands_does_not_matter(name: str) -> None:
    tokenizer = model(name)
    config = tokenizer.config
    lengths = [20, 33, 20, 57, 21]
    mels = [random_mel(config, length, seed) for seed, length in enumerate(lengths)]
    codes = [random_codes(config, length, seed) for seed, length in enumerate(lengths)]
    for order in ([4, 3, 2, 1, 0], [1, 0, 2, 4, 3], [0, 2, 1, 3, 4]):
        spans = Spans([lengths[item] for item in order])
        features, frames = tokenizer.encoder.features(torch.cat([mels[item] for item in order]), spans)
        encoded = tokenizer.encode(torch.cat([mels[item] for item in order]), spans, 3)
        parts = zip(order, encoded.split(frames.lengths, dim=1), frames.split(features), strict=True)
        for item, part, part_features in parts:
            check_codes(tokenizer, mels[item], part, part_features)
        waves = tokenizer.decode(torch.cat([codes[item] for item in order], dim=1), spans)
        samples = [length * config.samples_per_frame - config.samples_cut for length in spans.lengths]
        for item, wave in zip(order, waves.split(samples), strict=True):
            check_waveform(decode_alone(tokenizer, codes[item]), wave)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_further_from_float32_than_alone(dtype: torch.dtype) -> None:
    exact, rounded = model("published architecture"), model("published architecture", dtype=dtype)
    spans = Spans([60, 25, 25, 110])
    codes = random_codes(exact.config, spans.total)
    together = rounded.decode(codes, spans).split([length * 96 for length in spans.lengths])
    noise_together = noise_alone = 0.0
    for part, wave in zip(codes.split(spans.lengths, dim=1), together, strict=True):
        expected = decode_alone(exact, part)
        noise_together += float((wave - expected).square().sum())
        noise_alone += float((decode_alone(rounded, part) - expected).square().sum())
    assert noise_together <= 1.05 * noise_alone


def test_half_precision_encodes_as_many_codes_alike() -> None:
    """As float32 does: no fewer in a batch than alone, but for chance."""
    exact, rounded = model("published architecture"), model("published architecture", dtype=torch.bfloat16)
    spans = Spans([600, 250, 250, 1100])
    mel = random_mel(exact.config, spans.total)
    together = rounded.encode(mel, spans, 3)
    alone, expected = (
        torch.cat([encode_alone(tokenizer, item) for item in spans.split(mel)], dim=1) for tokenizer in (rounded, exact)
    )
    assert (together == expected).float().mean() >= (alone == expected).float().mean() - 0.02

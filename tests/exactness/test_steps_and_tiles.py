"""Steps and tiles give the answer that the whole, at once, gives."""

from __future__ import annotations

import pytest
import torch
from comparison import count_ties
from exactness_helpers import VARIANTS, check_waveform, finish, least_code_frames, least_mel_frames, model
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import decode_alone, encode_alone, random_codes, random_mel

from mimo_tokenizer_server.model import transformer
from mimo_tokenizer_server.model.packing import Spans

_FLOPS = st.sampled_from([0.0, 3e4, 1e6, 1e15]) | st.floats(1e3, 1e7)


@pytest.mark.parametrize("name", VARIANTS)
def test_encode_steps(name: str) -> None:
    tokenizer = model(name)
    config, least = tokenizer.config, least_mel_frames(tokenizer)
    books = list(tokenizer.encoder.quantizer.codebooks)

    @settings(deadline=None, max_examples=8)
    @given(
        length=st.integers(0, 40) | st.integers(200, 400), rows=st.integers(1, 3), flops=_FLOPS, seed=st.integers(0, 99)
    )
    def check(length: int, rows: int, flops: float, seed: int) -> None:
        mel = random_mel(config, least + length, seed)
        codes = finish(tokenizer.encode_steps(mel, rows, flops))
        features, _ = tokenizer.encoder.features(mel, Spans([len(mel)]))
        # Steps do not show what they quantize: up to 8 units in the last place from the whole's, either way.
        eps = torch.finfo(torch.float32).eps
        expected = encode_alone(tokenizer, mel)
        differ = (codes != expected[:rows]).any(0)
        assert differ.sum() <= 1
        for frame in differ.nonzero().flatten().tolist():
            row = int((codes[:, frame] != expected[:rows, frame]).int().argmax())
            apart = books[row][codes[row, frame]] - books[row][expected[row, frame]]
            drift = apart / apart.norm() * features[frame].norm() * 8 * eps
            count_ties(features[frame, None], books, expected[:, frame, None], codes[:, frame, None], drift[None])

    check()


@pytest.mark.parametrize("name", VARIANTS)
def test_decode_steps(name: str) -> None:
    tokenizer = model(name)
    config, least = tokenizer.config, least_code_frames(tokenizer)

    @settings(deadline=None, max_examples=8)
    @given(
        length=st.integers(0, 20) | st.integers(60, 120), rows=st.integers(1, 3), flops=_FLOPS, seed=st.integers(0, 99)
    )
    def check(length: int, rows: int, flops: float, seed: int) -> None:
        codes = random_codes(config, least + length, seed)[:rows]
        check_waveform(decode_alone(tokenizer, codes), finish(tokenizer.decode_steps(codes, flops)))

    check()


@pytest.mark.parametrize("name", VARIANTS)
def test_pieces_that_end_because_of_their_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "_MOST_ROWS", 17)
    monkeypatch.setattr(transformer, "_MOST_MASK", 600)
    tokenizer = model(name)
    codes = random_codes(tokenizer.config, 70)
    check_waveform(decode_alone(tokenizer, codes), finish(tokenizer.decode_steps(codes, 1e15)))
    mel = random_mel(tokenizer.config, 300)
    assert torch.equal(finish(tokenizer.encode_steps(mel, 3, 1e15)), encode_alone(tokenizer, mel))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_in_half_precision(dtype: torch.dtype) -> None:
    exact, rounded = model("published architecture"), model("published architecture", dtype=dtype)
    codes = random_codes(exact.config, 150)
    expected = decode_alone(exact, codes)
    whole, steps = (
        wave - expected for wave in (decode_alone(rounded, codes), finish(rounded.decode_steps(codes, 1e6)))
    )
    assert steps.square().sum() <= 1.1 * whole.square().sum()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("tile_rows", [1, 32])
def test_tiles(name: str, tile_rows: int) -> None:
    """The answer is that without tiles; and in a batch it is that alone, bit for bit."""
    plain, tiled = model(name), model(name, tile_rows)
    config = plain.config
    spans = Spans([30, 9, 9, 41])
    codes, mel = random_codes(config, spans.total), random_mel(config, spans.total)
    samples = [length * config.samples_per_frame - config.samples_cut for length in spans.lengths]
    frames = [config.code_frames(length) for length in spans.lengths]
    waves = tiled.decode(codes, spans).split(samples)
    encoded = tiled.encode(mel, spans, 3).split(frames, dim=1)
    for item, (part, item_mel) in enumerate(zip(codes.split(spans.lengths, dim=1), spans.split(mel), strict=True)):
        check_waveform(decode_alone(plain, part), waves[item], least=110)
        assert torch.equal(waves[item], decode_alone(tiled, part))
        assert torch.equal(encoded[item], encode_alone(plain, item_mel))
        assert torch.equal(encoded[item], encode_alone(tiled, item_mel))
    check_waveform(decode_alone(plain, codes), finish(tiled.decode_steps(codes, 1e6)))
    assert torch.equal(finish(tiled.encode_steps(mel, 3, 1e6)), encode_alone(plain, mel))

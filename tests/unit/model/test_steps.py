"""Steps: what they cost, how much they hold, and that they can be left at any of them."""

from __future__ import annotations

import gc
import math
from collections.abc import Generator
from typing import Any

import pytest
import torch
from model_helpers import Watch, random_codes, random_mel, tiny_config, tiny_tokenizer
from torch import Tensor

from mimo_tokenizer_server.model import transformer
from mimo_tokenizer_server.model.config import TokenizerConfig
from mimo_tokenizer_server.model.tokenizer import MiMoAudioTokenizer

_CHANGES: dict[str, dict[str, Any]] = {
    "published architecture": {},
    "no pooling": {"avg_pooler": 1},
    "windows": {"encoder_attn_window_size": [5, 3], "decoder_attn_window_size": [9, 0]},
    "wide windows, not causal": {"decoder_causal": False, "decoder_attn_window_size": [300, 20]},
    "center": {"vocoder_padding": "center", "decoder_kernel_size": 5},
}


def _run(steps: Generator[float, None, Tensor]) -> tuple[Tensor, list[float]]:
    costs = []
    while True:
        try:
            costs.append(next(steps))
        except StopIteration as stop:
            answer: Tensor = stop.value
            return answer, costs


def _steps(tokenizer: MiMoAudioTokenizer, kind: str, frames: int, flops: float) -> Generator[float, None, Tensor]:
    if kind == "encode":
        return tokenizer.encode_steps(random_mel(tokenizer.config, frames), 3, flops)
    return tokenizer.decode_steps(random_codes(tokenizer.config, frames), flops)


@pytest.mark.parametrize("frames", [1, 7, 180])
@pytest.mark.parametrize("kind", ["encode", "decode"])
@pytest.mark.parametrize("name", _CHANGES)
def test_costs_add_up_to_what_is_told_before(name: str, kind: str, frames: int) -> None:
    tokenizer = tiny_tokenizer(**_CHANGES[name])
    if kind == "decode" and frames * tokenizer.config.samples_per_frame <= tokenizer.config.samples_cut:
        frames = 2
    told = tokenizer.encode_flops(frames) if kind == "encode" else tokenizer.decode_flops(frames)
    for flops in (0.0, 1e4, 1e6, math.inf):
        _, costs = _run(_steps(tokenizer, kind, frames, flops))
        assert sum(costs) == pytest.approx(told, rel=1e-6)


@pytest.mark.parametrize("kind", ["encode", "decode"])
@pytest.mark.parametrize("name", _CHANGES)
def test_a_step_costs_at_most_what_is_asked_for(name: str, kind: str) -> None:
    tokenizer = tiny_tokenizer(**_CHANGES[name])
    _, single = _run(_steps(tokenizer, kind, 60, 0.0))
    for flops in (2e4, 1e5, 1e6):
        _, costs = _run(_steps(tokenizer, kind, 60, flops))
        assert max(costs) <= max(flops, max(single))
        assert len(costs) < len(single)
        # Nor is a step needlessly small: as many as that are the ends of layers.
        layers = len(tokenizer.encoder.layers) + len(tokenizer.decoder.layers) + len(tokenizer.decoder.vocoder.layers)
        assert len(costs) <= 2 * sum(costs) / flops * (1 + max(single) / flops) + 2 * layers + 16


def test_costs_are_those_of_the_products() -> None:
    """Of the decoder without its vocoder's attention, counted by hand."""
    config = tiny_config(decoder_layers=1, vocoder_num_layers=1, vocoder_attn_window_size=[0, 0])
    tokenizer = MiMoAudioTokenizer(config, torch.device("meta"), torch.float32)
    codes, rows, mel = 10, 20, 40
    by_hand = codes * 16 * 16 * 2  # the first upsampling
    by_hand += rows * (4 * 16 * 16 + 2 * 16 * 24) + 2 * 16 * rows * (rows + 1) // 2  # a causal layer
    by_hand += rows * 16 * 12 * 3  # the second upsampling
    by_hand += mel * 12 * 16 + mel * (4 * 16 * 16 + 2 * 16 * 24) + 2 * 16 * mel + mel * 16 * 98  # the vocoder
    assert tokenizer.decode_flops(codes) == 2 * by_hand


def test_costs_at_the_published_size() -> None:
    """About 2 operations a weight and row: 25 code frames are 50 rows of a decoder of 629 million weights."""
    config = TokenizerConfig(
        avg_pooler=2, d_model=1280, encoder_layers=32, encoder_attention_heads=20, encoder_ffn_dim=5120,
        decoder_layers=32, decoder_attention_heads=20, decoder_ffn_dim=5120, nfft=960, window_size=960, vocoder_dim=256,
        vocoder_intermediate_dim=1024, vocoder_num_layers=16, n_mels=128, num_quantizers=20,
        codebook_size=(1024, 1024, 128), vocoder_attention_heads=16,
    )  # fmt: skip
    tokenizer = MiMoAudioTokenizer(config, torch.device("meta"), torch.bfloat16)
    assert tokenizer.decode_flops(25) == pytest.approx(2 * 50 * 32 * 12 * 1280**2, rel=0.05)
    assert tokenizer.encode_flops(100) == pytest.approx(2 * 50 * 32 * 12 * 1280**2, rel=0.05)


@pytest.mark.parametrize("kind", ["encode", "decode"])
def test_a_closed_generator_holds_nothing(kind: str) -> None:
    tokenizer = tiny_tokenizer()

    def tensors() -> set[tuple[int, ...]]:
        gc.collect()
        # By type: an isinstance would ask things that only stand for others.
        return {tuple(thing.shape) for thing in gc.get_objects() if issubclass(type(thing), Tensor)}

    _, costs = _run(_steps(tokenizer, kind, 31, 1e5))
    before = tensors()
    held = set()
    for steps_taken in range(0, len(costs), 5):
        steps = _steps(tokenizer, kind, 31, 1e5)
        for _ in range(steps_taken):
            next(steps)
        held |= tensors() - before
        steps.close()
        assert tensors() - before == set()
    assert held


@pytest.mark.parametrize("name", ["published architecture", "windows", "wide windows, not causal"])
@pytest.mark.parametrize("kind", ["encode", "decode"])
def test_nothing_is_much_larger_than_a_layer_s_activations(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks and what lies between a feed-forward's products are of pieces."""
    monkeypatch.setattr(transformer, "_MOST_ROWS", 64)
    monkeypatch.setattr(transformer, "_MOST_MASK", 1 << 16)
    tokenizer = tiny_tokenizer(**_CHANGES[name])
    frames = 2000
    with Watch() as watch:
        _run(_steps(tokenizer, kind, frames, math.inf))
    mel_rows = frames if kind == "encode" else 4 * frames
    assert watch.largest <= mel_rows * 24 + 4096, watch.largest_from  # the vocoder's samples; a row of it is 16
    assert watch.largest < frames * frames // 4


def test_the_largest_piece_is_bounded_however_much_is_asked_for() -> None:
    tokenizer = tiny_tokenizer()
    _, costs = _run(_steps(tokenizer, "decode", 3000, math.inf))
    _, fewer = _run(_steps(tokenizer, "decode", 300, math.inf))
    assert len(costs) > len(fewer)

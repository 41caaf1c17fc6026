"""What CUDA graphs are recorded of, held against the same batch as it is computed without them.

Recorded is a function of tensors of one shape, whatever the items in them; here it is called each time, where a GPU
would run its graph. Attention of items whose lengths only the device knows is a GPU's kernel, of which the CPU has a
plain stand-in. tests/gpu has the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness_helpers import VARIANTS, check_codes, check_waveform, least_code_frames, least_mel_frames, model
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import random_codes, random_mel
from torch import Tensor

from mimo_tokenizer_server import graphs
from mimo_tokenizer_server.graphs import Graphs
from mimo_tokenizer_server.model import attention
from mimo_tokenizer_server.model.packing import Slots, Spans

FRAMES = 48


def called_again(function: Callable[[], Any], pool: Any) -> tuple[Any, Callable[[], None]]:
    """As a recording: the same tensors get what the function gives now."""
    result = function()

    def replay() -> None:
        for old, new in zip(tensors_of(result), tensors_of(function()), strict=True):
            old.copy_(new)

    return result, replay


def tensors_of(result: Any) -> list[Tensor]:
    """All tensors in a tensor, a tuple of results, or slots."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Slots):
        return [result._sizes, *result._tensors.values()]
    return [tensor for part in result for tensor in tensors_of(part)]


def plain_varlen(
    q: Tensor, k: Tensor, v: Tensor, q_bounds: Tensor, k_bounds: Tensor, *_: int, window_size: tuple[int, int]
) -> Tensor:
    """`varlen_attn` of items that attend to themselves."""
    assert torch.equal(q_bounds, k_bounds)
    rows = torch.arange(len(q))
    item = torch.bucketize(rows, q_bounds[1:], right=True)
    offset = rows - rows[:, None]
    left, right = (bound if bound >= 0 else len(q) for bound in window_size)
    seen = (item == item[:, None]) & (offset >= -left) & (offset <= right)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_record", called_again)
    monkeypatch.setattr(graphs, "_SIZES", (16, FRAMES))
    monkeypatch.setattr(attention, "varlen_attn", plain_varlen)
    monkeypatch.setattr(attention, "has_varlen", lambda *_: True)


@pytest.mark.parametrize("name", VARIANTS)
def test_decode(name: str) -> None:
    tokenizer = model(name)
    recorded, least = Graphs(tokenizer, FRAMES), least_code_frames(tokenizer)
    books = tokenizer.config.num_quantizers

    @settings(deadline=None, max_examples=12)
    @given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6), data=st.data(), seed=st.integers(0, 1000))
    def check(lengths: list[int], data: st.DataObject, seed: int) -> None:
        lengths = [least + length for length in lengths]
        rows = [data.draw(st.integers(1, books)) for _ in lengths]
        spans = Spans(lengths)
        codes = random_codes(tokenizer.config, spans.total, seed)
        items = [part[:used].numpy() for part, used in zip(codes.split(lengths, dim=1), rows, strict=True)]
        waves = recorded.decode(items)
        if sum(lengths) > FRAMES:
            assert waves is None
            return
        assert waves is not None
        config = tokenizer.config
        samples = [length * config.samples_per_frame - config.samples_cut for length in lengths]
        expected = tokenizer.decode(codes, spans, rows).split(samples)
        for one, other in zip(expected, waves, strict=True):
            check_waveform(one, other)

    check()


@pytest.mark.parametrize("name", VARIANTS)
def test_encode(name: str) -> None:
    tokenizer = model(name)
    recorded, least = Graphs(tokenizer, FRAMES), least_mel_frames(tokenizer)
    config = tokenizer.config
    most = FRAMES * config.samples_per_frame // config.hop_length

    @settings(deadline=None, max_examples=12)
    @given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=6), seed=st.integers(0, 1000))
    def check(lengths: list[int], seed: int) -> None:
        lengths = [least + length for length in lengths]
        mels = list(random_mel(config, sum(lengths), seed).split(lengths))
        codes = recorded.encode(mels)
        if sum(lengths) > most:
            assert codes is None
            return
        assert codes is not None
        features, frames = tokenizer.encoder.features(torch.cat(mels), Spans(lengths))
        parts = codes[:, : frames.total].split(frames.lengths, dim=1)
        for mel, part, own in zip(mels, parts, frames.split(features), strict=True):
            check_codes(tokenizer, mel, part, own)

    check()

"""Recordings in pieces to codes; where and in what type a tokenizer lives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import CPU, tiny_config, tiny_tokenizer
from torch import Tensor

from mimo_tokenizer_server.model import checkpoint, config, frontend
from mimo_tokenizer_server.model.tokenizer import EncodeState, MiMoAudioTokenizer


def _sound(samples: int, seed: int = 0) -> Tensor:
    return torch.randn(samples, generator=torch.Generator().manual_seed(seed)) * 0.3


def _encode(
    tokenizer: MiMoAudioTokenizer, pieces: Iterable[Tensor], rate: int = 2400, rows: int = 3, group_size: int = 1
) -> Tensor:
    state = EncodeState(tokenizer, rate, rows, group_size)
    parts = [state.push(piece) for piece in pieces]
    return torch.cat([*parts, state.finish()], dim=1)


@pytest.fixture(scope="module")
def tokenizer() -> MiMoAudioTokenizer:
    return tiny_tokenizer()


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> int:
    """Segments of 21 mel frames in place of 6000: 6 code frames of the tiny model, 504 samples."""
    for module in (config, frontend):
        monkeypatch.setattr(module, "SEGMENT_MEL_FRAMES", 21)
    return 21


@pytest.mark.parametrize("rate", [2400, 1000, 44_100])
def test_pieces_give_the_same_codes(tokenizer: MiMoAudioTokenizer, short_segments: int, rate: int) -> None:
    @settings(deadline=None, max_examples=25)
    @given(sizes=st.lists(st.integers(0, 2 * rate), max_size=8), samples=st.integers(rate // 10, 2 * rate))
    def check(sizes: list[int], samples: int) -> None:
        sound = _sound(samples)
        ends = torch.tensor(sizes, dtype=torch.int64).cumsum(0).clamp(max=samples).tolist()
        pieces = torch.tensor_split(sound, ends)
        assert torch.equal(_encode(tokenizer, pieces, rate), _encode(tokenizer, [sound], rate))

    check()


def test_codes_come_with_their_segment(tokenizer: MiMoAudioTokenizer, short_segments: int) -> None:
    """As soon as the last mel frame of a segment is covered, and not all at the end."""
    state = EncodeState(tokenizer, 2400, 3)
    of_segment = tokenizer.config.code_frames(short_segments)
    sound = _sound(5000)
    covered = (short_segments - 1) * 24 + 48
    assert state.push(sound[: covered - 1]).shape == (3, 0)
    assert state.push(sound[covered - 1 : covered]).shape == (3, of_segment)
    assert state.push(sound[covered:]).shape[1] % of_segment == 0
    assert 0 < state.finish().shape[1] <= 2 * of_segment


def test_each_segment_is_encoded_alone(tokenizer: MiMoAudioTokenizer, short_segments: int) -> None:
    sound = _sound(4000)
    state = frontend.Segmenter(tokenizer.mel)
    segments = [*state.push(sound), *state.finish()]
    alone = [tokenizer.encoder.encode(mel, 3) for mel in segments]
    assert len(alone) > 5
    assert torch.equal(_encode(tokenizer, [sound]), torch.cat(alone, dim=1))


@pytest.mark.parametrize("rows", [1, 2])
def test_fewer_rows(tokenizer: MiMoAudioTokenizer, rows: int) -> None:
    sound = _sound(4000)
    assert torch.equal(_encode(tokenizer, [sound], rows=rows), _encode(tokenizer, [sound])[:rows])


@pytest.mark.parametrize("changes", [{}, {"kernel_size": 5}, {"kernel_size": 4, "avg_pooler": 1}])
@pytest.mark.parametrize("group_size", [2, 4, 7])
def test_groups_are_filled_with_the_last_frame(changes: dict[str, Any], group_size: int, short_segments: int) -> None:
    """Of the recording, and where its last segment is too short for a frame too."""
    tokenizer = tiny_tokenizer(**changes)
    lengths = range(short_segments * 24 - 30, short_segments * 48 + 60, 12)
    filled = set()
    for samples in lengths:
        sound = _sound(samples)
        plain = _encode(tokenizer, [sound])
        grouped = _encode(tokenizer, [sound], group_size=group_size)
        padding = -plain.shape[1] % group_size
        filled.add(padding)
        assert torch.equal(grouped, torch.cat((plain, plain[:, -1:].expand(-1, padding)), dim=1))
    assert len(filled) > 1


@pytest.mark.parametrize("samples", [0, 1, 48])
def test_too_short(tokenizer: MiMoAudioTokenizer, samples: int) -> None:
    state = EncodeState(tokenizer, 2400, 3)
    state.push(torch.zeros(samples))
    with pytest.raises(ValueError, match=f"^{samples} samples are fewer than the 49"):
        state.finish()


def test_too_short_for_a_frame() -> None:
    """Long enough for mel frames, but not for the convolutions."""
    tokenizer = tiny_tokenizer(kernel_size=5, nfft=48, window_size=48)
    least = tokenizer.config.min_samples
    assert least > 48 // 2 + 1
    assert _encode(tokenizer, [torch.zeros(least)]).shape == (3, 1)
    state = EncodeState(tokenizer, 2400, 3)
    state.push(torch.zeros(least - 1))
    with pytest.raises(ValueError, match=f"^{least - 1} samples are fewer than the {least} that a code frame takes"):
        state.finish()


@pytest.mark.parametrize("kernel_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(("stride", "pool"), [(1, 1), (2, 2), (3, 1), (2, 3)])
def test_frames_are_as_many_as_the_config_says(kernel_size: int, stride: int, pool: int, short_segments: int) -> None:
    tokenizer = tiny_tokenizer(
        kernel_size=kernel_size,
        stride_size=stride,
        decoder_stride_size=stride,
        avg_pooler=pool,
        nfft=48,
        window_size=48,
    )
    least = tokenizer.config.min_samples
    for samples in [*range(least, least + 200, 11), *range(21 * 24 - 30, 21 * 24 + 200, 11), 2 * 21 * 24, 3000]:
        codes = _encode(tokenizer, [torch.zeros(samples)])
        assert codes.shape == (3, tokenizer.config.audio_code_frames(samples))
    assert tokenizer.config.audio_code_frames(least) >= 1
    assert least == 25 or tokenizer.config.audio_code_frames(least - 1) == 0


def test_default_device_of_anyone() -> None:
    """A default device, which stands in for cuda:0, gets nothing: all is on the device that was asked for."""
    sound, codes = _sound(4000), torch.zeros(3, 20, dtype=torch.int64)
    expected = tiny_tokenizer()
    codes_of_sound = _encode(expected, [sound], rate=11_025)
    with torch.device("meta"):
        tokenizer = tiny_tokenizer()
        assert {parameter.device for parameter in tokenizer.parameters()} == {CPU}
        assert {buffer.device for buffer in tokenizer.buffers()} <= {CPU}
        assert torch.equal(_encode(tokenizer, [sound], rate=11_025), codes_of_sound)
        assert _encode(tokenizer, [sound[:60]]).device == CPU
        assert torch.equal(tokenizer.decode(codes), expected.decode(codes))
    torch.set_default_device("meta")
    try:
        tokenizer = tiny_tokenizer()
        assert torch.equal(_encode(tokenizer, [sound], rate=11_025), codes_of_sound)
        assert torch.equal(tokenizer.decode(codes), expected.decode(codes))
    finally:
        torch.set_default_device(None)


def test_nothing_is_allocated_for_a_meta_device() -> None:
    tokenizer = MiMoAudioTokenizer(tiny_config(), torch.device("meta"), torch.bfloat16)
    assert {parameter.device.type for parameter in tokenizer.parameters()} == {"meta"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(dtype: torch.dtype) -> None:
    tokenizer = tiny_tokenizer(dtype)
    float32 = {name for name, parameter in tokenizer.named_parameters() if parameter.dtype == torch.float32}
    expected = {name for name, _ in tokenizer.named_parameters() if "quantizer" in name or name.endswith("window")}
    assert len(expected) == 4
    assert float32 == (expected if dtype != torch.float32 else {name for name, _ in tokenizer.named_parameters()})
    assert not any(parameter.requires_grad for parameter in tokenizer.parameters())
    codes = _encode(tokenizer, [_sound(4000)])
    waveform = tokenizer.decode(codes)
    assert waveform.dtype == torch.float32
    assert waveform.isfinite().all()


def test_bfloat16_is_near_float32() -> None:
    codes = torch.stack([torch.randint(16, (60,), generator=torch.Generator().manual_seed(row)) for row in range(3)])
    exact, rounded = tiny_tokenizer().decode(codes), tiny_tokenizer(torch.bfloat16).decode(codes)
    assert 10 * torch.log10(exact.square().sum() / (exact - rounded).square().sum()) > 20


def test_encoding_twice_gives_the_same(tokenizer: MiMoAudioTokenizer) -> None:
    sound = _sound(9000)
    first = _encode(tokenizer, [sound])
    _encode(tokenizer, [_sound(500, seed=1)])
    assert torch.equal(_encode(tokenizer, [sound]), first)


def test_two_recordings_at_once_do_not_mix(tokenizer: MiMoAudioTokenizer, short_segments: int) -> None:
    sounds = [_sound(3000, seed=1), _sound(2500, seed=2)]
    states = [EncodeState(tokenizer, 2400, 3) for _ in sounds]
    parts: list[list[Tensor]] = [[], []]
    for start in range(0, 3000, 100):
        for state, sound, codes in zip(states, sounds, parts, strict=True):
            codes.append(state.push(sound[start : start + 100]))
    for state, sound, codes in zip(states, sounds, parts, strict=True):
        assert torch.equal(torch.cat([*codes, state.finish()], dim=1), _encode(tokenizer, [sound]))


def test_parameter_bytes() -> None:
    tokenizer = tiny_tokenizer(torch.bfloat16)
    expected = sum(p.numel() * (4 if p.dtype == torch.float32 else 2) for p in tokenizer.parameters())
    assert checkpoint.parameter_bytes(tokenizer) == expected

"""Resampling and mel segments: torchaudio's on the whole, and the same segments however the sound is cut up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import CPU, Watch, tiny_config
from torch import Tensor
from torchaudio.functional import resample
from torchaudio.transforms import MelSpectrogram, Resample

from mimo_tokenizer_server.model import frontend
from mimo_tokenizer_server.model.config import TokenizerConfig
from mimo_tokenizer_server.model.frontend import MelFrontEnd, Resampler, Segment, SegmentCutter

_RATES = [1000, 8000, 11025, 16000, 22050, 24000, 44100, 48000, 96000, 192000, 384000]
# In lowest terms with 24000 Hz so large that torchaudio's filters take more than 16 MiB, if still less than 100.
_AWKWARD_RATES = [7926, 11118]


def _sound(samples: int, seed: int = 0) -> Tensor:
    return torch.randn(samples, generator=torch.Generator().manual_seed(seed)) * 0.3


def _resample(sound: Tensor, source: int, resampler: Resampler | None = None) -> Tensor:
    """All outputs at 24 kHz."""
    resampler = resampler or Resampler(source, 24000)
    return resampler.convert(sound, 0, 0, resampler.length(len(sound)))


def _cut(sound: npt.NDArray[Any], sizes: Iterable[int]) -> Iterator[npt.NDArray[Any]]:
    """Pieces of the given sizes, and the rest."""
    start = 0
    for size in sizes:
        yield sound[start : start + size]
        start += size
    yield sound[start:]


def _definition(sound: Tensor, rate: int, outputs: Tensor) -> Tensor:
    """Some of the outputs at 24 kHz, in float64: Hann-windowed sinc, 6 zero crossings, cut off at 0.99 of Nyquist."""
    cutoff = 0.99 * min(1.0, 24000 / rate)
    reach = math.ceil(6 / cutoff)
    centre = outputs * rate // 24000
    index = centre[:, None] + torch.arange(-reach, reach + 2)
    t = ((index * 24000 - outputs[:, None] * rate).double() / 24000 * cutoff).clamp(-6, 6)
    weights = torch.sinc(t) * (math.pi * t / 12).cos() ** 2 * cutoff
    padded = torch.cat((torch.zeros(reach), sound, torch.zeros(reach + 2))).double()
    return (padded[index + reach] * weights).sum(1)


def _check_resampled(got: Tensor, sound: Tensor, rate: int) -> None:
    expected = resample(sound, rate, 24000)
    assert got.shape == expected.shape
    assert got.dtype == torch.float32
    # torchaudio has each filter's phase in float32 only, in zero crossings of the reduced rates: of 11127 Hz, hundreds.
    rounding = 3e-6 + 2.5e-7 * min(rate, 24000) / math.gcd(rate, 24000)
    torch.testing.assert_close(got, Resample(rate, 24000)(sound) if rate != 24000 else sound, rtol=0, atol=rounding)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-4 + rounding)
    some = torch.randperm(len(got), generator=torch.Generator().manual_seed(1))[:500]
    torch.testing.assert_close(got[some].double(), _definition(sound, rate, some), rtol=0, atol=rounding)


@pytest.mark.parametrize("seconds", [0.013, 1.3, 5.0, 10.7])
@pytest.mark.parametrize("rate", [rate for rate in _RATES if rate != 24000])
def test_resampled_as_a_whole(rate: int, seconds: float) -> None:
    sound = _sound(int(seconds * rate))
    _check_resampled(_resample(sound, rate), sound, rate)


@pytest.mark.parametrize("rate", _AWKWARD_RATES)
def test_resampled_without_keeping_the_filters(rate: int) -> None:
    sound = _sound(int(10.7 * rate))
    with Watch() as watch:
        got = _resample(sound, rate)
    assert watch.calls["sinc"] > 0
    _check_resampled(got, sound, rate)


@pytest.mark.parametrize("rate", [1000, 8000, 11025, 44100, 48000, 96000])
def test_filters_worked_out_where_needed_are_the_same(rate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = _sound(6 * rate)
    kept = _resample(sound, rate)
    # Many lots of outputs, one after the other.
    monkeypatch.setattr(frontend, "_MAX_KERNEL_VALUES", 1 << 17)
    resampler = Resampler(rate, 24000)
    resampler.is_dense = False
    out = _resample(sound, rate, resampler)
    rounding = 3e-6 + 2.5e-7 * min(rate, 24000) / math.gcd(rate, 24000)
    torch.testing.assert_close(out, kept, rtol=0, atol=rounding)
    some = torch.randperm(len(out), generator=torch.Generator().manual_seed(1))[:500]
    torch.testing.assert_close(out[some].double(), _definition(sound, rate, some), rtol=0, atol=2e-6)


@pytest.mark.parametrize("rate", [383_999, 44_101, 7919, 1001])
def test_filters_that_torchaudio_could_not_keep(rate: int) -> None:
    sound = _sound(11 * rate)
    got = _resample(sound, rate)
    assert len(got) == 11 * 24000
    some = torch.randperm(len(got), generator=torch.Generator().manual_seed(1))[:500]
    torch.testing.assert_close(got[some].double(), _definition(sound, rate, some), rtol=0, atol=2e-6)


@pytest.mark.parametrize("rate", [383_999, 44_101, 7919])
def test_a_tone_of_an_awkward_rate(rate: int) -> None:
    """Where torchaudio cannot be asked: a tone is the same tone, far out in a long recording too."""
    seconds, pitch = 11, 700.0

    def tone(samples: int, of: int) -> Tensor:
        return torch.sin(math.tau * pitch * torch.arange(samples, dtype=torch.float64) / of).float()

    got = _resample(tone(seconds * rate, rate), rate)
    expected = tone(seconds * 24000, 24000)
    assert got.shape == expected.shape
    torch.testing.assert_close(got[100:-100], expected[100:-100], rtol=0, atol=2e-3)


@pytest.mark.parametrize("rate", [383_999, 44_101, 1_001, 384_000])
def test_memory_of_awkward_rates(rate: int) -> None:
    frontend._transform.cache_clear()
    sound = _sound(6 * rate)
    with Watch() as watch:
        _resample(sound, rate)
    assert watch.largest <= 10_000_000, watch.largest_from


@settings(deadline=None, max_examples=40)
@given(
    rate=st.sampled_from([1000, 8000, 16000, 24000, 44100, 11118, 44101]),
    samples=st.integers(1, 300_000),
    first=st.floats(0, 1),
    share=st.floats(0, 1),
    more=st.integers(0, 100),
)
def test_any_stretch_is_had_from_its_window(rate: int, samples: int, first: float, share: float, more: int) -> None:
    sound = _sound(samples)
    resampler = Resampler(rate, 24000)
    length = resampler.length(samples)
    low = int(first * (length - 1))
    high = low + 1 + int(share * (length - low - 1))
    start, stop = resampler.window(low, high)
    assert 0 <= start <= stop
    got = resampler.convert(sound[start : stop + more], start, low, high)
    assert got.shape == (high - low,)
    torch.testing.assert_close(got, _resample(sound, rate)[low:high], rtol=0, atol=2e-6)


@pytest.mark.parametrize("rate", [*_RATES, 1001, 383_999])
@pytest.mark.parametrize("samples", [0, 1, 2, 7, 999, 50_001])
def test_length(rate: int, samples: int) -> None:
    assert Resampler(rate, 24000).length(samples) == -(-samples * 24000 // rate)
    if samples:
        assert len(_resample(_sound(samples), rate)) == Resampler(rate, 24000).length(samples)


def test_length_where_float32_is_short_of_digits() -> None:
    """113249 and 1/751 outputs: 113250."""
    samples = 750 + 751 * 150
    assert len(_resample(_sound(samples), 24_032)) == 113_250


def test_the_model_s_own_rate_passes_through() -> None:
    sound = _sound(1000)
    resampler = Resampler(24000, 24000)
    assert resampler.window(10, 20) == (10, 20)
    assert resampler.convert(sound[5:], 5, 10, 20).data_ptr() == sound[10:].data_ptr()


# Mel front end and segments.


def _whole_mel(config: TokenizerConfig, sound: Tensor) -> Tensor:
    """The spectrogram of the whole recording, centred, by torchaudio."""
    transform = MelSpectrogram(
        sample_rate=config.sampling_rate,
        n_fft=config.nfft,
        win_length=config.window_size,
        hop_length=config.hop_length,
        f_min=config.fmin,
        f_max=config.fmax,
        n_mels=config.n_mels,
        power=1.0,
        center=True,
    )
    return transform(sound).clamp(min=1e-7).log().T


def _cut_segments(
    config: TokenizerConfig, pieces: Iterable[npt.NDArray[Any]], rate: int | None = None
) -> list[Segment]:
    """The segments of a recording in pieces, (samples,) or (samples, channels)."""
    cutter = SegmentCutter(rate or config.sampling_rate, config)
    pieces = [piece if piece.ndim == 2 else piece[:, None] for piece in pieces]
    return [segment for piece in pieces for segment in cutter.push(piece)] + list(cutter.finish())


def _mels(config: TokenizerConfig, sound: Tensor, rate: int | None = None) -> list[Tensor]:
    """Mel frames of a recording's segments."""
    front_end = MelFrontEnd(config, CPU)
    return [front_end.segment(segment) for segment in _cut_segments(config, [sound.numpy()], rate)]


def _same(one: list[Segment], other: list[Segment]) -> bool:
    def facts(segment: Segment) -> tuple[Any, ...]:
        return segment.start, segment.sample_rate, segment.first_frame, segment.frames, segment.end, segment.pcm.dtype

    return [facts(segment) for segment in one] == [facts(segment) for segment in other] and all(
        np.array_equal(mine.pcm, theirs.pcm) for mine, theirs in zip(one, other, strict=True)
    )


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> int:
    """Segments of 10 mel frames in place of 6000."""
    monkeypatch.setattr(frontend, "SEGMENT_MEL_FRAMES", 10)
    return 10


_FRONT_ENDS: dict[str, dict[str, Any]] = {
    "published": {"nfft": 960, "window_size": 960, "hop_length": 240, "n_mels": 128, "sampling_rate": 24000},
    "tiny": {},
    "short window": {"window_size": 50},
    "hop half the FFT": {"hop_length": 48},
    "odd hop": {"hop_length": 23, "vocoder_padding": "center"},
    "range": {"fmin": 100, "fmax": 1000},
}


@pytest.mark.parametrize("name", _FRONT_ENDS)
def test_one_segment_is_the_centred_spectrogram(name: str) -> None:
    config = tiny_config(**_FRONT_ENDS[name])
    for samples in (config.nfft // 2 + 1, config.nfft, 12_345):
        sound = _sound(samples)
        (mel,) = _mels(config, sound)
        assert mel.shape == (samples // config.hop_length + 1, config.n_mels)
        torch.testing.assert_close(mel, _whole_mel(config, sound), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", _FRONT_ENDS)
def test_segments_are_a_split_of_the_whole(name: str, short_segments: int) -> None:
    config = tiny_config(**_FRONT_ENDS[name])
    hop = config.hop_length
    around = [short_segments * hop * n + off for n in (1, 2, 5) for off in range(-hop - 1, hop + 2, hop // 4)]
    for samples in (sum(around, config.nfft), *around, *(a + config.nfft // 2 for a in around)):
        sound = _sound(samples)
        segments = _mels(config, sound)
        whole = _whole_mel(config, sound)
        expected = [mel for mel in whole.split(short_segments) if config.code_frames(len(mel)) > 0]
        assert [len(mel) for mel in segments] == [len(mel) for mel in expected]
        torch.testing.assert_close(torch.cat(segments), torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rate", [1000, 2000, 4800, 4801, 44_100])
def test_segments_at_other_rates_are_a_split_of_the_whole(rate: int, short_segments: int) -> None:
    config = tiny_config()
    for seconds in (0.1, 0.31, 1.0, 1.77):
        sound = _sound(int(seconds * rate))
        resampler = Resampler(rate, config.sampling_rate)
        whole = _whole_mel(config, resampler.convert(sound, 0, 0, resampler.length(len(sound))))
        got = torch.cat(_mels(config, sound, rate))
        # Rounding shows in the logarithm of what is near 0: compare the magnitudes.
        torch.testing.assert_close(got.exp(), whole[: len(got)].exp(), rtol=1e-3, atol=1e-4)
        assert config.code_frames(len(whole) - len(got)) == 0


@settings(deadline=None, max_examples=150)
@given(
    name=st.sampled_from(sorted(_FRONT_ENDS)),
    rate=st.sampled_from([None, 1000, 8000, 11_118, 44_100, 44_101]),
    channels=st.integers(1, 2),
    int16=st.booleans(),
    segments=st.integers(0, 4),
    offset=st.integers(-60, 60),
    sizes=st.lists(st.integers(0, 3000), max_size=15),
)
def test_pieces_give_the_same_segments(
    name: str, rate: int | None, channels: int, int16: bool, segments: int, offset: int, sizes: list[int]
) -> None:
    config = tiny_config(**_FRONT_ENDS[name])
    rate = rate or config.sampling_rate
    at_model_rate = max(config.min_samples, segments * 10 * config.hop_length + offset)
    samples = -(-at_model_rate * rate // config.sampling_rate)
    sound = np.random.default_rng(0).uniform(-0.3, 0.3, (samples, channels))
    pcm = (sound * 32767).astype(np.int16) if int16 else sound.astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontend, "SEGMENT_MEL_FRAMES", 10)
        whole = _cut_segments(config, [pcm], rate)
        pieces = _cut_segments(config, _cut(pcm, sizes), rate)
        single = _cut_segments(config, np.array_split(pcm, max(1, samples // 170)), rate)
    assert _same(whole, pieces)
    assert _same(whole, single)


def test_a_segment_of_the_mean_of_the_channels() -> None:
    config = tiny_config()
    four = np.arange(4 * 200).reshape(-1, 4).astype(np.int16)
    (mono,) = _cut_segments(config, [four[:, 2]])
    assert mono.pcm.dtype == np.int16
    (mixed,) = _cut_segments(config, [four])
    assert mixed.pcm.dtype == np.float32
    np.testing.assert_array_equal(mixed.pcm, four.mean(axis=1) / 32768)
    front_end = MelFrontEnd(config, CPU)
    (scaled,) = _cut_segments(config, [(four[:, 2] / 32768).astype(np.float32)])
    assert torch.equal(front_end.segment(mono), front_end.segment(scaled))


def test_a_last_segment_too_short_for_a_frame_is_left_out(short_segments: int) -> None:
    config = tiny_config(kernel_size=6)
    assert [config.code_frames(frames) for frames in (1, 2, 5, 6, 7)] == [0, 0, 0, 0, 1]
    for mel_frames, expected in ((10, [10]), (12, [10]), (16, [10]), (17, [10, 7]), (20, [10, 10]), (21, [10, 10])):
        samples = (mel_frames - 1) * config.hop_length
        segments = _cut_segments(config, [_sound(samples).numpy()])
        assert [segment.frames for segment in segments] == expected


@pytest.mark.parametrize("rate", [2400, 8000, 4801])
@pytest.mark.parametrize("piece", [1, 100, 5000])
def test_the_cutter_forgets(piece: int, rate: int, short_segments: int) -> None:
    config = tiny_config()
    cutter = SegmentCutter(rate, config)
    kept = 0
    for _ in range(max(20, 20_000 // piece)):
        for _segment in cutter.push(np.zeros((piece, 1), np.float32)):
            pass
        kept = max(kept, sum(frontend._size_of_base(part) for part in cutter._pieces))
    at_model_rate = short_segments * config.hop_length + config.nfft + 2 * config.hop_length
    resampler = Resampler(rate, config.sampling_rate)
    segment = at_model_rate * rate // config.sampling_rate + 2 * resampler._context + resampler._source
    # A view keeps all that it was cut from until less than half of it is in use.
    assert 0 < kept <= 2 * 4 * (segment + piece)


@pytest.mark.parametrize("samples", [0, 1, 48])
def test_too_short_to_reflect(samples: int) -> None:
    cutter = SegmentCutter(2400, tiny_config())
    assert list(cutter.push(np.zeros((samples, 1), np.float32))) == []
    with pytest.raises(ValueError, match=rf"^{samples} samples are fewer than the 49 that a code frame takes$"):
        list(cutter.finish())


def test_silence_is_at_the_floor() -> None:
    (mel,) = _mels(tiny_config(), torch.zeros(500))
    assert torch.equal(mel, torch.full_like(mel, 1e-7).log())


def test_a_default_device_set_by_anyone_does_not_matter() -> None:
    config = tiny_config()
    sound = _sound(5000)
    (expected,) = _mels(config, sound)
    resampled = _resample(sound, 11118)
    dense = _resample(sound, 11025)
    frontend._transform.cache_clear()
    with torch.device("meta"):
        (mel,) = _mels(config, sound)
        assert torch.equal(mel, expected)
        assert torch.equal(_resample(sound, 11118), resampled)
        assert torch.equal(_resample(sound, 11025), dense)

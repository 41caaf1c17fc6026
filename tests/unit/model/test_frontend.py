"""Resampling and mel segments: torchaudio's on the whole, equal bit for bit however the sound is cut up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

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
from mimo_tokenizer_server.model.frontend import MelFrontEnd, Resampler, Segmenter

_RATES = [1000, 8000, 11025, 16000, 22050, 24000, 44100, 48000, 96000, 192000, 384000]
# In lowest terms with 24000 Hz so large that torchaudio's filters take more than 16 MiB, if still less than 100.
_AWKWARD_RATES = [7926, 11118]


def _sound(samples: int, seed: int = 0) -> Tensor:
    return torch.randn(samples, generator=torch.Generator().manual_seed(seed)) * 0.3


def _resample(pieces: Iterable[Tensor], source: int, target: int = 24000) -> Tensor:
    resampler = Resampler(source, target)
    out = [part for piece in pieces for part in resampler.push(piece)]
    return torch.cat([*out, *resampler.finish()])


def _cut(sound: Tensor, sizes: Iterable[int]) -> Iterator[Tensor]:
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
    _check_resampled(_resample([sound], rate), sound, rate)


@pytest.mark.parametrize("rate", _AWKWARD_RATES)
def test_resampled_without_keeping_the_filters(rate: int) -> None:
    sound = _sound(int(10.7 * rate))
    with Watch() as watch:
        got = _resample([sound], rate)
    assert watch.calls["sinc"] > 0
    _check_resampled(got, sound, rate)


@pytest.mark.parametrize("rate", [1000, 8000, 11025, 44100, 48000, 96000])
def test_filters_worked_out_where_needed_are_the_same(rate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = _sound(6 * rate)
    kept = _resample([sound], rate)
    # Many lots of outputs, one after the other.
    monkeypatch.setattr(frontend, "_MAX_KERNEL_VALUES", 1 << 17)
    resampler = Resampler(rate, 24000)
    resampler._dense = False
    out = torch.cat([*resampler.push(sound), *resampler.finish()])
    rounding = 3e-6 + 2.5e-7 * min(rate, 24000) / math.gcd(rate, 24000)
    torch.testing.assert_close(out, kept, rtol=0, atol=rounding)
    some = torch.randperm(len(out), generator=torch.Generator().manual_seed(1))[:500]
    torch.testing.assert_close(out[some].double(), _definition(sound, rate, some), rtol=0, atol=2e-6)


@pytest.mark.parametrize("rate", [383_999, 44_101, 7919, 1001])
def test_filters_that_torchaudio_could_not_keep(rate: int) -> None:
    sound = _sound(11 * rate)
    got = _resample([sound], rate)
    assert len(got) == 11 * 24000
    some = torch.randperm(len(got), generator=torch.Generator().manual_seed(1))[:500]
    torch.testing.assert_close(got[some].double(), _definition(sound, rate, some), rtol=0, atol=2e-6)


@pytest.mark.parametrize("rate", [383_999, 44_101, 7919])
def test_a_tone_of_an_awkward_rate(rate: int) -> None:
    """Where torchaudio cannot be asked: a tone is the same tone, far out in a long recording too."""
    seconds, pitch = 11, 700.0

    def tone(samples: int, of: int) -> Tensor:
        return torch.sin(math.tau * pitch * torch.arange(samples, dtype=torch.float64) / of).float()

    got = _resample([tone(seconds * rate, rate)], rate)
    expected = tone(seconds * 24000, 24000)
    assert got.shape == expected.shape
    torch.testing.assert_close(got[100:-100], expected[100:-100], rtol=0, atol=2e-3)


@pytest.mark.parametrize("rate", [383_999, 44_101, 1_001, 384_000])
def test_memory_of_awkward_rates(rate: int) -> None:
    frontend._transform.cache_clear()
    sound = _sound(6 * rate)
    with Watch() as watch:
        _resample([sound], rate)
    assert watch.largest <= 10_000_000, watch.largest_from


@settings(deadline=None, max_examples=25)
@given(
    rate=st.sampled_from([1000, 8000, 16000, 24000, 44100, 11118]),
    sizes=st.lists(st.integers(0, 90_000), max_size=12),
    samples=st.integers(1, 300_000),
)
def test_pieces_are_bit_equal_to_the_whole(rate: int, sizes: list[int], samples: int) -> None:
    sound = _sound(samples)
    assert torch.equal(_resample(_cut(sound, sizes), rate), _resample([sound], rate))


def test_many_small_pieces() -> None:
    sound = _sound(100_000)
    assert torch.equal(_resample(sound.split(160), 8000), _resample([sound], 8000))


@pytest.mark.parametrize("rate", [*_RATES, 1001, 383_999])
@pytest.mark.parametrize("samples", [0, 1, 2, 7, 999, 50_001])
def test_length(rate: int, samples: int) -> None:
    assert Resampler(rate, 24000).length(samples) == -(-samples * 24000 // rate)
    if samples:
        assert len(_resample([_sound(samples)], rate)) == Resampler(rate, 24000).length(samples)


def test_length_where_float32_is_short_of_digits() -> None:
    """113249 and 1/751 outputs: 113250."""
    samples = 750 + 751 * 150
    assert len(_resample([_sound(samples)], 24_032)) == 113_250


def test_nothing_in_nothing_out() -> None:
    assert list(Resampler(8000, 24000).finish()) == []


def test_the_model_s_own_rate_passes_through() -> None:
    sound = _sound(1000)
    assert [part.data_ptr() for part in Resampler(24000, 24000).push(sound)] == [sound.data_ptr()]


def _reached(root: Any) -> int:
    """Bytes of the tensors that an object keeps alive."""
    storages: dict[int, int] = {}
    todo, seen = [root], set()
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, (list, tuple)):
            todo.extend(item)
        elif isinstance(item, (Resampler, Segmenter)) or type(item).__name__ == "_Signal":
            todo.extend(vars(item).values())
    return sum(storages.values())


@pytest.mark.parametrize("piece", [1600, 40_000, 400_000])
@pytest.mark.parametrize("rate", [8000, 44_101])
def test_resampler_forgets(rate: int, piece: int) -> None:
    resampler = Resampler(rate, 24000)
    kept = 0
    sound = _sound(piece)
    for _ in range(30 * rate // piece + 3):
        for _out in resampler.push(sound.clone()):
            pass
        kept = max(kept, _reached(resampler))
    # A block and what its outputs see to either side, whatever came at once; twice that before it is copied.
    assert 0 < kept <= 2 * 4 * (6 * rate + 2 * rate)


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


def _segments(config: TokenizerConfig, pieces: Iterable[Tensor]) -> list[Tensor]:
    segmenter = Segmenter(MelFrontEnd(config, CPU))
    return [mel for piece in pieces for mel in segmenter.push(piece)] + list(segmenter.finish())


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
        (mel,) = _segments(config, [sound])
        assert mel.shape == (samples // config.hop_length + 1, config.n_mels)
        torch.testing.assert_close(mel, _whole_mel(config, sound), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", _FRONT_ENDS)
def test_segments_are_a_split_of_the_whole(name: str, short_segments: int) -> None:
    config = tiny_config(**_FRONT_ENDS[name])
    hop = config.hop_length
    around = [short_segments * hop * n + off for n in (1, 2, 5) for off in range(-hop - 1, hop + 2, hop // 4)]
    for samples in (sum(around, config.nfft), *around, *(a + config.nfft // 2 for a in around)):
        sound = _sound(samples)
        segments = _segments(config, [sound])
        whole = _whole_mel(config, sound)
        assert [len(mel) for mel in segments] == [len(mel) for mel in whole.split(short_segments)]
        torch.testing.assert_close(torch.cat(segments), whole, rtol=1e-4, atol=1e-4)


@settings(deadline=None, max_examples=150)
@given(
    name=st.sampled_from(sorted(_FRONT_ENDS)),
    segments=st.integers(0, 4),
    offset=st.integers(-60, 60),
    sizes=st.lists(st.integers(0, 3000), max_size=15),
)
def test_pieces_give_the_same_segments(name: str, segments: int, offset: int, sizes: list[int]) -> None:
    config = tiny_config(**_FRONT_ENDS[name])
    samples = max(config.nfft // 2 + 1, segments * 10 * config.hop_length + offset)
    sound = _sound(samples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontend, "SEGMENT_MEL_FRAMES", 10)
        whole = _segments(config, [sound])
        pieces = _segments(config, _cut(sound, sizes))
        single = _segments(config, sound.split(17))
    assert len(whole) == len(pieces) == len(single)
    assert all(map(torch.equal, whole, pieces))
    assert all(map(torch.equal, whole, single))


@pytest.mark.parametrize("piece", [1, 100, 5000])
def test_segmenter_forgets(piece: int, short_segments: int) -> None:
    config = tiny_config()
    segmenter = Segmenter(MelFrontEnd(config, CPU))
    kept = 0
    for _ in range(20_000 // piece):
        for _mel in segmenter.push(torch.zeros(piece)):
            pass
        kept = max(kept, _reached(segmenter))
    segment = short_segments * config.hop_length + config.nfft + 2 * config.hop_length
    assert 0 < kept <= 2 * 4 * segment


@pytest.mark.parametrize("samples", [0, 1, 48])
def test_too_short_to_reflect(samples: int) -> None:
    segmenter = Segmenter(MelFrontEnd(tiny_config(), CPU))
    assert list(segmenter.push(torch.zeros(samples))) == []
    with pytest.raises(ValueError, match=rf"^{samples} samples are fewer than the 49 that the mel front end takes$"):
        list(segmenter.finish())


def test_silence_is_at_the_floor() -> None:
    (mel,) = _segments(tiny_config(), [torch.zeros(500)])
    assert torch.equal(mel, torch.full_like(mel, 1e-7).log())


def test_a_default_device_set_by_anyone_does_not_matter() -> None:
    config = tiny_config()
    sound = _sound(5000)
    (expected,) = _segments(config, [sound])
    resampled = _resample([sound], 11118)
    dense = _resample([sound], 11025)
    frontend._transform.cache_clear()
    with torch.device("meta"):
        (mel,) = _segments(config, [sound])
        assert torch.equal(mel, expected)
        assert torch.equal(_resample([sound], 11118), resampled)
        assert torch.equal(_resample([sound], 11025), dense)

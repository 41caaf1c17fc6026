"""The real engine with the smallest model: answers, pieces, and what goes wrong on a device."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mimo_tokenizer_server.config import BUILT_IN_MODELS, ServeConfig
from mimo_tokenizer_server.device import DeviceError
from mimo_tokenizer_server.engine import DecodeVqWork, DecodeWork, DeviceFailure, EncodePiece, Engine, Work
from mimo_tokenizer_server.errors import Reason, RequestError
from mimo_tokenizer_server.model.config import ConfigError
from mimo_tokenizer_server.model.tokenizer import EncodeState, MiMoAudioTokenizer

TINY = ServeConfig(model="tiny", load_format="dummy", device="cpu")


def _codes(rows: int = 20, frames: int = 6, seed: int = 0) -> npt.NDArray[np.uint16]:
    sizes = [1024] * 2 + [128] * 18
    rng = np.random.default_rng(seed)
    return np.stack([rng.integers(0, size, frames) for size in sizes[:rows]]).astype(np.uint16)


def _encode(engine: Engine, recording: Any, pcm: npt.NDArray[Any], cuts: list[int]) -> npt.NDArray[Any]:
    edges = [0, *cuts, len(pcm)]
    answers = []
    for start, stop in itertools.pairwise(edges):
        (answer,) = engine.run([EncodePiece(recording, pcm[start:stop], last=stop == len(pcm))])
        assert isinstance(answer, np.ndarray), answer
        answers.append(answer)
    return np.concatenate(answers, axis=1)


# ---------------------------------------------------------------- answers


def test_answers_have_their_types_and_shapes(tiny_engine: Engine, build: Any) -> None:
    batch: list[Work] = [
        EncodePiece(build.recording(), build.pcm(24000), last=True),
        DecodeVqWork(_codes()),
        DecodeWork(_codes(), 2, int16=False),
        DecodeWork(_codes(), 2, int16=True),
    ]
    codes, features, samples, int16 = tiny_engine.run(batch)
    for answer, dtype, shape in (
        (codes, np.uint16, (20, 26)),
        (features, np.float32, (6, 128)),
        (samples, np.float32, (4 * 960,)),
        (int16, np.int16, (4 * 960,)),
    ):
        assert isinstance(answer, np.ndarray)
        assert answer.dtype == dtype
        assert answer.shape == shape


@pytest.mark.parametrize("rows", [1, 8, 19])
def test_fewer_rows_use_the_first_codebooks(tiny_engine: Engine, build: Any, rows: int) -> None:
    codes = _codes()
    few, rest, whole = tiny_engine.run([DecodeVqWork(codes[:rows]), DecodeVqWork(codes), DecodeVqWork(codes)])
    assert isinstance(few, np.ndarray)
    assert isinstance(rest, np.ndarray)
    assert isinstance(whole, np.ndarray)
    books = tiny_engine._model.encoder.quantizer
    expected = books.decode(torch.from_numpy(codes[:rows].astype(np.int32))).numpy()
    np.testing.assert_array_equal(few, expected)
    assert np.abs(few - whole).max() > 0
    pcm = build.pcm(5000)
    all_codes = _encode(tiny_engine, build.recording(), pcm, [])
    np.testing.assert_array_equal(_encode(tiny_engine, build.recording(num_quantizers=rows), pcm, []), all_codes[:rows])


def test_an_answer_does_not_depend_on_what_was_computed_before(tiny_engine: Engine) -> None:
    work = DecodeWork(_codes(seed=3), 0, int16=False)
    (first,) = tiny_engine.run([work])
    again = tiny_engine.run([DecodeWork(_codes(frames=50), 0, int16=False), work])[1]
    np.testing.assert_array_equal(np.asarray(first), np.asarray(again))


@pytest.mark.parametrize("rate", [24000, 16000, 44100, 44101])
@pytest.mark.parametrize("int16", [False, True])
def test_a_recording_in_pieces_is_one_recording(tiny_engine: Engine, build: Any, rate: int, int16: bool) -> None:
    pcm = build.pcm(2 * rate + 123, 2, int16=int16)
    whole = _encode(tiny_engine, build.recording(rate, group_size=4), pcm, [])
    assert whole.shape == (20, 52)
    for cuts in ([1], [rate], [5, 5, 6, 77, rate, 2 * rate + 122], list(range(999, 2 * rate, 999))):
        recording = build.recording(rate, group_size=4)
        np.testing.assert_array_equal(_encode(tiny_engine, recording, pcm, cuts), whole)
        assert recording.state is None


def test_recordings_do_not_mix(tiny_engine: Engine, build: Any) -> None:
    sounds = [build.pcm(9000, seed=seed) for seed in (1, 2)]
    alone = [_encode(tiny_engine, build.recording(), sound, []) for sound in sounds]
    recordings = [build.recording(), build.recording()]
    for recording, sound in zip(recordings, sounds, strict=True):
        tiny_engine.run([EncodePiece(recording, sound[:4000], last=False)])
    for recording, sound, expected in zip(recordings, sounds, alone, strict=True):
        (answer,) = tiny_engine.run([EncodePiece(recording, sound[4000:], last=True)])
        np.testing.assert_array_equal(np.asarray(answer), expected)


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[npt.NDArray[Any]]:
    """The mono samples that reach the model."""
    seen: list[npt.NDArray[Any]] = []
    push = EncodeState.push

    def keep(self: EncodeState, samples: torch.Tensor) -> torch.Tensor:
        seen.append(samples.numpy())
        return push(self, samples)

    monkeypatch.setattr(EncodeState, "push", keep)
    return seen


def test_channels_are_mixed_by_their_mean(tiny_engine: Engine, build: Any, pushed: list[Any]) -> None:
    mono = build.pcm(9000)
    # Powers of two, so that the mean is exact.
    four = np.concatenate([mono * 2, mono * 0, mono * 0, mono * 2], axis=1)
    for pcm in (mono, four):
        _encode(tiny_engine, build.recording(), pcm, [])
    for samples in pushed:
        np.testing.assert_array_equal(samples, mono[:, 0])
    assert len(pushed) == 2


def test_int16_stands_for_parts_of_32768(tiny_engine: Engine, build: Any, pushed: list[Any]) -> None:
    pcm = build.pcm(9000, int16=True)
    pcm[:2, 0] = -32768, 32767
    _encode(tiny_engine, build.recording(), pcm, [])
    _encode(tiny_engine, build.recording(), np.repeat(pcm, 2, axis=1), [])
    for samples in pushed:
        assert samples.dtype == np.float32
        np.testing.assert_array_equal(samples, pcm[:, 0] / 32768)
    assert len(pushed) == 2


def test_int16_answers_are_rounded_and_clipped(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [0, 0.4, 0.6, -0.4, -0.6, 1.5, 2.5, 32766.6, 32767, 32768, 1e9, -32768, -32769, -1e9]
    values = torch.tensor(steps, dtype=torch.float64).div(32768).float()
    monkeypatch.setattr(MiMoAudioTokenizer, "decode", lambda self, codes: values)
    (answer,) = tiny_engine.run([DecodeWork(_codes(), 0, int16=True)])
    assert np.asarray(answer).tolist() == [
        0, 0, 1, 0, -1, 2, 2, 32767, 32767, 32767, 32767, -32768, -32768, -32768,
    ]  # fmt: skip


def test_bfloat16_weights_give_answers_of_the_same_types(build: Any) -> None:
    engine = Engine(dataclasses.replace(TINY, dtype="bfloat16"))
    assert engine.info.dtype == "bfloat16"
    codes, features, samples = engine.run(
        [
            EncodePiece(build.recording(), build.pcm(5000), last=True),
            DecodeVqWork(_codes()),
            DecodeWork(_codes(), 0, int16=False),
        ]
    )
    assert np.asarray(codes).dtype == np.uint16
    assert np.asarray(features).dtype == np.float32
    assert np.asarray(samples).dtype == np.float32
    assert np.isfinite(np.asarray(samples)).all()


# ---------------------------------------------------------------- start


def test_info_tells_what_is_loaded(tiny_engine: Engine) -> None:
    info = tiny_engine.info
    assert (info.model_id, info.revision, info.random_weights) == ("tiny", "", True)
    assert (info.device, info.dtype, info.memory_total) == ("cpu", "float32", 0)
    assert info.device_name
    assert tiny_engine.memory_allocated() == 0


def test_the_seed_makes_the_weights_and_the_fingerprint(tiny_engine: Engine) -> None:
    other = Engine(dataclasses.replace(TINY, seed=1))
    again = Engine(dataclasses.replace(TINY, model=str(BUILT_IN_MODELS["tiny"])))
    assert again.info.fingerprint == tiny_engine.info.fingerprint != other.info.fingerprint
    work = DecodeVqWork(_codes())
    features = [np.asarray(engine.run([work])[0]) for engine in (tiny_engine, again, other)]
    np.testing.assert_array_equal(features[0], features[1])
    assert np.abs(features[0] - features[2]).max() > 0


def test_a_default_device_of_somebody_else_does_not_matter(tiny_engine: Engine, build: Any) -> None:
    work = DecodeWork(_codes(), 0, int16=False)
    pcm = build.pcm(5000)
    expected = np.asarray(tiny_engine.run([work])[0])
    codes = _encode(tiny_engine, build.recording(44100), pcm, [])
    with torch.device("meta"):
        engine = Engine(TINY)
        np.testing.assert_array_equal(np.asarray(engine.run([work])[0]), expected)
        np.testing.assert_array_equal(_encode(engine, build.recording(44100), pcm, []), codes)


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"device": "nonsense:0"}, DeviceError, "there is no device 'nonsense:0'"),
        ({"dtype": "int3"}, ValueError, "'int3' is no dtype; write auto, float32"),
        ({"model": "no/such/file.json"}, Exception, "no/such/file.json"),
    ],
)
def test_what_cannot_be_loaded_is_told(changes: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        Engine(dataclasses.replace(TINY, **changes))


def test_a_config_that_is_not_supported_is_refused(tmp_path: Path) -> None:
    config = BUILT_IN_MODELS["tiny"].read_text().replace('"vocoder_padding": "same"', '"vocoder_padding": "none"')
    file = tmp_path / "odd.json"
    file.write_text(config)
    with pytest.raises(ConfigError, match="vocoder_padding is 'none'"):
        Engine(dataclasses.replace(TINY, model=str(file)))


# ---------------------------------------------------------------- failures


def _raise(error: Exception) -> Any:
    def method(*args: Any, **kwargs: Any) -> Any:
        raise error

    return method


def _allocate(*args: Any, **kwargs: Any) -> Any:
    return torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize(
    "method",
    [
        _raise(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
        _raise(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
        _raise(MemoryError()),
        _allocate,
    ],
)
def test_too_little_memory_fails_one_item(
    tiny_engine: Engine, build: Any, monkeypatch: pytest.MonkeyPatch, method: Any
) -> None:
    encode = EncodePiece(build.recording(), build.pcm(36_000), last=True)
    batch: list[Work] = [encode, DecodeVqWork(_codes()), DecodeWork(_codes(), 0, int16=False)]
    with monkeypatch.context() as patch:
        patch.setattr(EncodeState, "push", method)
        patch.setattr(MiMoAudioTokenizer, "decode_vq", method)
        patch.setattr(MiMoAudioTokenizer, "decode", method)
        answers = tiny_engine.run(batch)
    for answer, size in zip(answers, ("1.5 seconds of audio", "6 frames", "6 frames"), strict=True):
        assert isinstance(answer, RequestError)
        assert answer.reason is Reason.OUT_OF_MEMORY
        assert str(answer) == f"cpu has too little free memory for this item of {size}"
        assert answer.value == size
    encode = EncodePiece(build.recording(), build.pcm(36_000), last=True)
    assert all(isinstance(answer, np.ndarray) for answer in tiny_engine.run([encode, *batch[1:]]))


def test_one_item_without_memory_does_not_fail_its_neighbours(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = MiMoAudioTokenizer.decode

    def short(self: MiMoAudioTokenizer, codes: torch.Tensor) -> torch.Tensor:
        if codes.shape[1] > 10:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode(self, codes)

    monkeypatch.setattr(MiMoAudioTokenizer, "decode", short)
    works = [DecodeWork(_codes(frames=frames), 0, int16=False) for frames in (4, 11, 5)]
    first, second, third = tiny_engine.run(works)
    assert isinstance(second, RequestError)
    assert (np.asarray(first).shape, np.asarray(third).shape) == ((4 * 960,), (5 * 960,))


def test_a_device_error_is_a_device_failure(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might")
    monkeypatch.setattr(MiMoAudioTokenizer, "decode", _raise(error))
    with pytest.raises(DeviceFailure) as failure:
        tiny_engine.run([DecodeWork(_codes(), 0, int16=False)])
    assert str(failure.value) == "cpu failed: CUDA error: an illegal memory access was encountered"


def test_another_error_is_raised_as_it_is(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("shapes cannot be multiplied")
    monkeypatch.setattr(MiMoAudioTokenizer, "decode", _raise(error))
    with pytest.raises(RuntimeError) as failure:
        tiny_engine.run([DecodeWork(_codes(), 0, int16=False)])
    assert failure.value is error

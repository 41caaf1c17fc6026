"""The real engine with the smallest model: answers, pieces, and what goes wrong on a device."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F

from mimo_tokenizer_server import memory
from mimo_tokenizer_server.config import BUILT_IN_MODELS, ServeConfig
from mimo_tokenizer_server.device import DeviceError
from mimo_tokenizer_server.engine import STEP_SECONDS, Computation, DeviceFailure, Engine
from mimo_tokenizer_server.errors import Reason, RequestError
from mimo_tokenizer_server.memory import Division, MemoryLimitError
from mimo_tokenizer_server.model import checkpoint
from mimo_tokenizer_server.model.config import ConfigError
from mimo_tokenizer_server.model.frontend import MelFrontEnd, Segment
from mimo_tokenizer_server.model.packing import Spans
from mimo_tokenizer_server.model.tokenizer import MiMoAudioTokenizer
from mimo_tokenizer_server.work import Cost, DecodeVqWork, DecodeWork, EncodeWork, Kind, Work

TINY = ServeConfig(model="tiny", load_format="dummy", device="cpu")


def _codes(rows: int = 20, frames: int = 6, seed: int = 0) -> npt.NDArray[np.uint16]:
    sizes = [1024] * 2 + [128] * 18
    rng = np.random.default_rng(seed)
    return np.stack([rng.integers(0, size, frames) for size in sizes[:rows]]).astype(np.uint16)


def _encode(engine: Engine, build: Any, pcm: npt.NDArray[Any], rate: int = 24000, rows: int = 20) -> npt.NDArray[Any]:
    """Codes of a recording of one segment, computed alone."""
    return _answer(engine, build.encode_work(pcm, rate, rows))


def _answer(engine: Engine, work: Work) -> npt.NDArray[Any]:
    """The answer to work that is computed alone."""
    (answer,) = engine.run([work])
    assert isinstance(answer, np.ndarray), answer
    return answer


def _decode(frames: int, seed: int = 0, rows: int = 20, left: int = 0, int16: bool = False) -> DecodeWork:
    return DecodeWork(_codes(rows, frames, seed), left, int16)


def _snr(signal: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    """Decibels of `signal` over its difference from `other`."""
    noise = float(np.square(signal.astype(np.float64) - other).sum())
    return float("inf") if noise == 0 else 10 * np.log10(float(np.square(signal.astype(np.float64)).sum()) / noise)


# ---------------------------------------------------------------- answers


def test_answers_have_their_types_and_shapes(tiny_engine: Engine, build: Any) -> None:
    (codes,) = tiny_engine.run([build.encode_work(build.pcm(24000))])
    (features,) = tiny_engine.run([DecodeVqWork(_codes())])
    samples, int16 = tiny_engine.run([_decode(6, left=2), _decode(6, left=2, int16=True)])
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
    expected = books.decode(torch.from_numpy(codes[:rows].astype(np.int32)), Spans([6])).numpy()
    np.testing.assert_array_equal(few, expected)
    np.testing.assert_array_equal(rest, whole)
    assert np.abs(few - whole).max() > 0
    pcm = build.pcm(5000)
    all_codes = _encode(tiny_engine, build, pcm)
    np.testing.assert_array_equal(_encode(tiny_engine, build, pcm, rows=rows), all_codes[:rows])


def test_an_answer_does_not_depend_on_what_was_computed_before(tiny_engine: Engine) -> None:
    work = DecodeWork(_codes(seed=3), 0, int16=False)
    (first,) = tiny_engine.run([work])
    tiny_engine.run([_decode(50)])
    (again,) = tiny_engine.run([work])
    np.testing.assert_array_equal(np.asarray(first), np.asarray(again))


@pytest.mark.parametrize("rate", [24000, 16000, 44100, 44101])
def test_a_batch_of_segments_gives_each_its_own_codes(tiny_engine: Engine, build: Any, rate: int) -> None:
    works = [
        build.encode_work(build.pcm(int(seconds * rate), 2, seed, int16), rate, rows)
        for seed, (seconds, int16, rows) in enumerate([(2.1, False, 20), (0.05, True, 8), (1.0, False, 1)])
    ]
    together = tiny_engine.run(works)
    for work, answer, shape in zip(works, together, [(20, 53), (8, 2), (1, 26)], strict=True):
        assert np.asarray(answer).shape == shape
        assert np.asarray(answer).flags["C_CONTIGUOUS"]
        np.testing.assert_array_equal(answer, _answer(tiny_engine, work))


@pytest.fixture
def mels(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The samples that the mel front end is given, with the reflected ends."""
    seen: list[torch.Tensor] = []
    call = MelFrontEnd.__call__

    def keep(self: MelFrontEnd, samples: torch.Tensor) -> torch.Tensor:
        seen.append(samples)
        return call(self, samples)

    monkeypatch.setattr(MelFrontEnd, "__call__", keep)
    return seen


def _centre(samples: torch.Tensor, count: int) -> npt.NDArray[Any]:
    half = 480
    centre: npt.NDArray[Any] = samples[half : half + count].numpy()
    return centre


def test_channels_are_mixed_by_their_mean(tiny_engine: Engine, build: Any, mels: list[torch.Tensor]) -> None:
    mono = build.pcm(9000)
    # Powers of two, so that the mean is exact.
    four = np.concatenate([mono * 2, mono * 0, mono * 0, mono * 2], axis=1)
    for pcm in (mono, four):
        _encode(tiny_engine, build, pcm)
    assert len(mels) == 2
    for samples in mels:
        np.testing.assert_array_equal(_centre(samples, 9000), mono[:, 0])


def test_int16_stands_for_parts_of_32768(tiny_engine: Engine, build: Any, mels: list[torch.Tensor]) -> None:
    pcm = build.pcm(9000, int16=True)
    pcm[:2, 0] = -32768, 32767
    _encode(tiny_engine, build, pcm)
    _encode(tiny_engine, build, np.repeat(pcm, 2, axis=1))
    assert len(mels) == 2
    for samples in mels:
        assert samples.dtype == torch.float32
        np.testing.assert_array_equal(_centre(samples, 9000), pcm[:, 0] / 32768)


def test_int16_answers_are_rounded_and_clipped(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [0, 0.4, 0.6, -0.4, -0.6, 1.5, 2.5, 32766.6, 32767, 32768, 1e9, -32768, -32769, -1e9]
    values = torch.tensor(steps, dtype=torch.float64).div(32768).float()
    frame = F.pad(values, (0, 960 - len(values)))
    monkeypatch.setattr(MiMoAudioTokenizer, "decode", lambda self, codes, spans, books: frame)
    answer = _answer(tiny_engine, _decode(1, int16=True))
    assert answer[: len(steps)].tolist() == [
        0, 0, 1, 0, -1, 2, 2, 32767, 32767, 32767, 32767, -32768, -32768, -32768,
    ]  # fmt: skip


def test_bfloat16_weights_give_answers_of_the_same_types(build: Any) -> None:
    engine = Engine(dataclasses.replace(TINY, dtype="bfloat16"))
    assert engine.info.dtype == "bfloat16"
    assert _encode(engine, build, build.pcm(5000)).dtype == np.uint16
    assert _answer(engine, DecodeVqWork(_codes())).dtype == np.float32
    samples = _answer(engine, _decode(6))
    assert samples.dtype == np.float32
    assert np.isfinite(samples).all()


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
    codes = _encode(tiny_engine, build, pcm, 44100)
    with torch.device("meta"):
        engine = Engine(TINY)
        np.testing.assert_array_equal(np.asarray(engine.run([work])[0]), expected)
        np.testing.assert_array_equal(_encode(engine, build, pcm, 44100), codes)


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


_OUT_OF_MEMORY = [
    _raise(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
    _raise(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
    _raise(MemoryError()),
    _allocate,
]


@pytest.mark.parametrize("method", _OUT_OF_MEMORY)
def test_too_little_memory_for_an_item_is_told_with_its_size(
    tiny_engine: Engine, build: Any, monkeypatch: pytest.MonkeyPatch, method: Any
) -> None:
    works: list[Work] = [build.encode_work(build.pcm(36_000)), DecodeVqWork(_codes()), _decode(6)]
    with monkeypatch.context() as patch:
        for name in ("encode", "decode_vq", "decode"):
            patch.setattr(MiMoAudioTokenizer, name, method)
        answers = [tiny_engine.run([work])[0] for work in works]
    for answer, size in zip(answers, ("1.5 seconds of audio", "6 frames", "6 frames"), strict=True):
        assert isinstance(answer, RequestError)
        assert answer.reason is Reason.OUT_OF_MEMORY
        assert str(answer) == f"cpu has too little free memory for this item of {size}"
        assert answer.value == size
    for work in works:
        _answer(tiny_engine, work)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Memory for 20 frames: what `decode` was asked for, in frames."""
    seen: list[int] = []
    decode = MiMoAudioTokenizer.decode

    def short(self: MiMoAudioTokenizer, codes: torch.Tensor, spans: Spans, books: Any = None) -> torch.Tensor:
        seen.append(spans.total)
        if spans.total > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode(self, codes, spans, books)

    monkeypatch.setattr(MiMoAudioTokenizer, "decode", short)
    return seen


def test_a_batch_without_memory_is_halved(tiny_engine: Engine, decoded: list[int]) -> None:
    works = [_decode(frames, seed=frames) for frames in (9, 4, 5, 10, 6, 7)]
    together = tiny_engine.run(works)
    assert decoded == [41, 15, 26, 7, 19]
    for work, answer in zip(works, together, strict=True):
        assert _snr(_answer(tiny_engine, work), np.asarray(answer)) >= 90


def test_one_item_without_memory_does_not_fail_its_neighbours(tiny_engine: Engine, decoded: list[int]) -> None:
    works = [_decode(frames, seed=frames) for frames in (4, 21, 5)]
    first, second, third = tiny_engine.run(works)
    assert isinstance(second, RequestError)
    assert second.reason is Reason.OUT_OF_MEMORY
    assert second.value == "21 frames"
    for answer, work in ((first, works[0]), (third, works[2])):
        assert _snr(_answer(tiny_engine, work), np.asarray(answer)) >= 90
    # And those that come later are computed together again.
    decoded.clear()
    assert all(isinstance(answer, np.ndarray) for answer in tiny_engine.run([works[0], works[2]]))
    assert decoded == [9]


def test_an_item_that_fails_does_not_spoil_the_others(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch, log_lines: list[logging.LogRecord]
) -> None:
    decode = MiMoAudioTokenizer.decode

    def fail(self: MiMoAudioTokenizer, codes: torch.Tensor, spans: Spans, books: Any = None) -> torch.Tensor:
        if 7 in spans.lengths:
            raise RuntimeError("shapes cannot be multiplied")
        return decode(self, codes, spans, books)

    monkeypatch.setattr(MiMoAudioTokenizer, "decode", fail)
    works = [_decode(frames, seed=frames) for frames in (8, 7, 3)]
    answers = tiny_engine.run(works)
    assert isinstance(answers[1], RequestError)
    assert answers[1].reason is Reason.INTERNAL
    assert "its log says why" in str(answers[1])
    for index in (0, 2):
        np.testing.assert_array_equal(answers[index], _answer(tiny_engine, works[index]))
    faults = [record for record in log_lines if record.exc_info]
    assert [str(record.exc_info[1]) for record in faults if record.exc_info] == ["shapes cannot be multiplied"] * 2


def test_what_fails_at_once_does_not_make_the_device_fast(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates come from what was computed; a failure takes no time."""
    works = [_decode(1000), _decode(1001)]
    for work in works:
        tiny_engine.run([work])
    rate = tiny_engine._measured[Kind.DECODE].rate
    with monkeypatch.context() as patch:
        patch.setattr(MiMoAudioTokenizer, "decode", _OUT_OF_MEMORY[0])
        assert all(isinstance(answer, RequestError) for answer in tiny_engine.run(works))
    assert tiny_engine._measured[Kind.DECODE].rate == rate


def test_the_rate_is_the_best_that_was_seen(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    works = [_decode(100), _decode(120)]
    measured = tiny_engine._measured[Kind.DECODE]

    def in_steps() -> None:
        computation = tiny_engine.begin(works[0])
        while computation.step() is None:
            pass

    for compute in (lambda: tiny_engine.run(works), in_steps):
        with monkeypatch.context() as patch:
            patch.setattr(measured, "rate", 1.0)
            compute()
            learned = measured.rate
            assert learned > 1e6
            patch.setattr(measured, "rate", 1e18)
            compute()
            assert measured.rate == 1e18


# What a GPU that has failed refuses first may come from PyTorch or from a library, and only the former has a class.
_DEVICE_ERRORS = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`\nmore"),
]


@pytest.mark.parametrize("error", _DEVICE_ERRORS, ids=["PyTorch", "cuBLAS"])
def test_an_error_of_a_lost_device_is_a_device_failure(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr("mimo_tokenizer_server.device.works", lambda device: False)
    for method in ("decode", "decode_steps"):
        monkeypatch.setattr(MiMoAudioTokenizer, method, _raise(error))
    with pytest.raises(DeviceFailure) as failure:
        tiny_engine.run([_decode(6), _decode(7)])
    assert str(failure.value) == f"cpu failed: {str(error).splitlines()[0]}"
    with pytest.raises(DeviceFailure):
        tiny_engine.begin(_decode(200)).step()


@pytest.mark.parametrize("error", _DEVICE_ERRORS, ids=["PyTorch", "cuBLAS"])
def test_an_error_that_the_device_survives_fails_the_item(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with monkeypatch.context() as patch:
        for method in ("decode", "decode_steps"):
            patch.setattr(MiMoAudioTokenizer, method, _raise(error))
        answers = [*tiny_engine.run([_decode(6), _decode(7)]), tiny_engine.begin(_decode(200)).step()]
    for answer in answers:
        assert isinstance(answer, RequestError)
        assert answer.reason is Reason.INTERNAL
    assert len(_answer(tiny_engine, _decode(6))) == 6 * 960


# ---------------------------------------------------------------- batches


def test_answers_stand_where_their_work_stood(tiny_engine: Engine) -> None:
    lengths = [30, 1, 17, 2, 45, 17, 3]
    works = [_decode(frames, seed) for seed, frames in enumerate(lengths)]
    for work, answer, frames in zip(works, tiny_engine.run(works), lengths, strict=True):
        assert np.asarray(answer).shape == (frames * 960,)
        assert _snr(_answer(tiny_engine, work), np.asarray(answer)) >= 90
    features = [DecodeVqWork(_codes(rows, frames, frames)) for rows, frames in ((20, 9), (1, 30), (8, 2), (20, 1))]
    for vq_work, answer in zip(features, tiny_engine.run(features), strict=True):
        np.testing.assert_array_equal(answer, _answer(tiny_engine, vq_work))


@pytest.mark.parametrize(
    ("kernel", "stride", "pool"), [(3, 2, 2), (4, 2, 1), (5, 2, 2), (7, 2, 2), (1, 1, 1), (2, 3, 2)]
)
def test_frames_that_are_missing_are_filled_up_for_any_encoder(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: int, stride: int, pool: int
) -> None:
    changes = {"kernel_size": kernel, "stride_size": stride, "decoder_stride_size": stride, "avg_pooler": pool}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(BUILT_IN_MODELS["tiny"].read_text()) | changes))
    engine = Engine(dataclasses.replace(TINY, model=str(path)))
    segment = Segment(build.pcm(24000)[:, 0], 0, 24000, 0, 101, 24000)
    work = EncodeWork(segment, 20)
    codes = _answer(engine, work)
    encode, frames = engine._model.encode, []

    def watched(mel: torch.Tensor, spans: Spans, books: int) -> torch.Tensor:
        frames.append(sum(map(engine.info.config.code_frames, spans.lengths)))
        return encode(mel, spans, books)

    monkeypatch.setattr(engine._model, "encode", watched)
    for missing in (1, 2, 3, 50):
        monkeypatch.setattr(engine, "_least_frames", codes.shape[1] + missing)
        np.testing.assert_array_equal(_answer(engine, work), codes)
        assert frames.pop() >= codes.shape[1] + missing


@pytest.mark.parametrize("least", [0, 40, 88, 89, 128])
def test_frames_for_large_enough_products_are_in_no_answer(
    build: Any, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    """As on a GPU in reduced precision."""
    engine = Engine(TINY)
    works: list[Work] = [
        _decode(frames, seed, rows, left=min(frames - 1, seed), int16=seed % 2 == 1)
        for seed, (frames, rows) in enumerate([(30, 19), (4, 3), (1, 19), (9, 8), (40, 1), (4, 19)])
    ]
    expected = [_answer(engine, work) for work in works]
    monkeypatch.setattr(engine, "_least_frames", least)
    frames = []
    decode = engine._model.decode

    def watched(codes: torch.Tensor, spans: Spans, books: list[int]) -> torch.Tensor:
        frames.append(spans.total)
        return decode(codes, spans, books)

    monkeypatch.setattr(engine._model, "decode", watched)
    for one, other in zip(expected, engine.run(works), strict=True):
        assert isinstance(other, np.ndarray)
        assert other.dtype == one.dtype
        assert _snr(one, other) > 90 or (one.dtype == np.int16 and np.abs(one.astype(int) - other).max() <= 1)
    assert frames == [max(88, least)]
    sounds: list[Work] = [
        build.encode_work(build.pcm(24000 * seconds), num_quantizers=9 - seconds) for seconds in (2, 1)
    ]
    monkeypatch.setattr(engine, "_least_frames", 0)
    alone = [_answer(engine, work) for work in sounds]
    monkeypatch.setattr(engine, "_least_frames", least)
    for codes, answer in zip(alone, engine.run(sounds), strict=True):
        np.testing.assert_array_equal(codes, answer)


def test_formats_and_left_contexts_in_one_batch(tiny_engine: Engine) -> None:
    works = [
        _decode(frames, frames, rows, left, int16)
        for frames, rows, left, int16 in [
            (12, 20, 0, False), (5, 8, 2, True), (7, 20, 7, True), (30, 1, 29, False), (3, 20, 0, True),
            (9, 2, 4, False),
        ]
    ]  # fmt: skip
    for work, answer in zip(works, tiny_engine.run(works), strict=True):
        whole = _answer(tiny_engine, DecodeWork(work.codes, 0, int16=False))
        samples = np.asarray(answer)
        assert samples.dtype == (np.int16 if work.int16 else np.float32)
        wanted = whole[work.left_context_frames * 960 :]
        assert samples.shape == wanted.shape
        if work.int16:
            assert np.abs(samples - np.clip(np.rint(wanted * 32768), -32768, 32767)).max(initial=0) <= 1
        else:
            assert _snr(wanted, samples) >= 90


@pytest.fixture(scope="module")
def invariant_engine() -> Engine:
    """An engine whose answers are the same bits in every batch."""
    return Engine(dataclasses.replace(TINY, batch_invariant=True))


def test_batch_invariant_answers_are_the_same_bits_in_every_company(invariant_engine: Engine, build: Any) -> None:
    assert invariant_engine.info.batch_invariant
    batches: list[list[Work]] = [
        [_decode(frames, seed, 20, 1, seed % 2 == 0) for seed, frames in enumerate((25, 3, 100, 25, 64, 7))],
        [build.encode_work(build.pcm(samples, seed=samples)) for samples in (24_000, 500, 100_000, 31_337)],
        [DecodeVqWork(_codes(frames=frames)) for frames in (5, 80, 1)],
    ]
    for batch in batches:
        alone = [_answer(invariant_engine, work) for work in batch]
        for answer, wanted in zip(invariant_engine.run(batch), alone, strict=True):
            np.testing.assert_array_equal(answer, wanted)
        for answer, wanted in zip(invariant_engine.run(batch[::-1]), alone[::-1], strict=True):
            np.testing.assert_array_equal(answer, wanted)


# ---------------------------------------------------------------- steps


def _in_steps(computation: Computation) -> tuple[Any, int]:
    """The answer, and the steps that it took."""
    steps, left = 1, computation.seconds_left
    while (answer := computation.step()) is None:
        steps += 1
        assert 0 <= computation.seconds_left <= left
        left = computation.seconds_left
    return answer, steps


@pytest.mark.parametrize("parts", [1, 7, 100])
def test_steps_give_the_answer_of_a_batch(tiny_engine: Engine, build: Any, parts: int) -> None:
    works: list[Work] = [
        _decode(150),
        _decode(150, 1, 8, 140, int16=True),
        _decode(1),
        build.encode_work(build.pcm(100_000)),
        build.encode_work(build.pcm(50_000, 2, int16=True), 16_000, 8),
    ]
    for work in works:
        whole = _answer(tiny_engine, work)
        answer, steps = _in_steps(Computation(tiny_engine, work, tiny_engine._flops(work) / parts))
        assert answer.dtype == whole.dtype
        assert answer.shape == whole.shape
        if whole.dtype == np.float32:
            assert _snr(whole, answer) >= 90
        else:
            assert np.abs(answer.astype(int) - whole).max() <= (1 if whole.dtype == np.int16 else 0)
        if parts > 1 and len(whole.T) > 960:
            assert steps > parts / 2


def test_begin_makes_steps_of_a_bounded_length(tiny_engine: Engine) -> None:
    work = _decode(3000)
    cost = tiny_engine.cost(work)
    assert cost.stepwise
    computation = tiny_engine.begin(work)
    assert computation.seconds_left == pytest.approx(cost.seconds, rel=0.1)
    before = computation.seconds_left
    computation.step()
    # The model's pieces are at most a step long; the last of them may be begun within it.
    assert 0 < before - computation.seconds_left <= 2 * STEP_SECONDS
    computation.close()
    computation.close()


def test_a_computation_that_is_closed_gives_its_memory_back(tiny_engine: Engine) -> None:
    """Begun and left off, over and over: what is alive does not grow."""
    work = _decode(500)
    peaks = []
    for count in (1, 8):

        def many(count: int = count) -> None:
            for _ in range(count):
                # A step is over after its first piece, however busy the machine.
                computation = Computation(tiny_engine, work, 1.0, tiny_engine._flops(work) / 10)
                for _ in range(20):
                    assert computation.step() is None
                computation.close()

        peaks.append(memory.peak_of(many, torch.device("cpu")))
    assert peaks[1] <= 1.1 * peaks[0]


def test_interleaved_computations_do_not_mix(tiny_engine: Engine) -> None:
    works = [_decode(200, seed) for seed in range(3)]
    wanted = [_answer(tiny_engine, work) for work in works]
    running = {seed: Computation(tiny_engine, work, tiny_engine._flops(work) / 9) for seed, work in enumerate(works)}
    rng = np.random.default_rng(0)
    while running:
        seed = int(rng.choice(list(running)))
        tiny_engine.run([_decode(5)])
        if (answer := running[seed].step()) is not None:
            del running[seed]
            assert _snr(wanted[seed], np.asarray(answer)) >= 90


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), Reason.OUT_OF_MEMORY),
        (RuntimeError("shapes cannot be multiplied"), Reason.INTERNAL),
    ],
)
def test_a_step_that_fails_answers_with_why(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: Reason
) -> None:
    work = _decode(200)
    steps = MiMoAudioTokenizer.decode_steps

    def short(self: MiMoAudioTokenizer, codes: torch.Tensor, flops: float) -> Generator[float, None, torch.Tensor]:
        done = 0.0
        for piece in steps(self, codes, flops):
            done += piece
            yield piece
            if done > self.decode_flops(200) / 2:
                raise error

    with monkeypatch.context() as patch:
        patch.setattr(MiMoAudioTokenizer, "decode_steps", short)
        computation = Computation(tiny_engine, work, tiny_engine._flops(work) / 20)
        assert computation.step() is None
        while (answer := computation.step()) is None:
            pass
    assert isinstance(answer, RequestError)
    assert answer.reason is reason
    if reason is Reason.OUT_OF_MEMORY:
        assert answer.value == "200 frames"
    assert isinstance(_in_steps(tiny_engine.begin(work))[0], np.ndarray)


# ---------------------------------------------------------------- costs

CPU = torch.device("cpu")


def _spread(build: Any) -> dict[str, list[Work]]:
    """Batches of all kinds, of few and of many, of short, long and mixed items."""
    return {
        "one frame": [_decode(1)],
        "a chunk": [_decode(25)],
        "chunks": [_decode(25, seed, int16=seed % 2 == 0) for seed in range(8)],
        "all lengths": [_decode(frames, frames, left=frames // 2) for frames in range(1, 41)],
        "a window": [_decode(280)],
        "windows": [_decode(280, seed) for seed in range(8)],
        "a minute": [_decode(1500)],
        "features": [DecodeVqWork(_codes(frames=1000))],
        "features of all lengths": [DecodeVqWork(_codes(frames=frames)) for frames in range(1, 51)],
        "a second": [build.encode_work(build.pcm(24_000))],
        "seconds": [build.encode_work(build.pcm(24_000, seed=seed)) for seed in range(8)],
        "sounds of all lengths": [build.encode_work(build.pcm(samples)) for samples in (2400, 24_000, 72_000, 480_000)],
        "a segment": [build.encode_work(build.pcm(59 * 24_000))],
        "a second at 16 kHz": [build.encode_work(build.pcm(16_000), 16_000)],
        "one frame of sound": [build.encode_work(build.pcm(900))],
        "half a minute at 44.1 kHz": [build.encode_work(build.pcm(30 * 44_100, 2, int16=True), 44_100)],
    }


def _costs(engine: Engine, works: list[Work]) -> list[Cost]:
    """What each takes in a batch, also where it would be computed in steps."""
    limits = engine.info
    engine.info = dataclasses.replace(limits, max_batch_frames=1 << 40, memory=Division(0, 0, 0, 1 << 60, 0))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mimo_tokenizer_server.engine.BATCH_SECONDS", 1e9)
            return [engine.cost(work) for work in works]
    finally:
        engine.info = limits


def test_a_batch_takes_what_was_foretold(tiny_engine: Engine, build: Any) -> None:
    for name, works in _spread(build).items():
        costs = _costs(tiny_engine, works)
        assert not any(cost.stepwise for cost in costs)
        foretold = sum(cost.bytes for cost in costs)
        peak = memory.peak_of(functools.partial(tiny_engine.run, works), CPU)
        assert peak <= foretold, name
        assert foretold <= 6 * peak + len(works) * (1 << 20), name


def test_steps_take_what_was_foretold(tiny_engine: Engine, build: Any) -> None:
    """The state; and for what is computed at the moment, no more than a batch may take."""
    sounds = [build.encode_work(build.pcm(seconds * 24_000)) for seconds in (20, 58)]
    sounds.append(build.encode_work(build.pcm(441_010), 44_101))
    works: list[Work] = [_decode(1000), _decode(5000), *sounds]
    tight = dataclasses.replace(tiny_engine.info, max_batch_frames=1)
    for work in works:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny_engine, "info", tight)
            cost = tiny_engine.cost(work)
        assert cost.stepwise
        computation = Computation(tiny_engine, work, tiny_engine._flops(work) / 128)
        peak = memory.peak_of(functools.partial(_in_steps, computation), CPU)
        assert peak <= cost.bytes, cost
        assert cost.bytes <= 6 * peak, cost
        peak = memory.peak_of(functools.partial(_in_steps, tiny_engine.begin(work)), CPU)
        assert peak <= cost.bytes + tiny_engine.info.memory.activations, cost


def test_what_is_too_long_or_too_large_for_a_batch_is_computed_in_steps(tiny_engine: Engine, build: Any) -> None:
    assert not tiny_engine.cost(_decode(25)).stepwise
    info = tiny_engine.info
    for changes in (
        {"max_batch_frames": 24},
        {"memory": dataclasses.replace(info.memory, activations=tiny_engine.cost(_decode(25)).bytes - 1)},
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny_engine, "info", dataclasses.replace(info, **changes))
            assert tiny_engine.cost(_decode(25)).stepwise
            assert not tiny_engine.cost(_decode(24)).stepwise
            # There are no steps to do it in, nor any need.
            assert not tiny_engine.cost(DecodeVqWork(_codes(frames=10_000))).stepwise
    assert tiny_engine.cost(_decode(45_000)).stepwise
    kinds = [Kind.ENCODE, Kind.DECODE, Kind.DECODE_VQ]
    works: list[Work] = [build.encode_work(build.pcm(24_000)), _decode(26), DecodeVqWork(_codes(frames=26))]
    costs = [tiny_engine.cost(work) for work in works]
    assert [(cost.kind, cost.frames) for cost in costs] == [(kind, 26) for kind in kinds]
    assert all(cost.seconds > 0 and cost.bytes > 0 for cost in costs)


# ---------------------------------------------------------------- how memory is divided


def test_the_parts_are_the_whole(tiny_engine: Engine) -> None:
    division = tiny_engine.info.memory
    assert division.weights == checkpoint.parameter_bytes(tiny_engine._model)
    assert division.weights + division.fixed + division.activations + division.state == division.limit
    assert min(dataclasses.astuple(division)) > 0
    total, free = memory.available(CPU)
    assert division.limit <= min(0.9 * total, total)
    assert free <= total


def test_a_limit_is_divided() -> None:
    division = Division.of(1000, 300, 100, 200)
    assert division == Division(limit=1000, weights=300, fixed=100, activations=200, state=400)
    # Where there is little, a batch has half.
    assert Division.of(500, 300, 100, 200) == Division(limit=500, weights=300, fixed=100, activations=50, state=50)


@pytest.mark.parametrize("limit", [0, 300 << 20, 400 << 20])
def test_a_limit_that_leaves_nothing_is_told(limit: int) -> None:
    with pytest.raises(MemoryLimitError) as refused:
        Division.of(limit, 300 << 20, 100 << 20, 1)
    assert str(refused.value) == (
        f"the memory limit of {limit >> 20} MiB leaves nothing to compute with: the weights take 300 MiB, libraries and"
        " workspaces 100 MiB"
    )


def test_an_engine_with_too_low_a_limit_does_not_start() -> None:
    with pytest.raises(MemoryLimitError, match=r"^the memory limit of 64 MiB leaves nothing .* weights take 10 MiB"):
        Engine(dataclasses.replace(TINY, device_memory_limit="64MiB"))


def test_an_engine_keeps_to_its_limit() -> None:
    limit = memory.resident() + (200 << 20)
    engine = Engine(dataclasses.replace(TINY, device_memory_limit=str(limit), max_batch_frames=500))
    division = engine.info.memory
    assert division.limit == limit
    assert division.state <= 200 << 20
    assert division.activations >= engine.cost(_decode(500)).bytes or engine.cost(_decode(500)).stepwise


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("12GiB", 12 << 30), ("12 GiB", 12 << 30), ("800MiB", 800 << 20), ("64kib", 64 << 10), ("1.5gb", 1_500_000_000),
        ("2MB", 2_000_000), ("3KB", 3_000), ("123456789", 123456789), (" 123456789 ", 123456789), ("2", 2),
    ],
)  # fmt: skip
def test_amounts_of_memory(text: str, wanted: int) -> None:
    assert memory.parse_limit(text, CPU) == wanted
    assert memory.limit(text, CPU) == wanted


@pytest.mark.parametrize(("text", "share"), [("50%", 0.5), ("0.5", 0.5), ("100%", 1.0), ("1", 1.0), ("12.5 %", 0.125)])
def test_shares_of_memory(text: str, share: float) -> None:
    assert memory.parse_limit(text, CPU) == int(memory.available(CPU)[0] * share)


@pytest.mark.parametrize("text", ["", "lots", "GiB", "-1", "0", "0%", "101%", "1e9", "nan", "inf", "1 GiB 2", "1.2.3"])
def test_no_amounts_of_memory(text: str) -> None:
    with pytest.raises(MemoryLimitError) as refused:
        memory.parse_limit(text, CPU)
    assert str(refused.value) == (
        f"{text!r} is no amount of memory: write bytes, 12GiB, 800MiB, or a share such as 50% or 0.5"
    )


def test_a_container_s_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_CGROUP_LIMITS", (str(tmp_path / "none"), str(file)))
    file.write_text("max\n")
    total, _ = memory.available(CPU)
    file.write_text(f"{100 << 20}\n")
    assert memory.available(CPU) == (100 << 20, 100 << 20)
    assert memory.parse_limit("50%", CPU) == 50 << 20
    assert memory.limit(None, CPU) == 90 << 20
    file.write_text(f"{total * 2}\n")
    assert memory.available(CPU)[0] == total


def test_peak_of_counts_what_is_alive_together() -> None:
    weights = torch.ones(1000)

    def function() -> None:
        first = weights * 2  # 4,000 bytes
        second = first.double()  # 8,000 more
        del first
        _ = second[10:].view(-1, 10)  # a view takes none
        third = second + 1
        del second, third
        weights.view(10, 100)

    assert memory.peak_of(function, CPU) == 16_000


def test_batch_invariant_goes_the_same_way_at_any_speed() -> None:
    """What is computed in steps, and in what pieces, must not follow from what the device has shown so far."""
    engine = Engine(ServeConfig(model="tiny", load_format="dummy", device="cpu", batch_invariant=True))
    works: list[Work] = [_decode(frames) for frames in (1, 40, 700, 6000, 9000)]
    ways, answers = [], []
    for rate in (1e6, 1e9, 1e15):
        for measured in engine._measured.values():
            measured.rate = rate
        ways.append([engine.cost(work).stepwise for work in works])
        answers.append(_in_steps(engine.begin(works[2]))[0])
    assert ways == [[False, False, False, True, True]] * 3
    for answer in answers[1:]:
        np.testing.assert_array_equal(answer, answers[0])


def test_sound_whose_filters_take_long_goes_in_steps(tiny_engine: Engine, build: Any) -> None:
    """At 44,101 Hz resampling takes longer than the model: neither a batch nor a step may be that long."""
    work = build.encode_work(build.pcm(10 * 44_101), 44_101)
    assert tiny_engine.cost(work).stepwise
    assert not tiny_engine.cost(build.encode_work(build.pcm(44_100), 44_100)).stepwise
    pieces = 0
    for _ in tiny_engine._model.mel.segment_steps(work.segment):
        pieces += 1
    assert pieces >= 5
    np.testing.assert_array_equal(_in_steps(tiny_engine.begin(work))[0], _answer(tiny_engine, work))


def test_many_short_items_are_reckoned_with(tiny_engine: Engine, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each takes beside its arithmetic: of thousands of chunks, no batch is as long as that would let it be."""
    for work in (build.encode_work(build.pcm(900)), _decode(1)):
        measured = tiny_engine._measured[tiny_engine.cost(work).kind]
        assert measured.item_seconds >= 0
        monkeypatch.setattr(measured, "item_seconds", 0.01)
        assert 0.01 < tiny_engine.cost(work).seconds < 0.02


@pytest.mark.parametrize(
    "sentence",
    [
        "CUDA error: out of memory",
        "cuFFT error: CUFFT_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_memory_that_lacks_has_many_names(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch, sentence: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(MiMoAudioTokenizer, "decode", _raise(RuntimeError(sentence)))
        (answer,) = tiny_engine.run([_decode(6)])
    assert isinstance(answer, RequestError)
    assert answer.reason is Reason.OUT_OF_MEMORY


def test_a_device_without_memory_to_try_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    from mimo_tokenizer_server import device as devices

    assert devices.works(torch.device("cpu"))
    for error, works in ((torch.OutOfMemoryError("none"), True), (RuntimeError("device-side assert"), False)):
        monkeypatch.setattr(torch, "ones", _raise(error))
        assert devices.works(torch.device("cpu")) is works

"""The engine with int8 weights: what it tells, what it answers, and what it takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file

from mimo_tokenizer_server.config import BUILT_IN_MODELS, ServeConfig
from mimo_tokenizer_server.engine import Computation, Engine
from mimo_tokenizer_server.model import checkpoint
from mimo_tokenizer_server.model.config import TokenizerConfig
from mimo_tokenizer_server.model.int8 import QuantizeError
from mimo_tokenizer_server.model.tokenizer import MiMoAudioTokenizer
from mimo_tokenizer_server.work import DecodeWork, EncodeWork, Work

INT8 = ServeConfig(model="tiny", load_format="dummy", device="cpu", quantize="int8")


@pytest.fixture(scope="module")
def engine() -> Engine:
    """With the decoder quantized."""
    return Engine(INT8)


@pytest.fixture(scope="module")
def whole() -> Engine:
    """With the encoder quantized, too."""
    return Engine(dataclasses.replace(INT8, quantize_encoder=True))


def _decode(frames: int, seed: int = 0) -> DecodeWork:
    rng = np.random.default_rng(seed)
    sizes = [1024] * 2 + [128] * 18
    codes = np.stack([rng.integers(0, size, frames) for size in sizes]).astype(np.uint16)
    return DecodeWork(codes, 0, int16=False)


def _answer(engine: Engine, work: Work) -> npt.NDArray[Any]:
    (answer,) = engine.run([work])
    assert isinstance(answer, np.ndarray), answer
    return answer


def _noise(expected: npt.NDArray[Any], got: npt.NDArray[Any]) -> float:
    return float(np.square(got.astype(np.float64) - expected).sum())


def _snr(expected: npt.NDArray[Any], got: npt.NDArray[Any]) -> float:
    return float(10 * np.log10(np.square(expected.astype(np.float64)).sum() / _noise(expected, got)))


def test_info_tells_what_it_costs(engine: Engine, whole: Engine, tiny_engine: Engine, build: Any) -> None:
    assert (tiny_engine.info.quantization, tiny_engine.info.loss) == ("none", None)
    for quantized in (engine, whole):
        info, loss = quantized.info, quantized.info.loss
        assert info.quantization == "int8"
        assert info.fingerprint == tiny_engine.info.fingerprint
        assert loss is not None
        assert loss.encoder is (quantized is whole)
        measured = _snr(_answer(tiny_engine, _decode(100)), _answer(quantized, _decode(100)))
        assert abs(loss.decode_snr - measured) < 4
        sound = build.encode_work(build.pcm(48_000))
        equal = float((_answer(tiny_engine, sound) == _answer(quantized, sound)).mean())
        if quantized is whole:
            assert 0.5 < loss.equal_codes < 1
            assert equal < 1
        else:
            assert equal == loss.equal_codes == 1


def test_weights_take_less(engine: Engine, whole: Engine, tiny_engine: Engine) -> None:
    config = tiny_engine.info.config
    layer = 4 * config.d_model**2 + 2 * config.d_model * config.decoder_ffn_dim
    takes = [one.info.memory.weights for one in (tiny_engine, engine, whole)]
    for before, after, layers in zip(takes, takes[1:], (config.decoder_layers, config.encoder_layers), strict=False):
        # Three of the four bytes of each weight, less a scale for each of its rows.
        assert 0.9 * 3 * layers * layer < before - after < 3 * layers * layer


def test_batches_and_steps_are_as_near_as_alone(engine: Engine, tiny_engine: Engine) -> None:
    works = [_decode(frames, seed) for seed, frames in enumerate((25, 3, 100, 25, 64, 7))]
    expected = [_answer(tiny_engine, work) for work in works]
    together = [np.asarray(answer) for answer in engine.run(works)]
    in_steps = []
    for work in works:
        computation = Computation(engine, work, engine._flops(work) / 20)
        while (answer := computation.step()) is None:
            pass
        in_steps.append(np.asarray(answer))
    alone = sum(map(_noise, expected, [_answer(engine, work) for work in works]))
    for answers in (together, in_steps):
        assert 0 < sum(map(_noise, expected, answers)) <= 10**0.1 * alone


def test_batch_invariant(build: Any) -> None:
    engine = Engine(dataclasses.replace(INT8, quantize_encoder=True, batch_invariant=True))
    batches: list[list[Work]] = [
        [_decode(frames, seed) for seed, frames in enumerate((25, 3, 100, 25, 64, 7))],
        [build.encode_work(build.pcm(samples, seed=samples)) for samples in (24_000, 500, 100_000)],
    ]
    for batch in batches:
        for answer, work in zip(engine.run(batch), batch, strict=True):
            np.testing.assert_array_equal(answer, _answer(engine, work))


def test_an_item_that_is_no_number_spoils_no_other(whole: Engine, build: Any) -> None:
    """Clients cannot send such sound; what a model makes of extreme ones is like it."""
    good, bad = build.encode_work(build.pcm(24_000)), build.encode_work(build.pcm(24_000, seed=1) * np.float32("nan"))
    assert isinstance(bad, EncodeWork)
    answers = whole.run([bad, good, bad])
    np.testing.assert_array_equal(answers[1], whole.run([good, good, good])[1])


@pytest.mark.parametrize("encoder", [False, True])
def test_a_checkpoint_is_quantized_as_dummy_weights_are(tmp_path: Path, encoder: bool) -> None:
    """Other layers may be packed on their way from the file, these not."""
    model = MiMoAudioTokenizer(TokenizerConfig.from_file(BUILT_IN_MODELS["tiny"]), torch.device("cpu"), torch.float32)
    checkpoint.fill_random(model, 0, lambda: None)
    save_file(
        {key: value.contiguous() for key, value in checkpoint._targets(model).items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_bytes(BUILT_IN_MODELS["tiny"].read_bytes())
    engines = [
        Engine(dataclasses.replace(INT8, quantize_encoder=encoder, **changes))
        for changes in ({}, {"model": str(tmp_path), "load_format": "safetensors"})
    ]
    losses = [one.info.loss for one in engines]
    assert losses[0] is not None
    assert losses[1] is not None
    assert losses[1].decode_snr == pytest.approx(losses[0].decode_snr, abs=0.5)
    assert losses[1].decode_snr < 60
    assert len({one.info.memory.weights for one in engines}) == 1


def test_what_cannot_be_quantized_does_not_start() -> None:
    with pytest.raises(QuantizeError, match="int8 is for float32 weights on cpu"):
        Engine(dataclasses.replace(INT8, dtype="bfloat16"))

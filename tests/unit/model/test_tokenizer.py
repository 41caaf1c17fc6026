"""The tokenizer as a whole: shapes, types, and where it lives. What batches do to answers is in tests/exactness."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_helpers import (
    CPU,
    decode_alone,
    encode_alone,
    random_codes,
    random_mel,
    tiny_config,
    tiny_tokenizer,
)

from mimo_tokenizer_server import memory
from mimo_tokenizer_server.model import checkpoint
from mimo_tokenizer_server.model.packing import Spans
from mimo_tokenizer_server.model.tokenizer import MiMoAudioTokenizer


@pytest.fixture(scope="module")
def tokenizer() -> MiMoAudioTokenizer:
    return tiny_tokenizer()


@pytest.mark.parametrize("kernel_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(("stride", "pool"), [(1, 1), (2, 2), (3, 1), (2, 3)])
def test_frames_are_as_many_as_the_config_says(kernel_size: int, stride: int, pool: int) -> None:
    changes: dict[str, Any] = {"kernel_size": kernel_size, "stride_size": stride, "decoder_stride_size": stride}
    tokenizer = tiny_tokenizer(**changes, avg_pooler=pool)
    config = tokenizer.config
    lengths = [frames for frames in range(1, 40) if config.code_frames(frames) >= 1]
    assert lengths[-1] == 39
    spans = Spans(lengths)
    frames = [config.code_frames(length) for length in lengths]
    codes = tokenizer.encode(random_mel(config, spans.total), spans, 3)
    assert codes.shape == (3, sum(frames))
    assert codes.dtype == torch.int64
    assert tokenizer.encoder.features(random_mel(config, spans.total), spans)[1].lengths == tuple(frames)
    for length, expected in zip(lengths, frames, strict=True):
        assert encode_alone(tokenizer, random_mel(config, length)).shape == (3, expected)


@pytest.mark.parametrize("rows", [1, 2])
def test_fewer_rows(tokenizer: MiMoAudioTokenizer, rows: int) -> None:
    mel = random_mel(tokenizer.config, 160)
    assert torch.equal(encode_alone(tokenizer, mel, rows), encode_alone(tokenizer, mel)[:rows])


def test_shapes_of_what_is_decoded(tokenizer: MiMoAudioTokenizer) -> None:
    spans = Spans([3, 1, 7])
    codes = random_codes(tokenizer.config, 11)
    features = tokenizer.decode_vq(codes, spans)
    assert features.shape == (11, 16)
    assert features.dtype == torch.float32
    assert tokenizer.decode(codes, spans).shape == (11 * 96,)
    centred = tiny_tokenizer(vocoder_padding="center")
    assert centred.decode(codes, spans).shape == (11 * 96 - 3 * 24,)


def test_default_device_of_anyone() -> None:
    """A default device, which stands in for cuda:0, gets nothing: all is on the device that was asked for."""
    expected = tiny_tokenizer()
    mel, codes = random_mel(expected.config, 160), random_codes(expected.config, 20)
    mel_spans, spans = [90, 70], [12, 8]

    def answers(tokenizer: MiMoAudioTokenizer) -> list[torch.Tensor]:
        steps = tokenizer.decode_steps(codes, 1e6)
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                stepwise: torch.Tensor = stop.value
                break
        return [
            tokenizer.encode(mel, Spans(mel_spans), 3),
            tokenizer.decode(codes, Spans(spans)),
            tokenizer.decode(codes, Spans(spans), [1, 3]),
            stepwise,
        ]

    of_expected = answers(expected)
    with torch.device("meta"):
        tokenizer = tiny_tokenizer()
        assert {parameter.device for parameter in tokenizer.parameters()} == {CPU}
        assert {buffer.device for buffer in tokenizer.buffers()} <= {CPU}
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(answers(tokenizer), of_expected, strict=True))
    torch.set_default_device("meta")
    try:
        tokenizer = tiny_tokenizer()
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(answers(tokenizer), of_expected, strict=True))
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
    waveform = decode_alone(tokenizer, encode_alone(tokenizer, random_mel(tokenizer.config, 160)))
    assert waveform.dtype == torch.float32
    assert waveform.isfinite().all()


def test_bfloat16_is_near_float32() -> None:
    codes = random_codes(tiny_config(), 60)
    exact, rounded = (decode_alone(tiny_tokenizer(dtype), codes) for dtype in (torch.float32, torch.bfloat16))
    assert 10 * torch.log10(exact.square().sum() / (exact - rounded).square().sum()) > 20


def test_an_answer_does_not_depend_on_what_was_asked_before(tokenizer: MiMoAudioTokenizer) -> None:
    mel = random_mel(tokenizer.config, 300)
    first = encode_alone(tokenizer, mel)
    encode_alone(tokenizer, random_mel(tokenizer.config, 20, seed=1))
    assert torch.equal(encode_alone(tokenizer, mel), first)


def test_tile_rows_must_be_positive() -> None:
    with pytest.raises(ValueError, match="tile_rows is 0"):
        MiMoAudioTokenizer(tiny_config(), CPU, torch.float32, tile_rows=0)


def test_parameter_bytes() -> None:
    tokenizer = tiny_tokenizer(torch.bfloat16)
    expected = sum(p.numel() * (4 if p.dtype == torch.float32 else 2) for p in tokenizer.parameters())
    assert checkpoint.parameter_bytes(tokenizer) == expected


@pytest.mark.parametrize("skip", [None, 0, 3])
def test_memory_is_the_same_with_fewer_layers(skip: int | None) -> None:
    tokenizer = tiny_tokenizer(encoder_skip_layer_id=skip, encoder_layers=12, decoder_layers=12, vocoder_num_layers=12)
    mel, codes = random_mel(tokenizer.config, 90), random_codes(tokenizer.config, 40)
    flops = tokenizer.decode_flops(1)

    def peaks() -> list[int]:
        with torch.inference_mode():
            return [
                memory.peak_of(function, CPU)
                for function in (
                    lambda: encode_alone(tokenizer, mel),
                    lambda: list(tokenizer.encode_steps(mel, tokenizer.config.num_quantizers, flops)),
                    lambda: decode_alone(tokenizer, codes),
                    lambda: list(tokenizer.decode_steps(codes, flops)),
                )
            ]

    sound, expected = decode_alone(tokenizer, codes), peaks()
    whole = tokenizer.decode_flops(10), tokenizer.encode_flops(10)
    for layers, less in ((2, True), (30, False), (None, False)):
        with tokenizer.shallow(layers):
            assert peaks() == expected
            for now, before in zip((tokenizer.decode_flops(10), tokenizer.encode_flops(10)), whole, strict=True):
                assert now < before if less else now == before
    with pytest.raises(ZeroDivisionError), tokenizer.shallow(1):
        raise ZeroDivisionError
    assert torch.equal(decode_alone(tokenizer, codes), sound)

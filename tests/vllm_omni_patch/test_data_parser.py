"""Stage 0 through the service: the front end's real data parser, a real server."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_harness as harness
import numpy as np
import pytest
from engine_harness import parse_audio, through
from model_folders import AUDIO_CHANNELS, GROUP_SIZE
from service_process import ServiceProcess

from mimo_tokenizer_client import InvalidInput

ADDRESS_KEY = "mimo_audio_tokenizer_address"


def sound(seconds: float, rate: int, seed: int = 0, channels: int = 0) -> tuple[np.ndarray[Any, Any], int]:
    """Noise with a swell and a tone in it, (samples,) or (channels, samples), and its rate."""
    generator = np.random.default_rng(seed)
    samples = int(seconds * rate)
    shape = (channels, samples) if channels else (samples,)
    swell = np.abs(np.sin(np.linspace(0, 7, samples)))
    tone = np.sin(np.arange(samples) * 2 * np.pi * (200 + 40 * seed) / rate)
    return (0.1 * generator.standard_normal(shape) * swell + 0.3 * tone).astype(np.float32), rate


SOUNDS = (
    sound(1.0, 24_000),
    sound(0.5, 24_000, 1),
    sound(3.21, 16_000, 2),
    sound(2.0, 44_100, 3),
    sound(1.3, 8_000, 4),
    sound(1.0, 24_000, 5, channels=2),
)


@pytest.mark.parametrize("one", SOUNDS, ids=lambda one: f"{one[0].shape}@{one[1]}")
def test_codes_are_those_of_the_in_process_worker(
    make_parser: Callable[..., Any], service: ServiceProcess, one: tuple[np.ndarray[Any, Any], int]
) -> None:
    (here,) = parse_audio(make_parser(), one)
    (there,) = parse_audio(make_parser(through(service.address)), one)
    np.testing.assert_array_equal(here, there)
    assert there.shape[0] == AUDIO_CHANNELS
    assert there.shape[1] % GROUP_SIZE == 0


def test_several_sounds_of_one_request(make_parser: Callable[..., Any], service: ServiceProcess) -> None:
    here = parse_audio(make_parser(), *SOUNDS)
    there = parse_audio(make_parser(through(service.address)), *SOUNDS)
    for first, second in zip(here, there, strict=True):
        np.testing.assert_array_equal(first, second)


def test_what_the_parser_hands_on_has_the_same_types(make_parser: Callable[..., Any], service: ServiceProcess) -> None:
    answers = []
    for parser in (make_parser(), make_parser(through(service.address))):
        codes = parser._parse_audio_data([sound(1.0, 24_000)]).get(0)
        answers.append((type(codes), type(codes[0]), type(codes[0][0]), codes))
    assert answers[0] == answers[1]


def test_no_folder_is_needed_and_the_environment_stays_as_it_was(
    make_parser: Callable[..., Any], service: ServiceProcess
) -> None:
    parser = make_parser(through(service.address))
    assert "MIMO_AUDIO_TOKENIZER_PATH" not in os.environ
    assert "MIMO_AUDIO_TOKENIZER_DEVICE" not in os.environ
    assert parser.audio_tokenizer_path == service.address
    assert parser.mimo_tokenizer.address == service.address


def test_an_address_wins_over_path_and_device_and_says_so(
    make_parser: Callable[..., Any], service: ServiceProcess, plugin_lines: list[logging.LogRecord]
) -> None:
    ignored = {"MIMO_AUDIO_TOKENIZER_PATH": "/nowhere/at/all", "MIMO_AUDIO_TOKENIZER_DEVICE": "cuda:1"}
    parser = make_parser(through(service.address) | ignored)
    assert parser.mimo_tokenizer.address == service.address
    assert {name: os.environ[name] for name in ignored} == ignored
    warnings = [line.getMessage() for line in plugin_lines if line.levelno == logging.WARNING]
    for name, value in ignored.items():
        assert f"{name}={value} is ignored: the tokenizer is the service at {service.address}" in warnings


def test_the_address_in_the_deploy_yaml_reaches_the_front_end(
    make_language_model: Callable[..., Path], set_environment: Callable[..., None], service: ServiceProcess
) -> None:
    set_environment({})
    info = harness.build_processing_info(
        make_language_model(audio_channels=6, group_size=5), hf_overrides={ADDRESS_KEY: service.address}
    )
    parser = info.get_data_parser()
    (codes,) = parse_audio(parser, sound(1.0, 24_000))
    # The language model's own numbers, which the tokenizer does not know.
    assert codes.shape == (6, 30)
    assert (parser.mimo_tokenizer.audio_channels, parser.mimo_tokenizer.group_size) == (6, 5)


def test_the_whole_processor_of_the_front_end_encodes_through_the_service(
    language_model: Path, set_environment: Callable[..., None], service: ServiceProcess, make_parser: Callable[..., Any]
) -> None:
    one = sound(1.0, 24_000)
    (here,) = parse_audio(make_parser(), one)
    set_environment(through(service.address))
    info = harness.build_processing_info(language_model)
    items = info.parse_mm_data({"audio": [one]})
    np.testing.assert_array_equal(np.asarray(items["audio"].get(0)), here)


def test_audio_that_cannot_be_encoded_fails_with_a_sentence_and_harms_nothing(
    make_parser: Callable[..., Any], service: ServiceProcess
) -> None:
    parser = make_parser(through(service.address))
    with pytest.raises(InvalidInput, match="481"):
        parse_audio(parser, (np.zeros(100, np.float32), 24_000))
    with pytest.raises(InvalidInput, match=r"(?i)nan|finite"):
        parse_audio(parser, (np.full(24_000, np.nan, np.float32), 24_000))
    assert parse_audio(parser, sound(1.0, 24_000))[0].shape == (AUDIO_CHANNELS, 28)

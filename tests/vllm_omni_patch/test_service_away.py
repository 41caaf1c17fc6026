"""The service goes away and comes back, under the real stage and the real parser."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_harness import decode_step, flat_codes, parse_audio, random_codes, snr, through
from model_folders import AUDIO_CHANNELS, SAMPLES_PER_FRAME
from service_process import ServiceProcess

from mimo_tokenizer_client import ServiceUnavailable

ONE_SECOND = (np.sin(np.arange(24_000) * 0.05).astype(np.float32), 24_000)
SLOTS = [flat_codes(random_codes(8 + 4 * seed, seed)) for seed in range(3)]


@pytest.fixture
def own(make_service: Callable[..., ServiceProcess]) -> ServiceProcess:
    """A service that the test may end."""
    return make_service().start()


def lengths(waveforms: list[Any]) -> list[int]:
    return [waveform.numel() // SAMPLES_PER_FRAME for waveform in waveforms]


def impatient(address: str, **more: str) -> dict[str, str]:
    return through(address) | {"MIMO_AUDIO_TOKENIZER_UNAVAILABLE_TIMEOUT": "1", **more}


def test_killed_during_a_step_and_brought_back_the_step_completes(
    make_code2wav: Callable[..., Any], own: ServiceProcess, errors: Any
) -> None:
    stage = make_code2wav(through(own.address))
    before = decode_step(stage, SLOTS)
    # Held, so that the step is certainly under way when the server dies.
    own.pause()
    answer: list[Any] = []
    step = threading.Thread(target=lambda: answer.extend(decode_step(stage, SLOTS)))
    step.start()
    step.join(1.0)
    assert step.is_alive()
    own.kill()
    own.start()
    step.join(60)
    assert lengths(answer) == [8, 12, 16]
    assert all(snr(first, second) >= 90 for first, second in zip(before, answer, strict=True))
    assert list(errors) == []


def test_down_for_good_a_step_stays_silent_and_the_next_one_works(
    make_code2wav: Callable[..., Any], own: ServiceProcess, errors: Any
) -> None:
    stage = make_code2wav(impatient(own.address))
    assert lengths(decode_step(stage, SLOTS)) == [8, 12, 16]
    own.kill()
    assert lengths(decode_step(stage, SLOTS)) == [0, 0, 0]
    (line,) = errors
    assert line.startswith("3 of 3 slots of this step could not be decoded and stay silent: slot 0, slot 1, slot 2: ")
    assert own.address in line
    assert "\n" not in line
    own.start()
    assert lengths(decode_step(stage, SLOTS)) == [8, 12, 16]
    assert len(list(errors)) == 1


def test_told_to_raise_a_step_without_the_service_raises(
    make_code2wav: Callable[..., Any], own: ServiceProcess
) -> None:
    stage = make_code2wav(impatient(own.address, MIMO_AUDIO_TOKENIZER_ON_FAILURE="raise"))
    own.kill()
    with pytest.raises(ServiceUnavailable, match="unix://"):
        decode_step(stage, SLOTS)
    own.start()
    assert lengths(decode_step(stage, SLOTS)) == [8, 12, 16]


def test_there_but_silent_a_step_ends_with_its_deadline(
    make_code2wav: Callable[..., Any], own: ServiceProcess, errors: Any
) -> None:
    stage = make_code2wav(through(own.address) | {"MIMO_AUDIO_TOKENIZER_TIMEOUT": "1.5"})
    own.pause()
    assert lengths(decode_step(stage, SLOTS)) == [0, 0, 0]
    own.resume()
    (line,) = errors
    assert "1.5 s" in line
    assert lengths(decode_step(stage, SLOTS)) == [8, 12, 16]


def test_a_request_that_cannot_be_encoded_fails_with_its_sentence_and_the_next_one_works(
    make_parser: Callable[..., Any], own: ServiceProcess
) -> None:
    parser = make_parser(impatient(own.address))
    (before,) = parse_audio(parser, ONE_SECOND)
    own.kill()
    with pytest.raises(ServiceUnavailable) as failure:
        parse_audio(parser, ONE_SECOND)
    assert own.address in str(failure.value)
    assert "\n" not in str(failure.value)
    own.start()
    (after,) = parse_audio(parser, ONE_SECOND)
    assert after.shape == (AUDIO_CHANNELS, 28)
    np.testing.assert_array_equal(before, after)


def test_back_with_another_model_nothing_is_decoded_with_it(
    make_code2wav: Callable[..., Any], make_checkpoint: Callable[..., Path], own: ServiceProcess, errors: Any
) -> None:
    stage = make_code2wav(through(own.address))
    first = own.model
    own.stop()
    own.model = make_checkpoint(seed=1)
    own.start()
    assert lengths(decode_step(stage, SLOTS)) == [0, 0, 0]
    (line,) = errors
    assert "fingerprint" in line
    assert "until it is started again" in line
    own.stop()
    own.model = first
    own.start()
    assert lengths(decode_step(stage, SLOTS)) == [8, 12, 16]

"""Whether engine and service fit each other is found at start-up, and told with both values."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_harness as harness
import pytest
from engine_harness import decode_step, flat_codes, random_codes, through
from model_folders import SAMPLES_PER_FRAME
from service_process import ServiceProcess

from mimo_tokenizer_client import ServiceUnavailable

ADDRESS_KEY = "mimo_audio_tokenizer_address"


def test_more_audio_channels_than_codebooks(
    make_code2wav: Callable[..., Any], make_checkpoint: Callable[..., Path], make_service: Callable[..., ServiceProcess]
) -> None:
    small = make_service(make_checkpoint(num_quantizers=7, codebook_size=[1024, 1024, *[128] * 5])).start()
    with pytest.raises(ValueError, match=r"8 audio channels, the tokenizer at unix://.* 7 codebooks"):
        make_code2wav(through(small.address))


def test_a_codebook_smaller_than_the_language_models(
    make_code2wav: Callable[..., Any], make_checkpoint: Callable[..., Path], make_service: Callable[..., ServiceProcess]
) -> None:
    sizes = [1024, 1024, 128, 64, *[128] * 16]
    small = make_service(make_checkpoint(num_quantizers=20, codebook_size=sizes)).start()
    said = r"audio channel 3 of the language model has 128 codes, codebook 3 of the tokenizer at unix://.* 64;"
    with pytest.raises(ValueError, match=said):
        make_code2wav(through(small.address))


def test_another_sample_rate(
    make_code2wav: Callable[..., Any], make_language_model: Callable[..., Path], service: ServiceProcess
) -> None:
    with pytest.raises(ValueError, match=r"audio has 16000 Hz, the tokenizer at unix://.* 24000 Hz"):
        make_code2wav(through(service.address), model=make_language_model(audio_sample_rate=16_000))


def test_the_data_parser_finds_it_too(
    make_language_model: Callable[..., Path], set_environment: Callable[..., None], service: ServiceProcess
) -> None:
    set_environment(through(service.address))
    vocabulary = "-".join(["1025", "1025", *["129"] * 19])
    empty = "-".join(["1024", "1024", *["128"] * 19])
    model = make_language_model(audio_channels=21, speech_vocab_size=vocabulary, speech_zeroemb_idx=empty)
    with pytest.raises(ValueError, match=r"21 audio channels, the tokenizer at unix://.* 20 codebooks"):
        harness.build_processing_info(model).get_data_parser()


def test_the_address_may_come_from_the_deploy_yaml_alone(
    make_code2wav: Callable[..., Any], service: ServiceProcess
) -> None:
    stage = make_code2wav({}, hf_overrides={ADDRESS_KEY: service.address})
    assert stage._tokenizer_service.address == stage.audio_tokenizer_path == service.address
    assert decode_step(stage, [flat_codes(random_codes(8))])[0].shape == (8 * SAMPLES_PER_FRAME,)


def test_one_process_has_one_worker_for_an_address(
    make_code2wav: Callable[..., Any], make_parser: Callable[..., Any], service: ServiceProcess
) -> None:
    stage, parser = make_code2wav(through(service.address)), make_parser(through(service.address))
    assert stage._tokenizer_service is parser.mimo_tokenizer
    from vllm_omni.model_executor.models.mimo_audio import mimo_audio_code2wav

    keys = [key for key in mimo_audio_code2wav._TOKENIZER_WORKER_CACHE if isinstance(key, str)]
    assert keys == [service.address]


def test_a_later_engine_of_the_process_finds_what_is_there_then(
    make_code2wav: Callable[..., Any],
    make_checkpoint: Callable[..., Path],
    make_language_model: Callable[..., Path],
    make_service: Callable[..., ServiceProcess],
) -> None:
    own = make_service().start()
    first = make_code2wav(through(own.address))._tokenizer_service
    assert make_code2wav(through(own.address))._tokenizer_service is first
    # Told otherwise.
    raising = make_code2wav(through(own.address) | {"MIMO_AUDIO_TOKENIZER_ON_FAILURE": "raise"})
    assert raising._tokenizer_service.settings.on_failure == "raise"
    assert first.settings.on_failure == "empty"
    # Another language model.
    fewer = make_code2wav(through(own.address), model=make_language_model(audio_channels=6))
    assert fewer._tokenizer_service.audio_channels == 6
    assert first.audio_channels == 8
    # Another tokenizer.
    own.stop()
    own.model = make_checkpoint(seed=1)
    own.start()
    stage = make_code2wav(through(own.address))
    assert stage._tokenizer_service.fingerprint != first.fingerprint
    assert decode_step(stage, [flat_codes(random_codes(8))])[0].shape == (8 * SAMPLES_PER_FRAME,)


def test_start_up_waits_for_the_service(
    make_code2wav: Callable[..., Any], make_service: Callable[..., ServiceProcess]
) -> None:
    late = make_service()
    timer = threading.Timer(2.0, late.start, kwargs={"wait": False})
    timer.start()
    try:
        stage = make_code2wav(through(late.address))
    finally:
        timer.join()
    assert decode_step(stage, [flat_codes(random_codes(8))])[0].shape == (8 * SAMPLES_PER_FRAME,)


def test_start_up_without_a_service_fails_in_its_time(
    make_code2wav: Callable[..., Any], make_parser: Callable[..., Any], make_service: Callable[..., ServiceProcess]
) -> None:
    absent = make_service()
    env = through(absent.address) | {"MIMO_AUDIO_TOKENIZER_READY_TIMEOUT": "1.5"}
    for make in (make_code2wav, make_parser):
        with pytest.raises(ServiceUnavailable, match=r"is not ready after 1\.5 s") as failure:
            make(env)
        assert absent.address in str(failure.value)
        assert "\n" not in str(failure.value)

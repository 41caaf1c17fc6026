"""How the plugin gets in: found by the engine, harmless when loaded again, and out of what it does not know."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import engine_harness as harness
import pytest
import torch
from engine_harness import decode_step, flat_codes, random_codes, through
from model_folders import AUDIO_CHANNELS, GROUP_SIZE, SAMPLES_PER_FRAME, SPECIAL_TOKENS
from service_process import ServiceProcess

from mimo_tokenizer_vllm_omni import UnfamiliarEngine, _code2wav, _data_parser, register

CODE2WAV = f"{harness.MODELS}.mimo_audio_code2wav"
OUTER = f"{harness.MODELS}.mimo_audio"


def _what_the_engine_loads(language_model: Path) -> tuple[bool, bool]:
    harness.engine_config(language_model, 1)
    from vllm_omni.model_executor.models.mimo_audio import mimo_audio, mimo_audio_code2wav

    changed = (mimo_audio.MiMoAudioDataParser.__init__, mimo_audio_code2wav.get_tokenizer_worker)
    return hasattr(changed[0], "__wrapped__"), hasattr(changed[1], "__wrapped__")


def test_the_engine_finds_and_loads_it_by_itself(language_model: Path) -> None:
    assert harness.run_fresh(_what_the_engine_loads, language_model) == (True, True)
    assert harness.run_fresh(_what_the_engine_loads, language_model, plugins=False) == (False, False)


def test_loaded_again_it_changes_nothing(make_code2wav: Callable[..., Any]) -> None:
    make_code2wav()
    from vllm_omni.model_executor.models.mimo_audio import mimo_audio, mimo_audio_code2wav

    stage = mimo_audio_code2wav.MiMoAudioToken2WavForConditionalGenerationVLLM

    def parts() -> tuple[Any, ...]:
        parser = mimo_audio.MiMoAudioDataParser
        return (stage.__init__, stage.forward, parser.__init__, mimo_audio_code2wav.get_tokenizer_worker)

    before = parts()
    register()
    for patches, module in ((_code2wav.PATCHES, mimo_audio_code2wav), (_data_parser.PATCHES, mimo_audio)):
        patches[module.__name__](module)
    assert parts() == before


def _decode_here(language_model: Path) -> list[Any]:
    stage = harness.build_code2wav(language_model)
    slots = [flat_codes(random_codes(8, 1)), harness.dummy_slot(), flat_codes(random_codes(40, 2))]
    return [waveform.numpy() for waveform in decode_step(stage, slots)]


def test_without_an_address_the_engine_answers_as_without_the_plugin(
    language_model: Path, small_checkpoint: Path
) -> None:
    env = harness.in_process(small_checkpoint)
    with_it = harness.run_fresh(_decode_here, language_model, env=env)
    without = harness.run_fresh(_decode_here, language_model, env=env, plugins=False)
    assert [waveform.tobytes() for waveform in with_it] == [waveform.tobytes() for waveform in without]


# ---------------------------------------------------------------- an engine that it does not know


@pytest.fixture
def changed_engine(monkeypatch: pytest.MonkeyPatch, make_code2wav: Callable[..., Any]) -> Callable[..., ModuleType]:
    """Makes a module of the real engine's source with some of its text replaced; not patched yet."""
    make_code2wav()

    def make(name: str, *changes: tuple[str, str]) -> ModuleType:
        path = Path(str(sys.modules[name].__file__))
        source = path.read_text()
        for old, new in changes:
            assert old in source
            source = source.replace(old, new)
        # As a module of its own, in which the plugin's import hooks see nothing.
        spec = importlib.util.spec_from_loader(f"changed_{name.rpartition('.')[2]}", loader=None)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        exec(compile(source, str(path), "exec"), module.__dict__)
        return module

    return make


UNKNOWN = [
    (("def get_tokenizer_worker(", "def get_tokenizers("), "get_tokenizer_worker"),
    (("def _batch_decode_waveforms(", "def _decode_waveforms("), "_batch_decode_waveforms"),
    (("per_req_left_context_frames:", "per_request_context:"), "_batch_chunked_decode_streaming"),
    (("self.total_upsample", "self.upsampling"), "total_upsample"),
    (("_TOKENIZER_WORKER_CACHE", "_WORKERS"), "_TOKENIZER_WORKER_CACHE"),
    (("def extract_audio_code_tensor(", "def extract("), "extract_audio_code_tensor"),
]


@pytest.mark.parametrize(("change", "attribute"), UNKNOWN, ids=[attribute for _, attribute in UNKNOWN])
def test_with_an_address_an_unknown_engine_is_refused_whole(
    changed_engine: Callable[..., ModuleType],
    set_environment: Callable[..., None],
    change: tuple[str, str],
    attribute: str,
) -> None:
    module = changed_engine(CODE2WAV, change)
    stage = module.MiMoAudioToken2WavForConditionalGenerationVLLM
    before = dict(vars(module)), dict(vars(stage))
    set_environment(through("unix:///run/nobody"))
    with pytest.raises(UnfamiliarEngine) as refusal:
        _code2wav.PATCHES[CODE2WAV](module)
    assert attribute in str(refusal.value)
    assert f"vLLM-Omni {version('vllm-omni')}" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    # Nothing of it is changed, but for our marks.
    after = vars(module), vars(stage)
    for old, new in zip(before, after, strict=True):
        assert {name: value for name, value in new.items() if "_mimo_tokenizer" not in name} == old


def test_without_an_address_an_unknown_engine_is_left_alone(
    changed_engine: Callable[..., ModuleType],
    set_environment: Callable[..., None],
    plugin_lines: list[logging.LogRecord],
) -> None:
    module = changed_engine(CODE2WAV, UNKNOWN[1][0])
    function = module.get_tokenizer_worker
    set_environment({})
    _code2wav.PATCHES[CODE2WAV](module)
    assert module.get_tokenizer_worker is function
    (line,) = [one.getMessage() for one in plugin_lines if one.levelno == logging.WARNING]
    assert "_batch_decode_waveforms" in line


def test_an_unknown_engine_with_an_address_in_its_yaml_does_not_start(
    changed_engine: Callable[..., ModuleType], set_environment: Callable[..., None], language_model: Path
) -> None:
    module = changed_engine(CODE2WAV, UNKNOWN[1][0])
    set_environment({})
    _code2wav.PATCHES[CODE2WAV](module)
    config = harness.engine_config(
        language_model, 1, hf_overrides={"mimo_audio_tokenizer_address": "unix:///run/nobody"}
    )
    with pytest.raises(UnfamiliarEngine, match="_batch_decode_waveforms"):
        module.MiMoAudioToken2WavForConditionalGenerationVLLM(vllm_config=config)


def test_the_data_parser_of_an_unknown_engine_is_refused(
    changed_engine: Callable[..., ModuleType], set_environment: Callable[..., None]
) -> None:
    module = changed_engine(OUTER, ("class MiMoAudioDataParser(", "class MiMoAudioParser("))
    set_environment(through("unix:///run/nobody"))
    with pytest.raises(UnfamiliarEngine, match="MiMoAudioDataParser"):
        _data_parser.PATCHES[OUTER](module)


def test_a_module_that_was_imported_first_is_changed_too(
    changed_engine: Callable[..., ModuleType], set_environment: Callable[..., None], service: ServiceProcess
) -> None:
    module = changed_engine(OUTER)
    _data_parser.PATCHES[OUTER](module)
    set_environment(through(service.address))
    assert module.MiMoAudioDataParser(target_sr=24_000).mimo_tokenizer.address == service.address


# ---------------------------------------------------------------- a worker that is not ours


def test_a_worker_that_is_not_ours_is_used_as_the_engine_uses_it() -> None:
    """As in the engine's own tests: a bare stage and a bare worker, in 0.28 one that names no device."""
    from vllm_omni.model_executor.models.mimo_audio import mimo_audio_code2wav as module

    seen: list[list[int]] = []

    def decoder(hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        seen.append(lengths.tolist())
        assert hidden.shape == (sum(seen[-1]), 7)
        return torch.ones(len(lengths), 1, max(seen[-1]) * SAMPLES_PER_FRAME + 100)

    tokenizer = SimpleNamespace(
        encoder=SimpleNamespace(decode_vq=lambda codes: torch.ones(codes.shape[1], 7)),
        decoder=decoder,
        config=SimpleNamespace(avg_pooler=2, stride_size=2, hop_length=240),
    )
    device = {} if version("vllm-omni").startswith("0.28.") else {"device": "cpu"}
    stage = object.__new__(module.MiMoAudioToken2WavForConditionalGenerationVLLM)
    stage.device = torch.device("cpu")
    stage.config = SimpleNamespace(group_size=GROUP_SIZE, audio_channels=AUDIO_CHANNELS)
    stage.streamer_config = module.AudioStreamerConfig(group_size=GROUP_SIZE, audio_channels=AUDIO_CHANNELS)
    stage.codes = SimpleNamespace(empty=SPECIAL_TOKENS["<|empty|>"], eostm=SPECIAL_TOKENS["<|eostm|>"])
    stage.total_upsample = GROUP_SIZE * SAMPLES_PER_FRAME
    stage._tokenizer_service = SimpleNamespace(audio_tokenizer=tokenizer, cuda_graph_wrapper=None, **device)
    slots = [None, flat_codes(random_codes(8)), harness.dummy_slot(), flat_codes(random_codes(4))]
    whole = stage._batch_decode_waveforms(slots)
    chunks = stage._batch_chunked_decode_streaming(slots, 30, 40, per_req_left_context_frames=[1, 1, 1, 1])
    assert [samples.numel() // SAMPLES_PER_FRAME for samples in whole] == [0, 8, 0, 4]
    assert [samples.numel() // SAMPLES_PER_FRAME for samples in chunks] == [0, 4, 0, 0]
    assert seen == [[8, 4], [8, 4]]
    assert stage._batch_decode_waveforms([])[0].numel() == 0

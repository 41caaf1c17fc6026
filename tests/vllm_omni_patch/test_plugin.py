"""How the plugin gets in: found by the engine, harmless when loaded again, and out of what it does not know."""

from __future__ import annotations

import contextlib
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

ADDRESS_KEY = "mimo_audio_tokenizer_address"
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


def unguarded(namespace: Any) -> dict[str, Any]:
    """What a module or class has, less our marks and what only asks for an address before it goes on."""
    return {
        name: getattr(value, "__wrapped__", value) if name in ("__init__", "get_tokenizer_worker") else value
        for name, value in vars(namespace).items()
        if "_mimo_tokenizer" not in name
    }


@pytest.mark.parametrize(("change", "attribute"), UNKNOWN, ids=[attribute for _, attribute in UNKNOWN])
def test_an_unknown_engine_is_left_as_it_is_and_does_not_start_with_an_address(
    changed_engine: Callable[..., ModuleType],
    set_environment: Callable[..., None],
    language_model: Path,
    small_checkpoint: Path,
    plugin_lines: list[logging.LogRecord],
    change: tuple[str, str],
    attribute: str,
) -> None:
    module = changed_engine(CODE2WAV, change)
    stage = module.MiMoAudioToken2WavForConditionalGenerationVLLM
    before = unguarded(module), unguarded(stage)
    _code2wav.PATCHES[CODE2WAV](module)
    assert (unguarded(module), unguarded(stage)) == before
    (line,) = [one.getMessage() for one in plugin_lines if one.levelno == logging.WARNING]
    assert attribute in line

    config = harness.engine_config(language_model, 1)
    in_yaml = harness.engine_config(language_model, 1, hf_overrides={ADDRESS_KEY: "unix:///run/nobody"})
    for settings, vllm_config in ((through("unix:///run/nobody"), config), ({}, in_yaml)):
        set_environment(settings)
        with pytest.raises(UnfamiliarEngine) as refusal:
            stage(vllm_config=vllm_config)
        said = str(refusal.value)
        assert said.startswith(f"vLLM-Omni {version('vllm-omni')}: ")
        assert attribute in said
        assert "unix:///run/nobody" in said
        assert "\n" not in said
    # Without one it goes the engine's way, up to where the change itself breaks it.
    set_environment(harness.in_process(small_checkpoint))
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(config), contextlib.suppress(AttributeError, NameError):
        stage(vllm_config=config)


def _start_changed(language_model: Path, name: str, old: str, new: str, hf_overrides: dict[str, str]) -> list[str]:
    """Start the parts of an engine of which one module's source is changed; what each says."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert old in source
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    exec(compile(source.replace(old, new), spec.origin, "exec"), module.__dict__)
    setattr(importlib.import_module(parent), child, module)
    said = []
    for start in (
        lambda: harness.build_processing_info(language_model, hf_overrides=hf_overrides).get_data_parser(),
        lambda: harness.build_code2wav_stage(language_model, hf_overrides=hf_overrides),
    ):
        try:
            start()
            said.append("started")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize(
    ("name", "old", "attribute"),
    [
        (CODE2WAV, "def _batch_decode_waveforms(", "_batch_decode_waveforms"),
        (OUTER, "def load_weights(", "load_weights"),
    ],
)
@pytest.mark.parametrize("told_by", ["environment", "deploy YAML"])
def test_both_parts_of_an_unknown_engine_say_so_at_start_up(
    language_model: Path, name: str, old: str, attribute: str, told_by: str
) -> None:
    nobody = "unix:///run/nobody"
    by_environment = told_by == "environment"
    said = harness.run_fresh(
        _start_changed,
        language_model,
        name,
        old,
        old.replace("def ", "def changed"),
        {} if by_environment else {ADDRESS_KEY: nobody},
        env=through(nobody) | {"MIMO_AUDIO_TOKENIZER_READY_TIMEOUT": "0.5"} if by_environment else {},
    )
    refused = [one for one in said if one.startswith("UnfamiliarEngine: ") and attribute in one and nobody in one]
    # A part that is not touched by the change may look for the service first; none starts without it.
    assert refused, said
    assert all(one in refused or "is not ready after" in one for one in said), said


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

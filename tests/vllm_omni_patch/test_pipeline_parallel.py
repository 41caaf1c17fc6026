"""The contract of pipeline parallelism, over every model of vLLM-Omni's own that says it keeps it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import pytest
from engine_harness import MODELS, in_process, run_fresh
from pipeline_survey import (
    FACTORY,
    INNER,
    MISSING,
    NAME,
    NONE,
    OWN,
    SOUND,
    TINY,
    ZERO_ARGUMENTS,
    build_language_model,
    call,
    read_class,
    survey,
)

from mimo_tokenizer_vllm_omni._pipeline_parallel import PATCHES

LANGUAGE_MODEL = "MiMoAudioLLMForConditionalGeneration"
CODE2WAV = "MiMoAudioToken2WavForConditionalGenerationVLLM"
OUTER = "MiMoAudioForConditionalGeneration"
COVO_CODE2WAV = "CovoAudioCode2WavForConditionalGeneration"
COVO_OUTER = "CovoAudioForConditionalGeneration"

# Other models' placeholders, which take no arguments: each has one for a stage or for a case of its own, and they are
# theirs to mend. A new one fails the contract, a mended one the table below.
PLACEHOLDERS = {
    "MammothModa2ForConditionalGeneration",
    "MingTTSForConditionalGeneration",
    "MiniCPMO45OmniForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniToken2WavForConditionalGenerationVLLM",
    "Qwen3OmniMoeForConditionalGeneration",
    "StepAudio2ForConditionalGeneration",
    "StepAudio2Token2WavForConditionalGeneration",
}

# What the source of each class that declares SupportsPP gives its instances, without the plugin.
_BOTH = {
    COVO_CODE2WAV: {MISSING},
    COVO_OUTER: {INNER, NONE},
    "CovoAudioLLMForConditionalGeneration": {INNER},
    "AuraQwen3VLForConditionalGeneration": {INNER},
    "GlmImageForConditionalGeneration": {INNER},
    "HunyuanImage3ForConditionalGeneration": {OWN},
    "MammothModa2ARForConditionalGeneration": {INNER},
    "MammothModa2ForConditionalGeneration": {INNER, ZERO_ARGUMENTS},
    "MammothModa2Qwen2ForCausalLM": {OWN},
    "MammothModa2Qwen3ARForConditionalGeneration": {INNER},
    "MammothModa2Qwen3ForCausalLM": {OWN},
    LANGUAGE_MODEL: {INNER},
    CODE2WAV: {MISSING},
    OUTER: {INNER, ZERO_ARGUMENTS},
    "MingFlashOmniForConditionalGeneration": {INNER},
    "MingFlashOmniThinkerForConditionalGeneration": {INNER},
    "MingTTSForConditionalGeneration": {INNER, ZERO_ARGUMENTS},
    "MiniCPMO45OmniForConditionalGeneration": {INNER, ZERO_ARGUMENTS},
    "MiniCPMO45OmniLLMForConditionalGeneration": {INNER},
    "MiniCPMO45OmniTTSForConditionalGeneration": {INNER},
    "NemotronDenseAudexForConditionalGeneration": {INNER},
    "NemotronDenseForCausalLM": {INNER},
    "NemotronHAudexForConditionalGeneration": {INNER},
    "OmniBagelForConditionalGeneration": {INNER},
    "Qwen2ForCausalLM": {INNER},
    "Qwen2_5OmniForConditionalGeneration": {INNER, ZERO_ARGUMENTS},
    "Qwen2_5OmniTalkerForConditionalGeneration": {INNER},
    "Qwen2_5OmniThinkerForConditionalGeneration": {INNER},
    "Qwen2_5OmniToken2WavForConditionalGenerationVLLM": {ZERO_ARGUMENTS},
    "Qwen3OmniMoeForConditionalGeneration": {INNER, ZERO_ARGUMENTS},
    "Qwen3OmniMoeTalkerForConditionalGeneration": {OWN},
    "Qwen3OmniMoeThinkerForConditionalGeneration": {INNER},
    "StepAudio2ForConditionalGeneration": {INNER, ZERO_ARGUMENTS},
    "StepAudio2ThinkerForConditionalGeneration": {INNER},
    "StepAudio2Token2WavForConditionalGeneration": {ZERO_ARGUMENTS},
}
READ: dict[str, set[str]] = {
    "0.28.0": _BOTH | {"MiniMaxH3TextEncoder": {INNER}},
    "0.30.0": _BOTH
    | {
        "AuKForConditionalGeneration": {INNER},
        "MingImageForConditionalGeneration": {INNER},
        "MiniMaxH3Encoder": {INNER},
        "Qwen3OmniMoeForConditionalGeneration": {INNER, FACTORY, ZERO_ARGUMENTS},
    },
}[version("vllm-omni")]

NO_ENTRIES = "tensors: []"
_TENSOR = ((2, TINY["hidden_size"]), "torch.bfloat16", "cpu")
LANGUAGE_MODEL_TENSORS = f"tensors: {[('hidden_states', _TENSOR), ('residual', _TENSOR)]}"
CALLED = {
    OUTER: {"code2wav": NO_ENTRIES, "fused_thinker_talker": LANGUAGE_MODEL_TENSORS},
    LANGUAGE_MODEL: {"fused_thinker_talker": LANGUAGE_MODEL_TENSORS},
    CODE2WAV: {"code2wav": NO_ENTRIES},
    COVO_OUTER: {"code2wav": NO_ENTRIES},
    COVO_CODE2WAV: {"code2wav": NO_ENTRIES},
}

Survey = dict[str, Any]


@pytest.fixture(scope="module")
def tiny(make_language_model: Callable[..., Path]) -> Path:
    """A language model's folder with which stage 0 can be constructed."""
    return make_language_model(**TINY)


@pytest.fixture(scope="module")
def surveys(
    language_model: Path, tiny: Path, small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[bool, Survey]:
    """Two engines without an address: one has loaded the plugin by its entry point, one has not."""

    def made(plugins: bool) -> Survey:
        scratch = tmp_path_factory.mktemp("survey")
        return run_fresh(survey, language_model, tiny, scratch, env=in_process(small_checkpoint), plugins=plugins)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip((True, False), pool.map(made, (True, False)), strict=True))


@pytest.fixture(scope="module")
def with_plugin(surveys: dict[bool, Survey]) -> Survey:
    """What is found in the engine that has loaded the plugin."""
    return surveys[True]


@pytest.fixture(scope="module")
def without_plugin(surveys: dict[bool, Survey]) -> Survey:
    """What is found in the same engine without it."""
    return surveys[False]


def complaints(found: Survey, name: str) -> set[str]:
    """What a class has that the runner cannot use; a class that was constructed is judged by what came of that."""
    if name in found["called"]:
        return {answer for answer in found["called"][name].values() if not answer.startswith("tensors: ")}
    return set(found["read"][name]) - SOUND


# ---------------------------------------------------------------- the contract


@pytest.mark.parametrize("name", sorted(READ))
def test_with_the_plugin_every_class_can_be_asked_as_the_runner_asks(with_plugin: Survey, name: str) -> None:
    assert complaints(with_plugin, name) == ({ZERO_ARGUMENTS} if name in PLACEHOLDERS else set())


def test_without_the_plugin_the_contract_names_the_classes(without_plugin: Survey) -> None:
    broken = {name: wrong for name in without_plugin["read"] if (wrong := complaints(without_plugin, name))}
    others = {name: broken.pop(name, set()) for name in PLACEHOLDERS}
    assert broken == {
        CODE2WAV: {f"{MISSING}: '{CODE2WAV}' object has no attribute '{NAME}'"},
        COVO_CODE2WAV: {f"{MISSING}: '{COVO_CODE2WAV}' object has no attribute '{NAME}'"},
        COVO_OUTER: {NONE},
        OUTER: {
            f"{ZERO_ARGUMENTS}: {OUTER}.__init__.<locals>.<lambda>() got an unexpected keyword argument 'batch_size'"
        },
    }
    assert others == {name: {ZERO_ARGUMENTS} for name in PLACEHOLDERS}


def test_every_class_has_what_the_table_says(without_plugin: Survey) -> None:
    assert without_plugin["read"] == READ


def test_the_plugin_changes_two_classes_and_the_stages_of_two(with_plugin: Survey) -> None:
    assert with_plugin["read"] == READ | {CODE2WAV: {OWN}, COVO_CODE2WAV: {OWN}}
    assert with_plugin["called"] == CALLED


def test_stage_0_is_as_without_the_plugin(with_plugin: Survey, without_plugin: Survey) -> None:
    for name in (OUTER, LANGUAGE_MODEL):
        stage0 = [found["called"][name]["fused_thinker_talker"] for found in (with_plugin, without_plugin)]
        assert stage0 == [LANGUAGE_MODEL_TENSORS] * 2


def test_each_thing_done_or_left_alone_has_one_line(with_plugin: Survey, without_plugin: Survey) -> None:
    assert sorted(line.partition(":")[0] for line in with_plugin["log"]) == sorted(
        [
            f"left {LANGUAGE_MODEL}.{NAME} alone",
            f"left {OUTER}.{NAME} with {LANGUAGE_MODEL} in it alone",
            f"patched {CODE2WAV}.{NAME}",
            f"patched {COVO_CODE2WAV}.{NAME}",
            f"patched {COVO_OUTER}.__init__",
            f"patched {COVO_OUTER}.{NAME} with {COVO_CODE2WAV} in it",
            f"patched {OUTER}.__init__",
            f"patched {OUTER}.{NAME} with {CODE2WAV} in it",
        ]
    )
    assert without_plugin["log"] == []


# ---------------------------------------------------------------- the failure that was reported


def start_without_delegation(language_model: Path, scratch: Path) -> dict[str, str]:
    """Start stage 0 of an engine whose source lacks the line with which both releases delegate, then once more.

    Args:
        language_model: Folder from `write_language_model` with `TINY`.
        scratch: An empty folder.

    Returns:
        What came of it without the plugin, and with it.
    """
    name = f"{MODELS}.mimo_audio_llm"
    released = importlib.util.find_spec(name)
    assert released is not None
    assert released.origin is not None
    source = Path(released.origin).read_text()
    line = f"        self.{NAME} = self.model.{NAME}\n"
    assert source.count(line) == 1
    older = scratch / "mimo_audio_llm.py"
    older.write_text(source.replace(line, ""))
    spec = importlib.util.spec_from_file_location(name, older)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    importlib.import_module(MODELS).mimo_audio_llm = module  # type: ignore[attr-defined]

    seen = {}
    try:
        build_language_model(language_model, scratch / "rendezvous", outer=True)
    except AttributeError as error:
        seen["without the plugin"] = str(error)
    from mimo_tokenizer_vllm_omni import register

    register()
    outer = build_language_model(language_model, scratch / "rendezvous", outer=True)
    for part, model in {"outer": outer, "language model": outer.model, "inner": outer.model.model}.items():
        seen[f"{part} with the plugin"] = call(model)
    seen["source"] = inspect.getfile(type(outer.model))
    return seen


def test_reported_failure_shows_without_the_line_and_is_repaired(tiny: Path, tmp_path: Path) -> None:
    assert run_fresh(start_without_delegation, tiny, tmp_path, plugins=False) == {
        "without the plugin": f"'{LANGUAGE_MODEL}' object has no attribute '{NAME}'",
        "outer with the plugin": LANGUAGE_MODEL_TENSORS,
        "language model with the plugin": LANGUAGE_MODEL_TENSORS,
        "inner with the plugin": LANGUAGE_MODEL_TENSORS,
        "source": str(tmp_path / "mimo_audio_llm.py"),
    }


# ---------------------------------------------------------------- engines to come, which cannot be had


class _Declares(Protocol):
    """As vLLM had it before 0.28: a protocol with a method that does nothing."""

    def make_empty_intermediate_tensors(self, batch_size: int, dtype: Any, device: Any) -> Any:
        return None


class _Inner:
    def make_empty_intermediate_tensors(self, batch_size: int, dtype: Any, device: Any) -> Any:
        return batch_size, dtype, device


def _module(path: str, **classes: object) -> ModuleType:
    module = ModuleType(path)
    vars(module).update(classes)
    return module


def _ask(model: Any) -> Any:
    return model.make_empty_intermediate_tensors(batch_size=3, dtype="dtype", device="device")


def test_protocols_empty_method_does_not_count_as_the_models_own() -> None:
    class Model(_Declares):
        def __init__(self) -> None:
            self.model = _Inner()

    path = f"{MODELS}.mimo_audio_llm"
    assert _ask(Model()) is None
    PATCHES[path](_module(path, **{LANGUAGE_MODEL: Model}))
    assert _ask(Model()) == (3, "dtype", "device")


def test_patching_again_changes_nothing() -> None:
    class Model:
        def __init__(self) -> None:
            self.model = _Inner()

    path = f"{MODELS}.mimo_audio"
    module = _module(path, **{OUTER: Model})
    PATCHES[path](module)
    patched = Model.__init__
    PATCHES[path](module)
    assert Model.__init__ is patched
    # Its constructor gave it nothing at all.
    assert _ask(Model()) == (3, "dtype", "device")


def test_outer_class_with_a_better_answer_keeps_it() -> None:
    class Model:
        def __init__(self) -> None:
            self.model = _Inner()
            self.make_empty_intermediate_tensors = lambda batch_size, dtype, device: "its own"

    path = f"{MODELS}.mimo_audio"
    PATCHES[path](_module(path, **{OUTER: Model}))
    assert _ask(Model()) == "its own"


def test_class_that_defines_it_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Model(_Inner):
        pass

    path = f"{MODELS}.mimo_audio_code2wav"
    with caplog.at_level(logging.INFO, "vllm_omni.mimo_tokenizer"):
        PATCHES[path](_module(path, **{CODE2WAV: Model}))
    assert _ask(Model()) == (3, "dtype", "device")
    assert f"left {CODE2WAV}.{NAME} alone: _Inner defines it" in caplog.messages


class _WithoutModel:
    def __init__(self) -> None:
        self.backbone = _Inner()


@pytest.mark.parametrize(
    ("module", "classes", "wrong"),
    [
        ("mimo_audio_llm", {LANGUAGE_MODEL: _WithoutModel}, f"{LANGUAGE_MODEL}.model is not set by the constructor"),
        ("mimo_audio", {OUTER: _WithoutModel}, f"{OUTER}.model is not set by the constructor"),
        ("mimo_audio_code2wav", {}, f"{CODE2WAV} is not a class"),
    ],
)
def test_unfamiliar_class_is_left_as_it_is_with_one_sentence(
    caplog: pytest.LogCaptureFixture, module: str, classes: dict[str, type], wrong: str
) -> None:
    path = f"{MODELS}.{module}"
    before = dict(vars(_WithoutModel))
    with caplog.at_level(logging.INFO, "vllm_omni.mimo_tokenizer"):
        PATCHES[path](_module(path, **classes))
    assert dict(vars(_WithoutModel)) == before
    assert caplog.messages == [
        f"vLLM-Omni {version('vllm-omni')}: {path}.{wrong}, so its {NAME} is left as it is; "
        "pipeline parallelism may fail"
    ]


# ---------------------------------------------------------------- the reading itself


class _Sometimes:
    def __init__(self, stage: str) -> None:
        self.model = _Inner()
        if stage == "thinker":
            self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors


class _OneStage:
    def __init__(self, stage: str) -> None:
        self.model = _Inner()
        if stage != "thinker":
            raise ValueError(stage)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors


class _Derived(_OneStage):
    def __init__(self) -> None:
        super().__init__("thinker")


class _Forgets(_OneStage):
    def __init__(self) -> None:
        self.model = _Inner()


class _Placeholder:
    def __init__(self, model: Any) -> None:
        def nothing(batch_size: int, dtype: Any, device: Any) -> None:
            return None

        self.make_empty_intermediate_tensors = getattr(model, "make_empty_intermediate_tensors", nothing)


class _Borrowed:
    def __init__(self, model: Any) -> None:
        self.make_empty_intermediate_tensors = model.something_else


class _WrongMethod:
    def make_empty_intermediate_tensors(self, count: int) -> Any:
        return count


@pytest.mark.parametrize(
    ("cls", "found"),
    [
        (_Inner, {OWN}),
        (_Sometimes, {INNER, MISSING}),
        (_OneStage, {INNER}),
        (_Derived, {INNER}),
        (_Forgets, {MISSING}),
        (_Placeholder, {INNER, NONE}),
        (_Borrowed, {"unknown: model.something_else"}),
        (_WrongMethod, {ZERO_ARGUMENTS}),
    ],
)
def test_reading_a_class_names_what_its_instances_may_have(cls: type, found: set[str]) -> None:
    assert read_class(cls) == found

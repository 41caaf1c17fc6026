"""deploy/engine's files, through the engine's own loader and the real pipeline, as far as the stages' configs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine_harness import GROUP_WIDTH, PREFIX, build_code2wav_stage, engine_config, through
from service_process import ServiceProcess

from mimo_tokenizer_vllm_omni._settings import Settings, settings_for

ROOT = Path(__file__).parents[2]
ENGINE_FILES = {
    "mimo_audio_one_gpu.yaml": "mimo_audio.yaml",
    "mimo_audio_two_gpus.yaml": "mimo_audio.yaml",
    "mimo_audio_32gb_cpu_tokenizer.yaml": "mimo_audio_5090d.yaml",
}
FILES = sorted(ENGINE_FILES)
ADDRESS = "unix:///run/mimo-tokenizer/tokenizer.sock"
OVERRIDES = {"mimo_audio_tokenizer_address": ADDRESS}
ABSENT = "absent"

# What each file changes of the engine's, as (stage, key): (theirs, ours).
INTENDED: dict[str, dict[tuple[int, str], tuple[Any, Any]]] = {
    "mimo_audio_one_gpu.yaml": {
        (0, "hf_overrides"): (ABSENT, OVERRIDES),
        (0, "max_num_seqs"): (1, 16),
        (0, "gpu_memory_utilization"): (0.5, 0.75),
        (1, "hf_overrides"): (ABSENT, OVERRIDES),
        (1, "max_num_seqs"): (1, 16),
        (1, "max_num_batched_tokens"): (8192, 40320),
        (1, "gpu_memory_utilization"): (0.3, 0.05),
    },
    "mimo_audio_two_gpus.yaml": {
        (0, "hf_overrides"): (ABSENT, OVERRIDES),
        (0, "max_num_seqs"): (1, 16),
        (0, "gpu_memory_utilization"): (0.5, 0.9),
        (1, "hf_overrides"): (ABSENT, OVERRIDES),
        (1, "max_num_seqs"): (1, 16),
        (1, "max_num_batched_tokens"): (8192, 40320),
        (1, "gpu_memory_utilization"): (0.3, 0.05),
        (1, "devices"): ("0", "1"),
    },
    "mimo_audio_32gb_cpu_tokenizer.yaml": {
        (0, "hf_overrides"): (ABSENT, OVERRIDES),
        (0, "max_num_seqs"): (1, 4),
        (0, "gpu_memory_utilization"): (0.78, 0.85),
        (1, "hf_overrides"): (ABSENT, OVERRIDES),
        (1, "max_num_seqs"): (1, 4),
        (1, "max_num_batched_tokens"): (4096, 10080),
        (1, "gpu_memory_utilization"): (0.12, 0.05),
    },
}

# vLLM-Omni has no worker classes for a machine without an accelerator: those that a CUDA machine would name.
WORKERS = {
    "0": {"worker_cls": "vllm_omni.worker.gpu_ar_worker.GPUARWorker"},
    "1": {"worker_cls": "vllm_omni.worker.gpu_generation_worker.GPUGenerationWorker"},
}


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(set_environment: Any) -> None:
    set_environment({})


def read(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text())
    assert isinstance(content, dict)
    return content


def engine_file(name: str) -> Path:
    import vllm_omni

    assert vllm_omni.__file__ is not None
    return Path(vllm_omni.__file__).parent / "deploy" / ENGINE_FILES[name]


def stage_configs(model: Path, deploy: Path, **from_command_line: Any) -> list[Any]:
    """The `VllmConfig` of each stage, by the front end's whole way from a deploy file and the command line.

    It is what the front end does before it starts the first stage's process.
    """
    from vllm_omni.engine.stage_runtime import StageRuntime

    common = {"trust_remote_code": None, "deploy_config_path": str(deploy), "stage_overrides": WORKERS}
    options: dict[str, Any] = {"stage_init_timeout": 60, "async_chunk": True}
    try:
        from vllm_omni.config.resolver import resolve_omni_config
    except ImportError:  # before 0.30
        from vllm_omni.entrypoints.utils import load_and_resolve_stage_configs

        _, stages, _ = load_and_resolve_stage_configs(str(model), from_command_line, **common)
        options["diffusion_batch_size"] = 1
    else:
        resolved = resolve_omni_config(str(model), cli_overrides=from_command_line, strategy_config_path=None, **common)
        stages = list(resolved.stage_configs)
    plans = StageRuntime(stages, str(model), str(deploy), **options)._prepare_stage_plans()
    return [plan.replicas[0].stage_vllm_config for plan in plans]


def slot_tokens(content: Mapping[str, Any]) -> int:
    """The most tokens of a stage 1 slot: a chunk and its left context, in groups."""
    (connector,) = content["connectors"].values()
    extra = connector["extra"]
    return (int(extra["codec_chunk_frames"]) + int(extra["codec_left_context_frames"])) * GROUP_WIDTH


def test_every_file_is_tested() -> None:
    assert sorted(path.name for path in (ROOT / "deploy/engine").glob("*.yaml")) == FILES


@pytest.mark.parametrize("name", FILES)
def test_only_what_is_intended_differs_from_the_engines_file(name: str) -> None:
    ours, theirs = read(ROOT / "deploy/engine" / name), read(engine_file(name))
    assert {key: value for key, value in ours.items() if key != "stages"} == {
        key: value for key, value in theirs.items() if key != "stages"
    }
    assert (
        [stage["stage_id"] for stage in ours["stages"]] == [stage["stage_id"] for stage in theirs["stages"]] == [0, 1]
    )
    changed = {
        (stage, key): (their_stage.get(key, ABSENT), our_stage.get(key, ABSENT))
        for stage, (our_stage, their_stage) in enumerate(zip(ours["stages"], theirs["stages"], strict=True))
        for key in {*our_stage, *their_stage}
        if their_stage.get(key, ABSENT) != our_stage.get(key, ABSENT)
    }
    assert changed == INTENDED[name]


@pytest.mark.parametrize("name", FILES)
def test_only_keys_that_the_engine_knows(name: str) -> None:
    from vllm_omni.config.stage_config import DeployConfig, StageDeployConfig
    from vllm_omni.engine.arg_utils import OmniEngineArgs

    content = read(ROOT / "deploy/engine" / name)
    assert set(content) <= {field.name for field in dataclasses.fields(DeployConfig)}
    known = {field.name for field in (*dataclasses.fields(StageDeployConfig), *dataclasses.fields(OmniEngineArgs))}
    for stage in content["stages"]:
        assert set(stage) <= known


@pytest.mark.parametrize("name", FILES)
def test_the_address_is_written_once(name: str) -> None:
    lines = (ROOT / "deploy/engine" / name).read_text().splitlines()
    assert sum(ADDRESS in line for line in lines if not line.lstrip().startswith("#")) == 1


@pytest.mark.parametrize("name", FILES)
def test_a_step_of_stage_1_has_room_for_whole_slots(name: str) -> None:
    """The engine's scheduler cuts a slot that does not fit into what is left of a step's tokens."""
    content = read(ROOT / "deploy/engine" / name)
    stage = content["stages"][1]
    assert slot_tokens(content) == 2520
    assert stage["max_num_seqs"] > 1
    assert stage["max_num_batched_tokens"] == stage["max_num_seqs"] * slot_tokens(content)
    assert stage["max_model_len"] >= slot_tokens(content)
    assert content["stages"][0]["max_num_seqs"] == stage["max_num_seqs"]


def scheduled(model: Path, stage: Mapping[str, Any], requests: int, tokens: int) -> list[int]:
    """What the engine's scheduler gives stage 1's requests in one step, each of which has `tokens` tokens."""
    from vllm import SamplingParams
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm_omni.core.sched.omni_generation_scheduler import OmniGenerationScheduler
    from vllm_omni.request import OmniRequest

    same = ("max_num_batched_tokens", "max_model_len", "enable_prefix_caching", "async_scheduling")
    options = {"max_num_seqs": requests} | {key: stage[key] for key in same}
    config = engine_config(model, 1, **options)
    config.cache_config.num_gpu_blocks = 1  # as for every model without a KV cache
    scheduler = OmniGenerationScheduler(
        config,
        KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[]),
        StructuredOutputManager(config),
        block_size=config.cache_config.block_size,
    )
    for number in range(requests):
        sampling = SamplingParams(max_tokens=1)
        scheduler.add_request(OmniRequest(str(number), [0] * tokens, sampling_params=sampling, pooling_params=None))
    return list(scheduler.schedule().num_scheduled_tokens.values())


@pytest.mark.parametrize("name", FILES)
def test_the_scheduler_gives_every_slot_whole(
    name: str, language_model: Path, service: ServiceProcess, set_environment: Any
) -> None:
    set_environment(through(service.address))
    stage = read(ROOT / "deploy/engine" / name)["stages"][1]
    assert scheduled(language_model, stage, stage["max_num_seqs"], 2520) == [2520] * stage["max_num_seqs"]


def test_with_the_engines_own_number_of_tokens_the_scheduler_cuts_the_fourth_slot(
    language_model: Path, service: ServiceProcess, set_environment: Any
) -> None:
    """Why max_num_seqs cannot be raised alone; if this fails, the files' comment is out of date."""
    set_environment(through(service.address))
    stage = read(engine_file("mimo_audio_one_gpu.yaml"))["stages"][1]
    assert scheduled(language_model, stage, 4, 2520) == [2520, 2520, 2520, 632]


def test_stage_1_has_no_kv_cache_and_no_weights(
    language_model: Path, service: ServiceProcess, set_environment: Any
) -> None:
    """So that its share of the GPU's memory may go to stage 0."""
    set_environment(through(service.address))
    stage = build_code2wav_stage(language_model)
    assert not list(stage.parameters())
    assert stage.token2wav.vllm_config.compilation_config.static_forward_context == {}


@pytest.mark.parametrize("name", FILES)
def test_shares_of_the_memory(name: str) -> None:
    ours, theirs = read(ROOT / "deploy/engine" / name)["stages"], read(engine_file(name))["stages"]
    together = [sum(stage["gpu_memory_utilization"] for stage in stages) for stages in (ours, theirs)]
    if ours[0]["devices"] == ours[1]["devices"]:
        assert together[0] == pytest.approx(together[1])
    assert ours[0]["gpu_memory_utilization"] > theirs[0]["gpu_memory_utilization"]


@pytest.mark.parametrize("name", FILES)
def test_loads_in_the_engine(name: str, language_model: Path) -> None:
    content = read(ROOT / "deploy/engine" / name)
    configs = stage_configs(language_model, ROOT / "deploy/engine" / name)
    assert [config.model_config.model_stage for config in configs] == ["fused_thinker_talker", "code2wav"]
    for written, config in zip(content["stages"], configs, strict=True):
        assert config.scheduler_config.max_num_seqs == written["max_num_seqs"]
        assert config.scheduler_config.max_num_batched_tokens == written["max_num_batched_tokens"]
        assert config.model_config.max_model_len == written["max_model_len"]
        assert config.cache_config.gpu_memory_utilization == written["gpu_memory_utilization"]
        assert config.model_config.async_chunk is True


@pytest.mark.parametrize("name", FILES)
def test_the_address_reaches_both_stages_and_the_front_end(name: str, language_model: Path) -> None:
    from vllm.multimodal import MULTIMODAL_REGISTRY

    configs = stage_configs(language_model, ROOT / "deploy/engine" / name)
    for config in configs:
        assert settings_for(config.model_config.hf_config) == Settings(address=ADDRESS)
    # The front end makes its processor from stage 0's config, with this context.
    context = MULTIMODAL_REGISTRY._create_processing_info(configs[0].model_config, tokenizer=None).ctx
    assert settings_for(context.get_hf_config()) == Settings(address=ADDRESS)


@pytest.mark.parametrize("name", FILES)
def test_the_command_line_replaces_the_address(name: str, language_model: Path) -> None:
    overrides = {"mimo_audio_tokenizer_address": "localhost:50051"}
    for config in stage_configs(language_model, ROOT / "deploy/engine" / name, hf_overrides=overrides):
        assert settings_for(config.model_config.hf_config) == Settings(address="localhost:50051")


# ---------------------------------------------------------------- one address


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[str, str], Path]:
    """Writes a deploy file that is ours but for one text."""

    def write(old: str, new: str) -> Path:
        text = (ROOT / "deploy/engine" / FILES[0]).read_text()
        assert text.count(old) == 1
        path = tmp_path / "deploy.yaml"
        path.write_text(text.replace(old, new))
        return path

    return write


STAGE_1 = "    hf_overrides: *tokenizer\n"
STAGE_0 = f"    hf_overrides: &tokenizer\n      mimo_audio_tokenizer_address: {ADDRESS}\n"


def test_the_environment_may_say_the_same(language_model: Path, set_environment: Any) -> None:
    set_environment({f"{PREFIX}ADDRESS": "unix:/run/mimo-tokenizer/tokenizer.sock"})
    for config in stage_configs(language_model, ROOT / "deploy/engine" / FILES[0]):
        assert settings_for(config.model_config.hf_config) == Settings(address=ADDRESS)


def test_the_environment_may_not_say_another(language_model: Path, set_environment: Any) -> None:
    set_environment({f"{PREFIX}ADDRESS": "localhost:50051"})
    with pytest.raises(ValueError, match="two different addresses"):
        stage_configs(language_model, ROOT / "deploy/engine" / FILES[0])


def test_the_environment_alone_is_enough(
    language_model: Path, set_environment: Any, changed: Callable[[str, str], Path]
) -> None:
    set_environment({f"{PREFIX}ADDRESS": ADDRESS})
    for config in stage_configs(language_model, changed(STAGE_1, "")):
        assert settings_for(config.model_config.hf_config) == Settings(address=ADDRESS)


def test_without_an_address_the_plugin_has_nothing_to_say(language_model: Path) -> None:
    for config in stage_configs(language_model, engine_file(FILES[0])):
        assert settings_for(config.model_config.hf_config) == Settings()


@pytest.mark.parametrize(
    ("stage_1", "uses"),
    [
        ("    hf_overrides: {mimo_audio_tokenizer_address: 'localhost:50051'}\n", "the one at localhost:50051"),
        ("", "none"),
    ],
    ids=["two addresses", "one and none"],
)
def test_one_address_for_the_whole_engine(
    stage_1: str, uses: str, language_model: Path, changed: Callable[[str, str], Path]
) -> None:
    with pytest.raises(ValueError, match="not all of the engine is to use the same tokenizer service, ") as refused:
        stage_configs(language_model, changed(STAGE_1, stage_1))
    assert f"the front end the one at {ADDRESS}, stage 0 the one at {ADDRESS}, stage 1 {uses}: " in str(refused.value)


def test_env_of_the_stages_does_not_reach_the_front_end(
    language_model: Path, changed: Callable[[str, str], Path]
) -> None:
    path = changed(STAGE_0, f"    env: &tokenizer\n      {PREFIX}ADDRESS: {ADDRESS}\n")
    path.write_text(path.read_text().replace(STAGE_1, "    env: *tokenizer\n"))
    with pytest.raises(ValueError, match=f"the front end none, stage 0 the one at {ADDRESS}, stage 1 the one at"):
        stage_configs(language_model, path)


@pytest.mark.parametrize(
    ("key", "value"), [("on_failure", "shout"), ("timeout", 0), ("ready_timeout", "soon"), ("unavailable_timeout", -1)]
)
def test_a_bad_value_is_refused_before_a_stage_starts(
    key: str, value: Any, language_model: Path, changed: Callable[[str, str], Path]
) -> None:
    path = changed(STAGE_0, f"{STAGE_0}      mimo_audio_tokenizer_{key}: {value}\n")
    with pytest.raises(
        ValueError, match=f"^mimo_audio_tokenizer_{key} in the deploy YAML's hf_overrides is {value!r};"
    ):
        stage_configs(language_model, path)

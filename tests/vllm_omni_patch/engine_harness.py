"""The engine's real objects on the CPU, and what the engine sends through them.

`VLLM_TARGET_DEVICE=cpu` is vLLM's own switch: with it, its CUDA wheel takes its CPU platform, and the whole of its
config is made as in production.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from model_folders import AUDIO_CHANNELS, CODEBOOK_SIZES, GROUP_SIZE, ROOT, SAMPLE_RATE, SPECIAL_TOKENS

Codes = npt.NDArray[np.int64]
_T = TypeVar("_T")

PREFIX = "MIMO_AUDIO_TOKENIZER_"
MODELS = "vllm_omni.model_executor.models.mimo_audio"
GROUP_WIDTH = GROUP_SIZE * (AUDIO_CHANNELS + 1)

_STAGES = ("fused_thinker_talker", "code2wav")


def prepare_process() -> None:
    """Set what the engine reads of the environment when it is imported; call it before anything imports vllm."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ |= {
        "VLLM_TARGET_DEVICE": "cpu",
        # Else vLLM's records, and so the plugin's, end in handlers of its own, where caplog does not see them.
        "VLLM_CONFIGURE_LOGGING": "0",
        # What it has learnt of a model's class, which takes a process of its own and 10 s, and which it keeps for one
        # version only.
        "VLLM_CACHE_ROOT": str(ROOT / ".cache/vllm" / version("vllm")),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]


def answer_for_missing_driver() -> None:
    """Let code2wav's `forward` run without a GPU.

    It asks CUDA whether the current stream is being captured, and a CUDA build without a driver refuses the question
    instead of saying no. That one answer is given here, where there is no GPU to ask; all else of `forward` is real.
    """
    import torch

    if not torch.cuda.is_available():
        torch.cuda.is_current_stream_capturing = lambda: False


def in_process(checkpoint: Path) -> dict[str, str]:
    """The settings with which the engine loads the tokenizer itself."""
    return {f"{PREFIX}PATH": str(checkpoint), f"{PREFIX}DEVICE": "cpu"}


def through(address: str) -> dict[str, str]:
    """The settings with which the engine asks the service."""
    return {f"{PREFIX}ADDRESS": address}


# ---------------------------------------------------------------- the engine's objects


def engine_config(language_model: Path, stage: int, **options: Any) -> Any:
    """The real `VllmConfig` of a stage, made by the engine's own way from arguments.

    Args:
        language_model: Folder from `write_language_model`.
        stage: 0 for the language model, 1 for code2wav.
        options: Further ones of `OmniEngineArgs`.

    Returns:
        The config; its `model_config` is an `OmniModelConfig`.
    """
    from vllm_omni.engine.arg_utils import OmniEngineArgs

    worker = ("gpu_ar_worker.GPUARWorker", "gpu_generation_worker.GPUGenerationWorker")[stage]
    arguments = {
        "model": str(language_model),
        "stage_id": stage,
        "model_stage": _STAGES[stage],
        "model_arch": "MiMoAudioModel",
        # Named here, since vLLM-Omni has none for a machine without an accelerator. Nothing starts it.
        "worker_cls": f"vllm_omni.worker.{worker}",
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 8192,
    }
    return OmniEngineArgs(**arguments | options).create_engine_config()


def build_code2wav(
    language_model: Path, *, async_chunk: bool = False, connector_extra: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """The real code2wav, by its own constructor; where its codes are decoded is the environment's and its config's.

    Args:
        language_model: Folder from `write_language_model`.
        async_chunk: Whether it decodes in chunks with left context.
        connector_extra: `extra` of the stage's connector, as codec_chunk_frames.
        options: Further ones of `OmniEngineArgs`, as hf_overrides.

    Returns:
        A `MiMoAudioToken2WavForConditionalGenerationVLLM`.
    """
    from vllm.config import set_current_vllm_config
    from vllm_omni.model_executor.models.mimo_audio import mimo_audio_code2wav

    connector = {"name": "SharedMemoryConnector", "extra": dict(connector_extra or {})}
    config = engine_config(language_model, 1, async_chunk=async_chunk, stage_connector_spec=connector, **options)
    with set_current_vllm_config(config):
        return mimo_audio_code2wav.MiMoAudioToken2WavForConditionalGenerationVLLM(vllm_config=config)


def build_code2wav_stage(language_model: Path, **options: Any) -> Any:
    """The outer class that the engine makes for stage 1, by its own constructor, with code2wav in it."""
    from vllm.config import set_current_vllm_config
    from vllm_omni.model_executor.models.mimo_audio import mimo_audio

    config = engine_config(language_model, 1, **options)
    with set_current_vllm_config(config):
        return mimo_audio.MiMoAudioForConditionalGeneration(vllm_config=config)


def build_processing_info(language_model: Path, **options: Any) -> Any:
    """What the front end has for stage 0: a `MiMoAudioLLMProcessingInfo` with a real context and text tokenizer."""
    from transformers import AutoTokenizer
    from vllm.multimodal.processing import InputProcessingContext
    from vllm_omni.model_executor.models.mimo_audio import mimo_audio

    config = engine_config(language_model, 0, **options)
    context = InputProcessingContext(config.model_config, tokenizer=AutoTokenizer.from_pretrained(language_model))
    return mimo_audio.MiMoAudioLLMProcessingInfo(context)


def build_parser() -> Any:
    """The real `MiMoAudioDataParser`, made as the front end makes it."""
    from vllm_omni.model_executor.models.mimo_audio import mimo_audio

    return mimo_audio.MiMoAudioDataParser(target_sr=SAMPLE_RATE)


def parse_audio(parser: Any, *sounds: tuple[npt.NDArray[np.float32], int]) -> list[Codes]:
    """Codes (audio_channels, frames) that a data parser makes of sounds with their sample rates."""
    items = parser.parse_mm_data({"audio": list(sounds)})["audio"]
    return [np.asarray(items.get(index), dtype=np.int64) for index in range(len(sounds))]


def lively_sound(seconds: float, rate: int = SAMPLE_RATE, seed: int = 0) -> npt.NDArray[np.float32]:
    """Noise and gliding tones that swell and fade, (samples,): what the small checkpoint has many codes for."""
    generator = np.random.default_rng(seed)
    time = np.arange(round(seconds * rate)) / rate
    sound = 0.2 * generator.standard_normal(len(time)) * np.sin(2 * np.pi * 0.7 * time) ** 2
    for pitch, glide, pace in generator.random((6, 3)):
        phase = 2 * np.pi * 0.35 * rate * pitch**2 * time + 40 * np.sin(2 * np.pi * 3 * glide * time)
        sound += 0.12 * np.sin(phase) * np.sin(2 * np.pi * 2 * pace * time + pitch) ** 2
    clipped: npt.NDArray[np.float32] = sound.clip(-1, 1).astype(np.float32)
    return clipped


# ---------------------------------------------------------------- what the talker sends


def random_codes(frames: int, seed: int = 0) -> Codes:
    """Codes (audio_channels, frames), each within its codebook."""
    generator = np.random.default_rng(seed)
    return np.stack([generator.integers(0, size, frames) for size in CODEBOOK_SIZES[:AUDIO_CHANNELS]])


def flat_codes(codes: Codes, text: str = "<|empty|>") -> Any:
    """A slot's ids (frames // group_size * 36,) as the talker sends them: in front of each frame's codes, a text id.

    Args:
        codes: (audio_channels, frames), whole groups.
        text: The token in front of the codes; "<|eostm|>" ends the speech, and a group of any other is skipped.

    Returns:
        A tensor of int64.
    """
    import torch

    channels, frames = codes.shape
    assert channels == AUDIO_CHANNELS
    assert frames % GROUP_SIZE == 0
    column = np.full((frames, 1), SPECIAL_TOKENS[text])
    return torch.from_numpy(np.concatenate([column, codes.T], axis=1).reshape(-1))


def dummy_slot() -> Any:
    """The ids of a slot that has nothing to say: one group, all of its codes 0."""
    return flat_codes(np.zeros((AUDIO_CHANNELS, GROUP_SIZE), dtype=np.int64))


def end_of_speech() -> Any:
    """The ids of the group behind which nothing is spoken."""
    return flat_codes(np.zeros((AUDIO_CHANNELS, GROUP_SIZE), dtype=np.int64), "<|eostm|>")


def malformed_slots() -> dict[str, Any]:
    """Slots in which the engine finds nothing to decode, by what is wrong with them."""
    import torch

    spoken = flat_codes(random_codes(GROUP_SIZE))
    return {
        "no ids": torch.zeros(0, dtype=torch.int64),
        "less than a group": spoken[: GROUP_WIDTH - 1],
        "no group of speech": flat_codes(random_codes(2 * GROUP_SIZE), "<|sostm|>"),
        "ended before it began": torch.cat([end_of_speech(), spoken]),
        "dummy": dummy_slot(),
    }


def outside_codebook(frames: int = GROUP_SIZE, row: int = 2, code: int | None = None) -> Any:
    """A slot's ids with one code that its codebook does not have: by default the language model's own "empty" id."""
    codes = random_codes(frames)
    codes[row, frames // 2] = CODEBOOK_SIZES[row] if code is None else code
    return flat_codes(codes)


def decode_step(code2wav: Any, slots: Sequence[Any], left_context: Sequence[int | None] | None = None) -> list[Any]:
    """Run `forward` as the engine does: the slots' ids in one tensor, and beside it what belongs to whom.

    Args:
        code2wav: From `build_code2wav` or `build_code2wav_stage`.
        slots: Ids of each request.
        left_context: Groups of left context of each request, where async_chunk is on.

    Returns:
        A waveform for each slot.
    """
    import torch

    information: list[dict[str, Any]] = []
    for index, slot in enumerate(slots):
        meta: dict[str, Any] = {"code_flat_numel": slot.numel()}
        if left_context is not None and left_context[index] is not None:
            meta["left_context_size"] = left_context[index]
        information.append({"meta": meta})
    ids = torch.cat(list(slots))
    output = code2wav(
        input_ids=ids,
        positions=torch.arange(ids.numel()),
        runtime_additional_information=information,
        seq_token_counts=[slot.numel() for slot in slots],
    )
    return list(output.multimodal_outputs["model_outputs"])


def snr(wanted: Any, got: Any) -> float:
    """Signal to noise ratio of two waveforms of one length in dB; infinite for equal ones."""
    first, second = np.asarray(wanted, dtype=np.float64), np.asarray(got, dtype=np.float64)
    assert first.shape == second.shape
    error = float(np.sum((first - second) ** 2))
    return float("inf") if error == 0 else 10 * float(np.log10(np.sum(first**2) / error))


# ---------------------------------------------------------------- an engine of one's own


def run_fresh(
    function: Callable[..., _T], *arguments: Any, env: Mapping[str, str] | None = None, plugins: bool = True
) -> _T:
    """Call a function in a new process of this interpreter, where nothing of the engine is imported or patched yet.

    An import of the engine takes some 15 s: keep such calls few.

    Args:
        function: Of a module's top level; its module is imported anew there, by its path.
        arguments: For it; they and its answer travel as pickles.
        env: Set there, beside the tests' own; a MIMO_AUDIO_TOKENIZER_ variable of this process does not get there.
        plugins: False: no plugin is loaded by vLLM or vLLM-Omni.

    Returns:
        The function's answer.
    """
    assert "<locals>" not in function.__qualname__, "a new process finds only functions of a module's top level"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    # An empty list of plugins to load is vLLM's way to say: none.
    chosen = {} if plugins else {"VLLM_PLUGINS": ""}
    with tempfile.TemporaryDirectory() as folder:
        call, answer = Path(folder, "call"), Path(folder, "answer")
        call.write_bytes(pickle.dumps((function.__code__.co_filename, function.__qualname__, arguments)))
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("fresh_process.py")), str(call), str(answer)],
            env=kept | chosen | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, (
            f"{function.__qualname__} in a new process: status {done.returncode}\n{done.stdout}"
        )
        result: _T = pickle.loads(answer.read_bytes())
    return result

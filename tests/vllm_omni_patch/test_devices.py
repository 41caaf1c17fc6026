"""The in-process tokenizer of an older engine: on the device it was told, fed with tensors that lie there.

There is no GPU where these tests run. Where the repair is about which device is asked for, the worker's class is
replaced by one that only notes it; where it is about tensors that meet, the stage's device is "meta", which mixes with
the CPU as badly as CUDA does.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_harness as harness
import numpy as np
import pytest
import torch
from engine_harness import flat_codes, random_codes
from model_folders import SAMPLES_PER_FRAME


class NotingWorker:
    """Stands for the in-process worker, without weights: keeps the device that it was made for."""

    def __init__(self, device_str: str, config_path: str | None, audio_tokenizer_path: str) -> None:
        from types import SimpleNamespace

        self.device = device_str
        self.audio_tokenizer = SimpleNamespace(config=SimpleNamespace(avg_pooler=2, stride_size=2, hop_length=240))


@pytest.fixture
def code2wav_module(monkeypatch: pytest.MonkeyPatch, make_code2wav: Callable[..., Any]) -> Any:
    """The engine's module, patched by the plugin, with an empty cache of workers that only note their device."""
    make_code2wav()  # the engine loads the plugin
    from vllm_omni.model_executor.models.mimo_audio import mimo_audio_code2wav

    monkeypatch.setattr(mimo_audio_code2wav, "MiMoAudioTokenizerWorker", NotingWorker)
    monkeypatch.setattr(mimo_audio_code2wav, "_TOKENIZER_WORKER_CACHE", {})
    return mimo_audio_code2wav


def worker_on(module: Any, device: torch.device | str) -> Any:
    return module.get_tokenizer_worker(device=device, config_path=None, audio_tokenizer_path="/nowhere")


@pytest.mark.parametrize("spell", [str, torch.device])
def test_an_index_reaches_the_constructor_and_has_a_worker_of_its_own(code2wav_module: Any, spell: Any) -> None:
    workers = [worker_on(code2wav_module, spell(name)) for name in ("cuda:0", "cuda:1", "cpu", "cuda:1")]
    assert [worker.device for worker in workers] == ["cuda:0", "cuda:1", "cpu", "cuda:1"]
    assert workers[1] is workers[3]
    assert len(set(map(id, workers))) == 3


def test_a_bare_cuda_and_its_index_share_a_worker(code2wav_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    bare, third = worker_on(code2wav_module, torch.device("cuda")), worker_on(code2wav_module, "cuda:3")
    assert bare is third
    assert bare.device == "cuda:3"
    assert worker_on(code2wav_module, "cuda:2") is not third


@pytest.mark.parametrize(("told", "got"), [("cuda:1", "cuda:1"), ("cpu", "cpu"), ("CPU", "cpu"), ("meta", "meta")])
def test_stage_1_takes_the_device_it_is_told(
    code2wav_module: Any, make_code2wav: Callable[..., Any], told: str, got: str
) -> None:
    stage = make_code2wav({"MIMO_AUDIO_TOKENIZER_PATH": "/nowhere", "MIMO_AUDIO_TOKENIZER_DEVICE": told})
    assert stage._tokenizer_service.device == got


def test_stage_1_told_no_device_takes_its_own(code2wav_module: Any, make_code2wav: Callable[..., Any]) -> None:
    stage = make_code2wav({"MIMO_AUDIO_TOKENIZER_PATH": "/nowhere"})
    assert torch.device(stage._tokenizer_service.device) == torch.device(stage.device)


def test_the_mel_filter_bank_is_built_on_the_cpu_under_any_default_device(
    make_code2wav: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_code2wav()
    from vllm_omni.model_executor.models.mimo_audio import mimo_audio_code2wav as module

    # The weights are there already: loading them under another default device is not what this is about.
    tokenizer = stage._tokenizer_service.audio_tokenizer
    monkeypatch.setattr(module.MiMoAudioTokenizer, "from_pretrained", lambda *args, **kwargs: tokenizer)
    path = stage.audio_tokenizer_path
    torch.set_default_device("meta")
    try:
        worker = module.MiMoAudioTokenizerWorker(device_str="cpu", config_path=path, audio_tokenizer_path=path)
    finally:
        torch.set_default_device(None)
    assert {buffer.device.type for buffer in worker.mel_transform.buffers()} == {"cpu"}
    mel = worker.wav2mel(torch.from_numpy(np.sin(np.arange(24_000) * 0.1).astype(np.float32)))
    assert mel.shape == (128, 101)
    assert bool(torch.isfinite(mel).all())


# ---------------------------------------------------------------- a CPU worker under a stage of another device


def _decode_on_another_device(language_model: Path) -> Any:
    """Decode both ways with a CPU tokenizer in a stage whose device is another; lengths, or the error's text."""
    stage = harness.build_code2wav(language_model, async_chunk=True)
    stage.device = torch.device("meta")
    slots = [flat_codes(random_codes(8, 1)), harness.dummy_slot(), flat_codes(random_codes(12, 2))]
    answers = []
    for decode, arguments in (
        (stage._batch_decode_waveforms, {}),
        (
            stage._batch_chunked_decode_streaming,
            {
                "default_chunk_size": 10,
                "default_left_context_size": 40,
                "per_req_left_context_frames": [1, 0, 2],
                "per_req_codec_chunk_frames": [None] * 3,
            },
        ),
    ):
        try:
            waveforms = decode(slots, **arguments)
            answers.append([(waveform.device.type, waveform.numel()) for waveform in waveforms])
        except (RuntimeError, NotImplementedError) as error:
            answers.append(str(error))
    return answers


def test_codes_and_lengths_go_to_the_tokenizers_device(language_model: Path, small_checkpoint: Path) -> None:
    env = harness.in_process(small_checkpoint)
    whole, chunked = harness.run_fresh(_decode_on_another_device, language_model, env=env)
    assert whole == [("cpu", 8 * SAMPLES_PER_FRAME), ("meta", 0), ("cpu", 12 * SAMPLES_PER_FRAME)]
    assert chunked == [("cpu", 4 * SAMPLES_PER_FRAME), ("meta", 0), ("cpu", 4 * SAMPLES_PER_FRAME)]

    from vllm_omni.model_executor.models.mimo_audio import mimo_audio_code2wav as module

    stage = module.MiMoAudioToken2WavForConditionalGenerationVLLM
    unpatched = harness.run_fresh(_decode_on_another_device, language_model, env=env, plugins=False)
    if "tok_device" in inspect.unwrap(stage._batch_decode_waveforms).__code__.co_varnames:
        assert unpatched == [whole, chunked]  # an engine that has it
    else:
        # What users of 0.28 reported, in the words that it has for these two devices.
        assert all("meta" in str(error) and isinstance(error, str) for error in unpatched), unpatched


def test_every_repair_is_told_made_or_left_alone(language_model: Path, small_checkpoint: Path) -> None:
    lines = harness.run_fresh(_lines_of_repairs, language_model, env=harness.in_process(small_checkpoint))
    about = [
        "stage 1 honours MIMO_AUDIO_TOKENIZER_DEVICE",
        "the index of a device stays in the worker cache's key and the constructor",
        "MelSpectrogram is built on the CPU",
        "codes and lengths go to the tokenizer's device",
    ]
    for what in about:
        told = [line for line in lines if line.endswith(what)]
        assert len(told) == 1, lines
        assert told[0].startswith(("patched vllm_omni.", "left vllm_omni."))


def _lines_of_repairs(language_model: Path) -> list[str]:
    lines: list[str] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("vllm_omni.mimo_tokenizer")
    logger.addHandler(Keeping())
    logger.setLevel(logging.INFO)
    harness.build_code2wav(language_model)
    return lines

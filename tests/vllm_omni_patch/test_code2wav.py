"""Stage 1 through the service: the real class, its own `forward`, a real server."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_harness as harness
import numpy as np
import pytest
import torch
from engine_harness import decode_step, flat_codes, random_codes, snr, through
from model_folders import GROUP_SIZE, SAMPLES_PER_FRAME
from service_process import ServiceProcess

from mimo_tokenizer_client import InvalidInput, TokenizerClient

# What a float32 answer must at least agree to; see design.md.
EXACT = 90.0
LENGTHS = (4, 8, 20, 120, 280)


@pytest.fixture
def here(make_code2wav: Callable[..., Any]) -> Any:
    """Stage 1 with the tokenizer in this process."""
    return make_code2wav()


@pytest.fixture
def there(make_code2wav: Callable[..., Any], service: ServiceProcess, here: Any) -> Any:
    """Stage 1 with the service; the environment is this one's, whatever `here` was made with."""
    return make_code2wav(through(service.address))


def alike(here: Any, there: Any, slots: list[Any], context: list[int | None] | None = None) -> list[torch.Tensor]:
    """Decode slots in one step through the service, each alone in this process, and compare; the former's answer."""
    together = decode_step(there, slots, context)
    assert len(together) == len(slots)
    for index, slot in enumerate(slots):
        (alone,) = decode_step(here, [slot], None if context is None else [context[index]])
        assert together[index].shape == alone.shape
        assert together[index].dtype == alone.dtype == torch.float32
        assert together[index].device == alone.device == torch.device("cpu")
        if alone.numel():
            assert snr(alone, together[index]) >= EXACT
    return together


def test_a_request_gets_the_in_process_waveform(here: Any, there: Any) -> None:
    for frames in LENGTHS:
        (waveform,) = alike(here, there, [flat_codes(random_codes(frames, frames))])
        assert waveform.shape == (frames * SAMPLES_PER_FRAME,)


def test_a_step_of_many_gives_each_what_it_gets_alone(here: Any, there: Any) -> None:
    alike(here, there, [flat_codes(random_codes(frames, frames)) for frames in LENGTHS])


def test_empty_dummy_and_malformed_slots_stay_empty_and_harm_nobody(here: Any, there: Any) -> None:
    slots = []
    for seed, slot in enumerate(harness.malformed_slots().values()):
        slots += [flat_codes(random_codes(8 + 4 * seed, seed)), slot]
    waveforms = alike(here, there, slots)
    assert [waveform.numel() > 0 for waveform in waveforms] == [True, False] * (len(slots) // 2)


def test_speech_ends_where_the_talker_says(here: Any, there: Any) -> None:
    slot = torch.cat([flat_codes(random_codes(8)), harness.end_of_speech(), flat_codes(random_codes(8, 1))])
    (waveform,) = alike(here, there, [slot])
    assert waveform.shape == (8 * SAMPLES_PER_FRAME,)


def test_slots_that_are_no_tensor_or_have_no_ids(there: Any) -> None:
    waveforms = there._batch_decode_waveforms([None, torch.zeros(0, dtype=torch.long), flat_codes(random_codes(4))])
    assert [waveform.shape for waveform in waveforms] == [(0,), (0,), (4 * SAMPLES_PER_FRAME,)]
    (nothing,) = there._batch_decode_waveforms([])
    assert nothing.shape == (0,)
    assert nothing.device == there.device


# ---------------------------------------------------------------- streaming


@pytest.fixture
def streaming(make_code2wav: Callable[..., Any], service: ServiceProcess) -> tuple[Any, Any]:
    """Stage 1 with asynchronous chunks, in this process and with the service."""
    extra = {"codec_chunk_frames": 5, "codec_left_context_frames": 40}
    here = make_code2wav(async_chunk=True, connector_extra=extra)
    return here, make_code2wav(through(service.address), async_chunk=True, connector_extra=extra)


def test_each_slot_drops_its_own_left_context(streaming: tuple[Any, Any]) -> None:
    here, there = streaming
    context: list[int | None] = [0, 1, 10, 29, 30, 31, 400]
    slots = [flat_codes(random_codes(120, seed)) for seed in range(len(context))]
    waveforms = alike(here, there, slots, context)
    kept = [max(0, 120 - (groups or 0) * GROUP_SIZE) * SAMPLES_PER_FRAME for groups in context]
    assert [waveform.numel() for waveform in waveforms] == kept


def test_without_word_of_the_context_a_long_chunk_has_the_default(streaming: tuple[Any, Any]) -> None:
    here, there = streaming
    # Five groups are a first chunk; six have context, and forty groups of it leave nothing of six.
    slots = [flat_codes(random_codes(groups * GROUP_SIZE, groups)) for groups in (1, 5, 6, 40, 41, 60)]
    waveforms = alike(here, there, slots, [None] * len(slots))
    groups_left = [waveform.numel() // (GROUP_SIZE * SAMPLES_PER_FRAME) for waveform in waveforms]
    assert groups_left == [1, 5, 0, 0, 1, 20]


def test_a_request_may_have_a_chunk_size_of_its_own(streaming: tuple[Any, Any]) -> None:
    slots = [flat_codes(random_codes(48, seed)) for seed in range(3)]
    arguments = {"per_req_codec_chunk_frames": [5, 12, None], "per_req_left_context_frames": [None, None, 3]}
    here, there = (
        stage._batch_chunked_decode_streaming(slots, default_chunk_size=5, default_left_context_size=2, **arguments)
        for stage in streaming
    )
    assert [samples.shape for samples in here] == [samples.shape for samples in there]
    assert [samples.numel() // (GROUP_SIZE * SAMPLES_PER_FRAME) for samples in there] == [10, 12, 9]


def test_chunks_with_context_between_slots_without_anything(streaming: tuple[Any, Any]) -> None:
    here, there = streaming
    slots = [
        flat_codes(random_codes(40, 1)),
        harness.dummy_slot(),
        flat_codes(random_codes(20, 2)),
        harness.malformed_slots()["no group of speech"],
        flat_codes(random_codes(60, 3)),
    ]
    waveforms = alike(here, there, slots, [4, 3, None, 2, 9])
    frames = [waveform.numel() // SAMPLES_PER_FRAME for waveform in waveforms]
    assert frames == [24, 0, 20, 0, 24]


# ---------------------------------------------------------------- one call, one model, no weights


def test_a_step_is_one_call(there: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    decode_batch = TokenizerClient.decode_batch

    def counting(self: TokenizerClient, codes: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(codes))
        return decode_batch(self, codes, *args, **kwargs)

    monkeypatch.setattr(TokenizerClient, "decode_batch", counting)
    decode_step(there, [flat_codes(random_codes(8, 1)), harness.dummy_slot(), flat_codes(random_codes(12, 2))])
    decode_step(there, [harness.dummy_slot()])
    assert calls == [2]


def test_the_other_ways_into_the_worker(here: Any, there: Any) -> None:
    codes = torch.from_numpy(random_codes(24))
    ours, theirs = there._tokenizer_service, here._tokenizer_service
    assert (ours.group_size, ours.audio_channels, ours.sample_rate) == (4, 8, 24_000)
    assert (theirs.group_size, theirs.audio_channels, theirs.sample_rate) == (4, 8, 24_000)
    assert torch.device(ours.device) == torch.device(theirs.device)
    assert ours.cuda_graph_wrapper is None
    for name, value in vars(ours.audio_tokenizer.config).items():
        assert getattr(theirs.audio_tokenizer.config, name) == value
    assert there.total_upsample == here.total_upsample == GROUP_SIZE * SAMPLES_PER_FRAME
    assert snr(theirs.decode(codes), ours.decode(codes)) >= EXACT
    whole = [worker.audio_tokenizer.decode(codes).reshape(-1) for worker in (theirs, ours)]
    assert snr(*whole) >= EXACT
    with torch.inference_mode():
        vectors = theirs.audio_tokenizer.encoder.decode_vq(codes)
    assert snr(vectors, ours.audio_tokenizer.encoder.decode_vq(codes)) >= EXACT
    slot = flat_codes(random_codes(24))
    assert snr(here._decode_waveform_from_codes(slot), there._decode_waveform_from_codes(slot)) >= EXACT
    assert there.chunked_decode_streaming(slot, chunk_size=3, left_context_size=2).shape == (16 * SAMPLES_PER_FRAME,)
    with pytest.raises(AttributeError, match=r"mel_transform: the tokenizer is the service at unix://"):
        ours.mel_transform  # noqa: B018


def test_all_of_stage_1_needs_no_folder(
    language_model: Path, service: ServiceProcess, set_environment: Callable[..., None]
) -> None:
    set_environment(through(service.address))
    stage = harness.build_code2wav_stage(language_model)
    stage.load_weights([])
    waveforms = decode_step(stage, [flat_codes(random_codes(8))])
    assert [waveform.shape for waveform in waveforms] == [(8 * SAMPLES_PER_FRAME,)]
    # The runner then tells which requests a step has.
    assert stage.requires_request_ids is True


def _build_both(language_model: Path) -> tuple[list[str], int]:
    stage, parser = harness.build_code2wav_stage(language_model), harness.build_parser()
    decode_step(stage, [flat_codes(random_codes(8))])
    harness.parse_audio(parser, (np.zeros(24_000, np.float32), 24_000))
    modules = [thing for thing in gc.get_objects() if isinstance(thing, torch.nn.Module)]
    kinds = sorted({type(module).__name__ for module in modules if "Tokenizer" in type(module).__name__})
    return kinds, sum(p.numel() for module in modules for p in module.parameters(recurse=False))


def test_no_weight_is_loaded_in_the_engine(
    language_model: Path, small_checkpoint: Path, service: ServiceProcess
) -> None:
    assert harness.run_fresh(_build_both, language_model, env=through(service.address)) == ([], 0)
    kinds, parameters = harness.run_fresh(_build_both, language_model, env=harness.in_process(small_checkpoint))
    assert kinds == ["MiMoAudioTokenizer"]
    assert parameters > 0


# ---------------------------------------------------------------- bad codes


@pytest.mark.parametrize("code", [128, 10_000, -1, 2**40])
def test_bad_codes_silence_their_own_slot_only(here: Any, there: Any, errors: Any, code: int) -> None:
    good = [flat_codes(random_codes(8, seed)) for seed in range(2)]
    waveforms = decode_step(there, [good[0], harness.outside_codebook(8, row=2, code=code), good[1]])
    assert [waveform.numel() for waveform in waveforms] == [8 * SAMPLES_PER_FRAME, 0, 8 * SAMPLES_PER_FRAME]
    for slot, waveform in zip(good, (waveforms[0], waveforms[2]), strict=True):
        assert snr(decode_step(here, [slot])[0], waveform) >= EXACT
    (line,) = errors
    assert line.startswith("1 of 3 slots of this step could not be decoded and stay silent: slot 1: ")
    assert "row 2, frame 4" in line
    assert str(code) in line
    # What is allowed: by its codebook, or by the type that codes travel in.
    assert re.search(r"0\.\.(127|65535)", line)
    # Its place in the call is not its place in the step.
    assert "item" not in line
    assert "\n" not in line


def test_the_line_names_the_requests_where_the_runner_tells(there: Any, errors: Any) -> None:
    bad, good = harness.outside_codebook(8), flat_codes(random_codes(8))
    output = there(
        codes=torch.cat([bad, good, bad]),
        seq_token_counts=[slot.numel() for slot in (bad, good, bad)],
        request_ids=["chat-1", "chat-2", "chat-3"],
    )
    assert [waveform.numel() for waveform in output.multimodal_outputs["model_outputs"]] == [
        0,
        8 * SAMPLES_PER_FRAME,
        0,
    ]
    (line,) = errors
    assert "2 of 3 slots" in line
    assert ": request chat-1, request chat-3: the code in row 2, frame 4 is 128" in line


def test_told_to_raise_a_step_with_a_bad_slot_raises(
    make_code2wav: Callable[..., Any], service: ServiceProcess, errors: Any
) -> None:
    stage = make_code2wav(through(service.address) | {"MIMO_AUDIO_TOKENIZER_ON_FAILURE": "raise"})
    slots = [flat_codes(random_codes(8)), harness.outside_codebook(8)]
    with pytest.raises(InvalidInput, match=r"^slot 2: the code in row 2, frame 4 is 128") as failure:
        decode_step(stage, [slots[0], harness.dummy_slot(), slots[1]])
    assert failure.value.detail is not None
    (line,) = errors
    assert line.startswith("1 of 3 slots of this step could not be decoded and the step fails: slot 2: ")
    assert decode_step(stage, slots[:1])[0].numel() == 8 * SAMPLES_PER_FRAME

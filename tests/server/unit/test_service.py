"""Answers, identities, timings, logs and limits of the servicer."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_audio_tokenizer.v1 import tokenizer_pb2_grpc
from mimo_tokenizer_server.config import BUILT_IN_MODELS
from mimo_tokenizer_server.engine import DeviceFailure, Engine
from mimo_tokenizer_server.errors import Reason, RequestError, too_large
from mimo_tokenizer_server.handlers import generic_handler
from mimo_tokenizer_server.memory import Division
from mimo_tokenizer_server.model.config import TokenizerConfig
from mimo_tokenizer_server.work import DecodeVqWork, DecodeWork, EncodeWork

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")

METHODS = ["Encode", "DecodeVq", "Decode", "DecodeLong", "EncodeStream"]
SAMPLES_PER_FRAME = 960
QUEUE_FULL = pb.ErrorDetail.REASON_QUEUE_FULL


# ---------------------------------------------------------------- answers


def _tiny_codes(frames: int, seed: int = 0) -> Any:
    sizes = TokenizerConfig.from_file(BUILT_IN_MODELS["tiny"]).codebook_sizes
    rng = np.random.default_rng(seed)
    return np.stack([rng.integers(0, size, frames) for size in sizes]).astype(np.uint16)


def test_encode_answers_with_the_engines_codes(tiny_rig: Any, tiny_engine: Engine, build: Any) -> None:
    pcm = build.pcm(30_001, 2)
    request = pb.EncodeRequest(items=[build.audio(pcm=pcm.tobytes(), channels=2)], num_quantizers=8, group_size=5)
    codes = tiny_rig.call("Encode", request).response.items[0].codes
    (expected,) = tiny_engine.run([build.encode_work(pcm, num_quantizers=8)])
    assert (codes.num_quantizers, codes.frames) == (8, 35)
    np.testing.assert_array_equal(build.array(codes)[:, :32], expected)
    np.testing.assert_array_equal(build.array(codes)[:, 32:], np.repeat(build.array(codes)[:, 31:32], 3, axis=1))


def test_absent_options_mean_all_codebooks_and_no_padding(rig: Any, build: Any) -> None:
    codes = rig.call("Encode", build.good("Encode")).response.items[0].codes
    (work,) = rig.engine.seen
    assert (work.segment.sample_rate, work.num_quantizers) == (24000, 20)
    assert (codes.num_quantizers, codes.frames) == (20, 3)


def test_decode_vq_answers_with_the_engines_features(tiny_rig: Any, tiny_engine: Engine, build: Any) -> None:
    arrays = [_tiny_codes(7), _tiny_codes(3, seed=1)[:8]]
    response = tiny_rig.call("DecodeVq", pb.DecodeVqRequest(items=[build.codes(array) for array in arrays])).response
    for item, array in zip(response.items, arrays, strict=True):
        features = np.frombuffer(item.features.data, "<f4").reshape(item.features.frames, item.features.d_model)
        np.testing.assert_array_equal(features, np.asarray(tiny_engine.run([DecodeVqWork(array)])[0]))
        assert features.shape == (array.shape[1], 128)


def test_decode_and_decode_long_answer_alike(tiny_rig: Any, tiny_engine: Engine, build: Any) -> None:
    array = _tiny_codes(9)
    (expected,) = tiny_engine.run([DecodeWork(array, 0, int16=False)])
    item = pb.DecodeItem(codes=build.codes(array))
    audio = tiny_rig.call("Decode", pb.DecodeRequest(items=[item])).response.items[0].audio
    assert (audio.sample_rate, audio.channels, audio.format) == (24000, 1, pb.SAMPLE_FORMAT_FLOAT32)
    samples = np.frombuffer(audio.pcm, "<f4")
    # A slow moment decides what is computed in steps, whose sums have another order.
    np.testing.assert_allclose(samples, expected, rtol=0, atol=1e-5)
    long = tiny_rig.call("DecodeLong", pb.DecodeLongRequest(item=item))
    in_pieces = np.frombuffer(b"".join(response.pcm for response in long.responses), "<f4")
    np.testing.assert_allclose(in_pieces, samples, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("max_message_bytes", "piece"), [(2 << 20, 1 << 20), (1 << 20, (1 << 20) - 1024)])
def test_decode_long_answers_in_pieces(make_rig: Any, build: Any, max_message_bytes: int, piece: int) -> None:
    rig = make_rig(max_message_bytes=max_message_bytes)
    item = pb.DecodeItem(codes=build.codes(build.code_array(600)), left_context_frames=1)
    outcome = rig.call("DecodeLong", pb.DecodeLongRequest(item=item))
    assert outcome.code is grpc.StatusCode.OK
    assert [len(response.pcm) for response in outcome.responses] == [piece, piece, 599 * 3840 - 2 * piece]
    assert all(response.ByteSize() <= max_message_bytes for response in outcome.responses)
    assert [response.HasField("timings") for response in outcome.responses] == [False, False, True]


def test_decode_long_of_a_whole_number_of_pieces_ends_with_the_last(
    rig: Any, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mimo_tokenizer_server.service._PIECE_BYTES", 2 * 3840)
    request = pb.DecodeLongRequest(item=pb.DecodeItem(codes=build.codes(build.code_array(4))))
    outcome = rig.call("DecodeLong", request)
    assert [len(response.pcm) for response in outcome.responses] == [7680, 7680]
    assert [response.HasField("timings") for response in outcome.responses] == [False, True]


@pytest.mark.parametrize("method", ["Decode", "DecodeLong"])
@pytest.mark.parametrize("sample_format", [pb.SAMPLE_FORMAT_UNSPECIFIED, pb.SAMPLE_FORMAT_INT16])
@pytest.mark.parametrize(("left", "kept"), [(0, 4), (1, 3), (3, 1), (4, 0), (5, 0), (2**32 - 1, 0)])
def test_left_context_is_dropped_from_the_front(
    tiny_rig: Any, tiny_engine: Engine, build: Any, method: str, sample_format: Any, left: int, kept: int
) -> None:
    array = _tiny_codes(4)
    item = pb.DecodeItem(codes=build.codes(array), left_context_frames=left)
    if method == "Decode":
        response = tiny_rig.call(method, pb.DecodeRequest(items=[item], format=sample_format)).response
        assert response.items[0].status.code == 0
        pcm = response.items[0].audio.pcm
    else:
        response = tiny_rig.call(method, pb.DecodeLongRequest(item=item, format=sample_format)).response
        pcm = response.pcm
    assert response.HasField("timings")
    int16 = sample_format == pb.SAMPLE_FORMAT_INT16
    whole = np.asarray(tiny_engine.run([DecodeWork(array, 0, int16)])[0])
    got = np.frombuffer(pcm, "<i2" if int16 else "<f4")
    wanted = whole[min(left, 4) * SAMPLES_PER_FRAME :]
    np.testing.assert_allclose(got.astype(float), wanted.astype(float), rtol=0, atol=1 if int16 else 1e-5)
    assert len(got) == kept * SAMPLES_PER_FRAME


def test_what_is_dropped_does_not_count_for_the_size_of_the_answer(rig: Any, build: Any) -> None:
    """1 MiB takes 272 frames of float32; the second item has none to answer, and takes nothing from the first."""
    codes = build.codes(build.code_array(1000))
    items = [pb.DecodeItem(codes=codes, left_context_frames=left) for left in (740, 2000)]
    response = rig.call("Decode", pb.DecodeRequest(items=items)).response
    assert [len(item.audio.pcm) for item in response.items] == [260 * 3840, 0]
    items[0].left_context_frames, items[1].left_context_frames = 720, 1020
    outcome = rig.call("Decode", pb.DecodeRequest(items=items))
    assert outcome.detail.reason == pb.ErrorDetail.REASON_TOO_LARGE
    assert outcome.detail.value == str(280 * 3840)


def test_nothing_to_answer_is_not_computed(rig: Any, build: Any) -> None:
    items = [pb.DecodeItem(codes=build.codes(), left_context_frames=left) for left in (4, 0)]
    response = rig.call("Decode", pb.DecodeRequest(items=items)).response
    assert [len(item.audio.pcm) for item in response.items] == [0, 4 * 3840]
    assert len(rig.engine.seen) == 1


def test_each_item_of_a_call_is_answered_in_its_place(rig: Any, build: Any) -> None:
    items = [build.codes(build.code_array(value, value=value)) for value in range(1, 30)]
    response = rig.call("DecodeVq", pb.DecodeVqRequest(items=items)).response
    assert [item.features.frames for item in response.items] == list(range(1, 30))
    assert all(
        set(np.frombuffer(item.features.data, "<f4")) == {float(value)}
        for value, item in enumerate(response.items, start=1)
    )


def test_a_large_request_is_checked_off_the_event_loop(rig: Any, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    check = "mimo_tokenizer_server.messages.check_finite"
    monkeypatch.setattr(check, lambda pcm, name, first: threads.add(threading.current_thread().name))
    rig.call("Encode", pb.EncodeRequest(items=[build.audio(2400)]))
    assert threads == {"loop"}
    threads.clear()
    rig.call("Encode", pb.EncodeRequest(items=[build.audio(70_000)]))
    assert len(threads) == 1
    assert "loop" not in threads


def test_long_audio_is_cut_into_segments_that_are_computed_together(rig: Any, build: Any, short_segments: int) -> None:
    pcm = build.pcm(48_000 + 1000)
    codes = rig.call("Encode", pb.EncodeRequest(items=[build.audio(pcm=pcm.tobytes())])).response.items[0].codes
    segments = [work.segment for work in rig.engine.seen]
    assert [(segment.first_frame, segment.frames) for segment in segments] == [(0, 100), (100, 100), (200, 5)]
    for segment in segments:
        np.testing.assert_array_equal(segment.pcm, pcm[segment.start : segment.start + len(segment.pcm), 0])
    values = [len(segment.pcm) % 128 for segment in segments]
    np.testing.assert_array_equal(build.array(codes)[0], np.repeat(values, [25, 25, 2]))


def test_segments_of_a_long_recording_interleave_with_other_calls(
    make_rig: Any, build: Any, fakes: Any, eventually: Any, short_segments: int
) -> None:
    rig = make_rig(fakes.Engine(max_batch_frames=60))
    gate = rig.engine.hook = fakes.Gate()
    first = rig.begin("DecodeVq", build.good("DecodeVq"))
    assert gate.entered.wait(30)
    long = rig.begin("Encode", pb.EncodeRequest(items=[build.audio(6 * 24_000 - 240)]))
    eventually(lambda: rig.waiting() == 6)
    short = rig.begin("DecodeVq", build.good("DecodeVq"))
    eventually(lambda: rig.waiting() == 7)
    gate.open()
    for call in (first, short):
        assert rig.finish("DecodeVq", call).code is grpc.StatusCode.OK
    assert rig.finish("Encode", long).code is grpc.StatusCode.OK
    kinds = [{type(work) for work in batch} for batch in rig.engine.batches]
    # Two segments fit into a batch; the short call has its turn after the first two.
    assert kinds == [{DecodeVqWork}, {EncodeWork}, {DecodeVqWork}, {EncodeWork}, {EncodeWork}]
    assert [len(batch) for batch in rig.engine.batches] == [1, 2, 1, 2, 2]


def test_half_an_hour_in_one_call_is_computed_segment_by_segment_between_others(
    make_rig: Any, build: Any, fakes: Any, eventually: Any
) -> None:
    rig = make_rig(fakes.Engine(max_batch_frames=1501), max_audio_seconds=1800.0, max_message_bytes=64 << 20)
    gate = rig.engine.hook = fakes.Gate()
    first = rig.begin("Decode", build.good("Decode"))
    assert gate.entered.wait(30)
    sound = np.zeros(1800 * 8000, "<i2")
    audio = build.audio(pcm=sound.tobytes(), sample_rate=8000, format=pb.SAMPLE_FORMAT_INT16)
    long = rig.begin("Encode", pb.EncodeRequest(items=[audio], num_quantizers=2, group_size=4))
    # 180,001 mel frames: the 31st segment has one, which gives a frame.
    eventually(lambda: rig.waiting() == 31)
    assert rig.admitted() == 4 + 30 * 1500 + 1
    short = rig.begin("DecodeVq", build.good("DecodeVq"))
    eventually(lambda: rig.waiting() == 32)
    gate.open()
    assert rig.finish("DecodeVq", short).code is grpc.StatusCode.OK
    assert rig.finish("Decode", first).code is grpc.StatusCode.OK
    response = rig.finish("Encode", long).response
    codes = response.items[0].codes
    assert (codes.num_quantizers, codes.frames) == (2, 45_004)
    np.testing.assert_array_equal(build.array(codes)[:, 45_001:], np.repeat(build.array(codes)[:, 45_000:45_001], 3, 1))
    # A segment is a batch; the short one has its turn after the first of them.
    assert [type(batch[0]) for batch in rig.engine.batches[:4]] == [DecodeWork, EncodeWork, DecodeVqWork, EncodeWork]
    starts = [work.segment.first_frame for work in rig.engine.seen if isinstance(work, EncodeWork)]
    assert starts == [6000 * number for number in range(31)]
    assert response.timings.batch_items in {1, 2}
    assert response.timings.batch_frames in {1500, 1501}
    assert rig.admitted() == 0


def test_a_long_item_is_decoded_in_steps_between_short_calls(
    make_rig: Any, build: Any, fakes: Any, eventually: Any
) -> None:
    rig = make_rig(fakes.Engine(max_batch_frames=200))
    order: list[int] = []
    gate = fakes.Gate()

    def hook(work: Any) -> None:
        order.append(work.codes.shape[1])
        gate(work)

    rig.engine.hook = hook
    request = pb.DecodeLongRequest(
        item=pb.DecodeItem(codes=build.codes(build.code_array(900)), left_context_frames=100)
    )
    long = rig.begin("DecodeLong", request)
    assert gate.entered.wait(30)
    short = rig.begin("Decode", build.good("Decode"))
    eventually(lambda: rig.waiting() == 2)
    gate.open()
    outcome = rig.finish("DecodeLong", long)
    assert sum(len(response.pcm) for response in outcome.responses) == 800 * 3840
    timings = outcome.responses[-1].timings
    assert (timings.batch_items, timings.batch_frames) == (1, 900)
    assert rig.finish("Decode", short).code is grpc.StatusCode.OK
    assert order == [900, 4] + [900] * 8


def test_what_has_no_room_in_the_memory_fails_alone(make_rig: Any, build: Any, fakes: Any) -> None:
    division = Division(limit=200_000, weights=0, fixed=0, activations=100_000, state=100_000)
    rig = make_rig(fakes.Engine(max_batch_frames=500, memory=division), max_message_bytes=64 << 20)
    items = [pb.DecodeItem(codes=build.codes(build.code_array(frames))) for frames in (4, 1001, 1000)]
    response = rig.call("Decode", pb.DecodeRequest(items=items)).response
    assert [item.status.code for item in response.items] == [0, grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], 0]
    detail = response.items[1].status.detail
    assert (detail.reason, detail.item) == (pb.ErrorDetail.REASON_OUT_OF_MEMORY, 1)
    # The same item never fits: nobody is told to try again.
    assert not detail.HasField("retry_after")


@pytest.mark.parametrize("method", ["Encode", "EncodeStream"])
@pytest.mark.parametrize(("mel_frames", "frames"), [(100, 25), (101, 25), (106, 25), (107, 26), (200, 50), (206, 50)])
@pytest.mark.parametrize("group_size", [1, 4, 7])
def test_groups_are_padded_over_segments_and_after_one_that_has_no_frame(
    make_rig: Any,
    build: Any,
    fakes: Any,
    short_segments: int,
    method: str,
    mel_frames: int,
    frames: int,
    group_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a kernel of 6, less than 7 mel frames give no code frame: a last segment of them is left out."""
    # Small pieces: a stream's segment is answered before it is known that nothing follows.
    monkeypatch.setattr("mimo_tokenizer_server.service._MAX_PIECE_BYTES", 1000)
    config = dataclasses.replace(fakes.info.config, kernel_size=6)
    assert [config.code_frames(count) for count in (6, 7, 100)] == [0, 1, 24]
    rig = make_rig(fakes.Engine(config=config))
    # Two segments of 100 mel frames give 24 code frames each.
    frames = frames - mel_frames // 100
    data = build.pcm((mel_frames - 1) * 240).tobytes()
    if method == "Encode":
        request = pb.EncodeRequest(items=[build.audio(pcm=data)], group_size=group_size)
        codes = build.array(rig.call(method, request).response.items[0].codes)
    else:
        outcome = rig.call(method, build.stream([data[:100_000], data[100_000:]], group_size=group_size))
        assert outcome.code is grpc.StatusCode.OK, outcome.details
        assert (len(outcome.responses) > 1) == (mel_frames > 101)
        codes = np.concatenate([build.array(response.codes) for response in outcome.responses], axis=1)
    assert codes.shape == (20, frames + -frames % group_size)
    np.testing.assert_array_equal(codes[:, frames:], np.repeat(codes[:, frames - 1 : frames], -frames % group_size, 1))


def test_get_info_tells_model_device_and_limits(tiny_rig: Any, tiny_engine: Engine) -> None:
    info = tiny_rig.call("GetInfo", pb.GetInfoRequest()).response
    assert (info.model.id, info.model.revision, info.model.random_weights) == ("tiny", "", True)
    assert info.model.fingerprint == tiny_engine.info.fingerprint
    assert list(info.model.codebook_sizes) == [1024] * 2 + [128] * 18
    assert (info.model.d_model, info.model.sample_rate, info.model.samples_per_frame) == (128, 24000, 960)
    assert (info.model.hop_length, info.model.stride_size, info.model.avg_pooler) == (240, 2, 2)
    assert (info.model.samples_cut, info.model.segment_samples) == (0, 1_440_000)
    assert (info.device.device, info.device.dtype, info.device.quantization) == ("cpu", "float32", "none")
    assert not any(info.device.HasField(name) for name in ("decode_snr_db", "equal_codes"))
    assert not info.device.encoder_quantized
    limits = info.limits
    assert (limits.max_message_bytes, limits.max_items, limits.max_channels) == (64 << 20, 1024, 64)
    assert (limits.min_sample_rate, limits.max_sample_rate) == (1000, 384_000)
    assert (limits.min_audio_samples, limits.max_audio_seconds, limits.max_group_size) == (481, 1800, 1024)
    # 30 segments of 60 seconds, and the last mel frame.
    assert limits.max_frames == 30 * 1500 + 1 + 1023
    assert limits.max_queued_frames == 2 * limits.max_frames
    assert limits.max_concurrent_calls == 128
    assert limits.max_batch_frames == 8192
    assert not info.device.batch_invariant
    memory = info.memory
    assert memory.limit == memory.weights + memory.fixed + memory.activations + memory.state
    assert min(memory.weights, memory.fixed, memory.activations, memory.state) > 0
    assert memory.weights == tiny_engine.info.memory.weights
    assert set(info.versions) == {"server", "python", "torch", "torchaudio", "grpcio", "protobuf"}
    assert all(info.versions.values())


def test_get_info_tells_what_the_engine_was_told(make_rig: Any, fakes: Any) -> None:
    division = Division(limit=10, weights=4, fixed=3, activations=2, state=1)
    rig = make_rig(fakes.Engine(batch_invariant=True, max_batch_frames=77, memory=division))
    info = rig.call("GetInfo", pb.GetInfoRequest()).response
    assert info.device.batch_invariant
    assert info.limits.max_batch_frames == 77
    memory = info.memory
    assert (memory.limit, memory.weights, memory.fixed, memory.activations, memory.state) == (10, 4, 3, 2, 1)


# ---------------------------------------------------------------- timings


@pytest.mark.parametrize("method", METHODS)
def test_timings_add_up(rig: Any, build: Any, method: str) -> None:
    rig.engine.hook = lambda work: time.sleep(0.01)
    before = time.monotonic()
    outcome = rig.call(method, build.good(method))
    elapsed = time.monotonic() - before
    timings = outcome.responses[-1].timings
    assert timings.compute_seconds >= 0.01
    assert timings.queue_seconds >= 0
    assert timings.queue_seconds + timings.compute_seconds <= timings.total_seconds <= elapsed


def test_timings_are_those_of_the_longest_wait_and_of_all_work(
    rig: Any, build: Any, fakes: Any, eventually: Any
) -> None:
    gate = fakes.Gate()

    def hook(work: Any) -> None:
        gate(work)
        time.sleep(0.01)

    rig.engine.hook = hook
    first = rig.begin("Decode", build.good("Decode"))
    assert gate.entered.wait(30)
    call = rig.begin("DecodeVq", pb.DecodeVqRequest(items=[build.codes()] * 4))
    eventually(lambda: rig.waiting() == 4)
    other = rig.begin("DecodeVq", build.good("DecodeVq"))
    eventually(lambda: rig.waiting() == 5)
    gate.open()
    timings = rig.finish("DecodeVq", call).response.timings
    assert timings.queue_seconds >= 0.01
    # The sum over the four items, of which each was on the device for as long as its batch.
    assert timings.compute_seconds >= 4 * 5 * 0.01
    assert timings.total_seconds >= 0.06
    # Of this call and of the other one.
    assert (timings.batch_items, timings.batch_frames) == (5, 20)
    timings = rig.finish("Decode", first).response.timings
    assert (timings.batch_items, timings.batch_frames) == (1, 4)
    assert rig.finish("DecodeVq", other).response.timings.batch_items == 5
    assert [len(batch) for batch in rig.engine.batches] == [1, 5]


# ---------------------------------------------------------------- who asks


def _metadata(outcome: Any, name: str) -> Any:
    (value,) = (value for key, value in outcome.trailing if key == name)
    return value


def _bad(build: Any, method: str) -> Any:
    return build.good(method, expected_fingerprint="another")


@pytest.mark.parametrize("method", METHODS)
def test_a_request_id_comes_back_with_an_error(rig: Any, build: Any, method: str) -> None:
    outcome = rig.call(method, _bad(build, method), metadata=(("x-request-id", "abc-1"), ("other", "x")))
    assert outcome.detail.request_id == "abc-1"
    assert _metadata(outcome, "x-request-id") == "abc-1"


def test_a_request_id_comes_back_in_the_status_of_an_item(rig: Any, build: Any) -> None:
    request = pb.EncodeRequest(items=[build.audio(), build.audio(pcm=b"")])
    response = rig.call("Encode", request, metadata=(("x-request-id", "abc-2"),)).response
    assert response.items[1].status.detail.request_id == "abc-2"


def test_an_absent_request_id_is_made_up(rig: Any, build: Any) -> None:
    ids = []
    for metadata in ((), (("x-request-id", ""),)):
        outcome = rig.call("Encode", _bad(build, "Encode"), metadata=metadata)
        assert _metadata(outcome, "x-request-id") == outcome.detail.request_id
        ids.append(outcome.detail.request_id)
    assert all(len(request_id) == 32 for request_id in ids)
    assert ids[0] != ids[1]


def test_a_long_request_id_is_cut(rig: Any, build: Any) -> None:
    outcome = rig.call("Encode", _bad(build, "Encode"), metadata=(("x-request-id", "x" * 5000),))
    assert outcome.detail.request_id == "x" * 128


def _line(records: list[logging.LogRecord], method: str) -> dict[str, Any]:
    (record,) = (record for record in records if record.getMessage() == method)
    assert record.levelno == logging.DEBUG
    fields: dict[str, Any] = record.__dict__["fields"]
    return fields


@pytest.mark.parametrize("method", METHODS)
def test_a_call_logs_who_what_and_how_it_ended(
    rig: Any, build: Any, method: str, log_lines: list[logging.LogRecord], eventually: Any
) -> None:
    metadata = (("x-request-id", "abc-3"), ("x-client", "tests/1"), ("x-secret-bin", b"\0"))
    assert rig.call(method, build.good(method), metadata=metadata).code is grpc.StatusCode.OK
    eventually(lambda: bool(log_lines))
    fields = _line(log_lines, method)
    assert (fields["status"], fields["request_id"], fields["client"]) == ("OK", "abc-3", "tests/1")
    assert (fields["items"], fields["error"]) == (1, "-")
    assert fields["total_seconds"] > 0
    # No audio: nothing but short text and numbers.
    assert all(isinstance(value, (str, int, float)) and len(str(value)) < 64 for value in fields.values())


def test_a_refused_call_logs_why(rig: Any, build: Any, log_lines: list[logging.LogRecord]) -> None:
    sound = build.pcm(100).tobytes()
    rig.call("Encode", pb.EncodeRequest(items=[build.audio(pcm=sound)]))
    fields = _line(log_lines, "Encode")
    assert (fields["status"], fields["client"]) == ("INVALID_ARGUMENT", "-")
    assert fields["error"].startswith("items[0].pcm is 100 samples at 24000 Hz")
    assert all(str(sound[:4]) not in str(value) for value in fields.values())


def test_a_fault_of_the_service_is_internal_and_logged(
    rig: Any, build: Any, log_lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mimo_tokenizer_server.messages.check_codes", lambda *args: 1 / 0)
    outcome = rig.call("Decode", build.good("Decode"), metadata=(("x-request-id", "abc-4"),))
    assert outcome.code is grpc.StatusCode.INTERNAL
    assert outcome.details == "the server failed on request abc-4; its log says why"
    assert outcome.detail.reason == pb.ErrorDetail.REASON_INTERNAL
    (failure,) = (record for record in log_lines if record.levelno == logging.ERROR)
    assert failure.exc_info is not None
    assert failure.exc_info[0] is ZeroDivisionError
    assert rig.admitted() == 0


def test_every_reason_is_in_the_contract() -> None:
    assert {f"REASON_{reason.name}" for reason in Reason} | {"REASON_UNSPECIFIED"} == set(pb.ErrorDetail.Reason.keys())


def test_large_numbers_are_told_in_full() -> None:
    error = too_large("frames", 2**32 - 1, 1_000_001, "frames")
    assert str(error) == "frames is 4294967295 frames; the limit is 1000001 frames"
    assert (error.value, error.allowed) == ("4294967295", "at most 1000001 frames")


# ---------------------------------------------------------------- states of the server


@pytest.mark.parametrize("method", [*METHODS, "GetInfo"])
def test_nothing_is_answered_before_the_model_is_loaded(make_rig: Any, build: Any, method: str) -> None:
    rig = make_rig(start=False)
    request = pb.GetInfoRequest() if method == "GetInfo" else build.good(method)
    outcome = rig.call(method, request)
    assert outcome.code is grpc.StatusCode.UNAVAILABLE
    assert outcome.details == "the server is starting: its model is not loaded yet"
    assert outcome.detail.reason == pb.ErrorDetail.REASON_NOT_READY
    assert outcome.detail.retry_after.ToTimedelta().total_seconds() == 1
    asyncio.run_coroutine_threadsafe(rig.scheduler.start(), rig.loop).result(30)
    assert rig.call(method, request).code is grpc.StatusCode.OK


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(make_rig: Any, build: Any, fakes: Any) -> None:
    rig = make_rig(max_queued_frames=6)
    gate = rig.engine.hook = fakes.Gate()
    first = rig.begin("Decode", build.good("Decode"))
    assert gate.entered.wait(30)
    for method in ("Encode", "DecodeVq", "Decode", "DecodeLong"):
        outcome = rig.call(method, build.good(method))
        frames = 3 if method == "Encode" else 4
        assert outcome.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert outcome.details == (
            "the queue is full: 4 frames are waiting, about 0.00 seconds of work; the call has"
            f" {frames}, the limit is 6"
        )
        assert outcome.detail.reason == QUEUE_FULL
        assert (outcome.detail.value, outcome.detail.limit) == (str(frames), 6)
        assert outcome.detail.retry_after.ToTimedelta().total_seconds() == pytest.approx(0.05)
        assert not outcome.item_statuses
    gate.open()
    assert rig.finish("Decode", first).code is grpc.StatusCode.OK
    assert len(rig.engine.seen) == 1
    assert rig.admitted() == 0
    assert rig.call("Decode", build.good("Decode")).code is grpc.StatusCode.OK


@pytest.mark.parametrize("method", METHODS)
def test_a_deadline_that_passes_in_the_queue(
    make_rig: Any, build: Any, fakes: Any, eventually: Any, method: str
) -> None:
    rig = make_rig()
    gate = rig.engine.hook = fakes.Gate()
    first = rig.begin("Decode", build.good("Decode"))
    assert gate.entered.wait(30)
    late = rig.begin(method, build.good(method), timeout=0.02)
    eventually(lambda: rig.waiting() == 1)
    time.sleep(0.03)
    gate.open()
    outcome = rig.finish(method, late)
    assert outcome.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert outcome.detail.reason == pb.ErrorDetail.REASON_DEADLINE
    assert "the deadline passed; the item had come " in outcome.details
    assert rig.finish("Decode", first).code is grpc.StatusCode.OK
    assert len(rig.engine.seen) == 1
    assert rig.admitted() == 0


@pytest.mark.parametrize("method", METHODS)
def test_a_cancelled_call_drops_its_work(
    make_rig: Any, build: Any, fakes: Any, eventually: Any, method: str, log_lines: list[logging.LogRecord]
) -> None:
    rig = make_rig()
    gate = rig.engine.hook = fakes.Gate()
    first = rig.begin("Decode", build.good("Decode"))
    assert gate.entered.wait(30)
    cancelled = rig.begin(method, build.good(method))
    eventually(lambda: rig.waiting() == 1)
    assert rig.admitted() > 4
    cancelled.cancel()
    eventually(lambda: rig.admitted() == 4)
    gate.open()
    assert rig.finish("Decode", first).code is grpc.StatusCode.OK
    assert rig.call("Decode", build.good("Decode")).code is grpc.StatusCode.OK
    assert [type(work) for work in rig.engine.seen] == [DecodeWork, DecodeWork]

    def statuses() -> list[str]:
        return [record.__dict__["fields"]["status"] for record in log_lines if record.getMessage() == method]

    # The call's own task notices after its work has gone.
    eventually(lambda: "CANCELLED" in statuses())


def test_a_stream_cancelled_between_its_messages_gives_its_place_back(rig: Any, build: Any, eventually: Any) -> None:
    descriptor = pb.DESCRIPTOR.services_by_name["AudioTokenizer"].methods_by_name["EncodeStream"]
    rpc = rig.server.invoke_stream_stream(descriptor, (), None)
    for message in build.good("EncodeStream"):
        rpc.send_request(message)
    eventually(lambda: rig.servicer._calls == 1)
    rpc.cancel()
    eventually(lambda: rig.servicer._calls == 0)
    assert not rig.engine.seen
    assert rig.admitted() == 0


def test_a_stream_holds_room_only_while_a_segment_is_computed(
    make_rig: Any, build: Any, fakes: Any, eventually: Any, short_segments: int
) -> None:
    rig = make_rig(max_queued_frames=25)
    gate = rig.engine.hook = fakes.Gate()
    descriptor = pb.DESCRIPTOR.services_by_name["AudioTokenizer"].methods_by_name["EncodeStream"]
    rpc = rig.server.invoke_stream_stream(descriptor, (), None)
    for message in build.stream([bytes(4 * 48_000)]):
        rpc.send_request(message)
    assert gate.entered.wait(30)
    assert rig.admitted() == 25
    gate.open()
    assert rpc.take_response().codes.frames == 25
    # Idle between its messages, it is in nobody's way: all of the queue is free.
    eventually(lambda: rig.admitted() == 0)
    whole = pb.DecodeVqRequest(items=[build.codes(build.code_array(25))])
    assert rig.call("DecodeVq", whole).code is grpc.StatusCode.OK
    rpc.requests_closed()
    outcome = rig.finish("EncodeStream", rpc)
    assert sum(response.codes.frames for response in outcome.responses) == 26
    assert rig.admitted() == 0


def test_a_stream_is_refused_at_its_start_and_waits_later(
    make_rig: Any, build: Any, fakes: Any, eventually: Any, short_segments: int
) -> None:
    rig = make_rig(max_queued_frames=30)
    descriptor = pb.DESCRIPTOR.services_by_name["AudioTokenizer"].methods_by_name["EncodeStream"]
    stream = rig.server.invoke_stream_stream(descriptor, (), None)
    messages = build.stream([bytes(4 * 48_000)])
    checked = threading.Event()
    check_room = rig.scheduler.check_room

    def check(frames: int) -> None:
        check_room(frames)
        checked.set()

    rig.scheduler.check_room = check
    stream.send_request(messages[0])
    assert checked.wait(30)
    gate = rig.engine.hook = fakes.Gate()
    busy = rig.begin("Decode", pb.DecodeRequest(items=[pb.DecodeItem(codes=build.codes(build.code_array(10)))]))
    assert gate.entered.wait(30)
    outcome = rig.call("EncodeStream", build.good("EncodeStream"))
    assert outcome.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert outcome.details == (
        "the queue is full: 10 frames are waiting, about 0.00 seconds of work; the call has 25, the limit is 30"
    )
    assert outcome.detail.reason == QUEUE_FULL
    # The stream that has begun waits for its room instead; and nobody overtakes it.
    stream.send_request(messages[1])
    eventually(lambda: rig.on_loop(lambda: len(rig.scheduler._waiters)) == 1)
    assert rig.call("Decode", build.good("Decode")).detail.reason == QUEUE_FULL
    stream.requests_closed()
    gate.open()
    assert rig.finish("Decode", busy).code is grpc.StatusCode.OK
    outcome = rig.finish("EncodeStream", stream)
    assert outcome.code is grpc.StatusCode.OK
    assert sum(response.codes.frames for response in outcome.responses) == 51
    assert rig.admitted() == 0


def test_streams_share_the_queue_with_calls(make_rig: Any, build: Any, fakes: Any) -> None:
    rig = make_rig(max_queued_frames=5)
    gate = rig.engine.hook = fakes.Gate()
    first = rig.begin("EncodeStream", build.good("EncodeStream"))
    assert gate.entered.wait(30)
    outcome = rig.call("Decode", build.good("Decode"))
    assert outcome.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert outcome.details == (
        "the queue is full: 3 frames are waiting, about 0.00 seconds of work; the call has 4, the limit is 5"
    )
    assert outcome.detail.reason == QUEUE_FULL
    gate.open()
    assert rig.finish("EncodeStream", first).code is grpc.StatusCode.OK
    assert rig.admitted() == 0


def test_a_failure_in_the_middle_of_a_stream(rig: Any, build: Any, short_segments: int) -> None:
    def hook(work: Any) -> None:
        if len(rig.engine.seen) == 2:
            raise ZeroDivisionError

    rig.engine.hook = hook
    outcome = rig.call("EncodeStream", build.stream([bytes(4 * 96_000)]))
    assert outcome.code is grpc.StatusCode.INTERNAL
    assert outcome.detail.reason == pb.ErrorDetail.REASON_INTERNAL
    assert len(rig.engine.seen) == 2
    assert rig.admitted() == 0
    assert rig.call("EncodeStream", build.good("EncodeStream")).code is grpc.StatusCode.OK


@pytest.mark.parametrize("method", METHODS)
def test_a_lost_device_is_unavailable(rig: Any, build: Any, method: str) -> None:
    def hook(work: Any) -> None:
        raise DeviceFailure("cuda:1 failed: an illegal memory access")

    rig.engine.hook = hook
    outcomes = [rig.call(method, build.good(method)) for _ in range(2)]
    outcomes.append(rig.call("GetInfo", pb.GetInfoRequest()))
    for outcome in outcomes:
        assert outcome.code is grpc.StatusCode.UNAVAILABLE
        assert outcome.details == "cuda:1 failed: an illegal memory access; the server is going down"
        assert outcome.detail.reason == pb.ErrorDetail.REASON_DEVICE_FAILURE
        assert outcome.detail.HasField("retry_after")
    assert len(rig.engine.seen) == 1
    assert len(rig.device_failures) == 1
    assert rig.admitted() == 0


def test_a_failed_item_fails_alone(rig: Any, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run_one = rig.engine._run_one
    fault = RequestError(Reason.INTERNAL, "the server failed to compute this item; its log says why")
    monkeypatch.setattr(rig.engine, "_run_one", lambda work: fault if work.codes[0, 0] == 9 else run_one(work))
    items = [build.codes(build.code_array(value=value)) for value in (1, 9, 2)]
    response = rig.call("DecodeVq", pb.DecodeVqRequest(items=items)).response
    assert [item.status.code for item in response.items] == [0, grpc.StatusCode.INTERNAL.value[0], 0]
    assert response.items[1].status.detail.reason == pb.ErrorDetail.REASON_INTERNAL
    assert response.items[1].status.detail.item == 1


def test_out_of_memory_is_told_of_its_item(rig: Any, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run_one = rig.engine._run_one
    short = RequestError(Reason.OUT_OF_MEMORY, "cpu has too little free memory for this item of 4 frames")
    monkeypatch.setattr(rig.engine, "_run_one", lambda work: short if work.codes[0, 0] == 9 else run_one(work))
    items = [build.codes(build.code_array(value=value)) for value in (9, 2)]
    response = rig.call("DecodeVq", pb.DecodeVqRequest(items=items)).response
    assert [item.status.code for item in response.items] == [grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], 0]
    assert response.items[0].status.detail.reason == pb.ErrorDetail.REASON_OUT_OF_MEMORY
    assert response.items[0].status.detail.item == 0


# ---------------------------------------------------------------- memory


def _check_let_go(rig: Any, method: str, request: Callable[[], Any], eventually: Any) -> None:
    """Make refused calls, and see that reference counts alone free their requests."""
    kind = type(request())

    def alive() -> int:
        return sum(type(thing) in {kind, DecodeWork} for thing in gc.get_objects())

    async def refused() -> None:
        for _ in range(3):
            with pytest.raises(grpc.aio.AbortError):
                await getattr(rig.servicer, method)(request(), _Context())

    gc.collect()
    gc.disable()
    try:
        before = alive()
        asyncio.run_coroutine_threadsafe(refused(), rig.loop).result(30)
        # A thread of the executor holds its last work for a moment longer.
        eventually(lambda: alive() <= before)
    finally:
        gc.enable()


class _Context:
    def invocation_metadata(self) -> tuple[()]:
        return ()

    def time_remaining(self) -> None:
        return None

    async def abort(self, *status: Any) -> None:
        raise grpc.aio.AbortError("aborted")


@pytest.mark.parametrize("samples", [2400, 200_000])
def test_a_refused_request_is_let_go_of(rig: Any, build: Any, samples: int, eventually: Any) -> None:
    """Errors keep tracebacks, and those the requests: a few bad ones of 64 MiB must not fill the memory."""

    def bad() -> Any:
        return pb.EncodeRequest(items=[build.audio(pcm=np.full(samples, np.nan, "<f4").tobytes())])

    _check_let_go(rig, "Encode", bad, eventually)


def test_a_request_that_comes_too_early_is_let_go_of(make_rig: Any, build: Any, eventually: Any) -> None:
    _check_let_go(make_rig(start=False), "Encode", lambda: build.good("Encode"), eventually)


def test_a_request_that_fails_in_the_engine_is_let_go_of(rig: Any, build: Any, eventually: Any) -> None:
    rig.engine.run = lambda batch: [RequestError(Reason.OUT_OF_MEMORY, "too little memory") for _ in batch]
    _check_let_go(rig, "Decode", lambda: build.good("Decode"), eventually)


# ---------------------------------------------------------------- calls at a time, over a real channel


class _Served:
    """The servicer behind a real grpc.aio server, with the health service beside it."""

    def __init__(self, rig: Any) -> None:
        self._rig = rig

    async def __aenter__(self) -> _Served:
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((generic_handler(self._rig.servicer),))
        servicer = health.aio.HealthServicer()
        await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.stub: Any = tokenizer_pb2_grpc.AudioTokenizerStub(self._channel)
        self.health: Any = health_pb2_grpc.HealthStub(self._channel)
        return self

    def raw(self, method: str) -> Any:
        """A unary method that takes bytes."""
        return self._channel.unary_unary(f"/mimo_audio_tokenizer.v1.AudioTokenizer/{method}")

    async def __aexit__(self, *exc: object) -> None:
        await self._channel.close()
        await self._server.stop(None)


def _run(rig: Any, coroutine: Coroutine[Any, Any, None]) -> None:
    # Cancelled when it takes too long, so that the traceback says where it waits.
    asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, 30), rig.loop).result()


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (what is waited for has no event; the test has a timeout)
        await asyncio.sleep(0.002)


def _detail(error: Any) -> pb.ErrorDetail:
    return pb.ErrorDetail.FromString(dict(error.trailing_metadata())["mimo-error-detail-bin"])


def test_calls_over_the_limit_are_refused_while_health_and_info_answer(make_rig: Any, build: Any, fakes: Any) -> None:
    rig = make_rig(max_concurrent_calls=2)
    gate = rig.engine.hook = fakes.Gate()

    async def check() -> None:
        async with _Served(rig) as served:
            running = asyncio.ensure_future(served.stub.Decode(build.good("Decode"), timeout=30))
            stream = served.stub.EncodeStream(timeout=30)
            await stream.write(build.good("EncodeStream")[0])
            await asyncio.to_thread(gate.entered.wait, 30)
            await _until(lambda: rig.servicer._calls == 2)
            for method in ("Encode", "DecodeVq", "Decode"):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await getattr(served.stub, method)(build.good(method), timeout=30)
                error = refused.value
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert error.details() == "2 calls are in progress; at most 2 are taken"
                assert _detail(error).reason == QUEUE_FULL
                assert _detail(error).limit == 2
                assert _detail(error).retry_after.nanos == 100_000_000
            for call in (
                served.stub.DecodeLong(build.good("DecodeLong"), timeout=30),
                # Without a message: grpc.aio's client tells of a write that fails, instead of the status.
                served.stub.EncodeStream(timeout=30),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call.read()
                assert _detail(refused.value).reason == QUEUE_FULL
            info = await served.stub.GetInfo(pb.GetInfoRequest(), timeout=30)
            assert info.limits.max_concurrent_calls == 2
            answer = await served.health.Check(health_pb2.HealthCheckRequest(), timeout=30)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            gate.open()
            await running
            assert (await served.stub.Decode(build.good("Decode"), timeout=30)).items[0].status.code == 0
            stream.cancel()
            await _until(lambda: rig.servicer._calls == 0)

    _run(rig, check())
    assert rig.admitted() == 0


def test_a_client_gets_the_details_of_a_thousand_bad_items(rig: Any, build: Any) -> None:
    async def check() -> None:
        async with _Served(rig) as served:
            request = pb.EncodeRequest(items=[build.audio(sample_rate=2**32 - 1, pcm=b"")] * 1024)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await served.stub.Encode(request, timeout=30)
            error = refused.value
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert _detail(error).field == "items[0].sample_rate"
            statuses = [value for key, value in error.trailing_metadata() if key == "mimo-item-status-bin"]
            assert len(statuses) >= 10

    _run(rig, check())


def test_a_call_without_a_deadline_over_a_real_channel(rig: Any, build: Any) -> None:
    async def check() -> None:
        async with _Served(rig) as served:
            response = await served.stub.Decode(build.good("Decode"))
            assert response.items[0].status.code == 0

    _run(rig, check())


# ---------------------------------------------------------------- bytes, and callers that do nothing


def test_what_is_no_message_gets_a_proper_status(rig: Any, build: Any) -> None:
    async def check() -> None:
        async with _Served(rig) as served:
            for method in ("Encode", "DecodeVq", "Decode", "GetInfo"):
                for data in (b"\xff", b"\x0a\x7f", b"\x0b\x0c", b"\x80" * 11):
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await served.raw(method)(data, timeout=30, metadata=(("x-request-id", "r1"),))
                    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                    assert _detail(refused.value).field == "message"
                    assert _detail(refused.value).request_id == "r1"
            assert (await served.stub.Decode(build.good("Decode"), timeout=30)).items[0].status.code == 0

    _run(rig, check())


def test_a_million_empty_items_are_not_built(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(pb.EncodeRequest, "FromString", staticmethod(built.append), raising=False)

    async def check() -> None:
        async with _Served(rig) as served:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await served.raw("Encode")(b"\x0a\x00" * 1_000_000, timeout=30)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert refused.value.details() == "the call has more than 1024 items"

    _run(rig, check())
    assert not built


def _ended(rig: Any, method: str) -> dict[str, float]:
    """The method's calls that the metrics have counted, by status."""
    return {
        sample.labels["status"]: sample.value
        for family in rig.servicer._metrics.registry.collect()
        for sample in family.samples
        if sample.name == "mimo_tokenizer_requests_total" and sample.labels["method"] == method and sample.value
    }


@pytest.mark.parametrize("messages", [0, 1, 2])
def test_a_stream_that_sends_nothing_more_ends(
    rig: Any, build: Any, monkeypatch: pytest.MonkeyPatch, messages: int
) -> None:
    monkeypatch.setattr("mimo_tokenizer_server.service.IDLE_SECONDS", 0.2)

    async def check() -> None:
        async with _Served(rig) as served:
            call = served.stub.EncodeStream(timeout=30)
            for message in build.good("EncodeStream")[:messages]:
                await call.write(message)
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await call.read()
            assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "did not come within 0.2 seconds" in str(ended.value.details())

    _run(rig, check())
    assert rig.admitted() == 0


def test_an_answer_that_nobody_reads_gives_up_its_place(
    make_rig: Any, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mimo_tokenizer_server.handlers.IDLE_SECONDS", 0.5)
    rig = make_rig(max_audio_seconds=1800.0)
    request = pb.DecodeLongRequest(item=pb.DecodeItem(codes=build.codes(build.code_array(20_000))))

    async def check() -> None:
        async with _Served(rig) as served:
            call = served.stub.DecodeLong(request, timeout=30)
            await call.read()
            await _until(lambda: rig.servicer._calls == 0)
            # The place is free again, and the server answers others.
            assert (await served.stub.Decode(build.good("Decode"), timeout=30)).items[0].status.code == 0
            call.cancel()

    _run(rig, check())
    assert rig.admitted() == 0
    assert _ended(rig, "DecodeLong") == {"DEADLINE_EXCEEDED": 1}


@pytest.mark.parametrize("messages", [0, 1, 2])
def test_a_stream_whose_client_goes_away_is_cancelled(rig: Any, build: Any, messages: int) -> None:
    """Its messages end first, which would be no recording, or one that is too short."""
    sent = build.stream([build.pcm(10).tobytes()])

    async def check() -> None:
        async with _Served(rig) as served:
            for count in range(10):
                call = served.stub.EncodeStream(timeout=30)
                await _until(lambda: rig.servicer._calls == 1)
                for message in sent[:messages]:
                    await call.write(message)
                call.cancel()
                await _until(lambda count=count: sum(_ended(rig, "EncodeStream").values()) == count + 1)
            assert _ended(rig, "EncodeStream") == {"CANCELLED": 10}
            # One that ends its messages itself is told what was wrong with them.
            call = served.stub.EncodeStream(timeout=30)
            for message in sent[:messages]:
                await call.write(message)
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT

    _run(rig, check())
    assert _ended(rig, "EncodeStream") == {"CANCELLED": 10, "INVALID_ARGUMENT": 1}


def test_a_deadline_that_passes_on_the_device_is_no_cancellation(make_rig: Any, build: Any, fakes: Any) -> None:
    """GRPC's server ends both in the same way; the metrics and the log tell them apart."""
    rig = make_rig()
    gate = rig.engine.hook = fakes.Gate()

    async def check() -> None:
        async with _Served(rig) as served:
            late = served.stub.Decode(build.good("Decode"), timeout=0.5)
            await asyncio.to_thread(gate.entered.wait, 30)
            await _until(lambda: rig.servicer._calls == 0)
            assert await late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert _ended(rig, "Decode") == {"DEADLINE_EXCEEDED": 1}
            given_up = served.stub.Decode(build.good("Decode"), timeout=30)
            await _until(lambda: rig.servicer._calls == 1)
            given_up.cancel()
            await _until(lambda: rig.servicer._calls == 0)
            assert _ended(rig, "Decode") == {"DEADLINE_EXCEEDED": 1, "CANCELLED": 1}
            gate.open()

    _run(rig, check())
    assert rig.admitted() == 0


def test_odd_bytes_in_a_request_id_do_no_harm(rig: Any) -> None:
    odd = rig.call("Decode", pb.DecodeRequest(), metadata=(("x-request-id", "a\x01b\n\u00e9"),))
    assert odd.code is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(odd.trailing)["x-request-id"] == "a?b??"

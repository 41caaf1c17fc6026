"""EncodeStream answers as Encode does, bit for bit, however the bytes are cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_tokenizer_server.model.frontend import Segment, SegmentCutter

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")

# 44100 is resampled with a filter bank, 44101 and 383999 without one.
RATES = [24000, 1000, 16000, 44100, 44101, 48000, 383999]

SEGMENT_FRAMES = 100  # of mel: a second


def _cut(data: bytes, positions: list[int]) -> list[bytes]:
    edges = [0, *sorted(position % (len(data) + 1) for position in positions), len(data)]
    return [data[start:stop] for start, stop in itertools.pairwise(edges)]


def _encode(rig: Any, build: Any, data: bytes, options: dict[str, Any], **sizes: Any) -> npt.NDArray[np.uint16]:
    response = rig.call("Encode", pb.EncodeRequest(items=[build.audio(pcm=data, **options)], **sizes)).response
    codes: npt.NDArray[np.uint16] = build.array(response.items[0].codes)
    return codes


def _encode_stream(
    rig: Any, build: Any, pieces: list[bytes], options: dict[str, Any], **sizes: Any
) -> list[npt.NDArray[np.uint16]]:
    outcome = rig.call("EncodeStream", build.stream(pieces, **options, **sizes))
    assert outcome.code is grpc.StatusCode.OK, outcome.details
    assert [response.HasField("timings") for response in outcome.responses] == [False] * (
        len(outcome.responses) - 1
    ) + [True]
    return [build.array(response.codes) for response in outcome.responses]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rate=st.sampled_from(RATES),
    channels=st.integers(1, 3),
    int16=st.booleans(),
    seconds=st.floats(0.05, 2.5),
    positions=st.lists(st.integers(0, 2**40), max_size=12),
    num_quantizers=st.sampled_from([None, 1, 8, 20]),
    group_size=st.sampled_from([None, 1, 4, 7]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_stream_equals_a_call(
    tiny_rig: Any,
    build: Any,
    rate: int,
    channels: int,
    int16: bool,
    seconds: float,
    positions: list[int],
    num_quantizers: int | None,
    group_size: int | None,
    seed: int,
) -> None:
    samples = max(rate // 50 + 1, int(seconds * min(rate, 48000)))
    data = build.pcm(samples, channels, seed, int16).tobytes()
    sample_format = pb.SAMPLE_FORMAT_INT16 if int16 else pb.SAMPLE_FORMAT_FLOAT32
    options = {"sample_rate": rate, "channels": channels, "format": sample_format}
    sizes = {"num_quantizers": num_quantizers, "group_size": group_size}
    with pytest.MonkeyPatch.context() as patch:
        # Several segments and several blocks of the resampler in little time.
        for module in ("model.config", "model.frontend", "service"):
            patch.setattr(f"mimo_tokenizer_server.{module}.SEGMENT_MEL_FRAMES", SEGMENT_FRAMES)
        patch.setattr("mimo_tokenizer_server.model.frontend._BLOCK_SECONDS", 1)
        whole = _encode(tiny_rig, build, data, options, **sizes)
        parts = _encode_stream(tiny_rig, build, _cut(data, positions), options, **sizes)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
    assert whole.shape[0] == (num_quantizers or 20)
    assert whole.shape[1] % (group_size or 1) == 0


@pytest.mark.parametrize("rate", [24000, 44100])
def test_bytes_one_by_one(tiny_rig: Any, build: Any, rate: int) -> None:
    data = build.pcm(1000, int16=True).tobytes()
    options = {"sample_rate": rate, "format": pb.SAMPLE_FORMAT_INT16}
    pieces = [data[index : index + 1] for index in range(len(data))]
    (codes,) = _encode_stream(tiny_rig, build, pieces, options)
    np.testing.assert_array_equal(codes, _encode(tiny_rig, build, data, options))


def test_over_the_real_segment_boundary(tiny_rig: Any, build: Any) -> None:
    data = build.pcm(61 * 24000 + 7, int16=True).tobytes()
    options = {"format": pb.SAMPLE_FORMAT_INT16}
    parts = _encode_stream(tiny_rig, build, _cut(data, [1_000_001, 2_879_999, 2_880_003]), options, group_size=4)
    codes = np.concatenate(parts, axis=1)
    np.testing.assert_array_equal(codes, _encode(tiny_rig, build, data, options, group_size=4))
    assert codes.shape == (20, 1528)
    # Each segment alone: the first one does not depend on what follows it.
    first = _encode(tiny_rig, build, data[: 2 * 24000 * 60 + 2 * 720], options)
    np.testing.assert_array_equal(codes[:, :1500], first[:, :1500])


def test_codes_come_as_segments_finish(tiny_rig: Any, build: Any, short_segments: int) -> None:
    descriptor = pb.DESCRIPTOR.services_by_name["AudioTokenizer"].methods_by_name["EncodeStream"]
    rpc = tiny_rig.server.invoke_stream_stream(descriptor, (), None)
    pcm = build.pcm(24000 * 4)
    for message in build.stream([pcm[:48000].tobytes()]):
        rpc.send_request(message)
    first = build.array(rpc.take_response().codes)  # while the recording goes on
    assert first.shape == (20, 25)
    rpc.send_request(pb.EncodeStreamRequest(pcm=pcm[48000:].tobytes()))
    rpc.requests_closed()
    parts = [first, *(build.array(response.codes) for response in tiny_rig.finish("EncodeStream", rpc).responses)]
    whole = _encode(tiny_rig, build, pcm.tobytes(), {})
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


def test_a_stream_is_cut_in_pieces_of_a_bounded_size(
    make_rig: Any, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second of 64 channels at 384 kHz would be 98 MB."""
    monkeypatch.setattr("mimo_tokenizer_server.service._MAX_PIECE_BYTES", 10_000)
    sizes: list[int] = []
    push = SegmentCutter.push

    def keep(cutter: SegmentCutter, pcm: npt.NDArray[Any]) -> Iterator[Segment]:
        sizes.append(pcm.nbytes)
        return push(cutter, pcm)

    monkeypatch.setattr(SegmentCutter, "push", keep)
    rig = make_rig()
    pcm = build.pcm(20_000, 7)
    pieces = _cut(pcm.tobytes(), [12_345, 77_777, 200_001])
    outcome = rig.call("EncodeStream", build.stream(pieces, channels=7, sample_rate=384_000))
    assert outcome.code is grpc.StatusCode.OK
    assert max(sizes) <= 10_000
    assert sum(sizes) == pcm.nbytes
    (work,) = rig.engine.seen
    np.testing.assert_allclose(work.segment.pcm, pcm.mean(axis=1), atol=1e-6)

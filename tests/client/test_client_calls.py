"""The operations, and how large or long ones are cut: both clients against a server that enforces its limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import grpc
import numpy as np
import pytest

import mimo_tokenizer_client as library
from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_tokenizer_client import InvalidInput, ModelMismatch, ServerFault, ServerInfo, TokenizerError, TooLarge

# Of the fixtures that make something.
Factory = Callable[..., Any]

SMALL = 16 << 10


def wave(samples: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, samples).astype(np.float32)


def codes(frames: int, rows: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, (rows, frames), np.uint16)


def shapes_sent(server: Any, rpc: str) -> list[list[int]]:
    """Frames of the items of each call."""
    return [[getattr(item, "codes", item).frames for item in call.request.items] for call in server.seen(rpc)]


# ---------------------------------------------------------------- one item


def test_encode(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    server = serve()
    client = connect(server.address)
    audio = wave(9001)
    np.testing.assert_array_equal(client.encode(audio, 8000), fake.encode(audio))
    np.testing.assert_array_equal(client.encode(audio, 8000, num_quantizers=2), fake.encode(audio, 2))
    np.testing.assert_array_equal(client.encode(audio, 8000, group_size=16), fake.encode(audio, 3, 16))
    first, second, third = (call.request for call in server.seen("Encode"))
    assert not first.HasField("num_quantizers")
    assert not first.HasField("group_size")
    assert (second.num_quantizers, third.group_size) == (2, 16)


def test_decode(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    client = connect(serve().address)
    array = codes(10)
    np.testing.assert_array_equal(client.decode(array), fake.decode(array))
    np.testing.assert_array_equal(client.decode(array, 3), fake.decode(array, 3))
    assert client.decode(array, left_context_frames=10).shape == (0,)


def test_decode_vq(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    client = connect(serve().address)
    array = codes(10)
    np.testing.assert_array_equal(client.decode_vq(array), fake.decode_vq(array))


def test_info(serve: Factory, connect: Factory) -> None:
    server = serve(fingerprint="abc", max_audio_seconds=7.5)
    info = connect(server.address).info()
    assert isinstance(info, ServerInfo)
    assert info.model.fingerprint == "abc"
    assert info.model.codebook_sizes == (50000,) * 3
    assert info.limits.max_audio_seconds == 7.5
    assert info.device.device == "cpu"
    assert info.versions == {"server": "0"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.model.id = "other"


def test_info_always_asks(serve: Factory, connect: Factory) -> None:
    server = serve()
    client = connect(server.address)
    client.encode(wave(50), 8000)
    client.encode(wave(50), 8000)
    assert len(server.seen("GetInfo")) == 1
    server.fingerprint = "model-b"
    assert client.info().model.fingerprint == "model-b"


def test_info_has_every_field_of_the_contract() -> None:
    for kind, message in (("model", pb.ModelInfo), ("device", pb.DeviceInfo), ("limits", pb.Limits)):
        cls = {"model": library.ModelInfo, "device": library.DeviceInfo, "limits": library.Limits}[kind]
        assert [f.name for f in dataclasses.fields(cls)] == [f.name for f in message.DESCRIPTOR.fields]
    assert {f.name for f in dataclasses.fields(ServerInfo)} == {f.name for f in pb.GetInfoResponse.DESCRIPTOR.fields}
    assert {f.name for f in dataclasses.fields(library.ErrorDetail)} == {
        f.name for f in pb.ErrorDetail.DESCRIPTOR.fields
    }


def test_metadata(serve: Factory, connect: Factory) -> None:
    server = serve()
    connect(server.address).info()
    connect(server.address, name="my-app/1.2").encode_batch([wave(50)] * 2, 8000)
    plain, *named = (call.metadata for call in server.calls)
    assert plain["x-client"] == f"mimo-tokenizer-client/{library.__version__}"
    assert named[0]["x-client"] == f"my-app/1.2 mimo-tokenizer-client/{library.__version__}"
    assert len(plain["x-request-id"]) == 32
    assert len({call["x-request-id"] for call in named}) == 1
    assert plain["x-request-id"] != named[0]["x-request-id"]


@pytest.mark.parametrize("name", ["", " x", "naïve", "a\nb"])
def test_names_that_are_no_metadata(name: str) -> None:
    with pytest.raises(InvalidInput, match="printable ASCII"):
        library.TokenizerClient("localhost:1", name=name)


def test_a_recording_that_is_too_long_is_not_sent(serve: Factory, connect: Factory) -> None:
    server = serve(max_audio_seconds=1.0)
    client = connect(server.address)
    assert client.encode(np.zeros(8000, np.float32), 8000).shape[0] == 3
    with pytest.raises(TooLarge, match=r"^the waveform is 2.5 seconds; the server's limit is 1 seconds$") as refused:
        client.encode(np.zeros(20_000, np.float32), 8000)
    assert refused.value.detail.limit == 1.0
    assert len(server.seen("Encode")) == 1
    assert not server.seen("EncodeStream")
    # Not by a limit that was once known.
    server.limits["max_audio_seconds"] = 5.0
    assert client.encode(np.zeros(20_000, np.float32), 8000).shape[0] == 3


def test_an_error_that_the_client_finds_names_the_item(serve: Factory, connect: Factory) -> None:
    client = connect(serve().address)
    with pytest.raises(InvalidInput, match=r"^item 1 of the batch: the waveform is empty"):
        client.encode_batch([wave(50), wave(0)], 8000)
    with pytest.raises(InvalidInput, match=r"^the waveform is empty"):
        client.encode(wave(0), 8000)


# ---------------------------------------------------------------- batches


def test_batches_keep_their_order(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    server = serve()
    client = connect(server.address)
    waves = [wave(n, n) for n in (50, 8000, 3, 4001)]
    for got, audio in zip(client.encode_batch(waves, 8000), waves, strict=True):
        np.testing.assert_array_equal(got, fake.encode(audio))
    arrays = [codes(n, seed=n) for n in (5, 1, 30)]
    for got, array, left in zip(client.decode_batch(arrays, [0, 1, 7]), arrays, [0, 1, 7], strict=True):
        np.testing.assert_array_equal(got, fake.decode(array, left))
    assert [len(call.request.items) for call in server.seen("Encode")] == [4]
    assert shapes_sent(server, "Decode") == [[5, 1, 30]]


def test_one_rate_for_each(serve: Factory, connect: Factory) -> None:
    server = serve()
    connect(server.address).encode_batch([wave(50), wave(60)], np.array([8000, 16000]))
    assert [item.sample_rate for item in server.seen("Encode")[0].request.items] == [8000, 16000]


def test_a_3d_array_is_a_batch(serve: Factory, connect: Factory) -> None:
    server = serve()
    assert len(connect(server.address).encode_batch(np.zeros((4, 2, 80), np.float32), 8000)) == 4
    assert [item.channels for item in server.seen("Encode")[0].request.items] == [2] * 4


def test_empty_batches_need_no_server(connect: Factory, socket_path: str) -> None:
    client = connect(f"unix:{socket_path}")
    assert client.encode_batch([], 8000) == []
    assert client.decode_batch([]) == []


def test_counts_must_match(connect: Factory) -> None:
    client = connect("localhost:1")
    with pytest.raises(InvalidInput, match="sample_rate has 2 values for 3 items"):
        client.encode_batch([wave(50)] * 3, [8000, 8000])
    with pytest.raises(InvalidInput, match="left_context_frames has 0 values for 1 items"):
        client.decode_batch([codes(3)], [])


def test_batches_are_cut_by_the_number_of_items(serve: Factory, connect: Factory) -> None:
    server = serve(max_items=3)
    arrays = [codes(n + 1) for n in range(7)]
    connect(server.address).decode_batch(arrays)
    assert shapes_sent(server, "Decode") == [[1, 2, 3], [4, 5, 6], [7]]


def test_batches_are_cut_by_the_queue(serve: Factory, connect: Factory) -> None:
    server = serve(max_queued_frames=10)
    connect(server.address).decode_batch([codes(n) for n in (4, 6, 1, 9, 11, 2)])
    assert shapes_sent(server, "Decode") == [[4, 6], [1, 9], [11], [2]]


def test_batches_are_cut_by_the_bytes_of_the_request(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    server = serve(max_message_bytes=SMALL)
    waves = [wave(1500, n) for n in range(10)]  # 6 KB each: two fit
    for got, audio in zip(connect(server.address).encode_batch(waves, 8000), waves, strict=True):
        np.testing.assert_array_equal(got, fake.encode(audio))
    assert [len(call.request.items) for call in server.seen("Encode")] == [2] * 5
    assert server.seen("EncodeStream") == []


def test_batches_are_cut_by_the_bytes_of_the_answer(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    server = serve(max_message_bytes=SMALL)
    arrays = [codes(400, seed=n) for n in range(5)]  # 2.4 KB there, 6.4 KB back
    for got, array in zip(connect(server.address).decode_batch(arrays), arrays, strict=True):
        np.testing.assert_array_equal(got, fake.decode(array))
    assert shapes_sent(server, "Decode") == [[400, 400], [400, 400], [400]]


def test_context_that_is_dropped_takes_no_room(serve: Factory, connect: Factory) -> None:
    server = serve(max_message_bytes=SMALL)
    connect(server.address).decode_batch([codes(400)] * 5, 399)
    assert shapes_sent(server, "Decode") == [[400] * 5]


@pytest.mark.parametrize("frames", range(850, 1000, 7))
def test_what_just_fits(frames: int, serve: Factory, connect: Factory, fake: ModuleType) -> None:
    """Around the largest answer that a message holds, whatever way it goes."""
    array = codes(frames)
    np.testing.assert_array_equal(connect(serve(max_message_bytes=SMALL).address).decode(array), fake.decode(array))


def test_a_large_item_amid_a_batch_goes_as_a_stream(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    server = serve(max_message_bytes=SMALL)
    client = connect(server.address)
    waves = [wave(n) for n in (100, 100, 9000, 100)]
    for got, audio in zip(client.encode_batch(waves, 8000), waves, strict=True):
        np.testing.assert_array_equal(got, fake.encode(audio))
    arrays = [codes(n) for n in (10, 2500, 10, 10)]
    for got, array in zip(client.decode_batch(arrays), arrays, strict=True):
        np.testing.assert_array_equal(got, fake.decode(array))
    rpcs = [call.rpc for call in server.calls if call.rpc != "GetInfo"]
    assert rpcs == ["Encode", "EncodeStream", "Encode", "Decode", "DecodeLong", "Decode"]


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.int16])
def test_the_stream_answers_as_the_call(channels: int, dtype: Any, serve: Factory, connect: Factory) -> None:
    audio = wave(50_000 * channels).reshape(channels, -1)
    if dtype is np.int16:
        audio = (audio * 32767).astype(np.int16)
    small, large = serve(max_message_bytes=SMALL), serve()
    options = {"num_quantizers": 2, "group_size": 16}
    streamed = connect(small.address).encode(audio, 8000, **options)
    np.testing.assert_array_equal(streamed, connect(large.address).encode(audio, 8000, **options))
    assert streamed.flags.owndata
    assert len(small.seen("EncodeStream")) == 1
    assert len(large.seen("EncodeStream")) == 0


def test_an_answer_too_large_for_encode_comes_as_a_stream(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    server = serve(max_message_bytes=SMALL)
    audio = wave(100)
    got = connect(server.address).encode(audio, 8000, group_size=5000)
    np.testing.assert_array_equal(got, fake.encode(audio, 3, 5000))
    assert len(server.seen("EncodeStream")) == 1


@pytest.mark.parametrize("left", [0, 17, 2000])
def test_decode_long_answers_as_decode(left: int, serve: Factory, connect: Factory) -> None:
    array = codes(2000)
    small, large = serve(max_message_bytes=SMALL), serve()
    samples = connect(small.address).decode(array, left)
    np.testing.assert_array_equal(samples, connect(large.address).decode(array, left))
    assert samples.flags.owndata
    assert len(small.seen("DecodeLong")) == (left < 2000)
    assert len(large.seen("DecodeLong")) == 0


def test_half_an_hour(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    """Through the limits that a server has by default: 172 MB of float32."""
    server = serve(model={"sample_rate": 24000, "samples_per_frame": 960, "d_model": 1280})
    client = connect(server.address)
    audio = np.zeros(30 * 60 * 24000, np.float32)
    got = client.encode(audio, 24000)
    assert got.shape == (3, fake.encode(audio[: fake.SEGMENT_SAMPLES]).shape[1] * len(audio) // fake.SEGMENT_SAMPLES)
    assert len(server.seen("EncodeStream")) == 1
    array = codes(30 * 60 * 25)
    np.testing.assert_array_equal(client.decode(array), fake.decode(array))
    assert len(server.seen("DecodeLong")) == 1


def test_decode_vq_is_cut_by_frames(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    server = serve(max_message_bytes=SMALL)
    array = codes(5000)
    got = connect(server.address).decode_vq(array)
    np.testing.assert_array_equal(got, fake.decode_vq(array))
    assert len(server.seen("DecodeVq")) > 2
    assert sum(map(sum, shapes_sent(server, "DecodeVq"))) == 5000


def test_decode_vq_is_cut_by_the_limit_of_frames(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    server = serve(max_frames=100)
    array = codes(250)
    np.testing.assert_array_equal(connect(server.address).decode_vq(array), fake.decode_vq(array))
    assert shapes_sent(server, "DecodeVq") == [[100], [100], [50]]


# ---------------------------------------------------------------- the fingerprint


@pytest.mark.parametrize("size", [SMALL, 64 << 20])
def test_the_fingerprint_goes_with_every_request(size: int, serve: Factory, connect: Factory) -> None:
    server = serve(max_message_bytes=size)
    client = connect(server.address, fingerprint="model-a")
    client.encode(wave(9000), 8000)
    client.decode(codes(2500))
    client.decode_vq(codes(3000))
    requests = [call.request for call in server.calls if call.rpc != "GetInfo"]
    assert {request.expected_fingerprint for request in requests} == {"model-a"}
    server.fingerprint = "model-b"
    for call in (lambda: client.encode(wave(9000), 8000), lambda: client.decode_vq(codes(3000))):
        with pytest.raises(ModelMismatch, match="another model") as error:
            call()
        assert error.value.code is grpc.StatusCode.FAILED_PRECONDITION
        assert error.value.detail.reason == "WRONG_MODEL"


def test_a_single_call_names_no_fingerprint(serve: Factory, connect: Factory) -> None:
    server = serve()
    client = connect(server.address)
    client.decode(codes(3))
    client.decode_vq(codes(3))
    assert [call.request.expected_fingerprint for call in server.calls if call.rpc != "GetInfo"] == ["", ""]


def change_model(server: Any) -> Any:
    def change(context: Any) -> Any:
        server.fingerprint = "model-b"

    return change


def test_parts_of_a_batch_cannot_come_from_two_models(serve: Factory, connect: Factory) -> None:
    server = serve(max_items=1)
    client = connect(server.address)
    server.script("Decode", None, change_model(server))
    with pytest.raises(ModelMismatch):
        client.decode_batch([codes(3)] * 3)
    assert len(server.seen("Decode")) == 2


def test_parts_of_decode_vq_cannot_come_from_two_models(serve: Factory, connect: Factory) -> None:
    server = serve(max_frames=10)
    client = connect(server.address)
    server.script("DecodeVq", None, change_model(server))
    with pytest.raises(ModelMismatch):
        client.decode_vq(codes(30))


def test_a_model_changed_between_two_calls_is_no_error(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    """What the client remembers of the first model must not pin the second call."""
    server = serve(max_items=1, max_frames=10)
    client = connect(server.address)
    client.decode(codes(3))
    server.fingerprint = "model-b"
    assert len(client.decode_batch([codes(3)] * 3)) == 3
    server.fingerprint = "model-c"
    np.testing.assert_array_equal(client.decode_vq(codes(30)), fake.decode_vq(codes(30)))


# ---------------------------------------------------------------- items that fail


BAD = codes(6)
BAD[1, 4] = 60000


def test_a_failed_item_in_its_place(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    client = connect(serve().address)
    good, bad, last = client.decode_batch([codes(3), BAD, codes(4)], return_errors=True)
    np.testing.assert_array_equal(good, fake.decode(codes(3)))
    np.testing.assert_array_equal(last, fake.decode(codes(4)))
    assert isinstance(bad, InvalidInput)
    assert str(bad) == "code 60000 in row 1, frame 4 is outside 0..49999"
    assert bad.detail.reason == "INVALID_VALUE"
    assert (bad.detail.item, bad.detail.row, bad.detail.frame) == (1, 1, 4)
    assert (bad.detail.value, bad.detail.allowed) == ("60000", "0..49999")


def test_the_first_failed_item_is_raised(serve: Factory, connect: Factory) -> None:
    client = connect(serve().address)
    worse = BAD.copy()
    worse[0, 0] = 65535
    with pytest.raises(InvalidInput, match="code 60000"):
        client.decode_batch([codes(3), BAD, worse])


def test_the_clients_own_finds_are_items_too(serve: Factory, connect: Factory) -> None:
    server = serve()
    client = connect(server.address)
    results = client.decode_batch(
        [codes(3).astype(int) + 70000, codes(3), codes(3).astype(float), BAD], return_errors=True
    )
    assert [type(r) for r in results] == [InvalidInput, np.ndarray, InvalidInput, InvalidInput]
    assert [r.detail.item for r in results if isinstance(r, TokenizerError)] == [0, 2, 3]
    assert str(results[3]).startswith("item 3 of the batch: code 60000")
    assert len(server.seen("Decode")[0].request.items) == 2
    before = len(server.calls)
    with pytest.raises(InvalidInput, match=r"is outside 0\.\.65535"):
        client.decode_batch([codes(3), codes(3).astype(int) + 70000])
    assert len(server.calls) == before

    results = client.encode_batch([np.zeros((20, 2)), wave(50), np.zeros((9000, 2))], 8000, return_errors=True)
    assert [type(r) for r in results] == [InvalidInput, np.ndarray, InvalidInput]
    results = client.encode_batch([wave(50), wave(50)], [8000, 0], return_errors=True)
    assert [type(r) for r in results] == [np.ndarray, InvalidInput]


def test_items_are_counted_through_a_cut_batch(serve: Factory, connect: Factory) -> None:
    results = connect(serve(max_items=2).address).decode_batch([codes(3)] * 3 + [BAD], return_errors=True)
    assert results[3].detail.item == 3
    assert str(results[3]) == "item 3 of the batch: code 60000 in row 1, frame 4 is outside 0..49999"


def test_frames_are_counted_through_a_cut_array(serve: Factory, connect: Factory) -> None:
    with pytest.raises(InvalidInput, match=r"^frame 24: code 60000 in row 1, frame 4 .*\(counted from frame 20\)") as e:
        connect(serve(max_frames=20).address).decode_vq(np.concatenate([codes(20), BAD], axis=1))
    assert (e.value.detail.row, e.value.detail.frame) == (1, 24)


def test_all_items_bad(serve: Factory, connect: Factory) -> None:
    """Then the call itself fails, and the items' statuses come in its trailing metadata."""
    worse = BAD.copy()
    worse[0, 0] = 65535
    client = connect(serve().address)
    first, second = client.decode_batch([BAD, worse], return_errors=True)
    assert str(first) == "code 60000 in row 1, frame 4 is outside 0..49999"
    assert str(second) == "code 65535 in row 0, frame 0 is outside 0..49999"
    assert [e.detail.item for e in (first, second)] == [0, 1]
    with pytest.raises(InvalidInput, match="code 60000"):
        client.decode_batch([BAD, worse])


def test_more_bad_items_than_statuses_fit(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    server = serve()
    status = pb.ItemStatus(code=3, message="the first is bad")
    server.script(
        "Decode",
        lambda context: fake.fail(
            context, grpc.StatusCode.INVALID_ARGUMENT, "all are bad", statuses=[status], reason=1
        ),
    )
    results = connect(server.address).decode_batch([codes(3)] * 3, return_errors=True)
    assert [str(r) for r in results] == ["the first is bad", "all are bad", "all are bad"]
    assert [type(r) for r in results] == [InvalidInput] * 3
    assert len({id(r) for r in results}) == 3


def test_items_over_a_limit(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    server = serve(max_items=1)
    too_large = lambda context: fake.fail(  # noqa: E731
        context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too long", reason=pb.ErrorDetail.REASON_TOO_LARGE, limit=7.5
    )
    server.script("Decode", None, too_large)
    first, second, third = connect(server.address).decode_batch([codes(3)] * 3, return_errors=True)
    assert isinstance(first, np.ndarray)
    assert isinstance(second, TooLarge)
    assert second.detail.limit == 7.5
    assert isinstance(third, np.ndarray)


def test_a_bad_stream_amid_a_batch(serve: Factory, connect: Factory) -> None:
    server = serve(max_message_bytes=SMALL)
    bad = codes(2500)
    bad[2, 2222] = 60000
    client = connect(server.address)
    first, second, third = client.decode_batch([codes(3), bad, codes(3)], return_errors=True)
    assert isinstance(first, np.ndarray)
    assert isinstance(second, InvalidInput)
    assert (second.detail.item, second.detail.row, second.detail.frame) == (1, 2, 2222)
    assert isinstance(third, np.ndarray)
    nan = wave(9000)
    nan[7777] = np.nan
    with pytest.raises(InvalidInput, match="not finite"):
        client.encode(nan, 8000)


# ---------------------------------------------------------------- answers that break the contract


def test_answers_that_do_not_fit_their_shape(serve: Factory, connect: Factory) -> None:
    server = serve()
    client = connect(server.address)

    class Broken(type(server)):
        def _encode(self, audio: Any, options: Any) -> Any:
            return pb.Codes(num_quantizers=3, frames=5, data=b"123")

        def _decode(self, item: Any) -> Any:
            return pb.Audio(format=pb.SAMPLE_FORMAT_FLOAT32, pcm=b"123")

        def _decode_vq(self, codes: Any) -> Any:
            return pb.Features(frames=1, d_model=2, data=bytes(8))

    server.__class__ = Broken
    with pytest.raises(ServerFault, match=r"3 bytes for shape \(3, 5\), which takes 30"):
        client.encode(wave(50), 8000)
    with pytest.raises(ServerFault, match="no whole number of float32 samples"):
        client.decode(codes(3))
    with pytest.raises(ServerFault, match=r"shape \(1, 2\) for 3 frames of 2"):
        client.decode_vq(codes(3))
    server._items = lambda *_: []
    with pytest.raises(ServerFault, match="0 items where 1 were sent"):
        client.decode(codes(3))
    assert [type(r) for r in client.encode_batch([wave(50)] * 2, 8000, return_errors=True)] == [ServerFault] * 2

"""The server and gRPC: reflection, health, limits, and callers who are broken, hostile or gone."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from process_harness import PATIENCE, RATE, ServerProcess, SlowModel, environment, noise, random_codes

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_audio_tokenizer.v1 import tokenizer_pb2_grpc
from mimo_tokenizer_client import TokenizerClient

SERVICE = "mimo_audio_tokenizer.v1.AudioTokenizer"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

Code = grpc.StatusCode


def stub_of(channel: grpc.Channel) -> Any:
    return tokenizer_pb2_grpc.AudioTokenizerStub(channel)


def check(channel: grpc.Channel, service: str = "") -> Any:
    request = health_pb2.HealthCheckRequest(service=service)
    return health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE, wait_for_ready=True).status


def detail_of(error: grpc.RpcError) -> pb.ErrorDetail:
    trailing = dict(error.trailing_metadata())  # type: ignore[attr-defined]
    return pb.ErrorDetail.FromString(trailing["mimo-error-detail-bin"])


def audio(samples: Any, rate: int = RATE, channels: int = 1) -> pb.Audio:
    array = np.asarray(samples, "<f4")
    return pb.Audio(sample_rate=rate, channels=channels, format=pb.SAMPLE_FORMAT_FLOAT32, pcm=array.tobytes())


def codes_message(frames: int, quantizers: int = 20, seed: int = 0) -> pb.Codes:
    codes = random_codes(frames, quantizers, seed)
    return pb.Codes(num_quantizers=quantizers, frames=frames, data=codes.tobytes())


def decode_request(frames: int) -> pb.DecodeRequest:
    return pb.DecodeRequest(items=[pb.DecodeItem(codes=codes_message(frames))])


# ---------------------------------------------------------------- reflection and health


def test_reflection_describes_the_services(server: ServerProcess, channel: Callable[[str], grpc.Channel]) -> None:
    database = ProtoReflectionDescriptorDatabase(channel(server.address))
    assert set(database.get_services()) >= {
        SERVICE,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    file = database.FindFileContainingSymbol(SERVICE)
    (service,) = (service for service in file.service if service.name == "AudioTokenizer")
    assert [method.name for method in service.method] == [
        method.name for method in pb.DESCRIPTOR.services_by_name["AudioTokenizer"].methods
    ]


def test_health_of_a_server_that_serves(server: ServerProcess, channel: Callable[[str], grpc.Channel]) -> None:
    connection = channel(server.address)
    assert check(connection) == check(connection, SERVICE) == SERVING
    with pytest.raises(grpc.RpcError) as unknown:
        check(connection, "no.such.Service")
    assert unknown.value.code() is Code.NOT_FOUND
    stub = health_pb2_grpc.HealthStub(connection)
    for name, status in (("", SERVING), (SERVICE, SERVING), ("no.such.Service", SERVICE_UNKNOWN)):
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE)
        assert next(watch).status == status
        watch.cancel()


def test_a_watch_of_a_name_that_fills_a_message_ends(
    server: ServerProcess, channel: Callable[[str], grpc.Channel], works: Callable[[ServerProcess], None]
) -> None:
    request = health_pb2.HealthCheckRequest(service="x" * 1_000_000)
    watch = health_pb2_grpc.HealthStub(channel(server.address)).Watch(request, timeout=PATIENCE)
    with pytest.raises(grpc.RpcError) as refused:
        next(watch)
    assert refused.value.code() is Code.INVALID_ARGUMENT
    works(server)


def test_health_from_loading_to_the_end(
    start: Callable[..., ServerProcess], channel: Callable[[str], grpc.Channel], tmp_path: Path
) -> None:
    model = SlowModel(tmp_path / "slow")
    server = start(model=model.flags)
    connection = channel(server.address)

    # It loads: it can be reached, and says so.
    assert check(connection) == check(connection, SERVICE) == NOT_SERVING
    watches = {
        name: health_pb2_grpc.HealthStub(connection).Watch(health_pb2.HealthCheckRequest(service=name), timeout=120)
        for name in ("", SERVICE)
    }
    assert {next(watch).status for watch in watches.values()} == {NOT_SERVING}
    stub = stub_of(connection)
    calls: dict[str, Callable[[], Any]] = {
        "Encode": lambda: stub.Encode(pb.EncodeRequest(items=[audio(noise(0.5))]), timeout=PATIENCE),
        "Decode": lambda: stub.Decode(decode_request(3), timeout=PATIENCE),
        "DecodeVq": lambda: stub.DecodeVq(pb.DecodeVqRequest(items=[codes_message(3)]), timeout=PATIENCE),
        "DecodeLong": lambda: list(
            stub.DecodeLong(pb.DecodeLongRequest(item=pb.DecodeItem(codes=codes_message(3))), timeout=PATIENCE)
        ),
        "EncodeStream": lambda: list(
            stub.EncodeStream(iter([pb.EncodeStreamRequest(open=pb.EncodeStreamOpen())]), timeout=PATIENCE)
        ),
        "GetInfo": lambda: stub.GetInfo(pb.GetInfoRequest(), timeout=PATIENCE),
    }
    for method, call in calls.items():
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert refused.value.code() is Code.UNAVAILABLE, method
        detail = detail_of(refused.value)
        assert detail.reason == pb.ErrorDetail.REASON_NOT_READY, method
        assert detail.retry_after.ToTimedelta().total_seconds() > 0, method
        assert "loaded" in refused.value.details(), method

    # Its model arrives.
    model.arrive()
    server.ready()
    assert {next(watch).status for watch in watches.values()} == {SERVING}
    assert check(connection) == check(connection, SERVICE) == SERVING
    assert stub.GetInfo(pb.GetInfoRequest()).model.id == "slow"

    # It drains. Watches must not keep it: they never end of themselves.
    began = time.monotonic()
    server.signal(15)
    for name, watch in watches.items():
        assert next(watch).status == NOT_SERVING, name
    assert server.wait() == 0
    assert time.monotonic() - began < 10, "a health watch held up the end"


# ---------------------------------------------------------------- limits of messages


def test_a_request_over_the_limit(
    small_server: ServerProcess, channel: Callable[[str], grpc.Channel], works: Callable[[ServerProcess], None]
) -> None:
    stub = stub_of(channel(small_server.address))
    with pytest.raises(grpc.RpcError) as refused:
        stub.Encode(pb.EncodeRequest(items=[audio(noise(20))]), timeout=PATIENCE)
    assert refused.value.code() is Code.RESOURCE_EXHAUSTED
    assert str(1 << 20) in refused.value.details()
    works(small_server)


def test_an_answer_over_the_limit(
    small_server: ServerProcess, channel: Callable[[str], grpc.Channel], works: Callable[[ServerProcess], None]
) -> None:
    stub = stub_of(channel(small_server.address))
    for call in (
        lambda: stub.Decode(decode_request(300), timeout=PATIENCE),
        lambda: stub.DecodeVq(pb.DecodeVqRequest(items=[codes_message(2100)]), timeout=PATIENCE),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert refused.value.code() is Code.RESOURCE_EXHAUSTED
        detail = detail_of(refused.value)
        assert detail.reason == pb.ErrorDetail.REASON_TOO_LARGE
        assert detail.limit == 1 << 20
        assert not detail.HasField("retry_after")
    # The largest that fits.
    frames = ((1 << 20) - 2048) // (960 * 4)
    assert len(stub.Decode(decode_request(frames)).items[0].audio.pcm) == frames * 960 * 4
    works(small_server)


@pytest.mark.parametrize("where", ["unix_server", "small_server"])
def test_decode_long_gives_the_samples_of_decode(
    request: pytest.FixtureRequest, where: str, channel: Callable[[str], grpc.Channel]
) -> None:
    """Its pieces must fit into messages of any size that may be set."""
    stub = stub_of(channel(request.getfixturevalue(where).address))
    item = pb.DecodeItem(codes=codes_message(600), left_context_frames=2)
    pieces = list(stub.DecodeLong(pb.DecodeLongRequest(item=item), timeout=PATIENCE))
    assert len(pieces) > 1
    assert pieces[-1].HasField("timings")
    assert not any(piece.HasField("timings") for piece in pieces[:-1])
    first = stub.Decode(pb.DecodeRequest(items=[pb.DecodeItem(codes=codes_message(2))]), timeout=PATIENCE)
    assert first.items[0].status.code == 0
    assert len(b"".join(piece.pcm for piece in pieces)) == 598 * 960 * 4
    small = list(stub.DecodeLong(pb.DecodeLongRequest(item=item, format=pb.SAMPLE_FORMAT_INT16), timeout=PATIENCE))
    floats = np.frombuffer(b"".join(piece.pcm for piece in pieces), "<f4")
    ints = np.frombuffer(b"".join(piece.pcm for piece in small), "<i2")
    np.testing.assert_allclose(ints / 32768, np.clip(floats, -1, 32767 / 32768), atol=0.51 / 32768)


# ---------------------------------------------------------------- the broken and the hostile

METHODS = {"Encode": "uu", "Decode": "uu", "DecodeVq": "uu", "GetInfo": "uu", "DecodeLong": "us", "EncodeStream": "ss"}


def send_bytes(channel: grpc.Channel, method: str, data: bytes) -> tuple[grpc.StatusCode, str]:
    """Send `data` as a request, and return the status."""
    path = f"/{SERVICE}/{method}"
    plain = {"request_serializer": bytes, "response_deserializer": bytes}
    try:
        if METHODS[method] == "uu":
            channel.unary_unary(path, **plain)(data, timeout=PATIENCE)
        elif METHODS[method] == "us":
            list(channel.unary_stream(path, **plain)(data, timeout=PATIENCE))
        else:
            list(channel.stream_stream(path, **plain)(iter([data]), timeout=PATIENCE))
    except grpc.RpcError as error:
        return error.code(), error.details()  # type: ignore[attr-defined]
    return Code.OK, ""


@pytest.mark.parametrize("method", METHODS)
def test_bytes_that_are_no_message(
    server: ServerProcess,
    channel: Callable[[str], grpc.Channel],
    method: str,
    works: Callable[[ServerProcess], None],
) -> None:
    connection = channel(server.address)
    for data in (b"\xff", b"\x0a\xff\xff\xff\xff\x0f", random.Random(1).randbytes(10_000), b"GET / HTTP/1.1\r\n\r\n"):
        code, sentence = send_bytes(connection, method, data)
        assert code is Code.INVALID_ARGUMENT, (data[:20], code, sentence)
    works(server)


def test_unknown_methods(server: ServerProcess, channel: Callable[[str], grpc.Channel]) -> None:
    connection = channel(server.address)
    for path in (f"/{SERVICE}/DecodeStream", f"/{SERVICE}/", "/x/y", "/"):
        with pytest.raises(grpc.RpcError) as refused:
            connection.unary_unary(path, request_serializer=bytes, response_deserializer=bytes)(b"", timeout=PATIENCE)
        assert refused.value.code() is Code.UNIMPLEMENTED, path


def connect_raw(server: ServerProcess) -> socket.socket:
    if server.address.startswith("unix:"):
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.settimeout(PATIENCE)
        raw.connect(server.address.removeprefix("unix:"))
        return raw
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), PATIENCE)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def test_bytes_that_are_no_http(server: ServerProcess, works: Callable[[ServerProcess], None]) -> None:
    rng = random.Random(2)
    openings = [
        b"",
        b"\x00",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),  # TLS
        PREFACE[:10],
        PREFACE,
        PREFACE + SETTINGS,
        PREFACE + SETTINGS + b"\x00\x40\x00\x01\x04\x00\x00\x00\x01" + rng.randbytes(0x4000),  # headers
        PREFACE + SETTINGS + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + rng.randbytes(1000),  # data of 16 MiB
        *(rng.randbytes(rng.randrange(1, 5000)) for _ in range(10)),
        *(PREFACE + SETTINGS + rng.randbytes(rng.randrange(1, 5000)) for _ in range(10)),
    ]
    half_open = []
    for number, opening in enumerate(openings):
        raw = connect_raw(server)
        with contextlib.suppress(ConnectionError):  # it may have hung up already
            raw.sendall(opening)
        if number % 2:
            raw.close()
        else:
            half_open.append(raw)
    works(server)
    for raw in half_open:
        raw.close()
    works(server)


def fuzzed_bytes(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice([0, 1, 2, 3, 4, 40, 960, 1924, 3840, 3841]))


def fuzzed_number(rng: random.Random) -> int:
    usual = [0, 1, 2, 3, 16, 20, 21, 100, 481, 1000, 16_000, 24_000, 44_100, 384_000, 384_001]
    return rng.choice([*usual, 2**16, 2**31 - 1, 2**31, 2**32 - 1, rng.randrange(2**32)])


def fuzzed_codes(rng: random.Random) -> pb.Codes:
    quantizers, frames = rng.choice([1, 2, 8, 20]), rng.randrange(1, 30)
    codes = np.random.default_rng(rng.randrange(2**32)).integers(
        0, rng.choice([128, 129, 1025, 65_536]), (quantizers, frames)
    )
    message = pb.Codes(num_quantizers=quantizers, frames=frames, data=codes.astype("<u2").tobytes())
    what = rng.randrange(6)
    if what == 0:
        message.data = message.data[: rng.randrange(len(message.data))]
    elif what == 1:
        message.frames = fuzzed_number(rng)
    elif what == 2:
        message.num_quantizers = fuzzed_number(rng)
    elif what == 3:
        message = pb.Codes(num_quantizers=fuzzed_number(rng), frames=fuzzed_number(rng), data=fuzzed_bytes(rng))
    return message


def fuzzed_audio(rng: random.Random) -> pb.Audio:
    if rng.randrange(2):
        message = audio(noise(rng.choice([0.02, 0.021, 0.1]), seed=rng.randrange(100)), rng.choice([8_000, 24_000]))
        if not rng.randrange(3):
            message.pcm = message.pcm[: rng.randrange(len(message.pcm))]
        return message
    values = [0.0, -1.0, 1e6, 1.1e6, 3.4e38, float("nan"), float("inf"), -float("inf"), 1e-45]
    pcm = (
        np.array(rng.choices(values, k=rng.randrange(2000)), "<f4").tobytes() if rng.randrange(2) else fuzzed_bytes(rng)
    )
    return pb.Audio(
        sample_rate=fuzzed_number(rng),
        channels=rng.choice([0, 1, 1, 2, 3, 64, 65, 2**32 - 1]),
        format=rng.choice([0, 1, 2, 3, -1, 2**31 - 1]),  # type: ignore[arg-type]
        pcm=pcm,
    )


def fuzzed_options(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if not rng.randrange(3):
        options["num_quantizers"] = fuzzed_number(rng)
    if not rng.randrange(3):
        options["group_size"] = fuzzed_number(rng)
    return options | fuzzed_fingerprint(rng)


def fuzzed_fingerprint(rng: random.Random) -> dict[str, Any]:
    return {} if rng.randrange(8) else {"expected_fingerprint": rng.choice(["x", "é\n\x00\U0001f3b5", "0" * 100_000])}


def fuzzed_item(rng: random.Random) -> pb.DecodeItem:
    return pb.DecodeItem(codes=fuzzed_codes(rng), left_context_frames=rng.choice([0, 0, 1, 5, 2**32 - 1]))


def fuzzed_format(rng: random.Random) -> Any:
    return rng.choice([0, 1, 2, 2, 3, -5])


def fuzzed_request(rng: random.Random) -> tuple[str, Any]:
    """A method, and a request or, for EncodeStream, some of them."""
    method = rng.choice(["Encode", "Decode", "DecodeVq", "DecodeLong", "EncodeStream"])
    count = rng.choice([0, 1, 1, 1, 2, 5])
    if method == "Encode":
        return method, pb.EncodeRequest(items=[fuzzed_audio(rng) for _ in range(count)], **fuzzed_options(rng))
    if method == "Decode":
        items = [fuzzed_item(rng) for _ in range(count)]
        return method, pb.DecodeRequest(items=items, format=fuzzed_format(rng), **fuzzed_fingerprint(rng))
    if method == "DecodeVq":
        return method, pb.DecodeVqRequest(items=[fuzzed_codes(rng) for _ in range(count)], **fuzzed_fingerprint(rng))
    if method == "DecodeLong":
        return method, pb.DecodeLongRequest(
            item=fuzzed_item(rng) if count else None, format=fuzzed_format(rng), **fuzzed_fingerprint(rng)
        )
    sound = fuzzed_audio(rng)
    opening = pb.EncodeStreamOpen(
        sample_rate=sound.sample_rate, channels=sound.channels, format=sound.format, **fuzzed_options(rng)
    )
    messages = [pb.EncodeStreamRequest(open=opening)]
    size = rng.choice([1, 7, 1000, 4000])
    messages += [
        pb.EncodeStreamRequest(pcm=sound.pcm[at : at + size]) for at in range(0, min(len(sound.pcm), 50 * size), size)
    ]
    if not rng.randrange(4):
        messages.insert(rng.randrange(len(messages) + 1), rng.choice([messages[0], pb.EncodeStreamRequest()]))
    if not rng.randrange(8):
        messages.pop(0)
    return method, messages


def test_messages_of_random_content(
    server: ServerProcess, channel: Callable[[str], grpc.Channel], works: Callable[[ServerProcess], None]
) -> None:
    rng = random.Random(20_260_101)
    stub = stub_of(channel(server.address))
    allowed = {Code.OK, Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED, Code.FAILED_PRECONDITION}
    seen: Counter[grpc.StatusCode] = Counter()
    for number in range(500):
        method, request = fuzzed_request(rng)
        try:
            if method == "EncodeStream":
                list(stub.EncodeStream(iter(request), timeout=PATIENCE))
            elif method == "DecodeLong":
                list(stub.DecodeLong(request, timeout=PATIENCE))
            else:
                answer = getattr(stub, method)(request, timeout=PATIENCE)
                assert len(answer.items) == len(request.items)
                item_codes = {item.status.code for item in answer.items}
                assert 0 in item_codes
                assert item_codes <= {code.value[0] for code in allowed}, (number, method, str(answer)[:500])
            code, sentence = Code.OK, ""
        except grpc.RpcError as error:
            code, sentence = error.code(), error.details()  # type: ignore[attr-defined]
            assert code in allowed, (number, method, code, sentence, str(request)[:500])
            assert sentence, (number, method)
            detail = detail_of(error)
            assert detail.reason not in (pb.ErrorDetail.REASON_UNSPECIFIED, pb.ErrorDetail.REASON_INTERNAL), number
        seen[code] += 1
    # Each kind of answer was tried, not only refusals.
    assert seen[Code.OK] > 50, seen
    assert seen.keys() == allowed, seen
    works(server)


def test_messages_with_flipped_bits(
    server: ServerProcess, channel: Callable[[str], grpc.Channel], works: Callable[[ServerProcess], None]
) -> None:
    rng = random.Random(3)
    connection = channel(server.address)
    requests = {
        "Encode": pb.EncodeRequest(items=[audio(noise(0.05))], num_quantizers=8, group_size=4),
        "Decode": pb.DecodeRequest(items=[pb.DecodeItem(codes=codes_message(4), left_context_frames=1)]),
        "DecodeVq": pb.DecodeVqRequest(items=[codes_message(4, 2)]),
        "DecodeLong": pb.DecodeLongRequest(item=pb.DecodeItem(codes=codes_message(4))),
    }
    for _ in range(300):
        method, request = rng.choice(list(requests.items()))
        data = bytearray(request.SerializeToString())
        # Mostly in the tags and lengths at its ends.
        for _ in range(rng.randrange(1, 4)):
            end = min(len(data), rng.choice([10, 40, len(data)]))
            data[rng.choice([rng.randrange(end), -1 - rng.randrange(end)])] ^= 1 << rng.randrange(8)
        code, sentence = send_bytes(connection, method, bytes(data))
        assert code in (
            Code.OK,
            Code.INVALID_ARGUMENT,
            Code.RESOURCE_EXHAUSTED,
            Code.FAILED_PRECONDITION,
            Code.UNKNOWN,
        ), (method, code, sentence, bytes(data[:60]))
        # gRPC's own answer to bytes that are no message.
        assert code is not Code.UNKNOWN or "DecodeError" in sentence, (method, sentence)
    works(server)


@pytest.mark.parametrize(
    "metadata",
    [
        (("x-request-id", ""),),
        (("x-request-id", "a" * 5000),),
        (("x-request-id", "one"), ("x-request-id", "two")),
        (("x-request-id-bin", b"\x00\xff"), ("x-client-bin", b"\xff")),
        (("x-client", 'a="b" c'), ("x-request-id", "a=b ~")),
    ],
    ids=str,
)
def test_odd_metadata(
    server: ServerProcess, channel: Callable[[str], grpc.Channel], metadata: tuple[tuple[str, str | bytes], ...]
) -> None:
    stub = stub_of(channel(server.address))
    assert stub.GetInfo(pb.GetInfoRequest(), metadata=metadata, timeout=PATIENCE).model.id == "tiny"
    with pytest.raises(grpc.RpcError) as refused:
        stub.Decode(pb.DecodeRequest(), metadata=metadata, timeout=PATIENCE)
    assert refused.value.code() is Code.INVALID_ARGUMENT


def test_the_request_id_comes_back_with_an_error(server: ServerProcess, channel: Callable[[str], grpc.Channel]) -> None:
    stub = stub_of(channel(server.address))
    with pytest.raises(grpc.RpcError) as refused:
        stub.Decode(pb.DecodeRequest(), metadata=(("x-request-id", "mine-17"),), timeout=PATIENCE)
    assert detail_of(refused.value).request_id == "mine-17"
    assert ("x-request-id", "mine-17") in [tuple(entry) for entry in refused.value.trailing_metadata()]


# ---------------------------------------------------------------- the gone and the impatient

# The tiny model takes seconds for it: enough to do something meanwhile.
LONG = 3000


def long_call(stub: Any, timeout: float = 120) -> Any:
    """A call that computes for a while."""
    request = pb.DecodeLongRequest(item=pb.DecodeItem(codes=codes_message(LONG)))
    return stub.DecodeLong(request, timeout=timeout)


def test_health_is_told_while_the_device_computes(
    unix_server: ServerProcess, channel: Callable[[str], grpc.Channel]
) -> None:
    connection = channel(unix_server.address)
    call = long_call(stub_of(connection))
    slowest = 0.0
    done = threading.Event()
    threading.Thread(target=lambda: (list(call), done.set()), daemon=True).start()
    looks = 0
    while not done.is_set():
        began = time.monotonic()
        assert check(connection) == SERVING
        stub_of(connection).GetInfo(pb.GetInfoRequest(), timeout=PATIENCE)
        slowest = max(slowest, time.monotonic() - began)
        looks += 1
        done.wait(0.02)
    assert looks > 5
    assert slowest < 1.0


def test_a_cancelled_call_does_not_stop_the_others(
    unix_server: ServerProcess, channel: Callable[[str], grpc.Channel], works: Callable[[ServerProcess], None]
) -> None:
    stub = stub_of(channel(unix_server.address))
    computing, queued = long_call(stub), [long_call(stub) for _ in range(5)]
    time.sleep(0.3)
    began = time.monotonic()
    for call in queued:
        call.cancel()
    computing.cancel()
    for call in (computing, *queued):
        with pytest.raises(grpc.RpcError) as cancelled:
            list(call)
        assert cancelled.value.code() is Code.CANCELLED
    works(unix_server)
    spent = time.monotonic() - began
    began = time.monotonic()
    list(long_call(stub))
    # What was queued was dropped; what was on the device could not be.
    assert spent < 3 * (time.monotonic() - began) + 1


def test_cancelled_streams(
    server: ServerProcess, channel: Callable[[str], grpc.Channel], works: Callable[[ServerProcess], None]
) -> None:
    stub = stub_of(channel(server.address))
    gate = threading.Event()

    def messages() -> Iterator[pb.EncodeStreamRequest]:
        opening = pb.EncodeStreamOpen(sample_rate=RATE, channels=1, format=pb.SAMPLE_FORMAT_FLOAT32)
        yield pb.EncodeStreamRequest(open=opening)
        yield pb.EncodeStreamRequest(pcm=noise(1).tobytes())
        gate.wait(PATIENCE)

    calls = [stub.EncodeStream(messages(), timeout=120) for _ in range(5)]
    time.sleep(0.2)
    for call in calls:
        call.cancel()
    gate.set()
    for call in calls:
        with pytest.raises(grpc.RpcError) as cancelled:
            list(call)
        assert cancelled.value.code() is Code.CANCELLED
    works(server)


def test_deadlines_are_kept(
    server: ServerProcess, channel: Callable[[str], grpc.Channel], works: Callable[[ServerProcess], None]
) -> None:
    stub = stub_of(channel(server.address))
    busy = [long_call(stub) for _ in range(2)]
    time.sleep(0.3)
    began = time.monotonic()
    # As long as those before it, of which it is to have a third of the device.
    with pytest.raises(grpc.RpcError) as late:
        list(long_call(stub, timeout=0.3))
    assert late.value.code() is Code.DEADLINE_EXCEEDED
    assert time.monotonic() - began < 2
    # What is short is answered meanwhile.
    assert len(stub.Decode(decode_request(25), timeout=PATIENCE).items) == 1
    assert any(call.is_active() for call in busy)
    for call in busy:
        assert sum(len(piece.pcm) for piece in call) == LONG * 960 * 4
    with pytest.raises(grpc.RpcError) as past:
        stub.Decode(decode_request(25), timeout=0)
    assert past.value.code() is Code.DEADLINE_EXCEEDED
    works(server)


def test_a_closed_channel(server: ServerProcess, works: Callable[[ServerProcess], None]) -> None:
    connection = grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)])
    grpc.channel_ready_future(connection).result(PATIENCE)
    calls = [long_call(stub_of(connection)) for _ in range(3)]
    time.sleep(0.2)
    connection.close()
    for call in calls:
        with pytest.raises(grpc.RpcError):
            list(call)
    works(server)


def test_a_client_that_is_killed(server: ServerProcess, works: Callable[[ServerProcess], None]) -> None:
    script = (
        "import sys, numpy as np\n"
        "from mimo_tokenizer_client import TokenizerClient\n"
        "client = TokenizerClient(sys.argv[1])\n"
        "client.info()\n"
        "print('calling', flush=True)\n"
        f"client.decode(np.zeros((20, {LONG}), np.uint16))\n"
        "print('answered', flush=True)\n"
    )
    client = subprocess.Popen(
        [sys.executable, "-c", script, server.address], stdout=subprocess.PIPE, text=True, env=environment()
    )
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == "calling\n"
        time.sleep(0.3)
        client.kill()
        assert client.stdout.read() == ""
    finally:
        client.kill()
        client.wait()
    works(server)


def test_many_connections(server: ServerProcess, works: Callable[[ServerProcess], None]) -> None:
    clients = [TokenizerClient(server.address, timeout=PATIENCE) for _ in range(50)]
    try:
        for client in clients:
            assert client.health()
        wanted = clients[0].decode(random_codes(2))
        for client in clients[1:]:
            np.testing.assert_allclose(client.decode(random_codes(2)), wanted, rtol=0, atol=1e-5)
    finally:
        for client in clients:
            client.close()
    works(server)

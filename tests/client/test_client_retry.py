"""Deadlines, and what is tried again: through real restarts of a server process, too."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import grpc
import numpy as np
import pytest

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_tokenizer_client import (
    DeadlineExceeded,
    InvalidInput,
    ModelMismatch,
    Overloaded,
    ServerFault,
    ServiceUnavailable,
    TokenizerClient,
    TokenizerError,
    TooLarge,
)

# Of the fixtures that make something.
Factory = Callable[..., Any]

SMALL = 16 << 10
CODES = np.arange(30).reshape(3, 10)
STATUS = grpc.StatusCode


def wave(samples: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, samples).astype(np.float32)


def failing(fake: Any, code: grpc.StatusCode, message: str = "no", **detail: Any) -> Callable[[Any], None]:
    return lambda context: fake.fail(context, code, message, **detail)


def queue_full(fake: Any, nanos: int) -> Callable[[Any], None]:
    detail = {"reason": pb.ErrorDetail.REASON_QUEUE_FULL, "retry_after": {"nanos": nanos}}
    return failing(fake, STATUS.RESOURCE_EXHAUSTED, "the queue is full", **detail)


# ---------------------------------------------------------------- deadlines


def seconds_given(server: Any, rpc: str) -> float:
    return server.seen(rpc)[-1].seconds


def test_the_default_deadline_grows_with_the_audio(serve: Factory, connect: Factory) -> None:
    server = serve(max_message_bytes=1 << 20)
    client = connect(server.address)
    # (call, RPC, seconds): at 8000 samples and 2000 frames a second
    table = [
        (lambda: client.encode(wave(8000), 8000), "Encode", 34),
        (lambda: client.encode(wave(8000), 800), "Encode", 70),
        (lambda: client.encode(wave(800_000), 8000), "EncodeStream", 430),
        (lambda: client.encode_batch([wave(8000)] * 5, 8000), "Encode", 50),
        (lambda: client.decode(np.zeros((1, 20_000), int)), "Decode", 70),
        (lambda: client.decode(np.zeros((1, 200_000), int)), "DecodeLong", 430),
        (lambda: client.decode_batch([np.zeros((1, 2000), int)] * 5), "Decode", 50),
        (lambda: client.decode_vq(np.zeros((1, 100_000), int)), "DecodeVq", 35),
        (client.info, "GetInfo", 30),
    ]
    for call, rpc, seconds in table:
        call()
        assert seconds - 10 < seconds_given(server, rpc) <= seconds + 1, rpc


def test_the_clients_timeout_and_the_calls(serve: Factory, connect: Factory) -> None:
    server = serve()
    client = connect(server.address, timeout=500)
    client.encode(wave(8000), 8000)
    # gRPC sends long times rounded up by up to two percent.
    assert 400 < seconds_given(server, "Encode") <= 515
    client.encode(wave(8000), 8000, timeout=1000)
    assert 900 < seconds_given(server, "Encode") <= 1030
    client.decode_vq(CODES, timeout=1000)
    assert 900 < seconds_given(server, "DecodeVq") <= 1030


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), "5"])
def test_timeouts_that_make_no_sense(timeout: Any, connect: Factory) -> None:
    with pytest.raises(InvalidInput, match="timeout must be a positive, finite number of seconds"):
        connect("localhost:1", timeout=timeout)
    with pytest.raises(InvalidInput, match="unavailable_timeout must be"):
        connect("localhost:1", unavailable_timeout=timeout)
    with pytest.raises(InvalidInput, match="timeout must be"):
        connect("localhost:1").decode(CODES, timeout=timeout)


@pytest.mark.parametrize("method", ["unary", "stream"])
def test_the_deadline_passes(method: str, serve: Factory, connect: Factory) -> None:
    server = serve(max_message_bytes=SMALL)
    client = connect(server.address)
    client.info()
    release = threading.Event()
    server.script("Encode", lambda context: release.wait(30))
    server.script("EncodeStream", lambda context: release.wait(30))
    audio = wave(50 if method == "unary" else 9000)
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"no answer from unix:.* within 0.5 s") as error:
        client.encode(audio, 8000, timeout=0.5)
    assert time.monotonic() - start < 15
    assert isinstance(error.value, TimeoutError)
    assert error.value.code is STATUS.DEADLINE_EXCEEDED
    release.set()


def test_the_servers_word_on_the_deadline(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    server = serve()
    detail = {"reason": pb.ErrorDetail.REASON_DEADLINE, "request_id": "7"}
    server.script("Decode", failing(fake, STATUS.DEADLINE_EXCEEDED, "it waited too long", **detail))
    with pytest.raises(DeadlineExceeded, match=r"^it waited too long$") as error:
        connect(server.address).decode(CODES)
    assert error.value.detail.request_id == "7"


# ---------------------------------------------------------------- what is tried again


@pytest.mark.parametrize("code", [STATUS.UNAVAILABLE, STATUS.CANCELLED])
@pytest.mark.parametrize("rpc", ["GetInfo", "Encode", "EncodeStream", "Decode", "DecodeLong", "DecodeVq"])
def test_unavailable_is_tried_again(
    rpc: str, code: grpc.StatusCode, serve: Factory, connect: Factory, fake: ModuleType
) -> None:
    server = serve(max_message_bytes=SMALL)
    server.script(rpc, *[failing(fake, code)] * 3)
    client = connect(server.address)
    audio, codes = wave(9000), np.zeros((3, 2500), int)
    {
        "GetInfo": client.info,
        "Encode": lambda: client.encode(audio[:100], 8000),
        "EncodeStream": lambda: np.testing.assert_array_equal(client.encode(audio, 8000), fake.encode(audio)),
        "Decode": lambda: client.decode(CODES),
        "DecodeLong": lambda: np.testing.assert_array_equal(client.decode(codes), fake.decode(codes)),
        "DecodeVq": lambda: client.decode_vq(CODES),
    }[rpc]()
    calls = server.seen(rpc)
    assert len(calls) >= 4
    assert len({call.metadata["x-request-id"] for call in calls}) == 1


def test_a_stream_that_breaks_off_begins_again(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    server = serve(max_message_bytes=SMALL)
    codes = np.arange(6000).reshape(3, 2000)
    server.long_answers_break_off_after = [3, 1]
    np.testing.assert_array_equal(connect(server.address).decode(codes), fake.decode(codes))
    assert len(server.seen("DecodeLong")) == 3


def test_a_stream_refused_while_it_is_sent_tells_why(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    """The refusal of the opening message meets pieces that are still on their way."""
    server = serve(max_message_bytes=1 << 20)
    client = connect(server.address)
    reason = {"reason": pb.ErrorDetail.REASON_INVALID_VALUE, "value": "8000"}
    server.script("EncodeStream", *[failing(fake, STATUS.INVALID_ARGUMENT, "not this rate", **reason)] * 200)
    for _ in range(20):
        with pytest.raises(InvalidInput, match="not this rate") as error:
            client.encode(np.zeros(2_000_000, np.float32), 8000)
        assert error.value.detail.value == "8000"
    assert len(server.seen("EncodeStream")) == 20


def test_retry_after_is_kept_to(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    server = serve()
    client = connect(server.address)
    client.info()
    for nanos, least in ((600_000_000, 0.6), (1_000_000, 0.001)):
        server.script("Decode", queue_full(fake, nanos))
        start = time.monotonic()
        client.decode(CODES)
        assert least <= time.monotonic() - start < 20


def test_a_starting_server_says_when(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    server = serve()
    detail = {"reason": pb.ErrorDetail.REASON_NOT_READY, "retry_after": {"nanos": 700_000_000}}
    server.script("GetInfo", failing(fake, STATUS.UNAVAILABLE, "loading", **detail))
    start = time.monotonic()
    connect(server.address).info()
    assert time.monotonic() - start >= 0.7


def test_a_full_queue_until_the_deadline(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    server = serve()
    server.script("Decode", *[queue_full(fake, 200_000_000)] * 100)
    with pytest.raises(Overloaded, match="the queue is full") as error:
        connect(server.address).decode(CODES, timeout=1.5)
    assert error.value.code is STATUS.RESOURCE_EXHAUSTED
    assert error.value.detail.retry_after == pytest.approx(0.2)
    assert 2 <= len(server.seen("Decode")) <= 8


def test_a_server_with_as_many_calls_as_it_takes(
    serve: Factory, connect: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them are refused by gRPC itself, without a word of ours."""
    # Waits of 0.1, 0.2, 0.4, 0.8 and 1 s: the last attempt within 2.4 s has 0.9 s for its answer, not next to nothing.
    monkeypatch.setattr("random.uniform", lambda least, most: most)
    server = serve(maximum_concurrent_rpcs=1)
    begun, release = threading.Event(), threading.Event()
    server.script("DecodeVq", lambda context: (begun.set(), release.wait(60)))
    client = connect(server.address)
    client.info()
    with TokenizerClient(server.address) as other, ThreadPoolExecutor(1) as pool:
        first = pool.submit(other.decode_vq, CODES)
        try:
            assert begun.wait(30)
            with pytest.raises(Overloaded, match=r"^the server has as many calls at a time as it takes$") as error:
                client.decode(CODES, timeout=2.4)
            assert error.value.code is STATUS.RESOURCE_EXHAUSTED
            threading.Timer(0.5, release.set).start()
            client.decode(CODES)
        finally:
            release.set()
        first.result(timeout=30)


def test_an_estimate_beyond_the_deadline_ends_the_call_at_once(
    serve: Factory, connect: Factory, fake: ModuleType
) -> None:
    server = serve()
    wait = {"reason": pb.ErrorDetail.REASON_QUEUE_FULL, "retry_after": {"seconds": 3600}}
    server.script("Decode", failing(fake, STATUS.RESOURCE_EXHAUSTED, "the queue is full", **wait))
    start = time.monotonic()
    with pytest.raises(Overloaded):
        connect(server.address).decode(CODES, timeout=30)
    assert time.monotonic() - start < 15


@pytest.mark.parametrize(
    ("code", "detail", "kind"),
    [
        (STATUS.RESOURCE_EXHAUSTED, {}, TooLarge),
        (STATUS.RESOURCE_EXHAUSTED, {"reason": pb.ErrorDetail.REASON_TOO_LARGE, "limit": 3.0}, TooLarge),
        (STATUS.RESOURCE_EXHAUSTED, {"reason": pb.ErrorDetail.REASON_OUT_OF_MEMORY}, TooLarge),
        (STATUS.INVALID_ARGUMENT, {"reason": pb.ErrorDetail.REASON_INVALID_VALUE}, InvalidInput),
        (STATUS.OUT_OF_RANGE, {}, InvalidInput),
        (STATUS.FAILED_PRECONDITION, {"reason": pb.ErrorDetail.REASON_WRONG_MODEL}, ModelMismatch),
        (STATUS.INTERNAL, {"reason": pb.ErrorDetail.REASON_INTERNAL}, ServerFault),
        (STATUS.UNKNOWN, {}, ServerFault),
        (STATUS.UNIMPLEMENTED, {}, TokenizerError),
        (STATUS.PERMISSION_DENIED, {}, TokenizerError),
    ],
    ids=str,
)
def test_all_else_is_final(
    code: grpc.StatusCode, detail: dict[str, Any], kind: Any, serve: Factory, connect: Factory, fake: ModuleType
) -> None:
    server = serve()
    server.script("Decode", failing(fake, code, "a sentence", **detail))
    with pytest.raises(TokenizerError, match=r"^a sentence$") as error:
        connect(server.address).decode(CODES)
    assert type(error.value) is kind
    assert error.value.code is (code if kind is not InvalidInput else error.value.code)
    assert len(server.seen("Decode")) == 1


def test_unavailable_until_the_deadline(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    server = serve()
    server.script("Decode", *[failing(fake, STATUS.UNAVAILABLE, "the device failed")] * 100)
    with pytest.raises(ServiceUnavailable) as error:
        connect(server.address).decode(CODES, timeout=1.5)
    assert server.address in str(error.value)
    assert "the device failed" in str(error.value)
    assert 3 <= len(server.seen("Decode")) <= 30, "backs off, does not spin"


def test_a_deadline_that_passes_while_waiting_names_the_reason(
    serve: Factory, connect: Factory, fake: ModuleType
) -> None:
    """The last attempt meets a slow server, the ones before met none: that is what the caller has to know."""
    server = serve()
    release = threading.Event()
    server.script("Decode", failing(fake, STATUS.UNAVAILABLE, "going down"), lambda context: release.wait(30))
    with pytest.raises(ServiceUnavailable, match="going down"):
        connect(server.address).decode(CODES, timeout=1)
    release.set()


def test_return_errors_covers_a_service_that_goes_away(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    server = serve(max_items=1)
    client = connect(server.address, unavailable_timeout=0.5)
    server.script("Decode", None, *[failing(fake, STATUS.UNAVAILABLE, "going down")] * 100)
    start = time.monotonic()
    results = client.decode_batch([CODES] * 40, return_errors=True)
    assert time.monotonic() - start < 10, "waits for the service once, not for each part"
    assert isinstance(results[0], np.ndarray)
    assert [type(r) for r in results[1:]] == [ServiceUnavailable] * 39


# ---------------------------------------------------------------- no server


@pytest.mark.parametrize("address", ["unix", "tcp"])
def test_a_missing_server_is_one_sentence(address: str, connect: Factory, socket_path: str, free_port: int) -> None:
    address = f"unix://{socket_path}" if address == "unix" else f"127.0.0.1:{free_port}"
    client = connect(address, unavailable_timeout=1)
    for call in (client.info, lambda: client.decode(CODES), lambda: client.encode(wave(50), 8000)):
        start = time.monotonic()
        with pytest.raises(ServiceUnavailable) as error:
            call()
        assert 1 <= time.monotonic() - start < 10
        assert str(error.value).startswith(f"the tokenizer service at {address} is not available: ")
        assert "\n" not in str(error.value)
        assert error.value.code is STATUS.UNAVAILABLE


def test_a_server_that_accepts_and_says_nothing(connect: Factory, free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)):
        client = connect(f"127.0.0.1:{free_port}", unavailable_timeout=1)
        start = time.monotonic()
        with pytest.raises(ServiceUnavailable):
            client.info()
        assert time.monotonic() - start < 15


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


# ---------------------------------------------------------------- restarts


def restart_during(
    call: Callable[[], Any], process: subprocess.Popen[str], start: Callable[[], subprocess.Popen[str]]
) -> Any:
    """Kill the server once it is busy with `call`, bring it up again after two seconds, return the call's answer."""

    def restart() -> None:
        assert process.stdout is not None
        assert process.stdout.readline() == "hanging\n"
        process.kill()
        process.wait()
        time.sleep(2)
        start()

    thread = threading.Thread(target=restart)
    thread.start()
    try:
        return call()
    finally:
        thread.join()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("rpc", ["Encode", "EncodeStream", "DecodeLong"])
def test_through_a_restart(
    rpc: str, transport: str, spawn: Factory, connect: Factory, socket_path: str, free_port: int, fake: ModuleType
) -> None:
    """With a call of 2 MB under way, and with streams."""
    address = f"unix:{socket_path}" if transport == "unix" else f"127.0.0.1:{free_port}"
    limit = {"Encode": 64 << 20, "EncodeStream": 1 << 20, "DecodeLong": 1 << 20}[rpc]
    options = ("--max-message-bytes", str(limit))
    process = spawn(address, "--hang", rpc, *options)
    assert process.stdout.readline().strip() == address
    client = connect(address)
    if rpc == "DecodeLong":
        codes = np.arange(100_000).reshape(1, -1) % 50_000
        call, expected = lambda: client.decode(codes), fake.decode(codes)
    else:
        audio = wave(500_000)
        call, expected = lambda: client.encode(audio, 16_000), fake.encode(audio)
    got = restart_during(call, process, lambda: spawn(address, *options))
    np.testing.assert_array_equal(got, expected)


def test_another_model_after_a_restart(spawn: Factory, connect: Factory, socket_path: str) -> None:
    address = f"unix:{socket_path}"
    process = spawn(address, "--hang", "Decode")
    process.stdout.readline()
    client = connect(address, fingerprint="model-a")
    with pytest.raises(ModelMismatch):
        restart_during(lambda: client.decode(CODES), process, lambda: spawn(address, "--fingerprint", "model-b"))


def test_an_idle_client_finds_the_new_server(
    spawn: Factory, connect: Factory, socket_path: str, fake: ModuleType
) -> None:
    address = f"unix:{socket_path}"
    client = connect(address)
    for _ in range(3):
        process = spawn(address)
        process.stdout.readline()
        np.testing.assert_array_equal(client.decode(CODES), fake.decode(CODES))
        process.kill()
        process.wait()

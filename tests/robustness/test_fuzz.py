"""Ten thousand messages that nobody should send: no crash, no INTERNAL, no leak, and good requests in between work."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from fuzz_messages import METHODS, SERVICE, Fuzzer
from google.protobuf.message_factory import GetMessageClass
from process_harness import PATIENCE, RATE, ServerProcess, noise, random_codes
from robustness_harness import resident_mib, same, settled_mib

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_tokenizer_client import TokenizerClient

Code = grpc.StatusCode

CALLS = 10_000
WARM_UP = 1_000
GOOD_EVERY = 200

ALLOWED = {
    Code.OK,
    Code.INVALID_ARGUMENT,
    Code.RESOURCE_EXHAUSTED,
    Code.FAILED_PRECONDITION,
    Code.DEADLINE_EXCEEDED,
    Code.CANCELLED,
}
# What a client's own part of gRPC says, without the server.
OWN = {Code.DEADLINE_EXCEEDED, Code.CANCELLED}

UNKNOWN_METHODS = [
    f"/{SERVICE.full_name}/Nothing",
    f"/{SERVICE.full_name}/",
    f"/{SERVICE.full_name}/encode",
    f"/{SERVICE.full_name}/Encode/",
    "/mimo_audio_tokenizer.v2.AudioTokenizer/Encode",
    "/x/y",
    "/",
    "//",
]


class Caller:
    """Sends bytes as they are, in every way that a call can go.

    Args:
        channel: to the server.
        rng: where all chance comes from.
    """

    def __init__(self, channel: grpc.Channel, rng: random.Random) -> None:
        self._rng = rng
        self._calls: dict[str, Any] = {}
        for method in SERVICE.methods:
            make = {
                (False, False): channel.unary_unary,
                (False, True): channel.unary_stream,
                (True, True): channel.stream_stream,
            }[method.client_streaming, method.server_streaming]
            path = f"/{SERVICE.full_name}/{method.name}"
            self._calls[method.name] = make(path, request_serializer=bytes, response_deserializer=bytes)

    def call(self, method: str, messages: list[bytes]) -> tuple[list[bytes] | None, Any]:
        """Make one call.

        Returns:
            The answer's messages, None where the call was given up early; and the error or None.
        """
        call = self._calls[method]
        timeout = self._rng.choice([0.0005, 0.002, 0.01]) if self._rng.random() < 0.03 else PATIENCE
        give_up = self._rng.random() < 0.1
        try:
            if method not in ("DecodeLong", "EncodeStream"):
                return self._unary(call, messages[0], timeout, give_up)
            if method == "DecodeLong":
                return self._read(call(messages[0], timeout=timeout), give_up)
            return self._stream(call, messages, timeout, give_up)
        except grpc.RpcError as error:
            return None, error

    def _unary(self, call: Any, message: bytes, timeout: float, give_up: bool) -> tuple[list[bytes] | None, Any]:
        if not give_up:
            return [call(message, timeout=timeout)], None
        pending = call.future(message, timeout=timeout)
        pending.cancel()
        return None, None

    def _stream(
        self, call: Any, messages: list[bytes], timeout: float, give_up: bool
    ) -> tuple[list[bytes] | None, Any]:
        over = threading.Event()
        if give_up:
            messages = messages[: self._rng.randint(0, len(messages))]
        pause = self._rng.choice([0, 0.001, 0.01])

        def sent() -> Iterator[bytes]:
            yield from messages
            if give_up:
                # Neither a further message nor the half-close: the server waits for what never comes.
                over.wait(PATIENCE)

        try:
            answer = call(sent(), timeout=timeout)
            if not give_up:
                return self._read(answer, False)
            # Its end can come before: a message may have been refused.
            over.wait(pause)
            answer.cancel()
            return None, None
        finally:
            over.set()

    @staticmethod
    def _read(answer: Any, give_up: bool) -> tuple[list[bytes] | None, Any]:
        messages = list(itertools.islice(answer, 1 if give_up else None))
        answer.cancel()
        return (None if give_up else messages), None


def assert_good_answer(method: str, messages: list[bytes], answers: list[bytes]) -> None:
    """Check that what was answered with OK is an answer to the request."""
    descriptor = SERVICE.methods_by_name[method]
    kind = GetMessageClass(descriptor.output_type)
    parsed: list[Any] = [kind.FromString(answer) for answer in answers]
    if method == "GetInfo":
        assert parsed[0].model.id == "tiny"
    elif method in ("Encode", "Decode", "DecodeVq"):
        request: Any = GetMessageClass(descriptor.input_type).FromString(messages[0])
        codes = [item.status.code for item in parsed[0].items]
        assert len(codes) == len(request.items)
        assert 0 in codes
        assert set(codes) <= {code.value[0] for code in ALLOWED}
        assert all(item.status.message for item in parsed[0].items if item.status.code)
    else:
        assert [answer.HasField("timings") for answer in parsed] == [False] * (len(parsed) - 1) + [True]


def assert_proper_refusal(error: Any) -> None:
    """Check that a call that failed says why, to people and to programs."""
    assert error.code() in ALLOWED, (error.code(), error.details())
    assert error.details(), error.code()
    assert "\n" not in error.details().strip(), error.details()
    if error.code() in OWN:
        return
    details = [value for key, value in error.trailing_metadata() or () if key == "mimo-error-detail-bin"]
    assert len(details) == 1, (error.code(), error.details())
    reason = pb.ErrorDetail.FromString(details[0]).reason
    assert reason not in (pb.ErrorDetail.REASON_UNSPECIFIED, pb.ErrorDetail.REASON_INTERNAL), error.details()


@pytest.mark.timeout(900)
def test_ten_thousand_messages(
    start: Callable[..., ServerProcess], channel: Callable[[str], grpc.Channel], record_property: Any
) -> None:
    server = start()
    rng = random.Random(20_261_201)
    fuzzer, caller = Fuzzer(rng), Caller(channel(server.address), rng)
    sound, codes = noise(0.5), random_codes(25)
    seen: Counter[tuple[str, str]] = Counter()
    sent = 0
    memory: list[float] = []
    with TokenizerClient(server.address, timeout=PATIENCE) as client:
        wanted: list[Any] = [client.encode(sound, RATE), client.decode(codes), client.decode_vq(codes)]
        for number in range(CALLS):
            method = rng.choice(METHODS)
            messages = fuzzer.messages(method)
            sent += len(messages)
            told = f"call {number}, {method}, {len(messages)} messages, first {messages[0][:80] if messages else b''!r}"
            try:
                answers, error = caller.call(method, messages)
                if error is not None:
                    assert_proper_refusal(error)
                elif answers is not None:
                    assert_good_answer(method, messages, answers)
            except AssertionError as failed:
                raise AssertionError(f"{told}: {failed}\n{server.log[-3000:]}") from None
            seen[method, "given up" if answers is None and error is None else error.code().name if error else "OK"] += 1
            if number % GOOD_EVERY == 0 or number == CALLS - 1:
                assert server.process.poll() is None, f"{told}\n{server.log}"
                got: list[Any] = [client.encode(sound, RATE), client.decode(codes), client.decode_vq(codes)]
                assert all(map(same, wanted, got)), told
            if number % WARM_UP == WARM_UP - 1:
                memory.append(settled_mib(server.pid))
    told = f"{sent} messages; resident MiB: {[round(value) for value in memory]}; {dict(sorted(seen.items()))}"
    record_property("fuzz", told)
    print(told)
    assert memory[-1] <= 1.05 * memory[0] + 32, told
    # Each method's answers and refusals were seen, not only one of them.
    for method in METHODS:
        assert seen[method, "OK"] >= 50, told
        assert seen[method, "INVALID_ARGUMENT"] >= 50, told
    assert server.complaints() == []


def test_unknown_methods(start: Callable[..., ServerProcess], channel: Callable[[str], grpc.Channel]) -> None:
    server = start()
    connection = channel(server.address)
    rng = random.Random(1)
    for path in UNKNOWN_METHODS:
        for data in (b"", rng.randbytes(100), rng.randbytes(1 << 20)):
            with pytest.raises(grpc.RpcError) as refused:
                connection.unary_unary(path, request_serializer=bytes, response_deserializer=bytes)(
                    data, timeout=PATIENCE
                )
            assert refused.value.code() is Code.UNIMPLEMENTED, path
    with TokenizerClient(server.address, timeout=PATIENCE) as client:
        assert client.decode(random_codes(2)).shape == (2 * 960,)


def test_shapes_that_would_need_terabytes(
    start: Callable[..., ServerProcess], channel: Callable[[str], grpc.Channel]
) -> None:
    server = start()
    stub = Caller(channel(server.address), random.Random(2))
    before = resident_mib(server.pid)
    for quantizers, frames in [(20, 2**32 - 1), (2**32 - 1, 2**32 - 1), (2**16, 2**16), (1, 46_025), (20, 0), (0, 1)]:
        codes = pb.Codes(num_quantizers=quantizers, frames=frames, data=bytes(1 << 20))
        requests: dict[str, Any] = {
            "Decode": pb.DecodeRequest(items=[pb.DecodeItem(codes=codes)]),
            "DecodeVq": pb.DecodeVqRequest(items=[codes]),
            "DecodeLong": pb.DecodeLongRequest(item=pb.DecodeItem(codes=codes)),
        }
        for method, request in requests.items():
            answers, error = stub.call(method, [request.SerializeToString()])
            assert answers is None
            if error is not None:  # else the caller gave up
                assert_proper_refusal(error)
                assert error.code() in (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED)
    assert resident_mib(server.pid) < before + 64
    with TokenizerClient(server.address, timeout=PATIENCE) as client:
        assert np.isfinite(client.decode(random_codes(2))).all()

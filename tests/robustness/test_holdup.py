"""A big caller holds up nobody: what is short and comes later is answered first."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from process_harness import RATE, ServerProcess
from robustness_harness import codes_message, decode_item, decode_request

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_audio_tokenizer.v1 import tokenizer_pb2_grpc

HALF_AN_HOUR = 1800  # seconds
FRAMES_A_SECOND = 25

# How many short calls must get through while the big one is at it, from how many callers.
PROBES = 50
CALLERS = 4

# A bound for a call that is held up, not for one that is answered: that takes milliseconds.
HELD_UP = 40.0


SERVING = health_pb2.HealthCheckResponse.SERVING


def stub_of(channel: grpc.Channel) -> Any:
    return tokenizer_pb2_grpc.AudioTokenizerStub(channel)


class Big:
    """A big call in a thread of its own.

    Args:
        call: makes the call: an iterator of its answers.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self.ended = threading.Event()
        self.error: grpc.RpcError | None = None
        self.answers = 0
        self._call = call()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for _ in self._call:
                self.answers += 1
        except grpc.RpcError as error:
            self.error = error
        self.ended.set()

    def give_up(self) -> None:
        """Cancel what is left of it."""
        self._call.cancel()
        self._thread.join(HELD_UP)


def decode_long(channel: grpc.Channel, seconds: float) -> Any:
    request = pb.DecodeLongRequest(item=decode_item(int(seconds * FRAMES_A_SECOND)), format=pb.SAMPLE_FORMAT_INT16)
    return stub_of(channel).DecodeLong(request, timeout=600)


def encode_stream(channel: grpc.Channel, seconds: float) -> Any:
    minute = bytes(60 * RATE * 2)
    piece = 1 << 20

    def messages() -> Iterator[pb.EncodeStreamRequest]:
        opening = pb.EncodeStreamOpen(sample_rate=RATE, channels=1, format=pb.SAMPLE_FORMAT_INT16)
        yield pb.EncodeStreamRequest(open=opening)
        for _ in range(int(seconds // 60)):
            for at in range(0, len(minute), piece):
                yield pb.EncodeStreamRequest(pcm=minute[at : at + piece])

    return stub_of(channel).EncodeStream(messages(), timeout=600)


@pytest.mark.parametrize("big_call", [decode_long, encode_stream], ids=lambda call: call.__name__)
def test_short_calls_while_half_an_hour_of_audio_is_worked_on(
    big_call: Callable[[grpc.Channel, float], Any],
    start: Callable[..., ServerProcess],
    channel: Callable[[str], grpc.Channel],
) -> None:
    server = start()
    big_channel, *others = (channel(server.address) for _ in range(1 + CALLERS))
    stub_of(others[0]).Decode(decode_request(1), timeout=HELD_UP)
    big = Big(lambda: big_call(big_channel, HALF_AN_HOUR))
    answered: list[str] = []

    def probe(connection: grpc.Channel) -> None:
        stub, health = stub_of(connection), health_pb2_grpc.HealthStub(connection)
        while answered.count("decode") < PROBES and not big.ended.is_set():
            assert health.Check(health_pb2.HealthCheckRequest(), timeout=HELD_UP).status == SERVING
            answered.append("health")
            assert stub.Decode(decode_request(1), timeout=HELD_UP).items[0].status.code == 0
            answered.append("decode")

    try:
        # Until it surely computes; a look that does not depend on anything the server says.
        assert not big.ended.wait(0.5), big.error
        with ThreadPoolExecutor(CALLERS) as pool:
            probes = [pool.submit(probe, connection) for connection in others]
        ended, seen = big.ended.is_set(), Counter(answered)
    finally:
        big.give_up()
    for one in probes:
        try:
            one.result()
        except grpc.RpcError as error:
            sentence = error.details()
            raise AssertionError(f"a short call was held up ({sentence}); answered before: {seen}") from None
    assert not ended, f"the big call ended first; answered before: {seen}; {big.error}"
    assert min(seen["decode"], seen["health"]) >= PROBES


def test_a_short_call_overtakes_long_ones(
    start: Callable[..., ServerProcess], channel: Callable[[str], grpc.Channel]
) -> None:
    server = start()
    connections = [channel(server.address) for _ in range(3)]
    stub = stub_of(connections[2])
    stub.Decode(decode_request(1), timeout=HELD_UP)
    order: list[str] = []
    done = threading.Condition()

    def tell(name: str) -> Callable[[Any], None]:
        def called_back(call: Any) -> None:
            with done:
                order.append(name if call.exception() is None else f"{name}: {call.exception()}")
                done.notify_all()

        return called_back

    # Seconds of computing each.
    long_request = pb.DecodeRequest(items=[decode_item(4 * 60 * FRAMES_A_SECOND)], format=pb.SAMPLE_FORMAT_INT16)
    for number in range(2):
        stub_of(connections[number]).Decode.future(long_request, timeout=600).add_done_callback(tell("long"))
    # One of them must have been begun, or there would be nothing to overtake.
    time.sleep(0.3)
    assert order == []
    stub.Decode.future(decode_request(1), timeout=600).add_done_callback(tell("short"))
    with done:
        assert done.wait_for(lambda: len(order) == 3, 600)
    assert order == ["short", "long", "long"]


def test_short_calls_while_the_largest_messages_come_and_go(
    start: Callable[..., ServerProcess], channel: Callable[[str], grpc.Channel]
) -> None:
    server = start()
    limit = 64 << 20
    others = channel(server.address)
    stub, health = stub_of(others), health_pb2_grpc.HealthStub(others)
    width = stub.GetInfo(pb.GetInfoRequest(), timeout=HELD_UP).model.d_model
    frames = (limit - (1 << 16)) // (4 * width)
    request = pb.DecodeVqRequest(items=[codes_message(min(frames, 46_000))])
    silence = pb.Audio(sample_rate=384_000, channels=8, format=pb.SAMPLE_FORMAT_FLOAT32, pcm=bytes(limit - (1 << 16)))
    sound = pb.EncodeRequest(items=[silence], num_quantizers=1)
    stop = threading.Event()
    sent = [0, 0]
    failures: list[str] = []

    def send(number: int, connection: grpc.Channel) -> None:
        big = stub_of(connection)
        while not stop.is_set():
            try:
                if number == 0:
                    big.DecodeVq(request, timeout=600)
                else:
                    big.Encode(sound, timeout=600)
            except grpc.RpcError as error:
                failures.append(str(error.details()))
                return
            sent[number] += 1

    threads = [threading.Thread(target=send, args=(number, channel(server.address))) for number in range(2)]
    for thread in threads:
        thread.start()
    probes = 0
    try:
        # At least one large message of each kind has come and gone by then, and many short calls with them.
        while (min(sent) == 0 or probes < PROBES) and not failures:
            assert health.Check(health_pb2.HealthCheckRequest(), timeout=HELD_UP).status == SERVING
            assert stub.Decode(decode_request(1), timeout=HELD_UP).items[0].status.code == 0
            probes += 1
    finally:
        stop.set()
        for thread in threads:
            thread.join(HELD_UP)
    assert failures == []

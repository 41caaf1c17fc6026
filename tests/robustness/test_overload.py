"""More calls than a server can answer: those it takes are answered, the others are told when to come back.

How many it answers meanwhile, and how soon, is measured by benchmarks/overload.py.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from process_harness import PATIENCE, ServerProcess, random_codes
from robustness_harness import decode_item

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_tokenizer_client import TokenizerClient

SECONDS = 10.0
TIMES_CAPACITY = 4
FRAMES = 100
MAX_QUEUED_FRAMES = 4000
MAX_CONCURRENT_CALLS = 128

METHOD = "/mimo_audio_tokenizer.v1.AudioTokenizer/Decode"


class Results:
    """Counts the ends of calls, as gRPC's callbacks tell them."""

    def __init__(self) -> None:
        self._told = threading.Condition()
        self.outcomes: Counter[str] = Counter()
        self.improper: list[str] = []

    def add(self, call: Any) -> None:
        """Put down how a call ended."""
        outcome = "answered"
        improper = None
        if call.code() is grpc.StatusCode.OK:
            (item,) = pb.DecodeResponse.FromString(call.result()).items
            if item.status.code or len(item.audio.pcm) != FRAMES * 960 * 2:
                improper = f"an answer of {len(item.audio.pcm)} bytes, status {item.status}"
        else:
            outcome = call.code().name
            trailing = dict(call.trailing_metadata())
            detail = pb.ErrorDetail.FromString(trailing.get("mimo-error-detail-bin", b""))
            if (
                call.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED
                or detail.reason != pb.ErrorDetail.REASON_QUEUE_FULL
                or detail.limit not in (MAX_QUEUED_FRAMES, MAX_CONCURRENT_CALLS)
                or detail.retry_after.ToTimedelta().total_seconds() <= 0
            ):
                improper = f"{call.code()}: {call.details()} {detail}"
        with self._told:
            self.outcomes[outcome] += 1
            if improper is not None:
                self.improper.append(improper)
            self._told.notify_all()

    def wait_for(self, count: int) -> bool:
        """Wait until so many have ended."""
        with self._told:
            return self._told.wait_for(lambda: self.outcomes.total() >= count, 2 * PATIENCE)


def test_four_times_as_many_calls_as_it_can_answer(
    start: Callable[..., ServerProcess], channel: Callable[[str], grpc.Channel], record_property: Any
) -> None:
    server = start("--max-queued-frames", str(MAX_QUEUED_FRAMES))
    decode = channel(server.address).unary_unary(METHOD, request_serializer=bytes, response_deserializer=bytes)
    request = pb.DecodeRequest(items=[decode_item(FRAMES)], format=pb.SAMPLE_FORMAT_INT16).SerializeToString()

    def one_after_another(count: int) -> None:
        for _ in range(count):
            decode(request, timeout=PATIENCE)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one_after_another, [3] * 8))
        began = time.monotonic()
        list(pool.map(one_after_another, [12] * 8))
    rate = TIMES_CAPACITY * 96 / (time.monotonic() - began)

    results = Results()
    rng = random.Random(0)
    sent = 0
    now = began = time.monotonic()
    while now < began + SECONDS:
        # Whoever comes does not wait for those before; a sender that is late sends as many as it owes.
        time.sleep(max(0.0, now - time.monotonic()))
        decode.future(request, timeout=2 * PATIENCE).add_done_callback(results.add)
        sent += 1
        now += rng.expovariate(rate)
    assert results.wait_for(sent), f"{sent - results.outcomes.total()} of {sent} calls were lost"
    told = f"{rate:.0f} calls a second, {sent} in all: {dict(results.outcomes)}"
    record_property("overload", told)
    print(told)
    assert results.improper == []
    assert results.outcomes.total() == sent
    assert results.outcomes["answered"] > 0, told
    assert results.outcomes["RESOURCE_EXHAUSTED"] > 0, told
    with TokenizerClient(server.address, timeout=PATIENCE) as client:
        assert client.health()
        assert client.decode(random_codes(10)).shape == (9600,)
        # Nothing is left of the room that they took.
        assert client.decode(random_codes(MAX_QUEUED_FRAMES)).shape == (MAX_QUEUED_FRAMES * 960,)


def test_callers_who_come_back_are_answered(start: Callable[..., ServerProcess]) -> None:
    """With the client's own retries: room for three calls, sixteen callers, and in the end all of them are served."""
    server = start("--max-queued-frames", str(3 * FRAMES), "--log-level", "debug")
    codes = random_codes(FRAMES)

    def work(_: int) -> list[int]:
        with TokenizerClient(server.address, timeout=2 * PATIENCE) as client:
            return [len(client.decode(codes)) for _ in range(8)]

    with ThreadPoolExecutor(16) as pool:
        lengths = [length for done in pool.map(work, range(16)) for length in done]
    assert lengths == [FRAMES * 960] * 128
    assert "status=RESOURCE_EXHAUSTED" in server.log, "nobody was ever refused"

"""Servers that are replaced under load, as an operator does it: no call fails, and none is answered otherwise."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import pytest
from process_harness import PATIENCE, RATE, ServerProcess, eventually, noise, random_codes
from robustness_harness import Answer, Asked, new_address, same

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_audio_tokenizer.v1 import tokenizer_pb2_grpc
from mimo_tokenizer_client import AsyncTokenizerClient, TokenizerClient

RESTARTS = 3
SYNC_CALLERS = 2
ASYNC_CALLERS = 2

# A small message limit: what is over it goes as a stream, through EncodeStream or DecodeLong.
FLAGS = ("--max-message-mib", "1", "--log-level", "debug")
GRACE_SECONDS = 30.0  # the server's default
SEGMENT_SECONDS = 60  # of a stream, after which its first answer comes

ASKED = (
    Asked("decode", (random_codes(25),)),
    Asked("encode", (noise(1.0, 44_100), 44_100), {"num_quantizers": 8, "group_size": 4}),
    Asked("decode_vq", (random_codes(50, seed=1),)),
    Asked("encode", (noise(15.0, seed=2), RATE)),  # EncodeStream
    Asked("decode", (random_codes(100, seed=3), 30)),
    Asked("decode", (random_codes(600, seed=4),)),  # DecodeLong
)

Start = Callable[..., ServerProcess]


class Load:
    """Callers of either client who ask again and again, with no deadline but the client's own.

    Args:
        address: of the servers.
        wanted: the answers from before, in the order of `ASKED`.
    """

    def __init__(self, address: str, wanted: list[Answer]) -> None:
        self._address = address
        self._wanted = wanted
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._call_sync, args=(n,), daemon=True) for n in range(SYNC_CALLERS)]
        self._threads.append(threading.Thread(target=lambda: asyncio.run(self._call_async()), daemon=True))
        self.answered: Counter[int] = Counter()
        self.wrong: list[str] = []

    def _end(self, number: int, outcome: Answer | BaseException) -> None:
        with self._lock:
            if isinstance(outcome, BaseException):
                self.wrong.append(f"{ASKED[number].method} ({number}): {outcome!r}")
            elif same(self._wanted[number], outcome):
                self.answered[number] += 1
            else:
                self.wrong.append(f"{ASKED[number].method} ({number}): another answer")

    def _numbers(self, caller: int) -> Iterator[int]:
        """What a caller asks, each beginning with another."""
        number = caller
        while not self._stop.is_set():
            yield number % len(ASKED)
            number += 1

    def _call_sync(self, caller: int) -> None:
        with TokenizerClient(self._address) as client:
            for number in self._numbers(caller):
                outcome: Any
                try:
                    outcome = ASKED[number].of(client, None)
                except Exception as error:
                    outcome = error
                self._end(number, outcome)

    async def _call_async(self) -> None:
        async def caller(client: AsyncTokenizerClient, first: int) -> None:
            for number in self._numbers(first):
                outcome: Any
                try:
                    call: Awaitable[Answer] = ASKED[number].of(client, None)
                    outcome = await call
                except Exception as error:
                    outcome = error
                self._end(number, outcome)

        async with AsyncTokenizerClient(self._address) as client:
            await asyncio.gather(*(caller(client, SYNC_CALLERS + number) for number in range(ASYNC_CALLERS)))

    def go_round(self) -> None:
        """Wait until each call has been answered once more; one that failed will not do."""
        before = self.answered.copy()
        eventually(lambda: bool(self.wrong) or all(self.answered[n] > before[n] for n in range(len(ASKED))))
        assert self.wrong == []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE)

    def check(self) -> None:
        """When it is over: everybody has come back, with the right answers."""
        assert not any(thread.is_alive() for thread in self._threads), "callers hang"
        assert self.wrong == []


class OpenCall:
    """An EncodeStream of another client, in flight until it is let go."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._gate = threading.Event()
        self._call = tokenizer_pb2_grpc.AudioTokenizerStub(channel).EncodeStream(self._messages(), timeout=2 * PATIENCE)
        next(self._call)  # the first segment's codes: the server has begun

    def _messages(self) -> Iterator[pb.EncodeStreamRequest]:
        opening = pb.EncodeStreamOpen(sample_rate=RATE, channels=1, format=pb.SAMPLE_FORMAT_FLOAT32)
        yield pb.EncodeStreamRequest(open=opening)
        for seed in range(SEGMENT_SECONDS + 1):
            yield pb.EncodeStreamRequest(pcm=noise(1, seed=seed).tobytes())
        self._gate.wait(2 * PATIENCE)

    def let_go(self) -> None:
        """Send the end of the recording."""
        self._gate.set()


@pytest.fixture(scope="module")
def wanted() -> list[Answer]:
    """The answers of a server that nobody disturbs."""
    server = ServerProcess(*FLAGS)
    try:
        with TokenizerClient(server.ready().address) as client:
            return [asked.of(client, PATIENCE) for asked in ASKED]
    finally:
        server.clean_up()


def terminated(server: ServerProcess) -> None:
    """Wait for the end of a server that has been sent SIGTERM."""
    assert server.wait(GRACE_SECONDS + PATIENCE) == 0, server.log
    assert "stopped" in server.lines[-1]


def answers(server: ServerProcess) -> int:
    """The calls that a server has answered so far."""
    return len(re.findall("(Encode|EncodeStream|Decode|DecodeVq|DecodeLong) status=OK", server.log))


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_one_after_the_other(kind: str, start: Start, wanted: list[Answer]) -> None:
    """As a container is restarted: the next one starts when the last one has ended."""
    with new_address(kind) as address:
        server = start(*FLAGS, address=address)
        with Load(address, wanted) as load:
            load.go_round()
            for _ in range(RESTARTS):
                server.signal(signal.SIGTERM)
                terminated(server)
                server = start(*FLAGS, address=address)
                load.go_round()
        load.check()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_one_beside_the_other(
    kind: str, start: Start, wanted: list[Answer], channel: Callable[[str], grpc.Channel]
) -> None:
    """The next one starts when the last one is told to end, and serves while that one's calls finish."""
    with new_address(kind) as address:
        last = start(*FLAGS, address=address)
        with Load(address, wanted) as load:
            load.go_round()
            open_call = OpenCall(channel(address))
            last.signal(signal.SIGTERM)
            server = start(*FLAGS, address=address)
            eventually(lambda: answers(server) > 2 * (SYNC_CALLERS + ASYNC_CALLERS))
            assert last.process.poll() is None, "it should have waited for the open call"
            open_call.let_go()
            terminated(last)
            assert "EncodeStream status=OK" in last.log[last.log.index("stopping") :]
            load.go_round()
        load.check()

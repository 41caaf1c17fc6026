"""A server that is killed every few seconds and restarted: no call is lost, and none is answered wrongly."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from process_harness import PATIENCE, RATE, ServerProcess, noise, random_codes
from robustness_harness import FULL, Answer, Asked, new_address, same

from mimo_tokenizer_client import (
    AsyncTokenizerClient,
    DeadlineExceeded,
    ServiceUnavailable,
    TokenizerClient,
)

SECONDS = 120.0 if FULL else 20.0
LIVES = (1.0, 3.0)  # seconds between a server's readiness and its end

SYNC_CALLERS = 4
ASYNC_CALLERS = 4

# What a call has: too little to outlive a restart, or plenty.
TIMEOUTS = (0.5, 3.0, 20.0)
# How much later than its deadline a caller may hear of it, on a busy machine.
MARGIN = 10.0

# A small message limit: what is over it goes as a stream, through EncodeStream or DecodeLong.
FLAGS = ("--max-message-mib", "1")


ASKED = (
    *(Asked("decode", (random_codes(frames, seed=frames),)) for frames in (1, 25, 100)),
    Asked("decode", (random_codes(80), 30)),
    *(Asked("decode_vq", (random_codes(frames, seed=frames),)) for frames in (7, 3000)),  # the long one in two calls
    *(Asked("encode", (noise(seconds, seed=1), RATE)) for seconds in (0.04, 1.0, 4.0)),
    Asked("encode", (noise(2.0, 44_100), 44_100), {"num_quantizers": 8, "group_size": 4}),
    Asked("encode", (noise(90.0, seed=2), RATE)),  # EncodeStream
    Asked("decode", (random_codes(1500, seed=2),)),  # DecodeLong
)


class Supervisor:
    """Starts a server wherever there is none, and kills it every few seconds, for as long as the body of `with` runs.

    Args:
        address: of each of the servers.
        seed: of the length of their lives.
    """

    def __init__(self, address: str, seed: int) -> None:
        self._address = address
        self._rng = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.kills = 0
        self.complaints: list[str] = []
        self.error: BaseException | None = None

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                server = ServerProcess(*FLAGS, address=self._address)
                try:
                    server.ready()
                    self._stop.wait(self._rng.uniform(*LIVES))
                    assert server.process.poll() is None, f"it ended before it was killed:\n{server.log}"
                    server.signal(signal.SIGKILL)
                    assert server.wait() == -signal.SIGKILL
                    self.kills += 1
                    self.complaints += server.complaints()
                finally:
                    server.clean_up()
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Supervisor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(2 * PATIENCE)


class Ledger:
    """What became of the calls.

    Args:
        wanted: the answers of an undisturbed server, in the order of `ASKED`.
    """

    def __init__(self, wanted: list[Answer]) -> None:
        self._wanted = wanted
        self._lock = threading.Lock()
        self.started = 0
        self.answered: Counter[int] = Counter()
        self.failed: Counter[str] = Counter()
        self.wrong: list[str] = []

    def begin(self, rng: random.Random) -> tuple[int, float]:
        """A call to make and its timeout."""
        with self._lock:
            self.started += 1
        return rng.randrange(len(ASKED)), rng.choice(TIMEOUTS)

    def end(self, number: int, timeout: float, seconds: float, outcome: Answer | BaseException) -> None:
        """Put down what became of it."""
        asked = ASKED[number]
        told = f"{asked.method} ({number}) with a timeout of {timeout} s, after {seconds:.1f} s: "
        with self._lock:
            if seconds > timeout + MARGIN:
                self.wrong.append(f"{told}too late")
            if isinstance(outcome, (ServiceUnavailable, DeadlineExceeded)):
                # The only truths: there was no server, or there was no time.
                self.failed[type(outcome).__name__] += 1
            elif isinstance(outcome, BaseException):
                self.wrong.append(f"{told}{outcome!r}")
            elif same(self._wanted[number], outcome):
                self.answered[number] += 1
            else:
                self.wrong.append(f"{told}another answer")


def call_sync(address: str, ledger: Ledger, seed: int, end: float) -> None:
    rng = random.Random(seed)
    with TokenizerClient(address) as client:
        while time.monotonic() < end:
            number, timeout = ledger.begin(rng)
            began = time.monotonic()
            outcome: Any
            try:
                outcome = ASKED[number].of(client, timeout)
            except Exception as error:
                outcome = error
            ledger.end(number, timeout, time.monotonic() - began, outcome)


async def call_async(address: str, ledger: Ledger, seed: int, end: float) -> None:
    async def caller(client: AsyncTokenizerClient, rng: random.Random) -> None:
        while time.monotonic() < end:
            number, timeout = ledger.begin(rng)
            began = time.monotonic()
            outcome: Any
            try:
                call: Awaitable[Answer] = ASKED[number].of(client, timeout)
                outcome = await call
            except Exception as error:
                outcome = error
            ledger.end(number, timeout, time.monotonic() - began, outcome)

    async with AsyncTokenizerClient(address) as client:
        await asyncio.gather(*(caller(client, random.Random(seed + number)) for number in range(ASYNC_CALLERS)))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["unix", "tcp"] if FULL else ["unix"])
def test_no_call_is_lost_and_none_answered_wrongly(
    kind: str, start: Callable[..., ServerProcess], record_property: Any
) -> None:
    undisturbed = start(*FLAGS)
    with TokenizerClient(undisturbed.address) as client:
        wanted = [asked.of(client, PATIENCE) for asked in ASKED]
    undisturbed.stop()
    ledger = Ledger(wanted)
    with new_address(kind) as address, Supervisor(address, seed=1) as supervisor:
        with TokenizerClient(address) as client:
            client.wait_until_ready(PATIENCE)
        end = time.monotonic() + SECONDS
        threads = [
            threading.Thread(target=call_sync, args=(address, ledger, 100 * number, end), daemon=True)
            for number in range(SYNC_CALLERS)
        ]
        threads.append(threading.Thread(target=lambda: asyncio.run(call_async(address, ledger, 1, end)), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0, end - time.monotonic()) + max(TIMEOUTS) + 2 * MARGIN)
        hung = sum(thread.is_alive() for thread in threads)
    answered, failed = sum(ledger.answered.values()), sum(ledger.failed.values())
    told = f"{supervisor.kills} kills; {ledger.started} calls: {answered} answered, failed: {dict(ledger.failed)}"
    record_property("chaos", told)
    print(told)
    assert supervisor.error is None, supervisor.error
    assert hung == 0, f"{hung} callers hang; {told}"
    assert ledger.wrong == []
    assert ledger.started == answered + failed, told
    assert supervisor.complaints == []
    # It was chaos, and calls of every kind came through it.
    assert supervisor.kills >= 3, told
    assert failed > 0, told
    assert len(ledger.answered) == len(ASKED), ledger.answered


def test_a_call_longer_than_any_life_is_reported_failed() -> None:
    """A server that never lives long enough for it: the caller hears of it at its deadline."""
    with new_address("unix") as address, Supervisor(address, seed=2) as supervisor, TokenizerClient(address) as client:
        began = time.monotonic()
        with pytest.raises((ServiceUnavailable, DeadlineExceeded)):
            client.decode(np.zeros((20, 25_000), np.uint16), timeout=8)
        assert time.monotonic() - began < 8 + MARGIN
    assert supervisor.error is None
    assert supervisor.kills > 0

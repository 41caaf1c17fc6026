"""`mimo-tokenizer bench`: load on a running server, and what it makes of it.

Closed loop: so many callers, each of which sends its next request when it has its answer; that finds the throughput.
Open loop: requests at random times (a Poisson process) that wait for no answer; that shows what overload does. A time
there counts from when its request was to be sent, whatever held it up, or else a stalled server would be measured less
often the worse it stalls ("coordinated omission").
"""

from __future__ import annotations

import asyncio
import math
import random
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from mimo_tokenizer_client import (
    Credentials,
    DeadlineExceeded,
    InvalidInput,
    Overloaded,
    ServerFault,
    ServerInfo,
    TokenizerError,
    TooLarge,
)
from mimo_tokenizer_client._credentials import Authenticator
from mimo_tokenizer_client._transport import Connection, Rpc, client_name, resolve_address
from mimo_tokenizer_client.errors import Failure, error_of_item

from .bench_mix import METHODS, Entry, Request, Requests
from .bench_report import EntryCheck, Generator, Outcome, Report, Sample, group, problems

# Calls on one connection share its one writer and its flow control; beyond this many, that would be measured.
_CALLS_PER_CHANNEL = 32
_MAX_CHANNELS = 8
_CONNECT_SECONDS = 5.0

# How often the generator looks whether its own event loop is late.
_LAG_SECONDS = 0.01

# How near an answer has to be to the answer alone, in dB SNR; the promise is made for float32.
_FLOAT32_SNR_DB = 90.0
_OTHER_SNR_DB = 25.0


class BenchError(Exception):
    """The load cannot be put on the server at all; one sentence."""


@dataclass(frozen=True)
class Load:
    """What to send.

    Attributes:
        mix: methods and lengths.
        concurrency: callers of the closed loop; without meaning in the open loop.
        rate: requests a second of the open loop; None for the closed loop.
        duration: seconds that are measured.
        warm_up: seconds of the same load before them.
        timeout: seconds for each call.
        seed: of what is sent, and when.
        items: of each call.
        max_in_flight: calls of the open loop at a time; one above it is not sent, which is counted.
        check: whether each answer is compared with the answer alone.
    """

    mix: tuple[Entry, ...]
    concurrency: int = 8
    rate: float | None = None
    duration: float = 10.0
    warm_up: float = 2.0
    timeout: float = 30.0
    seed: int = 0
    items: int = 1
    max_in_flight: int = 2000
    check: bool = False


def arrivals(rate: float, seconds: float, seed: int) -> Iterator[float]:
    """Yield the times of a Poisson process, in seconds after its start.

    Args:
        rate: arrivals a second, on average.
        seconds: when to end.
        seed: of the gaps, which are distributed exponentially.
    """
    rng = random.Random(f"arrivals {seed}")
    time = rng.expovariate(rate)
    while time < seconds:
        yield time
        time += rng.expovariate(rate)


async def run(address: str, info: ServerInfo, load: Load, credentials: Credentials | None = None) -> Report:
    """Put load on a server until its time is over or SIGINT comes, and report.

    Args:
        address: `unix:///path` or `host:port`.
        info: what the server says of itself.
        load: what to send.
        credentials: as of `TokenizerClient`.

    Raises:
        BenchError: the server cannot be reached, or takes no such requests.
        MixError: the requests are over a limit that the server states.
        InvalidInput: the address or the credentials make no sense.
    """
    requests = Requests(load.mix, info, load.items, load.seed)
    address = resolve_address(address)
    authenticator = Authenticator(address, credentials)
    async with AsyncExitStack() as stack:
        expected = load.max_in_flight if load.rate is not None else load.concurrency
        # gRPC shares a connection between channels of the same options unless each has a pool of its own.
        own_pool = ("grpc.use_local_subchannel_pool", 1)
        connections = [
            Connection(grpc.aio, authenticator, _CONNECT_SECONDS, own_pool)
            for _ in range(min(_MAX_CHANNELS, math.ceil(expected / _CALLS_PER_CHANNEL)))
        ]
        channels = [await stack.enter_async_context(one.channel) for one in connections]
        try:
            await asyncio.wait_for(asyncio.gather(*(one.channel_ready() for one in channels)), _CONNECT_SECONDS)
        except asyncio.TimeoutError:
            raise BenchError(f"no {len(channels)} connections to {address} within {_CONNECT_SECONDS:g} s") from None
        bench = _Bench(connections, authenticator, requests, info, load)
        await bench.prepare()
        await bench.load()
    return bench.report(address)


class _Bench:
    """One run of the load generator."""

    def __init__(
        self,
        connections: list[Connection],
        authenticator: Authenticator,
        requests: Requests,
        info: ServerInfo,
        load: Load,
    ) -> None:
        # One callable for each method on each connection: (connections, entries of the mix).
        self._methods = [[one.methods[Rpc(METHODS[entry.method].rpc)] for entry in load.mix] for one in connections]
        self._authenticator = authenticator
        self._metadata = (("x-client", client_name("mimo-tokenizer-bench")),)
        self._requests = requests
        self._info = info
        self._load = load
        self._sent = 0
        self._samples: list[Sample] = []
        self._begin = 0.0  # of the measurement, on the loop's clock
        self._interrupted: float | None = None  # when, in seconds since the measurement began
        self._loop_lag = 0.0
        self._send_lag = 0.0
        self._in_flight_max = 0
        self._alone: dict[tuple[int, int], bytes] = {}
        self._checks = [EntryCheck(entry.text) for entry in load.mix]

    # ------------------------------------------------------------ before the load

    async def prepare(self) -> None:
        """Send the largest request of each entry, and with `check` all items alone; neither is measured.

        Raises:
            BenchError: a request is one that the server will never take, or an item alone is not answered.
        """
        for index, entry in enumerate(self._load.mix):
            try:
                _raise_first(await self._call(self._requests.largest(index)))
            except (InvalidInput, TooLarge) as error:
                raise BenchError(f"{entry.text}: {error}") from None
            except TokenizerError:
                pass  # of the moment: the load will show it
            if self._load.check:
                for item in range(len(self._requests.pools[index])):
                    try:
                        answer = await self._call(self._requests.of(index, [item]))
                        _raise_first(answer)
                    except TokenizerError as error:
                        raise BenchError(f"{entry.text}, alone, was not answered: {error}") from None
                    self._alone[index, item] = METHODS[entry.method].payload(answer.items[0])

    async def _call(self, request: Request) -> Any:
        """Send a request and return its answer, in which items may have failed.

        Raises:
            TokenizerError: it is not answered.
        """
        methods = self._methods[self._sent % len(self._methods)]
        self._sent += 1
        metadata = (*self._metadata, *self._authenticator.metadata())
        try:
            answer = await methods[request.entry](request.message, timeout=self._load.timeout, metadata=metadata)
        except grpc.RpcError as error:
            raise Failure.from_rpc_error(error).error from None
        if len(answer.items) != len(request.items):
            raise ServerFault(f"the answer has {len(answer.items)} items, the request {len(request.items)}")
        return answer

    # ------------------------------------------------------------ the load

    async def load(self) -> None:
        """Warm up and measure; SIGINT ends it early."""
        loop = asyncio.get_running_loop()
        self._begin = loop.time() + self._load.warm_up
        driver = asyncio.create_task(self._closed_loop() if self._load.rate is None else self._open_loop())
        monitor = asyncio.create_task(self._watch_loop())

        def interrupt() -> None:
            self._interrupted = self._now()
            driver.cancel()
            # A second one ends the process as ever.
            loop.remove_signal_handler(signal.SIGINT)

        # Not on Windows, and not outside of the main thread: there, SIGINT does what it always does.
        with suppress(NotImplementedError, ValueError, RuntimeError):
            loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            await driver
        except asyncio.CancelledError:
            if self._interrupted is None:
                driver.cancel()
                raise
        finally:
            monitor.cancel()
            with suppress(NotImplementedError, ValueError, RuntimeError):
                loop.remove_signal_handler(signal.SIGINT)

    async def _closed_loop(self) -> None:
        self._in_flight_max = self._load.concurrency

        async def caller() -> None:
            while (now := self._now()) < self._load.duration:
                await self._send(self._requests.draw(), now)

        await asyncio.gather(*(caller() for _ in range(self._load.concurrency)))

    async def _open_loop(self) -> None:
        assert self._load.rate is not None
        tasks: set[asyncio.Task[None]] = set()
        faults: list[BaseException] = []

        def done(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            if not task.cancelled() and (fault := task.exception()) is not None:
                faults.append(fault)

        try:
            for time in arrivals(self._load.rate, self._load.warm_up + self._load.duration, self._load.seed):
                scheduled = time - self._load.warm_up
                # Sleeps also when it is late already: answers that have come are to be read.
                await asyncio.sleep(max(0.0, scheduled - self._now()))
                request = self._requests.draw()
                if len(tasks) >= self._load.max_in_flight:
                    self._samples.append(Sample(request.entry, Outcome.NOT_SENT, scheduled, self._now()))
                    continue
                task = asyncio.create_task(self._send(request, scheduled))
                tasks.add(task)
                task.add_done_callback(done)
                self._in_flight_max = max(self._in_flight_max, len(tasks))
            if tasks:
                await asyncio.wait(tasks)
        finally:
            # A task that has not begun yet would leave no sample behind.
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
        if faults:
            raise faults[0]

    async def _send(self, request: Request, scheduled: float) -> None:
        """Send a request and keep what becomes of it."""
        if scheduled >= 0:
            self._send_lag = max(self._send_lag, self._now() - scheduled)
        try:
            answer = await self._call(request)
        except TokenizerError as error:
            self._keep_failure(request, scheduled, error)
            return
        except asyncio.CancelledError:
            self._samples.append(Sample(request.entry, Outcome.UNFINISHED, scheduled, self._now()))
            raise
        finished = self._now()
        good = [index for index, item in enumerate(answer.items) if not item.status.code]
        audio_seconds = sum(request.audio_seconds[index] for index in good)
        if len(good) < len(request.items):
            first = next(item.status for item in answer.items if item.status.code)
            self._keep_failure(request, scheduled, error_of_item(first), audio_seconds)
        else:
            timings = answer.timings
            self._samples.append(
                Sample(
                    request.entry,
                    Outcome.OK,
                    scheduled,
                    finished,
                    audio_seconds,
                    queue_seconds=timings.queue_seconds,
                    compute_seconds=timings.compute_seconds,
                    batch_items=timings.batch_items,
                    batch_frames=timings.batch_frames,
                )
            )
        if self._load.check:
            method = METHODS[self._load.mix[request.entry].method]
            for index in good:
                alone = self._alone[request.entry, request.items[index]]
                least = None if method.exact else self._least_snr_db
                self._checks[request.entry].compare(alone, method.payload(answer.items[index]), method.dtype, least)

    def _keep_failure(
        self, request: Request, scheduled: float, error: TokenizerError, audio_seconds: float = 0.0
    ) -> None:
        if isinstance(error, Overloaded):
            outcome = Outcome.REJECTED
        elif isinstance(error, DeadlineExceeded):
            outcome = Outcome.LATE
        else:
            outcome = Outcome.FAILED
        self._samples.append(
            Sample(request.entry, outcome, scheduled, self._now(), audio_seconds, error.code.name, str(error))
        )

    async def _watch_loop(self) -> None:
        """Notice when the generator's own event loop is late, during the measurement."""
        while True:
            before = self._now()
            await asyncio.sleep(_LAG_SECONDS)
            after = self._now()
            if after > 0 and before < self._load.duration:
                self._loop_lag = max(self._loop_lag, after - before - _LAG_SECONDS)

    def _now(self) -> float:
        """Seconds since the measurement began; negative in the warm-up."""
        return asyncio.get_running_loop().time() - self._begin

    # ------------------------------------------------------------ after the load

    def report(self, address: str) -> Report:
        """Take the figures."""
        load, model, device = self._load, self._info.model, self._info.device
        seconds = load.duration
        if self._interrupted is not None:
            seconds = max(0.0, min(seconds, self._interrupted))
        entries: list[list[Sample]] = [[] for _ in load.mix]
        for sample in self._samples:
            entries[sample.entry].append(sample)
        return Report(
            server={
                "address": address,
                "model": model.id,
                "fingerprint": model.fingerprint,
                "device": device.device,
                "device_name": device.name,
                "dtype": device.dtype,
                "quantization": device.quantization,
                "version": self._info.versions.get("server", ""),
            },
            load={
                "loop": "closed" if load.rate is None else "open",
                "concurrency": load.concurrency if load.rate is None else None,
                "requests_per_second": load.rate,
                "max_in_flight": None if load.rate is None else load.max_in_flight,
                "mix": [entry.text for entry in load.mix],
                "items_per_request": load.items,
                "warm_up_seconds": load.warm_up,
                "duration_seconds": load.duration,
                "timeout_seconds": load.timeout,
                "seed": load.seed,
            },
            interrupted=self._interrupted is not None,
            measured_seconds=seconds,
            overall=group("all", self._samples, seconds),
            entries=[group(entry.text, own, seconds) for entry, own in zip(load.mix, entries, strict=True)],
            problems=problems(self._samples, seconds),
            generator=Generator(self._loop_lag, self._send_lag, self._in_flight_max, len(self._methods)),
            check=self._checks if load.check else None,
        )

    @property
    def _least_snr_db(self) -> float:
        return _FLOAT32_SNR_DB if self._info.device.dtype == "float32" else _OTHER_SNR_DB


def _raise_first(answer: Any) -> None:
    """Raise the error of the first item that has one."""
    for item in answer.items:
        if item.status.code:
            raise error_of_item(item.status)

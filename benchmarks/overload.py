"""Four times as many calls as the server can answer, for a minute: what it answers, how soon, and with what memory.

    python benchmarks/overload.py
    python benchmarks/overload.py --config published --device cuda:0 --frames 280 --max-queued-frames 11200

The peak is what clients get who wait for an answer before they ask again, enough of them to keep the server busy; it is
measured before and after, and the mean taken, since the machine may be another's, too. Then calls come at random
(Poisson) at four times that rate, whether others are answered or not. The promises: goodput of at least 90 % of the
peak; the 99th percentile of the latencies of what was taken is no more than a full queue takes, and one batch;
resident memory at the end is what it was at the start, within 5 % and 32 MiB; each call is answered or refused with
QUEUE_FULL. Exits with 1 if one is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
from server_process import running_server

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_tokenizer_client import ServerInfo

TIMES_CAPACITY = 4
LEAST_GOODPUT = 0.9
MEMORY_GROWTH, MEMORY_MIB = 1.05, 32.0

_METHOD = "/mimo_audio_tokenizer.v1.AudioTokenizer/Decode"
_TIMEOUT = 120.0
# Waiting clients whose frames fill half of the queue: the server is busy, and refuses nobody.
_PEAK_QUEUE_SHARE = 0.5


@dataclass
class Load:
    """What the generator saw in one phase.

    Attributes:
        seconds: of the phase.
        sent: calls.
        latencies: in seconds, of what was answered.
        ends: when that was, in order, on the monotonic clock.
        in_time: answers that came before the phase was over.
        outcomes: how many calls ended how.
    """

    seconds: float = 0.0
    sent: int = 0
    latencies: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    in_time: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def goodput(self) -> float:
        """Answers a second."""
        return self.in_time / self.seconds


def main() -> None:
    """Measure, print, and say which promises hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="tiny", help="a built-in config, or a JSON file")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--peak-seconds", type=float, default=10)
    parser.add_argument("--frames", type=int, default=400, help="of each call; heavy for the server, light for clients")
    parser.add_argument("--max-queued-frames", type=int, default=16_000)
    arguments = parser.parse_args()
    flags = ["--load-format", "dummy", "--model", arguments.config, "--device", arguments.device]
    flags += ["--max-queued-frames", str(arguments.max_queued_frames), "--log-level", "error"]
    with running_server(*flags) as (process, client):
        info = client.info()
        waiting = max(2, int(_PEAK_QUEUE_SHARE * arguments.max_queued_frames / arguments.frames))
        if waiting >= info.limits.max_concurrent_calls:
            parser.error("--max-queued-frames is so large that the limit on calls would be what is measured")
        with Generator(client.address, decode_request(info, arguments.frames)) as generator:
            generator.closed_loop(waiting, arguments.peak_seconds / 2)  # warms up
            before = generator.closed_loop(waiting, arguments.peak_seconds)
            rate = TIMES_CAPACITY * before.goodput
            memory = [resident_mib(process.pid)]

            def look() -> None:
                memory.append(resident_mib(process.pid))

            load = generator.open_loop(rate, arguments.seconds, look)
            time.sleep(1)  # its last answers are on their way
            look()
            after = generator.closed_loop(waiting, arguments.peak_seconds)
    report(arguments, info, before, load, after, memory)


def report(
    arguments: argparse.Namespace, info: ServerInfo, before: Load, load: Load, after: Load, memory: list[float]
) -> None:
    """Print the figures, and exit with 1 if they break a promise."""
    frames, limit = arguments.frames, arguments.max_queued_frames
    peak = (before.goodput + after.goodput) / 2
    p50, p99 = np.percentile(load.latencies, (50, 99)) if load.latencies else (np.inf, np.inf)
    batch = max(info.limits.max_batch_frames, frames)
    # As long as a full queue and one batch take: at the mean speed, and at the speed that the machine had at the time,
    # whose 99th percentile is what the 99th percentile of the latencies is held against.
    full = -(-(limit + batch) // frames)
    mean_bound = full / load.goodput if load.in_time else 0.0
    drained = [end - start for start, end in zip(load.ends, load.ends[full:], strict=False)]
    bound = float(np.percentile(drained, 99)) if len(drained) >= 100 else mean_bound
    middle = memory[len(memory) // 2]
    offered = load.sent / load.seconds
    print(f"calls of {frames} frames; queue limit {limit} frames, batch {batch} frames; {info.device.name}")
    print(f"peak          {before.goodput:8.1f} a second before, {after.goodput:.1f} after")
    print(f"offered       {offered:8.1f} a second, {offered / peak:.2f} times the peak, for {load.seconds:.0f} s")
    print(f"goodput       {load.goodput:8.1f} a second, {load.goodput / peak:.1%} of the peak")
    print(f"accepted      p50 {p50:.3f} s, p99 {p99:.3f} s; a full queue {bound:.3f} s (mean {mean_bound:.3f} s)")
    print(f"resident MiB  {memory[0]:.0f} at the start, {middle:.0f} halfway, {memory[-1]:.0f} at the end")
    print(f"outcomes      {dict(load.outcomes)}")
    figures = {"peak": peak, "offered": offered, "goodput": load.goodput, "p50": p50, "p99": p99}
    figures |= {"bound": bound, "mean_bound": mean_bound}
    print(json.dumps(figures | {"memory": [memory[0], middle, memory[-1]], "outcomes": load.outcomes}))
    broken = []
    if offered < 0.9 * TIMES_CAPACITY * before.goodput:
        sys.exit("the generator cannot send so many calls: give it heavier ones, with --frames")
    if load.goodput < LEAST_GOODPUT * peak:
        broken.append(f"goodput is {load.goodput / peak:.1%} of the peak, less than {LEAST_GOODPUT:.0%}")
    if p99 > bound:
        broken.append(f"the 99th percentile is {p99:.3f} s, more than {bound:.3f} s")
    if memory[-1] > MEMORY_GROWTH * memory[0] + MEMORY_MIB:
        broken.append(f"memory grew from {memory[0]:.0f} to {memory[-1]:.0f} MiB")
    if others := set(load.outcomes) - {"OK", "QUEUE_FULL"}:
        broken.append(f"calls ended with {', '.join(sorted(others))}")
    if load.outcomes.total() != load.sent:
        broken.append(f"{load.sent - load.outcomes.total()} calls were lost")
    if broken:
        sys.exit("; ".join(broken))
    print("all promises hold")


def decode_request(info: ServerInfo, frames: int) -> bytes:
    """Codes to decode to int16."""
    rng = np.random.default_rng(0)
    codes = np.stack([rng.integers(0, size, frames) for size in info.model.codebook_sizes]).astype("<u2")
    item = pb.DecodeItem(codes=pb.Codes(num_quantizers=len(codes), frames=frames, data=codes.tobytes()))
    return pb.DecodeRequest(items=[item], format=pb.SAMPLE_FORMAT_INT16).SerializeToString()


def resident_mib(pid: int) -> float:
    """Resident memory of a process in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


# ---------------------------------------------------------------- the generator


class Generator:
    """Clients in a process of their own.

    Args:
        address: of the server.
        request: what they all send.
    """

    def __init__(self, address: str, request: bytes) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other_end = spawn.Pipe()
        self._process = spawn.Process(target=generate, args=(address, request, other_end), daemon=True)

    def __enter__(self) -> Generator:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(10)
        self._process.kill()

    def closed_loop(self, waiting: int, seconds: float) -> Load:
        """So many clients, each of which asks again when it is answered."""
        self._pipe.send(("closed", waiting, seconds))
        return self._answer(None)

    def open_loop(self, rate: float, seconds: float, look: Callable[[], None]) -> Load:
        """Calls at random, `rate` a second; `look` is called every second meanwhile."""
        self._pipe.send(("open", rate, seconds))
        return self._answer(look)

    def _answer(self, look: Callable[[], None] | None) -> Load:
        while not self._pipe.poll(1.0):
            if not self._process.is_alive():
                sys.exit("the generator ended; its error is above")
            if look is not None:
                look()
        return Load(**self._pipe.recv())


def generate(address: str, request: bytes, pipe: Connection) -> None:
    """In the generator's process: phase after phase."""
    asyncio.run(phases(address, request, pipe))


async def phases(address: str, request: bytes, pipe: Connection) -> None:
    """Do what the pipe says until it says None."""
    limit = [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=limit) as channel:
        decode = channel.unary_unary(_METHOD, request_serializer=bytes, response_deserializer=bytes)
        while (phase := await asyncio.to_thread(pipe.recv)) is not None:
            kind, how_many, seconds = phase
            load = Load(seconds=seconds)
            run = closed_loop if kind == "closed" else open_loop
            await run(decode, request, how_many, load)
            pipe.send(vars(load))


async def closed_loop(decode: Any, request: bytes, waiting: int, load: Load) -> None:
    """So many clients, each one call at a time."""
    end = time.monotonic() + load.seconds

    async def client() -> None:
        while time.monotonic() < end:
            await call(decode, request, load, end)

    await asyncio.gather(*(client() for _ in range(waiting)))


async def open_loop(decode: Any, request: bytes, rate: float, load: Load) -> None:
    """Calls when they are due, whatever became of those before."""
    rng = random.Random(0)
    due = time.monotonic()
    end = due + load.seconds
    calls = set()
    while due < end:
        if (early := due - time.monotonic()) > 0:
            await asyncio.sleep(early)
        elif load.sent % 16 == 0:
            # Behind its time, it sends what is due; but what comes must be looked at, too.
            await asyncio.sleep(0)
            if time.monotonic() > end:
                break
        task = asyncio.ensure_future(call(decode, request, load, end))
        calls.add(task)
        task.add_done_callback(calls.discard)
        due += rng.expovariate(rate)
    await asyncio.gather(*calls)


async def call(decode: Any, request: bytes, load: Load, end: float) -> None:
    """Make one call, and put down how it ended."""
    load.sent += 1
    began = time.monotonic()
    try:
        answer = await decode(request, timeout=_TIMEOUT)
    except grpc.aio.AioRpcError as error:
        trailing = dict(error.trailing_metadata() or ())
        detail = pb.ErrorDetail.FromString(trailing.get("mimo-error-detail-bin", b""))
        full = detail.reason == pb.ErrorDetail.REASON_QUEUE_FULL
        load.outcomes["QUEUE_FULL" if full else error.code().name] += 1
        return
    ended = time.monotonic()
    load.outcomes["OK" if answer else "an empty answer"] += 1
    load.latencies.append(ended - began)
    load.ends.append(ended)
    load.in_time += ended <= end


if __name__ == "__main__":
    main()

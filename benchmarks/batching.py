"""Throughput of 32 clients at a time against the same calls one after another, on one server, by turns.

    python benchmarks/batching.py
    python benchmarks/batching.py --config published --device cuda:0

Each round makes the same calls both ways, so that a machine whose speed drifts does so for both; the ratio is the
median of the rounds' ratios. Both ways are timed from the same process, and what is timed is what clients see.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from server_process import running_server

from mimo_tokenizer_client import AsyncTokenizerClient, ServerInfo

_NO_TIMEOUT = 3600.0

# A call, and the seconds of sound that it is about.
Call = tuple[Callable[[AsyncTokenizerClient], Awaitable[Any]], float]


@dataclass(frozen=True)
class Result:
    """One mix.

    Attributes:
        mix: its name.
        calls: in each round, each way.
        alone: calls a second, one after another; the median of the rounds.
        together: calls a second, from all clients at a time; likewise.
        audio_together: seconds of sound a second, from all clients at a time; likewise.
        ratio: the median of together / alone of each round.
        least: of those ratios.
        most: likewise.
    """

    mix: str
    calls: int
    alone: float
    together: float
    audio_together: float
    ratio: float
    least: float
    most: float


class Calls:
    """Makes the calls.

    Args:
        info: the server's facts.
    """

    def __init__(self, info: ServerInfo) -> None:
        self._info = info
        self._rng = np.random.default_rng(0)
        self._frames_a_second = info.model.sample_rate / info.model.samples_per_frame

    def decode(self, seconds: float) -> Call:
        """Codes to a waveform."""
        codes = self._codes(seconds)
        return lambda client: client.decode(codes), seconds

    def decode_vq(self, seconds: float) -> Call:
        """Codes to the quantizer's output."""
        codes = self._codes(seconds)
        return lambda client: client.decode_vq(codes), seconds

    def encode(self, seconds: float) -> Call:
        """A waveform to codes."""
        rate = self._info.model.sample_rate
        sound = self._rng.normal(0, 0.1, int(seconds * rate)).astype(np.float32)
        return lambda client: client.encode(sound, rate), seconds

    def mixed(self) -> Call:
        """Any of the others."""
        # As often as in an engine: sound comes out in many small pieces, and goes in a few seconds at a time.
        kind, seconds = random.Random(int(self._rng.integers(2**32))).choice(
            [
                *[(self.decode, s) for s in (0.04, 0.16, 1.0, 1.0, 4.0, 11.2)],
                *[(self.encode, s) for s in (0.5, 2.0, 5.0)],
                (self.decode_vq, 1.0),
            ]
        )
        return kind(seconds)

    def _codes(self, seconds: float) -> Any:
        frames = max(1, round(seconds * self._frames_a_second))
        return np.stack([self._rng.integers(0, size, frames) for size in self._info.model.codebook_sizes]).astype(
            np.uint16
        )


MIXES: dict[str, tuple[int, Callable[[Calls], Call]]] = {
    "decode 40 ms": (256, lambda calls: calls.decode(0.04)),
    "decode 1 s": (128, lambda calls: calls.decode(1.0)),
    "decode 11.2 s": (64, lambda calls: calls.decode(11.2)),
    "encode 2 s": (128, lambda calls: calls.encode(2.0)),
    "mixed": (128, Calls.mixed),
}


def main() -> None:
    """Measure, and print a table and JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="tiny", help="a built-in config, or a JSON file")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, help="in each round, each way; without it, as many as the mix says")
    parser.add_argument("--mix", choices=MIXES, action="append", help="one or more; without it, all")
    arguments = parser.parse_args()
    flags = ("--load-format", "dummy", "--model", arguments.config, "--device", arguments.device)
    with running_server(*flags, "--log-level", "error") as (_, client):
        info = client.info()
        print(f"{arguments.config} on {info.device.name} ({info.device.device}, {info.device.dtype})", file=sys.stderr)
        results = []
        print(f"{'calls a second':16}{'alone':>10}{f'{arguments.clients} clients':>14}{'ratio':>8}  (least..most)")
        for mix in arguments.mix or MIXES:
            count = arguments.calls or MIXES[mix][0]
            result = asyncio.run(measure(client.address, info, mix, count, arguments.clients, arguments.rounds))
            results.append(result)
            print(
                f"{mix:16}{result.alone:10.1f}{result.together:14.1f}{result.ratio:8.2f}"
                f"  ({result.least:.2f}..{result.most:.2f}), {result.audio_together:.0f} s of sound a second",
                flush=True,
            )
    print(json.dumps([asdict(result) for result in results]))


async def measure(address: str, info: ServerInfo, mix: str, count: int, clients: int, rounds: int) -> Result:
    """Make `count` calls of a mix both ways, by turns."""
    make, calls = MIXES[mix][1], Calls(info)
    made = [make(calls) for _ in range(count)]
    audio = sum(seconds for _, seconds in made)
    pool = [AsyncTokenizerClient(address, timeout=_NO_TIMEOUT) for _ in range(clients)]
    try:
        await asyncio.gather(*(client.info() for client in pool))
        pairs = []
        for number in range(rounds + 1):
            ways = {"alone": pool[:1], "together": pool}
            # By turns also within a round: neither is always the first.
            order = sorted(ways, reverse=bool(number % 2))
            took = {way: await make_calls([call for call, _ in made], ways[way]) for way in order}
            pairs.append((took["alone"], took["together"]))
    finally:
        for client in pool:
            await client.close()
    pairs = pairs[1:]  # the first one warms up
    ratios = [alone / together for alone, together in pairs]
    together = statistics.median(together for _, together in pairs)
    return Result(
        mix=mix,
        calls=count,
        alone=count / statistics.median(alone for alone, _ in pairs),
        together=count / together,
        audio_together=audio / together,
        ratio=statistics.median(ratios),
        least=min(ratios),
        most=max(ratios),
    )


async def make_calls(calls: list[Callable[[AsyncTokenizerClient], Awaitable[Any]]], pool: list[Any]) -> float:
    """Seconds in which the clients of `pool` make all calls, each one at a time."""
    waiting = iter(calls)

    async def work(client: AsyncTokenizerClient) -> None:
        for call in waiting:
            await call(client)

    started = time.perf_counter()
    await asyncio.gather(*map(work, pool))
    return time.perf_counter() - started


if __name__ == "__main__":
    main()

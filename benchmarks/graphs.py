"""CUDA graphs beside the same work without them, by turns, in one process.

    python benchmarks/graphs.py --device cuda:0

With random weights. Printed are the medians of what a batch takes, from arrays on the host to arrays on the host, and
how many of its answers have the same bits either way.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from exact_batches import decode_work, encode_work, run

from mimo_tokenizer_server import memory
from mimo_tokenizer_server.config import ServeConfig
from mimo_tokenizer_server.engine import Engine
from mimo_tokenizer_server.work import Work

# Method, items, and code frames of each.
SHAPES = [
    *(("decode", count, frames) for count, frames in [(1, 1), (1, 8), (1, 25), (32, 1), (8, 25), (1, 280), (32, 15)]),
    *(("encode", count, frames) for count, frames in [(1, 12), (1, 100), (8, 25), (1, 250), (1, 500)]),
]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--model", default="published")
    parser.add_argument("--repeats", type=int, default=41)
    arguments = parser.parse_args()

    def engine(graphs: int, model: str = arguments.model) -> Engine:
        config = ServeConfig(model=model, load_format="dummy", device=arguments.device, max_graph_frames=graphs)
        return Engine(config)

    device = torch.device(arguments.device)
    held = engine(ServeConfig.max_graph_frames, "tiny")  # what libraries take for themselves, once
    before, started = memory.used(device), time.monotonic()
    plain = engine(0)
    between, loaded = memory.used(device), time.monotonic()
    graphed = engine(ServeConfig.max_graph_frames)
    after, ended = memory.used(device), time.monotonic()
    print(
        f"start without graphs {loaded - started:.1f} s, with {ended - loaded:.1f} s; they take"
        f" {memory.mib(after - between - (between - before))}"
    )
    del held
    print(f"{arguments.model}, {plain.info.device} ({plain.info.device_name}), {plain.info.dtype}")
    print(f"{'':20}{'without':>10}{'with':>10}{'ratio':>8}   same bits")
    rng = np.random.default_rng(0)
    for kind, count, frames in SHAPES:
        make = decode_work if kind == "decode" else encode_work
        works = [make(plain, frames, rng) for _ in range(count)]
        pairs = zip(run(plain, works), run(graphed, works), strict=True)
        same = sum(np.array_equal(one, other) for one, other in pairs)
        without, with_graphs = by_turns(plain, graphed, works, arguments.repeats)
        print(
            f"{f'{kind} {count} x {frames}':20}{1e3 * without:7.2f} ms{1e3 * with_graphs:7.2f} ms"
            f"{with_graphs / without:8.2f}   {same} of {count}"
        )


def by_turns(plain: Engine, graphed: Engine, works: Sequence[Work], repeats: int) -> tuple[float, float]:
    """Median seconds of each."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for engine, taken in zip((plain, graphed), seconds, strict=True):
            started = time.perf_counter()
            run(engine, works)
            taken.append(time.perf_counter() - started)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


if __name__ == "__main__":
    main()

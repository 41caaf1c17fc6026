"""What a batch changes: each item beside the same item alone, and what a batch is faster.

    python benchmarks/exact_batches.py --device cuda:0
    python benchmarks/exact_batches.py --device cpu --model tiny

In-process, with random weights. Printed are, for batches of mixed lengths: the distance to float32 of the items alone
and in the batch, how many codes differ between alone and batch, and the same under --batch-invariant, where none may;
then the time of batches beside that of their items one by one, without and with --batch-invariant, by turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from mimo_tokenizer_server.config import ServeConfig
from mimo_tokenizer_server.engine import Engine
from mimo_tokenizer_server.errors import RequestError
from mimo_tokenizer_server.model.frontend import SegmentCutter
from mimo_tokenizer_server.work import DecodeWork, EncodeWork, Work

RATE = 24_000


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--model", default="published")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--items", type=int, default=24, help="of the batches whose answers are compared")
    parser.add_argument("--batches", type=int, default=4, help="that are compared")
    parser.add_argument("--repeats", type=int, default=11)
    arguments = parser.parse_args()

    def engine(dtype: str, invariant: bool) -> Engine:
        return Engine(
            ServeConfig(
                model=arguments.model,
                load_format="dummy",
                device=arguments.device,
                dtype=dtype,
                batch_invariant=invariant,
            )
        )

    plain, invariant = engine(arguments.dtype, False), engine(arguments.dtype, True)
    print(f"{arguments.model}, {plain.info.device} ({plain.info.device_name}), {plain.info.dtype}")
    rng = np.random.default_rng(0)
    frames = [[int(n) for n in np.exp(rng.uniform(0, np.log(400), arguments.items))] for _ in range(arguments.batches)]
    decodes = [[decode_work(plain, count, rng) for count in batch] for batch in frames]
    encodes = [[encode_work(plain, max(1, count), rng) for count in batch] for batch in frames]
    full = engine("float32", False) if plain.info.dtype != "float32" else None
    exact_decodes = [[run(full or plain, [work])[0] for work in batch] for batch in decodes]
    exact_encodes = [[run(full or plain, [work])[0] for work in batch] for batch in encodes]
    del full
    for name, one in (("as by default", plain), ("--batch-invariant", invariant)):
        compare(name, one, decodes, exact_decodes, encodes, exact_encodes)
    print(f"\n{'batch':28}{'one by one':>12}{'batch':>10}{'ratio':>8}{'invariant':>12}{'cost':>8}{'seconds/s':>11}")
    shapes = [("decode", 1, 1), ("decode", 32, 1), ("decode", 128, 1), ("decode", 1, 280), ("decode", 8, 280)]
    shapes += [("decode", 32, 280), ("encode", 1, 25), ("encode", 32, 25), ("encode", 1, 250), ("encode", 8, 250)]
    for kind, count, length in shapes:
        make = decode_work if kind == "decode" else encode_work
        works = [make(plain, length, rng) for _ in range(count)]
        speed(f"{kind} {count} x {length}", plain, invariant, works, count * length / 25, arguments.repeats)


def decode_work(engine: Engine, frames: int, rng: np.random.Generator) -> Work:
    """Random codes."""
    sizes = engine.info.config.codebook_sizes
    return DecodeWork(np.stack([rng.integers(0, size, frames) for size in sizes]).astype(np.uint16), 0, int16=False)


def encode_work(engine: Engine, frames: int, rng: np.random.Generator) -> Work:
    """Noise and tones of so many code frames."""
    time_axis = np.arange(max(engine.info.config.min_samples, frames * 960 - 500)) / RATE
    tones = sum(np.sin(2 * np.pi * rng.uniform(80, 4000) * time_axis) for _ in range(4))
    sound = (0.1 * tones + rng.normal(0, 0.05, len(time_axis))).astype(np.float32)
    cutter = SegmentCutter(RATE, engine.info.config)
    (segment,) = [*cutter.push(sound[:, None]), *cutter.finish()]
    return EncodeWork(segment, engine.info.config.num_quantizers)


def run(engine: Engine, batch: Sequence[Work]) -> list[np.ndarray]:
    """The answers, none of them an error."""
    answers = []
    for answer in engine.run(batch):
        if isinstance(answer, RequestError):
            raise answer
        answers.append(answer)
    return answers


def compare(
    name: str,
    engine: Engine,
    decodes: list[list[Work]],
    exact_decodes: list[list[np.ndarray]],
    encodes: list[list[Work]],
    exact_encodes: list[list[np.ndarray]],
) -> None:
    """Print what the batch has changed."""
    worse: dict[str, list[float]] = {"under a second": [], "a second and more": []}
    same = 0
    alone_all: list[float] = []
    batch_all: list[float] = []
    for works, exact in zip(decodes, exact_decodes, strict=True):
        alone = [run(engine, [work])[0] for work in works]
        together = run(engine, works)
        for truth, single, batched in zip(exact, alone, together, strict=True):
            same += np.array_equal(single, batched)
            alone_all.append(snr(truth, single))
            batch_all.append(snr(truth, batched))
            worse["under a second" if len(truth) < RATE else "a second and more"].append(alone_all[-1] - batch_all[-1])
    count = len(alone_all)
    print(f"\n{name}: {count} items of 1 to 400 frames, in {len(decodes)} batches")
    print(f"  decode: the same bits {same} of {count}; SNR to float32 alone {statistics.median(alone_all):.1f} dB,")
    print(f"    in the batch {statistics.median(batch_all):.1f} dB; worse than alone by")
    for length, values in worse.items():
        ordered = sorted(values)
        print(
            f"      {length}: median {statistics.median(ordered):+.2f} dB, 95 % up to"
            f" {ordered[int(0.95 * (len(ordered) - 1))]:+.2f}, most {ordered[-1]:+.2f}, least {ordered[0]:+.2f}"
        )
    frames = changed = changed_codes = codes = alone_off = batch_off = same = 0
    first_rows: list[float] = []
    for works, exact in zip(encodes, exact_encodes, strict=True):
        alone = [run(engine, [work])[0] for work in works]
        together = run(engine, works)
        for truth, single, batched in zip(exact, alone, together, strict=True):
            same += np.array_equal(single, batched)
            different = single != batched
            frames += single.shape[1]
            codes += single.size
            changed += int(different.any(axis=0).sum())
            changed_codes += int(different.sum())
            first_rows.append(float(different[0].sum()))
            alone_off += int((single != truth).sum())
            batch_off += int((batched != truth).sum())
    print(
        f"  encode: the same codes {same} of {count}; codes changed {changed_codes} of {codes}"
        f" ({changed_codes / codes:.3%}), frames with a change {changed} of {frames} ({changed / frames:.2%}),"
    )
    print(
        f"    of the first codebook {sum(first_rows) / frames:.3%}; other than in float32: alone"
        f" {alone_off / codes:.2%}, in the batch {batch_off / codes:.2%}"
    )


def speed(name: str, plain: Engine, invariant: Engine, works: list[Work], seconds: float, repeats: int) -> None:
    """Print medians of the three ways to compute `works`."""
    ways: dict[str, Callable[[], object]] = {
        "single": lambda: [run(plain, [work]) for work in works],
        "batch": lambda: run(plain, works),
        "invariant": lambda: run(invariant, works),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats + 1):
        for way, call in ways.items():
            started = time.perf_counter()
            call()
            if repeat:
                times[way].append(time.perf_counter() - started)
    single, batch, tiled = (statistics.median(values) for values in times.values())
    print(
        f"{name:28}{single * 1e3:10.1f}ms{batch * 1e3:8.1f}ms{single / batch:8.2f}{tiled * 1e3:10.1f}ms"
        f"{tiled / batch:8.2f}{seconds / batch:11.0f}"
    )


def snr(reference: np.ndarray, other: np.ndarray) -> float:
    """Signal to noise in dB, at most 200."""
    error = float(np.square(reference.astype(np.float64) - other).sum())
    signal = float(np.square(reference.astype(np.float64)).sum())
    return min(200.0, 10 * np.log10(signal / error)) if error else 200.0


if __name__ == "__main__":
    main()

"""A step of the engine's real code2wav and a prompt's encoding, with the tokenizer in the process and with the service.

    PYTHONPATH=.cache/engine/0.30.0 .cache/engine/bin/python benchmarks/engine_step.py

(after `make test-engine`). Published size, random weights, float32, CPU; both get the same slots by turns, in one
process. What is timed of the service is what the stage sees: extraction of the codes, messages, sockets and all.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from engine_memory import (
    TokenizerClient,
    engine_harness,
    server_python,
    service_environment,
    write_language_model,
    write_tokenizer,
)

STEPS = {
    "1 x 280 frames": [280],
    "4 x 280 frames": [280] * 4,
    "8 x 40 frames": [40] * 8,
    "280 beside 7 x 8": [280, *[8] * 7],
}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each of the two")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": str(arguments.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    engine_harness.prepare_process()
    engine_harness.answer_for_missing_driver()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        language_model = write_language_model(folder / "language-model")
        write_tokenizer(folder / "tokenizer")
        address = f"unix://{folder}/s"
        serve = ["-m", "mimo_tokenizer_server", "serve", "--model", str(folder / "tokenizer"), "--device", "cpu"]
        environment = service_environment() | {"OMP_NUM_THREADS": str(arguments.threads)}
        server = subprocess.Popen(
            [server_python(), *serve, "--address", address, "--log-level", "warning"], env=environment
        )
        try:
            with TokenizerClient(address) as client:
                client.wait_until_ready(600)
            measure(language_model, folder / "tokenizer", address, arguments.repeats)
        finally:
            server.terminate()
            server.wait()


def measure(language_model: Path, tokenizer: Path, address: str, repeats: int) -> None:
    """Build both stages and parsers in this process, and have them work by turns."""
    parts = []
    for settings in (engine_harness.in_process(tokenizer), engine_harness.through(address)):
        for name in [name for name in os.environ if name.startswith(engine_harness.PREFIX)]:
            del os.environ[name]
        os.environ |= settings
        parts.append((engine_harness.build_code2wav(language_model), engine_harness.build_parser()))
    print(f"{'seconds, median':24} {'in process':>12} {'service':>12} {'service / in process':>22}")
    for name, lengths in STEPS.items():
        slots = [engine_harness.flat_codes(engine_harness.random_codes(n, seed)) for seed, n in enumerate(lengths)]
        compare(name, [lambda s=stage, x=slots: engine_harness.decode_step(s, x) for stage, _ in parts], repeats)
    for seconds in (4, 20):
        sound = (0.1 * np.random.default_rng(0).standard_normal(seconds * 24_000)).astype(np.float32)
        calls = [lambda p=parser, x=sound: engine_harness.parse_audio(p, (x, 24_000)) for _, parser in parts]
        compare(f"encode {seconds} s", calls, repeats)


def compare(name: str, calls: list[Callable[[], Any]], repeats: int) -> None:
    """Time both by turns, and print their medians and the median ratio."""
    pairs = [[timed(call) for call in calls] for _ in range(repeats + 1)][1:]
    here, there = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    print(f"{name:24} {here:12.3f} {there:12.3f} {ratio:22.2f}")


def timed(call: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    start = time.monotonic()
    call()
    return time.monotonic() - start


if __name__ == "__main__":
    main()

"""The server at the published size with random weights, beside the in-process reference: start, memory, 10 s of sound.

    python benchmarks/published.py --device cpu
    python benchmarks/published.py --device cuda:0 --repeats 20

Both get the same sound and the same codes, by turns, so that a machine whose speed drifts does so for both. What is
timed of the server is what a client sees: messages, sockets and all. The reference is the wheel that `make reference`
unpacks, eager, in the dtype that its worker uses on the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from server_process import running_server

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "server/mimo_tokenizer_server/configs/published.json"
RATE = 24_000
OPERATIONS = ("encode", "decode", "decode_vq")


def main() -> None:
    """Measure, and print a table and JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=10.0, help="of sound in each call")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--reference-worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.reference_worker:
        work_as_reference(arguments.device, arguments.seconds)
    else:
        report(measure(arguments.device, arguments.seconds, arguments.repeats))


def measure(device: str, seconds: float, repeats: int) -> dict[str, dict[str, float]]:
    """Start both, and have them work by turns."""
    started = time.monotonic()
    with running_server("--load-format", "dummy", "--device", device, "--log-level", "warning") as (process, client):
        server = {"start_seconds": time.monotonic() - started}
        server |= memory(process.pid, "idle")
        info = client.info()
        sound, codes = inputs(info.model.codebook_sizes, seconds)
        calls: dict[str, Callable[[], Any]] = {
            "encode": lambda: client.encode(sound, RATE),
            "decode": lambda: client.decode(codes),
            "decode_vq": lambda: client.decode_vq(codes),
        }
        command = [sys.executable, __file__, "--reference-worker", "--device", device, "--seconds", str(seconds)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as worker:
            reference = ask(worker, "ready")
            for operation, call in calls.items():
                pairs = [(timed(call), ask(worker, operation)["seconds"]) for _ in range(repeats + 1)][1:]
                server[f"{operation}_seconds"] = statistics.median(ours for ours, _ in pairs)
                reference[f"{operation}_seconds"] = statistics.median(theirs for _, theirs in pairs)
            server |= memory(process.pid, "after")
            server["device_memory_gib"] = client.info().device.memory_allocated / 2**30
            reference |= memory(worker.pid, "after") | ask(worker, "memory")
            assert worker.stdin is not None
            worker.stdin.close()
    return {"server": server, "reference": reference}


def report(results: dict[str, dict[str, float]]) -> None:
    """Print the results side by side."""
    server, reference = results["server"], results["reference"]
    print(f"{'':24}{'server':>12}{'reference':>12}{'ratio':>12}")
    for name, ours in server.items():
        theirs = reference.get(name)
        rest = f"{theirs:12.3f}{ours / theirs:12.2f}" if theirs else f"{'-':>12}"
        print(f"{name:24}{ours:12.3f}{rest}")
    print(json.dumps(results))


def work_as_reference(device_name: str, seconds: float) -> None:
    """Build the reference, then do what each line of standard input says and print how long it took."""
    import torch

    sys.path.insert(0, str(ROOT / "tests/parity"))
    import reference

    started = time.monotonic()
    config = {key: value for key, value in json.loads(CONFIG.read_text()).items() if key != "model_type"}
    device = torch.device(device_name)
    with device:
        tokenizer = reference.build(config, seed=0)
    tokenizer.to(torch.float32 if device.type == "cpu" else torch.bfloat16)
    tokenizer.encoder.quantizer.float()
    start_seconds = time.monotonic() - started
    sound, codes = inputs(tuple(config["codebook_size"]), seconds)
    samples, to_mel = torch.from_numpy(sound), reference.mel_front_end(config, device)
    code_tensor = torch.from_numpy(codes.astype(np.int64)).to(device)
    calls: dict[str, Callable[[], Any]] = {
        "encode": lambda: reference.encode_segment(tokenizer, to_mel(samples)).cpu(),
        "decode": lambda: tokenizer.decode(code_tensor).cpu(),
        "decode_vq": lambda: tokenizer.encoder.decode_vq(code_tensor).cpu(),
    }
    with torch.inference_mode():
        for line in sys.stdin:
            if line.strip() == "ready":
                answer = {"start_seconds": start_seconds}
            elif line.strip() == "memory":
                held = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
                answer = {"device_memory_gib": held / 2**30}
            else:
                answer = {"seconds": timed(calls[line.strip()])}
            print(json.dumps(answer), flush=True)


def ask(worker: subprocess.Popen[str], what: str) -> dict[str, float]:
    """Have the reference do something, and return what it says."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{what}\n")
    worker.stdin.flush()
    line = worker.stdout.readline()
    if not line:
        sys.exit("the reference ended; its error is above")
    answer: dict[str, float] = json.loads(line)
    return answer


def inputs(sizes: tuple[int, ...], seconds: float) -> tuple[Any, Any]:
    """Noise, and random codes of as many seconds at 25 frames a second."""
    rng = np.random.default_rng(0)
    sound = rng.normal(0, 0.1, int(seconds * RATE)).astype(np.float32)
    frames = int(seconds * 25)
    return sound, np.stack([rng.integers(0, size, frames) for size in sizes]).astype(np.uint16)


def timed(call: Callable[[], Any]) -> float:
    """Seconds that `call` takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def memory(pid: int, when: str) -> dict[str, float]:
    """Resident memory of a process in GiB, now and at its highest."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = {key: int(rest.split()[0]) / 2**20 for key, rest in (line.split(":", 1) for line in lines) if "kB" in rest}
    return {f"resident_{when}_gib": values["VmRSS"], f"resident_peak_{when}_gib": values["VmHWM"]}


if __name__ == "__main__":
    main()

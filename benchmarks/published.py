"""The server at the published size with random weights, beside the in-process reference: start, memory, 10 s of sound.

    python benchmarks/published.py --device cpu
    python benchmarks/published.py --device cuda:0 --no-reference

Both get the same sound and the same codes, one after the other in one run. What is timed of the server is what a
client sees: messages, sockets and all. The reference is the wheel that `make reference` unpacks; it is run eagerly, in
the dtype that its worker uses on the device.
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


def main() -> None:
    """Measure, and print a table and JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=10.0, help="of sound in each call")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument("--reference-child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.reference_child:
        print(json.dumps(measure_reference(arguments.device, arguments.seconds, arguments.repeats)))
        return
    results = {"server": measure_server(arguments.device, arguments.seconds, arguments.repeats)}
    if not arguments.no_reference:
        command = [sys.executable, __file__, "--reference-child", "--device", arguments.device]
        command += ["--seconds", str(arguments.seconds), "--repeats", str(arguments.repeats)]
        child = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        results["reference"] = json.loads(child.stdout.splitlines()[-1])
    names = list(results["server"])
    print(f"{'':28}" + "".join(f"{column:>12}" for column in results) + ("       ratio" if len(results) > 1 else ""))
    for name in names:
        row = [values.get(name) for values in results.values()]
        cells = "".join(f"{'-' if value is None else f'{value:.3f}':>12}" for value in row)
        ratio = f"{row[0] / row[1]:12.2f}" if len(row) > 1 and row[0] and row[1] else ""
        print(f"{name:28}{cells}{ratio}")
    print(json.dumps(results))


def measure_server(device: str, seconds: float, repeats: int) -> dict[str, float]:
    """Start a server, and time calls to it."""
    started = time.monotonic()
    flags = ("--load-format", "dummy", "--device", device, "--log-level", "warning")
    with running_server(*flags) as (process, client):
        result = {"start_seconds": time.monotonic() - started}
        result |= memory(process.pid, "idle")
        info = client.info()
        sound, codes = inputs(info.model.codebook_sizes, seconds, info.model.samples_per_frame)
        result["encode_seconds"] = median(lambda: client.encode(sound, RATE), repeats)
        result["decode_seconds"] = median(lambda: client.decode(codes), repeats)
        result["decode_vq_seconds"] = median(lambda: client.decode_vq(codes), repeats)
        result |= memory(process.pid, "after")
        result["device_memory_gib"] = client.info().device.memory_allocated / 2**30
        return result


def measure_reference(device_name: str, seconds: float, repeats: int) -> dict[str, float]:
    """Time the reference, in this process."""
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
    result = {"start_seconds": time.monotonic() - started}
    sizes = tuple(config["codebook_size"])
    sound, codes = inputs(sizes, seconds, 960)
    mel = reference.log_mel(config, torch.from_numpy(sound)).to(device)
    code_tensor = torch.from_numpy(codes.astype(np.int64)).to(device)

    def encode() -> Any:
        return reference.encode_segment(tokenizer, mel).cpu()

    def decode() -> Any:
        with torch.inference_mode():
            return tokenizer.decode(code_tensor).cpu()

    def decode_vq() -> Any:
        return tokenizer.encoder.decode_vq(code_tensor).cpu()

    result["encode_seconds"] = median(encode, repeats)
    result["decode_seconds"] = median(decode, repeats)
    result["decode_vq_seconds"] = median(decode_vq, repeats)
    result |= memory("self", "after")
    if device.type == "cuda":
        result["device_memory_gib"] = torch.cuda.memory_reserved(device) / 2**30
    return result


def inputs(sizes: tuple[int, ...], seconds: float, samples_per_frame: int) -> tuple[Any, Any]:
    """Noise, and random codes of as many seconds."""
    rng = np.random.default_rng(0)
    sound = rng.normal(0, 0.1, int(seconds * RATE)).astype(np.float32)
    frames = int(seconds * RATE / samples_per_frame)
    return sound, np.stack([rng.integers(0, size, frames) for size in sizes]).astype(np.uint16)


def median(call: Callable[[], Any], repeats: int) -> float:
    """Median seconds of `call`, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def memory(pid: int | str, when: str) -> dict[str, float]:
    """Resident memory of a process in GiB, now and at its highest."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = {key: int(rest.split()[0]) / 2**20 for key, rest in (line.split(":", 1) for line in lines) if "kB" in rest}
    return {f"resident_{when}_gib": values["VmRSS"], f"resident_peak_{when}_gib": values["VmHWM"]}


if __name__ == "__main__":
    main()

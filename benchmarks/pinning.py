"""Show that a server pinned to one GPU leaves the others alone, by what the driver says is in use on them.

    python benchmarks/pinning.py --device cuda:1

Runs a server at the published size, encodes and decodes, and compares what is in use on every other GPU with what a
process leaves there that initializes the driver and does nothing else (the driver attaches each GPU it sees: 4 MiB on
an H200; a context takes hundreds). Exits with 1 if there is a byte more, or a process of the server's is listed there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from server_process import running_server


def main() -> None:
    """Run the check."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda:1")
    device = parser.parse_args().device
    own = int(device.partition(":")[2])
    before = memory_used()
    with driver_initialized():
        attached = memory_used()
    print(f"before:             {before} MiB in use")
    print(f"driver initialized: {attached} MiB in use")
    with running_server("--load-format", "dummy", "--device", device) as (process, client):
        ready = memory_used()
        print(f"server ready:       {ready} MiB in use, GetInfo says {client.info().device.device}")
        sound = np.random.default_rng(0).normal(0, 0.1, 24_000 * 70).astype(np.float32)
        codes = client.encode(np.stack([sound, sound]), 44_100)
        client.decode(codes)
        client.decode_vq(codes)
        worked = memory_used()
        print(f"after its calls:    {worked} MiB in use")
        contexts = query("--query-compute-apps=gpu_bus_id,pid,used_memory")
        buses = query("--query-gpu=pci.bus_id")
        print(f"contexts: {contexts}; GPUs: {buses}; the server is process {process.pid}")
    others = [index for index in range(len(before)) if index != own]
    touched = [index for index in others if max(ready[index], worked[index]) > attached[index]]
    touched += [index for index in others if any(buses[index] in line for line in contexts)]
    if worked[own] <= attached[own]:
        sys.exit(f"the driver does not show the server on its own GPU {own}")
    if touched:
        sys.exit(f"the server uses GPUs {sorted(set(touched))}, which are not its own")
    print(f"the server is on GPU {own} and on no other")


@contextmanager
def driver_initialized() -> Iterator[None]:
    """A process that has called cuInit and nothing else, for as long as the body runs."""
    script = "import ctypes, sys; print(ctypes.CDLL('libcuda.so.1').cuInit(0), flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "0":
            sys.exit("the driver does not initialize")
        yield
        process.communicate()


def memory_used() -> list[int]:
    """MiB in use on each GPU, as the driver tells."""
    return [int(line) for line in query("--query-gpu=memory.used")]


def query(what: str) -> list[str]:
    """Ask nvidia-smi."""
    command = ["nvidia-smi", what, "--format=csv,noheader,nounits"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


if __name__ == "__main__":
    main()

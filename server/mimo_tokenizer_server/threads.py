"""How many threads compute on the CPU. Imports no PyTorch, which reads the environment when it is imported."""

from __future__ import annotations

import math
import os
from collections.abc import MutableMapping
from pathlib import Path

# OpenMP's threads spin while they wait for each other, by default. Where others want the same cores, the event loop for
# one, a step then takes seconds instead of milliseconds; asleep they lose nothing that can be measured.
_WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}

# Of the libraries that PyTorch's kernels call; each would otherwise count the host's cores.
_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def default(root: Path = Path("/")) -> int:
    """Cores that this process may use: those it is allowed to run on, or the container's CPU quota if that is less.

    A part of a core counts as a whole one; two hardware threads of a core, which share its arithmetic, as one.

    Args:
        root: where /proc and /sys are.
    """
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    # Where it is not told, each stands for itself.
    cores = {" ".join(_lines(root / topology.format(cpu))) or str(cpu) for cpu in os.sched_getaffinity(0)}
    return min([len(cores), *(max(1, math.ceil(quota)) for quota in _quotas(root))])


def prepare(threads: int | None, environment: MutableMapping[str, str]) -> int:
    """Have PyTorch, once it is imported, compute with so many threads.

    Args:
        threads: None for OMP_NUM_THREADS of `environment`, or if that is not there `default()`.
        environment: is changed.

    Returns:
        The number of threads.
    """
    told = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if threads is None:
        threads = int(told) if told.isdecimal() and int(told) > 0 else default()
    for name, value in _WAITING.items():
        environment.setdefault(name, value)
    for name in _COUNTS:
        environment[name] = str(threads)
    return threads


def _quotas(root: Path) -> list[float]:
    """Cores that the process's control groups and those above them may use, where that is limited."""
    quotas: list[float] = []
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base = root / "sys/fs/cgroup"
        elif "cpu" in controllers.split(","):
            base = root / "sys/fs/cgroup" / controllers
            base = base if base.is_dir() else root / "sys/fs/cgroup/cpu"
        else:
            continue
        # Seen from within a container its own group is the root, whatever the path says.
        folder = base / path.lstrip("/")
        for group in (folder, *folder.parents):
            quotas += _quota(group)
            if group == base:
                break
    return quotas


def _quota(group: Path) -> list[float]:
    """Cores that one control group may use: of version 2's one file, or of version 1's two; none if it does not say."""
    text = " ".join(_lines(group / "cpu.max")) or " ".join(
        line for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us") for line in _lines(group / name)
    )
    try:
        quota, period = (float(word) for word in text.split())
    except ValueError:  # no such file, or "max"
        return []
    return [quota / period] if quota > 0 and period > 0 else []


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []

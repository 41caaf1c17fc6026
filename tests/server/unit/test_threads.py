"""How many threads compute: what the process is told, what it may run on, and what its container may use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mimo_tokenizer_server import threads

MANY = 64


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(MANY)))


def _machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/", {}, MANY),
        ("0::/", {"cpu.max": "max 100000"}, MANY),
        ("0::/", {"cpu.max": "200000 100000"}, 2),
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "9900000 100000"}, MANY),
        ("0::/", {"cpu.max": "nonsense"}, MANY),
        ("0::/", {"cpu.max": "0 0"}, MANY),
        # The host's path, of which the container sees only its own end.
        ("0::/kubepods/pod1/abc", {"cpu.max": "400000 100000"}, 4),
        # Without a namespace: the tightest of the group and those above it.
        ("0::/a/b", {"a/b/cpu.max": "800000 100000", "a/cpu.max": "300000 100000", "cpu.max": "max 100000"}, 3),
        ("0::/a/b", {"a/b/cpu.max": "200000 100000", "a/cpu.max": "300000 100000"}, 2),
        # Another group's limit is not ours.
        ("0::/a", {"b/cpu.max": "100000 100000"}, MANY),
        # Version 1, alone and beside version 2's empty tree.
        ("4:cpu,cpuacct:/", {"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 3),
        ("1:cpu:/d\n0::/", {"cpu/d/cpu.cfs_quota_us": "250000", "cpu/d/cpu.cfs_period_us": "100000"}, 3),
        ("1:cpu:/\n0::/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, MANY),
        ("3:cpuset:/\n2:cpuacct:/", {"cpuset/cpu.max": "100000 100000"}, MANY),
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    ],
)
def test_the_quota_counts(tmp_path: Path, cgroup: str, files: dict[str, str], expected: int) -> None:
    assert threads.default(_machine(tmp_path, cgroup, files)) == expected


def test_where_nothing_is_told_the_cores_count(tmp_path: Path) -> None:
    assert threads.default(tmp_path) == MANY


@pytest.mark.parametrize(("quota", "expected"), [("max 100000", MANY // 2), ("2000000 100000", 20), ("max", MANY // 2)])
def test_hardware_threads_of_one_core_are_one(tmp_path: Path, quota: str, expected: int) -> None:
    _machine(tmp_path, "0::/", {"cpu.max": quota})
    for cpu in range(MANY):
        first = cpu % (MANY // 2)
        path = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(f"{first},{first + MANY // 2}\n")
    assert threads.default(tmp_path) == expected


@pytest.mark.parametrize(
    ("asked", "told", "expected"),
    [(3, None, 3), (3, "5", 3), (None, "5", 5), (None, "6,2", 6), (None, " 4 ", 4)],
)
def test_who_says_how_many(asked: int | None, told: str | None, expected: int) -> None:
    environment = {} if told is None else {"OMP_NUM_THREADS": told}
    assert threads.prepare(asked, environment) == expected
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == str(expected)
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize("told", ["", "0", "-3", "many", ","])
def test_nonsense_in_the_environment_is_nothing(told: str) -> None:
    environment = {"OMP_NUM_THREADS": told, "OMP_WAIT_POLICY": "ACTIVE"}
    assert threads.prepare(None, environment) == threads.default()
    assert environment["OMP_WAIT_POLICY"] == "ACTIVE"


def test_it_comes_before_pytorch() -> None:
    code = "import sys, mimo_tokenizer_server.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

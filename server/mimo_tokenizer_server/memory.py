"""How much memory there is, how it is divided, and what a computation takes of it."""

from __future__ import annotations

import ctypes
import gc
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from . import device as devices

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

# Of malloc.h.
_M_ARENA_MAX = -8


class MemoryLimitError(ValueError):
    """A memory limit that says nothing, or leaves no room; the sentence says what is allowed or what takes how much."""


@dataclass(frozen=True)
class Division:
    """The device's memory, in bytes.

    Attributes:
        limit: all that may be used.
        weights: of the model.
        fixed: workspaces of the libraries, what warming up has left allocated, and what small batches are filled up
            with.
        activations: for what is being computed.
        state: for long items between their steps.
    """

    limit: int
    weights: int
    fixed: int
    activations: int
    state: int

    @classmethod
    def of(cls, limit: int, weights: int, fixed: int, batch: int) -> Division:
        """Divide `limit`: what weights and workspaces leave goes to a batch of `batch` bytes and to state.

        Raises:
            MemoryLimitError: nothing is left.
        """
        left = limit - weights - fixed
        if left <= 0:
            raise MemoryLimitError(
                f"the memory limit of {mib(limit)} leaves nothing to compute with: the weights take {mib(weights)},"
                f" libraries and workspaces {mib(fixed)}"
            )
        activations = min(batch, left // 2)
        return cls(limit, weights, fixed, activations, left - activations)


def limit(text: str | None, device: torch.device) -> int:
    """Bytes that the process may use of `device`: as `parse_limit` reads `text`, or a default.

    The default is nine tenths of the device's memory, or what is free of it if that is less.

    Raises:
        MemoryLimitError: `text` says nothing.
    """
    if text is not None:
        return parse_limit(text, device)
    total, free = available(device)
    return min(int(total * 0.9), free)


def enforce(limit: int, device: torch.device) -> None:
    """Have PyTorch's allocator refuse what goes over `limit`, where it can."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / available(device)[0]), device)


def used(device: torch.device) -> int:
    """Bytes that this process holds: of the device, on the CPU of the host."""
    return devices.memory_allocated(device) if device.type != "cpu" else resident()


def parse_limit(text: str, device: torch.device) -> int:
    """Bytes that "12GiB", "800MiB", "123456789" or a share, "50%" or "0.5", of the device's memory stands for.

    Raises:
        MemoryLimitError: it stands for none.
    """
    total = available(device)[0]
    units = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9, "": 1}
    number = text.strip().lower()
    unit = number.lstrip("0123456789.").strip()
    number = number[: len(number) - len(unit)].strip() if unit else number
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    share = unit == "%" or (unit == "" and 0 < value <= 1)
    if value <= 0 or not (share or unit in units) or (unit == "%" and value > 100):
        raise MemoryLimitError(
            f"{text!r} is no amount of memory: write bytes, 12GiB, 800MiB, or a share such as 50% or 0.5"
        )
    if share:
        return int(total * (value / 100 if unit == "%" else value))
    return int(value * units[unit])


def available(device: torch.device) -> tuple[int, int]:
    """Bytes in all, and bytes that this process may still take or has taken already.

    For the CPU it is the container's memory where that is limited.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, free + torch.cuda.memory_reserved(device)
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total = int(facts["MemTotal"].split()[0]) << 10
    free = (int(facts["MemAvailable"].split()[0]) << 10) + resident()
    for path in _CGROUP_LIMITS:
        try:
            limit = int(Path(path).read_text())
        except (OSError, ValueError):  # another version of cgroups, or "max"
            continue
        total, free = min(total, limit), min(free, limit)
    return total, free


def resident() -> int:
    """Bytes of this process in the host's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_of(function: Callable[[], Any], device: torch.device) -> int:
    """Bytes that `function` has allocated on `device` at the most, beyond what was there before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _LiveTensors() as live:
        function()
    peak: int = live.peak
    return peak


class _LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that are alive, as an allocator with statistics would.

    Attributes:
        peak: the most so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._now = 0
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._older: set[int] = set()  # what was there before, the weights, of which an operation may return a view

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_iter((args, kwargs)):
            if _has_storage(value) and value.untyped_storage().data_ptr() not in self._seen:
                self._older.add(value.untyped_storage().data_ptr())
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if _has_storage(value):
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._seen or address in self._older or size == 0:
            return

        def forget(_: Any) -> None:
            if self._seen.pop(address, None) is not None:
                self._now -= size

        self._seen[address] = weakref.ref(storage, forget)
        self._now += size
        self.peak = max(self.peak, self._now)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._seen.clear()


def _has_storage(value: object) -> TypeGuard[Tensor]:
    """Not of packed weights, which were there before and of which no view is ever returned."""
    return isinstance(value, Tensor) and not value.is_mkldnn


def keep_allocations_together() -> None:
    """Have the C library's allocator share what is free between all threads.

    To be called before there are many. By default each thread gets memory of its own, in which the holes that messages
    of all sizes leave are lost to the others: some hundred MiB, after some thousand calls.
    """
    if _mallopt is not None:
        _mallopt(_M_ARENA_MAX, 1)


def trim() -> None:
    """Give back to the system what the C library keeps of the host's memory for later allocations."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def release(device: torch.device) -> None:
    """Give back what nothing uses any more, on the device and on the host."""
    gc.collect()
    devices.release_memory(device)
    trim()


def mib(size: float) -> str:
    """`size` bytes in MiB, for people."""
    return f"{size / 2**20:,.0f} MiB"


def _of_libc(name: str) -> Callable[..., int] | None:
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):  # another C library
        return None
    return function


_malloc_trim = _of_libc("malloc_trim")
_mallopt = _of_libc("mallopt")

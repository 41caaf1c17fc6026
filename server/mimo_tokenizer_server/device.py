"""Device names to one pinned `torch.device`. The only place that knows how devices are spelled."""

from __future__ import annotations

import re

import torch

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class DeviceError(ValueError):
    """A device that is not there; the sentence lists those that are."""


def available() -> list[str]:
    """The devices that this PyTorch can use here, the CPU first."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["cpu"]
    return ["cpu", *(f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count()))]


def resolve(name: str) -> torch.device:
    """The device that `name` means, with its index.

    Args:
        name: "cpu", a device type ("cuda": its first device), a type with an index ("cuda:1"), or "auto": the first
            accelerator if there is one, else the CPU.

    Raises:
        DeviceError: no such device.
    """
    devices = available()
    if name == "auto":
        found = devices[min(1, len(devices) - 1)]
    elif re.fullmatch(r"[a-z]+(:[0-9]+)?", name):
        found = name if name == "cpu" or ":" in name else f"{name}:0"
    else:
        raise DeviceError(
            f"{name!r} is no device; write cpu, a type such as cuda, one with an index such as cuda:1, or auto"
            f" (here: {', '.join(devices)})"
        )
    if found not in devices:
        raise DeviceError(f"there is no device {name!r} here; there are: {', '.join(devices)}")
    return torch.device(found)


def pin(device: torch.device) -> None:
    """Make `device` the calling thread's current one, so that nothing it does makes a context on another."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The dtype that `name` means; "auto" is float32 on the CPU and bfloat16 elsewhere.

    Raises:
        ValueError: no such dtype.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _DTYPES:
        raise ValueError(f"{name!r} is no dtype; write auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def describe(device: torch.device) -> str:
    """What the device calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else device.type


def memory_total(device: torch.device) -> int:
    """Bytes that the device has in all; 0 where it does not tell."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def memory_allocated(device: torch.device) -> int:
    """Bytes of the device that PyTorch holds in this process; 0 where it does not tell."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def works(device: torch.device) -> bool:
    """Whether the device still computes."""
    try:
        return bool(torch.ones(2, device=device).sum().item() == 2)
    except torch.OutOfMemoryError:
        return True
    except RuntimeError:
        return False


def release_memory(device: torch.device) -> None:
    """Give back what PyTorch keeps for later allocations."""
    if device.type == "cuda":
        torch.cuda.empty_cache()

"""Device names, on this machine and on one with two GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mimo_tokenizer_server import device as devices
from mimo_tokenizer_server.device import DeviceError

MALFORMED = [
    "", " ", "cuda:", "cuda:-1", "cuda:1:2", "CUDA:1", "Cuda", " cuda", "cuda ", "cuda\n", "cuda:1 ", "cuda: 1",
    "cuda:x", "cuda:1.0", "cuda:0x1", "cuda:\N{ARABIC-INDIC DIGIT ONE}", ":0", ":", "0", "1", "cuda1", "AUTO",
    "cuda,cpu",
]  # fmt: skip


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends that there are so many accelerators of a type, or none."""

    def pretend(kind: str | None, count: int = 0) -> None:
        def current(check_available: bool = False) -> torch.device | None:
            return torch.device(kind) if kind else None

        monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)

    return pretend


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cpu", "cpu"),
        ("cuda", "cuda:0"),
        ("cuda:0", "cuda:0"),
        ("cuda:1", "cuda:1"),
        ("auto", "cuda:0"),
    ],
)
def test_two_gpus(machine: Any, name: str, expected: str) -> None:
    machine("cuda", 2)
    resolved = devices.resolve(name)
    assert str(resolved) == expected
    assert (resolved.index is None) == (expected == "cpu")
    assert devices.available() == ["cpu", "cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    "name", ["cuda:2", "cuda:10", "cuda:01", "xpu", "xpu:0", "mps", "gpu", "gpu:0", "cpu:0", "cpu:1"]
)
def test_absent_on_two_gpus(machine: Any, name: str) -> None:
    machine("cuda", 2)
    with pytest.raises(DeviceError) as refused:
        devices.resolve(name)
    assert str(refused.value) == f"there is no device {name!r} here; there are: cpu, cuda:0, cuda:1"


@pytest.mark.parametrize(("name", "expected"), [("xpu", "xpu:0"), ("xpu:0", "xpu:0"), ("auto", "xpu:0")])
def test_another_accelerator(machine: Any, name: str, expected: str) -> None:
    machine("xpu", 1)
    assert str(devices.resolve(name)) == expected
    with pytest.raises(DeviceError, match=r"there is no device 'cuda' here; there are: cpu, xpu:0$"):
        devices.resolve("cuda")


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:1", "xpu:0"])
def test_a_machine_without_accelerators(machine: Any, name: str) -> None:
    machine(None)
    with pytest.raises(DeviceError, match=r"there are: cpu$"):
        devices.resolve(name)
    assert devices.resolve("auto") == devices.resolve("cpu") == torch.device("cpu")


def test_a_driver_without_devices(machine: Any) -> None:
    machine("cuda", 0)
    assert devices.available() == ["cpu"]
    assert devices.resolve("auto") == torch.device("cpu")
    with pytest.raises(DeviceError, match=r"there are: cpu$"):
        devices.resolve("cuda")


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_names(machine: Any, name: str, count: int) -> None:
    machine("cuda" if count else None, count)
    with pytest.raises(DeviceError) as refused:
        devices.resolve(name)
    sentence = str(refused.value)
    assert "\n" not in sentence
    here = "cpu, cuda:0, cuda:1" if count else "cpu"
    assert sentence == (
        f"{name!r} is no device; write cpu, a type such as cuda, one with an index such as cuda:1, or auto"
        f" (here: {here})"
    )


def test_what_exists_here_can_be_named() -> None:
    here = devices.available()
    assert here[0] == "cpu"
    for name in here:
        assert str(devices.resolve(name)) == name


def test_pinning_sets_the_threads_device(monkeypatch: pytest.MonkeyPatch) -> None:
    indices: list[int | None] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", indices.append)
    devices.pin(torch.device("cpu"))
    assert indices == []
    devices.pin(torch.device("cuda:1"))
    devices.pin(torch.device("xpu:0"))
    assert indices == [1, 0]


def test_the_cpu_needs_nothing_of_cuda(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A context on a GPU costs its memory: a server on the CPU makes none, also where there are GPUs."""
    machine("cuda", 2)

    def touched(*args: Any, **kwargs: Any) -> Any:
        pytest.fail("CUDA was touched")

    for name in (
        "_lazy_init", "init", "is_available", "device_count", "current_device", "set_device", "get_device_name",
        "get_device_properties", "memory_reserved", "mem_get_info", "synchronize", "empty_cache",
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, touched)
    for name in ("set_device_index", "synchronize", "current_device_index"):
        monkeypatch.setattr(torch.accelerator, name, touched)
    device = devices.resolve("cpu")
    devices.pin(device)
    devices.synchronize(device)
    devices.release_memory(device)
    assert devices.describe(device)
    assert devices.memory_total(device) == devices.memory_allocated(device) == 0
    assert devices.dtype_of("auto", device) is torch.float32


def test_calls_name_the_pinned_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = torch.device("cuda:1")
    seen: list[Any] = []

    def keep(device: Any) -> Any:
        seen.append(device)
        return 5

    for name in ("get_device_name", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, keep)
    monkeypatch.setattr(torch.accelerator, "synchronize", keep)
    devices.describe(pinned)
    devices.memory_allocated(pinned)
    devices.synchronize(pinned)
    assert seen == [pinned] * 3


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("auto", "cpu", torch.float32),
        ("auto", "cuda:1", torch.bfloat16),
        ("auto", "xpu:0", torch.bfloat16),
        ("float32", "cuda:0", torch.float32),
        ("bfloat16", "cpu", torch.bfloat16),
        ("float16", "cuda:0", torch.float16),
    ],
)
def test_dtypes(name: str, device: str, expected: torch.dtype) -> None:
    assert devices.dtype_of(name, torch.device(device)) is expected


@pytest.mark.parametrize("name", ["", "int8", "Float32", "bf16", "torch.float32", "float64"])
def test_unknown_dtypes(name: str) -> None:
    with pytest.raises(ValueError, match=r"is no dtype; write auto, float32, bfloat16, float16$") as refused:
        devices.dtype_of(name, torch.device("cpu"))
    assert repr(name) in str(refused.value)

"""A fake server in this process or another one, and both clients behind one face."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mimo_tokenizer_client import AsyncTokenizerClient, TokenizerClient

SCRIPT = Path(__file__).with_name("fake_server.py")


def _load_fake() -> ModuleType:
    # By its file: with pytest's importlib mode the tests' folders are no import roots.
    spec = importlib.util.spec_from_file_location("client_fake_server", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_fake = _load_fake()


class AsyncFace:
    """An asynchronous client with the methods of the synchronous one, on one event loop of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self._client = AsyncTokenizerClient(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if not callable(method):
            return method
        return lambda *args, **kwargs: self.loop.run_until_complete(method(*args, **kwargs))


@pytest.fixture
def fake() -> ModuleType:
    """The module of the fake server."""
    return _fake


@pytest.fixture
def socket_path() -> Iterator[str]:
    """A path short enough for a socket, which pytest's own folders may not be."""
    with tempfile.TemporaryDirectory(prefix="mimo-") as folder:
        yield f"{folder}/s"


@pytest.fixture
def serve(socket_path: str) -> Iterator[Callable[..., Any]]:
    """Start a fake server in this process, with these limits."""
    servers: list[Any] = []

    def start(address: str | None = None, **options: Any) -> Any:
        server = _fake.FakeServer(address or f"unix:{socket_path}{len(servers)}", **options).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a fake server in a process of its own; its standard output's first line is the address."""
    processes: list[subprocess.Popen[str]] = []

    def start(address: str, *options: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), address, *options], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Make a client of either kind, with the methods of the synchronous one."""
    clients: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        client = (TokenizerClient if request.param == "sync" else AsyncFace)(*args, **kwargs)
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()
        if isinstance(client, AsyncFace):
            client.loop.close()

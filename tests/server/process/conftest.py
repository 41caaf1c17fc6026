"""Servers for the tests of this folder: two that all of them share, and as many of their own as they start."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# With pytest's importlib mode the tests' folders are no import roots.
sys.path.insert(0, str(Path(__file__).parent))

import grpc
import pytest
import torch
from process_harness import RATE, ServerProcess, noise, opened_channels, short_folder

from mimo_tokenizer_client import TokenizerClient
from mimo_tokenizer_server.config import BUILT_IN_MODELS
from mimo_tokenizer_server.model import checkpoint
from mimo_tokenizer_server.model.config import TokenizerConfig
from mimo_tokenizer_server.model.rows import pack
from mimo_tokenizer_server.model.tokenizer import MiMoAudioTokenizer


@pytest.fixture(scope="session")
def shared_servers() -> Iterator[dict[str, ServerProcess]]:
    """One server on a Unix socket and one on TCP, which must outlive whatever the tests do to them."""
    servers = {"unix": ServerProcess("--log-level", "debug"), "tcp": ServerProcess(address="127.0.0.1:0")}
    try:
        for server in servers.values():
            server.ready()
        yield servers
        for server in servers.values():
            assert server.process.poll() is None, f"a shared server died:\n{server.log}"
            assert server.stop() == 0, server.log
            assert server.complaints() == []
    finally:
        for server in servers.values():
            server.clean_up()


@pytest.fixture(scope="session", params=["unix", "tcp"])
def server(request: pytest.FixtureRequest, shared_servers: dict[str, ServerProcess]) -> ServerProcess:
    """A shared server, on either kind of address."""
    return shared_servers[request.param]


@pytest.fixture(scope="session")
def unix_server(shared_servers: dict[str, ServerProcess]) -> ServerProcess:
    """The shared server on a Unix socket, with debug logs."""
    return shared_servers["unix"]


@pytest.fixture(scope="session")
def small_server() -> Iterator[ServerProcess]:
    """A server with room for little: 1 MiB a message, 3500 frames at a time."""
    server = ServerProcess("--max-message-mib", "1", "--max-queued-frames", "3500")
    try:
        yield server.ready()
        assert server.stop() == 0, server.log
        assert server.complaints() == []
    finally:
        server.clean_up()


@pytest.fixture
def start() -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers of the test's own; takes what `ServerProcess` takes."""
    started: list[ServerProcess] = []

    def make(*flags: str, **options: Any) -> ServerProcess:
        started.append(ServerProcess(*flags, **options))
        return started[-1]

    yield make
    for server in started:
        server.clean_up()


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder whose name leaves room for a socket's."""
    path = short_folder()
    yield path
    path.chmod(0o755)
    shutil.rmtree(path)


@pytest.fixture
def channel() -> Iterator[Callable[[str], grpc.Channel]]:
    """Opens gRPC channels without limits on messages; takes the address."""
    with opened_channels() as make:
        yield make


@pytest.fixture(scope="session")
def local_model() -> MiMoAudioTokenizer:
    """The shared servers' model, in this process."""
    config = TokenizerConfig.from_file(BUILT_IN_MODELS["tiny"])
    model = MiMoAudioTokenizer(config, torch.device("cpu"), torch.float32)
    checkpoint.fill_random(model, 0, lambda: None)
    pack(model)  # as the server does; the sums' order is the library's
    return model


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch with one thread, as the servers have: the same sums in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def works() -> Callable[[ServerProcess], None]:
    """Checks that a server answers a good request as ever."""

    def check(server: ServerProcess) -> None:
        assert server.process.poll() is None, server.log
        sound = noise(0.5)
        with TokenizerClient(server.address, timeout=60) as client:
            codes = client.encode(sound, RATE)
            assert codes.shape == (20, len(sound) // 960 + 1)
            assert client.decode(codes).shape == (codes.shape[1] * 960,)

    return check

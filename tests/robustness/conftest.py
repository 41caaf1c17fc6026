"""Servers and channels for the robustness tests; MIMO_ROBUSTNESS=full runs them at their full length."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# With pytest's importlib mode the tests' folders are no import roots.
sys.path.insert(0, str(Path(__file__).parents[1] / "server" / "process"))
sys.path.insert(0, str(Path(__file__).parent))

import grpc
import pytest
from process_harness import ServerProcess, opened_channels


@pytest.fixture
def start() -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers and waits until they serve; takes what `ServerProcess` takes.

    When the test is over, each must still be there, end as it is told to and have had nothing to complain about, unless
    the test has ended it.
    """
    started: list[ServerProcess] = []

    def make(*flags: str, **options: Any) -> ServerProcess:
        started.append(ServerProcess(*flags, **options))
        return started[-1].ready()

    ended = False
    try:
        yield make
        for server in started:
            if server.process.returncode is None:
                assert server.process.poll() is None, f"a server died:\n{server.log}"
                assert server.stop() == 0, server.log
            assert server.complaints() == []
        ended = True
    finally:
        for server in started:
            # A test that failed may have left it at work for minutes.
            if not ended:
                server.process.kill()
            server.clean_up()


@pytest.fixture
def channel() -> Iterator[Callable[[str], grpc.Channel]]:
    """Opens gRPC channels, each with a connection of its own, without limits on messages; takes the address."""
    with opened_channels() as make:
        yield make

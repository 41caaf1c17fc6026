"""What the deployment files say is held against real servers, as the tests of the server start them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

# With pytest's importlib mode the tests' folders are no import roots.
sys.path.insert(0, str(Path(__file__).parents[1] / "server/process"))
sys.path.insert(0, str(Path(__file__).parent))

import pytest
from containers import Machine


@pytest.fixture
def machine() -> Iterator[Machine]:
    """Runs containers' commands as processes, and ends what is left of them."""
    with Machine() as machine:
        yield machine

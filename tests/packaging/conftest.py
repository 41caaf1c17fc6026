"""The wheel, and fresh environments that it is installed into."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# With pytest's importlib mode the tests' folders are no import roots.
sys.path.insert(0, str(Path(__file__).parent.parent / "server" / "process"))

import pytest
from process_harness import ServerProcess

ROOT = Path(__file__).parent.parent.parent


def pip(*arguments: str) -> None:
    """Run pip, and show what it says if it fails."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="session")
def environment_with(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a fresh environment with the wheel, and further requirements; returns its Python."""
    made: dict[tuple[str, ...], Path] = {}

    def make(extra: str = "", *requirements: str) -> Path:
        key = (extra, *requirements)
        if key not in made:
            folder = tmp_path_factory.mktemp("environment")
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], timeout=120, check=True)
            python = folder / "bin" / "python"
            what = f"{wheel}[{extra}]" if extra else str(wheel)
            pip("--python", str(python), "install", "--only-binary", ":all:", what, *requirements)
            made[key] = python
        return made[key]

    return make


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """A server in the tests' own environment."""
    server = ServerProcess()
    try:
        yield server.ready()
        assert server.stop() == 0, server.log
        assert server.complaints() == []
    finally:
        server.clean_up()

"""What the parity tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# The tests are imported each by its path; the modules beside them are found only so.
sys.path.insert(0, str(Path(__file__).parent))

import comparison


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors on many threads are slow where other processes want the cores too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", params=[0, 1, 2], ids=lambda seed: f"seed{seed}")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> comparison.Pair:
    """The small model with the weights of one seed."""
    return comparison.make_pair(tmp_path_factory.mktemp("checkpoint"), {}, request.param)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was compared."""
    tally = comparison.TALLY
    if tally.codes:
        terminalreporter.write_line(
            f"parity: {tally.codes} codes, {tally.ties} at ties; lowest SNR {tally.lowest_snr:.1f} dB"
        )

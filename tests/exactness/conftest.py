"""What the tests of exactness share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# The tests are imported each by its path; the modules beside them, and those of other folders, are found only so.
sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("exactness", "unit/model", "parity"))

import exactness_helpers


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors on many threads are slow where other processes want the cores too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def inference_mode() -> Iterator[None]:
    """As the engine runs the model."""
    with torch.inference_mode():
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was compared."""
    tally = exactness_helpers.TALLY
    terminalreporter.write_line(
        f"exactness: {tally.codes} codes, {tally.ties} at ties, features at most {tally.drift:.1f} ulps apart; "
        f"lowest SNR {tally.lowest_snr:.1f} dB"
    )

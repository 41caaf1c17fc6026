"""A server process for the measurements."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mimo_tokenizer_client import TokenizerClient

START_SECONDS = 600


@contextmanager
def running_server(*flags: str) -> Iterator[tuple[subprocess.Popen[bytes], TokenizerClient]]:
    """A ready server on a Unix socket, and a client of it, for as long as the body runs."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix://{folder}/tokenizer.sock"
        command = [sys.executable, "-m", "mimo_tokenizer_server", "serve", "--address", address, *flags]
        process = subprocess.Popen(command)
        try:
            with TokenizerClient(address, timeout=START_SECONDS) as client:
                deadline = time.monotonic() + START_SECONDS
                while not client.health():
                    if process.poll() is not None or time.monotonic() > deadline:
                        sys.exit(f"the server did not start: exit status {process.poll()}")
                    time.sleep(0.02)
                yield process, client
        finally:
            process.terminate()
            process.wait()

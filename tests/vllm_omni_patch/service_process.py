"""The real service as a process, from the project's environment, which is another one than the engine's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from model_folders import server_python, service_environment

from mimo_tokenizer_client import TokenizerClient, TokenizerError

# The machine may be busy; nothing here takes that long when all is well.
PATIENCE = 120.0


class ServiceProcess:
    """`mimo-tokenizer serve` on the CPU in float32, on a Unix socket that stays the same from start to start.

    Args:
        model: The checkpoint's folder.
        flags: Further ones of `serve`.
    """

    def __init__(self, model: Path, *flags: str) -> None:
        self.model = model
        self.flags = flags
        # Short: a socket's name may have 107 characters, and pytest's folders take most of them.
        self._folder = Path(tempfile.mkdtemp(prefix="mimo-", dir="/tmp"))
        self.address = f"unix://{self._folder / 's'}"
        self._log = self._folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """What it has written, in all of its lives."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None
        return self._process.pid

    def start(self, *, wait: bool = True) -> ServiceProcess:
        """Start it, again or for the first time, and wait until it serves unless told otherwise."""
        assert self._process is None or self._process.poll() is not None, "it runs already"
        command = [server_python(), "-m", "mimo_tokenizer_server", "serve", "--model", str(self.model)]
        where = ["--device", "cpu", "--dtype", "float32", "--address", self.address]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *where, *self.flags],
                env=service_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if wait:
            self.wait_until_ready()
        return self

    def wait_until_ready(self) -> None:
        """Wait until it serves."""
        assert self._process is not None
        try:
            with TokenizerClient(self.address, name="tests") as client:
                client.wait_until_ready(PATIENCE)
        except TokenizerError as error:
            raise AssertionError(f"the service did not start: {error}\n{self.log}") from error

    def kill(self) -> None:
        """End it at once, as the kernel does when memory is short; the socket's file stays."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE)

    def stop(self) -> int:
        """End it as an operator does; its exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(PATIENCE)

    def pause(self) -> None:
        """Let it answer nothing until `resume`: it is there and silent, as on a stuck device."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `pause`."""
        os.killpg(self.pid, signal.SIGCONT)

    def clean_up(self) -> None:
        """Leave nothing behind, whatever it does."""
        if self._process is not None and self._process.poll() is None:
            self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

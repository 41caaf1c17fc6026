"""The real server as a process, the real command, and sounds for them; for the tests here and in tests/packaging."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from mimo_tokenizer_server.config import BUILT_IN_MODELS, ENVIRONMENT_PREFIX

# The machine may be busy; nothing here waits that long when all is well.
PATIENCE = 60.0

COMMAND = Path(sys.executable).with_name("mimo-tokenizer")

RATE = 24_000
SAMPLES_PER_FRAME = 960
QUANTIZERS = 20
# Every codebook of the tiny model has at least this many entries.
SMALLEST_BOOK = 128

# To run as a user whom permissions hold for, also where the tests run as root: without CAP_DAC_OVERRIDE and
# CAP_DAC_READ_SEARCH, which a program that root starts gets back unless they leave the bounding set.
_UNPRIVILEGED = """
import ctypes, os, sys
if os.geteuid() == 0:
    for capability in (1, 2):
        if ctypes.CDLL(None, use_errno=True).prctl(24, capability, 0, 0, 0):
            sys.exit(f"cannot drop capability {capability}: {os.strerror(ctypes.get_errno())}")
os.execv(sys.argv[1], sys.argv[1:])
"""
UNPRIVILEGED = (sys.executable, "-c", _UNPRIVILEGED)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what would set the command's flags, and with a steady number of threads."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | dict(extra or {})


def free_port(host: str = "127.0.0.1", family: int = socket.AF_INET) -> int:
    """A port that was free a moment ago."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def short_folder() -> Path:
    """A new folder with a name that leaves room for a socket's; pytest's own may not."""
    return Path(tempfile.mkdtemp(prefix="mimo-", dir="/tmp"))


class ServerProcess:
    """`mimo-tokenizer serve` in a process group of its own, on random weights unless told otherwise.

    Args:
        flags: of `serve`, behind those that choose the tiny model.
        address: None for a Unix socket in a new folder.
        model: the flags that choose the model and its device.
        env: beside the tests' own.
        launcher: a command that runs the rest.
    """

    def __init__(
        self,
        *flags: str,
        address: str | None = None,
        model: Sequence[str] = ("--load-format", "dummy", "--model", "tiny", "--device", "cpu"),
        env: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
    ) -> None:
        self.folder = short_folder()
        self.socket = self.folder / "s"
        # None: it is left to `flags` and `env`.
        self.asked = f"unix://{self.socket}" if address is None else address
        where = ("--address", self.asked) if self.asked else ()
        self.lines: list[str] = []
        self._told = threading.Condition()
        self._closed = False
        self.process = subprocess.Popen(
            [*launcher, sys.executable, "-m", "mimo_tokenizer_server", "serve", *model, *where, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment(env),
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._told:
                self.lines.append(line.rstrip("\n"))
                self._told.notify_all()
        with self._told:
            self._closed = True
            self._told.notify_all()

    @property
    def pid(self) -> int:
        """Of the server."""
        return self.process.pid

    @property
    def log(self) -> str:
        """Standard error so far."""
        return "\n".join(self.lines)

    @property
    def address(self) -> str:
        """Where a client finds it, once it listens."""
        found = re.search(r'listening.*address"?[=:] ?"?([^\s"]+)', self.wait_for("listening"))
        assert found is not None
        return found[1]

    def wait_for(self, text: str, seconds: float = PATIENCE) -> str:
        """Wait for a line of the log that has `text`, and return it."""
        end = time.monotonic() + seconds
        with self._told:
            while True:
                for line in self.lines:
                    if text in line:
                        return line
                left = end - time.monotonic()
                if self._closed or left <= 0:
                    raise AssertionError(f"the server never said {text!r}:\n{self.log}")
                self._told.wait(left)

    def ready(self) -> ServerProcess:
        """Wait until it serves."""
        self.wait_for("serving")
        return self

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def wait(self, seconds: float = PATIENCE) -> int:
        """Wait for its end, and return the exit status."""
        status = self.process.wait(seconds)
        self._reader.join(PATIENCE)
        return status

    def stop(self) -> int:
        """End it as an operator does, and return the exit status."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait()

    def clean_up(self) -> None:
        """Leave nothing behind, whatever it does."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(PATIENCE)
        assert self.process.stderr is not None
        self.process.stderr.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def complaints(self) -> list[str]:
        """Lines of the log that a server should not write, whatever it is sent."""
        return [line for line in self.lines if re.search(r"Traceback|\bERROR\b|\bCRITICAL\b|never retrieved", line)]


class SlowModel:
    """A model folder whose config arrives when the test says so: until then, a server loads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._pipe = folder / "config.json"
        os.mkfifo(self._pipe)

    @property
    def flags(self) -> tuple[str, ...]:
        """Of `serve`."""
        return ("--load-format", "dummy", "--model", str(self.folder), "--device", "cpu")

    def wait_until_read(self) -> int:
        """Wait until a server waits for the config; return the pipe's open end."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                assert time.monotonic() < end, "the server never opened its config.json"
                time.sleep(0.02)

    def arrive(self) -> None:
        """Let the config arrive, whole, and be a plain file from now on."""
        text = BUILT_IN_MODELS["tiny"].read_bytes()
        plain = self.folder / "plain"
        plain.write_bytes(text)
        pipe = self.wait_until_read()
        try:
            select.select([], [pipe], [], PATIENCE)
            assert os.write(pipe, text) == len(text)
            plain.replace(self._pipe)
        finally:
            os.close(pipe)


def run_command(
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    launcher: Sequence[str] = (),
    command: Path = COMMAND,
    timeout: float = PATIENCE,
) -> subprocess.CompletedProcess[str]:
    """Run `mimo-tokenizer` to its end."""
    return subprocess.run(
        [*launcher, str(command), *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment(env),
        timeout=timeout,
        check=False,
    )


def assert_one_sentence(done: subprocess.CompletedProcess[str], *texts: str, status: int = 1) -> None:
    """Check that a command failed with one sentence on standard error that has `texts`, and no traceback.

    Wrong flags (exit status 2) are answered with the usage above the sentence.
    """
    said = f"exit status {done.returncode}\nstdout: {done.stdout}\nstderr: {done.stderr}"
    assert done.returncode == status, said
    assert "Traceback" not in done.stderr, said
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 or status == 2, said
    assert re.match(r"(Error|mimo-tokenizer): \S", lines[-1]), said
    for text in texts:
        assert text in lines[-1], said


# ---------------------------------------------------------------- sounds and codes


def tone(seconds: float, rate: int = RATE, hertz: float = 440.0) -> npt.NDArray[np.float32]:
    """A sine, (samples,)."""
    time_axis = np.arange(round(seconds * rate)) / rate
    return (0.3 * np.sin(2 * np.pi * hertz * time_axis)).astype(np.float32)


def sweep(seconds: float, rate: int = RATE, top: float = 3000.0) -> npt.NDArray[np.float32]:
    """A tone that rises from 100 Hz to `top`, (samples,)."""
    time_axis = np.arange(round(seconds * rate)) / rate
    phase = 100 * time_axis + (top - 100) * time_axis**2 / (2 * seconds)
    return (0.3 * np.sin(2 * np.pi * phase)).astype(np.float32)


def noise(seconds: float, rate: int = RATE, seed: int = 0) -> npt.NDArray[np.float32]:
    """White noise, (samples,)."""
    samples = np.random.default_rng(seed).uniform(-0.3, 0.3, round(seconds * rate))
    return samples.astype(np.float32)


def random_codes(frames: int, quantizers: int = QUANTIZERS, seed: int = 0) -> npt.NDArray[np.uint16]:
    """Codes that the tiny model takes, (quantizers, frames)."""
    return np.random.default_rng(seed).integers(0, SMALLEST_BOOK, (quantizers, frames)).astype(np.uint16)


def snr(wanted: npt.NDArray[Any], got: npt.NDArray[Any]) -> float:
    """Signal to noise ratio in dB; infinite for equal arrays."""
    assert wanted.shape == got.shape
    error = float(np.sum((wanted.astype(np.float64) - got) ** 2))
    return float("inf") if error == 0 else 10 * np.log10(float(np.sum(wanted.astype(np.float64) ** 2)) / error)


def eventually(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait until `condition` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.02)


@contextmanager
def opened_channels() -> Iterator[Callable[[str], grpc.Channel]]:
    """Opens gRPC channels, each with a connection of its own, without limits on messages; takes the address."""
    opened: list[grpc.Channel] = []

    def make(address: str) -> grpc.Channel:
        limits = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        opened.append(grpc.insecure_channel(address, options=[*limits, ("grpc.use_local_subchannel_pool", 1)]))
        return opened[-1]

    try:
        yield make
    finally:
        for one in opened:
            one.close()

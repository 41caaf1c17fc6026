"""`mimo-tokenizer top` beside a real server: its figures against what was sent, and the live view in a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from process_harness import (
    COMMAND,
    PATIENCE,
    RATE,
    ServerProcess,
    assert_one_sentence,
    environment,
    eventually,
    free_port,
    noise,
    random_codes,
    run_command,
)

from mimo_tokenizer_client import InvalidInput, TokenizerClient
from mimo_tokenizer_server import top


@pytest.fixture(scope="module")
def watched() -> Iterator[ServerProcess]:
    """A server with metrics."""
    server = ServerProcess("--metrics-address", "127.0.0.1:0")
    try:
        yield server.ready()
        assert server.stop() == 0
        assert server.complaints() == []
    finally:
        server.clean_up()


def metrics_address(server: ServerProcess) -> str:
    return server.wait_for(" metrics ").rsplit("address=", 1)[1].strip()


def row(shown: str, name: str) -> list[str]:
    """A row of a table, as cells."""
    (line,) = [line for line in shown.splitlines() if line.startswith(f"{name} ")]
    return re.split(r"\s{2,}", line.strip())


def test_figures_are_those_of_what_was_sent(watched: ServerProcess) -> None:
    address = metrics_address(watched)
    url = top.url_of(address)
    plain = subprocess.Popen(
        [COMMAND, "top", address, "--interval", "0.5"], stdout=subprocess.PIPE, text=True, env=environment()
    )
    first = top.read(url)

    def work(seed: int) -> None:
        with TokenizerClient(watched.address, timeout=PATIENCE) as client:
            for _ in range(5):
                client.encode(noise(1, seed=seed), RATE)
                client.decode_batch([random_codes(40, seed=seed), random_codes(10, seed=seed)])
            with pytest.raises(InvalidInput):
                client.decode(np.full((2, 5), 60_000, np.uint16))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    # A call is counted a moment after its answer has left.
    eventually(lambda: top.read(url).sum("requests_in_progress") == 0)
    interval = top.Interval.between(first, top.read(url))
    assert interval.before is first
    calls = {("Encode", "OK"): 20, ("Decode", "OK"): 20, ("Decode", "INVALID_ARGUMENT"): 4}
    for (method, status), count in calls.items():
        assert interval.increase("requests_total", method=method, status=status) == count
    assert interval.increase("code_frames_total", kind="decode") == 20 * 50
    assert interval.increase("audio_seconds_total", kind="encode") == pytest.approx(20 * 26 / 25)
    assert interval.rate("audio_seconds_total", kind="encode") == pytest.approx(20 * 26 / 25 / interval.seconds)
    assert 1 <= interval.mean("batch_items", kind="decode") <= 8
    assert 0 < interval.rate("device_busy_seconds_total") <= 1
    assert 0 < interval.rate("process_cpu_seconds_total") < 64
    quantiles = [interval.quantile(q, "request_duration_seconds", method="Encode") for q in (0.5, 0.9, 0.99)]
    assert 0 < quantiles[0] <= quantiles[1] <= quantiles[2] <= 60

    once = run_command("top", "--once", env={"MIMO_AUDIO_TOKENIZER_METRICS_ADDRESS": address})
    assert once.returncode == 0, once.stderr
    assert ": ready, up " in once.stdout
    assert "tiny on cpu (" in once.stdout
    assert "since the start" in once.stdout
    assert row(once.stdout, "Encode")[3:6] == ["20", "0", "0"]
    assert row(once.stdout, "Decode")[3:6] == ["24", "4", "0"]
    assert re.search(r"Decode failed: INVALID_ARGUMENT 4 \(\S+/s\)", once.stdout)
    assert row(once.stdout, "decode_vq")[3:5] == ["-", "-"]
    assert "queue 0 of 92048 frames" in once.stdout

    # Not on a terminal: a block for each interval, none of it for terminals only.
    assert plain.stdout is not None
    for line in plain.stdout:
        if re.search(r"^rates.* of the last \d", line):
            break
    plain.send_signal(signal.SIGINT)
    rest, _ = plain.communicate(timeout=PATIENCE)
    assert plain.returncode == 0
    assert "\x1b" not in rest


@pytest.mark.parametrize(
    ("address", "texts"),
    [
        ("nowhere", ("'nowhere'", "host:port")),
        ("closed", ("does not answer", "refused")),
        ("grpc", ("/metrics",)),
        ("http://silent", ("does not answer", "timed out")),
        ("web", ("HTTP status 404",)),
        ("other", ("of no tokenizer server",)),
        ("text", ("not with metrics",)),
    ],
)
def test_what_is_no_server_with_metrics(
    address: str, texts: tuple[str, ...], shared_servers: dict[str, ServerProcess]
) -> None:
    answers = {
        "web": b"HTTP/1.0 404 Not Found\r\n\r\n",
        "other": b"HTTP/1.0 200 OK\r\n\r\nup 1\n",
        "text": b"HTTP/1.0 200 OK\r\n\r\n<!doctype html>\n<p>\xff",
    }
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        here = f"127.0.0.1:{listening.getsockname()[1]}"
        if address == "closed":
            address = f"127.0.0.1:{free_port()}"
        elif address == "grpc":
            address = shared_servers["tcp"].address
        elif address == "http://silent":
            address = f"http://{here}"
        elif address in answers:
            pool.submit(answer, listening, answers[address])
            address = here
        done = run_command("top", address, "--once")
    assert_one_sentence(done, *texts)
    assert done.stdout == ""


def answer(listening: socket.socket, data: bytes) -> None:
    connection, _ = listening.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(data)


class Terminal:
    """A command in a terminal of its own, and what it has drawn there."""

    def __init__(self, *command: str) -> None:
        self._master, self._slave = pty.openpty()
        self.resize(24, 110)
        self.modes = termios.tcgetattr(self._slave)
        self.drawn = ""
        self.process = subprocess.Popen(
            command,
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env=environment({"TERM": "xterm-256color"}),
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    @property
    def screen(self) -> list[str]:
        """The rows of the last whole picture."""
        pictures = self.drawn.split("\x1b[H")
        picture = pictures[-2] if len(pictures) > 2 else ""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", picture).rstrip("\r\n").split("\r\n")

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, self.drawn[-3000:]
            if select.select([self._master], [], [], 0.1)[0]:
                self.drawn += os.read(self._master, 65536).decode(errors="replace")

    def shows(self, text: str) -> None:
        """Wait until the screen has a text that matches."""
        self.wait_for(lambda: re.search(text, "\n".join(self.screen)) is not None)

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def end(self) -> None:
        """Wait for the command's end, with all that it draws."""
        self.wait_for(lambda: self.process.poll() is not None)
        while select.select([self._master], [], [], 0)[0]:
            self.drawn += os.read(self._master, 65536).decode(errors="replace")

    def modes_now(self) -> list[object]:
        return termios.tcgetattr(self._slave)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._master)
        os.close(self._slave)


def test_a_live_view_that_outlives_its_server(start: Callable[..., ServerProcess]) -> None:
    address = f"127.0.0.1:{free_port()}"
    server = start("--metrics-address", address).ready()
    terminal = Terminal(str(COMMAND), "top", address, "--interval", "0.2")
    try:
        terminal.shows("ready, up")
        with TokenizerClient(server.address) as client:
            for _ in range(3):
                client.decode(random_codes(20))
        terminal.shows(r"Decode +\S+ +\S+ +3 +0 +0 ")
        assert {len(line) for line in terminal.screen} == {110}
        terminal.resize(12, 60)
        terminal.wait_for(lambda: {len(line) for line in terminal.screen} == {60} and len(terminal.screen) == 12)
        terminal.resize(30, 120)
        terminal.wait_for(lambda: {len(line) for line in terminal.screen} == {120} and len(terminal.screen) == 30)

        server.signal(signal.SIGKILL)
        server.wait()
        terminal.shows("does not answer: Connection refused; trying again")
        terminal.shows(r"Decode +\S+ +\S+ +3 ")
        start("--metrics-address", address)
        terminal.shows("not ready, up|: ready, up")
        terminal.wait_for(lambda: "trying again" not in "\n".join(terminal.screen))
        terminal.shows(": ready, up")
        assert "Decode " not in "\n".join(terminal.screen)
        assert not re.search(r" -\d", "\n".join(terminal.screen)), "a rate below 0"

        terminal.type(b"\x03")
        terminal.end()
        assert terminal.process.returncode == 0
        # The screen as it was, the cursor, and the modes.
        assert terminal.drawn.rindex("\x1b[?1049l") > terminal.drawn.rindex("\x1b[?1049h")
        assert terminal.drawn.rindex("\x1b[?25h") > terminal.drawn.rindex("\x1b[?25l")
        assert terminal.modes_now() == terminal.modes
        assert "Traceback" not in terminal.drawn
    finally:
        terminal.close()

"""Addresses, signals, and the end of the process."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import signal
import socket
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from process_harness import (
    PATIENCE,
    RATE,
    UNPRIVILEGED,
    ServerProcess,
    SlowModel,
    assert_one_sentence,
    eventually,
    free_port,
    noise,
    random_codes,
    snr,
)

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_audio_tokenizer.v1 import tokenizer_pb2_grpc
from mimo_tokenizer_client import ServiceUnavailable, TokenizerClient, TokenizerError
from mimo_tokenizer_server.config import DEFAULT_ADDRESS

Start = Callable[..., ServerProcess]
Works = Callable[[ServerProcess], None]


def refused(server: ServerProcess) -> subprocess.CompletedProcess[str]:
    """The end of a server that could not start, as that of a command."""
    status = server.wait()
    return subprocess.CompletedProcess([], status, "", server.log)


class OpenStream:
    """An EncodeStream that is in flight for as long as the test wants."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._gate = threading.Event()
        self.call = tokenizer_pb2_grpc.AudioTokenizerStub(channel).EncodeStream(self._messages(), timeout=120)
        eventually(lambda: self._sent)

    _sent = False

    def _messages(self) -> Iterator[pb.EncodeStreamRequest]:
        opening = pb.EncodeStreamOpen(sample_rate=RATE, channels=1, format=pb.SAMPLE_FORMAT_FLOAT32)
        yield pb.EncodeStreamRequest(open=opening)
        yield pb.EncodeStreamRequest(pcm=noise(1).tobytes())
        self._sent = True
        self._gate.wait(120)

    def finish(self) -> int | grpc.StatusCode:
        """Send the end of the recording; return the number of frames that come back, or how it failed."""
        self._gate.set()
        try:
            return sum(message.codes.frames for message in self.call)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
            return code


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_server_is_there(start: Start, number: signal.Signals) -> None:
    """While it still imports what it needs. For a container's first process the system has no answer to a signal."""
    server = start()

    def handled() -> bool:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{server.pid}/status").read_text().splitlines())
        return bool(int(status["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1)

    eventually(handled)
    assert server.lines == []
    server.signal(number)
    assert server.wait() == 0
    assert server.lines == []


def test_sigterm_lets_a_call_in_flight_finish(start: Start, channel: Callable[[str], grpc.Channel]) -> None:
    server = start("--log-level", "debug").ready()
    connection = channel(server.address)
    stub = tokenizer_pb2_grpc.AudioTokenizerStub(connection)
    codes = random_codes(3000)
    item = pb.DecodeItem(codes=pb.Codes(num_quantizers=20, frames=3000, data=codes.tobytes()))
    computing = stub.DecodeLong(pb.DecodeLongRequest(item=item), timeout=120)
    stream = OpenStream(connection)
    server.signal(signal.SIGTERM)
    server.wait_for("stopping")

    # Soon neither old nor new connections take new calls. CANCELLED is gRPC's word for a call that was on its way when
    # the server began to drain; the client knows it.
    def refuses(other: grpc.Channel) -> bool:
        call = tokenizer_pb2_grpc.AudioTokenizerStub(other).GetInfo.future(pb.GetInfoRequest(), timeout=PATIENCE)
        return call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

    for other in (connection, channel(server.address)):
        eventually(lambda other=other: refuses(other), 5)
    with TokenizerClient(server.address, unavailable_timeout=0.3) as client, pytest.raises(ServiceUnavailable):
        client.info()

    assert sum(len(piece.pcm) for piece in computing) == 3000 * 960 * 4
    assert server.process.poll() is None
    answer = stream.finish()
    assert server.wait() == 0
    assert not server.socket.exists()
    assert "stopped" in server.lines[-1]
    assert "EncodeStream status=OK" in server.log
    # gRPC hangs up right behind the very last answer; a client that is writing at that moment (as gRPC does by itself,
    # to answer a ping) can lose it. It is told UNAVAILABLE, and ours tries again.
    assert answer in (26, grpc.StatusCode.UNAVAILABLE)
    assert not server.complaints()


def test_grace_ends(start: Start, channel: Callable[[str], grpc.Channel]) -> None:
    server = start("--grace-seconds", "0.5").ready()
    stream = OpenStream(channel(server.address))
    began = time.monotonic()
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert 0.4 < time.monotonic() - began < 10
    assert stream.finish() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    assert not server.socket.exists()


def test_grace_ends_also_while_the_device_computes(start: Start) -> None:
    server = start("--grace-seconds", "0.2").ready()
    with TokenizerClient(server.address, unavailable_timeout=0.5) as client:
        client.info()
        errors: list[Exception] = []

        def decode() -> None:
            try:
                client.decode(random_codes(20_000))
            except TokenizerError as error:
                errors.append(error)

        call = threading.Thread(target=decode)
        call.start()
        time.sleep(0.5)
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert time.monotonic() - began < 10
        call.join(PATIENCE)
        assert [type(error) for error in errors] == [ServiceUnavailable]


def test_a_second_signal_ends_it_at_once(start: Start, channel: Callable[[str], grpc.Channel]) -> None:
    server = start().ready()
    stream = OpenStream(channel(server.address))
    server.signal(signal.SIGINT)
    server.wait_for("signal=SIGINT")
    assert server.process.poll() is None
    began = time.monotonic()
    server.signal(signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGTERM
    assert time.monotonic() - began < 5
    assert stream.finish() is grpc.StatusCode.UNAVAILABLE


def test_sigint(start: Start) -> None:
    server = start().ready()
    server.signal(signal.SIGINT)
    assert server.wait() == 0
    assert not server.socket.exists()
    assert not server.complaints()


def test_sigterm_while_it_loads(start: Start, tmp_path: Path) -> None:
    server = start(model=SlowModel(tmp_path / "slow").flags)
    server.wait_for("listening")
    began = time.monotonic()
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert time.monotonic() - began < 10
    assert not server.socket.exists()
    assert not server.complaints()


def test_a_model_that_cannot_be_loaded_ends_it(start: Start, tmp_path: Path) -> None:
    model = SlowModel(tmp_path / "slow")
    server = start(model=model.flags)
    server.wait_for("listening")
    pipe = model.wait_until_read()
    os.write(pipe, b"[]")
    os.close(pipe)
    assert server.wait() == 1
    assert server.lines[-1] == f"Error: {model.folder}/config.json holds a JSON list, not an object"
    assert not server.socket.exists()
    assert not server.complaints()


# ---------------------------------------------------------------- sockets


def test_a_killed_servers_socket_is_replaced_and_its_clients_go_on(start: Start, works: Works) -> None:
    first = start().ready()
    answers: list[Any] = []
    with TokenizerClient(first.address, timeout=120) as client:
        wanted = client.decode(random_codes(2000))
        call = threading.Thread(target=lambda: answers.append(client.decode(random_codes(2000))))
        call.start()
        time.sleep(0.4)
        first.signal(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
        assert stat.S_ISSOCK(first.socket.lstat().st_mode)
        # The call that was in flight is answered by the next server, and the caller need not know.
        second = start(address=first.asked).ready()
        call.join(120)
        assert len(answers) == 1
        assert snr(wanted, answers[0]) >= 90
    works(second)
    assert second.stop() == 0
    assert not first.socket.exists()


def test_the_socket_of_a_successor_is_left_alone(
    start: Start, channel: Callable[[str], grpc.Channel], works: Works
) -> None:
    old = start().ready()
    stream = OpenStream(channel(old.address))
    old.signal(signal.SIGTERM)
    eventually(lambda: not old.socket.exists())
    new = start(address=old.asked).ready()
    works(new)
    assert old.process.poll() is None
    stream.finish()
    assert old.wait() == 0
    assert old.socket.exists()
    works(new)
    assert new.stop() == 0


def test_a_live_socket_is_refused(start: Start, unix_server: ServerProcess, works: Works) -> None:
    began = time.monotonic()
    second = start(address=unix_server.asked)
    assert_one_sentence(refused(second), "a server already listens on", str(unix_server.socket))
    assert time.monotonic() - began < 30
    works(unix_server)


def test_a_file_in_the_sockets_place_is_left_alone(start: Start, folder: Path) -> None:
    (folder / "file").write_text("precious")
    server = start(address=f"unix://{folder}/file")
    assert_one_sentence(refused(server), f"{folder}/file", "is no socket")
    assert (folder / "file").read_text() == "precious"


def test_a_folder_that_is_not_there(start: Start, folder: Path) -> None:
    server = start(address=f"unix://{folder}/absent/s")
    assert_one_sentence(refused(server), "there is no folder", f"{folder}/absent")


def test_a_folder_that_is_not_writable(start: Start, folder: Path) -> None:
    folder.chmod(0o555)
    server = start(address=f"unix://{folder}/s", launcher=UNPRIVILEGED)
    assert_one_sentence(refused(server), "is not writable", str(folder))


def test_a_socket_that_may_not_be_reached(start: Start, folder: Path) -> None:
    """Whether somebody listens cannot be told, so it is not removed."""
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"{folder}/s")
        other.listen()
        (folder / "s").chmod(0)
        server = start(address=f"unix://{folder}/s", launcher=UNPRIVILEGED)
        assert_one_sentence(refused(server), f"{folder}/s", "Permission denied")
        assert (folder / "s").exists()


@pytest.mark.parametrize("length", [107, 108])
def test_the_longest_socket_path(start: Start, folder: Path, works: Works, length: int) -> None:
    place = f"{folder}/".ljust(length, "x")
    server = start(address=f"unix://{place}")
    if length > 107:
        assert_one_sentence(refused(server), "longer than the 107 bytes")
    else:
        works(server.ready())
        assert server.stop() == 0
        assert not Path(place).exists()


@pytest.mark.parametrize(
    ("flags", "mode"), [((), 0o660), (("--socket-mode", "600"), 0o600), (("--socket-mode", "0666"), 0o666)]
)
def test_permissions_of_the_socket(start: Start, flags: tuple[str, ...], mode: int) -> None:
    server = start(*flags)
    server.wait_for("listening")
    assert stat.S_IMODE(server.socket.stat().st_mode) == mode


# ---------------------------------------------------------------- ports


def test_a_port_in_use_is_refused(start: Start, shared_servers: dict[str, ServerProcess], works: Works) -> None:
    live = shared_servers["tcp"]
    assert_one_sentence(refused(start(address=live.address)), live.address, "already listens")
    works(live)
    # By somebody who is no server of ours, and on all interfaces.
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = other.getsockname()[1]
        assert_one_sentence(refused(start(address=f"127.0.0.1:{port}")), f"127.0.0.1:{port}", "already listens")


def test_a_host_that_is_not_this_one(start: Start) -> None:
    # Of the addresses that are set apart for documentation: nobody's.
    assert_one_sentence(refused(start(address="192.0.2.1:0")), "192.0.2.1:0")


def listening_on(server: ServerProcess) -> set[str]:
    """The addresses of the process's listening TCP sockets."""
    inodes = set()
    for descriptor in Path(f"/proc/{server.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.add(os.readlink(descriptor))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{server.pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state != "0A" or f"socket:[{rest[5]}]" not in inodes:
                continue
            host, _, port = local.partition(":")
            # Words of 32 bits, each in this machine's byte order.
            words = struct.pack(f"{len(host) // 8}I", *(int(host[at : at + 8], 16) for at in range(0, len(host), 8)))
            address: Any = ipaddress.ip_address(words)
            address = getattr(address, "ipv4_mapped", None) or address
            found.add(f"{address}:{int(port, 16)}")
    return found


def test_the_default_is_loopback_only(start: Start, works: Works) -> None:
    # Without a host; the default address itself, with its fixed port, may be taken on a machine that runs tests.
    server = start(address=f":{free_port()}").ready()
    assert server.address.startswith("127.0.0.1:")
    assert listening_on(server) == {server.address}
    assert "anybody" not in server.log
    works(server)
    # The port is free again as soon as the server has ended.
    assert server.stop() == 0
    works(start(address=server.address).ready())


def test_the_default_address(start: Start) -> None:
    assert re.fullmatch(r"127\.0\.0\.1:\d+", DEFAULT_ADDRESS)
    server = start(address="")
    eventually(lambda: "listening" in server.log or server.process.poll() is not None)
    # Somebody else may have the port; either way it is this one.
    assert DEFAULT_ADDRESS in server.log


def test_all_interfaces_are_warned_of(start: Start) -> None:
    server = start(address="0.0.0.0:0").ready()
    assert "WARNING" in server.wait_for("anybody who reaches this address")
    port = int(server.address.rpartition(":")[2])
    assert listening_on(server) <= {f"0.0.0.0:{port}", f":::{port}"}
    with TokenizerClient(f"127.0.0.1:{port}") as client:
        assert client.health()


def has_ipv6() -> bool:
    try:
        free_port("::1", socket.AF_INET6)
    except OSError:
        return False
    return True


def test_ipv6_loopback(start: Start, works: Works) -> None:
    server = start(address="[::1]:0")
    if has_ipv6():
        server.ready()
        assert re.fullmatch(r"\[::1\]:\d+", server.address)
        assert "anybody" not in server.log
        works(server)
    else:
        assert_one_sentence(refused(server), "[::1]:0")


def test_of_two_servers_at_once_one_gets_the_socket(start: Start, works: Works) -> None:
    first = start()
    second = start(address=first.asked)
    eventually(lambda: first.process.poll() is not None or second.process.poll() is not None)
    loser, winner = (first, second) if first.process.poll() is not None else (second, first)
    assert loser.wait() == 1
    assert "a server already listens on" in loser.log
    works(winner.ready())


def test_a_locked_folder_is_said(folder: Path, start: Start) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        server = start(address=f"unix://{folder}/s")
        assert server.wait() == 1
        assert "another process keeps the folder" in server.log
    finally:
        os.close(descriptor)

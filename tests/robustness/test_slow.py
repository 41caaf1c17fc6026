"""Callers that stop in the middle: with an answer they do not read, or a request they do not finish."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from process_harness import PATIENCE, RATE, ServerProcess, environment, eventually, noise

from mimo_tokenizer_client import TokenizerClient

# Asks for an answer near the largest there may be, stops dead, and when it may go on says how large it was.
_STOPS_BEFORE_READING = """
import os, signal, sys
import grpc
from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_audio_tokenizer.v1 import tokenizer_pb2_grpc

frames, items, rpc = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
limit = [("grpc.max_receive_message_length", -1)]
stub = tokenizer_pb2_grpc.AudioTokenizerStub(grpc.insecure_channel(sys.argv[1], options=limit))
stub.GetInfo(pb.GetInfoRequest())
item = pb.DecodeItem(codes=pb.Codes(num_quantizers=1, frames=frames, data=bytes(2 * frames)))
if rpc == "Decode":
    call = stub.Decode.future(pb.DecodeRequest(items=[item] * items), timeout=600)
    os.kill(os.getpid(), signal.SIGSTOP)
    print(sum(len(item.audio.pcm) for item in call.result().items))
else:
    call = stub.DecodeLong(pb.DecodeLongRequest(item=item), timeout=600)
    first = len(next(call).pcm)
    os.kill(os.getpid(), signal.SIGSTOP)
    print(first + sum(len(piece.pcm) for piece in call))
"""


def serves_others(server: ServerProcess) -> None:
    """Check that a few calls of all kinds are answered."""
    sound = noise(1.0)
    with TokenizerClient(server.address, timeout=PATIENCE) as client:
        for _ in range(10):
            assert client.health()
            codes = client.encode(sound, RATE)
            assert codes.shape == (20, 26)
            assert client.decode(codes).shape == (26 * 960,)


def stopped(process: subprocess.Popen[str]) -> bool:
    """Whether it stands still; False also while it is still to come to that."""
    assert process.poll() is None
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_answers_that_are_not_read(start: Callable[..., ServerProcess]) -> None:
    server = start()
    # Frames, items, method: 64 MiB less what a message needs beside, a few smaller ones, and some in pieces.
    asked = [(500, 34, "Decode"), (500, 8, "Decode"), (500, 8, "Decode"), *[(4000, 1, "DecodeLong")] * 3]
    command = [sys.executable, "-c", _STOPS_BEFORE_READING, server.address]
    readers = [
        subprocess.Popen([*command, *map(str, one)], stdout=subprocess.PIPE, text=True, env=environment())
        for one in asked
    ]
    try:
        for reader in readers:
            eventually(lambda reader=reader: stopped(reader), 3 * PATIENCE)  # type: ignore[misc]
        serves_others(server)
        for reader in readers[::2]:
            os.kill(reader.pid, signal.SIGCONT)
        # They took their time, and miss nothing.
        for (frames, items, _), reader in list(zip(asked, readers, strict=True))[::2]:
            assert reader.communicate(timeout=2 * PATIENCE)[0] == f"{items * frames * 960 * 4}\n"
        for reader in readers[1::2]:
            reader.kill()
        serves_others(server)
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
            assert reader.stdout is not None
            reader.stdout.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame (RFC 9113, 4.1)."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _half_a_message(method: str, size: int, sent: int) -> bytes:
    """What a client sends that opens a call, tells of a message of `size` bytes and sends `sent` of them."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/mimo_audio_tokenizer.v1.AudioTokenizer/{method}",
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b""
    for name, value in headers.items():  # literal, never indexed, no Huffman (RFC 7541, 6.2.3)
        block += b"\x10" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    opening = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b"") + _frame(1, 4, 1, block)
    return opening + _frame(0, 0, 1, b"\x00" + size.to_bytes(4, "big") + bytes(sent))


def test_requests_that_stop_in_the_middle(start: Callable[..., ServerProcess]) -> None:
    server = start()
    path = "/" + server.address.removeprefix("unix:").lstrip("/")
    connections = []
    try:
        # What is sent is right as far as it goes: a whole message is answered.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as whole:
            whole.settimeout(PATIENCE)
            whole.connect(path)
            whole.sendall(_half_a_message("GetInfo", 0, 0) + _frame(0, 1, 1, b""))
            received = b""
            while b"tiny" not in received:
                received += whole.recv(1 << 16) or pytest.fail(f"it hung up: {received!r}")
        for number in range(60):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connections.append(connection)
            connection.settimeout(PATIENCE)
            connection.connect(path)
            method = ["Encode", "Decode", "EncodeStream"][number % 3]
            connection.sendall(_half_a_message(method, 60 << 20, [0, 1, 10_000, 16_000][number % 4]))
        time.sleep(0.5)
        serves_others(server)
        for connection in connections[::2]:
            connection.close()
        serves_others(server)
        # It waits for the others still: they were a call's beginning, not something to hang up on.
        for connection in connections[1::2]:
            connection.setblocking(False)
            answer = connection.recv(1 << 16)
            assert answer, "it hung up"
            assert b"grpc-status" not in answer
    finally:
        for connection in connections:
            connection.close()

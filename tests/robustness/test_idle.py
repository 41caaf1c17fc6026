"""Callers that have opened a stream and say nothing more: they keep nobody from being answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from process_harness import PATIENCE, RATE, ServerProcess, noise, random_codes

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_audio_tokenizer.v1 import tokenizer_pb2_grpc
from mimo_tokenizer_client import Overloaded, TokenizerClient

IDLE = 100


class IdleStream:
    """A stream that was opened, with two seconds of sound sent, and then nothing.

    Args:
        channel: to the server.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        self._gate = threading.Event()
        self.silent = threading.Event()
        self._pcm = noise(2.0).tobytes()
        stub: Any = tokenizer_pb2_grpc.AudioTokenizerStub(channel)
        self.call = stub.EncodeStream(self._messages(), timeout=600)

    def _messages(self) -> Iterator[pb.EncodeStreamRequest]:
        opening = pb.EncodeStreamOpen(sample_rate=RATE, channels=1, format=pb.SAMPLE_FORMAT_FLOAT32)
        yield pb.EncodeStreamRequest(open=opening)
        yield pb.EncodeStreamRequest(pcm=self._pcm)
        self.silent.set()
        self._gate.wait()

    def wait_until_silent(self) -> None:
        """Wait until all was taken that there is to say."""
        end = time.monotonic() + PATIENCE
        while not self.silent.wait(0.01):
            assert self.call.is_active(), f"a stream was refused: {self.call.details()}"
            assert time.monotonic() < end, "a stream is not read"

    def give_up(self) -> None:
        """Cancel it."""
        self.call.cancel()
        self._gate.set()

    def go_on(self) -> int:
        """Half-close, and return the frames that come."""
        self._gate.set()
        return sum(answer.codes.frames for answer in self.call)


def test_a_hundred_idle_streams(start: Callable[..., ServerProcess], channel: Callable[[str], grpc.Channel]) -> None:
    server = start()
    sound, codes = noise(3.0), random_codes(100)
    with TokenizerClient(server.address, timeout=PATIENCE) as client:
        wanted = client.encode(sound, RATE), client.decode(codes)
    connection = channel(server.address)
    streams = [IdleStream(connection) for _ in range(IDLE)]
    try:
        for stream in streams:
            stream.wait_until_silent()
        # What remains of the calls at a time is for others, and is enough for any number of them in turn.
        answers: list[tuple[Any, Any]] = []
        failed: list[BaseException] = []

        def work() -> None:
            try:
                with TokenizerClient(server.address, timeout=PATIENCE) as client:
                    for _ in range(5):
                        answers.append((client.encode(sound, RATE), client.decode(codes)))
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
        assert failed == []
        assert len(answers) == 40
        for encoded, decoded in answers:
            np.testing.assert_array_equal(encoded, wanted[0])
            np.testing.assert_allclose(decoded, wanted[1], atol=1e-4)
        # They were silent, not gone: those that are not given up still get their codes.
        assert all(stream.call.is_active() for stream in streams)
        assert [stream.go_on() for stream in streams[:5]] == [51] * 5
    finally:
        for stream in streams:
            stream.give_up()


def test_more_streams_than_calls_at_a_time(
    start: Callable[..., ServerProcess], channel: Callable[[str], grpc.Channel]
) -> None:
    """Past the stated limit a call is refused with a word of when to come back; once a stream has gone, it is taken."""
    server = start("--max-concurrent-calls", "10")
    streams = [IdleStream(channel(server.address)) for _ in range(10)]
    try:
        for stream in streams:
            stream.wait_until_silent()
        with TokenizerClient(server.address, timeout=PATIENCE) as client:
            assert client.health()
            assert client.info().limits.max_concurrent_calls == 10
            with pytest.raises(Overloaded) as refused:
                client.decode(random_codes(1), timeout=0.5)
            assert refused.value.detail is not None
            assert refused.value.detail.limit == 10
            assert (refused.value.detail.retry_after or 0) > 0
            streams[0].call.cancel()
            assert client.decode(random_codes(1)).shape == (960,)
    finally:
        for stream in streams:
            stream.give_up()

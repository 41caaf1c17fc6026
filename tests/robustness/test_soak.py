"""Mixed traffic for a long time: everything is answered or refused as it should be, and memory stays where it was."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from process_harness import PATIENCE, RATE, ServerProcess, noise, random_codes
from robustness_harness import FULL, audio_message, decode_item, settled_mib

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_audio_tokenizer.v1 import tokenizer_pb2_grpc
from mimo_tokenizer_client import InvalidInput, TokenizerClient, TooLarge

SECONDS = 600.0 if FULL else 16.0
WARM_UP_SECONDS = 60.0 if FULL else 6.0
# A short run has seen less of what comes, and PyTorch's and the C library's caches are still growing.
ALLOWED_GROWTH, ALLOWED_MIB = (1.02, 0.0) if FULL else (1.10, 32.0)

CALLERS = 4

# Frames: from 40 ms to two minutes, the long ones seldom.
_FRAMES = [1, 1, 1, 5, 25, 25, 100, 280, 280, 750]
_LONG_FRAMES = [1500, 3000]


class Traffic:
    """One caller's calls, of all kinds, one after another.

    Args:
        server: the server.
        seed: of its choices.
        seen: counts what was done.
    """

    def __init__(self, server: ServerProcess, seed: int, seen: Counter[str]) -> None:
        self._rng = random.Random(seed)
        self._seen = seen
        self._address = server.address
        self._client = TokenizerClient(server.address, timeout=PATIENCE)
        self._channel = grpc.insecure_channel(
            server.address, options=[("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        )
        self._stub: Any = tokenizer_pb2_grpc.AudioTokenizerStub(self._channel)
        self._kinds: list[Callable[[], None]] = [
            self._decode,
            self._encode,
            self._decode_vq,
            self._batch,
            self._bad,
            self._cancelled,
        ]
        self._kinds += [self._encode_stream, self._decode_long, self._impatient, self._info, self._new_client]

    def close(self) -> None:
        """Hang up."""
        self._client.close()
        self._channel.close()

    def step(self) -> None:
        """Make one call, and check what comes of it."""
        kind = self._rng.choice(self._kinds)
        kind()
        self._seen[kind.__name__] += 1

    def _frames(self) -> int:
        return self._rng.choice(_LONG_FRAMES if self._rng.random() < 0.03 else _FRAMES)

    def _sound(self) -> Any:
        return noise(self._frames() * 960 / RATE, seed=self._rng.randrange(1000))

    def _decode(self) -> None:
        frames = self._frames()
        assert self._client.decode(random_codes(frames, seed=self._rng.randrange(1000))).shape == (frames * 960,)

    def _encode(self) -> None:
        sound = self._sound()
        # A recording of several segments, too: they are whole frames long.
        assert self._client.encode(sound, RATE, num_quantizers=8).shape == (8, len(sound) // 960 + 1)

    def _decode_vq(self) -> None:
        frames = self._frames()
        assert self._client.decode_vq(random_codes(frames)).shape[0] == frames

    def _batch(self) -> None:
        codes = [random_codes(self._rng.choice(_FRAMES), self._rng.choice([1, 8, 20])) for _ in range(5)]
        codes[2] = np.full((20, 3), 60_000, np.uint16)
        answers = self._client.decode_batch(codes, return_errors=True)
        for number, answer in enumerate(answers):
            assert isinstance(answer, InvalidInput) == (number == 2), answer

    def _bad(self) -> None:
        bad: Callable[[], Any] = self._rng.choice(
            [
                lambda: self._client.decode(np.full((20, 500), 60_000, np.uint16)),
                lambda: self._client.decode_vq(np.zeros((21, 50), np.uint16)),
                lambda: self._client.encode(np.full(50_000, np.nan, np.float32), RATE),
                lambda: self._client.encode(noise(0.01), RATE),
                lambda: self._client.decode(np.zeros((1, 50_000), np.uint16)),
            ]
        )
        with pytest.raises((InvalidInput, TooLarge)):
            bad()

    def _cancelled(self) -> None:
        request = pb.DecodeRequest(items=[decode_item(self._frames()) for _ in range(3)])
        call = self._stub.Decode.future(request, timeout=PATIENCE)
        time.sleep(self._rng.choice([0, 0.002, 0.02]))
        call.cancel()

    def _encode_stream(self) -> None:
        pcm = self._sound().tobytes()
        give_up = self._rng.random() < 0.4

        def messages() -> Iterator[pb.EncodeStreamRequest]:
            opening = pb.EncodeStreamOpen(sample_rate=RATE, channels=1, format=pb.SAMPLE_FORMAT_FLOAT32)
            yield pb.EncodeStreamRequest(open=opening)
            for at in range(0, len(pcm) // 2 if give_up else len(pcm), 65_536):
                yield pb.EncodeStreamRequest(pcm=pcm[at : at + 65_536])
            if give_up:
                gate.wait(PATIENCE)

        gate = threading.Event()
        call = self._stub.EncodeStream(messages(), timeout=PATIENCE)
        if give_up:
            time.sleep(0.01)
            call.cancel()
        else:
            assert sum(answer.codes.frames for answer in call) >= len(pcm) // (4 * 960)
        gate.set()

    def _decode_long(self) -> None:
        frames = self._frames()
        request = pb.DecodeLongRequest(item=decode_item(frames), format=pb.SAMPLE_FORMAT_INT16)
        call = self._stub.DecodeLong(request, timeout=PATIENCE)
        if self._rng.random() < 0.3:
            next(call)
            call.cancel()
        else:
            assert sum(len(answer.pcm) for answer in call) == frames * 960 * 2

    def _impatient(self) -> None:
        request = pb.EncodeRequest(items=[audio_message(self._sound())])
        call = self._stub.Encode.future(request, timeout=0.002)
        assert call.code() in (grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED), call.details()

    def _info(self) -> None:
        assert self._client.health()
        assert self._client.info().model.id == "tiny"

    def _new_client(self) -> None:
        with TokenizerClient(self._address, timeout=PATIENCE) as client:
            assert client.decode_vq(random_codes(3)).shape[0] == 3


@pytest.mark.timeout(900)
def test_memory_stays_where_it_was(start: Callable[..., ServerProcess], record_property: Any) -> None:
    server = start()
    seen: Counter[str] = Counter()
    traffic = [Traffic(server, seed, seen) for seed in range(CALLERS)]
    # The largest of all first, so that the mark is not set below what one call of the mix takes.
    with TokenizerClient(server.address, timeout=PATIENCE) as client:
        for _ in range(CALLERS):
            client.encode(client.decode(random_codes(max(_LONG_FRAMES))), RATE)

    def run(seconds: float) -> float:
        """Traffic of all callers for `seconds`; the server's memory after it, when it has nothing to do."""
        end = time.monotonic() + seconds
        failed: list[BaseException] = []

        def work(one: Traffic) -> None:
            try:
                while time.monotonic() < end and not failed:
                    one.step()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(one,)) for one in traffic]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 3 * PATIENCE)
            assert not thread.is_alive(), "a call hangs"
        if failed:
            raise failed[0]
        return settled_mib(server.pid)

    try:
        before = run(WARM_UP_SECONDS)
        marks = [before]
        for _ in range(4):
            marks.append(run((SECONDS - WARM_UP_SECONDS) / 4))
    finally:
        for one in traffic:
            one.close()
    told = f"resident MiB: {[round(mark, 1) for mark in marks]}; calls: {dict(seen)}"
    record_property("soak", told)
    print(told)
    assert marks[-1] <= ALLOWED_GROWTH * before + ALLOWED_MIB, told
    # Each kind of call was made.
    assert len(seen) == len(traffic[0]._kinds), told

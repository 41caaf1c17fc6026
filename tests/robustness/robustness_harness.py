"""What the robustness tests share: how long they last, requests, and a look at a server's memory."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from process_harness import RATE, free_port, random_codes, short_folder, snr

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb

FULL = os.environ.get("MIMO_ROBUSTNESS") == "full"

# The promise for float32: what is further from the answer alone than this is another answer.
LEAST_SNR = 90.0

Answer = npt.NDArray[Any]


@dataclass(frozen=True)
class Asked:
    """A call, as either client takes it."""

    method: str
    arguments: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def of(self, client: Any, timeout: float) -> Any:
        """Make it."""
        return getattr(client, self.method)(*self.arguments, **self.options, timeout=timeout)


def codes_message(frames: int, quantizers: int = 20, seed: int = 0) -> pb.Codes:
    """Codes that the tiny model takes."""
    codes = random_codes(frames, quantizers, seed)
    return pb.Codes(num_quantizers=quantizers, frames=frames, data=codes.astype("<u2").tobytes())


def decode_item(frames: int, quantizers: int = 20, seed: int = 0, left_context_frames: int = 0) -> pb.DecodeItem:
    """Codes to decode."""
    return pb.DecodeItem(codes=codes_message(frames, quantizers, seed), left_context_frames=left_context_frames)


def decode_request(frames: int) -> pb.DecodeRequest:
    """A call of one item."""
    return pb.DecodeRequest(items=[decode_item(frames)])


def audio_message(samples: npt.NDArray[np.float32], rate: int = RATE) -> pb.Audio:
    """Mono float32 sound."""
    pcm = samples.astype("<f4").tobytes()
    return pb.Audio(sample_rate=rate, channels=1, format=pb.SAMPLE_FORMAT_FLOAT32, pcm=pcm)


def same(wanted: npt.NDArray[Any], got: npt.NDArray[Any]) -> bool:
    """Whether an answer is as exact as promised: codes equal, sound and features at least 90 dB."""
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        return False
    return bool(np.array_equal(wanted, got)) if wanted.dtype.kind == "u" else snr(wanted, got) >= LEAST_SNR


def resident_mib(pid: int) -> float:
    """Resident memory of a process in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"process {pid} is gone")


def settled_mib(pid: int) -> float:
    """Resident memory in MiB of a process that has nothing to do: the least of a second's looks."""
    least = float("inf")
    for _ in range(10):
        time.sleep(0.1)
        least = min(least, resident_mib(pid))
    return least


@contextmanager
def new_address(kind: str) -> Iterator[str]:
    """An address, "unix" or "tcp", that nobody listens on."""
    if kind == "tcp":
        yield f"127.0.0.1:{free_port()}"
        return
    folder = short_folder()
    yield f"unix://{folder / 's'}"
    shutil.rmtree(folder)

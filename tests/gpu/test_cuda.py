"""What only a GPU can show. Not part of `make test`; run `make test-gpu` on a machine with one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from mimo_tokenizer_client import InvalidInput, TokenizerClient
from mimo_tokenizer_server.config import ServeConfig
from mimo_tokenizer_server.engine import DecodeVqWork, DecodeWork, EncodePiece, Engine, Recording
from mimo_tokenizer_server.errors import Reason, RequestError

RATE = 24_000


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    """Tones and noise under a slow envelope, (samples,)."""
    rng = np.random.default_rng(seed)
    time = np.arange(int(seconds * RATE)) / RATE
    tones = sum(np.sin(2 * np.pi * rng.uniform(80, 4000) * time + rng.uniform(0, 6)) for _ in range(6))
    return ((tones / 6 + rng.normal(0, 0.1, len(time))) * (0.3 + 0.3 * np.sin(3 * time))).astype(np.float32)


def engine(device: str, dtype: str = "float32", model: str = "tiny") -> Engine:
    return Engine(ServeConfig(model=model, load_format="dummy", device=device, dtype=dtype))


def encode(engine: Engine, samples: np.ndarray, rate: int = RATE) -> np.ndarray:
    recording = Recording(rate, engine.info.config.num_quantizers, 1)
    (answer,) = engine.run([EncodePiece(recording, samples[:, None], last=True)])
    assert not isinstance(answer, RequestError), answer
    return answer


def decode(engine: Engine, codes: np.ndarray) -> np.ndarray:
    (answer,) = engine.run([DecodeWork(codes, 0, int16=False)])
    assert not isinstance(answer, RequestError), answer
    return answer


def snr(reference: np.ndarray, other: np.ndarray) -> float:
    error = np.square(reference.astype(np.float64) - other).sum()
    return float(10 * np.log10(np.square(reference.astype(np.float64)).sum() / error)) if error else float("inf")


def test_float32_is_that_of_the_cpu() -> None:
    cpu, gpu = engine("cpu"), engine("cuda:0")
    assert gpu.info.device == "cuda:0"
    assert gpu.info.fingerprint == cpu.info.fingerprint
    different = total = 0
    for seed, (seconds, rate) in enumerate([(0.5, RATE), (7.3, RATE), (61.0, RATE), (3.0, 44_100), (2.0, 44_101)]):
        samples = sound(seconds, seed)
        ours, theirs = encode(gpu, samples, rate), encode(cpu, samples, rate)
        assert ours.shape == theirs.shape
        different += int((ours != theirs).any(axis=0).sum())
        total += ours.shape[1]
        assert snr(decode(cpu, theirs), decode(gpu, theirs)) >= 90
    print(f"frames with another code than on the CPU: {different} of {total}")
    # Other kernels round otherwise: a frame on the border between two entries may fall to either side.
    assert different <= total // 500


def test_decode_vq_is_exact() -> None:
    cpu, gpu = engine("cpu"), engine("cuda:0", "bfloat16")
    codes = encode(cpu, sound(3.0))
    (ours,), (theirs,) = gpu.run([DecodeVqWork(codes)]), cpu.run([DecodeVqWork(codes)])
    np.testing.assert_array_equal(ours, theirs)


def test_bfloat16_is_the_default_and_near_float32() -> None:
    full, half = engine("cuda:0"), engine("cuda:0", "auto")
    assert half.info.dtype == "bfloat16"
    codes = encode(full, sound(10.0))
    ratio = snr(decode(full, codes), decode(half, codes))
    same = (encode(half, sound(10.0)) == codes).mean(axis=1)
    print(f"bfloat16: decode {ratio:.1f} dB from float32, equal codes by codebook {np.round(same, 3)}")
    assert ratio > 15


def test_another_default_device_mixes_nothing() -> None:
    expected = encode(engine("cpu"), sound(1.0))
    torch.set_default_device("cuda")
    try:
        on_cpu, on_gpu = engine("cpu"), engine("cuda:0")
        np.testing.assert_array_equal(encode(on_cpu, sound(1.0)), expected)
        assert encode(on_gpu, sound(1.0), 44_100).shape[0] == len(on_gpu.info.config.codebook_sizes)
    finally:
        torch.set_default_device(None)


def test_out_of_memory_fails_one_item() -> None:
    gpu = engine("cuda:0")
    codes = np.zeros((8, 40_000), np.uint16)
    torch.cuda.set_per_process_memory_fraction(0.005, 0)
    try:
        (answer,) = gpu.run([DecodeWork(codes, 0, int16=False)])
        assert isinstance(answer, RequestError)
        assert answer.reason is Reason.OUT_OF_MEMORY
        assert "40000 frames" in str(answer)
        assert len(decode(gpu, codes[:, :10])) == 9600
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server process on the first GPU."""
    path: Path = tmp_path_factory.mktemp("run") / "s.sock"
    command = ["serve", "--load-format", "dummy", "--model", "tiny", "--device", "cuda", "--address", f"unix://{path}"]
    process = subprocess.Popen([sys.executable, "-m", "mimo_tokenizer_server", *command])
    try:
        with TokenizerClient(f"unix://{path}") as client:
            client.wait_until_ready(120)
        yield f"unix://{path}"
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_a_bad_code_leaves_the_device_usable(address: str) -> None:
    with TokenizerClient(address) as client:
        assert client.info().device.device == "cuda:0"
        codes = client.encode(sound(1.0), RATE, num_quantizers=8)
        expected = client.decode(codes)
        bad = codes.copy()
        bad[2, 7] = 128  # the language model's own "empty" id
        with pytest.raises(InvalidInput, match="row 2, frame 7 is 128"):
            client.decode(bad)
        answers = client.decode_batch([codes, bad, codes], return_errors=True)
        assert isinstance(answers[1], InvalidInput)
        for answer in (answers[0], answers[2], client.decode(codes)):
            np.testing.assert_array_equal(answer, expected)


def test_a_gpu_tensor_is_accepted(address: str) -> None:
    samples = sound(1.0)
    with TokenizerClient(address) as client:
        expected = client.encode(samples, RATE)
        codes = client.encode(torch.from_numpy(samples).cuda(), RATE)
        np.testing.assert_array_equal(codes, expected)
        np.testing.assert_array_equal(
            client.decode(torch.from_numpy(codes.astype(np.int64)).cuda()), client.decode(codes)
        )

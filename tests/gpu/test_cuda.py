"""What only a GPU can show. Not part of `make test`; run `make test-gpu` on a machine with one."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from mimo_tokenizer_client import InvalidInput, TokenizerClient, TokenizerError
from mimo_tokenizer_server import memory
from mimo_tokenizer_server.config import ServeConfig
from mimo_tokenizer_server.engine import Engine
from mimo_tokenizer_server.errors import Reason, RequestError
from mimo_tokenizer_server.memory import MemoryLimitError
from mimo_tokenizer_server.model.frontend import SegmentCutter
from mimo_tokenizer_server.work import Answer, DecodeVqWork, DecodeWork, EncodeWork, Kind, Work

RATE = 24_000


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    """Tones and noise under a slow envelope, (samples,)."""
    rng = np.random.default_rng(seed)
    time = np.arange(int(seconds * RATE)) / RATE
    tones = sum(np.sin(2 * np.pi * rng.uniform(80, 4000) * time + rng.uniform(0, 6)) for _ in range(6))
    return ((tones / 6 + rng.normal(0, 0.1, len(time))) * (0.3 + 0.3 * np.sin(3 * time))).astype(np.float32)


def engine(device: str, dtype: str = "float32", model: str = "tiny", **settings: object) -> Engine:
    return Engine(ServeConfig(model=model, load_format="dummy", device=device, dtype=dtype, **settings))


def run(engine: Engine, batch: list[Work]) -> list[np.ndarray]:
    answers = []
    for answer in engine.run(batch):
        assert not isinstance(answer, RequestError), answer
        answers.append(answer)
    return answers


def in_steps(engine: Engine, work: Work) -> np.ndarray:
    computation = engine.begin(work)
    answer: Answer | None = None
    while answer is None:
        answer = computation.step()
    assert not isinstance(answer, RequestError), answer
    return answer


def encode_works(engine: Engine, samples: np.ndarray, rate: int = RATE) -> list[Work]:
    cutter = SegmentCutter(rate, engine.info.config)
    segments = [*cutter.push(samples[:, None]), *cutter.finish()]
    return [EncodeWork(segment, engine.info.config.num_quantizers) for segment in segments]


def encode(engine: Engine, samples: np.ndarray, rate: int = RATE) -> np.ndarray:
    return np.concatenate(run(engine, encode_works(engine, samples, rate)), axis=1)


def decode(engine: Engine, codes: np.ndarray) -> np.ndarray:
    return run(engine, [DecodeWork(codes, 0, int16=False)])[0]


def random_codes(engine: Engine, frames: int, seed: int, books: int | None = None) -> np.ndarray:
    rng = np.random.default_rng(seed)
    sizes = engine.info.config.codebook_sizes[:books]
    return np.stack([rng.integers(0, size, frames) for size in sizes]).astype(np.uint16)


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


LENGTHS = [1, 2, 3, 7, 25, 26, 70, 280, 1, 25, 333, 1900]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_batch_is_as_exact_as_its_items_alone(dtype: str) -> None:
    full, gpu = engine("cuda:0"), engine("cuda:0", dtype)
    codes = [random_codes(gpu, frames, seed, 20 - seed) for seed, frames in enumerate(LENGTHS)]
    batch = run(gpu, [DecodeWork(item, 0, int16=False) for item in codes])
    truth, alone = [decode(full, item) for item in codes], [decode(gpu, item) for item in codes]
    for one, single, together in zip(truth, alone, batch, strict=True):
        if dtype == "float32":
            assert snr(single, together) >= 90
        else:
            assert snr(one, together) >= snr(one, single) - 1
    works = [work for seed in range(8) for work in encode_works(gpu, sound(0.2 + 1.7 * seed, seed))]
    together = np.concatenate(run(gpu, works), axis=1)
    single = np.concatenate([run(gpu, [work])[0] for work in works], axis=1)
    changed = float((together != single).mean())
    print(f"{dtype}: {changed:.2%} of the codes are others than alone")
    assert changed <= (0.001 if dtype == "float32" else 0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_batch_invariant_is_the_same_bits(dtype: str) -> None:
    gpu = engine("cuda:0", dtype, batch_invariant=True)
    assert gpu.info.batch_invariant
    decodes: list[Work] = [
        DecodeWork(random_codes(gpu, frames, seed, 20 - seed), 0, int16=seed % 2 == 0)
        for seed, frames in enumerate(LENGTHS)
    ]
    encodes = [work for seed in range(8) for work in encode_works(gpu, sound(0.2 + 1.7 * seed, seed))]
    for works in (decodes, encodes):
        alone = [run(gpu, [work])[0] for work in works]
        for order in (works, works[::-1], works[3:6]):
            for work, answer in zip(order, run(gpu, list(order)), strict=True):
                np.testing.assert_array_equal(answer, alone[works.index(work)])


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_graphs_change_nothing(dtype: str, invariant: bool) -> None:
    """Batch after batch, each in what the ones before have left in the graphs' tensors."""
    counted: list[tuple[Kind, bool]] = []
    plain = engine("cuda:0", dtype, max_graph_frames=0, batch_invariant=invariant)
    config = ServeConfig(model="tiny", load_format="dummy", device="cuda:0", dtype=dtype, batch_invariant=invariant)
    graphed = Engine(config, lambda kind, hit: counted.append((kind, hit)))
    assert counted == []
    rng = np.random.default_rng(0)
    shapes = [
        [1],
        [512],
        [3, 500],
        [25] * 8,
        [1] * 128,
        [1] * 129,
        [600],
        *(list(rng.integers(1, 60, 9)) for _ in range(6)),
    ]
    for seed, lengths in enumerate(shapes):
        works: list[Work] = [
            DecodeWork(random_codes(plain, frames, seed + item, 1 + (seed + item) % 20), item % 3, int16=item % 2 == 1)
            for item, frames in enumerate(lengths)
        ]
        for ours, theirs in zip(run(graphed, works), run(plain, works), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert counted.pop() == (Kind.DECODE, sum(lengths) <= 512 and len(lengths) <= 128)
        sounds = [sound(frames / 25, seed) for frames in lengths[:40]]
        encodes = [work for samples in sounds for work in encode_works(plain, samples)]
        for ours, theirs in zip(run(graphed, encodes), run(plain, encodes), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        mel_frames = sum(work.segment.frames for work in encodes if isinstance(work, EncodeWork))
        assert counted.pop() == (Kind.ENCODE, mel_frames <= 2048 and len(encodes) <= 32)
    assert counted == []


def test_graphs_are_given_back() -> None:
    """With the engine that they belong to."""
    device = torch.device("cuda:0")
    left = []
    for _ in range(3):
        gpu = engine("cuda:0", "bfloat16")
        decode(gpu, random_codes(gpu, 30, 0))
        del gpu
        memory.release(device)
        left.append(memory.used(device))
    assert left[2] <= left[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_are_as_exact_as_one_piece(dtype: str) -> None:
    full, gpu = engine("cuda:0"), engine("cuda:0", dtype)
    codes = random_codes(gpu, 3_000, 0)
    truth, whole = decode(full, codes), decode(gpu, codes)
    stepwise = in_steps(gpu, DecodeWork(codes, 0, int16=False))
    if dtype == "float32":
        assert snr(whole, stepwise) >= 90
    else:
        assert snr(truth, stepwise) >= snr(truth, whole) - 1
    (work,) = encode_works(gpu, sound(50.0))
    changed = float((in_steps(gpu, work) != run(gpu, [work])[0]).mean())
    print(f"{dtype}: {changed:.2%} of the codes are others than in one piece")
    assert changed <= (0.001 if dtype == "float32" else 0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_known_before_it_is_used(dtype: str) -> None:
    gpu = engine("cuda:0", dtype)
    division = gpu.info.memory
    assert division.limit == sum((division.weights, division.fixed, division.activations, division.state))
    for frames, count in ((1, 1), (1, 500), (25, 40), (280, 1), (280, 20), (3000, 1), (8000, 1)):
        works: list[Work] = [DecodeWork(random_codes(gpu, frames, seed), 0, int16=False) for seed in range(count)]
        predicted = max(count * frames, gpu._least_frames) * gpu._measured[gpu.cost(works[0]).kind].batch_bytes
        measured = memory.peak_of(lambda works=works: run(gpu, works), torch.device("cuda:0"))
        print(f"{dtype}: decode {count} x {frames}: {measured / predicted:.2f} of what was expected")
        # Allocations are rounded up to 512 bytes and 2 MiB.
        assert measured <= predicted + (4 << 20)
    for frames in (3000, 20_000):
        work = DecodeWork(random_codes(gpu, frames, 0), 0, int16=False)
        predicted = frames * gpu._measured[gpu.cost(work).kind].state_bytes
        measured = memory.peak_of(lambda work=work: in_steps(gpu, work), torch.device("cuda:0"))
        print(f"{dtype}: {frames} frames in steps: {measured / predicted:.2f} of what was expected")
        assert measured <= predicted + division.activations


def test_the_memory_limit_is_kept() -> None:
    try:
        gpu = engine("cuda:0", device_memory_limit="1GiB")
        division = gpu.info.memory
        assert division.limit == 1 << 30
        long = DecodeWork(random_codes(gpu, 45_000, 0), 0, int16=False)
        answers = gpu.run([DecodeWork(random_codes(gpu, 2_000, seed), 0, int16=False) for seed in range(40)])
        assert not any(isinstance(answer, RequestError) for answer in answers)
        if gpu.cost(long).bytes <= division.state:
            in_steps(gpu, long)
        assert torch.cuda.max_memory_reserved(0) <= 1 << 30
        with pytest.raises(MemoryLimitError, match="too little memory for this model: the limit is 1 MiB"):
            engine("cuda:0", device_memory_limit="1MiB")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


def test_out_of_memory_halves_the_batch() -> None:
    gpu = engine("cuda:0")
    codes = [random_codes(gpu, 2_000, seed) for seed in range(16)]
    expected = [decode(gpu, item) for item in codes]
    one = memory.peak_of(lambda: decode(gpu, codes[0]), torch.device("cuda:0"))
    memory.release(torch.device("cuda:0"))
    room = torch.cuda.memory_reserved(0) + 3 * one
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory, 0)
    try:
        batch = run(gpu, [DecodeWork(item, 0, int16=False) for item in codes])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
    for whole, answer in zip(expected, batch, strict=True):
        assert snr(whole, answer) >= 90


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


# A server that lets any code through to the device: the only way to a failure that a GPU does not recover from.
CARELESS = """
import sys
import numpy as np
from mimo_tokenizer_server import messages
from mimo_tokenizer_server.__main__ import main
def careless(codes, name, info, limits):
    return np.frombuffer(codes.data, "<u2").reshape(codes.num_quantizers, codes.frames)
messages.check_codes = careless
sys.argv[0] = "mimo-tokenizer"
main()
"""


def test_a_lost_device_ends_the_server(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/s.sock"
    command = ["serve", "--load-format", "dummy", "--model", "tiny", "--device", "cuda", "--address", address]
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen([sys.executable, "-X", "faulthandler", "-c", CARELESS, *command], stderr=stderr)
    try:
        with TokenizerClient(address, unavailable_timeout=0.1) as client:
            client.wait_until_ready(120)
            good = np.zeros((8, 30), np.uint16)
            long = np.zeros((8, 40_000), np.uint16)
            failures: list[str] = []
            waiting = threading.Thread(target=lambda: failures.append(outcome(client, long)))
            waiting.start()
            failures.append(outcome(client, np.full((8, 30), 5000, np.uint16)))
            waiting.join(20)
            failures.append(outcome(client, good))
        assert process.wait(30) == 3
    finally:
        process.send_signal(signal.SIGABRT)  # for its stacks, if it still runs
        process.wait(10)
        print(log.read_text()[-6000:])
    print(failures)
    assert len(failures) == 3
    assert all(failure.startswith("ServiceUnavailable") for failure in failures), failures
    assert "cuda:0 failed" in log.read_text()


def outcome(client: TokenizerClient, codes: np.ndarray) -> str:
    try:
        client.decode(codes, timeout=20)
    except TokenizerError as error:
        return f"{type(error).__name__}: {error}"
    return "answered"

"""32 clients at a time, all methods mixed: each gets the answer it gets alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from process_harness import RATE, ServerProcess, noise, random_codes
from robustness_harness import same

from mimo_tokenizer_client import TokenizerClient

CLIENTS = 32
ROUNDS = 3

Call = Callable[[TokenizerClient], npt.NDArray[Any]]


def calls() -> dict[str, Call]:
    """What the clients ask for: from one frame to several seconds, no two alike."""
    made: dict[str, Call] = {}
    for number, frames in enumerate([1, 1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 25, 31, 50, 64, 97, 128, 160, 256, 280]):
        codes = random_codes(frames, seed=number)
        few = random_codes(frames, quantizers=8, seed=100 + number)
        context = frames // 3 if number % 3 == 0 else 0
        made[f"decode {number}: {frames} frames"] = lambda client, c=codes, left=context: client.decode(c, left)  # type: ignore[misc]
        made[f"decode of 8 codebooks {number}: {frames} frames"] = lambda client, c=few: client.decode(c)  # type: ignore[misc]
        made[f"decode_vq {number}: {frames} frames"] = lambda client, c=codes: client.decode_vq(c)  # type: ignore[misc]
    lengths = [481, 960, 961, 1920, 2400, 5000, 9600, 12_000, 24_000, 25_000, 40_001, 72_000, 100_000, 144_000, 200_000]
    for number, samples in enumerate(lengths):
        sound = noise(samples / RATE, seed=number)
        options: dict[str, int] = (
            {"group_size": 4} if number % 3 == 0 else {"num_quantizers": 8} if number % 3 == 1 else {}
        )
        made[f"encode {number}: {samples} samples"] = lambda client, s=sound, o=options: client.encode(s, RATE, **o)  # type: ignore[misc]
    stereo = np.stack([noise(1.5, 44_100, 1), noise(1.5, 44_100, 2)])
    made["encode of two channels at 44.1 kHz"] = lambda client: client.encode(stereo, 44_100)
    return made


def test_each_of_32_clients_gets_the_answer_it_gets_alone(start: Callable[..., ServerProcess]) -> None:
    server = start()
    asked = calls()
    with TokenizerClient(server.address, timeout=120) as client:
        alone = {name: call(client) for name, call in asked.items()}
        # Asked twice, alone, it says the same bit for bit: else there would be nothing to compare with.
        for name, call in asked.items():
            np.testing.assert_array_equal(call(client), alone[name], err_msg=name)
    together = threading.Barrier(CLIENTS)

    def work(number: int) -> list[str]:
        order = np.random.default_rng(number).permutation(list(asked))
        wrong = []
        with TokenizerClient(server.address, timeout=120) as client:
            client.info()
            for _ in range(ROUNDS):
                together.wait(120)  # so that they meet in the queue
                for name in order[:12]:
                    if not same(alone[name], asked[name](client)):
                        wrong.append(name)
                order = np.roll(order, 12)
        return wrong

    with ThreadPoolExecutor(CLIENTS) as pool:
        wrong = [name for names in pool.map(work, range(CLIENTS)) for name in names]
    assert not wrong, (
        f"{len(wrong)} of {CLIENTS * ROUNDS * 12} answers differ from the answer alone: {sorted(set(wrong))}"
    )


def test_the_items_of_one_call_get_the_answers_they_get_alone(start: Callable[..., ServerProcess]) -> None:
    server = start()
    codes = [random_codes(frames, seed=frames) for frames in [1, 50, 20, 3, 280, 1, 100, 17] * 4]
    sounds = [noise(seconds, seed=number) for number, seconds in enumerate([0.021, 3.0, 0.5, 1.0, 2.2, 0.04] * 4)]
    with TokenizerClient(server.address, timeout=120) as client:
        decoded, encoded = client.decode_batch(codes), client.encode_batch(sounds, RATE)
        assert all(map(same, map(client.decode, codes), decoded))
        assert all(map(same, map(partial(client.encode, sample_rate=RATE), sounds), encoded))

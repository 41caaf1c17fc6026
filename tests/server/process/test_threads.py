"""How many threads a real server computes with."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from process_harness import ServerProcess, random_codes

from mimo_tokenizer_client import TokenizerClient
from mimo_tokenizer_server import threads


@pytest.mark.parametrize(
    ("flags", "env", "expected"),
    [
        (("--threads", "3"), {"OMP_NUM_THREADS": "2"}, 3),
        ((), {"OMP_NUM_THREADS": "2"}, 2),
        ((), {"MIMO_AUDIO_TOKENIZER_THREADS": "2"}, 2),
        ((), {"OMP_NUM_THREADS": ""}, threads.default()),
    ],
)
def test_it_computes_with_as_many_as_it_is_told(
    start: Callable[..., ServerProcess], flags: tuple[str, ...], env: dict[str, str], expected: int
) -> None:
    server = start(*flags, env=env).ready()
    assert re.search(rf"threads={expected}\b", server.wait_for("model loaded"))
    with TokenizerClient(server.address) as client:
        assert client.decode(random_codes(50)).shape == (50 * 960,)
    assert server.stop() == 0

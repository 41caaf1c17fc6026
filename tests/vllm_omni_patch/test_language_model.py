"""The real language model of stage 0, tiny and on the CPU, alone and as two ranks of a real pipeline."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_harness import run_fresh
from pipeline_survey import TINY, build_language_model

Tensors = dict[str, tuple[tuple[int, ...], str, str, float]]
Rank = dict[str, Any]


def start_rank(folder: Path, rendezvous: Path, rank: int, ranks: int) -> Rank:
    """Construct stage 0 as one rank, with vLLM's dummy weights, and ask for empty tensors.

    Args:
        folder: Of a language model with `TINY`.
        rendezvous: A file that all ranks have and nobody has used.
        rank: This process's.
        ranks: How many there are.

    Returns:
        What this rank has, and what it says when it is asked as the runner asks.
    """
    import torch
    from vllm.config import LoadConfig
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    outer = build_language_model(folder, rendezvous, outer=True, rank=rank, ranks=ranks)
    model = outer.model
    DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(outer, outer.vllm_config.model_config)

    def ask(whom: Any) -> Tensors:
        answer = whom.make_empty_intermediate_tensors(batch_size=2, dtype=torch.float16, device="cpu")
        return {
            name: (tuple(value.shape), str(value.dtype), str(value.device), float(value.abs().sum()))
            for name, value in answer.items()
        }

    group = get_pp_group()
    return {
        "classes": [type(part).__name__ for part in (outer, model, model.model)],
        "first": group.is_first_rank,
        "last": group.is_last_rank,
        "layers": [type(layer).__name__ for layer in model.model.model.layers],
        "weights": all(bool(weight.any()) for weight in model.parameters()),
        "of outer": ask(outer),
        "of language model": ask(model),
        "of inner": ask(model.model),
    }


_ZEROS = ((2, TINY["hidden_size"]), "torch.float16", "cpu", 0.0)
TENSORS: Tensors = {"hidden_states": _ZEROS, "residual": _ZEROS}
HERE, ELSEWHERE = "Qwen2DecoderLayer", "PPMissingLayer"


def expected(first: bool, last: bool, layers: list[str]) -> Rank:
    """All of a rank: the outer class and the language model answer as the inner one does."""
    return {
        "classes": ["MiMoAudioForConditionalGeneration", "MiMoAudioLLMForConditionalGeneration", "Qwen2ForCausalLM"],
        "first": first,
        "last": last,
        "layers": layers,
        "weights": True,
        "of outer": TENSORS,
        "of language model": TENSORS,
        "of inner": TENSORS,
    }


@pytest.fixture(scope="module")
def folder(make_language_model: Callable[..., Path]) -> Path:
    """A language model of two layers with which stage 0 can be constructed."""
    return make_language_model(**TINY)


def test_language_model_answers_as_its_inner_language_model(folder: Path, tmp_path: Path) -> None:
    alone = run_fresh(start_rank, folder, tmp_path / "rendezvous", 0, 1)
    assert alone == expected(True, True, [HERE, HERE])


def test_each_rank_of_a_pipeline_of_two_answers_so(folder: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        started = [pool.submit(run_fresh, start_rank, folder, tmp_path / "rendezvous", rank, 2) for rank in range(2)]
        first, second = (process.result() for process in started)
    assert first == expected(True, False, [HERE, ELSEWHERE])
    # The one that the runner asks.
    assert second == expected(False, True, [ELSEWHERE, HERE])

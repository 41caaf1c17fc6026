"""Processors with less than this one has: the same answers, by other kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import mimo_tokenizer_server
from mimo_tokenizer_server.config import BUILT_IN_MODELS

# Decodes with float32 weights, packed where this PyTorch can, and with int8, and keeps both waveforms.
_SCRIPT = """
import sys
from pathlib import Path
import numpy as np
import torch
from mimo_tokenizer_server.model import checkpoint, int8
from mimo_tokenizer_server.model.config import TokenizerConfig
from mimo_tokenizer_server.model.packing import Spans
from mimo_tokenizer_server.model.rows import can_pack, pack
from mimo_tokenizer_server.model.tokenizer import MiMoAudioTokenizer

torch.set_num_threads(1)
config = TokenizerConfig.from_file(Path(sys.argv[1]))
rng = np.random.default_rng(0)
codes = torch.from_numpy(np.stack([rng.integers(0, size, 60) for size in config.codebook_sizes]))
waves = {}
for name in ("float32", "int8"):
    model = MiMoAudioTokenizer(config, torch.device("cpu"), torch.float32)
    checkpoint.fill_random(model, 0, lambda: None)
    if name == "int8":
        int8.check(model.device, model.dtype)
        int8.quantize(model, encoder=False)
    if can_pack(model.device, model.dtype):
        pack(model)
    with torch.inference_mode():
        waves[name] = model.decode(codes, Spans([60])).numpy()
np.savez(sys.argv[2], capability=torch.backends.cpu.get_cpu_capability(), **waves)
"""


def _capped(onednn: str, aten: str, mkl: str) -> dict[str, str]:
    return {"ONEDNN_MAX_CPU_ISA": onednn, "ATEN_CPU_CAPABILITY": aten, "MKL_ENABLE_INSTRUCTIONS": mkl}


# Caps on what the libraries use; what the processor does not have they do without anyway.
_PROCESSORS = {
    "AVX-512 without VNNI": _capped("AVX512_CORE", "avx512", "AVX512"),
    "AVX2": _capped("AVX2", "avx2", "AVX2"),
    "SSE4.1": _capped("SSE41", "default", "SSE4_2"),
}


def _waves(target: Path, env: dict[str, str]) -> dict[str, npt.NDArray[Any]]:
    """What a fresh process decodes."""
    root = str(Path(mimo_tokenizer_server.__file__).parents[1])
    command = [sys.executable, "-c", _SCRIPT, str(BUILT_IN_MODELS["tiny"]), str(target)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root} | env
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    with np.load(target) as stored:
        return dict(stored)


def _snr(signal: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    """Decibels of `signal` over its difference from `other`."""
    difference = float(np.square(signal.astype(np.float64) - other).sum())
    return float("inf") if difference == 0 else 10 * np.log10(np.square(signal.astype(np.float64)).sum() / difference)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, npt.NDArray[Any]]:
    """What is decoded with all that this processor has."""
    return _waves(tmp_path_factory.mktemp("here") / "waves.npz", {})


@pytest.mark.parametrize("processor", _PROCESSORS)
def test_a_processor_with_less(here: dict[str, npt.NDArray[Any]], tmp_path: Path, processor: str) -> None:
    there = _waves(tmp_path / "waves.npz", _PROCESSORS[processor])
    if processor != "AVX-512 without VNNI":
        assert there["capability"] != "AVX512"
    assert _snr(here["float32"], there["float32"]) >= 90
    best = _snr(here["float32"], here["int8"])
    # Weights are rounded to steps twice as large where there are no instructions for int8: up to 6 dB.
    assert 25 < best - 6 <= _snr(here["float32"], there["int8"]) <= best + 1

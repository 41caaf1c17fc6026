"""Models to try batches on, and how two answers to one item are compared."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from comparison import count_ties, signal_to_noise
from model_helpers import CPU, tiny_config
from torch import Tensor

from mimo_tokenizer_server.model import checkpoint
from mimo_tokenizer_server.model.packing import Spans
from mimo_tokenizer_server.model.rows import can_pack, pack
from mimo_tokenizer_server.model.tokenizer import MiMoAudioTokenizer

# Each changes a way in which items could touch each other.
VARIANTS: dict[str, dict[str, Any]] = {
    "published architecture": {},
    "weights as on a GPU": {},
    "no pooling": {"avg_pooler": 1},
    "strides of 3": {"stride_size": 3, "decoder_stride_size": 3, "avg_pooler": 3, "kernel_size": 4},
    "long kernels": {"kernel_size": 5, "decoder_kernel_size": 7},
    "windows": {"encoder_attn_window_size": [5, 3], "decoder_attn_window_size": [9, 0]},
    "wide windows": {
        "encoder_attn_window_size": [200, 90],
        "decoder_attn_window_size": [-1, 2],
        "decoder_causal": False,
    },
    "causal encoder, decoder not": {"encoder_causal": True, "decoder_causal": False},
    "vocoder without a window": {"vocoder_attn_window_size": [-1, -1]},
    "center, hops that do not divide the FFT": {"vocoder_padding": "center", "nfft": 100, "window_size": 90},
    "RMSNorm": {"ln_type": "RMSNorm", "activation_function": "silu"},
}

# What is quantized may differ by so many units in the last place of its norm.
_DRIFT_ULPS = 32


@dataclass
class Tally:
    """What was compared in this run, for the summary at its end."""

    codes: int = 0
    ties: int = 0
    drift: float = 0.0
    lowest_snr: float = math.inf


TALLY = Tally()


@cache
def model(name: str, tile_rows: int | None = None, dtype: torch.dtype = torch.float32) -> MiMoAudioTokenizer:
    """A tiny tokenizer with random weights; the same for the same variant."""
    with torch.inference_mode(False):
        tokenizer = MiMoAudioTokenizer(tiny_config(**VARIANTS[name]), CPU, dtype, tile_rows=tile_rows)
        checkpoint.fill_random(tokenizer, 0, lambda: None)
        if name != "weights as on a GPU" and can_pack(CPU, dtype):
            pack(tokenizer)
        return tokenizer


def least_mel_frames(tokenizer: MiMoAudioTokenizer) -> int:
    """Mel frames that give a code frame."""
    return next(frames for frames in range(1, 100) if tokenizer.config.code_frames(frames) >= 1)


def least_code_frames(tokenizer: MiMoAudioTokenizer) -> int:
    """Code frames that give a sample."""
    return 1 + (tokenizer.config.samples_cut >= tokenizer.config.samples_per_frame)


def check_codes(tokenizer: MiMoAudioTokenizer, mel: Tensor, got: Tensor, features: Tensor) -> None:
    """Assert that an item's codes are those it gets alone.

    Args:
        tokenizer: the model.
        mel: the item.
        got: its codes to be judged, (rows, frames).
        features: what these were quantized from, (frames, d_model).
    """
    spans = Spans([len(mel)])
    expected, _ = tokenizer.encoder.features(mel, spans)
    assert features.shape == expected.shape
    drift = (features - expected).norm(dim=1) / expected.norm(dim=1) / torch.finfo(torch.float32).eps
    assert drift.max() <= _DRIFT_ULPS
    codes = tokenizer.encode(mel, spans, tokenizer.config.num_quantizers)
    ties = count_ties(expected, list(tokenizer.encoder.quantizer.codebooks), codes, got, features - expected)
    assert ties <= 1, f"{ties} ties in {got.numel()} codes are too many to be chance"
    TALLY.codes += got.numel()
    TALLY.ties += ties
    TALLY.drift = max(TALLY.drift, float(drift.max()))


def check_waveform(expected: Tensor, got: Tensor, least: float = 90) -> None:
    """Assert that a waveform is another, to `least` dB."""
    ratio = signal_to_noise(expected, got)
    assert ratio >= least, f"{ratio:.1f} dB"
    TALLY.lowest_snr = min(TALLY.lowest_snr, ratio)


def finish(steps: Generator[float, None, Tensor]) -> Tensor:
    """The answer of a stepwise computation."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            answer: Tensor = stop.value
            return answer

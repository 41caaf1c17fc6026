"""Every config field that changes the function: our answer is the reference's, or the value is refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from comparison import SMALL, check_decode, check_diverse, check_encode, lively_sound, make_pair

from mimo_tokenizer_server.model.config import ConfigError, TokenizerConfig

_16_KHZ = {"sampling_rate": 16000, "nfft": 640, "window_size": 640, "hop_length": 160}

_VARIANTS: dict[str, dict[str, Any]] = {
    "encoder causal": {"encoder_causal": True},
    "decoder not causal": {"decoder_causal": False},
    "encoder window 7 3": {"encoder_attn_window_size": [7, 3]},
    "encoder window 0 0": {"encoder_attn_window_size": [0, 0]},
    "encoder window open to the left": {"encoder_attn_window_size": [-1, 2]},
    "encoder window open to the right": {"encoder_attn_window_size": [5, -1]},
    "encoder window wide": {"encoder_attn_window_size": [300, 20]},
    "encoder window longer than the sound": {"encoder_attn_window_size": [5000, 6000]},
    "encoder causal with a window": {"encoder_causal": True, "encoder_attn_window_size": [9, 4]},
    "encoder causal with a window open to the left": {"encoder_causal": True, "encoder_attn_window_size": [-1, 4]},
    "decoder window 9 0": {"decoder_attn_window_size": [9, 0]},
    "decoder window wide": {"decoder_attn_window_size": [300, 20]},
    "decoder window wide, not causal": {"decoder_causal": False, "decoder_attn_window_size": [300, 20]},
    "decoder window 12 5, not causal": {"decoder_causal": False, "decoder_attn_window_size": [12, 5]},
    "windows null": {
        "encoder_attn_window_size": None,
        "decoder_attn_window_size": None,
        "vocoder_attn_window_size": None,
    },
    "vocoder window none": {"vocoder_attn_window_size": [-1, -1]},
    "vocoder window 0 0": {"vocoder_attn_window_size": [0, 0]},
    "vocoder window 0 10": {"vocoder_attn_window_size": [0, 10]},
    "vocoder window open": {"vocoder_attn_window_size": [-1, 10]},
    "vocoder window wide": {"vocoder_attn_window_size": [500, 100]},
    "RMSNorm": {"ln_type": "RMSNorm"},
    "RMSNorm without pooling": {"ln_type": "RMSNorm", "avg_pooler": 1},
    "avg_pooler 1": {"avg_pooler": 1},
    "avg_pooler 3": {"avg_pooler": 3},
    "no skip": {"encoder_skip_layer_id": None},
    "skip 0": {"encoder_skip_layer_id": 0},
    "skip from the first": {"encoder_skip_layer_id": 1},
    "skip from the last": {"encoder_skip_layer_id": 4},
    "fewer quantizers": {"num_quantizers": 5},
    "one quantizer": {"num_quantizers": 1},
    "short codebook list": {"num_quantizers": 6, "codebook_size": [256, 100]},
    "codebook_size a number": {"num_quantizers": 4, "codebook_size": 200},
    "codebook_size absent": {"num_quantizers": 2, "codebook_size": None},
    "center padding": {"vocoder_padding": "center"},
    "kernel 1": {"kernel_size": 1},
    "kernel 4": {"kernel_size": 4},
    "kernel 5": {"kernel_size": 5},
    "stride 1": {"stride_size": 1, "decoder_stride_size": 1},
    "stride 1, decoder kernel 1": {"stride_size": 1, "decoder_stride_size": 1, "decoder_kernel_size": 1},
    "stride 2, decoder kernel 2": {"decoder_kernel_size": 2},
    "stride 3": {"stride_size": 3, "decoder_stride_size": 3, "decoder_kernel_size": 3},
    "stride 3, decoder kernel 5": {"stride_size": 3, "decoder_stride_size": 3, "decoder_kernel_size": 5},
    "stride 3, pool 3, kernel 5": {"stride_size": 3, "decoder_stride_size": 3, "avg_pooler": 3, "kernel_size": 5},
    "window shorter than the FFT": {"window_size": 600},
    "odd window": {"window_size": 601},
    "FFT 1024, hop 256": {"nfft": 1024, "window_size": 1024, "hop_length": 256},
    "FFT 512, hop 200, center": {
        "nfft": 512,
        "window_size": 400,
        "hop_length": 200,
        "vocoder_padding": "center",
        "n_mels": 64,
    },
    "hop half the FFT": {"nfft": 480, "window_size": 480, "n_mels": 40},
    "fmin": {"fmin": 80},
    "fmax": {"fmin": 20, "fmax": 7600},
    "relu": {"activation_function": "relu"},
    "silu": {"activation_function": "silu"},
    "swish": {"activation_function": "swish"},
    "gelu_new": {"activation_function": "gelu_new"},
    "gelu_pytorch_tanh": {"activation_function": "gelu_pytorch_tanh"},
    "rope_theta 500": {"rope_theta": 500},
    "rope_theta 1000000": {"rope_theta": 1_000_000},
    "16 kHz": _16_KHZ,
    "16 kHz, 80 bins": _16_KHZ | {"n_mels": 80, "fmax": 8000},
    "22.05 kHz": {"sampling_rate": 22050, "nfft": 1024, "window_size": 1024, "hop_length": 256, "n_mels": 80},
    "80 bins": {"n_mels": 80},
    "other widths": {
        "d_model": 48,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 6,
        "vocoder_dim": 40,
        "vocoder_attention_heads": 1,
        "encoder_layers": 3,
        "decoder_layers": 1,
        "vocoder_num_layers": 1,
        "encoder_ffn_dim": 50,
    },
    "scaled embedding, which is never applied": {"scale_embedding": True},
    "short audio limit, which is never applied": {"max_audio_seconds": 1},
}


@pytest.mark.parametrize("name", _VARIANTS)
def test_variant(name: str, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, _VARIANTS[name], seed=5)
    config = pair.ours.config
    rate = config.sampling_rate
    codes = check_encode(pair, lively_sound(int(12.3 * rate), rate, seed=6))
    check_diverse(codes)
    check_encode(pair, lively_sound(config.min_samples, rate, seed=7))
    for frames in (1, 3, 330):
        if frames * config.samples_per_frame > config.samples_cut:
            check_decode(pair, frames)
    if config.num_quantizers > 1:
        check_decode(pair, 20, rows=config.num_quantizers // 2)


def _use(changes: dict[str, Any]) -> None:
    """Build the reference with `changes`, and encode and decode with it."""
    values = copy.deepcopy(SMALL | changes)
    tokenizer = reference.build(values, 0)
    mel = reference.log_mel(values, lively_sound(24_000, 24_000, seed=0))
    codes = reference.encode_segment(tokenizer, mel)
    waveform = reference.decode(tokenizer, codes)
    # As many samples as the frames stand for, or it is no tokenizer.
    frame = values["hop_length"] * values["stride_size"] * values["avg_pooler"]
    assert len(waveform) == codes.shape[1] * frame


# Where the reference fails as well: the field that is at fault, and its value.
_FAILING: dict[str, tuple[str, dict[str, Any]]] = {
    "strides that do not match": ("decoder_stride_size", {"decoder_stride_size": 3}),
    "decoder kernel shorter than its stride": ("decoder_kernel_size", {"decoder_kernel_size": 1}),
    "odd head dimension": ("encoder_attention_heads", {"d_model": 60, "decoder_attention_heads": 2}),
    "heads that do not divide": ("decoder_attention_heads", {"decoder_attention_heads": 7}),
    "vocoder heads that do not divide": ("vocoder_attention_heads", {"vocoder_attention_heads": 5}),
    "odd FFT": ("nfft", {"nfft": 961}),
    "window longer than the FFT": ("window_size", {"window_size": 1200}),
    "odd overlap": ("hop_length", {"hop_length": 241}),
    "unknown activation": ("activation_function", {"activation_function": "softsign-ish"}),
    "unknown norm": ("ln_type", {"ln_type": "BatchNorm"}),
    "unknown padding": ("vocoder_padding", {"vocoder_padding": "valid"}),
    "unknown rope": ("rope_type", {"rope_type": "spiral"}),
    "linear rope": ("rope_type", {"rope_type": "linear"}),
    "dynamic rope": ("rope_type", {"rope_type": "dynamic"}),
    "yarn": ("rope_type", {"rope_type": "yarn"}),
    "no quantizer": ("num_quantizers", {"num_quantizers": 0}),
    "empty codebook list": ("codebook_size", {"codebook_size": []}),
    "empty codebook": ("codebook_size", {"codebook_size": [0]}),
    "no stride": ("stride_size", {"stride_size": 0}),
    "no pooling": ("avg_pooler", {"avg_pooler": 0}),
    "no kernel": ("kernel_size", {"kernel_size": 0}),
    "no heads": ("encoder_attention_heads", {"encoder_attention_heads": 0}),
    "no hop": ("hop_length", {"hop_length": 0}),
    "no bins": ("n_mels", {"n_mels": 0}),
    "a window of one number": ("encoder_attn_window_size", {"encoder_attn_window_size": [4]}),
    "fmin above fmax": ("fmin", {"fmin": 9000, "fmax": 8000}),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", _FAILING)
def test_what_the_reference_cannot_run_is_refused(name: str) -> None:
    field, changes = _FAILING[name]
    with pytest.raises(Exception):  # noqa: B017, PT011
        _use(changes)
    with pytest.raises(ConfigError, match=rf"\b{field} is "):
        TokenizerConfig.from_dict(SMALL | changes)


def test_what_is_said_of_the_reference_holds_without_changes() -> None:
    _use({})


def test_no_value_of_the_variants_is_the_default() -> None:
    plain = TokenizerConfig.from_dict(SMALL)
    same = [name for name, changes in _VARIANTS.items() if TokenizerConfig.from_dict(SMALL | changes) == plain]
    # Null windows mean other values than the small model's only if those differ from the defaults.
    assert same == ["windows null"]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_numbers_that_are_none(value: float) -> None:
    with pytest.raises(ConfigError, match="rope_theta is "):
        TokenizerConfig.from_dict(SMALL | {"rope_theta": value})

"""Our tokenizer beside the reference on one checkpoint, and how their answers are compared."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reference
import torch
from torch import Tensor

from mimo_tokenizer_server.model import checkpoint
from mimo_tokenizer_server.model.config import SEGMENT_MEL_FRAMES, TokenizerConfig
from mimo_tokenizer_server.model.frontend import Segment, SegmentCutter
from mimo_tokenizer_server.model.packing import Spans
from mimo_tokenizer_server.model.tokenizer import MiMoAudioTokenizer

# The published architecture, made small; odd numbers of layers, so that none stands in for another.
SMALL: dict[str, Any] = {
    "max_audio_seconds": 1800,
    "stride_size": 2,
    "avg_pooler": 2,
    "d_model": 64,
    "scale_embedding": False,
    "kernel_size": 3,
    "activation_function": "gelu",
    "encoder_layers": 4,
    "encoder_skip_layer_id": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "encoder_causal": False,
    "encoder_attn_window_size": [-1, -1],
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "decoder_kernel_size": 3,
    "decoder_stride_size": 2,
    "decoder_causal": True,
    "decoder_attn_window_size": [-1, -1],
    "nfft": 960,
    "vocoder_dim": 32,
    "vocoder_intermediate_dim": 64,
    "vocoder_num_layers": 3,
    "n_mels": 128,
    "sampling_rate": 24000,
    "hop_length": 240,
    "window_size": 960,
    "vocoder_padding": "same",
    "fmin": 0,
    "fmax": None,
    "num_quantizers": 20,
    "codebook_size": [1024, 1024] + [128] * 18,
    "threshold_ema_dead_code": 2,
    "rope_theta": 10000,
    "rope_type": "default",
    "ln_type": "LayerNorm",
    "vocoder_attention_heads": 4,
    "vocoder_attn_window_size": [40, 10],
}

# Two distances closer than this many units in the last place of |x|^2 + |e|^2 are one to float32.
_TIE_ULPS = 4

# What is quantized may differ by so many units in the last place of its norm: sums in another order. The reference
# itself is up to 8 away from what float64 gives, and the small model's features up to 15 apart.
_DRIFT_ULPS = 32


@dataclass
class Tally:
    """What was compared in this run, for the summary at its end."""

    codes: int = 0
    ties: int = 0
    lowest_snr: float = math.inf


TALLY = Tally()


@dataclass(frozen=True)
class Pair:
    """The reference and our tokenizer, with the same weights."""

    values: dict[str, Any]
    reference: Any
    ours: MiMoAudioTokenizer
    folder: Path


def make_pair(folder: Path, changes: dict[str, Any], seed: int, max_shard_size: str = "1GB") -> Pair:
    """Let the reference write a checkpoint of `SMALL` with `changes` into `folder`, and load it."""
    values = copy.deepcopy(SMALL | changes)
    # The reference lengthens a short codebook_size in place: give it a copy, and its file the original.
    theirs = reference.build(copy.deepcopy(values), seed)
    sound = lively_sound(20 * values["sampling_rate"], values["sampling_rate"], seed + 1000)
    reference.fit_codebooks(theirs, reference.log_mel(values, sound), seed)
    theirs.save_pretrained(folder, max_shard_size=max_shard_size)
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stored | {"codebook_size": values["codebook_size"]}))
    return Pair(values, theirs, load(folder), folder)


def load(folder: Path) -> MiMoAudioTokenizer:
    """Our tokenizer on the CPU in float32, from a checkpoint."""
    config = TokenizerConfig.from_file(folder / "config.json")
    ours = MiMoAudioTokenizer(config, torch.device("cpu"), torch.float32)
    checkpoint.load(ours, folder, lambda: None)
    return ours


def lively_sound(samples: int, rate: int, seed: int) -> Tensor:
    """Noise and gliding tones, each swelling and fading at its own pace: (samples,) float32 within [-1, 1]."""
    generator = torch.Generator().manual_seed(seed)
    time = torch.arange(samples, dtype=torch.float64) / rate
    sound = 0.2 * torch.randn(samples, generator=generator) * torch.sin(math.tau * 0.7 * time).square()
    for pitch, glide, pace in torch.rand(6, 3, generator=generator).tolist():
        phase = math.tau * 0.35 * rate * pitch**2 * time + 40 * torch.sin(math.tau * 3 * glide * time)
        sound = sound + 0.12 * torch.sin(phase) * torch.sin(math.tau * 2 * pace * time + pitch).square()
    return sound.clamp(-1, 1).float()


@torch.inference_mode()
def encode(ours: MiMoAudioTokenizer, sound: Tensor, rows: int) -> Tensor:
    """Our codes (rows, frames) of a whole recording at the model's rate, its segments packed."""
    return encode_with_features(ours, sound, rows)[0]


@torch.inference_mode()
def encode_with_features(ours: MiMoAudioTokenizer, sound: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Our codes of a whole recording, and what was quantized: (frames, d_model)."""
    cutter = SegmentCutter(ours.config.sampling_rate, ours.config)
    segments: list[Segment] = [*cutter.push(sound.numpy()[:, None]), *cutter.finish()]
    mels = [ours.mel.segment(segment) for segment in segments]
    packed, spans = torch.cat(mels), Spans([len(mel) for mel in mels])
    return ours.encode(packed, spans, rows), ours.encoder.features(packed, spans)[0]


def check_encode(pair: Pair, sound: Tensor, rows: int | None = None) -> Tensor:
    """Assert that each segment's codes are what the reference gives for that segment alone; return them."""
    rows = rows or pair.ours.config.num_quantizers
    codes, features = encode_with_features(pair.ours, sound, rows)
    segments = reference.log_mel(pair.values, sound).split(SEGMENT_MEL_FRAMES)
    lengths = [pair.ours.config.code_frames(len(mel)) for mel in segments]
    assert codes.shape == (rows, sum(lengths))
    assert codes.shape[1] == pair.ours.config.audio_code_frames(len(sound))
    for mel, part, ours in zip(segments, codes.split(lengths, dim=1), features.split(lengths), strict=True):
        theirs = reference.encode_segment(pair.reference, mel)
        expected = reference.features(pair.reference, mel)
        drift = (ours - expected).norm(dim=1) / expected.norm(dim=1) / torch.finfo(torch.float32).eps
        assert drift.max() <= _DRIFT_ULPS
        ties = count_ties(expected, reference.codebooks(pair.reference), theirs, part, ours - expected)
        TALLY.codes += part.numel()
        TALLY.ties += ties
        # About one in 100,000 codes is; more in one segment are chance, but not many more.
        assert ties <= 2 + part.numel() // 20_000, f"{ties} ties in {part.numel()} codes are too many to be chance"
    return codes


def count_ties(features: Tensor, books: list[Tensor], theirs: Tensor, ours: Tensor, drift: Tensor | None = None) -> int:
    """The number of frames whose codes part at a tie.

    Once a frame's codes part, what is left over for the next codebook is another: only the first difference is judged.

    Args:
        features: (frames, dim), what the reference quantized.
        books: its codebooks.
        theirs: its codes, (codebooks, frames).
        ours: (rows, frames), with as many rows or fewer.
        drift: what we quantized, less `features`, (frames, dim); None for nothing.

    Raises:
        AssertionError: a code differs, and in float64 the two entries are neither equally near, nor so near that
            `drift` brings one past the other.
    """
    theirs = theirs[: len(ours)]
    assert theirs.shape == ours.shape
    different = theirs != ours
    frames = different.any(0).nonzero().flatten().tolist()
    for frame in frames:
        row = int(different[:, frame].int().argmax())
        residual = features[frame].clone()
        for book, code in zip(books, theirs[:row, frame].tolist(), strict=False):
            residual -= book[code]
        distances = (residual.double() - books[row].double()).square().sum(1)
        both = torch.stack((theirs[row, frame], ours[row, frame]))
        size = residual.double().square().sum() + books[row][both].double().square().sum(1).max()
        rounding = _TIE_ULPS * torch.finfo(torch.float32).eps * size
        explained = torch.zeros(2, dtype=torch.float64)
        if drift is not None:
            # The difference of two squared distances is linear in what is quantized.
            apart = books[row][both[1]].double() - books[row][both[0]].double()
            explained[1] = (2 * drift[frame].double() @ apart).clamp(min=0)
        assert (distances[both] - distances.min() <= rounding + explained).all(), (
            f"frame {frame}, codebook {row}: {both.tolist()} at distances {distances[both].tolist()}"
        )
    return len(frames)


def signal_to_noise(expected: Tensor, got: Tensor) -> float:
    """Decibels; infinite for equal signals."""
    assert got.shape == expected.shape
    assert got.dtype == torch.float32
    signal = expected.double().square().sum()
    noise = (expected.double() - got.double()).square().sum()
    assert signal.isfinite()
    assert signal > 0
    assert noise.isfinite()
    return float(10 * torch.log10(signal / noise))


@torch.inference_mode()
def check_decode(pair: Pair, frames: int, rows: int | None = None, seed: int = 0) -> None:
    """Assert that decode_vq and decode of random codes are the reference's."""
    config = pair.ours.config
    generator = torch.Generator().manual_seed(seed + frames)
    sizes = config.codebook_sizes[:rows]
    codes = torch.stack([torch.randint(size, (frames,), generator=generator) for size in sizes])
    spans = Spans([frames])
    torch.testing.assert_close(
        pair.ours.decode_vq(codes, spans), reference.decode_vq(pair.reference, codes), rtol=0, atol=1e-6
    )
    waveform = pair.ours.decode(codes, spans)
    assert waveform.shape == (frames * config.samples_per_frame - config.samples_cut,)
    snr = signal_to_noise(reference.decode(pair.reference, codes), waveform)
    assert snr >= 100, f"{snr:.1f} dB"
    TALLY.lowest_snr = min(TALLY.lowest_snr, snr)


def check_diverse(codes: Tensor) -> None:
    """Assert that the codes of some seconds vary enough for a comparison of them to mean something."""
    assert min(len(row.unique()) for row in codes) >= 8
    assert len(codes.unique(dim=1).T) >= codes.shape[1] // 10

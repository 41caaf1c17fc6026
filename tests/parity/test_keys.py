"""Every key of a published checkpoint is used, and where it belongs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import comparison
import pytest
import reference
import torch
from comparison import SMALL, lively_sound, make_pair
from safetensors.torch import load_file, save_file
from torch import Tensor

from mimo_tokenizer_server.model import checkpoint
from mimo_tokenizer_server.model.packing import Spans
from mimo_tokenizer_server.model.tokenizer import MiMoAudioTokenizer

# One layer fewer would do for the code, but not to tell the first from the rest.
_TINY: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_skip_layer_id": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 24,
    "vocoder_dim": 16,
    "vocoder_attention_heads": 2,
    "vocoder_intermediate_dim": 24,
    "vocoder_num_layers": 2,
    "n_mels": 20,
    "num_quantizers": 3,
    "codebook_size": [64, 32, 16],
}
_TRAINING_ONLY = ("embed_avg", "cluster_size", "inited")


@torch.inference_mode()
def _answers(ours: MiMoAudioTokenizer, mel: Tensor) -> dict[str, Tensor]:
    features, _ = ours.encoder.features(mel, Spans([len(mel)]))
    codes = torch.stack([torch.arange(40) % size for size in ours.config.codebook_sizes])
    spans = Spans([40])
    return {"features": features, "vq": ours.decode_vq(codes, spans), "waveform": ours.decode(codes, spans)}


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_every_key_is_used(norm: str, tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "whole", _TINY | {"ln_type": norm}, 0)
    mel = reference.log_mel(SMALL | _TINY, lively_sound(20_000, 24_000, seed=0))
    weights = load_file(tmp_path / "whole/model.safetensors")
    before = _answers(pair.ours, mel)
    config = pair.ours.config

    def answers_with(changed: dict[str, Tensor]) -> tuple[dict[str, Tensor], str]:
        folder = tmp_path / "changed"
        folder.mkdir(exist_ok=True)
        shutil.copy(tmp_path / "whole/config.json", folder)
        save_file(changed, folder / "model.safetensors")
        ours = MiMoAudioTokenizer(config, torch.device("cpu"), torch.float32)
        fingerprint = checkpoint.load(ours, folder, lambda: None)
        return _answers(ours, mel), fingerprint

    same, fingerprint = answers_with(weights)
    assert all(torch.equal(same[name], before[name]) for name in before)

    generator = torch.Generator().manual_seed(0)
    wrong: list[str] = []
    for key, weight in weights.items():
        noise = 0.1 * torch.randn(weight.shape, generator=generator)
        after, print_after = answers_with(weights | {key: weight + noise})
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        if key.rsplit(".", 1)[-1] in _TRAINING_ONLY:
            expected = set()
        elif key.endswith(".embed"):
            expected = {"vq", "waveform"}
        elif key.startswith("encoder."):
            expected = {"features"}
        else:
            expected = {"waveform"}
        if changed != expected or (print_after == fingerprint) != (not expected):
            wrong.append(f"{key}: {changed}")
    assert wrong == []
    assert len(weights) == {"LayerNorm": 127, "RMSNorm": 111}[norm]


def test_training_only_keys_may_be_absent(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, _TINY, 1)
    mel = reference.log_mel(SMALL | _TINY, lively_sound(20_000, 24_000, seed=0))
    weights = load_file(tmp_path / "model.safetensors")
    needed = {key: weight for key, weight in weights.items() if key.rsplit(".", 1)[-1] not in _TRAINING_ONLY}
    assert len(weights) - len(needed) == 3 * 3
    save_file(needed, tmp_path / "model.safetensors")
    after = _answers(comparison.load(tmp_path), mel)
    assert all(torch.equal(after[name], answer) for name, answer in _answers(pair.ours, mel).items())

"""The reference implementation: the tokenizer inside the vllm-omni wheel, loaded without vLLM.

`make test` unpacks the wheel into an ignored folder; nothing of it is kept in the project.
"""

from __future__ import annotations

import importlib
import logging
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[2] / ".cache/reference/vllm_omni/model_executor/models/mimo_audio"
_PACKAGE = "reference_mimo_audio"


def _import() -> tuple[types.ModuleType, types.ModuleType]:
    """The reference's model and config modules."""
    if not FOLDER.is_dir():
        raise RuntimeError(f"the reference is not at {FOLDER}; `make reference` puts it there")
    if _PACKAGE not in sys.modules:
        # The two modules need of vLLM nothing but its logger; the package's own __init__ would need all of it.
        logger = types.ModuleType("vllm.logger")
        logger.init_logger = logging.getLogger  # type: ignore[attr-defined]
        sys.modules.setdefault("vllm", types.ModuleType("vllm"))
        sys.modules.setdefault("vllm.logger", logger)
        package = types.ModuleType(_PACKAGE)
        package.__path__ = [str(FOLDER)]
        sys.modules[_PACKAGE] = package
    return (
        importlib.import_module(f"{_PACKAGE}.modeling_audio_tokenizer"),
        importlib.import_module(f"{_PACKAGE}.config_mimo_audio"),
    )


def build(config: dict[str, Any], seed: int) -> Any:
    """A reference tokenizer with random weights, every one of them off its neutral value."""
    model_module, config_module = _import()
    torch.manual_seed(seed)
    tokenizer = model_module.MiMoAudioTokenizer(config_module.MiMoAudioTokenizerConfig(**config)).eval()
    with torch.no_grad():
        for name, parameter in tokenizer.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith("fc1.weight"):
                parameter.mul_(6)  # as far out as an activation's bends
        for layer in tokenizer.encoder.quantizer.vq.layers:
            layer._codebook.embed.normal_(std=0.5)
    return tokenizer


@torch.inference_mode()
def encode_segment(tokenizer: Any, mel: torch.Tensor) -> torch.Tensor:
    """Codes (num_quantizers, frames) of one mel segment (frames, n_mels), alone."""
    codes, _ = tokenizer.encoder.encode(mel, torch.tensor([len(mel)], device=mel.device), return_codes_only=True)
    return codes


def mel_front_end(config: dict[str, Any], device: str | torch.device = "cpu") -> Callable[[torch.Tensor], torch.Tensor]:
    """Samples of a whole recording to its mel frames (frames, n_mels), with the reference worker's parameters."""
    from torchaudio.transforms import MelSpectrogram

    transform = MelSpectrogram(
        sample_rate=config["sampling_rate"],
        n_fft=config["nfft"],
        win_length=config["window_size"],
        hop_length=config["hop_length"],
        f_min=config["fmin"],
        f_max=config["fmax"],
        n_mels=config["n_mels"],
        power=1.0,
        center=True,
    ).to(device)
    return lambda samples: torch.log(torch.clip(transform(samples.to(device)[None]), min=1e-7))[0].T


@torch.inference_mode()
def log_mel(config: dict[str, Any], samples: torch.Tensor) -> torch.Tensor:
    """A recording's mel frames (frames, n_mels)."""
    return mel_front_end(config)(samples)


@torch.inference_mode()
def features(tokenizer: Any, mel: torch.Tensor) -> torch.Tensor:
    """What the quantizer is given for one mel segment (frames, n_mels), alone: (code frames, d_model)."""
    _, packed, _, _ = tokenizer.encoder.encode(mel, torch.tensor([len(mel)]), use_quantizer=False)
    return packed


@torch.inference_mode()
def fit_codebooks(tokenizer: Any, mel: torch.Tensor, seed: int) -> None:
    """Spread the codebooks over what each of them is given for `mel`, as training does, so that codes vary."""
    generator = torch.Generator().manual_seed(seed)
    residual = features(tokenizer, mel)
    for book in codebooks(tokenizer):
        # Normally distributed, with their mean and covariance.
        mean = residual.mean(0)
        mixture = torch.randn(len(book), len(residual), generator=generator) / len(residual) ** 0.5
        book.copy_(mean + 0.8 * mixture @ (residual - mean))
        nearest = torch.cdist(residual, book).argmin(1)
        residual = residual - book[nearest]


@torch.inference_mode()
def codebooks(tokenizer: Any) -> list[torch.Tensor]:
    """The entries of each codebook, (size, d_model)."""
    return [layer._codebook.embed for layer in tokenizer.encoder.quantizer.vq.layers]


@torch.inference_mode()
def decode_vq(tokenizer: Any, codes: torch.Tensor) -> torch.Tensor:
    """The quantizer's output (frames, d_model) for codes (rows, frames)."""
    return tokenizer.encoder.decode_vq(codes)


@torch.inference_mode()
def decode(tokenizer: Any, codes: torch.Tensor) -> torch.Tensor:
    """The waveform (samples,) of codes (rows, frames)."""
    return tokenizer.decode(codes)[0, 0]

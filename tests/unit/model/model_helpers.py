"""A tiny model, checkpoints of it written by hand, and a look at what PyTorch allocates."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mimo_tokenizer_server.model import checkpoint
from mimo_tokenizer_server.model.config import TokenizerConfig
from mimo_tokenizer_server.model.packing import Spans
from mimo_tokenizer_server.model.tokenizer import MiMoAudioTokenizer

CPU = torch.device("cpu")

TINY: dict[str, Any] = {
    "model_type": "mimo_audio_tokenizer",
    "stride_size": 2,
    "avg_pooler": 2,
    "d_model": 16,
    "kernel_size": 3,
    "activation_function": "gelu",
    "encoder_layers": 2,
    "encoder_skip_layer_id": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "encoder_causal": False,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 24,
    "decoder_kernel_size": 3,
    "decoder_stride_size": 2,
    "decoder_causal": True,
    "nfft": 96,
    "vocoder_dim": 16,
    "vocoder_attention_heads": 2,
    "vocoder_intermediate_dim": 24,
    "vocoder_num_layers": 2,
    "vocoder_attn_window_size": [4, 1],
    "n_mels": 12,
    "sampling_rate": 2400,
    "hop_length": 24,
    "window_size": 96,
    "vocoder_padding": "same",
    "num_quantizers": 3,
    "codebook_size": [64, 32, 16],
    "ln_type": "LayerNorm",
}


def tiny_config(**changes: Any) -> TokenizerConfig:
    """The config of `TINY`, with changes."""
    return TokenizerConfig.from_dict(TINY | changes)


def tiny_tokenizer(dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> MiMoAudioTokenizer:
    """A tiny tokenizer with random weights, on the CPU."""
    tokenizer = MiMoAudioTokenizer(tiny_config(**changes), CPU, dtype)
    checkpoint.fill_random(tokenizer, seed, lambda: None)
    return tokenizer


def random_codes(config: TokenizerConfig, frames: int, seed: int = 0) -> Tensor:
    """Codes of all codebooks: int64 (num_quantizers, frames)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randint(size, (frames,), generator=generator) for size in config.codebook_sizes])


def random_mel(config: TokenizerConfig, frames: int, seed: int = 0) -> Tensor:
    """Something of a log mel spectrogram's size: (frames, n_mels)."""
    return 2 * torch.randn(frames, config.n_mels, generator=torch.Generator().manual_seed(seed)) - 4


def encode_alone(tokenizer: MiMoAudioTokenizer, mel: Tensor, rows: int | None = None) -> Tensor:
    """Codes of one segment."""
    return tokenizer.encode(mel, Spans([len(mel)]), rows or tokenizer.config.num_quantizers)


def decode_alone(tokenizer: MiMoAudioTokenizer, codes: Tensor) -> Tensor:
    """Waveform of one item."""
    return tokenizer.decode(codes, Spans([codes.shape[1]]))


def published_shapes(config: TokenizerConfig) -> dict[str, tuple[int, ...]]:
    """The keys of a published checkpoint that are needed, with the shapes of their tensors."""
    dim, bins, pool = config.d_model, config.n_mels, config.avg_pooler
    shapes: dict[str, tuple[int, ...]] = {}

    def norm(name: str, width: int) -> None:
        shapes[f"{name}.weight"] = (width,)
        if config.ln_type == "LayerNorm":
            shapes[f"{name}.bias"] = (width,)

    def layers(part: str, depth: int, width: int, inner: int) -> None:
        for number in range(depth):
            layer = f"{part}.layers.{number}"
            norm(f"{layer}.self_attn_layer_norm", width)
            norm(f"{layer}.final_layer_norm", width)
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                shapes[f"{layer}.self_attn.{name}.weight"] = (width, width)
                if name != "k_proj":
                    shapes[f"{layer}.self_attn.{name}.bias"] = (width,)
            shapes.update({f"{layer}.fc1.weight": (inner, width), f"{layer}.fc1.bias": (inner,)})
            shapes.update({f"{layer}.fc2.weight": (width, inner), f"{layer}.fc2.bias": (width,)})
        norm(f"{part}.layer_norm", width)

    layers("encoder", config.encoder_layers, dim, config.encoder_ffn_dim)
    layers("decoder", config.decoder_layers, dim, config.decoder_ffn_dim)
    layers("decoder.vocoder", config.vocoder_num_layers, config.vocoder_dim, config.vocoder_intermediate_dim)
    for name, source in (("conv1", bins), ("conv2", dim)):
        shapes.update({f"encoder.{name}.weight": (dim, source, config.kernel_size), f"encoder.{name}.bias": (dim,)})
    ups = [("dconv2", bins, config.decoder_kernel_size)]
    if pool != 1:
        shapes["encoder.down_sample_layer.0.weight"] = (dim, dim, pool)
        norm("encoder.down_sample_norm", dim)
        ups.append(("dconv1", dim, pool))
    for name, out, kernel in ups:
        shapes.update({f"decoder.{name}.conv.weight": (dim, out, kernel), f"decoder.{name}.conv.bias": (out,)})
        shapes.update({f"decoder.{name}.norm.weight": (out,), f"decoder.{name}.norm.bias": (out,)})
    for number, size in enumerate(config.codebook_sizes):
        shapes[f"encoder.quantizer.vq.layers.{number}._codebook.embed"] = (size, dim)
    head = "decoder.vocoder.head"
    shapes["decoder.vocoder.embeddings.weight"] = (config.vocoder_dim, bins)
    shapes.update({f"{head}.out.weight": (config.nfft + 2, config.vocoder_dim), f"{head}.out.bias": (config.nfft + 2,)})
    shapes[f"{head}.istft.window"] = (config.nfft,)
    return shapes


def training_shapes(config: TokenizerConfig) -> dict[str, tuple[int, ...]]:
    """The keys that a published checkpoint holds beside those, left over from training."""
    shapes: dict[str, tuple[int, ...]] = {}
    for number, size in enumerate(config.codebook_sizes):
        book = f"encoder.quantizer.vq.layers.{number}._codebook"
        shapes |= {f"{book}.embed_avg": (size, config.d_model), f"{book}.cluster_size": (size,)}
        shapes |= {f"{book}.inited": (1,)}
    return shapes


def random_weights(config: TokenizerConfig, seed: int = 0, training: bool = True) -> dict[str, Tensor]:
    """A checkpoint's tensors, float32."""
    generator = torch.Generator().manual_seed(seed)
    shapes = published_shapes(config) | (training_shapes(config) if training else {})
    weights = {}
    for key, shape in shapes.items():
        scale = 0.3 if len(shape) == 1 else math.prod(shape[1:]) ** -0.5
        weights[key] = torch.randn(shape, generator=generator) * scale
    weights["decoder.vocoder.head.istft.window"] = torch.hann_window(config.nfft)
    return weights


def write_checkpoint(folder: Path, weights: dict[str, Tensor], shards: int = 1) -> Path:
    """Write tensors into `folder`, in one file or in some with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        keys = sorted(weights)[shard::shards]
        save_file({key: weights[key] for key in keys}, folder / name)
        weight_map |= dict.fromkeys(keys, name)
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    """Write the index of a checkpoint in several files."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def load(config: TokenizerConfig, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[MiMoAudioTokenizer, str]:
    """A tokenizer with a checkpoint's weights, and the fingerprint."""
    tokenizer = MiMoAudioTokenizer(config, CPU, dtype)
    return tokenizer, checkpoint.load(tokenizer, folder, lambda: None)


class Watch(TorchDispatchMode):
    """What PyTorch's operators gave while it was active: how often each ran, and the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.largest = 0
        self.largest_from = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and look at its results."""
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.calls[name] += 1
        for leaf in tree_leaves(out):
            # A view takes no memory: what counts is what it views.
            if isinstance(leaf, Tensor):
                elements = leaf.untyped_storage().nbytes() // leaf.element_size() if leaf.element_size() else 0
                if elements > self.largest:
                    self.largest, self.largest_from = elements, name
        return out

"""The tokenizer's configuration, as published in `config.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

MODEL_TYPE = "mimo_audio_tokenizer"
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish")
NORMS = ("LayerNorm", "RMSNorm")
PADDINGS = ("same", "center")

# Longer recordings (11 days) are nobody's, and their frames would no longer fit the contract's fields.
MAX_AUDIO_SECONDS = 1_000_000

# Frames of mel that are encoded together; a longer recording is cut. Not in the published config: the model was
# trained and is served with it.
SEGMENT_MEL_FRAMES = 6000

# Keys that a Hugging Face config carries for its own bookkeeping; they do not change the function.
_BOOKKEEPING = frozenset(
    {
        "architectures",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "tie_word_embeddings",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "use_cache",
    }
)


class ConfigError(ValueError):
    """A configuration that this implementation refuses; the sentence names each field at fault."""


@dataclass(frozen=True)
class TokenizerConfig:
    """Every published field; the defaults are those of the published format for an absent field.

    Two fields never change the function and are accepted with any value: `scale_embedding` (the published model
    computes the scale and does not apply it) and `threshold_ema_dead_code` (training only).
    """

    max_audio_seconds: float = 1800.0
    stride_size: int = 2
    avg_pooler: int = 1
    d_model: int = 768
    scale_embedding: bool = True
    kernel_size: int = 3
    activation_function: str = "gelu"
    encoder_layers: int = 8
    encoder_skip_layer_id: int | None = None
    encoder_attention_heads: int = 12
    encoder_ffn_dim: int = 3072
    encoder_causal: bool = False
    encoder_attn_window_size: tuple[int, int] = (-1, -1)
    decoder_layers: int = 8
    decoder_attention_heads: int = 12
    decoder_ffn_dim: int = 3072
    decoder_kernel_size: int = 3
    decoder_stride_size: int = 2
    decoder_causal: bool = True
    decoder_attn_window_size: tuple[int, int] = (-1, -1)
    nfft: int = 1024
    vocoder_dim: int = 512
    vocoder_intermediate_dim: int = 4096
    vocoder_num_layers: int = 30
    n_mels: int = 80
    sampling_rate: int = 24000
    hop_length: int = 240
    window_size: int = 1024
    vocoder_padding: str = "same"
    fmin: float = 0.0
    fmax: float | None = None
    num_quantizers: int = 12
    codebook_size: tuple[int, ...] = (1024,)
    threshold_ema_dead_code: float = 10.0
    position_embedding_type: str = "rope"
    rope_theta: float = 10000.0
    rope_type: str = "default"
    ln_type: str = "LayerNorm"
    vocoder_attention_heads: int = 4
    vocoder_attn_window_size: tuple[int, int] = (40, 10)

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """Entries of each of the `num_quantizers` codebooks; a short list is continued with its last value."""
        sizes = self.codebook_size[: self.num_quantizers]
        return sizes + (self.codebook_size[-1],) * (self.num_quantizers - len(sizes))

    @property
    def samples_per_frame(self) -> int:
        """Samples that one code frame stands for."""
        return self.hop_length * self.stride_size * self.avg_pooler

    @property
    def samples_cut(self) -> int:
        """Samples that a decoded item is shorter than frames * samples_per_frame."""
        return self.hop_length if self.vocoder_padding == "center" else 0

    @property
    def segment_samples(self) -> int:
        """Samples of a segment; each is encoded alone."""
        return SEGMENT_MEL_FRAMES * self.hop_length

    @property
    def min_samples(self) -> int:
        """Least samples that give a code frame, and more than half an FFT, which the reflect padding needs."""
        mel_frames = 1
        while self.code_frames(mel_frames) < 1:
            mel_frames += 1
        return max(self.nfft // 2 + 1, (mel_frames - 1) * self.hop_length)

    def code_frames(self, mel_frames: int) -> int:
        """Code frames that the encoder gives for `mel_frames` of one segment, at least 0."""
        after_conv1 = mel_frames + 3 - self.kernel_size
        after_conv2 = (after_conv1 + 2 - self.kernel_size) // self.stride_size + 1
        return max(0, -(-after_conv2 // self.avg_pooler))

    def audio_code_frames(self, samples: int) -> int:
        """Code frames of a recording of `samples` at the model's rate, over all its segments."""
        full, rest = divmod(samples // self.hop_length + 1, SEGMENT_MEL_FRAMES)
        return full * self.code_frames(SEGMENT_MEL_FRAMES) + (self.code_frames(rest) if rest else 0)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TokenizerConfig:
        """Build a checked config.

        Raises:
            ConfigError: naming every field whose value is not supported.
        """
        model_type = values.get("model_type", MODEL_TYPE)
        if model_type != MODEL_TYPE:
            raise ConfigError(f"model_type is {model_type!r}; this server runs {MODEL_TYPE!r}")
        known: dict[str, Any] = {}
        problems: list[str] = []
        for field in fields(cls):
            if field.name not in values:
                continue
            try:
                known[field.name] = _coerce(field.name, str(field.type), values[field.name])
            except (TypeError, ValueError) as error:
                problems.append(str(error))
        if problems:
            raise ConfigError("config.json: " + "; ".join(problems))
        config = cls(**known)
        problems = list(_problems(config))
        if problems:
            raise ConfigError("config.json: " + "; ".join(problems))
        return config

    @classmethod
    def from_file(cls, path: Path) -> TokenizerConfig:
        """Read and check a `config.json`.

        Raises:
            ConfigError: the file is absent or no JSON object, or a field's value is not supported.
        """
        return cls.from_dict(read_json(path))

    def canonical_json(self) -> str:
        """The fields in one fixed spelling; equal for configs that say the same."""
        values = asdict(self) | {"codebook_size": self.codebook_sizes}
        return json.dumps(values, sort_keys=True, separators=(",", ":"))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ConfigError: the file is absent or holds no JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a JSON {type(values).__name__}, not an object")
    return values


def unknown_fields(values: Mapping[str, Any]) -> list[str]:
    """Fields of a config.json that mean nothing to this implementation, nor to the published one."""
    known = {field.name for field in fields(TokenizerConfig)}
    return sorted(name for name in values if name not in known | _BOOKKEEPING and not name.startswith("_"))


def _coerce(name: str, annotation: str, value: Any) -> Any:
    """Check a JSON value against a field's annotation; lists become tuples."""

    def refuse(expected: str) -> ValueError:
        return ValueError(f"{name} is {value!r}; it must be {expected}")

    def integer(item: Any) -> int:
        if isinstance(item, bool) or not isinstance(item, (int, float)) or not math.isfinite(item) or item != int(item):
            raise refuse("a whole number" if annotation.startswith("int") else "a list of whole numbers")
        return int(item)

    if annotation.endswith("| None") and value is None:
        return None
    if annotation.startswith("tuple"):
        if value is None:
            return {field.name: field.default for field in fields(TokenizerConfig)}[name]
        if name == "codebook_size" and not isinstance(value, (list, tuple)):
            return (integer(value),)
        if not isinstance(value, (list, tuple)) or not value:
            raise refuse("a list of whole numbers")
        if annotation == "tuple[int, int]" and len(value) != 2:
            raise refuse("a list of two whole numbers, left and right")
        return tuple(integer(item) for item in value)
    if annotation == "bool":
        if not isinstance(value, bool):
            raise refuse("true or false")
        return value
    if annotation.startswith("int"):
        return integer(value)
    if annotation.startswith("float"):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise refuse("a number")
        return float(value)
    if not isinstance(value, str):
        raise refuse("a string")
    return value


def _problems(config: TokenizerConfig) -> list[str]:
    """Every reason why this implementation would not compute the published function for `config`."""
    problems: list[str] = []

    def check(ok: bool, field: str, allowed: str) -> None:
        if not ok:
            problems.append(f"{field} is {getattr(config, field)!r}; supported: {allowed}")

    for field in (
        "stride_size", "avg_pooler", "d_model", "kernel_size", "encoder_layers", "encoder_attention_heads",
        "encoder_ffn_dim", "decoder_layers", "decoder_attention_heads", "decoder_ffn_dim", "decoder_kernel_size",
        "decoder_stride_size", "nfft", "vocoder_dim", "vocoder_intermediate_dim", "vocoder_num_layers", "n_mels",
        "sampling_rate", "hop_length", "window_size", "num_quantizers", "vocoder_attention_heads",
        "max_audio_seconds", "rope_theta",
    ):  # fmt: skip
        check(getattr(config, field) > 0, field, "more than 0")
    if problems:  # what follows divides by them
        return problems

    check(config.max_audio_seconds <= MAX_AUDIO_SECONDS, "max_audio_seconds", f"at most {MAX_AUDIO_SECONDS}")
    check(config.activation_function in ACTIVATIONS, "activation_function", ", ".join(ACTIVATIONS))
    check(config.ln_type in NORMS, "ln_type", ", ".join(NORMS))
    check(config.vocoder_padding in PADDINGS, "vocoder_padding", ", ".join(PADDINGS))
    check(config.position_embedding_type == "rope", "position_embedding_type", "rope")
    check(config.rope_type == "default", "rope_type", "default")
    check(
        config.encoder_skip_layer_id is None or 0 <= config.encoder_skip_layer_id <= config.encoder_layers,
        "encoder_skip_layer_id",
        f"null, or 0 to encoder_layers ({config.encoder_layers})",
    )
    for dim, heads in (
        ("d_model", "encoder_attention_heads"),
        ("d_model", "decoder_attention_heads"),
        ("vocoder_dim", "vocoder_attention_heads"),
    ):
        # RoPE rotates pairs of dimensions within a head.
        check(
            getattr(config, dim) % (2 * getattr(config, heads)) == 0,
            heads,
            f"divisors of {dim} ({getattr(config, dim)}) that leave an even head dimension",
        )
    for window in ("encoder_attn_window_size", "decoder_attn_window_size", "vocoder_attn_window_size"):
        check(min(getattr(config, window)) >= -1, window, "-1 for no bound, or 0 and more, on either side")
    check(
        config.decoder_stride_size == config.stride_size,
        "decoder_stride_size",
        f"the encoder's stride_size ({config.stride_size})",
    )
    check(
        config.decoder_kernel_size >= config.decoder_stride_size,
        "decoder_kernel_size",
        f"at least decoder_stride_size ({config.decoder_stride_size})",
    )
    check(
        all(1 <= size <= 65536 for size in config.codebook_size),
        "codebook_size",
        "1 to 65536 entries each, as codes travel as uint16",
    )
    check(config.nfft % 2 == 0, "nfft", "even numbers")
    check(config.window_size <= config.nfft, "window_size", f"at most nfft ({config.nfft})")
    # A periodic Hann window starts with a zero: at hops over half a window some sample is covered by (nearly) none.
    check(config.hop_length <= config.nfft // 2, "hop_length", f"at most nfft / 2 ({config.nfft // 2})")
    check(
        config.vocoder_padding != "same" or (config.nfft - config.hop_length) % 2 == 0,
        "hop_length",
        f"as even or odd as nfft ({config.nfft}), with vocoder_padding 'same'",
    )
    nyquist = config.sampling_rate / 2
    check(0 <= config.fmin < (config.fmax or nyquist), "fmin", f"0 to fmax ({config.fmax or nyquist:g} Hz)")
    check(config.fmax is None or 0 < config.fmax <= nyquist, "fmax", f"null, or at most {nyquist:g} Hz")
    return problems

"""Linear layers in int8, dynamically quantized, and what that costs in fidelity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from .config import TokenizerConfig
from .frontend import Segment
from .packing import Spans
from .rows import Activation, Linear, linear_layers
from .tokenizer import MiMoAudioTokenizer

# Of the largest magnitude in a row, also where that is nothing but zeros.
_SMALLEST = 1e-12

_SIGNAL_SECONDS = 2.0

# In dB, of answers that are the same.
_HIGHEST_SNR = 200.0


class QuantizeError(ValueError):
    """Quantization that cannot be had here; the sentence says why."""


def check(device: torch.device, dtype: torch.dtype) -> None:
    """Find out whether layers can be quantized on `device`, of weights of `dtype`.

    Raises:
        QuantizeError: they cannot.
    """
    if device.type != "cpu" or dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        raise QuantizeError(f"int8 is for float32 weights on cpu, and these would be {name} on {device}")
    try:
        Int8Product(torch.ones(2, 32), None)(torch.ones(1, 32))
    except (AttributeError, RuntimeError) as error:  # what the operators are called is not promised by anyone
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise QuantizeError(f"PyTorch {torch.__version__} has no int8 products on this processor: {reason}") from error


class Int8Product:
    """A weight in int8, a scale for each of its rows, and inputs quantized as they come, a scale for each row of those.

    With scales of their own rows do not see each other, and their sums, of whole numbers, are exact: a row's answer is
    the same bits whatever it is computed with.

    Args:
        weight: float32 (out, in).
        bias: (out,).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        scale = _largest(weight).div_(_largest_weight())
        self._weight: Tensor = torch.ops.onednn.qlinear_prepack(torch.div(weight, scale).round_().to(torch.int8), None)
        self._scale = scale.flatten()
        self._zero_point = torch.zeros(len(weight), dtype=torch.int64)
        self._bias = bias

    @property
    def nbytes(self) -> int:
        """What the weight takes, with its scales."""
        parts = (self._weight, self._scale, self._zero_point)
        return sum(part.numel() * part.element_size() for part in parts)

    def __call__(self, x: Tensor, activation: Activation | None = None, added: Tensor | None = None) -> Tensor:
        """Map float32 (rows, in) to (rows, out), and that by `activation`, or add it to `added`."""
        scale = _largest(x).div_(127)
        # By way of int8, to which PyTorch converts ten times as fast. To flip the highest bit adds 128.
        values = torch.div(x, scale).round_().to(torch.int8).view(torch.uint8).bitwise_xor_(128)
        out = _multiply(values, 128, self._weight, self._scale, self._zero_point)
        out = out.mul_(scale) if self._bias is None else torch.addcmul(self._bias, out, scale, out=out)
        if added is not None:
            return out.add_(added)
        return out if activation is None else activation(out)


def _multiply(values: Tensor, zero: int, weight: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """Map uint8 (rows, in), in which `zero` stands for 0, to float32 (rows, out)."""
    out: Tensor = torch.ops.onednn.qlinear_pointwise(
        values, 1.0, zero, weight, scale, zero_point, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return out


@cache
def _largest_weight() -> int:
    """The largest quantized weight with which sums do not overflow.

    Where a processor has no instructions for it (VNNI), oneDNN adds pairs of products in 16 bits: 2 * 255 * 64 is the
    most that fits. It is tried, as an environment variable can have oneDNN do without them.
    """
    rows, columns, out = 32, 512, 256
    values = torch.full((rows, columns), 255, dtype=torch.uint8)
    weight = torch.ops.onednn.qlinear_prepack(torch.full((out, columns), 127, dtype=torch.int8), None)
    sums = _multiply(values, 0, weight, torch.ones(out), torch.zeros(out, dtype=torch.int64))
    return 127 if bool((sums == 255 * 127 * columns).all()) else 64


def _largest(rows: Tensor) -> Tensor:
    """The largest magnitude of each row: (rows, columns) to (rows, 1)."""
    # Faster than a norm, and than both at once.
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    return torch.maximum(high, low.neg_()).clamp_(min=_SMALLEST)


@dataclass(frozen=True)
class Loss:
    """How far a quantized model's answers to a built-in signal are from those in float32.

    Attributes:
        decode_snr: of the sound that it decodes, in dB.
        equal_codes: share of the codes that are the same, all codebooks counted.
        encoder: whether the encoder is quantized; if not, all codes are the same.
    """

    decode_snr: float
    equal_codes: float
    encoder: bool


def layers(model: MiMoAudioTokenizer, *, encoder: bool) -> list[Linear]:
    """What is quantized: the linear layers of the decoder's transformer, and of the encoder's if that is wanted.

    Those of the vocoder take little of the time, and would cost more than a decibel.
    """
    return linear_layers(model.decoder.layers) + (linear_layers(model.encoder.layers) if encoder else [])


@torch.inference_mode()
def quantize(model: MiMoAudioTokenizer, *, encoder: bool) -> Loss:
    """Quantize `layers`, one by one: there is never more than one weight twice.

    Args:
        model: on the CPU, with float32 weights, which in these layers are not packed.
        encoder: as for `layers`.

    Raises:
        QuantizeError: the model answers with silence, or with what is no number.
    """
    segment = _signal(model.config)
    codes = _encode(model, segment)
    spans = Spans([codes.shape[1]])
    sound = model.decode(codes, spans)
    for layer in layers(model, encoder=encoder):
        layer.pack(Int8Product)
    equal = float((_encode(model, segment) == codes).double().mean()) if encoder else 1.0
    difference = model.decode(codes, spans) - sound
    signal, noise = (float(x.double().square().sum()) for x in (sound, difference))
    if not (0 < signal < math.inf and noise < math.inf):
        raise QuantizeError("what int8 costs cannot be told: the model answers the built-in signal with silence or NaN")
    return Loss(min(_HIGHEST_SNR, 10 * math.log10(signal / noise)) if noise else _HIGHEST_SNR, equal, encoder)


def _encode(model: MiMoAudioTokenizer, segment: Segment) -> Tensor:
    return model.encode(model.mel.segment(segment), Spans([segment.frames]), model.config.num_quantizers)


def _signal(config: TokenizerConfig) -> Segment:
    """Something like a voice: a gliding tone with its harmonics, in syllables, and a little noise."""
    rate = config.sampling_rate
    samples = max(config.min_samples, int(_SIGNAL_SECONDS * rate))
    time = np.arange(samples) / rate
    phase = 2 * np.pi * (100 * time + 20 * time**2)
    voice = sum(np.sin(order * phase) / order for order in range(1, 13))
    syllables = 0.5 - 0.5 * np.cos(2 * np.pi * 4 * time)
    noise = np.random.default_rng(0).normal(size=samples)
    sound = (0.2 * syllables * voice + 0.005 * noise).astype(np.float32)
    return Segment(sound, 0, rate, 0, samples // config.hop_length + 1, samples)

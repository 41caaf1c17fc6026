"""What the device is asked for: small objects, born in service.py, waiting in the scheduler, computed in the engine.

Each carries all that its answer depends on, so it can be computed in any company, and again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import RequestError
from .model.frontend import Segment


class Kind(enum.Enum):
    """What can be computed together."""

    ENCODE = enum.auto()
    DECODE = enum.auto()
    DECODE_VQ = enum.auto()


@dataclass(eq=False)
class EncodeWork:
    """A segment of a recording. Answered with uint16 codes (num_quantizers, frames)."""

    segment: Segment
    num_quantizers: int


@dataclass(eq=False)
class DecodeVqWork:
    """uint16 codes (num_quantizers, frames), checked. Answered with float32 (frames, d_model)."""

    codes: npt.NDArray[np.uint16]


@dataclass(eq=False)
class DecodeWork:
    """uint16 codes (num_quantizers, frames), checked. Answered with samples, float32 or int16."""

    codes: npt.NDArray[np.uint16]
    left_context_frames: int
    int16: bool


Work = EncodeWork | DecodeVqWork | DecodeWork
Answer = npt.NDArray[Any] | RequestError


@dataclass(frozen=True)
class Cost:
    """What a piece of work takes, known before it is computed.

    Attributes:
        kind: what it can be computed together with.
        frames: its code frames.
        seconds: on the device, alone, at the best rate seen so far.
        bytes: of the device's memory: in a batch its part of the activations, in steps its state.
        stepwise: whether it is computed in steps, as it is too long for a batch.
    """

    kind: Kind
    frames: int
    seconds: float
    bytes: int
    stepwise: bool

"""Protobuf's wire format, where its library would do too much with what is large.

In Python a large message is copied when it is parsed, when a field is read, set or measured, and several times over
when it is serialized; each copy of 64 MiB keeps every other thread waiting for some 50 ms. What is here looks into a
message before it is parsed, and writes a message around arrays that are copied once.

The format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

MessageT = TypeVar("MessageT", bound=Message)

# Wire types; groups (3, 4) are in no message here.
_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}


def has_more_fields(data: bytes, most: int) -> bool:
    """Whether a serialized message has more than `most` fields at its top.

    Raises:
        DecodeError: it is no message, as far as it was looked at.
    """
    position = 0
    for _ in range(most):
        if position >= len(data):
            return False
        tag, position = _read_varint(data, position)
        if tag & 7 == _VARINT:
            _, position = _read_varint(data, position)
        elif tag & 7 == _BYTES:
            size, position = _read_varint(data, position)
            position += size
        elif tag & 7 in _FIXED:
            position += _FIXED[tag & 7]
        else:
            raise DecodeError("groups, which no message here has")
    return position < len(data)


def with_bytes(message: Message, field: str, values: npt.NDArray[Any]) -> list[Any]:
    """A message whose field `field`, of type bytes, is an array's memory.

    Returns:
        Buffers that, joined, are the serialized message.
    """
    head = message.SerializeToString()
    payload = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    return [head, _header(message, field, len(payload)), payload] if len(payload) else [head]


def with_message(message: Message, field: str, parts: Sequence[Any]) -> list[Any]:
    """A message with one more message in its field `field`, which is given in buffers; see `with_bytes`."""
    return [message.SerializeToString(), _header(message, field, sum(map(len, parts))), *parts]


def _header(message: Message, field: str, size: int) -> bytes:
    number: int = message.DESCRIPTOR.fields_by_name[field].number
    return _varint(number << 3 | _BYTES) + _varint(size)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at `position`, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise DecodeError("a truncated number")

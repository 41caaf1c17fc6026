"""Messages that nobody should send, made from good ones: protobuf's wire format taken apart, bent and put together.

A message is a list of `Field`s. Those whose value is again such a list are submessages; the descriptors tell which.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from process_harness import RATE, noise, random_codes

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["AudioTokenizer"]
METHODS = tuple(method.name for method in SERVICE.methods)

VARINT, FIXED64, BYTES, GROUP_START, GROUP_END, FIXED32 = range(6)
# Not protobuf's: a field whose value is its bytes already, tag and all.
ENCODED = -1

# A message that is bent again and again does not outgrow this by much.
_MAX_REPEATED_BYTES = 1 << 20

_NUMBERS = (0, 1, 2, 3, 20, 21, 127, 128, 1024, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1)
_SAMPLES = (0.0, 1.0, -1.0, 32_768.0, 1e6, 1.0001e6, 1e30, 3.4e38, float("nan"), float("inf"), -float("inf"), 1e-45)

# A message under construction.
Message: TypeAlias = "list[Field]"


@dataclass
class Field:
    """One field on the wire.

    Attributes:
        number: of the field.
        wire: protobuf's wire type.
        value: a number, bytes, or a submessage; for a broken field the bytes that stand for all of it.
        length: what stands before bytes as their length; None for the truth.
    """

    number: int
    wire: int
    value: int | bytes | Message
    length: int | None = None

    def encoded(self) -> bytes:
        """Its bytes."""
        if self.wire == ENCODED:
            assert isinstance(self.value, bytes)
            return self.value
        tag = varint(self.number << 3 | self.wire)
        if isinstance(self.value, int):
            if self.wire == VARINT:
                return tag + varint(self.value)
            return tag + (self.value & 2**64 - 1).to_bytes(8, "little")[: 4 if self.wire == FIXED32 else 8]
        data = self.value if isinstance(self.value, bytes) else encode(self.value)
        if self.wire == BYTES:
            return tag + varint(len(data) if self.length is None else self.length) + data
        return tag + data


def varint(value: int) -> bytes:
    """Protobuf's encoding of an unsigned number."""
    data = bytearray()
    while True:
        data.append(value & 0x7F | (0x80 if value > 0x7F else 0))
        value >>= 7
        if not value:
            return bytes(data)


def encode(message: Message) -> bytes:
    """A message's bytes."""
    return b"".join(field.encoded() for field in message)


def take_apart(message: Any) -> Message:
    """The fields of a protobuf message."""
    fields = []
    for descriptor, value in message.ListFields():
        for one in value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else [value]:
            if descriptor.message_type is not None:
                fields.append(Field(descriptor.number, BYTES, take_apart(one)))
            elif isinstance(one, (str, bytes)):
                fields.append(Field(descriptor.number, BYTES, one.encode() if isinstance(one, str) else one))
            else:
                fields.append(Field(descriptor.number, VARINT, int(one) & 2**64 - 1))
    return fields


# ---------------------------------------------------------------- good ones, or nearly


class Fuzzer:
    """Makes calls from a seed.

    Args:
        rng: where all chance comes from.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def messages(self, method: str) -> list[bytes]:
        """The serialized messages of one call: one, or for a stream any number of them."""
        messages = self._good(method)
        if self._chance(0.3):
            return [message.SerializeToString() for message in messages]
        # One bad message is enough for the end of a stream; now and then all of them are.
        chosen = set(range(len(messages))) if self._chance(0.3) else {self._rng.randrange(len(messages))}
        data = [
            self._bent(message) if at in chosen else message.SerializeToString() for at, message in enumerate(messages)
        ]
        if method == "EncodeStream" and self._chance(0.3):
            self._disorder(data)
        return data

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _good(self, method: str) -> list[Any]:
        rng = self._rng
        fingerprint: dict[str, Any] = {}
        if self._chance(0.05):
            fingerprint["expected_fingerprint"] = rng.choice(["x", "é\n\x00", "0" * 20_000])
        count = rng.choice([0, 1, 1, 1, 1, 2, 3, 8])
        # Its names, not its values, are typed.
        sample_format: Any = rng.choice([0, 1, 2, 2, 1, 3, -1, 2**31 - 1]) if self._chance(0.2) else rng.choice([1, 2])
        if method == "GetInfo":
            return [pb.GetInfoRequest()]
        if method == "Encode":
            items = [self._audio() for _ in range(count)]
            return [pb.EncodeRequest(items=items, **self._options(), **fingerprint)]
        if method == "Decode":
            return [pb.DecodeRequest(items=[self._item() for _ in range(count)], format=sample_format, **fingerprint)]
        if method == "DecodeVq":
            return [pb.DecodeVqRequest(items=[self._codes() for _ in range(count)], **fingerprint)]
        if method == "DecodeLong":
            return [pb.DecodeLongRequest(item=self._item() if count else None, format=sample_format, **fingerprint)]
        sound = self._audio()
        opening = pb.EncodeStreamOpen(
            sample_rate=sound.sample_rate,
            channels=sound.channels,
            format=sound.format,
            **self._options(),
            **fingerprint,
        )
        size = max(rng.choice([1, 7, 1000, 4096, 100_000]), len(sound.pcm) // 20)
        pieces = [sound.pcm[at : at + size] for at in range(0, len(sound.pcm), size)]
        return [pb.EncodeStreamRequest(open=opening), *(pb.EncodeStreamRequest(pcm=piece) for piece in pieces)]

    def _number(self) -> int:
        return self._rng.choice([*_NUMBERS, self._rng.randrange(2**32)]) & 2**32 - 1

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self._chance(0.3):
            options["num_quantizers"] = self._number() if self._chance(0.3) else self._rng.randint(1, 20)
        if self._chance(0.3):
            options["group_size"] = self._number() if self._chance(0.3) else self._rng.randint(1, 8)
        return options

    def _codes(self) -> pb.Codes:
        rng = self._rng
        quantizers, frames = rng.choice([1, 2, 8, 20]), rng.choice([1, 2, 3, 10, 30, 100])
        array = random_codes(frames, quantizers, rng.randrange(1000))
        if self._chance(0.15):
            array[rng.randrange(quantizers), rng.randrange(frames)] = rng.choice([128, 1023, 1024, 65_535])
        message = pb.Codes(num_quantizers=quantizers, frames=frames, data=array.astype("<u2").tobytes())
        if self._chance(0.15):
            message.frames = self._number()
        if self._chance(0.1):
            message.num_quantizers = self._number()
        if self._chance(0.1):
            message.data = message.data[: rng.randrange(len(message.data))]
        return message

    def _item(self) -> pb.DecodeItem:
        context = self._number() if self._chance(0.2) else 0
        return pb.DecodeItem(codes=self._codes(), left_context_frames=context)

    def _audio(self) -> pb.Audio:
        rng = self._rng
        rate = rng.choice([8_000, RATE, 44_100])
        sound = noise(rng.choice([0.0, 0.01, 0.021, 0.1, 0.5]), rate, rng.randrange(100))
        if self._chance(0.2):
            sound = np.array(rng.choices(_SAMPLES, k=max(1, len(sound))), np.float32)
        elif self._chance(0.1):
            sound = np.zeros_like(sound)
        if self._chance(0.3):
            pcm, kind = (np.clip(sound, -1, 1) * 32767).astype("<f4"), pb.SAMPLE_FORMAT_INT16
            data = np.nan_to_num(pcm).astype("<i2").tobytes()
        else:
            data, kind = sound.astype("<f4").tobytes(), pb.SAMPLE_FORMAT_FLOAT32
        message = pb.Audio(sample_rate=rate, channels=rng.choice([1, 1, 1, 2, 3, 64]), format=kind, pcm=data)
        if self._chance(0.1):
            message.sample_rate = self._number()
        if self._chance(0.1):
            message.channels = self._number()
        if self._chance(0.1):
            message.format = rng.choice([0, 3, -1, 2**31 - 1])  # type: ignore[assignment]
        if data and self._chance(0.1):
            message.pcm = data[: rng.randrange(len(data))]
        return message

    # ------------------------------------------------------------ bent ones

    def _bent(self, message: Any) -> bytes:
        rng = self._rng
        if self._chance(0.1):
            return rng.randbytes(rng.choice([0, 1, 2, 3, 10, 100, 5000]))
        if self._chance(0.25):
            return message.SerializeToString()  # type: ignore[no-any-return]
        fields = take_apart(message)
        for _ in range(rng.choice([0, 1, 1, 1, 2, 5])):
            self._bend(fields)
        data = encode(fields)
        return self._garbled(data) if self._chance(0.3) else data

    def _bend(self, message: Message) -> None:
        """Change something of a message or, as often, of one of its submessages."""
        rng = self._rng
        deeper = [field.value for field in message if isinstance(field.value, list)]
        if deeper and self._chance(0.6):
            self._bend(rng.choice(deeper))
            return
        changes: list[Callable[[Message], None]] = [self._insert]
        if message:
            changes += [self._drop, self._repeat, self._renumber, self._retype, self._revalue, self._lie]
            changes += [self._reorder, self._bury]
        rng.choice(changes)(message)

    def _insert(self, message: Message) -> None:
        rng = self._rng
        number = rng.choice([0, 1, 2, 3, 4, 5, 15, 16, 1000, 19_000, 2**29 - 1, 2**29, 2**32])
        wire = rng.choice([VARINT, FIXED64, BYTES, GROUP_START, GROUP_END, FIXED32, 6, 7])
        value: int | bytes
        if wire in (VARINT, FIXED64, FIXED32):
            value = rng.choice(_NUMBERS)
        elif wire == GROUP_START and self._chance(0.5):
            value = varint(1 << 3) + b"\x01" + varint(number << 3 | GROUP_END)
        else:
            value = rng.randbytes(rng.choice([0, 1, 10, 1000]))
        message.insert(rng.randint(0, len(message)), Field(number, wire, value))

    def _drop(self, message: Message) -> None:
        del message[self._rng.randrange(len(message))]

    def _repeat(self, message: Message) -> None:
        data = self._rng.choice(message).encoded()
        times = self._rng.choice([1, 2, 10, 1022, 1023, 1024, 5000, 100_000])
        repeated = data * min(times, _MAX_REPEATED_BYTES // max(1, len(data)))
        message.append(Field(0, ENCODED, repeated))

    def _renumber(self, message: Message) -> None:
        self._rng.choice(message).number = self._rng.choice([0, 1, 2, 3, 4, 6, 7, 99, 2**29 - 1])

    def _retype(self, message: Message) -> None:
        field = self._rng.choice(message)
        if field.wire == ENCODED:
            return
        field.wire = self._rng.randrange(8)
        if field.wire in (VARINT, FIXED64, FIXED32) and not isinstance(field.value, int):
            field.value = self._rng.choice(_NUMBERS)
        elif field.wire not in (VARINT, FIXED64, FIXED32) and isinstance(field.value, int):
            field.value = varint(field.value)

    def _revalue(self, message: Message) -> None:
        rng = self._rng
        field = rng.choice(message)
        if isinstance(field.value, int):
            # More than the ten bytes that a number may have, now and then.
            field.value = rng.choice([*_NUMBERS, 2**70, 2**100])
        elif isinstance(field.value, bytes):
            size = len(field.value)
            field.value = rng.choice(
                [b"", bytes(size), b"\xff" * size, field.value[: rng.randint(0, size)], field.value * 2]
            )
        else:
            field.value = rng.randbytes(rng.choice([0, 1, 20]))

    def _lie(self, message: Message) -> None:
        field = self._rng.choice(message)
        size = len(field.encoded())
        field.length = max(0, self._rng.choice([0, size - 3, size, size + 1, 2**31 - 1, 2**31, 2**32, 2**63]))

    def _reorder(self, message: Message) -> None:
        self._rng.shuffle(message)

    def _bury(self, message: Message) -> None:
        """Put the message into itself, deep enough for any parser's stack."""
        field = self._rng.choice(message)
        data = field.encoded()
        for _ in range(self._rng.choice([2, 99, 101, 3000])):
            if self._chance(0.5):
                data = varint(field.number << 3 | BYTES) + varint(len(data)) + data
            else:
                data = varint(field.number << 3 | GROUP_START) + data + varint(field.number << 3 | GROUP_END)
        message.append(Field(field.number, BYTES, data))

    def _garbled(self, data: bytes) -> bytes:
        rng = self._rng
        if not data:
            return data
        if self._chance(0.4):
            return data[: rng.randrange(len(data))]
        changed = bytearray(data)
        for _ in range(rng.choice([1, 2, 10])):
            # Mostly in the tags and lengths at its front.
            changed[rng.randrange(min(len(changed), rng.choice([10, 40, len(changed)])))] ^= 1 << rng.randrange(8)
        if self._chance(0.2):
            changed += rng.randbytes(rng.choice([1, 9]))
        return bytes(changed)

    def _disorder(self, messages: list[bytes]) -> None:
        rng = self._rng
        what = rng.randrange(5)
        if what == 0:
            messages.pop(0)
        elif what == 1:
            messages.insert(rng.randint(0, len(messages)), messages[0])
        elif what == 2:
            messages.insert(rng.randint(0, len(messages)), b"")
        elif what == 3:
            rng.shuffle(messages)
        else:
            messages += [messages[-1]] * 50

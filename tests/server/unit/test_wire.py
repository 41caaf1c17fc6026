"""What is written around arrays is what protobuf writes, and what is looked into is what protobuf reads."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_tokenizer_server import wire

ARRAYS = [
    np.arange(12, dtype="<u2").reshape(3, 4),
    np.arange(12, dtype="<u2").reshape(3, 4)[:, 1:3],
    np.arange(12, dtype="<f4").reshape(3, 4).T,
    np.arange(100_000, dtype="<i2"),
    np.empty((8, 0), "<u2"),
    np.empty(0, "<f4"),
    np.arange(20, dtype="<i2")[::2],
]


@pytest.mark.parametrize("array", ARRAYS, ids=[f"{a.dtype}{list(a.shape)}" for a in ARRAYS])
def test_a_message_around_an_array(array: np.ndarray) -> None:
    head = pb.Codes(num_quantizers=array.shape[0], frames=2**32 - 1)
    expected = pb.Codes(num_quantizers=array.shape[0], frames=2**32 - 1, data=array.tobytes())
    assert pb.Codes.FromString(b"".join(wire.with_bytes(head, "data", array))) == expected


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_messages_within_messages(payloads: list[bytes]) -> None:
    parts: list[bytes] = []
    expected = pb.EncodeResponse(timings=pb.Timings(queue_seconds=1.5))
    for number, payload in enumerate(payloads):
        codes = wire.with_bytes(pb.Codes(frames=number), "data", np.frombuffer(payload, np.uint8))
        item = wire.with_message(pb.EncodeResponse.Item(status=pb.ItemStatus(code=number)), "codes", codes)
        parts += wire.with_message(pb.EncodeResponse(), "items", item)
        added = expected.items.add(codes=pb.Codes(frames=number, data=payload))
        added.status.code = number
        added.status.SetInParent()
    parts.append(pb.EncodeResponse(timings=expected.timings).SerializeToString())
    got = pb.EncodeResponse.FromString(b"".join(parts))
    assert got == expected
    assert all(item.HasField("codes") and item.HasField("status") for item in got.items)


@given(st.integers(0, 40), st.integers(0, 40))
def test_fields_are_counted(items: int, most: int) -> None:
    data = pb.EncodeRequest(items=[pb.Audio(pcm=b"x" * n) for n in range(items)]).SerializeToString()
    assert wire.has_more_fields(data, most) == (items > most)


@given(st.binary(max_size=200))
def test_any_bytes_are_counted_or_refused(data: bytes) -> None:
    try:
        counted = wire.has_more_fields(data, 1000)
    except DecodeError:
        with pytest.raises(DecodeError):
            pb.EncodeRequest.FromString(data)
    else:
        assert not counted

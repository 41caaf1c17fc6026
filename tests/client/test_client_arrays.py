"""What callers may hand in, what it becomes on the wire, and what they get back."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_tokenizer_client import InvalidInput, TokenizerClient

# Of the fixtures that make something.
Factory = Callable[..., Any]

WAVE = np.linspace(-1, 1, 21)
CODES = np.arange(12).reshape(3, 4)


class DLPackOnly:
    """Lends its memory through DLPack and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


class OnDevice:
    """An array in memory that the CPU cannot read, as torch or CuPy have them."""

    def __init__(self, array: np.ndarray, method: str) -> None:
        self._array = array
        setattr(self, method, self._copy)

    def _copy(self, *args: str) -> np.ndarray:
        assert args in ((), ("cpu",))
        return self._array

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise BufferError("not on this device")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("implicit conversion is not allowed")


@pytest.fixture
def server(serve: Factory) -> Any:
    return serve()


@pytest.fixture
def client(server: Any) -> Any:
    with TokenizerClient(server.address) as client:
        yield client


def sent(server: Any) -> tuple[np.ndarray, Any]:
    """The last waveform as it reached the server, (samples, channels), and its message."""
    audio = server.seen("Encode")[-1].request.items[0]
    dtype = "<i2" if audio.format == pb.SAMPLE_FORMAT_INT16 else "<f4"
    return np.frombuffer(audio.pcm, dtype).reshape(-1, audio.channels), audio


FLOATS = {
    "float16": WAVE.astype(np.float16),
    "float32": WAVE.astype(np.float32),
    "float64": WAVE,
    "big-endian": WAVE.astype(">f4"),
    "every other": np.repeat(WAVE, 2)[::2],
    "read-only": np.frombuffer(WAVE.tobytes()),
    "list": WAVE.tolist(),
    "tensor": torch.from_numpy(WAVE),
    "tensor with gradient": torch.from_numpy(WAVE).requires_grad_(),
    "half tensor": torch.from_numpy(WAVE).half(),
    "DLPack": DLPackOnly(WAVE),
    "device .cpu()": OnDevice(WAVE, "cpu"),
    "device .get()": OnDevice(WAVE, "get"),
    "device .to('cpu')": OnDevice(WAVE, "to"),
}


@pytest.mark.parametrize("kind", FLOATS)
def test_floating_point_becomes_float32(kind: Any, client: TokenizerClient, server: Any) -> None:
    client.encode(FLOATS[kind], 8000)
    samples, audio = sent(server)
    expected = WAVE.astype(np.float16 if kind in ("float16", "half tensor") else np.float32).astype(np.float32)
    np.testing.assert_array_equal(samples[:, 0], expected)
    assert (audio.sample_rate, audio.channels, audio.format) == (8000, 1, pb.SAMPLE_FORMAT_FLOAT32)


@pytest.mark.parametrize("gradient", [False, True])
def test_bfloat16_tensor(gradient: bool, client: TokenizerClient, server: Any) -> None:
    tensor = torch.from_numpy(WAVE).bfloat16().requires_grad_(gradient)
    client.encode(tensor, 8000)
    np.testing.assert_array_equal(sent(server)[0][:, 0], tensor.detach().float().numpy())


@pytest.mark.parametrize("dtype", ["<i2", ">i2"])
def test_int16_stays_int16(dtype: Any, client: TokenizerClient, server: Any) -> None:
    wave = np.array([-32768, -1, 0, 258, 32767], dtype)
    client.encode(wave, 8000)
    samples, audio = sent(server)
    assert audio.format == pb.SAMPLE_FORMAT_INT16
    np.testing.assert_array_equal(samples[:, 0], wave)


@pytest.mark.parametrize("order", ["C", "F"])
def test_channels_are_interleaved(order: Any, client: TokenizerClient, server: Any) -> None:
    wave = np.array([[1, 2, 3], [4, 5, 6]], np.float32, order=order)
    client.encode(wave, 8000)
    samples, audio = sent(server)
    assert audio.channels == 2
    np.testing.assert_array_equal(samples, wave.T)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "int32", "int64", "bool", "complex64", "U1", "object"])
def test_waveforms_of_unknown_scale_are_refused(dtype: Any, client: TokenizerClient, server: Any) -> None:
    with pytest.raises(InvalidInput, match=r"float32 or float64 .* or int16; this one is") as error:
        client.encode(np.zeros(30).astype(dtype), 8000)
    assert error.value.detail.field == "waveform"
    assert error.value.detail.value == str(np.zeros(30).astype(dtype).dtype)
    assert server.calls == []


@pytest.mark.parametrize("shape", [(), (2, 3, 4), (0,), (1, 0), (0, 5)])
def test_shapes_of_waveforms(shape: tuple[int, ...], client: TokenizerClient, server: Any) -> None:
    with pytest.raises(InvalidInput, match="shape"):
        client.encode(np.zeros(shape, np.float32), 8000)
    assert server.calls == []


def test_exchanged_axes_are_noticed_without_a_server(client: TokenizerClient, server: Any) -> None:
    with pytest.raises(InvalidInput, match=r"\(channels, samples\).*transpose"):
        client.encode(np.zeros((8000, 2)), 8000)
    assert server.calls == []


def test_exchanged_axes_are_noticed_by_the_servers_limit(client: TokenizerClient, server: Any) -> None:
    with pytest.raises(InvalidInput, match=r"at most 8 channels; this one has 20 channels of 2 .*transpose") as error:
        client.encode(np.zeros((20, 2)), 8000)
    assert error.value.detail.allowed == "1..8 channels"
    assert server.seen("Encode") == []


@pytest.mark.parametrize("rate", [0, -1, 8000.0, "8000", None, True, 2**32, [8000]])
def test_sample_rates(rate: Any, client: TokenizerClient) -> None:
    with pytest.raises(InvalidInput, match="sample_rate must be an integer of at least 1"):
        client.encode(WAVE, rate)


@pytest.mark.parametrize("name", ["num_quantizers", "group_size"])
@pytest.mark.parametrize("value", [0, -3, 1.5, True])
def test_counts(name: str, value: Any, client: TokenizerClient) -> None:
    with pytest.raises(InvalidInput, match=f"{name} must be an integer of at least 1"):
        client.encode(WAVE, 8000, **{name: value})


def test_ragged_lists(client: TokenizerClient) -> None:
    with pytest.raises(InvalidInput, match="waveform of type list cannot be read as an array"):
        client.encode([[0.5, 0.5], [0.5]], 8000)


@pytest.mark.parametrize(
    "codes",
    [
        CODES,
        CODES.astype(np.uint16),
        CODES.astype(">u2"),
        CODES.astype(np.int8),
        CODES.astype(np.uint64),
        np.asfortranarray(CODES.astype(np.int32)),
        CODES.tolist(),
        torch.from_numpy(CODES),
        torch.from_numpy(CODES.astype(np.uint16)),
        DLPackOnly(CODES),
        OnDevice(CODES, "cpu"),
    ],
    ids=lambda codes: f"{type(codes).__name__}-{getattr(codes, 'dtype', '')}",
)
def test_codes_of_any_integer_type(codes: Any, client: TokenizerClient, server: Any, fake: ModuleType) -> None:
    np.testing.assert_array_equal(client.decode(codes), fake.decode(CODES))
    message = server.seen("Decode")[-1].request.items[0].codes
    assert (message.num_quantizers, message.frames) == (3, 4)
    np.testing.assert_array_equal(np.frombuffer(message.data, "<u2").reshape(3, 4), CODES)


@pytest.mark.parametrize("codes", [CODES.astype(float), CODES > 3, torch.ones(3, 4), [[1.0]], [[2**70]], [["1"]]])
@pytest.mark.parametrize("method", ["decode", "decode_vq"])
def test_codes_of_other_types_are_refused(method: str, codes: Any, client: TokenizerClient, server: Any) -> None:
    with pytest.raises(InvalidInput, match="codes must be integers"):
        getattr(client, method)(codes)
    assert server.calls == []


@pytest.mark.parametrize("shape", [(), (4,), (1, 2, 3), (3, 0), (0, 3)])
def test_shapes_of_codes(shape: tuple[int, ...], client: TokenizerClient) -> None:
    with pytest.raises(InvalidInput, match=r"\(num_quantizers, frames\)"):
        client.decode(np.zeros(shape, np.uint16))


@pytest.mark.parametrize("value", [-1, 1.5, 2**32, None])
def test_left_context(value: Any, client: TokenizerClient) -> None:
    with pytest.raises(InvalidInput, match="left_context_frames must be an integer of at least 0"):
        client.decode(CODES, value)


INTEGERS = st.sampled_from([np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_range_of_codes(data: st.DataObject, client: TokenizerClient, server: Any) -> None:
    """A code outside 0..65535 is an error that names it; all others arrive as they are."""
    dtype = data.draw(INTEGERS)
    edges = st.sampled_from([v for v in (-1, 0, 5, 65535, 65536, 65541) if np.iinfo(dtype).min <= v])
    edges = edges.filter(lambda v: v <= np.iinfo(dtype).max)
    shape = data.draw(hnp.array_shapes(min_dims=2, max_dims=2, max_side=5))
    codes = data.draw(hnp.arrays(dtype, shape, elements=hnp.from_dtype(np.dtype(dtype)) | edges))
    bad = [(row, frame, int(c)) for (row, frame), c in np.ndenumerate(codes) if not 0 <= int(c) <= 65535]
    before = len(server.calls)
    if bad:
        row, frame, code = bad[0]
        with pytest.raises(
            InvalidInput, match=rf"^code {code} in row {row}, frame {frame} is outside 0\.\.65535$"
        ) as e:
            client.decode_vq(codes)
        detail = e.value.detail
        assert (detail.row, detail.frame, detail.value, detail.allowed) == (row, frame, str(code), "0..65535")
        assert len(server.calls) == before
    elif codes.max() < 50000:
        features = client.decode_vq(codes)
        np.testing.assert_array_equal(features[:, 1], codes[0].astype(np.float32))


def test_answers_are_writable_and_own_their_memory(client: TokenizerClient) -> None:
    codes = client.encode(WAVE, 8000)
    samples = client.decode(codes)
    features = client.decode_vq(codes)
    assert (codes.dtype, samples.dtype, features.dtype) == (np.uint16, np.float32, np.float32)
    assert (codes.shape, samples.shape, features.shape) == ((3, 6), (24,), (6, 2))
    for array in (codes, samples, features):
        assert array.flags.writeable
        assert array.flags.owndata
        array[:] = 0

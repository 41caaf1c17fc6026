"""Sound through the real clients and the real server, compared with the model in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from process_harness import (
    QUANTIZERS,
    RATE,
    SAMPLES_PER_FRAME,
    ServerProcess,
    noise,
    random_codes,
    snr,
    sweep,
    tone,
)

from mimo_tokenizer_client import AsyncTokenizerClient, InvalidInput, ModelMismatch, TokenizerClient, TooLarge
from mimo_tokenizer_server.config import BUILT_IN_MODELS
from mimo_tokenizer_server.model import checkpoint
from mimo_tokenizer_server.model.config import TokenizerConfig
from mimo_tokenizer_server.model.frontend import SegmentCutter
from mimo_tokenizer_server.model.packing import Spans
from mimo_tokenizer_server.model.tokenizer import MiMoAudioTokenizer


class AsyncFace:
    """An asynchronous client with the methods of the synchronous one, on an event loop of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self._client = AsyncTokenizerClient(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return lambda *args, **kwargs: self.loop.run_until_complete(method(*args, **kwargs))


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Makes clients of either kind; takes what they take."""
    clients: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        clients.append((TokenizerClient if request.param == "sync" else AsyncFace)(*args, **kwargs))
        return clients[-1]

    yield make
    for client in clients:
        client.close()
        if isinstance(client, AsyncFace):
            client.loop.close()


@pytest.fixture
def client(server: ServerProcess, connect: Callable[..., Any]) -> Any:
    """A client of a shared server: both kinds of client, both kinds of address."""
    return connect(server.address)


@torch.inference_mode()
def encode_here(
    model: MiMoAudioTokenizer,
    waveform: npt.NDArray[Any],
    rate: int,
    quantizers: int = QUANTIZERS,
    group_size: int = 1,
) -> npt.NDArray[np.uint16]:
    """Codes of (samples,) or (channels, samples), by the model in this process, each segment alone."""
    cutter = SegmentCutter(rate, model.config)
    segments = [*cutter.push(np.atleast_2d(waveform).T), *cutter.finish()]
    mels = [model.mel.segment(segment) for segment in segments]
    codes = np.concatenate([model.encode(mel, Spans([len(mel)]), quantizers).numpy() for mel in mels], axis=1)
    return np.pad(codes, ((0, 0), (0, -codes.shape[1] % group_size)), mode="edge").astype(np.uint16)


@torch.inference_mode()
def decode_here(model: MiMoAudioTokenizer, codes: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Samples of codes, by the model in this process."""
    return model.decode(torch.from_numpy(codes.astype(np.int32)), Spans([codes.shape[1]])).numpy()


def test_info_describes_the_model(client: Any) -> None:
    info = client.info()
    config = TokenizerConfig.from_file(BUILT_IN_MODELS["tiny"])
    model = MiMoAudioTokenizer(config, torch.device("cpu"), torch.float32)
    assert info.model.fingerprint == checkpoint.fill_random(model, 0, lambda: None)
    assert info.model.id == "tiny"
    assert info.model.random_weights
    assert info.model.codebook_sizes == tuple(config.codebook_sizes)
    assert info.model.sample_rate == RATE
    assert info.model.samples_per_frame == SAMPLES_PER_FRAME
    assert (info.device.device, info.device.dtype, info.device.quantization) == ("cpu", "float32", "none")
    assert info.limits.max_message_bytes == 64 << 20
    assert info.limits.max_audio_seconds == config.max_audio_seconds
    assert {"server", "python", "torch", "torchaudio", "grpcio", "protobuf"} <= info.versions.keys()
    assert client.health()
    client.wait_until_ready(5)


@pytest.mark.parametrize("samples", [481, 959, 960, 961, 24_000, 31_337])
def test_a_round_trip_is_the_models_own(
    client: Any, local_model: MiMoAudioTokenizer, one_thread: None, samples: int
) -> None:
    sound = sweep(2)[:samples]
    codes = client.encode(sound, RATE)
    assert codes.dtype == np.uint16
    assert codes.shape == (QUANTIZERS, samples // SAMPLES_PER_FRAME + 1)
    np.testing.assert_array_equal(codes, encode_here(local_model, sound, RATE))

    decoded = client.decode(codes)
    assert decoded.dtype == np.float32
    assert decoded.shape == (codes.shape[1] * SAMPLES_PER_FRAME,)
    assert snr(decode_here(local_model, codes), decoded) >= 120

    features = client.decode_vq(codes)
    assert features.shape == (codes.shape[1], local_model.config.d_model)
    assert features.dtype == np.float32
    wanted = local_model.decode_vq(torch.from_numpy(codes.astype(np.int32)), Spans([codes.shape[1]])).numpy()
    np.testing.assert_array_equal(features, wanted)


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 24_000, 44_100, 48_000, 96_000])
@pytest.mark.parametrize("kind", ["float32", "int16", "stereo", "int16 stereo"])
def test_rates_channels_and_formats(
    unix_server: ServerProcess, local_model: MiMoAudioTokenizer, one_thread: None, rate: int, kind: str
) -> None:
    sound: npt.NDArray[Any] = sweep(0.7, rate)
    if "stereo" in kind:
        sound = np.stack([sound, tone(0.7, rate)])
    if "int16" in kind:
        sound = np.round(sound * 32767).astype(np.int16)
    with TokenizerClient(unix_server.address) as client:
        codes = client.encode(sound, rate)
    resampled = -(-sound.shape[-1] * RATE // rate)
    assert codes.shape == (QUANTIZERS, resampled // SAMPLES_PER_FRAME + 1)
    np.testing.assert_array_equal(codes, encode_here(local_model, sound, rate))


def test_channels_are_mixed_by_their_mean(client: Any) -> None:
    left, right = tone(0.5), noise(0.5)
    both = client.encode(np.stack([left, right]), RATE)
    np.testing.assert_array_equal(both, client.encode((left + right) / 2, RATE))
    np.testing.assert_array_equal(client.encode(np.stack([left, left]), RATE), client.encode(left, RATE))


def test_int16_stands_for_its_32768th(client: Any) -> None:
    samples = np.round(noise(0.5) * 32767).astype(np.int16)
    np.testing.assert_array_equal(client.encode(samples, RATE), client.encode(samples.astype(np.float32) / 32768, RATE))


def test_fewer_quantizers_are_the_first_rows(client: Any) -> None:
    sound = noise(0.5)
    every = client.encode(sound, RATE)
    np.testing.assert_array_equal(client.encode(sound, RATE, num_quantizers=8), every[:8])
    assert client.decode(every[:8]).shape == client.decode(every).shape
    assert client.decode_vq(every[:1]).shape == client.decode_vq(every).shape


@pytest.mark.parametrize("group_size", [1, 4, 5, 100])
def test_groups_are_filled_with_the_last_frame(client: Any, group_size: int) -> None:
    sound = noise(1.0)
    plain = client.encode(sound, RATE)
    frames = plain.shape[1]
    assert frames == 26
    grouped = client.encode(sound, RATE, group_size=group_size)
    padding = -frames % group_size
    assert grouped.shape == (QUANTIZERS, frames + padding)
    np.testing.assert_array_equal(grouped, np.concatenate([plain, np.repeat(plain[:, -1:], padding, axis=1)], axis=1))


@pytest.mark.parametrize("left", [0, 1, 7, 24, 25, 26, 4_000_000_000])
def test_left_context_is_dropped_from_the_front(client: Any, left: int) -> None:
    codes = random_codes(25)
    np.testing.assert_array_equal(client.decode(codes, left), client.decode(codes)[left * SAMPLES_PER_FRAME :])


def test_a_batch_is_its_items(client: Any) -> None:
    sounds = [tone(0.3), noise(1.1), sweep(0.021), noise(0.5, 48_000)]
    rates = [RATE, RATE, RATE, 48_000]
    codes = client.encode_batch(sounds, rates)
    for sound, rate, item in zip(sounds, rates, codes, strict=True):
        np.testing.assert_array_equal(item, client.encode(sound, rate))
    decoded = client.decode_batch(codes, [0, 1, 0, 2])
    for item, left, samples in zip(codes, [0, 1, 0, 2], decoded, strict=True):
        assert snr(client.decode(item, left), samples) >= 90


def test_a_bad_item_of_a_batch_fails_alone(client: Any) -> None:
    good = random_codes(10)
    bad = good.copy()
    bad[3, 4] = 200
    answers = client.decode_batch([good, bad, good[:2]], return_errors=True)
    assert snr(client.decode(good), answers[0]) >= 90
    assert isinstance(answers[1], InvalidInput)
    detail = answers[1].detail
    assert (detail.item, detail.row, detail.frame, detail.value, detail.allowed) == (1, 3, 4, "200", "0..127")
    assert snr(client.decode(good[:2]), answers[2]) >= 90
    with pytest.raises(InvalidInput, match="row 3, frame 4 is 200"):
        client.decode_batch([good, bad])

    short = client.encode_batch([noise(0.5), noise(0.01)], RATE, return_errors=True)
    np.testing.assert_array_equal(short[0], client.encode(noise(0.5), RATE))
    assert isinstance(short[1], InvalidInput)


BAD_CALLS: dict[str, Callable[[Any], Any]] = {
    "empty": lambda client: client.encode(np.zeros(0, np.float32), RATE),
    "too short": lambda client: client.encode(np.zeros(480, np.float32), RATE),
    "too short after resampling": lambda client: client.encode(np.zeros(480, np.float32), 48_000),
    "NaN": lambda client: client.encode(np.array([0.0] * 999 + [np.nan]), RATE),
    "infinity": lambda client: client.encode(np.array([np.inf] * 999), RATE),
    "rate too low": lambda client: client.encode(noise(1), 999),
    "rate too high": lambda client: client.encode(noise(1), 384_001),
    "too many quantizers": lambda client: client.encode(noise(1), RATE, num_quantizers=21),
    "group too large": lambda client: client.encode(noise(1), RATE, group_size=1025),
    "no frames": lambda client: client.decode(random_codes(0)),
    "too many rows": lambda client: client.decode(random_codes(3, quantizers=21)),
    "code too large": lambda client: client.decode_vq(np.full((20, 3), 128)),
    "code out of range of its type": lambda client: client.decode(np.full((20, 3), 65_541)),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_bad_input_is_refused_and_the_next_call_works(client: Any, what: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        BAD_CALLS[what](client)
    assert refused.value.message
    assert client.decode(random_codes(3)).shape == (3 * SAMPLES_PER_FRAME,)


def test_limits_are_told(client: Any) -> None:
    with pytest.raises(TooLarge, match="1800 seconds"):
        client.encode(np.zeros(1801 * 1000, np.int16), 1000)
    with pytest.raises(TooLarge, match="frames"):
        client.decode(random_codes(46_025, quantizers=1))


def test_another_models_fingerprint_is_refused(server: ServerProcess, connect: Callable[..., Any]) -> None:
    ours = connect(server.address).info().model.fingerprint
    assert connect(server.address, fingerprint=ours).decode(random_codes(3)).size
    other = connect(server.address, fingerprint="0" * 32)
    for call in (
        lambda: other.encode(noise(0.5), RATE),
        lambda: other.decode(random_codes(3)),
        lambda: other.decode_vq(random_codes(3)),
    ):
        with pytest.raises(ModelMismatch, match=ours):
            call()


def test_callers_at_the_same_time_get_their_own_answers(server: ServerProcess) -> None:
    sounds = [noise(0.2 + 0.1 * number, seed=number) for number in range(8)]
    answers: dict[int, Any] = {}
    with TokenizerClient(server.address) as client:
        alone = [client.encode(sound, RATE) for sound in sounds]
        decoded = [client.decode(codes) for codes in alone]

        def call(number: int) -> None:
            codes = client.encode(sounds[number], RATE)
            answers[number] = codes, client.decode(codes)

        threads = [threading.Thread(target=call, args=[number]) for number in range(len(sounds))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    for number in range(len(sounds)):
        np.testing.assert_array_equal(answers[number][0], alone[number])
        # In a batch with others sums have another order.
        assert snr(decoded[number], answers[number][1]) >= 90


def test_asyncio_calls_overlap(server: ServerProcess) -> None:
    async def main() -> None:
        async with AsyncTokenizerClient(server.address) as client:
            batches = await asyncio.gather(*(client.decode(random_codes(20, seed=seed)) for seed in range(6)))
            for seed, samples in enumerate(batches):
                assert snr(await client.decode(random_codes(20, seed=seed)), samples) >= 90

    asyncio.run(main())


@pytest.fixture(scope="module")
def two_minutes() -> npt.NDArray[np.float32]:
    """A recording that spans three segments."""
    return 0.5 * sweep(121) + 0.5 * noise(121)


@pytest.fixture(scope="module")
def in_one_message(two_minutes: npt.NDArray[np.float32], unix_server: ServerProcess) -> tuple[Any, Any, Any]:
    """Its codes, and their samples and features, each in one message."""
    with TokenizerClient(unix_server.address) as client:
        codes = client.encode(two_minutes, RATE)
        return codes, client.decode(codes), client.decode_vq(codes)


class TestTwoMinutes:
    """Longer than two segments, and larger than the small server's messages."""

    def test_go_through_in_one_message(
        self,
        two_minutes: npt.NDArray[np.float32],
        in_one_message: tuple[Any, Any, Any],
        local_model: MiMoAudioTokenizer,
        one_thread: None,
    ) -> None:
        codes, samples, features = in_one_message
        assert codes.shape == (QUANTIZERS, len(two_minutes) // SAMPLES_PER_FRAME + 1)
        segment = local_model.config.segment_samples
        assert len(two_minutes) > 2 * segment
        np.testing.assert_array_equal(codes, encode_here(local_model, two_minutes, RATE))
        assert samples.shape == (codes.shape[1] * SAMPLES_PER_FRAME,)
        assert snr(decode_here(local_model, codes), samples) >= 120
        assert features.shape == (codes.shape[1], local_model.config.d_model)

    def test_go_through_streams_where_messages_are_small(
        self,
        two_minutes: npt.NDArray[np.float32],
        in_one_message: tuple[Any, Any, Any],
        small_server: ServerProcess,
        connect: Callable[..., Any],
    ) -> None:
        client = connect(small_server.address)
        assert client.info().limits.max_message_bytes == 1 << 20 < two_minutes.nbytes
        codes = client.encode(two_minutes, RATE)
        np.testing.assert_array_equal(codes, in_one_message[0])
        # Where long work is cut into steps depends on how fast the server is, and the order of sums on that.
        assert snr(in_one_message[1], client.decode(codes)) >= 90
        np.testing.assert_array_equal(client.decode_vq(codes), in_one_message[2])

    def test_batches_are_cut_where_messages_are_small(self, small_server: ServerProcess) -> None:
        sounds = [noise(8, seed=seed) for seed in range(3)]  # 0.77 MB each
        with TokenizerClient(small_server.address) as client:
            together = client.encode_batch(sounds, RATE)
            for sound, codes in zip(sounds, together, strict=True):
                np.testing.assert_array_equal(codes, client.encode(sound, RATE))
            decoded = client.decode_batch(together)
            for codes, samples in zip(together, decoded, strict=True):
                np.testing.assert_array_equal(samples, client.decode(codes))

    def test_a_full_queue_is_waited_for(self, small_server: ServerProcess) -> None:
        # Two of them are more than the small server's 3500 frames.
        codes = random_codes(2000)
        answers: list[Any] = []
        with TokenizerClient(small_server.address) as client:
            threads = [threading.Thread(target=lambda: answers.append(client.decode(codes))) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
        assert len(answers) == 2
        np.testing.assert_array_equal(answers[0], answers[1])

"""What is refused, with which words; none of it reaches the engine, and the next good request works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")

FINGERPRINT = "0123456789abcdef0123456789abcdef"  # of the fake engine
UINT32 = 2**32 - 1
MAX_FRAMES = 251 + 1023  # 10 seconds, padded to a group

INVALID = pb.ErrorDetail.REASON_INVALID_VALUE
TOO_LARGE = pb.ErrorDetail.REASON_TOO_LARGE
WRONG_MODEL = pb.ErrorDetail.REASON_WRONG_MODEL
CODES = {
    INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    WRONG_MODEL: grpc.StatusCode.FAILED_PRECONDITION,
}

FORMATS = "SAMPLE_FORMAT_FLOAT32 (1), SAMPLE_FORMAT_INT16 (2)"
RATES = "1000..384000 Hz"
FINITE = "finite numbers up to 1e+06; full scale is 1"


@dataclass(frozen=True)
class Bad:
    """A row of the table: what is sent, and what the answer says of it.

    Attributes:
        name: of the row.
        make: given the message builder, the bad item, request or messages.
        sentence: a part of the sentence.
        path: of the field; of an item, the part behind the item's own path.
        settings: of the server.
        reached: works that the engine has got before.
    """

    name: str
    make: Callable[[Any], Any]
    sentence: str
    path: str
    value: str
    allowed: str = ""
    reason: Any = INVALID
    limit: float | None = None
    row: int | None = None
    frame: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    reached: int = 0


def _check_detail(detail: pb.ErrorDetail, bad: Bad, item: int | None, path: str) -> None:
    def optional(name: Any) -> Any:
        return getattr(detail, name) if detail.HasField(name) else None

    assert detail.reason == bad.reason
    assert optional("item") == item
    assert detail.field == path
    assert detail.value == bad.value
    assert detail.allowed == bad.allowed
    assert optional("limit") == bad.limit
    assert optional("row") == bad.row
    assert optional("frame") == bad.frame
    assert not detail.HasField("retry_after")
    assert detail.request_id


def _check_failure(outcome: Any, bad: Bad, item: int | None, path: str, responses: int = 0) -> None:
    assert outcome.code is CODES[bad.reason]
    assert bad.sentence in outcome.details
    assert "\n" not in outcome.details
    assert len(outcome.responses) == responses
    _check_detail(outcome.detail, bad, item, path)


# ---------------------------------------------------------------- items: audio


def _audio(name: str, sentence: str, path: str, value: str, allowed: str = "", **rest: Any) -> Bad:
    fields: dict[str, Any] = {}
    expected: dict[str, Any] = {}
    for key, setting in rest.items():
        (expected if key in {"reason", "limit"} else fields)[key] = setting
    return Bad(name, lambda build: build.audio(**fields), sentence, path, value, allowed, **expected)


def _sound(name: str, place: tuple[int, int], value: float, text: str, channels: int = 1) -> Bad:
    def make(build: Any) -> pb.Audio:
        pcm = build.pcm(2400, channels)
        pcm[place] = value
        audio: pb.Audio = build.audio(channels=channels, pcm=pcm.tobytes())
        return audio

    where = f"{text} at sample {place[0] % 2400}, channel {place[1]}"
    return Bad(name, make, f"pcm is {where}; allowed: finite numbers", ".pcm", where, FINITE)


def _too_short(sample_rate: int, least: int) -> Bad:
    return _audio(
        f"one sample too short at {sample_rate} Hz",
        f"pcm is {least - 1} samples at {sample_rate} Hz; allowed: at least 481 samples",
        ".pcm",
        f"{least - 1} samples at {sample_rate} Hz",
        "at least 481 samples at 24000 Hz (0.020 seconds)",
        samples=least - 1,
        sample_rate=sample_rate,
    )


# The least samples at a rate that give the 481 that the mel front end takes.
LEAST_SAMPLES = {1000: 21, 8000: 161, 22050: 442, 24000: 481, 44100: 883, 48000: 961, 384000: 7681}

AUDIO = [
    _audio("empty", "pcm is empty", ".pcm", "empty", "at least 0.020 seconds of audio", pcm=b""),
    *(_too_short(rate, least) for rate, least in LEAST_SAMPLES.items()),
    _sound("NaN in the first sample", (0, 0), np.nan, "nan"),
    _sound("NaN in the last sample", (-1, 0), np.nan, "nan"),
    _sound("NaN in the second channel", (7, 1), np.nan, "nan", channels=2),
    _sound("+inf in the first sample", (0, 0), np.inf, "inf"),
    _sound("+inf in the last sample", (-1, 0), np.inf, "inf"),
    _sound("+inf in the second channel", (7, 1), np.inf, "inf", channels=2),
    _sound("-inf in the first sample", (0, 0), -np.inf, "-inf"),
    _sound("-inf in the last sample", (-1, 0), -np.inf, "-inf"),
    _sound("-inf in the second channel", (7, 1), -np.inf, "-inf", channels=2),
    _sound("amplitude over the limit", (100, 0), 1000001.0, "1000001"),
    _sound("amplitude under the limit", (100, 0), -(2.0**100), "-1.2676506e+30"),
    *(
        _audio(
            f"sample rate {rate}", f"sample_rate is {rate}; allowed: 1000", ".sample_rate", str(rate), RATES,
            sample_rate=rate,
        )
        for rate in (0, 999, 384001, UINT32)
    ),
    *(
        _audio(
            f"{channels} channels", f"channels is {channels}; allowed: 1..64", ".channels", str(channels), "1..64",
            channels=channels,
        )
        for channels in (0, 65, UINT32)
    ),
    _audio(
        "half a float32", "pcm is 9602 bytes", ".pcm", "9602 bytes", "a multiple of 4 (1 channels of 4 bytes a sample)",
        pcm=bytes(9602),
    ),
    _audio(
        "half a stereo sample", "pcm is 9604 bytes", ".pcm", "9604 bytes",
        "a multiple of 8 (2 channels of 4 bytes a sample)", pcm=bytes(9604), channels=2,
    ),
    _audio(
        "half an int16", "pcm is 9601 bytes", ".pcm", "9601 bytes", "a multiple of 2 (1 channels of 2 bytes a sample)",
        pcm=bytes(9601), format=pb.SAMPLE_FORMAT_INT16,
    ),
    _audio(
        "int16 of three channels", "pcm is 9604 bytes", ".pcm", "9604 bytes",
        "a multiple of 6 (3 channels of 2 bytes a sample)", pcm=bytes(9604), channels=3, format=pb.SAMPLE_FORMAT_INT16,
    ),
    _audio(
        "a sample more than the longest", "pcm is 10.00004167 seconds; the limit is 10 seconds", ".pcm", "10.00004167",
        "at most 10 seconds", pcm=bytes(240001 * 4), reason=TOO_LARGE, limit=10.0,
    ),
    _audio(
        "longer than the longest at 1 kHz", "pcm is 20 seconds; the limit is 10 seconds", ".pcm", "20",
        "at most 10 seconds", pcm=bytes(20_000 * 2), sample_rate=1000, format=pb.SAMPLE_FORMAT_INT16, reason=TOO_LARGE,
        limit=10.0,
    ),
    _audio("unknown format", "format is 7; allowed: SAMPLE_FORMAT_FLOAT32", ".format", "7", FORMATS, format=7),
    _audio("unspecified format", "format is 0; allowed: SAMPLE_FORMAT_FLOAT32", ".format", "0", FORMATS, format=0),
]  # fmt: skip


# ---------------------------------------------------------------- items: codes


def _codes(name: str, sentence: str, path: str, value: str, allowed: str, **rest: Any) -> Bad:
    fields: dict[str, Any] = {}
    expected: dict[str, Any] = {}
    for key, setting in rest.items():
        (expected if key in {"reason", "limit"} else fields)[key] = setting
    return Bad(name, lambda build: build.codes(**fields), sentence, path, value, allowed, **expected)


def _code(row: int, frame: int, value: int, size: int) -> Bad:
    def make(build: Any) -> pb.Codes:
        array = build.code_array(frames=6)
        array[row, frame] = value
        # Of several bad codes the first one is told.
        array[row, frame + 1 :] = value
        codes: pb.Codes = build.codes(array)
        return codes

    sentence = f"the code in row {row}, frame {frame} is {value}; codebook {row} has 0..{size - 1}"
    return Bad(
        f"code {value} in row {row}, frame {frame}", make, sentence, ".data", str(value), f"0..{size - 1}",
        row=row, frame=frame,
    )  # fmt: skip


_SIZE = "160 bytes (20 quantizers * 4 frames * 2 bytes)"

CODE_ARRAYS = [
    _code(0, 0, 1024, 1024),
    _code(1, 5, 1024, 1024),
    _code(2, 3, 128, 128),
    _code(19, 5, 128, 128),
    _code(19, 0, 1023, 128),
    _code(0, 4, 65535, 1024),
    _code(7, 2, 65535, 128),
    _codes("data too short", "data is 158 bytes", ".data", "158 bytes", _SIZE, data=bytes(158)),
    _codes("data an odd byte too long", "data is 161 bytes", ".data", "161 bytes", _SIZE, data=bytes(161)),
    _codes("data a frame too long", "data is 200 bytes", ".data", "200 bytes", _SIZE, data=bytes(200)),
    _codes("no data", "data is 0 bytes", ".data", "0 bytes", _SIZE, data=b""),
    *(
        _codes(
            f"{rows} rows", f"num_quantizers is {rows}; allowed: 1..20", ".num_quantizers", str(rows),
            "1..20, the model's codebooks", num_quantizers=rows,
        )
        for rows in (0, 21, UINT32)
    ),
    _codes("no frames", "frames is 0", ".frames", "0", f"1..{MAX_FRAMES}", frames=0),
    *(
        _codes(
            f"{frames} frames", f"frames is {frames} frames; the limit is {MAX_FRAMES} frames", ".frames", str(frames),
            f"at most {MAX_FRAMES} frames", frames=frames, reason=TOO_LARGE, limit=MAX_FRAMES,
        )
        for frames in (MAX_FRAMES + 1, UINT32)
    ),
]  # fmt: skip

ITEMS: list[tuple[str, Bad]] = [
    *(("Encode", bad) for bad in AUDIO),
    *(("DecodeVq", bad) for bad in CODE_ARRAYS),
    *(("Decode", bad) for bad in CODE_ARRAYS),
]


def _as_params(rows: list[tuple[str, Bad]]) -> list[Any]:
    return [pytest.param(method, bad, id=f"{method}: {bad.name}") for method, bad in rows]


def _request(method: str, items: list[Any]) -> Any:
    if method == "Encode":
        return pb.EncodeRequest(items=items)
    if method == "DecodeVq":
        return pb.DecodeVqRequest(items=items)
    return pb.DecodeRequest(items=[pb.DecodeItem(codes=codes) for codes in items])


def _path(method: str, bad: Bad, item: int) -> str:
    return f"items[{item}]{'.codes' if method == 'Decode' else ''}{bad.path}"


def _check_next(rig: Any, build: Any, method: str) -> None:
    rig.engine.batches.clear()
    outcome = rig.call(method, build.good(method))
    assert outcome.code is grpc.StatusCode.OK, outcome.details
    assert outcome.responses
    assert len(rig.engine.seen) == 1
    assert rig.admitted() == 0


@pytest.mark.parametrize(("method", "bad"), _as_params(ITEMS))
def test_a_call_with_nothing_but_a_bad_item_fails(rig: Any, build: Any, method: str, bad: Bad) -> None:
    outcome = rig.call(method, _request(method, [bad.make(build)]))
    _check_failure(outcome, bad, 0, _path(method, bad, 0))
    (status,) = outcome.item_statuses
    assert status.code == CODES[bad.reason].value[0]
    assert status.message == outcome.details
    assert not rig.engine.seen
    _check_next(rig, build, method)


@pytest.mark.parametrize(("method", "bad"), _as_params(ITEMS))
def test_a_bad_item_fails_alone(rig: Any, build: Any, method: str, bad: Bad) -> None:
    good = build.audio() if method == "Encode" else build.codes()
    response = rig.call(method, _request(method, [good, bad.make(build), good])).response
    first, middle, last = response.items
    payload = {"Encode": "codes", "DecodeVq": "features", "Decode": "audio"}[method]
    for item in (first, last):
        assert item.status.code == 0
        assert not item.status.HasField("detail")
        assert item.HasField(payload)
    assert not middle.HasField(payload)
    assert middle.status.code == CODES[bad.reason].value[0]
    assert bad.sentence in middle.status.message
    _check_detail(middle.status.detail, bad, 1, _path(method, bad, 1))
    assert len(rig.engine.seen) == 2
    _check_next(rig, build, method)


@pytest.mark.parametrize("bad", [pytest.param(bad, id=bad.name) for bad in CODE_ARRAYS])
def test_decode_long_refuses_what_decode_refuses(rig: Any, build: Any, bad: Bad) -> None:
    outcome = rig.call("DecodeLong", pb.DecodeLongRequest(item=pb.DecodeItem(codes=bad.make(build))))
    _check_failure(outcome, bad, None, f"item.codes{bad.path}")
    assert not rig.engine.seen
    _check_next(rig, build, "DecodeLong")


@pytest.mark.parametrize(("sample_rate", "least"), LEAST_SAMPLES.items())
@pytest.mark.parametrize("method", ["Encode", "EncodeStream"])
def test_the_shortest_audio_passes(tiny_rig: Any, build: Any, method: str, sample_rate: int, least: int) -> None:
    pcm = build.pcm(least).tobytes()
    if method == "Encode":
        outcome = tiny_rig.call(method, pb.EncodeRequest(items=[build.audio(sample_rate=sample_rate, pcm=pcm)]))
        codes = outcome.response.items[0].codes
    else:
        codes = tiny_rig.call(method, build.stream([pcm], sample_rate=sample_rate)).response.codes
    assert (codes.num_quantizers, codes.frames) == (20, 1)


def test_the_longest_audio_and_the_largest_amplitude_pass(rig: Any, build: Any) -> None:
    pcm = build.pcm(10 * 24000)
    pcm[0], pcm[-1] = 1e6, -1e6
    response = rig.call("Encode", pb.EncodeRequest(items=[build.audio(pcm=pcm.tobytes())])).response
    assert response.items[0].codes.frames == 251


def test_the_extremes_of_int16_pass(rig: Any, build: Any) -> None:
    pcm = np.resize(np.array([-32768, 32767], "<i2"), 2400)
    audio = build.audio(pcm=pcm.tobytes(), format=pb.SAMPLE_FORMAT_INT16)
    assert rig.call("Encode", pb.EncodeRequest(items=[audio])).response.items[0].codes.frames == 3


def test_the_largest_code_of_each_codebook_passes(rig: Any, build: Any) -> None:
    array = build.code_array()
    array[:2], array[2:] = 1023, 127
    response = rig.call("Decode", _request("Decode", [build.codes(array)])).response
    assert response.items[0].status.code == 0


# ---------------------------------------------------------------- calls

FINGERPRINT_SENTENCE = f"expects the model with fingerprint feedface; this server runs fake with {FINGERPRINT}"


def _wrong_model(method: str) -> tuple[str, Bad]:
    return method, Bad(
        "another fingerprint", lambda build: build.good(method, expected_fingerprint="feedface"), FINGERPRINT_SENTENCE,
        "open.expected_fingerprint" if method == "EncodeStream" else "expected_fingerprint", "feedface", FINGERPRINT,
        WRONG_MODEL,
    )  # fmt: skip


def _option(method: str, name: str, value: int, allowed: str) -> tuple[str, Bad]:
    path = f"open.{name}" if method == "EncodeStream" else name
    return method, Bad(
        f"{name} {value}", lambda build: build.good(method, **{name: value}), f"{path} is {value}; allowed: {allowed}",
        path, str(value), allowed,
    )  # fmt: skip


def _item_count(method: str) -> Iterator[tuple[str, Bad]]:
    def many(build: Any) -> Any:
        return _request(method, [pb.Audio() if method == "Encode" else pb.Codes()] * 1025)

    yield (
        method,
        Bad("no items", lambda build: _request(method, []), "items is empty", "items", "empty", "1 to 1024 items"),
    )
    yield method, Bad(
        "too many items", many, "items is 1025 items; the limit is 1024 items", "items", "1025", "at most 1024 items",
        TOO_LARGE, 1024,
    )  # fmt: skip


def _queue(method: str, make: Callable[[Any], Any], frames: int) -> tuple[str, Bad]:
    return method, Bad(
        "more frames than the queue ever takes", make, f"items have {frames} frames; at most 7 are taken at a time", "",
        str(frames), "", TOO_LARGE, 7, settings={"max_queued_frames": 7},
    )  # fmt: skip


def _answer(method: str, make: Callable[[Any], Any], frames: int, size: int, hint: str, **settings: Any) -> Bad:
    limit = settings.get("max_message_bytes", 1 << 20)
    sentence = f"the answer to {frames} frames is {size} bytes; a message has at most {limit}: {hint}"
    return Bad("answer too large", make, sentence, "items", str(size), "", TOO_LARGE, limit, settings=settings)


CALLS: list[tuple[str, Bad]] = [
    *(_wrong_model(method) for method in ("Encode", "DecodeVq", "Decode", "DecodeLong")),
    *(_option("Encode", "num_quantizers", value, "1..20, the model's codebooks") for value in (0, 21, UINT32)),
    *(_option("Encode", "group_size", value, "1..1024") for value in (0, 1025, UINT32)),
    *(row for method in ("Encode", "DecodeVq", "Decode") for row in _item_count(method)),
    *(_option(method, "format", 7, FORMATS) for method in ("Decode", "DecodeLong")),
    (
        "Decode",
        _answer(
            "Decode",
            lambda build: _request("Decode", [build.codes(build.code_array(140))] * 2),
            280,
            280 * 960 * 4,
            "DecodeLong takes it",
        ),
    ),
    (
        "DecodeVq",
        _answer(
            "DecodeVq",
            lambda build: _request("DecodeVq", [build.codes(build.code_array(1100))] * 2),
            2200,
            2200 * 128 * 4,
            "ask for fewer frames a call",
        ),
    ),
    (
        "Encode",
        _answer(
            "Encode",
            lambda build: pb.EncodeRequest(items=[build.audio(481)] * 2, group_size=1024),
            2048,
            2048 * 20 * 2,
            "send fewer items a call",
            max_message_bytes=50_000,
        ),
    ),
    _queue("Encode", lambda build: pb.EncodeRequest(items=[build.audio(24000 // 5)] * 2), 12),
    _queue("DecodeVq", lambda build: _request("DecodeVq", [build.codes()] * 2), 8),
    # What is dropped from the answer is computed all the same.
    _queue(
        "Decode",
        lambda build: pb.DecodeRequest(items=[pb.DecodeItem(codes=build.codes(), left_context_frames=3)] * 2),
        8,
    ),
    _queue(
        "DecodeLong",
        lambda build: pb.DecodeLongRequest(item=pb.DecodeItem(codes=build.codes(build.code_array(8)))),
        8,
    ),
]


@pytest.mark.parametrize(("method", "bad"), _as_params(CALLS))
def test_a_bad_call_is_refused(make_rig: Any, build: Any, method: str, bad: Bad) -> None:
    rig = make_rig(**bad.settings)
    outcome = rig.call(method, bad.make(build))
    _check_failure(outcome, bad, None, bad.path)
    assert not outcome.item_statuses
    assert not rig.engine.seen
    _check_next(rig, build, method)


@pytest.mark.parametrize("method", ["Encode", "DecodeVq", "Decode", "DecodeLong", "EncodeStream"])
def test_the_right_fingerprint_passes(rig: Any, build: Any, method: str) -> None:
    assert rig.call(method, build.good(method, expected_fingerprint=FINGERPRINT)).code is grpc.StatusCode.OK


def test_a_bad_item_does_not_count_for_the_size_of_the_answer(rig: Any, build: Any) -> None:
    """The good ones of a call are answered, however large the answer would be that a bad one asks for."""
    for method in ("DecodeVq", "Decode"):
        items = [build.codes(), build.codes(frames=UINT32), build.codes(num_quantizers=21, frames=MAX_FRAMES)]
        response = rig.call(method, _request(method, items)).response
        assert [item.status.code for item in response.items] == [0, 8, 3]


# ---------------------------------------------------------------- streams


def _stream(name: str, pieces: list[bytes], sentence: str, path: str, value: str, allowed: str, **rest: Any) -> Bad:
    fields = {key: rest.pop(key) for key in ("sample_rate", "channels", "format") if key in rest}
    return Bad(name, lambda build: build.stream(pieces, **fields), sentence, path, value, allowed, **rest)


def _sound_with(value: float, sample: int, samples: int = 2400) -> bytes:
    pcm = np.zeros(samples, "<f4")
    pcm[sample] = value
    return pcm.tobytes()


def _messages(name: str, make: Callable[[Any], Any], value: str, allowed: str) -> Bad:
    return Bad(name, make, f"message is {value}; allowed: {allowed}", "message", value, allowed)


_FIRST = "`open` in the first message"
_FURTHER = "`pcm` in all messages after the first"

STREAMS = [
    _wrong_model("EncodeStream")[1],
    *(_option("EncodeStream", "num_quantizers", value, "1..20, the model's codebooks")[1] for value in (0, 21)),
    *(_option("EncodeStream", "group_size", value, "1..1024")[1] for value in (0, 1025, UINT32)),
    _messages("no message", lambda build: [], "absent", _FIRST),
    _messages("pcm first", lambda build: build.stream([bytes(9600)])[1:], "pcm", _FIRST),
    _messages("an empty message first", lambda build: [pb.EncodeStreamRequest()], "absent", _FIRST),
    _messages("a second open", lambda build: build.good("EncodeStream") + build.stream([]), "open", _FURTHER),
    _messages(
        "an empty message later",
        lambda build: [*build.good("EncodeStream"), pb.EncodeStreamRequest()],
        "absent",
        _FURTHER,
    ),
    *(
        _stream(
            f"sample rate {rate}", [], f"sample_rate is {rate}; allowed: 1000", "open.sample_rate", str(rate), RATES,
            sample_rate=rate,
        )
        for rate in (0, 999, 384001, UINT32)
    ),
    *(
        _stream(
            f"{channels} channels", [], f"channels is {channels}; allowed: 1..64", "open.channels", str(channels),
            "1..64", channels=channels,
        )
        for channels in (0, 65, UINT32)
    ),
    *(
        _stream(f"format {kind}", [], f"open.format is {kind}", "open.format", str(kind), FORMATS, format=kind)
        for kind in (0, 7)
    ),
    *(
        _stream(
            name, pieces, "pcm is 0 samples at 24000 Hz; allowed: at least 481 samples", "pcm",
            "0 samples at 24000 Hz", "at least 481 samples at 24000 Hz (0.020 seconds)",
        )
        for name, pieces in (("nothing after open", []), ("empty pieces", [b"", b""]))
    ),
    _stream(
        "too short", [bytes(960), bytes(960)], "pcm is 480 samples at 24000 Hz; allowed: at least 481", "pcm",
        "480 samples at 24000 Hz", "at least 481 samples at 24000 Hz (0.020 seconds)",
    ),
    _stream(
        "half a sample at the end", [bytes(9600), bytes(3)], "pcm is 9603 bytes in all; allowed: a multiple of 4",
        "pcm", "9603 bytes in all", "a multiple of 4 (channels * bytes a sample)",
    ),
    _stream(
        "half a stereo sample at the end, after a segment for the engine", [bytes(8 * 48000), bytes(9604)],
        "pcm is 393604 bytes in all", "pcm", "393604 bytes in all", "a multiple of 8 (channels * bytes a sample)",
        channels=2, reached=1,
    ),
    _stream(
        "NaN at the start", [_sound_with(np.nan, 0)], "pcm is nan at sample 0, channel 0; allowed", "pcm",
        "nan at sample 0, channel 0", FINITE,
    ),
    _stream(
        "infinity in a later message", [bytes(4 * 10_000), _sound_with(-np.inf, 5)],
        "pcm is -inf at sample 10005, channel 0", "pcm", "-inf at sample 10005, channel 0", FINITE,
    ),
    _stream(
        "NaN after two segments for the engine, across messages", [bytes(4 * 71_000 + 1), b"\0\0\0" + bytes(4 * 2000),
        _sound_with(np.nan, 7)], "pcm is nan at sample 73008, channel 0", "pcm", "nan at sample 73008, channel 0",
        FINITE, reached=2,
    ),
    _stream(
        "too long", [bytes(4 * 240_001)], "pcm is 10.00004167 seconds; the limit is 10 seconds", "pcm", "10.00004167",
        "at most 10 seconds", reason=TOO_LARGE, limit=10.0,
    ),
    _stream(
        "too long with its second message", [bytes(4 * 60_000), bytes(4 * 180_001)],
        "pcm is 10.00004167 seconds; the limit is 10 seconds", "pcm", "10.00004167", "at most 10 seconds",
        reason=TOO_LARGE, limit=10.0, reached=1,
    ),
]  # fmt: skip


@pytest.mark.parametrize("bad", [pytest.param(bad, id=bad.name) for bad in STREAMS])
def test_a_bad_stream_is_refused(rig: Any, build: Any, bad: Bad, short_segments: int) -> None:
    outcome = rig.call("EncodeStream", bad.make(build))
    # What was complete before the bad part is answered.
    _check_failure(outcome, bad, None, bad.path, responses=bad.reached)
    assert len(rig.engine.seen) == bad.reached
    assert not any(np.isnan(work.segment.pcm).any() for work in rig.engine.seen)
    _check_next(rig, build, "EncodeStream")


# ---------------------------------------------------------------- all items bad


def test_the_statuses_of_all_items_follow_when_none_is_good(rig: Any, build: Any) -> None:
    items = [build.audio(pcm=b""), build.audio(sample_rate=5), build.audio(format=7)]
    outcome = rig.call("Encode", pb.EncodeRequest(items=items))
    assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT
    assert outcome.details.startswith("none of the 3 items is answered; first: items[0].pcm is empty")
    assert (outcome.detail.item, outcome.detail.field) == (0, "items[0].pcm")
    assert [status.code for status in outcome.item_statuses] == [3, 3, 3]
    assert [status.detail.item for status in outcome.item_statuses] == [0, 1, 2]
    assert [status.detail.field for status in outcome.item_statuses] == [
        "items[0].pcm",
        "items[1].sample_rate",
        "items[2].format",
    ]
    assert all(status.message.startswith(status.detail.field) for status in outcome.item_statuses)


@pytest.mark.parametrize("method", ["Encode", "DecodeVq", "Decode"])
def test_trailing_metadata_stays_small(rig: Any, build: Any, method: str) -> None:
    """Clients refuse more than 8 KiB, in which a key and its value count 32 bytes more, and base64 a third."""
    bad = build.audio(sample_rate=UINT32) if method == "Encode" else build.codes(data=bytes(161))
    request_id = "r" * 300
    outcome = rig.call(method, _request(method, [bad] * 1024), metadata=(("x-request-id", request_id),))
    statuses = outcome.item_statuses
    assert len(statuses) >= 10
    assert [status.detail.item for status in statuses] == list(range(len(statuses)))
    assert outcome.detail.item == 0
    assert outcome.details.startswith("none of the 1024 items is answered; first: ")
    size: float = len("grpc-message") + len(outcome.details) + 32
    for key, value in outcome.trailing:
        size += len(key) + len(value) * (4 / 3 if isinstance(value, bytes) else 1) + 32
    assert size < 8192

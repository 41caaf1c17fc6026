"""The load generator without a server: the mix, the requests, the arrivals and the figures."""

from __future__ import annotations

import io
import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_tokenizer_client import ServerInfo
from mimo_tokenizer_server import bench_report
from mimo_tokenizer_server.bench import arrivals
from mimo_tokenizer_server.bench_mix import POOL_ITEMS, MixError, Requests, parse_mix
from mimo_tokenizer_server.bench_report import (
    EntryCheck,
    Generator,
    Outcome,
    Problem,
    Report,
    Sample,
    group,
    problems,
    snr_db,
    summarize,
)

BOOKS = (1024, 1024, *[128] * 18)


@pytest.fixture
def info() -> ServerInfo:
    """A server with the published model's rates and the usual limits."""
    return ServerInfo.from_message(
        pb.GetInfoResponse(
            model=pb.ModelInfo(
                id="m",
                fingerprint="f" * 32,
                codebook_sizes=BOOKS,
                d_model=1280,
                sample_rate=24_000,
                samples_per_frame=960,
            ),
            limits=pb.Limits(max_message_bytes=64 << 20, max_items=1024, max_audio_seconds=1800, max_frames=46_000),
        )
    )


# ---------------------------------------------------------------- the mix


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("decode:0.04s*8", ("decode", 0.04, 0.04, 8)),
        ("encode:4s", ("encode", 4, 4, 1)),
        ("decode-vq:40ms*.5", ("decode-vq", 0.04, 0.04, 0.5)),
        ("decode:0.5-4s", ("decode", 0.5, 4, 1)),
        ("decode:500-900ms*2", ("decode", 0.5, 0.9, 2)),
        ("decode:500ms-4s", ("decode", 0.5, 4, 1)),
        (" encode:1.s ", ("encode", 1, 1, 1)),
    ],
)
def test_an_entry(text: str, wanted: tuple[str, float, float, float]) -> None:
    (entry,) = parse_mix(text)
    assert entry.text == text.strip()
    assert (entry.method, entry.shortest, entry.longest, entry.weight) == pytest.approx(wanted)


def test_a_mix() -> None:
    mix = parse_mix("decode:0.04s*8,decode:2s*2, encode:4s*1,decode-vq:1s*1")
    assert [entry.text for entry in mix] == ["decode:0.04s*8", "decode:2s*2", "encode:4s*1", "decode-vq:1s*1"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is no method:duration"),
        ("decode", "'decode' is no method:duration"),
        ("decode:2", "'decode:2' is no method:duration"),
        ("decode:2m", "'decode:2m' is no method:duration"),
        ("decode:-2s", "is no method:duration"),
        ("decode:nans", "is no method:duration"),
        ("decode:1e3s", "is no method:duration"),
        ("decode:2s*-1", "is no method:duration"),
        ("decode:1-2", "is no method:duration"),
        ("decode:1s,,encode:1s", "'' is no method:duration"),
        ("transcribe:1s", "'transcribe' is none of the methods encode, decode, decode-vq"),
        ("decode:0s", "a duration must be above zero"),
        ("decode:4-1s", "from the shorter to the longer"),
        ("decode:500-4s", "from the shorter to the longer"),
        (f"decode:{'9' * 400}s", "a duration must be"),
        ("decode:1s*0", "a weight must be above zero"),
        (f"decode:1s*{'9' * 400}", "a weight must be"),
    ],
)
def test_what_is_no_mix(text: str, reason: str) -> None:
    with pytest.raises(MixError, match=r"^.+$") as raised:
        parse_mix(text)
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


# ---------------------------------------------------------------- requests


def test_requests_are_as_the_contract_wants_them(info: ServerInfo) -> None:
    requests = Requests(parse_mix("decode:2s,encode:1s,decode-vq:40ms"), info, 3, 0)
    seen = set()
    for _ in range(60):
        request = requests.draw()
        seen.add(request.entry)
        message = request.message
        assert message.expected_fingerprint == "f" * 32
        assert len(message.items) == len(request.items) == len(request.audio_seconds) == 3
        for item, seconds in zip(message.items, request.audio_seconds, strict=True):
            if request.entry == 1:
                assert (item.sample_rate, item.channels, item.format) == (24_000, 1, pb.SAMPLE_FORMAT_FLOAT32)
                pcm = np.frombuffer(item.pcm, "<f4")
                assert len(pcm) == 24_000
                assert 0.05 < np.abs(pcm).max() < 1
                assert seconds == 1
            else:
                codes = item.codes if request.entry == 0 else item
                frames = 50 if request.entry == 0 else 1
                assert (codes.num_quantizers, codes.frames) == (20, frames)
                array = np.frombuffer(codes.data, "<u2").reshape(20, frames)
                assert (array.max(axis=1) < np.array(BOOKS)).all()
                assert seconds == pytest.approx(frames / 25)
    assert seen == {0, 1, 2}


def test_the_seed_decides_what_is_sent(info: ServerInfo) -> None:
    mix = parse_mix("decode:1-3s*3,encode:0.5s")

    def first(seed: int) -> list[bytes]:
        requests = Requests(mix, info, 2, seed)
        return [requests.draw().message.SerializeToString(deterministic=True) for _ in range(20)]

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_weights_and_lengths(info: ServerInfo) -> None:
    requests = Requests(parse_mix("decode:1-3s*3,decode-vq:1s"), info, 1, 0)
    drawn = [requests.draw() for _ in range(4000)]
    assert Counter(request.entry for request in drawn)[0] == pytest.approx(3000, abs=150)
    pool = [item.audio_seconds for item in requests.pools[0]]
    assert len(pool) == POOL_ITEMS
    # One in each sixteenth of the range, to within a frame.
    for part, seconds in enumerate(sorted(pool)):
        assert 1 + part / 8 - 0.04 <= seconds <= 1 + (part + 1) / 8 + 0.04
    assert len({item.message.SerializeToString() for item in requests.pools[0]}) == POOL_ITEMS
    assert requests.largest(0).audio_seconds == (max(pool),)


def test_what_the_server_would_not_take_is_never_made(info: ServerInfo) -> None:
    for text, items, reason in [
        ("encode:1801s", 1, "at most 1800 s"),
        ("decode:999999s", 1, "at most 46000 frames"),
        ("decode-vq:1841s", 1, "(1840 s)"),
        ("decode:1s", 1025, "at most 1024"),
        ("encode:600s", 2, "messages of at most 67108864"),
    ]:
        with pytest.raises(MixError) as raised:
            Requests(parse_mix(text), info, items, 0)
        assert reason in str(raised.value)


def test_long_items_make_a_small_pool(info: ServerInfo) -> None:
    (pool,) = Requests(parse_mix("encode:150s"), info, 1, 0).pools
    assert len(pool) == 4  # of 14.4 MB each


# ---------------------------------------------------------------- arrivals


def test_arrivals_are_a_poisson_process() -> None:
    times = list(arrivals(200, 50, 0))
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] < 50
    # A Poisson count has the variance of its mean; exponential gaps have a deviation of their mean.
    assert abs(len(times) - 10_000) < 5 * math.sqrt(10_000)
    gaps = np.diff(times)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1, abs=0.05)
    assert list(arrivals(200, 50, 0)) == times
    assert list(arrivals(200, 50, 1)) != times
    assert list(arrivals(200, 10, 0)) == list(itertools.takewhile(lambda time: time < 10, times))


# ---------------------------------------------------------------- figures


def test_percentiles_are_values_that_were_seen() -> None:
    summary = summarize(float(value) for value in reversed(range(1, 101)))
    assert summary == bench_report.Summary(mean=50.5, p50=50, p95=95, p99=99, max=100)
    assert summarize([3.0]) == bench_report.Summary(3, 3, 3, 3, 3)
    # With ten values the worst is also the 95th and 99th percentile; none in between is invented.
    ten = summarize([1.0] * 9 + [7.0])
    assert ten is not None
    assert (ten.p50, ten.p95, ten.p99) == (1, 7, 7)
    assert summarize([]) is None


def test_snr() -> None:
    wanted = np.array([1, -1, 1, -1], np.float32)
    assert snr_db(wanted, wanted) == math.inf
    assert snr_db(wanted, wanted * np.float32(0.9)) == pytest.approx(20, abs=1e-4)
    assert snr_db(np.zeros(4, np.float32), wanted) == -math.inf
    assert math.isnan(snr_db(wanted, np.array([1, -1, math.nan, -1], np.float32)))
    assert math.isnan(snr_db(np.array([math.inf], np.float32), np.array([1], np.float32)))


def sample(outcome: Outcome, scheduled: float, finished: float, **values: Any) -> Sample:
    if outcome is Outcome.OK:
        values = {"audio_seconds": 2.0} | values
    return Sample(0, outcome, scheduled, finished, **values)


SAMPLES = [
    # Sent in the warm-up: part of the throughput if answered within the measurement, never of the latencies.
    sample(Outcome.OK, -1.0, -0.5),
    sample(Outcome.OK, -0.5, 1.0, queue_seconds=100),
    sample(Outcome.REJECTED, -0.5, 1.0, status="RESOURCE_EXHAUSTED", sentence="too early"),
    # Sent in the measurement.
    sample(Outcome.OK, 0.0, 1.0, queue_seconds=0.5, compute_seconds=0.25, batch_items=2, batch_frames=50),
    sample(Outcome.OK, 1.0, 4.0, queue_seconds=1.5, compute_seconds=0.75, batch_items=4, batch_frames=90),
    sample(Outcome.OK, 9.0, 11.0, queue_seconds=1.0, compute_seconds=0.5),
    sample(Outcome.REJECTED, 2.0, 2.1, status="RESOURCE_EXHAUSTED", sentence="full"),
    sample(Outcome.REJECTED, 3.0, 3.1, status="RESOURCE_EXHAUSTED", sentence="full again"),
    sample(Outcome.LATE, 4.0, 9.0, status="DEADLINE_EXCEEDED", sentence="late"),
    # Of its items one was answered.
    sample(Outcome.FAILED, 5.0, 5.1, status="INTERNAL", sentence="broken", audio_seconds=1.0),
    sample(Outcome.UNFINISHED, 9.5, 10.0),
    sample(Outcome.NOT_SENT, 6.0, 6.0),
    # After the measurement.
    sample(Outcome.OK, 10.0, 12.0, queue_seconds=100),
]


def test_the_figures_of_a_group() -> None:
    figures = group("decode:2s", SAMPLES, 10.0)
    assert figures.requests == 9
    counts = (figures.ok, figures.rejected, figures.late, figures.failed, figures.unfinished, figures.not_sent)
    assert counts == (3, 2, 1, 1, 1, 1)
    assert figures.answers == 4
    assert figures.answers_per_second == pytest.approx(0.4)
    assert figures.audio_seconds_per_second == pytest.approx((3 * 2.0 + 1.0) / 10)
    assert figures.queue_seconds == bench_report.Summary(1.0, 1.0, 1.5, 1.5, 1.5)
    assert figures.compute_seconds == bench_report.Summary(0.5, 0.5, 0.75, 0.75, 0.75)
    assert figures.total_seconds == bench_report.Summary(2.0, 2.0, 3.0, 3.0, 3.0)
    assert figures.batch_items == bench_report.Summary(3.0, 2.0, 4.0, 4.0, 4.0)
    assert figures.batch_frames == bench_report.Summary(70.0, 50.0, 90.0, 90.0, 90.0)
    assert figures.batch_items_histogram == {2: 1, 4: 1}


@pytest.mark.parametrize("seconds", [0.0, 10.0])
def test_the_figures_of_nothing(seconds: float) -> None:
    figures = group("all", [], seconds)
    assert figures.requests == figures.answers == 0
    assert figures.answers_per_second == figures.audio_seconds_per_second == 0
    assert figures.queue_seconds is figures.total_seconds is figures.batch_items is None


def test_problems_have_the_first_example() -> None:
    assert problems(SAMPLES, 10.0) == [
        Problem(Outcome.REJECTED, "RESOURCE_EXHAUSTED", 2, "full"),
        Problem(Outcome.LATE, "DEADLINE_EXCEEDED", 1, "late"),
        Problem(Outcome.FAILED, "INTERNAL", 1, "broken"),
    ]


def test_codes_have_to_be_equal() -> None:
    check = EntryCheck("encode:1s")
    alone = np.arange(100, dtype="<u2")
    check.compare(alone.tobytes(), alone.tobytes(), "<u2", None)
    assert (check.items, check.same_bits, check.differing, check.example) == (1, 1, 0, "")
    other = alone.copy()
    other[[3, 7]] += 1
    check.compare(alone.tobytes(), other.tobytes(), "<u2", None)
    assert (check.items, check.same_bits, check.differing) == (2, 1, 1)
    assert (check.values, check.differing_codes) == (200, 2)
    assert check.example == "2 of 100 codes are others than alone"
    check.compare(alone.tobytes(), alone[:50].tobytes(), "<u2", None)
    assert (check.differing, check.worst_snr_db) == (2, None)


def test_samples_have_to_be_near() -> None:
    check = EntryCheck("decode:1s")
    alone = np.sin(np.arange(1000)).astype("<f4")
    near = alone * np.float32(1 + 1e-5)  # 100 dB
    far = alone * np.float32(1 + 1e-4)  # 80 dB
    for got in (alone, near):
        check.compare(alone.tobytes(), got.tobytes(), "<f4", 90.0)
    assert (check.items, check.same_bits, check.differing) == (2, 1, 0)
    assert check.worst_snr_db == pytest.approx(100, abs=0.5)
    check.compare(alone.tobytes(), far.tobytes(), "<f4", 90.0)
    assert check.differing == 1
    assert check.worst_snr_db == pytest.approx(80, abs=0.5)
    assert "80.0 dB SNR" in check.example
    check.compare(alone.tobytes(), far.tobytes(), "<f4", 25.0)
    assert check.differing == 1
    broken = alone.copy()
    broken[5] = math.nan
    check.compare(alone.tobytes(), broken.tobytes(), "<f4", 25.0)
    check.compare(alone.tobytes(), alone[:-1].tobytes(), "<f4", 25.0)
    assert check.differing == 3
    assert check.worst_snr_db == pytest.approx(80, abs=0.5)


# ---------------------------------------------------------------- the report


def report_of(samples: list[Sample], check: list[EntryCheck] | None = None) -> Report:
    return Report(
        server={"address": "unix:/s", "model": "m", "device": "cpu", "dtype": "float32"},
        load={"loop": "open", "requests_per_second": 5.0, "max_in_flight": 7, "warm_up_seconds": 1.0},
        interrupted=False,
        measured_seconds=10.0,
        overall=group("all", samples, 10.0),
        entries=[group("decode:2s", samples, 10.0)],
        problems=problems(samples, 10.0),
        generator=Generator(0.001, 0.002, 7, 2),
        check=check,
    )


def printed(report: Report) -> str:
    stream = io.StringIO()
    bench_report.show(report, Console(file=stream))
    return stream.getvalue()


def test_a_report_on_the_terminal() -> None:
    text = printed(report_of(SAMPLES, [EntryCheck("decode:2s", 5, 3, 1, 44.4, example="something [bold]odd")]))
    assert "m on cpu (float32) at unix:/s: open loop, 5 requests a second, 10.0 s measured" in text
    (counts,) = [line.split() for line in text.splitlines() if line.split()[:2] == ["all", "9"]]
    assert counts == ["all", "9", "3", "2", "1", "1", "1", "1", "0.40", "0.70"]
    totals = [line.split()[-5:] for line in text.splitlines() if "total, ms" in line]
    assert totals == [["2000.00", "2000.00", "3000.00", "3000.00", "3000.00"]] * 2
    assert "batch, items" in text
    assert "2 rejected (RESOURCE_EXHAUSTED), the first: full" in text
    assert "1 not sent: 7 were in flight" in text
    assert "5 answers compared with the answer alone, 3 the same bits" in text
    assert "1 DIFFER, the first: something [bold]odd" in text
    assert "did not keep up" not in text


def test_a_generator_that_cannot_keep_up_says_so() -> None:
    report = report_of(SAMPLES)
    assert "did not keep up" in printed(replace(report, generator=Generator(0.3, 0.0, 1, 1)))
    assert "did not keep up" in printed(replace(report, generator=Generator(0.0, 0.3, 1, 1)))


def test_batches_that_the_server_does_not_tell() -> None:
    text = printed(report_of([sample(Outcome.OK, 1.0, 2.0)]))
    assert "does not tell its batches" in text
    assert "batch, items" not in text


def test_a_report_as_json() -> None:
    facts = json.loads(json.dumps(report_of(SAMPLES, [EntryCheck("decode:2s")]).as_dict(), allow_nan=False))
    assert facts["overall"]["total_seconds"]["p95"] == 3
    assert facts["overall"]["batch_items_histogram"] == {"2": 1, "4": 1}
    assert facts["problems"][0] == {
        "outcome": "rejected", "status": "RESOURCE_EXHAUSTED", "requests": 2, "example": "full",
    }  # fmt: skip
    assert facts["check"][0]["worst_snr_db"] is None


def test_when_a_bench_has_failed() -> None:
    assert report_of(SAMPLES).failure is None
    refused = [one for one in SAMPLES if one.outcome is not Outcome.OK]
    assert report_of(refused).failure == "nothing was answered; 2 requests ended with RESOURCE_EXHAUSTED: full"
    assert "no request was sent" in str(report_of([]).failure)
    assert "interruption" in str(replace(report_of([]), interrupted=True).failure)
    good, bad = EntryCheck("decode:2s", 5, 5, 0), EntryCheck("encode:1s", 3, 1, 2)
    assert report_of(SAMPLES, [good]).failure is None
    assert report_of(SAMPLES, [good, bad]).failure == "2 of 8 answers under load differ from the answer alone"

"""`mimo-tokenizer bench` against a real server, and against one between them that stalls, lies or fails items."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from process_harness import COMMAND, PATIENCE, ServerProcess, assert_one_sentence, environment, eventually, run_command

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_audio_tokenizer.v1.tokenizer_pb2_grpc import (
    AudioTokenizerServicer,
    AudioTokenizerStub,
    add_AudioTokenizerServicer_to_server,
)
from mimo_tokenizer_client import TokenizerClient
from mimo_tokenizer_server.bench import Load, arrivals, run
from mimo_tokenizer_server.bench_mix import parse_mix
from mimo_tokenizer_server.bench_report import Report

MIX = "decode:40ms*4,decode:0.2-1s*2,encode:0.5s*1,decode-vq:1s*1"
COUNTS = ("ok", "rejected", "late", "failed", "unfinished", "not_sent")
SUMMARIES = ("queue_seconds", "compute_seconds", "total_seconds")


def bench(address: str, *flags: str, mix: str = MIX) -> subprocess.CompletedProcess[str]:
    return run_command("bench", "--address", address, "--mix", mix, *flags, timeout=2 * PATIENCE)


def checked(text: str) -> dict[str, Any]:
    """Parse a report, and check that its figures agree with one another."""
    report: dict[str, Any] = json.loads(text)

    def numbers(value: Any) -> Iterator[float]:
        if isinstance(value, dict | list):
            for part in value.values() if isinstance(value, dict) else value:
                yield from numbers(part)
        elif isinstance(value, int | float):
            yield value

    found = list(numbers(report))
    assert len(found) > 30
    assert all(math.isfinite(number) for number in found)
    overall, entries, seconds = report["overall"], report["entries"], report["measured_seconds"]
    for group in (overall, *entries):
        assert group["requests"] == sum(group[name] for name in COUNTS)
        for name in SUMMARIES:
            assert (group[name] is None) == (group["ok"] == 0)
        if group["ok"]:
            total = group["total_seconds"]
            assert 0 < total["p50"] <= total["p95"] <= total["p99"] <= total["max"]
            assert 0 <= group["queue_seconds"]["max"] <= total["max"]
            assert group["compute_seconds"]["mean"] > 0
        if seconds:
            assert group["answers_per_second"] == pytest.approx(group["answers"] / seconds)
    for name in ("requests", "answers", *COUNTS):
        assert overall[name] == sum(entry[name] for entry in entries)
    rates = [entry["audio_seconds_per_second"] for entry in entries]
    assert overall["audio_seconds_per_second"] == pytest.approx(sum(rates))
    unanswered = sum(overall[name] for name in ("rejected", "late", "failed"))
    assert sum(problem["requests"] for problem in report["problems"]) == unanswered
    assert all(problem["example"] for problem in report["problems"])
    return report


# ---------------------------------------------------------------- both loops


def test_the_closed_loop(server: ServerProcess) -> None:
    done = bench(server.address, "--concurrency", "4", "--duration", "2", "--warm-up", "0.5", "--json", "-")
    assert done.returncode == 0, done.stderr
    report = checked(done.stdout)
    assert report["load"]["loop"] == "closed"
    assert report["load"]["concurrency"] == 4
    assert report["server"]["model"] == "tiny"
    assert report["measured_seconds"] == 2
    assert report["generator"]["in_flight_max"] == 4
    assert report["check"] is None
    overall = report["overall"]
    assert overall["ok"] == overall["requests"] > 10
    # Four callers are never idle: their requests fill the time, save the one of each that ends after it.
    busy = overall["ok"] * overall["total_seconds"]["mean"]
    assert busy > 4 * 2 * 0.5
    # Of these lengths, each entry's sound is what was asked for.
    by_name = {entry["entry"]: entry for entry in report["entries"]}
    assert list(by_name) == MIX.split(",")
    for name, seconds in (("decode:40ms*4", 0.04), ("encode:0.5s*1", 0.5), ("decode-vq:1s*1", 1.0)):
        entry = by_name[name]
        assert entry["audio_seconds_per_second"] == pytest.approx(seconds * entry["answers_per_second"])
    # The table is not in the way of the JSON.
    assert "closed loop, 4 at a time" in done.stderr


def test_the_open_loop(server: ServerProcess, tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    flags = ("--rate", "15", "--duration", "2", "--warm-up", "0.5", "--seed", "3", "--json", str(target))
    done = bench(server.address, *flags)
    assert (done.returncode, done.stderr) == (0, "")
    report = checked(target.read_text())
    assert report["load"]["loop"] == "open"
    assert report["load"]["requests_per_second"] == 15
    # Whatever the server did, the seed alone says how many were sent.
    scheduled = [when for when in arrivals(15, 2.5, 3) if when >= 0.5]
    assert report["overall"]["requests"] == report["overall"]["ok"] == len(scheduled)
    for text in ("open loop, 15 requests a second", "tiny on cpu (float32)", "answers", "total, ms", *MIX.split(",")):
        assert text in done.stdout


def test_several_items_of_each_request(unix_server: ServerProcess) -> None:
    flags = ("--items", "3", "--concurrency", "2", "--duration", "1", "--warm-up", "0", "--json", "-")
    done = bench(unix_server.address, *flags, mix="decode:0.2s")
    assert done.returncode == 0, done.stderr
    overall = checked(done.stdout)["overall"]
    assert overall["audio_seconds_per_second"] == pytest.approx(0.6 * overall["answers_per_second"])


def test_each_answer_is_compared_with_the_answer_alone(unix_server: ServerProcess) -> None:
    flags = ("--check", "--items", "2", "--concurrency", "4", "--duration", "2", "--warm-up", "0", "--json", "-")
    done = bench(unix_server.address, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    report = checked(done.stdout)
    assert [entry["entry"] for entry in report["check"]] == MIX.split(",")
    for entry, compared in zip(report["entries"], report["check"], strict=True):
        assert compared["items"] == 2 * entry["ok"] > 0
        assert compared["differing"] == compared["differing_codes"] == 0
        assert compared["values"] > 0
        if compared["same_bits"] < compared["items"]:
            assert compared["worst_snr_db"] > 90
    assert "compared with the answer alone" in done.stderr


# ---------------------------------------------------------------- overload, and the end


def test_rejections_are_counted(start: Callable[..., ServerProcess]) -> None:
    server = start("--max-concurrent-calls", "1").ready()
    done = bench(server.address, "--concurrency", "8", "--duration", "1.5", "--warm-up", "0.2", "--json", "-")
    assert done.returncode == 0, done.stderr
    report = checked(done.stdout)
    assert report["overall"]["ok"] > 0
    assert report["overall"]["rejected"] > 0
    assert report["overall"]["failed"] == 0
    (problem,) = report["problems"]
    assert (problem["outcome"], problem["status"]) == ("rejected", "RESOURCE_EXHAUSTED")
    assert "at most 1" in problem["example"]
    assert "rejected (RESOURCE_EXHAUSTED), the first: " in done.stderr


def test_late_answers_are_counted(unix_server: ServerProcess) -> None:
    flags = ("--timeout", "0.001", "--concurrency", "2", "--duration", "0.5", "--warm-up", "0", "--json", "-")
    done = bench(unix_server.address, *flags, mix="decode:4s")
    assert_one_sentence(done_without_tables(done), "nothing was answered", "DEADLINE_EXCEEDED")
    report = checked(done.stdout)
    assert report["overall"]["late"] == report["overall"]["requests"] > 0


def done_without_tables(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """The same, with only the last line of standard error, which the tables are on as well."""
    last = done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout, last)


def test_an_interruption_reports_what_there_is(start: Callable[..., ServerProcess]) -> None:
    server = start("--log-level", "debug").ready()
    words = [COMMAND, "bench", "--address", server.address, "--duration", "600", "--warm-up", "0", "--json", "-"]
    process = subprocess.Popen(
        [str(word) for word in words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        eventually(lambda: server.log.count("mimo-tokenizer-bench") > 30)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, stderr
    assert "Traceback" not in stderr
    report = checked(stdout)
    assert report["interrupted"] is True
    assert 0 < report["measured_seconds"] < 600
    assert report["overall"]["ok"] > 0
    # The default's eight callers each had one request in flight, or were about to send one.
    assert report["overall"]["unfinished"] <= 8
    assert ", interrupted" in stderr


# ---------------------------------------------------------------- what the server will not take


@pytest.mark.parametrize(
    ("flags", "status", "texts"),
    [
        (("--mix", "decode:2"), 2, ("--mix", "decode:0.04s*8")),
        (("--mix", "sing:2s"), 2, ("--mix", "encode, decode, decode-vq")),
        (("--rate", "5", "--concurrency", "5"), 2, ("--concurrency", "--rate")),
        (("--rate", "nan"), 2, ("--rate",)),
        (("--duration", "0"), 2, ("--duration",)),
        (("--json", "/no/such/folder/x.json"), 2, ("/no/such/folder",)),
        (("--mix", "encode:1ms"), 1, ("encode:1ms", "at least 481 samples")),
        (("--mix", "encode:1801s"), 1, ("encode:1801s", "at most 1800 s")),
        (("--mix", "decode:900s"), 1, ("decode:900s", "67108864")),
        (("--items", "2000"), 1, ("at most 1024",)),
    ],
)
def test_a_load_that_cannot_be(
    unix_server: ServerProcess, flags: tuple[str, ...], status: int, texts: tuple[str, ...]
) -> None:
    done = run_command("bench", "--address", unix_server.address, "--duration", "0.1", *flags)
    assert_one_sentence(done, *texts, status=status)
    assert done.stdout == ""


def test_no_server(folder: Path) -> None:
    assert_one_sentence(run_command("bench", "--address", f"unix://{folder}/s"), "not available")


# ---------------------------------------------------------------- servers that misbehave


class Between(AudioTokenizerServicer):
    """Hands calls on to a real server, one at a time; a test says what becomes of the answers to Decode and Encode."""

    def __init__(self, address: str, change: Callable[[int, Any], None]) -> None:
        self._channel = grpc.insecure_channel(address)
        self._stub: Any = AudioTokenizerStub(self._channel)
        self._change = change
        self._lock = threading.Lock()
        self.calls = 0

    def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> Any:
        return self._stub.GetInfo(request)

    def Decode(self, request: pb.DecodeRequest, context: Any) -> Any:
        return self._changed(self._stub.Decode, request)

    def Encode(self, request: pb.EncodeRequest, context: Any) -> Any:
        return self._changed(self._stub.Encode, request)

    def _changed(self, method: Any, request: Any) -> Any:
        with self._lock:
            answer = method(request)
            self._change(self.calls, answer)
            self.calls += 1
        return answer

    def close(self) -> None:
        self._channel.close()


@contextmanager
def between(server: ServerProcess, change: Callable[[int, Any], None]) -> Iterator[str]:
    """Serve `Between` on a port, whose address it yields; `change` gets the number of the call and its answer."""
    servicer = Between(server.address, change)
    front = grpc.server(futures.ThreadPoolExecutor(32))
    add_AudioTokenizerServicer_to_server(servicer, front)
    port = front.add_insecure_port("127.0.0.1:0")
    front.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        front.stop(None).wait(PATIENCE)
        servicer.close()


# Of one entry: the largest request of it, then each item of its pool alone.
CALLS_BEFORE_THE_LOAD = 1 + 16


def quieter(call: int, answer: pb.DecodeResponse) -> None:
    if call == CALLS_BEFORE_THE_LOAD + 5:
        audio = answer.items[0].audio
        audio.pcm = bytes(len(audio.pcm))


def other_code(call: int, answer: pb.EncodeResponse) -> None:
    if call == CALLS_BEFORE_THE_LOAD + 5:
        codes = answer.items[0].codes
        codes.data = bytes([codes.data[0] ^ 1]) + codes.data[1:]


def shorter(call: int, answer: pb.DecodeResponse) -> None:
    if call == CALLS_BEFORE_THE_LOAD + 5:
        audio = answer.items[0].audio
        audio.pcm = audio.pcm[:-4]


@pytest.mark.parametrize(
    ("mix", "change", "text"),
    [
        ("decode:40ms", quieter, "0.0 dB SNR"),
        ("encode:0.1s", other_code, "1 of 60 codes"),
        ("decode:40ms", shorter, "3836 bytes, alone 3840"),
    ],
)
def test_one_wrong_answer_is_found(
    unix_server: ServerProcess, mix: str, change: Callable[[int, Any], None], text: str
) -> None:
    with between(unix_server, change) as address:
        flags = ("--check", "--concurrency", "2", "--duration", "2", "--warm-up", "0", "--json", "-")
        done = bench(address, *flags, mix=mix)
    assert_one_sentence(done_without_tables(done), "1 of ", "answers under load differ from the answer alone")
    (check,) = checked(done.stdout)["check"]
    assert check["differing"] == 1
    assert check["items"] > 5
    assert text in check["example"]
    assert f"1 DIFFER, the first: {check['example']}" in done.stderr


def test_an_item_that_fails_within_an_answer(unix_server: ServerProcess) -> None:
    def fail_one(call: int, answer: pb.DecodeResponse) -> None:
        if call % 2:
            answer.items[1].ClearField("audio")
            answer.items[1].status.code = grpc.StatusCode.INTERNAL.value[0]
            answer.items[1].status.message = "the second item broke"

    with between(unix_server, fail_one) as address:
        flags = ("--items", "2", "--concurrency", "1", "--duration", "1", "--warm-up", "0", "--json", "-")
        done = bench(address, *flags, mix="decode:1s")
    assert done.returncode == 0, done.stderr
    report = checked(done.stdout)
    overall = report["overall"]
    assert overall["failed"] > 0
    assert abs(overall["failed"] - overall["ok"]) <= 1
    assert report["problems"] == [
        {
            "outcome": "failed",
            "status": "INTERNAL",
            "requests": overall["failed"],
            "example": "the second item broke",
        }
    ]
    # The item beside it was answered.
    assert overall["answers_per_second"] < overall["audio_seconds_per_second"] < 2 * overall["answers_per_second"]


def test_a_stall_is_in_the_times_of_all_who_came_meanwhile(unix_server: ServerProcess) -> None:
    def stall_once(call: int, answer: Any) -> None:
        if call == 10:
            time.sleep(1.0)

    with between(unix_server, stall_once) as address:
        flags = ("--rate", "30", "--duration", "2.5", "--warm-up", "0", "--json", "-")
        done = bench(address, *flags, mix="decode:40ms")
    assert done.returncode == 0, done.stderr
    overall = checked(done.stdout)["overall"]
    assert overall["requests"] == len(list(arrivals(30, 2.5, 0)))
    # About thirty of the seventy-five came in that second, at random times in it: a closed loop would have seen one.
    assert overall["total_seconds"]["max"] > 0.9
    assert overall["total_seconds"]["mean"] > 0.1


def test_an_arrival_above_the_cap_is_not_sent(unix_server: ServerProcess) -> None:
    with between(unix_server, lambda call, answer: time.sleep(0.2)) as address:
        flags = ("--rate", "50", "--max-in-flight", "2", "--duration", "2", "--warm-up", "0", "--json", "-")
        done = bench(address, *flags, mix="decode:40ms")
    assert done.returncode == 0, done.stderr
    report = checked(done.stdout)
    overall = report["overall"]
    assert overall["requests"] == len(list(arrivals(50, 2, 0)))
    # Five a second are answered at most, so in two seconds and what is left in flight.
    assert 0 < overall["ok"] <= 13
    assert overall["not_sent"] == overall["requests"] - overall["ok"]
    assert report["generator"]["in_flight_max"] == 2
    assert "not sent: 2 were in flight" in done.stderr


def test_a_generator_that_was_held_up_counts_it(unix_server: ServerProcess) -> None:
    with TokenizerClient(unix_server.address) as client:
        info = client.info()
    load = Load(parse_mix("decode:40ms"), rate=50.0, duration=2.0, warm_up=0.0)

    async def held_up() -> Report:
        loop = asyncio.get_running_loop()

        def hold_up(call: int, answer: Any) -> None:
            if call == 10:
                loop.call_soon_threadsafe(time.sleep, 0.5)

        with between(unix_server, hold_up) as address:
            return await run(address, info, load)

    report = asyncio.run(held_up())
    assert report.generator.event_loop_lag_max_seconds > 0.4
    assert report.generator.send_lag_max_seconds > 0.3
    # It is in the times of the requests that were to be sent meanwhile.
    assert report.overall.total_seconds is not None
    assert report.overall.total_seconds.max > 0.3
    assert report.overall.requests == report.overall.ok == len(list(arrivals(50.0, 2.0, 0)))

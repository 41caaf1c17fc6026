"""The arithmetic of `mimo-tokenizer top`: increases, rates and quantiles between two readings of metrics."""

from __future__ import annotations

import bisect
import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from rich.console import Console

from mimo_tokenizer_server.top import Interval, Reading, TopError, quantile, url_of, view


def reading(registry: CollectorRegistry, clock: float, now: float = 0.0) -> Reading:
    return Reading.parse(generate_latest(registry).decode(), clock, now)


@pytest.mark.parametrize(
    ("q", "buckets", "wanted"),
    [
        (0.5, [(1, 10), (2, 30), (4, 40), (math.inf, 40)], 1.5),  # the 20th: 10 of 20 into 1..2
        (0.9, [(1, 10), (2, 30), (4, 40), (math.inf, 40)], 3.2),  # the 36th: 6 of 10 into 2..4
        (0.25, [(1, 10), (2, 30), (4, 40), (math.inf, 40)], 1.0),
        (0.1, [(1, 10), (2, 30), (4, 40), (math.inf, 40)], 0.4),  # the 4th of 10 in 0..1
        (0.99, [(1, 1), (2, 2), (math.inf, 4)], 2.0),  # in the last bucket: the highest finite bound
        (0.5, [(-1, 3), (2, 3), (math.inf, 3)], -1.0),
        (0.5, [(1, 0), (math.inf, 0)], math.nan),
        (0.5, [(math.inf, 3)], math.nan),
        (0.5, [], math.nan),
    ],
)
def test_quantiles_worked_out_by_hand(q: float, buckets: list[tuple[float, float]], wanted: float) -> None:
    assert quantile(q, buckets) == pytest.approx(wanted, nan_ok=True)


@given(
    st.lists(st.floats(0.001, 100), min_size=1, max_size=40),
    st.lists(st.floats(0.01, 90), min_size=1, max_size=8, unique=True).map(sorted),
)
def test_a_quantile_lies_in_the_bucket_of_the_observation_with_its_rank(
    observations: list[float], bounds: list[float]
) -> None:
    ordered = sorted(observations)
    buckets = [(bound, float(bisect.bisect_right(ordered, bound))) for bound in [*bounds, math.inf]]
    found = []
    for percent in (1, 50, 90, 99):
        value = quantile(percent / 100, buckets)
        observed = ordered[-(-percent * len(ordered) // 100) - 1]
        index = bisect.bisect_left(bounds, observed)
        if index == len(bounds):
            assert value == bounds[-1]
        else:
            lower = bounds[index - 1] if index else 0.0
            assert lower - 1e-9 <= value <= bounds[index] + 1e-9
        found.append(value)
    assert found == sorted(found)


def test_rates_means_and_quantiles_of_an_interval() -> None:
    registry = CollectorRegistry()
    calls = Counter("mimo_tokenizer_requests", "", ["method", "status"], registry=registry)
    seconds = Histogram("mimo_tokenizer_batch", "", ["kind"], buckets=(1, 2, 4), registry=registry)
    Gauge("process_start_time_seconds", "", registry=registry).set(1000)
    calls.labels("Decode", "OK").inc(7)
    for value in (0.5, 0.5, 3):
        seconds.labels("decode").observe(value)
    first = reading(registry, 50, 1010)
    calls.labels("Decode", "OK").inc(6)
    calls.labels("Decode", "CANCELLED").inc(2)
    for value in (1.2, 1.4, 1.6, 1.8, 5):
        seconds.labels("decode").observe(value)
    seconds.labels("encode").observe(0.1)
    second = reading(registry, 54, 1014)

    interval = Interval.between(first, second)
    assert interval.seconds == 4
    assert interval.rate("requests_total", method="Decode") == 2
    assert interval.rate("requests_total", method="Decode", status="OK") == 1.5
    assert interval.mean("batch", kind="decode") == pytest.approx(11 / 5)
    assert interval.quantile(0.5, "batch", kind="decode") == pytest.approx(1 + 2.5 / 4)
    assert interval.quantile(0.5, "batch") == pytest.approx(1 + 2 / 4)  # of both kinds
    assert interval.quantile(0.99, "batch", kind="decode") == 4
    assert math.isnan(interval.rate("nothing_total"))
    assert math.isnan(interval.quantile(0.5, "nothing"))
    # Without one before, and after a restart, all of it is since the start.
    for since in (Interval.between(None, second), Interval.between(second, first)):
        assert since.before is None
    assert Interval.between(None, second).seconds == 14
    assert Interval.between(None, second).rate("requests_total") == pytest.approx(15 / 14)
    # Nothing has happened: no rate, and no mean of nothing.
    still = Interval.between(second, reading(registry, 56))
    assert still.rate("requests_total") == 0
    assert math.isnan(still.mean("batch"))


@given(st.lists(st.tuples(st.booleans(), st.lists(st.floats(0, 9), max_size=4)), min_size=1, max_size=6))
def test_what_is_counted_comes_out_whatever_restarts(life: list[tuple[bool, list[float]]]) -> None:
    """Each part of `life`: whether the server is started anew before it, and what it then observes."""
    last: Reading | None = None
    start = 0
    seen: list[float] = []
    for clock, (restarts, observations) in enumerate(life):
        if restarts or last is None:
            start, seen = start + 1, []
            registry = CollectorRegistry()
            histogram = Histogram("mimo_tokenizer_work", "", buckets=(1, 3), registry=registry)
            Gauge("process_start_time_seconds", "", registry=registry).set(start)
        for value in observations:
            histogram.observe(value)
        now = reading(registry, clock, 100)
        interval = Interval.between(last, now)
        assert interval.increase("work_count") == len(observations)
        assert interval.increase("work_sum") == pytest.approx(sum(observations), abs=1e-9)
        for bound in ("1.0", "3.0", "+Inf"):
            wanted = sum(value <= float(bound) for value in observations)
            assert interval.increase("work_bucket", le=bound) == wanted
        seen += observations
        assert now.sum("work_count") == len(seen)
        last = now


def test_a_restart_that_only_the_counters_tell_of() -> None:
    before, after = (Reading.parse(f"a_total {count}\nb_total 5\n", clock, 0) for clock, count in enumerate((9, 4)))
    interval = Interval.between(before, after)
    assert interval.increase("a_total") == 4
    assert interval.increase("b_total") == 5


def drawn(interval: Interval) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(view(interval, "http://h:1/metrics"))
    return out.getvalue()


@pytest.mark.parametrize("loaded", [False, True])
def test_the_view_of_a_server_of_another_version(loaded: bool) -> None:
    """Metrics that it lacks are dashes; those of CUDA graphs are shown where they are."""
    text = "mimo_tokenizer_ready 1\nmimo_tokenizer_queue_frames 3\n"
    if loaded:
        text += 'mimo_tokenizer_model_info{model="[bold]m",device="cuda:1"} 1\n'
        text += 'mimo_tokenizer_batch_items_count{kind="decode"} 8\n'
        text += 'mimo_tokenizer_graph_hits_total{kind="decode"} 6\nmimo_tokenizer_graph_misses_total{kind="decode"} 2\n'
    else:
        text += 'mimo_tokenizer_batch_items_count{kind="decode"} 8\n'
        text += 'mimo_tokenizer_graph_hits_total{kind="decode"} 0\nmimo_tokenizer_graph_misses_total{kind="decode"} 0\n'
    shown = drawn(Interval.between(None, Reading.parse(text, 0, 0)))
    assert "queue 3 of - frames" in shown
    assert ("[bold]m on cuda:1 (?)" in shown) == loaded
    assert ("graphs hit" in shown) == loaded
    assert (" 75%" in shown) == loaded


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e308", "-1e308", "-0.5"])
@pytest.mark.parametrize("label", ["[/x]", "[bold", "\x1b[2J", ":smile:"])
def test_the_view_of_a_server_that_says_strange_things(value: str, label: str) -> None:
    names = ("requests_total", "requests_in_progress", "batch_items_sum", "batch_items_count", "audio_seconds_total")
    text = "".join(
        f'mimo_tokenizer_{name}{{method="{label}",kind="{label}",status="{status}"}} {value}\n'
        for name in (*names, "graph_hits_total", "graph_misses_total", "device_busy_seconds_total")
        for status in ("OK", label)
    )
    for name in ("request_duration_seconds", "queue_seconds"):
        for le in ("1", "nan", "+Inf"):
            text += f'mimo_tokenizer_{name}_bucket{{method="{label}",kind="{label}",le="{le}"}} {value}\n'
    for name in ("ready", "queue_frames", "queue_limit_frames", "device_memory_bytes", "device_memory_limit_bytes"):
        text += f"mimo_tokenizer_{name} {value}\n"
    text += f"process_start_time_seconds {value}\nprocess_resident_memory_bytes {value}\n"
    # Both infinities in one sum, too.
    text += 'mimo_tokenizer_queue_frames{a="b"} -Inf\n'
    text += f'mimo_tokenizer_model_info{{model="{label}"}} 1\n'
    first, second = (Reading.parse(text, clock, clock) for clock in (1, 2))
    for before in (None, first):
        shown = drawn(Interval(before, second))
        lines = shown.splitlines()
        name = label.replace("\x1b", "?")
        assert [line.split()[0] for line in lines if line.startswith(name)][:2] in ([name], [name, name])
        assert f"{name} on ? (?)" in shown
        assert "\x1b" not in shown


@pytest.mark.parametrize("labels", ['{le="many"}', '{le=""}', ""])
def test_a_histogram_without_bounds_is_refused(labels: str) -> None:
    with pytest.raises(ValueError, match="could not convert"):
        Reading.parse(f"mimo_tokenizer_queue_seconds_bucket{labels} 1\n", 0, 0)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:9100", "http://127.0.0.1:9100/metrics"),
        (":9100", "http://127.0.0.1:9100/metrics"),
        ("[::1]:9100", "http://[::1]:9100/metrics"),
        ("http://host:9100", "http://host:9100/metrics"),
        ("http://host:9100/", "http://host:9100/metrics"),
        ("https://host/tokenizer/metrics", "https://host/tokenizer/metrics"),
    ],
)
def test_addresses(text: str, url: str) -> None:
    assert url_of(text) == url


@pytest.mark.parametrize("text", ["", "nowhere", "unix:///run/x", "http://", "http://h:x", "http://[", "http://a b"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(TopError, match="neither host:port nor a URL"):
        url_of(text)


@given(st.text(alphabet='a1_{}="\\,\n #HELPTY.+-e', max_size=60) | st.text(max_size=60))
def test_text_that_is_no_metrics_is_refused(text: str) -> None:
    try:
        Reading.parse(text, 0, 0)
    except ValueError:
        return

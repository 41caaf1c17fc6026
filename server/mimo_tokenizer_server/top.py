"""`mimo-tokenizer top`: what a running server tells Prometheus, as a view for people."""

from __future__ import annotations

import http.client
import math
import re
import signal
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from . import address as addresses
from .config import MIB

_PREFIX = "mimo_tokenizer_"
_SECONDS_TO_ANSWER = 5.0
_MAX_ANSWER_BYTES = 8 * MIB
# Of plain blocks; a terminal has a width of its own.
_PLAIN_WIDTH = 120

Labels = Mapping[str, str]


class TopError(Exception):
    """There are no metrics of a server at the address; the sentence says why."""


@dataclass(frozen=True)
class Reading:
    """All values of a server at one moment.

    Attributes:
        clock: when they were read, in seconds of a clock that only goes forward.
        uptime: seconds since the server's process started; 0 if it does not say.
        values: by name without "mimo_tokenizer_", then by the labels, sorted.
    """

    clock: float
    uptime: float
    values: Mapping[str, Mapping[tuple[tuple[str, str], ...], float]]

    @classmethod
    def parse(cls, text: str, clock: float, now: float) -> Reading:
        """Read Prometheus' text format.

        Args:
            text: what the server told.
            clock: see above.
            now: the time of day, in seconds since 1970.

        Raises:
            ValueError: it is in another format, or a histogram's bound is no number.
        """
        values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith(_PREFIX) and sample.name.endswith("_bucket"):
                    float(sample.labels.get("le", ""))
                # Not for a terminal to obey.
                shown = {key: re.sub("[\x00-\x1f\x7f-\x9f]", "?", value) for key, value in sample.labels.items()}
                labels = tuple(sorted(shown.items()))
                values.setdefault(sample.name.removeprefix(_PREFIX), {})[labels] = sample.value
        started = values.get("process_start_time_seconds", {}).get((), now)
        return cls(clock, max(0.0, now - started) if math.isfinite(started) else 0.0, values)

    def sum(self, name: str, **labels: str) -> float:
        """The sum of the values that have these labels; NaN if there is none."""
        found = [value for key, value in self.values.get(name, {}).items() if labels.items() <= dict(key).items()]
        return sum(found) if found else math.nan

    def by(self, name: str, label: str) -> list[str]:
        """What `label` is in the values of a name."""
        return list(dict.fromkeys(dict(key).get(label, "") for key in self.values.get(name, {})))

    def info(self, name: str) -> Labels:
        """The labels of an info metric."""
        return dict(next(iter(self.values.get(name, {})), ()))


@dataclass(frozen=True)
class Interval:
    """What happened between two readings, or, without a first one, since the server's start.

    A server that was started again in between has counted from 0 since.
    """

    before: Reading | None
    now: Reading

    @classmethod
    def between(cls, before: Reading | None, now: Reading) -> Interval:
        """The interval; `before` is left out if it is of an earlier process."""
        if before is not None and _restarted(before, now):
            before = None
        return cls(before, now)

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.now.uptime if self.before is None else self.now.clock - self.before.clock

    def increase(self, name: str, **labels: str) -> float:
        """By how much a counter has grown."""
        before = 0.0 if self.before is None else self.before.sum(name, **labels)
        return self.now.sum(name, **labels) - (0.0 if math.isnan(before) else before)

    def rate(self, name: str, **labels: str) -> float:
        """The same a second."""
        return _ratio(self.increase(name, **labels), self.seconds)

    def mean(self, name: str, **labels: str) -> float:
        """Of a histogram's observations."""
        return _ratio(self.increase(f"{name}_sum", **labels), self.increase(f"{name}_count", **labels))

    def quantile(self, q: float, name: str, **labels: str) -> float:
        """Of a histogram's observations, as Prometheus reckons it."""
        bounds = self.now.by(f"{name}_bucket", "le")
        buckets = [(float(le), self.increase(f"{name}_bucket", le=le, **labels)) for le in bounds]
        return quantile(q, sorted(buckets))


def quantile(q: float, buckets: Sequence[tuple[float, float]]) -> float:
    """`histogram_quantile` of Prometheus: linear within a bucket, and the highest finite bound if it is in the last.

    Args:
        q: between 0 and 1.
        buckets: upper bounds, rising to infinity, each with the count of observations that are not above it.

    Returns:
        NaN if there is no observation.
    """
    if len(buckets) < 2 or not buckets[-1][1] > 0:
        return math.nan
    rank = q * buckets[-1][1]
    index = next((index for index, (_, count) in enumerate(buckets[:-1]) if count >= rank), len(buckets) - 1)
    if index == len(buckets) - 1:
        return buckets[-2][0]
    upper, count = buckets[index]
    lower, below = buckets[index - 1] if index else (min(0.0, upper), 0.0)
    return lower + (upper - lower) * _ratio(rank - below, count - below)


def _restarted(before: Reading, now: Reading) -> bool:
    """Whether they are of two processes: the start is another, or a counter has fallen."""
    started = "process_start_time_seconds"
    return before.values.get(started) != now.values.get(started) or any(
        now.values.get(name, {}).get(key, 0.0) < value
        for name, values in before.values.items()
        if re.search("_(total|bucket|count)$", name)
        for key, value in values.items()
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


# ---------------------------------------------------------------- asking


def url_of(address: str) -> str:
    """Where metrics are read: host:port, or a URL.

    Raises:
        TopError: it is neither.
    """
    try:
        if re.fullmatch(r"https?://\S+", address):
            parts = urllib.parse.urlsplit(address)
            if parts.hostname and parts.port != 0:
                return parts._replace(path=parts.path.rstrip("/") or "/metrics").geturl()
        elif (found := addresses.parse(address)).path is None:
            return f"http://{found.target}/metrics"
    except ValueError:
        pass
    raise TopError(f"{address!r} is neither host:port nor a URL of a server's metrics (serve --metrics-address)")


def read(url: str) -> Reading:
    """Ask a server.

    Raises:
        TopError: it does not answer, or not with a tokenizer's metrics.
    """
    # The server stands beside who asks: a proxy meant for the outside world is not the way to it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_SECONDS_TO_ANSWER) as answer:
            text = answer.read(_MAX_ANSWER_BYTES).decode()
        reading = Reading.parse(text, time.monotonic(), time.time())
    except urllib.error.HTTPError as error:
        raise TopError(f"{url} has no metrics: HTTP status {error.code}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise TopError(f"{url} does not answer: {getattr(reason, 'strerror', None) or reason}") from None
    except (http.client.HTTPException, ValueError):
        raise TopError(f"{url} answers, but not with metrics") from None
    if "ready" not in reading.values or "queue_frames" not in reading.values:
        raise TopError(f"{url} has metrics, but of no tokenizer server")
    return reading


def run(address: str, interval: float, once: bool) -> None:
    """Show a server's figures until Ctrl-C: live on a terminal, as plain blocks elsewhere.

    Args:
        address: host:port or URL of its metrics.
        interval: seconds between readings.
        once: show what it has done since its start, and end.

    Raises:
        TopError: there is no such server at the beginning; one that goes away later is waited for.
    """
    url = url_of(address)
    console = Console()
    live = console.is_terminal and not console.is_dumb_terminal and not once
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    last = Interval(None, read(url))
    if not live:
        console.print(view(last, url))
        while not once:
            time.sleep(interval)
            last, trouble = _next(last, url)
            console.print("", trouble or view(last, url))
        return
    # To be ended in any way must not leave the terminal as it is in between.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Live(view(last, url), console=console, screen=True) as screen:
        while True:
            time.sleep(interval)
            last, trouble = _next(last, url)
            screen.update(Group(trouble, "", view(last, url)) if trouble else view(last, url), refresh=True)


def _next(last: Interval, url: str) -> tuple[Interval, Text | None]:
    """The interval that ends now; if the server is away, the last one and a sentence about it."""
    try:
        return Interval.between(last.now, read(url)), None
    except TopError as error:
        return last, Text(f"{error}; trying again, and these are its last figures", "bold red")


# ---------------------------------------------------------------- showing


def view(interval: Interval, url: str) -> RenderableType:
    """All of it, for rich."""
    calls, work = (_calls(interval), *_failures(interval)), _work(interval)
    return Group(_head(interval, url), "", *calls, "", work, "", _foot(interval))


def _head(interval: Interval, url: str) -> RenderableType:
    now = interval.now
    model, build = now.info("model_info"), now.info("build_info")
    ready = now.sum("ready") == 1
    head = Text()
    head.append(f"mimo-tokenizer {build.get('server', '?')}", "bold")
    head.append(f" at {url}: ")
    head.append("ready" if ready else "not ready", "bold green" if ready else "bold red")
    head.append(f", up {_duration(now.uptime)}\n")
    if model:
        what = (model.get(name, "?") for name in ("model", "device", "device_name", "dtype", "quantization"))
        head.append("{} on {} ({}), {}, quantization {}".format(*what))
    else:
        head.append("no model is loaded yet")
    of = "since the start" if interval.before is None else f"of the last {interval.seconds:.1f} s"
    return head.append(f"\nrates, quantiles and means {of}", "dim")


def _calls(interval: Interval) -> RenderableType:
    now = interval.now
    table = _table("calls", "calls/s", "failed/s", "calls", "failed", "open", "p50", "p90", "p99")
    for method in now.by("requests_total", "method"):
        total, open_calls = now.sum("requests_total", method=method), now.sum("requests_in_progress", method=method)
        if not total and not open_calls:
            continue
        good = {"method": method, "status": "OK"}
        table.add_row(
            Text(method),
            _number(interval.rate("requests_total", method=method)),
            _number(interval.rate("requests_total", method=method) - interval.rate("requests_total", **good)),
            _number(total),
            _number(total - now.sum("requests_total", **good)),
            _number(open_calls),
            *(_seconds(interval.quantile(q, "request_duration_seconds", method=method)) for q in (0.5, 0.9, 0.99)),
        )
    return table


def _failures(interval: Interval) -> list[RenderableType]:
    now = interval.now
    lines: list[RenderableType] = []
    for method in now.by("requests_total", "method"):
        failed = [
            f"{status} {count:.0f} ({_number(interval.rate('requests_total', method=method, status=status))}/s)"
            for status in now.by("requests_total", "status")
            if status != "OK" and (count := now.sum("requests_total", method=method, status=status)) > 0
        ]
        if failed:
            lines.append(Text(f"  {method} failed: {', '.join(failed)}", "yellow"))
    return lines


def _work(interval: Interval) -> RenderableType:
    now = interval.now
    # Where none are recorded, neither is counted.
    graphs = now.sum("graph_hits_total") + now.sum("graph_misses_total") > 0
    table = _table(
        *("device", "busy", "batches/s", "items", "frames", "sound/s", "wait p50", "p99", "compute p50", "p99"),
        *(("graphs hit",) if graphs else ()),
    )
    for kind in now.by("batch_items_count", "kind"):
        hits, misses = (interval.increase(f"graph_{name}_total", kind=kind) for name in ("hits", "misses"))
        table.add_row(
            Text(kind),
            _percent(interval.rate("device_busy_seconds_total", kind=kind)),
            _number(interval.rate("batch_items_count", kind=kind)),
            _number(interval.mean("batch_items", kind=kind)),
            _number(interval.mean("batch_frames", kind=kind)),
            f"{_number(interval.rate('audio_seconds_total', kind=kind))} s",
            *(_seconds(interval.quantile(q, "queue_seconds", kind=kind)) for q in (0.5, 0.99)),
            *(_seconds(interval.quantile(q, "compute_seconds", kind=kind)) for q in (0.5, 0.99)),
            *((_percent(_ratio(hits, hits + misses)),) if graphs else ()),
        )
    return table


def _foot(interval: Interval) -> RenderableType:
    now = interval.now
    queue, room = now.sum("queue_frames"), now.sum("queue_limit_frames")
    used, limit = now.sum("device_memory_bytes"), now.sum("device_memory_limit_bytes")
    real_time = interval.rate("audio_seconds_total", kind="encode") + interval.rate(
        "audio_seconds_total", kind="decode"
    )
    return Text(
        f"queue {_number(queue)} of {_number(room)} frames   device busy"
        f" {_percent(interval.rate('device_busy_seconds_total'))}, {_number(real_time)} x real time"
        f"   device memory {_bytes(used)} of {_bytes(limit)}\n"
        f"process memory {_bytes(now.sum('process_resident_memory_bytes'))},"
        f" CPU {_percent(interval.rate('process_cpu_seconds_total'))}"
    )


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if value >= 100 or value % 1 == 0 else f"{value:.3g}"


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.0f}%"


def _seconds(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{1000 * value:.3g} ms" if value < 0.9995 else f"{value:.3g} s"


def _bytes(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value / MIB:.0f} MiB" if value < 1024 * MIB else f"{value / MIB / 1024:.1f} GiB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"

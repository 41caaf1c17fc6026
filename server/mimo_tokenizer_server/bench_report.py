"""From what `mimo-tokenizer bench` saw to figures, a table and JSON; pure, but for the printing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from rich.console import Console

# A generator that is later than this has measured itself as well.
_LATE_GENERATOR_SECONDS = 0.05


class Outcome(str, Enum):
    """What became of a request."""

    OK = "ok"
    REJECTED = "rejected"  # the queue was full
    LATE = "late"  # its deadline passed
    FAILED = "failed"
    UNFINISHED = "unfinished"  # the bench was interrupted
    NOT_SENT = "not_sent"  # too many were in flight


@dataclass(frozen=True, slots=True)
class Sample:
    """One request; times are seconds since the measurement began, negative in the warm-up.

    Attributes:
        entry: index in the mix.
        outcome: what became of it; OK only if all of its items were answered.
        scheduled: when it was to be sent.
        finished: when its answer was there.
        audio_seconds: of the items that were answered.
        status: name of the gRPC status, if the outcome is none of OK, UNFINISHED and NOT_SENT.
        sentence: what the server said to it.
        queue_seconds: as the server's timings have it, like the following ones.
        compute_seconds: on the device.
        batch_items: 0 where the server does not tell.
        batch_frames: 0 where the server does not tell.
    """

    entry: int
    outcome: Outcome
    scheduled: float
    finished: float
    audio_seconds: float = 0.0
    status: str = ""
    sentence: str = ""
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    batch_items: int = 0
    batch_frames: int = 0


# ---------------------------------------------------------------- statistics


@dataclass(frozen=True)
class Summary:
    """Of many values; each percentile is one of them (the nearest rank), so that none is better than was seen."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float


def summarize(values: Iterable[float]) -> Summary | None:
    """Summarize values, which may be none."""
    array = np.fromiter(values, np.float64)
    if not array.size:
        return None
    p50, p95, p99 = np.quantile(array, (0.50, 0.95, 0.99), method="inverted_cdf").tolist()
    return Summary(float(array.mean()), p50, p95, p99, float(array.max()))


def snr_db(wanted: npt.NDArray[Any], got: npt.NDArray[Any]) -> float:
    """Signal-to-noise ratio, 10 log10(sum wanted^2 / sum (wanted - got)^2), in dB.

    Infinite for equal arrays, minus infinity for an error where there was silence; NaN if there is one in them.
    """
    reference = wanted.astype(np.float64)
    error = float(np.sum((reference - got) ** 2))
    power = float(np.sum(reference**2))
    if error == 0:
        return math.inf
    if power == 0:
        return -math.inf
    return 10 * math.log10(power / error) if math.isfinite(power / error) else math.nan


# ---------------------------------------------------------------- the report


@dataclass(frozen=True)
class Group:
    """Figures of one entry of the mix, or of all.

    Counts and summaries are of the requests that were to be sent within the measurement; summaries of those that were
    answered. `answers`, and the rates, are of what was answered within it, whenever it was sent.

    Attributes:
        entry: of the mix; "all".
        requests: the sum of the following six.
        ok: answered.
        rejected: refused because the queue was full.
        late: not answered before the deadline.
        failed: all other failures.
        unfinished: in flight when the bench was interrupted.
        not_sent: held back by the generator's own limit.
        answers: answered within the measurement.
        answers_per_second: of the measurement.
        audio_seconds_per_second: of sound that was encoded or decoded, or that vectors were looked up for.
        queue_seconds: as the server says.
        compute_seconds: as the server says.
        total_seconds: from when a request was to be sent to when its answer was there.
        batch_items: of the batches, as the answers saw them: a batch of eight calls counts eight times. None where
            the server does not tell.
        batch_frames: likewise.
        batch_items_histogram: size to the number of answers that saw it.
    """

    entry: str
    requests: int
    ok: int
    rejected: int
    late: int
    failed: int
    unfinished: int
    not_sent: int
    answers: int
    answers_per_second: float
    audio_seconds_per_second: float
    queue_seconds: Summary | None
    compute_seconds: Summary | None
    total_seconds: Summary | None
    batch_items: Summary | None
    batch_frames: Summary | None
    batch_items_histogram: dict[int, int]


def group(entry: str, samples: Sequence[Sample], seconds: float) -> Group:
    """Take the figures of samples.

    Args:
        entry: what they are of.
        samples: also those of the warm-up, and what ended after the measurement.
        seconds: that the measurement took.
    """
    measured = [sample for sample in samples if 0 <= sample.scheduled < seconds]
    count = Counter(sample.outcome for sample in measured)
    answers = [sample for sample in samples if sample.audio_seconds and 0 <= sample.finished < seconds]
    ok = [sample for sample in measured if sample.outcome is Outcome.OK]
    told = [sample for sample in ok if sample.batch_items]
    return Group(
        entry=entry,
        requests=len(measured),
        ok=count[Outcome.OK],
        rejected=count[Outcome.REJECTED],
        late=count[Outcome.LATE],
        failed=count[Outcome.FAILED],
        unfinished=count[Outcome.UNFINISHED],
        not_sent=count[Outcome.NOT_SENT],
        answers=len(answers),
        answers_per_second=len(answers) / seconds if seconds else 0.0,
        audio_seconds_per_second=math.fsum(sample.audio_seconds for sample in answers) / seconds if seconds else 0.0,
        queue_seconds=summarize(sample.queue_seconds for sample in ok),
        compute_seconds=summarize(sample.compute_seconds for sample in ok),
        total_seconds=summarize(sample.finished - sample.scheduled for sample in ok),
        batch_items=summarize(sample.batch_items for sample in told),
        batch_frames=summarize(sample.batch_frames for sample in told),
        batch_items_histogram=dict(sorted(Counter(sample.batch_items for sample in told).items())),
    )


@dataclass(frozen=True)
class Problem:
    """Requests that were not answered, for one reason, with what the server said to the first of them."""

    outcome: Outcome
    status: str
    requests: int
    example: str


def problems(samples: Sequence[Sample], seconds: float) -> list[Problem]:
    """Group what was not answered within the measurement by its status, the most frequent first."""
    bad = [sample for sample in samples if sample.status and 0 <= sample.scheduled < seconds]
    counted = Counter((sample.outcome, sample.status) for sample in bad)
    examples = {(sample.outcome, sample.status): sample.sentence for sample in reversed(bad)}
    return [Problem(*key, requests, examples[key]) for key, requests in counted.most_common()]


@dataclass
class EntryCheck:
    """How the answers under load compare with the answers alone, for one entry of the mix.

    Attributes:
        entry: of the mix.
        items: answers of items that were compared, those of the warm-up too.
        same_bits: those that had the same bytes.
        differing: those that differ by more than they may.
        worst_snr_db: of those that had not the same bytes; None for codes, and where no ratio is a number.
        values: codes, samples or numbers of vectors in what was compared.
        differing_codes: of them, for `encode`.
        example: of what differs.
    """

    entry: str
    items: int = 0
    same_bits: int = 0
    differing: int = 0
    worst_snr_db: float | None = None
    values: int = 0
    differing_codes: int = 0
    example: str = ""

    def compare(self, alone: bytes, got: bytes, dtype: str, least_snr_db: float | None) -> None:
        """Count an answer.

        Args:
            alone: the item's answer alone.
            got: its answer under load.
            dtype: of the values in both.
            least_snr_db: how near they have to be; None for all values equal.
        """
        self.items += 1
        if got == alone:
            self.same_bits += 1
            self.values += len(alone) // np.dtype(dtype).itemsize
            return
        if len(got) != len(alone):
            self._differs(f"{len(got)} bytes, alone {len(alone)}")
            return
        wanted, values = np.frombuffer(alone, dtype), np.frombuffer(got, dtype)
        self.values += len(wanted)
        if least_snr_db is None:
            wrong = int(np.count_nonzero(wanted != values))
            self.differing_codes += wrong
            self._differs(f"{wrong} of {len(wanted)} codes are others than alone")
            return
        snr = snr_db(wanted, values)
        if math.isfinite(snr):
            self.worst_snr_db = min(snr, math.inf if self.worst_snr_db is None else self.worst_snr_db)
        if not snr >= least_snr_db:
            self._differs(f"{snr:.1f} dB SNR against the answer alone; at least {least_snr_db:g} are wanted")

    def _differs(self, how: str) -> None:
        self.differing += 1
        self.example = self.example or how


@dataclass(frozen=True)
class Generator:
    """How the load generator itself did.

    Attributes:
        event_loop_lag_max_seconds: by which its own timer was late, at most.
        send_lag_max_seconds: by which it sent a request later than it was to, at most.
        in_flight_max: requests at a time.
        channels: connections to the server.
    """

    event_loop_lag_max_seconds: float = 0.0
    send_lag_max_seconds: float = 0.0
    in_flight_max: int = 0
    channels: int = 0


@dataclass(frozen=True)
class Report:
    """All that a bench has to say.

    Attributes:
        server: which one, where, on what.
        load: what was sent.
        interrupted: whether it was ended early.
        measured_seconds: without the warm-up.
        overall: figures of all requests.
        entries: figures of each entry of the mix.
        problems: what was not answered.
        generator: how the generator itself did.
        check: how answers compare with those alone, for each entry; None if they were not compared.
    """

    server: dict[str, Any]
    load: dict[str, Any]
    interrupted: bool
    measured_seconds: float
    overall: Group
    entries: list[Group]
    problems: list[Problem]
    generator: Generator
    check: list[EntryCheck] | None = field(default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; numbers are finite, and None stands where there is nothing to tell."""
        return asdict(self)

    @property
    def failure(self) -> str | None:
        """Why the bench as a whole failed, in a sentence; None if it did not."""
        if not self.overall.ok:
            if self.problems:
                first = self.problems[0]
                return f"nothing was answered; {first.requests} requests ended with {first.status}: {first.example}"
            if self.interrupted:
                return "nothing was answered before the interruption"
            return "nothing was answered: no request was sent in the measurement; make it longer"
        differing = sum(entry.differing for entry in self.check or ())
        if differing:
            compared = sum(entry.items for entry in self.check or ())
            return f"{differing} of {compared} answers under load differ from the answer alone"
        return None


# ---------------------------------------------------------------- on the terminal


def show(report: Report, console: Console) -> None:
    """Print a report as tables and sentences."""

    def say(sentence: str) -> None:
        console.print(sentence, markup=False, soft_wrap=True)

    server, load = report.server, report.load
    how = (
        f"open loop, {load['requests_per_second']:g} requests a second"
        if load["loop"] == "open"
        else f"closed loop, {load['concurrency']} at a time"
    )
    say(
        f"{server['model']} on {server['device']} ({server['dtype']}) at {server['address']}: {how},"
        f" {report.measured_seconds:.1f} s measured after {load['warm_up_seconds']:g} s of warm-up"
        f"{', interrupted' if report.interrupted else ''}"
    )
    groups = [*report.entries, report.overall]
    console.print(_counts(groups))
    console.print(_distributions(groups))
    for problem in report.problems:
        say(f"{problem.requests} {problem.outcome.value} ({problem.status}), the first: {problem.example}")
    if report.overall.not_sent:
        say(
            f"{report.overall.not_sent} not sent: {load['max_in_flight']} were in flight, as many as --max-in-flight"
            " allows"
        )
    if report.overall.ok and not report.overall.batch_items:
        say("The server does not tell its batches.")
    for entry in report.check or ():
        say(_check_line(entry))
    generator = report.generator
    say(
        f"The generator: at most {generator.in_flight_max} in flight over {generator.channels} connection(s), its event"
        f" loop at most {generator.event_loop_lag_max_seconds * 1e3:.1f} ms late, its requests at most"
        f" {generator.send_lag_max_seconds * 1e3:.1f} ms."
    )
    if max(generator.event_loop_lag_max_seconds, generator.send_lag_max_seconds) > _LATE_GENERATOR_SECONDS:
        say(
            "The generator did not keep up: part of the times above are its own. Give it a core of its own, or send"
            " less."
        )


def _counts(groups: Sequence[Group]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    # The rarer outcomes have a column where there are any; all of them together still fit into 80 characters.
    headers = {"unfinished": "unfin-\nished", "not_sent": "not\nsent"}
    names = ["requests", "ok", "rejected", "late", "failed"]
    names += [name for name in ("unfinished", "not_sent") if any(getattr(one, name) for one in groups)]
    titles = [*(headers.get(name, name) for name in names), "answers\n/s", "audio\ns/s"]
    table = Table("", *titles, box=None, pad_edge=False, collapse_padding=True)
    for column in table.columns[1:]:
        column.justify = "right"
    for one in groups:
        counts = [str(getattr(one, name)) for name in names]
        table.add_row(
            escape(one.entry), *counts, f"{one.answers_per_second:.2f}", f"{one.audio_seconds_per_second:.2f}"
        )
    return table


def _distributions(groups: Sequence[Group]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    columns = ("mean", "p50", "p95", "p99", "max")
    table = Table("", "", *columns, box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for one in groups:
        rows: list[tuple[str, Summary | None, float, int]] = [
            ("queue, ms", one.queue_seconds, 1e3, 2),
            ("compute, ms", one.compute_seconds, 1e3, 2),
            ("total, ms", one.total_seconds, 1e3, 2),
            ("batch, items", one.batch_items, 1, 1),
            ("batch, frames", one.batch_frames, 1, 1),
        ]
        name = escape(one.entry)
        for what, summary, scale, digits in rows:
            if summary is not None:
                values = (f"{getattr(summary, column) * scale:.{digits}f}" for column in columns)
                table.add_row(name, what, *values)
                name = ""
    return table


def _check_line(entry: EntryCheck) -> str:
    line = f"{entry.entry}: {entry.items} answers compared with the answer alone, {entry.same_bits} the same bits"
    if entry.worst_snr_db is not None:
        line += f", the farthest of the others {entry.worst_snr_db:.1f} dB SNR"
    if entry.differing:
        line += f"; {entry.differing} DIFFER, the first: {entry.example}"
    return line

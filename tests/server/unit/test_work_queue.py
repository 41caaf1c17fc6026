"""The scheduler's policy, sentence by sentence: a queue, a clock moved by hand, and jobs that take what they say."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_tokenizer_server.errors import Reason, RequestError
from mimo_tokenizer_server.scheduler import Job, WorkQueue
from mimo_tokenizer_server.work import Cost, Kind

MAX_FRAMES = 100
MAX_SECONDS = 0.08
ACTIVATIONS = 1000
STATE = 1000
STEP = 0.04


class Future:
    """What the queue asks of a caller: whether it has gone."""

    def __init__(self) -> None:
        self.gone = False

    def done(self) -> bool:
        return self.gone


class Computation:
    """Long work that has been begun: what is left of it."""

    def __init__(self, seconds: float) -> None:
        self.seconds_left = seconds
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Desk:
    """A queue and what it refuses, with jobs of any size.

    Attributes:
        refused: jobs taken out, and why.
        now: the clock.
    """

    def __init__(self, **limits: Any) -> None:
        self.now = 100.0
        self.refused: list[tuple[Job, RequestError | None]] = []
        bounds: dict[str, Any] = {
            "max_frames": MAX_FRAMES,
            "max_seconds": MAX_SECONDS,
            "activations": ACTIVATIONS,
            "state": STATE,
        }
        self.queue = WorkQueue(**bounds | limits, refuse=self._refuse)
        self._numbers = itertools.count()

    def _refuse(self, job: Job, error: RequestError | None) -> None:
        if job.computation is not None:
            job.computation.close()
        self.refused.append((job, error))

    def job(self, call: object = None, **changes: Any) -> Job:
        """Short work of a call of its own: 10 frames, 1 ms, 10 bytes. With `stepwise`, long: 1 s, 100 bytes."""
        stepwise = changes.pop("stepwise", False)
        deadline = changes.pop("deadline", None)
        values: dict[str, Any] = {"kind": Kind.DECODE, "frames": 10, "seconds": 0.001, "bytes": 10}
        if stepwise:
            values |= {"frames": 1000, "seconds": 1.0, "bytes": 100}
        cost = Cost(**values | changes, stepwise=stepwise)
        work: Any = next(self._numbers)
        future: Any = Future()
        return Job(work, cost, call or object(), deadline, self.now, future)

    def add(self, call: object = None, **changes: Any) -> Job:
        job = self.job(call, **changes)
        self.queue.add(job)
        return job

    def next(self) -> list[Job]:
        return self.queue.next(self.now)

    def step(self, job: Job, seconds: float = STEP) -> bool:
        """Compute a long job's step, and say whether it was the last."""
        if job.computation is None:
            begun: Any = Computation(job.cost.seconds)
            job.computation = begun
        computation: Any = job.computation
        computation.seconds_left -= seconds
        self.now += seconds
        self.queue.account([job], seconds)
        if computation.seconds_left > 1e-9:
            return False
        self.queue.finish(job)
        return True

    def serve(self) -> list[Job]:
        """Compute what is next: a batch, or a step."""
        jobs = self.next()
        if jobs and jobs[0].cost.stepwise:
            self.step(jobs[0])
        elif jobs:
            seconds = sum(job.cost.seconds for job in jobs)
            self.now += seconds
            self.queue.account(jobs, seconds)
        return jobs


@pytest.fixture
def desk() -> Desk:
    return Desk()


# ---------------------------------------------------------------- batches


def test_nothing_is_next_where_nothing_waits(desk: Desk) -> None:
    assert desk.next() == []
    job = desk.add()
    assert desk.next() == [job]
    assert desk.next() == []


def test_what_fits_goes_together(desk: Desk) -> None:
    jobs = [desk.add() for _ in range(10)]
    assert desk.next() == jobs


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"frames": 30}, 3),
        ({"frames": 25}, 4),
        ({"seconds": 0.03}, 2),
        ({"bytes": 400}, 2),
        ({"bytes": 500}, 2),
    ],
)
def test_a_batch_is_bounded(desk: Desk, changes: dict[str, Any], most: int) -> None:
    jobs = [desk.add(**changes) for _ in range(2 * most)]
    assert desk.next() == jobs[:most]
    assert desk.next() == jobs[most:]


def test_a_batch_has_one_kind_that_of_the_call_whose_turn_it_is(desk: Desk) -> None:
    kinds = [Kind.ENCODE, Kind.DECODE, Kind.ENCODE, Kind.DECODE_VQ, Kind.DECODE]
    jobs = [desk.add(kind=kind) for kind in kinds]
    assert desk.next() == [jobs[0], jobs[2]]
    assert desk.next() == [jobs[1], jobs[4]]
    assert desk.next() == [jobs[3]]


def test_what_does_not_fit_stops_nobody_that_does(desk: Desk) -> None:
    first = desk.add(frames=60)
    large = desk.add(frames=50)
    small = desk.add(frames=40)
    assert desk.next() == [first, small]
    assert desk.next() == [large]


def test_what_is_larger_than_a_batch_goes_alone_when_its_turn_comes(desk: Desk) -> None:
    huge = desk.add(frames=5 * MAX_FRAMES, seconds=1.0)
    others = [desk.add() for _ in range(3)]
    assert desk.next() == [huge]
    assert desk.next() == others
    # And it does not stop those before it.
    others = [desk.add() for _ in range(3)]
    huge = desk.add(frames=5 * MAX_FRAMES)
    behind = desk.add()
    assert desk.next() == [*others, behind]
    assert desk.next() == [huge]


def test_a_call_of_many_items_gives_each_other_call_its_turn(desk: Desk) -> None:
    many, one, other = object(), object(), object()
    items = [desk.add(many) for _ in range(50)]
    first, second = desk.add(one), desk.add(other)
    batch = desk.next()
    # One of each call, and then, as there is room, more of the call that has more.
    assert batch[:3] == [items[0], first, second]
    assert batch[3:] == items[1:8]


def test_calls_that_were_served_go_to_the_end(desk: Desk) -> None:
    calls = [object() for _ in range(4)]
    items = [[desk.add(call, frames=40) for _ in range(3)] for call in calls]
    batches = [desk.next() for _ in range(6)]
    assert batches == [[items[call][number], items[call + 1][number]] for number in range(3) for call in (0, 2)]


def test_items_of_a_call_keep_their_order(desk: Desk) -> None:
    call = object()
    items = [desk.add(call, frames=frames) for frames in (60, 60, 10, 90, 5)]
    served = [job for _ in range(4) for job in desk.next()]
    assert served == items


def test_encoding_and_decoding_alternate(desk: Desk) -> None:
    encoding, decoding = [object() for _ in range(6)], [object() for _ in range(6)]
    for encode, decode in zip(encoding, decoding, strict=True):
        for _ in range(10):
            desk.add(encode, kind=Kind.ENCODE)
            desk.add(decode)
    kinds = [desk.next()[0].cost.kind for _ in range(12)]
    assert all(one is not other for one, other in itertools.pairwise(kinds))


def test_one_call_of_another_kind_waits_for_one_batch(desk: Desk) -> None:
    for _ in range(30):
        desk.add(kind=Kind.ENCODE)
    desk.next()
    decode = desk.add()
    # Those that came before it had their turns before.
    for _ in range(2):
        assert decode not in desk.next()
    assert desk.next() == [decode]


# ---------------------------------------------------------------- long work


def test_a_long_job_is_given_out_step_by_step(desk: Desk) -> None:
    job = desk.add(stepwise=True, seconds=3 * STEP)
    for last in (False, False, True):
        assert desk.next() == [job]
        assert desk.step(job) == last
    assert desk.next() == []


def test_steps_go_to_the_shortest_and_to_the_oldest_by_turns(desk: Desk) -> None:
    oldest = desk.add(stepwise=True, seconds=10.0)
    middle = desk.add(stepwise=True, seconds=5.0)
    shortest = desk.add(stepwise=True, seconds=1.0)
    given = [desk.serve()[0] for _ in range(20)]
    assert Counter(map(id, given)) == {id(oldest): 10, id(shortest): 10}
    assert all(one is not other for one, other in itertools.pairwise(given))
    assert middle.computation is None
    # A shorter one goes first from then on.
    newest = desk.add(stepwise=True, seconds=0.08)
    given = [desk.serve()[0] for _ in range(4)]
    assert Counter(map(id, given)) == {id(oldest): 2, id(newest): 2}


def test_what_counts_is_what_is_left(desk: Desk) -> None:
    oldest = desk.add(stepwise=True, seconds=0.5)
    desk.step(oldest, 0.4)
    desk.add(stepwise=True, seconds=0.2)
    assert {id(desk.serve()[0]) for _ in range(2)} == {id(oldest)}


def test_short_and_long_work_get_half_each(desk: Desk) -> None:
    call = object()
    desk.add(stepwise=True, seconds=1e6)
    spent = {True: 0.0, False: 0.0}
    for _ in range(2000):
        while len(desk.queue._calls.get(call, ())) < 20:
            desk.add(call, seconds=0.004)
        before = desk.now
        jobs = desk.serve()
        spent[jobs[0].cost.stepwise] += desk.now - before
    assert spent[True] == pytest.approx(spent[False], abs=MAX_SECONDS + STEP)


def test_what_waits_alone_gets_all(desk: Desk) -> None:
    job = desk.add(stepwise=True, seconds=1e6)
    assert all(desk.serve() == [job] for _ in range(100))
    # What it had while nobody else waited is not held against it, nor does it make the others wait for long.
    short = desk.add()
    assert desk.serve() == [short]
    assert desk.serve() == [job]
    desk.queue.finish(job)
    for _ in range(100):
        short = desk.add()
        assert desk.serve() == [short]
    job, short = desk.add(stepwise=True, seconds=1e6), desk.add()
    assert {id(desk.serve()[0]) for _ in range(2)} == {id(job), id(short)}


def _begun(desk: Desk) -> list[Job]:
    return [job for job in desk.queue._long if job.computation is not None]


def test_the_state_of_what_has_been_begun_is_bounded(desk: Desk) -> None:
    jobs = [desk.add(stepwise=True, bytes=400, seconds=seconds) for seconds in (0.8, 0.4, 0.2)]
    finished = []
    for _ in range(100):
        served = desk.serve()
        assert sum(job.cost.bytes for job in _begun(desk)) <= STATE
        finished += [job for job in served if job not in desk.queue._long]
    # Every one got there, the shortest first, the oldest not last of all.
    assert Counter(map(id, finished)) == Counter(map(id, jobs))
    assert finished[0] is jobs[2]


def test_nothing_begins_in_the_room_that_the_oldest_needs(desk: Desk) -> None:
    """Else ever new short ones could keep a large one from beginning for ever."""
    young = [desk.add(stepwise=True, bytes=300, seconds=2 * STEP)]
    desk.serve()
    large = desk.add(stepwise=True, bytes=900, seconds=1.0)
    for _ in range(100):
        young.append(desk.add(stepwise=True, bytes=300, seconds=2 * STEP))
        desk.serve()
        if large.computation is not None:
            break
    assert large.computation is not None
    # Only what had been begun before went on before it.
    assert [job for job in young if job.computation is not None] == young[:1]


def test_small_ones_may_begin_beside_the_oldest(desk: Desk) -> None:
    large = desk.add(stepwise=True, bytes=700, seconds=10.0)
    small = desk.add(stepwise=True, bytes=300, seconds=0.04)
    assert desk.serve() == [small]
    assert desk.serve() == [large]


def test_long_work_of_any_age_and_size_ends(desk: Desk) -> None:
    """A stream of short long ones, for ever: the oldest ends all the same, and so do they."""
    rng = random.Random(0)
    oldest = desk.add(stepwise=True, seconds=50.0, bytes=600)
    others: list[Job] = []
    waits: list[float] = []
    call = object()
    start = desk.now
    while oldest in desk.queue._long:
        if len(desk.queue._long) < 6:
            others.append(desk.add(stepwise=True, seconds=rng.uniform(0.1, 2.0), bytes=rng.randrange(50, 400)))
        if not desk.queue._calls:
            desk.add(call, seconds=0.03)
        for job in desk.serve():
            if job in others and job not in desk.queue._long:
                waits.append(desk.now - job.arrived)
        assert desk.now - start < 250, "half of a half of the device, and no more, is for the oldest"
    assert len(waits) > 30
    assert max(waits) < 120


# ---------------------------------------------------------------- deadlines and callers that go


@pytest.mark.parametrize("stepwise", [False, True])
def test_a_passed_deadline_is_told(desk: Desk, stepwise: bool) -> None:
    late = desk.add(stepwise=stepwise, deadline=desk.now + 5)
    job = desk.add()
    desk.now += 5
    assert desk.next() == [job]
    ((refused, error),) = desk.refused
    assert refused is late
    assert error is not None
    assert error.reason is Reason.DEADLINE
    assert str(error) == "the deadline passed; the item had come 5.000 seconds before"


@pytest.mark.parametrize("stepwise", [False, True])
def test_a_deadline_that_cannot_be_met_is_told_before_it_passes(desk: Desk, stepwise: bool) -> None:
    late = desk.add(stepwise=stepwise, deadline=desk.now + 3.0, seconds=4.0)
    desk.now += 2.5
    assert desk.next() == []
    ((refused, error),) = desk.refused
    assert refused is late
    assert error is not None
    assert error.reason is Reason.DEADLINE
    assert str(error) == (
        "the deadline is 0.500 seconds off, after 2.500 seconds in the queue, and the item takes about 4.000 seconds"
        " more"
    )


@pytest.mark.parametrize("stepwise", [False, True])
def test_a_deadline_that_might_be_met_is_tried(desk: Desk, stepwise: bool) -> None:
    """The estimate may be wrong by a factor of five."""
    job = desk.add(stepwise=stepwise, deadline=desk.now + 0.81, seconds=4.0)
    assert desk.next() == [job]
    assert not desk.refused


def test_a_long_job_that_turns_out_to_be_late_is_left_off(desk: Desk) -> None:
    job = desk.add(stepwise=True, deadline=desk.now + 1.0, seconds=1.0)
    assert not desk.step(job, 0.2)
    desk.now += 0.7
    assert desk.next() == []
    computation: Any = job.computation
    assert computation.closed
    assert [refused for refused, _ in desk.refused] == [job]


def test_one_late_item_does_not_fail_its_call(desk: Desk) -> None:
    call = object()
    late, good = desk.add(call, deadline=desk.now), desk.add(call)
    assert desk.next() == [good]
    assert [job for job, _ in desk.refused] == [late]
    assert desk.next() == []


@pytest.mark.parametrize("stepwise", [False, True])
def test_whoever_has_gone_is_dropped_without_a_word(desk: Desk, stepwise: bool) -> None:
    jobs = [desk.add(stepwise=stepwise) for _ in range(3)]
    futures: list[Any] = [job.future for job in jobs]
    futures[0].gone = futures[2].gone = True
    assert desk.next() == [jobs[1]]
    assert [job for job, _ in desk.refused] == ([jobs[0], jobs[2]])
    assert all(error is None for _, error in desk.refused)


def test_a_long_job_whose_caller_goes_is_closed_between_its_steps(desk: Desk) -> None:
    job = desk.add(stepwise=True, bytes=900)
    other = desk.add(stepwise=True, bytes=900)
    desk.step(job)
    future: Any = job.future
    future.gone = True
    # Its room is free at once.
    assert desk.next() == [other]
    computation: Any = job.computation
    assert computation.closed
    assert desk.refused == [(job, None)]


def test_clearing_takes_out_everything(desk: Desk) -> None:
    jobs = [desk.add(), desk.add(stepwise=True), desk.add(kind=Kind.ENCODE), desk.add(stepwise=True)]
    desk.step(jobs[1])
    assert Counter(map(id, desk.queue.clear())) == Counter(map(id, jobs))
    assert desk.next() == []
    desk.queue.finish(jobs[1])  # it had been given out before
    assert desk.next() == []


# ---------------------------------------------------------------- any jobs at all

_SHORT = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(Kind),
        "frames": st.integers(1, 150),
        "seconds": st.floats(0.0001, 0.12),
        "bytes": st.integers(1, 1500),
    }
)
_LONG = st.fixed_dictionaries(
    {
        "stepwise": st.just(True),
        "kind": st.sampled_from([Kind.ENCODE, Kind.DECODE]),
        "frames": st.integers(100, 50_000),
        "seconds": st.floats(0.01, 2.0),
        "bytes": st.integers(1, STATE),
    }
)


@settings(deadline=None, max_examples=200)
@given(
    jobs=st.lists(
        st.tuples(
            st.integers(0, 5),  # the call
            st.one_of(_SHORT, _LONG),
            st.one_of(st.none(), st.floats(-0.5, 3.0)),  # its deadline
            st.integers(0, 3),  # what is served before the next one comes
            st.booleans(),  # whether its caller goes before the end
        ),
        max_size=40,
    ),
    goes=st.integers(0, 30),
)
def test_every_job_is_given_out_once_or_refused(jobs: list[Any], goes: int) -> None:
    desk = Desk()
    calls = [object() for _ in range(6)]
    added: list[Job] = []
    answered: list[Job] = []

    def serve() -> bool:
        served = desk.serve()
        if not served:
            return False
        if served[0].cost.stepwise:
            (job,) = served
            assert sum(other.cost.bytes for other in _begun(desk)) <= STATE
            answered.extend([job] if job not in desk.queue._long else [])
        else:
            assert len({job.cost.kind for job in served}) == 1
            if len(served) > 1:
                assert sum(job.cost.frames for job in served) <= MAX_FRAMES
                assert sum(job.cost.seconds for job in served) <= MAX_SECONDS + 1e-9
                assert sum(job.cost.bytes for job in served) <= ACTIVATIONS
            answered.extend(served)
        return True

    leaving: list[Job] = []
    for call, cost, deadline, between, leaves in jobs:
        due = None if deadline is None else desk.now + deadline
        job = desk.add(calls[call], **cost, deadline=due)
        added.append(job)
        if leaves:
            leaving.append(job)
        for _ in range(between):
            serve()
    for _ in range(goes):
        serve()
    for job in leaving:
        future: Any = job.future
        future.gone = True
    while serve():
        pass
    refused = [job for job, _ in desk.refused]
    assert Counter(map(id, answered + refused)) == Counter(map(id, added))
    for job, error in desk.refused:
        assert error is not None if job not in leaving else True
        if job.computation is not None:
            computation: Any = job.computation
            assert computation.closed
    assert desk.queue.clear() == []


# ---------------------------------------------------------------- a busy day


class Day:
    """Traffic and a device whose times are what the estimates say, but for a third.

    Attributes:
        waits: of the chunks, from arrival to answer.
        busy: device time that long and short work had while both waited.
    """

    def __init__(self, seed: int = 0) -> None:
        self.desk = Desk(max_frames=8192, activations=1 << 30, state=1 << 30)
        self.rng = random.Random(seed)
        self.waits: list[float] = []
        self.busy = {"long": 0.0, "short": 0.0}
        self.longest_batch = 0.0
        self.chunks: set[int] = set()
        self._arrivals: list[tuple[float, Callable[[], Job]]] = []

    def at(self, time: float, make: Callable[[], Job]) -> None:
        """Have a job come at a time."""
        self._arrivals.append((time, make))

    def chunk_at(self, time: float) -> None:
        def make() -> Job:
            job = self.desk.add(frames=1, seconds=0.0005, bytes=1000)
            self.chunks.add(id(job))
            # It came while the device was busy, and was noticed after.
            job.arrived = time
            return job

        self.at(time, make)

    def run(self, until: float) -> None:
        desk = self.desk
        coming: Iterator[tuple[float, Callable[[], Job]]] = iter(sorted(self._arrivals, key=lambda entry: entry[0]))
        upcoming = next(coming, None)
        while desk.now < until:
            while upcoming is not None and upcoming[0] <= desk.now:
                upcoming[1]()
                upcoming = next(coming, None)
            both = bool(desk.queue._long) and bool(desk.queue._calls)
            jobs = desk.next()
            if not jobs:
                if upcoming is None:
                    return
                desk.now = upcoming[0]
                continue
            started = desk.now
            luck = self.rng.uniform(0.7, 1.3)
            if jobs[0].cost.stepwise:
                desk.step(jobs[0], STEP * luck)
            else:
                seconds = sum(job.cost.seconds for job in jobs) * luck
                desk.now += seconds
                desk.queue.account(jobs, seconds)
                self.longest_batch = max(self.longest_batch, seconds)
            if both:
                self.busy["long" if jobs[0].cost.stepwise else "short"] += desk.now - started
            self.waits += [desk.now - job.arrived for job in jobs if id(job) in self.chunks]


def test_on_a_busy_day_chunks_are_soon_answered_and_long_work_gets_on() -> None:
    day = Day()
    start = day.desk.now
    long = day.desk.add(stepwise=True, frames=45_000, seconds=20.0, bytes=1 << 29)
    # 16 streams of chunks of 40 ms of sound, 10 s long.
    for stream in range(16):
        for number in range(250):
            day.chunk_at(start + stream * 0.0025 + number * 0.04)
    # A call of 1024 items, and others that encode.
    call = object()

    def item() -> Job:
        return day.desk.add(call, frames=100, seconds=0.01, bytes=100_000)

    for _ in range(1024):
        day.at(start + 1.0, item)
    for number in range(100):
        caller = object()

        def encode(caller: object = caller) -> Job:
            return day.desk.add(caller, kind=Kind.ENCODE, frames=250, seconds=0.02, bytes=100_000)

        day.at(start + number * 0.1, encode)
    day.run(start + 10.0)
    assert len(day.waits) > 3000
    # The batch that is computed, one of the other kind, the steps that make up for either, and its own batch.
    assert max(day.waits) <= 1.3 * (2 * (MAX_SECONDS + MAX_SECONDS + STEP) + MAX_SECONDS)
    # Nobody has less than half of the device for long.
    assert long.computation is not None
    assert day.busy["long"] == pytest.approx(day.busy["short"], rel=0.1)
    assert day.longest_batch <= 1.3 * MAX_SECONDS
    assert 20.0 - long.computation.seconds_left >= 0.45 * 10.0


def test_without_long_work_chunks_wait_for_a_batch_of_each_kind() -> None:
    day = Day()
    start = day.desk.now
    call = object()
    for number in range(1024):
        day.at(start, lambda: day.desk.add(call, frames=100, seconds=0.01, bytes=100_000))
        if number < 250:
            day.chunk_at(start + number * 0.04)
        if number < 100:
            day.at(
                start + number * 0.1,
                lambda: day.desk.add(kind=Kind.ENCODE, frames=250, seconds=0.02, bytes=100_000),
            )
    day.run(start + 10.0)
    assert len(day.waits) > 200
    assert max(day.waits) <= 1.3 * 3 * MAX_SECONDS


def test_with_light_traffic_long_work_has_what_is_left() -> None:
    day = Day()
    start = day.desk.now
    long = day.desk.add(stepwise=True, frames=45_000, seconds=100.0, bytes=1 << 29)
    for number in range(250):
        day.chunk_at(start + number * 0.04)
    day.run(start + 10.0)
    assert long.computation is not None
    assert 100.0 - long.computation.seconds_left >= 0.9 * 10.0
    # At most the step that was under way, and itself.
    assert max(day.waits) <= 1.3 * (STEP + 0.002) + 1e-6


def test_one_call_of_many_long_items_leaves_another_its_steps(desk: Desk) -> None:
    """Sixty segments of one call, and a decode that is longer than each: it is not kept waiting for all sixty."""
    segments = [desk.add("segments", stepwise=True, seconds=1.0, bytes=1) for _ in range(60)]
    long = desk.add("another", stepwise=True, seconds=5.0, bytes=1)
    given: Counter[str] = Counter()
    while long in desk.queue._long:
        (job,) = desk.next()
        given["another" if job is long else "segments"] += 1
        desk.step(job)
    # Half of the steps from the first segment's end on.
    assert given["segments"] <= given["another"] + 2 * 1.0 / STEP + 2
    assert sum(job in desk.queue._long for job in segments) >= 50

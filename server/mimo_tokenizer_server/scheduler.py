"""Between the calls and the device: what is computed next, and with what.

Policy: short work goes in batches, the calls taking turns: with the call whose turn it is goes everything of the same
kind that fits. Longer work goes in steps, every other one for the item with the least left to do and the others for the
oldest, calls taking turns item by item; and while both wait, short and long work get half of the device's time each.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy.typing as npt

from .engine import BATCH_SECONDS, Computation, DeviceFailure, Engine, EngineInfo
from .errors import Reason, RequestError
from .metrics import Metrics
from .telemetry import log, logger
from .work import Answer, Cost, Kind, Work

# What a caller is told to wait before it tries again: while the server starts, and when the queue is full.
_RETRY_STARTING = 1.0
_RETRY_FULL = (0.05, 5.0)
_RETRY_UNREAD = 2.0

# An estimate is held against a deadline with this much of doubt: it was made from what the device has shown so far,
# which on a busy machine may be little, and nothing that might just be done is to be refused.
_DOUBT = 0.2

# The C library keeps what is freed; it is asked to give it back when the device has been idle for a moment, and
# every so often when it never is.
_TRIM_IDLE_SECONDS = 0.5
_TRIM_BUSY_SECONDS = 10.0


@dataclass(frozen=True)
class Done:
    """An answer, and what it took.

    Attributes:
        value: the answer.
        queue_seconds: waiting for the device.
        compute_seconds: on the device, with the rest of its batch.
        batch_items: pieces of work in that batch.
        batch_frames: code frames in it.
    """

    value: npt.NDArray[Any]
    queue_seconds: float
    compute_seconds: float
    batch_items: int
    batch_frames: int


@dataclass(eq=False)
class Job:
    """A piece of work that waits or is computed.

    Attributes:
        work: to be computed.
        cost: what it takes.
        call: whatever stands for the call that it is a part of.
        deadline: on the scheduler's clock; None for none.
        arrived: likewise.
        future: of the caller; it is done when the caller has gone.
        compute_seconds: on the device so far.
        computation: where it has been begun in steps.
    """

    work: Work
    cost: Cost
    call: object
    deadline: float | None
    arrived: float
    future: asyncio.Future[Done]
    compute_seconds: float = 0.0
    computation: Computation | None = field(default=None, repr=False)

    @property
    def seconds_left(self) -> float:
        """About how long the device still takes."""
        return self.cost.seconds if self.computation is None else self.computation.seconds_left


class WorkQueue:
    """The policy: which of the waiting jobs the device gets next. Not safe for threads.

    Args:
        max_frames: code frames of a batch.
        max_seconds: of a batch.
        activations: bytes for a batch.
        state: bytes for all jobs that have been begun in steps together.
        refuse: called with a job that is taken out unanswered, and why; None where its caller has gone.
    """

    def __init__(
        self,
        max_frames: int,
        max_seconds: float,
        activations: int,
        state: int,
        refuse: Callable[[Job, RequestError | None], None],
    ) -> None:
        self._max_frames = max_frames
        self._max_seconds = max_seconds
        self._activations = activations
        self._state = state
        self._refuse = refuse
        # The calls that have short work, in the order of their turns.
        self._calls: dict[object, deque[Job]] = {}
        # Long work, the oldest first, begun or not.
        self._long: list[Job] = []
        self._oldest_next = False
        # Device time that short work has had more than long work since both wait.
        self._ahead = 0.0

    def add(self, job: Job) -> None:
        """Let a job wait."""
        if job.cost.stepwise:
            self._long.append(job)
        else:
            self._calls.setdefault(job.call, deque()).append(job)

    def next(self, now: float) -> list[Job]:
        """Take the jobs of the next batch; or one long job for its next step, which stays until `finish`. None: []."""
        self._long = [job for job in self._long if not self._is_lost(job, now)]
        both = bool(self._long) and any(self._first(call, now) for call in list(self._calls))
        if not both:
            self._ahead = 0.0
        if (both and self._ahead <= 0) or not self._long:
            batch = self._next_batch(now)
            if batch or not self._long:  # a caller may go at any moment
                return batch
        return [self._next_long()]

    def account(self, jobs: list[Job], seconds: float) -> None:
        """Tell how long the device was busy with what `next` gave."""
        self._ahead += -seconds if jobs[0].cost.stepwise else seconds

    def finish(self, job: Job) -> None:
        """Take out a long job that has its answer."""
        if job not in self._long:  # it has been taken out with everything
            return
        self._long.remove(job)
        # Calls take turns in being the oldest, or one of many long items would be so until its last is done.
        self._long.sort(key=lambda other: other.call is job.call)

    def clear(self) -> list[Job]:
        """Take out everything."""
        jobs = [job for waiting in self._calls.values() for job in waiting] + self._long
        self._calls, self._long = {}, []
        return jobs

    def _next_batch(self, now: float) -> list[Job]:
        batch: list[Job] = []
        frames, seconds, size = 0, 0.0, 0
        # One of each call, then a second of each, and so on; the call whose turn it is says of what kind.
        taking = list(self._calls)
        while taking:
            again = []
            for call in taking:
                job = self._first(call, now)
                if job is None or (batch and not self._fits(job, batch[0].cost.kind, frames, seconds, size)):
                    continue
                batch.append(job)
                frames, seconds, size = frames + job.cost.frames, seconds + job.cost.seconds, size + job.cost.bytes
                # Whoever has had a turn goes to the end of the line.
                waiting = self._calls.pop(call)
                waiting.popleft()
                if waiting:
                    self._calls[call] = waiting
                    again.append(call)
            taking = again
        return batch

    def _fits(self, job: Job, kind: Kind, frames: int, seconds: float, size: int) -> bool:
        cost = job.cost
        return (
            cost.kind is kind
            and frames + cost.frames <= self._max_frames
            and seconds + cost.seconds <= self._max_seconds
            and size + cost.bytes <= self._activations
        )

    def _first(self, call: object, now: float) -> Job | None:
        """The call's next job, after dropping those that are lost."""
        waiting = self._calls[call]
        while waiting and self._is_lost(waiting[0], now):
            waiting.popleft()
        if not waiting:
            del self._calls[call]
            return None
        return waiting[0]

    def _next_long(self) -> Job:
        oldest = self._long[0]
        room = self._state - sum(job.cost.bytes for job in self._long if job.computation is not None)
        # What is begun may go on. Others may begin where there is room, but what the oldest needs is kept for it.
        kept = oldest.cost.bytes if oldest.computation is None else 0
        able = [
            job
            for job in self._long
            if job.computation is not None or job.cost.bytes + (0 if job is oldest else kept) <= room
        ]
        self._oldest_next = not self._oldest_next
        if not self._oldest_next and oldest in able:
            return oldest
        return min(able, key=lambda job: job.seconds_left)

    def _is_lost(self, job: Job, now: float) -> bool:
        """Whether nobody waits for the job any more, or it cannot be done in time, which its caller is told."""
        if job.future.done():
            self._refuse(job, None)
            return True
        if job.deadline is None or now + _DOUBT * job.seconds_left < job.deadline:
            return False
        waited = now - job.arrived
        if now >= job.deadline:
            sentence = f"the deadline passed; the item had come {waited:.3f} seconds before"
        else:
            sentence = (
                f"the deadline is {job.deadline - now:.3f} seconds off, after {waited:.3f} seconds in the queue, and"
                f" the item takes about {job.seconds_left:.3f} seconds more"
            )
        self._refuse(job, RequestError(Reason.DEADLINE, sentence))
        return True


class Scheduler:
    """Owns the queue, the device thread, and the engine in it.

    Args:
        make_engine: called in the device thread.
        max_queued_frames: given the engine, the code frames that may be admitted at a time.
        on_device_failure: called on the event loop when the device is lost.
        clock: seconds.
        metrics: told what is computed; None for nobody.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        max_queued_frames: Callable[[EngineInfo], int],
        on_device_failure: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        metrics: Metrics | None = None,
    ) -> None:
        self._make_engine = make_engine
        self._limit_of = max_queued_frames
        self._on_device_failure = on_device_failure
        self._metrics = metrics
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[Engine] = self._loop.create_future()
        self._engine: Engine | None = None
        self._refusal: RequestError | None = RequestError(
            Reason.NOT_READY, "the server is starting: its model is not loaded yet", retry_after=_RETRY_STARTING
        )
        self._frames = 0  # admitted
        self._unread = 0  # computed for long answers that are being read
        self._seconds = 0.0  # that what is submitted takes, about
        self._limit = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._queue: WorkQueue | None = None  # guarded by the condition, as is `_stop`
        self._wake = threading.Condition()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    async def start(self) -> EngineInfo:
        """Start the device thread and wait until its model is loaded; whatever that raised is raised here."""
        self._thread.start()
        self._engine = await asyncio.shield(self._loaded)
        self._limit = self._limit_of(self._engine.info)
        if self._metrics is not None:
            self._metrics.loaded(self._engine.info)
        if not self._stop:  # closed while it loaded
            self._refusal = None
        return self._engine.info

    @property
    def engine(self) -> Engine:
        """The engine, for what may be asked of it from any thread.

        Raises:
            RequestError: it is not there yet, or not any more.
        """
        if self._refusal is not None or self._engine is None:
            raise self._refused()
        return self._engine

    @property
    def queued_frames(self) -> int:
        """Code frames that are admitted: they wait or are computed."""
        return self._frames

    def memory_used(self) -> int:
        """Bytes of the device that the process holds; 0 before the model is loaded."""
        return 0 if self._engine is None else self._engine.memory_used()

    def memory_limit(self) -> int:
        """Bytes of the device that the process may use; 0 before the model is loaded."""
        return 0 if self._engine is None else self._engine.info.memory.limit

    @property
    def max_queued_frames(self) -> int:
        """Code frames that may be admitted at a time."""
        return self._limit

    @contextmanager
    def admit(self, frames: int) -> Iterator[None]:
        """Hold room for `frames` code frames while the body runs.

        Raises:
            RequestError: there is no room, or never will be, or nothing is admitted now.
        """
        self.check_room(frames)
        self._frames += frames
        try:
            yield
        finally:
            self._leave(frames)

    @contextmanager
    def long_answer(self, frames: int) -> Iterator[None]:
        """Hold room for an answer of `frames` code frames that is read at its caller's pace, while the body runs.

        It is room of its own, as large as the queue's: slow readers keep each other waiting, and nobody else.

        Raises:
            RequestError: there is no room.
        """
        if self._unread + frames > self._limit and self._unread:
            raise RequestError(
                Reason.QUEUE_FULL,
                f"long answers of {self._unread} frames are being computed or read; the call has {frames}, the limit is"
                f" {self._limit}",
                value=str(frames),
                limit=self._limit,
                retry_after=_RETRY_UNREAD,
            )
        self._unread += frames
        try:
            yield
        finally:
            self._unread -= frames

    def check_room(self, frames: int) -> None:
        """See whether there is room for `frames` code frames now.

        Raises:
            RequestError: there is none, or never will be, or nothing is admitted now.
        """
        if self._refusal is not None:
            raise self._refused()
        if frames > self._limit:
            raise RequestError(
                Reason.TOO_LARGE,
                f"the call's items have {frames} frames; at most {self._limit} are taken at a time",
                value=str(frames),
                limit=self._limit,
            )
        if self._waiters or self._frames + frames > self._limit:
            least, most = _RETRY_FULL
            raise RequestError(
                Reason.QUEUE_FULL,
                f"the queue is full: {self._frames} frames are waiting, about {self._seconds:.2f} seconds of work; the"
                f" call has {frames}, the limit is {self._limit}",
                value=str(frames),
                limit=self._limit,
                retry_after=min(max(least, self._seconds / 2), most),
            )

    @asynccontextmanager
    async def room(self, frames: int, deadline: float | None) -> AsyncIterator[None]:
        """Hold room for `frames` code frames while the body runs, after waiting for it in turn.

        For a call of many parts, of which some have been computed: to refuse the next would lose the work.

        Raises:
            RequestError: there is none before the deadline, or nothing is admitted any more.
        """
        if self._refusal is not None:
            raise self._refused()
        frames = min(frames, self._limit)
        if self._waiters or self._frames + frames > self._limit:
            turn: asyncio.Future[None] = self._loop.create_future()
            self._waiters.append((frames, turn))
            admitted = False
            try:
                await asyncio.wait_for(turn, None if deadline is None else deadline - self._clock())
                admitted = True
            except asyncio.TimeoutError:
                raise RequestError(Reason.DEADLINE, "the deadline passed while the queue was full") from None
            finally:
                if not admitted:
                    self._give_up(frames, turn)
        else:
            self._frames += frames
        try:
            yield
        finally:
            self._leave(frames)

    def _leave(self, frames: int) -> None:
        self._frames -= frames
        self._admit_waiters()

    def _give_up(self, frames: int, turn: asyncio.Future[None]) -> None:
        """A caller leaves the line; it may have been admitted in the same moment."""
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            self._frames -= frames
        self._waiters = deque(waiter for waiter in self._waiters if waiter[1] is not turn)
        self._admit_waiters()

    def _admit_waiters(self) -> None:
        while self._waiters and self._frames + self._waiters[0][0] <= self._limit:
            frames, turn = self._waiters.popleft()
            if not turn.done():
                self._frames += frames
                turn.set_result(None)

    async def submit(self, work: Work, call: object, deadline: float | None) -> Done:
        """Have `work` computed. Cancelling the caller drops it, before the device begins it or between two steps.

        Args:
            work: checked; nothing bad reaches the device.
            call: whatever stands for the call that it is a part of: calls take turns.
            deadline: on the monotonic clock; None for none.

        Raises:
            RequestError: the work failed, it does not fit into memory, its deadline cannot be met, or the server is
                going.
        """
        engine = self.engine
        cost = engine.cost(work)
        division = engine.info.memory
        if cost.bytes > (division.state if cost.stepwise else division.activations):
            raise engine.too_large(work)
        job = Job(work, cost, call, deadline, self._clock(), self._loop.create_future())
        self._seconds += cost.seconds
        try:
            with self._wake:
                assert self._queue is not None, "the queue is made before the engine is handed out"
                self._queue.add(job)
                self._wake.notify()
            return await job.future
        finally:
            self._seconds -= cost.seconds

    async def close(self, timeout: float) -> bool:
        """Refuse what comes, drop what waits, and let the device thread end after what it computes.

        Args:
            timeout: seconds to wait for the thread.

        Returns:
            Whether it has ended; a load or a batch cannot be interrupted.
        """
        self._refuse_all(RequestError(Reason.NOT_READY, "the server is going down", retry_after=_RETRY_STARTING))
        with self._wake:
            self._stop = True
            self._wake.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, timeout)
        return not self._thread.is_alive()

    def _refused(self) -> RequestError:
        # One for each call: a raised exception keeps its traceback, and with it the request.
        return replace(self._refusal or RequestError(Reason.NOT_READY, "the server is starting"))

    def _refuse_all(self, refusal: RequestError) -> None:
        self._refusal = refusal
        with self._wake:
            jobs = self._queue.clear() if self._queue is not None else []
        for job in jobs:
            self._settle(job.future, self._refused())
        for _, turn in self._waiters:
            self._settle(turn, self._refused())

    # ------------------------------------------------------------ in the device thread

    def _run(self) -> None:
        try:
            engine = self._make_engine()
            memory = engine.info.memory
            self._queue = WorkQueue(
                engine.info.max_batch_frames, BATCH_SECONDS, memory.activations, memory.state, self._drop
            )
        except Exception as error:
            self._post(self._settle, self._loaded, error)
            return
        self._post(self._settle, self._loaded, engine)
        jobs: list[Job] = []
        try:
            trimmed = self._clock()
            while jobs := self._next(engine, self._queue):
                self._compute(engine, self._queue, jobs)
                jobs = []  # or an idle server keeps its last requests, and the answers
                if self._clock() - trimmed > _TRIM_BUSY_SECONDS:
                    engine.trim()
                    trimmed = self._clock()
        except BaseException as error:
            # Whatever ends this thread ends the process: nobody may wait for it in vain.
            sentence = str(error) if isinstance(error, DeviceFailure) else f"the device thread ended: {error!r}"
            log(logging.CRITICAL, sentence)
            self._post(self._lose_device, jobs, sentence)

    def _next(self, engine: Engine, queue: WorkQueue) -> list[Job]:
        """Wait for the next batch or step; [] at the end."""
        trimmed = False
        while True:
            with self._wake:
                if self._stop:
                    return []
                if jobs := queue.next(self._clock()):
                    return jobs
                woken = self._wake.wait(None if trimmed else _TRIM_IDLE_SECONDS)
            if not woken:
                engine.trim()
                trimmed = True

    def _compute(self, engine: Engine, queue: WorkQueue, jobs: list[Job]) -> None:
        started = self._clock()
        answers: list[Answer | None]
        try:
            if jobs[0].cost.stepwise:
                answers = [self._step(engine, jobs[0])]
            else:
                answers = list(engine.run([job.work for job in jobs]))
        except DeviceFailure:
            raise
        except Exception:
            logger.exception("the engine failed")
            fault = RequestError(Reason.INTERNAL, "the server failed to compute this item; its log says why")
            answers = [replace(fault) for _ in jobs]
        seconds = self._clock() - started
        frames = sum(job.cost.frames for job in jobs)
        settled: list[tuple[asyncio.Future[Done], object]] = []
        waits: list[float] = []
        answered = 0
        for job, answer in zip(jobs, answers, strict=True):
            job.compute_seconds += seconds
            if isinstance(answer, RequestError):
                settled.append((job.future, answer))
            elif answer is not None:
                waited = started + seconds - job.arrived - job.compute_seconds
                waits.append(waited)
                answered += job.cost.frames
                settled.append((job.future, Done(answer, waited, job.compute_seconds, len(jobs), frames)))
        if self._metrics is not None:
            self._metrics.busy(jobs[0].cost.kind, seconds)
            if waits:
                self._metrics.computed(jobs[0].cost.kind, answered, waits, jobs[0].compute_seconds)
        with self._wake:
            queue.account(jobs, seconds)
            if jobs[0].cost.stepwise and settled:
                queue.finish(jobs[0])
        if settled:
            self._post(self._settle_all, settled)

    @staticmethod
    def _step(engine: Engine, job: Job) -> Answer | None:
        if job.computation is None:
            job.computation = engine.begin(job.work)
        return job.computation.step()

    def _drop(self, job: Job, error: RequestError | None) -> None:
        """Leave off a job, in the device thread."""
        if job.computation is not None:
            job.computation.close()
        if error is not None:
            self._post(self._settle, job.future, error)

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        # A closed event loop: the process is ending, nobody waits.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    # ------------------------------------------------------------ on the event loop

    @staticmethod
    def _settle(future: asyncio.Future[Any], outcome: object) -> None:
        if future.done():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _settle_all(self, settled: list[tuple[asyncio.Future[Any], object]]) -> None:
        for future, outcome in settled:
            self._settle(future, outcome)

    def _lose_device(self, jobs: list[Job], sentence: str) -> None:
        lost = RequestError(Reason.DEVICE_FAILURE, f"{sentence}; the server is going down", retry_after=_RETRY_STARTING)
        for job in jobs:
            self._settle(job.future, replace(lost))
        self._refuse_all(lost)
        self._on_device_failure()

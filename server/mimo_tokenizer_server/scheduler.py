"""Between the calls and the device: one queue, one thread.

Policy: work is computed in the order of its arrival, an item at a time. Long recordings arrive piece by piece, the
next one only when the one before is done, so whatever came meanwhile goes first.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy.typing as npt

from .engine import DeviceFailure, Engine, EngineInfo, Work
from .errors import Reason, RequestError
from .telemetry import log, logger

# What a caller is told to wait before it tries again.
_RETRY_STARTING = 1.0
_RETRY_FULL = 0.1


@dataclass(frozen=True)
class Done:
    """An answer, and the seconds it took: waiting for the device, and on it."""

    value: npt.NDArray[Any]
    queue_seconds: float
    compute_seconds: float


@dataclass(eq=False)
class _Job:
    work: Work
    deadline: float | None  # on the monotonic clock
    future: asyncio.Future[Done]
    arrived: float = field(default_factory=time.monotonic)


class Scheduler:
    """Owns the device thread, and the engine in it.

    Args:
        make_engine: called in the device thread.
        max_queued_frames: given the engine, the code frames that may be admitted at a time.
        on_device_failure: called on the event loop when the device is lost.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        max_queued_frames: Callable[[EngineInfo], int],
        on_device_failure: Callable[[], None],
    ) -> None:
        self._make_engine = make_engine
        self._limit_of = max_queued_frames
        self._on_device_failure = on_device_failure
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[Engine] = self._loop.create_future()
        self._engine: Engine | None = None
        self._refusal: RequestError | None = RequestError(
            Reason.NOT_READY, "the server is starting: its model is not loaded yet", retry_after=_RETRY_STARTING
        )
        self._frames = 0  # admitted
        self._limit = 0
        self._jobs: deque[_Job] = deque()
        self._wake = threading.Condition()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    async def start(self) -> EngineInfo:
        """Start the device thread and wait until its model is loaded; whatever that raised is raised here."""
        self._thread.start()
        self._engine = await asyncio.shield(self._loaded)
        self._limit = self._limit_of(self._engine.info)
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
    def max_queued_frames(self) -> int:
        """Code frames that may be admitted at a time."""
        return self._limit

    @contextmanager
    def admit(self, frames: int) -> Iterator[None]:
        """Hold room for `frames` code frames while the body runs.

        Raises:
            RequestError: there is no room, or never will be, or nothing is admitted now.
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
        if self._frames + frames > self._limit:
            raise RequestError(
                Reason.QUEUE_FULL,
                f"the queue is full: {self._frames} frames are waiting, the call has {frames}, the limit is"
                f" {self._limit}",
                value=str(frames),
                limit=self._limit,
                retry_after=_RETRY_FULL,
            )
        self._frames += frames
        try:
            yield
        finally:
            self._frames -= frames

    async def submit(self, work: Work, deadline: float | None) -> Done:
        """Have `work` computed. Cancelling the caller drops it, if the device has not begun it.

        Args:
            work: checked; nothing bad reaches the device.
            deadline: on the monotonic clock; None for none.

        Raises:
            RequestError: the work failed, its deadline passed while it waited, or the server is going.
        """
        if self._refusal is not None:
            raise self._refused()
        job = _Job(work, deadline, self._loop.create_future())
        with self._wake:
            self._jobs.append(job)
            self._wake.notify()
        return await job.future

    async def close(self, timeout: float) -> bool:
        """Refuse what comes, drop what waits, and let the device thread end after what it computes.

        Args:
            timeout: seconds to wait for the thread.

        Returns:
            Whether it has ended; a load or a computation cannot be interrupted.
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
            jobs, self._jobs = self._jobs, deque()
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(self._refused())

    # ------------------------------------------------------------ in the device thread

    def _run(self) -> None:
        try:
            engine = self._make_engine()
        except Exception as error:
            self._post(self._settle, self._loaded, error)
            return
        self._post(self._settle, self._loaded, engine)
        while (job := self._next()) is not None:
            try:
                self._compute(engine, job)
            except BaseException as error:
                # Whatever ends this thread ends the process: nobody may wait for it in vain.
                sentence = str(error) if isinstance(error, DeviceFailure) else f"the device thread ended: {error!r}"
                log(logging.CRITICAL, sentence)
                self._post(self._lose_device, job, sentence)
                return
            del job  # or an idle server keeps its last request, and the answer

    def _next(self) -> _Job | None:
        with self._wake:
            while not self._jobs and not self._stop:
                self._wake.wait()
            return None if self._stop else self._jobs.popleft()

    def _compute(self, engine: Engine, job: _Job) -> None:
        started = time.monotonic()
        if job.future.done():  # cancelled: nobody waits for it
            return
        if job.deadline is not None and started >= job.deadline:
            late = RequestError(
                Reason.DEADLINE, f"the deadline passed after {started - job.arrived:.3f} seconds in the queue"
            )
            self._post(self._settle, job.future, late)
            return
        try:
            answer = engine.run([job.work])[0]
        except DeviceFailure:
            raise
        except Exception:
            logger.exception("the engine failed")
            answer = RequestError(Reason.INTERNAL, "the server failed to compute this item; its log says why")
        if isinstance(answer, RequestError):
            self._post(self._settle, job.future, answer)
        else:
            done = Done(answer, started - job.arrived, time.monotonic() - started)
            self._post(self._settle, job.future, done)

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

    def _lose_device(self, job: _Job, sentence: str) -> None:
        lost = RequestError(Reason.DEVICE_FAILURE, f"{sentence}; the server is going down", retry_after=_RETRY_STARTING)
        self._settle(job.future, lost)
        self._refuse_all(lost)
        self._on_device_failure()

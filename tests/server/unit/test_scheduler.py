"""Order, admission, deadlines, cancellation and failures, with a fake engine and without a wait."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from mimo_tokenizer_server.device import DeviceError
from mimo_tokenizer_server.engine import DeviceFailure
from mimo_tokenizer_server.errors import Reason, RequestError
from mimo_tokenizer_server.scheduler import Scheduler


class Fixture:
    """A scheduler with a fake engine, on the event loop of the test."""

    def __init__(self, engine: Any, limit: int = 100, make_engine: Callable[[], Any] | None = None) -> None:
        self.engine = engine
        self.failures: list[str] = []
        self.scheduler = Scheduler(
            make_engine or (lambda: engine), lambda info: limit, lambda: self.failures.append("called")
        )

    async def busy(self, gate: Any, work: Any) -> asyncio.Task[Any]:
        """Hold the device thread with `work` until the gate opens."""
        self.engine.hook = gate
        task = asyncio.ensure_future(self.scheduler.submit(work, None))
        await asyncio.to_thread(gate.entered.wait, 30)
        return task


@pytest.fixture
def run(fakes: Any) -> Callable[..., Any]:
    """Runs a test's coroutine with a scheduler, which is started unless told otherwise."""

    def run(test: Callable[[Fixture], Awaitable[None]], start: bool = True, **options: Any) -> Fixture:
        async def main() -> Fixture:
            fixture = Fixture(fakes.Engine(), **options)
            if start:
                await fixture.scheduler.start()
            try:
                await asyncio.wait_for(_awaitable(test(fixture)), 30)
            finally:
                await fixture.scheduler.close(30)
            return fixture

        return asyncio.run(main())

    return run


async def _awaitable(awaitable: Awaitable[None]) -> None:
    await awaitable


async def _refused(coroutine: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> RequestError:
    with pytest.raises(RequestError) as refused:
        await coroutine
    return refused.value


def _marks(engine: Any) -> list[int]:
    return [int(work.codes[0, 0]) for work in engine.seen]


async def _settle() -> None:
    """Let every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


# ---------------------------------------------------------------- order


def test_work_is_computed_in_the_order_of_its_arrival(run: Any, build: Any, fakes: Any) -> None:
    async def test(fixture: Fixture) -> None:
        gate = fakes.Gate()
        first = await fixture.busy(gate, build.decode_work(value=0))
        tasks = []
        for value in range(1, 60):
            tasks.append(asyncio.ensure_future(fixture.scheduler.submit(build.decode_work(value=value), None)))
            await _settle()
        gate.open()
        await asyncio.gather(first, *tasks)
        assert _marks(fixture.engine) == list(range(60))

    run(test)


def test_each_caller_gets_its_own_answer(run: Any, build: Any) -> None:
    async def test(fixture: Fixture) -> None:
        async def caller(number: int) -> None:
            rng = random.Random(number)
            for _ in range(5):
                value = rng.randrange(1024)
                done = await fixture.scheduler.submit(build.decode_work(value=value, int16=True), None)
                assert set(done.value.tolist()) == {value}
                await asyncio.sleep(0)

        await asyncio.gather(*(caller(number) for number in range(40)))
        assert len(fixture.engine.seen) == 200

    run(test)


def test_the_engine_is_made_and_run_in_one_thread(run: Any, build: Any, fakes: Any) -> None:
    threads: list[threading.Thread] = []
    engine = fakes.Engine()
    engine.hook = lambda work: threads.append(threading.current_thread())

    def make() -> Any:
        threads.append(threading.current_thread())
        return engine

    async def test(fixture: Fixture) -> None:
        await asyncio.gather(*(fixture.scheduler.submit(build.decode_work(), None) for _ in range(10)))

    run(test, make_engine=make)
    assert len(threads) == 11
    assert len(set(threads)) == 1
    assert threads[0] is not threading.main_thread()


def test_an_answer_says_how_long_it_waited_and_took(run: Any, build: Any, fakes: Any) -> None:
    async def test(fixture: Fixture) -> None:
        before = time.monotonic()
        gate = fakes.Gate()
        tasks = [await fixture.busy(gate, build.decode_work())]
        tasks.append(asyncio.ensure_future(fixture.scheduler.submit(build.decode_work(), None)))
        await _settle()
        await asyncio.sleep(0.02)
        gate.open()
        first, second = await asyncio.gather(*tasks)
        elapsed = time.monotonic() - before
        assert first.compute_seconds >= 0.02
        assert second.queue_seconds >= 0.02
        for done in (first, second):
            assert 0 <= done.queue_seconds + done.compute_seconds <= elapsed

    run(test)


def test_the_event_loop_goes_on_while_the_engine_computes(run: Any, build: Any) -> None:
    async def test(fixture: Fixture) -> None:
        fixture.engine.hook = lambda work: time.sleep(0.5)
        ticks = 0

        async def heartbeat() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        beating = asyncio.ensure_future(heartbeat())
        await fixture.scheduler.submit(build.decode_work(), None)
        beating.cancel()
        assert ticks >= 10  # of 50; of a blocked loop, at most 1

    run(test)


# ---------------------------------------------------------------- cancellation


def test_cancelled_work_never_reaches_the_engine(run: Any, build: Any, fakes: Any) -> None:
    async def test(fixture: Fixture) -> None:
        gate = fakes.Gate()
        first = await fixture.busy(gate, build.decode_work(value=0))
        tasks = [
            asyncio.ensure_future(fixture.scheduler.submit(build.decode_work(value=value), None))
            for value in range(1, 6)
        ]
        await _settle()
        for task in (tasks[1], tasks[4]):
            task.cancel()
        await _settle()
        gate.open()
        results = await asyncio.gather(first, *tasks, return_exceptions=True)
        assert [isinstance(result, asyncio.CancelledError) for result in results] == [
            False, False, True, False, False, True,
        ]  # fmt: skip
        await fixture.scheduler.submit(build.decode_work(value=6), None)
        assert _marks(fixture.engine) == [0, 1, 3, 4, 6]

    run(test)


def test_work_that_is_cancelled_while_it_is_computed_disturbs_nobody(run: Any, build: Any, fakes: Any) -> None:
    async def test(fixture: Fixture) -> None:
        gate = fakes.Gate()
        first = await fixture.busy(gate, build.decode_work(value=0))
        first.cancel()
        second = asyncio.ensure_future(fixture.scheduler.submit(build.decode_work(value=1), None))
        await _settle()
        gate.open()
        assert (await second).value.max() == pytest.approx(1 / 1024)
        assert first.cancelled()
        assert _marks(fixture.engine) == [0, 1]

    run(test)


# ---------------------------------------------------------------- deadlines


class Clock:
    """The scheduler's clock, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr("mimo_tokenizer_server.scheduler.time", SimpleNamespace(monotonic=lambda: self.now))


def test_a_deadline_that_passes_while_waiting(
    run: Any, build: Any, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(fixture: Fixture) -> None:
        clock = Clock(monkeypatch)
        gate = fakes.Gate()
        first = await fixture.busy(gate, build.decode_work(value=0))
        tasks = [
            asyncio.ensure_future(fixture.scheduler.submit(build.decode_work(value=value), deadline))
            for value, deadline in enumerate((clock.now + 5, clock.now + 10, clock.now + 15, None), start=1)
        ]
        await _settle()
        clock.now += 10
        gate.open()
        await first
        for task in tasks[:2]:
            error = await _refused(task)
            assert error.reason is Reason.DEADLINE
            assert re.fullmatch(r"the deadline passed after \d+\.\d{3} seconds in the queue", str(error))
        for task in tasks[2:]:
            assert len((await task).value) == 4 * 960
        assert _marks(fixture.engine) == [0, 3, 4]

    run(test)


def test_a_deadline_that_has_passed_already(run: Any, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(fixture: Fixture) -> None:
        clock = Clock(monkeypatch)
        error = await _refused(fixture.scheduler.submit(build.decode_work(), clock.now - 1))
        assert error.reason is Reason.DEADLINE
        assert not fixture.engine.seen

    run(test)


def test_a_deadline_that_passes_while_computing_does_not_lose_the_answer(
    run: Any, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(fixture: Fixture) -> None:
        clock = Clock(monkeypatch)

        def slow(work: Any) -> None:
            clock.now += 100

        fixture.engine.hook = slow
        done = await fixture.scheduler.submit(build.decode_work(), clock.now + 50)
        assert done.compute_seconds == pytest.approx(100)

    run(test)


# ---------------------------------------------------------------- admission


def test_a_full_queue_refuses_at_once(run: Any) -> None:
    async def test(fixture: Fixture) -> None:
        scheduler = fixture.scheduler
        with scheduler.admit(60), scheduler.admit(30):
            with pytest.raises(RequestError) as refused, scheduler.admit(11):
                pytest.fail("admitted")
            assert refused.value.reason is Reason.QUEUE_FULL
            assert str(refused.value) == ("the queue is full: 90 frames are waiting, the call has 11, the limit is 100")
            assert (refused.value.value, refused.value.limit, refused.value.retry_after) == ("11", 100, 0.1)
            with scheduler.admit(10):
                pass
        with scheduler.admit(100):
            pass

    run(test)


def test_a_call_over_the_limit_is_never_admitted(run: Any) -> None:
    async def test(fixture: Fixture) -> None:
        assert fixture.scheduler.max_queued_frames == 100
        for room in (0, 50):
            with fixture.scheduler.admit(room):
                with pytest.raises(RequestError) as refused, fixture.scheduler.admit(101):
                    pytest.fail("admitted")
                assert refused.value.reason is Reason.TOO_LARGE
                assert str(refused.value) == "the call's items have 101 frames; at most 100 are taken at a time"
                assert (refused.value.value, refused.value.limit) == ("101", 100)
                assert refused.value.retry_after is None

    run(test)


@pytest.mark.parametrize("end", ["success", "failure", "cancelled"])
def test_room_is_given_back(run: Any, build: Any, fakes: Any, end: str) -> None:
    async def test(fixture: Fixture) -> None:
        async def call() -> None:
            with fixture.scheduler.admit(100):
                await fixture.scheduler.submit(build.decode_work(value=1), None)

        def hook(work: Any) -> None:
            gate(work)
            if end == "failure":
                raise ZeroDivisionError

        gate = fakes.Gate()
        fixture.engine.hook = hook
        task = asyncio.ensure_future(call())
        await asyncio.to_thread(gate.entered.wait, 30)
        with pytest.raises(RequestError), fixture.scheduler.admit(1):
            pytest.fail("admitted")
        if end == "cancelled":
            task.cancel()
        else:
            gate.open()
        await asyncio.wait((task,))
        assert task.cancelled() == (end == "cancelled")
        with fixture.scheduler.admit(100):
            pass
        gate.open()

    run(test)


# ---------------------------------------------------------------- failures


def test_an_exception_of_the_engine_fails_one_item(run: Any, build: Any, log_lines: list[logging.LogRecord]) -> None:
    async def test(fixture: Fixture) -> None:
        def hook(work: Any) -> None:
            if work.codes[0, 0] in {1, 3}:
                raise (ZeroDivisionError if work.codes[0, 0] == 1 else MemoryError)

        fixture.engine.hook = hook
        results = await asyncio.gather(
            *(fixture.scheduler.submit(build.decode_work(value=value), None) for value in range(5)),
            return_exceptions=True,
        )
        for index, result in enumerate(results):
            assert isinstance(result, RequestError) == (index in {1, 3})
            if isinstance(result, RequestError):
                assert result.reason is Reason.INTERNAL
                assert "its log says why" in str(result)
        assert not fixture.failures

    run(test)
    tracebacks = [record.exc_info[0] for record in log_lines if record.exc_info]
    assert tracebacks == [ZeroDivisionError, MemoryError]


def test_an_error_that_the_engine_answers_with_is_raised(run: Any, build: Any) -> None:
    async def test(fixture: Fixture) -> None:
        error = RequestError(Reason.OUT_OF_MEMORY, "too little")
        run_one = fixture.engine._run_one
        fixture.engine._run_one = lambda work: error if work.codes[0, 0] == 1 else run_one(work)
        assert await _refused(fixture.scheduler.submit(build.decode_work(value=1), None)) is error
        await fixture.scheduler.submit(build.decode_work(value=2), None)

    run(test)


def test_a_lost_device_ends_everything(run: Any, build: Any, fakes: Any, log_lines: list[logging.LogRecord]) -> None:
    async def test(fixture: Fixture) -> None:
        gate = fakes.Gate()

        def hook(work: Any) -> None:
            gate(work)
            raise DeviceFailure("cuda:1 failed: an illegal memory access")

        fixture.engine.hook = hook
        tasks = [
            asyncio.ensure_future(fixture.scheduler.submit(build.decode_work(value=value), None)) for value in range(4)
        ]
        await asyncio.to_thread(gate.entered.wait, 30)
        tasks[3].cancel()
        await _settle()
        gate.open()
        errors = [await _refused(task) for task in tasks[:3]]
        assert tasks[3].cancelled()

        def later() -> None:
            with fixture.scheduler.admit(1):
                pytest.fail("admitted")

        errors.append(await _refused(fixture.scheduler.submit(build.decode_work(), None)))
        with pytest.raises(RequestError) as refused:
            later()
        errors.append(refused.value)
        with pytest.raises(RequestError) as refused:
            _ = fixture.scheduler.engine
        errors.append(refused.value)
        for error in errors:
            assert error.reason is Reason.DEVICE_FAILURE
            assert str(error) == "cuda:1 failed: an illegal memory access; the server is going down"
            assert error.retry_after == 1
        # Each caller its own: an exception that is raised again keeps what it has met.
        assert len({id(error) for error in errors}) == len(errors)
        assert _marks(fixture.engine) == [0]
        assert fixture.failures == ["called"]
        assert await fixture.scheduler.close(30)

    run(test)
    assert [record.levelno for record in log_lines] == [logging.CRITICAL]


# ---------------------------------------------------------------- start


def test_nothing_is_taken_before_the_model_is_loaded(run: Any, build: Any) -> None:
    async def test(fixture: Fixture) -> None:
        scheduler = fixture.scheduler

        def admit() -> None:
            with scheduler.admit(1):
                pytest.fail("admitted")

        for attempt in (admit, lambda: scheduler.engine):
            with pytest.raises(RequestError) as refused:
                attempt()
            assert refused.value.reason is Reason.NOT_READY
            assert refused.value.retry_after == 1
        error = await _refused(scheduler.submit(build.decode_work(), None))
        assert error.reason is Reason.NOT_READY
        info = await scheduler.start()
        assert info is fixture.engine.info
        assert scheduler.engine is fixture.engine
        await scheduler.submit(build.decode_work(), None)

    run(test, start=False)


def test_what_loading_raises_is_raised_by_start(run: Any, build: Any) -> None:
    def make() -> Any:
        raise DeviceError("there is no device 'cuda:7' here")

    async def test(fixture: Fixture) -> None:
        with pytest.raises(DeviceError, match="cuda:7"):
            await fixture.scheduler.start()
        assert (await _refused(fixture.scheduler.submit(build.decode_work(), None))).reason is Reason.NOT_READY
        assert await fixture.scheduler.close(30)

    run(test, start=False, make_engine=make)


# ---------------------------------------------------------------- close


def test_close_lets_the_device_finish_and_drops_what_waits(run: Any, build: Any, fakes: Any) -> None:
    async def test(fixture: Fixture) -> None:
        gate = fakes.Gate()
        first = await fixture.busy(gate, build.decode_work(value=0))
        waiting = [
            asyncio.ensure_future(fixture.scheduler.submit(build.decode_work(value=value), None)) for value in (1, 2)
        ]
        await _settle()
        assert not await fixture.scheduler.close(0.01)  # it computes still
        for task in waiting:
            error = await _refused(task)
            assert error.reason is Reason.NOT_READY
            assert str(error) == "the server is going down"
        assert not first.done()
        assert (await _refused(fixture.scheduler.submit(build.decode_work(value=3), None))).reason is Reason.NOT_READY
        gate.open()
        assert len((await first).value) == 4 * 960
        assert await fixture.scheduler.close(30)
        assert await fixture.scheduler.close(30)
        assert _marks(fixture.engine) == [0]

    run(test)


def test_close_before_start(run: Any) -> None:
    async def test(fixture: Fixture) -> None:
        assert await fixture.scheduler.close(30)

    run(test, start=False)


def test_close_while_loading_stays_closed(run: Any, build: Any, fakes: Any) -> None:
    loading = threading.Event()

    def make() -> Any:
        assert loading.wait(30)
        return fakes.Engine()

    async def test(fixture: Fixture) -> None:
        starting = asyncio.ensure_future(fixture.scheduler.start())
        await _settle()
        assert not await fixture.scheduler.close(0.01)
        loading.set()
        await starting
        error = await _refused(asyncio.wait_for(fixture.scheduler.submit(build.decode_work(), None), 5))
        assert error.reason is Reason.NOT_READY
        assert await fixture.scheduler.close(30)

    run(test, start=False, make_engine=make)


@pytest.mark.parametrize("end", [SystemExit(1), KeyboardInterrupt()])
def test_nobody_waits_for_a_thread_that_has_ended(run: Any, build: Any, end: BaseException) -> None:
    async def test(fixture: Fixture) -> None:
        def hook(work: Any) -> None:
            raise end

        fixture.engine.hook = hook
        error = await _refused(fixture.scheduler.submit(build.decode_work(), None))
        assert error.reason is Reason.DEVICE_FAILURE
        assert "the device thread ended" in str(error)
        assert fixture.failures == ["called"]

    run(test)

"""Order, admission, deadlines, cancellation and failures, with a fake engine and without a wait."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mimo_tokenizer_server.device import DeviceError
from mimo_tokenizer_server.engine import DeviceFailure
from mimo_tokenizer_server.errors import Reason, RequestError
from mimo_tokenizer_server.memory import Division
from mimo_tokenizer_server.scheduler import Done, Scheduler
from mimo_tokenizer_server.work import DecodeVqWork


class Fixture:
    """A scheduler with a fake engine, on the event loop of the test."""

    def __init__(
        self,
        engine: Any,
        limit: int = 100,
        make_engine: Callable[[], Any] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.engine = engine
        self.failures: list[str] = []
        self.scheduler = Scheduler(
            make_engine or (lambda: engine),
            lambda info: limit,
            lambda: self.failures.append("called"),
            clock or time.monotonic,
        )

    async def submit(self, work: Any, deadline: float | None = None, call: object = None) -> Done:
        """Have work computed, for a call of its own unless one is given."""
        return await self.scheduler.submit(work, call or object(), deadline)

    async def busy(self, gate: Any, work: Any) -> asyncio.Task[Any]:
        """Hold the device thread with `work` until the gate opens."""
        self.engine.hook = gate
        task = asyncio.ensure_future(self.submit(work))
        await asyncio.to_thread(gate.entered.wait, 30)
        return task


@pytest.fixture
def run(fakes: Any) -> Callable[..., Any]:
    """Runs a test's coroutine with a scheduler, which is started unless told otherwise."""

    def run(test: Callable[[Fixture], Awaitable[None]], start: bool = True, **options: Any) -> Fixture:
        async def main() -> Fixture:
            fixture = Fixture(options.pop("engine", None) or fakes.Engine(), **options)
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
            tasks.append(asyncio.ensure_future(fixture.submit(build.decode_work(value=value))))
            await _settle()
        gate.open()
        await asyncio.gather(first, *tasks)
        assert _marks(fixture.engine) == list(range(60))
        assert [len(batch) for batch in fixture.engine.batches] == [1, 59]

    run(test)


def test_each_caller_gets_its_own_answer(run: Any, build: Any) -> None:
    async def test(fixture: Fixture) -> None:
        async def caller(number: int) -> None:
            rng = random.Random(number)
            for _ in range(5):
                value = rng.randrange(1024)
                done = await fixture.submit(build.decode_work(value=value, int16=True))
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
        await asyncio.gather(*(fixture.submit(build.decode_work()) for _ in range(10)))

    run(test, make_engine=make)
    assert len(threads) == 11
    assert len(set(threads)) == 1
    assert threads[0] is not threading.main_thread()


def test_an_answer_says_how_long_it_waited_and_took(run: Any, build: Any, fakes: Any) -> None:
    async def test(fixture: Fixture) -> None:
        before = time.monotonic()
        gate = fakes.Gate()
        tasks = [await fixture.busy(gate, build.decode_work())]
        tasks.append(asyncio.ensure_future(fixture.submit(build.decode_work())))
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
        await fixture.submit(build.decode_work())
        beating.cancel()
        assert ticks >= 10  # of 50; of a blocked loop, at most 1

    run(test)


# ---------------------------------------------------------------- cancellation


def test_cancelled_work_never_reaches_the_engine(run: Any, build: Any, fakes: Any) -> None:
    async def test(fixture: Fixture) -> None:
        gate = fakes.Gate()
        first = await fixture.busy(gate, build.decode_work(value=0))
        tasks = [asyncio.ensure_future(fixture.submit(build.decode_work(value=value))) for value in range(1, 6)]
        await _settle()
        for task in (tasks[1], tasks[4]):
            task.cancel()
        await _settle()
        gate.open()
        results = await asyncio.gather(first, *tasks, return_exceptions=True)
        assert [isinstance(result, asyncio.CancelledError) for result in results] == [
            False, False, True, False, False, True,
        ]  # fmt: skip
        await fixture.submit(build.decode_work(value=6))
        assert _marks(fixture.engine) == [0, 1, 3, 4, 6]

    run(test)


def test_work_that_is_cancelled_while_it_is_computed_disturbs_nobody(run: Any, build: Any, fakes: Any) -> None:
    async def test(fixture: Fixture) -> None:
        gate = fakes.Gate()
        first = await fixture.busy(gate, build.decode_work(value=0))
        first.cancel()
        second = asyncio.ensure_future(fixture.submit(build.decode_work(value=1)))
        await _settle()
        gate.open()
        assert (await second).value.max() == pytest.approx(1 / 1024)
        assert first.cancelled()
        assert _marks(fixture.engine) == [0, 1]

    run(test)


# ---------------------------------------------------------------- deadlines


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_deadline_that_passes_while_waiting(run: Any, build: Any, fakes: Any) -> None:
    clock = Clock()

    async def test(fixture: Fixture) -> None:
        gate = fakes.Gate()
        first = await fixture.busy(gate, build.decode_work(value=0))
        tasks = [
            asyncio.ensure_future(fixture.submit(build.decode_work(value=value), deadline))
            for value, deadline in enumerate((clock.now + 5, clock.now + 10, clock.now + 15, None), start=1)
        ]
        await _settle()
        clock.now += 10
        gate.open()
        await first
        for task in tasks[:2]:
            error = await _refused(task)
            assert error.reason is Reason.DEADLINE
            assert str(error) == "the deadline passed; the item had come 10.000 seconds before"
        for task in tasks[2:]:
            assert len((await task).value) == 4 * 960
        assert _marks(fixture.engine) == [0, 3, 4]

    run(test, clock=clock)


def test_a_deadline_that_has_passed_already(run: Any, build: Any) -> None:
    clock = Clock()

    async def test(fixture: Fixture) -> None:
        error = await _refused(fixture.submit(build.decode_work(), clock.now - 1))
        assert error.reason is Reason.DEADLINE
        assert not fixture.engine.seen

    run(test, clock=clock)


def test_a_deadline_that_passes_while_computing_does_not_lose_the_answer(run: Any, build: Any) -> None:
    clock = Clock()

    async def test(fixture: Fixture) -> None:
        def slow(work: Any) -> None:
            clock.now += 100

        fixture.engine.hook = slow
        done = await fixture.submit(build.decode_work(), clock.now + 50)
        assert done.compute_seconds == pytest.approx(100)

    run(test, clock=clock)


# ---------------------------------------------------------------- admission


def test_a_full_queue_refuses_at_once(run: Any) -> None:
    async def test(fixture: Fixture) -> None:
        scheduler = fixture.scheduler
        with scheduler.admit(60), scheduler.admit(30):
            with pytest.raises(RequestError) as refused, scheduler.admit(11):
                pytest.fail("admitted")
            assert refused.value.reason is Reason.QUEUE_FULL
            assert str(refused.value) == (
                "the queue is full: 90 frames are waiting, about 0.00 seconds of work; the call has 11, the limit is"
                " 100"
            )
            assert (refused.value.value, refused.value.limit, refused.value.retry_after) == ("11", 100, 0.05)
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
                await fixture.submit(build.decode_work(value=1))

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


def test_an_exception_of_the_engine_fails_its_batch(
    run: Any, build: Any, fakes: Any, log_lines: list[logging.LogRecord]
) -> None:
    async def test(fixture: Fixture) -> None:
        gate = fakes.Gate()

        def hook(work: Any) -> None:
            gate(work)
            if work.codes[0, 0] == 2:
                raise ZeroDivisionError

        first = asyncio.ensure_future(fixture.submit(build.decode_work(value=0)))
        fixture.engine.hook = hook
        await asyncio.to_thread(gate.entered.wait, 30)
        batch = [asyncio.ensure_future(fixture.submit(build.decode_work(value=value))) for value in (1, 2, 3)]
        await _settle()
        gate.open()
        await first
        errors = [await _refused(task) for task in batch]
        for error in errors:
            assert error.reason is Reason.INTERNAL
            assert "its log says why" in str(error)
        assert len({id(error) for error in errors}) == 3
        await fixture.submit(build.decode_work(value=4))
        assert not fixture.failures

    run(test)
    assert [record.exc_info[0] for record in log_lines if record.exc_info] == [ZeroDivisionError]


def test_an_error_that_the_engine_answers_with_is_raised(run: Any, build: Any) -> None:
    async def test(fixture: Fixture) -> None:
        error = RequestError(Reason.OUT_OF_MEMORY, "too little")
        run_one = fixture.engine._run_one
        fixture.engine._run_one = lambda work: error if work.codes[0, 0] == 1 else run_one(work)
        assert await _refused(fixture.submit(build.decode_work(value=1))) is error
        await fixture.submit(build.decode_work(value=2))

    run(test)


def test_a_lost_device_ends_everything(run: Any, build: Any, fakes: Any, log_lines: list[logging.LogRecord]) -> None:
    async def test(fixture: Fixture) -> None:
        gate = fakes.Gate()

        def hook(work: Any) -> None:
            gate(work)
            raise DeviceFailure("cuda:1 failed: an illegal memory access")

        fixture.engine.hook = hook
        tasks = [asyncio.ensure_future(fixture.submit(build.decode_work(value=0)))]
        await asyncio.to_thread(gate.entered.wait, 30)
        tasks += [asyncio.ensure_future(fixture.submit(build.decode_work(value=value))) for value in range(1, 4)]
        await _settle()
        tasks[3].cancel()
        await _settle()
        gate.open()
        errors = [await _refused(task) for task in tasks[:3]]
        assert tasks[3].cancelled()

        def later() -> None:
            with fixture.scheduler.admit(1):
                pytest.fail("admitted")

        errors.append(await _refused(fixture.submit(build.decode_work())))
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
        error = await _refused(fixture.submit(build.decode_work()))
        assert error.reason is Reason.NOT_READY
        info = await scheduler.start()
        assert info is fixture.engine.info
        assert scheduler.engine is fixture.engine
        await fixture.submit(build.decode_work())

    run(test, start=False)


def test_what_loading_raises_is_raised_by_start(run: Any, build: Any) -> None:
    def make() -> Any:
        raise DeviceError("there is no device 'cuda:7' here")

    async def test(fixture: Fixture) -> None:
        with pytest.raises(DeviceError, match="cuda:7"):
            await fixture.scheduler.start()
        assert (await _refused(fixture.submit(build.decode_work()))).reason is Reason.NOT_READY
        assert await fixture.scheduler.close(30)

    run(test, start=False, make_engine=make)


# ---------------------------------------------------------------- close


def test_close_lets_the_device_finish_and_drops_what_waits(run: Any, build: Any, fakes: Any) -> None:
    async def test(fixture: Fixture) -> None:
        gate = fakes.Gate()
        first = await fixture.busy(gate, build.decode_work(value=0))
        waiting = [asyncio.ensure_future(fixture.submit(build.decode_work(value=value))) for value in (1, 2)]
        await _settle()
        assert not await fixture.scheduler.close(0.01)  # it computes still
        for task in waiting:
            error = await _refused(task)
            assert error.reason is Reason.NOT_READY
            assert str(error) == "the server is going down"
        assert not first.done()
        assert (await _refused(fixture.submit(build.decode_work(value=3)))).reason is Reason.NOT_READY
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
        error = await _refused(asyncio.wait_for(fixture.submit(build.decode_work()), 5))
        assert error.reason is Reason.NOT_READY
        assert await fixture.scheduler.close(30)

    run(test, start=False, make_engine=make)


@pytest.mark.parametrize("end", [SystemExit(1), KeyboardInterrupt()])
def test_nobody_waits_for_a_thread_that_has_ended(run: Any, build: Any, end: BaseException) -> None:
    async def test(fixture: Fixture) -> None:
        def hook(work: Any) -> None:
            raise end

        fixture.engine.hook = hook
        error = await _refused(fixture.submit(build.decode_work()))
        assert error.reason is Reason.DEVICE_FAILURE
        assert "the device thread ended" in str(error)
        assert fixture.failures == ["called"]

    run(test)


# ---------------------------------------------------------------- batches and steps


def test_what_waits_is_computed_together(run: Any, build: Any, fakes: Any) -> None:
    async def test(fixture: Fixture) -> None:
        gate = fakes.Gate()
        first = await fixture.busy(gate, build.decode_work(value=0))
        tasks = [
            asyncio.ensure_future(fixture.submit(build.decode_work(value=value, frames=value))) for value in (3, 1, 7)
        ]
        await _settle()
        gate.open()
        done = await asyncio.gather(first, *tasks)
        assert [(one.batch_items, one.batch_frames) for one in done] == [(1, 4), (3, 11), (3, 11), (3, 11)]
        assert [len(one.value) for one in done] == [4 * 960, 3 * 960, 960, 7 * 960]

    run(test)


def test_calls_take_turns(run: Any, build: Any, fakes: Any) -> None:
    async def test(fixture: Fixture) -> None:
        gate = fakes.Gate()
        first = await fixture.busy(gate, build.decode_work(value=0))
        many = object()
        tasks = [
            asyncio.ensure_future(fixture.submit(build.decode_work(value=value, frames=10), call=many))
            for value in range(1, 9)
        ]
        await _settle()
        tasks.append(asyncio.ensure_future(fixture.submit(build.decode_work(value=100, frames=10))))
        await _settle()
        gate.open()
        await asyncio.gather(first, *tasks)
        assert _marks(fixture.engine) == [0, 1, 100, 2, 3, 4, 5, 6, 7, 8]
        assert [len(batch) for batch in fixture.engine.batches] == [1, 4, 4, 1]

    run(test, engine=fakes.Engine(max_batch_frames=40))


def test_long_work_is_computed_in_steps_with_short_work_between(run: Any, build: Any, fakes: Any) -> None:
    async def test(fixture: Fixture) -> None:
        gate = fakes.Gate()
        order: list[int] = []

        def hook(work: Any) -> None:
            order.append(int(work.codes[0, 0]))
            gate(work)

        fixture.engine.hook = hook
        long = asyncio.ensure_future(fixture.submit(build.decode_work(value=1, frames=1000)))
        await asyncio.to_thread(gate.entered.wait, 30)
        short = asyncio.ensure_future(fixture.submit(build.decode_work(value=2)))
        await _settle()
        gate.open()
        done = await long
        await short
        assert order == [1, 2] + [1] * 9
        assert len(done.value) == 1000 * 960
        assert (done.batch_items, done.batch_frames) == (1, 1000)
        assert [computation.closed for computation in fixture.engine.computations] == [True]
        assert fakes.waiting(fixture.scheduler) == 0

    run(test, engine=fakes.Engine(max_batch_frames=40))


def test_the_time_of_a_long_item_is_that_of_its_steps(run: Any, build: Any, fakes: Any) -> None:
    clock = Clock()

    async def test(fixture: Fixture) -> None:
        def hook(work: Any) -> None:
            clock.now += 3

        fixture.engine.hook = hook
        done = await fixture.submit(build.decode_work(frames=500))
        assert done.compute_seconds == pytest.approx(15)
        assert done.queue_seconds == pytest.approx(0)

    run(test, clock=clock, engine=fakes.Engine(max_batch_frames=40))


def test_a_long_item_that_is_cancelled_midway_is_left_off(run: Any, build: Any, fakes: Any, eventually: Any) -> None:
    async def test(fixture: Fixture) -> None:
        gate = fakes.Gate()
        long = await fixture.busy(gate, build.decode_work(frames=10_000))
        long.cancel()
        await _settle()
        gate.open()
        await fixture.submit(build.decode_work(value=2))
        await asyncio.to_thread(eventually, lambda: fakes.waiting(fixture.scheduler) == 0)
        assert [computation.closed for computation in fixture.engine.computations] == [True]
        assert len(fixture.engine.steps) < 100

    run(test, engine=fakes.Engine(max_batch_frames=40))


def test_a_long_item_that_becomes_too_late_is_left_off(run: Any, build: Any, fakes: Any) -> None:
    clock = Clock()

    async def test(fixture: Fixture) -> None:
        def hook(work: Any) -> None:
            clock.now += 1

        fixture.engine.hook = hook
        error = await _refused(fixture.submit(build.decode_work(frames=10_000), clock.now + 4.5))
        assert error.reason is Reason.DEADLINE
        assert len(fixture.engine.steps) == 5
        assert [computation.closed for computation in fixture.engine.computations] == [True]

    run(test, clock=clock, engine=fakes.Engine(max_batch_frames=40))


def test_a_deadline_that_cannot_be_met_is_refused_before_anything_is_computed(run: Any, build: Any, fakes: Any) -> None:
    clock = Clock()

    async def test(fixture: Fixture) -> None:
        # 30,000 frames take 0.3 seconds by the fake engine's estimate.
        error = await _refused(fixture.submit(build.decode_work(frames=30_000), clock.now + 0.05))
        assert error.reason is Reason.DEADLINE
        assert "0.050 seconds off" in str(error)
        assert "about 0.300 seconds more" in str(error)
        assert not fixture.engine.steps
        assert len((await fixture.submit(build.decode_work(frames=30_000), clock.now + 0.07)).value) == 30_000 * 960

    run(test, clock=clock)


def test_a_step_that_fails_fails_its_item_alone(
    run: Any, build: Any, fakes: Any, log_lines: list[logging.LogRecord]
) -> None:
    async def test(fixture: Fixture) -> None:
        def hook(work: Any) -> None:
            if work.codes[0, 0] == 1 and len(fixture.engine.steps) > 2:
                raise ZeroDivisionError

        fixture.engine.hook = hook
        failing = asyncio.ensure_future(fixture.submit(build.decode_work(value=1, frames=1000)))
        good = asyncio.ensure_future(fixture.submit(build.decode_work(value=2, frames=1000)))
        assert (await _refused(failing)).reason is Reason.INTERNAL
        assert len((await good).value) == 1000 * 960
        assert all(computation.closed for computation in fixture.engine.computations)
        assert fakes.waiting(fixture.scheduler) == 0

    run(test, engine=fakes.Engine(max_batch_frames=40))
    assert [record.exc_info[0] for record in log_lines if record.exc_info] == [ZeroDivisionError]


def test_a_device_that_is_lost_in_a_step_ends_everything(run: Any, build: Any, fakes: Any) -> None:
    async def test(fixture: Fixture) -> None:
        gate = fakes.Gate()

        def hook(work: Any) -> None:
            gate(work)
            raise DeviceFailure("cuda:1 failed: an illegal memory access")

        fixture.engine.hook = hook
        tasks = [asyncio.ensure_future(fixture.submit(build.decode_work(frames=1000)))]
        await asyncio.to_thread(gate.entered.wait, 30)
        tasks += [asyncio.ensure_future(fixture.submit(build.decode_work(frames=frames))) for frames in (1000, 4)]
        await _settle()
        gate.open()
        errors = [await _refused(task) for task in tasks]
        assert all(error.reason is Reason.DEVICE_FAILURE for error in errors)
        assert len({id(error) for error in errors}) == 3
        assert len(fixture.engine.steps) == 1
        assert fixture.failures == ["called"]
        assert await fixture.scheduler.close(30)

    run(test, engine=fakes.Engine(max_batch_frames=40))


def test_what_never_fits_into_memory_is_refused_at_once(run: Any, build: Any, fakes: Any) -> None:
    async def test(fixture: Fixture) -> None:
        gate = fakes.Gate()
        busy = await fixture.busy(gate, build.decode_work())
        # 100 bytes a frame: 4,000 of state, and 2,000 of activations for what is computed at once.
        for work in (build.decode_work(frames=41), DecodeVqWork(build.code_array(21))):
            error = await _refused(fixture.submit(work))
            assert error.reason is Reason.OUT_OF_MEMORY
            assert str(error) == "the fake device has too little memory"
            assert error.retry_after is None
        assert fakes.waiting(fixture.scheduler) == 0
        fits = [
            asyncio.ensure_future(fixture.submit(work))
            for work in (build.decode_work(frames=40), DecodeVqWork(build.code_array(20)))
        ]
        gate.open()
        await asyncio.gather(busy, *fits)

    division = Division(limit=10_000, weights=2_000, fixed=2_000, activations=2_000, state=4_000)
    run(test, engine=fakes.Engine(max_batch_frames=10, memory=division))


# ---------------------------------------------------------------- room, in turn


async def _hold(scheduler: Scheduler, frames: int, log: list[str], name: str, deadline: float | None = None) -> None:
    """Hold room until cancelled."""
    async with scheduler.room(frames, deadline):
        log.append(name)
        await asyncio.Event().wait()


async def _leave(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def test_room_is_given_in_turn(run: Any) -> None:
    async def test(fixture: Fixture) -> None:
        scheduler, log = fixture.scheduler, list[str]()
        tasks = {}
        for name, frames in (("a", 60), ("b", 50), ("c", 10), ("d", 30)):
            tasks[name] = asyncio.ensure_future(_hold(scheduler, frames, log, name))
            await _settle()
        # There would be room for c beside a; but b came first.
        assert log == ["a"]
        with pytest.raises(RequestError) as refused, scheduler.admit(1):
            pytest.fail("overtook those who wait")
        assert refused.value.reason is Reason.QUEUE_FULL
        await _leave(tasks["a"])
        await _settle()
        assert log == ["a", "b", "c", "d"]
        await _leave(*(tasks[name] for name in "bcd"))
        assert scheduler._frames == 0

    run(test)


def test_room_for_more_than_there_is_ever_takes_all(run: Any) -> None:
    async def test(fixture: Fixture) -> None:
        scheduler, log = fixture.scheduler, list[str]()
        small = asyncio.ensure_future(_hold(scheduler, 1, log, "small"))
        await _settle()
        huge = asyncio.ensure_future(_hold(scheduler, 10_000, log, "huge"))
        await _settle()
        assert log == ["small"]
        await _leave(small)
        await _settle()
        assert log == ["small", "huge"]
        assert scheduler._frames == 100
        await _leave(huge)
        assert scheduler._frames == 0

    run(test)


@pytest.mark.parametrize("end", ["deadline", "cancelled"])
def test_whoever_gives_up_waiting_lets_the_next_one_in(run: Any, end: str) -> None:
    async def test(fixture: Fixture) -> None:
        scheduler, log = fixture.scheduler, list[str]()
        first = asyncio.ensure_future(_hold(scheduler, 60, log, "first"))
        await _settle()
        deadline = time.monotonic() + 0.05 if end == "deadline" else None
        large = asyncio.ensure_future(_hold(scheduler, 90, log, "large", deadline))
        await _settle()
        small = asyncio.ensure_future(_hold(scheduler, 40, log, "small"))
        await _settle()
        assert log == ["first"]
        if end == "cancelled":
            large.cancel()
        await asyncio.wait((large,))
        await _settle()
        if end == "deadline":
            error = await _refused(large)
            assert error.reason is Reason.DEADLINE
            assert str(error) == "the deadline passed while the queue was full"
        assert log == ["first", "small"]
        await _leave(first, small)
        assert scheduler._frames == 0

    run(test)


def test_a_deadline_that_has_passed_does_not_wait_for_room(run: Any) -> None:
    async def test(fixture: Fixture) -> None:
        with fixture.scheduler.admit(100):
            error = await _refused(_hold(fixture.scheduler, 1, [], "late", time.monotonic() - 1))
            assert error.reason is Reason.DEADLINE
        assert fixture.scheduler._frames == 0

    run(test)


def test_nobody_waits_for_room_in_a_server_that_goes_down(run: Any) -> None:
    async def test(fixture: Fixture) -> None:
        scheduler = fixture.scheduler
        with scheduler.admit(100):
            waiting = [asyncio.ensure_future(_hold(scheduler, frames, [], "x")) for frames in (10, 20)]
            await _settle()
            await scheduler.close(30)
            errors = [await _refused(task) for task in waiting]
            assert all(error.reason is Reason.NOT_READY for error in errors)
            assert errors[0] is not errors[1]
        assert (await _refused(_hold(scheduler, 1, [], "later"))).reason is Reason.NOT_READY
        assert scheduler._frames == 0

    run(test)


def test_a_full_queue_says_how_long_it_is(run: Any, build: Any, fakes: Any) -> None:
    async def test(fixture: Fixture) -> None:
        scheduler = fixture.scheduler
        gate = fakes.Gate()

        async def call(frames: int) -> None:
            with scheduler.admit(frames):
                await fixture.submit(build.decode_work(frames=frames))

        fixture.engine.hook = gate
        calls = []
        for number, (frames, retry_after) in enumerate([(200, 0.05), (19_800, 0.1), (880_000, 4.5), (200_000, 5.0)]):
            calls.append(asyncio.ensure_future(call(frames)))
            await _settle()
            if number == 0:
                await asyncio.to_thread(gate.entered.wait, 30)
            with pytest.raises(RequestError) as refused, scheduler.admit(2_000_000):
                pytest.fail("admitted")
            error = refused.value
            assert error.reason is Reason.QUEUE_FULL
            assert error.limit == 2_000_000
            assert error.retry_after == pytest.approx(retry_after)
        # 10 microseconds a frame, by the estimate.
        assert str(error) == (
            "the queue is full: 1100000 frames are waiting, about 11.00 seconds of work; the call has 2000000, the"
            " limit is 2000000"
        )
        for task in calls:
            task.cancel()
        gate.open()
        await asyncio.wait(calls)
        assert (scheduler._frames, scheduler._seconds) == (0, pytest.approx(0, abs=1e-9))

    division = Division(limit=1 << 40, weights=0, fixed=0, activations=1 << 39, state=1 << 39)
    run(test, limit=2_000_000, engine=fakes.Engine(memory=division))


# What callers do, in any order: come, wait, have their turn, give up, fail.
_CALLERS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "room", "room with a deadline"]),
        st.integers(1, 120),  # frames
        st.integers(0, 3),  # works
        st.integers(0, 6),  # turns of the event loop before it is cancelled; 0: never
        st.integers(0, 2),  # turns before the next one comes
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(callers=_CALLERS)
def test_whatever_callers_do_all_room_is_free_at_the_end(run: Any, build: Any, callers: list[Any]) -> None:
    async def test(fixture: Fixture) -> None:
        scheduler = fixture.scheduler

        async def compute(frames: int, works: int) -> None:
            for value in range(works):
                await fixture.submit(build.decode_work(value=value, frames=frames))

        async def caller(way: str, frames: int, works: int) -> None:
            if way == "admit":
                with scheduler.admit(frames):
                    await compute(frames, works)
            else:
                deadline = time.monotonic() + 0.001 if way == "room with a deadline" else None
                async with scheduler.room(frames, deadline):
                    assert scheduler._frames <= 100
                    await compute(frames, works)

        tasks = []

        async def cancelled(task: asyncio.Task[None], after: int) -> None:
            for _ in range(after):
                await asyncio.sleep(0)
            task.cancel()

        for way, frames, works, cancel_after, pause in callers:
            task = asyncio.ensure_future(caller(way, frames, works))
            tasks.append(task)
            if cancel_after:
                tasks.append(asyncio.ensure_future(cancelled(task, cancel_after)))
            for _ in range(pause):
                await asyncio.sleep(0)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                assert isinstance(result, (asyncio.CancelledError, RequestError)), result
        assert scheduler._frames == 0
        assert scheduler._seconds == pytest.approx(0, abs=1e-9)
        assert not scheduler._waiters
        with scheduler.admit(100):
            pass

    run(test)


@pytest.mark.parametrize("where", ["next", "trim"])
def test_a_fault_beside_the_computation_ends_the_process_too(
    run: Any, build: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Whatever ends the device thread: nobody may wait for it in vain, and health must not say that all is well."""

    def fault(*args: Any) -> Any:
        raise ValueError("a fault")

    async def test(fixture: Fixture) -> None:
        if where == "next":
            monkeypatch.setattr("mimo_tokenizer_server.scheduler.WorkQueue.next", fault)
            error = await _refused(fixture.submit(build.decode_work()))
            assert error.reason is Reason.DEVICE_FAILURE
        else:
            monkeypatch.setattr(fixture.engine, "trim", fault, raising=False)
            await fixture.submit(build.decode_work())
        for _ in range(1000):
            if fixture.failures:
                break
            await asyncio.sleep(0.01)
        error = await _refused(fixture.submit(build.decode_work()))
        assert error.reason is Reason.DEVICE_FAILURE
        assert "a fault" in str(error)

    run(test)

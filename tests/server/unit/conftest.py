"""The servicer behind grpcio-testing, a fake engine, and the small things that tests build requests from."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc
import grpc_testing  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
import pytest
from google.protobuf.message_factory import GetMessageClass

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_tokenizer_server.config import BUILT_IN_MODELS, ServeConfig
from mimo_tokenizer_server.engine import Engine, EngineInfo
from mimo_tokenizer_server.errors import Reason, RequestError
from mimo_tokenizer_server.memory import Division
from mimo_tokenizer_server.messages import Limits
from mimo_tokenizer_server.model.config import TokenizerConfig
from mimo_tokenizer_server.model.frontend import Segment, SegmentCutter
from mimo_tokenizer_server.scheduler import Scheduler
from mimo_tokenizer_server.service import TokenizerServicer
from mimo_tokenizer_server.work import Answer, Cost, DecodeVqWork, DecodeWork, EncodeWork, Kind, Work

SERVICE = pb.DESCRIPTOR.services_by_name["AudioTokenizer"]

# Nothing here takes this long; a test that waits so long has failed.
PATIENCE = 30.0

FAKE_INFO = EngineInfo(
    config=TokenizerConfig.from_file(BUILT_IN_MODELS["tiny"]),
    model_id="fake",
    revision="",
    fingerprint="0123456789abcdef0123456789abcdef",
    random_weights=True,
    device="cpu",
    device_name="none",
    memory_total=0,
    dtype="float32",
    quantization="none",
    loss=None,
    batch_invariant=False,
    max_batch_frames=2048,
    memory=Division(limit=10_000_000, weights=1_000_000, fixed=1_000_000, activations=4_000_000, state=4_000_000),
)


class FakeEngine:
    """Arithmetic instead of a model; keeps what reaches it.

    Codes are the samples of their segment, modulo 128; features and samples are the codes of the first row. A frame
    takes 10 microseconds and 100 bytes by its estimate, and nothing in truth; what has more frames than a batch is
    computed in steps.

    Attributes:
        batches: the works of each batch.
        steps: the work of each step.
        hook: called with each work before it is answered, and before each step; raises, or waits.
        computations: of long works, in the order of their beginning.
        step_frames: of a step.
    """

    def __init__(self, **changes: Any) -> None:
        self.info = dataclasses.replace(FAKE_INFO, **changes)
        self.batches: list[list[Work]] = []
        self.steps: list[Work] = []
        self.hook: Callable[[Work], None] = lambda work: None
        self.computations: list[FakeComputation] = []
        self.step_frames = 100

    @property
    def seen(self) -> list[Work]:
        """Every work of the batches, in the order of its arrival."""
        return [work for batch in self.batches for work in batch]

    def memory_allocated(self) -> int:
        return 0

    def trim(self) -> None:
        """Nothing is kept."""

    def cost(self, work: Work) -> Cost:
        if isinstance(work, EncodeWork):
            kind, frames = Kind.ENCODE, self.info.config.code_frames(work.segment.frames)
        else:
            kind = Kind.DECODE if isinstance(work, DecodeWork) else Kind.DECODE_VQ
            frames = work.codes.shape[1]
        stepwise = kind is not Kind.DECODE_VQ and frames > self.info.max_batch_frames
        return Cost(kind, frames, frames * 1e-5, frames * 100, stepwise)

    def too_large(self, work: Work) -> RequestError:
        return RequestError(Reason.OUT_OF_MEMORY, "the fake device has too little memory", value="too large")

    def run(self, batch: Sequence[Work]) -> list[Answer]:
        self.batches.append(list(batch))
        for work in batch:
            self.hook(work)
        return [self._run_one(work) for work in batch]

    def begin(self, work: Work) -> FakeComputation:
        self.computations.append(FakeComputation(self, work))
        return self.computations[-1]

    def _run_one(self, work: Work) -> Answer:
        if isinstance(work, EncodeWork):
            frames = self.info.config.code_frames(work.segment.frames)
            return np.full((work.num_quantizers, frames), len(work.segment.pcm) % 128, np.uint16)
        if isinstance(work, DecodeVqWork):
            return np.repeat(work.codes[0].astype(np.float32)[:, None], self.info.config.d_model, axis=1)
        samples = np.repeat(work.codes[0], self.info.config.samples_per_frame)
        samples = samples[work.left_context_frames * self.info.config.samples_per_frame :]
        return samples.astype(np.int16) if work.int16 else samples.astype(np.float32) / 1024


class FakeComputation:
    """A long work on its way, `step_frames` at a time.

    Attributes:
        work: that is computed.
        closed: whether its memory is given back.
    """

    def __init__(self, engine: FakeEngine, work: Work) -> None:
        self.work = work
        self.closed = False
        self._engine = engine
        self._frames = engine.cost(work).frames

    @property
    def seconds_left(self) -> float:
        return max(0, self._frames) * 1e-5

    def step(self) -> Answer | None:
        assert not self.closed
        self._engine.steps.append(self.work)
        try:
            self._engine.hook(self.work)
        except BaseException:
            self.closed = True
            raise
        self._frames -= self._engine.step_frames
        if self._frames > 0:
            return None
        self.closed = True
        return self._engine._run_one(self.work)

    def close(self) -> None:
        self.closed = True


class Gate:
    """A hook for FakeEngine that holds the device thread until it is told to go on."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()

    def __call__(self, work: Work) -> None:
        self.entered.set()
        assert self._open.wait(PATIENCE), "nobody opened the gate"

    def open(self) -> None:
        self._open.set()


# ---------------------------------------------------------------- grpc.aio's side of grpcio-testing


class _AioContext:
    """What a grpc.aio method sees of a call, on top of the synchronous context of grpcio-testing."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self._context = context

    def invocation_metadata(self) -> Any:
        return self._context.invocation_metadata()

    def time_remaining(self) -> float | None:
        return self._context.time_remaining()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        # grpcio-testing's own abort forgets the trailing metadata.
        self._context.set_trailing_metadata(trailing_metadata)
        self._context.set_code(code)
        self._context.set_details(details)
        raise grpc.aio.AbortError("aborted")


class SyncServicer:
    """A grpc.aio servicer with the methods that grpcio-testing calls: synchronous ones, from threads of its own.

    Args:
        servicer: the asynchronous one.
        loop: runs in another thread.
    """

    def __init__(self, servicer: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        for method in SERVICE.methods:
            implementation = getattr(servicer, method.name)
            if method.server_streaming:
                adapted = self._streaming(implementation, method.client_streaming)
            else:
                adapted = self._unary(implementation, GetMessageClass(method.output_type))
            setattr(self, method.name, adapted)

    def _start(self, coroutine: Coroutine[Any, Any, Any], context: grpc.ServicerContext) -> Any:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)

        def cancel() -> None:
            future.cancel()

        # A call that was cancelled in between has no more callbacks.
        if not context.add_callback(cancel):
            cancel()
        return future

    def _unary(self, implementation: Callable[..., Awaitable[bytes]], kind: Any) -> Callable[..., Any]:
        async def call(request: Any, context: grpc.ServicerContext) -> Any:
            return kind.FromString(await implementation(request, _AioContext(context), request.ByteSize()))

        def method(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return self._start(call(request, context), context).result()
            except grpc.aio.AbortError:
                return None

        return method

    def _streaming(
        self, implementation: Callable[..., AsyncIterator[Any]], client_streaming: bool
    ) -> Callable[..., Iterator[Any]]:
        async def requests(iterator: Iterator[Any]) -> AsyncIterator[Any]:
            while True:
                try:
                    message = await self._loop.run_in_executor(None, next, iterator, None)
                except grpc.RpcError:  # the call is over: grpc.aio cancels its method
                    raise asyncio.CancelledError from None
                if message is None:
                    return
                yield message

        def method(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            responses: queue.SimpleQueue[Any] = queue.SimpleQueue()
            end = object()

            async def pump() -> None:
                try:
                    argument = requests(request) if client_streaming else request
                    async for response in implementation(argument, _AioContext(context)):
                        responses.put(response)
                finally:
                    responses.put(end)

            future = self._start(pump(), context)
            while (response := responses.get()) is not end:
                yield response
            try:
                future.result()
            except grpc.aio.AbortError:
                return

        return method


@dataclass
class Outcome:
    """How a call ended."""

    responses: list[Any]
    code: grpc.StatusCode
    details: str
    trailing: list[tuple[str, str | bytes]]

    @property
    def response(self) -> Any:
        """The only response of a call that went well."""
        assert self.code is grpc.StatusCode.OK, self.details
        assert len(self.responses) == 1
        return self.responses[0]

    @property
    def detail(self) -> pb.ErrorDetail:
        """The machine-readable part of a failed call's status."""
        (value,) = (value for key, value in self.trailing if key == "mimo-error-detail-bin")
        assert isinstance(value, bytes)
        return pb.ErrorDetail.FromString(value)

    @property
    def item_statuses(self) -> list[pb.ItemStatus]:
        """Those that follow the detail."""
        return [
            pb.ItemStatus.FromString(value)
            for key, value in self.trailing
            if key == "mimo-item-status-bin" and isinstance(value, bytes)
        ]


@dataclass
class Rig:
    """A servicer with its scheduler and engine, called through grpcio-testing."""

    config: ServeConfig
    engine: Any
    scheduler: Scheduler
    servicer: TokenizerServicer
    server: grpc_testing.Server
    loop: asyncio.AbstractEventLoop
    device_failures: list[float] = field(default_factory=list)

    def begin(self, method: str, request: Any, metadata: Any = (), timeout: float | None = None) -> Any:
        """Start a call and return grpcio-testing's handle; a stream takes a sequence of requests."""
        descriptor = SERVICE.methods_by_name[method]
        if descriptor.client_streaming:
            rpc = self.server.invoke_stream_stream(descriptor, metadata, timeout)
            for message in request:
                rpc.send_request(_over_the_wire(message))
            rpc.requests_closed()
            return rpc
        invoke = self.server.invoke_unary_stream if descriptor.server_streaming else self.server.invoke_unary_unary
        return invoke(descriptor, metadata, _over_the_wire(request), timeout)

    def finish(self, method: str, rpc: Any) -> Outcome:
        """Wait for the end of a call that was begun."""
        if not SERVICE.methods_by_name[method].server_streaming:
            response, trailing, code, details = rpc.termination()
            return Outcome([] if response is None else [_over_the_wire(response)], code, details, _plain(trailing))
        trailing, code, details = rpc.termination()
        responses = []
        while True:
            try:
                responses.append(_over_the_wire(rpc.take_response()))
            except ValueError:  # no more
                return Outcome(responses, code, details, _plain(trailing))

    def call(self, method: str, request: Any, metadata: Any = (), timeout: float | None = None) -> Outcome:
        """Make a call and wait for its end."""
        return self.finish(method, self.begin(method, request, metadata, timeout))

    def on_loop(self, function: Callable[[], Any]) -> Any:
        """Call `function` on the event loop."""

        async def call() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(PATIENCE)

    def admitted(self) -> int:
        """Code frames that are admitted now."""
        return int(self.on_loop(lambda: self.scheduler._frames))

    def waiting(self) -> int:
        """Pieces of work in the queue, and long ones that have been begun."""
        return waiting(self.scheduler)


def waiting(scheduler: Scheduler) -> int:
    """Pieces of work in a scheduler's queue, and long ones that have been begun."""
    work_queue = scheduler._queue
    assert work_queue is not None
    with scheduler._wake:
        return sum(map(len, work_queue._calls.values())) + len(work_queue._long)


def _over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


def _plain(metadata: Any) -> list[tuple[str, str | bytes]]:
    return [(key, value) for key, value in metadata if key != "grpc.metadata_added_by_runtime"]


# ---------------------------------------------------------------- fixtures


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="loop")
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(PATIENCE)
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def _make_rig(loop: asyncio.AbstractEventLoop, make_engine: Callable[[], Any], config: ServeConfig, start: bool) -> Rig:
    failures: list[float] = []

    async def make() -> Scheduler:
        scheduler = Scheduler(
            make_engine,
            lambda info: config.max_queued_frames or 2 * Limits.of(config, info).max_frames,
            lambda: failures.append(time.monotonic()),
        )
        if start:
            await scheduler.start()
        return scheduler

    scheduler = asyncio.run_coroutine_threadsafe(make(), loop).result(PATIENCE)
    servicer = TokenizerServicer(scheduler, config)
    # The clock of a call's deadline stands still, so that what passes is what the server measures itself.
    server = grpc_testing.server_from_dictionary(
        {SERVICE: SyncServicer(servicer, loop)}, grpc_testing.strict_fake_time(time.time())
    )
    engine = scheduler._engine
    return Rig(config, engine, scheduler, servicer, server, loop, failures)


@pytest.fixture
def make_rig(loop: asyncio.AbstractEventLoop) -> Iterator[Callable[..., Rig]]:
    """Builds rigs from an engine, which is a FakeEngine unless one is given, and from settings of the server."""
    rigs: list[Rig] = []

    def make(engine: Any = None, start: bool = True, **settings: Any) -> Rig:
        engine = engine or FakeEngine()
        settings = {"max_audio_seconds": 10.0, "max_message_bytes": 1 << 20, **settings}
        config = ServeConfig(model="tiny", load_format="dummy", device="cpu", **settings)
        rig = _make_rig(loop, lambda: engine, config, start)
        rig.engine = engine
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        asyncio.run_coroutine_threadsafe(rig.scheduler.close(PATIENCE), loop).result(PATIENCE)


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    """A rig with a fake engine: at most 10 seconds, 1 MiB a message, twice the longest recording queued."""
    return make_rig()


@pytest.fixture(scope="session")
def tiny_engine() -> Engine:
    """The real engine, with the smallest model."""
    return Engine(ServeConfig(model="tiny", load_format="dummy", device="cpu"))


@pytest.fixture
def tiny_rig(make_rig: Callable[..., Rig], tiny_engine: Engine) -> Rig:
    """A rig with the real engine."""
    return make_rig(tiny_engine, max_audio_seconds=None, max_message_bytes=64 << 20)


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> int:
    """Segments of a second, 100 mel frames, in place of a minute."""
    for module in ("model.config", "model.frontend", "service"):
        monkeypatch.setattr(f"mimo_tokenizer_server.{module}.SEGMENT_MEL_FRAMES", 100)
    return 100


@pytest.fixture
def fakes() -> SimpleNamespace:
    """FakeEngine, Gate, the info that a fake engine has, and how many jobs a scheduler holds."""
    return SimpleNamespace(Engine=FakeEngine, Gate=Gate, info=FAKE_INFO, waiting=waiting)


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Wait until something is true; fail if it never is."""

    def wait(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, "it never came"
            time.sleep(0.002)

    return wait


@pytest.fixture
def log_lines() -> Iterator[list[logging.LogRecord]]:
    """What the server's package logs, from debug on."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Keep()
    logger = logging.getLogger("mimo_tokenizer_server")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(level)


# ---------------------------------------------------------------- messages


class Build:
    """Messages, all right unless told otherwise."""

    @staticmethod
    def pcm(samples: int, channels: int = 1, seed: int = 0, int16: bool = False) -> npt.NDArray[Any]:
        """Noise (samples, channels), float32 or int16."""
        sound = np.random.default_rng(seed).uniform(-0.5, 0.5, (samples, channels))
        return (sound * 32767).astype("<i2") if int16 else sound.astype("<f4")

    @classmethod
    def audio(cls, samples: int = 2400, **fields: Any) -> pb.Audio:
        """Mono float32 at 24 kHz."""
        values = {"sample_rate": 24000, "channels": 1, "format": pb.SAMPLE_FORMAT_FLOAT32, **fields}
        if "pcm" not in values:
            values["pcm"] = cls.pcm(samples).tobytes()
        return pb.Audio(**values)

    @staticmethod
    def code_array(frames: int = 4, rows: int = 20, value: int = 5) -> npt.NDArray[np.uint16]:
        """Equal codes (rows, frames)."""
        return np.full((rows, frames), value, "<u2")

    @classmethod
    def codes(cls, array: npt.NDArray[Any] | None = None, **fields: Any) -> pb.Codes:
        """A message of `array`, with other fields than its own if they are given."""
        array = cls.code_array() if array is None else array
        rows, frames = array.shape
        return pb.Codes(**{"num_quantizers": rows, "frames": frames, "data": array.astype("<u2").tobytes(), **fields})

    @staticmethod
    def array(codes: pb.Codes) -> npt.NDArray[np.uint16]:
        """The array (rows, frames) of a message."""
        return np.frombuffer(codes.data, "<u2").reshape(codes.num_quantizers, codes.frames)

    @staticmethod
    def segments(pcm: npt.NDArray[Any], sample_rate: int = 24000) -> list[Segment]:
        """The segments of a recording (samples, channels)."""
        cutter = SegmentCutter(sample_rate, FAKE_INFO.config)
        return [*cutter.push(pcm), *cutter.finish()]

    @classmethod
    def encode_work(cls, pcm: npt.NDArray[Any], sample_rate: int = 24000, num_quantizers: int = 20) -> EncodeWork:
        """A recording of one segment."""
        (segment,) = cls.segments(pcm, sample_rate)
        return EncodeWork(segment, num_quantizers)

    @classmethod
    def decode_work(cls, **fields: Any) -> DecodeWork:
        """Work of four frames unless told otherwise; `value` marks it."""
        array = cls.code_array(fields.pop("frames", 4), value=fields.pop("value", 5))
        return DecodeWork(array, fields.pop("left_context_frames", 0), fields.pop("int16", False))

    @classmethod
    def good(cls, method: str, **fields: Any) -> Any:
        """A request that every server answers; of a stream, all its messages."""
        if method == "Encode":
            return pb.EncodeRequest(items=[cls.audio()], **fields)
        if method == "DecodeVq":
            return pb.DecodeVqRequest(items=[cls.codes()], **fields)
        if method == "Decode":
            return pb.DecodeRequest(items=[pb.DecodeItem(codes=cls.codes())], **fields)
        if method == "DecodeLong":
            return pb.DecodeLongRequest(item=pb.DecodeItem(codes=cls.codes()), **fields)
        assert method == "EncodeStream"
        return cls.stream([cls.pcm(2400).tobytes()], **fields)

    @staticmethod
    def stream(pieces: Sequence[bytes], **fields: Any) -> list[pb.EncodeStreamRequest]:
        """The messages of an EncodeStream call."""
        values = {"sample_rate": 24000, "channels": 1, "format": pb.SAMPLE_FORMAT_FLOAT32, **fields}
        opening = pb.EncodeStreamRequest(open=pb.EncodeStreamOpen(**values))
        return [opening, *(pb.EncodeStreamRequest(pcm=piece) for piece in pieces)]


@pytest.fixture(scope="session")
def build() -> type[Build]:
    """Builds messages."""
    return Build

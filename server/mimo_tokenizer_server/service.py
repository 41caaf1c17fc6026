"""The contract's methods: a call from its message to its answer or status. No model code, no policy."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import platform
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf import __version__ as protobuf_version
from google.protobuf.message import Message

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb

from . import messages, wire
from .config import ServeConfig
from .engine import EngineInfo
from .errors import Reason, RequestError, invalid, too_large
from .metrics import Metrics
from .model.config import SEGMENT_MEL_FRAMES
from .model.frontend import Segment, SegmentCutter
from .scheduler import Done, Scheduler
from .telemetry import log, logger
from .work import DecodeVqWork, DecodeWork, EncodeWork, Work

T = TypeVar("T")

# A stream's sound is checked and cut in pieces of at most this length and size.
_PIECE_SECONDS = 1
_MAX_PIECE_BYTES = 4 << 20
# DecodeVq's work in pieces of about so much of its answer.
_VQ_PIECE_BYTES = 4 << 20
# DecodeLong's answer in pieces of this size: small enough to share a connection with short calls.
_PIECE_BYTES = 1 << 20
# How long a stream may keep the server waiting, for its next message or until it reads its answer.
IDLE_SECONDS = 60
# How long after the end of its messages a client's call may be cancelled, where it is the client that has ended.
GONE_SECONDS = 0.05
# A client's deadline passes before what the server has been told of it, by the time that the call was on its way.
_CLOCK_SLACK = 0.1
# Message contents above this size are checked and converted in a thread, so that the event loop goes on.
_OFF_LOOP_BYTES = 256 << 10


@dataclass(eq=False)
class _Call:
    """One call: who, how long, and what its answer says of it."""

    method: str
    request_id: str
    client: str
    deadline: float | None
    arrived: float = field(default_factory=time.monotonic)
    frames: int = 0
    items: int = 0
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    batch_items: int = 0
    batch_frames: int = 0

    def count(self, done: Done) -> npt.NDArray[Any]:
        """Add an answer's timings to the call's, and hand out its value."""
        self.queue_seconds = max(self.queue_seconds, done.queue_seconds)
        self.compute_seconds += done.compute_seconds
        if done.batch_frames > self.batch_frames:
            self.batch_items, self.batch_frames = done.batch_items, done.batch_frames
        return done.value

    def facts(self) -> dict[str, Any]:
        """What logs and spans tell of it."""
        return {
            "request_id": self.request_id,
            "client": self.client,
            "items": self.items,
            "frames": self.frames,
            "queue_seconds": self.queue_seconds,
            "compute_seconds": self.compute_seconds,
        }

    def timings(self) -> pb.Timings:
        return pb.Timings(
            queue_seconds=self.queue_seconds,
            compute_seconds=self.compute_seconds,
            total_seconds=time.monotonic() - self.arrived,
            batch_items=self.batch_items,
            batch_frames=self.batch_frames,
        )


class TokenizerServicer:
    """The contract's methods; what they answer to a unary call is serialized already.

    Their `size` is that of the request, in bytes.

    Args:
        scheduler: computes.
        config: the process's settings.
        metrics: told of each call; None for metrics that nobody reads.
        traced: told of each call within its span; None where calls are not traced.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        config: ServeConfig,
        metrics: Metrics | None = None,
        traced: Callable[..., None] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._config = config
        self._metrics = metrics or Metrics(versions())
        self._traced = traced
        self._calls = 0
        self._arriving = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def drain(self, timeout: float) -> None:
        """Refuse new calls, and wait at most `timeout` seconds for those in progress."""
        self._draining = True
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)

    def full(self, method: str) -> RequestError | None:
        """Why a call that comes now is refused whatever it says, so that nobody need read it; None if it is not."""
        if self._draining:
            return RequestError(Reason.NOT_READY, "the server is going down", retry_after=1.0)
        calls, most = self._calls + self._arriving, self._config.max_concurrent_calls
        if calls < most or method == "GetInfo":
            return None
        sentence = f"{calls} calls are in progress; at most {most} are taken"
        return RequestError(Reason.QUEUE_FULL, sentence, limit=most, retry_after=0.1)

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Count a call whose request is being read, while the body runs."""
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1

    async def refuse(self, method: str, error: RequestError, context: Any) -> None:
        """End a call that does not get as far as its method with the error's status."""
        async with self._call(method, context, error):
            raise AssertionError("a refused call has no body")

    # ------------------------------------------------------------ methods

    async def Encode(self, request: pb.EncodeRequest, context: Any, size: int = 0) -> bytes:
        """Waveforms to codes."""
        async with self._call("Encode", context) as call:
            info, limits = self._ready(request.expected_fingerprint)
            num_quantizers, group_size = messages.encode_options(request, info)
            self._check_items(call, len(request.items))

            def parse(index: int) -> _Cut:
                audio = request.items[index]
                pcm = messages.check_audio(audio, f"items[{index}]", info, limits)
                cutter = SegmentCutter(audio.sample_rate, info.config)
                return _Cut(len(pcm), audio.sample_rate, [*cutter.push(pcm), *cutter.finish()])

            async def run(cut: _Cut) -> npt.NDArray[Any]:
                works = [EncodeWork(segment, num_quantizers) for segment in cut.segments]
                codes = await _all([self._compute(call, work) for work in works])
                return _grouped(np.concatenate(codes, axis=1), group_size)

            def frames(cuts: Collection[_Cut]) -> int:
                lengths = [messages.resampled_length(cut.samples, cut.sample_rate, info) for cut in cuts]
                counts = [info.config.audio_code_frames(length) for length in lengths]
                padded = sum(-(-count // group_size) * group_size for count in counts)
                size = padded * num_quantizers * 2
                messages.check_answer_size(
                    size, len(cuts), call.items - len(cuts), padded, limits, "send fewer items a call"
                )
                return sum(counts)

            answers = await self._items(call, size, parse, frames, run)
            return await _respond(pb.EncodeResponse, answers, call, "codes", messages.codes_shape, "data")

    async def DecodeVq(self, request: pb.DecodeVqRequest, context: Any, size: int = 0) -> bytes:
        """Codes to the quantizer's output."""
        async with self._call("DecodeVq", context) as call:
            info, limits = self._ready(request.expected_fingerprint)
            self._check_items(call, len(request.items))

            def parse(index: int) -> npt.NDArray[np.uint16]:
                return messages.check_codes(request.items[index], f"items[{index}]", info, limits)

            def frames(items: Collection[npt.NDArray[np.uint16]]) -> int:
                count = sum(map(messages.frames_of, items))
                size = count * info.config.d_model * 4
                messages.check_answer_size(
                    size, len(items), call.items - len(items), count, limits, "ask for fewer frames a call"
                )
                return count

            async def run(codes: npt.NDArray[np.uint16]) -> npt.NDArray[Any]:
                # Frames by themselves: a long item is many short pieces of work, beside which others have their turns.
                step = max(1, _VQ_PIECE_BYTES // (4 * info.config.d_model))
                pieces = [codes[:, start : start + step] for start in range(0, codes.shape[1], step)]
                parts = await _all([self._compute(call, DecodeVqWork(piece)) for piece in pieces])
                if len(parts) == 1:
                    return parts[0]
                return await off_loop(sum(part.nbytes for part in parts), np.concatenate, parts)

            answers = await self._items(call, size, parse, frames, run)
            return await _respond(pb.DecodeVqResponse, answers, call, "features", messages.features_shape, "data")

    async def Decode(self, request: pb.DecodeRequest, context: Any, size: int = 0) -> bytes:
        """Codes to waveforms."""
        async with self._call("Decode", context) as call:
            info, limits = self._ready(request.expected_fingerprint)
            self._check_items(call, len(request.items))
            sample_format = messages.answer_format(request.format)
            frame_bytes = info.config.samples_per_frame * np.dtype(messages.SAMPLE_TYPES[sample_format]).itemsize

            def parse(index: int) -> DecodeWork:
                item = request.items[index]
                codes = messages.check_codes(item.codes, f"items[{index}].codes", info, limits)
                return DecodeWork(codes, item.left_context_frames, sample_format == pb.SAMPLE_FORMAT_INT16)

            def frames(works: Collection[DecodeWork]) -> int:
                answered = sum(max(0, messages.frames_of(work.codes) - work.left_context_frames) for work in works)
                failed = call.items - len(works)
                size = answered * frame_bytes
                messages.check_answer_size(size, len(works), failed, answered, limits, "DecodeLong takes it")
                return sum(messages.frames_of(work.codes) for work in works)

            async def run(work: DecodeWork) -> npt.NDArray[Any]:
                return await self._decode(call, work)

            def head(samples: npt.NDArray[Any]) -> pb.Audio:
                return pb.Audio(sample_rate=info.config.sampling_rate, channels=1, format=sample_format)

            answers = await self._items(call, size, parse, frames, run)
            return await _respond(pb.DecodeResponse, answers, call, "audio", head, "pcm")

    async def EncodeStream(
        self, request_iterator: AsyncIterator[pb.EncodeStreamRequest], context: Any
    ) -> AsyncIterator[pb.EncodeStreamResponse]:
        """One long waveform to codes, with memory for a segment."""
        async with self._call("EncodeStream", context) as call, _unless_gone():
            requests = in_time(request_iterator)
            first = await anext(requests, None)
            kind = first.WhichOneof("message") if first is not None else None
            if first is None or kind != "open":
                raise invalid("message", kind or "absent", "`open` in the first message")
            options = first.open
            info, limits = self._ready(options.expected_fingerprint, "open.")
            num_quantizers, group_size = messages.encode_options(options, info, "open.")
            messages.check_format(options, "open", limits)
            cutter = SegmentCutter(options.sample_rate, info.config)
            pieces = _PcmPieces(options, limits)
            call.items = 1
            # A stream holds room for a segment while that is computed, and only then.
            segment_frames = info.config.code_frames(SEGMENT_MEL_FRAMES)
            self._scheduler.check_room(min(segment_frames, self._scheduler.max_queued_frames))
            last_frame: npt.NDArray[Any] | None = None

            async def encode(segment: Segment) -> npt.NDArray[Any]:
                frames = info.config.code_frames(segment.frames)
                call.frames += frames
                # A stream is refused at its start or not at all: what it has paid for is not thrown away.
                async with self._scheduler.room(frames, call.deadline):
                    return await self._compute(call, EncodeWork(segment, num_quantizers))

            async for message in requests:
                if (kind := message.WhichOneof("message")) != "pcm":
                    raise invalid("message", kind or "absent", "`pcm` in all messages after the first")
                data = message.pcm
                for pcm in await off_loop(len(data), lambda data: list(pieces.push(data)), data):
                    for segment in await off_loop(pcm.nbytes, _segments, pieces, cutter, pcm):
                        codes = await encode(segment)
                        last_frame = codes[:, -1:]
                        yield pb.EncodeStreamResponse(codes=messages.codes_message(codes))
            pcm = pieces.finish()
            messages.check_length(pieces.samples, options.sample_rate, "pcm", info)
            rest = await off_loop(pcm.nbytes, _segments, pieces, cutter, pcm) + list(cutter.finish())
            parts = [await encode(segment) for segment in rest]
            # The last segment can be too short for a frame: the one to repeat is then the segment's before.
            codes = np.concatenate(parts, axis=1) if parts else np.empty((num_quantizers, 0), np.uint16)
            padding = _padding(call.frames, group_size, codes if parts else last_frame)
            codes = np.concatenate((codes, padding), axis=1)
            yield pb.EncodeStreamResponse(codes=messages.codes_message(codes), timings=call.timings())

    async def DecodeLong(
        self, request: pb.DecodeLongRequest, context: Any, size: int = 0
    ) -> AsyncIterator[pb.DecodeLongResponse]:
        """One code array to the samples of Decode, in pieces."""
        async with self._call("DecodeLong", context) as call:
            info, limits = self._ready(request.expected_fingerprint)
            sample_format = messages.answer_format(request.format)
            codes = await off_loop(size, messages.check_codes, request.item.codes, "item.codes", info, limits)
            call.items, call.frames = 1, messages.frames_of(codes)
            with self._scheduler.long_answer(call.frames):
                with self._scheduler.admit(call.frames):
                    int16 = sample_format == pb.SAMPLE_FORMAT_INT16
                    samples = await self._decode(call, DecodeWork(codes, request.item.left_context_frames, int16))
                step = min(_PIECE_BYTES, limits.max_message_bytes - messages.CALL_BYTES) // samples.itemsize
                for start in range(0, max(1, len(samples)), step):
                    timings = call.timings() if start + step >= len(samples) else None
                    yield pb.DecodeLongResponse(pcm=samples[start : start + step].tobytes(), timings=timings)

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any, size: int = 0) -> bytes:
        """What is loaded, where, and what is allowed."""
        async with self._call("GetInfo", context):
            info, limits = self._ready("")
            model, loss = info.config, info.loss
            return pb.GetInfoResponse(
                model=pb.ModelInfo(
                    id=info.model_id,
                    revision=info.revision,
                    fingerprint=info.fingerprint,
                    random_weights=info.random_weights,
                    codebook_sizes=model.codebook_sizes,
                    d_model=model.d_model,
                    sample_rate=model.sampling_rate,
                    samples_per_frame=model.samples_per_frame,
                    samples_cut=model.samples_cut,
                    segment_samples=model.segment_samples,
                    hop_length=model.hop_length,
                    stride_size=model.stride_size,
                    avg_pooler=model.avg_pooler,
                ),
                device=pb.DeviceInfo(
                    device=info.device,
                    name=info.device_name,
                    dtype=info.dtype,
                    quantization=info.quantization,
                    decode_snr_db=loss.decode_snr if loss else None,
                    equal_codes=loss.equal_codes if loss else None,
                    encoder_quantized=loss is not None and loss.encoder,
                    batch_invariant=info.batch_invariant,
                    memory_total=info.memory_total,
                    memory_allocated=self._scheduler.engine.memory_allocated(),
                ),
                limits=pb.Limits(
                    max_message_bytes=limits.max_message_bytes,
                    max_items=messages.MAX_ITEMS,
                    max_channels=messages.MAX_CHANNELS,
                    min_sample_rate=messages.MIN_SAMPLE_RATE,
                    max_sample_rate=messages.MAX_SAMPLE_RATE,
                    min_audio_samples=model.min_samples,
                    max_audio_seconds=limits.max_audio_seconds,
                    max_frames=limits.max_frames,
                    max_group_size=messages.MAX_GROUP_SIZE,
                    max_queued_frames=self._scheduler.max_queued_frames,
                    max_concurrent_calls=limits.max_concurrent_calls,
                    max_batch_frames=info.max_batch_frames,
                ),
                memory=pb.MemoryInfo(**dataclasses.asdict(info.memory)),
                versions=versions(),
            ).SerializeToString()

    # ------------------------------------------------------------ a call

    @asynccontextmanager
    async def _call(self, method: str, context: Any, refusal: RequestError | None = None) -> AsyncIterator[_Call]:
        """Frame of every method: identity, the limit on calls, errors to a status, one log line.

        A call with a `refusal` ends with that; the body does not run.
        """
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        remaining = context.time_remaining()
        call = _Call(
            method,
            request_id=_printable(metadata.get("x-request-id", "")) or uuid.uuid4().hex,
            client=_printable(metadata.get("x-client", "-")),
            deadline=None if remaining is None else time.monotonic() + remaining,
        )
        error: RequestError | None = None
        failed: _AllItemsFailed | None = None
        outcome = "OK"
        refusal = refusal or self.full(method)
        self._calls += 1
        self._idle.clear()
        try:
            if refusal is not None:
                raise refusal
            with self._metrics.in_progress(method):
                yield call
        except _AllItemsFailed as all_failed:
            failed = all_failed
            error = failed.first
        except RequestError as request_error:
            error = request_error
        except (asyncio.CancelledError, GeneratorExit):
            # When its deadline passes, gRPC cancels a call, too: on the client's clock, which is a little ahead.
            late = call.deadline is not None and time.monotonic() >= call.deadline - _CLOCK_SLACK
            outcome = "DEADLINE_EXCEEDED" if late else "CANCELLED"
            raise
        except grpc.aio.AbortError:
            raise
        except Exception:
            logger.exception("%s failed, request %s", method, call.request_id)
            error = RequestError(Reason.INTERNAL, f"the server failed on request {call.request_id}; its log says why")
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()
            if error is not None:
                outcome = messages.STATUS[error.reason].name
            seconds = time.monotonic() - call.arrived
            self._metrics.ended(method, outcome, seconds)
            if self._traced is not None:
                self._traced(outcome, batch_items=call.batch_items, **call.facts())
            log(
                logging.DEBUG,
                method,
                status=outcome,
                **call.facts(),
                total_seconds=seconds,
                error=str(error) if error else "-",
            )
        if error is not None:
            status = (
                messages.STATUS[error.reason],
                str(failed or error),
                messages.trailing_metadata(error, failed.errors if failed else (), call.request_id),
            )
            # A traceback refers to this frame: without the cycle a refused request is let go of at once.
            error = failed = None
            await context.abort(*status)

    def _ready(self, expected_fingerprint: str, prefix: str = "") -> tuple[EngineInfo, messages.Limits]:
        """The model's facts and the limits.

        Raises:
            RequestError: there is no model yet, or it is not the one that the request expects.
        """
        info = self._scheduler.engine.info
        if expected_fingerprint and expected_fingerprint != info.fingerprint:
            expected = _printable(expected_fingerprint[:64])
            raise RequestError(
                Reason.WRONG_MODEL,
                f"the request expects the model with fingerprint {expected}; this server runs"
                f" {info.model_id} with {info.fingerprint}",
                field=f"{prefix}expected_fingerprint",
                value=expected,
                allowed=info.fingerprint,
            )
        return info, messages.Limits.of(self._config, info)

    def _check_items(self, call: _Call, count: int) -> None:
        call.items = count
        if count == 0:
            raise invalid("items", "empty", f"1 to {messages.MAX_ITEMS} items")
        if count > messages.MAX_ITEMS:
            raise too_large("items", count, messages.MAX_ITEMS, "items")

    async def _items(
        self,
        call: _Call,
        size: int,
        parse: Callable[[int], T],
        frames: Callable[[Collection[T]], int],
        run: Callable[[T], Coroutine[Any, Any, npt.NDArray[Any]]],
    ) -> list[npt.NDArray[Any] | RequestError]:
        """Answer each item or say why not.

        Args:
            call: the call.
            size: of the request, in bytes.
            parse: checks an item.
            frames: given the good ones, the code frames to admit; raises where the answer has no room in a message.
            run: answers a good one.

        Raises:
            _AllItemsFailed: none could be answered.
            RequestError: the queue or the answer has no room for them.
        """

        def parse_all() -> list[T | RequestError]:
            return [_or_error(functools.partial(parse, index)) for index in range(call.items)]

        parsed = await off_loop(size, parse_all)
        answers: list[npt.NDArray[Any] | RequestError | None] = [
            item if isinstance(item, RequestError) else None for item in parsed
        ]
        good = {index: item for index, item in enumerate(parsed) if not isinstance(item, RequestError)}
        if good:
            call.frames = frames(good.values())
            with self._scheduler.admit(call.frames):
                outcomes = await _gather(run, good.values())
            for index, outcome in zip(good, outcomes, strict=True):
                answers[index] = outcome
        complete = [answer for answer in answers if answer is not None]
        for index, answer in enumerate(complete):
            if isinstance(answer, RequestError):
                # The same error object may stand for several items: a queue that closes refuses all of them.
                complete[index] = replace(answer, item=index)
        errors = [answer for answer in complete if isinstance(answer, RequestError)]
        if len(errors) == len(complete):
            raise _AllItemsFailed(errors)
        return complete

    async def _compute(self, call: _Call, work: Work) -> npt.NDArray[Any]:
        return call.count(await self._scheduler.submit(work, call, call.deadline))

    async def _decode(self, call: _Call, work: DecodeWork) -> npt.NDArray[Any]:
        if work.left_context_frames >= messages.frames_of(work.codes):
            return np.empty(0, "<i2" if work.int16 else "<f4")
        return await self._compute(call, work)


class _AllItemsFailed(Exception):
    """No item of a call could be answered, so the call fails."""

    def __init__(self, errors: list[RequestError]) -> None:
        self.errors = errors
        self.first = errors[0]
        super().__init__(
            str(self.first) if len(errors) == 1 else f"none of the {len(errors)} items is answered; first: {self.first}"
        )


@dataclass(frozen=True)
class _Cut:
    """A recording of `samples`, and its segments."""

    samples: int
    sample_rate: int
    segments: list[Segment]


class _PcmPieces:
    """The bytes of a stream to arrays (samples, channels) of bounded size.

    Attributes:
        samples: in the pieces handed out so far.
    """

    def __init__(self, options: pb.EncodeStreamOpen, limits: messages.Limits) -> None:
        self._dtype = np.dtype(messages.SAMPLE_TYPES[options.format])
        self._channels = options.channels
        self._rate = options.sample_rate
        self._limits = limits
        self._frame_bytes = options.channels * self._dtype.itemsize
        self._piece_bytes = self._frame_bytes * min(
            _PIECE_SECONDS * options.sample_rate, _MAX_PIECE_BYTES // self._frame_bytes
        )
        self._buffer = bytearray()
        self.samples = 0

    def push(self, data: bytes) -> Iterator[npt.NDArray[Any]]:
        self._buffer += data
        messages.check_duration(self.samples + len(self._buffer) // self._frame_bytes, self._rate, "pcm", self._limits)
        while len(self._buffer) >= self._piece_bytes:
            yield self._take(self._piece_bytes)

    def finish(self) -> npt.NDArray[Any]:
        if len(self._buffer) % self._frame_bytes:
            raise invalid(
                "pcm",
                f"{self.samples * self._frame_bytes + len(self._buffer)} bytes in all",
                f"a multiple of {self._frame_bytes} (channels * bytes a sample)",
            )
        return self._take(len(self._buffer))

    def _take(self, size: int) -> npt.NDArray[Any]:
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        pcm = np.frombuffer(data, self._dtype).reshape(-1, self._channels)
        self.samples += len(pcm)
        return pcm


def _segments(pieces: _PcmPieces, cutter: SegmentCutter, pcm: npt.NDArray[Any]) -> list[Segment]:
    """Check a stream's next samples, and cut off the segments that are complete."""
    messages.check_finite(pcm, "pcm", pieces.samples - len(pcm))
    return list(cutter.push(pcm))


def _padding(frames: int, group_size: int, codes: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    """What makes `frames` a multiple of `group_size`: the last frame of `codes`, repeated."""
    assert codes is not None, "a recording that is not too short has a frame"
    return np.repeat(codes[:, -1:], -frames % group_size, axis=1)


def _grouped(codes: npt.NDArray[Any], group_size: int) -> npt.NDArray[Any]:
    """Codes (num_quantizers, frames), padded to a multiple of `group_size`."""
    return np.concatenate((codes, _padding(codes.shape[1], group_size, codes)), axis=1)


async def _respond(
    kind: type[pb.EncodeResponse] | type[pb.DecodeVqResponse] | type[pb.DecodeResponse],
    answers: Sequence[npt.NDArray[Any] | RequestError],
    call: _Call,
    field: str,
    head: Callable[[Any], Message],
    data: str,
) -> bytes:
    """A serialized response: each item's answer or what was wrong with it, and the timings.

    Args:
        kind: of the response.
        answers: of its items.
        call: gives request id and timings.
        field: of an item, for its answer.
        head: the answer's message, but for the data.
        data: of that message, the field for the data.
    """

    def serialize() -> bytes:
        parts: list[Any] = []
        for answer in answers:
            if isinstance(answer, RequestError):
                item = [kind.Item(status=messages.item_status(answer, call.request_id)).SerializeToString()]
            else:
                payload = wire.with_bytes(head(answer), data, answer)
                item = wire.with_message(kind.Item(status=pb.ItemStatus()), field, payload)
            parts += wire.with_message(kind(), "items", item)
        parts.append(kind(timings=call.timings()).SerializeToString())
        return b"".join(parts)

    return await off_loop(sum(answer.nbytes for answer in answers if not isinstance(answer, RequestError)), serialize)


@functools.cache
def versions() -> dict[str, str]:
    """Of the server and of what it runs on."""

    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "unknown"

    packages = {"server": "mimo-audio-tokenizer-service", "torch": "torch", "torchaudio": "torchaudio"}
    return {name: of(package) for name, package in packages.items()} | {
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
        "protobuf": protobuf_version,
    }


def _printable(text: str) -> str:
    """What a caller calls itself or its request, as it may stand in metadata and in logs."""
    return "".join(character if " " <= character <= "~" else "?" for character in text[:128]).strip()


def _or_error(function: Callable[[], T]) -> T | RequestError:
    try:
        return function()
    except RequestError as error:
        # Its traceback would keep the request.
        return error.with_traceback(None)


@asynccontextmanager
async def _unless_gone() -> AsyncIterator[None]:
    """Let a client's going away, which at first looks like the end of its messages, cancel the call it is found in."""
    try:
        yield
    except RequestError as error:
        if error.reason is Reason.INVALID_VALUE:
            await asyncio.sleep(GONE_SECONDS)
        raise


async def in_time(requests: AsyncIterator[T]) -> AsyncIterator[T]:
    """The messages of a stream, of which the next one may not keep the server waiting for ever."""
    iterator = aiter(requests)
    while True:
        try:
            message = await within(IDLE_SECONDS, anext(iterator, None))
        except asyncio.TimeoutError:
            raise RequestError(
                Reason.DEADLINE, f"the stream's next message did not come within {IDLE_SECONDS} seconds"
            ) from None
        if message is None:
            return
        yield message


async def within(seconds: float, awaitable: Awaitable[T]) -> T:
    """As `asyncio.wait_for`, which until Python 3.12 forgets a cancellation that comes together with the result.

    Raises:
        asyncio.TimeoutError: `seconds` have passed.
    """
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # or it would be logged as one that nobody has asked for


async def off_loop(size: int, function: Callable[..., T], *args: Any) -> T:
    """Call `function`, in a thread if it goes over much data."""
    return await asyncio.to_thread(function, *args) if size > _OFF_LOOP_BYTES else function(*args)


async def _all(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all; the first error cancels the rest."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _gather(
    function: Callable[[T], Coroutine[Any, Any, npt.NDArray[Any]]], items: Collection[T]
) -> list[npt.NDArray[Any] | RequestError]:
    """`function` of all items; a RequestError stands in its place, anything else cancels the rest and is raised."""

    # Not of coroutines that are there already: where the call is cancelled at once, they would never be awaited.
    async def outcome(item: T) -> npt.NDArray[Any] | RequestError:
        try:
            return await function(item)
        except RequestError as error:
            return error.with_traceback(None)

    return await _all([outcome(item) for item in items])

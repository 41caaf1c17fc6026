"""Messages to arrays and back, errors to status codes. No model code, no policy."""

from __future__ import annotations

import asyncio
import functools
import logging
import platform
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf import __version__ as protobuf_version
from google.protobuf.duration_pb2 import Duration

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_audio_tokenizer.v1 import tokenizer_pb2_grpc

from .config import ServeConfig
from .engine import DecodeVqWork, DecodeWork, EncodePiece, EngineInfo, Recording
from .errors import Reason, RequestError, invalid, too_large
from .scheduler import Done, Scheduler
from .telemetry import log, logger

T = TypeVar("T")

MAX_ITEMS = 1024
MAX_CHANNELS = 64
MIN_SAMPLE_RATE = 1_000
MAX_SAMPLE_RATE = 384_000
MAX_GROUP_SIZE = 1024

# Full scale is 1; ten octaves above what anybody sends by mistake (16-bit values as floats), far below what makes the
# mel front end overflow.
MAX_AMPLITUDE = 1e6

# Audio is handed to the device in pieces of this length, so that what came meanwhile goes first.
_PIECE_SECONDS = 60
# A stream's pieces are also bounded in bytes: a minute of 64 channels at 384 kHz is 6 GB.
_MAX_PIECE_BYTES = 32 << 20
# DecodeLong's answer in pieces of this size: small enough to share a connection with short calls.
_PIECE_BYTES = 1 << 20
# Message contents above this size are checked and converted in a thread, so that the event loop goes on.
_OFF_LOOP_BYTES = 256 << 10
# Room in a message for what is no payload: tags, lengths, timings, and statuses of items.
_CALL_BYTES = 1024
_ITEM_BYTES = 256
# Trailing metadata above about 8 KiB is refused by clients.
_MAX_METADATA_BYTES = 6000

_SAMPLE_TYPES: dict[int, npt.DTypeLike] = {pb.SAMPLE_FORMAT_FLOAT32: "<f4", pb.SAMPLE_FORMAT_INT16: "<i2"}
_FORMATS = "SAMPLE_FORMAT_FLOAT32 (1), SAMPLE_FORMAT_INT16 (2)"

_STATUS = {
    Reason.INVALID_VALUE: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.WRONG_MODEL: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NOT_READY: grpc.StatusCode.UNAVAILABLE,
    Reason.DEVICE_FAILURE: grpc.StatusCode.UNAVAILABLE,
    Reason.OUT_OF_MEMORY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}


@dataclass(frozen=True)
class Limits:
    """What a request may ask for; GetInfo tells them."""

    max_message_bytes: int
    max_audio_seconds: float
    max_frames: int
    max_concurrent_calls: int

    @classmethod
    def of(cls, config: ServeConfig, info: EngineInfo) -> Limits:
        """The limits that follow from flags and model."""
        model = info.config
        seconds = config.max_audio_seconds if config.max_audio_seconds is not None else model.max_audio_seconds
        # Whatever Encode answers, Decode takes: also when it was padded to groups.
        frames = model.audio_code_frames(int(seconds * model.sampling_rate)) + MAX_GROUP_SIZE - 1
        return cls(config.max_message_bytes, seconds, frames, config.max_concurrent_calls)


@dataclass
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

    def count(self, done: Done) -> npt.NDArray[Any]:
        """Add an answer's timings to the call's, and hand out its value."""
        self.queue_seconds = max(self.queue_seconds, done.queue_seconds)
        self.compute_seconds += done.compute_seconds
        return done.value

    def timings(self) -> pb.Timings:
        return pb.Timings(
            queue_seconds=self.queue_seconds,
            compute_seconds=self.compute_seconds,
            total_seconds=time.monotonic() - self.arrived,
        )


class TokenizerServicer(tokenizer_pb2_grpc.AudioTokenizerServicer):
    """The contract's methods, for a grpc.aio server.

    Args:
        scheduler: computes.
        config: the process's settings.
    """

    def __init__(self, scheduler: Scheduler, config: ServeConfig) -> None:
        self._scheduler = scheduler
        self._config = config
        self._calls = 0

    # ------------------------------------------------------------ methods

    async def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeResponse:
        """Waveforms to codes."""
        async with self._call("Encode", context) as call:
            info, limits = self._ready(request.expected_fingerprint)
            num_quantizers, group_size = _encode_options(request, info)
            self._check_items(call, len(request.items))

            def parse(index: int) -> tuple[npt.NDArray[Any], int]:
                audio = request.items[index]
                name = f"items[{index}]"
                return _check_audio(audio, name, info, limits), audio.sample_rate

            async def run(index: int, parsed: tuple[npt.NDArray[Any], int]) -> npt.NDArray[Any]:
                pcm, sample_rate = parsed
                recording = Recording(sample_rate, num_quantizers, group_size)
                return await self._encode_pieces(call, recording, pcm)

            def frames(items: Collection[tuple[npt.NDArray[Any], int]]) -> int:
                counts = [info.config.audio_code_frames(_resampled(len(pcm), rate, info)) for pcm, rate in items]
                padded = sum(-(-count // group_size) * group_size for count in counts)
                _check_answer_size(padded * num_quantizers * 2, call.items, padded, limits, "send fewer items a call")
                return sum(counts)

            answers = await self._items(call, request.ByteSize(), parse, frames, run)
            response = pb.EncodeResponse(timings=call.timings())
            for answer in answers:
                if isinstance(answer, RequestError):
                    response.items.add(status=_item_status(answer, call))
                else:
                    response.items.add(status=pb.ItemStatus(), codes=_codes_message(answer))
            return response

    async def DecodeVq(self, request: pb.DecodeVqRequest, context: Any) -> pb.DecodeVqResponse:
        """Codes to the quantizer's output."""
        async with self._call("DecodeVq", context) as call:
            info, limits = self._ready(request.expected_fingerprint)
            self._check_items(call, len(request.items))

            def parse(index: int) -> npt.NDArray[np.uint16]:
                return _check_codes(request.items[index], f"items[{index}]", info, limits)

            def frames(items: Collection[npt.NDArray[np.uint16]]) -> int:
                count = sum(map(_frames, items))
                size = count * info.config.d_model * 4
                _check_answer_size(size, call.items, count, limits, "ask for fewer frames a call")
                return count

            async def run(index: int, codes: npt.NDArray[np.uint16]) -> npt.NDArray[Any]:
                return call.count(await self._scheduler.submit(DecodeVqWork(codes), call.deadline))

            answers = await self._items(call, request.ByteSize(), parse, frames, run)
            response = pb.DecodeVqResponse(timings=call.timings())
            for answer in answers:
                if isinstance(answer, RequestError):
                    response.items.add(status=_item_status(answer, call))
                else:
                    rows, width = answer.shape
                    features = pb.Features(frames=rows, d_model=width, data=answer.tobytes())
                    response.items.add(status=pb.ItemStatus(), features=features)
            return response

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> pb.DecodeResponse:
        """Codes to waveforms."""
        async with self._call("Decode", context) as call:
            info, limits = self._ready(request.expected_fingerprint)
            self._check_items(call, len(request.items))
            sample_format = _answer_format(request.format)
            frame_bytes = info.config.samples_per_frame * np.dtype(_SAMPLE_TYPES[sample_format]).itemsize

            def parse(index: int) -> DecodeWork:
                item = request.items[index]
                codes = _check_codes(item.codes, f"items[{index}].codes", info, limits)
                return DecodeWork(codes, item.left_context_frames, sample_format == pb.SAMPLE_FORMAT_INT16)

            def frames(works: Collection[DecodeWork]) -> int:
                answered = sum(max(0, _frames(work.codes) - work.left_context_frames) for work in works)
                _check_answer_size(answered * frame_bytes, call.items, answered, limits, "DecodeLong takes it")
                return sum(_frames(work.codes) for work in works)

            async def run(index: int, work: DecodeWork) -> npt.NDArray[Any]:
                return await self._decode(call, work)

            answers = await self._items(call, request.ByteSize(), parse, frames, run)
            response = pb.DecodeResponse(timings=call.timings())
            for answer in answers:
                if isinstance(answer, RequestError):
                    response.items.add(status=_item_status(answer, call))
                else:
                    audio = pb.Audio(
                        sample_rate=info.config.sampling_rate, channels=1, format=sample_format, pcm=answer.tobytes()
                    )
                    response.items.add(status=pb.ItemStatus(), audio=audio)
            return response

    async def EncodeStream(
        self, request_iterator: AsyncIterator[pb.EncodeStreamRequest], context: Any
    ) -> AsyncIterator[pb.EncodeStreamResponse]:
        """One long waveform to codes, with memory for a segment."""
        async with self._call("EncodeStream", context) as call:
            first = await anext(aiter(request_iterator), None)
            kind = first.WhichOneof("message") if first is not None else None
            if first is None or kind != "open":
                raise invalid("message", kind or "absent", "`open` in the first message")
            options = first.open
            info, limits = self._ready(options.expected_fingerprint, "open.")
            num_quantizers, group_size = _encode_options(options, info, "open.")
            _check_format(options, "open", limits)
            recording = Recording(options.sample_rate, num_quantizers, group_size)
            pieces = _PcmPieces(options, limits)
            call.items = 1
            # A stream holds a piece at a time, whatever its length.
            with self._scheduler.admit(info.config.audio_code_frames(_PIECE_SECONDS * info.config.sampling_rate)):
                async for message in request_iterator:
                    if (kind := message.WhichOneof("message")) != "pcm":
                        raise invalid("message", kind or "absent", "`pcm` in all messages after the first")
                    for pcm in pieces.push(message.pcm):
                        codes = await self._encode_piece(call, recording, pcm, last=False)
                        if codes.shape[1]:
                            yield pb.EncodeStreamResponse(codes=_codes_message(codes))
                pcm = pieces.finish()
                _check_length(pieces.samples, options.sample_rate, "pcm", info)
                codes = await self._encode_piece(call, recording, pcm, last=True)
                yield pb.EncodeStreamResponse(codes=_codes_message(codes), timings=call.timings())

    async def DecodeLong(self, request: pb.DecodeLongRequest, context: Any) -> AsyncIterator[pb.DecodeLongResponse]:
        """One code array to the samples of Decode, in pieces."""
        async with self._call("DecodeLong", context) as call:
            info, limits = self._ready(request.expected_fingerprint)
            sample_format = _answer_format(request.format)
            codes = await _off_loop(request.ByteSize(), _check_codes, request.item.codes, "item.codes", info, limits)
            call.items, call.frames = 1, _frames(codes)
            with self._scheduler.admit(call.frames):
                int16 = sample_format == pb.SAMPLE_FORMAT_INT16
                samples = await self._decode(call, DecodeWork(codes, request.item.left_context_frames, int16))
            step = min(_PIECE_BYTES, limits.max_message_bytes - _CALL_BYTES) // samples.itemsize
            for start in range(0, max(1, len(samples)), step):
                timings = call.timings() if start + step >= len(samples) else None
                yield pb.DecodeLongResponse(pcm=samples[start : start + step].tobytes(), timings=timings)

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:
        """What is loaded, where, and what is allowed."""
        async with self._call("GetInfo", context):
            info, limits = self._ready("")
            model = info.config
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
                ),
                device=pb.DeviceInfo(
                    device=info.device,
                    name=info.device_name,
                    dtype=info.dtype,
                    quantization="none",
                    memory_total=info.memory_total,
                    memory_allocated=self._scheduler.engine.memory_allocated(),
                ),
                limits=pb.Limits(
                    max_message_bytes=limits.max_message_bytes,
                    max_items=MAX_ITEMS,
                    max_channels=MAX_CHANNELS,
                    min_sample_rate=MIN_SAMPLE_RATE,
                    max_sample_rate=MAX_SAMPLE_RATE,
                    min_audio_samples=model.min_samples,
                    max_audio_seconds=limits.max_audio_seconds,
                    max_frames=limits.max_frames,
                    max_group_size=MAX_GROUP_SIZE,
                    max_queued_frames=self._scheduler.max_queued_frames,
                    max_concurrent_calls=limits.max_concurrent_calls,
                ),
                versions=_versions(),
            )

    # ------------------------------------------------------------ a call

    @asynccontextmanager
    async def _call(self, method: str, context: Any) -> AsyncIterator[_Call]:
        """Frame of every method: identity, the limit on calls, errors to a status, one log line."""
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        remaining = context.time_remaining()
        call = _Call(
            method,
            request_id=metadata.get("x-request-id", "")[:128] or uuid.uuid4().hex,
            client=metadata.get("x-client", "-")[:128],
            deadline=None if remaining is None else time.monotonic() + remaining,
        )
        error: RequestError | None = None
        failed: _AllItemsFailed | None = None
        outcome = "OK"
        self._calls += 1
        try:
            if self._calls > self._config.max_concurrent_calls and method != "GetInfo":
                raise RequestError(
                    Reason.QUEUE_FULL,
                    f"{self._calls - 1} calls are in progress; at most {self._config.max_concurrent_calls} are taken",
                    limit=self._config.max_concurrent_calls,
                    retry_after=0.1,
                )
            yield call
        except _AllItemsFailed as all_failed:
            failed = all_failed
            error = failed.first
        except RequestError as request_error:
            error = request_error
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "CANCELLED"
            raise
        except grpc.aio.AbortError:
            raise
        except Exception:
            logger.exception("%s failed, request %s", method, call.request_id)
            error = RequestError(Reason.INTERNAL, f"the server failed on request {call.request_id}; its log says why")
        finally:
            self._calls -= 1
            if error is not None:
                outcome = _STATUS[error.reason].name
            log(
                logging.DEBUG,
                method,
                status=outcome,
                request_id=call.request_id,
                client=call.client,
                items=call.items,
                frames=call.frames,
                queue_seconds=call.queue_seconds,
                compute_seconds=call.compute_seconds,
                total_seconds=time.monotonic() - call.arrived,
                error=str(error) if error else "-",
            )
        if error is not None:
            status = _STATUS[error.reason], str(failed or error), _trailing(error, failed, call)
            # A traceback refers to this frame: without the cycle a refused request is let go of at once.
            error = failed = None
            await context.abort(*status)

    def _ready(self, expected_fingerprint: str, prefix: str = "") -> tuple[EngineInfo, Limits]:
        """The model's facts and the limits.

        Raises:
            RequestError: there is no model yet, or it is not the one that the request expects.
        """
        info = self._scheduler.engine.info
        if expected_fingerprint and expected_fingerprint != info.fingerprint:
            raise RequestError(
                Reason.WRONG_MODEL,
                f"the request expects the model with fingerprint {expected_fingerprint[:64]}; this server runs"
                f" {info.model_id} with {info.fingerprint}",
                field=f"{prefix}expected_fingerprint",
                value=expected_fingerprint[:64],
                allowed=info.fingerprint,
            )
        return info, Limits.of(self._config, info)

    def _check_items(self, call: _Call, count: int) -> None:
        call.items = count
        if count == 0:
            raise invalid("items", "empty", f"1 to {MAX_ITEMS} items")
        if count > MAX_ITEMS:
            raise too_large("items", count, MAX_ITEMS, "items")

    async def _items(
        self,
        call: _Call,
        size: int,
        parse: Callable[[int], T],
        frames: Callable[[Collection[T]], int],
        run: Callable[[int, T], Coroutine[Any, Any, npt.NDArray[Any]]],
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

        parsed = await _off_loop(size, parse_all)
        answers: list[npt.NDArray[Any] | RequestError | None] = [
            item if isinstance(item, RequestError) else None for item in parsed
        ]
        good = {index: item for index, item in enumerate(parsed) if not isinstance(item, RequestError)}
        if good:
            call.frames = frames(good.values())
            with self._scheduler.admit(call.frames):
                outcomes = await _gather([run(index, item) for index, item in good.items()])
            for index, outcome in zip(good, outcomes, strict=True):
                answers[index] = outcome
        complete = [answer for answer in answers if answer is not None]
        for index, answer in enumerate(complete):
            if isinstance(answer, RequestError):
                # The same error object may stand for several items: a queue that closes refuses all of them.
                complete[index] = _for_item(answer, index)
        errors = [answer for answer in complete if isinstance(answer, RequestError)]
        if len(errors) == len(complete):
            raise _AllItemsFailed(errors)
        return complete

    async def _encode_pieces(self, call: _Call, recording: Recording, pcm: npt.NDArray[Any]) -> npt.NDArray[Any]:
        step = _PIECE_SECONDS * recording.sample_rate
        starts = range(0, len(pcm), step)
        codes = [
            await self._encode_piece(call, recording, pcm[start : start + step], last=start == starts[-1])
            for start in starts
        ]
        return np.concatenate(codes, axis=1)

    async def _encode_piece(
        self, call: _Call, recording: Recording, pcm: npt.NDArray[Any], *, last: bool
    ) -> npt.NDArray[Any]:
        return call.count(await self._scheduler.submit(EncodePiece(recording, pcm, last), call.deadline))

    async def _decode(self, call: _Call, work: DecodeWork) -> npt.NDArray[Any]:
        if work.left_context_frames >= _frames(work.codes):
            return np.empty(0, "<i2" if work.int16 else "<f4")
        return call.count(await self._scheduler.submit(work, call.deadline))


class _AllItemsFailed(Exception):
    """No item of a call could be answered, so the call fails."""

    def __init__(self, errors: list[RequestError]) -> None:
        self.errors = errors
        self.first = errors[0]
        super().__init__(
            str(self.first) if len(errors) == 1 else f"none of the {len(errors)} items is answered; first: {self.first}"
        )


class _PcmPieces:
    """The bytes of a stream to arrays (samples, channels) of bounded length and size, checked."""

    def __init__(self, options: pb.EncodeStreamOpen, limits: Limits) -> None:
        self._dtype = np.dtype(_SAMPLE_TYPES[options.format])
        self._channels = options.channels
        self._rate = options.sample_rate
        self._limits = limits
        self._frame_bytes = options.channels * self._dtype.itemsize
        self._piece_bytes = self._frame_bytes * min(
            _PIECE_SECONDS * options.sample_rate, _MAX_PIECE_BYTES // self._frame_bytes
        )
        self._buffer = bytearray()
        self.samples = 0

    def push(self, data: bytes) -> list[npt.NDArray[Any]]:
        self._buffer += data
        _check_duration(self.samples + len(self._buffer) // self._frame_bytes, self._rate, "pcm", self._limits)
        pieces = []
        while len(self._buffer) >= self._piece_bytes:
            pieces.append(self._take(self._piece_bytes))
        return pieces

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
        _check_finite(pcm, "pcm", self.samples)
        self.samples += len(pcm)
        return pcm


# ---------------------------------------------------------------- checks


def _encode_options(
    request: pb.EncodeRequest | pb.EncodeStreamOpen, info: EngineInfo, prefix: str = ""
) -> tuple[int, int]:
    """(num_quantizers, group_size) of an encode request, with the defaults filled in."""
    books = info.config.num_quantizers
    num_quantizers = request.num_quantizers if request.HasField("num_quantizers") else books
    group_size = request.group_size if request.HasField("group_size") else 1
    if not 1 <= num_quantizers <= books:
        raise invalid(f"{prefix}num_quantizers", num_quantizers, f"1..{books}, the model's codebooks")
    if not 1 <= group_size <= MAX_GROUP_SIZE:
        raise invalid(f"{prefix}group_size", group_size, f"1..{MAX_GROUP_SIZE}")
    return num_quantizers, group_size


def _answer_format(requested: int) -> pb.SampleFormat.ValueType:
    if requested == pb.SAMPLE_FORMAT_UNSPECIFIED:
        return pb.SAMPLE_FORMAT_FLOAT32
    if requested not in _SAMPLE_TYPES:
        raise invalid("format", requested, _FORMATS)
    return pb.SampleFormat.ValueType(requested)


def _check_format(audio: pb.Audio | pb.EncodeStreamOpen, name: str, limits: Limits) -> None:
    if audio.format not in _SAMPLE_TYPES:
        raise invalid(f"{name}.format", audio.format, _FORMATS)
    if not MIN_SAMPLE_RATE <= audio.sample_rate <= MAX_SAMPLE_RATE:
        raise invalid(f"{name}.sample_rate", audio.sample_rate, f"{MIN_SAMPLE_RATE}..{MAX_SAMPLE_RATE} Hz")
    if not 1 <= audio.channels <= MAX_CHANNELS:
        raise invalid(f"{name}.channels", audio.channels, f"1..{MAX_CHANNELS}")


def _check_audio(audio: pb.Audio, name: str, info: EngineInfo, limits: Limits) -> npt.NDArray[Any]:
    """The samples of `audio`, (samples, channels); a view.

    Raises:
        RequestError: anything about it is not allowed.
    """
    _check_format(audio, name, limits)
    dtype = np.dtype(_SAMPLE_TYPES[audio.format])
    width = audio.channels * dtype.itemsize
    if not audio.pcm:
        raise invalid(f"{name}.pcm", "empty", f"at least {_min_seconds(info):.3f} seconds of audio")
    if len(audio.pcm) % width:
        raise invalid(
            f"{name}.pcm",
            f"{len(audio.pcm)} bytes",
            f"a multiple of {width} ({audio.channels} channels of {dtype.itemsize} bytes a sample)",
        )
    pcm = np.frombuffer(audio.pcm, dtype).reshape(-1, audio.channels)
    _check_duration(len(pcm), audio.sample_rate, f"{name}.pcm", limits)
    _check_length(len(pcm), audio.sample_rate, f"{name}.pcm", info)
    _check_finite(pcm, f"{name}.pcm", 0)
    return pcm


def _check_duration(samples: int, sample_rate: int, name: str, limits: Limits) -> None:
    if samples > limits.max_audio_seconds * sample_rate:
        raise too_large(name, samples / sample_rate, limits.max_audio_seconds, "seconds")


def _check_length(samples: int, sample_rate: int, name: str, info: EngineInfo) -> None:
    resampled = _resampled(samples, sample_rate, info)
    if resampled < info.config.min_samples:
        raise invalid(
            name,
            f"{samples} samples at {sample_rate} Hz",
            f"at least {info.config.min_samples} samples at {info.config.sampling_rate} Hz"
            f" ({_min_seconds(info):.3f} seconds)",
        )


def _check_finite(pcm: npt.NDArray[Any], name: str, first: int) -> None:
    """Refuse NaN, infinity and absurd amplitudes; `first` is the index of pcm[0] in the recording."""
    # Minimum and maximum carry a NaN through, and need no array of their own.
    if pcm.dtype.kind == "i" or not len(pcm) or max(-pcm.min(), pcm.max()) <= MAX_AMPLITUDE:
        return
    sample, channel = np.argwhere(~(np.abs(pcm) <= MAX_AMPLITUDE))[0]
    raise invalid(
        name,
        f"{pcm[sample, channel]:.9g} at sample {first + sample}, channel {channel}",
        f"finite numbers up to {MAX_AMPLITUDE:g}; full scale is 1",
    )


def _check_codes(codes: pb.Codes, name: str, info: EngineInfo, limits: Limits) -> npt.NDArray[np.uint16]:
    """The codes as (num_quantizers, frames); a view.

    Raises:
        RequestError: anything about them is not allowed.
    """
    sizes = info.config.codebook_sizes
    if not 1 <= codes.num_quantizers <= len(sizes):
        raise invalid(f"{name}.num_quantizers", codes.num_quantizers, f"1..{len(sizes)}, the model's codebooks")
    if codes.frames == 0:
        raise invalid(f"{name}.frames", 0, f"1..{limits.max_frames}")
    if codes.frames > limits.max_frames:
        raise too_large(f"{name}.frames", codes.frames, limits.max_frames, "frames")
    expected = codes.num_quantizers * codes.frames * 2
    if len(codes.data) != expected:
        raise invalid(
            f"{name}.data",
            f"{len(codes.data)} bytes",
            f"{expected} bytes ({codes.num_quantizers} quantizers * {codes.frames} frames * 2 bytes)",
        )
    array = np.frombuffer(codes.data, "<u2").reshape(codes.num_quantizers, codes.frames)
    for row, (values, size) in enumerate(zip(array, sizes, strict=False)):
        if int(values.max()) >= size:
            frame = int(np.argmax(values >= size))
            raise invalid(
                f"{name}.data",
                int(values[frame]),
                f"0..{size - 1}",
                sentence=f"{name}: the code in row {row}, frame {frame} is {values[frame]}; codebook {row} has"
                f" 0..{size - 1}",
                row=row,
                frame=frame,
            )
    return array


def _check_answer_size(size: int, items: int, frames: int, limits: Limits, hint: str) -> None:
    if size + items * _ITEM_BYTES + _CALL_BYTES > limits.max_message_bytes:
        raise RequestError(
            Reason.TOO_LARGE,
            f"the answer to {frames} frames is {size} bytes; a message has at most {limits.max_message_bytes}: {hint}",
            field="items",
            value=str(size),
            limit=limits.max_message_bytes,
        )


# ---------------------------------------------------------------- messages


def _codes_message(codes: npt.NDArray[Any]) -> pb.Codes:
    rows, frames = codes.shape
    return pb.Codes(num_quantizers=rows, frames=frames, data=codes.tobytes())


def _detail(error: RequestError, call: _Call) -> pb.ErrorDetail:
    detail = pb.ErrorDetail(
        reason=pb.ErrorDetail.Reason.Value(f"REASON_{error.reason.name}"),
        field=error.field,
        value=error.value,
        allowed=error.allowed,
        item=error.item,
        limit=error.limit,
        row=error.row,
        frame=error.frame,
        request_id=call.request_id,
    )
    if error.retry_after is not None:
        detail.retry_after.CopyFrom(
            Duration(nanos=int(error.retry_after * 1e9) % 10**9, seconds=int(error.retry_after))
        )
    return detail


def _item_status(error: RequestError, call: _Call) -> pb.ItemStatus:
    return pb.ItemStatus(code=_STATUS[error.reason].value[0], message=str(error), detail=_detail(error, call))


def _trailing(error: RequestError, failed: _AllItemsFailed | None, call: _Call) -> tuple[tuple[str, str | bytes], ...]:
    """Trailing metadata of a failed call."""
    entries: list[tuple[str, str | bytes]] = [
        ("x-request-id", call.request_id),
        ("mimo-error-detail-bin", _detail(error, call).SerializeToString()),
    ]
    size = 0
    for item_error in failed.errors if failed else ():
        status = _item_status(item_error, call).SerializeToString()
        size += len(status) + 64
        if size > _MAX_METADATA_BYTES:
            break
        entries.append(("mimo-item-status-bin", status))
    return tuple(entries)


@functools.cache
def _versions() -> dict[str, str]:
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


# ---------------------------------------------------------------- small things


def _frames(codes: npt.NDArray[np.uint16]) -> int:
    return int(codes.shape[1])


def _resampled(samples: int, sample_rate: int, info: EngineInfo) -> int:
    return -(-samples * info.config.sampling_rate // sample_rate)


def _min_seconds(info: EngineInfo) -> float:
    return info.config.min_samples / info.config.sampling_rate


def _or_error(function: Callable[[], T]) -> T | RequestError:
    try:
        return function()
    except RequestError as error:
        # Its traceback would keep the request.
        return error.with_traceback(None)


def _for_item(error: RequestError, item: int) -> RequestError:
    values = {name: getattr(error, name) for name in error.__dataclass_fields__}
    return RequestError(**values | {"item": item})


async def _off_loop(size: int, function: Callable[..., T], *args: Any) -> T:
    """Call `function`, in a thread if it goes over much data."""
    return await asyncio.to_thread(function, *args) if size > _OFF_LOOP_BYTES else function(*args)


async def _gather(
    coroutines: Sequence[Coroutine[Any, Any, npt.NDArray[Any]]],
) -> list[npt.NDArray[Any] | RequestError]:
    """Run all; a RequestError stands in its place, anything else cancels the rest and is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]

    async def outcome(task: Awaitable[npt.NDArray[Any]]) -> npt.NDArray[Any] | RequestError:
        try:
            return await task
        except RequestError as error:
            return error.with_traceback(None)

    try:
        return await asyncio.gather(*(outcome(task) for task in tasks))
    finally:
        for task in tasks:
            task.cancel()

"""All of the client that does no I/O: each operation as a plan of RPCs, written once for both clients.

A plan is a generator. It yields `Attempt` (send this, give me the answer's messages or the failure) and `Sleep`, and
returns the operation's result. `_sync` and `_aio` only carry plans out.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, ParamSpec, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.wrappers_pb2 import StringValue

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb

from ._arrays import (
    MAX_UINT32,
    ArrayInput,
    Waveform,
    check_channels,
    check_duration,
    codes_from,
    codes_out,
    features_view,
    integer,
    one_per_item,
    samples_out,
    waveform_from,
)
from ._credentials import Authenticator, Credentials
from ._retry import FIRST_BACKOFF, MAX_BACKOFF, Deadline, Retry, checked_seconds
from ._transport import Rpc, client_name, resolve_address
from .errors import (
    AuthenticationFailed,
    CallFailed,
    Cancelled,
    DeadlineExceeded,
    Failure,
    ModelMismatch,
    ServerFault,
    ServiceUnavailable,
    TokenizerError,
    TooLarge,
    error_of_item,
    in_batch,
    named_in_batch,
)
from .info import Limits, ServerInfo

# Default time of a call: a queue's worth, and what a small CPU takes for the audio in it. Without audio through the
# model (decode_vq is a table look-up) it is little more than the transport.
BASE_SECONDS = 30.0
SECONDS_PER_AUDIO_SECOND = 4.0
VQ_SECONDS_PER_AUDIO_SECOND = 0.1
HEALTH_SECONDS = 5.0

STREAM_PIECE_BYTES = 1 << 20

# What a message takes beside the arrays: tags and lengths, timings, and, in the place of an item's payload, a sentence.
CALL_OVERHEAD = 1024
ITEM_REQUEST_OVERHEAD = 64
ITEM_ANSWER_OVERHEAD = 512

# Protobuf's own limit, where a server states none.
MAX_MESSAGE_BYTES = (1 << 31) - 1

# Errors after which the other calls that a batch takes are not worth sending.
_OF_ALL_CALLS = (ServiceUnavailable, AuthenticationFailed, DeadlineExceeded, ModelMismatch, Cancelled)

_SERVING = 1
_HEALTH_STATES = {0: "UNKNOWN", 2: "NOT_SERVING (it is starting or draining, or its device failed)"}

_T = TypeVar("_T")
_P = ParamSpec("_P")
_ItemT = TypeVar("_ItemT")
_OutT = TypeVar("_OutT")
_ItemT_contra = TypeVar("_ItemT_contra", contravariant=True)
_OutT_co = TypeVar("_OutT_co", covariant=True)


# ---------------------------------------------------------------- what a plan is made of


@dataclass(frozen=True)
class Attempt:
    """Step: send one RPC and collect its answer.

    Attributes:
        rpc: Which one.
        request: Makes the request message, or the iterator of them; called for each attempt anew.
        timeout: In seconds.
        metadata: Of the call.
    """

    rpc: Rpc
    request: Callable[[], Any]
    timeout: float
    metadata: tuple[tuple[str, str], ...] = field(repr=False)  # the token is in it


@dataclass(frozen=True)
class Sleep:
    """Step: wait."""

    seconds: float


Reply: TypeAlias = list[Any] | Failure | None
"""What a driver sends back: the answer's messages or the failure after `Attempt`, None after `Sleep`."""

Plan: TypeAlias = Generator[Attempt | Sleep, Reply, _T]


@dataclass
class _Call:
    """One call of the caller's, which may take several RPCs."""

    deadline: Deadline
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)


# ---------------------------------------------------------------- cutting batches


@dataclass(frozen=True)
class Cost:
    """What one item takes: payload bytes of its request and its answer, and frames (the latter two at most)."""

    request_bytes: int
    answer_bytes: int
    frames: int


@dataclass
class Group:
    """Items that travel in one RPC: by their indices, and whether it is the streaming one (then it is one item)."""

    items: list[int]
    streamed: bool = False


def split(costs: Iterable[tuple[int, Cost]], limits: Limits) -> list[Group]:
    """Cut a batch into calls that keep to the server's limits, both ways, without changing the order.

    An item that is too large for a message goes alone, as a stream. One that is over a limit whatever is done (too many
    frames) goes alone too, so that the server's refusal is about it and nothing else.
    """
    room = _room(limits)
    most_items = limits.max_items or MAX_UINT32
    most_frames = limits.max_queued_frames or MAX_MESSAGE_BYTES
    groups: list[Group] = []
    sent = answered = frames = 0
    for index, cost in costs:
        request_bytes = cost.request_bytes + ITEM_REQUEST_OVERHEAD
        answer_bytes = cost.answer_bytes + ITEM_ANSWER_OVERHEAD
        if request_bytes > room or answer_bytes > room:
            groups.append(Group([index], streamed=True))
            continue
        sent, answered, frames = sent + request_bytes, answered + answer_bytes, frames + cost.frames
        fits = sent <= room and answered <= room and frames <= most_frames
        if groups and not groups[-1].streamed and fits and len(groups[-1].items) < most_items:
            groups[-1].items.append(index)
        else:
            groups.append(Group([index]))
            sent, answered, frames = request_bytes, answer_bytes, cost.frames
    return groups


def _room(limits: Limits) -> int:
    """Bytes of a message for its items."""
    return min(limits.max_message_bytes or MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES) - CALL_OVERHEAD


# ---------------------------------------------------------------- the two operations on batches


class _Operation(Protocol[_ItemT_contra, _OutT_co]):
    """How items of one kind become messages, and messages results."""

    rpc: ClassVar[Rpc]
    stream_rpc: ClassVar[Rpc]

    def check(self, item: _ItemT_contra, info: ServerInfo) -> None:
        """Refuse an item that the server's limits tell to be a mistake."""

    def seconds(self, item: _ItemT_contra, info: ServerInfo | None) -> float:
        """Duration of an item's audio; 0 if only the server's info, which is still to be asked for, tells it."""

    def cost(self, item: _ItemT_contra, info: ServerInfo) -> Cost:
        """What the item takes."""

    def request(self, items: Sequence[_ItemT_contra], fingerprint: str) -> Any:
        """Make the unary request."""

    def result(self, item: Any) -> _OutT_co:
        """Read the payload of an item of the unary answer."""

    def stream_request(self, item: _ItemT_contra, fingerprint: str, limits: Limits) -> Any:
        """Make the streaming RPC's request, or the iterator of them."""

    def stream_result(self, messages: list[Any]) -> _OutT_co:
        """Read the streaming RPC's answer."""


@dataclass(frozen=True)
class _Encode:
    num_quantizers: int | None
    group_size: int | None
    rpc: ClassVar[Rpc] = Rpc.ENCODE
    stream_rpc: ClassVar[Rpc] = Rpc.ENCODE_STREAM

    def check(self, item: Waveform, info: ServerInfo) -> None:
        check_channels(item, info.limits.max_channels or MAX_UINT32)
        check_duration(item, info.limits.max_audio_seconds)

    def seconds(self, item: Waveform, info: ServerInfo | None) -> float:
        return item.seconds

    def cost(self, item: Waveform, info: ServerInfo) -> Cost:
        model = info.model
        samples = -(-len(item.samples) * model.sample_rate // item.sample_rate)
        # A segment of N samples has N // samples_per_frame + 1 frames.
        frames = samples // max(1, model.samples_per_frame) + samples // max(1, model.segment_samples) + 1
        group = self.group_size or 1
        frames += -frames % group
        rows = self.num_quantizers or len(model.codebook_sizes)
        return Cost(item.samples.nbytes, 2 * rows * frames, frames)

    def request(self, items: Sequence[Waveform], fingerprint: str) -> pb.EncodeRequest:
        return pb.EncodeRequest(
            items=[
                pb.Audio(sample_rate=w.sample_rate, channels=w.channels, format=w.format, pcm=w.samples.tobytes())
                for w in items
            ],
            num_quantizers=self.num_quantizers,
            group_size=self.group_size,
            expected_fingerprint=fingerprint,
        )

    def result(self, item: Any) -> npt.NDArray[np.uint16]:
        return codes_out([item.codes])

    def stream_request(self, item: Waveform, fingerprint: str, limits: Limits) -> Iterator[pb.EncodeStreamRequest]:
        yield pb.EncodeStreamRequest(
            open=pb.EncodeStreamOpen(
                sample_rate=item.sample_rate,
                channels=item.channels,
                format=item.format,
                num_quantizers=self.num_quantizers,
                group_size=self.group_size,
                expected_fingerprint=fingerprint,
            )
        )
        for piece in item.pieces(min(STREAM_PIECE_BYTES, _room(limits))):
            yield pb.EncodeStreamRequest(pcm=piece)

    def stream_result(self, messages: list[Any]) -> npt.NDArray[np.uint16]:
        return codes_out(message.codes for message in messages)


@dataclass(frozen=True)
class _CodeItem:
    codes: npt.NDArray[np.uint16]
    left_context_frames: int

    @classmethod
    def checked(cls, codes: ArrayInput, left_context_frames: Any) -> _CodeItem:
        return cls(codes_from(codes), integer(left_context_frames, "left_context_frames", least=0))

    @property
    def frames(self) -> int:
        return int(self.codes.shape[1])

    def message(self) -> pb.DecodeItem:
        return pb.DecodeItem(codes=_codes_message(self.codes), left_context_frames=self.left_context_frames)


@dataclass(frozen=True)
class _Decode:
    rpc: ClassVar[Rpc] = Rpc.DECODE
    stream_rpc: ClassVar[Rpc] = Rpc.DECODE_LONG

    def check(self, item: _CodeItem, info: ServerInfo) -> None:
        """The server knows the codebooks; nothing is left to refuse here."""

    def seconds(self, item: _CodeItem, info: ServerInfo | None) -> float:
        return 0.0 if info is None else _seconds_of_frames(item.frames, info)

    def cost(self, item: _CodeItem, info: ServerInfo) -> Cost:
        answered = max(0, item.frames - item.left_context_frames) * info.model.samples_per_frame
        return Cost(item.codes.nbytes, 4 * answered, item.frames)

    def request(self, items: Sequence[_CodeItem], fingerprint: str) -> pb.DecodeRequest:
        return pb.DecodeRequest(
            items=[item.message() for item in items],
            format=pb.SAMPLE_FORMAT_FLOAT32,
            expected_fingerprint=fingerprint,
        )

    def result(self, item: Any) -> npt.NDArray[np.float32]:
        if item.audio.format != pb.SAMPLE_FORMAT_FLOAT32:
            raise ServerFault("the server answered in another sample format than float32")
        return samples_out([item.audio.pcm])

    def stream_request(self, item: _CodeItem, fingerprint: str, limits: Limits) -> pb.DecodeLongRequest:
        return pb.DecodeLongRequest(
            item=item.message(), format=pb.SAMPLE_FORMAT_FLOAT32, expected_fingerprint=fingerprint
        )

    def stream_result(self, messages: list[Any]) -> npt.NDArray[np.float32]:
        return samples_out(message.pcm for message in messages)


def _codes_message(codes: npt.NDArray[np.uint16]) -> pb.Codes:
    return pb.Codes(num_quantizers=codes.shape[0], frames=codes.shape[1], data=codes.tobytes())


def _default_seconds(audio: Iterable[float]) -> float:
    return BASE_SECONDS + SECONDS_PER_AUDIO_SECOND * sum(audio)


def _seconds_of_frames(frames: int, info: ServerInfo) -> float:
    return frames * info.model.samples_per_frame / max(1, info.model.sample_rate)


# ---------------------------------------------------------------- the plans


class Core:
    """The state of a client, which any number of plans may share at a time, and its operations as plans."""

    def __init__(
        self,
        address: str | None,
        timeout: float | None,
        fingerprint: str | None,
        name: str | None,
        unavailable_timeout: float | None,
        credentials: Credentials | None,
    ) -> None:
        """Check and keep the settings; see `TokenizerClient` for their meaning.

        Raises:
            InvalidInput: One of them makes no sense.
        """
        self.address = resolve_address(address)
        self.authenticator = Authenticator(self.address, credentials)
        self.unavailable_timeout = checked_seconds(unavailable_timeout, "unavailable_timeout")
        self._timeout = checked_seconds(timeout, "timeout")
        self._fingerprint = fingerprint or ""
        self._name = client_name(name)
        # Of the last answer of GetInfo, until something tells that the server may be another one.
        self._info: ServerInfo | None = None

    def encode(
        self,
        waveforms: Iterable[ArrayInput],
        sample_rate: Any,
        num_quantizers: int | None,
        group_size: int | None,
        timeout: float | None,
        return_errors: bool,
    ) -> Plan[list[Any]]:
        """Plan Encode, or EncodeStream for what is too large for it."""
        call = self._begin(timeout)
        waveforms = list(waveforms)
        rates = one_per_item(sample_rate, len(waveforms), "sample_rate")
        operation = _Encode(
            None if num_quantizers is None else integer(num_quantizers, "num_quantizers", least=1),
            None if group_size is None else integer(group_size, "group_size", least=1),
        )
        items = [_outcome(waveform_from, w, r) for w, r in zip(waveforms, rates, strict=True)]
        return (yield from self._batch(operation, items, call, return_errors))

    def decode(
        self,
        codes: Iterable[ArrayInput],
        left_context_frames: Any,
        timeout: float | None,
        return_errors: bool,
    ) -> Plan[list[Any]]:
        """Plan Decode, or DecodeLong for what is too large for it."""
        call = self._begin(timeout)
        codes = list(codes)
        contexts = one_per_item(left_context_frames, len(codes), "left_context_frames")
        items = [_outcome(_CodeItem.checked, c, n) for c, n in zip(codes, contexts, strict=True)]
        return (yield from self._batch(_Decode(), items, call, return_errors))

    def decode_vq(self, codes: ArrayInput, timeout: float | None) -> Plan[npt.NDArray[np.float32]]:
        """Plan DecodeVq, cut by frames: each frame's output depends on that frame alone."""
        call = self._begin(timeout)
        array = codes_from(codes)
        rows, frames = array.shape
        try:
            info = self._info or (yield from self._ask_info(call))
            step = _frames_per_call(rows, info)
            fingerprint = self._fingerprint
            if frames > step and not fingerprint:
                info = yield from self._ask_info(call)
                step, fingerprint = _frames_per_call(rows, info), info.model.fingerprint
            call.deadline.grow(BASE_SECONDS + VQ_SECONDS_PER_AUDIO_SECOND * _seconds_of_frames(frames, info))
            features = np.empty((frames, info.model.d_model), np.float32)
            for start in range(0, frames, step):
                part = array[:, start : start + step]
                request = pb.DecodeVqRequest(items=[_codes_message(part)], expected_fingerprint=fingerprint)
                try:
                    (item,) = yield from self._call_items(call, Rpc.DECODE_VQ, request, 1)
                except CallFailed as failed:
                    raise _in_frames(failed.failure.of_items([0])[0], start) from None
                if item.status.code:
                    raise _in_frames(error_of_item(item.status), start)
                view = features_view(item.features)
                if view.shape != (part.shape[1], features.shape[1]):
                    raise ServerFault(
                        f"the server answered with shape {view.shape} for {part.shape[1]} frames of {features.shape[1]}"
                    )
                features[start : start + step] = view
        except CallFailed as failed:
            raise failed.failure.error from None
        return features

    def info(self, timeout: float | None) -> Plan[ServerInfo]:
        """Plan GetInfo."""
        try:
            return (yield from self._ask_info(self._begin(timeout)))
        except CallFailed as failed:
            raise failed.failure.error from None

    def health(self, timeout: float | None) -> Plan[bool]:
        """Plan one health check; whatever goes wrong is an answer, too, but want of trust: that stays."""
        call = self._begin(min(self._timeout or HEALTH_SECONDS, HEALTH_SECONDS) if timeout is None else timeout)
        reply = yield from self._attempt(call, Rpc.HEALTH, StringValue, call.deadline.seconds)
        if isinstance(reply, Failure) and isinstance(reply.error, AuthenticationFailed):
            raise reply.error
        return isinstance(reply, list) and reply[0].value == _SERVING

    def wait_until_ready(self, timeout: float) -> Plan[None]:
        """Plan health checks until one says SERVING."""
        call = self._begin(timeout)
        pause = FIRST_BACKOFF
        while True:
            # At least a moment, so that even the shortest wait finds a server that is there.
            left = min(max(call.deadline.remaining(), 0.1), HEALTH_SECONDS)
            reply = yield from self._attempt(call, Rpc.HEALTH, StringValue, left)
            if isinstance(reply, list):
                if reply[0].value == _SERVING:
                    return
                state = f"its health is {_HEALTH_STATES.get(reply[0].value, reply[0].value)}"
            elif isinstance(reply.error, AuthenticationFailed):
                raise reply.error
            else:
                silent = isinstance(reply.error, DeadlineExceeded)
                state = "it does not answer" if silent else reply.error.message
            left = call.deadline.remaining()
            if left <= 0:
                raise ServiceUnavailable(
                    f"the tokenizer service at {self.address} is not ready after {call.deadline.seconds:.3g} s: {state}"
                )
            yield Sleep(min(pause, left))
            pause = min(2 * pause, MAX_BACKOFF)

    # ------------------------------------------------------------ batches

    def _batch(
        self,
        operation: _Operation[_ItemT, _OutT],
        items: Sequence[_ItemT | TokenizerError],
        call: _Call,
        return_errors: bool,
    ) -> Plan[list[_OutT | TokenizerError]]:
        """Answer all items in their order; raise the first one's error unless `return_errors`."""
        results: dict[int, _OutT | TokenizerError] = {}
        batch = _Batch(operation, results, return_errors)
        sound: dict[int, _ItemT] = {}
        for index, item in enumerate(items):
            if isinstance(item, TokenizerError):
                batch.put(index, named_in_batch(item, index, len(items)))
            else:
                sound[index] = item
        if sound:
            try:
                yield from self._answer(batch, sound, call)
            except CallFailed as failed:
                # No server, no time, another model: what has not been answered so far will not be.
                for index in sound:
                    if index not in results:
                        batch.put(index, in_batch(failed.failure.error, index, index))
        return [results[index] for index in range(len(items))]

    def _answer(self, batch: _Batch[_ItemT, _OutT], items: dict[int, _ItemT], call: _Call) -> Plan[None]:
        """Send the items in as few RPCs as fit, and put down what comes back."""
        operation = batch.operation
        call.deadline.grow(_default_seconds(operation.seconds(item, None) for item in items.values()))
        cached = self._info
        info = cached or (yield from self._ask_info(call))
        longest = max(operation.seconds(item, info) for item in items.values())
        if cached is not None and longest > info.limits.max_audio_seconds > 0:
            # Refused here, or in the middle of a stream: it should be by the limit of now.
            info = yield from self._ask_info(call)
        groups = batch.groups(items, info)
        fingerprint = self._fingerprint
        if len(groups) > 1 and not fingerprint:
            # Pinned to one model, so that a restart with another one in between cannot mix the two. What was known of
            # the server may be out of date, which is no reason to fail.
            if cached is not None:
                info = yield from self._ask_info(call)
                groups = batch.groups(items, info)
            fingerprint = info.model.fingerprint
        call.deadline.grow(_default_seconds(operation.seconds(item, info) for item in items.values()))
        for group in groups:
            try:
                if group.streamed:
                    yield from self._answer_stream(batch, group.items[0], items, info, fingerprint, call)
                else:
                    yield from self._answer_unary(batch, group.items, items, fingerprint, call)
            except CallFailed as failed:
                error = failed.failure.error
                if isinstance(error, _OF_ALL_CALLS):
                    raise
                for index, own in zip(group.items, failed.failure.of_items(group.items), strict=True):
                    batch.put(index, own)

    def _answer_unary(
        self,
        batch: _Batch[_ItemT, _OutT],
        indices: list[int],
        items: dict[int, _ItemT],
        fingerprint: str,
        call: _Call,
    ) -> Plan[None]:
        request = batch.operation.request([items[i] for i in indices], fingerprint)
        answers = yield from self._call_items(call, batch.operation.rpc, request, len(indices))
        for sent_as, (index, answer) in enumerate(zip(indices, answers, strict=True)):
            if answer.status.code:
                batch.put(index, in_batch(error_of_item(answer.status), sent_as, index))
            else:
                batch.put(index, _outcome(batch.operation.result, answer))

    def _answer_stream(
        self,
        batch: _Batch[_ItemT, _OutT],
        index: int,
        items: dict[int, _ItemT],
        info: ServerInfo,
        fingerprint: str,
        call: _Call,
    ) -> Plan[None]:
        messages = yield from self._rpc(
            call,
            batch.operation.stream_rpc,
            lambda: batch.operation.stream_request(items[index], fingerprint, info.limits),
        )
        batch.put(index, _outcome(batch.operation.stream_result, messages))

    # ------------------------------------------------------------ single RPCs

    def _begin(self, timeout: float | None) -> _Call:
        named = checked_seconds(timeout, "timeout") or self._timeout
        return _Call(Deadline(named or BASE_SECONDS, fixed=named is not None))

    def _ask_info(self, call: _Call) -> Plan[ServerInfo]:
        (message,) = yield from self._rpc(call, Rpc.GET_INFO, pb.GetInfoRequest)
        self._info = ServerInfo.from_message(message)
        return self._info

    def _call_items(self, call: _Call, rpc: Rpc, request: Any, count: int) -> Plan[Sequence[Any]]:
        (answer,) = yield from self._rpc(call, rpc, lambda: request)
        if len(answer.items) != count:
            raise CallFailed(
                Failure(ServerFault(f"the server answered with {len(answer.items)} items where {count} were sent"))
            )
        items: Sequence[Any] = answer.items
        return items

    def _rpc(self, call: _Call, rpc: Rpc, request: Callable[[], Any]) -> Plan[list[Any]]:
        """Send one RPC, again and again where that makes sense, and return the answer's messages.

        Raises:
            CallFailed: For good.
        """
        retry = Retry(self.address, call.deadline, self.unavailable_timeout)
        while True:
            left = call.deadline.remaining()
            if left <= 0:
                raise CallFailed(retry.out_of_time())
            reply = yield from self._attempt(call, rpc, request, left)
            if isinstance(reply, list):
                return reply
            if isinstance(reply.error, (ServiceUnavailable, Cancelled, ModelMismatch, TooLarge)):
                self._info = None
            next_step = retry.wait_after(reply)
            if isinstance(next_step, Failure):
                raise CallFailed(next_step)
            yield Sleep(next_step)

    def _attempt(self, call: _Call, rpc: Rpc, request: Callable[[], Any], timeout: float) -> Plan[list[Any] | Failure]:
        """Send one RPC once, and return the answer's messages or the failure."""
        metadata = (("x-request-id", call.request_id), ("x-client", self._name), *self.authenticator.metadata())
        reply = yield Attempt(rpc, request, timeout, metadata)
        assert reply is not None
        return self.authenticator.explained(reply) if isinstance(reply, Failure) else reply


@dataclass
class _Batch(Generic[_ItemT, _OutT]):
    """Where the results of a batch are put down."""

    operation: _Operation[_ItemT, _OutT]
    results: dict[int, _OutT | TokenizerError]
    return_errors: bool

    def put(self, index: int, result: _OutT | TokenizerError) -> None:
        """Put down an item's result; its error is raised where the caller wants that."""
        if isinstance(result, TokenizerError) and not self.return_errors:
            raise result from None
        self.results[index] = result

    def groups(self, items: dict[int, _ItemT], info: ServerInfo) -> list[Group]:
        """Put down the errors of the items that `info` tells to be mistakes, and cut the others into calls."""
        costs = []
        for index, item in items.items():
            try:
                self.operation.check(item, info)
            except TokenizerError as error:
                self.put(index, named_in_batch(error, index, len(items)))
            else:
                costs.append((index, self.operation.cost(item, info)))
        return split(costs, info.limits)


def _outcome(make: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | TokenizerError:
    try:
        return make(*args, **kwargs)
    except TokenizerError as error:
        return error


def _frames_per_call(rows: int, info: ServerInfo) -> int:
    room = _room(info.limits) - ITEM_ANSWER_OVERHEAD
    fits = room // max(4 * info.model.d_model, 2 * rows)
    limits = (fits, info.limits.max_frames or fits, info.limits.max_queued_frames or fits)
    return max(1, min(limits))


def _in_frames(error: TokenizerError, start: int) -> TokenizerError:
    """Count the frame that an error names from the start of the caller's array, of which `start` frames came before."""
    detail = error.detail
    if not start or detail is None or detail.frame is None:
        return error
    frame = detail.frame + start
    message = f"frame {frame}: {error.message} (counted from frame {start})"
    return type(error)(message, code=error.code, detail=replace(detail, frame=frame))

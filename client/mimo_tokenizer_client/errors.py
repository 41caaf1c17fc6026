"""The one tree of exceptions that the clients raise, and how a failed call or item becomes one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import grpc
from google.protobuf.message import DecodeError

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb

# Keys of the trailing metadata in which a failed call says more than its status can.
DETAIL_KEY = "mimo-error-detail-bin"
ITEM_STATUS_KEY = "mimo-item-status-bin"

_CODES = {code.value[0]: code for code in grpc.StatusCode}

_ErrorT = TypeVar("_ErrorT", bound="TokenizerError")


@dataclass(frozen=True)
class ErrorDetail:
    """What a program needs to know of an error; text fields are empty and numbers None where they do not apply.

    Attributes:
        reason: `INVALID_VALUE`, `TOO_LARGE`, `QUEUE_FULL`, `WRONG_MODEL`, `NOT_READY`, `DEVICE_FAILURE`,
            `OUT_OF_MEMORY`, `DEADLINE`, `UNAUTHENTICATED`, `INTERNAL` or `UNSPECIFIED`; a number as text if the server
            is newer.
        item: Index of the item in the caller's batch.
        field: Path of the field in the request, or the name of the argument.
        value: The offending value.
        allowed: The allowed values.
        limit: The limit that was exceeded, in the unit of the field.
        retry_after: Seconds after which another attempt makes sense.
        row: Row (quantizer) of the offending code.
        frame: Frame (column) of the offending code.
        request_id: The request's id in the server's log.
    """

    reason: str = "UNSPECIFIED"
    item: int | None = None
    field: str = ""
    value: str = ""
    allowed: str = ""
    limit: float | None = None
    retry_after: float | None = None
    row: int | None = None
    frame: int | None = None
    request_id: str = ""


class TokenizerError(Exception):
    """Root of all errors of this library.

    Attributes:
        message: One sentence for people, the same as `str(error)`.
        code: The gRPC status.
        detail: The machine-readable part, if there is one.
    """

    default_code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    # Only `message` is positional: exceptions are pickled as cls(*args) plus their attributes, and engines pass them
    # between processes.
    def __init__(self, message: str, *, code: grpc.StatusCode | None = None, detail: ErrorDetail | None = None) -> None:
        """Make an error of `message`, with the class's own status unless `code` names another."""
        super().__init__(message)
        self.message = message
        self.code = self.default_code if code is None else code
        self.detail = detail

    def __str__(self) -> str:
        """Return the sentence."""
        return self.message


class InvalidInput(TokenizerError, ValueError):
    """The input is wrong, found by the client or the server; the same call fails again."""

    default_code = grpc.StatusCode.INVALID_ARGUMENT


class ModelMismatch(TokenizerError):
    """The server has another model than the expected fingerprint names."""

    default_code = grpc.StatusCode.FAILED_PRECONDITION


class TooLarge(TokenizerError):
    """The input is over a stated limit of the server; the same call fails again."""

    default_code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Overloaded(TokenizerError):
    """The server stayed as busy as it may be; the same call may succeed later, after `detail.retry_after` if given."""

    default_code = grpc.StatusCode.RESOURCE_EXHAUSTED


class ServiceUnavailable(TokenizerError):
    """No server answers, or it is starting or draining, or its device failed."""

    default_code = grpc.StatusCode.UNAVAILABLE


class AuthenticationFailed(TokenizerError):
    """The server does not take our token or certificate, or its own is not trusted; the same call fails again."""

    default_code = grpc.StatusCode.UNAUTHENTICATED


class DeadlineExceeded(TokenizerError, TimeoutError):
    """The call was not done in its time."""

    default_code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(TokenizerError):
    """The call was ended before it was done, or the client is closed."""

    default_code = grpc.StatusCode.CANCELLED


class ServerFault(TokenizerError):
    """A fault of the server's own, or an answer that does not keep to the contract."""

    default_code = grpc.StatusCode.INTERNAL


_CLASSES: dict[grpc.StatusCode, type[TokenizerError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidInput,
    grpc.StatusCode.OUT_OF_RANGE: InvalidInput,
    grpc.StatusCode.FAILED_PRECONDITION: ModelMismatch,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationFailed,
    grpc.StatusCode.UNAVAILABLE: ServiceUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.INTERNAL: ServerFault,
    grpc.StatusCode.UNKNOWN: ServerFault,
    grpc.StatusCode.DATA_LOSS: ServerFault,
}


def error_for(code: grpc.StatusCode, message: str, detail: ErrorDetail | None) -> TokenizerError:
    """Return the exception that stands for a status."""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        # The status alone does not tell "never" from "later"; without a word of a later try it is "never".
        later = detail is not None and (detail.reason == "QUEUE_FULL" or detail.retry_after is not None)
        return (Overloaded if later else TooLarge)(message, detail=detail)
    return _CLASSES.get(code, TokenizerError)(message or code.name, code=code, detail=detail)


def error_of_item(status: pb.ItemStatus) -> TokenizerError:
    """Return the exception of an item whose status is not OK."""
    detail = _plain_detail(status.detail) if status.HasField("detail") else None
    return error_for(_CODES.get(status.code, grpc.StatusCode.UNKNOWN), status.message, detail)


def in_batch(error: _ErrorT, sent_as: int, item: int) -> _ErrorT:
    """Return a copy of an item's error that names the item by its index in the caller's batch.

    Args:
        error: The error, as the call that the item was part of gave it.
        sent_as: The item's index in that call.
        item: The item's index in the batch.
    """
    detail = None if error.detail is None else replace(error.detail, item=item)
    # The server's sentence counts from the start of its call.
    message = error.message if sent_as == item else f"item {item} of the batch: {error.message}"
    return type(error)(message, code=error.code, detail=detail)


def named_in_batch(error: _ErrorT, item: int, items: int) -> _ErrorT:
    """Return a copy of an error that the client found in an item, which names the item if there are several."""
    return in_batch(error, -1 if items > 1 else item, item)


# What grpc.aio itself says of a call that it cannot go on with, as when the server dies while a message is written;
# no server says so.
_BROKEN_CALL = "Internal error from Core"

# What gRPC itself says in a server that has as many calls as it takes (maximum_concurrent_rpcs).
_TOO_MANY_CALLS = "Concurrent RPC limit exceeded!"


@dataclass(frozen=True)
class Failure:
    """How one attempt of a call failed, the same for both flavours of gRPC."""

    error: TokenizerError
    item_errors: tuple[TokenizerError | None, ...] = ()

    @classmethod
    def from_rpc_error(cls, error: Any) -> Failure:
        """Read an RpcError (which has the methods of a call in practice, though not in its type)."""
        return cls.from_status(error.code(), error.details(), error.trailing_metadata())

    @classmethod
    def from_status(cls, code: grpc.StatusCode, message: str | None, trailers: Iterable[Any] | None) -> Failure:
        """Read the status and the trailing metadata of a failed call."""
        detail: ErrorDetail | None = None
        items: list[TokenizerError | None] = []
        for key, value in trailers or ():
            # What a proxy may have mangled is no reason to hide the error itself.
            try:
                if key == DETAIL_KEY:
                    detail = _plain_detail(pb.ErrorDetail.FromString(value))
                elif key == ITEM_STATUS_KEY:
                    status = pb.ItemStatus.FromString(value)
                    items.append(error_of_item(status) if status.code else None)
            except DecodeError:
                continue
        if code is grpc.StatusCode.INTERNAL and message == _BROKEN_CALL and detail is None:
            return cls(ServiceUnavailable("the connection broke during the call", code=grpc.StatusCode.UNAVAILABLE))
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and message == _TOO_MANY_CALLS and detail is None:
            return cls(Overloaded("the server has as many calls at a time as it takes"))
        return cls(error_for(code, message or "", detail), tuple(items))

    def of_items(self, items: Sequence[int]) -> list[TokenizerError]:
        """Return an error for each item of the call: its own, or the call's where it has none.

        Args:
            items: Indices of the call's items in the caller's batch.
        """
        errors = []
        for sent_as, item in enumerate(items):
            own = self.item_errors[sent_as] if sent_as < len(self.item_errors) else None
            if own is None and len(items) > 1:
                errors.append(in_batch(self.error, item, item))
            else:
                errors.append(in_batch(own or self.error, sent_as, item))
        return errors


class CallFailed(Exception):
    """Carries the failure of a call, retries included, out of it; never reaches the caller of the library."""

    def __init__(self, failure: Failure) -> None:
        """Wrap `failure`."""
        super().__init__(failure.error.message)
        self.failure = failure


def _plain_detail(message: pb.ErrorDetail) -> ErrorDetail:
    def optional(name: str) -> Any:
        return getattr(message, name) if message.HasField(name) else None  # type: ignore[arg-type]

    try:
        reason = pb.ErrorDetail.Reason.Name(message.reason).removeprefix("REASON_")
    except ValueError:
        reason = str(message.reason)
    wait = message.retry_after
    return ErrorDetail(
        reason=reason,
        item=optional("item"),
        field=message.field,
        value=message.value,
        allowed=message.allowed,
        limit=optional("limit"),
        retry_after=wait.seconds + wait.nanos / 1e9 if message.HasField("retry_after") else None,
        row=optional("row"),
        frame=optional("frame"),
        request_id=message.request_id,
    )

"""The tree of exceptions."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import grpc
import pytest

import mimo_tokenizer_client as library
from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_tokenizer_client import ErrorDetail, TokenizerError
from mimo_tokenizer_client.errors import Failure

# Of the fixtures that make something.
Factory = Callable[..., Any]

CLASSES = [
    library.InvalidInput,
    library.ModelMismatch,
    library.TooLarge,
    library.Overloaded,
    library.ServiceUnavailable,
    library.DeadlineExceeded,
    library.Cancelled,
    library.ServerFault,
]
CODES = [[[1, 2, 3]]] * 2


@pytest.mark.parametrize("kind", [TokenizerError, *CLASSES])
def test_an_error_survives_a_process_boundary(kind: Any) -> None:
    error = kind("a sentence", code=grpc.StatusCode.DATA_LOSS, detail=ErrorDetail(item=3, retry_after=0.5))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == copy.message == "a sentence"
    assert copy.code is grpc.StatusCode.DATA_LOSS
    assert copy.detail == ErrorDetail(item=3, retry_after=0.5)


@pytest.mark.parametrize("kind", CLASSES)
def test_one_tree(kind: Any) -> None:
    error = kind("a sentence")
    assert isinstance(error, TokenizerError)
    assert error.code is kind.default_code
    assert error.detail is None


def test_builtin_bases() -> None:
    assert issubclass(library.InvalidInput, ValueError)
    assert issubclass(library.DeadlineExceeded, TimeoutError)


def test_every_part_of_a_detail(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    server = serve()
    detail = {
        "reason": pb.ErrorDetail.REASON_INVALID_VALUE,
        "item": 0,
        "field": "items[0].codes.data",
        "value": "1024",
        "allowed": "0..1023",
        "limit": 2.5,
        "retry_after": {"seconds": 1, "nanos": 500_000_000},
        "row": 0,
        "frame": 7,
        "request_id": "abc",
    }
    server.script("Decode", lambda context: fake.fail(context, grpc.StatusCode.INVALID_ARGUMENT, "bad", **detail))
    with pytest.raises(library.InvalidInput) as error:
        connect(server.address).decode([[1]])
    assert error.value.detail == ErrorDetail(**{**detail, "reason": "INVALID_VALUE", "retry_after": 1.5})


def test_a_detail_of_a_newer_server(serve: Factory, connect: Factory, fake: ModuleType) -> None:
    server = serve()
    server.script("Decode", lambda context: fake.fail(context, grpc.StatusCode.INTERNAL, "bad", reason=77))
    with pytest.raises(library.ServerFault) as error:
        connect(server.address).decode([[1]])
    assert error.value.detail == ErrorDetail(reason="77", item=0)


def test_a_mangled_detail_does_not_hide_the_error(serve: Factory, connect: Factory) -> None:
    server = serve()

    def mangled(context: Any) -> Any:
        context.set_trailing_metadata((("mimo-error-detail-bin", b"\xff"), ("mimo-item-status-bin", b"\xff")))
        context.abort(grpc.StatusCode.INTERNAL, "a fault")

    server.script("Decode", mangled)
    with pytest.raises(library.ServerFault, match=r"^a fault$") as error:
        connect(server.address).decode([[1]])
    assert error.value.detail is None


def test_an_exception_in_the_server_is_a_fault(serve: Factory, connect: Factory) -> None:
    server = serve()
    server.script("Decode", lambda context: 1 / 0)
    with pytest.raises(library.ServerFault, match="division by zero") as error:
        connect(server.address).decode([[1]])
    assert error.value.code is grpc.StatusCode.UNKNOWN


def test_nothing_of_grpc_is_in_the_way(serve: Factory, connect: Factory) -> None:
    """Errors carry no chain of exceptions of the transport."""
    server = serve()
    server.script("Decode", lambda context: context.abort(grpc.StatusCode.INTERNAL, "a fault"))
    with pytest.raises(library.ServerFault) as error:
        connect(server.address).decode([[1]])
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__ or error.value.__context__ is None


def test_a_call_that_grpc_gave_up_is_a_broken_connection() -> None:
    """A server that dies while a request is written leaves grpc.aio without a status: not a fault of the server's."""
    broken = Failure.from_status(grpc.StatusCode.INTERNAL, "Internal error from Core", ()).error
    assert isinstance(broken, library.ServiceUnavailable)
    detail = pb.ErrorDetail(reason=pb.ErrorDetail.REASON_INTERNAL).SerializeToString()
    for message, trailers in (("another", ()), ("Internal error from Core", [("mimo-error-detail-bin", detail)])):
        fault = Failure.from_status(grpc.StatusCode.INTERNAL, message, trailers).error
        assert isinstance(fault, library.ServerFault)


def test_too_many_calls_are_no_word_on_the_size_of_one() -> None:
    """What the service itself says of a call counts, whatever its sentence."""
    busy = "Concurrent RPC limit exceeded!"
    detail = pb.ErrorDetail(reason=pb.ErrorDetail.REASON_TOO_LARGE).SerializeToString()
    for message, trailers, kind in (
        (busy, (), library.Overloaded),
        ("another", (), library.TooLarge),
        (busy, [("mimo-error-detail-bin", detail)], library.TooLarge),
    ):
        assert type(Failure.from_status(grpc.StatusCode.RESOURCE_EXHAUSTED, message, trailers).error) is kind

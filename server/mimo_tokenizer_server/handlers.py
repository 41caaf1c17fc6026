"""The servicer's methods as gRPC calls them: from bytes on, so that whatever arrives is checked in one place.

gRPC's own parsing answers UNKNOWN to what is no message, and has built a million empty items before anybody counts
them. Here a request is parsed off the event loop, after a look at its size, and its faults get a proper status; and
what is large is serialized off it too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb

from . import messages
from .errors import Reason, RequestError, invalid
from .service import GONE_SECONDS, IDLE_SECONDS, TokenizerServicer, off_loop, within

T = TypeVar("T")

# How long the largest message may take, one way or the other.
TRANSIT_SECONDS = 120.0

SERVICE = pb.DESCRIPTOR.services_by_name["AudioTokenizer"]


def generic_handler(servicer: TokenizerServicer) -> grpc.GenericRpcHandler:
    """All methods of the contract, for `grpc.aio.Server.add_generic_rpc_handlers`."""
    return grpc.method_handlers_generic_handler(
        SERVICE.full_name, {method.name: _handler(servicer, method) for method in SERVICE.methods}
    )


def _handler(servicer: TokenizerServicer, method: Any) -> grpc.RpcMethodHandler[Any, Any]:
    kind: type[Message] = GetMessageClass(method.input_type)
    call = getattr(servicer, method.name)

    async def parsed(stream: AsyncIterator[bytes], context: Any) -> tuple[Message, int]:
        refusal = servicer.full(method.name)
        if refusal is None:
            try:
                with servicer.arriving():
                    data = await only_message(stream, TRANSIT_SECONDS)
                    return await off_loop(len(data), messages.parse, kind, data), len(data)
            except RequestError as error:
                refusal = error.with_traceback(None)
        await servicer.refuse(method.name, refusal, context)
        raise AssertionError("refuse() ends the call")

    async def each_parsed(stream: AsyncIterator[bytes]) -> AsyncIterator[Message]:
        async for data in stream:
            yield await off_loop(len(data), messages.parse, kind, data)

    async def answer(stream: AsyncIterator[bytes], context: Any) -> None:
        request, size = await parsed(stream, context)
        response: bytes = await call(request, context, size)
        del request
        try:
            await within(TRANSIT_SECONDS, context.write(response))
        except asyncio.TimeoutError:
            sentence = f"the answer was not read for {TRANSIT_SECONDS:g} seconds"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, sentence)

    async def answer_in_stream(stream: AsyncIterator[bytes], context: Any) -> None:
        request, size = await parsed(stream, context)
        await _write_all(call(request, context, size), context)

    async def answer_stream(stream: AsyncIterator[bytes], context: Any) -> None:
        await _write_all(call(each_parsed(stream), context), context)

    asked = answer_in_stream if method.server_streaming else answer
    # Of whatever kind the method is: for a request that is no stream gRPC itself would wait without end, and unseen.
    return grpc.stream_stream_rpc_method_handler(_forgetful(answer_stream if method.client_streaming else asked))


async def only_message(stream: AsyncIterator[bytes], seconds: float) -> bytes:
    """The message of a call that has one.

    Raises:
        RequestError: it has none, or that is not there in time.
    """
    try:
        data = await within(seconds, anext(aiter(stream), None))
    except asyncio.TimeoutError:
        raise RequestError(Reason.DEADLINE, f"the request did not arrive within {seconds:g} seconds") from None
    if data is None:
        await asyncio.sleep(GONE_SECONDS)  # where it is the client that has ended, the call is cancelled now
        raise invalid("message", "absent", "one message")
    return data


async def _write_all(responses: AsyncGenerator[Message, None], context: Any) -> None:
    """Write a stream's responses; a reader that does not read gives up its place."""
    try:
        async for response in responses:
            try:
                await within(IDLE_SECONDS, context.write(response.SerializeToString()))
            except asyncio.TimeoutError:
                # To the method, which ends the call with it, and counts it once.
                sentence = f"the answer was not read for {IDLE_SECONDS} seconds"
                await responses.athrow(RequestError(Reason.DEADLINE, sentence))
    finally:
        await responses.aclose()


def _forgetful(method: Callable[[Any, Any], Coroutine[Any, Any, T]]) -> Callable[[Any, Any], Awaitable[T]]:
    """`method`, without a trace of its request in the error that ends it.

    gRPC keeps that error in the call's state, to which its traceback's frames refer: a circle, in which a refused
    request of 64 MiB would wait for the garbage collector.
    """

    async def call(request: Any, context: Any) -> T:
        running = method(request, context)
        del request
        try:
            return await running
        except grpc.aio.AbortError as error:
            aborted = error
        aborted.__traceback__ = aborted.__context__ = None
        raise aborted

    return call

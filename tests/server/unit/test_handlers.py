"""Calls that arrive together: the limit on calls holds from their first byte on, not from their last."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_audio_tokenizer.v1 import tokenizer_pb2_grpc
from mimo_tokenizer_server import handlers, messages
from mimo_tokenizer_server.handlers import generic_handler


def test_a_request_that_does_not_arrive(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as a call from its first byte on, and not for ever."""
    monkeypatch.setattr(handlers, "TRANSIT_SECONDS", 3.0)
    rig = make_rig(max_concurrent_calls=2)

    async def never() -> Any:
        await asyncio.sleep(60)
        yield b""

    async def calls(channel: grpc.aio.Channel) -> None:
        path = "/mimo_audio_tokenizer.v1.AudioTokenizer/"
        begun = [channel.stream_stream(path + method)(never(), timeout=30) for method in ("Decode", "DecodeLong")]
        stub = tokenizer_pb2_grpc.AudioTokenizerStub(channel)

        async def status() -> grpc.StatusCode:
            """Of a call that is refused for what it says, if it gets so far."""
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Decode(pb.DecodeRequest(), timeout=30)
            return refused.value.code()

        while await status() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            pass
        for call in begun:
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert await call.details() == "the request did not arrive within 3 seconds"
        assert await status() is grpc.StatusCode.INVALID_ARGUMENT
        empty = channel.stream_stream(path + "Decode")(timeout=30)
        await empty.done_writing()
        assert await empty.code() is grpc.StatusCode.INVALID_ARGUMENT

    serve(rig, calls)


def serve(rig: Any, calls: Callable[[grpc.aio.Channel], Awaitable[Any]]) -> Any:
    """What `calls` returns, with a channel to a real server of the rig's servicer."""

    async def test() -> Any:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((generic_handler(rig.servicer),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                return await calls(channel)
        finally:
            await server.stop(None)

    return asyncio.run_coroutine_threadsafe(test(), rig.loop).result(60)


def test_requests_that_are_being_read_count_as_calls(
    make_rig: Any, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(max_concurrent_calls=2, max_queued_frames=50_000)
    may_parse, parsing = threading.Event(), threading.Semaphore(0)
    parse = messages.parse

    def slow(kind: Any, data: bytes) -> Any:
        parsing.release()
        assert may_parse.wait(30)
        return parse(kind, data)

    monkeypatch.setattr(messages, "parse", slow)
    # Large enough to be read in a thread.
    item = pb.DecodeItem(codes=build.codes(build.code_array(100)), left_context_frames=100)
    request = pb.DecodeRequest(items=[item] * 100)
    assert request.ByteSize() > 300_000

    async def calls(channel: grpc.aio.Channel) -> list[Any]:
        stub = tokenizer_pb2_grpc.AudioTokenizerStub(channel)
        begun = [stub.Decode(request, timeout=30) for _ in range(2)]
        for _ in begun:
            assert await asyncio.to_thread(parsing.acquire, timeout=30)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Decode(request, timeout=30)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.value.details() == "2 calls are in progress; at most 2 are taken"
        may_parse.set()
        return [await call for call in begun]

    assert [len(answer.items) for answer in serve(rig, calls)] == [100, 100]

"""Calls that arrive together: the limit on calls holds from their first byte on, not from their last."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import pytest

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_audio_tokenizer.v1 import tokenizer_pb2_grpc
from mimo_tokenizer_server import messages
from mimo_tokenizer_server.handlers import generic_handler


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

    async def calls(port: int) -> list[Any]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
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

    async def test() -> list[Any]:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((generic_handler(rig.servicer),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            return await calls(port)
        finally:
            await server.stop(None)

    answers = asyncio.run_coroutine_threadsafe(test(), rig.loop).result(60)
    assert [len(answer.items) for answer in answers] == [100, 100]

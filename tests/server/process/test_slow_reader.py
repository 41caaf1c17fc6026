"""What a caller that does not read its answer may hold, and what a small queue still takes."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import numpy as np
import pytest
from process_harness import PATIENCE, ServerProcess, eventually, random_codes

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_audio_tokenizer.v1 import tokenizer_pb2_grpc
from mimo_tokenizer_client import TokenizerClient


def test_an_answer_counts_until_it_is_read(start: Callable[..., ServerProcess]) -> None:
    server = start("--max-queued-frames", "3100").ready()
    codes = random_codes(3000)
    message = pb.Codes(num_quantizers=codes.shape[0], frames=codes.shape[1], data=codes.tobytes())
    request = pb.DecodeLongRequest(item=pb.DecodeItem(codes=message))
    few = pb.Codes(num_quantizers=1, frames=200, data=bytes(400))
    small = pb.DecodeRequest(items=[pb.DecodeItem(codes=few)])
    with grpc.insecure_channel(server.address) as slow, grpc.insecure_channel(server.address) as other:
        answer = tokenizer_pb2_grpc.AudioTokenizerStub(slow).DecodeLong(request, timeout=PATIENCE)
        stub = tokenizer_pb2_grpc.AudioTokenizerStub(other)
        read = len(next(answer).pcm)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Decode(small, timeout=PATIENCE)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "the queue is full" in refused.value.details()
        read += sum(len(message.pcm) for message in answer)
        assert read == 3000 * 960 * 4

        def answered() -> bool:
            try:
                return len(stub.Decode(small, timeout=PATIENCE).items) == 1
            except grpc.RpcError:
                return False

        eventually(answered)


def test_a_stream_is_taken_by_a_queue_shorter_than_its_pieces(start: Callable[..., ServerProcess]) -> None:
    server = start("--max-queued-frames", "100", "--max-message-mib", "1").ready()
    sound = np.random.default_rng(0).normal(0, 0.1, (16, 48_000)).astype(np.float32)
    with TokenizerClient(server.address) as client:
        assert client.encode(sound, 48_000, num_quantizers=2).shape == (2, 26)

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


def test_slow_readers_keep_only_each_other_waiting(start: Callable[..., ServerProcess]) -> None:
    """A long answer that is read at its caller's pace holds memory, but not the queue."""
    server = start("--max-queued-frames", "3100").ready()
    codes = random_codes(3000)
    message = pb.Codes(num_quantizers=codes.shape[0], frames=codes.shape[1], data=codes.tobytes())
    request = pb.DecodeLongRequest(item=pb.DecodeItem(codes=message))
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(server.address) as slow, grpc.insecure_channel(server.address, options) as other:
        answer = tokenizer_pb2_grpc.AudioTokenizerStub(slow).DecodeLong(request, timeout=PATIENCE)
        stub = tokenizer_pb2_grpc.AudioTokenizerStub(other)
        read = len(next(answer).pcm)
        # As much as the queue takes at all is decoded beside it.
        response = stub.Decode(pb.DecodeRequest(items=[pb.DecodeItem(codes=message)]), timeout=PATIENCE)
        assert len(response.items[0].audio.pcm) == 3000 * 960 * 4
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.DecodeLong(request, timeout=PATIENCE))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.value.details() == (
            "long answers of 3000 frames are being computed or read; the call has 3000, the limit is 3100"
        )
        read += sum(len(message.pcm) for message in answer)
        assert read == 3000 * 960 * 4

        def answered() -> bool:
            try:
                return sum(len(message.pcm) for message in stub.DecodeLong(request, timeout=PATIENCE)) == read
            except grpc.RpcError:
                return False

        eventually(answered)


def test_a_stream_is_taken_by_a_queue_shorter_than_its_pieces(start: Callable[..., ServerProcess]) -> None:
    server = start("--max-queued-frames", "100", "--max-message-mib", "1").ready()
    sound = np.random.default_rng(0).normal(0, 0.1, (16, 48_000)).astype(np.float32)
    with TokenizerClient(server.address) as client:
        assert client.encode(sound, 48_000, num_quantizers=2).shape == (2, 26)

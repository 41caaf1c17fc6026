"""A tokenizer service whose model is arithmetic, for the client's tests: a module, and a script for other processes.

The messages, the limits, the transport and the health service are real. `encode` gives each frame the sum of its
samples, `decode` gives each sample the sum of its frame's codes, and a frame is four samples at 8 kHz.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_audio_tokenizer.v1 import tokenizer_pb2_grpc

SAMPLE_RATE = 8000
SAMPLES_PER_FRAME = 4
SEGMENT_SAMPLES = 4000
ROWS = 3
D_MODEL = 2
CODEBOOK_SIZE = 50000

Behaviour = Callable[[grpc.ServicerContext], None]


def encode(samples: np.ndarray, rows: int = ROWS, group_size: int = 1) -> np.ndarray:
    """(samples,) -> (rows, frames): each segment alone, the frames of all padded to `group_size`."""
    frames = []
    for start in range(0, len(samples), SEGMENT_SAMPLES):
        segment = samples[start : start + SEGMENT_SAMPLES].astype(np.float64)
        count = len(segment) // SAMPLES_PER_FRAME + 1
        padded = np.pad(segment, (0, count * SAMPLES_PER_FRAME - len(segment)))
        frames.append(np.abs(padded.reshape(count, SAMPLES_PER_FRAME).sum(axis=1)) * 1000)
    codes = np.concatenate(frames).round().astype(np.int64) + np.arange(rows)[:, None]
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % group_size)), mode="edge")
    return (codes % CODEBOOK_SIZE).astype(np.uint16)


def decode(codes: np.ndarray, left_context_frames: int = 0) -> np.ndarray:
    """(rows, frames) -> (samples,)."""
    samples = codes.sum(axis=0, dtype=np.float32)[:, None] + np.arange(SAMPLES_PER_FRAME, dtype=np.float32) / 4
    return samples.reshape(-1)[left_context_frames * SAMPLES_PER_FRAME :]


def decode_vq(codes: np.ndarray) -> np.ndarray:
    """(rows, frames) -> (frames, 2)."""
    return np.stack([codes.sum(axis=0, dtype=np.float32), codes[0].astype(np.float32)], axis=1)


@dataclass
class Seen:
    """A call as it reached the server."""

    rpc: str
    request: Any
    metadata: dict[str, str]
    seconds: float
    certificate: str  # the caller's common name


class BadItem(Exception):
    """An item with a status."""

    def __init__(self, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.status = pb.ItemStatus(
            code=grpc.StatusCode.INVALID_ARGUMENT.value[0],
            message=message,
            detail=pb.ErrorDetail(reason=pb.ErrorDetail.REASON_INVALID_VALUE, **detail),
        )


class Health(health.HealthServicer):
    """The real one, for those who are let in; keeps the metadata that it was asked with."""

    def __init__(self, let_in: Behaviour) -> None:
        super().__init__()
        self.metadata: list[dict[str, Any]] = []
        self._let_in = let_in

    def Check(self, request: Any, context: Any) -> Any:
        self.metadata.append(dict(context.invocation_metadata()))
        self._let_in(context)
        return super().Check(request, context)


class FakeServer(tokenizer_pb2_grpc.AudioTokenizerServicer):
    """Servicer and server in one.

    Attributes:
        calls: What was asked so far.
        fingerprint: Of the model.
        address: Where it listens.
        model: Fields of ModelInfo that differ from the defaults.
        tokens: Those that are let in; without any, everybody is.
        long_answers_break_off_after: Pieces after which the next calls of DecodeLong end, the last one's first.
    """

    def __init__(
        self,
        address: str,
        *,
        fingerprint: str = "model-a",
        model: Any = None,
        tls: grpc.ServerCredentials | None = None,
        maximum_concurrent_rpcs: int | None = None,
        **limits: Any,
    ) -> None:
        self.calls: list[Seen] = []
        self.fingerprint = fingerprint
        self.model = model or {}
        self.limits = {"max_message_bytes": 64 << 20, "max_items": 64, "max_channels": 8, "max_frames": 10**7, **limits}
        self.tokens: set[str] = set()
        self.long_answers_break_off_after: list[int] = []
        self._scripts: dict[str, list[Behaviour | None]] = {}
        self._lock = threading.Lock()
        size = self.limits["max_message_bytes"]
        self._server = grpc.server(
            futures.ThreadPoolExecutor(20),
            options=[
                ("grpc.max_receive_message_length", size),
                ("grpc.max_send_message_length", size),
                ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=maximum_concurrent_rpcs,
        )
        tokenizer_pb2_grpc.add_AudioTokenizerServicer_to_server(self, self._server)
        self.health = Health(self._let_in)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        port = self._server.add_secure_port(address, tls) if tls else self._server.add_insecure_port(address)
        self.address = address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"

    def start(self) -> FakeServer:
        self._server.start()
        return self

    def stop(self) -> None:
        self._server.stop(None).wait()

    def set_serving(self, serving: bool) -> None:
        states = health_pb2.HealthCheckResponse
        self.health.set("", states.SERVING if serving else states.NOT_SERVING)

    def script(self, rpc: str, *behaviours: Behaviour | None) -> None:
        """Let the next calls of `rpc` do these things first; None is nothing."""
        self._scripts.setdefault(rpc, []).extend(behaviours)

    def seen(self, rpc: str) -> list[Seen]:
        return [call for call in self.calls if call.rpc == rpc]

    # ------------------------------------------------------------ the service

    def Encode(self, request: Any, context: Any) -> Any:
        self._enter("Encode", request, context, request.expected_fingerprint)
        items = self._items(request.items, context, lambda item: self._encode(item, request))
        return pb.EncodeResponse(items=[pb.EncodeResponse.Item(status=s, codes=c) for s, c in items])

    def Decode(self, request: Any, context: Any) -> Any:
        self._enter("Decode", request, context, request.expected_fingerprint)
        items = self._items(request.items, context, self._decode)
        return pb.DecodeResponse(items=[pb.DecodeResponse.Item(status=s, audio=a) for s, a in items])

    def DecodeVq(self, request: Any, context: Any) -> Any:
        self._enter("DecodeVq", request, context, request.expected_fingerprint)
        items = self._items(request.items, context, self._decode_vq)
        return pb.DecodeVqResponse(items=[pb.DecodeVqResponse.Item(status=s, features=f) for s, f in items])

    def EncodeStream(self, request_iterator: Any, context: Any) -> Iterator[Any]:
        first = next(request_iterator).open
        self._enter("EncodeStream", first, context, first.expected_fingerprint)
        pcm = b"".join(message.pcm for message in request_iterator)
        audio = pb.Audio(sample_rate=first.sample_rate, channels=first.channels, format=first.format, pcm=pcm)
        codes = _codes_in(self._answer(context, lambda: self._encode(audio, first)))
        for start in range(0, codes.shape[1], 1000):
            yield pb.EncodeStreamResponse(codes=_codes_out(codes[:, start : start + 1000]))
        yield pb.EncodeStreamResponse(timings=pb.Timings(total_seconds=1.0))

    def DecodeLong(self, request: Any, context: Any) -> Iterator[Any]:
        self._enter("DecodeLong", request, context, request.expected_fingerprint)
        pcm = self._answer(context, lambda: self._decode(request.item)).pcm
        pieces_left = self.long_answers_break_off_after.pop() if self.long_answers_break_off_after else len(pcm)
        for start in range(0, len(pcm), 4097):  # pieces that end inside a sample
            if pieces_left == 0:
                fail(context, grpc.StatusCode.UNAVAILABLE, "going down")
            pieces_left -= 1
            yield pb.DecodeLongResponse(pcm=pcm[start : start + 4097])
        yield pb.DecodeLongResponse(timings=pb.Timings(total_seconds=1.0))

    def GetInfo(self, request: Any, context: Any) -> Any:
        self._enter("GetInfo", request, context, "")
        model = {
            "id": "fake",
            "fingerprint": self.fingerprint,
            "codebook_sizes": [CODEBOOK_SIZE] * ROWS,
            "d_model": D_MODEL,
            "sample_rate": SAMPLE_RATE,
            "samples_per_frame": SAMPLES_PER_FRAME,
            "segment_samples": SEGMENT_SAMPLES,
            **self.model,
        }
        return pb.GetInfoResponse(
            model=pb.ModelInfo(**model),
            device=pb.DeviceInfo(device="cpu", dtype="float32", quantization="none"),
            limits=pb.Limits(**self.limits),
            versions={"server": "0"},
        )

    # ------------------------------------------------------------ its parts

    def _enter(self, rpc: str, request: Any, context: Any, expected: str) -> None:
        with self._lock:
            metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
            (name,) = context.auth_context().get("x509_common_name", [b""])
            self.calls.append(Seen(rpc, request, metadata, context.time_remaining(), name.decode()))
            script = self._scripts.get(rpc)
            behaviour = script.pop(0) if script else None
        self._let_in(context)
        if behaviour is not None:
            behaviour(context)
        if expected not in ("", self.fingerprint):
            fail(
                context, grpc.StatusCode.FAILED_PRECONDITION, "another model", reason=pb.ErrorDetail.REASON_WRONG_MODEL
            )

    def _let_in(self, context: Any) -> None:
        token = dict(context.invocation_metadata()).get("authorization", "").removeprefix("Bearer ")
        if self.tokens and token not in self.tokens:
            fail(context, grpc.StatusCode.UNAUTHENTICATED, "the token is unknown", request_id="7")

    def _items(self, items: Any, context: Any, answer: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
        answers: list[tuple[Any, Any]] = []
        for index, item in enumerate(items):
            try:
                answers.append((None, answer(item)))
            except BadItem as error:
                error.status.detail.item = index
                answers.append((error.status, None))
        statuses = [status for status, _ in answers if status is not None]
        if len(statuses) == len(answers):
            fail_all(context, statuses)
        return answers

    def _answer(self, context: Any, answer: Callable[[], Any]) -> Any:
        try:
            return answer()
        except BadItem as error:
            fail_all(context, [error.status])

    def _encode(self, audio: Any, options: Any) -> Any:
        if audio.format == pb.SAMPLE_FORMAT_INT16:
            samples = np.frombuffer(audio.pcm, "<i2").astype(np.float64) / 32768
        else:
            samples = np.frombuffer(audio.pcm, "<f4").astype(np.float64)
        if not np.isfinite(samples).all():
            raise BadItem("a sample is not finite", field="pcm")
        samples = samples.reshape(-1, audio.channels).mean(axis=1)
        rows = options.num_quantizers if options.HasField("num_quantizers") else ROWS
        return _codes_out(encode(samples, rows, options.group_size if options.HasField("group_size") else 1))

    def _decode(self, item: Any) -> Any:
        pcm = decode(_codes_in(item.codes), item.left_context_frames).tobytes()
        return pb.Audio(sample_rate=SAMPLE_RATE, channels=1, format=pb.SAMPLE_FORMAT_FLOAT32, pcm=pcm)

    def _decode_vq(self, codes: Any) -> Any:
        features = decode_vq(_codes_in(codes))
        return pb.Features(frames=features.shape[0], d_model=features.shape[1], data=features.tobytes())


def _codes_in(codes: Any) -> np.ndarray:
    array = np.frombuffer(codes.data, "<u2").reshape(codes.num_quantizers, codes.frames)
    if (array >= CODEBOOK_SIZE).any():
        row, frame = (int(i) for i in np.argwhere(array >= CODEBOOK_SIZE)[0])
        code = int(array[row, frame])
        allowed = f"0..{CODEBOOK_SIZE - 1}"
        message = f"code {code} in row {row}, frame {frame} is outside {allowed}"
        raise BadItem(message, row=row, frame=frame, value=str(code), allowed=allowed)
    return array


def _codes_out(codes: np.ndarray) -> Any:
    return pb.Codes(num_quantizers=codes.shape[0], frames=codes.shape[1], data=codes.astype("<u2").tobytes())


# ---------------------------------------------------------------- behaviours


def fail(context: Any, code: grpc.StatusCode, message: str, *, statuses: Any = (), **detail: Any) -> None:
    """End the call with a status and its detail."""
    trailers = [("mimo-error-detail-bin", pb.ErrorDetail(**detail).SerializeToString())] if detail else []
    trailers += [("mimo-item-status-bin", status.SerializeToString()) for status in statuses]
    context.set_trailing_metadata(trailers)
    context.abort(code, message)


def fail_all(context: Any, statuses: Any) -> None:
    """End a call all of whose items are bad."""
    first = statuses[0]
    context.set_trailing_metadata(
        [("mimo-error-detail-bin", first.detail.SerializeToString())]
        + [("mimo-item-status-bin", status.SerializeToString()) for status in statuses]
    )
    context.abort(next(c for c in grpc.StatusCode if c.value[0] == first.code), first.message)


def main() -> None:
    """Serve until the process is killed; print the address once it is bound."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--fingerprint", default="model-a")
    parser.add_argument("--max-message-bytes", type=int, default=64 << 20)
    parser.add_argument("--hang", default="", help="an RPC that never answers")
    args = parser.parse_args()
    server = FakeServer(args.address, fingerprint=args.fingerprint, max_message_bytes=args.max_message_bytes)
    if args.hang:

        def hang(context: Any) -> None:
            print("hanging", flush=True)
            threading.Event().wait()

        server.script(args.hang, *[hang] * 100)
    server.start()
    print(server.address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()

"""Spans of a server with `--trace`, as a collector receives them from it and from an instrumented client."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from process_harness import (
    PATIENCE,
    RATE,
    ServerProcess,
    SlowModel,
    assert_one_sentence,
    environment,
    noise,
    random_codes,
    run_command,
)

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_audio_tokenizer.v1 import tokenizer_pb2_grpc
from mimo_tokenizer_client import TokenizerClient
from mimo_tokenizer_server import telemetry, tracing

TINY = ("--load-format", "dummy", "--model", "tiny", "--device", "cpu", "--address", "127.0.0.1:0")
SERVICE = "mimo_audio_tokenizer.v1.AudioTokenizer"
CLIENT, SERVER = 3, 2  # of opentelemetry.proto.trace.v1.Span.SpanKind
UNSET, ERROR = 0, 2  # of Status.StatusCode

# What a span may say. Sound and codes are in none of it.
ATTRIBUTES = {
    *("rpc.system", "rpc.service", "rpc.method", "rpc.user_agent", "rpc.grpc.status_code"),
    *("net.peer.ip", "net.peer.port", "net.peer.name"),
    *(f"mimo_tokenizer.{name}" for name in ("request_id", "client", "items", "frames", "batch_items")),
    *("mimo_tokenizer.queue_seconds", "mimo_tokenizer.compute_seconds"),
}

# A caller whose gRPC is instrumented, as it would be for any other service.
CALLER = """
import asyncio
import sys
import numpy as np
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.grpc import GrpcAioInstrumentorClient, GrpcInstrumentorClient
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from mimo_tokenizer_client import AsyncTokenizerClient, InvalidInput, TokenizerClient

exporter = OTLPSpanExporter()  # its own calls are not to be traced
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(exporter))
trace.set_tracer_provider(provider)
GrpcInstrumentorClient().instrument()
GrpcAioInstrumentorClient().instrument()


async def again():
    async with AsyncTokenizerClient(sys.argv[1], name="caller") as client:
        assert (await client.decode(await client.encode(sound, 24_000))).shape == (codes.shape[1] * 960,)


with TokenizerClient(sys.argv[1], name="caller") as client, trace.get_tracer("caller").start_as_current_span("work"):
    assert client.health()
    codes = client.encode(np.zeros(24_000, np.float32), 24_000)
    assert client.decode(codes).shape == (codes.shape[1] * 960,)
    try:
        client.decode(np.full((2, 5), 60_000, np.uint16))
    except InvalidInput as error:
        assert "60000" in str(error)
    else:
        sys.exit("a bad request was answered")
    # Too much for one message: EncodeStream and DecodeLong.
    sound = np.zeros(24_000 * 13, np.float32)
    codes = client.encode(sound, 24_000)
    assert client.decode(codes).shape == (codes.shape[1] * 960,)
    asyncio.run(again())
"""


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans that are exported to it over OTLP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.env = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"}
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        sent = dict(context.invocation_metadata()).get("authorization")
        if sent is not None:
            self.headers.append(sent)
            context.abort(grpc.StatusCode.UNAUTHENTICATED, f"nobody knows {sent!r}")
        for part in request.resource_spans:
            self.resources.append(plain(part.resource.attributes))
            self.spans += [span for scope in part.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, kind: int) -> dict[tuple[str, str], list[Any]]:
        """The spans of the service's methods, by method and gRPC status."""
        found: dict[tuple[str, str], list[Any]] = {}
        for span in self.spans:
            if span.kind == kind and span.name.startswith(f"/{SERVICE}/"):
                number = plain(span.attributes)["rpc.grpc.status_code"]
                status = next(code.name for code in grpc.StatusCode if code.value[0] == number)
                found.setdefault((span.name.rsplit("/", 1)[1], status), []).append(span)
        return found

    def stop(self) -> None:
        self._server.stop(None).wait()


def plain(attributes: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.stop()


def test_one_trace_from_the_caller_to_the_server(start: Callable[..., ServerProcess], collector: Collector) -> None:
    # An hour between exports: what arrives has been flushed at the end.
    server = start("--trace", "--max-message-mib", "1", env={**collector.env, "OTEL_BSP_SCHEDULE_DELAY": "3600000"})
    caller = subprocess.run(
        [sys.executable, "-c", CALLER, server.ready().address],
        env=environment(collector.env),
        timeout=PATIENCE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert caller.returncode == 0, caller.stderr
    assert run_command("health", "--address", server.address).returncode == 0
    assert server.stop() == 0
    assert server.complaints() == []
    (told,) = [line for line in server.lines if " tracing " in line]
    where = collector.env["OTEL_EXPORTER_OTLP_ENDPOINT"]
    assert re.search(f" INFO +tracing exporter=otlp_proto_grpc endpoint={where}$", told)
    clients, servers = collector.of(CLIENT), collector.of(SERVER)
    counts = {("GetInfo", "OK"): 2, ("Encode", "OK"): 1, ("Decode", "OK"): 1, ("Decode", "INVALID_ARGUMENT"): 1}
    counts |= {("EncodeStream", "OK"): 2, ("DecodeLong", "OK"): 2}
    assert {key: len(spans) for key, spans in servers.items()} == counts
    assert {key: len(spans) for key, spans in clients.items()} == counts
    (work,) = [span for span in collector.spans if span.name == "work"]
    assert {span.trace_id for span in collector.spans} == {work.trace_id}
    for key, spans in servers.items():
        assert {span.parent_span_id for span in spans} == {span.span_id for span in clients[key]}
        assert {span.parent_span_id for span in clients[key]} == {work.span_id}
        assert all(plain(span.attributes).keys() <= ATTRIBUTES and not span.events for span in spans)
        # By OpenTelemetry's conventions a request's own fault is an error to its caller, not to the server.
        assert {span.status.code for span in spans} == {UNSET}
    assert clients["Decode", "INVALID_ARGUMENT"][0].status.code == ERROR
    # Neither health checks nor anything else that is not the service's own.
    assert sum(span.kind == SERVER for span in collector.spans) == sum(counts.values())
    for method, frames in (("Encode", 26), ("Decode", 26), ("EncodeStream", 326), ("DecodeLong", 326)):
        span = servers[method, "OK"][0]
        said = plain(span.attributes)
        seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert (said["rpc.service"], said["rpc.method"]) == (SERVICE, method)
        assert said["mimo_tokenizer.frames"] == frames
        assert said["mimo_tokenizer.items"] == said["mimo_tokenizer.batch_items"] == 1
        assert 0 < said["mimo_tokenizer.compute_seconds"] < seconds
        assert 0 <= said["mimo_tokenizer.queue_seconds"] < seconds
        assert said["mimo_tokenizer.client"].startswith("caller mimo-tokenizer-client/")
        assert len(said["mimo_tokenizer.request_id"]) >= 16
    assert "mimo-tokenizer" in {resource["service.name"] for resource in collector.resources}


def test_calls_that_are_refused_or_given_up(
    start: Callable[..., ServerProcess], collector: Collector, tmp_path: Path
) -> None:
    model = SlowModel(tmp_path / "model")
    server = start("--trace", model=model.flags, env={**collector.env, "OTEL_SERVICE_NAME": "another"})
    opening = pb.EncodeStreamOpen(sample_rate=RATE, channels=1, format=pb.SAMPLE_FORMAT_FLOAT32)
    over = threading.Event()

    def requests(seconds: float) -> Iterator[pb.EncodeStreamRequest]:
        yield pb.EncodeStreamRequest(open=opening)
        yield pb.EncodeStreamRequest(pcm=noise(seconds).tobytes())
        over.wait(PATIENCE)

    with grpc.insecure_channel(server.address) as channel:
        stub = tokenizer_pb2_grpc.AudioTokenizerStub(channel)
        with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            stub.GetInfo(pb.GetInfoRequest(), timeout=PATIENCE)
        model.arrive()
        server.ready()
        with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
            stub.DecodeLong(pb.DecodeLongRequest(), timeout=PATIENCE).result()
        call = stub.EncodeStream(requests(100), timeout=PATIENCE)
        assert next(call).codes.frames > 0
        call.cancel()
        with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
            list(stub.EncodeStream(requests(1), timeout=1))
        over.set()
    assert server.stop() == 0
    assert server.complaints() == []
    spans = {key: span for key, (span,) in collector.of(SERVER).items()}
    assert {key: span.status.code for key, span in spans.items()} == {
        ("GetInfo", "UNAVAILABLE"): ERROR,
        ("DecodeLong", "INVALID_ARGUMENT"): UNSET,
        ("EncodeStream", "CANCELLED"): UNSET,
        ("EncodeStream", "DEADLINE_EXCEEDED"): ERROR,
    }
    assert plain(spans["EncodeStream", "CANCELLED"].attributes)["mimo_tokenizer.frames"] > 0
    assert {resource["service.name"] for resource in collector.resources} == {"another"}


def test_strangers_leave_no_spans(start: Callable[..., ServerProcess], collector: Collector, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("0123456789abcdef\n")
    server = start("--trace", "--token-file", str(tmp_path / "tokens"), env=collector.env).ready()
    with grpc.insecure_channel(server.address) as channel:
        stub = tokenizer_pb2_grpc.AudioTokenizerStub(channel)
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            stub.GetInfo(pb.GetInfoRequest(), timeout=PATIENCE)
        stub.GetInfo(pb.GetInfoRequest(), timeout=PATIENCE, metadata=[("authorization", "Bearer 0123456789abcdef")])
    assert server.stop() == 0
    assert list(collector.of(SERVER)) == [("GetInfo", "OK")]


@pytest.mark.parametrize("silent", [False, True], ids=["nobody listens", "nobody answers"])
def test_a_collector_that_is_not_there(start: Callable[..., ServerProcess], silent: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        if not silent:
            listening.close()
        # Whoever waited for an export would wait for longer than this test does.
        env = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "600" if silent else "1",
            "OTEL_BSP_SCHEDULE_DELAY": "10",
        }
        server = start("--trace", env=env).ready()
        with TokenizerClient(server.address) as client:
            for _ in range(100):
                client.decode_vq(random_codes(1))
            if not silent:
                server.wait_for("WARNING tracing ")
                for _ in range(100):
                    client.decode_vq(random_codes(1))
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 0
    # One line while it runs, and one at the end; and nothing by any other way.
    events = [line for line in server.lines if re.search(r" (WARNING|ERROR) +", line) and "random" not in line]
    assert 1 <= len(events) <= 2, server.log
    assert all(" tracing " in line for line in events)
    assert all(re.match(r"20\d\d-\S+ [A-Z]+ ", line) for line in server.lines)


def test_no_trace_of_it_without_the_flag(start: Callable[..., ServerProcess]) -> None:
    server = start(env={"PYTHONPROFILEIMPORTTIME": "1"}).ready()
    with TokenizerClient(server.address) as client:
        client.decode_vq(random_codes(1))
    assert server.stop() == 0
    assert "prometheus_client" in server.log
    assert "opentelemetry" not in server.log


def test_without_the_extra(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['opentelemetry'] = None\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = run_command("serve", *TINY, "--trace", env={"PYTHONPATH": path})
    assert_one_sentence(done, "--trace needs opentelemetry", "[tracing]")


@pytest.mark.parametrize(
    ("variable", "value"), [("OTEL_TRACES_EXPORTER", "pigeon"), ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")]
)
def test_settings_that_opentelemetry_does_not_take(variable: str, value: str) -> None:
    done = run_command("serve", *TINY, "--trace", env={variable: value})
    assert_one_sentence(done, "OTEL_", value)


SECRET = "SECRETSECRET"


@pytest.mark.parametrize(
    ("variable", "value", "number"),
    [
        ("OTEL_EXPORTER_OTLP_HEADERS", f"authorization: Bearer {SECRET}", 1),
        ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", f"a=b,,authorization=Bearer%0A{SECRET}", 3),
        ("OTEL_EXPORTER_OTLP_HEADERS", f"{SECRET}'s=b", 1),  # of which gRPC itself would tell
        ("OTEL_EXPORTER_OTLP_HEADERS", f'a="{SECRET}"', 1),
    ],
)
def test_headers_that_are_malformed(variable: str, value: str, number: int) -> None:
    done = run_command("serve", *TINY, "--trace", env={variable: value})
    assert_one_sentence(done, f"header {number} of {variable} is malformed")
    assert SECRET not in done.stderr.upper()


def test_headers_are_told_to_the_collector_alone(start: Callable[..., ServerProcess], collector: Collector) -> None:
    """Not even when it says them itself, or another variable has what was meant for them."""
    headers = {"OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{SECRET}, x=y", "OTEL_BSP_SCHEDULE_DELAY": "10"}
    server = start("--trace", env=collector.env | headers).ready()
    with TokenizerClient(server.address) as client:
        client.decode_vq(random_codes(1))
    assert "UNAUTHENTICATED" in server.wait_for("WARNING tracing ")
    assert server.stop() == 0
    assert set(collector.headers) == {f"Bearer {SECRET}"}
    assert SECRET not in server.log
    done = run_command("serve", *TINY, "--trace", env=headers | {"OTEL_EXPORTER_OTLP_TIMEOUT": f"Bearer {SECRET}"})
    assert_one_sentence(done, "OTEL_", "float", "***")
    assert SECRET not in done.stderr


@pytest.mark.parametrize(
    ("variables", "where"),
    [
        ({}, ("otlp_proto_grpc", "http://localhost:4317")),
        ({"EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, ("otlp_proto_http", "http://localhost:4318")),
        ({"EXPORTER_OTLP_ENDPOINT": "here:1"}, ("otlp_proto_grpc", "here:1")),
        (
            {
                "EXPORTER_OTLP_ENDPOINT": "here:1",
                "EXPORTER_OTLP_TRACES_ENDPOINT": f"https://me:{SECRET}@a:1/b?c={SECRET}",
            },
            ("otlp_proto_grpc", "https://a:1/b"),
        ),
        ({"EXPORTER_OTLP_ENDPOINT": f"{SECRET}@here:1"}, ("otlp_proto_grpc", "here:1")),
        ({"TRACES_EXPORTER": "console", "EXPORTER_OTLP_ENDPOINT": "here:1"}, ("console", None)),
    ],
)
def test_where_spans_go(
    variables: dict[str, str], where: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_{name}", value)
    name = tracing._exporter_name()
    assert (name, tracing._endpoint(name).get("endpoint")) == where
    told = tracing._without_secrets(f"Failed to export traces to me:{SECRET}@a:1")
    assert (SECRET in told) == (SECRET not in str(variables))


def test_what_opentelemetry_repeats_is_told_once() -> None:
    """A day without a collector, as its exporter tells of it; its own filter lets it through every 20 seconds."""
    told: list[logging.LogRecord] = []
    keeper = logging.Handler()
    keeper.emit = told.append  # type: ignore[method-assign]
    telemetry.logger.addHandler(keeper)
    try:
        retold = tracing._Retold(logging.WARNING)
        for number in range(4000):
            for text in ("Failed to export traces to %s", "Queue full, dropping %s."):
                retold.handle(logging.LogRecord("opentelemetry", logging.ERROR, "", 0, text, (number,), None))
    finally:
        telemetry.logger.removeHandler(keeper)
    assert [record.fields["says"] for record in told] == [  # type: ignore[attr-defined]
        "Failed to export traces to 0",
        "Queue full, dropping 0.",
    ]

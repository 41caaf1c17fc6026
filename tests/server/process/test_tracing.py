"""Spans of a server with `--trace`, as a collector receives them from it and from an instrumented client."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from process_harness import (
    RATE,
    ServerProcess,
    SlowModel,
    assert_one_sentence,
    eventually,
    noise,
    random_codes,
    run_command,
)

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_audio_tokenizer.v1 import tokenizer_pb2_grpc
from mimo_tokenizer_client import InvalidInput, ServiceUnavailable, TokenizerClient

SERVICE = "/mimo_audio_tokenizer.v1.AudioTokenizer"
CLIENT, SERVER = 3, 2  # of opentelemetry.proto.trace.v1.Span.SpanKind
UNSET, ERROR = 0, 2  # of Status.StatusCode

# A caller whose gRPC is instrumented, as it would be for any other service.
CALLER = """
import sys
import numpy as np
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.grpc import GrpcInstrumentorClient
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from mimo_tokenizer_client import InvalidInput, TokenizerClient
exporter = OTLPSpanExporter()  # before its own calls could be traced
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(exporter))
trace.set_tracer_provider(provider)
GrpcInstrumentorClient().instrument()
with TokenizerClient(sys.argv[1], name="caller") as client, trace.get_tracer("caller").start_as_current_span("work"):
    codes = client.encode(np.zeros(24_000, np.float32), 24_000)
    assert client.decode(codes).shape == (len(codes[0]) * 960,)
    assert client.health()
    try:
        client.decode(np.full((2, 5), 60_000, np.uint16))
    except InvalidInput as error:
        assert "60000" in str(error)
    else:
        sys.exit("a bad request was answered")
    stream = codes = client.encode(np.zeros(24_000 * 1200, np.float32), 24_000)  # too much for one message
    assert codes.shape[1] == 30_001
"""


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans that are exported to it over OTLP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def env(self) -> dict[str, str]:
        """For a server that exports to it, without delay."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}", "OTEL_BSP_SCHEDULE_DELAY": "50"}

    def Export(self, request: Any, context: Any) -> Any:
        for of_resource in request.resource_spans:
            self.resources.append(plain(of_resource.resource.attributes))
            self.spans += [span for of_scope in of_resource.scope_spans for span in of_scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, method: str, kind: int = SERVER) -> list[Any]:
        """The spans of a method, in order of their end."""
        found = [span for span in self.spans if span.name == f"{SERVICE}/{method}" and span.kind == kind]
        return sorted(found, key=lambda span: span.end_time_unix_nano)

    def wait_for(self, method: str, count: int = 1) -> list[Any]:
        """The server's spans of a method, once there are so many."""
        eventually(lambda: len(self.of(method)) >= count)
        return self.of(method)

    def stop(self) -> None:
        self._server.stop(None).wait()


def plain(attributes: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.stop()



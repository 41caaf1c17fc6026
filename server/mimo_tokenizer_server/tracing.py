"""Spans of the service's calls, by OpenTelemetry; its own OTEL_* variables say where to and how many.

Imported only with `serve --trace`, and needs the extra [tracing].
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.instrumentation.grpc import aio_server_interceptor, filters
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from .config import TracingError
from .handlers import SERVICE
from .telemetry import log

_PREFIX = "mimo_tokenizer"

# How long the last spans may take to leave.
_FLUSH_SECONDS = 1.0

# A collector that is away is away at every export, which is every few seconds.
_REPEAT_SECONDS = 600.0

_OTLP = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}


class Tracing:
    """The spans of one server.

    Args:
        versions: of the server and of what it runs on, by name.

    Raises:
        TracingError: there is no such exporter, or it does not take its settings.
    """

    def __init__(self, versions: Mapping[str, str]) -> None:
        logger = logging.getLogger("opentelemetry")
        logger.handlers[:] = [_Retold(logging.WARNING)]
        logger.propagate = False
        logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)  # and not each attempt
        try:
            self._exporter = _exporter()
            resource = Resource.create(
                {
                    "service.name": "mimo-tokenizer",
                    "service.version": versions["server"],
                    **OTELResourceDetector().detect().attributes,
                }
            )
            # What fails is in the log, and every refusal would be recorded with a traceback, twice.
            limits = SpanLimits(max_events=0)
            self._provider = TracerProvider(resource=resource, span_limits=limits, shutdown_on_exit=False)
            if self._exporter is not None:
                self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        except (ValueError, RuntimeError) as error:
            raise TracingError(f"--trace: OpenTelemetry does not take its OTEL_* variables: {error}") from error

    def interceptors(self) -> Sequence[grpc.aio.ServerInterceptor]:
        """Of the server; they trace the service's own methods."""
        ours = filters.service_name(SERVICE.full_name)
        return aio_server_interceptor(self._provider, ours), _Fitting()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Export what there is, within a second."""
        if self._exporter is not None:
            # To shut down the processor waits for half a minute; without its exporter it does not.
            giving_up = threading.Timer(_FLUSH_SECONDS, self._give_up, (self._exporter,))
            giving_up.daemon = True
            giving_up.start()
            self._provider.shutdown()
            giving_up.cancel()

    @staticmethod
    def _give_up(exporter: SpanExporter) -> None:
        logging.getLogger("opentelemetry").handlers[:] = [logging.NullHandler()]
        log(logging.WARNING, "tracing", says=f"the last spans could not be exported within {_FLUSH_SECONDS:g} s")
        exporter.shutdown()


def ended(status: str, **facts: str | int | float) -> None:
    """Tell the current span how its call has ended, and what the call says of itself."""
    span = trace.get_current_span()
    code = grpc.StatusCode[status]
    span.set_attribute("rpc.grpc.status_code", code.value[0])
    span.set_attributes({f"{_PREFIX}.{name}": value for name, value in facts.items()})
    # The interceptor sees calls that are aborted, not those that are cancelled, as gRPC does with one that is late.
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        span.set_status(trace.StatusCode.ERROR, status)


class _Fitting(grpc.aio.ServerInterceptor):
    """Makes the service's handlers such as OpenTelemetry's interceptor, which comes before, can do with."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Wrap the handler, if it is the service's."""
        handler = await continuation(details)
        if handler is None or not details.method.startswith(f"/{SERVICE.full_name}/"):
            return handler
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(_without_responses(handler.stream_stream))
        # The interceptor keeps what it is given until the call has ended: a box, not a request of 64 MiB.
        if handler.response_streaming:
            method = _without_responses(_unboxed(handler.unary_stream))
            return grpc.unary_stream_rpc_method_handler(method, lambda data: [data])
        return grpc.unary_unary_rpc_method_handler(_unboxed(handler.unary_unary), lambda data: [data])


def _unboxed(method: Callable[[bytes, Any], Awaitable[Any]]) -> Callable[[list[bytes], Any], Awaitable[Any]]:
    return lambda box, context: method(box.pop(), context)


def _without_responses(method: Callable[[Any, Any], Awaitable[None]]) -> Callable[[Any, Any], Any]:
    """A generator, as which the interceptor calls what answers in a stream; `method` writes its responses itself."""

    async def call(request: Any, context: Any) -> Any:
        await method(request, context)
        return
        yield

    return call


class _Retold(logging.Handler):
    """What OpenTelemetry has to say, in this server's log, each kind of message once in ten minutes."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self._next: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Log it."""
        now = time.monotonic()
        if now >= self._next.get(record.msg, now):
            self._next[record.msg] = now + _REPEAT_SECONDS
            log(logging.WARNING, "tracing", says=record.getMessage())


def _exporter() -> SpanExporter | None:
    """What OTEL_TRACES_EXPORTER names; OTLP over gRPC unless it says otherwise."""
    name = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if name == "none":
        return None
    if name == "otlp":
        variables = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
        protocol = next(filter(None, map(os.environ.get, variables)), "grpc")
        name = _OTLP.get(protocol, protocol)
    found = entry_points(group="opentelemetry_traces_exporter", name=name)
    if not found:
        raise TracingError(f"no exporter {name!r} is installed")
    exporter: SpanExporter = next(iter(found)).load()()
    return exporter

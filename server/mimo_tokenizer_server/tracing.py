"""Spans of the service's calls, by OpenTelemetry; its own OTEL_* variables say where to and how many.

Imported only with `serve --trace`, and needs the extra [tracing].
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any
from urllib.parse import unquote

import grpc
from opentelemetry import trace
from opentelemetry.instrumentation.grpc import aio_server_interceptor, filters
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.util.re import parse_env_headers

from .config import TracingError
from .handlers import SERVICE
from .telemetry import log

_PREFIX = "mimo_tokenizer"

# How long the last spans may take to leave.
_FLUSH_SECONDS = 1.0

# A collector that is away is away at every export, which is every few seconds.
_REPEAT_SECONDS = 600.0

_OTLP = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
_DEFAULT_ENDPOINTS = {"otlp_proto_grpc": "http://localhost:4317", "otlp_proto_http": "http://localhost:4318"}

# What is shorter is none, and stands in other words.
_SHORTEST_SECRET = 4


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
        _check_headers()
        try:
            name = _exporter_name()
            self._exporter = _exporter(name)
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
            reason = _without_secrets(str(error))
            raise TracingError(f"--trace: OpenTelemetry does not take its OTEL_* variables: {reason}") from None
        log(logging.INFO, "tracing", exporter=name, **_endpoint(name))

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
        """Wrap the handler, if it is the service's: all of those read and write their messages themselves."""
        handler = await continuation(details)
        if handler is None or not details.method.startswith(f"/{SERVICE.full_name}/"):
            return handler
        return grpc.stream_stream_rpc_method_handler(_without_responses(handler.stream_stream))


def _without_responses(method: Callable[[Any, Any], Awaitable[None]]) -> Callable[[Any, Any], Any]:
    """A generator, as which the interceptor calls what answers in a stream; `method` writes its responses itself."""

    async def call(requests: Any, context: Any) -> Any:
        await method(requests, context)
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
            log(logging.WARNING, "tracing", says=_without_secrets(record.getMessage()))


def _exporter(name: str) -> SpanExporter | None:
    """The exporter of that name."""
    if name == "none":
        return None
    found = entry_points(group="opentelemetry_traces_exporter", name=name)
    if not found:
        raise TracingError(f"no exporter {name!r} is installed")
    exporter: SpanExporter = next(iter(found)).load()()
    return exporter


def _exporter_name() -> str:
    """What OTEL_TRACES_EXPORTER names; OTLP over gRPC unless it says otherwise."""
    name = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if name == "otlp":
        protocol = _first("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
        name = _OTLP.get(protocol, protocol)
    return name


def _endpoint(name: str) -> dict[str, str]:
    """Where an OTLP exporter sends spans to, without what may stand before its host or behind its path."""
    if name not in _DEFAULT_ENDPOINTS:
        return {}
    url = _first("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT") or _DEFAULT_ENDPOINTS[name]
    return {"endpoint": re.sub(r"^(\w+://)?[^/]*@", r"\1", url).partition("?")[0]}


def _first(*variables: str) -> str | None:
    return next(filter(None, map(os.environ.get, variables)), None)


# ---------------------------------------------------------------- secrets


def _check_headers() -> None:
    """Refuse headers that OpenTelemetry would leave out, or gRPC would not send, without a word of what they are."""
    # It would tell of them, and what they are.
    logging.getLogger("opentelemetry.util.re").disabled = True
    for variable in ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"):
        for number, part in enumerate(os.environ.get(variable, "").split(","), 1):
            header = next(iter(parse_env_headers(part, liberal=True).items()), ("", ""))
            if part.strip() and not re.fullmatch(r"[0-9a-z_.-]+(?<!-bin)=[ -~]+", "=".join(header)):
                sentence = f"header {number} of {variable} is malformed: it has to be name=value, in URL encoding"
                raise TracingError(f"--trace: {sentence}")


def _without_secrets(text: str) -> str:
    """`text` without what stands in headers, or before the host of an endpoint; a collector may say it again."""
    for variable, value in os.environ.items():
        if re.fullmatch("OTEL_.*HEADERS", variable):
            secret = value
        elif re.fullmatch("OTEL_.*ENDPOINT", variable):
            secret = re.sub("^.*//|[^@]*$", "", value)
        else:
            continue
        words = re.split(r"[\s,;:=@]+", f"{secret} {unquote(secret)}")
        for word in sorted(filter(lambda word: len(word) >= _SHORTEST_SECRET, words), key=len, reverse=True):
            text = text.replace(word, "***")
    return text

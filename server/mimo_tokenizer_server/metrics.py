"""What a running server counts and measures, for Prometheus; named after its conventions (prometheus.io, naming)."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    make_wsgi_app,
)

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb

from . import address as addresses
from . import messages
from .engine import EngineInfo
from .telemetry import log
from .work import Kind

_PREFIX = "mimo_tokenizer"

_METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["AudioTokenizer"].methods]
_STATUSES = sorted({"OK", "CANCELLED", *(status.name for status in messages.STATUS.values())})

# A frame of a warm GPU takes some milliseconds, ten minutes of sound on two cores some minutes.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1200.0)
_FRAMES = tuple(float(1 << power) for power in range(0, 17, 2))
_ITEMS = tuple(float(1 << power) for power in range(9))

# Of HTTP: at a time, and how long one may keep silent.
_MAX_CONNECTIONS = 32
_SILENT_SECONDS = 10


class Metrics:
    """The metrics of one server. May be told things from any thread.

    Args:
        versions: of the server and of what it runs on, by name.
    """

    def __init__(self, versions: Mapping[str, str]) -> None:
        # Not the library's global one: a process may hold more than one server, as the tests do.
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)

        def histogram(name: str, text: str, label: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"{_PREFIX}_{name}", text, [label], buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{_PREFIX}_{name}", text, labels, registry=registry)

        self._requests = counter("requests", "Calls that have ended, by gRPC status.", "method", "status")
        self._durations = histogram(
            "request_duration_seconds", "Calls from their arrival to their end.", "method", _SECONDS
        )
        self._in_progress = Gauge(
            f"{_PREFIX}_requests_in_progress",
            "Calls in progress; of EncodeStream and DecodeLong, the open streams.",
            ["method"],
            registry=registry,
        )
        self._queue = histogram("queue_seconds", "What pieces of work waited for the device.", "kind", _SECONDS)
        self._compute = histogram(
            "compute_seconds", "What batches, and long pieces of work in all their steps, took.", "kind", _SECONDS
        )
        self._batch_frames = histogram("batch_frames", "Code frames that were computed together.", "kind", _FRAMES)
        self._batch_items = histogram("batch_items", "Pieces of work that were computed together.", "kind", _ITEMS)
        self._busy = counter("device_busy_seconds", "What the device computed, whatever came of it.", "kind")
        self._graph_hits = counter("graph_hits", "Batches that were one of the recorded CUDA graphs.", "kind")
        self._graph_misses = counter("graph_misses", "Batches for which no graph was recorded.", "kind")
        self._frames = counter("code_frames", "Code frames that were computed.", "kind")
        self._audio = counter("audio_seconds", "Sound that these frames stand for.", "kind")
        self._build = Info(f"{_PREFIX}_build", "Versions.", registry=registry)
        self._model = Info(f"{_PREFIX}_model", "What is loaded, and where.", registry=registry)
        self._build.info(dict(versions))
        self._seconds_per_frame = 0.0
        # There from the start, or the first of each would not count as an increase.
        by_kind = (self._queue, self._compute, self._batch_frames, self._batch_items)
        for metric in (*by_kind, self._busy, self._frames, self._audio):
            for kind in Kind:
                metric.labels(kind.name.lower())
        for counted in (self._graph_hits, self._graph_misses):
            for kind in (Kind.ENCODE, Kind.DECODE):
                counted.labels(kind.name.lower())
        for method in _METHODS:
            self._durations.labels(method)
            self._in_progress.labels(method)
            for status in _STATUSES:
                self._requests.labels(method, status)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge that is asked for its value whenever it is read."""
        Gauge(f"{_PREFIX}_{name}", text, registry=self.registry).set_function(value)

    def loaded(self, info: EngineInfo) -> None:
        """Tell what is loaded."""
        self._seconds_per_frame = info.config.samples_per_frame / info.config.sampling_rate
        self._model.info(
            {
                "model": info.model_id,
                "revision": info.revision,
                "fingerprint": info.fingerprint,
                "device": info.device,
                "device_name": info.device_name,
                "dtype": info.dtype,
                "quantization": info.quantization,
            }
        )

    def in_progress(self, method: str) -> AbstractContextManager[None]:
        """Count a call as in progress while the body runs."""
        return self._in_progress.labels(method).track_inprogress()

    def ended(self, method: str, status: str, seconds: float) -> None:
        """Count a call that has ended."""
        self._requests.labels(method, status).inc()
        self._durations.labels(method).observe(seconds)

    def graph(self, kind: Kind, hit: bool) -> None:
        """Count a batch where graphs are recorded: it was one of them, or not."""
        (self._graph_hits if hit else self._graph_misses).labels(kind.name.lower()).inc()

    def busy(self, kind: Kind, seconds: float) -> None:
        """Count what a batch or a step took of the device."""
        self._busy.labels(kind.name.lower()).inc(seconds)

    def computed(self, kind: Kind, frames: int, queue_seconds: Sequence[float], compute_seconds: float) -> None:
        """Count what the device has computed together.

        Args:
            kind: of the work.
            frames: code frames of those that are answered.
            queue_seconds: of each piece that is answered.
            compute_seconds: of all together.
        """
        name = kind.name.lower()
        for seconds in queue_seconds:
            self._queue.labels(name).observe(seconds)
        self._compute.labels(name).observe(compute_seconds)
        self._batch_frames.labels(name).observe(frames)
        self._batch_items.labels(name).observe(len(queue_seconds))
        self._frames.labels(name).inc(frames)
        self._audio.labels(name).inc(frames * self._seconds_per_frame)


class _HttpHandler(WSGIRequestHandler):
    """Waits for a request for a while only, and logs none."""

    timeout = _SILENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class _HttpServer(ThreadingMixIn, WSGIServer):
    """A thread for each connection; one too many ends the oldest, so that idle ones keep nobody out."""

    daemon_threads = True
    request_queue_size = _MAX_CONNECTIONS

    def __init__(self, address: addresses.Address) -> None:
        self._connections: dict[Any, None] = {}
        self.address_family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((address.host, address.port), _HttpHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a new connection."""
        self._connections[request] = None
        for oldest in list(self._connections)[:-_MAX_CONNECTIONS]:
            self._connections.pop(oldest, None)
            with suppress(OSError):  # it has ended meanwhile
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection that has ended."""
        self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say in a line that a connection came to nothing."""
        log(logging.DEBUG, "metrics connection failed", error=repr(sys.exc_info()[1]))


@contextmanager
def exposed(metrics: Metrics, text: str) -> Iterator[str]:
    """Serve `metrics` over HTTP at `text`, host:port, while the body runs.

    Yields:
        The address, with the port that a 0 has become.

    Raises:
        AddressError: nothing can listen there.
    """
    address = addresses.parse_port(text, "metrics")
    with addresses.taken(address, 0):
        pass  # whatever speaks against it is said in words
    try:
        server = _HttpServer(address)
    except OSError as error:
        raise addresses.AddressError(f"cannot listen on {address.target} for metrics: {error.strerror}") from error
    server.set_app(make_wsgi_app(metrics.registry))
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    target = addresses.Address(host=address.host, port=server.server_port).target
    if not address.is_loopback:
        log(logging.WARNING, "anybody who reaches this address can read the metrics", address=target)
    try:
        yield target
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

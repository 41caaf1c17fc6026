"""One server process, from its flags to its exit status."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from . import access, memory
from . import address as addresses
from .config import ServeConfig
from .engine import Engine
from .errors import RequestError, invalid
from .handlers import SERVICE, generic_handler, only_message
from .messages import STATUS, Limits
from .metrics import Metrics, exposed
from .scheduler import Scheduler
from .service import TokenizerServicer, in_time, versions
from .telemetry import log

SERVICE_NAME = SERVICE.full_name

# The empty name stands for the whole process.
_HEALTH_NAMES = ("", SERVICE_NAME)
# Checks, and as many watches, at a time: in all less than _OTHER_CALLS, that they are in nobody's way.
_MOST_HEALTH_CALLS = 100
# How long its request may take.
_HEALTH_SECONDS = 10.0
_MOST_REFLECTIONS = 16

# How often the files of certificates are looked at.
_LOOK_SECONDS = 1.0
# With mutual TLS, how long a client may come back by what was agreed upon with its certificate, without showing it.
_SESSION_SECONDS = 3600.0
# How long calls may go on whose connection has grown old, or has been made under other certificates.
_FORMER_SECONDS = 3600.0

# How long answers that have been given may take to leave.
_HANG_UP_SECONDS = 1.0

# Calls beside the service's own that have room at any time: health checks and watches, GetInfo, reflection.
_OTHER_CALLS = 256

# How long a connection may take to become one, with TLS and HTTP/2: one that says nothing is closed.
_HANDSHAKE_SECONDS = 10.0
# Of the health port.
_HEALTH_CONNECTIONS = 256
_HEALTH_MESSAGE_BYTES = 4096
# Open files beside connections: the listening sockets, those of the model and the libraries, the metrics' connections.
_OTHER_FILES = 256

EXIT_OK = 0
EXIT_NO_START = 1
EXIT_DEVICE_FAILURE = 3


def _options(config: ServeConfig, max_connections: int, max_message_bytes: int) -> list[tuple[str, Any]]:
    def milliseconds(seconds: float) -> int:
        return max(1, round(seconds * 1000))

    options = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_concurrent_streams", config.max_streams_per_connection),
        ("grpc.server_handshake_timeout_ms", milliseconds(_HANDSHAKE_SECONDS)),
        ("grpc.max_connection_idle_ms", milliseconds(config.max_connection_idle_seconds)),
        # No compression: neither sound nor codes shrink, but a few bytes can grow to the largest message.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # With it two servers on one port share its connections, without a word: it is for those of one process.
        ("grpc.so_reuseport", int(config.tls_cert is not None)),
        # Let clients notice a dead connection within a minute without being sent away for asking.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]
    if config.max_connection_age_seconds is not None:
        options.append(("grpc.max_connection_age_ms", milliseconds(config.max_connection_age_seconds)))
        options.append(("grpc.max_connection_age_grace_ms", milliseconds(_FORMER_SECONDS)))
    return options


class _Health:
    """`grpc.health.v1` of a process whose services have one status.

    Unlike grpcio-health-checking's servicer it ends the watches when the server drains: they never end of themselves,
    and the server would wait for them until its grace is over. And it waits for no request for long, nor for many: at
    the health address anybody may ask.
    """

    def __init__(self) -> None:
        self._status = health_pb2.HealthCheckResponse.NOT_SERVING
        self._draining = False
        self._changed = asyncio.Event()
        self._calls = {"Check": 0, "Watch": 0}

    @property
    def serving(self) -> bool:
        """The status now."""
        serving: bool = self._status == health_pb2.HealthCheckResponse.SERVING
        return serving

    def set(self, serving: bool, *, draining: bool = False) -> None:
        """Tell the status from now on; a server that drains has no other after it."""
        status = health_pb2.HealthCheckResponse
        self._status = status.SERVING if serving else status.NOT_SERVING
        self._draining = draining
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @property
    def handler(self) -> grpc.GenericRpcHandler:
        """Its methods, for a server."""
        methods = {"Check": self._handler("Check", self._check), "Watch": self._handler("Watch", self._watch)}
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods)

    def _handler(self, name: str, method: Callable[[str, Any], Awaitable[None]]) -> Any:
        async def call(stream: Any, context: Any) -> None:
            if self._calls[name] >= _MOST_HEALTH_CALLS:
                sentence = f"{_MOST_HEALTH_CALLS} such calls are in progress already"
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence)
            self._calls[name] += 1
            try:
                await method(await self._service_of(stream), context)
            except RequestError as error:
                await context.abort(STATUS[error.reason], str(error))
            finally:
                self._calls[name] -= 1

        return grpc.stream_stream_rpc_method_handler(call)

    @staticmethod
    async def _service_of(stream: Any) -> str:
        """The service that a request asks about."""
        data = await only_message(stream, _HEALTH_SECONDS)
        if len(data) > _HEALTH_MESSAGE_BYTES:
            raise invalid("message", f"{len(data)} bytes", f"at most {_HEALTH_MESSAGE_BYTES} bytes")
        try:
            service: str = health_pb2.HealthCheckRequest.FromString(data).service
        except DecodeError:
            raise invalid("message", f"{len(data)} bytes", "a HealthCheckRequest") from None
        return service

    async def _check(self, service: str, context: Any) -> None:
        """The status now."""
        if service not in _HEALTH_NAMES:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {service[:128]!r} here")
        await self._tell(self._status, context)

    async def _watch(self, service: str, context: Any) -> None:
        """The status now, and each further one."""
        known = service in _HEALTH_NAMES
        told = None
        while True:
            draining, changed = self._draining, self._changed
            status = self._status if known else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status != told:
                await self._tell(status, context)
                told = status
            if draining:
                return
            await changed.wait()

    @staticmethod
    async def _tell(status: Any, context: Any) -> None:
        await context.write(health_pb2.HealthCheckResponse(status=status).SerializeToString())


class _FewReflections(grpc.aio.ServerInterceptor):
    """Keeps streams of grpc.reflection, whose servicer waits without end, few and none of them idle."""

    def __init__(self) -> None:
        self._open = 0

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """The call's handler, or the bounded one of a reflection."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith("/grpc.reflection."):
            return handler

        async def call(stream: AsyncIterator[Any], context: Any) -> None:
            if self._open >= _MOST_REFLECTIONS:
                sentence = f"{_MOST_REFLECTIONS} such calls are in progress already"
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence)
            self._open += 1
            try:
                async for response in handler.stream_stream(in_time(stream), context):
                    await context.write(response)
            except RequestError as error:
                await context.abort(STATUS[error.reason], str(error))
            finally:
                self._open -= 1

        return grpc.stream_stream_rpc_method_handler(call, handler.request_deserializer, handler.response_serializer)


class Server:
    """Binds, loads, serves until told to stop.

    Args:
        config: the process's settings.

    Raises:
        AddressError, AccessError: a setting that is no good; the sentence says why.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._address = addresses.parse(config.address)
        self._health_address = (
            addresses.parse_port(config.health_address, "health") if config.health_address is not None else None
        )
        self._certificates = access.certificates(config)
        self._max_connections = _allowed_connections(config.max_connections)
        self._exit_status = EXIT_OK
        self._stopping = asyncio.Event()
        # The ports beside the service's own.
        self._beside = AsyncExitStack()
        self._metrics = metrics = Metrics(versions())
        self._scheduler = scheduler = Scheduler(
            lambda: Engine(config, metrics.graph),
            lambda info: config.max_queued_frames or 2 * Limits.of(config, info).max_frames,
            self._device_failed,
            metrics=metrics,
        )
        self._health = _Health()
        metrics.watch("ready", "Whether calls are answered: 1 or 0.", lambda: self._health.serving)
        metrics.watch("queue_frames", "Code frames that wait or are computed.", lambda: scheduler.queued_frames)
        metrics.watch("queue_limit_frames", "Code frames that may.", lambda: scheduler.max_queued_frames)
        metrics.watch("device_memory_bytes", "Memory of the device that the process holds.", scheduler.memory_used)
        metrics.watch("device_memory_limit_bytes", "Memory of the device that it may use.", scheduler.memory_limit)
        interceptors: list[grpc.aio.ServerInterceptor] = []
        traced: Callable[..., None] | None = None
        if config.trace:
            from . import tracing

            self._tracing = tracing.Tracing(versions())
            interceptors += self._tracing.interceptors()
            traced = tracing.ended
        self._servicer = TokenizerServicer(self._scheduler, config, metrics, traced)
        if config.token_file is not None:
            # Before all else: strangers leave no spans.
            interceptors.insert(0, access.TokenCheck(config.token_file, self._servicer))
        self._interceptors = [*interceptors, _FewReflections()]
        self._grpc = self._made()
        # Those with other certificates, while calls are in flight on them.
        self._former: set[Any] = set()

    def _made(self) -> Any:
        config = self._config
        # The service refuses calls over its own limit, with words and a status of its own; this one keeps what a flood
        # of them may hold in memory bounded. Health checks count here, and have room above it.
        server = grpc.aio.server(
            options=_options(config, self._max_connections, config.max_message_bytes),
            interceptors=self._interceptors,
            maximum_concurrent_rpcs=2 * config.max_concurrent_calls + _OTHER_CALLS,
        )
        server.add_generic_rpc_handlers((generic_handler(self._servicer),))
        server.add_generic_rpc_handlers((self._health.handler,))
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        return server

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT.

        Returns:
            The exit status: 0, or 3 after a device failure.

        Raises:
            AddressError, DeviceError, ConfigError, CheckpointError, QuantizeError, MemoryLimitError: the server cannot
                start; the sentence says why.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        async with self._beside:
            if self._config.metrics_address is not None:
                metrics = exposed(self._metrics, self._config.metrics_address)
                log(logging.INFO, "metrics", address=metrics.__enter__())
                # It takes half a second, in which calls are to go on.
                self._beside.push_async_callback(asyncio.to_thread, metrics.__exit__, None, None, None)
            await self._beside.enter_async_context(self._health_port())
            return await self._run()

    async def _renew(self, certificates: access.Files[grpc.ServerCredentials]) -> None:
        """Go over to another listener on the same port when the certificates have changed.

        gRPC can be given others while it runs, but then a handshake may use what another has just freed. With mutual
        TLS also every so often: with the listener end the sessions that clients could come back by.
        """
        config = self._config
        used, since = certificates.get(), asyncio.get_running_loop().time()
        longest = min(config.max_connection_age_seconds or _SESSION_SECONDS, _SESSION_SECONDS)
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            latest, now = certificates.get(), asyncio.get_running_loop().time()
            if latest is used and (config.tls_client_ca is None or now - since < longest):
                continue
            used, since = latest, now
            server = self._made()
            try:
                server.add_secure_port(self._address.target, latest)
            except RuntimeError as error:
                log(logging.WARNING, "cannot listen with the new certificates; the old go on", error=str(error))
                continue
            former, self._grpc = self._grpc, server
            self._former.add(former)
            await server.start()
            leaving = asyncio.ensure_future(former.stop(_FORMER_SECONDS))
            leaving.add_done_callback(lambda _, former=former: self._former.discard(former))

    async def _run(self) -> int:
        await self._bind()
        renewing = asyncio.ensure_future(self._renew(self._certificates)) if self._certificates else None
        try:
            loading = asyncio.ensure_future(self._scheduler.start())
            stopping = asyncio.ensure_future(self._stopping.wait())
            await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                if loading.exception() is not None:
                    self._exit_status = EXIT_NO_START
                loading.result()
                self._health.set(True)
                log(logging.INFO, "serving", address=self._address.target, pid=os.getpid())
            await stopping
        finally:
            if renewing is not None:
                renewing.cancel()
            await self._shut_down()
        return self._exit_status

    @asynccontextmanager
    async def _health_port(self) -> AsyncIterator[None]:
        """Answer at the health address while the body runs."""
        if self._health_address is None:
            yield
            return
        server = grpc.aio.server(
            options=_options(self._config, _HEALTH_CONNECTIONS, _HEALTH_MESSAGE_BYTES),
            maximum_concurrent_rpcs=_OTHER_CALLS,
        )
        server.add_generic_rpc_handlers((self._health.handler,))
        address = await _started(server, self._health_address)
        log(logging.INFO, "health", address=address.target)
        try:
            yield
        finally:
            await server.stop(_HANG_UP_SECONDS)

    async def _bind(self) -> None:
        """Listen. Until the model is loaded, calls are answered with UNAVAILABLE and health with NOT_SERVING."""
        config = self._config
        credentials = self._certificates.get() if self._certificates else None
        self._address = await _started(self._grpc, self._address, config.socket_mode, credentials)
        tls = "none" if credentials is None else "server" if config.tls_client_ca is None else "mutual"
        address = self._address.target
        if not self._address.is_loopback:
            if tls != "mutual" and config.token_file is None:
                sentence = "anybody who reaches this address can use the server: it asks for no credentials"
                log(logging.WARNING, sentence, address=address)
            elif tls == "none":
                sentence = "the token travels in the clear: whoever sees the traffic can use it; --tls-cert hides it"
                log(logging.WARNING, sentence, address=address)
        log(logging.INFO, "listening", address=address, tls=tls, token="no" if config.token_file is None else "yes")

    async def _shut_down(self) -> None:
        self._health.set(False, draining=True)
        # After a device failure there is nothing to wait for but the answers that say so.
        grace = self._config.grace_seconds if self._exit_status == EXIT_OK else 1.0
        if self._address.path is not None:
            # First of all: from then on the path is a successor's.
            self._address.path.unlink(missing_ok=True)
        # Clients are told at once (GOAWAY) to make their next call on another connection: to a successor, which may be
        # there long before the last call has finished here. To one that was on its way gRPC answers CANCELLED. It may
        # hang up on its last answers, so it has a moment left when the service has given them.
        servers = [self._grpc, *self._former]
        leaving = asyncio.gather(
            *(server.stop(grace + _HANG_UP_SECONDS) for server in servers),
            self._beside.aclose(),  # a successor wants these ports, too
        )
        await self._servicer.drain(grace)
        await asyncio.gather(*(server.stop(_HANG_UP_SECONDS) for server in servers))
        await leaving
        # In a thread while the device comes to its end: it takes a second at most.
        flushing = asyncio.to_thread(self._tracing.close) if self._config.trace else asyncio.sleep(0)
        idle, _ = await asyncio.gather(self._scheduler.close(timeout=1.0), flushing)
        log(logging.INFO, "stopped", exit_status=self._exit_status)
        if not idle or self._exit_status == EXIT_DEVICE_FAILURE:
            # Nobody waits any more for what the device thread is at, and it cannot be told to leave off; and what is
            # left on a device that has failed cannot be cleared away, nor is there a need to try.
            logging.shutdown()
            os._exit(self._exit_status)

    def _signalled(self, number: int) -> None:
        if self._stopping.is_set():
            log(logging.WARNING, "second signal: stopping at once", signal=signal.Signals(number).name)
            os._exit(128 + number)
        log(logging.INFO, "stopping", signal=signal.Signals(number).name, grace_seconds=self._config.grace_seconds)
        self._stopping.set()

    def _device_failed(self) -> None:
        self._exit_status = EXIT_DEVICE_FAILURE
        self._stopping.set()


async def _started(
    server: Any, address: addresses.Address, socket_mode: int = 0, credentials: grpc.ServerCredentials | None = None
) -> addresses.Address:
    """Have `server` listen at `address`.

    Returns:
        The address, with the port that a 0 has become.

    Raises:
        AddressError: it cannot.
    """
    with addresses.taken(address, socket_mode) as binding:
        try:
            if credentials is None:
                port = server.add_insecure_port(binding.target)
            else:
                port = server.add_secure_port(binding.target, credentials)
        except RuntimeError as error:
            raise addresses.AddressError(f"cannot listen on {address.target}: {error}") from error
        await server.start()
    return address if address.path is not None else addresses.Address(host=address.host, port=port)


def _allowed_connections(wanted: int) -> int:
    """Let the process have as many open files as `wanted` connections need; and how many of these it may have."""
    beside = _HEALTH_CONNECTIONS + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted + beside:
        return wanted
    allowed = wanted + beside if hard == resource.RLIM_INFINITY else min(wanted + beside, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    connections = min(wanted, max(allowed - beside, allowed // 2))
    if connections < wanted:
        log(logging.WARNING, "too few open files for --max-connections", open_files=allowed, connections=connections)
    return connections


async def serve(config: ServeConfig) -> int:
    """Run a server; see `Server.run`."""
    memory.keep_allocations_together()
    return await Server(config).run()

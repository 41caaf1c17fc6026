"""Who may call: TLS, tokens, and callers that open connections and say nothing."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import queue
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from process_harness import PATIENCE, ServerProcess, eventually, free_port, random_codes, run_command
from test_metrics import metrics_url, read, value

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_audio_tokenizer.v1 import tokenizer_pb2_grpc
from mimo_tokenizer_server import access
from mimo_tokenizer_server.config import ServeConfig

Code = grpc.StatusCode

TOKEN = "first-token-of-two-0123456789"
OTHER_TOKEN = "another-token-0123456789"

SERVICE = pb.DESCRIPTOR.services_by_name["AudioTokenizer"]
SERVING = health_pb2.HealthCheckResponse.SERVING
TOO_LONG_AGO = datetime(2001, 1, 1, tzinfo=timezone.utc)


@dataclass
class Pair:
    """A certificate with its chain, and its key."""

    chain: bytes
    key: bytes


def issue(ca: trustme.CA, *, expired: bool = False) -> Pair:
    """A certificate for this machine."""
    dates = {"not_before": TOO_LONG_AGO, "not_after": TOO_LONG_AGO + timedelta(days=1)} if expired else {}
    issued = ca.issue_cert("localhost", "127.0.0.1", **dates)
    return Pair(b"".join(part.bytes() for part in issued.cert_chain_pems), issued.private_key_pem.bytes())


def put(path: Path, data: str | bytes, mode: int = 0o600) -> None:
    """Replace a file as a careful program does, at once and whole."""
    new = path.with_suffix(".new")
    new.write_bytes(data if isinstance(data, bytes) else data.encode())
    new.chmod(mode)
    new.replace(path)


class Site:
    """CAs, and the files of a server: cert.pem, key.pem, ca.pem, tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Of servers, of clients, and of nobody here.
        self.server_ca, self.client_ca, self.foreign_ca = trustme.CA(), trustme.CA(), trustme.CA()
        self.server, self.client = issue(self.server_ca), issue(self.client_ca)
        self.restore()

    def restore(self) -> None:
        """Put back what is not as it was at the start: a file that is written anew has changed for a server."""
        first = {
            "cert.pem": self.server.chain,
            "key.pem": self.server.key,
            "ca.pem": self.client_ca.cert_pem.bytes(),
            "tokens": f"# of the tests\n\n{TOKEN}\n".encode(),
        }
        for name, data in first.items():
            path = self.folder / name
            if not path.is_file() or path.read_bytes() != data:
                put(path, data)

    def restored(self, server: ServerProcess) -> None:
        """Put everything back, and wait for the server to use it."""
        self.restore()
        eventually(lambda: self.status(server) is Code.OK)

    def put_pair(self, pair: Pair) -> None:
        """Change the server's certificate."""
        put(self.folder / "cert.pem", pair.chain)
        put(self.folder / "key.pem", pair.key)

    @property
    def tls(self) -> tuple[str, ...]:
        """Flags for TLS."""
        return ("--tls-cert", str(self.folder / "cert.pem"), "--tls-key", str(self.folder / "key.pem"))

    @property
    def mutual(self) -> tuple[str, ...]:
        """Flags for mutual TLS."""
        return (*self.tls, "--tls-client-ca", str(self.folder / "ca.pem"))

    @property
    def token(self) -> tuple[str, ...]:
        """Flags for tokens."""
        return ("--token-file", str(self.folder / "tokens"))

    @contextlib.contextmanager
    def channel(
        self, server: ServerProcess, *, roots: trustme.CA | None = None, client: Pair | None = None
    ) -> Iterator[grpc.Channel]:
        """A TLS channel with a connection of its own; without a client's certificate if that is empty."""
        client = self.client if client is None else client
        trusted = (roots or self.server_ca).cert_pem.bytes()
        credentials = grpc.ssl_channel_credentials(trusted, client.key or None, client.chain or None)
        port = server.address.rpartition(":")[2]
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
            yield channel

    def status(self, server: ServerProcess, token: str | None = TOKEN, **options: Any) -> grpc.StatusCode:
        """How a call on a new connection ends."""
        with self.channel(server, **options) as channel:
            return status_of(channel, token)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"

NO_CERTIFICATE = Pair(b"", b"")


def bearer(token: str | None) -> tuple[tuple[str, str], ...]:
    return () if token is None else (("authorization", f"Bearer {token}"),)


def status_of(channel: grpc.Channel, token: str | None = TOKEN) -> grpc.StatusCode:
    """How a call ends."""
    try:
        tokenizer_pb2_grpc.AudioTokenizerStub(channel).GetInfo(
            pb.GetInfoRequest(), timeout=PATIENCE, metadata=bearer(token)
        )
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
        return code
    return Code.OK


def warnings(server: ServerProcess) -> list[str]:
    """What it has warned of before it listened."""
    lines = server.log.partition("listening")[0].splitlines()
    return [line for line in lines if "WARNING" in line and "random weights" not in line]


def tcp(address: str) -> tuple[str, int]:
    return "127.0.0.1", int(address.rpartition(":")[2])


def open_files(soft: int, hard: int) -> tuple[str, ...]:
    """A launcher that lets a process have so many open files, and itself allow so many."""
    program = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}));"
    return (sys.executable, "-c", f"{program} os.execv(sys.argv[1], sys.argv[1:])")


@contextlib.contextmanager
def module_server(*flags: str, address: str = "127.0.0.1:0", launcher: tuple[str, ...] = ()) -> Iterator[ServerProcess]:
    server = ServerProcess(*flags, address=address, launcher=launcher)
    try:
        yield server.ready()
        assert server.stop() == 0, server.log
        assert server.complaints() == []
    finally:
        server.clean_up()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The files of all servers of this module."""
    return Site(tmp_path_factory.mktemp("site"))


@pytest.fixture
def site(files: Site) -> Iterator[Site]:
    """The files, which a test may change."""
    yield files
    files.restore()


@pytest.fixture(scope="module")
def guarded(files: Site) -> Iterator[ServerProcess]:
    """A server with everything: mutual TLS, a token, a health port."""
    ports = ("--health-address", "127.0.0.1:0", "--metrics-address", "127.0.0.1:0")
    with module_server(*files.mutual, *files.token, *ports, "--log-level", "debug") as server:
        yield server
        for token in (TOKEN, OTHER_TOKEN):
            assert token not in server.log
        # What gRPC's library writes by itself is not ours to read, and anybody can have it written.
        assert [line for line in server.lines if not line.startswith("20")] == []


@pytest.fixture(scope="module")
def narrow(files: Site) -> Iterator[ServerProcess]:
    """A server on all interfaces with a token, no TLS, and room for few connections that soon are idle."""
    limits = ("--max-connections", "20", "--max-connection-idle-seconds", "1", "--max-streams-per-connection", "3")
    limits += ("--metrics-address", "127.0.0.1:0")
    launcher = open_files(200, 1000)
    with module_server(*files.token, *limits, address="0.0.0.0:0", launcher=launcher) as server:
        yield server


@pytest.fixture(scope="module")
def ageing(files: Site) -> Iterator[ServerProcess]:
    """A server on all interfaces with TLS that asks for nothing, whose connections grow a second old."""
    flags, launcher = (*files.tls, "--max-connection-age-seconds", "1"), open_files(200, 400)
    with module_server(*flags, address="0.0.0.0:0", launcher=launcher) as server:
        yield server


# ---------------------------------------------------------------- certificates


def test_mutual_tls_and_a_token(site: Site, guarded: ServerProcess) -> None:
    assert "tls=mutual token=yes" in guarded.wait_for("listening")
    assert warnings(guarded) == []
    codes = random_codes(40)
    message = pb.Codes(num_quantizers=len(codes), frames=40, data=codes.tobytes())
    with site.channel(guarded) as channel:
        assert status_of(channel) is Code.OK
        stub = tokenizer_pb2_grpc.AudioTokenizerStub(channel)
        request = pb.DecodeRequest(items=[pb.DecodeItem(codes=message)])
        (item,) = stub.Decode(request, timeout=PATIENCE, metadata=bearer(TOKEN)).items
        assert len(item.audio.pcm) == 40 * 960 * 4
        long = pb.DecodeLongRequest(item=request.items[0])
        answers = list(stub.DecodeLong(long, timeout=PATIENCE, metadata=bearer(TOKEN)))
        assert b"".join(answer.pcm for answer in answers) == item.audio.pcm


@pytest.mark.parametrize("whose", ["foreign", "expired", "nobody", "server"])
def test_clients_that_are_not_let_in(site: Site, guarded: ServerProcess, whose: str) -> None:
    client = {
        "foreign": issue(site.foreign_ca),
        "expired": issue(site.client_ca, expired=True),
        "nobody": NO_CERTIFICATE,
        "server": site.server,
    }[whose]
    assert site.status(guarded, client=client) is Code.UNAVAILABLE
    # Health is told without a token, not without a certificate.
    with site.channel(guarded, client=client) as channel, pytest.raises(grpc.RpcError) as refused:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
    assert refused.value.code() is Code.UNAVAILABLE
    assert site.status(guarded) is Code.OK


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_sessions_end(site: Site, start: Callable[..., ServerProcess], version: ssl.TLSVersion) -> None:
    """Or a certificate that has expired would be good for as long as a session's ticket is."""
    flags = (*site.mutual, "--max-connection-age-seconds", "1")
    server = start(*flags, address="127.0.0.1:0").ready()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    site.server_ca.configure_trust(context)
    put(site.folder / "client.pem", site.client.key + site.client.chain)
    context.load_cert_chain(site.folder / "client.pem")
    context.set_alpn_protocols(["h2"])
    context.minimum_version = context.maximum_version = version
    session: ssl.SSLSession | None = None

    def resumed() -> bool:
        nonlocal session
        with (
            socket.create_connection(tcp(server.address), PATIENCE) as raw,
            context.wrap_socket(raw, server_hostname="localhost", session=session) as connection,
        ):
            connection.sendall(PREFACE + SETTINGS)
            assert connection.recv(1000)  # the ticket comes with it
            session = session or connection.session
            return bool(connection.session_reused)

    def ended() -> bool:
        try:
            return not resumed()
        except OSError:  # between two listeners
            return False

    eventually(ended)
    assert session is not None
    eventually(ended)


def test_handshakes_at_a_time_while_certificates_change(site: Site, start: Callable[..., ServerProcess]) -> None:
    """What one handshake has let go of must not be what another has just begun to use."""
    server = start(*site.mutual, address="127.0.0.1:0").ready()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    put(site.folder / "client.pem", site.client.key + site.client.chain)
    context.load_cert_chain(site.folder / "client.pem")
    context.set_alpn_protocols(["h2"])
    done = threading.Event()

    def connect() -> int:
        count = 0
        while not done.is_set():
            with contextlib.suppress(OSError), socket.create_connection(tcp(server.address), PATIENCE) as raw:
                context.wrap_socket(raw).close()
                count += 1
        return count

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        counts = [pool.submit(connect) for _ in range(16)]
        for number in range(1, 5):
            put(site.folder / "ca.pem", site.client_ca.cert_pem.bytes() + b"# another\n" * number)
            eventually(lambda number=number: server.log.count("certificates read anew") == number)
        done.set()
        assert sum(count.result() for count in counts) > 100
    eventually(lambda: site.status(server) is Code.OK)
    assert server.stop() == 0, server.log
    assert server.complaints() == []


def test_servers_that_a_client_refuses(site: Site, guarded: ServerProcess) -> None:
    assert site.status(guarded, roots=site.foreign_ca) is Code.UNAVAILABLE
    site.put_pair(issue(site.server_ca, expired=True))
    eventually(lambda: site.status(guarded) is Code.UNAVAILABLE)
    site.restored(guarded)


def test_plain_text_is_not_answered(site: Site, guarded: ServerProcess) -> None:
    with grpc.insecure_channel(guarded.address) as channel:
        assert status_of(channel) is Code.UNAVAILABLE
    assert site.status(guarded) is Code.OK


def test_a_new_certificate_and_a_new_ca(site: Site, guarded: ServerProcess) -> None:
    messages: queue.SimpleQueue[pb.EncodeStreamRequest | None] = queue.SimpleQueue()
    opening = pb.EncodeStreamOpen(sample_rate=24_000, channels=1, format=pb.SAMPLE_FORMAT_FLOAT32)
    messages.put(pb.EncodeStreamRequest(open=opening))
    with site.channel(guarded) as old:
        stub = tokenizer_pb2_grpc.AudioTokenizerStub(old)
        in_flight = stub.EncodeStream(iter(messages.get, None), timeout=PATIENCE, metadata=bearer(TOKEN))
        eventually(lambda: value(guarded, "requests_in_progress", method="EncodeStream") == 1)
        site.put_pair(issue(site.foreign_ca))
        eventually(lambda: site.status(guarded, roots=site.foreign_ca) is Code.OK)
        guarded.wait_for("certificates read anew")
        assert site.status(guarded) is Code.UNAVAILABLE
        put(site.folder / "ca.pem", site.foreign_ca.cert_pem.bytes())
        new = issue(site.foreign_ca)
        eventually(lambda: site.status(guarded, roots=site.foreign_ca, client=new) is Code.OK)
        assert site.status(guarded, roots=site.foreign_ca) is Code.UNAVAILABLE
        # What has begun before goes on to its end.
        messages.put(pb.EncodeStreamRequest(pcm=bytes(4 * 24_000)))
        messages.put(None)
        assert sum(message.codes.frames for message in in_flight) == 26
    site.restored(guarded)


@pytest.mark.parametrize("fault", ["half", "empty", "gone", "other key", "no CA"])
def test_new_files_that_are_no_good_leave_the_old(site: Site, guarded: ServerProcess, fault: str) -> None:
    new = issue(site.foreign_ca)
    before = guarded.log.count("certificates changed and cannot be used")
    if fault == "half":
        put(site.folder / "cert.pem", new.chain[: len(new.chain) // 2])
    elif fault == "empty":
        put(site.folder / "cert.pem", b"")
    elif fault == "gone":
        (site.folder / "key.pem").unlink()
    elif fault == "other key":
        put(site.folder / "cert.pem", new.chain)
    else:
        put(site.folder / "ca.pem", b"garbage")
    eventually(lambda: guarded.log.count("certificates changed and cannot be used; the old go on") == before + 1)
    assert site.status(guarded) is Code.OK
    assert site.status(guarded, client=NO_CERTIFICATE) is Code.UNAVAILABLE
    # And whole ones are taken again.
    put(site.folder / "ca.pem", site.client_ca.cert_pem.bytes())
    site.put_pair(new)
    eventually(lambda: site.status(guarded, roots=site.foreign_ca) is Code.OK)
    site.restored(guarded)


# ---------------------------------------------------------------- tokens


def send(channel: grpc.Channel, path: str, data: bytes, metadata: Any, streaming: bool) -> grpc.RpcError | None:
    """Send a call, and return how it fails."""
    plain: dict[str, Any] = {"request_serializer": bytes, "response_deserializer": bytes}
    try:
        if streaming:
            list(channel.stream_stream(path, **plain)(iter([data]), timeout=PATIENCE, metadata=metadata))
        else:
            channel.unary_unary(path, **plain)(data, timeout=PATIENCE, metadata=metadata)
    except grpc.RpcError as error:
        return error
    return None


@pytest.mark.parametrize("method", [method.name for method in SERVICE.methods])
def test_every_method_needs_a_token(site: Site, guarded: ServerProcess, method: str) -> None:
    path, streaming = f"/{SERVICE.full_name}/{method}", method in ("EncodeStream", "DecodeLong")
    before = value(guarded, "requests_total", method=method, status="UNAUTHENTICATED")
    wrong = [
        (),
        bearer(OTHER_TOKEN),
        bearer(TOKEN[:-1]),
        bearer(TOKEN + "x"),
        bearer(""),
        bearer("# of the tests"),
        bearer("x" * 4000),
        (("authorization", TOKEN),),
        (("authorization", f"Basic {TOKEN}"),),
        (("token", TOKEN),),
    ]
    with site.channel(guarded) as channel:
        for metadata in wrong:
            error: Any = send(channel, path, b"\xff" * 1000, (*metadata, ("x-request-id", "of-mine")), streaming)
            assert error.code() is Code.UNAUTHENTICATED, metadata
            assert ("metadata `authorization: Bearer <token>`" in error.details()) == (
                "authorization" not in dict(metadata)
            )
            trailing = dict(error.trailing_metadata())
            detail = pb.ErrorDetail.FromString(trailing["mimo-error-detail-bin"])
            assert (detail.reason, detail.request_id) == (pb.ErrorDetail.REASON_UNAUTHENTICATED, "of-mine")
            assert trailing["x-request-id"] == "of-mine"
        # With it, it is the request that is looked at.
        for scheme in ("Bearer", "bearer"):
            fine = send(channel, path, b"\xff" * 1000, (("authorization", f"{scheme} {TOKEN}"),), streaming)
            assert fine is not None
            assert fine.code() is Code.INVALID_ARGUMENT  # type: ignore[attr-defined]
    eventually(lambda: value(guarded, "requests_total", method=method, status="UNAUTHENTICATED") == before + len(wrong))


def test_a_message_that_is_too_large(site: Site, guarded: ServerProcess) -> None:
    """Without a token it is not even read."""
    path, large = f"/{SERVICE.full_name}/Encode", bytes(65 << 20)
    with site.channel(guarded) as channel:
        for token, code in ((None, Code.UNAUTHENTICATED), (OTHER_TOKEN, Code.UNAUTHENTICATED)):
            error: Any = send(channel, path, large, bearer(token), streaming=False)
            assert error.code() is code
        error = send(channel, path, large, bearer(TOKEN), streaming=False)
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert status_of(channel) is Code.OK


def test_reflection_and_what_is_not_there_need_a_token(site: Site, guarded: ServerProcess) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")

    def services(channel: grpc.Channel, token: str | None) -> set[str]:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=PATIENCE, metadata=bearer(token))
        return {service.name for service in answer.list_services_response.service}

    with site.channel(guarded) as channel:
        for token in (None, OTHER_TOKEN):
            with pytest.raises(grpc.RpcError) as refused:
                services(channel, token)
            assert refused.value.code() is Code.UNAUTHENTICATED
            error: Any = send(channel, "/no.such.Service/Method", b"", bearer(token), streaming=False)
            assert error.code() is Code.UNAUTHENTICATED
        assert SERVICE.full_name in services(channel, TOKEN)
        error = send(channel, "/no.such.Service/Method", b"", bearer(TOKEN), streaming=False)
        assert error.code() is Code.UNIMPLEMENTED


def test_health_needs_a_token(site: Site, guarded: ServerProcess) -> None:
    with site.channel(guarded) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=SERVICE.full_name)
        for metadata in ((), bearer(OTHER_TOKEN)):
            for call in (stub.Check, stub.Watch):
                with pytest.raises(grpc.RpcError) as refused:
                    list(call(request, timeout=PATIENCE, metadata=metadata))
                assert refused.value.code() is Code.UNAUTHENTICATED
        assert stub.Check(request, timeout=PATIENCE, metadata=bearer(TOKEN)).status == SERVING
        watch = stub.Watch(request, timeout=PATIENCE, metadata=bearer(TOKEN))
        assert next(watch).status == SERVING
        watch.cancel()


def test_calls_without_end_of_strangers_are_in_nobodys_way(site: Site, guarded: ServerProcess) -> None:
    """More than there is room for, on one connection, whose requests never come."""
    never: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with site.channel(guarded) as channel:
        paths = [
            "/grpc.health.v1.Health/Check",
            f"/{SERVICE.full_name}/Encode",
            "/grpc.reflection.v1.ServerReflection/S",
        ]
        for path in paths:
            for _ in range(250):
                call = channel.stream_stream(path)(iter(never.get, None), timeout=PATIENCE)
                assert call.code() is Code.UNAUTHENTICATED
                never.put(None)  # the call's thread ends
        assert status_of(channel) is Code.OK


def test_health_calls_without_end_are_in_nobodys_way(site: Site, guarded: ServerProcess) -> None:
    request = health_pb2.HealthCheckRequest()
    never: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with site.channel(guarded) as channel, contextlib.ExitStack() as stack:
        stub = health_pb2_grpc.HealthStub(channel)
        check = channel.stream_stream("/grpc.health.v1.Health/Check")
        half_open = [check(iter(never.get, None), timeout=PATIENCE, metadata=bearer(TOKEN)) for _ in range(101)]
        assert next(call for call in as_ended(half_open)).code() is Code.RESOURCE_EXHAUSTED
        for _ in range(100):
            watch = stub.Watch(request, timeout=PATIENCE, metadata=bearer(TOKEN))
            stack.callback(watch.cancel)
            assert next(watch).status == SERVING
        with pytest.raises(grpc.RpcError) as refused:
            next(stub.Watch(request, timeout=PATIENCE, metadata=bearer(TOKEN)))
        assert refused.value.code() is Code.RESOURCE_EXHAUSTED
        assert status_of(channel) is Code.OK
        # Those whose request never came end by themselves.
        codes = [call.code() for call in half_open]
        assert codes.count(Code.DEADLINE_EXCEEDED) == 100
        assert stub.Check(request, timeout=PATIENCE, metadata=bearer(TOKEN)).status == SERVING
        for _ in half_open:
            never.put(None)
        stack.close()

        def watched() -> bool:
            watch = stub.Watch(request, timeout=PATIENCE, metadata=bearer(TOKEN))
            try:
                return bool(next(watch).status == SERVING)
            except grpc.RpcError:
                return False
            finally:
                watch.cancel()

        eventually(watched)


def as_ended(calls: list[Any]) -> Iterator[Any]:
    """Calls, the first that has ended first."""
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for call in calls:
        if not call.add_callback(lambda call=call: ended.put(call)):
            ended.put(call)
    for _ in calls:
        yield ended.get(timeout=PATIENCE)


def test_reflections_without_end_are_in_nobodys_way(site: Site, guarded: ServerProcess) -> None:
    never: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with site.channel(guarded) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        begun = [
            stub.ServerReflectionInfo(iter(never.get, None), timeout=PATIENCE, metadata=bearer(TOKEN))
            for _ in range(17)
        ]
        assert next(as_ended(begun)).code() is Code.RESOURCE_EXHAUSTED
        for call in begun:
            call.cancel()
            never.put(None)
        request = reflection_pb2.ServerReflectionRequest(list_services="")

        def answered() -> bool:
            try:
                return bool(list(stub.ServerReflectionInfo(iter([request]), timeout=PATIENCE, metadata=bearer(TOKEN))))
            except grpc.RpcError:
                return False

        eventually(answered)


def test_tokens_change(site: Site, guarded: ServerProcess) -> None:
    path = site.folder / "tokens"
    with site.channel(guarded) as channel:
        answers = []
        stop = threading.Event()

        def call() -> None:
            while not stop.is_set():
                answers.append(status_of(channel))

        caller = threading.Thread(target=call)
        caller.start()
        try:
            put(path, f"{TOKEN}\n# new:\n  {OTHER_TOKEN}\r\n")
            eventually(lambda: status_of(channel, OTHER_TOKEN) is Code.OK)
            assert status_of(channel) is Code.OK
        finally:
            stop.set()
            caller.join(PATIENCE)
        assert set(answers) == {Code.OK}
        put(path, f"{OTHER_TOKEN}\n")
        assert status_of(channel) is Code.UNAUTHENTICATED
        assert status_of(channel, OTHER_TOKEN) is Code.OK
        for bad in ("", "# none\n", "short\n", f"{TOKEN}\nwith a space in it\n", "é" * 20):
            before = guarded.log.count("tokens changed and cannot be used")
            put(path, bad)
            for _ in range(2):
                assert status_of(channel, OTHER_TOKEN) is Code.OK
                assert status_of(channel) is Code.UNAUTHENTICATED
            eventually(lambda before=before: guarded.log.count("tokens changed and cannot be used") == before + 1)
        path.unlink()
        assert status_of(channel, OTHER_TOKEN) is Code.OK
        put(path, f"{TOKEN}\n", mode=0o644)
        assert status_of(channel) is Code.OK
        guarded.wait_for("every user of this machine can read the file of --token-file")
        assert status_of(channel, OTHER_TOKEN) is Code.UNAUTHENTICATED


# ---------------------------------------------------------------- the health port


def test_the_health_port(guarded: ServerProcess) -> None:
    address = guarded.wait_for(" health ").rpartition("address=")[2]
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE.full_name):
            assert stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE).status == SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        assert next(watch).status == SERVING
        watch.cancel()
        for metadata in ((), bearer(TOKEN)):
            for method in SERVICE.methods:
                error: Any = send(channel, f"/{SERVICE.full_name}/{method.name}", b"", metadata, streaming=False)
                assert error.code() is Code.UNIMPLEMENTED
            path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
            error = send(channel, path, b"", metadata, streaming=True)
            assert error.code() is Code.UNIMPLEMENTED
        with pytest.raises(grpc.RpcError) as refused:
            stub.Check(health_pb2.HealthCheckRequest(service="x" * 10_000), timeout=PATIENCE)
        assert refused.value.code() is Code.RESOURCE_EXHAUSTED


def test_all_ports_are_a_successors_while_the_last_calls_finish(
    start: Callable[..., ServerProcess], channel: Any
) -> None:
    flags = ("--grace-seconds", "30", "--health-address", f"127.0.0.1:{free_port()}")
    flags += ("--metrics-address", f"127.0.0.1:{free_port()}")
    server = start(*flags, address=f"127.0.0.1:{free_port()}").ready()
    goes_on = threading.Event()

    def requests() -> Iterator[pb.EncodeStreamRequest]:
        opening = pb.EncodeStreamOpen(sample_rate=24_000, channels=1, format=pb.SAMPLE_FORMAT_FLOAT32)
        yield pb.EncodeStreamRequest(open=opening)
        goes_on.wait(PATIENCE)
        yield pb.EncodeStreamRequest(pcm=bytes(4 * 24_000))

    stream = tokenizer_pb2_grpc.AudioTokenizerStub(channel(server.address)).EncodeStream(requests(), timeout=PATIENCE)
    eventually(lambda: value(server, "requests_in_progress", method="EncodeStream") == 1)
    watch = health_pb2_grpc.HealthStub(channel(flags[3])).Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
    assert next(watch).status == SERVING
    server.signal(signal.SIGTERM)
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    successor = start(*flags, address=server.asked).ready()
    assert value(successor, "ready") == 1
    assert server.process.poll() is None
    goes_on.set()
    assert sum(message.codes.frames for message in stream) == 26
    assert server.wait() == 0
    assert server.complaints() == []
    stub = health_pb2_grpc.HealthStub(channel(flags[3]))
    assert stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE).status == SERVING


# ---------------------------------------------------------------- connections


def half_a_hello() -> bytes:
    """The first half of what opens TLS."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    hello = outgoing.read()
    return hello[: len(hello) // 2]


def metrics_of(server: ServerProcess) -> str:
    """Where its metrics are."""
    return metrics_url(server).removeprefix("http://").removesuffix("/metrics")


def hung_up(raw: socket.socket) -> bool:
    """Read to the end; whether there was one."""
    try:
        while raw.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def test_connections_that_say_nothing_are_closed(site: Site, guarded: ServerProcess, narrow: ServerProcess) -> None:
    openings = [(guarded.address, b""), (guarded.address, half_a_hello())] * 60
    openings += [(narrow.address, PREFACE[:11]), (narrow.address, PREFACE)] * 5
    openings += [(metrics_of(guarded), b""), (metrics_of(guarded), b"GET /met")]
    silent = []
    try:
        for where, opening in openings:
            raw = socket.create_connection(tcp(where), PATIENCE)
            raw.sendall(opening)
            silent.append(raw)
        for _ in range(5):
            assert site.status(guarded) is Code.OK
            with grpc.insecure_channel(f"127.0.0.1:{tcp(narrow.address)[1]}") as channel:
                assert status_of(channel) is Code.OK
        for raw in silent:
            assert hung_up(raw), "the server keeps a connection that says nothing"
    finally:
        for raw in silent:
            raw.close()


def test_more_connections_than_may_be(narrow: ServerProcess) -> None:
    def status() -> grpc.StatusCode:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"127.0.0.1:{tcp(narrow.address)[1]}", options) as channel:
            return status_of(channel)

    eventually(lambda: status() is Code.OK)
    held = []
    try:
        for _ in range(19):
            held.append(socket.create_connection(tcp(narrow.address), PATIENCE))
        assert status() is Code.OK
        # One of a channel that was closed may count for a moment.
        while status() is Code.OK:
            held.append(socket.create_connection(tcp(narrow.address), PATIENCE))
            assert len(held) < 30
    finally:
        for raw in held:
            raw.close()
    eventually(lambda: status() is Code.OK)


def test_calls_beyond_those_of_a_connection_wait(narrow: ServerProcess) -> None:
    goes_on = threading.Event()

    def requests() -> Iterator[pb.EncodeStreamRequest]:
        goes_on.wait(PATIENCE)
        yield pb.EncodeStreamRequest()

    with grpc.insecure_channel(f"127.0.0.1:{tcp(narrow.address)[1]}") as channel:
        assert status_of(channel) is Code.OK
        stub = tokenizer_pb2_grpc.AudioTokenizerStub(channel)
        streams = [stub.EncodeStream(requests(), timeout=PATIENCE, metadata=bearer(TOKEN)) for _ in range(3)]
        eventually(lambda: value(narrow, "requests_in_progress", method="EncodeStream") == 3)
        waits = stub.GetInfo.future(pb.GetInfoRequest(), timeout=PATIENCE, metadata=bearer(TOKEN))
        with pytest.raises(grpc.FutureTimeoutError):
            waits.result(0.5)
        goes_on.set()
        assert waits.result(PATIENCE).model.id == "tiny"
        for stream in streams:
            assert stream.code() is Code.INVALID_ARGUMENT


def watched_states(channel: grpc.Channel) -> list[grpc.ChannelConnectivity]:
    """What becomes of a channel's connection; grows."""
    states: list[grpc.ChannelConnectivity] = []
    channel.subscribe(states.append)
    return states


def test_an_idle_connection_is_closed(narrow: ServerProcess) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{tcp(narrow.address)[1]}") as channel:
        states = watched_states(channel)
        assert status_of(channel) is Code.OK
        eventually(lambda: states[-1] is grpc.ChannelConnectivity.IDLE and grpc.ChannelConnectivity.READY in states)
        assert status_of(channel) is Code.OK


def test_connections_grow_old_and_no_call_knows(site: Site, ageing: ServerProcess) -> None:
    ready = grpc.ChannelConnectivity.READY
    with site.channel(ageing, client=NO_CERTIFICATE) as channel:
        states = watched_states(channel)
        answers = {status_of(channel, None)}
        eventually(lambda: answers.add(status_of(channel, None)) or states.count(ready) > 3)
    assert answers == {Code.OK}


def test_open_files_for_the_connections(narrow: ServerProcess, ageing: ServerProcess) -> None:
    def allowed(server: ServerProcess) -> list[str]:
        (line,) = [
            line for line in Path(f"/proc/{server.pid}/limits").read_text().splitlines() if "Max open files" in line
        ]
        return line.split()[3:5]

    assert allowed(narrow) == ["532", "1000"]
    assert allowed(ageing) == ["400", "400"]
    (warning,) = [line for line in warnings(ageing) if "open files" in line]
    assert "too few open files for --max-connections open_files=400 connections=200" in warning


# ---------------------------------------------------------------- the metrics' port


def test_idle_connections_to_the_metrics(narrow: ServerProcess) -> None:
    """The oldest make room."""
    held = []
    try:
        for number in range(200):
            raw = socket.create_connection(tcp(metrics_of(narrow)), PATIENCE)
            raw.sendall(b"" if number % 2 else b"GET /met")
            held.append(raw)
        threads = len(list(Path(f"/proc/{narrow.pid}/task").iterdir()))
        assert threads < 100
        for _ in range(3):
            assert "mimo_tokenizer_ready 1.0" in read(metrics_url(narrow))
        assert all(hung_up(raw) for raw in held[:150])
    finally:
        for raw in held:
            raw.close()
    assert "mimo_tokenizer_ready 1.0" in read(metrics_url(narrow))


# ---------------------------------------------------------------- who is warned of what


def test_all_interfaces_with_a_token_and_no_tls(narrow: ServerProcess) -> None:
    assert "tls=none token=yes" in narrow.wait_for("listening")
    (warning,) = warnings(narrow)
    assert "the token travels in the clear" in warning


def test_all_interfaces_with_tls_for_everybody(ageing: ServerProcess) -> None:
    assert "tls=server token=no" in ageing.wait_for("listening")
    _, warning = warnings(ageing)
    assert "anybody who reaches this address can use the server" in warning


_CONNECT = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as raw:
    try:
        raw.connect(sys.argv[1])
    except PermissionError:
        sys.exit(3)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_and_the_socket(unix_server: ServerProcess) -> None:
    """The socket's own permissions keep others out, whatever those of its folder are."""
    unix_server.ready()

    def connect() -> int:
        return subprocess.run([sys.executable, "-c", _CONNECT, str(unix_server.socket)], check=False).returncode

    folder_mode, mode = unix_server.folder.stat().st_mode, unix_server.socket.stat().st_mode
    assert stat.S_IMODE(mode) == 0o660
    try:
        unix_server.folder.chmod(0o755)
        assert connect() == 3
        unix_server.socket.chmod(0o666)
        assert connect() == 0
    finally:
        unix_server.socket.chmod(mode)
        unix_server.folder.chmod(folder_mode)


# ---------------------------------------------------------------- files at the start


def encrypted(key: bytes) -> bytes:
    """The key under a passphrase."""
    from cryptography.hazmat.primitives import serialization as form

    loaded = form.load_pem_private_key(key, None)
    return loaded.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.BestAvailableEncryption(b"secret"))


@pytest.mark.parametrize(
    ("name", "make", "texts"),
    [
        ("cert.pem", None, ("--tls-cert", "cannot read", "No such file")),
        ("key.pem", None, ("--tls-key", "cannot read", "No such file")),
        ("ca.pem", None, ("--tls-client-ca", "cannot read", "No such file")),
        ("cert.pem", lambda _: b"", ("--tls-cert", "no certificate")),
        ("cert.pem", lambda site: site.server.key, ("--tls-cert", "no certificate")),
        ("cert.pem", lambda site: site.server.chain[:300], ("--tls-cert", "no certificate", "broken")),
        ("cert.pem", lambda site: site.client.chain, ("--tls-key", "is not the key of", "cert.pem")),
        ("key.pem", lambda site: site.server.chain, ("--tls-key", "no private key")),
        ("key.pem", lambda site: site.server.key[:100], ("--tls-key", "no private key")),
        ("key.pem", lambda site: encrypted(site.server.key), ("--tls-key", "without a passphrase")),
        ("ca.pem", lambda _: "é garbage".encode(), ("--tls-client-ca", "no certificate")),
    ],
)
def test_certificates_that_are_no_good(
    site: Site, name: str, make: Callable[[Site], bytes] | None, texts: tuple[str, ...]
) -> None:
    path = site.folder / name
    if make is None:
        path.unlink()
    else:
        put(path, make(site))
    config = ServeConfig(
        tls_cert=site.folder / "cert.pem", tls_key=site.folder / "key.pem", tls_client_ca=site.folder / "ca.pem"
    )
    with pytest.raises(access.AccessError) as refused:
        access.certificates(config)
    for text in (*texts, str(path)):
        assert text in str(refused.value)


def test_text_around_certificates_may_be_in_any_language(site: Site) -> None:
    put(site.folder / "ca.pem", "Prüfstelle\n".encode() + site.client_ca.cert_pem.bytes())
    config = ServeConfig(
        tls_cert=site.folder / "cert.pem", tls_key=site.folder / "key.pem", tls_client_ca=site.folder / "ca.pem"
    )
    assert access.certificates(config) is not None


@pytest.mark.parametrize("name", ["tokens", "cert.pem"])
def test_a_pipe_in_a_files_place_is_not_waited_for(site: Site, start: Callable[..., ServerProcess], name: str) -> None:
    server = start(*site.tls, *site.token, address="127.0.0.1:0").ready()
    assert site.status(server) is Code.OK
    os.mkfifo(site.folder / "pipe")
    (site.folder / "pipe").replace(site.folder / name)
    eventually(lambda: site.status(server) is Code.OK and "is no regular file" in server.log)
    assert server.stop() == 0


def test_a_server_with_another_certificates_key_does_not_start(site: Site) -> None:
    put(site.folder / "key.pem", site.client.key)
    flags = ("--load-format", "dummy", "--model", "tiny", "--device", "cpu", "--address", "127.0.0.1:0")
    done = run_command("serve", *flags, *site.tls)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"Error: --tls-key: {site.folder}/key.pem is not the key of the (first) certificate in {site.folder}/cert.pem"
    ]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot read"),
        ("", "holds no token"),
        ("# only this\n\n", "holds no token"),
        (f"{TOKEN}\ntoo-short\n", "line 2 of"),
        ("two words of a token\n", "printable ASCII without spaces"),
        ("t\u00f6ken" * 8, "printable ASCII without spaces"),
    ],
)
def test_token_files_that_are_no_good(site: Site, content: str | None, text: str) -> None:
    path = site.folder / "tokens"
    if content is None:
        path.unlink()
    else:
        put(path, content)
    with pytest.raises(access.AccessError) as refused:
        access.TokenCheck(path, None)  # type: ignore[arg-type]
    assert text in str(refused.value)
    assert str(path) in str(refused.value)
    for word in ("short", "two", "ken"):
        assert word not in str(refused.value).replace("token", "")

"""Certificates and tokens: who is let in, what is said to who is not, and files that change."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import os
import pickle
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import trustme
from cryptography.hazmat.primitives import serialization as pem

from mimo_tokenizer_client import (
    AsyncTokenizerClient,
    AuthenticationFailed,
    Cancelled,
    Credentials,
    InvalidInput,
    ServiceUnavailable,
    TokenizerClient,
)
from mimo_tokenizer_client._credentials import _Current

# Of the fixtures that make something.
Factory = Callable[..., Any]

CODES = np.arange(30).reshape(3, 10)
TOKEN = "correct-horse-battery-staple"
YESTERDAY = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=1)
VARIABLES = ("TLS_CA", "TLS_CLIENT_CERT", "TLS_CLIENT_KEY", "TLS_SERVER_NAME", "TOKEN_FILE")


class Authority:
    """An authority, and the files of what it signs."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._ca = trustme.CA()
        self.pem = self._ca.cert_pem.bytes()
        self.file = self._write("ca.pem", self.pem)
        self.server = self._ca.issue_cert("localhost", "127.0.0.1")
        self.expired_server = self._ca.issue_cert("localhost", not_after=YESTERDAY)

    def caller(self, name: str, **options: Any) -> dict[str, str]:
        """Files of a caller's certificate with this common name, as arguments of `Credentials`."""
        issued = self._ca.issue_cert(f"{name}@example.org", common_name=name, **options)
        return {
            "tls_client_cert": self._write(f"{name}.pem", chain(issued)),
            "tls_client_key": self._write(f"{name}.key", issued.private_key_pem.bytes()),
        }

    def _write(self, name: str, content: bytes) -> str:
        (self._folder / name).write_bytes(content)
        return str(self._folder / name)


def chain(issued: trustme.LeafCert) -> bytes:
    return b"".join(pem.bytes() for pem in issued.cert_chain_pems)


def tls(issued: trustme.LeafCert, client_ca: bytes | None = None) -> grpc.ServerCredentials:
    """A server's side."""
    pair = (issued.private_key_pem.bytes(), chain(issued))
    return grpc.ssl_server_credentials([pair], client_ca, client_ca is not None)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates") / "known")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates") / "unknown")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(f"MIMO_AUDIO_TOKENIZER_{name}", raising=False)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    return file


def replace(file: str | Path, content: bytes | str | Path) -> None:
    """Put another content in the place of a file, at once."""
    new = Path(f"{file}.new")
    if isinstance(content, Path):
        content = content.read_bytes()
    new.write_bytes(content.encode() if isinstance(content, str) else content)
    new.replace(file)


# ---------------------------------------------------------------- tokens


def test_the_token_goes_with_every_call(serve: Factory, connect: Factory, token_file: Path) -> None:
    server = serve(max_message_bytes=16 << 10)
    server.tokens = {TOKEN}
    token_file.write_text(f"# of this week\n\n  {TOKEN} \r\nan-older-one\n")
    client = connect(server.address, credentials=Credentials(token_file=token_file))
    client.wait_until_ready(60)
    assert client.health()
    client.encode(np.zeros(50), 8000)
    client.encode(np.zeros(200_000), 8000)
    client.decode(CODES)
    client.decode(np.zeros((3, 2500), int))
    client.decode_vq(CODES)
    assert {call.rpc for call in server.calls} == {
        "GetInfo", "Encode", "EncodeStream", "Decode", "DecodeLong", "DecodeVq"
    }  # fmt: skip
    assert {call.metadata["authorization"] for call in server.calls} == {f"Bearer {TOKEN}"}
    assert [asked.get("authorization") for asked in server.health.metadata] == [f"Bearer {TOKEN}"] * 2


def test_without_a_token_none_is_sent(serve: Factory, connect: Factory) -> None:
    server = serve()
    connect(server.address).info()
    assert "authorization" not in server.calls[0].metadata


def test_a_token_that_is_not_taken(serve: Factory, connect: Factory, token_file: Path) -> None:
    server = serve(max_items=1)
    client = connect(server.address, credentials=Credentials(token_file=token_file), fingerprint="model-a")
    client.info()
    server.tokens = {"another"}
    server.calls.clear()
    with pytest.raises(AuthenticationFailed) as error:
        client.decode(CODES)
    assert str(error.value) == (
        f"the tokenizer service at {server.address} does not take the token in {token_file}: the token is unknown"
    )
    assert error.value.code is grpc.StatusCode.UNAUTHENTICATED
    assert error.value.detail.request_id == "7"
    assert len(server.calls) == 1
    # The rest of a batch would fare no better.
    errors = client.decode_batch([CODES] * 3, return_errors=True)
    assert [type(one) for one in errors] == [AuthenticationFailed] * 3
    assert len(server.calls) == 2


def test_health_needs_the_token_too(serve: Factory, connect: Factory, token_file: Path) -> None:
    server = serve()
    server.tokens = {"another"}
    wants = "wants a token (token_file, or MIMO_AUDIO_TOKENIZER_TOKEN_FILE)"
    for credentials, problem in (
        (None, wants),
        (Credentials(token_file=token_file), f"does not take the token in {token_file}"),
    ):
        client = connect(server.address, credentials=credentials)
        for ask in (client.health, lambda client=client: client.wait_until_ready(60)):
            with pytest.raises(AuthenticationFailed) as error:
                ask()
            assert str(error.value) == f"the tokenizer service at {server.address} {problem}: the token is unknown"
    assert len(server.health.metadata) == 4, "who is not let in does not wait"
    replace(token_file, "another")
    assert client.health()


def test_no_token_where_one_is_wanted(serve: Factory, connect: Factory) -> None:
    server = serve()
    server.tokens = {TOKEN}
    with pytest.raises(AuthenticationFailed) as error:
        connect(server.address).info()
    assert str(error.value) == (
        f"the tokenizer service at {server.address} wants a token (token_file, or MIMO_AUDIO_TOKENIZER_TOKEN_FILE):"
        " the token is unknown"
    )


def test_a_token_is_shown_to_nobody(
    serve: Factory, connect: Factory, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = serve()
    credentials = Credentials(token_file=token_file)
    client = connect(server.address, credentials=credentials)
    client.info()
    server.tokens = {"another"}
    with pytest.raises(AuthenticationFailed) as error:
        client.decode(CODES)
    replace(token_file, f"{TOKEN} with spaces")
    with pytest.raises(AuthenticationFailed):
        client.decode(CODES)
    with pytest.raises(InvalidInput) as bad_file:
        connect(server.address, credentials=credentials)
    attempt = next(TokenizerClient(server.address, credentials=credentials_of(token_file))._core.info(None))
    shown = [repr(client), repr(vars(client)), repr(credentials), repr(attempt), caplog.text]
    shown += [repr(one.value) + repr(pickle.dumps(one.value)) for one in (error, bad_file)]
    assert "line 1" in str(bad_file.value)
    assert all(TOKEN not in text for text in shown)


def credentials_of(token_file: Path) -> Credentials:
    replace(token_file, TOKEN)
    return Credentials(token_file=token_file)


def test_a_token_that_travels_in_the_clear(
    connect: Factory, authority: Authority, token_file: Path, socket_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = Credentials(token_file=token_file)
    for address in (f"unix:{socket_path}", ":1", "localhost:1", "LOCALHOST:1", "127.0.0.2:1", "[::1]:1"):
        connect(address, credentials=given)
    for address in ("tokenizer.test:1", "192.0.2.1:1"):
        connect(address)
        connect(address, credentials=Credentials(tls_ca=authority.file, token_file=token_file))
    assert not caplog.records
    addresses = ["tokenizer.test:1", "localhost.test:1", "192.0.2.1:1", "[2001:db8::1]:1", "0.0.0.0:1"]
    for address in addresses * 2:
        connect(address, credentials=given)
    assert [(record.name, record.levelname, record.message) for record in caplog.records] == [
        (
            "mimo_tokenizer_client",
            "WARNING",
            f"the token in {token_file} travels in the clear to {address}: whoever sees the traffic can use it; TLS"
            " (tls_ca, or MIMO_AUDIO_TOKENIZER_TLS_CA) hides it",
        )
        for address in addresses
    ]


# ---------------------------------------------------------------- settings


def test_files_that_are_no_good(connect: Factory, authority: Authority, stranger: Authority, tmp_path: Path) -> None:
    ours, theirs = authority.caller("ours"), stranger.caller("theirs")
    rsa = authority.caller("rsa", key_type=trustme.KeyType.RSA)
    cert, key = ours.values()

    def file(content: bytes) -> str:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        path.write_bytes(content)
        return str(path)

    missing, folder, junk, empty = str(tmp_path / "none"), str(tmp_path), file(b"junk"), file(b"")
    half_ca, half_key = file(authority.pem[:300]), file(Path(key).read_bytes()[:150])
    bundle_cut_off = file(authority.pem + authority.pem[:300])
    pair = f"{{}} and its certificate {cert} are no PEM files of a certificate and its plain key"
    table: list[tuple[dict[str, Any], str]] = [
        ({"tls_ca": missing}, f"tls_ca {missing} cannot be read: No such file or directory"),
        ({"tls_ca": folder}, f"tls_ca {folder} cannot be read: Is a directory"),
        *(
            ({"tls_ca": one}, f"tls_ca {one} is no PEM file of certificates")
            for one in (junk, empty, half_ca, bundle_cut_off, key)
        ),
        ({**ours, "tls_client_cert": missing}, f"tls_client_cert {missing} cannot be read: No such file or directory"),
        ({**ours, "tls_client_key": missing}, f"tls_client_key {missing} cannot be read: No such file or directory"),
        ({**ours, "tls_client_cert": junk}, f"tls_client_cert {junk} is no PEM file of a certificate"),
        ({**ours, "tls_client_cert": key}, f"tls_client_cert {key} is no PEM file of a certificate"),
        ({**ours, "tls_client_key": junk}, "tls_client_key " + pair.format(junk)),
        ({**ours, "tls_client_key": half_key}, "tls_client_key " + pair.format(half_key)),
        *(
            ({**ours, "tls_client_key": one}, f"tls_client_key {one} does not fit the certificate {cert}")
            for one in (theirs["tls_client_key"], rsa["tls_client_key"])
        ),
        (
            {"tls_client_cert": cert},
            f"tls_client_cert {cert} needs tls_client_key (MIMO_AUDIO_TOKENIZER_TLS_CLIENT_KEY), too",
        ),
        (
            {"tls_client_key": key},
            f"tls_client_key {key} needs tls_client_cert (MIMO_AUDIO_TOKENIZER_TLS_CLIENT_CERT), too",
        ),
        ({"token_file": missing}, f"token_file {missing} cannot be read: No such file or directory"),
        ({"token_file": empty}, f"token_file {empty} has no token in it"),
        ({"token_file": file(b"# none\n\n")}, r"token_file .* has no token in it"),
        ({"token_file": 7}, "token_file 7 is no path or name"),
        ({"tls_server_name": b"x"}, "tls_server_name b'x' is no path or name"),
        *(
            ({"token_file": file(content)}, r"token_file .* has characters in line 2 that are no part of a token")
            for content in (b"\ntwo words", b"#\nt\xc3\xb6ken", b"\n\x00", b"\na\x0cb", b"\n\xff\xfe")
        ),
    ]
    for given, sentence in table:
        with pytest.raises(InvalidInput) as error:
            connect("localhost:1", credentials=Credentials(**{"tls_ca": authority.file, **given}))
        assert str(error.value) == sentence or re.match(sentence, str(error.value)), given
        assert error.value.detail.field in given


AT_A_TERMINAL = """
import pty, sys
code = "import sys; from mimo_tokenizer_client import *; TokenizerClient('a:1', credentials=Credentials(*sys.argv[1:]))"
pty.spawn([sys.executable, "-c", code, *sys.argv[1:]])
"""


def test_an_encrypted_key_asks_nobody_for_a_password(authority: Authority, tmp_path: Path) -> None:
    ours = authority.caller("ours")
    plain = pem.load_pem_private_key(Path(ours["tls_client_key"]).read_bytes(), None)
    secret = pem.BestAvailableEncryption(b"secret")
    encrypted = tmp_path / "key"
    encrypted.write_bytes(plain.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, secret))
    result = subprocess.run(
        [sys.executable, "-c", AT_A_TERMINAL, authority.file, ours["tls_client_cert"], str(encrypted)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "pass phrase" not in result.stdout
    assert "its plain key" in result.stdout


def test_settings_that_do_not_go_together(connect: Factory, authority: Authority, socket_path: str) -> None:
    for name in ("tls_ca", "tls_client_cert", "tls_client_key", "tls_server_name"):
        with pytest.raises(InvalidInput) as error:
            connect(f"unix:{socket_path}", credentials=Credentials(**{name: "x"}))
        assert str(error.value) == f"{name} x is for addresses host:port; unix:{socket_path} is a Unix socket"
    for name in ("tls_client_cert", "tls_client_key", "tls_server_name"):
        with pytest.raises(InvalidInput) as error:
            connect("localhost:1", credentials=Credentials(**{name: "x"}))
        assert str(error.value) == (
            f"{name} x is of use with TLS only, which tls_ca (MIMO_AUDIO_TOKENIZER_TLS_CA) turns on"
        )
    with pytest.raises(InvalidInput, match="credentials must be Credentials or None; it is a str"):
        connect("localhost:1", credentials=TOKEN)


def test_the_environment(
    serve: Factory,
    connect: Factory,
    authority: Authority,
    token_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    issued = trustme.CA()  # for a name that is not the address's
    server = serve("127.0.0.1:0", tls=tls(issued.issue_cert("tokenizer.test"), authority.pem))
    server.tokens = {TOKEN}
    ca = token_file.with_name("ca")
    ca.write_bytes(issued.cert_pem.bytes())
    ours = authority.caller("ours")
    values = (ca, *ours.values(), "tokenizer.test", token_file)
    for name, value in zip(VARIABLES, values, strict=True):
        monkeypatch.setenv(f"MIMO_AUDIO_TOKENIZER_{name}", str(value))
    connect(server.address).info()
    assert server.calls[0].certificate == "ours"
    # What is passed is all there is.
    given = Credentials(tls_ca=str(ca), tls_server_name="tokenizer.test", **ours)
    with pytest.raises(AuthenticationFailed, match="wants a token"):
        connect(server.address, credentials=given).info()
    plain = serve()
    for name in VARIABLES:
        monkeypatch.setenv(f"MIMO_AUDIO_TOKENIZER_{name}", "")
    connect(plain.address).info()


# ---------------------------------------------------------------- TLS


def test_tls_and_mutual_tls(serve: Factory, connect: Factory, authority: Authority, fake: ModuleType) -> None:
    server = serve("127.0.0.1:0", tls=tls(authority.server))
    mutual = serve("127.0.0.1:0", tls=tls(authority.server, authority.pem))
    ours = authority.caller("ours")
    for credentials, one, caller in (
        (Credentials(tls_ca=authority.file), server, ""),
        (Credentials(tls_ca=authority.file, **ours), server, ""),
        (Credentials(tls_ca=Path(authority.file), **ours), mutual, "ours"),
    ):
        for host in ("localhost", "127.0.0.1"):
            client = connect(f"{host}:{one.address.rpartition(':')[2]}", credentials=credentials)
            client.wait_until_ready(60)
            np.testing.assert_array_equal(client.decode(CODES), fake.decode(CODES))
            assert one.calls[-1].certificate == caller


def test_servers_that_are_not_trusted(
    serve: Factory, connect: Factory, authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    port = serve("127.0.0.1:0", tls=tls(authority.server)).address.rpartition(":")[2]
    expired = serve("127.0.0.1:0", tls=tls(authority.expired_server)).address.rpartition(":")[2]
    plain = serve("127.0.0.1:0").address.rpartition(":")[2]
    theirs = {"tls_ca": stranger.file}
    ours = {"tls_ca": authority.file}
    certificate = "the certificate of the tokenizer service at 127.0.0.1:{} is not"
    for one, given, sentence in (
        (
            port,
            theirs,
            f"{certificate} trusted, unable to get local issuer certificate: look at whether an authority in"
            f" {stranger.file} (tls_ca) has signed it",
        ),
        (
            port,
            {"tls_ca": "system"},
            f"{certificate} trusted, unable to get local issuer certificate: none of the authorities that gRPC ships"
            " has signed it; name the one that has in tls_ca",
        ),
        (
            expired,
            ours,
            f"{certificate} trusted, certificate has expired: look at its dates, and at this machine's clock",
        ),
        (
            port,
            {**ours, "tls_server_name": "elsewhere.test"},
            f"{certificate} for elsewhere.test: look at the address, or name in tls_server_name what the certificate is"
            " for",
        ),
        (
            plain,
            ours,
            "the tokenizer service at 127.0.0.1:{} does not speak TLS: look at the port and at its --tls-cert, or leave"
            " out tls_ca",
        ),
    ):
        client = connect(f"127.0.0.1:{one}", credentials=Credentials(**given))
        for method, *arguments in (["info"], ["decode", CODES], ["health"], ["wait_until_ready", 60]):
            with pytest.raises(AuthenticationFailed) as error:
                getattr(client, method)(*arguments)
            assert str(error.value) == sentence.format(one)


def test_a_host_that_the_certificate_is_not_for(serve: Factory, connect: Factory, tmp_path: Path) -> None:
    ca = trustme.CA()
    (tmp_path / "ca").write_bytes(ca.cert_pem.bytes())
    server = serve("127.0.0.1:0", tls=tls(ca.issue_cert("elsewhere.test")))
    with pytest.raises(AuthenticationFailed, match=r"is not for 127\.0\.0\.1: look at the address"):
        connect(server.address, credentials=Credentials(tls_ca=tmp_path / "ca")).info()
    connect(server.address, credentials=Credentials(tls_ca=tmp_path / "ca", tls_server_name="elsewhere.test")).info()


def test_what_looks_like_a_restart_is_tried_again(
    serve: Factory, connect: Factory, authority: Authority, stranger: Authority
) -> None:
    """A gRPC server closes the connection of a caller it does not trust without a word, after the handshake."""
    mutual = serve("127.0.0.1:0", tls=tls(authority.server, authority.pem))
    expired, theirs = authority.caller("expired", not_after=YESTERDAY), stranger.caller("theirs")
    wants = "look at whether it wants a client certificate (tls_client_cert, tls_client_key)"
    for given, look in (
        (Credentials(tls_ca=authority.file), wants),
        *(
            (
                Credentials(tls_ca=authority.file, **caller),
                f"look at the dates of {caller['tls_client_cert']} (tls_client_cert), and at whether the service trusts"
                " its signer",
            )
            for caller in (expired, theirs)
        ),
        (None, "look at whether it wants TLS (tls_ca)"),
    ):
        client = connect(mutual.address, credentials=given, unavailable_timeout=0.5)
        with pytest.raises(ServiceUnavailable) as error:
            client.info()
        pattern = rf".* is not available: .*; if this goes on, {re.escape(look)} \(\d+ attempts in .*"
        assert re.fullmatch(pattern, str(error.value)), error.value
        assert not client.health()
        with pytest.raises(ServiceUnavailable, match=re.escape(look)):
            client.wait_until_ready(0.3)


@pytest.fixture
def openssl_server(authority: Authority) -> Iterator[Callable[[ssl.TLSVersion], str]]:
    """A server that is not gRPC's, asks for a certificate, and says so when it refuses one."""
    listeners: list[socket.socket] = []

    def accept(listener: socket.socket, context: ssl.SSLContext) -> None:
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            with connection:
                try:
                    with context.wrap_socket(connection, server_side=True) as encrypted:
                        encrypted.recv(1 << 16)
                except OSError:
                    continue

    def start(version: ssl.TLSVersion) -> str:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.server.configure_cert(context)
        context.load_verify_locations(authority.file)
        context.verify_mode = ssl.CERT_REQUIRED
        context.maximum_version = version
        context.set_alpn_protocols(["h2"])
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        threading.Thread(target=accept, args=(listener, context), daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_refusal_in_so_many_words(
    version: ssl.TLSVersion, openssl_server: Factory, connect: Factory, authority: Authority, stranger: Authority
) -> None:
    address = openssl_server(version)
    old = version is ssl.TLSVersion.TLSv1_2
    for caller, alert in (
        ({}, "handshake failure"),
        (stranger.caller("theirs"), "unknown ca"),
        (authority.caller("expired", not_after=YESTERDAY), "certificate expired"),
    ):
        with pytest.raises(AuthenticationFailed) as error:
            connect(address, credentials=Credentials(tls_ca=authority.file, **caller)).info()
        said = f"{address} refuses the connection{f' ({alert})' if old else ''}: look at "
        assert said + ("the dates of" if caller else "whether it wants a client certificate") in str(error.value)


# ---------------------------------------------------------------- files that change


def test_another_token(serve: Factory, connect: Factory, token_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = serve()
    client = connect(server.address, credentials=Credentials(token_file=token_file))

    def sent() -> str:
        client.info()
        return server.calls[-1].metadata["authorization"].removeprefix("Bearer ")

    assert sent() == TOKEN
    replace(token_file, "a-new-one\n")
    assert sent() == "a-new-one"
    token_file.unlink()
    assert [sent(), sent()] == ["a-new-one"] * 2
    token_file.write_text("two words")
    assert [sent(), sent()] == ["a-new-one"] * 2
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records if r.name.startswith("mimo")] == [
        ("mimo_tokenizer_client", "WARNING", f"token_file {token_file} {problem}; what was there before is used on")
        for problem in (
            "cannot be read: No such file or directory",
            "has characters in line 1 that are no part of a token: printable ASCII, no spaces",
        )
    ]
    token_file.write_text("a-third-one")
    assert sent() == "a-third-one"


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    """What is read of several files belongs together."""
    file = tmp_path / "file"
    file.write_text("a")

    def read() -> str:
        text = file.read_text()
        if text == "b":
            replace(file, "c")
        return text

    current = _Current([str(file)], read)
    assert current.now() == "a"
    replace(file, "b")
    assert current.now() == "c"


@pytest.fixture
def own_files(authority: Authority, tmp_path: Path) -> dict[str, Path]:
    """A client's files, to be replaced."""
    files = {name: tmp_path / name for name in ("tls_ca", "tls_client_cert", "tls_client_key")}
    for name, source in {"tls_ca": authority.file, **authority.caller("before")}.items():
        files[name].write_bytes(Path(source).read_bytes())
    return files


def put(files: dict[str, Path], caller: dict[str, str]) -> None:
    for name, source in caller.items():
        replace(files[name], Path(source))


def test_another_certificate(
    serve: Factory,
    connect: Factory,
    authority: Authority,
    own_files: dict[str, Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = serve("127.0.0.1:0", tls=tls(authority.server, authority.pem))
    client = connect(server.address, credentials=Credentials(**own_files))

    def shown() -> str:
        client.info()
        return server.calls[-1].certificate

    assert shown() == "before"
    after = authority.caller("after")
    replace(own_files["tls_client_cert"], Path(after["tls_client_cert"]))
    assert [shown(), shown()] == ["before"] * 2  # the key is still another's
    records = [record for record in caplog.records if record.name == "mimo_tokenizer_client"]
    assert [(record.levelname, record.getMessage()) for record in records] == [
        (
            "WARNING",
            f"tls_client_key {own_files['tls_client_key']} does not fit the certificate {own_files['tls_client_cert']};"
            " what was there before is used on",
        )
    ]
    replace(own_files["tls_client_key"], Path(after["tls_client_key"]))
    assert [shown(), shown()] == ["after"] * 2
    # The connection of before is gone.
    assert len(client._connections) == 1


def test_another_authority(
    serve: Factory, connect: Factory, authority: Authority, stranger: Authority, own_files: dict[str, Path]
) -> None:
    server = serve("127.0.0.1:0", tls=tls(stranger.server))
    client = connect(server.address, credentials=Credentials(tls_ca=own_files["tls_ca"]))
    with pytest.raises(AuthenticationFailed, match="is not trusted"):
        client.info()
    replace(own_files["tls_ca"], stranger.pem)
    client.info()


@pytest.mark.parametrize("end", ["answered", "closed"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_call_in_flight_while_certificates_change(
    kind: str, end: str, serve: Factory, authority: Authority, own_files: dict[str, Path], fake: ModuleType
) -> None:
    server = serve("127.0.0.1:0", tls=tls(authority.server, authority.pem))
    begun, release = threading.Event(), threading.Event()
    server.script("Decode", lambda context: (begun.set(), release.wait(60)))
    given, after = Credentials(**own_files), authority.caller("after")

    def check(first: Callable[[], Any]) -> None:
        assert server.seen("DecodeVq")[-1].certificate == "after"
        if end == "answered":
            np.testing.assert_array_equal(first(), fake.decode(CODES))
            assert server.seen("Decode")[-1].certificate == "before"
        else:
            with pytest.raises(Cancelled, match="is closed"):
                first()

    def use() -> None:
        client = TokenizerClient(server.address, timeout=500, credentials=given)
        with client, ThreadPoolExecutor() as pool:
            first = pool.submit(client.decode, CODES)
            assert begun.wait(30)
            put(own_files, after)
            client.decode_vq(CODES)
            if end == "closed":
                client.close()
            else:
                release.set()
            check(lambda: first.result(timeout=20))

    async def use_async() -> None:
        async with AsyncTokenizerClient(server.address, timeout=500, credentials=given) as client:
            first = asyncio.create_task(client.decode(CODES))
            assert await asyncio.to_thread(begun.wait, 30)
            put(own_files, after)
            await client.decode_vq(CODES)
            if end == "closed":
                await client.close()
            else:
                release.set()
            await asyncio.wait([first], timeout=20)
            check(first.result)

    use() if kind == "sync" else asyncio.run(use_async())
    release.set()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_everything_changes_under_load(
    kind: str,
    serve: Factory,
    authority: Authority,
    stranger: Authority,
    own_files: dict[str, Path],
    token_file: Path,
    fake: ModuleType,
) -> None:
    """Token, both sides' certificates and both sides' authorities are replaced, as an operator would; no call fails."""

    def side(issued: trustme.LeafCert) -> grpc.ServerCertificateConfiguration:
        pair = (issued.private_key_pem.bytes(), chain(issued))
        return grpc.ssl_server_certificate_configuration([pair], authority.pem + stranger.pem)

    shown = [authority.server]
    credentials = grpc.dynamic_ssl_server_credentials(side(shown[0]), lambda: side(shown[0]), True)
    server = serve("127.0.0.1:0", tls=credentials)
    server.tokens = {TOKEN, "a-new-token"}
    given = Credentials(**own_files, token_file=token_file)
    stop = threading.Event()
    expected = fake.decode(CODES)

    def change() -> None:
        """Let some calls pass after each step."""
        steps: list[Callable[[], Any]] = [
            lambda: replace(own_files["tls_ca"], authority.pem + stranger.pem),
            lambda: shown.__setitem__(0, stranger.server),
            lambda: put(own_files, stranger.caller("after")),
            lambda: replace(own_files["tls_ca"], stranger.pem),
            lambda: replace(token_file, "a-new-token"),
        ]
        try:
            for step in steps:
                step()
                wait_for_calls(server, 40)
            server.tokens = {"a-new-token"}
            server.calls.clear()
            wait_for_calls(server, 40)
        finally:
            stop.set()

    with ThreadPoolExecutor(1) as operator:
        changes = None
        if kind == "sync":
            client = TokenizerClient(server.address, timeout=60, credentials=given)
            with client, ThreadPoolExecutor(8) as pool:

                def use() -> None:
                    while not stop.is_set():
                        np.testing.assert_array_equal(client.decode(CODES), expected)

                calls = [pool.submit(use) for _ in range(8)]
                changes = operator.submit(change)
                for call in calls:
                    call.result(timeout=120)
        else:

            async def use_async() -> None:
                nonlocal changes
                async with AsyncTokenizerClient(server.address, timeout=60, credentials=given) as client:

                    async def one() -> None:
                        while not stop.is_set():
                            np.testing.assert_array_equal(await client.decode(CODES), expected)

                    changes = operator.submit(change)
                    await asyncio.gather(*(one() for _ in range(8)))

            asyncio.run(use_async())
        changes.result(timeout=120)
    # The last word, on everything: a caller that began before the change of tokens may be among the first.
    assert {call.certificate for call in server.calls} == {"after"}
    assert {call.metadata["authorization"] for call in server.calls} == {"Bearer a-new-token"}


def wait_for_calls(server: Any, count: int) -> None:
    goal = len(server.calls) + count
    pause = threading.Event()
    for _ in range(2000):
        if len(server.calls) >= goal:
            return
        pause.wait(0.02)
    raise AssertionError(f"{len(server.calls)} calls of {goal}")


# ---------------------------------------------------------------- commands, and the engine's plugin


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mimo_tokenizer_server", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
        timeout=120,
    )


def test_the_commands(serve: Factory, authority: Authority, stranger: Authority, token_file: Path) -> None:
    server = serve("127.0.0.1:0", tls=tls(authority.server, authority.pem))
    server.tokens = {TOKEN}
    ours = authority.caller("ours")
    at = ["--address", server.address]
    flags = ["--tls-ca", authority.file, "--tls-server-name", "localhost", "--token-file", str(token_file)]
    flags += ["--tls-client-cert", ours["tls_client_cert"], "--tls-client-key", ours["tls_client_key"]]
    result = command("health", *at, *flags)
    assert (result.returncode, result.stdout) == (0, "ready\n"), result.stderr
    info = command("info", "--json", *at, *flags)
    assert json.loads(info.stdout)["model"]["id"] == "fake", info.stderr
    environment = dict(zip(VARIABLES, (authority.file, *ours.values(), "", str(token_file)), strict=True))
    variables = {f"MIMO_AUDIO_TOKENIZER_{name}": value for name, value in environment.items()}
    load = ["--mix", "decode:40ms", "--duration", "0.3", "--warm-up", "0", "--concurrency", "2", "--json", "-"]
    bench = command("bench", *at, *load, **variables)
    assert bench.returncode == 0, bench.stderr
    assert {call.certificate for call in server.calls} == {"ours"}
    assert "mimo-tokenizer-bench" in server.calls[-1].metadata["x-client"]

    wrong = command("health", *at, "--tls-ca", stranger.file)
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert re.fullmatch(r"Error: the certificate of .* is not trusted, .* \(tls_ca\) has signed it\n", wrong.stderr)
    missing = command("info", *at, "--tls-ca", "/none")
    assert (missing.returncode, missing.stderr) == (
        1,
        "Error: tls_ca /none cannot be read: No such file or directory\n",
    )
    without = command("info", *at, **{**variables, "MIMO_AUDIO_TOKENIZER_TOKEN_FILE": ""})
    assert without.returncode == 1
    assert "wants a token" in without.stderr


def test_the_engines_plugin(
    serve: Factory, authority: Authority, stranger: Authority, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes its credentials from the environment, and does not wait for who will never let it in."""
    import torch

    from mimo_tokenizer_vllm_omni._settings import Settings
    from mimo_tokenizer_vllm_omni._worker import RemoteTokenizerWorker

    server = serve("127.0.0.1:0", tls=tls(authority.server))
    settings = Settings(address=server.address)
    config = SimpleNamespace(group_size=4, audio_channels=3, audio_sample_rate=8000)
    config.parsed_speech_vocab_sizes = lambda: [100] * 3
    config.parsed_speech_empty_ids = lambda: [99] * 3
    monkeypatch.setenv("MIMO_AUDIO_TOKENIZER_TLS_CA", stranger.file)
    with pytest.raises(AuthenticationFailed, match="is not trusted"):
        RemoteTokenizerWorker(settings, config)
    monkeypatch.setenv("MIMO_AUDIO_TOKENIZER_TLS_CA", authority.file)
    server.tokens = {TOKEN}
    with pytest.raises(AuthenticationFailed, match="wants a token"):
        RemoteTokenizerWorker(settings, config)
    monkeypatch.setenv("MIMO_AUDIO_TOKENIZER_TOKEN_FILE", str(token_file))
    worker = RemoteTokenizerWorker(settings, config)
    server.tokens = {"another"}
    codes = [torch.zeros((3, 4), dtype=torch.int64)] * 2
    answers = worker.decode_batch(codes, [0, 0])
    assert [type(answer) for answer in answers] == [AuthenticationFailed] * 2
    worker.close()

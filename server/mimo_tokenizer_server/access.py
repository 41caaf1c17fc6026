"""Who may call: certificates and tokens, read anew when their files change."""

from __future__ import annotations

import hmac
import logging
import os
import re
import ssl
import stat
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc

from . import messages
from .config import ServeConfig
from .errors import Reason, RequestError
from .handlers import SERVICE
from .service import TokenizerServicer
from .telemetry import log

T = TypeVar("T")

_OWN_METHODS = {f"/{SERVICE.full_name}/{method.name}": method.name for method in SERVICE.methods}

_MIN_TOKEN = 16
_MAX_FILE_BYTES = 1 << 20


class AccessError(ValueError):
    """A certificate, key or token that is no good; the sentence says which and why, and never what it is."""


class Files(Generic[T]):
    """What `load` makes of some files, and makes again when one of them has changed.

    Args:
        what: of the files, for the log.
        paths: of the files.
        load: called when one of them has changed, too.

    Raises:
        AccessError: the files are no good.
    """

    def __init__(self, what: str, paths: Sequence[Path], load: Callable[[], T]) -> None:
        self._what = what
        self._paths = paths
        self._load = load
        # From before they are read: what changes meanwhile is read again.
        self._stamps = self._stamp()
        self._value = load()

    def get(self) -> T:
        """What `load` makes of the files as they are now; if that is no good, what it made before."""
        stamps = self._stamp()
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                self._value = self._load()
            except AccessError as error:
                log(logging.WARNING, f"{self._what} changed and cannot be used; the old go on", error=str(error))
            else:
                log(logging.INFO, f"{self._what} read anew")
        return self._value

    def _stamp(self) -> list[tuple[int, ...]]:
        stamps: list[tuple[int, ...]] = []
        for path in self._paths:
            try:
                status = path.stat()
            except OSError:
                stamps.append(())
            else:
                stamps.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        return stamps


def _read(flag: str, path: Path, *, secret: bool = False) -> bytes:
    try:
        # A pipe in the file's place must not be waited for.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise AccessError(f"{flag}: {path} is no regular file")
            if secret and mode & stat.S_IROTH:
                log(logging.WARNING, f"every user of this machine can read the file of {flag}", path=path)
            data = file.read(_MAX_FILE_BYTES + 1)
            if len(data) > _MAX_FILE_BYTES:
                raise AccessError(f"{flag}: {path} is larger than {_MAX_FILE_BYTES >> 20} MiB")
            return data
    except OSError as error:
        raise AccessError(f"{flag}: cannot read {path}: {error.strerror}") from None


# ---------------------------------------------------------------- certificates


def certificates(config: ServeConfig) -> Files[grpc.ServerCredentials] | None:
    """TLS, mutual or not, as `config` says; None for none.

    Raises:
        AccessError: a file cannot be read, or is not what it should be.
    """
    cert, key, ca = config.tls_cert, config.tls_key, config.tls_client_ca
    if cert is None or key is None:
        return None
    paths = [cert, key] if ca is None else [cert, key, ca]
    return Files("certificates", paths, lambda: _certificates(cert, key, ca))


def _certificates(cert: Path, key: Path, ca: Path | None) -> grpc.ServerCredentials:
    chain, private = _read("--tls-cert", cert), _read("--tls-key", key, secret=True)
    roots = None if ca is None else _read("--tls-client-ca", ca)
    _check_certificates("--tls-cert", cert, chain)
    if ca is not None and roots is not None:
        _check_certificates("--tls-client-ca", ca, roots)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
    except OSError as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            raise AccessError(f"--tls-key: {key} is not the key of the (first) certificate in {cert}") from None
        raise AccessError(f"--tls-key: {key} holds no private key in PEM without a passphrase") from None
    return grpc.ssl_server_credentials([(private, chain)], roots, require_client_auth=ca is not None)


def _check_certificates(flag: str, path: Path, data: bytes) -> None:
    try:
        # What stands around the certificates may be in any language.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=data.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        raise AccessError(f"{flag}: {path} holds no certificate in PEM, or a broken one") from None


# ---------------------------------------------------------------- tokens


class TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without one of the tokens in a file, before their requests are read; those for health, too.

    Args:
        path: of the file.
        servicer: counts the refused calls of its own methods.

    Raises:
        AccessError: the file is no good.
    """

    def __init__(self, path: Path, servicer: TokenizerServicer) -> None:
        self._servicer = servicer
        self._tokens = Files("tokens", [path], lambda: _tokens(path))

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """The call's handler, or one that refuses it."""
        method = handler_call_details.method
        sent = dict(handler_call_details.invocation_metadata).get("authorization")
        if sent is None:
            sentence = "the server takes calls with a token only: metadata `authorization: Bearer <token>`"
        elif self._good(str(sent)):
            return await continuation(handler_call_details)
        else:
            sentence = "the call's metadata `authorization` is not `Bearer` and a token that the server takes"

        async def refuse(_requests: Any, context: Any) -> None:
            error = RequestError(Reason.UNAUTHENTICATED, sentence)
            if method in _OWN_METHODS:
                await self._servicer.refuse(_OWN_METHODS[method], error, context)
            else:
                await context.abort(
                    messages.STATUS[error.reason], sentence, messages.trailing_metadata(error, (), request_id="")
                )

        # Of whatever kind the method is: this one waits for no request.
        return grpc.stream_stream_rpc_method_handler(refuse)

    def _good(self, sent: str) -> bool:
        scheme, _, token = sent.partition(" ")
        # Each of them, that the time tells nothing.
        equal = [hmac.compare_digest(token.strip().encode(), one) for one in self._tokens.get()]
        return scheme.lower() == "bearer" and any(equal)


def _tokens(path: Path) -> tuple[bytes, ...]:
    tokens = []
    for number, line in enumerate(_read("--token-file", path, secret=True).splitlines(), 1):
        token = line.strip()
        if not token or token.startswith(b"#"):
            continue
        if re.fullmatch(rb"[!-~]{%d,}" % _MIN_TOKEN, token) is None:
            allowed = f"at least {_MIN_TOKEN} characters of printable ASCII without spaces"
            raise AccessError(f"--token-file: line {number} of {path} is no token: {allowed}")
        tokens.append(token)
    if not tokens:
        raise AccessError(f"--token-file: {path} holds no token")
    return tuple(tokens)

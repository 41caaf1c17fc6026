"""How a client and a server come to trust each other, with certificates and tokens; what is said where they don't."""

from __future__ import annotations

import functools
import ipaddress
import logging
import os
import re
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Generic, TypeAlias, TypeVar

import grpc

from .errors import AuthenticationFailed, ErrorDetail, Failure, InvalidInput, ServiceUnavailable, TokenizerError

SYSTEM: Final = "system"

FilePath: TypeAlias = "str | os.PathLike[str]"
_T = TypeVar("_T")

_log = logging.getLogger("mimo_tokenizer_client")


@dataclass(frozen=True)
class Credentials:
    """What a client shows to a server, and what it asks of one; without any of it, plain text and no token.

    Files are looked at again when a call begins: one that has changed is used from then on, and one that has become
    unusable is not, with a warning in the log `mimo_tokenizer_client`. Empty text is as good as None.

    Attributes:
        tls_ca: PEM file of the authorities that may have signed the server's certificate, or "system" for those that
            gRPC ships. It turns TLS on.
        tls_client_cert: PEM file of the certificate that the server is shown, with its chain.
        tls_client_key: PEM file of its private key, not encrypted.
        tls_server_name: The name that the server's certificate must have, if it is not the address's host.
        token_file: File of the token that goes with every call; its first line that is neither empty nor begins with #.
            Without TLS it travels in the clear; that has a warning, but for a Unix socket and loopback.
    """

    tls_ca: FilePath | None = None
    tls_client_cert: FilePath | None = None
    tls_client_key: FilePath | None = None
    tls_server_name: str | None = None
    token_file: FilePath | None = None


def variable(name: str) -> str:
    """Return the environment variable of an attribute of `Credentials`."""
    return f"MIMO_AUDIO_TOKENIZER_{name.upper()}"


def credentials_in(environment: Mapping[str, str]) -> Credentials:
    """Return the credentials that an environment names."""
    return Credentials(**{field.name: environment.get(variable(field.name)) for field in fields(Credentials)})


class Authenticator:
    """The credentials of one client, as their files are now; any number of threads may use it.

    Attributes:
        address: Of the service.
    """

    def __init__(self, address: str, credentials: Credentials | None) -> None:
        """Read and check the files.

        Args:
            address: Of the service.
            credentials: None: what the environment says.

        Raises:
            InvalidInput: A file is missing or no good, or one setting does not go with another.
        """
        if credentials is None:
            credentials = credentials_in(os.environ)
        elif not isinstance(credentials, Credentials):
            raise InvalidInput(f"credentials must be Credentials or None; it is a {type(credentials).__name__}")
        self.address = address
        self._ca, self._cert, self._key, self._name, self._token_file = (
            _text(field.name, getattr(credentials, field.name)) for field in fields(Credentials)
        )
        self._check_combination()
        self._tls: _Current[grpc.ChannelCredentials] | None = None
        if self._ca:
            files = [name for name in (self._ca, self._cert, self._key) if name and name != SYSTEM]
            self._tls = _Current(files, self._load_tls)
        self._token: _Current[tuple[tuple[str, str], ...]] | None = None
        if self._token_file:
            self._token = _Current([self._token_file], self._load_token)
            if not self._ca and not _is_local(address):
                _warn_of_clear_token(address, self._token_file)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Return what a channel is to be made with, the same object until a file changes; None: no TLS."""
        return self._tls.now() if self._tls else None

    def channel_options(self) -> list[tuple[str, str]]:
        """Return the options that a channel needs for it."""
        return [("grpc.ssl_target_name_override", self._name)] if self._name else []

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata that a call needs; never to be shown to anybody."""
        return self._token.now() if self._token else ()

    def explained(self, failure: Failure) -> Failure:
        """Say what to look at, where a call has failed for want of trust, or may have."""
        error = failure.error
        if isinstance(error, AuthenticationFailed):
            if self._token_file:
                problem = f"does not take the token in {self._token_file}"
            else:
                problem = f"wants a token (token_file, or {variable('token_file')})"
            message = f"the tokenizer service at {self.address} {problem}: {error.message}"
            return replace(failure, error=AuthenticationFailed(message, detail=error.detail))
        # What comes from the server itself has a detail.
        if isinstance(error, ServiceUnavailable) and error.detail is None:
            return replace(failure, error=self._handshake_error(error))
        return failure

    # ------------------------------------------------------------ reading

    def _check_combination(self) -> None:
        tls = {"tls_ca": self._ca, "tls_client_cert": self._cert, "tls_client_key": self._key}
        tls["tls_server_name"] = self._name
        for name, value in tls.items():
            if value and self.address.startswith("unix:"):
                raise _bad(name, value, f"is for addresses host:port; {self.address} is a Unix socket")
            if value and not self._ca:
                raise _bad(name, value, f"is of use with TLS only, which tls_ca ({variable('tls_ca')}) turns on")
        if bool(self._cert) != bool(self._key):
            given, missing = ("cert", "key") if self._cert else ("key", "cert")
            missing = f"tls_client_{missing}"
            raise _bad(f"tls_client_{given}", self._cert or self._key, f"needs {missing} ({variable(missing)}), too")

    def _load_tls(self) -> grpc.ChannelCredentials:
        roots = cert = key = None
        # gRPC would take anything, and then fail to connect.
        if self._ca != SYSTEM:
            roots = _read("tls_ca", self._ca)
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(self._ca)
            except OSError:  # SSLError is one
                raise _bad("tls_ca", self._ca, "is no PEM file of certificates") from None
        if self._cert:
            cert, key = _read("tls_client_cert", self._cert), _read("tls_client_key", self._key)
            if b"-----BEGIN CERTIFICATE-----" not in cert:
                raise _bad("tls_client_cert", self._cert, "is no PEM file of a certificate")
            try:
                # Without a password, OpenSSL would ask for one at the terminal.
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(self._cert, self._key, password=lambda: b"")
            except OSError as error:
                # The latter where even their algorithms differ.
                if getattr(error, "reason", None) in ("KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED"):
                    problem = f"does not fit the certificate {self._cert}"
                else:
                    problem = f"and its certificate {self._cert} are no PEM files of a certificate and its plain key"
                raise _bad("tls_client_key", self._key, problem) from None
        return grpc.ssl_channel_credentials(roots, key, cert)

    def _load_token(self) -> tuple[tuple[str, str], ...]:
        lines = _read("token_file", self._token_file).decode("utf-8", errors="replace").split("\n")
        for number, line in enumerate(lines, 1):
            token = line.strip()
            if token and not token.startswith("#"):
                if not re.fullmatch("[!-~]+", token):
                    problem = f"has characters in line {number} that are no part of a token: printable ASCII, no spaces"
                    raise _bad("token_file", self._token_file, problem)
                return (("authorization", f"Bearer {token}"),)
        raise _bad("token_file", self._token_file, "has no token in it")

    # ------------------------------------------------------------ explaining

    def _handshake_error(self, error: ServiceUnavailable) -> TokenizerError:
        """Read gRPC's words about a connection that did not come about."""
        message = error.message
        service = f"the tokenizer service at {self.address}"
        if found := re.search(r"CERTIFICATE_VERIFY_FAILED(?:: ([\w ]+))?", message):
            reason = found[1] or "it does not verify"
            if "expired" in reason or "not yet valid" in reason:
                look = "look at its dates, and at this machine's clock"
            elif self._ca == SYSTEM:
                look = "none of the authorities that gRPC ships has signed it; name the one that has in tls_ca"
            else:
                look = f"look at whether an authority in {self._ca} (tls_ca) has signed it"
            return AuthenticationFailed(f"the certificate of {service} is not trusted, {reason}: {look}")
        if re.search(r"Hostname Verification Check failed|is not in peer certificate", message):
            name = self._name or self.address.rpartition(":")[0]
            return AuthenticationFailed(
                f"the certificate of {service} is not for {name}: look at the address, or name in tls_server_name what"
                " the certificate is for"
            )
        if "WRONG_VERSION_NUMBER" in message:
            return AuthenticationFailed(
                f"{service} does not speak TLS: look at the port and at its --tls-cert, or leave out tls_ca"
            )
        look = "look at whether it wants a client certificate (tls_client_cert, tls_client_key)"
        if self._cert:
            look = f"look at the dates of {self._cert} (tls_client_cert), and at whether the service trusts its signer"
        # From within a handshake, or, with TLS 1.3, after it: then gRPC keeps the alert to itself.
        if found := re.search(r"[A-Z0-9]+_ALERT_([A-Z_]+)|TSI_DATA_CORRUPTED", message):
            alert = f" ({found[1].replace('_', ' ').lower()})" if found[1] else ""
            return AuthenticationFailed(f"{service} refuses the connection{alert}: {look}")
        # So ends a connection to a gRPC server that refuses our certificate, or one to a server on its way down.
        if re.search(r"failed to connect.*(Socket closed|reset by peer)", message) and self.address[:5] != "unix:":
            if not self._ca:
                look = "look at whether it wants TLS (tls_ca)"
            return ServiceUnavailable(f"{message}; if this goes on, {look}", code=error.code)
        return error


class _Current(Generic[_T]):
    """What is made of some files, and made anew when one of them changes."""

    def __init__(self, files: list[str], make: Callable[[], _T]) -> None:
        self._files = files
        self._make = make
        self._lock = threading.Lock()
        self._seen: list[Any] | None = None
        error = self._refresh()
        if error is not None:
            raise error

    def now(self) -> _T:
        """Return it; what was made before if the files have become unusable."""
        if self._look() != self._seen:
            with self._lock:
                error = self._refresh()
            if error is not None:
                _log.warning("%s; what was there before is used on", error)
        return self._made

    def _refresh(self) -> InvalidInput | None:
        # Until nothing changes in between: then all that was read belongs together.
        error = None
        while (seen := self._look()) != self._seen:
            self._seen = seen
            try:
                self._made, error = self._make(), None
            except InvalidInput as problem:
                # A new one: a traceback holds the frames of the call, and with them its connection.
                error = InvalidInput(problem.message, detail=problem.detail)
        return error

    def _look(self) -> list[Any]:
        return [_version(file) for file in self._files]


def _is_local(address: str) -> bool:
    """Whether what is sent there does not leave this machine."""
    host = address.rpartition(":")[0].strip("[]")
    if address.startswith("unix:") or host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@functools.lru_cache  # a process may make many clients, one after the other, too
def _warn_of_clear_token(address: str, token_file: str) -> None:
    _log.warning(
        "the token in %s travels in the clear to %s: whoever sees the traffic can use it; TLS (tls_ca, or %s) hides it",
        token_file,
        address,
        variable("tls_ca"),
    )


def _version(file: str) -> tuple[int, ...] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_dev, status.st_ino, status.st_size


def _text(name: str, value: FilePath | None) -> str:
    try:
        text = os.fspath(value or "")
    except TypeError:
        text = None
    if not isinstance(text, str) or "\0" in text:
        raise _bad(name, repr(value), "is no path or name")
    return text


def _read(name: str, file: str) -> bytes:
    try:
        with open(file, "rb") as opened:
            return opened.read()
    except OSError as error:
        raise _bad(name, file, f"cannot be read: {error.strerror or error}") from None


def _bad(name: str, value: str, problem: str) -> InvalidInput:
    detail = ErrorDetail(reason="INVALID_VALUE", field=name, value=value)
    return InvalidInput(f"{name} {value} {problem}", detail=detail)

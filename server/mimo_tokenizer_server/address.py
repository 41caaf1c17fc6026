"""Where the server listens: a Unix socket or a TCP port, checked before gRPC sees it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# sizeof(sockaddr_un.sun_path) on Linux is 108 with the closing zero.
_MAX_SOCKET_PATH = 107

# How long another server that starts in the same folder may take to bind.
_LOCK_SECONDS = 10


class AddressError(ValueError):
    """An address that cannot be listened on; the sentence says why."""


@dataclass(frozen=True)
class Address:
    """Either a Unix socket's path, or a host and port (0: any free one)."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @property
    def target(self) -> str:
        """As gRPC writes it."""
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse(text: str) -> Address:
    """Read "unix:///path", "host:port" or ":port" (loopback).

    Raises:
        AddressError: it is none of these.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        path = path.removeprefix("//") if path.startswith("///") else path
        if not path or path.startswith("//"):
            raise AddressError(f"address {text!r} is no Unix socket; write unix:///absolute/path")
        address = Address(path=Path(path))
        if any(len(os.fsencode(name)) > _MAX_SOCKET_PATH for name in (path, _birthplace(Path(path)))):
            raise AddressError(f"the socket's path {path} is longer than the {_MAX_SOCKET_PATH} bytes a system takes")
        return address
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]/]*)):([0-9]{1,5})", text)
    if match is None or int(match[3]) > 65535:
        raise AddressError(f"address {text!r} is neither unix:///path nor host:port (an IPv6 host in brackets)")
    return Address(host=match[1] or match[2] or "127.0.0.1", port=int(match[3]))


def parse_port(text: str, what: str) -> Address:
    """Read "host:port" or ":port" (loopback), of the address for `what`.

    Raises:
        AddressError: it is neither.
    """
    address = parse(text)
    if address.path is not None:
        raise AddressError(f"{what} address {text!r} is a Unix socket; it must be host:port")
    return address


@contextlib.contextmanager
def taken(address: Address, socket_mode: int) -> Iterator[Address]:
    """Make way for a server at `address`, which binds in the body to the address that is yielded.

    A Unix socket comes into being under another name, with the permissions `socket_mode` from its first moment, and is
    moved to its place afterwards, over one that nobody listens on. gRPC removes what stands under the name it has
    bound when it stops, and by then a successor's socket may stand in the place.

    Raises:
        AddressError: somebody listens there, or the socket cannot be made.
    """
    if address.path is None:
        _check_port(address)
        yield address
        return
    path = address.path
    if not path.parent.is_dir():
        raise AddressError(f"cannot make the socket {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise AddressError(f"cannot make the socket {path}: the folder {path.parent} is not writable for this user")
    birthplace = _birthplace(path)
    with _alone_in(path.parent):
        _check_stale(path)
        before = os.umask(0o777 & ~socket_mode)
        try:
            yield Address(path=birthplace)
        finally:
            os.umask(before)
        try:
            birthplace.replace(path)
        except OSError as error:
            raise AddressError(f"cannot make the socket {path}: {error.strerror}") from error


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other servers that start at the same moment from looking at this folder's sockets before ours is there."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a folder that may be entered, not listed
        yield
        return
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise AddressError(f"another process keeps the folder {folder} locked; the socket needs it") from None
            time.sleep(0.02)


def _birthplace(path: Path) -> Path:
    return path.with_name(f".{os.getpid()}")


def _check_stale(path: Path) -> None:
    """Refuse a path that is neither free nor a socket that nobody listens on."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise AddressError(f"cannot use the socket {path}: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise AddressError(f"{path} exists and is no socket; it is left alone")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            pass
        except OSError as error:
            raise AddressError(f"cannot tell whether a server listens on {path}: {error}") from error
        else:
            raise AddressError(f"a server already listens on {path}")


def _check_port(address: Address) -> None:
    """Ask the system why a port cannot be had; gRPC says only that it failed."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise AddressError(f"cannot listen on {address.target}: {error.strerror or error}") from error
    family, kind, protocol, _, where = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(where)
        except OSError as error:
            reason = "a server already listens there" if error.errno == errno.EADDRINUSE else error.strerror
            raise AddressError(f"cannot listen on {address.target}: {reason}") from error

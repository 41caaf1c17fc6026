"""What both flavours of gRPC need to reach a server: the address, the channel's options, the methods, the metadata."""

from __future__ import annotations

import os
import re
from enum import Enum
from typing import Any, Final

from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from mimo_audio_tokenizer.v1.tokenizer_pb2_grpc import AudioTokenizerStub

from ._credentials import Authenticator
from ._version import __version__
from .errors import ErrorDetail, InvalidInput

ADDRESS_VARIABLE: Final = "MIMO_AUDIO_TOKENIZER_ADDRESS"

# Of sockaddr_un.sun_path, less its end mark. gRPC would report a longer path as a server that is not there yet.
_MAX_SOCKET_PATH: Final = 107

# Seconds in which a server has to accept a connection; gRPC's own default is 20.
_CONNECT_SECONDS: Final = 5.0


class Rpc(str, Enum):
    """The RPCs that the client uses."""

    ENCODE = "Encode"
    DECODE = "Decode"
    DECODE_VQ = "DecodeVq"
    ENCODE_STREAM = "EncodeStream"
    DECODE_LONG = "DecodeLong"
    GET_INFO = "GetInfo"
    HEALTH = "Health/Check"

    @property
    def answers_in_stream(self) -> bool:
        """Whether the answer is a stream of messages."""
        return self in (Rpc.ENCODE_STREAM, Rpc.DECODE_LONG)


def resolve_address(address: str | None) -> str:
    """Return the address to use: `address`, or else the environment's.

    Raises:
        InvalidInput: There is none, or it is neither `unix:///path`, `unix:path` nor `host:port`.
    """
    source = "the address"
    if address is None:
        address = os.environ.get(ADDRESS_VARIABLE, "")
        source = f"the address in {ADDRESS_VARIABLE}"
        if not address:
            raise _bad_address(
                "", f"no address of a tokenizer service: pass one (unix:///path or host:port) or set {ADDRESS_VARIABLE}"
            )
    if not isinstance(address, str):
        raise _bad_address(str(address), f"{source} is {address!r}, not text such as unix:///path or host:port")
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        if path.startswith("//"):
            path = path.removeprefix("//")
            if not path.startswith("/"):
                raise _bad_address(address, f"{source} {address!r} needs an absolute path after unix://")
        if not path:
            raise _bad_address(address, f"{source} {address!r} has no path")
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
            raise _bad_address(
                address,
                f"{source} {address!r} is longer than the {_MAX_SOCKET_PATH} bytes that a socket's path may have",
            )
        return address
    host, _, port = address.rpartition(":")
    if not host and address.startswith(":"):  # as the server takes it: this machine
        host, address = "127.0.0.1", f"127.0.0.1{address}"
    if re.fullmatch(r"[^\s/:]+|\[[0-9A-Fa-f:.%\w]+\]", host) and port.isascii() and port.isdigit():
        if 0 < int(port) <= 65535:
            return address
        raise _bad_address(address, f"{source} {address!r} has a port outside 1..65535")
    hint = f"; is it a socket's path? then write unix://{address}" if address.startswith("/") else ""
    raise _bad_address(address, f"{source} {address!r} is neither unix:///path nor host:port{hint}")


def _bad_address(address: str, message: str) -> InvalidInput:
    detail = ErrorDetail(
        reason="INVALID_VALUE", field="address", value=address, allowed="unix:///path, unix:path or host:port"
    )
    return InvalidInput(message, detail=detail)


def channel_options(unavailable_timeout: float | None) -> list[tuple[str, Any]]:
    """Return the options of a channel.

    Args:
        unavailable_timeout: Seconds to wait for a service that is not there; an attempt to connect takes no longer.
    """
    connect = min(_CONNECT_SECONDS, unavailable_timeout or _CONNECT_SECONDS)
    return [
        # The server states its limit in GetInfo, and enforces it.
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        # `_retry` does it, see there.
        ("grpc.enable_retries", 0),
        # A restarted server is found within a second; the default grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # In spite of its name, the time that an attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", max(100, int(connect * 1000))),
        # Finds a dead peer during a call. Without calls there are no pings, and no more than two (the default) without
        # data in between, so that a server with default settings has no reason to hang up on a client that waits.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 0),
        # The service stands beside its callers: a proxy meant for the outside world is not the way to it.
        ("grpc.enable_http_proxy", 0),
    ]


class Connection:
    """A channel with its methods, and the credentials it was made with; calls in flight hold on to it.

    Attributes:
        channel: Of `grpc` or `grpc.aio`.
        credentials: None: it is in plain text.
        methods: Its callables.
    """

    def __init__(
        self, library: Any, authenticator: Authenticator, unavailable_timeout: float | None, *options: tuple[str, Any]
    ) -> None:
        """Make a channel, with the credentials as they are now.

        Args:
            library: `grpc` or `grpc.aio`.
            authenticator: Has the address, too.
            unavailable_timeout: As for `channel_options`.
            options: More of them.
        """
        self.credentials = authenticator.channel_credentials()
        given = {"options": [*channel_options(unavailable_timeout), *authenticator.channel_options(), *options]}
        self.channel = (
            library.insecure_channel(authenticator.address, **given)
            if self.credentials is None
            else library.secure_channel(authenticator.address, self.credentials, **given)
        )
        self.methods = _methods(self.channel)


def _methods(channel: Any) -> dict[Rpc, Any]:
    """Return the callables of a channel, whether a synchronous or an asynchronous one."""
    stub: Any = AudioTokenizerStub(channel)
    methods: dict[Rpc, Any] = {rpc: getattr(stub, rpc.value) for rpc in Rpc if rpc is not Rpc.HEALTH}
    # The stubs of grpc.health.v1 come with grpcio-health-checking, which pins protobuf, and this library shares its
    # environment with others. Two well-known messages have the same shape on the wire: StringValue is
    # HealthCheckRequest{string service = 1}, Int32Value is HealthCheckResponse{enum status = 1}.
    methods[Rpc.HEALTH] = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=StringValue.SerializeToString,
        response_deserializer=Int32Value.FromString,
    )
    return methods


def client_name(name: str | None) -> str:
    """Return the value of `x-client`.

    Raises:
        InvalidInput: The name cannot be sent as metadata.
    """
    library = f"mimo-tokenizer-client/{__version__}"
    if name is None:
        return library
    if not re.fullmatch(r"[!-~]([ -~]*[!-~])?", name):
        raise InvalidInput(f"the client's name must be printable ASCII; it is {name!r}")
    return f"{name} {library}"

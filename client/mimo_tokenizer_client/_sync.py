"""The synchronous client."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar, cast, overload

import grpc
import numpy as np
import numpy.typing as npt

from ._arrays import ArrayInput
from ._core import Attempt, Core, Plan, Reply, Sleep
from ._credentials import Credentials
from ._transport import Connection
from .errors import Cancelled, Failure, TokenizerError
from .info import ServerInfo

_T = TypeVar("_T")
_ClientT = TypeVar("_ClientT", bound="TokenizerClient")


class TokenizerClient:
    """Client of one tokenizer service; any number of threads may use it at a time.

    Waveforms and codes may be numpy arrays, arrays of any library that speaks `__array__` or DLPack (those on a GPU are
    copied to the host with their own library's method), or nested lists. What is too large for one message travels as
    a stream, or in several calls, without the caller's doing.

    Each call has a deadline: `timeout` of the call, else `timeout` of the client, else 30 s and 4 s more for each
    second of audio in it (0.1 s for `decode_vq`). It covers everything the call takes, waiting for a busy or an absent
    server included: until then, a call that meets no server, one that is starting, or a full queue, is repeated from
    its beginning.

    Every method raises a `TokenizerError`: `InvalidInput`, `ModelMismatch`, `TooLarge`, `Overloaded`,
    `ServiceUnavailable`, `AuthenticationFailed`, `DeadlineExceeded`, `Cancelled` (the client was closed) or
    `ServerFault`.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout: float | None = None,
        fingerprint: str | None = None,
        name: str | None = None,
        unavailable_timeout: float | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """Make a client; it connects with its first call.

        Args:
            address: `unix:///path`, `unix:path` or `host:port`; None: what MIMO_AUDIO_TOKENIZER_ADDRESS says.
            timeout: Seconds for each call, instead of the default that grows with the audio.
            fingerprint: The model that is expected; with another one, calls raise `ModelMismatch`.
            name: Who is calling, for the server's log, as "my-app/1.2".
            unavailable_timeout: Seconds for which a call waits for a service that is not there; None: its whole time.
            credentials: Certificates and token; None: what the environment's variables MIMO_AUDIO_TOKENIZER_TLS_CA,
                _TLS_CLIENT_CERT, _TLS_CLIENT_KEY, _TLS_SERVER_NAME and _TOKEN_FILE say.

        Raises:
            InvalidInput: An argument makes no sense, there is no address, or a file of the credentials is no good.
        """
        self._core = Core(address, timeout, fingerprint, name, unavailable_timeout, credentials)
        self._connection = Connection(grpc, self._core.authenticator, unavailable_timeout)
        # Those of before, too, while calls are in flight on them.
        self._connections = weakref.WeakSet([self._connection])
        self._lock = threading.Lock()
        self._closed = threading.Event()

    @property
    def address(self) -> str:
        """Where the service is looked for."""
        return self._core.address

    def encode(
        self,
        waveform: ArrayInput,
        sample_rate: int,
        *,
        num_quantizers: int | None = None,
        group_size: int | None = None,
        timeout: float | None = None,
    ) -> npt.NDArray[np.uint16]:
        """Turn a waveform into codes.

        Args:
            waveform: (samples,) or (channels, samples); floating point with full scale [-1, 1], or int16. Channels are
                mixed to mono.
            sample_rate: Samples a second of one channel; the server resamples.
            num_quantizers: Codebooks wanted, counted from the first; None: all.
            group_size: Repeat the last frame until the number of frames is a multiple of this; None: don't.
            timeout: Seconds.

        Returns:
            Codes, (num_quantizers, frames).
        """
        plan = self._core.encode([waveform], [sample_rate], num_quantizers, group_size, timeout, False)
        return cast("npt.NDArray[np.uint16]", self._run(plan)[0])

    def decode(
        self, codes: ArrayInput, left_context_frames: int = 0, *, timeout: float | None = None
    ) -> npt.NDArray[np.float32]:
        """Turn codes into a waveform.

        Args:
            codes: (num_quantizers, frames) of any integer type; the first quantizers are enough.
            left_context_frames: Frames to drop from the front of the answer; as many as there are, or more, leave none.
            timeout: Seconds.

        Returns:
            Mono samples at the model's rate, (samples,), full scale [-1, 1].
        """
        plan = self._core.decode([codes], [left_context_frames], timeout, False)
        return cast("npt.NDArray[np.float32]", self._run(plan)[0])

    @overload
    def encode_batch(
        self,
        waveforms: Iterable[ArrayInput],
        sample_rate: int | Sequence[int],
        *,
        num_quantizers: int | None = None,
        group_size: int | None = None,
        timeout: float | None = None,
        return_errors: Literal[False] = False,
    ) -> list[npt.NDArray[np.uint16]]: ...

    @overload
    def encode_batch(
        self,
        waveforms: Iterable[ArrayInput],
        sample_rate: int | Sequence[int],
        *,
        num_quantizers: int | None = None,
        group_size: int | None = None,
        timeout: float | None = None,
        return_errors: bool,
    ) -> list[npt.NDArray[np.uint16] | TokenizerError]: ...

    def encode_batch(
        self,
        waveforms: Iterable[ArrayInput],
        sample_rate: int | Sequence[int],
        *,
        num_quantizers: int | None = None,
        group_size: int | None = None,
        timeout: float | None = None,
        return_errors: bool = False,
    ) -> Any:
        """Turn waveforms into codes, each as `encode` does.

        Args:
            waveforms: Each as for `encode`.
            sample_rate: One for all, or one for each.
            num_quantizers: As for `encode`.
            group_size: As for `encode`.
            timeout: Seconds for all of it.
            return_errors: Put a failed item's error in its place instead of raising the first one.

        Returns:
            For each waveform, in order, its codes or its error.
        """
        return self._run(self._core.encode(waveforms, sample_rate, num_quantizers, group_size, timeout, return_errors))

    @overload
    def decode_batch(
        self,
        codes: Iterable[ArrayInput],
        left_context_frames: int | Sequence[int] = 0,
        *,
        timeout: float | None = None,
        return_errors: Literal[False] = False,
    ) -> list[npt.NDArray[np.float32]]: ...

    @overload
    def decode_batch(
        self,
        codes: Iterable[ArrayInput],
        left_context_frames: int | Sequence[int] = 0,
        *,
        timeout: float | None = None,
        return_errors: bool,
    ) -> list[npt.NDArray[np.float32] | TokenizerError]: ...

    def decode_batch(
        self,
        codes: Iterable[ArrayInput],
        left_context_frames: int | Sequence[int] = 0,
        *,
        timeout: float | None = None,
        return_errors: bool = False,
    ) -> Any:
        """Turn code arrays into waveforms, each as `decode` does.

        Args:
            codes: Each as for `decode`.
            left_context_frames: One for all, or one for each.
            timeout: Seconds for all of it.
            return_errors: Put a failed item's error in its place instead of raising the first one.

        Returns:
            For each code array, in order, its samples or its error.
        """
        return self._run(self._core.decode(codes, left_context_frames, timeout, return_errors))

    def decode_vq(self, codes: ArrayInput, *, timeout: float | None = None) -> npt.NDArray[np.float32]:
        """Turn codes into the quantizer's output, the sum of their codebook vectors.

        Args:
            codes: (num_quantizers, frames) of any integer type; the first quantizers are enough.
            timeout: Seconds.

        Returns:
            (frames, d_model).
        """
        return self._run(self._core.decode_vq(codes, timeout))

    def info(self, *, timeout: float | None = None) -> ServerInfo:
        """Ask the server what is loaded, where, and what is allowed."""
        return self._run(self._core.info(timeout))

    def health(self, *, timeout: float | None = None) -> bool:
        """Tell whether the server is there and serving; one look, of 5 s at most unless told otherwise.

        Raises:
            AuthenticationFailed: The server does not take our token or certificate, or its own is not trusted; all else
                is an answer.
        """
        return self._run(self._core.health(timeout))

    def wait_until_ready(self, timeout: float) -> None:
        """Return as soon as the server is serving.

        Args:
            timeout: Seconds to wait at most.

        Raises:
            ServiceUnavailable: It is not, in that time.
            AuthenticationFailed: The server does not take our token or certificate, or its own is not trusted.
        """
        self._run(self._core.wait_until_ready(timeout))

    def close(self) -> None:
        """Close the connection; calls that are under way in other threads raise `Cancelled`."""
        with self._lock:
            self._closed.set()
            connections = list(self._connections)
        for connection in connections:
            connection.channel.close()

    def __enter__(self: _ClientT) -> _ClientT:
        """Return the client."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the client."""
        self.close()

    def _run(self, plan: Plan[_T]) -> _T:
        reply: Reply = None
        while True:
            try:
                step = plan.send(reply)
            except StopIteration as end:
                return cast("_T", end.value)
            if isinstance(step, Sleep):
                self._closed.wait(step.seconds)
                reply = None
            else:
                reply = self._perform(step)

    def _perform(self, attempt: Attempt) -> Reply:
        connection = self._connect()  # held to the end, see there
        method = connection.methods[attempt.rpc]
        try:
            call = method(attempt.request(), timeout=attempt.timeout, metadata=attempt.metadata)
            if not attempt.rpc.answers_in_stream:
                return [call]  # the answer itself; gRPC cancels what an interrupt leaves unanswered
            try:
                return list(call)
            finally:
                # After an interrupt, too; of no effect on a call that is done. OpenTelemetry's instrumentation makes a
                # generator of a call, which cancels it when it is let go of.
                if hasattr(call, "cancel"):
                    call.cancel()
        except (grpc.RpcError, ValueError) as error:
            # A closed channel ends its calls with CANCELLED and refuses new ones with ValueError.
            if self._closed.is_set():
                raise self._closed_error() from None
            if not isinstance(error, grpc.RpcError):
                raise
            return Failure.from_rpc_error(error)

    def _connect(self) -> Connection:
        """Return the connection for the next call: a new one when the certificates have changed."""
        if self._core.authenticator.channel_credentials() is not self._connection.credentials:
            with self._lock:
                old = self._connection
                if self._core.authenticator.channel_credentials() is not old.credentials and not self._closed.is_set():
                    self._connection = Connection(grpc, self._core.authenticator, self._core.unavailable_timeout)
                    self._connections.add(self._connection)
                    # Only calls in flight hold it now: it is closed after the last of them.
                    weakref.finalize(old, old.channel.close)
        if self._closed.is_set():
            raise self._closed_error()
        return self._connection

    def _closed_error(self) -> Cancelled:
        return Cancelled(f"the client of {self.address} is closed")

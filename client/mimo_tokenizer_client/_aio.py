"""The asynchronous client."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar, cast, overload

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt

from ._arrays import ArrayInput
from ._core import Attempt, Core, Plan, Reply, Sleep
from ._credentials import Credentials
from ._transport import Connection, Rpc
from .errors import Cancelled, Failure, TokenizerError
from .info import ServerInfo

_T = TypeVar("_T")
_ClientT = TypeVar("_ClientT", bound="AsyncTokenizerClient")


class AsyncTokenizerClient:
    """Client of one tokenizer service for asyncio; `TokenizerClient` tells what it takes, gives and raises.

    It belongs to the event loop of its first call; any number of tasks may use it at a time. Cancelling a task cancels
    its call on the server.
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
        """Make a client, inside or outside of an event loop; see `TokenizerClient` for the arguments.

        Raises:
            InvalidInput: An argument makes no sense, there is no address, or a file of the credentials is no good.
        """
        self._core = Core(address, timeout, fingerprint, name, unavailable_timeout, credentials)
        # A channel of grpc.aio takes hold of an event loop when it is made, so that has to wait for one.
        self._connection: Connection | None = None
        # Those of before, too, while calls are in flight on them.
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._closed = False

    @property
    def address(self) -> str:
        """Where the service is looked for."""
        return self._core.address

    async def encode(
        self,
        waveform: ArrayInput,
        sample_rate: int,
        *,
        num_quantizers: int | None = None,
        group_size: int | None = None,
        timeout: float | None = None,
    ) -> npt.NDArray[np.uint16]:
        """Turn a waveform, (samples,) or (channels, samples), into codes, (num_quantizers, frames)."""
        plan = self._core.encode([waveform], [sample_rate], num_quantizers, group_size, timeout, False)
        return cast("npt.NDArray[np.uint16]", (await self._run(plan))[0])

    async def decode(
        self, codes: ArrayInput, left_context_frames: int = 0, *, timeout: float | None = None
    ) -> npt.NDArray[np.float32]:
        """Turn codes, (num_quantizers, frames), into a waveform, (samples,)."""
        plan = self._core.decode([codes], [left_context_frames], timeout, False)
        return cast("npt.NDArray[np.float32]", (await self._run(plan))[0])

    @overload
    async def encode_batch(
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
    async def encode_batch(
        self,
        waveforms: Iterable[ArrayInput],
        sample_rate: int | Sequence[int],
        *,
        num_quantizers: int | None = None,
        group_size: int | None = None,
        timeout: float | None = None,
        return_errors: bool,
    ) -> list[npt.NDArray[np.uint16] | TokenizerError]: ...

    async def encode_batch(
        self,
        waveforms: Iterable[ArrayInput],
        sample_rate: int | Sequence[int],
        *,
        num_quantizers: int | None = None,
        group_size: int | None = None,
        timeout: float | None = None,
        return_errors: bool = False,
    ) -> Any:
        """Turn waveforms into codes, each as `encode` does; `return_errors` puts errors in their places."""
        plan = self._core.encode(waveforms, sample_rate, num_quantizers, group_size, timeout, return_errors)
        return await self._run(plan)

    @overload
    async def decode_batch(
        self,
        codes: Iterable[ArrayInput],
        left_context_frames: int | Sequence[int] = 0,
        *,
        timeout: float | None = None,
        return_errors: Literal[False] = False,
    ) -> list[npt.NDArray[np.float32]]: ...

    @overload
    async def decode_batch(
        self,
        codes: Iterable[ArrayInput],
        left_context_frames: int | Sequence[int] = 0,
        *,
        timeout: float | None = None,
        return_errors: bool,
    ) -> list[npt.NDArray[np.float32] | TokenizerError]: ...

    async def decode_batch(
        self,
        codes: Iterable[ArrayInput],
        left_context_frames: int | Sequence[int] = 0,
        *,
        timeout: float | None = None,
        return_errors: bool = False,
    ) -> Any:
        """Turn code arrays into waveforms, each as `decode` does; `return_errors` puts errors in their places."""
        return await self._run(self._core.decode(codes, left_context_frames, timeout, return_errors))

    async def decode_vq(self, codes: ArrayInput, *, timeout: float | None = None) -> npt.NDArray[np.float32]:
        """Turn codes, (num_quantizers, frames), into the quantizer's output, (frames, d_model)."""
        return await self._run(self._core.decode_vq(codes, timeout))

    async def info(self, *, timeout: float | None = None) -> ServerInfo:
        """Ask the server what is loaded, where, and what is allowed."""
        return await self._run(self._core.info(timeout))

    async def health(self, *, timeout: float | None = None) -> bool:
        """Tell whether the server is there and serving; one look, of 5 s at most unless told otherwise.

        Raises:
            AuthenticationFailed: The server does not take our token or certificate, or its own is not trusted; all else
                is an answer.
        """
        return await self._run(self._core.health(timeout))

    async def wait_until_ready(self, timeout: float) -> None:
        """Return as soon as the server is serving.

        Args:
            timeout: Seconds to wait at most.

        Raises:
            ServiceUnavailable: It is not, in that time.
            AuthenticationFailed: The server does not take our token or certificate, or its own is not trusted.
        """
        await self._run(self._core.wait_until_ready(timeout))

    async def close(self) -> None:
        """Close the connection; calls that are under way in other tasks raise `Cancelled`."""
        self._closed = True
        for connection in list(self._connections):
            await connection.channel.close()

    async def __aenter__(self: _ClientT) -> _ClientT:
        """Return the client."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the client."""
        await self.close()

    async def _run(self, plan: Plan[_T]) -> _T:
        reply: Reply = None
        while True:
            try:
                step = plan.send(reply)
            except StopIteration as end:
                return cast("_T", end.value)
            if isinstance(step, Sleep):
                await asyncio.sleep(step.seconds)
                reply = None
            else:
                reply = await self._perform(step)

    async def _perform(self, attempt: Attempt) -> Reply:
        if self._closed:
            raise self._closed_error()
        connection = self._connect()  # held to the end, see there
        method = connection.methods[attempt.rpc]
        call = method(attempt.request(), timeout=attempt.timeout, metadata=attempt.metadata)
        first = _first_failure(call) if attempt.rpc is Rpc.ENCODE_STREAM else []
        try:
            if attempt.rpc.answers_in_stream:
                return [message async for message in call]
            return [await call]
        except grpc.RpcError as error:
            if self._closed:
                raise self._closed_error() from None
            return first[0] if first else Failure.from_rpc_error(error)
        except asyncio.CancelledError:
            # Closing the channel looks the same as cancelling the task, which must stay cancelled
            # (`cancelling` is new in Python 3.11).
            cancelling = getattr(asyncio.current_task(), "cancelling", None)
            if self._closed and not (cancelling and cancelling()):
                raise self._closed_error() from None
            raise
        finally:
            call.cancel()  # of no effect on a call that is done

    def _connect(self) -> Connection:
        """Return the connection for the next call: a new one when the certificates have changed."""
        authenticator = self._core.authenticator
        if self._connection is None or self._connection.credentials is not authenticator.channel_credentials():
            # Only calls in flight hold the old one then, and a channel of grpc.aio is closed when nobody does.
            self._connection = Connection(grpc.aio, authenticator, self._core.unavailable_timeout)
            self._connections.add(self._connection)
        return self._connection

    def _closed_error(self) -> Cancelled:
        return Cancelled(f"the client of {self.address} is closed")


def _first_failure(call: Any) -> list[Failure]:
    """Return a list in which the failure of a call stands as soon as it is known.

    When a call ends while one of its requests is being written, which is how a server refuses a stream or dies in its
    midst, grpc.aio puts "Internal error from Core" over the status that it has just received. Callbacks run in between.
    """
    failures: list[Failure] = []

    def keep(call: Any) -> None:
        code = _at_once(call.code())
        if not failures and code not in (None, grpc.StatusCode.OK):
            failures.append(Failure.from_status(code, _at_once(call.details()), _at_once(call.trailing_metadata())))

    call.add_done_callback(keep)
    return failures


def _at_once(coroutine: Coroutine[Any, Any, _T]) -> _T | None:
    """Return the result of a coroutine that has nothing to wait for; None if it had."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return cast("_T", end.value)
    coroutine.close()
    return None

"""Deadlines, and when to try again.

gRPC's own retries are off (see `_transport`): its service config stops at five attempts, within a second or two, and
forgets requests over its buffer of 256 KiB, so neither a restart of the server nor a request with audio in it would
get through.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field

from .errors import Cancelled, DeadlineExceeded, ErrorDetail, Failure, InvalidInput, Overloaded, ServiceUnavailable

FIRST_BACKOFF = 0.1
MAX_BACKOFF = 1.0


def checked_seconds(value: float | None, name: str) -> float | None:
    """Check a duration: None, or a finite positive number of seconds.

    Raises:
        InvalidInput: It is something else.
    """
    try:
        if value is None or (math.isfinite(value) and value > 0):
            return value
    except TypeError:
        pass
    raise InvalidInput(
        f"{name} must be a positive, finite number of seconds; it is {value!r}",
        detail=ErrorDetail(reason="INVALID_VALUE", field=name, value=repr(value), allowed="more than 0"),
    )


@dataclass
class Deadline:
    """The time that one call of the caller's has, over all RPCs and attempts it takes.

    Attributes:
        seconds: All the time it has.
        fixed: The caller named it; otherwise it may grow once the amount of audio is known.
    """

    seconds: float
    fixed: bool
    _start: float = field(default_factory=time.monotonic)

    def grow(self, seconds: float) -> None:
        """Give the call `seconds` in all, unless the caller named a time."""
        if not self.fixed:
            self.seconds = max(self.seconds, seconds)

    def remaining(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._start + self.seconds - time.monotonic())


class Retry:
    """Decides, for one RPC, after each failed attempt: wait how long, or give up with which error."""

    def __init__(self, address: str, deadline: Deadline, unavailable_timeout: float | None) -> None:
        """Begin with the first attempt.

        Args:
            address: Where the service was looked for, for the sentence.
            deadline: Of the call.
            unavailable_timeout: Seconds for which a service that is not there is waited for; None: until the deadline.
        """
        self._address = address
        self._deadline = deadline
        self._patience = math.inf if unavailable_timeout is None else unavailable_timeout
        self._attempts = 0
        self._start = time.monotonic()
        self._away_since: float | None = None
        self._reason: ServiceUnavailable | Cancelled | None = None

    def wait_after(self, failure: Failure) -> float | Failure:
        """Return the seconds to wait before the next attempt, or the failure to end with."""
        error = failure.error
        self._attempts += 1
        if isinstance(error, (ServiceUnavailable, Cancelled)):
            # Nobody here cancelled: a server that is being stopped ends its calls with CANCELLED.
            return self._wait_for_service(error)
        if isinstance(error, Overloaded):
            self._away_since = self._reason = None
            hint = error.detail.retry_after if error.detail else None
            # The server's estimate is a least; callers refused together should not come back together.
            wait: float = hint * random.uniform(1.0, 1.25) if hint else self._backoff()
            return wait if wait < self._deadline.remaining() else failure
        if isinstance(error, DeadlineExceeded) and error.detail is None:
            return self.out_of_time()
        return failure

    def out_of_time(self) -> Failure:
        """Return the failure of a call whose deadline has passed without a word from the server about it."""
        if self._reason is not None:
            return self._unavailable(self._reason)
        return Failure(DeadlineExceeded(f"no answer from {self._address} within {self._deadline.seconds:.3g} s"))

    def _wait_for_service(self, error: ServiceUnavailable | Cancelled) -> float | Failure:
        now = time.monotonic()
        self._reason = error
        self._away_since = now if self._away_since is None else self._away_since
        left = min(self._deadline.remaining(), self._away_since + self._patience - now)
        if left <= 0:
            return self._unavailable(error)
        hint = error.detail.retry_after if error.detail else None
        # The last attempt stands at the very end of the time to wait.
        return min(max(self._backoff(), hint or 0.0), left)

    def _backoff(self) -> float:
        step: float = min(MAX_BACKOFF, FIRST_BACKOFF * 2 ** min(self._attempts - 1, 10))
        return step * random.uniform(0.5, 1.0)

    def _unavailable(self, error: ServiceUnavailable | Cancelled) -> Failure:
        tries = "1 attempt" if self._attempts == 1 else f"{self._attempts} attempts"
        return Failure(
            ServiceUnavailable(
                f"the tokenizer service at {self._address} is not available: {error.message} "
                f"({tries} in {time.monotonic() - self._start:.1f} s)",
                detail=error.detail,
            )
        )

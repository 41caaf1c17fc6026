"""What can be wrong with a request, in the service's own words; `service.py` turns it into gRPC's."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Reason(enum.Enum):
    """Why a request, or an item of it, was not answered; the names are those of the contract's ErrorDetail."""

    INVALID_VALUE = enum.auto()
    TOO_LARGE = enum.auto()
    QUEUE_FULL = enum.auto()
    WRONG_MODEL = enum.auto()
    NOT_READY = enum.auto()
    DEVICE_FAILURE = enum.auto()
    OUT_OF_MEMORY = enum.auto()
    DEADLINE = enum.auto()
    INTERNAL = enum.auto()
    UNAUTHENTICATED = enum.auto()


@dataclass(eq=False)
class RequestError(Exception):
    """A request, or an item of it, that is refused or has failed.

    Attributes:
        message: one sentence: what was wrong, where, what is allowed.
        field: path of the field in the request, such as "items[2].codes.data".
        value: the offending value.
        allowed: the allowed values.
        limit: the limit that was exceeded, in the field's unit.
        item: index in the call.
        row: where in a code array the value stands.
        frame: likewise.
        retry_after: seconds after which the same request may succeed.
    """

    reason: Reason
    message: str
    field: str = ""
    value: str = ""
    allowed: str = ""
    limit: float | None = None
    item: int | None = None
    row: int | None = None
    frame: int | None = None
    retry_after: float | None = None

    def __str__(self) -> str:
        return self.message


def invalid(
    field: str,
    value: object,
    allowed: str,
    *,
    sentence: str | None = None,
    row: int | None = None,
    frame: int | None = None,
) -> RequestError:
    """A field whose value is not allowed; without a `sentence`, "field is value; allowed: ..."."""
    message = sentence or f"{field} is {value}; allowed: {allowed}"
    return RequestError(Reason.INVALID_VALUE, message, field, str(value), allowed, row=row, frame=frame)


def too_large(field: str, value: float, limit: float, unit: str, hint: str = "") -> RequestError:
    """A field over a stated limit, which the same request will always be."""
    # Ten digits: a whole uint32, and the sample that is too much in half an hour.
    message = f"{field} is {value:.10g} {unit}; the limit is {limit:.10g} {unit}{f'; {hint}' if hint else ''}"
    return RequestError(Reason.TOO_LARGE, message, field, f"{value:.10g}", f"at most {limit:.10g} {unit}", limit)

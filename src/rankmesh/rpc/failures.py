"""What a failure that the server tells of is at its caller."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Final

from rankmesh.errors import (
    BusyError,
    CancelledError,
    DeadlineError,
    FunctionNotFound,
    InternalError,
    InvalidMessage,
    RemoteError,
    remote_error,
)
from rankmesh.rpc.protocol import Failure, Why

if TYPE_CHECKING:
    from rankmesh.rpc.client import Outgoing

Maker = Callable[["Outgoing", Failure], BaseException]


def _raised(call: Outgoing, told: Failure) -> BaseException:
    error = remote_error(
        told.type_name,
        f"{call.name!r} raised {told.type_name} at {call.peer}: {told.message}",
        remote_message=told.message,
        remote_traceback=told.traceback,
        peer=str(call.peer),
    )
    if told.traceback:
        error.add_note(f"Remote traceback:\n{told.traceback}")
    return error


def _refused(call: Outgoing, told: Failure) -> BaseException:
    return remote_error(
        "PermissionError",
        f"{call.peer} refuses the {call.what} {call.name!r}: {told.message}",
        remote_message=told.message,
        peer=str(call.peer),
    )


def _unsendable(call: Outgoing, told: Failure) -> BaseException:
    return RemoteError(
        f"{call.name!r} at {call.peer} returned what cannot be sent: {told.message}",
        remote_type=told.type_name,
        remote_message=told.message,
        peer=str(call.peer),
    )


def _missing(call: Outgoing, told: Failure) -> BaseException:
    like = f" Registered there: {', '.join(map(repr, told.names))}." if told.names else ""
    return FunctionNotFound(
        f"{call.peer} has no function {call.name!r}.{like}", function=call.name, nearest=told.names, peer=str(call.peer)
    )


def _late(call: Outgoing, told: Failure) -> BaseException:
    return DeadlineError(
        f"{call.peer} did not complete the {call.what} {call.name!r} in time: {told.message}",
        op=call.op,
        peer=str(call.peer),
        elapsed=monotonic() - call.began,
        timeout=call.timeout,
        known=told.message,
    )


def _invalid(call: Outgoing, told: Failure) -> BaseException:
    return InvalidMessage(told.message, function=call.name, peer=str(call.peer), reason=told.message)


def _not_idempotent(call: Outgoing, told: Failure) -> BaseException:
    return InvalidMessage(told.message, function=call.name, peer=str(call.peer), reason=Why.NOT_IDEMPOTENT)


def _busy(call: Outgoing, told: Failure) -> BaseException:
    return BusyError(told.message, hint="Call again later, or raise the bound named here on that side.")


ERRORS: Final[dict[str, Maker]] = {
    Why.RAISED: _raised,
    Why.MISSING: _missing,
    Why.INVALID: _invalid,
    Why.BUSY: _busy,
    Why.WAIT: _busy,
    Why.LATE: _late,
    Why.CANCELLED: lambda call, told: CancelledError(told.message),
    Why.REFUSED: _refused,
    Why.RESULT: _unsendable,
    Why.NOT_IDEMPOTENT: _not_idempotent,
    Why.INTERNAL: lambda call, told: InternalError(f"{call.peer} failed in rankmesh itself: {told.message}"),
}

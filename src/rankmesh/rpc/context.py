"""The call that the running handler serves: who calls, until when, and whether it is still wanted.

It is a context variable, so it follows a handler through its threads of execution as asyncio and `contextvars` carry
it. Calls made by a handler read it: they never wait longer than the call they serve, and carry its trace on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic
from typing import TYPE_CHECKING, Any

from rankmesh.errors import CancelledError, UsageError

if TYPE_CHECKING:
    import asyncio

    from rankmesh.endpoint import Peer
    from rankmesh.endpoint.router import Router
    from rankmesh.rpc.registry import Function


class CallContext:
    """A call being served. `current_call()` gives it to the handler."""

    # Defaults on the class: what an inline call never sets costs it nothing.
    kind = 0
    flags = 0
    #: The arguments, still encoded.
    body: Any = b""
    trace = b""
    given_up = False
    #: Bytes it counts for in the server's queue.
    counted = 0
    #: The task of an `async def` handler, once it runs, and its loop.
    task: asyncio.Task[Any] | None = None
    loop: asyncio.AbstractEventLoop | None = None
    #: The stream or channel it has become.
    state: Any = None

    def __init__(self, router: Router, ident: int, name: str, function: Function | None, deadline: float) -> None:
        self.router = router
        self.ident = ident
        #: The name it was called by.
        self.name = name
        self.function = function
        self.deadline = deadline

    @property
    def caller(self) -> Peer:
        """Who calls; `caller.rank` (in the mesh, by whichever group the call came), `caller.name`, `caller.host`."""
        return self.router.peer

    @property
    def remaining(self) -> float:
        """Seconds until the caller gives up; infinite for streams, which wait item by item."""
        return max(self.deadline - monotonic(), 0.0)

    @property
    def cancelled(self) -> bool:
        """The caller cancelled, died, or its time is up: nobody waits for the result. A handler that takes long looks
        at it now and then, and returns."""
        return self.given_up or monotonic() >= self.deadline

    def raise_if_cancelled(self) -> None:
        if self.cancelled:
            raise CancelledError(
                f"The caller of {self.name!r}, {self.caller}, no longer waits. Return from the handler."
            )

    @property
    def traceparent(self) -> str:
        """The W3C trace context that came with the call; empty if none did."""
        return self.trace.partition(b"\n")[0].decode("ascii", "replace")

    @property
    def tracestate(self) -> str:
        return self.trace.partition(b"\n")[2].decode("ascii", "replace")

    def __repr__(self) -> str:
        state = "cancelled" if self.cancelled else f"{self.remaining:.3g} s left"
        return f"<call of {self.name!r} by {self.caller}: {state}>"


current: ContextVar[CallContext | None] = ContextVar("rankmesh_call", default=None)
current_trace: ContextVar[bytes] = ContextVar("rankmesh_trace", default=b"")


def current_call() -> CallContext:
    """The call that the running handler serves. Raises UsageError outside of handlers."""
    call = current.get()
    if call is None:
        raise UsageError("There is no current call: this code does not run in an RPC handler. Call it from one.")
    return call


@contextmanager
def trace_context(traceparent: str, tracestate: str = "") -> Iterator[None]:
    """Calls made inside carry this W3C trace context; handlers see it as `current_call().traceparent`, and their own
    calls carry it on."""
    text = f"{traceparent}\n{tracestate}" if tracestate else traceparent
    if not text.isascii() or len(text) > 1024:
        raise UsageError("A trace context is ASCII and has at most 1,024 characters. Shorten its tracestate.")
    token = current_trace.set(text.encode())
    try:
        yield
    finally:
        current_trace.reset(token)


def outgoing_trace() -> bytes:
    """The trace context of a call made now."""
    trace = current_trace.get()
    if not trace:
        call = current.get()
        return b"" if call is None else call.trace
    return trace

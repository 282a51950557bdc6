"""Hooks: what sees calls before and after, on both sides. For metrics, tracing, and authorisation by peer.

Hooks run outside of all locks. On the caller's side an exception in `before_call` ends the call before it is sent; on
the server's side one in `before_serve` refuses it, and the caller hears why. What the `after_…` hooks raise is logged.
The process-wide observer of `rankmesh.trace` hears of every call too, as "rpc call" and "rpc serve".
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from rankmesh import trace
from rankmesh.rpc.context import CallContext

if TYPE_CHECKING:
    from rankmesh.endpoint import Peer

logger = logging.getLogger("rankmesh")


class CallInfo:
    """A call about to be made, for `before_call`, and afterwards for `after_call`."""

    __slots__ = ("began", "function", "notes", "peer", "timeout", "traceparent", "tracestate")

    def __init__(self, peer: Peer, function: str, timeout: float, trace_context: bytes) -> None:
        self.peer = peer
        self.function = function
        self.timeout = timeout
        parent, _, state = trace_context.decode("ascii", "replace").partition("\n")
        #: The W3C trace context that travels with the call; a hook may set it.
        self.traceparent = parent
        self.tracestate = state
        #: For the hook's own use between `before_call` and `after_call`.
        self.notes: dict[str, Any] = {}
        self.began = monotonic()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return monotonic() - self.began

    def trace_context(self) -> bytes:
        text = f"{self.traceparent}\n{self.tracestate}" if self.tracestate else self.traceparent
        return text.encode("ascii", "replace")[:1024]


class Hook:
    """Does nothing; override what is wanted."""

    def before_call(self, call: CallInfo) -> None:
        """This side is about to call."""

    def after_call(self, call: CallInfo, error: BaseException | None) -> None:
        """The call ended; `error` is what the caller gets, or None."""

    def before_serve(self, call: CallContext) -> None:
        """This side is about to run a handler. Raise to refuse the call: `call.caller` says who asks."""

    def after_serve(self, call: CallContext, error: BaseException | None) -> None:
        """The handler ended, or was refused."""


class Hooks:
    """The hooks of one agent, in the order in which they were added."""

    def __init__(self) -> None:
        self.hooks: tuple[Hook, ...] = ()

    @property
    def active(self) -> bool:
        """Whether there is anything to tell calls to."""
        return bool(self.hooks) or trace.active is not None

    def add(self, hook: Hook) -> None:
        self.hooks = (*self.hooks, hook)

    def remove(self, hook: Hook) -> None:
        self.hooks = tuple(other for other in self.hooks if other is not hook)

    def calling(self, info: CallInfo) -> Callable[[BaseException | None], None]:
        """Before a call; what it returns is called with its outcome. Raises what a hook raises."""
        hooks = self.hooks
        observer = trace.active
        token = None if observer is None else observer.started("rpc call", peer=info.peer, function=info.function)
        for hook in hooks:
            hook.before_call(info)

        def ended(error: BaseException | None) -> None:
            _observed(observer, token, error)
            for hook in reversed(hooks):
                _guarded(hook.after_call, info, error)

        return ended

    def serving(self, call: CallContext) -> Callable[[BaseException | None], None]:
        """Before a handler runs. What it returns is called with its outcome. Raises what a hook raises."""
        hooks = self.hooks
        observer = trace.active
        token = None if observer is None else observer.started("rpc serve", peer=call.caller, function=call.name)

        def ended(error: BaseException | None) -> None:
            _observed(observer, token, error)
            for hook in reversed(hooks):
                _guarded(hook.after_serve, call, error)

        try:
            for hook in hooks:
                hook.before_serve(call)
        except BaseException as error:
            ended(error)
            raise
        return ended


def _observed(observer: trace.Hook | None, token: Any, error: BaseException | None) -> None:
    if observer is not None:
        if error is None:
            observer.completed(token)
        else:
            observer.failed(token, error)


def _guarded(hook: Callable[..., None], *args: Any) -> None:
    try:
        hook(*args)
    except Exception:  # a hook is the user's code; the call has ended, and must not end differently for it
        logger.exception("A hook of RPC raised after the call.")

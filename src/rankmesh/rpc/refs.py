"""References: objects that stay where they were made, and are used from elsewhere.

The owner keeps an object as long as somebody holds a reference to it. Rules:

- A holder is a peer, with a count: how many references of its own it has to the object. `remote()` makes the first,
  `adopt()` of a handle one more; letting go of a Ref (or of its last name in the program) gives one back.
- A lease is as long as the holder's connection lives: it has heartbeats, and is not closed for being quiet while
  references are held over it. A holder that dies, or falls silent, holds nothing any more.
- To hand a reference on, send its `handle`, and keep the Ref until the other side has adopted it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from rankmesh.endpoint.router import Router
from rankmesh.endpoint.transfers import Send
from rankmesh.errors import BusyError, UsageError
from rankmesh.rpc.context import CallContext, current_call
from rankmesh.rpc.protocol import SERVICE, read_release, release
from rankmesh.rpc.registry import Function
from rankmesh.rpc.server import Server
from rankmesh.wire.header import Flag
from rankmesh.wire.header import Kind as FrameKind

if TYPE_CHECKING:
    from rankmesh.rpc.agent import RpcAgent

#: Names of the functions by which references are used; users' functions cannot have them by accident.
_CALL: Final = "rankmesh.ref.call"
_FETCH: Final = "rankmesh.ref.fetch"
#: Seconds until an owner is told again that a reference was let go of, where too much waits for it already.
TELL_AGAIN: Final = 0.1
_REQUEST: Final = int(FrameKind.REQUEST)
_REQUEST_FLAG: Final = int(Flag.REQUEST)


class RefHandle(msgspec.Struct, frozen=True):
    """What names an object for others: send it, and let them `adopt()` it."""

    owner: bytes
    number: int


class Ref:
    """A reference to an object at another endpoint. `rpc.remote()` makes it."""

    def __init__(self, agent: RpcAgent, router: Router, number: int) -> None:
        self._agent = agent
        self._router = router
        self._number = number
        # A finalizer may run where this thread holds the engine's lock: what it does is deferred.
        self._finalizer = weakref.finalize(self, router.engine.defer, lambda: agent.release(router, number))
        self._finalizer.atexit = False

    @property
    def owner(self) -> Any:
        """The Peer that has the object."""
        return self._router.peer

    @property
    def handle(self) -> RefHandle:
        """What another side needs to `adopt()` it."""
        return self._agent.handle_of(self._router, self._held())

    def call(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call a method of the object, there."""
        return self._agent.call(self.owner, _CALL, self._held(), method, list(args), kwargs, timeout=timeout)

    def fetch(self, timeout: float | None = None, *, returns: Any = None) -> Any:
        """A copy of the object, here."""
        return self._agent.call(self.owner, _FETCH, self._held(), timeout=timeout, returns=returns)

    def release(self) -> None:
        """Let go of it now. Twice is once."""
        if self._finalizer.detach() is not None:
            self._agent.release(self._router, self._number)

    def _held(self) -> int:
        if not self._finalizer.alive:
            raise UsageError("This reference was released. Make a new one by remote().")
        return self._number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = f"object {self._number}" if self._finalizer.alive else "released"
        return f"<Ref to {self.owner}: {state}>"


class References:
    """The objects of this side that others hold. All but the functions that others call need the lock."""

    HOLD: Final = "rankmesh.ref.hold"

    def __init__(self, server: Server) -> None:
        self._server = server
        self._engine = server.engine
        self._objects: dict[int, Any] = {}
        #: Number → holder's index → how many references it has.
        self._holders: dict[int, Counter[int]] = {}
        self._last = 0
        server.keep = self.keep
        server.released = self.released
        for name, fn in ((_CALL, self._call), (_FETCH, self._fetch), (self.HOLD, self._hold)):
            server.registry.add(Function(fn, name, inline=False, idempotent=False, channel=False))

    def __len__(self) -> int:
        return len(self._objects)

    def keep(self, call: CallContext, value: Any) -> int:
        """The number of an object that the caller holds from now on. Takes the lock."""
        with self._engine:
            self._last += 1
            self._objects[self._last] = value
            if call.router.gone:  # it died while its object was made
                del self._objects[self._last]
            else:
                self._holders[self._last] = Counter({call.router.index: 1})
            return self._last

    def held_by(self, router: Router) -> bool:
        return any(router.index in holders for holders in self._holders.values())

    def peer_lost(self, router: Router) -> None:
        for number in [number for number, holders in self._holders.items() if router.index in holders]:
            self._drop(number, router.index, self._holders[number][router.index])

    def released(self, router: Router, body: memoryview) -> None:
        """A holder let go. One that is not held any more is none of its business."""
        for number in read_release(body):
            if router.index in self._holders.get(number, ()):
                self._drop(number, router.index, 1)

    def _drop(self, number: int, index: int, count: int) -> None:
        holders = self._holders[number]
        holders[index] -= count
        if holders[index] <= 0:
            del holders[index]
        if not holders:
            del self._holders[number]
            value = self._objects.pop(number)
            self._engine.defer(lambda: _forget(value))  # its destructor is the user's code

    def tell_release(self, router: Router, number: int) -> None:
        """Tell the owner that this side let go: now, or when its turn comes. Takes the lock."""
        with self._engine:
            self._tell(router, release([number]))

    def _tell(self, router: Router, body: bytes) -> None:
        if router.gone or router.hub.closed:
            return  # and with that nothing is held any more
        outbound = router.outbound
        try:
            if outbound.send_rpc(_REQUEST, 0, SERVICE, 0, body) or router.gone:
                return
            parts, timeout = [memoryview(body)], self._server.config.timeout
            outbound.start(Send(router, "release at", SERVICE, 0, _REQUEST_FLAG, parts, len(body), timeout))
        except BusyError:  # an object that is not released would stay for as long as this side is connected
            self._engine.call_at(monotonic() + TELL_AGAIN, lambda: self._tell(router, body))

    # ------------------------------------------------------------------ functions that holders call

    def _object(self, number: int) -> Any:
        caller = current_call().router.index
        with self._engine:
            if caller not in self._holders.get(number, ()):
                raise LookupError(f"Object {number} is not held by the caller. Use a Ref that was not released.")
            return self._objects[number]

    def _call(self, number: int, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if method.startswith("_"):
            raise PermissionError(f"{method!r} is private. Call a public method.")
        return getattr(self._object(number), method)(*args, **kwargs)

    def _fetch(self, number: int) -> Any:
        return self._object(number)

    def _hold(self, number: int) -> None:
        caller = current_call().router
        with self._engine:
            if number not in self._holders:
                raise LookupError(f"Object {number} is gone. Adopt a reference while its giver still holds it.")
            if not caller.gone:
                self._holders[number][caller.index] += 1


def _forget(value: Any) -> None:
    """Lets go of an object, outside of all locks."""

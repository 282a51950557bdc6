"""Requests and replies: what a peer's router and the router to oneself have in common. With the engine's lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from rankmesh.endpoint.work import Work
from rankmesh.errors import RankmeshError
from rankmesh.wire.header import Flag

if TYPE_CHECKING:
    from rankmesh.endpoint.hub import Hub
    from rankmesh.endpoint.peer import Peer
    from rankmesh.endpoint.progress import Engine

T = TypeVar("T")

_REQUEST: Final = int(Flag.REQUEST)


class Reply:
    """What came back for a request: its payload, and whether it tells of a failure."""

    __slots__ = ("failed", "payload")

    def __init__(self, payload: memoryview, failed: bool) -> None:
        self.payload = payload
        self.failed = failed


class Awaiting(Protocol):
    """What waits for replies under an ident. `replied` is called for each, until it takes itself out of `requests`."""

    @property
    def op(self) -> str: ...
    @property
    def tag(self) -> int | None: ...

    def replied(self, flags: int, service: int, payload: memoryview, owned: bool) -> None: ...
    def fail(self, error: BaseException) -> None: ...


class Lone(Awaiting, Protocol):
    """What waits for one reply."""

    ident: int

    @property
    def finished(self) -> bool: ...


class Conversation:
    """A router, as far as requests go: those of this side that wait for replies, and where those of the other go."""

    hub: Hub
    engine: Engine
    peer: Peer
    index: int
    gone: str

    def __init__(self) -> None:
        self.requests: dict[int, Awaiting] = {}

    def on_rpc(self, flags: int, service: int, ident: int, payload: memoryview, owned: bool) -> None:
        """A request or a reply is here. `payload` is valid during the call only, unless it is `owned`: memory of its
        own, which whoever takes it may keep."""
        if flags & _REQUEST:
            handler = self.hub.services.get(service)
            if handler is None:
                text = f"{self.engine.name} offers no service {service}".encode()
                self.reply(ident, [memoryview(text)], len(text), failed=True)
            else:
                handler(self, ident, payload, owned)  # type: ignore[arg-type]  # the two Routers are all there are
            return
        request = self.requests.get(ident)
        if request is None:  # it was given up
            self.hub.late_replies += 1
        else:
            request.replied(flags, service, payload, owned)

    def reply(self, ident: int, parts: list[memoryview], nbytes: int, failed: bool = False, service: int = 0) -> None:
        """Answer a request."""
        raise NotImplementedError


class Asking(Work[T]):
    """A Work that waits for one reply, and whose waiter looks for it itself."""

    ident = 0

    def replied(self, flags: int, service: int, payload: memoryview, owned: bool) -> None:
        raise NotImplementedError

    def await_reply(self) -> None:
        """Look for the reply where it will come from, and then drive until it is there. With the lock."""
        if not self.finished and self.hint is not None:
            try:
                self.hint.await_reply(self)
            except BaseException:
                self._interrupted()
                raise
        if not self.finished:
            self.await_end(None)


class Request(Work[Reply]):
    """A request waiting for its reply."""

    def __init__(self, router: Conversation, op: str, ident: int, timeout: float) -> None:
        super().__init__(router.engine, op, router.peer, None, timeout)
        self._router = router
        self.ident = ident

    def replied(self, flags: int, service: int, payload: memoryview, owned: bool) -> None:
        del self._router.requests[self.ident]
        self.finish(Reply(payload if owned else memoryview(bytes(payload)), bool(flags & Flag.ERROR)))

    def _give_up(self, error: RankmeshError) -> None:
        self._router.requests.pop(self.ident, None)
        self.fail(error)

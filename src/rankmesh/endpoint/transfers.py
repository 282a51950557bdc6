"""The operations of messages: sends, receives, probes, and what waits between them. Methods need the engine's lock,
but for `complete`, `post` and `cancel`, which take it.

The life of a send: waiting (no connection, or no room to announce) → eager, on its way in one frame; or announced →
granted → moving → done. The life of a receive: posted → matched → landing → done. Whatever the state, giving up
detaches the caller's buffer before it returns: what is still to come is read into nothing, what is half sent is
finished from a copy.
"""

from __future__ import annotations

from enum import Enum, auto
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from rankmesh.buffers import EMPTY, fresh
from rankmesh.endpoint.lanes import Cursor, Piece
from rankmesh.endpoint.work import Work
from rankmesh.errors import CancelledError, RankmeshError, TruncationError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankmesh.endpoint.hub import Hub
    from rankmesh.endpoint.incoming import Incoming
    from rankmesh.endpoint.router import Router
    from rankmesh.endpoint.sharing import Reference


class Status(NamedTuple):
    """What a receive got: from whom (a rank, or a Peer), with which tag, how many bytes."""

    source: Any
    tag: int
    nbytes: int


_new_tuple = tuple.__new__


class SendState(Enum):
    WAITING = auto()
    STALLED = auto()
    EAGER = auto()
    ANNOUNCED = auto()
    MOVING = auto()
    WITHDRAWN = auto()


class Send(Work[None]):
    """A message, request or reply on its way out. It is done when its buffers may be reused."""

    #: A peer that cannot be reached, and for which nothing else waits, is not lost: it may have left in order.
    optional = False

    def __init__(
        self,
        router: Router,
        op: str,
        group: int,
        tag: int,
        flags: int,
        parts: list[memoryview],
        nbytes: int,
        timeout: float,
    ) -> None:
        super().__init__(router.engine, op, router.peer, tag, timeout)
        self._router = router
        self.group = group
        self.flags = flags
        self.parts = parts
        self.nbytes = nbytes
        self.ident = 0
        self.sent = 0
        self.state = SendState.WAITING
        self._cursor: Cursor | None = None
        #: It counts in its outbound's `rpc_bytes`.
        self.counted = False

    def next_piece(self, limit: int) -> Piece:
        if self._cursor is None:
            self._cursor = Cursor(self.parts)
        return self._cursor.next_piece(limit)

    @property
    def left(self) -> int:
        return self.nbytes - self.sent

    def frame_sent(self, nbytes: int) -> None:
        self.sent += nbytes
        if self.sent == self.nbytes:
            self._router.outbound.done(self)
            self.finish(None)

    def _end(self) -> None:
        self.parts = []
        self._cursor = None
        if self.counted:
            self._router.outbound.rpc_bytes -= self.nbytes
        super()._end()

    def abandon(self) -> None:
        """It need not be sent any more."""
        self._give_up(CancelledError(f"{self.describe()} was given up by this side."))

    def _give_up(self, error: RankmeshError) -> None:
        self._router.outbound.withdraw(self)
        self.fail(error)


class Posted(Work[Status]):
    """Something that waits for a message: what a receive and a probe have in common."""

    order = 0

    def __init__(
        self,
        hub: Hub,
        op: str,
        peer: Any,
        group: int,
        source: int,
        tag: int,
        sources: Mapping[int, Any],
        timeout: float,
    ) -> None:
        super().__init__(hub.engine, op, peer, tag if tag >= 0 else None, timeout)
        self._hub = hub
        self._sources = sources
        self.group = group
        self.source = source
        self.match_tag = tag

    def complete(self) -> Status:
        """Post it and wait for it."""
        engine = self._engine
        if not engine.lock.acquire(False):
            engine.acquire()
        try:
            self._enter()
            if not self.finished:  # await_end(None), written out: a call less for every receive
                try:
                    engine.drive(self, self.began + self.timeout)
                except BaseException:
                    self._interrupted()
                    raise
                if not self.finished:
                    self._give_up(self._late(self.timeout))
        finally:
            engine.lock.release()
            if engine.deferred or engine.contenders:
                engine.after_release()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # finished without an error: the Status is there

    def post(self) -> None:
        """Post it; the caller waits later."""
        with self._engine:
            self._enter()

    def _enter(self) -> None:
        raise NotImplementedError


class Receive(Posted):
    """A receive. `view` is where the message shall lie; None: memory is allocated when its size is known."""

    _landing: Landing | None = None

    def __init__(
        self,
        hub: Hub,
        op: str,
        peer: Any,
        group: int,
        source: int,
        tag: int,
        view: memoryview | None,
        wants_object: bool,
        sources: Mapping[int, Any],
        timeout: float,
    ) -> None:
        # Posted.__init__, written out: two calls less for every receive
        self._engine = hub.engine
        self.op = op
        self.peer = peer
        self.tag = tag if tag >= 0 else None
        self.timeout = timeout
        self.began = monotonic()
        self._hub = hub
        self._sources = sources
        self.group = group
        self.source = source
        self.match_tag = tag
        self.view = view
        self.wants_object = wants_object

    def _enter(self) -> None:
        self._hub.post(self)

    def truncates(self, nbytes: int) -> bool:
        """Whether a message of this size does not fit. The receive has failed then."""
        view = self.view
        if view is None or view.nbytes >= nbytes:
            return False
        self.fail(
            TruncationError(
                f"A message of {nbytes} bytes came for {self.describe()}, whose buffer has {view.nbytes}.",
                nbytes=nbytes,
                capacity=view.nbytes,
                peer=str(self.peer or ""),
                tag=self.tag,
            )
        )
        return True

    def place(self, nbytes: int) -> memoryview:
        """Where a message of this size, which fits, goes."""
        view = self.view
        if view is None:
            self.view = view = fresh(nbytes)
        return view if view.nbytes == nbytes else view[:nbytes]

    def wrong_kind(self) -> UsageError:
        sent, use = ("a buffer", "recv") if self.wants_object else ("an object", "recv_object")
        return UsageError(
            f"The message for {self.describe()} was sent as {sent}, and stays in the queue. Receive it with {use}()."
        )

    def matched(self, landing: Landing) -> None:
        """The message is on its way into the buffer."""
        self._landing = landing

    def unmatched(self) -> None:
        """The message was withdrawn: wait for the next, which may have another size."""
        self._landing = None
        if self.wants_object:
            self.view = None

    def arrived(self, source: int, tag: int, nbytes: int) -> None:
        """All bytes are where they belong."""
        self._landing = None
        # a Status made directly, not through NamedTuple's Python-level constructor
        self._value = _new_tuple(Status, (self._sources.get(source), tag, nbytes))
        if self.parker is None and self._callbacks is None:
            self.finished = True
        else:
            self._end()

    @property
    def payload(self) -> memoryview:
        """What was received into memory of our own."""
        return EMPTY if self.view is None else self.view

    def _give_up(self, error: RankmeshError) -> None:
        if self._landing is not None:
            self._landing.detach()
            self._landing = None
        else:
            self._hub.matcher.unpost(self)
        self.fail(error)


class Probe(Posted):
    """Waits until a message could be received, and leaves it where it is."""

    def _enter(self) -> None:
        self._hub.post_probe(self)

    def fits(self, message: Message) -> bool:
        return (
            message.group == self.group
            and self.source in (-1, message.source)
            and (self.match_tag == message.match_tag or (self.match_tag == -1 and message.match_tag >= 0))
        )

    def found(self, message: Message) -> None:
        self.finish(Status(self._sources.get(message.source), message.match_tag, message.nbytes))

    def _give_up(self, error: RankmeshError) -> None:
        self._hub.probes.remove(self)
        self.fail(error)


class Message:
    """A message that no receive was posted for: its bytes, or the announcement of them."""

    __slots__ = ("flags", "group", "ident", "match_tag", "nbytes", "order", "payload", "reference", "router", "source")

    def __init__(
        self,
        router: Router,
        group: int,
        tag: int,
        flags: int,
        nbytes: int,
        payload: memoryview | None,
        ident: int = 0,
        reference: Reference | None = None,
    ) -> None:
        self.router = router
        self.group = group
        self.source = router.index
        self.match_tag = tag
        self.flags = flags
        self.nbytes = nbytes
        self.order = 0
        #: None: it was only announced, under `ident`.
        self.payload = payload
        self.ident = ident
        #: Where an announced message lies in memory that both sides map.
        self.reference = reference


class Landing:
    """A payload being received: an eager one, or a granted transfer piece by piece."""

    __slots__ = ("_incoming", "flags", "got", "group", "ident", "nbytes", "receive", "tag", "view")

    def __init__(
        self,
        incoming: Incoming,
        receive: Receive | None,
        nbytes: int,
        group: int,
        tag: int,
        ident: int,
        flags: int = 0,
        view: memoryview | None = None,
    ) -> None:
        self._incoming = incoming
        #: None for requests and replies, and once the receive was given up.
        self.receive = receive
        self.view = receive.view if receive is not None else view
        self.nbytes = nbytes
        self.group = group
        self.tag = tag
        self.ident = ident
        self.flags = flags
        self.got = 0

    def detach(self) -> None:
        """The receive was given up: nothing more is written to its buffer."""
        self.receive = None
        self.view = None
        self._incoming.detach_landing(self)

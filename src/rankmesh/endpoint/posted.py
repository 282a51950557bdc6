"""Transfers whose place is known before they begin: bytes that a request asks for, or brings with it.

They need no announcement. Their DATA frames name the request, with a bit that says whose it is:

    ident | ANSWER     bytes that the receiver's own request asked for
    ident | BROUGHT    bytes that belong to the sender's request

The receiver posts the place before the first byte can come: the asker before it asks, the asked one when it reads the
request. A request that is refused gets its bytes read past. The end is the last byte; or the sender's ABORT; or an
error in reply, after which the sender of an answer sends no more of it.

A place is a run of views of somebody's memory. A frame that lies within one of them is received straight into it. One
that spans several (rows of a block, small pieces) is received into a staging buffer and spread from there, which costs
less than a system call for each of them. All methods need the engine's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol, runtime_checkable

from rankmesh.endpoint.lanes import Cursor
from rankmesh.errors import ProtocolError
from rankmesh.wire.header import DATA_LIMIT

ANSWER: Final = 1 << 63
BROUGHT: Final = 1 << 62
#: The first ident of this kind: those below are of announced transfers.
FIRST: Final = BROUGHT


class Joining(Protocol):
    """What an Outflow needs to know of the connection it leaves by: see Outbound."""

    @property
    def join_below(self) -> int: ...
    def joining(self) -> memoryview: ...


@runtime_checkable
class Run(Protocol):
    """Many small views which know a faster way to be filled and copied than one by one."""

    def __iter__(self) -> Iterator[memoryview]: ...
    def put(self, at: int, data: memoryview) -> None:
        """Put `data` at byte `at` of them all."""
        ...

    def take(self, at: int, into: memoryview) -> int:
        """Copy from byte `at` of them all on, at most as much as `into` holds. How many bytes that were; 0 if there is
        no faster way, or nothing left."""
        ...


class Posted:
    """A place for so many bytes. `done(whole)` is called once: at the last byte, or when the sender gives up."""

    __slots__ = ("_arrivals", "_at", "_done", "_part", "_parts", "_put", "_staged", "got", "ident", "nbytes")

    def __init__(
        self,
        arrivals: Arrivals,
        ident: int,
        nbytes: int,
        parts: Iterable[memoryview] | None,
        done: Callable[[bool], None],
    ) -> None:
        """`parts` None: the bytes are read past."""
        self._arrivals = arrivals
        self.ident = ident
        self.nbytes = nbytes
        self.got = 0
        self._parts: Iterator[memoryview] | None = None if parts is None else iter(parts)
        self._put = parts.put if isinstance(parts, Run) else None
        self._part = memoryview(b"")
        self._at = 0
        self._staged: memoryview | None = None
        self._done = done

    @property
    def discarded(self) -> bool:
        return self._parts is None

    def discard(self) -> None:
        """From now on nothing is written to the place. Who has begun to receive a frame there must divert it."""
        self._parts = self._put = None
        self._part = memoryview(b"")
        self._staged = None

    def place(self, nbytes: int) -> memoryview | None:
        """Where the next bytes go; None: nowhere."""
        if self._parts is None:
            return None
        if self._put is not None:
            self._staged = self._arrivals.staging()[:nbytes]
            return self._staged
        if self._at == len(self._part):
            self._next_part()
        at = self._at
        if len(self._part) - at >= nbytes:
            self._at = at + nbytes
            return self._part[at : at + nbytes]
        self._staged = self._arrivals.staging()[:nbytes]
        return self._staged

    def landed(self, nbytes: int) -> None:
        """They are there."""
        staged, self._staged = self._staged, None
        if staged is not None and self._parts is not None:
            if self._put is not None:
                self._put(self.got, staged)
            else:
                self._spread(staged)
        self.got += nbytes
        if self.got == self.nbytes:
            self._arrivals.forget(self.ident)
            self._end(True)

    def aborted(self) -> None:
        self._end(False)

    def _end(self, whole: bool) -> None:
        """Refer to nobody's memory from now on, nor to whoever refers to this: that would outlive it until the garbage
        is collected, and a buffer that is referred to cannot be closed or resized."""
        self.discard()
        done, self._done = self._done, _ended
        done(whole)

    def _spread(self, staged: memoryview) -> None:
        part, nbytes = self._part, len(staged)
        start = len(part) - self._at  # the first part takes less than is there: else nothing would be staged
        part[self._at :] = staged[:start]
        assert self._parts is not None
        for part in self._parts:
            end = start + len(part)
            if end > nbytes:
                part[: nbytes - start] = staged[start:]
                self._part, self._at = part, nbytes - start
                return
            part[:] = staged[start:end]
            start = end
            if end == nbytes:
                self._part, self._at = part, len(part)
                return
        raise self._overrun()

    def _next_part(self) -> None:
        assert self._parts is not None
        self._at = 0
        for part in self._parts:
            if len(part):
                self._part = part
                return
        raise self._overrun()

    def _overrun(self) -> ProtocolError:
        return ProtocolError(f"more bytes for transfer {self.ident:#x} than it has a place for", reason="bad piece")


def _ended(whole: bool) -> None:
    """It has been told already."""


class Outflow:
    """Bytes that go to a posted place, as a Transfer of the bulk lane."""

    def __init__(self, outbound: Joining, ident: int, parts: Iterable[memoryview], nbytes: int) -> None:
        self.ident = ident
        self._nbytes = nbytes
        self.sent = 0
        self._cursor = Cursor(parts)
        self._outbound = outbound
        self._take = parts.take if isinstance(parts, Run) else None
        #: Bytes that were handed out by `_take`.
        self._taken = 0

    def next_piece(self, limit: int) -> tuple[int, list[memoryview]]:
        """Parts that the link would take too long over are joined, in memory that is used again for the next frame:
        this one has left when it is asked for that."""
        if self._take is not None:
            joined, offset = self._outbound.joining(), self._taken
            nbytes = self._take(offset, joined[:limit])
            self._taken += nbytes
            if nbytes or offset:
                return offset, [joined[:nbytes]] if nbytes else []
            self._take = None
        cursor = self._cursor
        offset, pieces = cursor.next_piece(limit)
        if len(pieces) < 2 or cursor.offset - offset >= self._outbound.join_below * len(pieces):
            return offset, pieces
        joined, at = self._outbound.joining(), 0
        while pieces:
            for piece in pieces:
                end = at + len(piece)
                joined[at:end] = piece
                at = end
            pieces = cursor.next_piece(limit - at)[1] if at < limit else []
        return offset, [joined[:at]]

    @property
    def left(self) -> int:
        """Bytes that have not left."""
        return self._nbytes - self.sent

    def frame_sent(self, nbytes: int) -> None:
        self.sent += nbytes


class Arrivals:
    """The places of one conversation."""

    def __init__(self) -> None:
        self.posted: dict[int, Posted] = {}
        self._staging: memoryview | None = None

    def expect(
        self, ident: int, nbytes: int, parts: Iterable[memoryview] | None, done: Callable[[bool], None]
    ) -> Posted:
        """Post a place. Raises ProtocolError if the ident is taken."""
        if ident in self.posted:
            raise ProtocolError(f"transfer {ident:#x} was asked for twice", reason="transfer announced twice")
        posted = self.posted[ident] = Posted(self, ident, nbytes, parts, done)
        return posted

    def get(self, ident: int, offset: int, nbytes: int) -> Posted:
        """The place for a piece that comes now, which is checked."""
        posted = self.posted.get(ident)
        if posted is None:
            raise ProtocolError(f"data of transfer {ident:#x}, which nobody asked for", reason="unknown transfer")
        if not nbytes or offset != posted.got or offset + nbytes > posted.nbytes:
            raise ProtocolError(
                f"piece {offset}+{nbytes} of transfer {ident:#x} ({posted.got} of {posted.nbytes} so far)",
                reason="bad piece",
            )
        return posted

    def forget(self, ident: int) -> None:
        self.posted.pop(ident, None)

    def aborted(self, ident: int) -> None:
        """The sender sends no more of it. One that is unknown was complete when the sender gave up."""
        posted = self.posted.pop(ident, None)
        if posted is not None:
            posted.aborted()

    def clear(self) -> None:
        """The connection is gone; those who wait learn of it by its router."""
        for posted in self.posted.values():
            posted.discard()
        self.posted.clear()
        self._staging = None

    def staging(self) -> memoryview:
        """Memory for a frame that spans several views: one for all, as frames come one after the other."""
        if self._staging is None:
            self._staging = memoryview(bytearray(DATA_LIMIT))
        return self._staging

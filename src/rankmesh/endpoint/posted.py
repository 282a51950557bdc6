"""Transfers whose place is known before they begin: bytes that a request asks for, or brings with it.

They need no announcement. Their DATA frames name the request, with a bit that says whose it is:

    ident | ANSWER     bytes that the receiver's own request asked for
    ident | BROUGHT    bytes that belong to the sender's request

The receiver posts the place before the first byte can come: the asker before it asks, the asked one when it reads the
request. A request that is refused gets its bytes read past. The end is the last byte; or the sender's ABORT; or an
error in reply, after which the sender of an answer sends no more of it.

A place is a run of views of somebody's memory. A frame that lies within one of them is received straight into it. One
that spans several (rows of a block, pages) is received into all of them, many with one system call, where the link can
do that and they are not too small (`Scatter`); otherwise into a staging buffer and spread from there. Arrays of bytes
serve as views: to make one of each would take as long as to receive a page. All methods need the engine's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

from rankmesh.endpoint.lanes import Cursor, Piece, Series
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


class Run:
    """Many small views of one size which know a faster way to be filled and copied than one by one. To be derived from:
    every transfer asks whether it has one, and a Protocol answers that in ten microseconds."""

    __slots__ = ()
    #: Bytes of a view.
    each: int

    def __iter__(self) -> Iterator[memoryview]:
        raise NotImplementedError

    def put(self, at: int, data: memoryview) -> None:
        """Put `data` at byte `at` of them all."""
        raise NotImplementedError

    def take(self, at: int, into: memoryview) -> int:
        """Copy from byte `at` of them all on, at most as much as `into` holds. How many bytes that were; 0 if there is
        no faster way, or nothing left."""
        raise NotImplementedError


class Scatter:
    """The rest of a frame's place, where that is several views: the parser cuts it and fills it like one view, and
    whoever reads calls `receive`. No byte is copied twice, and none is staged."""

    #: Views handed to one system call: it pays for each, also for those for which nothing has come yet. (64 and 128
    #: were alike in a bare receiver, 32 and 255 slower.)
    WINDOW: Final = 64
    #: Smaller views cost more here than a copy from the staging buffer does.
    SMALLEST: Final = 1024

    __slots__ = ("_first", "_recvmsg", "_views", "nbytes")

    def __init__(self, recvmsg: Callable[[list[memoryview]], int], views: list[memoryview], nbytes: int) -> None:
        """`views` have `nbytes` together."""
        self._recvmsg = recvmsg
        self._views = views
        self._first = 0
        self.nbytes = nbytes

    def receive(self) -> int:
        """Receive some of it: how much. What was received is cut off afterwards, by whoever accounts for it."""
        return self._recvmsg(self._views[self._first : self._first + self.WINDOW])

    def __getitem__(self, key: slice) -> Scatter:
        """`self[n:]`, which is this one from now on: the first `n` bytes are there."""
        views, at, left = self._views, self._first, key.start or 0
        self.nbytes -= left
        while left:
            view = views[at]
            if len(view) > left:
                views[at] = view[left:]
                break
            left -= len(view)
            at += 1
        self._first = at
        return self

    def __setitem__(self, key: slice, data: memoryview) -> None:
        """`self[:n] = data`: bytes that came with the header."""
        start = 0
        for view in self._views[self._first :]:
            end = start + len(view)
            if end >= len(data):
                view[: len(data) - start] = data[start:]
                return
            view[:] = data[start:end]
            start = end


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

    def place(self, nbytes: int) -> memoryview | Scatter | None:
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
        recvmsg = self._arrivals.recvmsg
        if recvmsg is not None and len(self._part) >= Scatter.SMALLEST:
            return Scatter(recvmsg, self._next_views(nbytes), nbytes)
        self._staged = self._arrivals.staging()[:nbytes]
        return self._staged

    def _next_views(self, nbytes: int) -> list[memoryview]:
        """Views of the next `nbytes`, which begin in the part that was begun and end in another."""
        assert self._parts is not None
        views = [self._part[self._at :]]
        left = nbytes - len(views[0])
        for part in self._parts:
            if len(part) >= left:
                self._part, self._at = memoryview(part), left
                views.append(part if len(part) == left else part[:left])
                return views
            views.append(part)
            left -= len(part)
        raise self._overrun()

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
                self._part = memoryview(part)
                return
        raise self._overrun()

    def _overrun(self) -> ProtocolError:
        return ProtocolError(f"more bytes for transfer {self.ident:#x} than it has a place for", reason="bad piece")


def _ended(whole: bool) -> None:
    """It has been told already."""


#: Pieces in one frame that are joined: a million of one byte would take a second, in which nobody else is served.
MOST_JOINED: Final = 4096


class Outflow:
    """Bytes that go to a posted place, as a Transfer of the bulk lane."""

    def __init__(self, outbound: Joining, ident: int, parts: Iterable[memoryview] | Series, nbytes: int) -> None:
        self.ident = ident
        self._nbytes = nbytes
        self.sent = 0
        self._cursor = parts if isinstance(parts, Series) else Cursor(parts)
        self._outbound = outbound
        #: Where the link gathers views of this size itself, copying them before would only add a copy.
        self._take = parts.take if isinstance(parts, Run) and parts.each < outbound.join_below else None
        #: Bytes that were handed out by `_take`.
        self._taken = 0

    def next_piece(self, limit: int) -> Piece:
        """Parts that the link would take too long over are joined, in memory that is used again for the next frame:
        this one has left when it is asked for that."""
        if self._take is not None:
            joined, offset = self._outbound.joining(), self._taken
            nbytes = self._take(offset, joined[:limit])
            self._taken += nbytes
            if nbytes or offset:
                return offset, [joined[:nbytes]] if nbytes else [], nbytes
            self._take = None
        cursor = self._cursor
        piece = offset, pieces, nbytes = cursor.next_piece(limit)
        if len(pieces) < 2 or nbytes >= self._outbound.join_below * len(pieces):
            return piece
        joined, at, count = self._outbound.joining(), 0, 0
        while pieces:
            for each in pieces:
                end = at + len(each)
                joined[at:end] = each
                at = end
            count += len(pieces)
            pieces = cursor.next_piece(limit - at)[1] if at < limit and count < MOST_JOINED else []
        return offset, [joined[:at]], at

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
        #: Receives into several buffers at once, if the connection there is can do that.
        self.recvmsg: Callable[[list[memoryview]], int] | None = None
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
        self.recvmsg = None
        self._staging = None

    def staging(self) -> memoryview:
        """Memory for a frame that spans several views: one for all, as frames come one after the other."""
        if self._staging is None:
            self._staging = memoryview(bytearray(DATA_LIMIT))
        return self._staging

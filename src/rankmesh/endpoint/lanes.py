"""Which frame goes on the wire next. Pure: no I/O, no clock, no lock.

Frames wait in four lanes, served in this order: control, RPC (requests and replies), messages, bulk. A lane keeps
its order. Bulk transfers take turns, one DATA frame each, so that none waits for another, and everything else passes
between two frames. What was handed out by `commit()` goes first until it is gone: a frame is never cut by another.

So a control frame waits for at most one batch (COMMIT_BYTES) in front of it, whatever is being moved.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, Final, Protocol

from rankmesh.config import KIB
from rankmesh.wire.header import DATA_LIMIT, Kind, pack

#: A batch for one system call: large enough to fill it, small enough for precedence to mean something.
COMMIT_BYTES: Final = DATA_LIMIT
COMMIT_BUFFERS: Final = 256


#: Of a transfer: its offset, its buffers, and how many bytes they have.
Piece = tuple[int, list[memoryview], int]


class Lane(IntEnum):
    CONTROL = 0
    RPC = 1
    MESSAGE = 2


class Owner(Protocol):
    """Whoever must know that its frame has left."""

    def frame_sent(self, nbytes: int) -> None: ...


class Transfer(Owner, Protocol):
    """A granted bulk transfer."""

    ident: int
    #: Bytes that have left.
    sent: int

    @property
    def left(self) -> int:
        """Bytes that have not."""
        ...

    def next_piece(self, limit: int) -> Piece:
        """The next piece, of up to `limit` bytes; empty when everything was handed out."""
        ...


class Frame:
    """Buffers to be sent in order, and who is told when they are."""

    __slots__ = ("buffers", "nbytes", "owner", "size")

    def __init__(
        self, buffers: list[memoryview | bytes], nbytes: int, owner: Owner | None = None, size: int = 0
    ) -> None:
        self.buffers = buffers
        #: Bytes still to be sent, header included.
        self.nbytes = nbytes
        self.owner = owner
        #: Payload bytes, for the owner.
        self.size = size

    def advance(self, nbytes: int) -> None:
        """Forget the first bytes: they are gone."""
        self.nbytes -= nbytes
        buffers = self.buffers
        while nbytes:
            first = buffers[0]
            if len(first) > nbytes:
                buffers[0] = memoryview(first)[nbytes:]
                return
            nbytes -= len(first)
            del buffers[0]

    def privatise(self) -> None:
        """Copy what is left, because the caller's memory may no longer be read."""
        self.buffers = [bytes(buffer) for buffer in self.buffers]
        self.owner = None


class OutQueue:
    """Everything that waits for one connection."""

    def __init__(self) -> None:
        self._lanes: tuple[deque[Frame], ...] = tuple(deque() for _ in Lane)
        self._nbytes = [0] * len(Lane)
        self._bulk: deque[Transfer] = deque()
        self._committed: deque[Frame] = deque()

    def __bool__(self) -> bool:
        return bool(self._committed or self._bulk or any(self._lanes))

    def push(self, lane: Lane, frame: Frame) -> None:
        self._lanes[lane].append(frame)
        self._nbytes[lane] += frame.nbytes

    def resume(self, frame: Frame) -> None:
        """A frame that was sent in part outside the queue: its rest comes before everything else."""
        self._committed.appendleft(frame)

    def nbytes(self, lane: Lane) -> int:
        """Bytes of a lane's frames that have not begun."""
        return self._nbytes[lane]

    def waiting(self, lane: Lane) -> int:
        """Frames of a lane that have not begun."""
        return len(self._lanes[lane])

    def push_bulk(self, transfer: Transfer) -> None:
        self._bulk.append(transfer)

    @property
    def lone_transfer(self) -> Transfer | None:
        """The transfer that is all that waits, if there is just one."""
        if len(self._bulk) == 1 and not (self._committed or any(self._lanes)):
            return self._bulk[0]
        return None

    def forget(self, transfer: Transfer) -> None:
        """All of it has left."""
        self._bulk.remove(transfer)

    def commit_piece(self, transfer: Transfer, piece: Piece) -> None:
        """A piece of a transfer that goes the usual way."""
        offset, buffers, size = piece
        header = pack(Kind.DATA, ident=transfer.ident, nbytes=size, extra=offset)
        self._committed.append(Frame([header, *buffers], len(header) + size, transfer, size))

    def commit(self) -> list[memoryview | bytes]:
        """The buffers to send next, up to a batch; empty when there is nothing."""
        committed = self._committed
        if not committed:
            self._fill()
            if len(committed) == 1:
                return committed[0].buffers
        buffers: list[memoryview | bytes] = []
        for frame in committed:
            buffers += frame.buffers
            if len(buffers) >= COMMIT_BUFFERS:
                break
        return buffers[:COMMIT_BUFFERS]

    def advance(self, nbytes: int) -> None:
        """The first `nbytes` of what `commit()` gave are sent; their owners are told."""
        committed = self._committed
        while nbytes:
            frame = committed[0]
            if frame.nbytes > nbytes:
                frame.advance(nbytes)
                return
            nbytes -= frame.nbytes
            committed.popleft()
            if frame.owner is not None:
                frame.owner.frame_sent(frame.size)

    def withdraw(self, owner: Owner) -> bool:
        """`owner`'s memory is no longer to be read. True: its frame had not begun, and is forgotten; otherwise what has
        begun is finished from a copy."""
        if owner in self._bulk:
            self._bulk.remove(owner)  # type: ignore[arg-type]  # an owner in the bulk lane is a Transfer
        for frame in self._committed:
            if frame.owner is owner:
                frame.privatise()
        for lane, queue in enumerate(self._lanes):
            for frame in queue:
                if frame.owner is owner:
                    queue.remove(frame)
                    self._nbytes[lane] -= frame.nbytes
                    return True
        return False

    def owners(self) -> list[Owner]:
        """Whoever waits for a frame to leave."""
        frames = (frame for queue in (self._committed, *self._lanes) for frame in queue)
        return [*(frame.owner for frame in frames if frame.owner is not None), *self._bulk]

    def clear(self) -> None:
        for queue in (*self._lanes, self._committed):
            queue.clear()
        self._nbytes = [0] * len(Lane)
        self._bulk.clear()

    def _fill(self) -> None:
        committed = self._committed
        room = COMMIT_BYTES
        for lane, queue in enumerate(self._lanes):
            while queue and (room >= queue[0].nbytes or not committed):
                frame = queue.popleft()
                self._nbytes[lane] -= frame.nbytes
                committed.append(frame)
                room -= frame.nbytes
            if queue:
                return
        if not committed and self._bulk:
            self._commit_bulk()

    def _commit_bulk(self) -> None:
        while self._bulk:
            transfer = self._bulk.popleft()
            piece = transfer.next_piece(DATA_LIMIT)
            if piece[1]:
                self.commit_piece(transfer, piece)
                self._bulk.append(transfer)
                return


class Series:
    """Many buffers of one size, each of them at most LARGEST bytes: a Cursor over them that does not look at each."""

    #: A piece of a transfer holds at least one.
    LARGEST: Final = 64 * KIB

    __slots__ = ("_at", "_buffers", "_each")

    def __init__(self, buffers: Sequence[Any], each: int) -> None:
        self._buffers = buffers
        self._each = each
        self._at = 0

    def next_piece(self, limit: int) -> Piece:
        at = self._at
        pieces = list(self._buffers[at : at + min(limit // self._each, COMMIT_BUFFERS - 1)])
        self._at = at + len(pieces)
        return at * self._each, pieces, len(pieces) * self._each


class Cursor:
    """Walks over a run of buffers as if they were one, handing out pieces without copying."""

    __slots__ = ("_ahead", "_nbytes", "_parts", "offset")

    def __init__(self, parts: Iterable[memoryview]) -> None:
        self._parts = iter(parts)
        #: Parts that were taken from `_parts` and not handed out, the first of them perhaps cut.
        self._ahead: deque[memoryview] = deque()
        self._nbytes = 0
        self.offset = 0

    def next_piece(self, limit: int) -> Piece:
        began, ahead = self.offset, self._ahead
        while self._nbytes < limit and (room := COMMIT_BUFFERS - 1 - len(ahead)) > 0:
            more = list(itertools.islice(self._parts, room))
            if not more:
                break
            ahead.extend(more)
            self._nbytes += sum(map(len, more))
            if not self._nbytes:
                ahead.clear()  # nothing but empty ones
        nbytes = min(self._nbytes, limit)
        if nbytes == self._nbytes:  # all of them: many small ones pass here
            pieces = list(ahead)
            ahead.clear()
        else:
            pieces, left = [], nbytes
            while left:
                part = ahead.popleft()
                if len(part) > left:
                    ahead.appendleft(part[left:])
                    part = part[:left]
                pieces.append(part)
                left -= len(part)
        self._nbytes -= nbytes
        self.offset = began + nbytes
        return began, pieces, nbytes

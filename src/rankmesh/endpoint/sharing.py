"""A large message whose bytes lie in the sender's arena crosses with a single copy: the receiver's, from there.

    sender                                          receiver
    ANNOUNCE with a reference (segment, offset,  →  a receive is there: copies, piece by piece between other work
      cell, value)                               ←  REFUSE: the bytes are not wanted (any more): here they are

A receiver that cannot (it has not mapped the segment) answers GRANT, and the bytes come as DATA like any others.

Taking back. A sender that gives up may reuse its buffer at once, while the receiver is still copying. So each
reference names a cell, a word in the memory both share, and the value it has; the sender changes the word before it
gives up, and the receiver looks at it after it has copied. If it changed, the copy is worth nothing, and the receive
waits on as if the message had never come. (x86 keeps loads in order: the copy's come before the look at the cell.)
"""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from rankmesh.errors import ProtocolError
from rankmesh.transport.segment import take_back
from rankmesh.wire.header import REFERENCE_BYTES

if TYPE_CHECKING:
    from rankmesh.endpoint.transfers import Landing, Send
    from rankmesh.transport.arena import Arena
    from rankmesh.transport.base import PolledLink

#: Bytes copied before others get their turn.
PIECE_BYTES: Final = 4 * 1024 * 1024

_REFERENCE = struct.Struct("<QQQQ")
assert _REFERENCE.size == REFERENCE_BYTES


class Reference(NamedTuple):
    """Where a message lies in its sender's arena, and how to tell that it was not taken back."""

    segment: int
    offset: int
    cell: int
    value: int

    @classmethod
    def parse(cls, payload: memoryview) -> Self:
        if payload.nbytes != REFERENCE_BYTES:
            raise ProtocolError(f"a reference of {payload.nbytes} bytes", reason="malformed reference")
        return cls(*_REFERENCE.unpack(payload))


class Cells:
    """This side's words of one connection, each for one offer at a time."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._free = deque(range(len(words)))

    def lend(self) -> tuple[int, int] | None:
        """A cell and the value it has; None: there is none left."""
        if not self._free:
            return None
        cell = self._free.popleft()
        return cell, self._words[cell]

    def take_back(self, cell: int) -> None:
        """What was offered with it is not to be relied on any more."""
        take_back(self._words, cell)

    def give_back(self, cell: int) -> None:
        """The offer it was lent for is over, or taken back."""
        self._free.append(cell)


class Offers:
    """The sender's side of one connection."""

    def __init__(self, link: PolledLink, arena: Arena, cells: Cells) -> None:
        self._link = link
        self._arena = arena
        self._shared: set[int] = set()
        self._cells = cells
        #: By the send's ident.
        self._lent: dict[int, int] = {}

    def make(self, send: Send) -> bytes:
        """A reference to what is to be sent; nothing if it does not lie in the arena."""
        if len(send.parts) != 1:
            return b""
        spot = self._arena.locate(send.parts[0])
        if spot is None:
            return b""
        if spot.segment not in self._shared:
            if not self._link.share(spot.segment, *self._arena.descriptor(spot.segment)):
                return b""
            self._shared.add(spot.segment)
        lent = self._cells.lend()
        if lent is None:
            return b""
        self._lent[send.ident], _ = lent
        return _REFERENCE.pack(*spot, *lent)

    def take_back(self, send: Send) -> None:
        """The sender's buffer may be reused from now on."""
        cell = self._lent.get(send.ident)
        if cell is not None:
            self._cells.take_back(cell)

    def answered(self, send: Send) -> None:
        """The receiver has copied, or will not."""
        cell = self._lent.pop(send.ident, None)
        if cell is not None:
            self._cells.give_back(cell)

    def forget(self, segment: int) -> None:
        """The arena has given a segment up: nothing in it is on its way."""
        if segment in self._shared:
            self._shared.remove(segment)
            self._link.unshare(segment)


class Copy:
    """The receiver's side of one message."""

    __slots__ = ("_cell", "_cells", "_source", "_value", "landing")

    def __init__(self, link: PolledLink, reference: Reference, landing: Landing) -> None:
        source = link.shared[reference.segment]
        self.landing = landing
        self._source = source[reference.offset : reference.offset + landing.nbytes]
        self._cells = link.their_cells
        self._cell = reference.cell
        self._value = reference.value

    @staticmethod
    def possible(link: PolledLink, reference: Reference, nbytes: int) -> bool:
        """Whether the segment is mapped here. Raises ProtocolError for a reference out of bounds."""
        if reference.segment not in link.shared:
            link.answer_bell()  # its descriptor was sent before the reference was
        source = link.shared.get(reference.segment)
        if source is None:
            return False
        if reference.offset + nbytes > source.nbytes or reference.cell >= len(link.their_cells):
            raise ProtocolError(
                f"a reference to {reference.offset}+{nbytes} of {source.nbytes} bytes, cell {reference.cell}",
                reason="bad reference",
            )
        return True

    @property
    def nearly_done(self) -> bool:
        """The next piece is the last of several."""
        return 0 < self.landing.nbytes - self.landing.got <= PIECE_BYTES < self.landing.nbytes

    def step(self) -> bool:
        """Copy the next piece. True: that was the last."""
        landing = self.landing
        view, got = landing.view, landing.got
        if view is not None:
            end = min(got + PIECE_BYTES, landing.nbytes)
            view[got:end] = self._source[got:end]
            landing.got = end
        return view is None or landing.got == landing.nbytes

    @property
    def valid(self) -> bool:
        """What was copied is what was sent: looked at when everything is copied."""
        return self._cells[self._cell] == self._value

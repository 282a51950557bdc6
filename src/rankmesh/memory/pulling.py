"""Same host: registered memory, moved with one copy where the system lets processes read each other's (see
transport/pulling.py). Nobody writes into another's memory, so whoever receives copies:

- **A read** is made by the reader's own thread, without the owner, as if the region were mapped (mapping.py): it has
  the address and a permit of its own. It looks at its permit after it has copied, so it never returns a wrong byte, and
  at the owner's beacon, because the number of a process that is gone may be another's. Where it cannot be, the bytes
  are streamed, and the owner says what is wrong.
- **A write** is made by the owner, between other work: the request says where the bytes lie, and names a cell
  (endpoint/sharing.py) by which the writer takes them back when it gives up. What the owner copied of a piece that was
  taken back meanwhile may be anything the writer has put there since: it is zeroed, like no other memory's bytes.

Batches, strided blocks, and reads with `async_op`, which are to go on by themselves, are streamed.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np

from rankmesh.buffers import address_of
from rankmesh.errors import ProtocolError
from rankmesh.memory.mapping import PIECE_BYTES, Permit
from rankmesh.memory.moving import Moving
from rankmesh.memory.protocol import Bit, Why
from rankmesh.memory.region import Refusal
from rankmesh.transport.pulling import Puller

if TYPE_CHECKING:
    from rankmesh.endpoint.router import Router
    from rankmesh.endpoint.sharing import Cells
    from rankmesh.memory.region import Region
    from rankmesh.memory.server import MemoryServer
    from rankmesh.transport.base import PolledLink

_SOURCE: Final = struct.Struct("<QQQ")
#: In a request.
_BITS_AT: Final = 1
#: Bytes that an owner pulls before others get their turn.
TURN_BYTES: Final = 1024 * 1024


class Pulled(Permit):
    """The reader's side: one for all handles of a region. May be used from many threads."""

    def __init__(self, memory: memoryview, slot: int, name: str, generation: int, address: int, puller: Puller) -> None:
        super().__init__(memory, slot, name, generation)
        self._address = address
        self._puller = puller
        #: Twins of it that no thread uses right now.
        self._idle: deque[Puller] = deque()

    def read(self, into: memoryview, offset: int, deadline: float) -> bool:
        """Copy what lies there, from `offset` on. False: it cannot be read, or that is another process by now."""
        self.check()
        try:
            puller = self._idle.pop()
        except IndexError:  # other threads use those there are
            puller = self._puller.twin()
        try:
            to, source, nbytes = address_of(into), self._address + offset, len(into)
            for at in range(0, nbytes, PIECE_BYTES):
                if at:
                    self.look(deadline)
                if not puller.pull(to + at, source + at, min(PIECE_BYTES, nbytes - at)):
                    self.check()
                    return False
            stands = puller.stands()
        finally:
            self._idle.append(puller)
        self.check()
        return stands


class Source(NamedTuple):
    """Where a writer's bytes lie, and how to tell that it has not taken them back."""

    address: int
    cell: int
    value: int

    @classmethod
    def parse(cls, payload: memoryview) -> Self:
        if len(payload) != _SOURCE.size:
            raise ProtocolError(f"a source of {len(payload)} bytes", reason="malformed request")
        return cls(*_SOURCE.unpack(payload))


class Offer:
    """The writer's side of one write. Methods need the engine's lock."""

    def __init__(self, router: Router, cells: Cells, source: Source) -> None:
        self._router = router
        self._cells = cells
        self._source = source

    @classmethod
    def make(cls, router: Router, data: memoryview) -> Self | None:
        """Of bytes that the owner can read where they lie; None: it cannot."""
        link, cells = router.polled, router.outbound.cells
        if link is None or cells is None or not link.pulls:
            return None
        address = address_of(data)
        lent = cells.lend() if Puller(os.getpid()).reaches(address) else None
        return None if lent is None else cls(router, cells, Source(address, *lent))

    def instead_of_stream(self, request: bytes) -> bytes:
        """The request for a streamed write, as one that tells where the bytes lie."""
        body = bytearray(request)
        body[_BITS_AT] ^= Bit.STREAMED | Bit.PULLED
        return bytes(body) + _SOURCE.pack(*self._source)

    def take_back(self) -> None:
        """From now on the bytes do not count. (A connection that is closed has taken everything back.)"""
        if self._router.outbound.cells is self._cells:
            self._cells.take_back(self._source.cell)
            self._cells.give_back(self._source.cell)


class PulledWriting(Moving):
    """A large write, as its owner sees it: the bytes are fetched from the writer's memory."""

    def __init__(
        self,
        server: MemoryServer,
        region: Region,
        router: Router,
        ident: int,
        key: bytes | None,
        cost: int,
        into: memoryview,
        source: Source,
        link: PolledLink,
    ) -> None:
        super().__init__(server, region, router, ident, cost)
        if source.cell >= len(link.their_cells):
            raise ProtocolError(f"cell {source.cell} of {len(link.their_cells)}", reason="malformed request")
        self._key = key
        self._into = into
        self._to = address_of(into)
        self._source = source
        self._link = link
        self._got = 0

    def work_off(self) -> None:
        """Fetch the next piece; there is one, or the write was given up."""
        if self not in self.region.moving or self.router.polled is not self._link:
            return
        link, source, got = self._link, self._source, self._got
        size = min(TURN_BYTES, len(self._into) - got)
        assert link.puller is not None
        whole = link.puller.pull(self._to + got, source.address + got, size)
        if link.their_cells[source.cell] != source.value:
            np.frombuffer(self._into[got : got + size], np.uint8).fill(0)
            self.server.ended(self)
        elif not whole:
            self.abort(Why.INVALID, "its bytes cannot be read where they lie, in the memory of who writes")
        else:
            self._got = got + size
            if self._got < len(self._into):
                self.server.engine.backlog.append(self)
                return
            self.server.ended(self)
            self.server.written(self.region, self.router, self.request, self._key)

    def abort(self, why: Why, message: str) -> None:
        self.server.ended(self)
        self.server.refuse(self.router, self.request, Refusal(why, message))

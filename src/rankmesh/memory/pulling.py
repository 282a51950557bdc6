"""Same host: registered memory, moved with one copy where the system lets processes read each other's (see
transport/pulling.py). Here whoever receives copies; what a writer waits for it writes itself (pushing.py).

- **A read** is made by the reader's own thread, without the owner: it has the region's address, and a permit as for a
  mapped region (mapping.py). It looks at its permit after it has copied, so it never returns a wrong byte, and at the
  owner's beacon, because the number of a process that is gone may be another's. Where one of them is not there (any
  more) the bytes are asked for, and the owner says what is wrong, if anything is.
- **A write** that is to go on by itself is made by the owner, between other work: the request says where the bytes
  lie, and names a cell (endpoint/sharing.py) by which the writer takes them back when it gives up. The owner looks at
  it before and after each piece. What it copied of one that was taken back meanwhile may be anything that the writer
  has put there since: it is zeroed. An offer counts for the connection that it was made on: a request that does not
  leave at once is sent as a streamed one.

Batches, strided blocks, and reads with `async_op`, which are to go on by themselves, are streamed.
"""

from __future__ import annotations

import operator
import struct
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np

from rankmesh.buffers import EMPTY, address_of
from rankmesh.endpoint.router import PeerRouter
from rankmesh.errors import ProtocolError
from rankmesh.memory.mapping import PIECE_BYTES, Permit
from rankmesh.memory.moving import Moving
from rankmesh.memory.protocol import Bit, Why
from rankmesh.memory.region import Refusal

if TYPE_CHECKING:
    from rankmesh.endpoint.progress import Engine
    from rankmesh.endpoint.router import Router
    from rankmesh.endpoint.sharing import Cells
    from rankmesh.memory.region import Region
    from rankmesh.memory.server import MemoryServer
    from rankmesh.transport.base import PolledLink
    from rankmesh.transport.pulling import Puller

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
        """Copy what lies there, from `offset` on. False: it cannot be read, or not any more: what was copied may be
        anything."""
        if not self.holds:
            return False
        try:
            puller = self._idle.pop()
        except IndexError:  # other threads use those there are
            puller = self._puller.twin()
        to, source, nbytes = address_of(into), self._address + operator.index(offset), len(into)
        for at in range(0, nbytes, PIECE_BYTES):
            if at and not self.holds:
                return False
            if at and monotonic() > deadline:
                raise self.late()
            if not puller.pull_surely(to + at, source + at, min(PIECE_BYTES, nbytes - at)):
                return False
        self._idle.append(puller)
        return self.holds

    def renew(self, puller: Puller) -> None:
        """There is another connection by now, with another beacon."""
        self._puller = puller
        self._idle.clear()


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
        lent = cells.lend()
        return None if lent is None else cls(router, cells, Source(address_of(data), *lent))

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

    @property
    def _stands(self) -> bool:
        """The writer has not taken it back."""
        return self.router.polled is self._link and self._link.their_cells[self._source.cell] == self._source.value

    def fetch(self) -> bool:
        """Fetch the next piece. True: there is more."""
        if self not in self.region.moving:
            return False
        if not self._stands:
            self.abort(Why.CANCELLED, "it was taken back")
            return False
        got = self._got
        into = self._into[got : got + TURN_BYTES]
        assert self._link.puller is not None
        whole = self._link.puller.pull(self._to + got, self._source.address + got, len(into))
        if not self._stands:
            np.frombuffer(into, np.uint8).fill(0)
            self.abort(Why.CANCELLED, "it was taken back")
        elif not whole:
            self.abort(Why.INVALID, "its bytes cannot be read where they lie; pass a copy of them")
        else:
            self._got = got + len(into)
            if self._got < len(self._into):
                return True
            self.server.ended(self)
            self.server.written(self.region, self.router, self.request, self._key)
        return False

    def let_go(self) -> None:
        self._into = EMPTY

    def abort(self, why: Why, message: str) -> None:
        self.server.ended(self)
        self.server.refuse(self.router, self.request, Refusal(why, message))


class Fetching:
    """All writes that an owner fetches: a piece of one at a time, in turn. Methods need the engine's lock."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._under_way: deque[PulledWriting] = deque()
        #: This is in the engine's backlog.
        self._goes_on = False

    def begin(self, writing: PulledWriting) -> None:
        self._under_way.append(writing)
        if not self._goes_on:
            self.work_off()

    def work_off(self) -> None:
        """Fetch the next piece."""
        self._goes_on = False
        writing = self._under_way.popleft()
        try:
            if writing.fetch():
                self._under_way.append(writing)
        except Exception as error:  # noqa: BLE001  # see PeerRouter.failed
            router = writing.router
            assert isinstance(router, PeerRouter), "only a peer has another memory"
            router.failed(error)
        if self._under_way:
            self._goes_on = True
            self._engine.backlog.append(self)

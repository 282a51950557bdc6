"""Large transfers under way in a region, as its owner sees them. All methods need the engine's lock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rankmesh.endpoint.posted import ANSWER, Outflow
from rankmesh.endpoint.router import Router
from rankmesh.memory.protocol import Why
from rankmesh.memory.region import Refusal, Region

if TYPE_CHECKING:
    from rankmesh.endpoint.posted import Posted
    from rankmesh.memory.server import MemoryServer


class Moving:
    """A large transfer under way: what the two kinds have in common."""

    def __init__(self, server: MemoryServer, region: Region, router: Router, ident: int, cost: int) -> None:
        self.server = server
        self.region = region
        self.router = router
        self.request = ident
        self.cost = cost

    def abort(self, why: Why, message: str) -> None:
        """Move no more bytes, and tell whoever asked."""
        raise NotImplementedError

    def let_go(self) -> None:
        """It has ended: refer to the region's memory no longer."""


class Reading(Moving, Outflow):
    """A large read: its bytes leave from the region."""

    def __init__(
        self,
        server: MemoryServer,
        region: Region,
        router: Router,
        ident: int,
        parts: Iterable[memoryview],
        nbytes: int,
        cost: int,
    ) -> None:
        Moving.__init__(self, server, region, router, ident, cost)
        Outflow.__init__(self, router.outbound, ident | ANSWER, parts, nbytes)

    def frame_sent(self, nbytes: int) -> None:
        super().frame_sent(nbytes)
        if not self.left:
            self.server.ended(self)

    def abort(self, why: Why, message: str) -> None:
        self.router.outbound.halt(self)
        self.server.ended(self)
        self.server.refuse(self.router, self.request, Refusal(why, message))


class Writing(Moving):
    """A large write: its bytes come into the region."""

    posted: Posted

    def __init__(
        self, server: MemoryServer, region: Region, router: Router, ident: int, key: bytes | None, cost: int
    ) -> None:
        super().__init__(server, region, router, ident, cost)
        self._key = key

    def arrived(self, whole: bool) -> None:
        """The last byte is here, or the writer gave up."""
        if self not in self.region.moving:
            return  # it was aborted here, and the writer told
        self.server.ended(self)
        if whole:
            self.server.written(self.region, self.router, self.request, self._key)

    def abort(self, why: Why, message: str) -> None:
        self.posted.discard()
        self.router.inbound.divert(self.posted)
        self.server.ended(self)
        self.server.refuse(self.router, self.request, Refusal(why, message))

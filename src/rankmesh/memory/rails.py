"""Rails: further connections to one owner, over which large transfers are striped (Config.rails).

One connection is enough where the processors are the limit, as on loopback; over networks that give a single stream
less than the link can carry, several are faster. (Measured on loopback, 64 MiB: 3.7 GB/s read and 3.8 written with
one, 3.0 and 3.5 with two, 2.6 and 3.4 with four.) Each rail is a connection of an endpoint of its own, with its own
thread: the owner sees it as a peer that nobody accepts, and serves it like any other. A ticket, which the owner gives
over the main connection, says whose it is, so that allow-lists count for it.

A striped transfer is one operation per rail on a share of the bytes, and ends when all have ended; if one fails, the
others are given up. Locks: whoever holds the lock of the main endpoint may take a rail's, never the other way round.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from rankmesh import endpoint
from rankmesh.endpoint.router import PeerRouter, Router
from rankmesh.endpoint.work import Work
from rankmesh.errors import CancelledError, RankmeshError
from rankmesh.memory.flow import Flow
from rankmesh.memory.operations import Operation, Query
from rankmesh.memory.protocol import REQUEST, Op

if TYPE_CHECKING:
    from rankmesh.endpoint.endpoint import Endpoint

logger = logging.getLogger("rankmesh")

#: Transfers of at least this size are striped: below, the further requests cost more than they bring.
STRIPED_FROM: Final = 4 * 1024 * 1024
#: Shares are multiples of this.
_GRAIN: Final = 1024 * 1024


class _Rail:
    """One further connection, as an agent of its endpoint."""

    def __init__(self, main: Router, number: int, timeout: float) -> None:
        config = main.hub.config.override(shm=False, rails=1)
        self.endpoint: Endpoint = endpoint.Endpoint(
            None, name=f"{main.engine.name}/rail{number}"[-256:], config=config, rail=True
        )
        try:
            peer = self.endpoint.connect({"addresses": list(map(str, main.peer.addresses))}, timeout)
        except BaseException:
            self.endpoint.abort()
            raise
        self.flow = Flow(peer.router)
        with self.endpoint.hub.engine:
            self.endpoint.hub.agents.append(self)

    def needs(self, router: Router) -> bool:
        return True

    def peer_lost(self, router: Router) -> None:
        self.flow.abandon(router.lost_error)

    def closing(self) -> None:
        self.flow.abandon(self.endpoint.hub.closed_error)

    def closed(self) -> None:
        """Nothing is left to free."""


class Rails:
    """All connections to one owner: the main one, and the others once they are needed. Without locks."""

    def __init__(self, flow: Flow) -> None:
        self._main = flow
        self._rails: list[_Rail] | None = None
        #: One thread makes them, and others wait for it.
        self._making = threading.Lock()
        self._closed = False

    def flows(self, nbytes: int, timeout: float) -> Sequence[Flow]:
        """The flows that a transfer of this size is striped over."""
        router = self._main.router
        wanted = router.hub.config.rails
        if wanted < 2 or nbytes < STRIPED_FROM or not isinstance(router, PeerRouter) or router.polled is not None:
            return (self._main,)
        with self._making:
            if self._rails is None:
                self._rails = self._open(router, wanted - 1, timeout)
            if self._closed:
                self.close()
        if any(rail.flow.router.gone for rail in self._rails):
            return (self._main,)
        return (self._main, *(rail.flow for rail in self._rails))

    def _open(self, router: PeerRouter, count: int, timeout: float) -> list[_Rail]:
        """Further connections. Where there can be none, one has to do."""
        rails: list[_Rail] = []
        try:
            ask = REQUEST.pack(Op.RAIL, 0, 0, 0, 0, 0, 0)
            ticket = Query(self._main, "*", "stripe", ask, timeout, bytes).complete()
            show = REQUEST.pack(Op.RAIL, 0, len(ticket), 0, 0, 0, 0) + ticket
            for number in range(1, count + 1):
                rails.append(_Rail(router, number, timeout))
                Query(rails[-1].flow, "*", "stripe", show, timeout, bytes).complete()
        except RankmeshError as error:
            logger.warning("No further connections to %s, so transfers are not striped: %s", router.peer, error)
            for rail in rails:
                rail.endpoint.abort()
            return []
        return rails

    def close(self) -> None:
        """End the further connections; those that are being made are ended by whoever makes them."""
        self._closed = True
        rails, self._rails = self._rails or [], []
        for rail in rails:
            rail.endpoint.abort()


def shares(nbytes: int, count: int) -> list[tuple[int, int]]:
    """(offset, length) of each rail's share."""
    each = -(-nbytes // count // _GRAIN) * _GRAIN
    return [(at, min(each, nbytes - at)) for at in range(0, nbytes, each)]


class Striped(Work[Any]):
    """A transfer in shares. It ends when they all have."""

    def __init__(self, flow: Flow, what: str, region: str, timeout: float, value: Any) -> None:
        router = flow.router
        super().__init__(router.engine, f"{what} region {region!r} at", router.peer, None, timeout)
        self._result = value
        self._shares: list[Operation] = []
        self._left = 0
        self._first_error: BaseException | None = None

    def begin(self, operations: Sequence[Operation]) -> None:
        """Send all of them. Takes the locks."""
        self._shares = list(operations)
        self._left = len(self._shares)
        for operation in self._shares:
            operation.add_done_callback(self._share_ended)
            try:
                operation.begin()
            except RankmeshError as error:
                with operation.router.engine:
                    operation.fail(error)

    def _share_ended(self, share: Work[Any]) -> None:
        """Called without locks."""
        error: BaseException | None = None
        try:
            share.outcome()
        except RankmeshError as raised:
            error = raised
        with self._engine:
            self._left -= 1
            first = error is not None and self._first_error is None
            if first:
                self._first_error = error
            if not self._left and not self.finished:
                if self._first_error is None:
                    self.finish(self._result)
                else:
                    self.fail(self._first_error)
        if first:
            for other in self._shares:
                other.cancel()

    def _give_up(self, error: RankmeshError) -> None:
        """With the main lock, which the first share has too."""
        given_up = CancelledError("The transfer was given up.")
        for share in self._shares:
            if share.router.engine is not self._engine:
                _detach(share, given_up)
            elif not share.finished:
                share.give_up(given_up)
        self.fail(error)


def _detach(share: Operation, error: RankmeshError) -> None:
    """Give a rail's share up while the main lock is held: callbacks, which take that, are left to the rail's thread."""
    engine = share.router.engine
    engine.acquire()
    try:
        if not share.finished:
            share.give_up(error)
        engine.call_at(0.0, lambda: None)  # ends its sleep
        engine.background.wake()
    finally:
        engine.lock.release()


Make = Callable[[Flow, int, int], Operation]


def striped(flows: Sequence[Flow], what: str, region: str, timeout: float, value: Any, nbytes: int, make: Make) -> Any:
    """Begin a transfer of `nbytes`; `make(flow, offset, length)` makes the operation of a share."""
    work = Striped(flows[0], what, region, timeout, value)
    parts = zip(flows, shares(nbytes, len(flows)), strict=False)
    work.begin([make(flow, offset, length) for flow, (offset, length) in parts])
    return work

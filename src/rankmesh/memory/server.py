"""The owner's side: requests of others, served by whichever thread reads them, without users' code and without waiting.

A request is checked as a whole (region, generation, allow-list, access, bounds, sizes) before a byte moves. Then

- what is small is copied and answered at once: the read's bytes leave in the reply, in one system call; replies to
  requests that came together leave together;
- what is large is moved piece by piece between other work: a read goes straight from the region's memory into the
  connection's bulk lane, where it takes turns with others; a write is received straight into the region, or fetched
  from the writer's memory (pulling.py).

Nothing waits for memory of ours, so nothing is queued but the transfers themselves, and they are bounded in bytes of
bookkeeping (Config.memory_queue_bytes for each peer). All methods need the engine's lock unless they say otherwise.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Final

from rankmesh.endpoint.posted import BROUGHT
from rankmesh.endpoint.router import Router
from rankmesh.endpoint.waiting import Until
from rankmesh.errors import (
    AccessDenied,
    BusyError,
    DeadlineError,
    OutOfBounds,
    ProtocolError,
    RegionError,
    RegionNotFound,
    StaleRegion,
    UsageError,
)
from rankmesh.memory.finding import Finder, key_of
from rankmesh.memory.moving import Moving, Reading, Writing
from rankmesh.memory.protocol import (
    CELL,
    DONE,
    MAX_PIECES,
    MOST,
    REQUEST,
    SERVICE,
    SWAP,
    Ask,
    Bit,
    Failure,
    Op,
    Why,
    encode,
    read_ask,
)
from rankmesh.memory.pulling import Fetching, PulledWriting, Source
from rankmesh.memory.pushing import PushPermits
from rankmesh.memory.region import Refusal, Region
from rankmesh.wire.header import Flag, Kind

if TYPE_CHECKING:
    from rankmesh.endpoint.hub import Hub

_REPLY: Final = int(Kind.REPLY)
_ERROR: Final = int(Flag.ERROR)
_READ: Final = int(Op.READ)
_WRITE: Final = int(Op.WRITE)
_unpack: Final = REQUEST.unpack_from
_HEAD: Final = REQUEST.size
#: What a transfer costs its owner besides the pieces it names.
TRANSFER_COST: Final = 512
#: Streamed writes of one peer whose bytes have not come, refused ones included.
MAX_BROUGHT: Final = 65_536
#: Seconds between looks at the words of those who write through a mapping.
LOOK: Final = 0.001
#: What to do about those that not even `abort` ends.
_STOPPED: Final = (
    "A process of this host is in the middle of writing there: end it or let it go on, and unregister the region again."
)
#: What a Refusal is at the one who asked.
ERRORS: Final[dict[str, type[RegionError] | type[UsageError] | type[BusyError]]] = {
    Why.MISSING: RegionNotFound,
    Why.STALE: StaleRegion,
    Why.DENIED: AccessDenied,
    Why.BOUNDS: OutOfBounds,
    Why.INVALID: UsageError,
    Why.BUSY: BusyError,
    Why.FULL: BusyError,
}
#: What to do about it, where the error does not say so by itself.
HINTS: Final[dict[str, dict[str, str]]] = {
    Why.FULL: {"hint": "Go on when some of them have been taken, or given up."},
}


class MemoryServer(Finder):
    """The regions of one endpoint."""

    def __init__(self, hub: Hub, sweep: Callable[[Router], None]) -> None:
        super().__init__(hub, sweep)
        self._inline = hub.config.eager_bytes
        #: Unregistered, but not yet idle.
        self._retiring: set[Region] = set()
        self._generations = itertools.count(secrets.randbits(62) + 1)
        #: By router index: transfers under way by ident, and what they cost.
        self._moving: dict[int, dict[int, Moving]] = {}
        self._cost: dict[int, int] = {}
        self._fetching = Fetching(hub.engine)
        #: Routers for which replies wait to leave together.
        self._holding: set[Router] = set()
        self.served = 0
        self.refused = 0
        self._handlers: dict[int, Callable[[Router, int, Ask, memoryview], None]] = {
            Op.READ: self._on_read,
            Op.WRITE: self._on_write,
            Op.FETCH_ADD: self._on_fetch_add,
            Op.COMPARE_AND_SWAP: self._on_swap,
            Op.NOTIFY: self._on_notify,
            Op.OPEN: self._on_open,
            Op.LIST: self._on_list,
            Op.WATCH: self._on_watch,
            Op.CANCEL: self._on_cancel,
            Op.CLOSE: self._on_close,
            Op.RAIL: self._on_rail,
            Op.GONE: self._on_gone,
        }

    # ------------------------------------------------------------------ regions

    def find(self, name: str) -> Region | None:
        """The region of this name; or else one that was unregistered, and is still in use."""
        return self.regions.get(name) or next((region for region in self._retiring if region.name == name), None)

    def new_generation(self) -> int:
        return next(self._generations)

    def add(self, region: Region) -> None:
        """Let others find it."""
        self.hub.check_open()
        if region.name in self.regions:
            raise UsageError(
                f"There is a region {region.name!r} already. Take another name, or unregister that one first."
            )
        self.regions[region.name] = region
        self._by_generation[region.generation] = region
        self._appeared(region)

    def unregister(self, region: Region, abort: bool, timeout: float | None) -> None:
        """Takes the lock. Returns when nothing of the region's is under way."""
        timeout = self.hub.config.timeout if timeout is None else timeout
        with self.engine:
            self.remove(region, abort)
            idle = Until(lambda: region.idle)
            deadline = monotonic() + timeout
            while not idle.finished and (now := monotonic()) < deadline:
                # whoever writes through a mapping tells nobody when it has done
                self.engine.drive(idle, min(deadline, now + LOOK) if region.shared is not None else deadline)
            if not idle.finished:
                raise DeadlineError(
                    f"Transfers of region {region.name!r}, which is unregistered, are still under way after "
                    f"{timeout:g} s.",
                    op="unregister",
                    timeout=timeout,
                    hint=_STOPPED if abort else "Unregister it again with abort=True, which ends them.",
                )
            self._retiring.discard(region)
            region.release()

    def remove(self, region: Region, abort: bool) -> None:
        """From now on nobody finds it; with `abort`, transfers under way end."""
        if not region.stale:
            region.stale = True
            self._retiring.add(region)
            if region.shared is not None:
                region.shared.revoke()
                self._tell_gone(region)
            del self.regions[region.name]
            del self._by_generation[region.generation]
            waiting = [awaited for queue in region.waiters.values() for awaited in queue]
            region.waiters.clear()
            for awaited in waiting:
                awaited.fail(region.stale_error())
            self._tell("removed", region)
        if abort:
            for moving in list(region.moving):
                moving.abort(Why.STALE, f"region {region.name!r} was unregistered")

    # ------------------------------------------------------------------ requests

    def on_lone(self, router: Router, ident: int, payload: memoryview, owned: bool) -> None:
        """A request that came alone. The hot path, written out: a small read or write of what is there."""
        size = len(payload)
        if size >= _HEAD:
            op, bits, _, _, generation, offset, nbytes = _unpack(payload)
            region = self._by_generation.get(generation)
            end = offset + nbytes
            if region is not None and not bits and region.allowed is None and end <= region.nbytes:
                body: bytes | memoryview | None = None
                if op == _READ and region.readable and nbytes <= self._inline and size == _HEAD:
                    body = region.view[offset:end]
                elif op == _WRITE and region.writable and size == _HEAD + nbytes:
                    region.view[offset:end] = payload[_HEAD:]
                    body = DONE
                if body is not None:
                    self.served += 1
                    try:
                        if router.outbound.send_rpc(_REPLY, 0, SERVICE, ident, body):
                            return
                    except BusyError:
                        pass  # the general way deals with it
                    self._reply(router, ident, bytes(body))  # it may leave after the region was taken back
                    return
        self.on_request(router, ident, payload, owned)

    def on_request(self, router: Router, ident: int, payload: memoryview, owned: bool) -> None:
        """A request is here."""
        ask = read_ask(payload)
        handler = self._handlers.get(ask.op)
        if handler is None:
            raise ProtocolError(f"operation {ask.op} on memory", reason="unknown operation")
        try:
            handler(router, ident, ask, payload)
            self.served += 1
        except Refusal as refusal:
            self.refuse(router, ident, refusal)

    def _reply(self, router: Router, ident: int, body: bytes | memoryview, flags: int = 0) -> None:
        """Answer; where more requests came with this one, together with the answers to those."""
        outbound, more = router.outbound, router.inbound.expects_more
        try:
            if outbound.send_rpc(_REPLY, flags, SERVICE, ident, body, more):
                if more:
                    self._hold(router)
                return
        except BusyError:  # so much waits to leave that the other side does not read
            pass
        router.reply(ident, [memoryview(body)], len(body), failed=bool(flags), service=SERVICE)

    def _hold(self, router: Router) -> None:
        """The next answer takes the held ones with it, or else the engine's next turn does."""
        if router not in self._holding:
            self._holding.add(router)
            self.engine.backlog.append(self)

    def work_off(self) -> None:
        holding, self._holding = self._holding, set()
        for router in holding:
            router.outbound.flush()

    def refuse(self, router: Router, ident: int, refusal: Refusal) -> None:
        self.refused += 1
        self._reply(router, ident, encode(Failure(refusal.why, refusal.message, refusal.names)), _ERROR)

    def local_error(self, region: Region, refusal: Refusal) -> Exception:
        """A refusal, for the owner itself."""
        kind = ERRORS[refusal.why]
        about = {"region": region.name} if issubclass(kind, RegionError) else {}
        return kind(f"Region {region.name!r}: {refusal.message}.", **about)

    def main_of(self, router: Router) -> Router:
        """The connection that an allow-list knows a peer by: a rail stands for the one it belongs to."""
        return self._main.get(router.index, router)

    def _region(self, router: Router, ask: Ask, reads: bool, writes: bool) -> Region:
        region = self._by_generation.get(ask.generation)
        if region is None:
            raise Refusal(Why.STALE, "it was unregistered, or registered anew")
        if not region.admits(self.main_of(router)):
            raise Refusal(Why.DENIED, "its owner does not allow it to this peer")
        if (reads and not region.readable) or (writes and not region.writable):
            raise Refusal(Why.DENIED, f"it is registered with access {region.access!r}")
        if ask.nbytes > MOST or ask.offset > MOST:
            raise Refusal(Why.BOUNDS, f"offset {ask.offset} and length {ask.nbytes} overflow")
        if ask.pieces > MAX_PIECES:
            raise Refusal(Why.INVALID, f"{ask.pieces} pieces are more than the {MAX_PIECES} of one request")
        return region

    # ------------------------------------------------------------------ reads and writes

    def _on_read(self, router: Router, ident: int, ask: Ask, payload: memoryview) -> None:
        region = self._region(router, ask, reads=True, writes=False)
        parts = region.parts(ask, payload)
        if not ask.bits & Bit.STREAMED:
            if ask.nbytes > self._inline:
                raise Refusal(Why.INVALID, f"{ask.nbytes} bytes are too many for one reply")
            self._reply(router, ident, b"".join(parts))
        elif not ask.nbytes:
            raise Refusal(Why.INVALID, "a read of no bytes has nothing to stream")
        else:
            cost = TRANSFER_COST + len(payload)
            self._check_room(router, ident, cost)
            reading = Reading(self, region, router, ident, parts, ask.nbytes, cost)
            self._begin(reading)
            router.outbound.move(reading, ask.nbytes)

    def _on_write(self, router: Router, ident: int, ask: Ask, payload: memoryview) -> None:
        if ask.bits & Bit.STREAMED:
            self._on_streamed_write(router, ident, ask, payload)
            return
        if ask.bits & Bit.PULLED:
            self._on_pulled_write(router, ident, ask, payload)
            return
        region = self._region(router, ask, reads=False, writes=True)
        key = self._key(region, ask, payload)
        parts = region.parts(ask, payload)
        at = self._data_at(ask)
        if len(payload) - at != ask.nbytes:
            raise Refusal(Why.INVALID, f"it says {ask.nbytes} bytes and brings {max(len(payload) - at, 0)}")
        for part in parts:
            part[:] = payload[at : at + len(part)]
            at += len(part)
        self.written(region, router, ident, key)

    def _on_streamed_write(self, router: Router, ident: int, ask: Ask, payload: memoryview) -> None:
        """Its bytes are on their way already: whatever is wrong, they must have a place, or be read past."""
        arrivals = router.arrivals
        if not 0 < ask.nbytes <= MOST or len(arrivals.posted) >= MAX_BROUGHT:
            raise ProtocolError(f"a streamed write of {ask.nbytes} bytes", reason="malformed request")
        cost = TRANSFER_COST + len(payload)
        try:
            region = self._region(router, ask, reads=False, writes=True)
            key = self._key(region, ask, payload)
            parts = region.parts(ask, payload)
            self._check_room(router, ident, cost)
        except Refusal:
            arrivals.expect(ident | BROUGHT, ask.nbytes, None, lambda whole: None)
            raise
        writing = Writing(self, region, router, ident, key, cost)
        writing.posted = arrivals.expect(ident | BROUGHT, ask.nbytes, parts, writing.arrived)
        self._begin(writing)

    def _on_pulled_write(self, router: Router, ident: int, ask: Ask, payload: memoryview) -> None:
        polled = router.polled
        if polled is None or polled.puller is None:
            raise Refusal(Why.INVALID, "its bytes cannot be fetched: the memory of who writes is not to be read here")
        if ask.bits & Bit.BATCH or not ask.nbytes:
            raise ProtocolError(f"a write of {ask.nbytes} bytes to be fetched", reason="malformed request")
        source = Source.parse(payload[_HEAD + ask.key :])
        region = self._region(router, ask, reads=False, writes=True)
        key = self._key(region, ask, payload)
        (into,) = region.parts(ask, payload)
        cost = TRANSFER_COST + len(payload)
        self._check_room(router, ident, cost)
        writing = PulledWriting(self, region, router, ident, key, cost, into, source, polled)
        self._begin(writing)
        self._fetching.begin(writing)

    def written(self, region: Region, router: Router, ident: int, key: bytes | None) -> None:
        """A write is applied: tell those who wait for it, and then the writer."""
        if key is not None:
            region.notify(key, region.name_of(self.main_of(router)))
        self._reply(router, ident, DONE)

    @staticmethod
    def _key(region: Region, ask: Ask, payload: memoryview) -> bytes | None:
        if not ask.bits & Bit.NOTIFY:
            return None
        region.check_notice()
        return key_of(ask, payload)

    @staticmethod
    def _data_at(ask: Ask) -> int:
        pieces = ask.pieces if ask.bits & Bit.BATCH else 0
        return _HEAD + ask.key + pieces * (32 if ask.bits & Bit.STRIDED else 16)

    def _check_room(self, router: Router, ident: int, cost: int) -> None:
        if ident in self._moving.get(router.index, ()):
            raise ProtocolError(f"two transfers under request {ident}", reason="transfer announced twice")
        bound = self.hub.config.memory_queue_bytes
        spent = self._cost.get(router.index, 0)
        if spent and spent + cost > bound:
            raise Refusal(Why.BUSY, f"transfers of this peer's reach Config.memory_queue_bytes ({bound}) there")

    def _begin(self, moving: Moving) -> None:
        index = moving.router.index
        self._moving.setdefault(index, {})[moving.request] = moving
        self._cost[index] = self._cost.get(index, 0) + moving.cost
        moving.region.moving.add(moving)

    def ended(self, moving: Moving) -> None:
        index = moving.router.index
        moving.region.moving.discard(moving)
        moving.let_go()
        transfers = self._moving.get(index)
        if transfers is not None and transfers.pop(moving.request, None) is not None:
            self._cost[index] -= moving.cost
            if not transfers:
                del self._moving[index], self._cost[index]

    # ------------------------------------------------------------------ cells and notifications

    def _on_fetch_add(self, router: Router, ident: int, ask: Ask, payload: memoryview) -> None:
        region = self._region(router, ask, reads=True, writes=True)
        (value,) = self._operands(CELL.size, payload, CELL)
        self._reply(router, ident, CELL.pack(region.add(ask.offset, value)))

    def _on_swap(self, router: Router, ident: int, ask: Ask, payload: memoryview) -> None:
        region = self._region(router, ask, reads=True, writes=True)
        expected, desired = self._operands(SWAP.size, payload, SWAP)
        self._reply(router, ident, CELL.pack(region.swap(ask.offset, expected, desired)))

    @staticmethod
    def _operands(nbytes: int, payload: memoryview, form: Any) -> tuple[int, ...]:
        if len(payload) != _HEAD + nbytes:
            raise Refusal(Why.INVALID, f"an operation on a cell brings {nbytes} bytes, not {len(payload) - _HEAD}")
        return form.unpack_from(payload, _HEAD)  # type: ignore[no-any-return]  # of "Q"s only

    def _on_notify(self, router: Router, ident: int, ask: Ask, payload: memoryview) -> None:
        """The bytes were written through a mapping, or there were none."""
        region = self._region(router, ask, reads=False, writes=True)
        region.check_notice()
        self.written(region, router, ident, key_of(ask, payload))

    def _on_cancel(self, router: Router, ident: int, ask: Ask, payload: memoryview) -> None:
        """What was asked under this ident is given up. A read gets an answer, after which no more of its bytes come.
        One that is unknown has had its last byte or its answer already."""
        moving = self._moving.get(router.index, {}).get(ident)
        if isinstance(moving, Reading):
            moving.abort(Why.CANCELLED, "it was cancelled")
        elif isinstance(moving, PulledWriting):
            self.ended(moving)
        self._forget(router, ident)

    # ------------------------------------------------------------------ the end

    def needs(self, router: Router) -> bool:
        """Somebody there waits for regions of ours, or has one mapped."""
        index = router.index
        regions = (region for region in self.regions.values() if region.mappable)
        if any(region.shared is not None and region.shared.mapped_by(router) for region in regions):
            return True
        return any(waiting == index for waiting, _ in self._waiting())

    def peer_lost(self, router: Router) -> None:
        """Whatever it had under way is over; the regions stay."""
        index = router.index
        for moving in list(self._moving.get(index, {}).values()):
            self.ended(moving)
        for region in (*self.regions.values(), *self._retiring):
            if region.shared is not None:
                region.shared.lost(router)
        self._forget_peer(router)

    def closing(self) -> None:
        """Nobody will be notified any more."""
        for region in self.regions.values():
            for queue in region.waiters.values():
                for awaited in queue:
                    awaited.fail(self.hub.closed_error(awaited.op, None))
            region.waiters.clear()

    def free(self) -> None:
        """The endpoint is closed. Nobody can come any more; who is writing without us ends its piece, and finds then
        that it may not go on. Without the lock."""
        for moving in [moving for transfers in self._moving.values() for moving in transfers.values()]:
            self.ended(moving)
        regions = (*self.regions.values(), *self._retiring)
        for region in regions:
            if region.shared is not None:
                region.shared.revoke()
        deadline = monotonic() + self.hub.config.close_timeout
        for region in regions:
            pushed = region.shared if isinstance(region.shared, PushPermits) else None
            while pushed is not None and pushed.busy and monotonic() < deadline:
                sleep(LOOK)
            region.release()

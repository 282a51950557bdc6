"""What one peer is asked for at once, and how it leaves. All methods need the engine's lock.

Requests that cost the owner memory until their answers have left (small reads and writes) are held back beyond a
window, so a burst of them never fills a queue there: they wait here, where the caller's own bound applies.

Small operations coalesce. One that somebody waits for leaves at once. One begun with `async_op` while others are under
way waits for company: it leaves with the next that is urgent, when some answer has come, when enough have gathered,
when somebody waits for one of them, or by the endpoint's own thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from rankmesh.endpoint.outbound import SEND_COST
from rankmesh.endpoint.router import PeerRouter, Router
from rankmesh.errors import BusyError, RankmeshError, StaleRegion
from rankmesh.memory.mapping import Mapping, Permit, fits, has_words
from rankmesh.memory.protocol import MOST, REQUEST, SERVICE, Description, Op
from rankmesh.memory.pulling import Pulled
from rankmesh.memory.pushing import Pushed
from rankmesh.wire.header import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankmesh.memory.operations import Operation

_REQUEST: Final = int(Kind.REQUEST)
#: Bytes of requests and answers that may be under way at once.
WINDOW: Final = 4 * 1024 * 1024
#: Requests that leave together at most.
COMPANY: Final = 64


class Flow:
    """See the module's text."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self._engine = router.engine
        self._hub = router.hub
        self._waiting: deque[Operation] = deque()
        self._cost = 0
        #: Regions of this peer's that are mapped here, or read where they lie, by segment.
        self._mappings: dict[int, Permit] = {}
        #: Regions that are being opened.
        self._opening = 0
        #: Requests that were handed to the connection and not flushed.
        self._gathered = 0
        #: Requests to change memory that have left and are not answered; those that were given up count for ever, since
        #: nobody knows when the owner is through with them.
        self._changes = 0

    @property
    def needed(self) -> bool:
        """The connection must stay although it is quiet."""
        return bool(self._waiting) or any(isinstance(each, Mapping) for each in self._mappings.values())

    @contextmanager
    def opening(self) -> Iterator[None]:
        """While a region is being opened no mapping is given back: the answer may name its words. Takes the lock."""
        with self._engine:
            self._opening += 1
        try:
            yield
        finally:
            with self._engine:
                self._opening -= 1
                self.sweep()

    @property
    def changing(self) -> bool:
        """The owner has still to change something, or may have to. (Without the lock, of what this thread did.)"""
        return bool(self._changes or self._waiting)

    def map(self, description: Description) -> Permit | None:
        """By what a region that was opened now is mapped here, or read, if its owner offers that: all handles of it
        share it."""
        polled, segment = self.router.polled, description.segment
        if not segment or polled is None:
            return None
        if segment not in polled.shared:
            polled.answer_bell()  # its descriptor was sent before the answer was
        memory = polled.shared.pop(segment, None)
        known = self._mappings.get(segment)
        if known is not None:
            return known
        if memory is None:
            return None
        slot, name, generation = description.slot, description.name, description.generation
        mapping: Permit
        if description.address:
            if not 0 < description.address <= MOST or not 0 <= description.guard <= MOST:
                return None
            writes = bool(description.guard) and not memory.readonly
            kind = Pushed if writes else Pulled
            if polled.puller is None or not has_words(memory, slot, kind.of):
                return None
            where = memory, slot, name, generation, description.address, polled.puller
            mapping = Pushed(*where, polled.process, description.guard) if writes else Pulled(*where)
        elif fits(memory, description.nbytes, slot):
            mapping = Mapping(memory, slot, name, description.nbytes, generation)
        else:
            return None
        self._mappings[segment] = mapping
        return mapping

    def sweep(self) -> None:
        """Let go of mappings whose regions are gone, and give those back that nobody uses."""
        for segment, mapping in list(self._mappings.items()):
            if mapping.revoked:
                del self._mappings[segment]
                mapping.close()
            elif not self._opening and mapping.close_unused():
                del self._mappings[segment]
                if not self._hub.closed:
                    self._tell_closed(mapping.generation)

    def _tell_closed(self, generation: int) -> None:
        if self.router.gone:
            return
        body = REQUEST.pack(Op.CLOSE, 0, 0, 0, generation, 0, 0)
        try:
            self.router.outbound.send_rpc(_REQUEST, 0, SERVICE, self.router.outbound.new_ident(), body)
        except BusyError:  # its words stay this peer's, and serve the next mapping
            pass

    def is_free(self, cost: int) -> bool:
        """Whether a request of this cost may leave right now."""
        busy = self._waiting or (self._cost and self._cost + cost > WINDOW)
        return not (busy or self._hub.closed or self.router.gone)

    def count(self, operation: Operation) -> None:
        """Its request leaves now."""
        self._cost += operation.cost
        self._changes += operation.changes
        operation.counted = True

    def submit(self, operation: Operation, urgent: bool) -> None:
        """Send a request, or let it wait for its turn."""
        if self._hub.closed:
            self._hub.check_open()
        if self.router.gone:
            raise self._gone(operation.op, operation.region)
        if self._waiting or (self._cost and self._cost + operation.cost > WINDOW):
            bound = self._hub.config.send_queue_bytes
            if len(self._waiting) * SEND_COST >= bound:
                raise BusyError(
                    f"{len(self._waiting)} operations wait for {self.router.peer} already, as many as "
                    f"Config.send_queue_bytes ({bound}) allows."
                )
            self._waiting.append(operation)
            operation.queued = True
            return
        if not urgent and self._cost:
            self._send_with_others(operation)
        else:
            self.count(operation)
            operation.send(False)

    def _send_with_others(self, operation: Operation) -> None:
        self.count(operation)
        operation.send(True)
        self._gathered += 1
        if self._gathered == 1:
            self._engine.call_at(0.0, self.flush)
            self._engine.background.wake()
        elif self._gathered >= COMPANY:
            self.flush()

    def flush(self) -> None:
        """Let go what has gathered."""
        if self._gathered:
            self._gathered = 0
            self.router.outbound.flush()

    def left(self, operation: Operation) -> None:
        """An operation has ended: others may begin."""
        self._cost -= operation.cost
        self._changes -= operation.changes
        if self._waiting:
            self._advance()
        if self._gathered:
            self.flush()

    def _advance(self) -> None:
        while self._waiting and not self.router.gone and not self._hub.closed:
            operation = self._waiting[0]
            if self._cost and self._cost + operation.cost > WINDOW:
                return
            self._waiting.popleft()
            operation.queued = False
            try:
                self._send_with_others(operation)
            except RankmeshError as error:
                operation.fail(error)

    def abandoned(self, operation: Operation) -> None:
        """One that has left is given up."""
        self._changes += operation.changes

    def withdraw(self, operation: Operation) -> None:
        """One that waits is given up."""
        self._waiting.remove(operation)
        operation.queued = False

    def abandon(self, make_error: Callable[[str, int | None], RankmeshError]) -> None:
        """The peer is gone, or this side closes: those that wait will never leave, and mappings are worth nothing."""
        for mapping in self._mappings.values():
            if mapping.close():
                self._tell_closed(mapping.generation)
        self._mappings.clear()
        waiting, self._waiting = self._waiting, deque()
        for operation in waiting:
            operation.queued = False
            operation.fail(make_error(operation.op, None))

    def check(self, region: str) -> None:
        """Raises what a copy from or to this peer's memory would fail with right now."""
        if self._engine.closed:  # after fork() in the child, too, where taking the lock says so
            with self._engine:
                self._hub.check_open()
        if self._hub.closed:
            self._hub.check_open()
        if self.router.gone:
            raise self._gone(f"copy of region {region!r} of", region)

    def _gone(self, op: str, region: str) -> RankmeshError:
        """The owner is gone; if it is back, under its old name, then as another process, which knows none of our
        handles."""
        peer = self.router.peer
        for other in self._hub.routers.values():
            if isinstance(other, PeerRouter) and not other.gone and peer.name and other.peer.name == peer.name:
                return StaleRegion(
                    f"{peer} is lost, and {other.peer} has taken its place: {op} it cannot go on.",
                    region=region,
                    peer=str(peer),
                )
        error: RankmeshError = self.router.lost_error(op, None)
        return error

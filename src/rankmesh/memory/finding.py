"""How others find an owner's regions: by name, by waiting for them, by list, by watching; and further connections of
theirs. The lower half of MemoryServer. All methods need the engine's lock."""

from __future__ import annotations

import difflib
import itertools
import os
import secrets
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from rankmesh.endpoint.router import Router
from rankmesh.errors import BusyError
from rankmesh.memory.mapping import Permits
from rankmesh.memory.protocol import DONE, KEY_LIMIT, REQUEST, SERVICE, Ask, Bit, Description, Event, Op, Why, encode
from rankmesh.memory.pushing import PushPermits
from rankmesh.memory.region import Refusal, Region
from rankmesh.transport.pulling import Puller
from rankmesh.transport.pushing import guard
from rankmesh.wire.header import Kind

if TYPE_CHECKING:
    from rankmesh.endpoint.hub import Hub
    from rankmesh.transport.base import PolledLink

_HEAD: Final = REQUEST.size
_REQUEST: Final = int(Kind.REQUEST)
#: Names like the one asked for.
NEAREST: Final = 3
#: Names that it is compared with: each takes tens of microseconds, in which nobody else is served.
COMPARED: Final = 256
#: Requests of one peer that wait for a region, or watch.
MAX_WAITING: Final = 1024
#: A region of at least so many bytes is read where it lies, as long as no more of them have a descriptor each for it.
PULLED_FROM: Final = 64 * 1024
MOST_PULLED: Final = 128


class Finder:
    """See the module's text."""

    def __init__(self, hub: Hub, sweep: Callable[[Router], None]) -> None:
        """`sweep`: let go of what is mapped here of that peer's regions, as far as they are gone."""
        self.hub = hub
        self._sweep = sweep
        self.engine = hub.engine
        self.regions: dict[str, Region] = {}
        self._by_generation: dict[int, Region] = {}
        #: (router, ident) of requests that wait for a region, by its name; and of watchers.
        self._awaited: dict[str, dict[tuple[int, int], tuple[Router, int]]] = {}
        self._watchers: dict[tuple[int, int], Router] = {}
        #: Tickets for rails, by router index and back; and whose rail a router is.
        self._tickets: dict[int, bytes] = {}
        self._ticket_of: dict[bytes, Router] = {}
        self._main: dict[int, Router] = {}

    def _reply(self, router: Router, ident: int, body: bytes | memoryview, flags: int = 0) -> None:
        raise NotImplementedError

    def refuse(self, router: Router, ident: int, refusal: Refusal) -> None:
        raise NotImplementedError

    def _appeared(self, region: Region) -> None:
        """A region was registered: whoever waits for it, or watches, learns of it."""
        for (_, ident), (router, bits) in self._awaited.pop(region.name, {}).items():
            self._answer_open(router, ident, region, bits)
        self._tell("added", region)

    def _tell(self, kind: str, region: Region) -> None:
        for (_, ident), router in list(self._watchers.items()):
            if region.admits(router):
                self._reply(router, ident, encode(Event(kind, region.describe())))

    def readmit(self, region: Region, allowed: frozenset[Any] | None) -> None:
        """Its allow-list changes: to those who watch, and may open it only now, it came; to those who no longer may, it
        went."""
        watchers = list(self._watchers.items()) if self._by_generation.get(region.generation) is region else []
        could = [region.admits(router) for _, router in watchers]
        region.allowed = allowed
        for ((_, ident), router), before in zip(watchers, could, strict=True):
            if region.admits(router) != before:
                self._reply(router, ident, encode(Event("removed" if before else "added", region.describe())))

    def _on_open(self, router: Router, ident: int, ask: Ask, payload: memoryview) -> None:
        name = _text(key_of(ask, payload))
        region = self.regions.get(name)
        if region is not None:
            self._answer_open(router, ident, region, ask.bits)
        elif ask.bits & Bit.WAIT:
            self._check_waiting(router)
            self._awaited.setdefault(name, {})[router.index, ident] = (router, ask.bits)
            self._reply(router, ident, DONE)  # so that whoever waits in vain can tell why
        else:
            some = itertools.islice(self.regions.values(), COMPARED)
            known = [region.name for region in some if region.admits(router)]
            raise Refusal(Why.MISSING, "", tuple(difflib.get_close_matches(name, known, NEAREST)))

    def _answer_open(self, router: Router, ident: int, region: Region, bits: int) -> None:
        try:
            if not region.admits(router):
                raise Refusal(Why.DENIED, "its owner does not allow it to this peer")
            self._reply(router, ident, encode(self._offer(router, region, bits)))
        except Refusal as refusal:
            self.refuse(router, ident, refusal)

    def _offer(self, router: Router, region: Region, bits: int) -> Description:
        """What an OPEN is told; with where it may map the region, or read it, if it can and wants to."""
        description, polled = region.describe(), router.polled
        if not bits & Bit.MAP or polled is None:
            return description
        shared = region.shared if region.mappable else self._permits(region, polled)
        if shared is None:
            return description
        slot = shared.slot(router)
        if not slot or not polled.share(shared.segment, shared.fd, shared.nbytes, shared.writable):
            return description
        if region.mappable:
            return msgspec.structs.replace(description, segment=shared.segment, slot=slot)
        # who may write must be one whose end can be seen from here (`halted`)
        writes = shared.writable and polled.puller is not None
        where = {"address": region.address, "guard": guard() if writes else 0}
        return msgspec.structs.replace(description, segment=shared.segment, slot=slot, **where)

    def _permits(self, region: Region, polled: PolledLink) -> Permits | None:
        """Of a region that is read, and written, where it lies; None: it cannot be, or is not worth a descriptor."""
        if not polled.pulls or not region.readable or region.nbytes < PULLED_FROM:
            return None
        if region.shared is not None:
            return region.shared
        others = (one for one in self.regions.values() if one.shared is not None)
        many = next(itertools.islice(others, MOST_PULLED - 1, None), None) is not None
        if many or not Puller(os.getpid()).reaches(region.address):
            return None
        try:
            region.shared = PushPermits(region.generation) if region.writable else Permits(region.generation)
        except OSError:  # no descriptors left, or no such memory: the bytes are streamed
            pass
        return region.shared

    def _on_close(self, router: Router, ident: int, ask: Ask, payload: memoryview) -> None:
        """The last handle of those that had it mapped is closed. There is no answer."""
        region = self._by_generation.get(ask.generation)
        if region is not None and region.shared is not None:
            region.shared.closed_by(router)

    def _tell_gone(self, region: Region) -> None:
        """Those that have it mapped keep its memory from being freed. Who cannot be told right now finds out when it
        opens the next one."""
        body = REQUEST.pack(Op.GONE, 0, 0, 0, region.generation, 0, 0)
        for router in list(self.hub.routers.values()):
            if region.shared is not None and region.shared.mapped_by(router) and not router.gone:
                try:
                    router.outbound.send_rpc(_REQUEST, 0, SERVICE, router.outbound.new_ident(), body)
                except BusyError:
                    pass

    def _on_gone(self, router: Router, ident: int, ask: Ask, payload: memoryview) -> None:
        """Of a region of that peer's. What it says is not believed: the permits tell."""
        self._sweep(router)

    def _on_rail(self, router: Router, ident: int, ask: Ask, payload: memoryview) -> None:
        ticket = key_of(ask, payload)
        if not ticket:
            ticket = self._tickets.setdefault(router.index, secrets.token_bytes(16))
            self._ticket_of[ticket] = router
        elif ticket in self._ticket_of:
            self._main[router.index] = self._ticket_of[ticket]
        else:
            raise Refusal(Why.DENIED, "the ticket is not one of this owner's")
        self._reply(router, ident, ticket)

    def _on_list(self, router: Router, ident: int, ask: Ask, payload: memoryview) -> None:
        mine = [region.describe() for region in self.regions.values() if region.admits(router)]
        body = encode(mine)
        router.reply(ident, [memoryview(body)], len(body), service=SERVICE)

    def _on_watch(self, router: Router, ident: int, ask: Ask, payload: memoryview) -> None:
        """Events are replies to the same request, until it is cancelled."""
        self._check_waiting(router)
        self._watchers[router.index, ident] = router
        self._reply(router, ident, DONE)
        for region in self.regions.values():
            if region.admits(router):
                self._reply(router, ident, encode(Event("added", region.describe())))

    def _waiting(self) -> Iterator[tuple[int, int]]:
        """(router index, ident) of the requests that wait for regions."""
        yield from self._watchers
        for waiting in self._awaited.values():
            yield from waiting

    def _check_waiting(self, router: Router) -> None:
        if sum(index == router.index for index, _ in self._waiting()) >= MAX_WAITING:
            raise Refusal(Why.FULL, f"{MAX_WAITING} requests of this peer's wait there for regions already")

    def _forget(self, router: Router, ident: int) -> None:
        """Somebody waits, or watches, no longer."""
        self._watchers.pop((router.index, ident), None)
        for name, waiting in list(self._awaited.items()):
            if waiting.pop((router.index, ident), None) is not None and not waiting:
                del self._awaited[name]

    def _forget_peer(self, router: Router) -> None:
        index = router.index
        for key in [key for key in self._waiting() if key[0] == index]:
            self._forget(router, key[1])
        self._main.pop(index, None)
        self._ticket_of.pop(self._tickets.pop(index, b""), None)
        self._main = {rail: main for rail, main in self._main.items() if main is not router}


def key_of(ask: Ask, payload: memoryview) -> bytes:
    """The key or name that a request brings: owners keep it. Raises Refusal for one that is too long, or not all
    there."""
    key = bytes(payload[_HEAD : _HEAD + min(ask.key, KEY_LIMIT)])
    if len(key) != ask.key:
        raise Refusal(Why.INVALID, f"it names {ask.key} bytes of a key; at most {KEY_LIMIT}, and all of them, can be")
    return key


def _text(name: bytes) -> str:
    try:
        return str(name, "utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise Refusal(Why.INVALID, "a region's name is UTF-8") from None

"""Hub: what all conversations of one endpoint share. All methods need the engine's lock, unless they say that they
take it."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import DTypeLike

from rankmesh.buffers import BufferPool, RecyclingPool
from rankmesh.config import Config
from rankmesh.endpoint.loopback import Loopback
from rankmesh.endpoint.matching import ANY_SOURCE, Matcher
from rankmesh.endpoint.outbound import RPC
from rankmesh.endpoint.progress import Engine
from rankmesh.endpoint.requests import Awaiting
from rankmesh.endpoint.router import LOOKS, PeerRouter, Router
from rankmesh.endpoint.transfers import Landing, Message, Posted, Probe, Receive
from rankmesh.endpoint.work import Work
from rankmesh.errors import ClosedError, PeerLost
from rankmesh.transport.arena import Arena
from rankmesh.wire.header import Flag
from rankmesh.wire.messages import Control

if TYPE_CHECKING:
    from rankmesh.endpoint.incoming import Incoming
    from rankmesh.endpoint.peer import Peer

logger = logging.getLogger("rankmesh")

_OBJECT: Final = int(Flag.OBJECT)
#: Closed groups that are remembered, so that messages for them are told from those for groups still to be made. 200
#: bytes each. Nobody goes on sending in a group closed so many groups ago; what somebody sends all the same is kept.
MOST_CLOSED: Final = 16_384

#: A service handler: (router, ident, payload, owned). It runs on the thread that leads, with the lock, and must not
#: block; the payload is valid during the call only, unless it is owned. It answers by `router.reply(ident, …)`, now or
#: later.
Service = Callable[[Router, int, memoryview, bool], None]


class Agent(Protocol):
    """What stands on an endpoint and must learn of its peers' ends and of its own. The first three are called with the
    lock."""

    def needs(self, router: Router) -> bool:
        """Whether the connection must stay although it is quiet."""

    def peer_lost(self, router: Router) -> None: ...

    def closing(self) -> None:
        """The endpoint takes no more work."""

    def closed(self) -> None:
        """Everything has ended: free what is left. Without the lock."""


class Hub:
    """See the module's text. The endpoint sets `connect`, `on_lost` and `on_control`."""

    def __init__(self, name: str, config: Config) -> None:
        self.config = config
        self.engine = Engine(name, config.spin)
        self.matcher: Matcher[Receive, Message] = Matcher()
        self.routers: dict[int, Router] = {}
        self.probes: list[Probe] = []
        #: Memory of messages that came before their receive, used again: as much as one sender may have lying here.
        self.pool = BufferPool(config.peer_credit_bytes)
        self.arena: Arena = Arena(self._unshare)
        self.services: dict[int, Service] = {}
        #: The same, for requests that came alone: these may step down from the lead to run users' code.
        self.prompt_services: dict[int, Service] = {}
        self.agents: list[Agent] = []
        #: Replies that came for requests given up before.
        self.late_replies = 0
        #: Memory of large requests and replies, and of collectives, used again once nothing refers to it.
        self.large_pool = RecyclingPool(config.rpc_inflight_bytes)
        #: Members of each closed circle of peers, by index: a wildcard receive fails when none is left.
        self.members: dict[int, set[int]] = {}
        #: Groups that this side has closed, the oldest first: what comes for them goes nowhere.
        self.closed_groups: OrderedDict[int, None] = OrderedDict()
        self.closed = ""
        self.on_lost: Callable[[PeerRouter, bool], None] = lambda router, left: None
        self.on_control: Callable[[Peer, Control], None] = lambda peer, message: None
        self.want_link: Callable[[PeerRouter], None] = lambda router: None
        self.dial_trouble: Callable[[PeerRouter], str] = lambda router: ""
        #: A peer is gone and everything that needed it has failed: it may be forgotten.
        self.departed: Callable[[PeerRouter], None] = lambda router: None
        self._index = itertools.count()
        self._looked = monotonic()
        #: When this process last came back from not running, and how long it had been away.
        self._absence = (0.0, 0.0)
        self._rpc_bytes = 0
        self._rpc_waiting: deque[tuple[Incoming, tuple[int, ...]]] = deque()
        self._rpc_queued: Counter[Incoming] = Counter()

    def new_index(self) -> int:
        return next(self._index)

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike) -> np.ndarray[Any, Any]:
        """See Endpoint.empty. Small arrays travel eagerly and gain nothing. Without the lock."""
        with self.engine:  # also refuses a forked child, whose arrays would lie over the parent's
            self.check_open()
        kind = np.dtype(dtype)
        shape = tuple(shape) if isinstance(shape, Sequence) else (int(shape),)
        nbytes = kind.itemsize * math.prod(shape)
        if self.config.shm and nbytes > self.config.eager_bytes and not kind.hasobject:
            try:
                return self.arena.empty(shape, kind)
            except OSError as error:
                logger.warning("No shared memory for an array of %d bytes: %s.", nbytes, error.strerror or error)
        return np.empty(shape, kind)

    def _unshare(self, segment: int) -> None:
        """A segment of the arena is no more: peers that map it let go. Takes the lock."""
        with self.engine:
            for router in self.routers.values():
                if isinstance(router, PeerRouter):
                    router.outbound.unshare(segment)

    def check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"{self.closed} Nothing can be done with it any more.")

    def closed_error(self, op: str, tag: int | None) -> ClosedError:
        """For an operation that was under way when this side closed."""
        return ClosedError(f"{self.closed} The {op.split(maxsplit=1)[0]} under way ended with it.")

    # ------------------------------------------------------------------ receiving

    def take_receive(self, index: int, group: int, tag: int, flags: int) -> Receive | None:
        """The receive that an arriving message goes to."""
        receive = self.matcher.take_posted(group, index, tag)
        return None if receive is None else self.fitting(receive, index, group, tag, flags)

    def fitting(self, receive: Receive, index: int, group: int, tag: int, flags: int) -> Receive | None:
        """This receive, or the next that expects the message's kind: one that expects the other fails and leaves it."""
        found: Receive | None = receive
        while found is not None and found.wants_object != bool(flags & _OBJECT):
            found.fail(found.wrong_kind())
            found = self.matcher.take_posted(group, index, tag)
        return found

    def keep(self, message: Message) -> None:
        """No receive is posted for this message: it waits, and probes for it end. Nobody waits for one of a closed
        group."""
        if message.group in self.closed_groups:
            message.router.inbound.drop(message)
            return
        self.matcher.keep(message)
        if self.probes:
            for probe in [probe for probe in self.probes if probe.fits(message)]:
                self.probes.remove(probe)
                probe.found(message)

    def post(self, receive: Receive, again: bool = False) -> None:
        """Match a receive with what has arrived, or post it (`again`: at its old place)."""
        if self.closed and not again:
            self.check_open()
        source = receive.source
        message = self.matcher.peek(receive.group, source, receive.match_tag)
        if message is not None:
            if receive.wants_object != bool(message.flags & _OBJECT):
                receive.fail(receive.wrong_kind())
            else:
                self.matcher.discard(message)
                message.router.inbound.deliver(message, receive)
            return
        router = self.routers.get(source)
        if router is not None and router.link is not None and not router.gone:
            inbound = router.inbound
            if inbound.backlogged and inbound.serve(receive):
                return
            receive.hint = inbound.direct
        elif not self._may_come(receive):
            return
        if again:
            self.matcher.repost(receive)
        else:
            self.matcher.post(receive)

    def post_probe(self, probe: Probe) -> None:
        self.check_open()
        message = self.matcher.peek(probe.group, probe.source, probe.match_tag)
        if message is not None:
            probe.found(message)
        elif self._may_come(probe):
            self.probes.append(probe)

    def _may_come(self, posted: Posted) -> bool:
        """Whether a message can still come; if not, what was posted has failed."""
        if posted.source == ANY_SOURCE:
            if self._deserted(posted.group):
                posted.fail(self._nobody_left(posted))
            return not posted.finished
        router = self.routers.get(posted.source) or posted.peer.router  # which is forgotten when it is gone
        if isinstance(router, PeerRouter) and router.link is None and not router.gone:
            self.want_link(router)  # whoever waits for a peer must learn of its end
        if router.gone:
            posted.fail(router.lost_error(posted.op, posted.tag))
        return not posted.finished

    def close_group(self, group: int, reason: str) -> None:
        """Fail what waits in a group, drop what came for it, and drop from now on what comes."""
        self.closed_groups[group] = None
        if len(self.closed_groups) > MOST_CLOSED:
            self.closed_groups.popitem(last=False)
        self.members.pop(group, None)
        receives = self.matcher.posted(group=group)
        for receive in receives:
            self.matcher.unpost(receive)
        probes = [probe for probe in self.probes if probe.group == group]
        for probe in probes:
            self.probes.remove(probe)
        for posted in (*receives, *probes):
            posted.fail(ClosedError(reason))
        for message in self.matcher.unexpected():
            if message.group == group and self.matcher.discard(message):
                message.router.inbound.drop(message)

    def awaits(self, source: int) -> bool:
        """Whether a receive or a probe names `source`."""
        return bool(self.matcher.posted(source=source)) or any(probe.source == source for probe in self.probes)

    def waiting_for(self, source: int, group: int | None = None) -> list[Posted]:
        """Take out the receives and probes that name `source`, in order: they are about to fail."""
        receives = self.matcher.posted(source=source, group=group)
        for receive in receives:
            self.matcher.unpost(receive)
        probes = [probe for probe in self.probes if probe.source == source and group in (None, probe.group)]
        for probe in probes:
            self.probes.remove(probe)
        return [*receives, *probes]

    def _deserted(self, group: int) -> bool:
        members = self.members.get(group)
        return members is not None and all(self.routers[index].gone for index in members)

    def _nobody_left(self, posted: Posted) -> PeerLost:
        """Every member is lost; the error names the last of them."""
        members = (self.routers[index] for index in self.members[posted.group])
        last = max((router for router in members if isinstance(router, PeerRouter)), key=lambda router: router.lost_at)
        error = last.lost_error(posted.op, posted.tag)
        error.message = f"Nothing can come: every other member is lost. The last was {error.message}"
        return error

    def lost(self, router: PeerRouter, left: bool) -> None:
        """A peer is gone. Receives that name it are failed by its router; wildcards fail when nobody is left."""
        for group in self.members:
            if self._deserted(group):
                for posted in self.waiting_for(ANY_SOURCE, group):
                    posted.fail(self._nobody_left(posted))
        self.on_lost(router, left)

    def abandon(self) -> list[Work[Any] | Awaiting]:
        """The end: take out whatever still waits and belongs to no connection."""
        receives = self.matcher.posted()
        for receive in receives:
            self.matcher.unpost(receive)
        probes, self.probes = self.probes, []
        own = [work for router in self.routers.values() if isinstance(router, Loopback) for work in router.close()]
        return [*receives, *probes, *own]

    # ------------------------------------------------------------------ liveness

    def start_heartbeat(self) -> None:
        self.engine.call_at(monotonic() + self.config.heartbeat_interval / LOOKS, self._heartbeat)

    def _heartbeat(self) -> None:
        if self.closed:
            return
        now = monotonic()
        gap, self._looked = now - self._looked, now
        late = gap > self.config.heartbeat_timeout / 2
        if gap > self._too_long:
            self._absence = (now, gap)
            logger.warning("This process did not run for %.1f s; its peers may have given it up.", gap)
        for router in list(self.routers.values()):
            if isinstance(router, PeerRouter) and router.link is not None:
                if late:  # nobody was silent: nobody listened
                    router.last_heard = now
                router.heartbeat(now)
        self.start_heartbeat()

    @property
    def _too_long(self) -> float:
        return self.config.heartbeat_timeout - self.config.heartbeat_interval

    def absence(self, now: float) -> float:
        """Seconds for which this process did not run (stopped, swapped out, the GIL kept by one call) until just now,
        if so many that peers may have given it up; otherwise 0."""
        gap = now - self._looked
        if gap > self._too_long:
            return gap
        back, gap = self._absence
        return gap if now - back < self.config.heartbeat_timeout else 0.0

    # ------------------------------------------------------------------ RPC

    def rpc_announced(self, incoming: Incoming, header: tuple[int, ...]) -> None:
        """A large request or reply is granted when there is room for it, in the order of announcement."""
        self._rpc_waiting.append((incoming, header))
        self._rpc_queued[incoming] += 1
        self._grant_rpc()

    def rpc_waiting(self, incoming: Incoming) -> int:
        """Announcements of one connection that wait for room."""
        return self._rpc_queued.get(incoming, 0)

    def rpc_withdrawn(self, incoming: Incoming, ident: int | None = None) -> bool:
        """Forget an announcement that waits for room; all of a connection's when `ident` is None. False: there was
        none."""
        kept = [entry for entry in self._rpc_waiting if entry[0] is not incoming or ident not in (None, entry[1][5])]
        gone = len(self._rpc_waiting) - len(kept)
        if gone:
            self._rpc_waiting = deque(kept)
            self._rpc_left(incoming, gone)
        return gone > 0

    def _rpc_left(self, incoming: Incoming, count: int) -> None:
        self._rpc_queued[incoming] -= count
        if not self._rpc_queued[incoming]:
            del self._rpc_queued[incoming]

    def rpc_landed(self, landing: Landing) -> None:
        """A granted one ended, well or badly."""
        if landing.flags & RPC:
            self._rpc_bytes -= landing.nbytes
            self._grant_rpc()

    def _grant_rpc(self) -> None:
        while self._rpc_waiting:
            incoming, header = self._rpc_waiting[0]
            nbytes = header[7]
            if self._rpc_bytes and self._rpc_bytes + nbytes > self.config.rpc_inflight_bytes:
                return
            self._rpc_waiting.popleft()
            self._rpc_left(incoming, 1)
            if incoming.grant_rpc(header):
                self._rpc_bytes += nbytes

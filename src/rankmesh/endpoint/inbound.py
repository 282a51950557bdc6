"""The receiving half of a conversation: from readable bytes to matched messages. All methods need the engine's lock.

A frame's header decides where its payload goes, and the bytes go there: into the posted receive, into memory of our
own (no receive yet, a request, a reply), or nowhere. What does not fit is refused at the announcement or read past;
the stream stays in step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from rankmesh.buffers import BufferPool, fresh
from rankmesh.endpoint.direct import Direct, RingPath, SocketPath
from rankmesh.endpoint.frames import TURN_BYTES
from rankmesh.endpoint.incoming import Incoming
from rankmesh.endpoint.outbound import RPC, RPC_FLAG
from rankmesh.endpoint.posted import Posted, Scatter
from rankmesh.endpoint.transfers import Landing, Message, Receive
from rankmesh.errors import ProtocolError
from rankmesh.transport.base import ScatteringLink
from rankmesh.wire.credit import OVERHEAD, CreditIn
from rankmesh.wire.header import Kind, Limits
from rankmesh.wire.messages import decode_control
from rankmesh.wire.parser import Parser

if TYPE_CHECKING:
    from rankmesh.endpoint.router import PeerRouter
    from rankmesh.transport.base import Link, PolledLink

Header = tuple[int, ...]

#: What a frame counts for in a turn, in bytes: handling a small one takes far longer than reading it.
FRAME_COST: Final = 4096
#: Replies to others that a leader deals with after its own: each of them saves its caller a turn.
REPLIES: Final = 16
_REPLY: Final = int(Kind.REPLY)


class Inbound:
    """What comes from one peer."""

    def __init__(self, router: PeerRouter) -> None:
        self.router = router
        self._index = router.index
        self._hub = router.hub
        self._config = router.hub.config
        self._engine = router.engine
        self._matcher = router.hub.matcher
        self._members = router.hub.members
        self._link: Link | None = None
        #: Frames were read and not yet looked at; the router is in the engine's backlog.
        self.backlogged = False
        #: The next bytes begin a frame, at the start of the staging buffer: `direct` may read them.
        self.calm = False
        #: How pieces of transfers are received where that takes no parsing.
        self._bulk: Callable[[], int] | None = None
        #: The hot paths of the connection there is.
        self.direct: Direct | None = None
        self.incoming = Incoming(self)
        #: Messages that came over an earlier connection: their credit ended with it.
        self._unowed: set[Message] = set()
        #: What to do when the payload under way is complete, and the receive it belongs to, if any.
        self._then: Callable[[], None] | None = None
        self._landing: Landing | Posted | None = None
        self.frames = 0
        self.bytes = 0
        #: Set by traffic, cleared by the heartbeat.
        self.heard = False
        self._handlers: dict[int, Callable[[Header], None]] = {
            Kind.PING: self._on_ping,
            Kind.CREDIT: self._on_credit,
            Kind.CONTROL: self._on_control,
            Kind.GOODBYE: self._on_control,
            Kind.EAGER: self._on_eager,
            Kind.ANNOUNCE: self.incoming.on_announce,
            Kind.GRANT: self._on_grant,
            Kind.REFUSE: self._on_refuse,
            Kind.WITHDRAW: self.incoming.on_withdraw,
            Kind.DATA: self.incoming.on_data,
            Kind.ABORT: self.incoming.on_abort,
            Kind.REQUEST: self._on_rpc,
            Kind.REPLY: self._on_rpc,
        }

    def attach(self, link: Link, polled: PolledLink | None) -> None:
        config = self._config
        limits = Limits(config.eager_bytes, config.max_message_bytes, config.max_rpc_bytes)
        self._link = link
        self.incoming.attach(polled)
        self.router.arrivals.recvmsg = link.recvmsg_into if isinstance(link, ScatteringLink) else None
        self.backlogged = False
        self._recv = link.recv_into
        self._drained = link.drained_on_short_read
        self._parser = Parser(limits.payloads())
        self._credit = credit = CreditIn(config.lane_credit_bytes, config.peer_credit_bytes)
        if polled is not None and polled.reader is not None:
            self.direct = path = RingPath(self, polled, polled.reader, credit, config.eager_bytes)
            self._bulk = path.read_bulk
        else:
            self._bulk = None
            self.direct = SocketPath(self, link, self._parser, credit, config.eager_bytes)
        self.calm = True
        self.heard = True

    def detach(self) -> list[Receive]:
        """Forget what was under way; the receives that waited for its bytes are returned."""
        if self._link is not None:
            self._parser.divert()  # it would refer to their memory as long as the peer is known
        self._link = None
        self.settle()
        self._engine.forget(self.direct)
        self.direct = None
        self.calm = False
        self._then = None
        under_way = (self._landing, *self.incoming.detach())
        landings = {id(landing): landing for landing in under_way if isinstance(landing, Landing)}
        self._landing = None
        self._unowed.update(message for message in self._matcher.unexpected() if message.router is self.router)
        for landing in landings.values():
            self._hub.rpc_landed(landing)
        return [landing.receive for landing in landings.values() if landing.receive is not None]

    @property
    def expects_more(self) -> bool:
        """Further frames came with the one that is being handled: what answers it may wait for the rest."""
        return self._parser.buffered

    @property
    def idle(self) -> bool:
        """Nothing of this peer's is under way or lies unreceived."""
        unreceived = self._link is not None and self._credit.outstanding != self._credit.total_owed
        return self.incoming.idle and not unreceived

    def settle(self) -> None:
        """Account for all messages that came: the hot paths do so for several at once."""
        if self.direct is not None:
            self.direct.settle()

    # ------------------------------------------------------------------ reading

    def read(self, got: int | None = None) -> None:
        """Read what is there, up to a turn; `got` bytes are in the staging buffer already. Raises ProtocolError."""
        self.calm = False
        self._read(got)
        self.calm = self._link is not None and not self.backlogged and self._parser.at_rest()

    def _read(self, got: int | None) -> None:
        parser, bulk, budget = self._parser, self._bulk, TURN_BYTES
        if self.backlogged:
            self.resume()
        while self._link is not None and not self.backlogged:
            cost = bulk() if bulk is not None and got is None and parser.at_boundary() else 0
            cost = cost or self._read_once(parser, got)
            if not cost:
                return
            got = None
            budget -= cost
            if budget <= 0:
                if not self._drained and self.router not in self._engine.backlog:
                    self._engine.backlog.append(self.router)  # nothing may show that there is more to read
                return

    def _read_once(self, parser: Parser, got: int | None) -> int:
        """Read, and handle what came. What that counts for in the turn; 0: there is no more now."""
        target = parser.target()
        if got is None:
            try:
                got = self._recv(target) if isinstance(target, memoryview) else target.receive()
            except BlockingIOError:
                return 0
            except OSError as error:
                self.router.broken(error)
                return 0
        if not got:
            self.router.ended(parser.at_boundary())
            return 0
        self.heard = True
        frames = self.frames
        header = parser.feed(got)
        if header is not None:
            self._parse(header)
        elif self._then is not None and not parser.pending:
            then, self._then, self._landing = self._then, None, None
            then()
        if got < target.nbytes and self._drained:
            return 0
        return got + FRAME_COST * (self.frames - frames)

    def serve(self, receive: Receive) -> bool:
        """Give a receive the next frame that waits here, if it is just what it asks for: no matching, no driving. A
        stream of small messages is received this way. False: nothing happened."""
        view, group, tag = receive.view, receive.group, receive.match_tag
        if view is None or receive.wants_object or not self._matcher.free(group, self._index, tag):
            return False
        if not self.take_staged(group, tag, view):
            return False
        receive.arrived(self._index, tag, len(view))
        return True

    def take_staged(self, group: int, tag: int, view: memoryview) -> bool:
        """Put the next frame that was read and not looked at into `view`, if it is just what belongs there."""
        parser = self._parser
        if not parser.take_eager(group, tag, view):
            return False
        self.frames += 1
        self.bytes += len(view)
        if self._credit.passed((group, tag), len(view) + OVERHEAD):
            self.pay()
        if not parser.buffered:
            self.backlogged = False
            self.calm = self._link is not None and parser.at_rest()
        return True

    def stage(self, got: int) -> None:
        """So many bytes were read into the staging buffer, and are more than one frame: they wait to be looked at."""
        self.heard = True
        self.calm = False
        self._parser.target()  # which says that they begin the buffer
        self._parser.received(got)
        self.backlogged = True
        self._engine.backlog.append(self.router)

    def resume(self) -> None:
        """Go on with frames that were read but not yet looked at, or with bytes that the link holds and does not show
        (TLS). Raises ProtocolError."""
        if self.backlogged:
            self.backlogged = False
            self._parse(self._parser.next_header())
            self.calm = self._link is not None and not self.backlogged and self._parser.at_rest()
        if not self._drained and self._link is not None and not self.backlogged:
            self.read()

    def _parse(self, header: Header | None) -> None:
        """Handle the frames that are here, until the leader has what it waits for. Replies are often many."""
        parser, handlers, engine, replies = self._parser, self._handlers, self._engine, REPLIES
        leader = engine.leader
        if leader is not None and leader.yields:  # it is there for everything that comes
            leader = None
        while header is not None:
            self.frames += 1
            handlers[header[1]](header)
            if parser.pending or self._link is None:
                return
            if leader is not None and leader.finished and (header[1] != _REPLY or not (replies := replies - 1)):
                if parser.buffered:  # the rest can wait: the next waiter, or the background thread, goes on with it
                    self.backlogged = True
                    engine.backlog.append(self.router)
                return
            header = parser.next_header()

    def with_payload(self, header: Header, then: Callable[[Header, memoryview], None]) -> None:
        """Call `then` once the payload is here, in the staging buffer or in memory of its own."""
        payload = self._parser.take()
        if payload is not None:
            then(header, payload)
        else:
            view = fresh(header[6])
            self._parser.into(view)
            self._then = functools.partial(then, header, view)

    def land(self, landing: Landing | Posted, view: memoryview | Scatter | None, then: Callable[[], None]) -> None:
        """Put the payload where it belongs, or nowhere, and call `then` once it is there."""
        if self._parser.drop() if view is None else self._parser.into(view):
            then()
        else:
            self._landing = landing
            self._then = then

    def no_more_data(self) -> None:
        """No transfer is under way: what comes next is something small."""
        self._parser.forget()

    def divert(self, landing: Landing | Posted) -> None:
        """If `landing`'s bytes are being received, the rest goes nowhere."""
        if self._landing is landing:
            self._parser.divert()

    # ------------------------------------------------------------------ control

    def _on_ping(self, header: Header) -> None:
        self.frames -= 1  # a heartbeat is not traffic
        self._parser.drop()

    def _on_credit(self, header: Header) -> None:
        self.frames -= 1
        self.with_payload(header, lambda _, payload: self.router.outbound.on_credit(payload))

    def _on_control(self, header: Header) -> None:
        self.with_payload(header, lambda _, payload: self.router.on_control(decode_control(payload)))

    def _on_grant(self, header: Header) -> None:
        self.router.outbound.on_grant(header[5])

    def _on_refuse(self, header: Header) -> None:
        self.router.outbound.on_refuse(header[5])

    # ------------------------------------------------------------------ eager messages

    def _on_eager(self, header: Header) -> None:
        _, _, flags, group, tag, _, nbytes, _ = header
        self.bytes += nbytes
        index = self._index
        receive = self._matcher.take_posted(group, index, tag)
        if (receive is None or receive.source != index) and index not in self._members.get(group, (index,)):
            raise self.intruder(group)
        if receive is not None:
            view = receive.view
            if view is not None and view.nbytes == nbytes and not flags and not receive.wants_object:
                if self._parser.into(view):  # the common case, with as few steps as possible
                    if self._credit.passed((group, tag), nbytes + OVERHEAD):
                        self.pay()
                    receive.arrived(index, tag, nbytes)
                    return
                self._credit.arrived(nbytes + OVERHEAD)
                self._land(receive, group, tag, nbytes)
                return
            receive = self._hub.fitting(receive, self._index, group, tag, flags)
        self._credit.arrived(nbytes + OVERHEAD)
        if receive is None:
            view = self._room(nbytes, flags)
            if self._parser.into(view):
                self._hub.keep(Message(self.router, group, tag, flags, nbytes, view))
            else:
                self._then = functools.partial(self._late_eager, group, tag, flags, view)
        elif receive.truncates(nbytes):
            self._consumed(group, tag, nbytes)
            self._parser.drop()
        elif self._parser.into(receive.place(nbytes)):
            self._consumed(group, tag, nbytes)
            receive.arrived(self.router.index, tag, nbytes)
        else:
            self._land(receive, group, tag, nbytes)

    def _room(self, nbytes: int, flags: int) -> memoryview:
        """Memory for a message without a receive: from the pool, unless it is small, or an object, which keeps it."""
        if flags or nbytes < BufferPool.SMALLEST:
            return fresh(nbytes)
        return memoryview(self._hub.pool.take(nbytes))[:nbytes]

    def intruder(self, group: int) -> ProtocolError:
        return ProtocolError(f"a message for group {group}, of which it is no member", reason="not a member")

    def _land(self, receive: Receive, group: int, tag: int, nbytes: int) -> None:
        """The rest of an eager message is still to come."""
        self._landing = landing = Landing(self.incoming, receive, nbytes, group, tag, 0)
        receive.matched(landing)
        self._then = functools.partial(self._eager_landed, landing)

    def _eager_landed(self, landing: Landing) -> None:
        self._consumed(landing.group, landing.tag, landing.nbytes)
        if landing.receive is not None:
            landing.receive.arrived(self.router.index, landing.tag, landing.nbytes)

    def _late_eager(self, group: int, tag: int, flags: int, view: memoryview) -> None:
        """A message that came piece by piece without a receive: one may have been posted meanwhile."""
        message = Message(self.router, group, tag, flags, view.nbytes, view)
        receive = self._hub.take_receive(self.router.index, group, tag, flags)
        if receive is None:
            self._hub.keep(message)
        else:
            self.deliver(message, receive)

    def _consumed(self, group: int, tag: int, nbytes: int) -> None:
        """An eager message is where it belongs: its credit goes back, in batches."""
        if self._link is not None and self._credit.consumed((group, tag), nbytes + OVERHEAD):
            self.pay()

    def pay(self) -> None:
        if self._link is None:
            return  # the credit ended with its connection
        for payload in self._credit.pay():
            self.router.outbound.payload(Kind.CREDIT, payload)

    # ------------------------------------------------------------------ messages that waited

    def deliver(self, message: Message, receive: Receive) -> None:
        """Give a message that was kept to a receive posted now."""
        nbytes = message.nbytes
        if message.payload is None:
            self.incoming.deliver(message, receive)
            return
        if not receive.truncates(nbytes):
            if receive.view is None:
                receive.view = message.payload
            elif nbytes:
                receive.view[:nbytes] = message.payload
                self._recycle(message.payload)
            receive.arrived(self.router.index, message.match_tag, nbytes)
        self._left(message)

    def drop(self, message: Message) -> None:
        """Nobody will receive a message that does not wait (any more): its credit goes back, or it is refused."""
        if message.payload is None:
            self.incoming.refuse(message)
        else:
            self._recycle(message.payload)
            self._left(message)

    def _recycle(self, payload: memoryview) -> None:
        """Memory that a message waited in may be used for the next."""
        if isinstance(payload.obj, bytearray):
            self._hub.pool.give(payload.obj)

    def _left(self, message: Message) -> None:
        """A message that was kept has left the queue."""
        if message in self._unowed:
            self._unowed.remove(message)
        else:
            self._consumed(message.group, message.match_tag, message.nbytes)

    # ------------------------------------------------------------------ RPC

    def _on_rpc(self, header: Header) -> None:
        self.with_payload(header, self._rpc_here)

    def _rpc_here(self, header: Header, payload: memoryview) -> None:
        self.bytes += payload.nbytes
        self.router.on_rpc(header[2] & ~RPC | RPC_FLAG[header[1]], header[3], header[4], payload, False)

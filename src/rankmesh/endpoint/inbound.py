"""The receiving half of a conversation: from readable bytes to matched messages. All methods need the engine's lock.

A frame's header decides where its payload goes, and the bytes go there: into the posted receive, into memory of our
own (no receive yet, a request, a reply), or nowhere. What does not fit is refused at the announcement or read past;
the stream stays in step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from rankmesh.buffers import BufferPool, fresh
from rankmesh.endpoint.outbound import MAX_ANNOUNCED, RPC, TURN_BYTES
from rankmesh.endpoint.transfers import Landing, Message, Receive
from rankmesh.errors import ProtocolError, TransferAborted
from rankmesh.wire.credit import OVERHEAD, CreditIn
from rankmesh.wire.header import HEADER, HEADER_BYTES, VERSION, Flag, Kind, Limits
from rankmesh.wire.messages import decode_control
from rankmesh.wire.parser import Parser

if TYPE_CHECKING:
    from rankmesh.endpoint.router import PeerRouter
    from rankmesh.transport.base import Link

Header = tuple[int, ...]

_unpack_from = HEADER.unpack_from
_EAGER: Final = int(Kind.EAGER)
_RPC_FLAG: Final = {int(Kind.REQUEST): int(Flag.REQUEST), int(Kind.REPLY): int(Flag.REPLY)}

#: What a frame counts for in a turn, in bytes: handling a small one takes far longer than reading it.
FRAME_COST: Final = 4096
#: Replies to others that a leader deals with after its own: each of them saves its caller a turn.
REPLIES: Final = 16
_REPLY: Final = int(Kind.REPLY)


class Inbound:
    """What comes from one peer."""

    def __init__(self, router: PeerRouter) -> None:
        self._router = router
        self._index = router.index
        self._hub = router.hub
        self._config = router.hub.config
        self._engine = router.engine
        self._matcher = router.hub.matcher
        self._members = router.hub.members
        self._link: Link | None = None
        #: Frames were read and not yet looked at; the router is in the engine's backlog.
        self.backlogged = False
        #: The next bytes begin a frame, at the start of the staging buffer: `read_one()` may read them.
        self.calm = False
        self._incoming: dict[int, Landing] = {}
        self._announced: dict[int, Message] = {}
        #: Messages that came over an earlier connection: their credit ended with it.
        self._unowed: set[Message] = set()
        #: What to do when the payload under way is complete, and the receive it belongs to, if any.
        self._then: Callable[[], None] | None = None
        self._landing: Landing | None = None
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
            Kind.ANNOUNCE: self._on_announce,
            Kind.GRANT: self._on_grant,
            Kind.REFUSE: self._on_refuse,
            Kind.WITHDRAW: self._on_withdraw,
            Kind.DATA: self._on_data,
            Kind.ABORT: self._on_abort,
            Kind.REQUEST: functools.partial(self._with_payload, then=self._rpc_here),
            Kind.REPLY: functools.partial(self._with_payload, then=self._rpc_here),
        }

    def attach(self, link: Link) -> None:
        config = self._config
        limits = Limits(config.eager_bytes, config.max_message_bytes, config.max_rpc_bytes)
        self._link = link
        self.backlogged = False
        self._recv = link.recv_into
        self._drained = link.drained_on_short_read
        self._parser = Parser(limits.payloads())
        self._staging = self._parser.staging
        self._eager_limit = config.eager_bytes
        self._rpc_limit = HEADER_BYTES + config.eager_bytes
        self.calm = True
        self._credit = CreditIn(config.lane_credit_bytes, config.peer_credit_bytes)
        self.heard = True

    def detach(self) -> list[Receive]:
        """Forget what was under way; the receives that waited for its bytes are returned."""
        self._link = None
        self._then = None
        landings = {
            id(landing): landing for landing in (self._landing, *self._incoming.values()) if landing is not None
        }
        self._landing = None
        self._incoming.clear()
        for message in self._announced.values():
            self._matcher.discard(message)
        self._announced.clear()
        self._unowed.update(message for message in self._matcher.unexpected() if message.router is self._router)
        self._hub.rpc_withdrawn(self)
        for landing in landings.values():
            self._hub.rpc_landed(landing)
        return [landing.receive for landing in landings.values() if landing.receive is not None]

    @property
    def idle(self) -> bool:
        """Nothing of this peer's is under way or lies unreceived."""
        unreceived = self._link is not None and self._credit.outstanding != self._credit.total_owed
        return not (self._incoming or self._announced or unreceived)

    # ------------------------------------------------------------------ reading

    def read_one(self) -> None:
        """The hot path: exactly one small message, for a receive that waits for just that. Everything else goes the
        general way, with what was read. Called only while `calm`; deals with errors itself."""
        staging = self._staging
        try:
            got = self._recv(staging)
            if got > HEADER_BYTES:
                version, kind, flags, group, tag, _, nbytes, _ = _unpack_from(staging)
                if got == HEADER_BYTES + nbytes and kind == _EAGER and not flags and version == VERSION:
                    receive = self._matcher.take_lone(group, self._index, tag)
                    if receive is not None:
                        view = receive.view
                        if view is not None and len(view) == nbytes <= self._eager_limit and not receive.wants_object:
                            view[:] = staging[HEADER_BYTES:got]
                            self.heard = True
                            self.frames += 1
                            self.bytes += nbytes
                            if self._credit.passed((group, tag), nbytes + OVERHEAD):
                                self._pay()
                            receive.arrived(self._index, tag, nbytes)
                            return
                        self._matcher.repost(receive)
                elif kind in _RPC_FLAG and got == HEADER_BYTES + nbytes <= self._rpc_limit and version == VERSION:
                    self.heard = True
                    self.frames += 1
                    self.bytes += nbytes
                    self._router.on_lone_rpc(flags & ~RPC | _RPC_FLAG[kind], group, tag, staging[HEADER_BYTES:got])
                    return
            self.read(got)
        except BlockingIOError:
            return
        except OSError as error:
            self._router.broken(error)
        except Exception as error:  # noqa: BLE001  # see PeerRouter.failed
            self._router.failed(error)

    def read(self, got: int | None = None) -> None:
        """Read what is there, up to a turn; `got` bytes are in the staging buffer already. Raises ProtocolError."""
        self.calm = False
        self._read(got)
        self.calm = self._link is not None and not self.backlogged and self._parser.at_rest()

    def _read(self, got: int | None) -> None:
        parser = self._parser
        budget = TURN_BYTES
        if self.backlogged:
            self.resume()
        while self._link is not None and not self.backlogged:
            target = parser.target()
            if got is None:
                try:
                    got = self._recv(target)
                except BlockingIOError:
                    return
                except OSError as error:
                    self._router.broken(error)
                    return
            if not got:
                self._router.ended(parser.at_boundary())
                return
            self.heard = True
            frames = self.frames
            header = parser.feed(got)
            if header is not None:
                self._parse(header)
            elif self._then is not None and not parser.pending:
                then, self._then, self._landing = self._then, None, None
                then()
            if got < len(target) and self._drained:
                return
            budget -= got + FRAME_COST * (self.frames - frames)
            got = None
            if budget <= 0:
                if not self._drained:
                    self._engine.backlog.append(self._router)  # nothing may show that there is more to read
                return

    def serve(self, receive: Receive) -> bool:
        """Give a receive the next frame that waits here, if it is just what it asks for: no matching, no driving. A
        stream of small messages is received this way. False: nothing happened."""
        view, group, tag = receive.view, receive.group, receive.match_tag
        if view is None or receive.wants_object or not self._matcher.free(group, self._index, tag):
            return False
        if not self._parser.take_eager(group, tag, view):
            return False
        self.frames += 1
        self.bytes += len(view)
        if self._credit.passed((group, tag), len(view) + OVERHEAD):
            self._pay()
        receive.arrived(self._index, tag, len(view))
        if not self._parser.buffered:
            self.backlogged = False
            self.calm = self._link is not None and self._parser.at_rest()
        return True

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
        leader: Any = engine.leader
        while header is not None:
            self.frames += 1
            handlers[header[1]](header)
            if parser.pending or self._link is None:
                return
            if leader is not None and leader.finished and (header[1] != _REPLY or not (replies := replies - 1)):
                if parser.buffered:  # the rest can wait: the next waiter, or the background thread, goes on with it
                    self.backlogged = True
                    engine.backlog.append(self._router)
                return
            header = parser.next_header()

    def _with_payload(self, header: Header, then: Callable[[Header, memoryview], None]) -> None:
        """Call `then` once the payload is here, in the staging buffer or in memory of its own."""
        payload = self._parser.take()
        if payload is not None:
            then(header, payload)
        else:
            view = fresh(header[6])
            self._parser.into(view)
            self._then = functools.partial(then, header, view)

    # ------------------------------------------------------------------ control

    def _on_ping(self, header: Header) -> None:
        self.frames -= 1  # a heartbeat is not traffic
        self._parser.drop()

    def _on_credit(self, header: Header) -> None:
        self.frames -= 1
        self._with_payload(header, lambda _, payload: self._router.outbound.on_credit(payload))

    def _on_control(self, header: Header) -> None:
        self._with_payload(header, lambda _, payload: self._router.on_control(decode_control(payload)))

    def _on_grant(self, header: Header) -> None:
        self._router.outbound.on_grant(header[5])

    def _on_refuse(self, header: Header) -> None:
        self._router.outbound.on_refuse(header[5])

    # ------------------------------------------------------------------ eager messages

    def _on_eager(self, header: Header) -> None:
        _, _, flags, group, tag, _, nbytes, _ = header
        self.bytes += nbytes
        index = self._index
        receive = self._matcher.take_posted(group, index, tag)
        if (receive is None or receive.source != index) and index not in self._members.get(group, (index,)):
            raise self._intruder(group)
        if receive is not None:
            view = receive.view
            if view is not None and view.nbytes == nbytes and not flags and not receive.wants_object:
                if self._parser.into(view):  # the common case, with as few steps as possible
                    if self._credit.passed((group, tag), nbytes + OVERHEAD):
                        self._pay()
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
                self._hub.keep(Message(self._router, group, tag, flags, nbytes, view))
            else:
                self._then = functools.partial(self._late_eager, group, tag, flags, view)
        elif receive.truncates(nbytes):
            self._consumed(group, tag, nbytes)
            self._parser.drop()
        elif self._parser.into(receive.place(nbytes)):
            self._consumed(group, tag, nbytes)
            receive.arrived(self._router.index, tag, nbytes)
        else:
            self._land(receive, group, tag, nbytes)

    def _room(self, nbytes: int, flags: int) -> memoryview:
        """Memory for a message without a receive: from the pool, unless it is small, or an object, which keeps it."""
        if flags or nbytes < BufferPool.SMALLEST:
            return fresh(nbytes)
        return memoryview(self._hub.pool.take(nbytes))[:nbytes]

    def _intruder(self, group: int) -> ProtocolError:
        return ProtocolError(f"a message for group {group}, of which it is no member", reason="not a member")

    def _land(self, receive: Receive, group: int, tag: int, nbytes: int) -> None:
        """The rest of an eager message is still to come."""
        self._landing = landing = Landing(self, receive, nbytes, group, tag, 0)
        receive.matched(landing)
        self._then = functools.partial(self._eager_landed, landing)

    def _eager_landed(self, landing: Landing) -> None:
        self._consumed(landing.group, landing.tag, landing.nbytes)
        if landing.receive is not None:
            landing.receive.arrived(self._router.index, landing.tag, landing.nbytes)

    def _late_eager(self, group: int, tag: int, flags: int, view: memoryview) -> None:
        """A message that came piece by piece without a receive: one may have been posted meanwhile."""
        message = Message(self._router, group, tag, flags, view.nbytes, view)
        receive = self._hub.take_receive(self._router.index, group, tag, flags)
        if receive is None:
            self._hub.keep(message)
        else:
            self.deliver(message, receive)

    def _consumed(self, group: int, tag: int, nbytes: int) -> None:
        """An eager message is where it belongs: its credit goes back, in batches."""
        if self._link is not None and self._credit.consumed((group, tag), nbytes + OVERHEAD):
            self._pay()

    def _pay(self) -> None:
        for payload in self._credit.pay():
            self._router.outbound.payload(Kind.CREDIT, payload)

    # ------------------------------------------------------------------ messages that waited

    def deliver(self, message: Message, receive: Receive) -> None:
        """Give a message that was kept to a receive posted now."""
        nbytes = message.nbytes
        if message.payload is None:
            del self._announced[message.ident]
            self._grant(receive, message.group, message.match_tag, nbytes, message.ident)
            return
        if not receive.truncates(nbytes):
            if receive.view is None:
                receive.view = message.payload
            elif nbytes:
                receive.view[:nbytes] = message.payload
                if isinstance(message.payload.obj, bytearray):
                    self._hub.pool.give(message.payload.obj)
            receive.arrived(self._router.index, message.match_tag, nbytes)
        if message in self._unowed:
            self._unowed.remove(message)
        else:
            self._consumed(message.group, message.match_tag, nbytes)

    # ------------------------------------------------------------------ announced transfers

    def _on_announce(self, header: Header) -> None:
        _, _, flags, group, tag, ident, _, nbytes = header
        limit = self._config.max_rpc_bytes if flags & RPC else self._config.max_message_bytes
        if nbytes > limit:
            raise ProtocolError(
                f"a transfer of {nbytes} bytes was announced, over the limit of {limit}", reason="transfer too large"
            )
        if flags & RPC and not nbytes:
            raise ProtocolError("an empty request or reply was announced", reason="empty transfer")
        if ident in self._announced or ident in self._incoming:
            raise ProtocolError(f"transfer {ident} was announced twice", reason="transfer announced twice")
        if len(self._announced) + len(self._incoming) + self._hub.rpc_waiting(self) >= MAX_ANNOUNCED:
            raise ProtocolError(f"more than {MAX_ANNOUNCED} transfers announced", reason="too many announcements")
        if flags & RPC:
            self._hub.rpc_announced(self, header)
            return
        if group in self._members and self._index not in self._members[group]:
            raise self._intruder(group)
        receive = self._hub.take_receive(self._router.index, group, tag, flags)
        if receive is not None:
            self._grant(receive, group, tag, nbytes, ident)
            return
        message = Message(self._router, group, tag, flags, nbytes, None, ident)
        self._announced[ident] = message
        self._hub.keep(message)

    def _grant(self, receive: Receive, group: int, tag: int, nbytes: int, ident: int) -> None:
        if receive.truncates(nbytes):
            self._router.outbound.control(Kind.REFUSE, ident)
            return
        receive.place(nbytes)
        landing = Landing(self, receive, nbytes, group, tag, ident)
        receive.matched(landing)
        self._router.outbound.control(Kind.GRANT, ident)
        if nbytes:
            self._incoming[ident] = landing
        else:
            self._complete(landing)

    def grant_rpc(self, header: Header) -> bool:
        """There is room for a large request or reply: take it. False: the connection it was announced on is gone."""
        _, _, flags, group, tag, ident, _, nbytes = header
        if self._link is None:
            return False
        self._incoming[ident] = Landing(self, None, nbytes, group, tag, ident, flags, self._hub.rpc_pool.take(nbytes))
        self._router.outbound.control(Kind.GRANT, ident)
        return True

    def _on_data(self, header: Header) -> None:
        ident, nbytes, offset = header[5], header[6], header[7]
        landing = self._incoming.get(ident)
        if landing is None:
            raise ProtocolError(f"data of transfer {ident}, which was not granted", reason="unknown transfer")
        if not nbytes or offset != landing.got or offset + nbytes > landing.nbytes:
            raise ProtocolError(
                f"piece {offset}+{nbytes} of transfer {ident} ({landing.got} of {landing.nbytes} so far)",
                reason="bad piece",
            )
        view = landing.view
        done = self._parser.drop() if view is None else self._parser.into(view[offset : offset + nbytes])
        if done:
            self._piece_landed(landing, nbytes)
        else:
            self._landing = landing
            self._then = functools.partial(self._piece_landed, landing, nbytes)

    def _piece_landed(self, landing: Landing, nbytes: int) -> None:
        landing.got += nbytes
        self.bytes += nbytes
        if landing.got == landing.nbytes:
            del self._incoming[landing.ident]
            self._complete(landing)

    def _complete(self, landing: Landing) -> None:
        if landing.flags & RPC:
            self._hub.rpc_landed(landing)
            if landing.view is not None:
                self._router.on_rpc(landing.flags, landing.group, landing.tag, landing.view, True)
        elif landing.receive is not None:
            landing.receive.arrived(self._router.index, landing.tag, landing.nbytes)

    def detach_landing(self, landing: Landing) -> None:
        """A receive under way was given up: its bytes go nowhere, and the sender may stop."""
        if self._landing is landing:
            self._parser.divert()
        if landing.ident in self._incoming:
            self._router.outbound.control(Kind.REFUSE, landing.ident)

    def _on_withdraw(self, header: Header) -> None:
        """The sender takes its announcement back. One that was granted meanwhile leaves its receive as if it had
        never come."""
        ident = header[5]
        message = self._announced.pop(ident, None)
        if message is not None:
            self._matcher.discard(message)
        if message is not None or self._hub.rpc_withdrawn(self, ident):
            self._router.outbound.control(Kind.REFUSE, ident)
            return
        landing = self._incoming.pop(ident, None)
        if landing is not None:
            self._hub.rpc_landed(landing)
            if landing.receive is not None:
                landing.receive.unmatched()
                self._hub.post(landing.receive, again=True)

    def _on_abort(self, header: Header) -> None:
        landing = self._incoming.pop(header[5], None)
        if landing is None:
            return  # refused here while its last byte was on its way
        self._hub.rpc_landed(landing)
        if landing.receive is not None:
            peer = self._router.peer
            landing.receive.fail(
                TransferAborted(
                    f"{peer} gave up in the middle of the message for {landing.receive.describe()}, after "
                    f"{landing.got} of {landing.nbytes} bytes.",
                    **peer.attributes(),
                    op=landing.receive.op,
                    tag=landing.tag,
                    reason="the sender gave up",
                )
            )

    # ------------------------------------------------------------------ RPC

    def _rpc_here(self, header: Header, payload: memoryview) -> None:
        self.bytes += payload.nbytes
        self._router.on_rpc(header[2] & ~RPC | _RPC_FLAG[header[1]], header[3], header[4], payload, False)

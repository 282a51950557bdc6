"""Messages to oneself: matched like all others, copied once, bounded like all others. All methods need the engine's
lock.

Small messages without a receive are copied and kept, up to the credit of any peer; beyond that, and for large ones,
the send waits for its receive, and the bytes go straight from one buffer to the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankmesh.buffers import readable
from rankmesh.endpoint.lanes import Lane, Transfer
from rankmesh.endpoint.outbound import RPC
from rankmesh.endpoint.posted import Arrivals, Posted
from rankmesh.endpoint.requests import Awaiting, Conversation
from rankmesh.endpoint.shortcut import Carrier
from rankmesh.endpoint.transfers import Message, Receive, Send, SendState
from rankmesh.errors import PeerLost, UsageError
from rankmesh.wire.credit import OVERHEAD
from rankmesh.wire.header import DATA_LIMIT, Flag, Kind

if TYPE_CHECKING:
    from rankmesh.endpoint.hub import Hub
    from rankmesh.endpoint.peer import Peer


class Loopback(Conversation):
    """The router of this endpoint's messages to itself; it is both its own outbound and inbound half."""

    #: There is no connection to look at.
    direct = None
    polled = None
    cells = None
    carrier = Carrier("self", "this process")
    #: Nothing is joined: it is copied once.
    join_below = 0

    def __init__(self, hub: Hub, peer: Peer, index: int) -> None:
        super().__init__()
        self.hub = hub
        self.engine = hub.engine
        self.peer = peer
        self.index = index
        self.gone = ""
        self.link = None
        self.outbound = self
        self.inbound = self
        self.rpc_bytes = 0
        self.blocked = False
        self.last_ident = 0
        self._kept = 0
        self._sends: dict[Message, Send] = {}
        self.arrivals = Arrivals()

    def send_buffer(self, group: int, tag: int, data: Any, timeout: float | None) -> None:
        """Takes the lock. Like a peer's: returns when the buffer may be reused."""
        view = readable(data)
        timeout = self.hub.config.timeout if timeout is None else timeout
        self.send(group, tag, 0, [view], view.nbytes, timeout).result()

    def send(self, group: int, tag: int, flags: int, parts: list[memoryview], nbytes: int, timeout: float) -> Send:
        """Takes the lock. What was delivered or kept is finished at once."""
        with self.engine:
            self.hub.check_open()
            send = Send(self, "send to", group, tag, flags, parts, nbytes, timeout)
            receive = self.hub.take_receive(self.index, group, tag, flags)
            if receive is not None:
                if not receive.truncates(nbytes):
                    _gather(parts, receive.place(nbytes))
                    receive.arrived(self.index, tag, nbytes)
                send.finish(None)
                return send
            config = self.hub.config
            cost = nbytes + OVERHEAD
            if nbytes <= config.eager_bytes and self._kept + cost <= config.peer_credit_bytes:
                self._kept += cost
                self.hub.keep(Message(self, group, tag, flags, nbytes, memoryview(b"".join(parts))))
                send.finish(None)
                return send
            send.state = SendState.ANNOUNCED
            message = Message(self, group, tag, flags, nbytes, None)
            self._sends[message] = send
            self.hub.keep(message)
            return send

    def deliver(self, message: Message, receive: Receive) -> None:
        """Give a message that was kept to a receive posted now."""
        send = self._sends.pop(message, None)
        parts = send.parts if send is not None else [message.payload or memoryview(b"")]
        if not receive.truncates(message.nbytes):
            _gather(parts, receive.place(message.nbytes))
            receive.arrived(self.index, message.match_tag, message.nbytes)
        if send is not None:
            send.finish(None)
        else:
            self._kept -= message.nbytes + OVERHEAD

    def drop(self, message: Message) -> None:
        """Nobody will receive a message that does not wait (any more)."""
        send = self._sends.pop(message, None)
        if send is not None:
            send.finish(None)
        else:
            self._kept -= message.nbytes + OVERHEAD

    def withdraw(self, send: Send) -> None:
        """A send is given up before its receive came."""
        message = next(message for message, other in self._sends.items() if other is send)
        del self._sends[message]
        self.hub.matcher.discard(message)

    def done(self, send: Send) -> None:
        """Nothing is left to do: `deliver` did it."""

    def lost_error(self, op: str, tag: int | None) -> PeerLost:
        raise AssertionError("a process outlives its own messages")

    def known(self, now: float) -> str:
        return "It is this process itself: no matching call was made here."

    def close(self) -> list[Send | Awaiting]:
        """Forget everything; the sends and requests that still wait are returned."""
        waiting: list[Send | Awaiting] = [*self._sends.values(), *self.requests.values()]
        self._sends.clear()
        self.requests.clear()
        return waiting

    # ------------------------------------------------------------------ requests and replies

    def new_ident(self) -> int:
        self.last_ident += 1
        return self.last_ident

    def send_rpc(
        self, kind: int, flags: int, service: int, ident: int, body: bytes | memoryview, more: bool = False
    ) -> bool:
        """A small request or reply: like a peer's, in memory of its own."""
        flags = flags & ~RPC | (Flag.REQUEST if kind == Kind.REQUEST else Flag.REPLY)
        self.on_rpc(flags, service, ident, memoryview(bytearray(body)), True)
        return True

    def start(self, send: Send) -> None:
        """A request or reply of any size, in parts."""
        limit = self.hub.config.max_rpc_bytes
        if send.nbytes > limit:
            raise UsageError(
                f"{send.nbytes} bytes for {self.peer} exceed the limit of {limit}. Send less at once, or raise "
                "Config.max_rpc_bytes."
            )
        view = self.hub.large_pool.take(send.nbytes)
        _gather(send.parts, view)
        send.finish(None)
        self.on_rpc(send.flags, send.group, send.tag or 0, view, True)

    def move(self, transfer: Transfer, nbytes: int) -> None:
        """Bytes that have a place already: copied there."""
        posted = self.arrivals.posted[transfer.ident]
        while (piece := transfer.next_piece(DATA_LIMIT))[1]:
            _, pieces, size = piece
            view = posted.place(size)
            if view is not None:
                assert isinstance(view, memoryview)  # nothing is received here, so nothing scatters
                _gather(pieces, view)
            transfer.frame_sent(size)
            posted.landed(size)

    def joining(self) -> memoryview:
        raise AssertionError("nothing is joined here")

    def halt(self, transfer: Transfer) -> None:
        """Nothing is ever under way."""

    @property
    def expects_more(self) -> bool:
        """Requests to oneself come one by one."""
        return False

    def divert(self, posted: Posted) -> None:
        """Nothing is ever under way."""

    def control(self, kind: Kind, ident: int, lane: Lane = Lane.CONTROL) -> None:
        """What a transfer says about itself: it is over when it has begun, or it never begins."""
        if kind is Kind.ABORT:
            self.arrivals.aborted(ident)

    def flush(self) -> None:
        """Nothing is ever queued."""

    def check_unread(self, lane: Lane) -> None:
        """Everything is read at once."""

    def reply(self, ident: int, parts: list[memoryview], nbytes: int, failed: bool = False, service: int = 0) -> None:
        flags = Flag.REPLY | Flag.ERROR if failed else Flag.REPLY
        self.start(Send(self, "reply to", service, ident, int(flags), parts, nbytes, self.hub.config.timeout))


def _gather(parts: list[memoryview], view: memoryview) -> None:
    at = 0
    for part in parts:
        view[at : at + part.nbytes] = part
        at += part.nbytes

"""Messages to oneself: matched like all others, copied once, bounded like all others. All methods need the engine's
lock.

Small messages without a receive are copied and kept, up to the credit of any peer; beyond that, and for large ones,
the send waits for its receive, and the bytes go straight from one buffer to the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankmesh.buffers import readable
from rankmesh.endpoint.shortcut import Carrier
from rankmesh.endpoint.transfers import Message, Receive, Send, SendState
from rankmesh.errors import PeerLost
from rankmesh.wire.credit import OVERHEAD

if TYPE_CHECKING:
    from rankmesh.endpoint.hub import Hub
    from rankmesh.endpoint.peer import Peer


class Loopback:
    """The router of this endpoint's messages to itself; it is both its own outbound and inbound half."""

    #: There is no connection to look at.
    direct = None
    carrier = Carrier("self", "this process")

    def __init__(self, hub: Hub, peer: Peer, index: int) -> None:
        self.hub = hub
        self.engine = hub.engine
        self.peer = peer
        self.index = index
        self.gone = ""
        self.link = None
        self.outbound = self
        self.inbound = self
        self._kept = 0
        self._sends: dict[Message, Send] = {}

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

    def close(self) -> list[Send]:
        """Forget everything; the sends that still wait are returned."""
        sends = list(self._sends.values())
        self._sends.clear()
        return sends


def _gather(parts: list[memoryview], view: memoryview) -> None:
    at = 0
    for part in parts:
        view[at : at + part.nbytes] = part
        at += part.nbytes

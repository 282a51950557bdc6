"""Announced transfers of one peer: from the announcement to the last byte. All methods need the engine's lock.

A transfer is announced; it waits (a message without a receive, a request without room) or is granted; then it lands, by
DATA frames or by a copy from the sender's arena. Every announcement is answered once; see wire/header.py.
"""

from __future__ import annotations

import functools
from threading import get_ident
from typing import TYPE_CHECKING

from rankmesh.endpoint.frames import MAX_ANNOUNCED
from rankmesh.endpoint.outbound import RPC
from rankmesh.endpoint.posted import FIRST, Posted, Scatter
from rankmesh.endpoint.sharing import Copy, Reference
from rankmesh.endpoint.transfers import Landing, Message, Receive
from rankmesh.errors import ProtocolError, TransferAborted
from rankmesh.wire.header import Flag, Kind

if TYPE_CHECKING:
    from rankmesh.endpoint.inbound import Inbound
    from rankmesh.transport.base import PolledLink

Header = tuple[int, ...]


class Incoming:
    """See the module's text."""

    def __init__(self, inbound: Inbound) -> None:
        self._inbound = inbound
        self._router = inbound.router
        self._hub = inbound.router.hub
        self._engine = inbound.router.engine
        self._config = inbound.router.hub.config
        self._arrivals = inbound.router.arrivals
        self._attached = False
        self._polled: PolledLink | None = None
        #: Granted and not complete, by ident; of those, the ones that are copied from the sender's arena.
        self._incoming: dict[int, Landing] = {}
        self._copies: dict[int, Copy] = {}
        #: This is in the engine's backlog, in order to copy on.
        self._copying = False
        #: Messages that no receive was posted for.
        self._announced: dict[int, Message] = {}

    def attach(self, polled: PolledLink | None) -> None:
        self._attached = True
        self._polled = polled

    def detach(self) -> list[Landing]:
        """Forget everything; what was landing is returned."""
        self._attached = False
        landings = list(self._incoming.values())
        self._incoming.clear()
        self._copies.clear()
        for message in self._announced.values():
            self._hub.matcher.discard(message)
        self._announced.clear()
        self._arrivals.clear()
        self._hub.rpc_withdrawn(self)
        return landings

    @property
    def idle(self) -> bool:
        return not (self._incoming or self._announced or self._arrivals.posted)

    def deliver(self, message: Message, receive: Receive) -> None:
        """A receive was posted for a message that was announced."""
        del self._announced[message.ident]
        self._grant(receive, message.group, message.match_tag, message.nbytes, message.ident, message.reference)

    def refuse(self, message: Message) -> None:
        """Nobody will receive a message that was announced."""
        del self._announced[message.ident]
        self._router.outbound.control(Kind.REFUSE, message.ident)

    def on_announce(self, header: Header) -> None:
        if not header[6] and not header[2] & Flag.SHARED:
            self._announce(header)
        elif self._polled is None or not header[2] & Flag.SHARED or header[2] & RPC:
            raise ProtocolError("a reference to memory that is not shared", reason="malformed reference")
        else:
            self._inbound.with_payload(header, lambda header, payload: self._announce(header, Reference.parse(payload)))

    def _announce(self, header: Header, reference: Reference | None = None) -> None:
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
        if group in self._hub.members and self._router.index not in self._hub.members[group]:
            raise self._inbound.intruder(group)
        receive = self._hub.take_receive(self._router.index, group, tag, flags)
        if receive is not None:
            self._grant(receive, group, tag, nbytes, ident, reference)
            return
        message = Message(self._router, group, tag, flags, nbytes, None, ident, reference)
        self._announced[ident] = message
        self._hub.keep(message)

    def _grant(
        self, receive: Receive, group: int, tag: int, nbytes: int, ident: int, reference: Reference | None
    ) -> None:
        if receive.truncates(nbytes):
            self._router.outbound.control(Kind.REFUSE, ident)
            return
        receive.place(nbytes)
        landing = Landing(self, receive, nbytes, group, tag, ident)
        receive.matched(landing)
        self._incoming[ident] = landing  # from now on the receive fails if the connection does
        if reference is not None and self._polled is not None and Copy.possible(self._polled, reference, nbytes):
            self._copies[ident] = Copy(self._polled, reference, landing)
            self._copy_soon()
            return
        self._router.outbound.control(Kind.GRANT, ident)
        if not nbytes and self._incoming.pop(ident, None) is not None:
            self._complete(landing)

    def _copy_soon(self) -> None:
        engine = self._engine
        if not self._copying:
            self._copying = True
            engine.backlog.append(self)
            if engine.leader is not None and engine.leading_thread != get_ident():  # it may sleep
                engine.waker.release()

    def work_off(self) -> None:
        """Copy the next piece of each message that lies in the sender's arena."""
        self._copying = False
        for ident, copy in list(self._copies.items()):
            if copy.nearly_done:
                self._router.outbound.herald()
            if ident in self._copies and copy.step():
                del self._copies[ident]
                self._copied(copy)
        if self._copies:
            self._copy_soon()

    def _copied(self, copy: Copy) -> None:
        landing = copy.landing
        del self._incoming[landing.ident]
        receive = landing.receive
        if receive is None:
            return  # it was given up, and the sender told
        if copy.valid:
            self._inbound.bytes += landing.nbytes
            receive.arrived(self._router.index, landing.tag, landing.nbytes)
        else:
            receive.unmatched()
            self._hub.post(receive, again=True)
        self._router.outbound.control(Kind.REFUSE, landing.ident)  # last: it may find that the connection is broken

    def grant_rpc(self, header: Header) -> bool:
        """There is room for a large request or reply: take it. False: the connection it was announced on is gone."""
        _, _, flags, group, tag, ident, _, nbytes = header
        if not self._attached:
            return False
        self._incoming[ident] = Landing(self, None, nbytes, group, tag, ident, flags, self._hub.large_pool.take(nbytes))
        self._router.outbound.control(Kind.GRANT, ident)
        return True

    def on_data(self, header: Header) -> None:
        ident, nbytes, offset = header[5], header[6], header[7]
        if ident >= FIRST:
            posted = self._arrivals.get(ident, offset, nbytes)
            self._inbound.land(posted, posted.place(nbytes), functools.partial(self._posted_landed, posted, nbytes))
            return
        landing = self._incoming.get(ident)
        if landing is None or ident in self._copies:
            raise ProtocolError(f"data of transfer {ident}, which was not granted", reason="unknown transfer")
        if not nbytes or offset != landing.got or offset + nbytes > landing.nbytes:
            raise ProtocolError(
                f"piece {offset}+{nbytes} of transfer {ident} ({landing.got} of {landing.nbytes} so far)",
                reason="bad piece",
            )
        view = None if landing.view is None else landing.view[offset : offset + nbytes]
        self._inbound.land(landing, view, functools.partial(self._piece_landed, landing, nbytes))

    def place(self, ident: int, offset: int, nbytes: int) -> memoryview | Scatter | None:
        """Where a piece belongs that is all here, and is put there next; None: nowhere, or `on_data` has to say what is
        wrong with it. Raises ProtocolError."""
        if ident >= FIRST:
            return self._arrivals.get(ident, offset, nbytes).place(nbytes)
        landing = self._incoming.get(ident)
        if landing is None or landing.view is None or ident in self._copies:
            return None
        if not nbytes or offset != landing.got or offset + nbytes > landing.nbytes:
            return None
        return landing.view[offset : offset + nbytes]

    def landed(self, ident: int, nbytes: int) -> bool:
        """A piece was put into its `place`. True: that was the last of its transfer."""
        if ident >= FIRST:
            self._posted_landed(self._arrivals.posted[ident], nbytes)
            return ident not in self._arrivals.posted
        self._piece_landed(self._incoming[ident], nbytes)
        return ident not in self._incoming

    def _posted_landed(self, posted: Posted, nbytes: int) -> None:
        self._inbound.bytes += nbytes
        posted.landed(nbytes)
        self._after_piece()

    def _after_piece(self) -> None:
        if not (self._incoming or self._arrivals.posted):
            self._inbound.no_more_data()

    def _piece_landed(self, landing: Landing, nbytes: int) -> None:
        landing.got += nbytes
        self._inbound.bytes += nbytes
        if landing.got == landing.nbytes:
            del self._incoming[landing.ident]
            self._after_piece()
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
        self._inbound.divert(landing)
        if landing.ident in self._incoming:
            self._router.outbound.control(Kind.REFUSE, landing.ident)

    def on_withdraw(self, header: Header) -> None:
        """The sender takes its announcement back. One that was granted meanwhile leaves its receive as if it had
        never come."""
        ident = header[5]
        message = self._announced.pop(ident, None)
        if message is not None:
            self._hub.matcher.discard(message)
        if message is not None or self._hub.rpc_withdrawn(self, ident):
            self._router.outbound.control(Kind.REFUSE, ident)
            return
        landing = self._incoming.pop(ident, None)
        if landing is not None:
            if self._copies.pop(ident, None) is not None:
                self._router.outbound.control(Kind.REFUSE, ident)
            self._hub.rpc_landed(landing)
            if landing.receive is not None:
                landing.receive.unmatched()
                self._hub.post(landing.receive, again=True)

    def on_abort(self, header: Header) -> None:
        if header[5] >= FIRST:
            self._arrivals.aborted(header[5])
            return
        landing = self._incoming.pop(header[5], None)
        self._copies.pop(header[5], None)
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

"""PeerRouter: the conversation with one peer, whatever connection carries it. All methods need the engine's lock.

A router outlives its connections: it is made with the peer, a link is attached when there is one, and quiet links
are let go by agreement (idle) and made again on demand; nothing can be lost or doubled that way. A connection that
breaks is another matter: what was under way may or may not have arrived, so the peer is gone, and everything that
needs it fails with PeerLost.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from rankmesh.endpoint.inbound import Inbound
from rankmesh.endpoint.lanes import Lane
from rankmesh.endpoint.outbound import Outbound
from rankmesh.endpoint.posted import Arrivals
from rankmesh.endpoint.requests import Awaiting, Conversation, Request
from rankmesh.endpoint.transfers import Send
from rankmesh.endpoint.waiting import Look
from rankmesh.endpoint.work import Work
from rankmesh.errors import BusyError, ConnectError, PeerError, PeerLost, ProtocolError, RankmeshError, UsageError
from rankmesh.transport.base import PolledLink
from rankmesh.wire.header import Flag, Kind
from rankmesh.wire.messages import Closing, Control, Goodbye, Identity, IdleAnswer, IdleAsk, plain

if TYPE_CHECKING:
    from rankmesh.endpoint.hub import Hub
    from rankmesh.endpoint.loopback import Loopback
    from rankmesh.endpoint.peer import Peer
    from rankmesh.endpoint.shortcut import Carrier
    from rankmesh.transport.base import Link

logger = logging.getLogger("rankmesh")

#: Looks at every peer's liveness per heartbeat interval: how finely silence is measured.
LOOKS: Final = 4

_IN: Final = select.EPOLLIN
_OUT: Final = select.EPOLLOUT
_ANY: Final = _IN | _OUT


class PeerRouter(Conversation):
    """See the module's text."""

    def __init__(self, hub: Hub, peer: Peer, index: int) -> None:
        super().__init__()
        self.hub = hub
        self.engine = hub.engine
        self.peer = peer
        #: The peer's number in this endpoint: the source of its messages.
        self.index = index
        self.link: Link | None = None
        #: The same, if it is one that can be looked at directly: both sides share memory.
        self.polled: PolledLink | None = None
        #: What carries the conversation, and why; of the last connection if there is none now.
        self.carrier: Carrier | None = None
        #: Why the peer is gone for good, and since when; empty while it is not.
        self.gone = ""
        #: It says goodbye soon, and takes nothing more.
        self.closing = False
        self.lost_at = 0.0
        #: Kept open although it is quiet.
        self.pinned = False
        #: Places for bytes that need no announcement.
        self.arrivals = Arrivals()
        self.outbound = Outbound(self)
        self.inbound = Inbound(self)
        self.last_heard = 0.0
        self._last_spoke = 0.0
        self._last_traffic = 0.0
        self._traffic = -1

    # ------------------------------------------------------------------ the connection

    def attach(self, link: Link, remote: Identity, now: float) -> None:
        """A connection is there: what waited goes out."""
        self.link = link
        self.last_heard = self._last_spoke = self._last_traffic = now
        self.polled = polled = link if isinstance(link, PolledLink) and link.start_polling() else None
        self.inbound.attach(link, polled)
        if polled is None:
            self.engine.watch(link.fileno(), link.poll_mask(), self.ready)
        else:
            self._answer_bell = polled.answer_bell
            self.engine.watch(link.fileno(), link.poll_mask(), self._rung)
            self.engine.look_at(link.fileno(), Look(polled.ready, polled.arm, self._serve))
        self.outbound.attach(link, remote, polled)

    def _release_link(self, abort: bool) -> None:
        link, self.link, self.polled = self.link, None, None
        if link is not None:
            self.engine.unwatch(link.fileno())
            if abort:
                link.abort()
            else:
                link.close()

    def ready(self, mask: int) -> None:
        """The link can do something."""
        link = self.link
        if link is None:
            return
        if mask == _IN and not self.outbound.blocked:
            direct = self.inbound.direct
            if direct is not None and self.inbound.calm:
                direct.read_one()
                return
            try:
                self.inbound.read()
            except Exception as error:  # noqa: BLE001  # see `failed`
                self.failed(error)
            return
        if self.outbound.blocked and (mask & _OUT or not link.poll_mask() & _OUT):
            self.outbound.flush()
        if mask & ~_OUT and self.link is not None:
            try:
                self.inbound.read()
            except Exception as error:  # noqa: BLE001  # see `failed`
                self.failed(error)

    def _rung(self, mask: int) -> None:
        """The other side of a polled link rang, or is gone."""
        if self._answer_bell():
            self.ready(_ANY)
        elif self.outbound.announced:  # else it rang for the stage of a group
            self.engine.heralds += 1

    def _serve(self) -> None:
        """A polled link can do something."""
        self.ready(_IN)

    def work_off(self) -> None:
        """Go on with frames that were read but not yet looked at."""
        if self.link is not None:
            try:
                self.inbound.resume()
            except Exception as error:  # noqa: BLE001  # see `failed`
                self.failed(error)

    def failed(self, error: Exception) -> None:
        """What came in cannot be dealt with: by a fault of the peer's, or by a defect of ours, which must end this
        conversation and not the thread that happens to drive."""
        if isinstance(error, ProtocolError):
            logger.warning("Closing the connection with %s: %s.", self.peer, error.message)
            self.lose(f"it broke the protocol ({error.message})")
        else:
            logger.error("A defect in rankmesh ends the conversation with %s.", self.peer, exc_info=error)
            self.lose(f"a defect in rankmesh ended the conversation ({error!r}); please report it")

    def counters(self) -> dict[str, int]:
        """With the engine's lock."""
        self.inbound.settle()
        return {
            "frames_sent": self.outbound.frames,
            "bytes_sent": self.outbound.bytes,
            "frames_received": self.inbound.frames,
            "bytes_received": self.inbound.bytes,
        }

    # ------------------------------------------------------------------ liveness

    def heartbeat(self, now: float) -> None:
        """Called a few times per interval: show life, look for it, and let quiet connections go."""
        config = self.hub.config
        self.inbound.settle()
        if self.outbound.is_read() or self.inbound.heard:
            self.inbound.heard = False
            self.last_heard = now
        elif now - self.last_heard > config.heartbeat_timeout - 2 * config.heartbeat_interval / LOOKS:
            # it may have been silent since the look before that one, and the next one would be too late
            self.lose(f"it has been silent for {now - self.last_heard:.1f} s")
            return
        if self.outbound.spoke:
            self.outbound.spoke = False
            self._last_spoke = now
        elif now - self._last_spoke >= 0.75 * config.heartbeat_interval:
            self.outbound.ping()
        traffic = self.inbound.frames + self.outbound.frames
        if traffic != self._traffic:
            self._traffic = traffic
            self._last_traffic = now
        elif now - self._last_traffic > config.idle_timeout and self._quiet() and not self.outbound.paused:
            self.outbound.message(IdleAsk())
            self.outbound.pause()

    def _quiet(self) -> bool:
        """Nothing is under way in either direction, and nobody here waits for this peer."""
        return (
            not self.pinned
            and self.outbound.idle
            and self.inbound.idle
            and not self.requests
            and bool(self.peer.addresses)  # else it could not be reached again
            and not self.hub.awaits(self.index)
            and not any(agent.needs(self) for agent in self.hub.agents)
        )

    def on_control(self, message: Control) -> None:
        match message:
            case Goodbye(reason, failed):
                self.lose(reason or "it closed its endpoint", left=not failed)
            case Closing():
                self.closing = True
            case IdleAsk() if self.outbound.paused:
                self.rest()  # both asked at once: that is agreement enough, and the other side may have closed already
            case IdleAsk():
                agreed = self._quiet()
                self.outbound.message(IdleAnswer(agreed))
                if agreed:
                    self.rest()
            case IdleAnswer(agreed):
                if agreed:
                    self.rest()
                else:
                    self.outbound.resume()
            case _:
                self.hub.on_control(self.peer, message)

    def rest(self) -> None:
        """Let the quiet connection go, by agreement; the next operation makes a new one."""
        if self.link is None:
            return
        self.outbound.paused = False
        self._release_link(abort=False)
        self.inbound.detach()
        self.outbound.detach()
        if not self.outbound.idle:
            self.hub.want_link(self)

    # ------------------------------------------------------------------ RPC

    def request(self, service: int, parts: list[memoryview], nbytes: int, op: str, timeout: float) -> Request:
        """Ask the peer's `service`."""
        request = Request(self, op, self.outbound.new_ident(), timeout)
        self.requests[request.ident] = request  # before it is sent: a connection may be refused at once
        try:
            self.outbound.start(Send(self, op, service, request.ident, int(Flag.REQUEST), parts, nbytes, timeout))
        except RankmeshError:
            self.requests.pop(request.ident, None)
            raise
        return request

    def reply(self, ident: int, parts: list[memoryview], nbytes: int, failed: bool = False, service: int = 0) -> None:
        """Answer a request. A peer that is gone needs no answer, and who is closing gives none."""
        if not self.gone and not self.hub.closed:
            flags = Flag.REPLY | Flag.ERROR if failed else Flag.REPLY
            send = Send(self, "reply to", service, ident, int(flags), parts, nbytes, self.hub.config.timeout)
            try:
                self.outbound.start(send)
            except (UsageError, BusyError) as error:  # larger than the other side takes, or too many wait
                text = error.message.encode()
                if failed:
                    logger.warning("Cannot answer %s: %s", self.peer, error.message)
                else:
                    self.reply(ident, [memoryview(text)], len(text), failed=True)
            self.outbound.check_unread(Lane.RPC)

    # ------------------------------------------------------------------ the end

    def unwritable(self, error: OSError) -> None:
        """The link takes nothing any more. If it was agreed to end, what the other side sent is still to be read."""
        if not self.outbound.paused:
            self.broken(error)

    def broken(self, error: OSError) -> None:
        """The link failed."""
        if self.outbound.paused:
            self.rest()
            return
        reset = isinstance(error, ConnectionResetError | BrokenPipeError)
        self.lose("its connection was closed" if reset else f"its connection failed ({error.strerror or error})")

    def ended(self, at_boundary: bool) -> None:
        """The stream ended without a goodbye, unless it was agreed to end."""
        if self.outbound.paused and at_boundary:
            self.rest()
        else:
            self.lose(
                "its connection was closed" if at_boundary else "its connection was closed in the middle of a frame"
            )

    def lose(self, reason: str, left: bool = False) -> None:
        """The peer is gone: everything that needs it fails now."""
        if self.gone:
            return
        self.lost_at = now = monotonic()
        absence = 0.0 if left else self.hub.absence(now)
        if absence:
            reason += f", after this process itself did not run for {absence:.1f} s"
        self.gone = reason
        self._release_link(abort=not left)
        # Who was away for that long is the one that was given up: what it believes of others is not for passing on.
        self.hub.lost(self, left or absence > 0)
        self._fail_all(self.hub.closed_error if self.hub.closed else self.lost_error)
        for agent in self.hub.agents:
            agent.peer_lost(self)
        self.hub.departed(self)

    def unreachable(self, error: PeerError) -> None:
        """No connection could be made: what waits for one fails, and the next operation tries again."""

        def connect_error(op: str, tag: int | None) -> PeerError:
            about = {**vars(error), **self.peer.attributes(), "op": op, "tag": tag}
            return ConnectError(about.pop("message"), **about)

        self._fail_all(connect_error)

    def free(self, make_error: Callable[[str, int | None], RankmeshError]) -> None:
        """The endpoint is closed."""
        self._release_link(abort=True)
        self._fail_all(make_error)

    def _fail_all(self, make_error: Callable[[str, int | None], RankmeshError]) -> None:
        landing = self.inbound.detach()
        posted = self.hub.waiting_for(self.index)
        sends = self.outbound.abandon()
        self.outbound.detach()
        requests, self.requests = list(self.requests.values()), {}
        works: list[Work[Any] | Awaiting] = [*landing, *posted, *sends, *requests]
        for work in works:
            work.fail(make_error(work.op, work.tag))

    def lost_error(self, op: str, tag: int | None) -> PeerLost:
        during = f" during {op} it" + (f", tag {tag}" if tag is not None else "")
        return PeerLost(
            f"{self.peer} is lost: {self.gone}{',' if op else ''}{during if op else ''}.",
            **self.peer.attributes(),
            op=op,
            tag=tag,
            reason=self.gone,
        )

    def say_closing(self) -> None:
        """Who closes, too, is not to wait for this side to take anything."""
        if self.link is not None and not (self.gone or self.outbound.paused):
            self.outbound.message(Closing())

    @property
    def all_is_said(self) -> bool:
        """Nothing is unsent that the peer could still take."""
        return self.outbound.idle or bool(self.gone) or (self.closing and self.outbound.flushed)

    def say_goodbye(self, reason: str) -> None:
        """This side sends nothing more. What was sent still arrives."""
        if self.link is not None:
            self.outbound.message(Goodbye(reason), Kind.GOODBYE, Lane.MESSAGE)
            self.outbound.pause()

    def say_failed(self, reason: str) -> None:
        """This side ends because of an error. The connection ends in order, so that the reason arrives."""
        if self.link is not None:
            self.outbound.message(Goodbye(plain(reason), failed=True), Kind.GOODBYE)
            self._release_link(abort=False)

    def known(self, now: float) -> str:
        """What is known of the peer, for the message of an operation that timed out."""
        if self.gone:
            return f"{self.peer} is lost: {self.gone}."
        if self.link is None:
            trouble = self.hub.dial_trouble(self)
            return f"There is no connection to {self.peer}" + (f": {trouble}." if trouble else ".")
        self.inbound.settle()
        heard = 0.0 if self.inbound.heard else max(now - self.last_heard, 0.0)
        return f"{self.peer} is connected and was last heard {heard:.1f} s ago; it has not taken part."


Router: TypeAlias = "PeerRouter | Loopback"

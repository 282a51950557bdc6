"""Large operations on another's memory: their bytes travel by themselves, from where they lie to where they shall lie.
See operations.py for how they are asked for and given up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from rankmesh.endpoint.lanes import Lane
from rankmesh.endpoint.posted import ANSWER, BROUGHT, Outflow, Posted, Scatter
from rankmesh.errors import ProtocolError
from rankmesh.memory.layout import Later
from rankmesh.memory.operations import Operation, Read
from rankmesh.memory.pulling import Offer
from rankmesh.wire.header import Kind

if TYPE_CHECKING:
    from rankmesh.memory.flow import Flow

#: What one costs in the window of its flow: its bytes are kept nowhere, and this bounds their number.
STREAM_COST: Final = 4096


class StreamedRead(Read):
    """A read whose bytes come straight into their place."""

    streamed = True
    _posted: Posted | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.cost = STREAM_COST

    def prepare(self) -> None:
        self._posted = self.router.arrivals.expect(self.ident | ANSWER, self.nbytes, self._parts, self._arrived)

    def request_left(self) -> None:
        super().request_left()
        self.make_views(self._parts, plain_from=None if self.router.arrivals.recvmsg is None else Scatter.SMALLEST)
        self._parts = ()

    def _arrived(self, whole: bool) -> None:
        """The last byte is here."""
        self.router.requests.pop(self.ident, None)
        self._settle()
        if not self.finished:
            self.conclude(self._out)

    def answered(self, payload: memoryview) -> None:
        raise ProtocolError("a reply to a read whose bytes were to be streamed", reason="unexpected reply")

    def refused(self) -> None:
        self.router.arrivals.forget(self.ident | ANSWER)
        if self._posted is not None:
            self._posted.discard()

    def abandon(self) -> None:
        """It stays known, without its place, until the last byte or the owner's answer."""
        posted = self._posted
        if posted is not None:
            posted.discard()
            self.router.inbound.divert(posted)
        self.tell_cancelled()


class StreamedWrite(Operation):
    """A write whose bytes go straight from their place; or are fetched there by the owner, where it can."""

    what = "write"
    cost = STREAM_COST
    streamed = True
    changes = True
    _stream: Outflow | None = None
    _offer: Offer | None = None

    def __init__(
        self,
        flow: Flow,
        region: str,
        body: bytes,
        timeout: float,
        parts: Iterable[memoryview],
        nbytes: int,
        fetchable: bool = False,
    ) -> None:
        """`fetchable`: there is one part, which the owner can read where it lies."""
        super().__init__(flow, region, body, timeout)
        self._parts: Iterable[memoryview] = parts
        self.nbytes = nbytes
        self._fetchable = fetchable
        #: The request, as long as nothing was offered.
        self._streamed = body

    def prepare(self) -> None:
        """Offer the bytes where they lie, if the owner can read them there."""
        if self._fetchable and not self.finished:
            (part,) = self._parts
            self._offer = offer = Offer.make(self.router, part)
            if offer is not None:
                self._body = offer.instead_of_stream(self._streamed)

    def postponed(self) -> None:
        self._take_back()
        self._body = self._streamed

    def request_left(self) -> None:
        super().request_left()
        if self._offer is not None:
            return
        if self.finished:  # refused while it was being sent: its bytes, which will not come, have a place there
            self._tell_aborted()
            return
        if not self.make_views(self._parts):
            return
        outbound, parts = self.router.outbound, self._parts
        series = parts.series() if isinstance(parts, Later) else None
        self._stream = Outflow(outbound, self.ident | BROUGHT, series or parts, self.nbytes)
        self._parts = ()
        outbound.move(self._stream, self.nbytes)

    def answered(self, payload: memoryview) -> None:
        self._stream, self._parts = None, ()
        self._take_back()
        self.conclude(None)

    def refused(self) -> None:
        self._take_back()
        self._halt()

    def abandon(self) -> None:
        super().abandon()
        if self._offer is not None:
            self._take_back()
            self._parts = ()
            self.tell_cancelled()
            return
        if self._stream is None:  # the request still leaves, and the owner would wait for the bytes
            self._tell_aborted()
        self._halt()

    def _take_back(self) -> None:
        offer, self._offer = self._offer, None
        if offer is not None:
            offer.take_back()

    def _halt(self) -> None:
        """Send no more of it, and say so."""
        self._parts = ()
        stream, self._stream = self._stream, None
        if stream is not None and stream.left:
            self.router.outbound.halt(stream)
            self._tell_aborted()

    def _tell_aborted(self) -> None:
        """In a lane that comes after the request's."""
        self.router.outbound.control(Kind.ABORT, self.ident | BROUGHT, Lane.MESSAGE)

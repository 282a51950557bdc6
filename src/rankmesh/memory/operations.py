"""Operations under way on another's memory, as whoever asked for them sees them.

An operation is a Work that waits in its router's `requests` under its ident. The caller's thread packs the request,
takes the lock once, sends with one system call, and drives the engine itself until the answer is there. What is small
comes in the reply and is copied from the staging buffer; what is large (streaming.py) is received straight into the
caller's memory, whose place is posted before the request leaves (endpoint/posted.py).

Giving up (timeout, cancel) detaches the caller's memory first. A read that was sent stays known, without it, until its
last byte or the owner's answer has come: nothing that still arrives is taken for something else. A write stops; what
of it was applied is not undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import msgspec

from rankmesh.endpoint.requests import Asking
from rankmesh.endpoint.transfers import Send, SendState
from rankmesh.errors import (
    BusyError,
    CancelledError,
    DeadlineError,
    ProtocolError,
    RankmeshError,
    RegionError,
    RegionNotFound,
    UsageError,
)
from rankmesh.memory.layout import Later
from rankmesh.memory.protocol import CELL, DONE, REQUEST, SERVICE, Op, decode_description, decode_failure
from rankmesh.memory.server import ERRORS, HINTS
from rankmesh.wire.header import Flag, Kind

if TYPE_CHECKING:
    from rankmesh.memory.flow import Flow

_REQUEST: Final = int(Kind.REQUEST)
_REQUEST_FLAG: Final = int(Flag.REQUEST)
_ERROR: Final = int(Flag.ERROR)
CANCEL: Final = REQUEST.pack(Op.CANCEL, 0, 0, 0, 0, 0, 0)
#: What an operation costs in the window of its flow besides the bytes that its owner has to keep.
COST: Final = 128


class Carrier(Send):
    """The Send of a request too large for one frame, or without a connection yet: its failure is the operation's."""

    def __init__(self, operation: Operation, body: bytes) -> None:
        router, ident = operation.router, operation.ident
        parts = [memoryview(body)]
        super().__init__(router, operation.op, SERVICE, ident, _REQUEST_FLAG, parts, len(body), operation.timeout)
        self._operation: Operation | None = operation

    def finish(self, value: None) -> None:
        super().finish(value)
        operation, self._operation = self._operation, None
        if operation is not None and not operation.finished:
            operation.request_left()

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        operation, self._operation = self._operation, None
        if operation is not None:
            operation.router.requests.pop(operation.ident, None)
            operation.fail(error)

    def give_up(self) -> None:
        """The operation was given up before its request has left."""
        self._operation = None
        self._give_up(CancelledError("The operation was given up."))


class Operation(Asking[Any]):
    """What all operations have in common: a request sent under an ident, and a reply to it."""

    tag: int | None = None
    what = ""
    cost = COST
    #: Its bytes do not travel in the request or the reply.
    streamed = False
    #: The owner changes memory for it.
    changes = False
    #: It waits in its flow; or counts in it.
    queued = False
    counted = False
    _carrier: Carrier | None = None

    def __init__(self, flow: Flow, region: str, body: bytes, timeout: float) -> None:
        """`region`: its name; empty: it is about all of them."""
        # Work.__init__, written out: a call less for every operation
        self._engine = flow.router.engine
        self._flow = flow
        self.router = flow.router
        self.peer = flow.router.peer
        self.region = region
        self.timeout = timeout
        self.began = monotonic()
        self._body = body

    @property
    def op(self) -> str:  # type: ignore[override]  # a text that only errors need
        return f"{self.what} {self._which} at"

    @property
    def _which(self) -> str:
        return f"region {self.region!r}" if self.region else "regions"

    def begin(self) -> None:
        """Send it; the caller waits later. Takes the lock."""
        with self._engine:
            self._flow.submit(self, urgent=False)

    def complete(self) -> Any:
        """Send it and wait for its end. Takes the lock."""
        with self._engine:
            self._flow.submit(self, urgent=True)
            self.await_reply()
        return self.outcome()

    def await_end(self, timeout: float | None) -> None:
        self._flow.flush()
        super().await_end(timeout)

    # ------------------------------------------------------------------ with the lock

    def send(self, more: bool) -> None:
        """Its turn has come. `more`: others follow, and somebody flushes."""
        router = self.router
        self.ident = ident = router.outbound.new_ident()
        router.requests[ident] = self
        try:
            if self.streamed:
                self.prepare()
            if router.outbound.send_rpc(_REQUEST, 0, SERVICE, ident, self._body, more):
                if self.streamed:
                    self.request_left()
            else:
                self.postponed()
                self._carrier = Carrier(self, self._body)
                router.outbound.start(self._carrier)
        except BaseException:
            router.requests.pop(ident, None)
            self.refused()
            self._settle()
            raise
        self.hint = router.inbound.direct

    def prepare(self) -> None:
        """Before the request leaves: post what it asks for."""

    def postponed(self) -> None:
        """The request does not leave at once: perhaps by another connection than there is now."""

    def request_left(self) -> None:
        """The request is before whatever is sent from now on."""
        self._carrier = None

    def make_views(self, parts: Iterable[memoryview], *, plain_from: int | None = 0) -> bool:
        """Now that the request is on its way, make the views that were put off, or see that they can be made, or need
        not (`plain_from`, see Later). False: they cannot, and the operation has ended with the reason."""
        if isinstance(parts, Later) and not self.finished:
            try:
                parts.check(plain_from=plain_from)
            except UsageError as error:
                self._give_up(error)
        return not self.finished

    def replied(self, flags: int, service: int, payload: memoryview, owned: bool) -> None:
        del self.router.requests[self.ident]
        if self.counted:  # _settle, written out
            self.counted = False
            self._flow.left(self)
        if flags & _ERROR or service != SERVICE:
            self.refused()
            if not self.finished:
                self.fail(self._failure(payload, service))
        elif not self.finished:
            self.answered(payload)

    def answered(self, payload: memoryview) -> None:
        """The owner did it."""
        raise NotImplementedError

    def refused(self) -> None:
        """The owner did not: what was prepared is undone."""

    def conclude(self, value: Any) -> None:
        """As `finish`, written out: most have nobody to tell."""
        self._value = value
        if self.parker is None and self._callbacks is None:
            self.finished = True
        else:
            self._end()

    def fail(self, error: BaseException) -> None:
        self._settle()
        super().fail(error)

    def _settle(self) -> None:
        """It counts no longer. Others may begin."""
        if self.counted:
            self.counted = False
            self._flow.left(self)

    def give_up(self, error: RankmeshError) -> None:
        """For whoever this is a part of."""
        self._give_up(error)

    def _give_up(self, error: RankmeshError) -> None:
        if self.queued:
            self._flow.withdraw(self)
        elif self._carrier is not None and self._carrier.state is not SendState.EAGER:
            self.router.requests.pop(self.ident, None)
            self._carrier.give_up()
            self.refused()
        else:
            self.abandon()
        self.fail(error)

    def abandon(self) -> None:
        """It was sent, and is given up: an answer that still comes is late."""
        self.router.requests.pop(self.ident, None)
        self._flow.abandoned(self)

    def tell_cancelled(self) -> None:
        if not self.router.gone:
            try:
                self.router.outbound.send_rpc(_REQUEST, 0, SERVICE, self.ident, CANCEL)
            except BusyError:  # the owner goes on in vain, and what comes goes nowhere
                pass

    def _failure(self, payload: memoryview, service: int) -> BaseException:
        peer = str(self.peer)
        if service != SERVICE:  # the endpoint answered itself
            text = bytes(payload).decode(errors="replace")
            return RegionNotFound(f"{self.peer} offers no memory: {text}.", region=self.region, peer=peer)
        try:
            told = decode_failure(payload)
        except (msgspec.MsgspecError, ValueError) as error:
            return ProtocolError(f"{self.peer} answered {self.op} it with rubbish: {error}.", **self.peer.attributes())
        kind = ERRORS.get(told.why, UsageError)
        if kind is RegionNotFound:
            like = f" Registered there: {', '.join(map(repr, told.names))}." if told.names else ""
            return RegionNotFound(
                f"{self.peer} has no region {self.region!r}.{like}", region=self.region, nearest=told.names, peer=peer
            )
        about = {"region": self.region, "peer": peer} if issubclass(kind, RegionError) else {}
        about |= HINTS.get(told.why, {})
        return kind(f"{self.peer} refuses to {self.what} {self._which}: {told.message}.", **about)


def ask_small(kind: type[Operation], cost: int, flow: Flow, region: str, body: bytes, *rest: Any) -> Any:
    """An operation whose bytes come in the reply, or go in the request, and wait for it: `kind(flow, region, body,
    *rest).complete()`, written out. The request is sent first: the operation is made while it is on its way, which
    nobody can notice before the lock is free. `cost`: the operation's."""
    router, engine = flow.router, flow.router.engine
    if not engine.lock.acquire(False):
        engine.acquire()
    try:
        sent, outbound = 0, router.outbound
        if router.inbound.direct is not None and flow.is_free(cost):  # else it is oneself, who answers before we look
            outbound.last_ident = ident = outbound.last_ident + 1
            if outbound.send_rpc(_REQUEST, 0, SERVICE, ident, body):
                sent = ident
        operation = kind(flow, region, body, *rest)
        if sent:
            flow.count(operation)
            operation.ident = sent
            router.requests[sent] = operation
            operation.hint = router.inbound.direct
        else:
            flow.submit(operation, urgent=True)
        operation.await_reply()
    finally:
        engine.lock.release()
        if engine.deferred or engine.contenders:
            engine.after_release()
    return operation.outcome()


class Read(Operation):
    """A read whose bytes come in the reply."""

    what = "read"

    def __init__(
        self,
        flow: Flow,
        region: str,
        body: bytes,
        timeout: float,
        out: Any,
        parts: Iterable[memoryview],
        nbytes: int,
    ) -> None:
        # Operation.__init__, written out
        router = flow.router
        self._engine = router.engine
        self._flow = flow
        self.router = router
        self.peer = router.peer
        self.region = region
        self.timeout = timeout
        self.began = monotonic()
        self._body = body
        self._out = out
        self._parts: Iterable[memoryview] = parts
        self.nbytes = nbytes
        self.cost = COST + nbytes

    def answered(self, payload: memoryview) -> None:
        if len(payload) != self.nbytes:
            raise ProtocolError(
                f"a read of {self.nbytes} bytes was answered by {len(payload)}", reason="lengths disagree"
            )
        parts, self._parts = self._parts, ()
        at = 0
        for part in parts:
            end = at + len(part)
            part[:] = payload[at:end] if at or end < self.nbytes else payload
            at = end
        self.conclude(self._out)

    def fail(self, error: BaseException) -> None:
        self._parts = ()
        super().fail(error)


class Write(Operation):
    """A write whose bytes are in the request."""

    what = "write"
    changes = True

    def __init__(self, flow: Flow, region: str, body: bytes, timeout: float) -> None:
        super().__init__(flow, region, body, timeout)
        self.cost = COST + len(body)

    def answered(self, payload: memoryview) -> None:
        self.conclude(None)


class Swap(Operation):
    """An operation on a cell, which returns its old value."""

    what = "change a cell of"
    changes = True

    def __init__(self, flow: Flow, region: str, body: bytes, timeout: float, convert: Callable[[int], int]) -> None:
        super().__init__(flow, region, body, timeout)
        self._convert = convert

    def answered(self, payload: memoryview) -> None:
        if len(payload) != CELL.size:
            raise ProtocolError(f"a cell of {len(payload)} bytes", reason="lengths disagree")
        self.conclude(self._convert(CELL.unpack(payload)[0]))


class Query(Operation):
    """A question that is answered by a few bytes. `read` makes the value of them; it runs with the lock."""

    def __init__(
        self, flow: Flow, region: str, what: str, body: bytes, timeout: float, read: Callable[[memoryview], Any]
    ) -> None:
        super().__init__(flow, region, body, timeout)
        self.what = what
        self._read = read

    def answered(self, payload: memoryview) -> None:
        try:
            value = self._read(payload)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ProtocolError(f"an answer about memory that is none: {error}", reason="malformed answer") from error
        self.conclude(value)

    def abandon(self) -> None:
        super().abandon()
        self.tell_cancelled()


class Opening(Query):
    """A question for a region: its owner may answer that there is none yet, and again when there is."""

    _missing = False

    def __init__(self, flow: Flow, region: str, body: bytes, timeout: float) -> None:
        super().__init__(flow, region, "open", body, timeout, decode_description)

    def replied(self, flags: int, service: int, payload: memoryview, owned: bool) -> None:
        if bytes(payload) == DONE and not flags & _ERROR:
            self._missing = True
            self._settle()
        else:
            super().replied(flags, service, payload, owned)

    def _late(self, timeout: float) -> DeadlineError:
        error = super()._late(timeout)
        if self._missing:
            error.message = f"{self.peer} has no region {self.region!r}, and registered none within {timeout:g} s."
            error.hint = "Register it there, correct the name, or pass a larger timeout=."
        return error

"""Calls under way, as the caller sees them.

A call is a Work that waits in its router's `requests` under its ident. Its way, written out for its speed: the caller's
thread packs the arguments, takes the lock once, sends with one system call, and drives the engine itself until the
reply is there. The reply's bytes are decoded by whoever asks for the result, without the lock.

Giving up (timeout, cancel) takes the call out of `requests`, withdraws what has not left, and tells the server. What
comes for it afterwards is counted as late and dropped.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

import msgspec

from rankmesh.buffers import readable, writable
from rankmesh.codec import unpack_plain
from rankmesh.endpoint.outbound import JOIN_BYTES, SEND_COST
from rankmesh.endpoint.requests import Asking
from rankmesh.endpoint.router import Router
from rankmesh.endpoint.transfers import Send, SendState
from rankmesh.errors import (
    BusyError,
    CancelledError,
    CodecError,
    ConnectError,
    FunctionNotFound,
    InvalidMessage,
    NoConnection,
    PeerLost,
    RankmeshError,
    RemoteError,
    TruncationError,
)
from rankmesh.rpc.failures import ERRORS
from rankmesh.rpc.protocol import (
    PLAIN_RESULT,
    REPLY,
    SERVICE,
    Bit,
    Kind,
    Why,
    malformed,
    read_failure,
    read_item,
    read_reply,
    signal,
)
from rankmesh.wire.header import Flag
from rankmesh.wire.header import Kind as FrameKind

_REPLY_BYTES: Final = REPLY.size
#: The head of a reply as one value, and what that is for a plain result.
_head_of: Final = struct.Struct(f"{REPLY.size}s").unpack_from
_PLAIN_RESULT: Final = (PLAIN_RESULT[0],)
_REQUEST: Final = int(FrameKind.REQUEST)
_REQUEST_FLAG: Final = int(Flag.REQUEST)
_FAILURE: Final = Kind.FAILURE
CANCEL: Final = signal(Kind.CANCEL)
#: Seconds until a call that found the server's queue full tries again: the first time, then doubled up to the last.
_AGAIN: Final = (0.001, 0.1)

Part = memoryview | bytes


class Carrier(Send):
    """The Send of a request too large for one frame, or without a connection yet: if it fails, so does the call."""

    def __init__(self, call: Outgoing, parts: list[Part], nbytes: int) -> None:
        views = [memoryview(part) for part in parts]
        super().__init__(call.router, call.op, SERVICE, call.ident, _REQUEST_FLAG, views, nbytes, call.timeout)
        self._call = call

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        call = self._call
        if call.router.requests.get(call.ident) is call:  # else the router fails the call itself, or it has ended
            del call.router.requests[call.ident]
            call.fail(error)

    def give_up(self) -> None:
        """The call was given up: the caller's buffers are no longer read."""
        if not self.finished:
            self._give_up(CancelledError("The call was given up."))


def _op(what: str, name: str) -> str:
    return f"{what} {name!r} at"


def _check_free(router: Router, what: str, name: str) -> None:
    """Raise if a request cannot be made now."""
    hub, waiting = router.hub, len(router.requests)
    if hub.closed:
        hub.check_open()
    if router.gone:
        raise router.lost_error(_op(what, name), None)
    if waiting * SEND_COST >= hub.config.send_queue_bytes:
        raise BusyError(
            f"{waiting} calls to {router.peer} are under way already, as many as Config.send_queue_bytes "
            f"({hub.config.send_queue_bytes}) allows."
        )


class Outgoing(Asking[Any]):
    """What a call and a stream have in common: a request sent under an ident, and replies to it."""

    what = "call of"
    tag: int | None = None
    _carrier: Carrier | None = None

    def __init__(self, router: Router, name: str, timeout: float) -> None:
        # Work.__init__, written out: a call less for every call
        self._engine = router.engine
        self.router = router
        self.peer = router.peer
        self.name = name
        self.timeout = timeout
        self.began = monotonic()

    @property
    def op(self) -> str:  # type: ignore[override]  # a text that only errors need
        return _op(self.what, self.name)

    def send(self, parts: list[Part], nbytes: int) -> None:
        """Send the request. With the lock."""
        router, outbound, requests = self.router, self.router.outbound, self.router.requests
        _check_free(router, self.what, self.name)
        self.ident = ident = outbound.new_ident()
        requests[ident] = self
        try:
            if len(parts) != 1 or not outbound.send_rpc(_REQUEST, 0, SERVICE, ident, parts[0]):
                self.transmit(parts, nbytes)
        except BaseException:
            requests.pop(ident, None)
            raise
        self.hint = router.inbound.direct

    def transmit(self, parts: list[Part], nbytes: int) -> None:
        """A frame of this call's. With the lock."""
        outbound = self.router.outbound
        if nbytes <= JOIN_BYTES:
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            if outbound.send_rpc(_REQUEST, 0, SERVICE, self.ident, body):
                return
        self._carrier = Carrier(self, parts, nbytes)
        outbound.start(self._carrier)

    def tell(self, body: bytes) -> None:
        """Something small about this call, if there is a connection to say it on. With the lock."""
        try:
            self.router.outbound.send_rpc(_REQUEST, 0, SERVICE, self.ident, body)
        except BusyError:  # so much waits that the other side does not read: it will notice by itself
            pass

    def fail(self, error: BaseException) -> None:
        carrier = self._carrier
        if isinstance(error, ConnectError | PeerLost) and carrier is not None and carrier.state is SendState.WAITING:
            about = {name: value for name, value in error.__dict__.items() if name != "message"}
            error = NoConnection(error.message, **about, hint="The call was not sent. See that the peer runs.")
        super().fail(error)

    def leave(self) -> None:
        """Take it out of the requests; what of it has not left does not. With the lock."""
        self.router.requests.pop(self.ident, None)
        carrier, self._carrier = self._carrier, None
        if carrier is not None and not carrier.finished:
            carrier.give_up()
        else:
            self.tell(CANCEL)

    def _give_up(self, error: RankmeshError) -> None:
        self.leave()
        self.fail(error)

    def failure(self, body: memoryview | bytes) -> BaseException:
        """The exception that a FAILURE stands for."""
        try:
            told = read_failure(body)
        except InvalidMessage as error:
            return error
        make = ERRORS.get(told.why)
        return malformed(f"a failure of an unknown sort ({told.why!r})") if make is None else make(self, told)

    def unserved(self, payload: memoryview | bytes) -> BaseException:
        """The endpoint answered itself: it has no functions at all, or could not send the reply."""
        text = bytes(payload).decode(errors="replace")
        if f"no service {SERVICE}" in text:
            return FunctionNotFound(
                f"{self.peer} has registered no functions, so there is no {self.name!r}.",
                function=self.name,
                peer=str(self.peer),
            )
        return RemoteError(
            f"{self.peer} could not answer the {self.what} {self.name!r}: {text}",
            remote_type="RankmeshError",
            remote_message=text,
            peer=str(self.peer),
        )


class Notice(Outgoing):
    """A call that nobody waits for."""

    what = "notification of"

    def complete(self, parts: list[Part], nbytes: int) -> None:
        """Send it; wait until it has left, if it is large."""
        with self._engine:
            self.send(parts, nbytes)
            del self.router.requests[self.ident]  # there will be no reply
        if self._carrier is not None:
            self._carrier.result()


class Call(Outgoing):
    """A call that waits for its result."""

    # Defaults on the class, as in Work: what most calls never set costs them nothing.
    _reply: Any = None
    _foreign = False
    _pause = _AGAIN[0]
    #: Where, and as what, the caller wants the result.
    out: Any = None
    returns: Any = None

    def __init__(
        self,
        router: Router,
        name: str,
        parts: list[Part],
        nbytes: int,
        timeout: float,
        learn: Callable[[str], object],
    ) -> None:
        # Outgoing.__init__, written out
        self._engine = router.engine
        self.router = router
        self.peer = router.peer
        self.name = name
        self.timeout = timeout
        self.began = monotonic()
        self._parts = parts
        self._nbytes = nbytes
        #: Told the name of a function that says it is idempotent.
        self._learn = learn

    def begin(self) -> None:
        """Send it; the caller waits later."""
        with self._engine:
            self.send(self._parts, self._nbytes)

    def complete(self) -> Any:
        """Send it and wait for the result."""
        with self._engine:
            self.send(self._parts, self._nbytes)
            self.await_reply()
        return self.outcome()

    def replied(self, flags: int, service: int, payload: memoryview, owned: bool) -> None:
        plain = service == SERVICE and len(payload) > _REPLY_BYTES and _head_of(payload) == _PLAIN_RESULT
        if plain and self.returns is None and self.out is None:
            try:
                (self._value,) = unpack_plain(payload[_REPLY_BYTES:])  # the short way: no copy, decoded right here
            except (CodecError, ValueError):
                pass  # the general way tells what is wrong
            else:
                del self.router.requests[self.ident]
                self._parts = []
                self._carrier = None
                if self.parker is None and self._callbacks is None:
                    self.finished = True
                else:
                    self._end()
                return
        if not owned:
            payload = bytearray(payload)  # type: ignore[assignment]  # as good as a view, and arrays in it are writable
        if service != SERVICE:
            self._foreign = True
        elif payload and payload[0] == _FAILURE and self._try_again(payload):
            return
        self.router.requests.pop(self.ident, None)
        self._parts = []
        self._carrier = None  # which knows this call: the two would keep a large result alive until the collector comes
        self._reply = payload
        if self.parker is None and self._callbacks is None:
            self.finished = True
        else:
            self._end()

    def _try_again(self, payload: memoryview) -> bool:
        """The server's queue is full, and its callers shall wait. True: another attempt will be made."""
        try:
            waits = read_failure(payload[read_reply(payload)[2] :]).why == Why.WAIT
        except InvalidMessage:
            return False
        if waits:
            self._engine.call_at(monotonic() + self._pause, self._resend)
            self._pause = min(2 * self._pause, _AGAIN[1])
        return waits

    def _resend(self) -> None:
        if self.finished:
            return
        try:
            self.transmit(self._parts, self._nbytes)
        except RankmeshError as error:
            self.router.requests.pop(self.ident, None)
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        self._parts = []
        super().fail(error)

    def outcome(self) -> Any:
        reply = self._reply
        if reply is not None:
            self._decode(reply)
            self._reply = None
        if self._error is not None:
            raise self._error
        return self._value

    def expire(self) -> None:
        """End it if its time is up. Takes the lock."""
        with self._engine:
            if not self.finished and monotonic() >= self.began + self.timeout:
                self._give_up(self._late(self.timeout))

    def exception(self) -> BaseException | None:
        """What a call that has ended failed with."""
        try:
            self.outcome()
        except BaseException as error:  # noqa: BLE001  # it is asked for
            return error
        return None

    def _decode(self, payload: memoryview) -> None:
        try:
            if self._foreign:
                raise self.unserved(payload)
            kind, flags, body_at, _ = read_reply(payload)
            body = memoryview(payload)[body_at:]
            if kind == Kind.RESULT:
                if flags & Bit.IDEMPOTENT:
                    self._learn(self.name)
                value = read_item(flags, body, self.router.hub.config.allow_pickle)
                self._value = value if self.returns is None and self.out is None else self._land(value)
            elif kind == _FAILURE:
                raise self.failure(body)
            else:
                raise malformed(f"a reply of kind {kind} to a call")
        except CodecError as error:
            self._error = self._unreadable(error)
        except Exception as error:  # noqa: BLE001  # kept, and raised for whoever asks for the result
            self._error = error

    def _unreadable(self, error: CodecError) -> InvalidMessage:
        return InvalidMessage(
            f"The result of {self.name!r} at {self.peer} cannot be read: {error.message}",
            function=self.name,
            peer=str(self.peer),
            reason=error.message,
            hint=error.hint,
        )

    def _land(self, value: Any) -> Any:
        """The result where and as what the caller wants it."""
        if self.returns is not None:
            try:
                value = msgspec.convert(value, self.returns)
            except (msgspec.MsgspecError, TypeError, ValueError) as error:
                raise CodecError(f"it is not a {self.returns}: {error}.", hint="Ask for what it returns.") from error
        if self.out is not None:
            _copy_into(self.out, value)
            return self.out
        return value


def call_plain(router: Router, name: str, body: bytes, timeout: float, learn: Callable[[str], object]) -> Any:
    """Make a call whose request is small, and wait for its result: `Call.complete`, written out. The request is sent
    first: the call is made while it is on its way, which nobody can notice before the lock is free."""
    engine, outbound = router.engine, router.outbound
    if not engine.lock.acquire(False):
        engine.acquire()
    try:
        _check_free(router, Call.what, name)
        outbound.last_ident = ident = outbound.last_ident + 1
        sent = outbound.send_rpc(_REQUEST, 0, SERVICE, ident, body)
        call = Call(router, name, [body], len(body), timeout, learn)
        call.ident = ident
        router.requests[ident] = call
        if not sent:
            try:
                call.transmit([body], len(body))
            except BaseException:
                router.requests.pop(ident, None)
                raise
        call.hint = router.inbound.direct
        call.await_reply()
    finally:
        engine.lock.release()
        if engine.deferred or engine.contenders:
            engine.after_release()
    return call.outcome()


def _copy_into(out: Any, value: Any) -> None:
    source, target = readable(value), writable(out)
    if source.nbytes != target.nbytes:
        raise TruncationError(
            f"The result has {source.nbytes} bytes and out= has {target.nbytes}.",
            nbytes=source.nbytes,
            capacity=target.nbytes,
            hint="Pass an out= of just the result's size.",
        )
    target[:] = source

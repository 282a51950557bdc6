"""Streams and channels, as the side that serves them runs them.

A generator runs on a thread of the pool as far as credit goes. With an item in hand that there is no credit for, it is
put aside, and takes no thread; the caller's next CREDIT puts it back into the queue. So a caller that does not read
costs the server a generator and an item, and never a thread. An async generator waits on the event loop.

A channel's handler gets a Channel before its arguments. A plain one keeps its thread as long as it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from rankmesh.errors import CancelledError, InvalidMessage
from rankmesh.rpc.answers import Answer, Refusal
from rankmesh.rpc.context import CallContext, current
from rankmesh.rpc.protocol import Body, Kind, RequestHead, Why, credit_reply, end_reply, read_amount, reply
from rankmesh.rpc.server import Server
from rankmesh.rpc.streams import Channel, Inbox, Outbox

#: Seconds an item may wait for credit: the caller's end, or its loss, comes before that.
PATIENCE: Final = 24 * 3600.0


class Serving:
    """A stream or channel being served: its two halves, and what messages about it do. With the lock."""

    def __init__(self, server: Server, call: CallContext) -> None:
        self.server = server
        self.call = call
        self.inbox = Inbox(call.router, self._pay)
        self.outbox = Outbox(call.router, self._send_item)

    def _pay(self, amount: int) -> None:
        body = credit_reply(amount)
        self.server.transmit(self.call.router, self.call.ident, [body], len(body))

    def _send_item(self, body: Body, number: int) -> None:
        self.server.transmit(self.call.router, self.call.ident, *reply(Kind.ITEM, body, number=number))

    def credit(self, amount: int) -> None:
        self.outbox.credit(amount)

    def cancelled(self) -> None:
        error = CancelledError(f"The caller of {self.call.name!r}, {self.call.caller}, no longer wants it.")
        self.inbox.end(error)
        self.outbox.end(error)

    def ended(self) -> Answer:
        body = end_reply(self.outbox.number)
        return [body], len(body)


class Producer(Serving):
    """A generator, or anything else that can be iterated over, on the pool."""

    def __init__(self, server: Server, call: CallContext) -> None:
        super().__init__(server, call)
        self._items: Iterator[Any] | None = None
        self._held: Body | None = None
        self._hooks_ended: Callable[[BaseException | None], None] | None = None

    def credit(self, amount: int) -> None:
        super().credit(amount)
        if self._held is not None and self.outbox.open:
            self.outbox.send(self._held)
            self._held = None
            self.server.pool.submit(self.run)

    def cancelled(self) -> None:
        super().cancelled()
        if self._held is not None:  # it was put aside: it has to run once more, to end
            self._held = None
            self.server.pool.submit(self.run)

    def run(self) -> None:
        """A task of the pool: produce until the end, or until there is no credit."""
        server, call = self.server, self.call
        error: BaseException | None = None
        answer: Answer | None = None
        token = current.set(call)
        try:
            if self._produce():
                return
            answer = self.ended()
        except Refusal as refusal:
            answer, error = refusal.answer(self.outbox.number), refusal
        except BaseException as raised:  # noqa: BLE001  # whatever a handler raises is told to its caller
            answer, error = server.raised(call, raised, self.outbox.number), raised
        finally:
            current.reset(token)
        if self._hooks_ended is not None:
            self._hooks_ended(error)
        with server.engine:
            server.finish(call, answer)

    def _produce(self) -> bool:
        """True: put aside with an item. False: it has ended."""
        server, call = self.server, self.call
        if self._items is None:
            if call.given_up:
                return False
            function, args, kwargs = server.prepare(call)
            self._hooks_ended = server.begin(call)
            self._items = _iterator(call, function(*args, **kwargs))
        for value in self._items:
            if call.cancelled:
                break
            body = server.pack(call, value)
            with server.engine:
                if call.given_up:
                    break
                if not self.outbox.open:
                    self._held = body
                    return True
                self.outbox.send(body)
        close = getattr(self._items, "close", None)
        if close is not None:
            close()
        return False


def _iterator(call: CallContext, made: Any) -> Iterator[Any]:
    try:
        return iter(made)
    except TypeError:
        raise Refusal(
            Why.INVALID, f"{call.name!r} returned a {type(made).__name__}, which is no stream. Use call()."
        ) from None


class Conversing(Serving):
    """A channel."""

    def channel(self) -> Channel:
        timeout = self.server.config.timeout
        return Channel(self.inbox, self.outbox, self._packed, self._end, _nothing, timeout)

    def _packed(self, value: Any) -> Body:
        try:
            return self.server.pack(self.call, value)
        except Refusal as refusal:
            raise InvalidMessage(f"This item cannot be sent: {refusal}") from refusal

    def _end(self) -> None:
        """The handler's end is the channel's: there is nothing to say before that."""

    def run(self) -> None:
        """A task of the pool."""
        server, call = self.server, self.call
        error: BaseException | None = None
        token = current.set(call)
        ended = None
        try:
            function, args, kwargs = server.prepare(call)
            ended = server.begin(call)
            function(self.channel(), *args, **kwargs)
            answer = self.ended()
        except Refusal as refusal:
            answer, error = refusal.answer(self.outbox.number), refusal
        except BaseException as raised:  # noqa: BLE001  # whatever a handler raises is told to its caller
            answer, error = server.raised(call, raised, self.outbox.number), raised
        finally:
            current.reset(token)
        if ended is not None:
            ended(error)
        with server.engine:
            self.close()
            server.finish(call, answer)

    def close(self) -> None:
        error = CancelledError(f"The handler of {self.call.name!r} has returned.")
        self.inbox.end(error)
        self.outbox.end(error)


def _nothing() -> None:
    """A handler's channel ends with the handler."""


class Streams:
    """What the server does with requests that open streams and channels, and with messages about them."""

    def __init__(self, server: Server) -> None:
        self._server = server
        server.takes |= {Kind.STREAM: self._stream, Kind.CHANNEL: self._channel}
        server.about |= {Kind.CREDIT: _credit, Kind.ITEM: _item, Kind.END: _end}

    def _stream(self, call: CallContext) -> None:
        function = call.function
        if function is None or function.channel or (function.is_async and not function.streams):
            raise Refusal(Why.INVALID, f"{call.name!r} is no stream. Use {_verb(call)}().")
        if function.is_async:
            self._spawn(call, Serving(self._server, call))
        else:
            call.state = producer = Producer(self._server, call)
            self._server.pool.submit(producer.run)

    def _channel(self, call: CallContext) -> None:
        function = call.function
        if function is None or not function.channel:
            raise Refusal(Why.INVALID, f"{call.name!r} is no channel. Use {_verb(call)}().")
        conversing = Conversing(self._server, call)
        if function.is_async:
            self._spawn(call, conversing)
        else:
            call.state = conversing
            self._server.pool.submit(conversing.run)

    def _spawn(self, call: CallContext, serving: Serving) -> None:
        call.state = serving
        server = self._server

        def spawn() -> None:
            from rankmesh.rpc import loop

            server.spawn(call, lambda: loop.produce(serving))

        server.engine.defer(spawn)


def _verb(call: CallContext) -> str:
    function = call.function
    if function is None:
        return "call"
    return "channel" if function.channel else "stream" if function.streams else "call"


def _credit(call: CallContext, head: RequestHead, body: memoryview, owned: bool) -> None:
    if call.state is not None:
        call.state.credit(read_amount(body))


def _item(call: CallContext, head: RequestHead, body: memoryview, owned: bool) -> None:
    if isinstance(call.state, Conversing):
        call.state.inbox.put(_number(head), head[1], body, owned)


def _end(call: CallContext, head: RequestHead, body: memoryview, owned: bool) -> None:
    if isinstance(call.state, Conversing):
        call.state.inbox.end_after(_number(head))


def _number(head: RequestHead) -> int:
    if head[5] > 2**53:
        raise InvalidMessage("An item's number is not a number.")
    return int(head[5])

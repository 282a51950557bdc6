"""Streams and channels: items in order, as far as credit goes.

Rules, the same in both directions:

- An item costs its bytes plus OVERHEAD. A sender may send an item, of any size, while less than WINDOW is outstanding.
- The receiver owes an item's cost once its consumer has taken it, and pays in batches of a quarter of the window. So a
  consumer that stops taking stops its producer, and nobody else: the queue between them is bounded in bytes.
- A side that sends beyond its credit breaks the stream.

`Inbox` and `Outbox` are the two halves, used by callers and servers alike. Their methods need the engine's lock, but
for those of Stream and Channel, which users call: they take it. A wait is a Work, so threads and tasks wait alike.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Self

from rankmesh.config import KIB
from rankmesh.endpoint.work import Work
from rankmesh.errors import CodecError, InvalidMessage, RankmeshError
from rankmesh.rpc.protocol import Body, malformed, read_item

if TYPE_CHECKING:
    from rankmesh.endpoint.progress import Engine
    from rankmesh.endpoint.router import Router

WINDOW: Final = 256 * KIB
OVERHEAD: Final = 128

#: An item's flags and body.
Entry = tuple[int, Any]


class _End:
    """What a wait for an item gets when there is none any more."""


END: Final = _End()


class _Next(Work[Any]):
    """A consumer that waits for an item."""

    def __init__(self, inbox: Inbox, timeout: float) -> None:
        super().__init__(inbox.engine, "next item of", inbox.peer, None, timeout)
        self._inbox = inbox

    def _give_up(self, error: RankmeshError) -> None:
        self._inbox.waiters.remove(self)
        self.fail(error)


class _Room(Work[None]):
    """A producer that waits for credit, with its item."""

    def __init__(self, outbox: Outbox, body: Body, timeout: float) -> None:
        super().__init__(outbox.engine, "send an item to", outbox.peer, None, timeout)
        self._outbox = outbox
        self.body = body

    def _give_up(self, error: RankmeshError) -> None:
        self._outbox.waiters.remove(self)
        self.fail(error)


class Inbox:
    """Items that have come, and consumers that wait for them."""

    def __init__(self, router: Router, pay: Callable[[int], None]) -> None:
        self.engine: Engine = router.engine
        self.peer = router.peer
        self._allow_pickle = router.hub.config.allow_pickle
        self._pay = pay
        self._entries: deque[tuple[Entry, int]] = deque()
        self.waiters: deque[_Next] = deque()
        self._outstanding = 0
        self._owed = 0
        self._largest = 0
        #: The number of the next item; those that overtook it; how many there are in all, and why, once that is known.
        self._next = 0
        self._early: dict[int, tuple[Entry, int]] = {}
        self._total: int | None = None
        self.ended = False
        self._error: BaseException | None = None

    def put(self, number: int, flags: int, body: memoryview, owned: bool) -> None:
        """An item came. Raises InvalidMessage if there was no credit for it, or it is not to come now."""
        if self.ended:
            return
        cost = len(body) + OVERHEAD
        self._largest = max(self._largest, cost)  # items overtake each other, so any of them may have been the last
        if self._outstanding + cost - self._largest >= WINDOW:
            raise malformed(f"{self._outstanding + cost} bytes of items, over its credit of {WINDOW}")
        if number < self._next or number in self._early or (self._total is not None and number >= self._total):
            raise malformed(f"item {number}, which it has sent before or after its end")
        self._outstanding += cost
        self._early[number] = ((flags, body if owned else bytearray(body)), cost)
        while (found := self._early.pop(self._next, None)) is not None:
            self._next += 1
            if self.waiters:
                self.waiters.popleft().finish(found[0])
                self._taken(found[1])
            else:
                self._entries.append(found)
        if self._next == self._total:
            self.end(self._error)

    def end_after(self, total: int, error: BaseException | None = None) -> None:
        """It ends after so many items, which have not all come perhaps. Raises InvalidMessage if more have."""
        if self.ended:
            return
        if total < self._next + len(self._early) or self._total is not None:
            raise malformed(f"the end of a stream after {total} items, and {self._next} or more before")
        self._total, self._error = total, error
        if self._next == total:
            self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        """No further item comes. Those that are here can still be taken."""
        if self.ended:
            return
        self.ended = True
        self._error = error
        self._early.clear()
        while self.waiters:
            waiter = self.waiters.popleft()
            if error is None:
                waiter.finish(END)
            else:
                waiter.fail(error)

    def clear(self) -> None:
        self._entries.clear()

    def _taken(self, cost: int) -> None:
        self._owed += cost
        if self._owed >= WINDOW // 4 and not self.ended:
            self._outstanding -= self._owed
            owed, self._owed = self._owed, 0
            self._pay(owed)

    def next_work(self, timeout: float) -> Work[Any] | Entry | _End:
        """The next entry, or END, or a Work that gets one. Takes the lock. Raises what ended the stream."""
        with self.engine:
            if self._entries:
                entry, cost = self._entries.popleft()
                self._taken(cost)
                return entry
            if self.ended:
                if self._error is not None:
                    raise self._error
                return END
            waiter = _Next(self, timeout)
            self.waiters.append(waiter)
            return waiter

    def decoded(self, entry: Entry) -> Any:
        try:
            return read_item(*entry, self._allow_pickle)
        except CodecError as error:
            raise InvalidMessage(
                f"An item of {self.peer} cannot be read: {error.message}", peer=str(self.peer), reason=error.message
            ) from error


class Outbox:
    """Items to be sent, and producers that wait for credit."""

    def __init__(self, router: Router, transmit: Callable[[Body, int], None]) -> None:
        self.engine: Engine = router.engine
        self.peer = router.peer
        #: Sends a body as item `number`.
        self._transmit = transmit
        self.number = 0
        self.waiters: deque[_Room] = deque()
        self._outstanding = 0
        self._error: BaseException | None = None

    @property
    def open(self) -> bool:
        """There is credit for an item, and nobody waits for it."""
        return not self.waiters and self._outstanding < WINDOW

    def send(self, body: Body) -> None:
        """Send an item while it is open."""
        self._outstanding += body.nbytes + OVERHEAD
        self._transmit(body, self.number)
        self.number += 1

    def queue(self, body: Body, timeout: float) -> Work[None]:
        """Send now or when there is credit; the Work is done when it was sent. Raises what ended the stream."""
        if self._error is not None:
            raise self._error
        room = _Room(self, body, timeout)
        if self.open:
            self.send(body)
            room.finish(None)
        else:
            self.waiters.append(room)
        return room

    def credit(self, amount: int) -> None:
        """The other side has taken items. Raises InvalidMessage for more than it was sent."""
        if amount > self._outstanding:
            raise malformed(f"credit for {amount} bytes of items, when {self._outstanding} were sent")
        self._outstanding -= amount
        while self.waiters and self._outstanding < WINDOW:
            room = self.waiters.popleft()
            self.send(room.body)
            room.finish(None)

    def end(self, error: BaseException) -> None:
        """Nothing can be sent any more."""
        self._error = self._error or error
        while self.waiters:
            self.waiters.popleft().fail(error)


class Stream:
    """The items that a remote generator yields; iterate over it, with `for` or `async for`.

    The generator runs ahead of the consumer by at most a window of bytes. Leaving early stops it: `close()`, the end of
    a `with` block, or letting go of this object. An error there is raised here, after the items that came before it.
    Each wait for an item takes at most `timeout` seconds; then the stream is over, and DeadlineError is raised.
    """

    def __init__(self, inbox: Inbox, abandon: Callable[[], None], timeout: float) -> None:
        self._inbox = inbox
        self._timeout = timeout
        self._abandon = abandon
        # A finalizer may run anywhere, also where this thread holds the lock: what it does is deferred.
        self._finalizer = weakref.finalize(self, inbox.engine.defer, abandon)
        self._finalizer.atexit = False

    def recv(self, timeout: float | None = None) -> Any:
        """Wait for the next item. Raises StopIteration at the end."""
        try:
            found = self._inbox.next_work(self._timeout if timeout is None else timeout)
            entry = found.result() if isinstance(found, Work) else found
        except BaseException:
            self.close()
            raise
        if isinstance(entry, _End):
            raise StopIteration
        return self._inbox.decoded(entry)

    async def arecv(self, timeout: float | None = None) -> Any:  # noqa: ASYNC109  # as of every wait in rankmesh
        """Like `recv`, in asyncio. Raises StopAsyncIteration at the end."""
        try:
            found = self._inbox.next_work(self._timeout if timeout is None else timeout)
            entry = await found if isinstance(found, Work) else found
        except BaseException:
            self.close()
            raise
        if isinstance(entry, _End):
            raise StopAsyncIteration
        return self._inbox.decoded(entry)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.recv()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        return await self.arecv()

    def close(self) -> None:
        """Stop it, if it has not ended. Twice is once."""
        if self._finalizer.detach() is not None:
            self._abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} with {self._inbox.peer}: {'ended' if self._inbox.ended else 'open'}>"


class Channel(Stream):
    """Items in both directions. What the other side sends is iterated over; `send` sends; `end()` says that nothing
    more comes from here."""

    def __init__(
        self,
        inbox: Inbox,
        outbox: Outbox,
        pack: Callable[[Any], Body],
        ended: Callable[[], None],
        abandon: Callable[[], None],
        timeout: float,
    ) -> None:
        super().__init__(inbox, abandon, timeout)
        self._outbox = outbox
        self._pack = pack
        self._ended = ended

    def send(self, item: Any, timeout: float | None = None) -> None:
        """Send an item; wait while the other side has a window of them untaken."""
        self._queue(item, timeout).result()

    async def asend(self, item: Any, timeout: float | None = None) -> None:  # noqa: ASYNC109  # as above
        """Like `send`, in asyncio."""
        await self._queue(item, timeout)

    def _queue(self, item: Any, timeout: float | None) -> Work[None]:
        body = self._pack(item)
        with self._outbox.engine:
            return self._outbox.queue(body, self._timeout if timeout is None else timeout)

    def end(self) -> None:
        """Nothing more is sent from here; the other side's iteration ends after what was sent. Receiving goes on."""
        self._ended()

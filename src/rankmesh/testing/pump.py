"""Moves bytes over links in tests: as much as they take, then polls, all under one deadline.

A Pump does to its link what the progress engine does, and nothing that base.py does not promise. It is therefore also a
test of readiness: a link that does not poll ready when it should lets the deadline pass.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat

from rankmesh.config import Config
from rankmesh.transport import Address, Link, Listener, Transport

#: Bytes for one call where a test does not choose: about what the engine uses.
CALL_BYTES = 256 * 1024

NOTHING = memoryview(bytearray())


class Pump:
    """One side of a transfer: sends `outgoing`, receives until `incoming` is full, in calls of the sizes `chunks`."""

    def __init__(
        self,
        link: Link,
        *,
        outgoing: bytes | memoryview = b"",
        incoming: memoryview | None = None,
        chunks: Iterator[int] | None = None,
    ) -> None:
        self.link = link
        self.outgoing = memoryview(outgoing)
        self.incoming = memoryview(b"") if incoming is None else incoming
        self.chunks = repeat(CALL_BYTES) if chunks is None else chunks
        self.sent = 0
        self.received = 0

    @property
    def done(self) -> bool:
        return self.sent == self.outgoing.nbytes and self.received == self.incoming.nbytes

    def step(self) -> bool:
        """Do what can be done at once; true if anything moved."""
        before = self.sent + self.received
        while self.sent < self.outgoing.nbytes:
            try:
                self.sent += self.link.send(self.outgoing[self.sent :][: next(self.chunks)])
            except BlockingIOError:
                break
        while self.received < self.incoming.nbytes:  # until it blocks: see Link.drained_on_short_read
            try:
                count = self.link.recv_into(self.incoming[self.received :][: next(self.chunks)])
            except BlockingIOError:
                break
            if count == 0:
                raise AssertionError(f"{self.link} ended after {self.received} of {self.incoming.nbytes} bytes")
            self.received += count
        self.link.wants_write(self.sent < self.outgoing.nbytes)
        if self.received == self.incoming.nbytes:
            self.link.recv_into(NOTHING)  # answers a doorbell: a link may have rung to get rid of bytes it has taken
        return self.sent + self.received > before


def run(pumps: Sequence[Pump], timeout: float) -> None:
    """Run all pumps in this thread until they are done; AssertionError when time is up."""
    deadline = time.monotonic() + timeout
    while not all(pump.done for pump in pumps):
        moved = [pump.step() for pump in pumps]
        if any(moved):
            continue
        left = deadline - time.monotonic()
        if left < 0 or not wait_any([pump.link for pump in pumps], left):
            raise AssertionError(f"nothing moved: {[(p.link, p.sent, p.received) for p in pumps]}")


def transfer(source: Link, target: Link, data: bytes | memoryview, timeout: float) -> bytes:
    """Send `data` over the connection and return what arrived."""
    arrived = bytearray(len(data))
    run([Pump(source, outgoing=data), Pump(target, incoming=memoryview(arrived))], timeout)
    return bytes(arrived)


def is_ready(link: Link, timeout: float = 0.0) -> bool:
    return wait_any([link], timeout)


def wait_any(links: Sequence[Link | Listener], timeout: float) -> bool:
    """Poll as the engine does; false when time is up and none is ready."""
    poll = select.poll()
    for link in links:
        poll.register(link.fileno(), link.poll_mask() if isinstance(link, Link) else select.POLLIN)
    return bool(poll.poll(max(0.0, timeout) * 1000))


def retry(link: Link, operation: Callable[[], int | None], timeout: float) -> int | None:
    """Repeat an operation, whenever the link is ready, until it does not block."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return operation()
        except BlockingIOError:
            if not is_ready(link, deadline - time.monotonic()):
                raise AssertionError(f"{link} was not ready within {timeout} s") from None


def connect_pair(
    transport: Transport, address: Address, config: Config, timeout: float, listener: Listener | None = None
) -> tuple[Link, Link]:
    """The connecting and the accepted link of a new connection, both established."""
    door = listener or transport.listen(address, config)
    try:
        return _connect_pair(transport, door, config, timeout)
    finally:
        if listener is None:
            door.close()


def _connect_pair(transport: Transport, listener: Listener, config: Config, timeout: float) -> tuple[Link, Link]:
    near = transport.connect(transport.resolve(listener.address)[0], config)
    pending = {near}
    try:
        if not wait_any([listener], timeout):
            raise AssertionError(f"{listener} does not hear of the connection")
        far = listener.accept()
        pending.add(far)
        establish([near, far], timeout)
        pending.clear()
        return near, far
    finally:
        for link in pending:
            link.abort()


def establish(links: Sequence[Link], timeout: float) -> None:
    """Carry several links through their handshakes, in turn, in one thread."""
    deadline = time.monotonic() + timeout
    waiting = list(links)
    while waiting:
        waiting = [link for link in waiting if not _is_established(link)]
        if waiting and not wait_any(waiting, deadline - time.monotonic()):
            raise AssertionError(f"{waiting} did not get through the handshake within {timeout} s")


def _is_established(link: Link) -> bool:
    try:
        link.establish()
    except BlockingIOError:
        return False
    return True

"""Faults at logical times, inside the process: a wrapper around any transport.

    faults = FaultTransport(transport_for(Address.parse("tcp://127.0.0.1:0")), seed=7)
    with faults.installed():                      # fault+tcp:// works everywhere an address does
        ...
        faults.links[0].cut(after_bytes=1000)

Times are bytes that this side of the link has sent since it was made, so a run with the same seed and the same traffic
meets its faults at the same places. A fault concerns both directions of its link:

    cut      the connection breaks, on both sides
    stall    nothing moves until resume()
    drop     as if the network had died: sends succeed and vanish, nothing arrives; the other side hears silence until
             this one closes
    trickle  reads and writes are shorter than asked for, by chance

`FaultTransport(reorder=n)` lets connections wait until n have come, and hands them out in shuffled order. For faults
between processes see proxy.py.
"""

from __future__ import annotations

import errno
import random
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Self

from rankmesh.buffers import Buffer, readable
from rankmesh.config import Config
from rankmesh.transport import Address, Link, Listener, Transport, register_transport, unregister_transport
from rankmesh.transport.address import FORMS
from rankmesh.transport.doorbell import Doorbell

State = Literal["up", "stalled", "dropped", "cut"]


class FaultLink:
    """A link whose faults are called by name, from any thread.

    Its descriptor is an epoll instance that watches the inner link only while that may be seen. `sent` counts the bytes
    that this side has sent.
    """

    #: A short read may be the fault's doing.
    drained_on_short_read = False

    def __init__(self, inner: Link, rng: random.Random, *, accepted: bool) -> None:
        self.inner = inner
        self.accepted = accepted
        self.sent = 0
        self.channels = inner.channels
        self.loopback = inner.loopback
        self.local, self.remote = f"fault+{inner.local}", f"fault+{inner.remote}"
        self._rng = rng
        self._lock = threading.RLock()
        self._state: State = "up"
        self._planned: dict[State, int] = {}  # state → bytes sent at which it begins
        self._longest = 0  # bytes of a call while trickling; 0 is no limit
        self._epoll = select.epoll()
        self._bell = Doorbell()  # rings when the inner link is gone, so that the owner looks
        self._epoll.register(self._bell.fileno(), select.EPOLLIN)
        self._watched = 0
        self._watch()

    def __repr__(self) -> str:
        return f"<FaultLink {self._state} after {self.sent} bytes: {self.local} → {self.remote}>"

    # -- faults -------------------------------------------------------------------------------------------------------

    def cut(self, after_bytes: int = 0) -> None:
        self._plan("cut", after_bytes)

    def stall(self, after_bytes: int = 0) -> None:
        self._plan("stalled", after_bytes)

    def drop(self, after_bytes: int = 0) -> None:
        self._plan("dropped", after_bytes)

    def trickle(self, max_bytes: int) -> None:
        self._longest = max_bytes

    def resume(self, for_bytes: int | None = None) -> None:
        """End a stall, begun or planned; `for_bytes`: until that many more have been sent."""
        with self._lock:
            self._planned.pop("stalled", None)
            if self._state == "stalled":
                self._state = "up"
            if for_bytes is not None:
                self._planned["stalled"] = self.sent + for_bytes
            self._watch()

    def _plan(self, state: State, after_bytes: int) -> None:
        with self._lock:
            self._planned[state] = after_bytes
            self._strike()

    def _strike(self) -> None:
        """Let the faults begin whose time has come."""
        due = [state for state, after in self._planned.items() if after <= self.sent]
        for state in due:
            del self._planned[state]
            self._state = state
        self._watch()
        if "cut" in due:
            self.inner.abort()

    def _watch(self) -> None:
        """Set what polling sees to what the present state shows of the inner link."""
        if self._epoll.closed:
            return
        mask = self.inner.poll_mask() if self._state == "up" else 0
        if mask != self._watched:
            if not self._watched:
                self._epoll.register(self.inner.fileno(), mask)
            elif mask:
                self._epoll.modify(self.inner.fileno(), mask)
            else:
                self._epoll.unregister(self.inner.fileno())
            self._watched = mask
        self._bell.set(self._state == "cut")

    # -- Link ---------------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return -1 if self._epoll.closed else self._epoll.fileno()

    def poll_mask(self) -> int:
        return select.POLLIN

    def wants_write(self, wanted: bool) -> None:
        with self._lock:
            self.inner.wants_write(wanted)
            self._watch()

    def establish(self) -> None:
        with self._usable():
            self.inner.establish()
            self.loopback = self.inner.loopback
            self.local = f"fault+{self.inner.local}"

    def recv_into(self, view: memoryview, /) -> int:
        with self._usable():
            if self._state == "dropped":
                raise BlockingIOError(errno.EAGAIN, "the network is dead")
            return self.inner.recv_into(view[: self._call_bytes(view.nbytes)])

    def send(self, data: Buffer, /) -> int:
        return self.sendmsg((data,))

    def sendmsg(self, buffers: Sequence[Buffer], /) -> int:
        with self._usable():
            views = [readable(buffer) for buffer in buffers]
            nbytes = sum(view.nbytes for view in views)
            if self._state == "dropped":
                self.sent += nbytes
                return nbytes
            limit = min(self._call_bytes(nbytes), *(after - self.sent for after in self._planned.values()), nbytes)
            taken = self.inner.sendmsg(_prefix(views, limit))
            self.sent += taken
            self._strike()
            return taken

    def shutdown_write(self) -> None:
        with self._usable():
            self.inner.shutdown_write()

    def close(self) -> None:
        self._end(self.inner.close)

    def abort(self) -> None:
        self._end(self.inner.abort)

    def _end(self, how: Callable[[], None]) -> None:
        with self._lock:
            self._epoll.close()
            self._bell.close()
            how()

    def _call_bytes(self, nbytes: int) -> int:
        return self._rng.randint(1, min(nbytes, self._longest)) if self._longest and nbytes else nbytes

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """Around every operation: refuse it in states that know none, and see to readiness afterwards."""
        with self._lock:
            if self._epoll.closed:
                raise OSError(errno.EBADF, f"{self} is closed")
            if self._state == "cut":
                raise ConnectionResetError(errno.ECONNRESET, f"{self} was cut")
            if self._state == "stalled":
                raise BlockingIOError(errno.EAGAIN, f"{self} is stalled")
            try:
                yield
            finally:
                self._watch()


class FaultListener:
    """Hands out connections in groups, each in shuffled order."""

    def __init__(self, transport: FaultTransport, inner: Listener, group: int) -> None:
        self.address = inner.address.with_scheme(transport.scheme)
        self._transport = transport
        self._inner = inner
        self._group = group
        self._held: list[Link] = []
        self._ready: list[Link] = []
        self._bell = Doorbell()
        self._epoll = select.epoll()
        for source in (inner, self._bell):
            self._epoll.register(source.fileno(), select.EPOLLIN)

    def fileno(self) -> int:
        return -1 if self._epoll.closed else self._epoll.fileno()

    def accept(self) -> Link:
        while True:
            try:
                self._held.append(self._inner.accept())
            except BlockingIOError:
                break
            if len(self._held) == self._group:
                self._transport.rng.shuffle(self._held)
                self._ready += self._held
                self._held.clear()
        if not self._ready:
            raise BlockingIOError(errno.EAGAIN, f"{len(self._held)} of {self._group} connections have come")
        link = self._transport.wrap(self._ready.pop(0), accepted=True)
        self._bell.set(bool(self._ready))
        return link

    def close(self) -> None:
        self._epoll.close()
        self._bell.close()
        self._inner.close()
        for link in (*self._held, *self._ready):
            link.abort()
        self._held, self._ready = [], []


class FaultTransport:
    """Wraps a transport. `prepare` sees every link when it is made, and may plan its faults; `links` keeps them all."""

    def __init__(
        self, inner: Transport, *, seed: int, prepare: Callable[[FaultLink], None] | None = None, reorder: int = 1
    ) -> None:
        self.scheme = f"fault+{inner.scheme}"
        self.links: list[FaultLink] = []
        self.rng = random.Random(seed)
        self._inner = inner
        self._prepare = prepare
        self._reorder = reorder
        print(f"{self.scheme}: seed = {seed}")

    @contextmanager
    def installed(self) -> Iterator[Self]:
        """Addresses of this scheme are carried by this transport within the block."""
        register_transport(self.scheme, lambda: self, form=FORMS[self._inner.scheme])
        try:
            yield self
        finally:
            unregister_transport(self.scheme)

    def listen(self, address: Address, config: Config) -> FaultListener:
        inner = self._inner.listen(address.with_scheme(self._inner.scheme), config)
        return FaultListener(self, inner, self._reorder)

    def resolve(self, address: Address) -> list[Address]:
        found = self._inner.resolve(address.with_scheme(self._inner.scheme))
        return [address.with_scheme(self.scheme) for address in found]

    def connect(self, address: Address, config: Config) -> FaultLink:
        return self.wrap(self._inner.connect(address.with_scheme(self._inner.scheme), config), accepted=False)

    def wrap(self, inner: Link, *, accepted: bool) -> FaultLink:
        link = FaultLink(inner, random.Random(self.rng.random()), accepted=accepted)
        self.links.append(link)
        if self._prepare is not None:
            self._prepare(link)
        return link


def _prefix(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The first `nbytes` of the views."""
    prefix = []
    for view in views:
        prefix.append(view[:nbytes])
        nbytes -= prefix[-1].nbytes
        if not nbytes:
            break
    return prefix

"""inproc:// carries bytes between threads of one process. It is the reference for what a Link does.

A connection is two pipes of PIPE_BYTES, one per direction, and two ends. Rules:

- Bytes are copied in and out, so neither side ever sees the other's buffers.
- One lock per connection guards both pipes and both ends. It is held for a copy at most, never across a wait.
- Each end has a doorbell, an eventfd. After every change, and under the lock, the bells of the ends concerned are set
  to the state that polling must see (`InprocLink._answer`): a bell can therefore neither be missed nor left ringing.
  A bell costs a system call only when its state changes.
- Each end closes its own doorbell. The other end learns of it by the pipes' flags.
"""

from __future__ import annotations

import errno
import itertools
import select
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

from rankmesh.buffers import EMPTY, Buffer, readable
from rankmesh.config import KIB, Config
from rankmesh.transport.address import Address
from rankmesh.transport.base import Link, Transport
from rankmesh.transport.doorbell import Doorbell

#: Bound of each direction: as much as a socket buffer that is neither tuned nor starved.
PIPE_BYTES: Final = 256 * KIB
#: Connections a listener keeps until they are accepted; further ones are refused.
BACKLOG: Final = 1024

_listeners: dict[str, InprocListener] = {}
_listeners_lock: Final = threading.Lock()
_numbers: Final = itertools.count(1)


class _Pipe:
    """One direction: a ring of bytes, and what is known of its two sides."""

    __slots__ = ("ended", "reader_gone", "reset", "ring", "start", "used")

    def __init__(self) -> None:
        self.ring = memoryview(bytearray(PIPE_BYTES))
        self.start = 0  # of the oldest byte
        self.used = 0
        self.ended = False  # no byte follows those in the ring
        self.reader_gone = False
        self.reset = False

    def put(self, data: memoryview) -> int:
        """Copy in what fits."""
        count = min(data.nbytes, PIPE_BYTES - self.used)
        end = (self.start + self.used) % PIPE_BYTES
        first = min(count, PIPE_BYTES - end)
        self.ring[end : end + first] = data[:first]
        self.ring[: count - first] = data[first:count]
        self.used += count
        return count

    def take(self, view: memoryview) -> int:
        """Copy out what is there."""
        count = min(view.nbytes, self.used)
        first = min(count, PIPE_BYTES - self.start)
        view[:first] = self.ring[self.start : self.start + first]
        view[first:count] = self.ring[: count - first]
        self.start = (self.start + count) % PIPE_BYTES
        self.used -= count
        return count

    def abandon(self) -> None:
        """Nobody will read: let the bytes and their memory go."""
        self.reader_gone = True
        self.ring = EMPTY
        self.used = 0


class InprocLink:
    """One end of a connection."""

    channels = 1
    drained_on_short_read = True
    loopback = True

    def __init__(self, lock: threading.Lock, incoming: _Pipe, outgoing: _Pipe, local: str, remote: str) -> None:
        self.local = local
        self.remote = remote
        self._lock = lock
        self._incoming = incoming
        self._outgoing = outgoing
        self._peer = self  # until `pair` has made the other end
        self._bell = Doorbell()
        self._wants_write = False

    @classmethod
    def pair(cls, local: str, remote: str) -> tuple[InprocLink, InprocLink]:
        """Two connected ends; `local` names the first."""
        lock, there, back = threading.Lock(), _Pipe(), _Pipe()
        one, other = cls(lock, back, there, local, remote), cls(lock, there, back, remote, local)
        one._peer, other._peer = other, one
        return one, other

    def __repr__(self) -> str:
        return f"<InprocLink {self.local} → {self.remote}{' closed' if self.fileno() < 0 else ''}>"

    def fileno(self) -> int:
        return self._bell.fileno()

    def poll_mask(self) -> int:
        return select.POLLIN

    def wants_write(self, wanted: bool) -> None:
        with self._lock:
            self._wants_write = wanted
            self._answer()

    def establish(self) -> None:
        self._check_usable()

    def recv_into(self, view: memoryview, /) -> int:
        with self._lock:
            self._check_usable()
            count = self._incoming.take(view)
            if count:
                self._answer()
                self._peer._answer()  # it may wait for room
            elif view.nbytes and not self._incoming.ended:
                raise BlockingIOError(errno.EAGAIN, "nothing to read")
            return count

    def send(self, data: Buffer, /) -> int:
        return self.sendmsg((data,))

    def sendmsg(self, buffers: Sequence[Buffer], /) -> int:
        views = [readable(buffer) for buffer in buffers]
        with self._lock:
            self._check_usable()
            if self._outgoing.ended or self._outgoing.reader_gone:
                raise BrokenPipeError(errno.EPIPE, f"the stream to {self.remote} is closed")
            taken = 0
            for view in views:
                count = self._outgoing.put(view)
                taken += count
                if count < view.nbytes:
                    break
            if taken:
                self._answer()
                self._peer._answer()
            elif any(view.nbytes for view in views):
                raise BlockingIOError(errno.EAGAIN, "the pipe is full")
            return taken

    def shutdown_write(self) -> None:
        with self._lock:
            self._check_usable()
            self._outgoing.ended = True
            self._peer._answer()

    def close(self) -> None:
        self._close(reset=False)

    def abort(self) -> None:
        self._close(reset=True)

    def _close(self, *, reset: bool) -> None:
        with self._lock:
            if self._bell.fileno() < 0:
                return
            self._bell.close()
            self._outgoing.ended = True
            self._incoming.abandon()
            if reset:
                self._outgoing.reset = self._incoming.reset = True
            self._peer._answer()

    def _check_usable(self) -> None:
        if self._bell.fileno() < 0:
            raise OSError(errno.EBADF, f"this end of the connection to {self.remote} is closed")
        if self._incoming.reset:
            raise ConnectionResetError(errno.ECONNRESET, f"{self.remote} aborted the connection")

    def _answer(self) -> None:
        """Set this end's doorbell to what polling must see now. Call it with the lock held."""
        incoming, outgoing = self._incoming, self._outgoing
        can_read = incoming.used or incoming.ended or incoming.reset
        can_write = self._wants_write and (outgoing.used < PIPE_BYTES or outgoing.reader_gone)
        self._bell.set(bool(can_read or can_write))


class InprocListener:
    """A name in this process's table, and the connections to it that were not accepted yet."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._waiting: deque[InprocLink] = deque()
        self._bell = Doorbell()

    def fileno(self) -> int:
        return self._bell.fileno()

    def accept(self) -> Link:
        with self._lock:
            if self._bell.fileno() < 0:
                raise OSError(errno.EBADF, f"the listener on {self.address} is closed")
            if not self._waiting:
                raise BlockingIOError(errno.EAGAIN, "no connection is waiting")
            link = self._waiting.popleft()
            self._bell.set(bool(self._waiting))
            return link

    def close(self) -> None:
        with _listeners_lock:
            if _listeners.get(self.address.host) is self:
                del _listeners[self.address.host]
        with self._lock:
            self._bell.close()
            while self._waiting:
                self._waiting.popleft().abort()

    def offer(self) -> InprocLink:
        """The near end of a new connection, whose far end waits to be accepted."""
        with self._lock:
            if self._bell.fileno() < 0 or len(self._waiting) >= BACKLOG:
                raise ConnectionRefusedError(errno.ECONNREFUSED, f"{self.address} is closed or accepts too slowly")
            near, far = InprocLink.pair(f"{self.address}#{next(_numbers)}", str(self.address))
            self._waiting.append(far)
            self._bell.set(True)
            return near


class InprocTransport:
    scheme = "inproc"

    def listen(self, address: Address, config: Config) -> InprocListener:
        with _listeners_lock:
            if address.host in _listeners:
                raise OSError(errno.EADDRINUSE, f"{address} is in use in this process; inproc:// makes a fresh name")
            name = address.host or f"anonymous-{next(_numbers)}"
            listener = _listeners[name] = InprocListener(Address(self.scheme, name))
            return listener

    def resolve(self, address: Address) -> list[Address]:
        return [address]

    def connect(self, address: Address, config: Config) -> Link:
        with _listeners_lock:
            listener = _listeners.get(address.host)
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"nobody listens on {address} in this process")
        return listener.offer()


def transport() -> Transport:
    return InprocTransport()

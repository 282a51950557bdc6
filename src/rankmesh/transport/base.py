"""The whole interface between the endpoint and a way of moving bytes.

A Link behaves like a non-blocking socket, whatever carries it:

- `recv_into(view)` returns how many bytes arrived (> 0), or 0 at the orderly end of the stream;
- `send(data)` and `sendmsg(buffers)` return how many bytes were taken (> 0), in order, possibly fewer than given;
- each raises `BlockingIOError` when it can do nothing now, and another `OSError` when the connection is broken;
- nothing is ever lost, doubled or reordered within a channel, and nothing keeps a reference to a caller's buffer.

Readiness is level-triggered: while `recv_into` would return something, `fileno()` polls readable. While
`wants_write(True)` is in force and a send could succeed, `poll_mask()` on `fileno()` polls ready. A transport whose
readiness is one doorbell (in-process, shared memory) answers `POLLIN` always, and rings it for both directions.

A new Link may still be connecting or in a TLS handshake: `establish()` carries it on, raises `BlockingIOError` until
it is through (poll `poll_mask()` meanwhile), and an `OSError` when it failed.

`close()` ends the stream in order (what was sent still arrives); `abort()` drops everything at once. Both may be called
twice. A transport knows bytes only: no frames, peers, ranks or tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rankmesh.buffers import Buffer
from rankmesh.config import Config
from rankmesh.transport.address import Address
from rankmesh.transport.pulling import Puller
from rankmesh.transport.ring import RingReader, RingWriter


@runtime_checkable
class Link(Protocol):
    """One connection."""

    #: Independent ordered channels: 1 for a byte stream, many for QUIC. Lanes are spread over them.
    channels: int
    #: After a read that did not fill the view, there is nothing more now. False for a link that may hold more than it
    #: shows: it is read until it would block.
    drained_on_short_read: bool
    #: Both sides are this process or this host: a cluster token is not required.
    loopback: bool
    local: str
    remote: str

    def fileno(self) -> int: ...
    def poll_mask(self) -> int: ...
    def wants_write(self, wanted: bool) -> None: ...
    def establish(self) -> None: ...
    def recv_into(self, view: memoryview, /) -> int: ...
    def send(self, data: Buffer, /) -> int: ...
    def sendmsg(self, buffers: Sequence[Buffer], /) -> int: ...
    def shutdown_write(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...


@runtime_checkable
class ScatteringLink(Link, Protocol):
    """A Link that can receive into several buffers at once: one system call for many small ones."""

    def recvmsg_into(self, buffers: Sequence[memoryview], /) -> int:
        """As `recv_into`, for at most IOV_MAX of them."""
        ...


@runtime_checkable
class PolledLink(Link, Protocol):
    """A Link that can be looked at without a system call: rings in shared memory.

    After `start_polling()` whoever drives looks at `ready()`; before it sleeps it calls `arm()` (True: do not sleep),
    and when `fileno()` is ready `answer_bell()` (False: there is nothing to read). It may use the rings directly:
    `after_write()` and `after_read()` ring where the other side sleeps, and raise OSError like `send`.
    """

    reader: RingReader | None
    writer: RingWriter | None
    #: Taken and given back between a store and a load of the rings' words that must not change places.
    fence: threading.Lock
    #: Segments of the other side's that are mapped here: arenas, to be read, and regions of memory.
    shared: dict[int, memoryview]
    #: The other side's process, by the kernel's word; 0 where it has no number here (another container).
    process: int
    #: Reads that process's memory where it lies; None: it cannot be read, or Config.pull says no.
    puller: Puller | None

    @property
    def cells(self) -> memoryview:
        """This side's words in the shared memory, and below the other side's."""
        ...

    @property
    def their_cells(self) -> memoryview: ...

    @property
    def pulls(self) -> bool:
        """The other side can read the memory of this process."""
        ...

    def share(self, segment: int, fd: int, nbytes: int, writable: bool = False) -> bool:
        """Let the other side map a segment. False: not now."""
        ...

    def unshare(self, segment: int) -> None: ...

    def start_polling(self) -> bool:
        """False: on this machine it must be used like any other Link."""
        ...

    def ready(self) -> bool: ...
    def arm(self) -> bool: ...
    def answer_bell(self) -> bool: ...
    def ring(self) -> None: ...
    def after_write(self) -> None: ...
    def after_read(self) -> None: ...


@runtime_checkable
class Listener(Protocol):
    """Accepts links. `fileno()` polls readable while `accept()` has one; else `accept()` raises BlockingIOError."""

    address: Address

    def fileno(self) -> int: ...
    def accept(self) -> Link: ...
    def close(self) -> None: ...


class Transport(Protocol):
    """What a scheme offers. `resolve` may block (name lookup) and is called on a helper thread; the others never
    block."""

    scheme: str

    def listen(self, address: Address, config: Config) -> Listener: ...
    def resolve(self, address: Address) -> list[Address]: ...
    def connect(self, address: Address, config: Config) -> Link: ...

"""Links over shared memory, and how they come about.

A connection is a pair of rings (ring.py) in one segment (segment.py), and a Unix socket. The socket brings the two
together, carries the bells, and ends when its process does, however that ends.

    connecting side                              accepting side
    memory, OPENING (proof) by socket     →      the caller is of the same user; maps it, reads the proof there
    reads the other proof in the memory   ←      ANSWER: the proof it read, and its own

Each side also shows a beacon there, and looks for the other's in that process's memory (pulling.py): if it finds it, it
can read what the other side points it to (`puller`), and says so in the memory (`pulls`).

Bells are bytes on the socket: one for "there is something to read" and for "there is room", whichever the other side
sleeps for. Between bells there may be notices of further segments, of arenas (notices.py). Two ways to use a link:

- as it is: it arms its bell whenever it would block, and `fileno()` polls ready as base.py says;
- polled (after `start_polling()`): whoever drives looks at `ready()`, which costs no system call, calls `arm()` before
  it sleeps on `fileno()`, and `answer_bell()` when that is ready. While it is awake nobody rings.

x86 only: elsewhere (ORDERED is False) every write rings and nothing is polled, because the system calls order memory.
"""

from __future__ import annotations

import array
import errno
import os
import platform
import secrets
import select
import socket
import struct
import threading
import weakref
from collections.abc import Sequence
from typing import Final

from rankmesh.buffers import Buffer, readable
from rankmesh.config import Config
from rankmesh.transport import segment
from rankmesh.transport.address import Address
from rankmesh.transport.base import Link
from rankmesh.transport.notices import BELL_BYTE, MAX_SHARED, Notices
from rankmesh.transport.pulling import Beacon, Puller
from rankmesh.transport.ring import BELL, ENDED, OPEN, RESET, ROOM, STATE, RingReader, RingWriter
from rankmesh.transport.segment import CELLS, PROOF_BYTES, Segment, take_back

#: Stores are seen in the order in which they were made: rings may be polled, and bells left unrung.
ORDERED: Final = platform.machine() in ("x86_64", "AMD64", "i686", "i386")
BACKLOG: Final = 128
_OPENING = struct.Struct(f"<8s{PROOF_BYTES}s")
_ANSWER = struct.Struct(f"<{PROOF_BYTES}s{PROOF_BYTES}s")
_CREDENTIALS = struct.Struct("3i")
_BELLS: Final = 4096
_DESCRIPTORS: Final = socket.CMSG_SPACE(MAX_SHARED * array.array("i").itemsize)
#: As a plain number: an operation on an enum takes as long as the system call.
_CUT: Final = int(socket.MSG_CTRUNC)


class ShmLink:
    """One end of a connection."""

    channels = 1
    drained_on_short_read = False
    loopback = True

    def __init__(self, sock: socket.socket, local: str, remote: str, *, connecting: bool, pull: bool) -> None:
        """`pull`: the two sides may read each other's memory, as far as the system lets them."""
        self.local = local
        self.remote = remote
        self.reader: RingReader | None = None
        self.writer: RingWriter | None = None
        self.process, _, _ = _credentials(sock)
        self._pid = os.getpid()
        self._sock = sock
        self._connecting = connecting
        self._segment: Segment | None = None
        self._beacon = Beacon() if pull else None
        self.puller: Puller | None = None
        self._proof = b""
        self._opening: tuple[bytes, int] | None = None
        self._wants_write = False
        #: Whoever drives looks at `ready()` and calls `arm()`; see the module's text.
        self._polled = False
        #: The other side's process has closed its end, or is gone.
        self._hung_up = False
        self._notices = Notices(sock)
        self.shared = self._notices.shared
        #: What the other side wrote is wrong: the next read or write says so.
        self._fault: OSError | None = None
        #: Taking and giving it back is a full memory barrier: by its instructions on x86, elsewhere by the bell's
        #: system call, which follows.
        self.fence = threading.Lock()
        self._epoll = select.epoll()
        self._watched = select.EPOLLIN
        self._epoll.register(sock.fileno(), self._watched)
        _links.add(self)

    def __repr__(self) -> str:
        return f"<ShmLink {self.local} → {self.remote}{' closed' if self.fileno() < 0 else ''}>"

    # ------------------------------------------------------------------ set-up

    def offer(self) -> None:
        """The connecting side makes the memory; `establish()` passes it on."""
        self._segment, fd = segment.create()
        self._show_beacon(self._segment)
        self._proof = self._segment.prove()
        self._opening = (_OPENING.pack(segment.MAGIC, self._proof), fd)

    def establish(self) -> None:
        if self.reader is not None:
            return
        self._check_open()
        if self._connecting:
            self._open()
        else:
            self._answer_opening()

    def _open(self) -> None:
        if self._opening is not None:
            text, fd = self._opening
            socket.send_fds(self._sock, [text], [fd])
            os.close(fd)
            self._opening = None
        answer = self._sock.recv(_ANSWER.size)
        if len(answer) != _ANSWER.size:
            raise ConnectionResetError(errno.ECONNRESET, f"{self.remote} refused to share memory")
        read, written = _ANSWER.unpack(answer)
        assert self._segment is not None
        if read != self._proof or written != self._segment.proof():
            raise OSError(errno.EBADMSG, "the memory is not shared: what one side wrote the other did not read")
        self._share(self._segment)

    def _answer_opening(self) -> None:
        text, fds, _, _ = socket.recv_fds(self._sock, _OPENING.size, 1)
        try:
            if len(text) != _OPENING.size or len(fds) != 1:
                raise ConnectionResetError(errno.ECONNRESET, f"{self.remote} offered no memory")
            magic, written = _OPENING.unpack(text)
            if magic != segment.MAGIC:
                raise OSError(errno.EBADMSG, "the other side's memory has another layout")
            self._segment = shared = segment.attach(fds[0])
        finally:
            for fd in fds:
                os.close(fd)
        read = shared.proof()
        if read != written:
            raise OSError(errno.EBADMSG, "the memory is not shared: what one side wrote the other did not read")
        self._show_beacon(shared)
        self._sock.send(_ANSWER.pack(read, shared.prove()))
        self._share(shared)

    def _show_beacon(self, shared: Segment) -> None:
        beacon = self._beacon
        if beacon is not None:
            shared.pulling[0], shared.pulling[1] = beacon.address, beacon.value

    def _share(self, shared: Segment) -> None:
        self.writer = RingWriter(shared.outgoing)
        self.reader = reader = RingReader(shared.incoming)
        address, value, _ = shared.their_pulling
        puller = Puller(self.process, (address, value))
        if self._beacon is not None and puller.stands():
            self.puller = puller
            shared.pulling[2] = 1
        reader.control[BELL] = 1
        with self.fence:
            pass

    # ------------------------------------------------------------------ readiness

    def fileno(self) -> int:
        return -1 if self._epoll.closed else self._epoll.fileno()

    def poll_mask(self) -> int:
        return select.POLLIN

    def wants_write(self, wanted: bool) -> None:
        self._wants_write = wanted
        self._show()

    def start_polling(self) -> bool:
        if ORDERED:
            self._polled = True
            self._epoll.modify(self._sock.fileno(), select.EPOLLIN)
        return ORDERED

    def ready(self) -> bool:
        """There is something to read, or room for somebody who waits for it. For who polls."""
        reader, writer = self.reader, self.writer
        if reader is None or writer is None:
            return False
        try:
            return reader.ready() or (self._wants_write and writer.has_room())
        except OSError as error:
            self._fault = error
            return True

    def arm(self) -> bool:
        """Have the bell rung from now on, for whatever comes. True: something is there already."""
        reader, writer = self.reader, self.writer
        if reader is None or writer is None:
            return False
        reader.tell()
        reader.control[BELL] = 1
        if self._wants_write:
            writer.control[ROOM] = 1
        with self.fence:
            pass
        return self.ready()

    def ring(self) -> None:
        """Wake the other side. A full socket means that it has not answered thousands of bells: it will. One that has
        closed its end may have read everything before: the next write fails, this one has not."""
        try:
            self._sock.send(BELL_BYTE)
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self._hung_up = True

    def after_write(self) -> None:
        """Something was written: ring if the reader sleeps."""
        writer = self.writer
        assert writer is not None
        with self.fence:
            pass
        if writer.control[BELL] or not ORDERED:
            writer.control[BELL] = 0
            self.ring()

    def after_read(self) -> None:
        """Something was read: ring if the writer sleeps for want of room."""
        reader = self.reader
        assert reader is not None
        reader.tell()
        with self.fence:
            pass
        if reader.control[ROOM] or not ORDERED:
            reader.control[ROOM] = 0
            self.ring()

    def answer_bell(self) -> bool:
        """Take the bells that were rung, and what came between them. That the other side's process is gone shows here
        too. What is wrong is raised by the next read or write. False: there is nothing to read, and nothing wrong."""
        self._take_bells()
        reader = self.reader
        ended = reader is None or reader.control[STATE] != OPEN or self._hung_up or self._fault is not None
        return ended or self.ready()

    def _take_bells(self) -> None:
        try:
            rung, ancillary, flags, _ = self._sock.recvmsg(_BELLS, _DESCRIPTORS)
        except BlockingIOError:
            return
        except ConnectionResetError:
            self._hung_up = True
            return
        if not rung:
            self._hung_up = True
        fds = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        try:
            self._notices.take(rung, fds, bool(flags & _CUT))
        except OSError as error:
            self._fault = error

    def _show(self) -> None:
        """Make `fileno()` poll what `ready()` says, for who does not call it: a socket is always writable."""
        if self._epoll.closed or self._polled:
            return
        mask = select.EPOLLIN | select.EPOLLOUT if self.ready() else select.EPOLLIN
        if mask != self._watched:
            self._watched = mask
            self._epoll.modify(self._sock.fileno(), mask)

    # ------------------------------------------------------------------ arenas

    @property
    def cells(self) -> memoryview:
        assert self._segment is not None
        return self._segment.cells

    @property
    def their_cells(self) -> memoryview:
        assert self._segment is not None
        return self._segment.their_cells

    @property
    def pulls(self) -> bool:
        return self._segment is not None and self._segment.their_pulling[2] == 1

    def share(self, segment: int, fd: int, nbytes: int, writable: bool = False) -> bool:
        return self._notices.share(segment, fd, nbytes, writable)

    def unshare(self, segment: int) -> None:
        self._notices.unshare(segment)

    # ------------------------------------------------------------------ bytes

    def recv_into(self, view: memoryview, /) -> int:
        reader = self._reader()
        if reader.control[STATE] == RESET:
            raise ConnectionResetError(errno.ECONNRESET, f"{self.remote} aborted the connection")
        got = reader.read(view)
        if not got:
            got = self._recv_nothing(reader, view)
        if got:
            self.after_read()
        self._show()
        return got

    def _recv_nothing(self, reader: RingReader, view: memoryview) -> int:
        """The ring is empty: answer the bell, and look again, because what was written before it was rung counts."""
        if not self._polled and not self._hung_up:
            self.answer_bell()
            self.arm()
        ended = self._hung_up or reader.control[STATE] != OPEN
        got = reader.read(view)
        if got or ended or not view.nbytes:
            return got
        self._show()
        raise BlockingIOError(errno.EAGAIN, "nothing to read")

    def send(self, data: Buffer, /) -> int:
        return self.sendmsg((data,))

    def sendmsg(self, buffers: Sequence[Buffer], /) -> int:
        writer = self._writer()
        views = [readable(buffer) for buffer in buffers]
        taken = writer.write(views)
        if not taken and any(view.nbytes for view in views):
            writer.control[ROOM] = 1
            with self.fence:
                pass
            taken = writer.write(views)
            if not taken:
                self._show()
                raise BlockingIOError(errno.EAGAIN, "the ring is full")
        self.after_write()
        self._show()
        return taken

    def _reader(self) -> RingReader:
        self._check_open()
        if self.reader is None:
            raise BlockingIOError(errno.EAGAIN, "the connection is being made")
        return self.reader

    def _writer(self) -> RingWriter:
        self._check_open()
        writer, reader = self.writer, self.reader
        if writer is None or reader is None:
            raise BlockingIOError(errno.EAGAIN, "the connection is being made")
        if reader.control[STATE] == RESET:
            raise ConnectionResetError(errno.ECONNRESET, f"{self.remote} aborted the connection")
        if writer.control[STATE] != OPEN or self._hung_up:
            raise BrokenPipeError(errno.EPIPE, f"the stream to {self.remote} is closed")
        return writer

    def _check_open(self) -> None:
        if self._epoll.closed:
            raise OSError(errno.EBADF, f"this end of the connection to {self.remote} is closed")
        if self._fault is not None:
            raise self._fault

    # ------------------------------------------------------------------ the end

    def shutdown_write(self) -> None:
        writer = self._writer()
        writer.control[STATE] = ENDED
        self.ring()

    def close(self) -> None:
        self._close(ENDED)

    def abort(self) -> None:
        self._close(RESET)

    def _close(self, state: int) -> None:
        if self._epoll.closed:
            return
        writer, reader = self.writer, self.reader
        if writer is not None and reader is not None:
            if os.getpid() == self._pid:  # not in a forked child, which must leave the parent's connection alone
                writer.control[STATE] = max(state, writer.control[STATE])
                reader.control[BELL] = 1  # who writes on rings, and finds the socket closed
            self.writer = self.reader = None
            writer.release()
            reader.release()
        if self._segment is not None:
            if os.getpid() == self._pid:
                for cell in range(CELLS):  # whatever the other side is copying from here: not any more
                    take_back(self._segment.cells, cell)
            self._segment.close()
        self._notices.close()
        if self._opening is not None:
            os.close(self._opening[1])
            self._opening = None
        self._epoll.close()
        self._sock.close()

    def forked(self, null: int) -> None:
        """In a forked child: let go of the socket, which would keep the parent's connection alive after its end. The
        number goes on existing, for `null`: the object that holds it closes it sometime, and must hit nobody."""
        if not self._epoll.closed:
            os.dup2(null, self._sock.fileno(), inheritable=False)


_links: weakref.WeakSet[ShmLink] = weakref.WeakSet()


def _after_fork() -> None:
    if _links:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for link in list(_links):
            link.forked(null)
        os.close(null)


os.register_at_fork(after_in_child=_after_fork)


class ShmListener:
    """A Unix socket in the abstract name space: no file, and nothing left when the process ends."""

    def __init__(self, address: Address, pull: bool) -> None:
        self._pull = pull
        name = address.host or secrets.token_hex(16)
        self.address = Address("shm", name)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._sock.bind(_socket_name(name))
            self._sock.listen(BACKLOG)
        except OSError:
            self._sock.close()
            raise

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> Link:
        """The next caller, if it is of our own user. Another is sent away, and that is all for now: a crowd of them
        must not keep who drives from other connections, and the listener stays ready for those behind."""
        sock, _ = self._sock.accept()
        sock.setblocking(False)
        pid, uid, _ = _credentials(sock)
        if uid != os.geteuid():
            sock.close()
            raise BlockingIOError(errno.EAGAIN, "the caller was of another user")
        return ShmLink(sock, str(self.address), f"{self.address}#{pid}", connecting=False, pull=self._pull)

    def close(self) -> None:
        self._sock.close()


class ShmTransport:
    scheme = "shm"

    def listen(self, address: Address, config: Config) -> ShmListener:
        return ShmListener(address, config.pull)

    def resolve(self, address: Address) -> list[Address]:
        return [address]

    def connect(self, address: Address, config: Config) -> Link:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.connect(_socket_name(address.host))
            link = ShmLink(sock, f"{address}#{os.getpid()}", str(address), connecting=True, pull=config.pull)
            link.offer()
        except BlockingIOError as error:
            sock.close()
            raise OSError(errno.ENOBUFS, f"{address} has too many connections waiting") from error
        except OSError:
            sock.close()
            raise
        return link


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end."""
    pid, uid, gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid, gid


def _socket_name(name: str) -> str:
    return f"\0rankmesh-{name}"


def transport() -> ShmTransport:
    return ShmTransport()

"""The memory two processes share: anonymous, passed by descriptor, so that nothing is left behind however they end.

    page 0       MAGIC, then the proofs: a random value written by each side and read by the other; then what each side
                 says of memory outside this segment (see PULLING); then each side's cells, by which it takes back what
                 it allowed the other to copy (endpoint/sharing.py)
    page 1 …     the direction from the connecting side to the accepting one (see ring.py)
    then         the direction back

It has no name in any file system: there is nothing to unlink, no other user can open it, and a small /dev/shm does not
matter. It is sealed before it is passed on: neither side can shrink it, which would kill the other by SIGBUS.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import Final

from rankmesh.buffers import PAGE
from rankmesh.transport.ring import DIRECTION_BYTES

#: Names the layout, ring.py's included: both sides must mean the same.
MAGIC: Final = b"rmshm\x00\x00\x02"
PROOF_BYTES: Final = 16
_PROOFS: Final = (64, 128)
#: Three words of each side's: where its beacon lies and what it says (pulling.py); and 1 once it has found the other's.
_PULLING: Final = (192, 256)
PULLING_WORDS: Final = 3
#: Words by which a side takes back what it offered.
CELLS: Final = 64
_CELLS: Final = (1024, 2048)
_WORD_MOST: Final = (1 << 64) - 1
SEGMENT_BYTES: Final = PAGE + 2 * DIRECTION_BYTES
#: linux/fcntl.h; Python names it from 3.14 on.
_F_SEAL_FUTURE_WRITE: Final = 0x0010
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """One side's mapping. `side` 0 has made it, 1 was given it."""

    def __init__(self, memory: mmap.mmap, side: int) -> None:
        self._side = side
        self._map = memory
        self._view = memoryview(self._map)
        first = self._view[PAGE : PAGE + DIRECTION_BYTES]
        second = self._view[PAGE + DIRECTION_BYTES :]
        self.outgoing, self.incoming = (first, second) if side == 0 else (second, first)
        self.cells, self.their_cells = self._words(_CELLS, CELLS)
        self.pulling, self.their_pulling = self._words(_PULLING, PULLING_WORDS)

    def _words(self, places: tuple[int, int], count: int) -> tuple[memoryview, memoryview]:
        """Of this side, and of the other."""
        mine, theirs = (self._view[at : at + 8 * count].cast("Q") for at in places)
        return (mine, theirs) if self._side == 0 else (theirs, mine)

    def prove(self) -> bytes:
        """Write a random value, which the other side is to read."""
        value = os.urandom(PROOF_BYTES)
        at = _PROOFS[self._side]
        self._view[at : at + PROOF_BYTES] = value
        return value

    def proof(self) -> bytes:
        """What the other side wrote."""
        at = _PROOFS[1 - self._side]
        return bytes(self._view[at : at + PROOF_BYTES])

    def close(self) -> None:
        """Unmap it. The rings on it were released before."""
        words = self.cells, self.their_cells, self.pulling, self.their_pulling
        for view in (self.outgoing, self.incoming, *words, self._view):
            view.release()
        self._map.close()


def take_back(cells: memoryview, cell: int) -> None:
    """Change a cell: what it was offered with is not to be relied on any more."""
    cells[cell] = cells[cell] + 1 & _WORD_MOST  # the other side can write there too: nothing may overflow


def seal(fd: int) -> None:
    """From now on nobody can resize this memory."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def anonymous(name: str, nbytes: int, others_write: bool = True) -> tuple[mmap.mmap, int]:
    """New memory without a name in any file system, sealed, and its descriptor, which is the caller's to pass on and
    close. `others_write`: who maps it from now on may write to it. Raises OSError where there is no such memory."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        memory = mmap.mmap(fd, nbytes)
        if not others_write:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return memory, fd


def check(fd: int, nbytes: int) -> None:
    """Raises OSError unless this is sealed memory of that size."""
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # fails for what is no such memory
    if seals & _SEALS != _SEALS or os.fstat(fd).st_size != nbytes:
        raise OSError(errno.EBADMSG, "the memory offered can be resized, or has another size")


def create() -> tuple[Segment, int]:
    """A new segment and its descriptor, which is the caller's to pass on and close."""
    memory, fd = anonymous("rankmesh", SEGMENT_BYTES)
    segment = Segment(memory, 0)
    segment._view[: len(MAGIC)] = MAGIC
    return segment, fd


def attach(fd: int) -> Segment:
    """The segment behind a descriptor that was passed. Raises OSError for what is none."""
    check(fd, SEGMENT_BYTES)
    segment = Segment(mmap.mmap(fd, SEGMENT_BYTES), 1)
    if bytes(segment._view[: len(MAGIC)]) != MAGIC:
        segment.close()
        raise OSError(errno.EBADMSG, "the memory offered has another layout; install the same version on both sides")
    return segment

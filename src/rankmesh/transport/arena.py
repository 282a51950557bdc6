"""Arrays in memory that other processes can map: the owner's side.

An arena is a few sealed anonymous segments, cut into blocks of whole pages, first fit; an array begins in the middle of
its first page (see MID_PAGE). A block returns when the last array over it is gone; a segment without blocks is given
back to the system, except one, which is kept for the next. What is sent from here can be copied by the receiver
straight from where it lies (endpoint/sharing.py).

May be used from many threads. Blocks are returned by the collector, at any time and on any thread, so they only queue
up there; the next allocation takes them in.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from rankmesh.buffers import MID_PAGE, PAGE, address_of
from rankmesh.config import MIB
from rankmesh.transport.segment import anonymous

SEGMENT_BYTES: Final = 64 * MIB + PAGE


class Spot(NamedTuple):
    """Where some bytes of an arena lie."""

    segment: int
    offset: int


class _Segment:
    """Memory, its descriptor, and the free stretches in it, sorted."""

    def __init__(self, ident: int, nbytes: int) -> None:
        self.ident = ident
        self.nbytes = nbytes
        self.memory, self.fd = anonymous("rankmesh-arena", nbytes)
        self.address = address_of(memoryview(self.memory))
        self.free: list[tuple[int, int]] = [(0, nbytes)]
        weakref.finalize(self, os.close, self.fd)

    def take(self, nbytes: int) -> int:
        """The offset of a free block, or -1."""
        for at, (start, length) in enumerate(self.free):
            if length >= nbytes:
                if length == nbytes:
                    del self.free[at]
                else:
                    self.free[at] = (start + nbytes, length - nbytes)
                return start
        return -1

    def give(self, start: int, nbytes: int) -> None:
        stretches = sorted([*self.free, (start, nbytes)])
        self.free = [stretches[0]]
        for start, length in stretches[1:]:
            last, before = self.free[-1]
            if last + before == start:
                self.free[-1] = (last, before + length)
            else:
                self.free.append((start, length))

    @property
    def empty(self) -> bool:
        return self.free == [(0, self.nbytes)]


class Arena:
    """See the module's text. `forgotten(ident)` is called when a segment goes, so that those who map it let go too."""

    def __init__(self, forgotten: Callable[[int], None]) -> None:
        self._forgotten = forgotten
        self._lock = threading.Lock()
        self._segments: dict[int, _Segment] = {}
        self._returned: deque[tuple[int, int, int]] = deque()
        self._last = 0

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> np.ndarray[Any, Any]:
        """An array like numpy.empty's. Raises OSError where there is no such memory."""
        kind = np.dtype(dtype)
        count = math.prod(shape) if isinstance(shape, tuple) else shape
        nbytes = count * kind.itemsize
        block = -(-(MID_PAGE + nbytes) // PAGE) * PAGE
        with self._lock:
            self._take_in()
            segment, start = self._find(block)
        owner = np.frombuffer(segment.memory, np.uint8, nbytes, start + MID_PAGE)
        # Every view of the array refers to `owner`: numpy follows bases down to it, and no further.
        weakref.finalize(owner, self._returned.append, (segment.ident, start, block)).atexit = False
        return owner.view(kind).reshape(shape)

    def locate(self, view: memoryview) -> Spot | None:
        """Where these bytes lie, if they lie here."""
        if not self._segments:
            return None
        address = address_of(view)
        for segment in list(self._segments.values()):
            if segment.address <= address < segment.address + segment.nbytes:
                return Spot(segment.ident, address - segment.address)
        return None

    def descriptor(self, ident: int) -> tuple[int, int]:
        """A segment's descriptor, which stays the arena's, and its size."""
        segment = self._segments[ident]
        return segment.fd, segment.nbytes

    def close(self) -> None:
        """Give everything up. Arrays that are still there keep their memory."""
        with self._lock:
            self._segments.clear()

    def _find(self, nbytes: int) -> tuple[_Segment, int]:
        for segment in self._segments.values():
            start = segment.take(nbytes)
            if start >= 0:
                return segment, start
        self._last += 1
        segment = _Segment(self._last, max(nbytes, SEGMENT_BYTES))
        self._segments[segment.ident] = segment
        return segment, segment.take(nbytes)

    def _take_in(self) -> None:
        """Blocks come back; of the segments without any, one of the usual size stays."""
        while self._returned:
            ident, start, nbytes = self._returned.popleft()
            if ident in self._segments:
                self._segments[ident].give(start, nbytes)
        idle = [segment for segment in self._segments.values() if segment.empty]
        spare = next((segment for segment in idle if segment.nbytes == SEGMENT_BYTES), None)
        for segment in (segment for segment in idle if segment is not spare):
            del self._segments[segment.ident]
            self._forgotten(segment.ident)

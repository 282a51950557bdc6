"""Same host: memory that its owner allocated and others map, so that reads and writes are plain copies.

    page 0    two words for each peer that has it mapped: how many of its threads are writing right now; and its permit,
              which is the region's generation; 0 once the region is unregistered, 1 while it is forbidden to that peer
    page 1 …  the region's bytes, from the middle of the page on

The memory is anonymous and sealed (nobody can resize it), and its descriptor is passed over the connection. Only peers
that may open the region get it; for a region with access "r" it is sealed against writing, too. A region with access
"w" is not mapped, because what is mapped can be read.

Never a wrong byte:
- A reader looks at its permit after it has copied. If it is gone, what was copied may be anything, and the read fails
  with StaleRegion.
- A writer puts its word up, looks at its permit, copies, and takes its word down. The owner takes the permits back and
  then waits until all words are down. Each stores before it loads, with a full barrier between: either the writer sees
  that its permit is gone, or the owner sees the writer. So nothing is written after `unregister` has returned.
- Between two pieces a writer looks again, so that nobody waits longer for it than a piece takes.

A peer that is lost has its permit taken back. Lost while it lives (stopped, cut off), it might still be in the middle
of a piece: so its word counts until it is down, or its process is gone, and `unregister` waits for that as for any
other. Until then its words are given to nobody else; the memory of an allocated region is never used for another one.

What is in page 0 is written by peers, and nothing but waiting depends on it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import TYPE_CHECKING, Final

import numpy as np

from rankmesh.buffers import EMPTY, MID_PAGE, PAGE
from rankmesh.errors import AccessDenied, DeadlineError, StaleRegion
from rankmesh.transport.pushing import gone
from rankmesh.transport.segment import anonymous

if TYPE_CHECKING:
    from rankmesh.endpoint.router import Router

_DATA_AT: Final = PAGE + MID_PAGE
#: The permit of a peer that the region is forbidden to. (Generations begin at random: none is that small.)
FORBIDDEN: Final = 1
#: Bytes copied between two looks at the permit.
PIECE_BYTES: Final = 4 * 1024 * 1024
#: Up to this size a slice of a memoryview is copied faster than an array.
_SMALL: Final = 64 * 1024
#: Of what is closed: no permit, and words that nobody looks at, as many as any kind of permits has.
_NO_WORDS: Final = memoryview(bytearray(4 * PAGE)).cast("Q")
#: Segments of regions are numbered apart from those of arenas, which count from 1.
SEGMENT: Final = 1 << 63


class Permits:
    """The owner's side: the words, and as many pages behind them. Methods need the engine's lock."""

    #: Bytes of all words, and words of one peer. The first so many are nobody's: a slot is never 0.
    words_bytes = PAGE
    slot_words = 2

    def __init__(self, generation: int, pages: int = 0, writable: bool = False) -> None:
        """`writable`: by peers. Raises OSError where there is no such memory."""
        self.nbytes = self.words_bytes + pages * PAGE
        self.segment = generation | SEGMENT
        self.writable = writable
        memory, self.fd = anonymous("rankmesh-region", self.nbytes, others_write=writable)
        self._view = memoryview(memory)
        self._free_descriptor = weakref.finalize(self, os.close, self.fd)
        self._words = self._view[: self.words_bytes].cast("Q")
        self._generation = generation
        self._fence = threading.Lock()
        #: By router index: which words are that peer's. And those that were given back.
        self._slots: dict[int, int] = {}
        self._free = list(range(len(self._words) - self.slot_words, 0, -self.slot_words))
        #: Whose words they are, of those who may write: by slot, and those of lost peers.
        self._processes: dict[int, int] = {}
        self._late: dict[int, int] = {}

    def slot(self, router: Router) -> int:
        """The words of this peer; 0: there are none left."""
        slot = self._slots.get(router.index, 0)
        if not (slot or self._free):
            self._free = [slot for slot, process in self._late.items() if gone(process)]
            for late in self._free:
                del self._late[late]
        if not slot and self._free:
            slot = self._slots[router.index] = self._free.pop()
            self._clear(slot)
            self._words[slot + 1] = self._generation
        if slot and self.writable and router.polled is not None:
            self._processes[slot] = router.polled.process
        return slot

    def _clear(self, slot: int) -> None:
        for word in range(slot, slot + self.slot_words):
            self._words[word] = 0

    def mapped_by(self, router: Router) -> bool:
        return router.index in self._slots

    def closed_by(self, router: Router) -> None:
        """The peer has it mapped no longer."""
        slot = self._slots.pop(router.index, 0)
        if slot:
            self._clear(slot)
            self._free.append(slot)
            self._processes.pop(slot, None)

    def lost(self, router: Router) -> None:
        """The peer is gone, as far as is known. It may still be writing."""
        slot = self._slots.pop(router.index, 0)
        if slot:
            self._words[slot + 1] = 0
            process = self._processes.pop(slot, None)
            if process is None:
                self._free.append(slot)
            else:
                self._late[slot] = process

    def revoke(self) -> None:
        """From now on nobody begins to copy."""
        for slot in self._slots.values():
            self._words[slot + 1] = 0
        with self._fence:
            pass

    def admit(self, admits: Callable[[int], bool]) -> None:
        """From now on those begin to copy (by router index) that are admitted, and nobody else."""
        for index, slot in self._slots.items():
            self._words[slot + 1] = self._generation if admits(index) else FORBIDDEN
        with self._fence:
            pass

    @property
    def busy(self) -> bool:
        """Somebody is writing, or may be."""
        writers = (*self._processes.items(), *self._late.items())
        return any(self._words[slot] and self._may_write(process) for slot, process in writers)

    def _may_write(self, process: int) -> bool:
        """Its word is up: it is in the middle of a piece, stopped or not, unless it died there."""
        return not gone(process)

    def close(self) -> None:
        """Pass it on no more. The memory goes with the last array over it."""
        self._free_descriptor()
        self._words = _NO_WORDS
        self._slots.clear()
        self._processes.clear()
        self._late.clear()
        self._view = EMPTY


class SharedMemory(Permits):
    """The owner's side, with the region's bytes."""

    def __init__(self, nbytes: int, generation: int, writable: bool) -> None:
        super().__init__(generation, -(-(MID_PAGE + nbytes) // PAGE), writable)
        self.data = self._view[_DATA_AT : _DATA_AT + nbytes]

    def close(self) -> None:
        super().close()
        self.data = EMPTY


class Permit:
    """The other side's words: one for all handles of a region. May be used from many threads."""

    #: As of the owner's side.
    of: type[Permits] = Permits

    def __init__(self, memory: memoryview, slot: int, name: str, generation: int) -> None:
        self.generation = generation
        self._name = name
        self._slot = slot
        self._words = memory[: self.of.words_bytes].cast("Q")
        self._lock = threading.Lock()
        self._writers = 0
        #: Handles that use it.
        self.handles = 0

    def close(self) -> bool:
        """It is worth nothing any more. Who uses it right now goes on, and finds afterwards that it is gone. False:
        somebody is writing."""
        with self._lock:
            self._let_go()
            return not self._writers

    def close_unused(self) -> bool:
        """Close it if there is no handle of it and nobody writes: then its words may be given to another peer."""
        with self._lock:
            if self.handles or self._writers:
                return False
            self._let_go()
            return True

    def _let_go(self) -> None:
        self._words = _NO_WORDS

    @property
    def revoked(self) -> bool:
        """The region was unregistered."""
        return not self._words[self._slot + 1]

    @property
    def holds(self) -> bool:
        """The region may be used."""
        return self._words[self._slot + 1] == self.generation

    def check(self) -> None:
        """Raises what says that the region may not be used any more."""
        permit = self._words[self._slot + 1]
        if permit == FORBIDDEN:
            raise AccessDenied(f"The owner of region {self._name!r} has forbidden it to this peer.", region=self._name)
        if permit != self.generation:
            raise StaleRegion(f"The owner of region {self._name!r} has unregistered it.", region=self._name)

    def look(self, deadline: float) -> None:
        """Between two pieces."""
        self.check()
        if monotonic() > deadline:
            raise self.late()

    def late(self) -> DeadlineError:
        return DeadlineError(f"The copy of region {self._name!r} did not end in time.", op="copy")


class Mapping(Permit):
    """The other side's, with the region's bytes."""

    def __init__(self, memory: memoryview, slot: int, name: str, nbytes: int, generation: int) -> None:
        super().__init__(memory, slot, name, generation)
        self._data = memory[_DATA_AT : _DATA_AT + nbytes]

    def _let_go(self) -> None:
        super()._let_go()
        self._data = EMPTY

    def read(self, parts: Iterable[memoryview], blocks: Iterable[memoryview], deadline: float) -> None:
        """Copy from `blocks` of the region (see `views`) to `parts`."""
        self.check()
        self._move(parts, blocks, deadline)
        self.check()

    def write(self, parts: Iterable[memoryview], blocks: Iterable[memoryview], deadline: float) -> None:
        """Copy from `parts` to `blocks` of the region."""
        slot = self._slot
        with self._lock:  # giving it back is the barrier between this store and the loads of `check`
            words = self._words
            self._writers += 1
            words[slot] = self._writers
        try:
            self.check()
            self._move(blocks, parts, deadline)
        finally:
            with self._lock:
                self._writers -= 1
                words[slot] = self._writers

    def _move(self, to: Iterable[memoryview], source: Iterable[memoryview], deadline: float) -> None:
        moved = 0
        for into, data in _pairs(to, source):
            _copy(into, data)
            moved += len(data)
            if moved >= PIECE_BYTES:
                moved = 0
                self.look(deadline)

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self._data[offset : offset + nbytes]

    def views(self, blocks: Iterable[tuple[int, int, int, int]]) -> Iterator[memoryview]:
        """The bytes of blocks, which were checked: of the memory as it is here now, whoever lets go of it meanwhile."""
        return _slices(self._data, blocks)


def has_words(memory: memoryview, slot: int, of: type[Permits] = Permits) -> bool:
    """Whether what a peer passed has the words it says."""
    return of.slot_words <= slot <= of.words_bytes // 8 - of.slot_words and len(memory) >= of.words_bytes


def fits(memory: memoryview, nbytes: int, slot: int) -> bool:
    """Whether what a peer passed has a region's bytes, too."""
    return has_words(memory, slot) and 0 < nbytes <= len(memory) - _DATA_AT


def _slices(data: memoryview, blocks: Iterable[tuple[int, int, int, int]]) -> Iterator[memoryview]:
    for offset, length, stride, count in blocks:
        if count == 1:
            yield data[offset : offset + length]
        else:
            for start in range(offset, offset + stride * count, stride) if stride else (offset,) * count:
                yield data[start : start + length]


def _copy(to: memoryview, source: memoryview) -> None:
    if len(to) <= _SMALL:
        to[:] = source
    else:  # releases the GIL
        np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(source, np.uint8))


def _pairs(ones: Iterable[memoryview], others: Iterable[memoryview]) -> Iterator[tuple[memoryview, memoryview]]:
    """Equal stretches of both, in order, none longer than a piece. Both have the same bytes in all."""
    rest = iter(others)
    other = memoryview(b"")
    for one in ones:
        while one:
            if not other:
                other = next(rest)
                if len(other) == len(one) <= PIECE_BYTES:  # as in most batches
                    yield one, other
                    one = other = one[:0]
                continue
            size = min(len(one), len(other), PIECE_BYTES)
            yield one[:size], other[:size]
            one, other = one[size:], other[size:]

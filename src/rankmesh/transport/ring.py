"""A ring of bytes in shared memory, for one writer and one reader in different processes. Pure: no I/O, no lock.

    control   one page of 64-bit words, each alone on a cache line: TAIL HEAD BELL ROOM FREED STATE
    data      RING_BYTES of records, for what is small
    slots     SLOTS blocks of SLOT_BYTES, for what is large; used in turn; from the middle of a page on

A record begins at a multiple of LINE with one word, size | kind << 32. An INLINE record's bytes follow it; a SLOT
record's bytes lie in the next slot. The stream is what the records contain, in order. No record wraps: what does not
fit before the end of the ring is split. TAIL and HEAD count bytes since the beginning and never turn back.

Memory order. Every shared word has one writer at a time, is aligned, and is written and read by one machine instruction
(`memoryview.cast("Q")` does so). x86 keeps the stores of a core in order, and its loads:

- The writer stores a record's bytes, then TAIL. Who has loaded TAIL sees the bytes.
- The reader copies the bytes out, then stores HEAD (or FREED). Who has loaded HEAD may overwrite them.
- Sleeping is the one place where x86 is not enough, because a store may be delayed past a later load: the reader stores
  BELL ("ring when something comes") and then looks at TAIL, the writer stores TAIL and then looks at BELL. Each puts
  a fence, an instruction that is a full barrier, between the two, or both might look too early and the reader sleep
  over a message. ROOM ("ring when there is room") works alike, the other way round.
- BELL and ROOM are put down by who rings, before it rings, and put up by who wants to sleep: a bell that is down was
  rung and not yet answered, so it need not be rung again.

Other machines may reorder all of these: there every record rings, by a system call (see shm.py).

The other side is a process of the same user that knows the token, and may still be wrong: positions and sizes are
checked before they are used, and raise OSError. A size is read once.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final

from rankmesh.buffers import MID_PAGE, PAGE

LINE: Final = 64
WORD: Final = 8
RING_BYTES: Final = 256 * 1024
#: Measured for 64 MiB: 0.25 to 0.75 MiB are slower, and so are 2.
SLOT_BYTES: Final = 1024 * 1024
SLOTS: Final = 4
CONTROL_BYTES: Final = PAGE
_SLOTS_AT: Final = CONTROL_BYTES + RING_BYTES + MID_PAGE
DIRECTION_BYTES: Final = CONTROL_BYTES + RING_BYTES + SLOTS * SLOT_BYTES + PAGE

#: Indices of the control words.
TAIL: Final = 0 * LINE // WORD
HEAD: Final = 1 * LINE // WORD
BELL: Final = 2 * LINE // WORD
ROOM: Final = 3 * LINE // WORD
FREED: Final = 4 * LINE // WORD
STATE: Final = 5 * LINE // WORD

#: Values of STATE, set by the writer.
OPEN, ENDED, RESET = 0, 1, 2

INLINE: Final = 1 << 32
SLOT: Final = 2 << 32
_SIZE: Final = (1 << 32) - 1

MASK: Final = RING_BYTES - 1
#: Larger buffers go through slots.
INLINE_MOST: Final = 64 * 1024
#: The reader tells how far it is when it has taken this much: the writer cannot be short of room before.
TELL: Final = RING_BYTES // 4


def corrupt(what: str) -> OSError:
    return OSError(errno.EBADMSG, f"the shared ring is corrupt: {what}")


def begin(header: bytes, nbytes: int) -> bytes:
    """How a record begins that is one message: a header and `nbytes` more."""
    return (len(header) + nbytes | INLINE).to_bytes(WORD, "little") + header


class _End:
    """What both ends of a direction see."""

    __slots__ = ("control", "data", "slots", "words")

    def __init__(self, memory: memoryview) -> None:
        if memory.nbytes != DIRECTION_BYTES:
            raise ValueError(f"a direction has {DIRECTION_BYTES} bytes")
        self.control = memory[:CONTROL_BYTES].cast("Q")
        self.data = memory[CONTROL_BYTES : CONTROL_BYTES + RING_BYTES]
        self.words = self.data.cast("Q")
        self.slots = memory[_SLOTS_AT : _SLOTS_AT + SLOTS * SLOT_BYTES]

    def release(self) -> None:
        """Let go of the memory; the end cannot be used any more."""
        for view in (self.words, self.data, self.slots, self.control):
            view.release()


class RingWriter(_End):
    __slots__ = ("_slots_used", "lacks_slot", "limit", "tail")

    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory)
        self.tail = 0
        #: As far as the reader is known to have made room.
        self.limit = RING_BYTES
        self._slots_used = 0
        #: What waits for room needs a slot.
        self.lacks_slot = False

    def put(self, prefix: bytes, view: memoryview) -> bool:
        """Write one small message as one record: `prefix`, which `begin()` made, and the bytes of `view`. False: there
        is no room for it in one piece now."""
        tail = self.tail
        at = tail & MASK
        middle = at + len(prefix)
        end = middle + len(view)
        if end > RING_BYTES or tail + end - at > self.limit:
            return False
        data = self.data
        data[at:middle] = prefix
        data[middle:end] = view
        self.tail = tail = tail + (end - at + LINE - 1 & -LINE)
        self.control[TAIL] = tail
        return True

    def has_slot(self) -> bool:
        return self._slots_used - self._freed() < SLOTS

    def put_both(self, header: bytes, view: memoryview) -> bool:
        """Write a small record and a large one, of at most SLOT_BYTES. False: there is no room for the two now."""
        if self.limit - self.tail < 2 * LINE and not (self._refresh() and self.limit - self.tail >= 2 * LINE):
            return False
        used = self._slots_used
        if used - self._freed() >= SLOTS:
            return False
        start, at = used % SLOTS * SLOT_BYTES, self.tail & MASK
        size = len(header)
        assert size <= LINE - WORD
        self.words[at >> 3] = size | INLINE
        self.data[at + WORD : at + WORD + size] = header
        self.slots[start : start + len(view)] = view
        self._slots_used = used + 1
        self.words[(self.tail + LINE & MASK) >> 3] = len(view) | SLOT
        self.tail = tail = self.tail + 2 * LINE
        self.control[TAIL] = tail
        return True

    def write(self, buffers: Sequence[memoryview]) -> int:
        """Write what there is room for, in order; how many bytes that was."""
        taken = 0
        for buffer in buffers:
            put = self._put_slot if buffer.nbytes > INLINE_MOST else self._put_inline
            while len(buffer):
                count = put(buffer)
                if not count:
                    self.lacks_slot = buffer.nbytes > INLINE_MOST
                    return taken
                taken += count
                buffer = buffer[count:]
        return taken

    def has_room(self) -> bool:
        """Whether more of what did not fit would be taken now."""
        return self._refresh() and not (self.lacks_slot and self._slots_used - self._freed() >= SLOTS)

    def taken(self) -> int:
        """Grows whenever the reader tells that it has taken something."""
        return self.control[HEAD] + self.control[FREED]

    def _refresh(self) -> bool:
        head = self.control[HEAD]
        if head > self.tail or head + RING_BYTES < self.limit:
            raise corrupt(f"head {head} for tail {self.tail}")
        self.limit = head + RING_BYTES
        return self.limit - self.tail >= LINE

    def _freed(self) -> int:
        freed = self.control[FREED]
        if not self._slots_used - SLOTS <= freed <= self._slots_used:
            raise corrupt(f"{freed} slots freed of {self._slots_used}")
        return freed

    def _put_inline(self, buffer: memoryview) -> int:
        if self.limit - self.tail <= buffer.nbytes + LINE and not self._refresh():
            return 0
        at = self.tail & MASK
        room = min(self.limit - self.tail, RING_BYTES - at) - WORD
        size = min(room, buffer.nbytes)
        self.words[at >> 3] = size | INLINE
        self.data[at + WORD : at + WORD + size] = buffer[:size]
        self._publish(size)
        return size

    def _put_slot(self, buffer: memoryview) -> int:
        if self.limit - self.tail < LINE and not self._refresh():
            return 0
        used = self._slots_used
        if used - self._freed() >= SLOTS:
            return 0
        size = min(buffer.nbytes, SLOT_BYTES)
        start = used % SLOTS * SLOT_BYTES
        self.slots[start : start + size] = buffer[:size]
        self._slots_used = used + 1
        self.words[(self.tail & MASK) >> 3] = size | SLOT
        self._publish(0)
        return size

    def _publish(self, size: int) -> None:
        """The record at the tail is complete."""
        self.tail = tail = self.tail + (size + WORD + LINE - 1 & -LINE)
        self.control[TAIL] = tail


class RingReader(_End):
    __slots__ = ("_record", "_slots_used", "head", "size", "told", "used")

    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory)
        self.head = 0
        #: Bytes of the record that `front()` found.
        self.size = 0
        #: The record that was begun: its word; how many of its bytes are taken.
        self._record = 0
        self.used = 0
        self._slots_used = 0
        #: As far as the writer was told that this end is.
        self.told = 0

    def ready(self) -> bool:
        """Whether there is something to read."""
        return self.control[TAIL] != self.head

    def front(self) -> int:
        """Where the next record's bytes lie in `data`, if there is one, whole and inline; otherwise -1. Its `size` is
        set then, and `pop()` takes it."""
        head = self.head
        if self.control[TAIL] == head or self.used:
            return -1
        at = head & MASK
        size = self.words[at >> 3] - INLINE
        if not 0 <= size <= RING_BYTES - at - WORD:
            return -1
        self.size = size
        return at + WORD

    def pop(self) -> bool:
        """Take the record that `front()` found. True: it is time to `tell()`."""
        self.head = head = self.head + (self.size + WORD + LINE - 1 & -LINE)
        return head - self.told >= TELL

    def slot_behind(self, nbytes: int) -> memoryview | None:
        """The large record of `nbytes` behind the small one that `front()` found, if it is there, and all in one slot:
        `pop_both()` takes the two."""
        at = self.head + (self.size + WORD + LINE - 1 & -LINE)
        if self.control[TAIL] - at < LINE or self.words[(at & MASK) >> 3] - SLOT != nbytes or nbytes > SLOT_BYTES:
            return None
        start = self._slots_used % SLOTS * SLOT_BYTES
        return self.slots[start : start + nbytes]

    def pop_both(self) -> None:
        self._slots_used += 1
        self.control[FREED] = self._slots_used
        self.head += (self.size + WORD + LINE - 1 & -LINE) + LINE

    def read(self, view: memoryview) -> int:
        """Read what is there and fits; how many bytes that was. Large records are not mixed with others: a reader
        that learns from the small one where the large one belongs can have it put there."""
        got = 0
        while got < view.nbytes:
            if not self.used:
                tail = self.control[TAIL]
                if tail == self.head:
                    break
                if not LINE <= tail - self.head <= RING_BYTES or tail % LINE:
                    raise corrupt(f"tail {tail} for head {self.head}")
                self._record = self.words[(self.head & MASK) >> 3]
            if self._record >= SLOT:
                return got or self._read_slot(view)
            got += self._read_inline(view[got:])
        return got

    def tell(self) -> None:
        """Let the writer know how far this end is."""
        self.told = self.control[HEAD] = self.head

    def _read_inline(self, view: memoryview) -> int:
        at = (self.head & MASK) + WORD
        size = self._record - INLINE
        if not 0 < size <= RING_BYTES - at:
            raise corrupt(f"a record of {size} bytes at {at}")
        count = min(size - self.used, view.nbytes)
        view[:count] = self.data[at + self.used : at + self.used + count]
        self.used += count
        if self.used == size:
            self.used = 0
            self.size = size
            self.pop()
        return count

    def _read_slot(self, view: memoryview) -> int:
        size = self._record - SLOT
        if not 0 < size <= SLOT_BYTES:
            raise corrupt(f"a slot of {size} bytes")
        start = self._slots_used % SLOTS * SLOT_BYTES + self.used
        count = min(size - self.used, view.nbytes)
        view[:count] = self.slots[start : start + count]
        self.used += count
        if self.used == size:
            self.used = 0
            self._slots_used += 1
            self.control[FREED] = self._slots_used
            self.size = 0
            self.pop()
        return count

"""Memory of another process of this host, written where it lies: `process_vm_writev`, one copy, made by the kernel.

It takes the same permission as reading (pulling.py). But what was read wrongly can be thrown away, and what was written
stays written. So two things are seen to:

- **It is the right process.** A process is known by its number, which may be another's one day. Every write begins with
  the owner's guard, a page at a random address that its forked children do not have: where there is none, the kernel
  stops before the first byte.
- **It can be revoked until the kernel begins.** Where the bytes go, and how many, the kernel reads when it is called,
  in memory that both processes share (`Pusher`). The owner puts the length to 0 there: who makes the call afterwards
  writes nothing, and were it stopped for hours just before. Who has made it before is inside the kernel until all is
  written: signals, SIGSTOP too, wait for the end of the call. So an owner that has revoked, and then sees that the
  writer says it is outside, or finds it stopped or gone (`halted`), has its memory to itself.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from typing import Final

from rankmesh.buffers import PAGE, address_of
from rankmesh.transport.pulling import Vector, system_call

_GUARD_BYTES: Final = 8
#: Addresses of user space on x86-64, in pages, without its first 4 GiB and its upper half.
_PAGES: Final = range(1 << 20, 1 << 34)
_ATTEMPTS: Final = 8
#: sys/mman.h
_READ_WRITE: Final = 0x3
_PRIVATE_ANONYMOUS_THERE: Final = 0x2 | 0x20 | 0x100000
_MADV_DONTFORK: Final = 10
#: What /proc says of threads that are not inside a system call: stopped, traced, or dead.
_HALTED: Final = frozenset(b"TtZXx")
#: Words of a Pusher: the guard, its length, the address, the length.
VECTOR_WORDS: Final = 4


def guard() -> int:
    """Where this process has its guard; 0: it can have none."""
    return _guard_of(os.getpid())


@lru_cache(maxsize=1)
def _guard_of(_process: int) -> int:
    """Made anew in a forked child, which has not inherited it."""
    library = ctypes.CDLL(None)
    size, number = ctypes.c_size_t, ctypes.c_int
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, size, number, number, number, ctypes.c_long)
    library.madvise.argtypes = (ctypes.c_void_p, size, number)
    for _ in range(_ATTEMPTS):
        wish = _PAGES[int.from_bytes(os.urandom(8)) % len(_PAGES)] * PAGE
        if library.mmap(wish, PAGE, _READ_WRITE, _PRIVATE_ANONYMOUS_THERE, -1, 0) == wish:
            return wish if library.madvise(wish, PAGE, _MADV_DONTFORK) == 0 else 0
    return 0


class Pusher:
    """Writes into the memory of one process. Not for two threads at once."""

    def __init__(self, pid: int, guard: int, words: memoryview) -> None:
        """`words`: VECTOR_WORDS of them, in memory that the process shares."""
        self._pid = pid
        self._call = system_call("process_vm_writev")
        self._words = words
        self._there = address_of(words.cast("B"))
        words[0], words[1] = guard, _GUARD_BYTES
        self._guarded = ctypes.c_uint64()
        heres = (Vector * 2)()
        heres[0].base, heres[0].length = ctypes.addressof(self._guarded), _GUARD_BYTES
        self._source = heres[1]
        self._here = ctypes.addressof(heres)

    def aim(self, address: int, nbytes: int) -> None:
        """The next push goes there, unless it is revoked."""
        self._words[2], self._words[3] = address, nbytes

    def push(self, source: int, nbytes: int) -> bool:
        """Copy what `aim` said. False: not all of it was written, because it was revoked, or that process is gone, has
        no such memory, or does not let us."""
        self._source.base, self._source.length = source, nbytes
        if self._call is None:
            return False
        return self._call(self._pid, self._here, 2, self._there, 2, 0) == nbytes + _GUARD_BYTES


def gone(pid: int) -> bool:
    """Whether there is no such process, for certain."""
    try:
        return not os.path.exists(f"/proc/{pid}") and os.readlink("/proc/self") == str(os.getpid())
    except OSError:  # there is no /proc that could tell
        return False


def halted(pid: int) -> bool:
    """Whether none of its threads is inside a system call, for certain: all are stopped, or the process is gone."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return gone(pid)
    return all(_state(pid, thread) in _HALTED for thread in threads)


def _state(pid: int, thread: str) -> int:
    try:
        with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return ord("X")
    except OSError:
        return ord("?")

"""Memory of another process of this host, read where it lies: `process_vm_readv`, one copy, made by the kernel.

It needs the permission to trace that process: the same user, and neither Yama (`kernel.yama.ptrace_scope`) nor a
container's filter of system calls against it. Nothing tells beforehand: who wants to pull tries, with a random word
(`Beacon`, `Puller.stands`). What the kernel cannot reach for others, as memory of devices, fails for its owner in the
same way (`Puller.reaches`).

An address is only ever one that its owner gave, of its own memory. A process is known by its number, which may be
another's one day: who must be sure that it was the right one looks for the word again, afterwards.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from functools import lru_cache
from time import perf_counter
from typing import Final

import numpy as np

from rankmesh.buffers import PAGE
from rankmesh.config import KIB


class Vector(ctypes.Structure):
    """struct iovec"""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_WORD: Final = 8
#: linux/mman.h, from Linux 5.14 on.
_MADV_POPULATE_READ: Final = 22
#: What the kernel's copies are compared by: twice that fits into a core's second cache, where machines differ most.
_COMPARED_BYTES: Final = 128 * KIB
_COMPARED_TIMES: Final = 5
#: How many times as long as the C library it may take: on an Intel Xeon it took some two (between processes), on AMD's
#: Zen 5 seven.
_QUICK: Final = 4
#: linux/fs.h, from Linux 6.7 on: PAGEMAP_SCAN, its arguments, and pages that are part of a larger one.
_PAGEMAP_SCAN: Final = 0xC0606610
_SCAN: Final = struct.Struct("<12Q")
_PAGE_IS_HUGE: Final = 1 << 6
#: Of an array, where its pages are looked at: its ends may lie on small ones although the rest does not.
_LOOKED_AT: Final = (1, 2, 3)


@lru_cache(maxsize=2)
def system_call(name: str) -> Callable[..., int] | None:
    """process_vm_readv or process_vm_writev; None: this C library has no such call."""
    call = getattr(ctypes.CDLL(None), name, None)
    if call is not None:
        vector, count = ctypes.c_void_p, ctypes.c_ulong
        call.argtypes = (ctypes.c_int, vector, count, vector, count, ctypes.c_ulong)
        call.restype = ctypes.c_ssize_t
    return call


@lru_cache(maxsize=1)
def _madvise() -> Callable[..., int]:
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call


def populate(address: int, nbytes: int) -> None:
    """Bring memory of this process in, from a disk if it must be, so that who pulls it need not wait for that. Raises
    OSError: EFAULT if some of it is not there, as of a file that was cut off; EINVAL where it is no plain memory, or
    the system cannot."""
    start = address & -PAGE
    if _madvise()(start, address + nbytes - start, _MADV_POPULATE_READ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Beacon:
    """A random word in this process's memory: who finds it there can read the rest."""

    def __init__(self) -> None:
        self._word = ctypes.c_uint64.from_buffer_copy(os.urandom(_WORD))
        self.address = ctypes.addressof(self._word)
        self.value = self._word.value


class Puller:
    """Reads the memory of one process. Not for two threads at once."""

    def __init__(self, pid: int, beacon: tuple[int, int] = (0, 0)) -> None:
        """`beacon`: where that process shows one, and what it says."""
        self._pid = pid
        self._beacon = beacon
        self._call = system_call("process_vm_readv")
        self._word = ctypes.c_uint64()
        self._byte = ctypes.addressof(self._word)
        #: The second of each is for the beacon.
        heres, theres = (Vector * 2)(), (Vector * 2)()
        heres[1].base, heres[1].length = self._byte, _WORD
        theres[1].base, theres[1].length = beacon[0], _WORD
        self._here, self._there = heres[0], theres[0]
        self._vectors = ctypes.addressof(heres), ctypes.addressof(theres)

    def twin(self) -> Puller:
        """The same, for another thread."""
        return Puller(self._pid, self._beacon)

    def stands(self) -> bool:
        """Whether the beacon is there: this is the process it is taken for, and it lets us."""
        address, value = self._beacon
        return self._pid > 0 and address > 0 and self.finds(address, value)

    def pull(self, into: int, address: int, nbytes: int) -> bool:
        """Copy so many bytes from `address` there to `into` here. False: not all of it could be read, because that
        process is gone, has no such memory, or does not let us."""
        here, there = self._here, self._there
        here.base, here.length = into, nbytes
        there.base, there.length = address, nbytes
        to, source = self._vectors
        return self._call is not None and self._call(self._pid, to, 1, source, 1, 0) == nbytes

    def pull_surely(self, into: int, address: int, nbytes: int) -> bool:
        """`pull`, and the beacon stands."""
        here, there = self._here, self._there
        here.base, here.length = into, nbytes
        there.base, there.length = address, nbytes
        to, source = self._vectors
        value = self._beacon[1]
        self._word.value = ~value
        if self._call is None or self._call(self._pid, to, 2, source, 2, 0) != nbytes + _WORD:
            return False
        return self._word.value == value

    def finds(self, address: int, value: int) -> bool:
        """Whether that word is there."""
        word = self._word
        word.value = ~value
        return self.pull(self._byte, address, _WORD) and word.value == value

    def reaches(self, address: int) -> bool:
        """Whether memory can be read: by its first byte."""
        return self.pull(self._byte, address, 1)


class Copying(IntEnum):
    """How the kernel copies from other processes here, on pages of 4 KiB."""

    NOT = 0
    #: Beside the C library, which copies inside one process. What it costs is finding each page.
    SLOWLY = 1
    QUICKLY = 2


@lru_cache(maxsize=1)
def copying() -> Copying:
    """Of this machine, where it does copy: measured once, which takes a tenth of a millisecond."""
    memory = mmap.mmap(-1, 2 * _COMPARED_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel that has no large pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    source, target = np.split(np.frombuffer(memory, np.uint8), 2)
    source[...] = 1
    puller, to, address = Puller(os.getpid()), target.ctypes.data, source.ctypes.data
    kernels, own = [], []
    for _ in range(_COMPARED_TIMES):
        began = perf_counter()
        puller.pull(to, address, _COMPARED_BYTES)
        between = perf_counter()
        target[...] = source
        own.append(perf_counter() - between)
        kernels.append(between - began)
    return Copying.QUICKLY if min(kernels) <= _QUICK * min(own) else Copying.SLOWLY


def on_large_pages(address: int, nbytes: int) -> bool:
    """Whether this memory of ours lies on pages of 2 MiB, which take the kernel no time to find, as far as the system
    tells: by some of them, in ten microseconds."""
    try:
        table = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    found = (ctypes.c_uint64 * 3)()
    try:
        for quarter in _LOOKED_AT:
            page = (address + nbytes * quarter // 4) & -PAGE
            where, wanted = (page, page + PAGE, 0, ctypes.addressof(found), 1, 0), (0, _PAGE_IS_HUGE, 0, _PAGE_IS_HUGE)
            if not fcntl.ioctl(table, _PAGEMAP_SCAN, bytearray(_SCAN.pack(_SCAN.size, 0, *where, *wanted))):
                return False
    except OSError:  # an older kernel
        return False
    finally:
        os.close(table)
    return True

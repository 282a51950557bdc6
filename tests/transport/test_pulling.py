"""Another process's memory, read where it lies."""

from __future__ import annotations

import errno
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankmesh.transport import pulling
from rankmesh.transport.pulling import Beacon, Copying, Puller, copying, on_large_pages
from timing import scaled

#: Shows where 1 MiB of its memory lies, and stays until it is told to go. No word of it is one that other memory is
#: likely to hold: two processes may well have something at the same address.
OWNER = """
import ctypes, sys
first, count = map(int, sys.argv[1:])
memory = (ctypes.c_uint64 * count)(*range(first, first + count))
print(ctypes.addressof(memory), flush=True)
sys.stdin.read()
"""
FIRST, COUNT = 0x5EED_0FF0_0D15_EA5E, 131072


@pytest.fixture(name="owner")
def an_owner() -> Iterator[tuple[subprocess.Popen[str], int]]:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(FIRST), str(COUNT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield process, int(process.stdout.readline())
        process.stdin.close()


def test_it_is_copied_from_where_it_lies(owner: tuple[subprocess.Popen[str], int]) -> None:
    process, address = owner
    into = np.zeros(COUNT, np.uint64)
    puller = Puller(process.pid)
    assert puller.pull(into.ctypes.data, address, into.nbytes)
    assert np.array_equal(into, np.arange(FIRST, FIRST + COUNT, dtype=np.uint64))
    into[:] = 0
    assert puller.pull(into.ctypes.data + 8, address + 80, 16)
    assert into[:4].tolist() == [0, FIRST + 10, FIRST + 11, 0]


def test_a_word_proves_whose_memory_it_is(owner: tuple[subprocess.Popen[str], int]) -> None:
    process, address = owner
    puller = Puller(process.pid)
    assert puller.finds(address + 8 * 77, FIRST + 77)
    assert not puller.finds(address + 8 * 77, FIRST + 78)
    assert not Puller(os.getpid()).finds(address, FIRST), "this process has nothing there, or something else"


def test_a_beacon_stands_where_it_was_shown() -> None:
    beacon = Beacon()
    shown = beacon.address, beacon.value
    assert Puller(os.getpid(), shown).stands()
    assert Puller(os.getpid(), shown).twin().stands()
    word, into = np.array([5], np.uint64), np.zeros(1, np.uint64)
    assert Puller(os.getpid(), shown).pull_surely(into.ctypes.data, word.ctypes.data, 8)
    assert into[0] == 5
    assert not Puller(os.getpid(), (beacon.address, beacon.value ^ 1)).pull_surely(
        into.ctypes.data, word.ctypes.data, 8
    )
    assert not Puller(os.getpid()).pull_surely(into.ctypes.data, word.ctypes.data, 8)
    assert not Puller(os.getpid(), shown).pull_surely(into.ctypes.data, 4096, 8)
    assert not Puller(os.getpid(), (beacon.address, beacon.value ^ 1)).stands()
    assert not Puller(os.getpid()).stands(), "none was shown"
    assert not Puller(0, shown).stands(), "nobody's"
    assert Beacon().value != beacon.value


def test_what_is_not_there_cannot_be_read(owner: tuple[subprocess.Popen[str], int]) -> None:
    process, address = owner
    into = np.zeros(COUNT, np.uint64)
    puller = Puller(process.pid)
    assert puller.reaches(address)
    assert not puller.reaches(0)
    assert not puller.pull(into.ctypes.data, 4096, 8)
    assert not puller.pull(into.ctypes.data, (1 << 64) - 4096, 8), "the kernel's"


def test_who_is_gone_cannot_be_read(owner: tuple[subprocess.Popen[str], int]) -> None:
    process, address = owner
    puller = Puller(process.pid)
    assert puller.reaches(address)
    process.kill()
    process.wait(timeout=scaled(10))
    assert not puller.reaches(address)


def test_without_such_a_call_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankmesh.transport.pulling.system_call", lambda _: None)
    word = np.array([5], np.uint64)
    assert not Puller(os.getpid()).finds(word.ctypes.data, 5)


@pytest.mark.parametrize("kernels, copies", [(3, Copying.QUICKLY), (5, Copying.SLOWLY)])
def test_the_kernels_copies_are_compared_with_our_own(
    kernels: int, copies: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, by the best of several: the first of each takes ten times as long here."""
    ticks = iter([tick for slow in (10, 1, 1, 1, 1) for tick in (0, kernels * slow, kernels * slow + slow)])
    monkeypatch.setattr(pulling, "perf_counter", lambda: next(ticks))
    copying.cache_clear()
    try:
        assert [copying(), copying()] == [copies] * 2
    finally:
        copying.cache_clear()


def memory_of(nbytes: int, advice: int) -> np.ndarray[Any, Any]:
    """Written to, and on pages that the system was asked for."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    array = np.frombuffer(memory, np.uint8)
    array.fill(1)
    return array


def large_bytes(array: np.ndarray[Any, Any]) -> int:
    """How much of the mapping it lies in is on large pages, as /proc/self/smaps has it."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            inside = first <= array.ctypes.data < last
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("it lies nowhere")


def test_on_which_pages_memory_lies() -> None:
    """The system need not give what it was asked for, nor tell: then nothing is on large pages, as far as is known."""
    small, large = memory_of(16 << 20, mmap.MADV_NOHUGEPAGE), memory_of(16 << 20, mmap.MADV_HUGEPAGE)
    assert not large_bytes(small)
    assert not on_large_pages(small.ctypes.data, small.nbytes)
    tells = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2]) >= (6, 7)
    assert on_large_pages(large.ctypes.data, large.nbytes) == (tells and large_bytes(large) >= 12 << 20)


@pytest.mark.parametrize("what", ["os.open", "fcntl.ioctl"])
def test_a_system_that_does_not_tell(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(errno.ENOTTY, "no such call")

    monkeypatch.setattr(what, fail)
    descriptors = len(os.listdir("/proc/self/fd"))
    array = np.ones(16 << 20, np.uint8)
    assert not on_large_pages(array.ctypes.data, array.nbytes)
    assert len(os.listdir("/proc/self/fd")) == descriptors

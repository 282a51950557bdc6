"""Memory of another process, written where it lies: never of the wrong one, and never after it was revoked."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from rankmesh.buffers import PAGE
from rankmesh.transport import pushing
from rankmesh.transport.pushing import VECTOR_WORDS, Pusher, gone, guard, halted
from timing import wait_until

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="words are shared without bells on x86 only")

NBYTES = 3 * PAGE
LENGTH = VECTOR_WORDS - 1


@pytest.fixture
def words() -> memoryview:
    """Shared with forked children."""
    return memoryview(mmap.mmap(-1, PAGE))[: 8 * VECTOR_WORDS].cast("Q")


@contextmanager
def forked(run: Callable[[], object]) -> Iterator[int]:
    """A child of this process; at the end it is killed."""
    pid = os.fork()
    if not pid:
        try:
            run()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def address(array: np.ndarray[Any, Any]) -> int:
    return array.ctypes.data


def state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(") ")[2][0]


def test_bytes_go_where_they_belong(words: memoryview) -> None:
    """From a child into its parent: they have the same addresses, and other memory."""
    place, source = np.zeros(NBYTES, np.uint8), np.arange(NBYTES, dtype=np.uint8)
    to, parent, its = address(place), os.getpid(), guard()
    assert its

    def push() -> None:
        place[:] = 99
        pusher = Pusher(parent, its, words)
        pusher.aim(to + 5, 100)
        assert pusher.push(address(source), 100)

    with forked(push):
        wait_until(lambda: place[104] == 99, 10, "the last byte")
    assert (place[5:105] == source[:100]).all()
    assert not place[:5].any()
    assert not place[105:].any()


def test_nothing_is_written_into_a_process_that_has_no_such_guard(words: memoryview) -> None:
    """As if the owner were gone, and its number another's: a forked child has the same memory, but for the guard."""
    place = np.zeros(NBYTES, np.uint8)
    to, source, its = address(place), np.full(NBYTES, 7, np.uint8), guard()
    shared = memoryview(mmap.mmap(-1, PAGE))

    def look() -> None:
        shared[1] = guard() != its
        shared[0] = 1
        signal.pause()

    with forked(look) as child:
        wait_until(lambda: bool(shared[0]), 10, "the child")
        assert shared[1], "the child has its own"
        pusher = Pusher(child, its, words)
        pusher.aim(to, NBYTES)
        assert not pusher.push(address(source), NBYTES)
        with open(f"/proc/{child}/mem", "rb", buffering=0) as memory:
            memory.seek(to)
            assert memory.read(NBYTES) == bytes(NBYTES)


def test_what_was_revoked_writes_nothing(words: memoryview) -> None:
    place = np.zeros(NBYTES, np.uint8)
    pusher = Pusher(os.getpid(), guard(), words)
    pusher.aim(address(place), NBYTES)
    words[LENGTH] = 0
    source = np.ones(NBYTES, np.uint8)
    assert not pusher.push(address(source), NBYTES)
    assert not place.any()


def test_who_is_stopped_before_the_call_writes_nothing_when_it_goes_on(words: memoryview) -> None:
    place, parent, its = np.zeros(NBYTES, np.uint8), os.getpid(), guard()
    to, source = address(place), np.ones(NBYTES, np.uint8)
    said = memoryview(mmap.mmap(-1, PAGE))

    def push() -> None:
        pusher = Pusher(parent, its, words)
        pusher.aim(to, NBYTES)
        os.kill(os.getpid(), signal.SIGSTOP)
        said[1] = pusher.push(address(source), NBYTES)
        said[0] = 1
        signal.pause()

    with forked(push) as child:
        wait_until(lambda: halted(child), 10, "it is stopped")
        assert words[LENGTH] == NBYTES
        words[LENGTH] = 0
        os.kill(child, signal.SIGCONT)
        wait_until(lambda: bool(said[0]), 10, "its call")
        assert not said[1]
    assert not place.any()


def test_memory_that_is_not_there(words: memoryview) -> None:
    pusher = Pusher(os.getpid(), guard(), words)
    pusher.aim(PAGE, NBYTES)
    source = np.ones(NBYTES, np.uint8)
    assert not pusher.push(address(source), NBYTES)


def test_without_such_a_call_nothing_is_written(words: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushing, "system_call", lambda _: None)
    place = np.zeros(NBYTES, np.uint8)
    pusher = Pusher(os.getpid(), guard(), words)
    pusher.aim(address(place), NBYTES)
    source = np.ones(NBYTES, np.uint8)
    assert not pusher.push(address(source), NBYTES)
    assert not place.any()


def test_who_is_halted() -> None:
    assert not halted(os.getpid())
    with forked(signal.pause) as child:
        wait_until(lambda: state(child) == "S", 10)
        assert not halted(child), "it sleeps: in a system call, for all that is known"
        os.kill(child, signal.SIGSTOP)
        wait_until(lambda: halted(child), 10, "it is stopped")
        os.kill(child, signal.SIGCONT)
        wait_until(lambda: not halted(child), 10, "it goes on")
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: halted(child), 10, "it is dead, and not buried")
    assert halted(child), "it is gone"


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError, OSError])
def test_without_proc_nobody_is_known_to_be_halted(error: type[OSError], monkeypatch: pytest.MonkeyPatch) -> None:
    """Or with one of another container, or without descriptors left."""

    def none(path: str) -> Any:
        raise error(24, path)

    nobody = 1 << 30
    assert gone(nobody)
    assert halted(nobody)
    monkeypatch.setattr(os, "listdir", none)
    assert not halted(os.getpid())
    monkeypatch.setattr(os, "readlink", lambda _: "1")
    assert not gone(nobody)
    assert not halted(nobody)
    monkeypatch.setattr(os, "readlink", none)
    assert not halted(nobody)


def test_a_thread_that_nothing_is_known_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> Any:
        raise PermissionError

    with forked(signal.pause) as child:
        os.kill(child, signal.SIGSTOP)
        wait_until(lambda: halted(child), 10)
        monkeypatch.setattr("builtins.open", none)
        assert not halted(child)
        monkeypatch.undo()

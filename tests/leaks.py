"""What a test may leave behind: nothing. The check that tests/conftest.py puts around every test.

Four sorts of things are looked at, each by a function that maps a key to a description of what is there now:

    thread            threading.enumerate(), daemons too
    file descriptor   /proc/self/fd, with what it points at
    process           children of this process, zombies too, and orphans: processes that inherited MARK from it
    shared memory     names in /dev/shm that begin with `rankmesh`

What is there after the test and was not there before has leaked, if it is still there after SETTLE seconds: threads end
a moment after their last effect can be seen, and the kernel takes its time over processes. Garbage is collected
before the verdict, so that it does not depend on when the collector last ran; a socket or file that only the collector
closed then fails the test by its ResourceWarning.
"""

from __future__ import annotations

import gc
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from timing import wait_until

#: Seconds (scaled) that a test's remains have to disappear.
SETTLE = 2.0
#: In the environment of whatever a test starts: an orphan whose parent is gone is still known by it.
MARK = "RANKMESH_TEST_RUN"

State = Mapping[Any, str]


def threads() -> State:
    return {thread: f"{thread!r}" for thread in threading.enumerate()}


def descriptors() -> State:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor that listed the directory
            target = os.readlink(f"/proc/self/fd/{name}")
            found[name, target] = f"{name} → {target}"
    return found


#: PF_KTHREAD of a process's flags. Kernel threads have no environment to be known by.
_KERNEL_THREAD = 0x200000
#: Processes found not to be ours. They never become so, and looking at all of them again takes longer than most tests.
_foreign: set[str] = set()


def processes() -> State:
    found = {}
    running = {name for name in os.listdir("/proc") if name.isdigit()} - {str(os.getpid())}
    _foreign.intersection_update(running)
    for pid in running - _foreign:
        try:
            description = _describe_if_ours(Path("/proc", pid))
        except (FileNotFoundError, ProcessLookupError):  # it ended just now, or is in the middle of exec
            continue
        except PermissionError:  # another user's
            description = None
        if description is None:
            _foreign.add(pid)
        else:
            found[pid] = description
    return found


def _describe_if_ours(entry: Path) -> str | None:
    state, parent, *_, flags = (entry / "stat").read_text().rpartition(")")[2].split()[:7]
    if int(flags) & _KERNEL_THREAD or (int(parent) != os.getpid() and not _is_marked(entry)):
        return None
    command = (entry / "cmdline").read_bytes() or (entry / "comm").read_bytes()
    words = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return f"pid {entry.name} in state {state}: {words}"


def _is_marked(entry: Path) -> bool:
    environment = (entry / "environ").read_bytes()
    if not environment:
        raise ProcessLookupError(f"{entry} has no memory at the moment")
    return f"{MARK}={os.environ.get(MARK)}".encode() in environment.split(b"\0")


def shared_memory() -> State:
    return {path.name: f"/dev/shm/{path.name}" for path in Path("/dev/shm").glob("rankmesh*")}


SORTS: dict[str, Callable[[], State]] = {
    "thread": threads,
    "file descriptor": descriptors,
    "process": processes,
    "shared memory": shared_memory,
}


def mark_this_run() -> None:
    """Make everything that is started from now on recognisable; once per run, before the first test."""
    os.environ[MARK] = uuid.uuid4().hex


@contextmanager
def no_leaks() -> Iterator[None]:
    """Fail if the block leaves something behind, and name it."""
    before = {sort: look() for sort, look in SORTS.items()}

    def leaked() -> list[str]:
        return [
            f"{sort}: {description}"
            for sort, look in SORTS.items()
            for key, description in look().items()
            if key not in before[sort]
        ]

    yield
    if not leaked():
        return
    gc.collect()
    try:
        wait_until(lambda: not leaked(), SETTLE)
    except AssertionError:
        remains = leaked()
        if remains:
            pytest.fail("the test left behind\n  " + "\n  ".join(remains), pytrace=False)

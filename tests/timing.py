"""Deadlines of tests, and the one way in which a test waits for a state it cannot be told about."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

#: Seconds between two looks: long enough to leave the core to what is waited for.
POLL = 0.01


def scaled(seconds: float) -> float:
    """Multiply a deadline by the environment's RANKMESH_TEST_SCALE (default 1).

    A deadline in a test says "on an idle machine this takes far less", never "this is how long it takes". On a slow or
    loaded machine the factor stretches all of them at once: `RANKMESH_TEST_SCALE=5 make test`.
    """
    return seconds * float(os.environ.get("RANKMESH_TEST_SCALE", "1"))


def wait_until(predicate: Callable[[], object], timeout: float, what: str = "") -> None:
    """Return as soon as `predicate()` is true; fail after `timeout` seconds (scaled here, do not scale it yourself).

    For states that nobody announces: a process that disappears from /proc, a counter of another thread, a line in a
    file. Where there is a Work, an Event, a join() or a pipe to wait on, wait on that instead. This is the only place
    in the tests that sleeps in order to wait, on an event that is never set.
    """
    never = threading.Event()
    deadline = time.monotonic() + scaled(timeout)
    while not predicate():
        if time.monotonic() > deadline:
            subject = what or getattr(predicate, "__name__", "the condition")
            raise AssertionError(f"{subject} did not come true within {scaled(timeout):g} s")
        never.wait(POLL)

"""fork(): the child has copies of this process's engines, and must not use them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankmesh.endpoint.progress import Engine

#: All that live in this process.
engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def divert(descriptors: Iterable[int]) -> None:
    """Each number goes on existing, for /dev/null: the objects that hold it close it sometime, and must hit nobody."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in descriptors:
        os.dup2(null, fd, inheritable=False)
    os.close(null)


def _after_fork() -> None:
    for engine in list(engines):
        engine.forked()


os.register_at_fork(after_in_child=_after_fork)

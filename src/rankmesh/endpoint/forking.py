"""fork(): the child has copies of this process's engines, and must not use them."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankmesh.endpoint.progress import Engine

#: All that live in this process.
engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in list(engines):
        engine.forked()


os.register_at_fork(after_in_child=_after_fork)

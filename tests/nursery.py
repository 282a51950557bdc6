"""The process that others are forked from: the ranks of tests/ranks.py, and what tests/attack.py attacks."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest

#: What all of them need. Not modules of tests/: the server of Python 3.11 does not have them on its path, and says
#: nothing.
PRELOADED = ("pytest", "rankmesh.testing.proxy", "rankmesh.testing.world")
#: What some of them import too: the server does it for them all where a test of this run has done so.
SLOW_TO_IMPORT = ("hypothesis", "ml_dtypes", "torch")


@pytest.fixture(scope="session")
def nursery() -> Iterator[None]:
    """A server that has imported rankmesh and holds nothing else. Who starts a process with the context "forkserver"
    uses it: `pytestmark = pytest.mark.usefixtures("nursery")`."""
    slow = [name for name in SLOW_TO_IMPORT if name in sys.modules]
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED, *slow])
    forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # CPython's own tests end it that way; there is no other

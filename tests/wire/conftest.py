"""What the tests of the wire share."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def peak_bytes() -> Iterator[Callable[[], int]]:
    """The most memory that Python had allocated at once since this was last asked, or since the test began."""

    def since_last() -> int:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        tracemalloc.start()
        return peak

    tracemalloc.start()
    try:
        yield since_last
    finally:
        tracemalloc.stop()

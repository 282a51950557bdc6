"""One-sided memory is carried by whatever carries messages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from endpoint.conftest import certificates, faults, inproc, medium, tcp
from peers import Medium
from rankmesh import Config
from regions import Sides, open_sides

__all__ = ["certificates", "faults", "inproc", "medium", "same_host", "sides", "tcp"]


@pytest.fixture
def sides(medium: Medium) -> Iterator[Sides]:
    with open_sides(medium) as both:
        yield both


@pytest.fixture
def same_host() -> Medium:
    """Sockets that move over to shared memory by themselves."""
    return Medium("tcp://127.0.0.1:0", Config())

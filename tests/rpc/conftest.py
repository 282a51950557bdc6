"""RPC is carried by whatever carries messages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from calls import Served, serving
from endpoint.conftest import certificates, faults, inproc, medium, tcp
from peers import Medium

__all__ = ["certificates", "faults", "inproc", "medium", "served", "tcp"]


@pytest.fixture
def served(medium: Medium) -> Iterator[Served]:
    with serving(medium) as both:
        yield both

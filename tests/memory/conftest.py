"""One-sided memory is carried by whatever carries messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from endpoint.conftest import certificates, faults, inproc, medium, tcp
from peers import BRIEFLY, Medium
from rankmesh import CancelledError, Config, DeadlineError, Work
from regions import GiveUp, Sides, open_sides

__all__ = ["certificates", "faults", "give_up", "inproc", "medium", "same_host", "sides", "tcp"]


def cancel(work: Work[Any]) -> None:
    assert work.cancel() is True
    with pytest.raises(CancelledError):
        work.result()


def run_out(work: Work[Any]) -> None:
    with pytest.raises(DeadlineError, match="region 'kv'"):
        work.wait(timeout=BRIEFLY)


@pytest.fixture(params=[cancel, run_out], ids=["cancel", "timeout"])
def give_up(request: pytest.FixtureRequest) -> GiveUp:
    """A transfer under way is given up."""
    way: GiveUp = request.param
    return way


@pytest.fixture
def sides(medium: Medium) -> Iterator[Sides]:
    with open_sides(medium) as both:
        yield both


@pytest.fixture
def same_host() -> Medium:
    """Sockets that move over to shared memory by themselves."""
    return Medium("tcp://127.0.0.1:0", Config())

"""Large transfers over several connections."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from peers import FAULTY, SOON, Call, Medium, blank, pattern
from rankmesh import AccessDenied, ClosedError, Config, ConfigError, DeadlineError, PeerLost, StaleRegion
from rankmesh.config import MIB
from rankmesh.memory.rails import STRIPED_FROM, shares
from rankmesh.testing.faults import FaultTransport
from regions import Sides, open_sides
from timing import wait_until

SIZE = 3 * STRIPED_FROM + 12_345


@pytest.fixture(params=[2, 3])
def sides(tcp: Medium, request: pytest.FixtureRequest) -> Iterator[Sides]:
    with open_sides(tcp, rails=request.param) as both:
        yield both


@pytest.mark.parametrize("nbytes", [1, MIB, MIB + 1, STRIPED_FROM, SIZE])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_are_everything_once(nbytes: int, count: int) -> None:
    cut = shares(nbytes, count)
    assert len(cut) <= count
    assert [at for at, _ in cut] == [sum(length for _, length in cut[:n]) for n in range(len(cut))]
    assert sum(length for _, length in cut) == nbytes


def test_striped_transfers(sides: Sides) -> None:
    memory = pattern(SIZE)
    sides.register(memory)
    remote = sides.peer.open("kv")
    for _ in range(3):
        out = blank(SIZE - 100)
        assert remote.read(out, 50) is out
        assert (out == memory[50:-50]).all()
    work = remote.write(pattern(SIZE, 1), async_op=True)
    assert work.result(SOON) is None
    assert (memory == pattern(SIZE, 1)).all()
    assert len(sides.owner.peers) == 1, "rails are nobody's peers"
    with pytest.raises(DeadlineError):
        sides.owner.accept(timeout=0.01)
    routers = [router for router in sides.owner.hub.routers.values() if router.peer.rail]
    assert len(routers) == sides.owner.config.rails - 1


def test_threads_that_need_rails_at_once_share_them(sides: Sides) -> None:
    sides.register(pattern(SIZE))
    remote = sides.peer.open("kv")
    together = threading.Barrier(4)

    def read() -> bool:
        out = blank(SIZE)
        together.wait(SOON)
        remote.read(out)
        return bool((out == pattern(SIZE)).all())

    calls = [Call(read) for _ in range(4)]
    assert all(call.result() for call in calls)
    routers = [router for router in sides.owner.hub.routers.values() if router.peer.rail]
    assert len(routers) == sides.owner.config.rails - 1


def test_notifications_and_small_ones_take_one_connection(sides: Sides) -> None:
    memory = np.zeros(SIZE, np.uint8)
    region = sides.register(memory)
    remote = sides.peer.open("kv")
    remote.write(pattern(SIZE), notify="all")
    told = region.wait_notification("all", SOON)
    assert told.source is sides.back
    assert (memory == pattern(SIZE)).all()


def test_allow_lists_count_for_rails(sides: Sides) -> None:
    region = sides.register(pattern(SIZE), allow=[sides.back])
    remote = sides.peer.open("kv")
    out = blank(SIZE)
    remote.read(out)
    assert (out == pattern(SIZE)).all()
    region.allow([])
    with pytest.raises(AccessDenied):
        remote.read(out)
    with pytest.raises(AccessDenied):
        remote.write(out)
    assert (region.array == pattern(SIZE)).all()


def test_a_striped_transfer_fails_as_one(sides: Sides) -> None:
    region = sides.register(pattern(SIZE))
    remote = sides.peer.open("kv")
    remote.read(blank(SIZE))
    region.unregister()
    with pytest.raises(StaleRegion):
        remote.read(blank(SIZE))
    sides.register(pattern(SIZE), "other")
    handle = sides.peer.open("other")
    sides.owner.abort()
    with pytest.raises(PeerLost):
        handle.read(blank(SIZE), timeout=SOON)
    sides.user.close()
    with pytest.raises(ClosedError):
        handle.read(blank(SIZE))


@pytest.mark.parametrize("stalled", [0, 1], ids=["main", "rail"])
def test_giving_up_leaves_every_share_alone(faults: FaultTransport, stalled: int) -> None:
    with open_sides(FAULTY, rails=2) as sides:
        memory = pattern(16 * MIB)
        sides.register(memory)
        remote = sides.peer.open("kv")
        remote.read(blank(16 * MIB))
        links = [link for link in faults.links if link.accepted]
        link = links[stalled]
        link.stall(after_bytes=link.sent + MIB)
        out = blank(16 * MIB)
        with pytest.raises(DeadlineError):
            remote.read(out, timeout=0.3)
        out[:] = 7
        link.resume()
        again = blank(16 * MIB)
        remote.read(again)
        assert (again == memory).all()
        assert (out == 7).all()
        wait_until(lambda: sides.owner.memory.stats()["transfers"] == 0, 10)


def test_where_no_rail_can_be_made_one_connection_does(tcp: Medium) -> None:
    """The owner's address leads nowhere any more."""
    with open_sides(tcp, rails=2) as sides:
        memory = pattern(SIZE)
        sides.register(memory)
        remote = sides.peer.open("kv")
        sides.peer.addresses = ()
        out = blank(SIZE)
        remote.read(out)
        assert (out == memory).all()


def test_rails_are_counted_from_one() -> None:
    with pytest.raises(ConfigError, match=r"Config\.rails must be at least 1"):
        Config(rails=0)

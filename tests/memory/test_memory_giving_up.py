"""Timed-out, cancelled and aborted transfers: memory is nobody else's afterwards, and the connection goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from peers import BRIEFLY, FAULTY, SOON, Call, Medium, blank, is_blank, pattern, router_of
from rankmesh import (
    AccessDenied,
    BusyError,
    CancelledError,
    DeadlineError,
    PeerLost,
    Region,
    StaleRegion,
    UsageError,
    Work,
)
from rankmesh.config import KIB, MIB
from rankmesh.testing.faults import FaultLink, FaultTransport
from regions import GiveUp, Sides, open_sides
from timing import wait_until

LARGE = 8 * MIB
#: More than the kernel takes for a receiver that does not read.
HUGE = 48 * MIB


@pytest.fixture
def sides(faults: FaultTransport) -> Iterator[Sides]:
    with open_sides(FAULTY) as both:
        yield both
        wait_until(lambda: nothing_remains(both), 10, "the end of everything under way")


def nothing_remains(sides: Sides) -> bool:
    routers = (router_of(sides.peer), router_of(sides.back))
    idle = all(not router.requests and router.inbound.idle and router.outbound.idle for router in routers)
    return idle and sides.owner.memory.stats()["transfers"] == 0


def link_of(faults: FaultTransport, *, owner: bool) -> FaultLink:
    return next(link for link in faults.links if link.accepted == owner)


@contextmanager
def read_and_write_under_way(
    sides: Sides, faults: FaultTransport, region: Region, out: Any, data: Any, at: int = 0
) -> Iterator[tuple[Work[Any], Work[Any]]]:
    """Both have begun at the owner, and stand still until the block is left. The write's first mebibyte goes before the
    read's request; the next two let that pass, which has precedence over all but the frame under way."""
    remote = sides.peer.open("kv")
    owner, user = link_of(faults, owner=True), link_of(faults, owner=False)
    user.stall(after_bytes=user.sent + MIB)
    writing = remote.write(data, at, async_op=True)
    wait_until(lambda: len(region.moving) == 1 and "stalled" in repr(user), 10, "the write")
    owner.stall(after_bytes=owner.sent + MIB)
    reading = remote.read(out, async_op=True)
    user.resume(for_bytes=2 * MIB)
    wait_until(lambda: len(region.moving) == 2 and "stalled" in repr(owner), 10, "the read")
    yield reading, writing
    for link in (owner, user):
        link.resume()


@pytest.mark.parametrize("nbytes", [1 * KIB, LARGE])
def test_a_read_given_up_before_its_answer(sides: Sides, faults: FaultTransport, give_up: GiveUp, nbytes: int) -> None:
    memory = pattern(LARGE)
    sides.register(memory)
    remote = sides.peer.open("kv")
    link_of(faults, owner=True).stall()
    out = blank(nbytes)
    give_up(remote.read(out, async_op=True))
    assert is_blank(out)
    link_of(faults, owner=True).resume()
    again = blank(LARGE)
    remote.read(again)
    assert (again == memory).all()
    assert is_blank(out), "what came later went nowhere"


def test_a_read_given_up_in_the_middle(sides: Sides, faults: FaultTransport, give_up: GiveUp) -> None:
    memory = pattern(LARGE)
    sides.register(memory)
    remote = sides.peer.open("kv")
    link = link_of(faults, owner=True)
    link.stall(after_bytes=link.sent + 2 * MIB + 100)
    out = blank(LARGE)
    work = remote.read(out, async_op=True)
    posted = next(iter(router_of(sides.peer).arrivals.posted.values()))
    wait_until(lambda: posted.got >= MIB, 10)
    give_up(work)
    out[:] = 0xA5
    link.resume()
    again = blank(64)
    remote.read(again, 64)
    assert (again == memory[64:128]).all()
    wait_until(lambda: nothing_remains(sides), 10)
    assert is_blank(out)


@pytest.mark.parametrize("nbytes", [1 * KIB, LARGE])
def test_a_write_given_up_before_it_arrives(sides: Sides, faults: FaultTransport, give_up: GiveUp, nbytes: int) -> None:
    memory = np.zeros(LARGE, np.uint8)
    sides.register(memory)
    remote = sides.peer.open("kv")
    link = link_of(faults, owner=False)
    link.stall(after_bytes=link.sent + (3 * MIB if nbytes == LARGE else 0))
    data = pattern(nbytes, 1)
    work = remote.write(data, async_op=True)
    give_up(work)
    sent = data.copy()
    data[:] = 0
    link.resume()
    out = blank(LARGE)
    remote.read(out)
    assert ((memory == 0) | (memory == np.resize(sent, LARGE))).all(), "what was applied is what was given"


def test_a_write_given_up_before_its_request_has_left(sides: Sides, faults: FaultTransport, give_up: GiveUp) -> None:
    """The request leaves later, and the owner must not wait for bytes that will never come."""
    memory = np.zeros(LARGE, np.uint8)
    region = sides.register(memory)
    remote = sides.peer.open("kv")
    link = link_of(faults, owner=False)
    link.stall()
    give_up(remote.write_batch([(bytes(100), 100 * at) for at in range(2000)], async_op=True))
    link.resume()
    remote.read(blank(8))
    wait_until(lambda: region.idle, 10, "the end of the write")
    region.unregister(timeout=SOON)


def test_giving_up_where_nothing_more_can_be_said(faults: FaultTransport) -> None:
    """The queue of requests is full: the cancelled read ends all the same."""
    with open_sides(FAULTY, rpc_send_bytes=MIB) as sides:
        sides.register(pattern(LARGE))
        remote = sides.peer.open("kv")
        link_of(faults, owner=False).stall()
        out = blank(LARGE)
        read = remote.read(out, async_op=True)
        works = []
        for nbytes in (14_000, 1):
            with pytest.raises(BusyError):  # noqa: PT012  # sometime
                while True:
                    works.append(remote.write(bytes(nbytes), async_op=True))
        assert read.cancel() is True
        with pytest.raises(CancelledError):
            read.result()
        link_of(faults, owner=False).resume()
        for work in works:
            work.wait(SOON)
        wait_until(lambda: nothing_remains(sides), 10)
        assert is_blank(out)


def test_a_read_that_could_not_be_sent_leaves_nothing(tcp: Medium) -> None:
    with open_sides(tcp, max_rpc_bytes=MIB) as sides:
        sides.register(pattern(LARGE))
        remote = sides.peer.open("kv")
        out = blank(LARGE)
        with pytest.raises(UsageError, match="max_rpc_bytes"):
            remote.read_batch([(out[at : at + 1], at) for at in range(100_000)])
        assert nothing_remains(sides)
        assert router_of(sides.peer).arrivals.posted == {}


@pytest.mark.parametrize("got", [0, 1, 3 * MIB])
def test_a_read_through_rings_given_up_in_the_middle(same_host: Medium, got: int) -> None:
    """Pieces that are taken from a ring go straight to their place: not to that of one who has given up."""
    with open_sides(same_host) as sides:
        memory = pattern(HUGE)
        sides.register(memory)
        remote = sides.peer.open("kv")
        assert not remote.mapped
        out = blank(HUGE)
        work = remote.read(out, async_op=True)
        wait_until(lambda: work.done() or next(iter(router_of(sides.peer).arrivals.posted.values())).got >= got, 10)
        if work.cancel():
            out[:] = 0xA5
            small = blank(64)
            remote.read(small, 64)
            assert (small == memory[64:128]).all()
            wait_until(lambda: nothing_remains(sides), 10)
            assert is_blank(out)


def test_unregister_can_be_repeated_by_name(sides: Sides, faults: FaultTransport) -> None:
    sides.register(pattern(LARGE))
    remote = sides.peer.open("kv")
    user = link_of(faults, owner=False)
    user.stall(after_bytes=user.sent + MIB)
    writing = remote.write(pattern(LARGE), async_op=True)
    wait_until(lambda: sides.owner.memory.stats()["transfers"] == 1, 10)
    with pytest.raises(DeadlineError, match="abort=True"):
        sides.owner.memory.unregister("kv", timeout=BRIEFLY)
    sides.owner.memory.unregister("kv", abort=True, timeout=SOON)
    user.resume()
    with pytest.raises(StaleRegion):
        writing.wait(SOON)


def test_unregister_waits_for_transfers(sides: Sides, faults: FaultTransport) -> None:
    memory = pattern(LARGE)
    region = sides.register(memory)
    out, data = blank(LARGE // 2), pattern(LARGE // 2, 1)
    with read_and_write_under_way(sides, faults, region, out, data, LARGE // 2) as works:
        with pytest.raises(DeadlineError, match="still under way"):
            region.unregister(timeout=BRIEFLY)
        with pytest.raises(StaleRegion):
            _ = region.array
        unregister = Call(region.unregister, timeout=SOON)
    for work in works:
        work.wait(SOON)
    unregister.result()
    assert (out == pattern(LARGE)[: LARGE // 2]).all()
    assert (memory[LARGE // 2 :] == data).all()


def test_unregister_aborts_transfers(sides: Sides, faults: FaultTransport) -> None:
    memory = pattern(LARGE)
    region = sides.register(memory)
    with read_and_write_under_way(sides, faults, region, blank(LARGE), pattern(LARGE, 1)) as works:
        region.unregister(abort=True, timeout=SOON)
        memory[:] = 7
    for work in works:
        with pytest.raises(StaleRegion, match="unregistered"):
            work.wait(SOON)
    sides.register(memory, "again")
    out = blank(LARGE)
    sides.peer.open("again").read(out)
    assert (out == 7).all(), "nothing was written after unregister had returned"


def test_transfers_end_when_their_peer_is_allowed_no_longer(sides: Sides, faults: FaultTransport) -> None:
    memory = pattern(LARGE)
    region = sides.register(memory)
    with read_and_write_under_way(sides, faults, region, blank(LARGE), pattern(LARGE, 1)) as works:
        region.allow([sides.back])
        assert len(region.moving) == 2, "it is allowed still"
        region.allow([])
        assert region.idle
        memory[:] = 7
    for work in works:
        with pytest.raises(AccessDenied, match="any more"):
            work.wait(SOON)
    assert (memory == 7).all(), "nothing was written after allow() had returned"
    region.allow(None)
    out = blank(64)
    sides.peer.open("kv").read(out)
    assert (out == 7).all()


def test_small_operations_pass_large_ones(sides: Sides, faults: FaultTransport) -> None:
    """A large read that cannot move holds up no small one: they pass it between two frames."""
    memory = pattern(64 * MIB)
    sides.register(memory)
    remote = sides.peer.open("kv")
    out = blank(64 * MIB)
    large = remote.read(out, async_op=True)
    for at in range(20):
        small = blank(64)
        remote.read(small, at)
        assert (small == memory[at : at + 64]).all()
        if at == 0:
            assert not large.done()
    large.wait(SOON)
    assert (out == memory).all()


def test_an_owner_that_is_lost_ends_operations(sides: Sides, faults: FaultTransport) -> None:
    sides.register(pattern(LARGE))
    remote = sides.peer.open("kv")
    link = link_of(faults, owner=True)
    link.stall(after_bytes=link.sent + MIB)
    works = [
        remote.read(blank(LARGE), async_op=True),
        remote.write(pattern(LARGE), async_op=True),
        remote.read(bytearray(8), async_op=True),
        remote.fetch_add(0, 1, async_op=True),
    ]
    link.cut()
    for work in works:
        with pytest.raises(PeerLost):
            work.wait(SOON)
    with pytest.raises(PeerLost):
        remote.read(bytearray(8))
    wait_until(lambda: sides.owner.memory.stats()["transfers"] == 0, 10)
    assert sides.owner.memory.regions["kv"].idle


def test_pages_of_a_batch_given_up_are_not_written_to(tcp: Medium) -> None:
    """On sockets, which receive into the pages themselves: at whatever point it is given up."""
    memory = pattern(LARGE)
    with open_sides(tcp) as sides:
        sides.register(memory)
        remote = sides.peer.open("kv")
        for few in range(20):
            outs = [blank(4096) for _ in range(LARGE // 4096)]
            work = remote.read_batch([(out, 4096 * at) for at, out in enumerate(outs)], async_op=True)
            for _ in range(few):  # each takes the next bytes of the batch with it
                remote.read(blank(8), 0)
            if work.cancel():
                left = [out.copy() for out in outs]
                assert (remote.read(blank(LARGE), 0) == memory).all()  # all that was on its way has come before
                assert all((out == before).all() for out, before in zip(outs, left, strict=True))

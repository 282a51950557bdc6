"""Many collectives at once, on one group and on overlapping ones, from many threads, ending in any order; and groups
that come and go."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import numpy as np
import pytest

from peers import Call
from rankmesh import CancelledError, ClosedError, Config, DeadlineError, Mesh, PeerError, UsageError, Work
from rankmesh.collectives.choosing import ALGORITHMS
from rankmesh.config import MIB
from rankmesh.testing import run_world
from ranks import run_ranks
from timing import scaled, wait_until

pytestmark = pytest.mark.usefixtures("nursery")

CONFIG = Config(timeout=scaled(30))
LIMIT = scaled(50)


#: Asynchronous all_reduces per thread, and threads: 204 in flight on each rank.
EACH, THREADS = 51, 4


class Storm:
    """One thread's share on one rank: all_reduces on three groups of its own, begun without waiting, and waited for in
    an order of this rank's own."""

    def __init__(self, mesh: Mesh, seed: int) -> None:
        groups = (mesh.dup(), mesh.split(mesh.rank % 2), mesh.group(list(range(mesh.size))[::-1]))
        self._groups = [group for group in groups if group is not None]
        self._same, self._own = random.Random(seed), random.Random(seed * 1000 + mesh.rank)
        self._pending: list[tuple[Work[Any], int, bool]] = []

    def begin(self) -> None:
        for number in range(EACH):
            which, length = self._same.randrange(3), self._same.choice([0, 1, 10, 1000, 20_000])
            algorithm = self._same.choice([None, *ALGORITHMS["all_reduce"]])
            if self._same.random() < 0.2:
                self._groups[which].barrier(async_op=True)
            group = self._groups[which]
            mine = np.full(length, number + group.rank)
            work = group.all_reduce(mine, algorithm=algorithm, async_op=True)
            self._pending.append((work, number * group.size + sum(range(group.size)), which != 1))

    def under_way(self) -> int:
        """Those of groups that have all ranks."""
        return sum(of_all and not work.done() for work, _, of_all in self._pending)

    def of_all(self) -> int:
        return sum(of_all for _, _, of_all in self._pending)

    def end(self) -> None:
        self._own.shuffle(self._pending)
        for work, wanted, _ in self._pending:
            assert (work.result() == wanted).all()


def _in_threads(mesh: Mesh, seed: int) -> None:
    """Rank 0 begins when the others have begun all of theirs: so these were in flight together."""
    storms = [Storm(mesh, seed + at) for at in range(THREADS)]
    if mesh.rank == 0:
        for rank in range(1, mesh.size):
            mesh.recv(b"", source=rank)
    begun = [Call(storm.begin) for storm in storms]
    for call in begun:
        call.result(LIMIT)
    if mesh.rank != 0:
        assert sum(storm.under_way() for storm in storms) == sum(storm.of_all() for storm in storms) > 100
        mesh.send(b"", to=0)
    ended = [Call(storm.end) for storm in storms]
    for call in ended:
        call.result(LIMIT)
    mesh.barrier()


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(scaled(300))])])
@pytest.mark.parametrize("world", ["inproc", "shm", "tcp"])
def test_200_at_once_on_three_overlapping_groups_from_four_threads(world: str, times: int) -> None:
    for _ in range(times):
        seed = random.randrange(2**16)
        print(f"seed {seed}")
        if world == "inproc":
            run_world(4, _in_threads, args=(seed,), config=CONFIG, timeout=LIMIT)
        else:
            run_ranks(4, _in_threads, CONFIG.override(shm=world == "shm"), (seed,))


def _background(mesh: Mesh) -> None:
    """What was begun ends although nobody waits for it."""
    ended = threading.Event()
    work = mesh.all_reduce(np.full(50_000, mesh.rank), algorithm="ring", async_op=True)
    work.add_done_callback(lambda _: ended.set())
    assert ended.wait(scaled(20))
    assert work.done()
    assert (work.result() == sum(range(mesh.size))).all()


@pytest.mark.parametrize("transport", ["inproc://", "tcp://"])
def test_progress_is_made_in_the_background(transport: str) -> None:
    run_world(3, _background, transport, config=CONFIG, timeout=LIMIT)


def _overlapping(mesh: Mesh, algorithm: str) -> list[bool]:
    """While it reduces: whether the next round is under way."""
    found: list[bool] = []

    def add(left: Any, right: Any) -> Any:
        (collective,) = mesh._context.under_way.values()
        found.append(collective._round is not None)
        return left + right

    own = np.full(5001, mesh.rank)
    assert (mesh.all_reduce(own, add, algorithm=algorithm) == sum(range(mesh.size))).all()
    return found


def test_the_pipelined_ring_reduces_while_it_sends() -> None:
    assert run_world(3, _overlapping, args=("pipelined_ring",), config=CONFIG, timeout=LIMIT) == [[True] * 4] * 3
    assert run_world(3, _overlapping, args=("ring",), config=CONFIG, timeout=LIMIT) == [[False] * 2] * 3


def _aside(mesh: Mesh) -> int:
    """What is kept, after some calls, of the memory for blocks that came to be reduced."""
    own, calls = np.ones(mesh.size << 18, np.float32), 8
    for _ in range(calls):
        mesh.all_reduce(own, algorithm="ring")
    assert (own == mesh.size**calls).all()
    pool = mesh._hub.large_pool
    wait_until(lambda: pool.held, 5, "another thread to let go of it")
    return pool.held


def test_blocks_to_be_reduced_lie_on_pages_that_were_used_before() -> None:
    """Found: a sixth of an all_reduce over TCP went into new pages for the blocks of others."""
    for kept in run_world(2, _aside, config=CONFIG, timeout=LIMIT):
        assert MIB <= kept <= 2 * MIB, "one block of the eight, or two where one was given back late"


def _awaited(mesh: Mesh) -> Any:
    async def main() -> Any:
        works = [mesh.all_reduce(np.full(100, number), async_op=True) for number in range(5)]
        return [int((await work)[0]) for work in works]

    return asyncio.run(main())


def test_collectives_can_be_awaited() -> None:
    assert run_world(2, _awaited, config=CONFIG, timeout=LIMIT) == [[0, 2, 4, 6, 8]] * 2


def _cancelled(mesh: Mesh) -> None:
    own = np.full(30_000, mesh.rank)
    if mesh.rank == 0:
        work = mesh.all_reduce(own, async_op=True)
        assert work.cancel()
        with pytest.raises(CancelledError):
            work.result()
        own[:] = 7
        mesh.send(b"", to=1)
    else:
        mesh.recv(b"", source=0)
        with pytest.raises(PeerError, match=r"gave up all_reduce #0.*cancelled by this side"):
            mesh.all_reduce(own)
    if mesh.rank == 0:
        mesh.recv(bytearray(1), source=1)
        assert (own == 7).all()
    else:
        mesh.send(b"", to=0)
    assert mesh.all_reduce(1) == 2


def test_who_cancels_is_named_and_the_group_goes_on() -> None:
    run_world(2, _cancelled, config=CONFIG, timeout=LIMIT)


# ---------------------------------------------------------------------- groups


def _groups(mesh: Mesh) -> None:
    rank, size = mesh.rank, mesh.size
    halves = mesh.split(rank % 2, key=-rank)
    assert halves is not None
    members = [other for other in range(size) if other % 2 == rank % 2][::-1]
    assert (halves.size, members[halves.rank]) == (len(members), rank)
    assert halves.all_gather_object(rank) == members
    nested = halves.split(0 if halves.rank == 0 else None)
    assert (nested is None) == (halves.rank != 0)
    if nested is not None:
        assert (nested.size, nested.all_reduce(5)) == (1, 5)
    pair = mesh.group([size - 1, 0])
    assert (pair is None) == (rank not in (0, size - 1))
    if pair is not None:
        other = 1 - pair.rank
        pair.send(b"same tag", to=other, tag=3)  # a tag space of its own
        mesh.send(b"in world", to=[size - 1, 0][other], tag=3)
        out = bytearray(8)
        mesh.recv(out, source=[size - 1, 0][other], tag=3)
        assert out == b"in world"
        assert pair.recv(out, source=other, tag=3).source == other
        assert out == b"same tag"
        assert pair.peers[other].identity is not None
    assert mesh.all_reduce(1) == size


@pytest.mark.parametrize("size", [2, 3, 5])
def test_groups(size: int) -> None:
    run_world(size, _groups, config=CONFIG, timeout=LIMIT)


def _closed(mesh: Mesh) -> None:
    group = mesh.dup()
    other = 1 - mesh.rank
    big: Work[None] | None = None
    if mesh.rank == 0:
        group.send(bytes(100), to=1, tag=1)  # never received: forgotten with the group
        big = group.isend(bytes(10**6), to=1, tag=2)
    mesh.barrier()
    waiting = None
    if mesh.rank == 1:
        waiting = group.all_reduce(np.ones(10), async_op=True)
    group.close()
    group.close()
    if big is not None:
        big.wait()
    if waiting is not None:
        with pytest.raises(ClosedError, match="group is closed"):
            waiting.result()
    for call in (
        lambda: group.send(b"", to=other),
        lambda: group.recv(bytearray(1)),
        lambda: group.all_reduce(1),
        group.barrier,
        group.dup,
    ):
        with pytest.raises(ClosedError, match="group is closed"):
            call()
    assert "closed" in repr(group)
    assert mesh.all_reduce(1) == 2
    if mesh.rank == 1:  # nothing came for the group after it was closed here
        assert not [message for message in mesh._hub.matcher.unexpected() if message.group != mesh._number]


def test_a_closed_group_leaves_its_parent_alone() -> None:
    run_world(2, _closed, config=CONFIG, timeout=LIMIT)


def _bad_groups(mesh: Mesh) -> None:
    for ranks in ([], [0, 0]):
        with pytest.raises(UsageError, match="different ranks"):
            mesh.group(ranks)
    with pytest.raises(UsageError, match="no rank 7 in a world of 2"):
        mesh.group([0, 7])
    with mesh.dup() as group, pytest.raises(UsageError, match="no rank 2 in a group of 2"):
        group.send(b"", to=2)


def test_groups_that_cannot_be() -> None:
    run_world(2, _bad_groups, config=CONFIG, timeout=LIMIT)


def _bad_split(mesh: Mesh) -> None:
    for color, key in ((0.5, 0), ("red", 0), (2**63, 0), (-(2**63) - 1, 0), (0, 0.5), (0, None), (None, 2**63)):
        with pytest.raises(UsageError, match=r"split\(\) takes integers of 64 bits as (color|key)="):
            mesh.split(color, key)  # type: ignore[arg-type]  # which is what is wrong with them
    assert mesh.sequence == 0
    with pytest.raises(UsageError, match=r"group\(\) takes integers of 64 bits as ranks=, not 0.5"):
        mesh.group([0.5, 1])  # type: ignore[list-item]  # the same
    assert mesh.all_reduce(1) == mesh.size


def test_a_split_by_what_is_no_integer_is_refused_before_anything_is_sent() -> None:
    run_world(2, _bad_split, config=CONFIG, timeout=LIMIT)


def _colours(mesh: Mesh) -> None:
    for color, key in ((-1 - mesh.rank % 2, -mesh.rank), (np.int64(mesh.rank % 2), np.int8(-mesh.rank))):
        group = mesh.split(color, key)
        assert group is not None
        assert group.all_gather_object(mesh.rank) == [rank for rank in (3, 2, 1, 0) if rank % 2 == mesh.rank % 2]
    least, most = mesh.split(-(2**63) if mesh.rank else 2**63 - 1), mesh.split(np.uint8(7) if mesh.rank else None)
    assert least is not None
    assert least.size == (3 if mesh.rank else 1)
    assert (None if most is None else most.size) == (3 if mesh.rank else None)


def test_colours_may_be_negative_and_numpys() -> None:
    run_world(4, _colours, config=CONFIG, timeout=LIMIT)


def _differing_lists(mesh: Mesh) -> None:
    if mesh.rank == 2:
        with pytest.raises(DeadlineError) as caught:
            mesh.group([0, 2], timeout=0.2)
        error = caught.value
        assert error.op == "group([0, 2]), whose number comes from"
        assert "rank 0" in error.peer
        assert str(error).startswith(f"group([0, 2]), whose number comes from {mesh.peers[0]} did not complete")
        assert str(error).endswith(
            "See that all its members call group() with the same ranks in the same order, or pass a larger timeout=."
        )
    else:
        assert mesh.group([0, 1]) is not None
    mesh.barrier()


def test_a_group_of_differing_lists_says_what_was_made_and_who_is_waited_for() -> None:
    run_world(3, _differing_lists, config=CONFIG, timeout=LIMIT)

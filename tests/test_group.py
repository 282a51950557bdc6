"""Groups: calls and memory by ranks of the group, and what closing one leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from queue import Queue
from typing import Any

import numpy as np
import pytest

from peers import Call
from rankmesh import AccessDenied, Channel, ClosedError, Config, Group, Mesh, Peer, UsageError, Work, current_call
from rankmesh.endpoint.hub import MOST_CLOSED
from rankmesh.testing import run_world
from ranks import run_ranks
from timing import scaled, wait_until

pytestmark = pytest.mark.usefixtures("nursery")

CONFIG = Config(timeout=scaled(20), token="of the tests", allow_pickle=True)
LIMIT = scaled(50)
#: Ranks of the mesh, in the order of the group; and those of a group of this one, by rank of the mesh too.
OUTER, INNER = [3, 1, 2], [2, 3]


def in_world(world: str, size: int, fn: Callable[..., Any]) -> list[Any]:
    """Ranks in threads over inproc, or in processes over shm or tcp."""
    if world == "inproc":
        return run_world(size, fn, config=CONFIG, timeout=LIMIT)
    return run_ranks(size, fn, CONFIG.override(shm=world == "shm"))


worlds = pytest.mark.parametrize("world", ["inproc", "shm", "tcp"])


def _made(mesh: Mesh) -> list[tuple[Group, list[int]]]:
    """The groups that this rank is in, each with its members by rank of the mesh. None: it is in neither."""
    outer = mesh.group(OUTER)
    if outer is None:
        return []
    inner = outer.group([OUTER.index(rank) for rank in INNER])
    return [(outer, OUTER)] if inner is None else [(outer, OUTER), (inner, INNER)]


class Functions:
    """What a rank lets others call."""

    def __init__(self, mesh: Mesh) -> None:
        self._rank = mesh.rank
        self.noted: Queue[tuple[int, str]] = Queue()

    def who(self) -> tuple[int, int]:
        """This rank, and the caller's, as the mesh counts."""
        caller = current_call().caller.rank
        assert caller is not None
        return self._rank, caller

    def note(self, text: str) -> None:
        self.noted.put((self.who()[1], text))

    def count(self, upto: int) -> Any:
        yield from ((self._rank, number) for number in range(upto))

    def converse(self, channel: Channel) -> None:
        for item in channel:
            channel.send((self._rank, item))


def _calls(mesh: Mesh) -> None:
    functions = Functions(mesh)
    made = _made(mesh)
    if made:  # by which group it is registered makes no difference
        made[-1][0].rpc.register_object(functions, "of")
        made[0][0].rpc.register(functions.converse, "converse", channel=True)
    mesh.barrier()
    for group, members in made:
        rpc = group.rpc
        for rank, member in enumerate(members):
            assert rpc.call(rank, "of.who") == (member, mesh.rank)
            assert rpc.call_async(rank, "of.who").result() == (member, mesh.rank)
            assert list(rpc.stream(rank, "of.count", 2)) == [(member, 0), (member, 1)]
            with rpc.channel(rank, "converse") as channel:
                channel.send("hello")
                assert next(iter(channel)) == (member, "hello")
            assert rpc.call_fn(rank, lambda: current_call().caller.rank) == mesh.rank
            with rpc.remote(rank, "of.who") as ref:
                assert ref.fetch() == (member, mesh.rank)
                assert rpc.adopt(ref.handle).owner == group.peers[rank]
            rpc.notify(rank, "of.note", f"to rank {rank} of {group.size}")
        results = {rank: work.result() for rank, work in rpc.broadcast_call(None, "of.who")}
        assert results == {rank: (member, mesh.rank) for rank, member in enumerate(members)}
        some = {rank: work.result()[0] for rank, work in rpc.broadcast_call([1], "of.who")}
        assert some == {1: members[1]}
        assert mesh.rpc.call(members[0], "of.who") == (members[0], mesh.rank)
        expected = {(member, f"to rank {group.rank} of {group.size}") for member in members}
        assert {functions.noted.get(timeout=scaled(10)) for _ in members} == expected
        group.barrier()
    mesh.barrier()


@worlds
def test_calls_take_ranks_of_the_group(world: str) -> None:
    in_world(world, 4, _calls)


def _caller_in_the_group(mesh: Mesh) -> None:
    group = mesh.group([2, 0, 1])
    assert group is not None
    group.rpc.register(lambda: group.peers.index(current_call().caller), "rank_of_caller")
    mesh.barrier()
    assert [group.rpc.call(rank, "rank_of_caller") for rank in range(3)] == [group.rank] * 3
    mesh.barrier()


def test_a_handler_finds_the_callers_rank_in_the_group() -> None:
    run_world(3, _caller_in_the_group, config=CONFIG, timeout=LIMIT)


def _memory(mesh: Mesh) -> None:
    made = _made(mesh)
    for group, members in made:
        group.memory.register(f"kv {group.size}", np.full(4, mesh.rank), access="r")
        own = group.memory.allocate(f"own {group.size}", 2, np.int64)
        own.array[:] = mesh.rank
        group.memory.register(f"of one {group.size}", bytearray(8), allow=[1])
        group.barrier()
        for rank, member in enumerate(members):
            out = np.zeros(4, np.int64)
            group.memory.open(rank, f"kv {group.size}").read(out)
            assert out.tolist() == [member] * 4
            group.memory.open(rank, f"own {group.size}", wait=True).read(out[:2])
            assert out.tolist()[:2] == [member] * 2
            names = {info.name for info in group.memory.list(rank)}
            assert {f"kv {group.size}", f"own {group.size}"} <= names
            assert (f"of one {group.size}" in names) == (group.rank == 1)
            with group.memory.watch(rank) as watch:
                assert next(iter(watch)).kind == "added"
            if group.rank == 1:
                assert group.memory.open(rank, f"of one {group.size}").nbytes == 8
            else:
                with pytest.raises(AccessDenied):
                    group.memory.open(rank, f"of one {group.size}")
        group.barrier()
        group.memory.unregister(own)
        assert f"own {group.size}" not in mesh.memory.regions
        assert f"kv {group.size}" in mesh.memory.regions
    mesh.barrier()


@worlds
def test_memory_takes_ranks_of_the_group(world: str) -> None:
    in_world(world, 4, _memory)


def _notifications(mesh: Mesh) -> None:
    group = mesh.group([2, 1])
    owner = 1
    if group is not None and mesh.rank == owner:
        group.memory.register("board", bytearray(8))
        mesh.memory.register("of the mesh", bytearray(8))
    mesh.barrier()
    for writer in (2, 1):
        if group is not None and mesh.rank == writer:
            group.memory.open(1, "board").write(b"x" * 8, notify=f"by {writer}")
            group.memory.open(1, "of the mesh").write(b"x" * 8, notify=f"by {writer}")
    if mesh.rank == 0:
        mesh.memory.open(owner, "board").write(b"y" * 8, notify="by a stranger")
    if group is not None and mesh.rank == owner:
        board, other = mesh.memory.regions["board"], mesh.memory.regions["of the mesh"]
        assert board.wait_notification("by 2").source == 0
        assert board.wait_notification("by 1").source == 1
        assert other.wait_notification("by 2").source == 2
        stranger = board.wait_notification("by a stranger").source
        assert isinstance(stranger, Peer)
        assert stranger is mesh.peers[0]
        with pytest.raises(UsageError, match="no rank 2 in a group of 2"):
            board.allow([2])
    mesh.barrier()


@worlds
def test_notifications_come_from_ranks_of_the_group_that_registered_the_region(world: str) -> None:
    in_world(world, 3, _notifications)


def _no_such_rank(mesh: Mesh) -> None:
    group = mesh.group([1, 0])
    assert group is not None
    text = "no rank {} in a group of 2: ranks are 0 … 1"
    for rank in (2, -1):
        for call in (
            lambda rank=rank: group.send(b"", to=rank),
            lambda rank=rank: group.rpc.call(rank, "f"),
            lambda rank=rank: group.rpc.notify(rank, "f"),
            lambda rank=rank: group.rpc.broadcast_call([0, rank], "f"),
            lambda rank=rank: group.memory.open(rank, "kv"),
            lambda rank=rank: group.memory.list(rank),
            lambda rank=rank: group.memory.register("kv", bytearray(1), allow=[rank]),
        ):
            with pytest.raises(UsageError, match=text.format(rank)):
                call()
    with pytest.raises(UsageError, match="no rank 2 in a world of 2"):
        mesh.rpc.call(2, "f")
    assert mesh.memory.regions == {}


def test_ranks_that_the_group_has_not_are_refused_alike() -> None:
    run_world(2, _no_such_rank, config=CONFIG, timeout=LIMIT)


def _closed_group_calls_nobody(mesh: Mesh) -> None:
    group = mesh.dup()
    group.rpc.register(lambda: mesh.rank, f"rank {mesh.rank}")
    group.memory.register("kv", np.full(1, mesh.rank))
    region = mesh.memory.regions["kv"]
    rpc, memory = group.rpc, group.memory
    mesh.barrier()
    group.close()
    for call in (
        lambda: group.rpc,
        lambda: group.memory,
        lambda: rpc.call(0, "rank 0"),
        lambda: rpc.broadcast_call(None, "rank 0"),
        lambda: memory.open(0, "kv"),
        lambda: memory.list(0),
        lambda: region.allow([0]),
    ):
        with pytest.raises(ClosedError, match="group is closed"):
            call()
    other = 1 - mesh.rank  # what was registered belongs to the process, and outlives the group
    assert mesh.rpc.call(other, f"rank {other}") == other
    out = np.zeros(1, np.int64)
    mesh.memory.open(other, "kv").read(out)
    assert out[0] == other
    mesh.barrier()


def test_a_closed_group_calls_nobody_and_its_functions_and_regions_stay() -> None:
    run_world(2, _closed_group_calls_nobody, config=CONFIG, timeout=LIMIT)


#: Messages that are sent into a closed group: more than the credit of a peer has room for, each under its own tag.
MANY, NBYTES = 400, 60_000


def _sends_into_a_closed_group(mesh: Mesh) -> None:
    group = mesh.dup()
    if mesh.rank == 1:
        group.close()
        mesh.barrier()
        got = bytearray(30_000)
        mesh.recv(got, source=0, timeout=scaled(10))
        assert got == b"p" * 30_000
        mesh.barrier()
        assert not [*mesh._hub.matcher.unexpected()]
    else:
        mesh.barrier()
        for tag in range(MANY):
            group.send(bytes(NBYTES), to=1, tag=tag, timeout=scaled(10))
        large = group.isend(bytes(10**6), to=1)
        group.send_object({"text": "x" * 1000}, to=1)
        large.wait(scaled(10))
        mesh.send(b"p" * 30_000, to=1, timeout=scaled(10))
        mesh.barrier()
        assert mesh._hub.config.peer_credit_bytes < MANY * NBYTES
        group.close()


@worlds
def test_who_goes_on_sending_into_a_closed_group_keeps_its_credit(world: str) -> None:
    in_world(world, 2, _sends_into_a_closed_group)


def _late_group(mesh: Mesh) -> None:
    """Rank 0 sends in a group that rank 1 makes later than another, of a higher number, which it has closed."""
    large: Work[None] | None = None
    if mesh.rank == 0:
        pair = mesh.group([0, 1])
        assert pair is not None
        pair.send(b"early", to=1)
        large = pair.isend(b"L" * 10**6, to=1, tag=1)
    world = mesh.group([0, 1, 2])
    assert world is not None
    world.barrier()
    world.close()
    mesh.barrier()
    if mesh.rank == 1:
        pair = mesh.group([0, 1])
        assert pair is not None
        assert pair._number < world._number
        got, all_of_it = bytearray(5), bytearray(10**6)
        pair.recv(got, source=0, tag=0)
        pair.recv(all_of_it, source=0, tag=1)
        assert got == b"early"
        assert all_of_it == b"L" * 10**6
    if large is not None:
        large.wait(scaled(10))


@worlds
def test_messages_for_a_group_that_is_still_to_be_made_are_kept(world: str) -> None:
    in_world(world, 3, _late_group)


def _kept_for_oneself(mesh: Mesh) -> None:
    group = mesh.dup()
    router = mesh._routers[0]
    before = router._kept  # type: ignore[union-attr]  # of the world's only rank, which is this one
    group.send(bytes(1000), to=0, tag=1)
    large = group.isend(bytes(10**6), to=0, tag=2)
    assert router._kept > before  # type: ignore[union-attr]
    assert not large.done()
    group.close()
    large.wait(scaled(5))
    assert router._kept == before  # type: ignore[union-attr]
    assert not [*mesh._hub.matcher.unexpected()]


def test_what_a_rank_sent_itself_goes_with_the_group() -> None:
    run_world(1, _kept_for_oneself, config=CONFIG, timeout=LIMIT)


def _probed(mesh: Mesh) -> None:
    group = mesh.dup()
    probing = Call(group.probe)
    wait_until(lambda: mesh._hub.probes, 10)
    group.close()
    with pytest.raises(ClosedError, match="group is closed"):
        probing.result()
    assert mesh._hub.probes == []


def test_a_probe_ends_with_its_group() -> None:
    run_world(1, _probed, config=CONFIG, timeout=LIMIT)


def _closes_many(mesh: Mesh) -> None:
    hub = mesh._hub
    with hub.engine:
        for number in range(100, 100 + MOST_CLOSED + 5):
            hub.close_group(number, "")
    assert len(hub.closed_groups) == MOST_CLOSED
    assert [number in hub.closed_groups for number in (104, 105, 100 + MOST_CLOSED + 4)] == [False, True, True]


def test_closed_groups_are_remembered_up_to_a_bound() -> None:
    run_world(1, _closes_many, config=CONFIG, timeout=LIMIT)

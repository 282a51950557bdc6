"""Large calls on the stage, whose arrays are read where they lie: the plans against numpy, and in real processes."""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rankmesh.collectives.stage
from rankmesh import Config, DeadlineError, Group, Mesh, PeerLost, TransferAborted
from rankmesh.collectives import founding, pulling
from rankmesh.collectives.calls import Signature
from rankmesh.collectives.passage import steps
from rankmesh.collectives.pulling import FETCH, PUBLISH, PulledPassage, Pulling, Sizes, acts, pays
from rankmesh.collectives.recipe import Recipe
from rankmesh.collectives.stage import CHUNK_BITS, DONE, Way
from rankmesh.collectives.staged import StagedCollective
from rankmesh.collectives.staging import Case
from rankmesh.transport.pulling import Copying, Puller
from ranks import Outcome, Ranks, attempt, run_ranks
from stages import ROOM, Array, MemoryStage, arrays, in_order, run, shared_by
from timing import scaled, wait_until

CONFIG = Config(timeout=scaled(20))
MIB = 1 << 20
NAMES = ["all_gather", "all_to_all", "all_reduce", "broadcast"]


def recipe_of(name: str, rank: int, size: int, part: int, digest: int = 1) -> Recipe:
    width, case = Sizes(7, ROOM if size == 2 else ROOM // 2), Case(rank, size, 0, part, ROOM)
    by_slots = {"all_reduce": "all_reduce whole" if size == 2 else "all_reduce slices"}.get(name, name)
    plan = acts(name, case, width)
    return Recipe(
        Signature(name), digest, steps(by_slots, case), in_order, acts=plan, pays=(Copying.SLOWLY, Copying.QUICKLY)
    )


def begun(stage: Any, recipe: Recipe, sequence: int, source: Array, target: Array, by_express: bool) -> Way:
    if not by_express:
        return recipe.passage(stage, sequence, source, target)
    express = Pulling(stage, recipe.acts, recipe.digest, recipe.apply, source)
    taken = express.run(sequence, source, target)
    return recipe._replace(express=express).passage(stage, sequence, source, target, taken)


@settings(deadline=None)
@given(
    size=st.integers(2, 4),
    calls=st.lists(
        st.tuples(st.sampled_from(NAMES), st.integers(4, 70), st.booleans()),
        min_size=1,
        max_size=7,
    ),
    copies=st.sampled_from([Copying.QUICKLY, Copying.SLOWLY]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_sequence_of_calls_in_any_order_of_steps(
    size: int, calls: list[tuple[str, int, bool]], copies: Copying, seed: int
) -> None:
    """Where the kernel is slow, those are pulled whose arrays all lie on large pages; others go through slots."""
    rng = np.random.default_rng(seed)
    shared = shared_by(size)
    stages = [MemoryStage(rank, size, shared) for rank in range(size)]
    for stage in stages:
        stage.copying = copies
    ways: list[list[Callable[[], Way]]] = [[] for _ in range(size)]
    expected = []
    small: set[int] = set()
    for sequence, (name, part, in_place) in enumerate(calls):
        source, target, wanted = arrays(name, rng.integers(0, 1000, (size, size, part)), in_place)
        if rng.integers(2):
            small.add(source[rng.integers(size)].ctypes.data)
        for rank in range(size):
            recipe = recipe_of(name, rank, size, part, sequence + 1)
            by_express = bool(rng.integers(2))
            ways[rank].append(partial(begun, stages[rank], recipe, sequence, source[rank], target[rank], by_express))
        expected.append((name, source, target, wanted))
    with on_small_pages(small):
        run(ways, rng)
    for name, _, target, wanted in expected:
        for rank in range(size):
            assert np.array_equal(target[rank], wanted[rank]), (name, rank)


@contextmanager
def on_small_pages(addresses: Container[int]) -> Iterator[None]:
    with patch.object(pulling, "on_large_pages", lambda address, nbytes: address not in addresses):
        yield


@pytest.mark.parametrize("by_express", [True, False])
@pytest.mark.parametrize("which", [0, 1, None])
def test_where_the_kernel_is_slow_one_on_small_pages_is_enough_for_slots(which: int | None, by_express: bool) -> None:
    stages: list[Any] = [MemoryStage(rank, 2, shared) for shared in [shared_by(2)] for rank in range(2)]
    source, target, wanted = arrays("all_to_all", np.arange(4 * 50).reshape(2, 2, 50), in_place=False)
    ways: list[list[Callable[[], Way]]] = []
    pulls: list[int] = []

    def counted(puller: Puller, into: int, address: int, nbytes: int) -> bool:
        pulls.append(nbytes)
        return Puller.pull(puller, into, address, nbytes)

    for rank, stage in enumerate(stages):
        stage.copying = Copying.SLOWLY
        stage.pullers[1 - rank].pull = partial(counted, stage.pullers[1 - rank])
        recipe = recipe_of("all_to_all", rank, 2, 50)
        ways.append([partial(begun, stage, recipe, 0, source[rank], target[rank], by_express)])
    with on_small_pages(() if which is None else {source[which].ctypes.data}):
        run(ways, np.random.default_rng(0))
    for rank in range(2):
        assert np.array_equal(target[rank], wanted[rank])
    assert bool(pulls) == (which is None)


def test_who_gives_up_before_slots_are_used_leaves_nothing_that_others_read() -> None:
    stages: list[Any] = [MemoryStage(rank, 2, shared) for shared in [shared_by(2)] for rank in range(2)]
    source, target, _ = arrays("all_gather", np.arange(4 * 5).reshape(2, 2, 5), in_place=False)
    for stage in stages:
        stage.copying = Copying.SLOWLY
    with on_small_pages({source[0].ctypes.data}):
        first, second = (
            begun(stages[r], recipe_of("all_gather", r, 2, 5), 0, source[r], target[r], by_express=False)
            for r in range(2)
        )
        as_far_as_it_goes(first)
        assert first.awaited() == [1]
        first.give_up()
        as_far_as_it_goes(second)
    assert not second.ended
    assert second.awaited() == [0]


def pair(name: str, part: int) -> tuple[list[Any], list[Array], list[Array], list[PulledPassage]]:
    """The stages, sources, targets and ways of two ranks."""
    stages: list[Any] = [MemoryStage(rank, 2, shared) for shared in [shared_by(2)] for rank in range(2)]
    source, target, _ = arrays(name, np.arange(4 * part).reshape(2, 2, part), in_place=False)
    ways = [begun(stages[r], recipe_of(name, r, 2, part), 0, source[r], target[r], by_express=False) for r in range(2)]
    assert all(isinstance(way, PulledPassage) for way in ways)
    return stages, source, target, ways  # type: ignore[return-value]


def as_far_as_it_goes(way: Way) -> None:
    while not way.ended and way.step():
        pass


def test_a_call_ends_when_all_have_read_what_it_brought() -> None:
    _, _, target, (first, second) = pair("all_gather", 5)
    as_far_as_it_goes(first)
    assert first.awaited() == [1], "it has not come"
    as_far_as_it_goes(second)
    assert not second.ended, "the other has not read it"
    assert second.awaited() == [0]
    as_far_as_it_goes(first)
    as_far_as_it_goes(second)
    assert first.ended
    assert second.ended
    assert np.array_equal(target[0], target[1])


@pytest.mark.parametrize("name", NAMES)
def test_who_gives_up_is_not_read_any_more(name: str) -> None:
    _, source, target, (first, second) = pair(name, 5)
    as_far_as_it_goes(first)
    first.give_up()
    source[0][:] = -7
    as_far_as_it_goes(second)
    assert not second.ended
    assert not second.may_step()
    assert second.awaited() == [0]
    assert -7 not in target[1]


@pytest.mark.parametrize("name", ["all_gather", "all_reduce"])
def test_what_changed_under_the_copy_is_not_taken(name: str) -> None:
    """The other gives up, and its caller writes, while its memory is read."""
    stages, source, _, (first, second) = pair(name, 5)
    as_far_as_it_goes(first)
    puller = stages[1].pullers[0]

    class Late:
        def pull(self, *place: int) -> bool:
            first.give_up()
            source[0][:] = -7
            return bool(puller.pull(*place))

    stages[1].pullers[0] = Late()
    as_far_as_it_goes(second)
    assert not second.ended
    assert not second.may_step(), "it must not go on"
    assert second.awaited() == [0]


def test_calls_that_differ_do_not_read_each_other() -> None:
    stages, source, target, (first, _) = pair("all_gather", 5)
    other = begun(stages[1], recipe_of("all_gather", 1, 2, 5, digest=2), 0, source[1], target[1], by_express=False)
    as_far_as_it_goes(first)
    as_far_as_it_goes(other)
    assert not other.ended
    assert np.all(target[1][:5] == -1)


@pytest.mark.parametrize("by_express", [True, False])
@pytest.mark.parametrize("why", ["cannot be read", "overlaps"])
def test_a_source_that_cannot_stay_where_it_lies_is_copied(why: str, by_express: bool) -> None:
    """Memory of a device, which the kernel reads for nobody else; and one that is written over."""
    stages: list[Any] = [MemoryStage(rank, 2, shared) for shared in [shared_by(2)] for rank in range(2)]
    target = [np.arange(100, 110), np.arange(200, 210)]
    source = [np.arange(5), np.arange(5, 10)]
    if why == "overlaps":
        source[0] = target[0][3:8]
        source[0][:] = np.arange(5)
    else:
        refuse(stages[0], source[0])
    recipes = [recipe_of("all_gather", rank, 2, 5) for rank in range(2)]
    ways: list[list[Callable[[], Way]]] = [
        [partial(begun, stages[r], recipes[r], 0, source[r], target[r], by_express)] for r in range(2)
    ]
    run(ways, np.random.default_rng(0))
    for rank in range(2):
        assert np.array_equal(target[rank], np.arange(10))


def refuse(stage: Any, array: Array) -> None:
    """The kernel reads that array for nobody: neither for its owner, nor for others."""
    first, last = array.ctypes.data, array.ctypes.data + array.nbytes

    def pull(puller: Any, into: int, address: int, nbytes: int) -> bool:
        return not first <= address < last and Puller.pull(puller, into, address, nbytes)

    for puller in stage.pullers.values():
        puller.pull = partial(pull, puller)


@pytest.mark.parametrize("by_express", [True, False])
@pytest.mark.parametrize("which", ["in place", "source", "target"])
def test_arrays_that_cannot_be_reached_are_reduced(which: str, by_express: bool) -> None:
    stages: list[Any] = [MemoryStage(rank, 2, shared) for shared in [shared_by(2)] for rank in range(2)]
    given = np.arange(60).reshape(2, 2, 15)
    source, target, wanted = arrays("all_reduce", given, in_place=which == "in place")
    for stage in stages:
        if which in ("in place", "source"):
            refuse(stage, source[0])
        if which == "target":
            refuse(stage, target[0])
    recipes = [recipe_of("all_reduce", rank, 2, 15) for rank in range(2)]
    ways: list[list[Callable[[], Way]]] = [
        [partial(begun, stages[r], recipes[r], 0, source[r], target[r], by_express)] for r in range(2)
    ]
    run(ways, np.random.default_rng(0))
    for rank in range(2):
        assert np.array_equal(target[rank], wanted[rank])


NOT: tuple[Copying, ...] = ()
QUICK, SLOW, BOTH = (Copying.QUICKLY,), (Copying.SLOWLY,), (Copying.SLOWLY, Copying.QUICKLY)


@pytest.mark.parametrize(
    "name, size, nbytes, where",
    [
        ("all_gather", 2, 512 << 10, QUICK),
        ("all_gather", 2, 511 << 10, NOT),
        ("all_gather", 2, 8 * MIB - 1, QUICK),
        ("all_gather", 2, 8 * MIB, BOTH),
        ("all_gather", 4, 4 * MIB, NOT),
        ("all_gather", 4, 16 * MIB - 1, QUICK),
        ("all_gather", 4, 16 * MIB, BOTH),
        ("all_to_all", 16, 4 * MIB, QUICK),
        ("all_to_all", 4, 4 * MIB - 1, QUICK),
        ("all_to_all", 4, 4 * MIB, BOTH),
        ("all_to_all", 2, 4 * MIB - 1, QUICK),
        ("all_to_all", 2, 4 * MIB, BOTH),
        ("all_reduce", 2, 2 * MIB, QUICK),
        ("all_reduce", 2, 1024 * MIB, QUICK),
        ("all_reduce", 4, 64 * MIB, NOT),
        ("broadcast", 2, 8 * MIB - 1, NOT),
        ("broadcast", 2, 8 * MIB, SLOW),
        ("broadcast", 3, 64 * MIB, NOT),
        ("reduce_scatter", 2, 64 * MIB, NOT),
    ],
)
def test_when_it_pays(name: str, size: int, nbytes: int, where: tuple[Copying, ...]) -> None:
    assert pays(name, size, nbytes) == where


# ---------------------------------------------------------------------- in processes


def _pulls(mesh: Mesh) -> bool:
    """Found the stage. What can be pulled is, as if the kernel copied quickly here."""
    mesh.barrier()
    stage = mesh._context.founding.stage
    if stage is None or stage.copying == Copying.NOT:
        return False
    stage.copying = Copying.QUICKLY
    return True


def _large(mesh: Mesh) -> bool:
    """Each form twice, because the second call knows of the first; the result is checked all over."""
    pulls = _pulls(mesh)
    rank, size, part = mesh.rank, mesh.size, 700_001
    rows = np.arange(size * size * part, dtype=np.int64).reshape(size, size, part)
    own = rows[rank]
    for _ in range(2):
        assert np.array_equal(mesh.all_gather(own[0]), rows[:, 0])
        out = np.empty((size, part), np.int64)
        out[rank] = own[0]
        assert mesh.all_gather(out[rank], out=out) is out, "in place"
        assert np.array_equal(out, rows[:, 0])
        memory = np.concatenate([np.zeros(13, np.int64), own[0], np.zeros(size * part, np.int64)])
        over = memory[: size * part].reshape(size, part)
        assert np.array_equal(mesh.all_gather(memory[13 : 13 + part], out=over), rows[:, 0]), "they overlap"
        assert np.array_equal(mesh.all_to_all(own), rows[:, rank])
        given = own.copy()
        given.flags.writeable = False
        assert np.array_equal(mesh.all_to_all(given, out=out), rows[:, rank])
        array = own[0].copy()
        assert mesh.all_reduce(array) is array
        assert np.array_equal(array, rows[:, 0].sum(0))
        given = own[0]
        assert np.array_equal(mesh.all_reduce(given, "max", out=array), rows[-1, 0])
        assert np.array_equal(given, rows[rank, 0]), "the array stays"
        work = mesh.all_reduce(own[0].astype(np.float64), "avg", async_op=True)
        assert np.allclose(work.result(), rows[:, 0].mean(0))
    return pulls


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_large_calls_in_processes(size: int) -> None:
    assert run_ranks(size, _large, CONFIG) == [True] * size


@pytest.mark.usefixtures("nursery")
def test_large_calls_without_pulling() -> None:
    assert run_ranks(2, _large, CONFIG.override(pull=False)) == [False] * 2


def _one_does_not(mesh: Mesh) -> bool:
    """Rank 0 is not allowed to: it says so when the stage is founded."""
    if mesh.rank == 0:
        Puller.stands = lambda _: False  # type: ignore[method-assign, assignment]
        for router in mesh._routers:
            if router.polled is not None:
                router.polled.puller = None
    pulls = _pulls(mesh)
    got = mesh.all_gather(np.full(500_000, mesh.rank))
    return pulls or not np.array_equal(got[:, -1], np.arange(mesh.size))


@pytest.mark.usefixtures("nursery")
def test_where_one_cannot_nobody_does() -> None:
    assert run_ranks(3, _one_does_not, CONFIG) == [False] * 3


def _where_slow(mesh: Mesh, copies: Copying) -> tuple[Group, set[int], list[int]]:
    """A group of all whose stage is founded as if the kernel copied so here; addresses of arrays that are taken to lie
    on small pages; and the bytes of each read of others' memory."""
    small: set[int] = set()
    reads: list[int] = []
    founding.copying = lambda: copies  # type: ignore[attr-defined, assignment]
    pulling.on_large_pages = lambda address, nbytes: address not in small  # type: ignore[attr-defined]
    mesh.barrier()  # it may be that the mesh's own stage was founded before
    pull = Puller.pull

    def counted(self: Puller, into: int, address: int, nbytes: int) -> bool:
        reads.append(nbytes)
        return pull(self, into, address, nbytes)

    Puller.pull = counted  # type: ignore[method-assign]
    return mesh.dup(), small, reads


def _one_is_slow(mesh: Mesh) -> list[int]:
    """How many reads of others' memory calls took: on large pages, one that pays where that is slow, and one that does
    not; and the first where one rank's array is on small pages."""
    group, small, reads = _where_slow(mesh, Copying.SLOWLY if mesh.rank == 1 else Copying.QUICKLY)
    counts = []
    for part, is_small in ((4 * MIB, False), (MIB // 2, False), (4 * MIB, True)):
        reads.clear()
        given = np.full((3, part), mesh.rank, np.uint8)
        if is_small and mesh.rank == 2:
            small.add(given.ctypes.data)
        got = group.all_to_all(given)
        assert np.array_equal(got[:, -1], np.arange(3))
        counts.append(sum(nbytes == part for nbytes in reads))
    return counts


@pytest.mark.usefixtures("nursery")
def test_where_it_is_slow_for_one_all_pull_only_what_pays_for_it() -> None:
    assert run_ranks(3, _one_is_slow, CONFIG) == [[2, 0, 0]] * 3


def _broadcasts(mesh: Mesh) -> None:
    """From each root, on large pages and small ones, awaited and not; and so often that calls are alike. Whoever is not
    read from may have either."""
    group, small, reads = _where_slow(mesh, Copying.SLOWLY)
    for turn, root in enumerate((0, 1, 0, 1)):
        for whose in ("nobody's", "the root's", "the other's"):
            array = np.full(2 * MIB, 100.0 + mesh.rank)
            if whose == ("the root's" if mesh.rank == root else "the other's"):
                small.add(array.ctypes.data)
            for again in range(3):
                array[:] = np.arange(2 * MIB) + turn + again if mesh.rank == root else -1
                reads.clear()
                group.broadcast(array, root)
                assert np.array_equal(array, np.arange(2 * MIB) + turn + again)
                pulled = sum(reads) >= array.nbytes
                assert pulled == (whose != "the root's" and mesh.rank != root)
            array[:] = mesh.rank
            assert (group.broadcast(array, root, async_op=True).result() == root).all()
            small.discard(array.ctypes.data)


@pytest.mark.usefixtures("nursery")
def test_where_it_is_slow_broadcasts_are_pulled_off_large_pages() -> None:
    run_ranks(2, _broadcasts, CONFIG)


def _give_up_and_reuse(mesh: Mesh) -> Any:
    """Rank 1 comes when rank 0 has given up, and has other plans with its array."""
    assert _pulls(mesh)
    array, out = np.ones(500_000), np.zeros((2, 500_000))
    if mesh.rank == 0:
        late = attempt(lambda: mesh.all_gather(array, out=out, timeout=0.3))
        array[:] = -7
        mesh.send(b"", to=1)
        mesh.recv(bytearray(), source=1)
        return late
    mesh.recv(bytearray(), source=0)
    refused = attempt(lambda: mesh.all_gather(array, out=out))
    mesh.send(b"", to=0)
    assert -7 not in out
    return refused


@pytest.mark.usefixtures("nursery")
def test_who_comes_late_reads_nothing_of_who_gave_up() -> None:
    late, refused = run_ranks(2, _give_up_and_reuse, CONFIG)
    assert isinstance(late.error, DeadlineError)
    assert isinstance(refused.error, TransferAborted)
    assert "rank 0" in str(refused.error)


def _take_endless_turns(mesh: Mesh) -> None:
    """Who begins a call takes all steps that can be taken: none is left to a background thread, however late it is."""
    rankmesh.collectives.stage._TURN = math.inf  # type: ignore[misc]
    stage = mesh._context.founding.stage
    assert stage is not None
    stage.contenders = deque()


def _interrupted(mesh: Mesh, where: str, name: str) -> Any:
    """Rank 0 is interrupted when its arrays are published, and goes on with them before rank 1 reads."""
    assert _pulls(mesh)
    array, out = np.ones(2 * MIB), np.zeros((2, 2 * MIB))

    def call() -> None:
        if name == "all_gather":
            mesh.all_gather(array, out=out, async_op=where == "Work")
        else:
            mesh.all_reduce(array, out=out[0], async_op=where == "Work")

    if mesh.rank == 1:
        mesh.recv(bytearray(), source=0)
        where = "it waits"
        refused = attempt(call)
        assert -7 not in out
        mesh.send(b"", to=0)
        return refused
    ready = Pulling.ready

    def interrupt(*_args: Any, **_settings: Any) -> bool:
        raise KeyboardInterrupt

    Pulling.ready = interrupt  # type: ignore[method-assign]
    if where == "Work":  # which asks also whether it may publish
        _take_endless_turns(mesh)
        Pulling.ready = lambda *args, **settings: args[1].what == PUBLISH or interrupt()  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        call()
    Pulling.ready = ready  # type: ignore[method-assign]
    array[:] = out[:] = -7
    mesh.send(b"", to=1)
    mesh.recv(bytearray(), source=1)
    return None


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("where", ["express", "Work"])
@pytest.mark.parametrize("name", ["all_gather", "all_reduce"])
def test_nobody_reads_from_who_was_interrupted(where: str, name: str) -> None:
    _, refused = run_ranks(2, _interrupted, CONFIG, (where, name))
    assert isinstance(refused.error, TransferAborted)
    assert "KeyboardInterrupt" in str(refused.error)


def _cancel_a_later_one(mesh: Mesh) -> bool:
    """A call behind another is given up, which says nothing of the one before: that has yet to be read."""
    assert _pulls(mesh)
    array, out = np.full(2 * MIB, 1.0 + mesh.rank), np.zeros((2, 2 * MIB))
    if mesh.rank == 1:
        mesh.recv(bytearray(), source=0)
        mesh.all_gather(array, out=out)
        return bool(np.all(out == [[1.0], [2.0]]))
    stage = mesh._context.founding.stage
    assert stage is not None
    first = mesh.all_gather(array, out=out, async_op=True)
    second = mesh.all_reduce(np.ones(1000), async_op=True)
    assert second.cancel()
    assert stage._own[DONE] < first.call.sequence + 1 << CHUNK_BITS, "the first is not done"
    mesh.send(b"", to=1)
    first.result()
    assert stage._own[DONE] > second.call.sequence + 1 << CHUNK_BITS, "now both are"
    return bool(np.all(out == [[1.0], [2.0]]))


@pytest.mark.usefixtures("nursery")
def test_giving_up_a_later_call_says_nothing_of_the_one_before() -> None:
    assert run_ranks(2, _cancel_a_later_one, CONFIG) == [True] * 2


def _take_turns(mesh: Mesh) -> int:
    """How many steps an asynchronous call takes at a time, at most, while another thread wants the engine."""
    assert _pulls(mesh)
    stage = mesh._context.founding.stage
    assert stage is not None
    steps, most = 0, 0
    step, turn = PulledPassage.step, StagedCollective.step

    def counted(way: PulledPassage) -> bool:
        nonlocal steps, most
        steps += 1
        most = max(most, steps)
        return step(way)

    def one_turn(call: StagedCollective, *seconds: float) -> bool:
        nonlocal steps
        steps = 0
        return turn(call, *seconds)

    PulledPassage.step, StagedCollective.step = counted, one_turn  # type: ignore[method-assign, assignment]
    stage.contenders = deque([None])
    array, out = np.full(5 * MIB, 1.0 + mesh.rank), np.zeros((2, 5 * MIB))
    mesh.all_gather(array, out=out, async_op=True).result()
    assert np.all(out == [[1.0], [2.0]])
    return most


@pytest.mark.usefixtures("nursery")
def test_others_come_between_the_steps() -> None:
    assert run_ranks(2, _take_turns, CONFIG) == [1] * 2


def _combined_and_gave_up(mesh: Mesh, flag: str) -> Any:
    """Rank 1 is interrupted after it has reduced its part, and goes on with its array before rank 0 fetches that."""
    assert _pulls(mesh)
    array = np.full(2 * MIB, 1.0)
    take = Pulling.take

    def at_a_fetch(pulling: Pulling, act: Any, call: Any) -> bool:
        if act.what == FETCH and mesh.rank == 1:
            raise KeyboardInterrupt
        if act.what == FETCH:
            wait_until(lambda: Path(flag).exists(), 10)
        return take(pulling, act, call)

    Pulling.take = at_a_fetch  # type: ignore[method-assign, assignment]
    if mesh.rank == 1:
        with pytest.raises(KeyboardInterrupt):
            mesh.all_reduce(array)
        array[:] = -7
        Path(flag).touch()
        mesh.recv(bytearray(), source=0)
        return None
    refused = attempt(lambda: mesh.all_reduce(array))
    mesh.send(b"", to=1)
    return refused


@pytest.mark.usefixtures("nursery")
def test_who_gives_up_after_its_part_was_reduced_is_not_read(tmp_path: Path) -> None:
    refused, _ = run_ranks(2, _combined_and_gave_up, CONFIG, (str(tmp_path / "flag"),))
    assert isinstance(refused.error, TransferAborted)


def _on_and_on(mesh: Mesh, talk: Any, name: str) -> None:
    array, out = np.ones((mesh.size, 2 * MIB)), np.empty((mesh.size, 2 * MIB))
    call: Callable[[], Any] = {
        "all_gather": lambda: mesh.all_gather(array[0], out=out),
        "all_to_all": lambda: mesh.all_to_all(array, out=out),
        "all_reduce": lambda: mesh.all_reduce(array, "max"),
    }[name]
    call()
    assert _pulls(mesh)
    talk.send("under way")
    while True:
        outcome = attempt(call)
        if outcome.error is not None:
            break
    talk.send(outcome)


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "all_reduce"])
def test_a_rank_that_is_killed_meanwhile_is_named(name: str) -> None:
    with Ranks(3, _on_and_on, CONFIG, (name,)) as ranks:
        for rank in range(3):
            assert ranks.hear(rank) == "under way"
        ranks.signal(1, signal.SIGKILL)
        for rank in (0, 2):
            outcome = ranks.hear(rank)
            assert isinstance(outcome, Outcome)
            assert isinstance(outcome.error, PeerLost)
            assert outcome.error.rank == 1

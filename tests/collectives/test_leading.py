"""Calls that go through slots or are pulled, as their leader says: any sequence of them, whatever ranks expect, and in
real processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankmesh import Config, DeadlineError, Mesh, TransferAborted
from rankmesh.collectives.calls import Signature
from rankmesh.collectives.distance import Distance
from rankmesh.collectives.express import FORMS
from rankmesh.collectives.leading import Led, LedPassage, leader_of
from rankmesh.collectives.passage import steps
from rankmesh.collectives.pulling import PulledPassage, Pulling, Sizes, acts
from rankmesh.collectives.recipe import Recipe
from rankmesh.collectives.stage import DONE, Way
from rankmesh.collectives.staging import Case
from rankmesh.transport.pulling import Copying, Puller
from ranks import attempt, run_ranks
from stages import ROOM, Array, MemoryStage, arrays, in_order, run, shared_by
from timing import scaled

CONFIG = Config(timeout=scaled(20))
KIB = 1024
LED = ["all_gather", "all_to_all", "reduce_scatter", "broadcast"]


class Whims:
    """Of one rank: a leader decides by the toss of a coin, and what others expect has little to do with it."""

    def __init__(self, rank: int, seed: int) -> None:
        self.rank = rank
        self.rng = np.random.default_rng((seed, rank))
        #: What this rank had done as the leader.
        self.decided: list[bool] = []
        self.wrong = 0

    def pulls(self, leader: int) -> bool:
        pulls = bool(self.rng.integers(2))
        if leader == self.rank:
            self.decided.append(pulls)
        return pulls

    def follow(self, leader: int, pulls: bool) -> None:
        assert leader != self.rank
        self.wrong += 1

    def wrote(self, nbytes: int, seconds: float) -> None:
        assert seconds >= 0


def stages_of(size: int, seed: int = 0) -> list[Any]:
    shared = shared_by(size)
    stages = [MemoryStage(rank, size, shared) for rank in range(size)]
    for stage in stages:
        stage.copying = Copying.SLOWLY
        stage.distance = Whims(stage.rank, seed)  # type: ignore[assignment]
    return list(stages)


def recipe_of(name: str, rank: int, size: int, root: int, part: int, digest: int, led: bool = True) -> Recipe:
    case = Case(rank, size, root, part, ROOM)
    width = Sizes(7, ROOM if size == 2 else ROOM // 2)
    by_slots = {"all_reduce": "all_reduce whole" if size == 2 else "all_reduce slices"}.get(name, name)
    recipe = Recipe(Signature(name), digest, steps(by_slots, case), in_order)
    return recipe._replace(acts=acts(name, case, width), leader=root if name == "broadcast" else 0) if led else recipe


class Ended:
    """The way of a call that has gone by express."""

    ended = True

    def may_step(self) -> bool:
        return True

    def step(self) -> bool:
        raise AssertionError("it has ended")

    def wanted(self) -> tuple[int, int, tuple[int, ...]]:
        return DONE, 0, ()

    def awaited(self) -> list[int]:
        return []

    def strays(self) -> list[int]:
        return []

    def give_up(self) -> None:
        """Nothing is left of it."""


def begun(stage: Any, recipe: Recipe, sequence: int, source: Array, target: Array, by_express: bool) -> Way:
    if not by_express or recipe.leader < 0:
        return recipe.passage(stage, sequence, source, target)
    form = next((form for form in FORMS if form.serves(recipe.steps)), None)
    slots = form and form(stage, recipe.steps, recipe.digest, recipe.apply, source, target, True)
    led = Led(stage, recipe, source, slots)
    taken = led.run(sequence, source, target)
    if taken == led.steps:
        return Ended()
    return recipe._replace(express=led).passage(stage, sequence, source, target, taken)


def as_far_as_it_goes(way: Way) -> None:
    while not way.ended and way.step():
        pass


@settings(deadline=None)
@given(
    size=st.integers(2, 4),
    calls=st.lists(
        st.tuples(st.sampled_from([*LED, "all_reduce"]), st.integers(4, 130), st.booleans(), st.integers(0, 3)),
        min_size=1,
        max_size=9,
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_sequence_of_calls_whatever_ranks_expect(
    size: int, calls: list[tuple[str, int, bool, int]], seed: int
) -> None:
    """Of one chunk or many; those that have no leader, in between, use the same slots."""
    rng = np.random.default_rng(seed)
    stages = stages_of(size, seed)
    ways: list[list[Callable[[], Way]]] = [[] for _ in range(size)]
    expected = []
    for sequence, (name, part, in_place, any_root) in enumerate(calls):
        root = any_root % size if name == "broadcast" else 0
        source, target, wanted = arrays(name, rng.integers(0, 1000, (size, size, part)), in_place, root)
        for rank in range(size):
            recipe = recipe_of(name, rank, size, root, part, sequence + 1, led=name in LED)
            express = bool(rng.integers(2))
            ways[rank].append(partial(begun, stages[rank], recipe, sequence, source[rank], target[rank], express))
        expected.append((name, target, wanted))
    run(ways, rng)
    for name, target, wanted in expected:
        for rank in range(size):
            assert np.array_equal(target[rank], wanted[rank]), (name, rank)


class Set:
    """A rank that always pulls, or never does, until it is told otherwise."""

    def __init__(self, pulls: bool) -> None:
        self.always = pulls

    def pulls(self, leader: int) -> bool:
        return self.always

    def follow(self, leader: int, pulls: bool) -> None:
        self.always = pulls

    def wrote(self, nbytes: int, seconds: float) -> None:
        pass


def pair(name: str, part: int, *pulls: bool) -> tuple[list[Any], list[Array], list[Array], list[LedPassage]]:
    """Stages, sources, targets and ways of two ranks that expect this; rank 0 leads."""
    stages = stages_of(2)
    source, target, _ = arrays(name, np.arange(4 * part).reshape(2, 2, part), in_place=False)
    for stage, expects in zip(stages, pulls, strict=True):
        stage.distance = Set(expects)
    recipes = [recipe_of(name, rank, 2, 0, part, 1) for rank in range(2)]
    ways: list[Any] = [recipes[r].passage(stages[r], 0, source[r], target[r]) for r in range(2)]
    assert all(isinstance(way, LedPassage) for way in ways)
    return stages, source, target, ways


@pytest.mark.parametrize("name", LED)
@pytest.mark.parametrize("pulls", [True, False])
def test_who_expected_the_other_way_does_as_the_leader_does(name: str, pulls: bool) -> None:
    stages, _, target, (leader, other) = pair(name, 40, pulls, not pulls)
    as_far_as_it_goes(other)
    assert not other.ended
    assert 0 in other.awaited()
    for _ in range(10):
        as_far_as_it_goes(leader)
        as_far_as_it_goes(other)
    assert leader.ended
    assert other.ended
    assert stages[1].distance.always == pulls, "so it expects that of the next"
    _, _, wanted = arrays(name, np.arange(4 * 40).reshape(2, 2, 40), in_place=False)
    assert all(np.array_equal(*both) for both in zip(target, wanted, strict=True))


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "reduce_scatter"])
def test_nobody_is_read_before_the_leader_has_come(name: str) -> None:
    """It could go the other way, and the others with it, whose arrays are their callers' again when they have ended."""
    stages, reads = stages_of(3), deque[int]()

    def counted(pull: Callable[..., bool], *place: int) -> bool:
        reads.append(1)
        return pull(*place)

    source, target, wanted = arrays(name, np.arange(45).reshape(3, 3, 5), in_place=False)
    for stage in stages:
        stage.distance = Set(stage.rank > 0)
        for puller in stage.pullers.values():
            puller.pull = partial(counted, puller.pull)
    ways = [recipe_of(name, r, 3, 0, 5, 1).passage(stages[r], 0, source[r], target[r]) for r in range(3)]
    reads.clear()  # each has made sure that its own array can be read
    for way in ways[1:] * 3:
        as_far_as_it_goes(way)
        assert way.awaited() == [0]
    for way in ways * 5:
        as_far_as_it_goes(way)
    assert all(way.ended for way in ways)
    assert not reads, "all went through slots"
    assert all(np.array_equal(*both) for both in zip(target, wanted, strict=True))


def test_what_a_call_before_has_said_is_not_taken_back() -> None:
    """Rank 1 is the root of a broadcast of two chunks, of which rank 2 has yet to fetch the second, when it finds that
    the next call, of which it has said nothing yet, goes the other way than it expected."""
    stages, part = stages_of(3), 4 * ROOM + 1  # the next call begins with the second slot
    data, parts = np.arange(ROOM + 1), [np.full(part, rank) for rank in range(3)]
    got = [data.copy() if rank == 1 else np.zeros_like(data) for rank in range(3)]
    gathered = [np.zeros(3 * part, int) for _ in range(3)]
    for stage in stages:
        stage.distance = Set(False)
    casts = [recipe_of("broadcast", r, 3, 1, ROOM + 1, 1).passage(stages[r], 0, got[r], got[r]) for r in range(3)]
    for way in (casts[1], casts[0]):
        as_far_as_it_goes(way)
    stages[0].distance = Set(True)
    gathers = [recipe_of("all_gather", r, 3, 0, part, 2).passage(stages[r], 1, parts[r], gathered[r]) for r in range(2)]
    for way in gathers * 3:
        as_far_as_it_goes(way)
    as_far_as_it_goes(casts[2])
    assert casts[2].ended
    assert np.array_equal(got[2], data)


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "reduce_scatter"])
def test_who_gives_up_is_not_read_any_more(name: str) -> None:
    _, source, target, (leader, other) = pair(name, 5, True, True)
    as_far_as_it_goes(leader)
    leader.give_up()
    source[0][:] = -7
    as_far_as_it_goes(other)
    assert not other.ended
    assert not other.may_step()
    assert other.awaited() == [0]
    assert -7 not in target[1]


@pytest.mark.parametrize("pulls", [True, False])
def test_a_call_without_a_passage_that_was_given_up_is_not_read_either(pulls: bool) -> None:
    stages = stages_of(2)
    source, target, _ = arrays("all_gather", np.arange(20).reshape(2, 2, 5), in_place=False)
    recipes = [recipe_of("all_gather", rank, 2, 0, 5, 1) for rank in range(2)]
    for stage in stages:
        stage.distance = Set(pulls)
    way = recipes[0].passage(stages[0], 0, source[0], target[0])
    as_far_as_it_goes(way)
    recipes[0].give_up(stages[0], 0)
    source[0][:] = -7
    other = recipes[1].passage(stages[1], 0, source[1], target[1])
    as_far_as_it_goes(other)
    assert other.ended != pulls, "what lies in a slot stays said"
    assert -7 not in target[1]
    assert stages[0].words[0][DONE] > 0, "it holds nobody up"


@pytest.mark.parametrize(
    "collective, root, size, nbytes, leader",
    [
        ("all_gather", None, 2, 32 * KIB, 0),
        ("all_gather", None, 16, 32 * KIB - 1, -1),
        ("broadcast", 3, 4, 32 * KIB, 3),
        ("broadcast", 3, 4, 32 * KIB - 1, -1),
        ("reduce_scatter", None, 2, 1 << 30, 0),
        ("reduce_scatter", None, 5, 8 * KIB, 0),
        ("all_to_all", None, 5, 8 * KIB - 1, -1),
        ("all_to_all", None, 2, 32 * KIB, 0),
        ("all_reduce", None, 2, 1 << 20, -1),
        ("gather", 2, 4, 1 << 20, -1),
    ],
)
def test_what_is_led_and_by_whom(collective: str, root: int | None, size: int, nbytes: int, leader: int) -> None:
    assert leader_of(collective, root, size, nbytes) == leader


# ---------------------------------------------------------------------- in processes


def _whimsical(mesh: Mesh, seed: int, calls: int) -> tuple[int, int, int, int]:
    """Calls of all kinds and sizes, awaited and not. How many of those that this rank has led were pulled, and went
    through slots; how often it expected the other way; and how often it read others' memory."""
    mesh.barrier()
    stage = mesh._context.founding.stage
    assert stage is not None
    assert stage.copying != Copying.NOT
    stage.copying = Copying.SLOWLY  # so nothing else is pulled
    whims = Whims(mesh.rank, seed)
    stage.distance = whims  # type: ignore[assignment]
    pull, reads = Puller.pull, [0]

    def counted(self: Puller, into: int, address: int, nbytes: int) -> bool:
        reads[0] += nbytes >= KIB
        return pull(self, into, address, nbytes)

    Puller.pull = counted  # type: ignore[method-assign]
    rng, size, rank, works = np.random.default_rng(seed), mesh.size, mesh.rank, []
    for turn in range(calls):
        part, root = int(rng.integers(64 * KIB // 8, 200_000)) // size, int(rng.integers(size))
        name, is_async = LED[int(rng.integers(4))], bool(rng.integers(3) == 0)
        rows = np.arange(size * size * part, dtype=np.int64).reshape(size, size, part) + turn
        if name == "all_gather":
            work, wanted = mesh.all_gather(rows[rank, 0], async_op=is_async), rows[:, 0]
        elif name == "all_to_all":
            work, wanted = mesh.all_to_all(rows[rank], async_op=is_async), rows[:, rank]
        elif name == "reduce_scatter":
            work, wanted = mesh.reduce_scatter(rows[rank], async_op=is_async), rows[:, rank].sum(0)
        else:
            array = rows[rank].copy()
            work, wanted = mesh.broadcast(array, root=root, async_op=is_async), rows[root]
        if is_async:
            works.append((work, wanted))
            if len(works) < 4:
                continue
            for late, due in works:
                assert np.array_equal(late.result(), due), (seed, turn)
            works.clear()
        else:
            assert np.array_equal(work, wanted), (seed, turn, name)
    for late, due in works:
        assert np.array_equal(late.result(), due), seed
    return whims.decided.count(True), whims.decided.count(False), whims.wrong, reads[0]


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_calls_in_processes_whatever_ranks_expect(size: int) -> None:
    outcomes = run_ranks(size, _whimsical, CONFIG, (size, 60))
    assert all(pulled and not_pulled for pulled, not_pulled, *_ in outcomes[:1]), "rank 0 leads most of them"
    assert all(wrong and reads for *_, wrong, reads in outcomes[1:])


def _far(mesh: Mesh) -> list[bool]:
    """Which way rank 0 had its calls go: its writes take long, but from the 11th call on they no longer do."""
    mesh.barrier()
    stage = mesh._context.founding.stage
    assert stage is not None
    stage.copying = Copying.SLOWLY
    given, ways, turn = np.full((mesh.size, 40 * KIB), mesh.rank), list[bool](), 0
    wrote, pulls = Distance.wrote, Distance.pulls

    def as_if(self: Distance, nbytes: int, seconds: float) -> None:
        wrote(self, nbytes, 1.0 if turn < 10 else 1e-9)

    def noted(self: Distance, leader: int) -> bool:
        ways.append(pulls(self, leader))
        return ways[-1]

    Distance.wrote, Distance.pulls = as_if, noted  # type: ignore[method-assign]
    for turn in range(20):  # as_if reads it
        got = mesh.all_to_all(given)
        assert np.array_equal(got[:, -1], np.arange(mesh.size))
        if mesh.rank:
            ways[turn:] = [stage.distance._pulls[0]]
    return ways


@pytest.mark.usefixtures("nursery")
def test_far_ranks_pull_until_a_probe_says_that_they_are_near() -> None:
    near, far = [False], [True]
    probed = near * 3 + far + near + far * 2 + near + far * 4 + near
    assert run_ranks(2, _far, CONFIG) == [probed + near * 7] * 2


def _late(mesh: Mesh) -> Any:
    """Rank 0 has its calls pulled, and gives up one that the other is late for; then all is as ever."""
    mesh.barrier()
    stage = mesh._context.founding.stage
    assert stage is not None
    stage.copying = Copying.SLOWLY
    stage.distance = Set(mesh.rank == 0)  # type: ignore[assignment]
    given = np.full((2, 40 * KIB), mesh.rank)
    outcome = None
    if mesh.rank == 0:
        outcome = attempt(lambda: mesh.all_to_all(given, timeout=0.2)).error
        given[:] = -7
        mesh.send(np.ones(1), to=1, tag=3)
        mesh.recv(np.ones(1), source=1, tag=4)
        given[:] = 0
    else:
        mesh.recv(np.ones(1), source=0, tag=3)
        outcome = attempt(lambda: mesh.all_to_all(given)).error
        mesh.send(np.ones(1), to=0, tag=4)
    for _ in range(3):
        assert np.array_equal(mesh.all_to_all(given)[:, -1], np.arange(2))
    return outcome


@pytest.mark.usefixtures("nursery")
def test_a_leader_that_gave_up_and_goes_on() -> None:
    first, second = run_ranks(2, _late, CONFIG)
    assert isinstance(first, DeadlineError)
    assert isinstance(second, TransferAborted)


def test_slots_and_pulling_are_both_let_go_of() -> None:
    """With the stage: they hold slices of its memory."""
    stage: Any = stages_of(2)[0]
    source, target, _ = arrays("all_gather", np.arange(20).reshape(2, 2, 5), in_place=False)
    recipe = recipe_of("all_gather", 0, 2, 0, 5, 1)
    form = next(form for form in FORMS if form.serves(recipe.steps))
    slots = form(stage, recipe.steps, 1, None, source[0], target[0], True)
    led = Led(stage, recipe, source[0], slots)
    assert {type(express) for express in stage.express} == {Pulling, type(slots)}
    led.close()
    assert led.pulling._slots == []
    assert slots._slices == ()


def test_pulled_calls_are_pulled_passages() -> None:
    _, _, _, (leader, other) = pair("all_gather", 5, True, False)
    assert isinstance(leader._way, PulledPassage)
    assert not isinstance(other._way, PulledPassage)

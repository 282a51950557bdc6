"""Plans for ranks that share memory, against numpy, with their waits taken seriously: each rank takes its steps in its
order, whoever may go on does, and the seed decides who. A slot is overwritten as soon as all say that they are done."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankmesh.collectives.calls import Signature
from rankmesh.collectives.express import FORMS, SlicedExpress, SmallExpress
from rankmesh.collectives.passage import steps
from rankmesh.collectives.recipe import Recipe
from rankmesh.collectives.stage import CHUNK_BITS, SLOTS, Way
from rankmesh.collectives.staging import Case
from stages import ROOM, MemoryStage, run, shared_by

Array = np.ndarray[Any, Any]


def begun(stage: Any, recipe: Recipe, sequence: int, source: Array, target: Array, by_express: bool) -> Way:
    """A call that may have gone by express, as far as that took it."""
    taken = 0
    form = next((form for form in FORMS if form.serves(recipe.steps)), None)
    if by_express and form is not None:
        express = form(stage, recipe.steps, recipe.digest, recipe.apply, source, target)
        taken = express.run(sequence, source, target)
        assert taken <= express.steps
    return recipe.passage(stage, sequence, source, target, taken)


def arrays(name: str, given: Array, root: int) -> tuple[list[Array], list[Array], list[Array | None]]:
    """What each rank brings, gets, and should get. `given`: [rank, rank, part]."""
    size, _, part = given.shape
    total = given.sum(0)
    if name in ("all_reduce whole", "all_reduce slices", "reduce", "broadcast"):
        source = [given[rank, 0].copy() for rank in range(size)]
        result = given[root, 0] if name == "broadcast" else given[:, 0].sum(0)
        wanted = [result if name != "reduce" or rank == root else None for rank in range(size)]
        return source, source, wanted
    if name in ("all_gather", "gather"):
        source = [given[rank, 0].copy() for rank in range(size)]
        target = [np.zeros(size * part, np.int64) for _ in range(size)]
        for rank in range(size) if name == "gather" else ():
            target[rank][rank * part : (rank + 1) * part] = source[rank]
        joined = given[:, 0].reshape(-1)
        return source, target, [joined if name == "all_gather" or rank == root else None for rank in range(size)]
    source = [given[rank].reshape(-1).copy() for rank in range(size)]
    if name == "all_to_all":
        target = [np.zeros(size * part, np.int64) for _ in range(size)]
        for rank in range(size):
            target[rank][rank * part : (rank + 1) * part] = given[rank, rank]
        return source, target, [given[:, rank].reshape(-1) for rank in range(size)]
    target = [np.zeros(part, np.int64) for _ in range(size)]
    if name == "reduce_scatter":
        return source, target, [total[rank] for rank in range(size)]
    return source, target, [None if rank == root else given[root, rank] for rank in range(size)]


NAMES = ("all_reduce whole", "all_reduce slices", "reduce", "broadcast", "all_gather", "gather", "scatter",
         "all_to_all", "reduce_scatter")  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(2, 7),
    calls=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 200)), min_size=1, max_size=6),
    root=st.integers(0, 6),
    seed=st.integers(0, 2**32),
)
def test_any_sequence_of_calls_in_any_order_of_steps(
    size: int, calls: list[tuple[str, int]], root: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    root %= size
    shared = shared_by(size)
    stages = [MemoryStage(rank, size, shared) for rank in range(size)]
    passages: list[list[Callable[[], Way]]] = [[] for _ in range(size)]
    expected = []
    for sequence, (name, part) in enumerate(calls):
        source, target, wanted = arrays(name, rng.integers(0, 1000, (size, size, part)), root)
        for rank in range(size):
            recipe = Recipe(Signature(name), sequence + 1, steps(name, Case(rank, size, root, part, ROOM)), np.add)
            by_express = bool(rng.integers(2))
            passages[rank].append(
                partial(begun, stages[rank], recipe, sequence, source[rank], target[rank], by_express)
            )
        expected.append((name, target, wanted))
    run(passages, rng)
    for name, target, wanted in expected:
        for rank in range(size):
            right = wanted[rank]
            if right is not None:
                assert np.array_equal(target[rank], right), (name, rank)


def test_a_barrier_waits_for_all() -> None:
    shared = shared_by(3)
    recipes = [Recipe(Signature("barrier"), 1, steps("barrier", Case(rank, 3, 0, 0, ROOM))) for rank in range(3)]
    nothing = np.empty(0, np.int64)
    stages = [MemoryStage(rank, 3, shared) for rank in range(3)]
    first, second, third = (recipes[r].passage(stages[r], 0, nothing, nothing) for r in range(3))  # type: ignore[arg-type]
    first.step()
    assert not first.may_step()
    assert first.awaited() == [1, 2]
    second.step()
    third.step()
    first.step()
    assert first.ended


def test_calls_that_wait_twice_go_by_express() -> None:
    """Each goes as far as the others let it: their slices, then what they have combined."""
    stages: list[Any] = [MemoryStage(rank, 2, shared) for shared in [shared_by(2)] for rank in range(2)]
    source, target, wanted = arrays("all_reduce slices", np.arange(24).reshape(2, 2, 6), 0)
    order = [steps("all_reduce slices", Case(rank, 2, 0, 6, ROOM)) for rank in range(2)]
    assert all(map(SlicedExpress.serves, order))
    assert not any(map(SmallExpress.serves, order))
    express = [SlicedExpress(stages[r], order[r], 1, np.add, source[r], target[r]) for r in range(2)]
    assert express[0].run(0, source[0], target[0]) == 1, "the other has not come"
    assert express[1].run(0, source[1], target[1]) == 2, "the other has not combined"
    first, second = (
        Recipe(Signature("all_reduce"), 1, order[rank], np.add).passage(
            stages[rank], 0, source[rank], target[rank], taken
        )
        for rank, taken in ((0, 1), (1, 2))
    )
    while not first.ended:
        assert first.step()
    assert second.step()
    assert second.ended
    for rank in range(2):
        assert np.array_equal(target[rank], wanted[rank])  # type: ignore[arg-type]


def test_who_leaves_it_to_a_later_word_to_be_done_says_so_before_it_waits() -> None:
    """Two calls that are as far apart as there are slots, with none on the stage between them: both ranks have read
    the first, and want its slot."""
    stages: list[Any] = [MemoryStage(rank, 2, shared) for shared in [shared_by(2)] for rank in range(2)]
    ones = [np.ones(4, np.int64) for _ in range(2)]
    order = [steps("all_reduce whole", Case(rank, 2, 0, 4, ROOM)) for rank in range(2)]
    for sequence in (0, SLOTS, 2 * SLOTS):
        ways = [
            [
                partial(
                    begun,
                    stages[r],
                    Recipe(Signature("all_reduce"), 1, order[r], np.add),
                    sequence,
                    ones[r],
                    ones[r],
                    True,
                )
            ]
            for r in range(2)
        ]
        run(ways, np.random.default_rng(sequence))  # type: ignore[arg-type]
    assert all(np.all(array == 8) for array in ones)


@pytest.mark.parametrize("name", ["all_reduce whole", "broadcast", "all_gather", "all_to_all", "reduce_scatter"])
def test_small_calls_go_by_express(name: str) -> None:
    """The last to come takes all steps at once; a late one, a full slot or a call that differs leaves the rest."""
    stages = [MemoryStage(rank, 2, shared) for shared in [shared_by(2)] for rank in range(2)]
    small, large = ([steps(name, Case(rank, 2, 0, part, ROOM)) for rank in range(2)] for part in (1, 3 * ROOM))
    assert all(map(SmallExpress.serves, small))
    assert not any(map(SmallExpress.serves, large))
    source, target, wanted = arrays(name, np.arange(4).reshape(2, 2, 1), 0)

    def go(rank: int, sequence: int, digest: int = 1) -> int:
        express = SmallExpress(stages[rank], small[rank], digest, np.add, source[rank], target[rank])  # type: ignore[arg-type]
        return express.steps - express.run(sequence, source[rank], target[rank])

    assert go(0, 0) == (0 if name == "broadcast" else 1), "the root need not wait"
    assert go(1, 0) == 0
    assert np.array_equal(target[1], wanted[1])  # type: ignore[arg-type]
    go(0, 1)
    assert go(1, 1, digest=2) == 1, "they differ"
    stages[0].staged(2, 5 << CHUNK_BITS, 0)
    assert go(0, 2) == len(small[0]), "somebody may still read what the slot holds"


def test_what_was_read_by_express_may_be_overwritten() -> None:
    stages: list[Any] = [MemoryStage(rank, 2, shared) for shared in [shared_by(2)] for rank in range(2)]
    order = [steps("all_reduce whole", Case(rank, 2, 0, 4, ROOM)) for rank in range(2)]
    recipes = [Recipe(Signature("all_reduce"), 1, order[rank], np.add) for rank in range(2)]
    for sequence in range(3 * SLOTS):
        first, second = (
            begun(stages[rank], recipes[rank], sequence, array, array, by_express=True)
            for rank, array in enumerate((np.ones(4, np.int64), np.ones(4, np.int64)))
        )
        assert second.ended
        assert first.may_step()
        first.step()
        assert first.ended


def test_calls_that_differ_never_match() -> None:
    shared, ones = shared_by(2), np.ones(4, np.int64)
    order = [steps("all_reduce whole", Case(rank, 2, 0, 4, ROOM)) for rank in range(2)]
    stages = [MemoryStage(rank, 2, shared) for rank in range(2)]
    mine = Recipe(Signature("all_reduce"), 1, order[0], np.add).passage(stages[0], 0, ones, ones)  # type: ignore[arg-type]
    other = Recipe(Signature("all_reduce"), 2, order[1], np.add).passage(stages[1], 0, ones, ones)  # type: ignore[arg-type]
    mine.step()
    other.step()
    assert not mine.may_step()
    assert not other.may_step()
    assert list(ones) == [1, 1, 1, 1]


def test_who_gives_up_holds_nobody_up() -> None:
    shared = shared_by(2)
    order = [steps("broadcast", Case(rank, 2, 0, ROOM * (SLOTS + 1), ROOM)) for rank in range(2)]
    data = np.arange(ROOM * (SLOTS + 1))
    stages = [MemoryStage(rank, 2, shared) for rank in range(2)]
    root = Recipe(Signature("broadcast"), 1, order[0]).passage(stages[0], 0, data, data)  # type: ignore[arg-type]
    leaf = Recipe(Signature("broadcast"), 1, order[1]).passage(stages[1], 0, data.copy(), data.copy())  # type: ignore[arg-type]
    while root.may_step() and not root.ended:
        root.step()
    assert root.awaited() == [1], "all slots are full"
    leaf.give_up()
    while not root.ended:
        assert root.may_step()
        root.step()


@pytest.mark.parametrize("name", ["all_reduce slices", "all_reduce whole"])
def test_what_each_rank_copies_and_reduces_is_as_the_plans_say(name: str) -> None:
    size, part = 4, 4 * ROOM
    for rank in range(size):
        staged = combined = fetched = 0
        for what, _, chunk, _, _ in steps(name, Case(rank, size, 0, part, ROOM)):
            if what == 0:
                staged += sum(move.stop - move.start for move in chunk.stage)
            elif what == 1:
                assert chunk.combine is not None
                combined += (size - 1) * (chunk.combine.stop - chunk.combine.start)
            else:
                fetched += sum(fetch.stop - fetch.start for fetch in chunk.fetch)
        others = part * (size - 1) // size
        assert (staged, combined, fetched) == (
            (others, others, others) if name.endswith("slices") else (part, part * (size - 1), 0)
        )


def test_a_serial_number_has_room_for_the_chunks_of_any_array() -> None:
    from rankmesh.collectives.stage import SLOT_BYTES

    assert (1 << CHUNK_BITS) * SLOT_BYTES >= 2**39

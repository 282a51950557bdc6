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
from rankmesh.collectives.express import Express
from rankmesh.collectives.passage import Passage, Recipe, steps
from rankmesh.collectives.stage import CHUNK_BITS, COMBINED, DONE, SLOTS, STAGED
from rankmesh.collectives.staging import Case

Array = np.ndarray[Any, Any]
ROOM = 24


class MemoryStage:
    """A stage without processes: segments are arrays, and nobody sleeps."""

    def __init__(self, rank: int, size: int, shared: list[Any]) -> None:
        self.rank = rank
        self._others = [q for q in range(size) if q != rank]
        self.words: list[list[int]] = shared[0]
        self._slots: list[list[Array]] = shared[1]
        self._held = [0] * SLOTS
        self.express: set[Express] = set()
        self.looks = range(1)

    def slots(self, dtype: np.dtype[Any]) -> list[list[Array]]:
        return self._slots

    def free(self, slot: int) -> bool:
        return not self.behind(slot)

    def held(self, slot: int) -> int:
        return self._held[slot]

    def behind(self, slot: int) -> list[int]:
        return [q for q in self._others if self.words[q][DONE] < self._held[slot]]

    def staged(self, slot: int, serial: int, digest: int) -> None:
        self._held[slot] = serial
        self._say(STAGED[slot], serial, digest)

    def combined(self, slot: int, serial: int, digest: int) -> None:
        self._say(COMBINED[slot], serial, digest)

    def _say(self, word: int, serial: int, digest: int) -> None:
        self.words[self.rank][word : word + 2] = [serial, digest]

    def done(self, serial: int) -> None:
        self.words[self.rank][DONE] = max(serial, self.words[self.rank][DONE])

    def give_up(self, sequence: int) -> None:
        self.done((sequence + 2 << CHUNK_BITS) - 1)


def shared_by(size: int) -> list[Any]:
    slots = [[np.full(ROOM, -1, np.int64) for _ in range(SLOTS)] for _ in range(size)]
    return [[[0] * 512 for _ in range(size)], slots]


def run(calls: list[list[Callable[[], Passage]]], rng: np.random.Generator) -> None:
    """Every rank takes its calls in order; who is stuck is passed over."""
    at = [0] * len(calls)
    under_way: dict[int, Passage] = {}
    stuck: set[int] = set()
    while any(at[rank] < len(calls[rank]) for rank in range(len(calls))):
        able = [rank for rank in range(len(calls)) if at[rank] < len(calls[rank]) and rank not in stuck]
        assert able, "all wait for each other"
        rank = int(rng.choice(able))
        passage = under_way.get(rank)
        if passage is None:
            under_way[rank] = calls[rank][at[rank]]()
            stuck.clear()
        elif passage.ended:
            at[rank] += 1
            del under_way[rank]
        elif passage.may_step():
            passage.step()
            stuck.clear()
        else:
            assert passage.awaited() != []
            stuck.add(rank)


def begun(stage: Any, recipe: Recipe, sequence: int, source: Array, target: Array, by_express: bool) -> Passage:
    """A call that may have gone by express, as far as that took it."""
    taken = 0
    if by_express and Express.serves(recipe.steps):
        express = Express(stage, recipe.steps, recipe.digest, recipe.apply, source.dtype)
        taken = express.run(sequence, source, target)
        assert taken <= express.steps
    return Passage(stage, recipe, sequence, source, target, taken)


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
    passages: list[list[Callable[[], Passage]]] = [[] for _ in range(size)]
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
    first, second, third = (Passage(stages[r], recipes[r], 0, nothing, nothing) for r in range(3))  # type: ignore[arg-type]
    first.step()
    assert not first.may_step()
    assert first.awaited() == [1, 2]
    second.step()
    third.step()
    first.step()
    assert first.ended


@pytest.mark.parametrize("name", ["all_reduce whole", "broadcast", "all_gather", "all_to_all", "reduce_scatter"])
def test_small_calls_go_by_express(name: str) -> None:
    """The last to come takes all steps at once; a late one, a full slot or a call that differs leaves the rest."""
    stages = [MemoryStage(rank, 2, shared) for shared in [shared_by(2)] for rank in range(2)]
    small, large = ([steps(name, Case(rank, 2, 0, part, ROOM)) for rank in range(2)] for part in (1, 3 * ROOM))
    assert all(map(Express.serves, small))
    assert not any(map(Express.serves, large))
    source, target, wanted = arrays(name, np.arange(4).reshape(2, 2, 1), 0)

    def go(rank: int, sequence: int, digest: int = 1) -> int:
        express = Express(stages[rank], small[rank], digest, np.add, source[rank].dtype)  # type: ignore[arg-type]
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
    mine = Passage(stages[0], Recipe(Signature("all_reduce"), 1, order[0], np.add), 0, ones, ones)  # type: ignore[arg-type]
    other = Passage(stages[1], Recipe(Signature("all_reduce"), 2, order[1], np.add), 0, ones, ones)  # type: ignore[arg-type]
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
    root = Passage(stages[0], Recipe(Signature("broadcast"), 1, order[0]), 0, data, data)  # type: ignore[arg-type]
    leaf = Passage(stages[1], Recipe(Signature("broadcast"), 1, order[1]), 0, data.copy(), data.copy())  # type: ignore[arg-type]
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

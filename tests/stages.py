"""A stage without processes, for tests of what passes over it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from rankmesh.collectives.distance import Distance
from rankmesh.collectives.stage import CHUNK_BITS, COMBINED, DONE, SLOTS, STAGED, Way
from rankmesh.transport.pulling import Copying, Puller

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
        self.express: set[Any] = set()
        self.contenders: list[None] = []
        self.through = 0
        #: All memory is this process's own.
        self.pullers = {q: Puller(os.getpid()) for q in range(size)}
        self.copying = Copying.QUICKLY
        self.distance = Distance(rank, size)

    def slots(self, dtype: np.dtype[Any]) -> list[list[Array]]:
        return self._slots

    def free(self, slot: int) -> bool:
        if self.behind(slot):
            self.done(self.through)
        return not self.behind(slot)

    def held(self, slot: int) -> int:
        return self._held[slot]

    def behind(self, slot: int) -> list[int]:
        return [q for q in self._others if self.words[q][DONE] < self._held[slot]]

    def comes(self, its: list[int], word: int, serial: int) -> bool:
        return its[word] >= serial

    def staged(self, slot: int, serial: int, digest: int) -> None:
        self._held[slot] = serial
        self._say(STAGED[slot], serial, digest)

    def publish(self, slot: int, serial: int, digest: int, source: int, target: int) -> None:
        word = STAGED[slot]
        self.words[self.rank][word + 2 : word + 4] = [source, target]
        self.staged(slot, serial, digest)

    def withdraw(self, slot: int, serial: int, digest: int) -> None:
        for word in (STAGED[slot], COMBINED[slot]):
            if self.words[self.rank][word : word + 2] == [serial, digest]:
                self.words[self.rank][word] = 0

    def take_back(self, slot: int, serial: int) -> None:
        if self._held[slot] == serial:
            self._held[slot] = 0

    def combined(self, slot: int, serial: int, digest: int) -> None:
        self._say(COMBINED[slot], serial, digest)

    def _say(self, word: int, serial: int, digest: int) -> None:
        self.words[self.rank][DONE] = self.through
        self.words[self.rank][word : word + 2] = [serial, digest]

    def done(self, serial: int) -> None:
        self.words[self.rank][DONE] = self.through = max(serial, self.through)

    def give_up(self, sequence: int) -> None:
        self.done((sequence + 2 << CHUNK_BITS) - 1)


def shared_by(size: int) -> list[Any]:
    slots = [[np.full(ROOM, -1, np.int64) for _ in range(SLOTS)] for _ in range(size)]
    return [[[0] * 512 for _ in range(size)], slots]


def run(calls: list[list[Callable[[], Way]]], rng: np.random.Generator) -> None:
    """Every rank takes its calls in order; who is stuck is passed over."""
    at = [0] * len(calls)
    under_way: dict[int, Way] = {}
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


def in_order(left: Array, right: Array, out: Array) -> None:
    """An operation whose result shows in which order it was applied."""
    np.add(left * 3, right, out=out)


def total(rows: Array) -> Array:
    result: Array = rows[0]
    for row in rows[1:]:
        result = result * 3 + row
    return result


def arrays(name: str, given: Array, in_place: bool, root: int = 0) -> tuple[list[Array], list[Array], list[Array]]:
    """What each rank brings, gets, and should get. `given`: [rank, rank, part]."""
    size, _, part = given.shape
    if name == "broadcast":
        array = [given[rank, 0].copy() for rank in range(size)]
        return array, array, [given[root, 0].copy()] * size
    if name == "all_reduce":
        source = [given[rank, 0].copy() for rank in range(size)]
        target = source if in_place else [np.full(part, -1) for _ in range(size)]
        return source, target, [total(given[:, 0])] * size
    if name == "reduce_scatter":
        target = [np.full(part, -1) for _ in range(size)]
        return [given[rank].ravel() for rank in range(size)], target, [total(given[:, rank]) for rank in range(size)]
    target = [np.full(size * part, -1) for _ in range(size)]
    if name == "all_to_all":
        return (
            [given[rank].ravel().copy() for rank in range(size)],
            target,
            [given[:, rank].ravel() for rank in range(size)],
        )
    source = [given[rank, 0].copy() for rank in range(size)]
    if in_place:
        for rank in range(size):
            target[rank][rank * part : (rank + 1) * part] = source[rank]
            source[rank] = target[rank][rank * part : (rank + 1) * part]
    return source, target, [given[:, 0].ravel()] * size

"""One call's way over the stage: the steps of its plan (staging.py), with the memory they need. It takes a step when
what that waits for is there, and knows nothing of who drives it: the caller itself (verbs.py), or the engine
(staged.py)."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from functools import lru_cache
from time import perf_counter
from typing import Final, NamedTuple, Protocol

from rankmesh.buffers import copy
from rankmesh.collectives.distance import LEAST
from rankmesh.collectives.kinds import Array, Operation
from rankmesh.collectives.stage import CHUNK_BITS, COMBINED, DONE, SLOTS, STAGED, Stage
from rankmesh.collectives.staging import Case, Chunk, chunks

STAGE: Final = 0
COMBINE: Final = 1
FETCH: Final = 2


class Step(NamedTuple):
    """`what` of chunk `number`. It waits for what `ranks` say, STAGED or COMBINED (`words`, by slot)."""

    what: int
    number: int
    chunk: Chunk
    ranks: tuple[int, ...]
    words: tuple[int, ...]


class Express(Protocol):
    """Takes the steps of a recipe's calls as long as nobody is late: express.py, pulling.py, leading.py."""

    #: How many there are.
    steps: int

    def run(self, sequence: int, source: Array, target: Array) -> int:
        """How many steps were taken."""
        ...

    def close(self) -> None:
        """The stage is no more: let go of its memory."""


@lru_cache(maxsize=1024)
def steps(name: str, case: Case) -> tuple[Step, ...]:
    """In the order in which a rank takes them: it stages a chunk ahead, and fetches a chunk behind, so that what it
    waits for has usually been done by the others meanwhile."""
    plan = chunks(name, case)
    order = []
    for turn in range(len(plan) + 2):
        for behind, what in enumerate((STAGE, COMBINE, FETCH)):
            number = turn - behind
            if 0 <= number < len(plan) and _needed(what, plan[number]):
                chunk = plan[number]
                combined = what == FETCH and chunk.combine is not None
                ranks = () if what == STAGE else chunk.combined_by if combined else chunk.staged_by
                order.append(Step(what, number, chunk, ranks, COMBINED if combined else STAGED))
    return tuple(order)


def strays(
    said: Sequence[memoryview], ranks: Iterable[int], word: int, serial: int, digests: Container[int]
) -> list[int]:
    """Those whose word names that serial, and another call."""
    return [rank for rank in ranks if said[rank][word] == serial and said[rank][word + 1] not in digests]


def first_slot(sequence: int, steps: Sequence[Step]) -> int:
    """Modulo SLOTS: that of a call's first chunk. It follows on from those of the last call, if that was like this one:
    what another has just read is in its cache, and takes longer to write to than what was read before that."""
    return sequence * (steps[-1].number + 1)


def _needed(what: int, chunk: Chunk) -> bool:
    if what == STAGE:
        return not chunk.silent
    if what == COMBINE:
        return chunk.combine is not None
    return chunk.combine is None or bool(chunk.fetch)


class Passage:
    """`source` and `target` are flat; see staging.py for what they may have in common. Methods need the engine's
    lock."""

    __slots__ = (
        "_apply",
        "_at",
        "_digest",
        "_first",
        "_sequence",
        "_serial",
        "_slots",
        "_source",
        "_stage",
        "_steps",
        "_target",
        "_timed",
    )

    def __init__(
        self,
        stage: Stage,
        steps: Sequence[Step],
        digest: int,
        apply: Operation | None,
        sequence: int,
        source: Array,
        target: Array,
        taken: int = 0,
        ahead: int = 0,
        timed: bool = False,
    ) -> None:
        """`taken`: so many steps were taken before. `ahead`: so many slots, and serials, the call has used before.
        `timed`: it matters how long it takes to write to slots."""
        self._stage = stage
        self._steps = steps
        self._digest = digest
        self._apply = apply
        self._at = taken
        self._sequence = sequence
        #: Of the first chunk. No serial is 0, which all words are at first.
        self._serial = (sequence + 1 << CHUNK_BITS) + ahead
        self._timed = timed
        self._first = sequence + ahead if ahead else first_slot(sequence, steps)
        self._source = source
        self._target = target
        self._slots = stage.slots(source.dtype)
        if self._steps[0].what != STAGE:
            stage.done(stage.through)

    @property
    def ended(self) -> bool:
        return self._at == len(self._steps)

    def may_step(self) -> bool:
        """What the next step waits for is there, or there is none."""
        if self._at == len(self._steps):
            return True
        what, number, _, ranks, words = self._steps[self._at]
        slot = (self._first + number) % SLOTS
        if what == STAGE:
            return self._stage.free(slot)
        word, serial, said = words[slot], self._serial + number, self._stage.words
        for rank in ranks:
            its = said[rank]
            if its[word] != serial or its[word + 1] != self._digest:
                return False
        return True

    def step(self) -> bool:
        """Take the next step, if there is what it waits for: `may_step`, written out for its speed."""
        what, number, chunk, ranks, words = self._steps[self._at]
        stage, digest = self._stage, self._digest
        slot, serial = (self._first + number) % SLOTS, self._serial + number
        if what == STAGE:
            if not stage.free(slot):
                return False
            self._at += 1
            self._put(chunk, self._slots[stage.rank][slot])
            stage.staged(slot, serial, digest)
            if chunk.keep is not None:
                start, stop, at = chunk.keep
                copy(self._target[at : at + stop - start], self._source[start:stop])
            return True
        word, said = words[slot], stage.words
        for rank in ranks:
            its = said[rank]
            if its[word] != serial or its[word + 1] != digest:
                return False
        self._at += 1
        if what == COMBINE:
            if self._combine(chunk, slot):
                stage.combined(slot, serial, digest)
            if chunk.fetch:
                return True
        target = self._target
        for rank, at, start, stop in chunk.fetch:
            target[start:stop] = self._slots[rank][slot][at : at + stop - start]
        stage.done(serial)
        return True

    def _put(self, chunk: Chunk, own: Array) -> None:
        source, moved, began = self._source, 0, perf_counter() if self._timed else 0.0
        for start, stop, at in chunk.stage:
            length = stop - start
            own[at : at + length] = source if length == len(source) else source[start:stop]
            moved += length
        if self._timed and moved * own.itemsize >= LEAST:
            self._stage.distance.wrote(moved * own.itemsize, perf_counter() - began)

    def _combine(self, chunk: Chunk, slot: int) -> bool:
        """True: others are to see the result."""
        slots, apply, own = self._slots, self._apply, self._stage.rank
        assert chunk.combine is not None, "this step combines"
        assert apply is not None, "a recipe that combines has an operation"
        start, stop, places, staged, into, publish = chunk.combine
        length = stop - start
        parts = [slots[rank][slot][at : at + length] for rank, at in enumerate(places)]
        if not staged:
            parts[own] = self._source[start:stop]
        if publish >= 0:
            result = slots[own][slot][publish : publish + length]
        else:
            target = self._target
            result = target if length == len(target) else target[into : into + length]
        left = parts[0]
        for right in parts[1:]:
            apply(left, right, result)
            left = result
        if publish < 0:
            return False
        if into >= 0:
            self._target[into : into + length] = result
        return True

    def wanted(self) -> tuple[int, int, Sequence[int]]:
        """What the next step waits for: a word, up to which serial, of these ranks (none: of nobody)."""
        if self._at == len(self._steps):
            return DONE, 0, ()
        what, number, _, ranks, words = self._steps[self._at]
        slot = (self._first + number) % SLOTS
        if what == STAGE:
            return DONE, self._stage.held(slot), self._stage.behind(slot)
        return words[slot], self._serial + number, ranks

    def awaited(self) -> list[int]:
        """Ranks whose word the next step waits for."""
        word, serial, ranks = self.wanted()
        strays = self.strays()
        return [rank for rank in ranks if self._stage.words[rank][word] != serial or rank in strays]

    def strays(self) -> list[int]:
        """Those of them that have said another call instead."""
        word, serial, ranks = self.wanted()
        said = self._stage.words
        return [] if word == DONE else strays(said, ranks, word, serial, (self._digest,))

    def give_up(self) -> None:
        self._stage.give_up(self._sequence)

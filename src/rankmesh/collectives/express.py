"""Small calls over the stage: one chunk, which waits for others once at most.

The steps are those of a Passage (passage.py), written out, on slices that were made when the recipe was: for a few
bytes the steps cost more than the waiting. What does not go smoothly, because somebody is late, a slot is not free or a
call differs, is left to a Passage, which goes on where this ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rankmesh.collectives.kinds import Array, Operation
from rankmesh.collectives.passage import COMBINE, FETCH, STAGE, Step
from rankmesh.collectives.stage import CHUNK_BITS, SLOTS, STAGED, Stage

#: (into, start, stop): source[start:stop] goes there.
_Move = tuple[Array, int, int]
#: (its, start, stop): that goes to target[start:stop].
_Fetch = tuple[Array, int, int]


class _Slices(NamedTuple):
    """A call's memory in one of the slots."""

    word: int
    moves: tuple[_Move, ...]
    fetches: tuple[_Fetch, ...]
    #: By rank, what is reduced; in the place of this rank's comes its source, where that is not staged.
    parts: tuple[Array, ...]


class Express:
    """For all calls of one recipe in one group. `run` needs the engine's lock."""

    __slots__ = ("__weakref__", "_apply", "_digest", "_keep", "_own", "_slices", "_stage", "_stages", "_words", "steps")

    def __init__(self, stage: Stage, steps: Sequence[Step], digest: int, apply: Operation | None, dtype: Any) -> None:
        chunk = steps[-1].chunk
        self._stage = stage
        self._digest = digest
        self._apply = apply
        #: How many steps it takes.
        self.steps = len(steps)
        self._stages = steps[0].what == STAGE
        self._keep = chunk.keep
        self._words: tuple[memoryview, ...] = tuple(stage.words[rank] for rank in steps[-1].ranks)
        combine = chunk.combine
        #: Of what this rank brings, the stretch that it reduces from where it lies.
        self._own = None if combine is None or combine.staged else slice(combine.start, combine.stop)
        slots = stage.slots(dtype)
        self._slices: tuple[_Slices, ...] = tuple(
            _Slices(
                STAGED[slot],
                tuple(
                    (slots[stage.rank][slot][at : at + stop - start], start, stop) for start, stop, at in chunk.stage
                ),
                tuple((slots[q][slot][at : at + stop - start], start, stop) for q, at, start, stop in chunk.fetch),
                ()
                if combine is None
                else tuple(slots[q][slot][at : at + combine.stop - combine.start] for q, at in enumerate(combine.at)),
            )
            for slot in range(SLOTS)
        )

        stage.express.add(self)

    def close(self) -> None:
        """The stage is no more: let go of its memory."""
        self._slices, self._words = (), ()

    @staticmethod
    def serves(steps: Sequence[Step]) -> bool:
        """Whether a recipe's steps are such a call's: stage, or not; then combine for this rank alone, or fetch."""
        if not 1 <= len(steps) <= 2 or steps[-1].number:
            return False
        *first, last = steps
        if last.what == COMBINE and last.chunk.combine is not None and last.chunk.combine.publish >= 0:
            return False
        return last.what in (COMBINE, FETCH) and all(step.what == STAGE for step in first)

    def run(self, sequence: int, source: Array, target: Array) -> int:
        """How many steps were taken."""
        stage, digest, serial = self._stage, self._digest, sequence + 1 << CHUNK_BITS
        slot = sequence % SLOTS
        word, moves, fetches, parts = self._slices[slot]
        taken = 0
        if self._stages:
            if not stage.free(slot):
                return 0
            for into, start, stop in moves:
                into[:] = source if len(into) == len(source) else source[start:stop]
            stage.staged(slot, serial, digest)
            if self._keep is not None:
                start, stop, at = self._keep
                target[at : at + stop - start] = source
            taken = 1
        for its in self._words:
            if its[word] != serial:
                for _ in stage.looks:
                    if its[word] == serial:
                        break
                else:
                    return taken
            if its[word + 1] != digest:
                return taken
        if parts:
            self._combine(parts, source, target)
        for its_part, start, stop in fetches:
            target[start:stop] = its_part
        stage.done(serial)
        return taken + 1

    def _combine(self, parts: tuple[Array, ...], source: Array, target: Array) -> None:
        apply = self._apply
        assert apply is not None, "a recipe that combines has an operation"
        if self._own is not None:
            own = self._stage.rank
            mine = source if self._own.stop - self._own.start == len(source) else source[self._own]
            if len(parts) == 2:  # as below, without a tuple made for it
                apply(parts[0], mine, target) if own else apply(mine, parts[1], target)
                return
            parts = (*parts[:own], mine, *parts[own + 1 :])
        left = parts[0]
        for right in parts[1:]:
            apply(left, right, target)
            left = target

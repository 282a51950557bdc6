"""Small calls over the stage: one chunk.

The steps are those of a Passage (passage.py), written out, on slices that were made when the recipe was: for a few
bytes the steps cost more than the waiting. What does not go smoothly, because somebody is late, a slot is not free or a
call differs, is left to a Passage, which goes on where this ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from types import EllipsisType
from typing import Final, NamedTuple

import numpy as np

from rankmesh.collectives.distance import LEAST
from rankmesh.collectives.kinds import Array, Operation
from rankmesh.collectives.passage import COMBINE, FETCH, STAGE, Step
from rankmesh.collectives.stage import CHUNK_BITS, COMBINED, SLOTS, STAGED, Stage

#: What names a stretch of the source, or of the target.
_Stretch = slice | EllipsisType
#: A stretch of a slot, and that from or to which it goes.
_Piece = tuple[Array, _Stretch]


def _stretch(start: int, stop: int, of: Array) -> _Stretch:
    """[start:stop]; of all there is, what takes less time."""
    return ... if stop - start == len(of) else slice(start, stop)


class _Slices(NamedTuple):
    """A call's memory in one of the slots."""

    word: int
    moves: tuple[_Piece, ...]
    fetches: tuple[_Piece, ...]
    #: By rank, what is reduced; in the place of this rank's comes its source, where that is not staged.
    parts: tuple[Array, ...]


def _publishes(step: Step) -> bool:
    """Others fetch what this rank has combined."""
    return step.chunk.combine is not None and step.chunk.combine.publish >= 0


class SmallExpress:
    """For all calls of one recipe in one group. `run` needs the engine's lock."""

    __slots__ = (
        "__weakref__",
        "_apply",
        "_digest",
        "_keep",
        "_own",
        "_slices",
        "_stage",
        "_stages",
        "_timed",
        "_words",
        "may_overlap",
        "steps",
    )

    def __init__(
        self,
        stage: Stage,
        steps: Sequence[Step],
        digest: int,
        apply: Operation | None,
        source: Array,
        target: Array,
        timed: bool = False,
    ) -> None:
        """`source`, `target`: as those of its calls are. `timed`: it matters how long it takes to write to slots."""
        chunk = steps[0].chunk
        combine, keep = chunk.combine, chunk.keep
        moved = sum(stop - start for start, stop, _ in chunk.stage) * source.itemsize
        #: Bytes whose writing to a slot is timed; 0: it is not.
        self._timed = moved if timed and moved >= LEAST else 0
        self._stage = stage
        self._digest = digest
        self._apply = apply
        #: How many steps it takes.
        self.steps = len(steps)
        self._stages = steps[0].what == STAGE
        self._keep = keep and (
            _stretch(keep.at, keep.at + keep.stop - keep.start, target),
            _stretch(keep.start, keep.stop, source),
        )
        self._words: tuple[memoryview, ...] = tuple(stage.words[rank] for rank in chunk.staged_by)
        #: Of what this rank brings, the stretch that it reduces from where it lies.
        self._own = None if combine is None or combine.staged else _stretch(combine.start, combine.stop, source)
        #: Source and target may share memory as they like: nothing of the source is read after anything was written,
        #: but by numpy in one operation, which sees to it; others work block by block.
        self.may_overlap = self._own is None or (stage.rank <= 1 and isinstance(apply, np.ufunc))
        slots = stage.slots(source.dtype)
        self._slices: tuple[_Slices, ...] = tuple(
            _Slices(
                STAGED[slot],
                tuple(
                    (slots[stage.rank][slot][at : at + stop - start], _stretch(start, stop, source))
                    for start, stop, at in chunk.stage
                ),
                tuple(
                    (slots[q][slot][at : at + stop - start], _stretch(start, stop, target))
                    for q, at, start, stop in chunk.fetch
                ),
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
        if last.what == COMBINE and _publishes(last):
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
            began = perf_counter() if self._timed else 0.0
            for into, piece in moves:
                into[...] = source[piece]
            if self._timed:
                stage.distance.wrote(self._timed, perf_counter() - began)
            stage.staged(slot, serial, digest)
            if self._keep is not None:
                place, piece = self._keep
                target[place] = source[piece]
            taken = 1
        for its in self._words:
            if its[word] != serial and not stage.comes(its, word, serial):
                return taken
            if its[word + 1] != digest:
                return taken
        if parts:
            self._combine(parts, source, target)
        for its_part, piece in fetches:
            target[piece] = its_part
        if taken:
            stage.through = serial
        else:
            stage.done(serial)
        return taken + 1

    def _combine(self, parts: tuple[Array, ...], source: Array, target: Array) -> None:
        apply = self._apply
        assert apply is not None, "a recipe that combines has an operation"
        if self._own is not None:
            own = self._stage.rank
            mine = source[self._own]
            if len(parts) == 2:  # as below, without a tuple made for it
                apply(parts[0], mine, target) if own else apply(mine, parts[1], target)
                return
            parts = (*parts[:own], mine, *parts[own + 1 :])
        left = parts[0]
        for right in parts[1:]:
            apply(left, right, target)
            left = target


class SlicedExpress(SmallExpress):
    """For calls that wait twice: each rank combines a slice, puts it where the others see it, and fetches theirs, if it
    needs them."""

    __slots__ = ("_combined", "_combiners", "_into")

    def __init__(
        self,
        stage: Stage,
        steps: Sequence[Step],
        digest: int,
        apply: Operation | None,
        source: Array,
        target: Array,
        timed: bool = False,
    ) -> None:
        super().__init__(stage, steps, digest, apply, source, target, timed)
        chunk = steps[0].chunk
        combine = chunk.combine
        assert combine is not None, "it combines"
        self.may_overlap = False
        self._combiners: tuple[memoryview, ...] = tuple(stage.words[rank] for rank in chunk.combined_by)
        length = combine.stop - combine.start
        slots = stage.slots(source.dtype)[stage.rank]
        self._combined = tuple(slot[combine.publish : combine.publish + length] for slot in slots)
        self._into = None if combine.into < 0 else _stretch(combine.into, combine.into + length, target)

    def close(self) -> None:
        super().close()
        self._combined, self._combiners = (), ()

    @staticmethod
    def serves(steps: Sequence[Step]) -> bool:
        """Stage and combine for all; then fetch, or not."""
        whats = tuple(step.what for step in steps)
        return whats in ((STAGE, COMBINE), (STAGE, COMBINE, FETCH)) and not steps[-1].number and _publishes(steps[1])

    def run(self, sequence: int, source: Array, target: Array) -> int:
        """How many steps were taken."""
        stage, digest, serial, slot = self._stage, self._digest, sequence + 1 << CHUNK_BITS, sequence % SLOTS
        word, moves, fetches, parts = self._slices[slot]
        if not stage.free(slot):
            return 0
        for into, piece in moves:
            into[...] = source[piece]
        stage.staged(slot, serial, digest)
        if not self._have_said(self._words, word, serial):
            return 1
        result = self._combined[slot]
        self._combine(parts, source, result)
        stage.combined(slot, serial, digest)
        if self._into is not None:
            target[self._into] = result
        if self.steps == 3:
            if not self._have_said(self._combiners, COMBINED[slot], serial):
                return 2
            for its_part, piece in fetches:
                target[piece] = its_part
        stage.through = serial
        return self.steps

    def _have_said(self, words: tuple[memoryview, ...], word: int, serial: int) -> bool:
        for its in words:
            if its[word] != serial and not self._stage.comes(its, word, serial):
                return False
            if its[word + 1] != self._digest:
                return False
        return True


#: The first that serves a recipe's steps takes them.
FORMS: Final = (SmallExpress, SlicedExpress)

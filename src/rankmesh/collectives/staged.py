"""A collective on the stage of its group: memory that all its ranks share. Where there is none, it runs the plan that
its algorithm has for that, over messages (running.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rankmesh.collectives.calls import Call
from rankmesh.collectives.plan import Round
from rankmesh.collectives.reducing import Reduction
from rankmesh.collectives.running import Collective, Context, Partners
from rankmesh.collectives.space import Space
from rankmesh.collectives.stage import CHUNK_BITS, COMBINED, DONE, SLOTS, STAGED, Stage
from rankmesh.collectives.staging import Case, Chunk, chunks

if TYPE_CHECKING:
    from rankmesh.endpoint.router import Router

Array = np.ndarray[Any, Any]
#: How a collective goes over messages instead.
Fallback = Callable[[], tuple[Sequence[Round], Space]]

_STAGE, _COMBINE, _FETCH = range(3)
Step = tuple[int, int, Chunk]


@lru_cache(maxsize=1024)
def steps(name: str, case: Case) -> tuple[Step, ...]:
    """(what, number of the chunk, chunk), in the order in which a rank takes them: it stages a chunk ahead, and fetches
    a chunk behind, so that what it waits for has usually been done by the others meanwhile."""
    plan = chunks(name, case)
    order = []
    for turn in range(len(plan) + 2):
        for behind, what in enumerate((_STAGE, _COMBINE, _FETCH)):
            number = turn - behind
            if 0 <= number < len(plan) and _needed(what, plan[number]):
                order.append((what, number, plan[number]))
    return tuple(order)


def _needed(what: int, chunk: Chunk) -> bool:
    if what == _STAGE:
        return not chunk.silent
    if what == _COMBINE:
        return chunk.combine is not None
    return chunk.combine is None or bool(chunk.fetch)


class StagedCollective(Collective):
    """`source` and `target` are flat; see staging.py for what they may have in common. It is `founded` once it is known
    whether there is a stage."""

    def __init__(
        self,
        context: Context,
        call: Call,
        job: tuple[Step, ...],
        source: Array,
        target: Array,
        reduction: Reduction | None,
        conclude: Callable[[], Any],
        fallback: Fallback,
        timeout: float,
    ) -> None:
        # Collective.__init__, but for what only plans need: this runs for every small all_reduce
        self._engine = context.hub.engine
        self.op = f"{call.signature.collective} with"
        self.timeout = timeout
        self.began = self.moved = call.when
        self.context = context
        self.call = call
        self._job = job
        self._at = 0
        self._source = source
        self._target = target
        self._reduction = reduction
        self._conclude = conclude
        self._fallback = fallback

    def founded(self, stage: Stage | None) -> None:
        """Begin, on the stage, or over messages where there is none."""
        if stage is None:
            rounds, space = self._fallback()
            self.prepare(rounds, space)
            self.advance()
            return
        self._stage = self.hint = stage
        self._slots = stage.slots(self._source.dtype)
        self._serial = self.call.sequence << CHUNK_BITS
        stage.enter(self)

    # ------------------------------------------------------------------ steps

    def may_step(self) -> bool:
        """What the next step waits for is there."""
        what, number, chunk = self._job[self._at]
        slot = (self.call.sequence + number) % SLOTS
        if what == _STAGE:
            return self._stage.free(slot)
        if what == _FETCH and chunk.combine is not None:
            return self._said(chunk.combined_by, COMBINED[slot], number)
        return self._said(chunk.staged_by, STAGED[slot], number)

    def _said(self, ranks: tuple[int, ...], word: int, number: int) -> bool:
        words, serial, digest = self._stage.words, self._serial + number, self.call.digest
        for rank in ranks:
            its = words[rank]
            if its[word] != serial or its[word + 1] != digest:
                return False
        return True

    def step(self) -> bool:
        """Go on as far as it goes. False: it waits for others."""
        try:
            while not self.finished:
                if self._at == len(self._job):
                    self._succeed()
                elif self.may_step():
                    self._take(*self._job[self._at])
                    self._at += 1
                else:
                    return False
        except Exception as error:  # noqa: BLE001  # what a reduction raised: it is the caller's to see
            self.stop(error)
        return True

    def _take(self, what: int, number: int, chunk: Chunk) -> None:
        self.moved = monotonic()
        stage, slot = self._stage, (self.call.sequence + number) % SLOTS
        if what == _STAGE:
            source, own = self._source, self._slots[self.context.rank][slot]
            for start, stop, at in chunk.stage:
                own[at : at + stop - start] = source[start:stop]
            stage.hold(slot, self._serial + number)
            stage.say(STAGED[slot], self._serial + number, self.call.digest)
            return
        if what == _COMBINE:
            self._combine(chunk, slot, number)
            if chunk.fetch:
                return
        target = self._target
        for rank, at, start, stop in chunk.fetch:
            target[start:stop] = self._slots[rank][slot][at : at + stop - start]
        stage.done(self._serial + number)

    def _combine(self, chunk: Chunk, slot: int, number: int) -> None:
        combine, slots, reduction = chunk.combine, self._slots, self._reduction
        assert combine is not None and reduction is not None, "a plan that combines is given a reduction"
        start, stop, places, staged, into, publish = combine
        length, own_rank = stop - start, self.context.rank
        parts = [slots[rank][slot][at : at + length] for rank, at in enumerate(places)]
        if not staged:
            parts[own_rank] = self._source[start:stop]
        result = self._target[into : into + length] if publish < 0 else slots[own_rank][slot][publish : publish + length]
        left = parts[0]
        for right in parts[1:]:
            reduction.apply(left, right, result)
            left = result
        if publish >= 0:
            if into >= 0:
                self._target[into : into + length] = result
            self._stage.say(COMBINED[slot], self._serial + number, self.call.digest)

    # ------------------------------------------------------------------ the end

    def awaited(self) -> dict[int, Router]:
        if self._stage is None:
            return self.context.founding.awaited() if self._job is not None else super().awaited()
        return {}

    def _succeed(self) -> None:
        if self._stage is not None:
            self._stage.leave(self)
        super()._succeed()

    def stop(self, error: BaseException) -> None:
        stage, finished = self._stage, self.finished
        super().stop(error)
        if stage is not None and not finished:
            stage.done(self._serial | (1 << CHUNK_BITS) - 1)
            stage.leave(self)

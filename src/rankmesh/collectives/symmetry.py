"""Large worlds of ranks that are all alike: one rank's plan stands for all, so that 1,024 ranks cost what one does.

A plan turns with its rank if rank r's is rank 0's with r added to every rank and every block, modulo the world: ring,
pairwise, direct. (`period`: only every so many ranks are alike, and the first few stand for the others. `unit`: blocks
per rank.) Then rank r's memory is rank 0's too, turned by r, at any time: what comes from r is what the rank that
stands for it sent, turned.

What a block holds is not an array but a description of it, which tells more: which block it is, and which ranks' it
was reduced from. Reducing different blocks, or a rank's twice, is an error at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rankmesh.collectives.plan import Into, Plan, Round, Span
from rankmesh.collectives.simulator import Outcome, check
from rankmesh.errors import InternalError


class Content(NamedTuple):
    """A block, and the ranks whose are reduced in it, as bits."""

    block: int
    ranks: int


class Turning(NamedTuple):
    """How plans turn: see the module's text."""

    size: int
    unit: int = 1
    period: int = 1

    def block(self, block: int, by: int) -> int:
        """A block turned. Memory is regions of n·unit blocks."""
        region, at = divmod(block, self.size * self.unit)
        return region * self.size * self.unit + (at + by * self.unit) % (self.size * self.unit)

    def content(self, content: Content | None, by: int) -> Content | None:
        if content is None:
            return None
        ranks = content.ranks << by
        return Content(self.block(content.block, by), (ranks | ranks >> self.size) & ((1 << self.size) - 1))

    def round(self, this: Round, by: int) -> tuple[object, ...]:
        """What a round comes to when it is turned, for comparing: without the order of what goes on at once."""
        return (
            sorted((((to + by) % self.size), self._blocks(spans, by)) for to, spans in this.sends),
            sorted(
                ((source + by) % self.size, self._blocks(spans, by), into.name) for source, spans, into in this.receives
            ),
            [(self._blocks((copy.source,), by), self._blocks((copy.target,), by)) for copy in this.copies],
        )

    def _blocks(self, spans: tuple[Span, ...], by: int) -> list[int]:
        return [self.block(block, by) for span in spans for block in range(*span)]


def check_turning(plan: Callable[[int], Plan], turning: Turning, ranks: Sequence[int]) -> None:
    """That the plans of these ranks are those that stand for them, turned."""
    for rank in ranks:
        first = rank % turning.period
        for mine, theirs in zip(plan(rank), plan(first), strict=True):
            if turning.round(mine, 0) != turning.round(theirs, rank - first):
                raise InternalError(f"The plan of rank {rank} is not that of rank {first}, turned: {mine}, {theirs}.")


def simulate_turning(plan: Callable[[int], Plan], turning: Turning, memory: Sequence[list[Content | None]]) -> Outcome:
    """Run the plans of the first `period` ranks in step with each other, on `memory`. `nbytes` counts blocks."""
    outcome = Outcome(0, [0] * turning.period, [0] * turning.period)
    for rounds in zip(*(plan(rank) for rank in range(turning.period)), strict=True):
        sent: list[dict[int, list[Content | None]]] = []
        for rank, this in enumerate(rounds):
            check(this, rank)
            mine = memory[rank]
            for source, target in this.copies:
                mine[slice(*target)] = mine[slice(*source)]
            sent.append({to: [mine[block] for span in spans for block in range(*span)] for to, spans in this.sends})
            outcome.messages[rank] += len(this.sends)
            outcome.nbytes[rank] += sum(map(len, sent[-1].values()))
        for rank, this in enumerate(rounds):
            _receive(rank, this, turning, sent, memory[rank])
            if len(this.receives) != len(this.sends):
                raise InternalError(f"Rank {rank} sends what nobody receives in that round: {this}.")
        outcome.steps += any(this.sends for this in rounds)
    return outcome


def _receive(
    rank: int,
    this: Round,
    turning: Turning,
    sent: list[dict[int, list[Content | None]]],
    mine: list[Content | None],
) -> None:
    for source, spans, into in this.receives:
        first = source % turning.period
        by = source - first
        came = sent[first].get((rank - by) % turning.size)
        if came is None:
            raise InternalError(f"Rank {rank} waits for rank {source}, which sends it nothing in that round: {this}.")
        places = [block for span in spans for block in range(*span)]
        for place, content in zip(places, came, strict=True):
            arrived = turning.content(content, by)
            mine[place] = arrived if into is Into.PLACE else _reduced(mine[place], arrived)


def _reduced(one: Content | None, other: Content | None) -> Content:
    if one is None or other is None or one.block != other.block:
        raise InternalError(f"Different blocks are reduced: {one} and {other}.")
    if one.ranks & other.ranks:
        raise InternalError(f"A rank's block {one.block} is counted twice.")
    return Content(one.block, one.ranks | other.ranks)

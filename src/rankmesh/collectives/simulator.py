"""The simulator: runs the plans of all ranks against each other in memory, checks the rules of plans, and counts.

Pure: time is counted in steps. A message leaves when its round begins, and is there a step later. The steps of a
world are those of its slowest rank: what a network costs that takes one unit of time per message, however many are
under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rankmesh.collectives.plan import Into, Plan, Round, Span
from rankmesh.errors import InternalError

#: One rank's blocks: arrays of one dimension.
Blocks = list[np.ndarray[Any, Any]]
Reduction = Callable[[Any, Any], Any]


@dataclass
class Outcome:
    """What a run cost: steps of the slowest rank; messages and bytes sent by each."""

    steps: int = 0
    messages: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)


class _Rank:
    def __init__(self, rank: int, plan: Plan, blocks: Blocks) -> None:
        self.rank = rank
        self.blocks = blocks
        self._plan = plan
        self.round: Round | None = None
        self.clock = 0
        self.done = False

    def begin(self) -> Round | None:
        """The next round, its copies made."""
        self.round = next(self._plan, None)
        self.done = self.round is None
        if self.round is not None:
            _check(self.round, self.rank)
            for copy in self.round.copies:
                values = [self.blocks[block].copy() for block in range(*copy.source)]
                for block, value in zip(range(*copy.target), values, strict=True):
                    self.blocks[block] = value
        return self.round


def simulate(plans: Sequence[Plan], blocks: Sequence[Blocks], reduction: Reduction = np.add) -> Outcome:
    """Run `plans[r]` on `blocks[r]`, which end as the plans leave them. Raises InternalError for plans that break the
    rules or wait for each other for ever."""
    ranks = [_Rank(rank, plan, mine) for rank, (plan, mine) in enumerate(zip(plans, blocks, strict=True))]
    outcome = Outcome(0, [0] * len(ranks), [0] * len(ranks))
    wires: dict[tuple[int, int], deque[tuple[int, Blocks]]] = {}
    runnable = deque(ranks)
    waiting: dict[tuple[int, int], _Rank] = {}
    while runnable:
        rank = runnable.popleft()
        while not rank.done:
            if rank.round is None:
                if rank.begin() is not None:
                    for key in _send(rank, wires, outcome):
                        if key in waiting:
                            runnable.append(waiting.pop(key))
                continue
            missing = _receive(rank, wires, reduction)
            if missing is not None:
                waiting[missing, rank.rank] = rank
                break
    if any(not rank.done for rank in ranks) or any(wires.values()):
        raise InternalError("Plans do not fit each other: a rank waits for ever, or a message is never received.")
    outcome.steps = max(rank.clock for rank in ranks)
    return outcome


def _send(
    rank: _Rank, wires: dict[tuple[int, int], deque[tuple[int, Blocks]]], outcome: Outcome
) -> list[tuple[int, int]]:
    assert rank.round is not None
    keys = []
    for to, spans in rank.round.sends:
        payload = [rank.blocks[block] for low, high in spans for block in range(low, high)]
        wires.setdefault((rank.rank, to), deque()).append((rank.clock + 1, payload))
        outcome.messages[rank.rank] += 1
        outcome.nbytes[rank.rank] += sum(block.nbytes for block in payload)
        keys.append((rank.rank, to))
    return keys


def _receive(rank: _Rank, wires: dict[tuple[int, int], deque[tuple[int, Blocks]]], reduction: Reduction) -> int | None:
    """End the round. Or: the rank whose message is missing."""
    assert rank.round is not None
    for source, _, _ in rank.round.receives:
        if not wires.get((source, rank.rank)):
            return source
    end = rank.clock + bool(rank.round.sends)
    for source, spans, into in rank.round.receives:
        arrival, payload = wires[source, rank.rank].popleft()
        end = max(end, arrival)
        places = [block for low, high in spans for block in range(low, high)]
        for block, value in zip(places, payload, strict=True):
            mine = rank.blocks[block]
            if into is Into.PLACE:
                rank.blocks[block] = value
            else:
                rank.blocks[block] = reduction(value, mine) if into is Into.LEFT else reduction(mine, value)
    rank.clock = end
    rank.round = None
    return None


def _check(this: Round, rank: int) -> None:
    sent = [span for send in this.sends for span in send.spans]
    written = [span for receive in this.receives if receive.into is Into.PLACE for span in receive.spans]
    if any(_overlap(one, other) for one in sent for other in written):
        raise InternalError(f"Rank {rank} receives into a block that it sends: {this}.")
    partners = [send.to for send in this.sends] + [receive.source for receive in this.receives]
    if rank in partners:
        raise InternalError(f"Rank {rank} sends to itself: {this}.")
    sources = [receive.source for receive in this.receives]
    if len(sources) != len(set(sources)):
        raise InternalError(f"Rank {rank} receives twice from one rank in a round: {this}.")


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]

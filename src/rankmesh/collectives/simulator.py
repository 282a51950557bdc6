"""The simulator: runs the plans of all ranks against each other in memory, checks the rules of plans, and counts.

Pure: time is counted in steps. A message leaves when its round begins, and is there a step later. The steps of a
world are those of its slowest rank: what a network costs that takes one unit of time per message, however many are
under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from rankmesh.collectives.plan import Copy, Into, Plan, Round, Span
from rankmesh.errors import InternalError

#: One rank's blocks: entries of the first dimension.
Memory = np.ndarray[Any, Any]
Reduction = Callable[[Any, Any], Any]
#: (from, to) → (when it is there, its blocks), in the order of sending.
_Wires = dict[tuple[int, int], deque[tuple[int, Memory]]]


@dataclass
class Outcome:
    """What a run cost: steps of the slowest rank; messages and bytes sent by each; bytes between each two."""

    steps: int = 0
    messages: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    links: dict[tuple[int, int], int] = field(default_factory=dict)


class _Rank:
    def __init__(self, rank: int, plan: Plan, memory: Memory) -> None:
        self.rank = rank
        self.memory = memory
        self._plan = plan
        self.round: Round | None = None
        self.clock = 0
        self.done = False

    def begin(self) -> Round | None:
        """The next round, its copies made."""
        self.round = next(self._plan, None)
        self.done = self.round is None
        if self.round is not None:
            check(self.round, self.rank)
            if self.round.copies:
                sources, targets = _copies(self.round.copies)
                self.memory[targets] = self.memory[sources]
        return self.round


def simulate(plans: Sequence[Plan], memory: Sequence[Memory], reduction: Reduction = np.add) -> Outcome:
    """Run `plans[r]` on `memory[r]`, which ends as the plan leaves it. Raises InternalError for plans that break the
    rules or wait for each other for ever."""
    ranks = [_Rank(rank, plan, mine) for rank, (plan, mine) in enumerate(zip(plans, memory, strict=True))]
    outcome = Outcome(0, [0] * len(ranks), [0] * len(ranks))
    wires: _Wires = {}
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


def _send(rank: _Rank, wires: _Wires, outcome: Outcome) -> list[tuple[int, int]]:
    assert rank.round is not None
    keys = []
    for to, spans in rank.round.sends:
        payload = rank.memory[blocks(spans)].copy()
        wires.setdefault((rank.rank, to), deque()).append((rank.clock + 1, payload))
        outcome.messages[rank.rank] += 1
        outcome.nbytes[rank.rank] += payload.nbytes
        outcome.links[rank.rank, to] = outcome.links.get((rank.rank, to), 0) + payload.nbytes
        keys.append((rank.rank, to))
    return keys


def _receive(rank: _Rank, wires: _Wires, reduction: Reduction) -> int | None:
    """End the round. Or: the rank whose message is missing."""
    assert rank.round is not None
    for source, _, _ in rank.round.receives:
        if not wires.get((source, rank.rank)):
            return source
    end = rank.clock + bool(rank.round.sends)
    for source, spans, into in rank.round.receives:
        arrival, payload = wires[source, rank.rank].popleft()
        end = max(end, arrival)
        places = blocks(spans)
        mine = rank.memory[places]
        if len(mine) != len(payload):
            raise InternalError(
                f"Rank {rank.rank} expects {len(mine)} blocks of rank {source}, which sends {len(payload)}."
            )
        if into is Into.PLACE:
            rank.memory[places] = payload
        else:
            rank.memory[places] = reduction(payload, mine) if into is Into.LEFT else reduction(mine, payload)
    rank.clock = end
    rank.round = None
    return None


@lru_cache(maxsize=4096)
def blocks(spans: tuple[Span, ...]) -> Any:
    """The blocks of spans in their order, as an index."""
    if len(spans) == 1:
        return slice(*spans[0])
    return np.array([block for low, high in spans for block in range(low, high)], np.intp)


@lru_cache(maxsize=64)
def _copies(copies: tuple[Copy, ...]) -> tuple[Any, Any]:
    return blocks(tuple(copy.source for copy in copies)), blocks(tuple(copy.target for copy in copies))


def check(this: Round, rank: int) -> None:
    """The rules of a round that can be seen from one rank."""
    sends, receives, _ = this
    sources = {receive.source for receive in receives}
    if len(sources) != len(receives):
        raise InternalError(f"Rank {rank} receives twice from one rank in a round: {this}.")
    if rank in sources or any(send.to == rank for send in sends):
        raise InternalError(f"Rank {rank} sends to itself: {this}.")
    sent = {span for send in sends for span in send.spans}
    written = [span for receive in receives if receive.into is Into.PLACE for span in receive.spans]
    if sent and written and _overlap(sent, written):
        raise InternalError(f"Rank {rank} receives into a block that it sends: {this}.")


def _overlap(some: set[Span], others: list[Span]) -> bool:
    if max(high for _, high in some) <= min(others)[0] or max(high for _, high in others) <= min(some)[0]:
        return False
    ends = sorted(  # a sweep over the ends of both: (block, whether a span begins or ends there, whose)
        [(at, step, True) for span in some for at, step in zip(span, (1, -1), strict=True)]
        + [(at, step, False) for span in others for at, step in zip(span, (1, -1), strict=True)]
    )
    within = [0, 0]
    for _, step, which in ends:
        within[which] += step
        if all(within):
            return True
    return False

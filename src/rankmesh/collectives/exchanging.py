"""Neighbour exchange: each rank sends to some, and receives from some, all at once.

Idea. The pairs are the ranks' own business: a halo of a grid (grid.py), the edges of a graph. One round: whatever a
rank sends and receives is under way at the same time, so no order of calls can deadlock.

Cost: a message for each edge, one round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rankmesh.collectives.arguments import flat_input, flat_output, operand
from rankmesh.collectives.plan import Copy, Receive, Round, Send, Span
from rankmesh.collectives.space import Part, Space
from rankmesh.errors import UsageError

if TYPE_CHECKING:
    from rankmesh.collectives.starting import Running


def round_of(rank: int, sends: list[int], receives: list[int]) -> Round:
    """Over a block for each rank in `sends`, then one for each in `receives`."""
    out: dict[int, Span] = {to: (at, at + 1) for at, to in enumerate(sends)}
    into: dict[int, Span] = {source: (at, at + 1) for at, source in enumerate(receives, len(sends))}
    return Round(
        tuple(Send(to, (span,)) for to, span in out.items() if to != rank),
        tuple(Receive(source, (span,)) for source, span in into.items() if source != rank),
        (Copy(out[rank], into[rank]),) if rank in out and rank in into else (),
    )


def laid_out(group: Running, sends: Mapping[int, Any], receives: Mapping[int, Any]) -> tuple[Round, Space]:
    """Checked, and as blocks."""
    for rank in (*sends, *receives):
        if not 0 <= rank < group.size:
            raise UsageError(f"There is no rank {rank} in a group of {group.size}. Correct sends or receives.")
    given = {to: operand(array) for to, array in sends.items()}
    wanted = {source: operand(array) for source, array in receives.items()}
    own = group.rank
    if (given[own].what if own in given else None) != (wanted[own].what if own in wanted else None):
        raise UsageError(f"Rank {own} sends to itself what it does not receive from itself. Correct sends or receives.")
    targets = [flat_output(one.array, "receives") for one in wanted.values()]
    sources = [flat_input(one.array) for one in given.values()]
    sources = [flat.copy() if _touches(flat, targets) else flat for flat in sources]  # else it could change on the way
    space = Space(*(Part(flat, [flat.size]) for flat in (*sources, *targets)))
    return round_of(own, list(sends), list(receives)), space


def _touches(flat: Any, targets: list[Any]) -> bool:
    return any(np.may_share_memory(flat, target) for target in targets)

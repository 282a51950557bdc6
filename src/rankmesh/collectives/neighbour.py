"""Neighbour exchange: all_gather in which a rank talks with two neighbours only, in half as many rounds as the ring.

Idea. Neighbours exchange their blocks, even ranks with the next and odd ones with the one before; then each turns to
its other neighbour and exchanges the two blocks that it got last, and so on in turn.

Cost, for b bytes from each rank: n/2 rounds, b(n-1) bytes sent by each rank, the least. For blocks in between, where
rounds count and connections to many ranks do not pay. Worlds of an odd size have no pairs: there it is the ring.

Blocks are moved, not reduced: what arrives is what was given, bit by bit.
"""

from __future__ import annotations

from rankmesh.collectives import ring
from rankmesh.collectives.plan import Plan, Receive, Round, Send


def all_gather(rank: int, size: int) -> Plan:
    """Block r of n is rank r's."""
    if size % 2:
        yield from ring.all_gather(rank, size)
        return
    towards = 1 if rank % 2 == 0 else -1  # the first partner's side
    partner = (rank + towards) % size
    yield Round((Send(partner, ((rank, rank + 1),)),), (Receive(partner, ((partner, partner + 1),)),))
    last = rank - rank % 2  # the first of the two blocks that are sent next
    pairs = [last, last]  # what came last from the partner on either side: first, other
    for step in range(1, size // 2):
        side = step % 2
        partner = (rank + (-towards if side else towards)) % size
        pairs[side] = (pairs[side] + (-2 if side else 2) * towards) % size
        yield Round(
            (Send(partner, ((last, last + 2),)),),
            (Receive(partner, ((pairs[side], pairs[side] + 2),)),),
        )
        last = pairs[side]

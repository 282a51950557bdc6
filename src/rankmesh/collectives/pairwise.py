"""Pairwise exchange: in every round each rank sends to one and receives from one, straight to whom it concerns.

Idea. In round k rank r sends to r+k and receives from r-k: no rank is anybody's target twice in a round, and nothing
is passed on.

Cost, for b bytes per block: n-1 rounds, b(n-1) bytes sent by each rank, the least. For large blocks, and for blocks of
different sizes. all_gather and reduce_scatter: where a slow rank must hold up nobody but whom it sends to.

reduce_scatter: the owner of a block reduces it, its own first, then those of the ranks before it, backwards: a fixed
order, and one rank's result.
"""

from __future__ import annotations

from rankmesh.collectives.plan import Copy, Into, Plan, Receive, Round, Send


def all_to_all(rank: int, size: int) -> Plan:
    """Over 2n blocks: n to send, then n to receive."""
    yield Round(copies=(Copy((rank, rank + 1), (size + rank, size + rank + 1)),))
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        yield Round((Send(to, ((to, to + 1),)),), (Receive(source, ((size + source, size + source + 1),)),))


def all_gather(rank: int, size: int) -> Plan:
    """Block r of n is rank r's."""
    mine = ((rank, rank + 1),)
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        yield Round((Send(to, mine),), (Receive(source, ((source, source + 1),)),))


def reduce_scatter(rank: int, size: int) -> Plan:
    """In block r of n: rank r's result. The other blocks are left as they are."""
    mine = ((rank, rank + 1),)
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        yield Round((Send(to, ((to, to + 1),)),), (Receive(source, mine, Into.RIGHT),))

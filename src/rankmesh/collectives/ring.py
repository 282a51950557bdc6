"""Ring: every rank sends to the next and receives from the one before, so each link carries the same at any time.

Idea. There is a block per rank. In n-1 rounds each block travels once round the ring and is reduced at every stop: at
the end each rank has one block complete (reduce_scatter). In n-1 more rounds the complete blocks travel round again
(all_gather). The two together are all_reduce.

Cost, for B bytes in all and n ranks: reduce_scatter and all_gather n-1 rounds and B(n-1)/n bytes sent by each rank,
all_reduce twice that: no algorithm sends less, but the rounds grow with n. For large arrays.

A block is reduced by one rank only, in the order of the ring, beginning after its owner: bit-identical on all ranks.
"""

from __future__ import annotations

from rankmesh.collectives.plan import Into, Plan, Receive, Round, Send


def reduce_scatter(rank: int, size: int) -> Plan:
    """In block r of n: rank r's result. The other blocks are spent."""
    after, before = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        out, into = (rank - step - 1) % size, (rank - step - 2) % size
        yield Round((Send(after, ((out, out + 1),)),), (Receive(before, ((into, into + 1),), Into.LEFT),))


def all_gather(rank: int, size: int) -> Plan:
    """Block r of n is rank r's."""
    after, before = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        out, into = (rank - step) % size, (rank - step - 1) % size
        yield Round((Send(after, ((out, out + 1),)),), (Receive(before, ((into, into + 1),)),))


def all_reduce(rank: int, size: int) -> Plan:
    """Over n blocks."""
    yield from reduce_scatter(rank, size)
    yield from all_gather(rank, size)

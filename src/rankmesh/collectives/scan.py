"""Scans by doubling: the sum over all ranks up to one's own.

Idea. In round k each rank sends what it has to the rank 2^k above, and adds what comes from 2^k below on the left: it
then has the sum of the 2^(k+1) ranks up to itself. exscan first hands every input one rank up, and scans from rank 1
on.

Cost, for B bytes: ceil(log2(n)) rounds and as many times B sent by each rank; exscan one round more.

The order of ranks is kept, for functions that do not commute too, and what is added to what depends on n alone: the
same bits in every run.
"""

from __future__ import annotations

from rankmesh.collectives.plan import Into, Plan, Receive, Round, Send, Span


def _doubling(rank: int, first: int, size: int, block: Span) -> Plan:
    distance = 1
    while first + distance < size:
        above, below = rank + distance, rank - distance
        sends = (Send(above, (block,)),) if above < size else ()
        receives = (Receive(below, (block,), Into.LEFT),) if below >= first else ()
        if sends or receives:
            yield Round(sends, receives)
        distance *= 2


def scan(rank: int, size: int) -> Plan:
    """Over one block."""
    yield from _doubling(rank, 0, size, (0, 1))


def exscan(rank: int, size: int) -> Plan:
    """Over two blocks: the input, then the result, which rank 0 does not have."""
    sends = (Send(rank + 1, ((0, 1),)),) if rank + 1 < size else ()
    receives = (Receive(rank - 1, ((1, 2),)),) if rank else ()
    if sends or receives:
        yield Round(sends, receives)
    if rank:
        yield from _doubling(rank, 1, size, (1, 2))

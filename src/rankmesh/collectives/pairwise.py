"""Pairwise exchange: all_to_all where in every round each rank sends to one and receives from one.

Idea. In round k rank r sends to r+k and receives from r-k: no rank is anybody's target twice in a round.

Cost, for b bytes from each rank to each other: n-1 rounds, b(n-1) bytes sent by each rank, the least. For large
blocks, and for blocks of different sizes.
"""

from __future__ import annotations

from rankmesh.collectives.plan import Copy, Plan, Receive, Round, Send


def all_to_all(rank: int, size: int) -> Plan:
    """Over 2n blocks: n to send, then n to receive."""
    yield Round(copies=(Copy((rank, rank + 1), (size + rank, size + rank + 1)),))
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        yield Round((Send(to, ((to, to + 1),)),), (Receive(source, ((size + source, size + source + 1),)),))

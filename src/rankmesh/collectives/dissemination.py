"""Dissemination: a barrier in which every rank hears, directly or not, of every other.

Idea. In round k rank r tells r + 2^k that it has come, and all it was told before, by a message without content.

Cost: ceil(log2(n)) rounds, as many empty messages from each rank; the fewest rounds there can be.
"""

from __future__ import annotations

from rankmesh.collectives.plan import Plan, Receive, Round, Send


def barrier(rank: int, size: int) -> Plan:
    """Over no blocks."""
    distance = 1
    while distance < size:
        yield Round((Send((rank + distance) % size, ()),), (Receive((rank - distance) % size, ()),))
        distance *= 2

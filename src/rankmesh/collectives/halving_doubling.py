"""Recursive halving and doubling (Rabenseifner): all_reduce with few rounds and few bytes.

Idea. Of p blocks, partners at half the world's distance exchange the half that the other is to reduce, then a quarter
at a quarter of the distance, until each of p ranks has one block complete; then the same way back, gathering. Where n
is no power of two, the ranks beyond the largest power p fold theirs into a partner first, and get the result from it
at the end.

Cost, for B bytes: 2·log2(p) rounds and 2B(p-1)/p bytes sent by each rank of the p; where n > p, two rounds and B
bytes more. For arrays in between, and large ones in worlds of a power of two.

A block is reduced along a tree that depends on n alone, the lower rank's on the left, and by one rank in the last
round: bit-identical on all ranks.
"""

from __future__ import annotations

from rankmesh.collectives.plan import Into, Plan, Receive, Round, Send, fold, largest_power
from rankmesh.collectives.recursive_doubling import folded, unfolded


def blocks(size: int) -> int:
    return largest_power(size)


def all_reduce(rank: int, size: int) -> Plan:
    """Over p blocks, p the largest power of two up to n."""
    number, power, partner = folded(rank, size)
    whole = ((0, power),)
    if number < 0 and partner is not None:
        yield Round(sends=(Send(partner, whole),))
        yield Round(receives=(Receive(partner, whole),))
        return
    if partner is not None:
        yield Round(receives=(Receive(partner, whole, Into.RIGHT),))
    low, high = 0, power
    halvings: list[tuple[int, tuple[int, int], tuple[int, int]]] = []
    while high - low > 1:
        middle = (low + high) // 2
        lower, upper = (low, middle), (middle, high)
        mine, theirs = (lower, upper) if number < middle else (upper, lower)
        other = unfolded(number ^ (middle - low), size)
        yield Round((Send(other, (theirs,)),), (Receive(other, (mine,), fold(other, rank)),))
        halvings.append((other, mine, theirs))
        low, high = mine
    for other, mine, theirs in reversed(halvings):
        yield Round((Send(other, (mine,)),), (Receive(other, (theirs,)),))
    if partner is not None:
        yield Round(sends=(Send(partner, whole),))

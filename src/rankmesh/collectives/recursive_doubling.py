"""Recursive doubling: in each round ranks exchange all they have with a partner at twice the distance of the last.

Idea. After k rounds each rank has the sum over its group of 2^k. Where n is no power of two, the ranks beyond the
largest power p fold theirs into a partner first, and get the result from it at the end.

Cost, for B bytes: log2(p) rounds and B·log2(p) bytes sent by each rank; where n > p, two rounds more. The fewest rounds
there can be, so for small arrays.

Every rank reduces the same pairs, the lower rank's on the left: bit-identical on all ranks, also for functions that
do not commute.
"""

from __future__ import annotations

from rankmesh.collectives.plan import Into, Plan, Receive, Round, Send, fold, largest_power

_ALL = ((0, 1),)


def folded(rank: int, size: int) -> tuple[int, int, int | None]:
    """(number among the p that go on, or -1; p; partner in the fold). The first 2(n-p) ranks fold in pairs of
    neighbours, so that the order of ranks is kept; the even one of each pair goes on."""
    power = largest_power(size)
    extra = size - power
    if rank >= 2 * extra:
        return rank - extra, power, None
    return (rank // 2, power, rank + 1) if rank % 2 == 0 else (-1, power, rank - 1)


def unfolded(number: int, size: int) -> int:
    """The rank that goes on under this number."""
    extra = size - largest_power(size)
    return 2 * number if number < extra else number + extra


def all_reduce(rank: int, size: int) -> Plan:
    """Over one block."""
    number, power, partner = folded(rank, size)
    if number < 0 and partner is not None:
        yield Round(sends=(Send(partner, _ALL),))
        yield Round(receives=(Receive(partner, _ALL),))
        return
    if partner is not None:
        yield Round(receives=(Receive(partner, _ALL, Into.RIGHT),))
    distance = 1
    while distance < power:
        other = unfolded(number ^ distance, size)
        yield Round((Send(other, _ALL),), (Receive(other, _ALL, fold(other, rank)),))
        distance *= 2
    if partner is not None:
        yield Round(sends=(Send(partner, _ALL),))

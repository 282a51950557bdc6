"""Recursive halving and doubling (Rabenseifner): few rounds and few bytes.

Idea. Of the blocks, partners at half the world's distance exchange the half that the other is to reduce, then a
quarter at a quarter of the distance, until each rank has its own complete: reduce_scatter by halving. The same way
back, what each has is gathered: all_gather by doubling. The two together are all_reduce. Where n is no power of two,
the ranks beyond the largest power p fold theirs into a neighbour first, which takes part for both, and get their
result from it at the end.

Cost, for B bytes in all: each half log2(p) rounds and B(n-1)/n bytes sent by each rank; where n > p, two rounds and
at most B bytes more in each. all_reduce over p blocks: 2·log2(p) rounds and 2B(p-1)/p bytes; where n > p, two rounds
and B bytes more. For arrays in between, and large ones in worlds of a power of two.

A block is reduced along a tree that depends on n alone, the lower rank's on the left, and by one rank in the last
round: bit-identical on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from rankmesh.collectives.plan import Into, Plan, Receive, Round, Send, Span, fold, largest_power
from rankmesh.collectives.recursive_doubling import folded, unfolded

#: The first block of a number among the p that take part: those of a number are contiguous.
First = Callable[[int], int]


def blocks(size: int) -> int:
    """Blocks of all_reduce: one for each of those that take part."""
    return largest_power(size)


def _of_ranks(size: int) -> First:
    """Block r is rank r's: a number that takes part for two has both of theirs."""
    extra = size - largest_power(size)
    return lambda number: number + min(number, extra)


def _exchanges(number: int, size: int, first: First) -> list[tuple[int, Span, Span]]:
    """(partner, the blocks that are this side's from then on, the partner's), from the farthest partner to the next."""
    found = []
    low, high = 0, largest_power(size)
    while high - low > 1:
        middle = (low + high) // 2
        lower, upper = (first(low), first(middle)), (first(middle), first(high))
        is_lower = number < middle
        mine, theirs = (lower, upper) if is_lower else (upper, lower)
        found.append((unfolded(number ^ (middle - low), size), mine, theirs))
        low, high = (low, middle) if is_lower else (middle, high)
    return found


def _halving(rank: int, number: int, size: int, first: First) -> Plan:
    for other, mine, theirs in _exchanges(number, size, first):
        yield Round((Send(other, (theirs,)),), (Receive(other, (mine,), fold(other, rank)),))


def _doubling(number: int, size: int, first: First) -> Plan:
    for other, mine, theirs in reversed(_exchanges(number, size, first)):
        yield Round((Send(other, (mine,)),), (Receive(other, (theirs,)),))


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
    yield from _halving(rank, number, size, lambda number: number)
    yield from _doubling(number, size, lambda number: number)
    if partner is not None:
        yield Round(sends=(Send(partner, whole),))


def reduce_scatter(rank: int, size: int) -> Plan:
    """In block r of n: rank r's result. The other blocks are spent."""
    number, _, partner = folded(rank, size)
    if number < 0 and partner is not None:
        yield Round(sends=(Send(partner, ((0, size),)),))
        yield Round(receives=(Receive(partner, ((rank, rank + 1),)),))
        return
    if partner is not None:
        yield Round(receives=(Receive(partner, ((0, size),), Into.RIGHT),))
    yield from _halving(rank, number, size, _of_ranks(size))
    if partner is not None:
        yield Round(sends=(Send(partner, ((partner, partner + 1),)),))


def all_gather(rank: int, size: int) -> Plan:
    """Block r of n is rank r's."""
    number, _, partner = folded(rank, size)
    if number < 0 and partner is not None:
        yield Round(sends=(Send(partner, ((rank, rank + 1),)),))
        yield Round(receives=(Receive(partner, ((0, size),)),))
        return
    if partner is not None:
        yield Round(receives=(Receive(partner, ((partner, partner + 1),)),))
    yield from _doubling(number, size, _of_ranks(size))
    if partner is not None:
        yield Round(sends=(Send(partner, ((0, size),)),))

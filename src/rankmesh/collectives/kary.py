"""k-ary trees: one rank to all or all to one, in segments that follow each other down or up the tree.

Idea. Ranks are numbered from the root on; the children of number v are kv + 1 … kv + k. While a rank sends a segment
on, the next one is on its way to it: the tree is filled once, and then every link carries at any time. k = 1 is a
chain.

Cost, for B bytes in S segments and a tree of depth d (n-1 for a chain, about log_k(n) else): d + S - 1 rounds; a rank
sends up to kB in broadcast, B in reduce. A chain sends least, for very large arrays and few ranks; k = 2 for large
ones in large worlds; k = 4 for small ones, where it is one segment and few levels.

reduce takes children in the order of their numbers, each on the right of what is there: the same bits for the same n,
k and root, whatever the segments.
"""

from __future__ import annotations

from typing import Final

from rankmesh.collectives.plan import Into, Plan, Receive, Round, Send, Span
from rankmesh.config import KIB

#: Bytes of a segment.
SEGMENT: Final = 256 * KIB
#: Segments at most: they bound the length of a plan.
MOST: Final = 64


def segments(nbytes: int, size: int) -> int:
    return min(max(1, nbytes // SEGMENT), MOST)


def _tree(rank: int, size: int, root: int, arity: int) -> tuple[int | None, list[int]]:
    """(parent, children) as ranks."""
    number = (rank - root) % size
    parent = ((number - 1) // arity + root) % size if number else None
    last = min(arity * number + arity, size - 1)
    return parent, [(child + root) % size for child in range(arity * number + 1, last + 1)]


def broadcast(rank: int, size: int, root: int, arity: int, segments: int) -> Plan:
    """Over S blocks."""
    parent, children = _tree(rank, size, root, arity)

    def down(segment: int) -> tuple[Send, ...]:
        return tuple(Send(child, _only(segment)) for child in children)

    if parent is None:
        for segment in range(segments if children else 0):
            yield Round(down(segment))
        return
    for segment in range(segments):  # what came last goes on while the next comes
        yield Round(down(segment - 1) if segment else (), (Receive(parent, _only(segment)),))
    if children:
        yield Round(down(segments - 1))


def reduce(rank: int, size: int, root: int, arity: int, segments: int) -> Plan:
    """Over S blocks, which are spent on all ranks but the root."""
    parent, children = _tree(rank, size, root, arity)

    def up(segment: int) -> tuple[Send, ...]:
        return () if parent is None else (Send(parent, _only(segment)),)

    if not children:
        for segment in range(segments if parent is not None else 0):
            yield Round(up(segment))
        return
    for segment in range(segments):
        receives = tuple(Receive(child, _only(segment), Into.RIGHT) for child in children)
        yield Round(up(segment - 1) if segment else (), receives)
    if parent is not None:
        yield Round(up(segments - 1))


def _only(block: int) -> tuple[Span, ...]:
    return ((block, block + 1),)

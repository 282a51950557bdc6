"""Binomial trees: one rank to all or all to one, in as many rounds as the world has bits.

Idea. Ranks are numbered from the root on. The parent of number v is v without its lowest bit; the subtree of v is the
numbers v … v + lowbit(v) - 1. Down the tree the far children come first (their subtrees are the deepest), up the tree
the near.

Cost, for B bytes to or from each rank: ceil(log2(n)) rounds. broadcast sends B over each edge, at most
B·ceil(log2(n)) from the root; reduce the same upwards; gather and scatter carry whole subtrees, B(n-1) at the root in
all: the same as direct, in fewer messages. For small arrays, and large worlds.

reduce takes children in the order of the tree, a child's on the right: the same bits for the same n and root. The
order of ranks is kept only for root 0.
"""

from __future__ import annotations

from rankmesh.collectives.plan import Into, Plan, Receive, Round, Send, Span

_ALL = ((0, 1),)


def _tree(number: int, size: int) -> tuple[int | None, list[tuple[int, int]]]:
    """(parent's number, [(child's number, first number beyond its subtree)], near children first)."""
    children = []
    bit = 1
    while number + bit < size and not number & bit:
        children.append((number + bit, min(number + 2 * bit, size)))
        bit *= 2
    return (number & (number - 1) if number else None), children


def _blocks(low: int, high: int, root: int, size: int) -> tuple[Span, ...]:
    """The blocks of the ranks with numbers low … high - 1: they may wrap round the end."""
    low, high = low + root, high + root
    if high <= size:
        return ((low, high),)
    if low >= size:
        return ((low - size, high - size),)
    return ((low, size), (0, high - size))


def broadcast(rank: int, size: int, root: int) -> Plan:
    """Over one block."""
    parent, children = _tree((rank - root) % size, size)
    if parent is not None:
        yield Round(receives=(Receive((parent + root) % size, _ALL),))
    for child, _ in reversed(children):
        yield Round(sends=(Send((child + root) % size, _ALL),))


def reduce(rank: int, size: int, root: int) -> Plan:
    """Over one block, which is spent on all ranks but the root."""
    parent, children = _tree((rank - root) % size, size)
    for child, _ in children:
        yield Round(receives=(Receive((child + root) % size, _ALL, Into.RIGHT),))
    if parent is not None:
        yield Round(sends=(Send((parent + root) % size, _ALL),))


def gather(rank: int, size: int, root: int) -> Plan:
    """Block r of n is rank r's. Ranks between use the blocks of their subtree."""
    number = (rank - root) % size
    parent, children = _tree(number, size)
    for child, end in children:
        yield Round(receives=(Receive((child + root) % size, _blocks(child, end, root, size)),))
    if parent is not None:
        end = children[-1][1] if children else number + 1
        yield Round(sends=(Send((parent + root) % size, _blocks(number, end, root, size)),))


def scatter(rank: int, size: int, root: int) -> Plan:
    """Block r of n is for rank r. Ranks between use the blocks of their subtree."""
    number = (rank - root) % size
    parent, children = _tree(number, size)
    if parent is not None:
        end = children[-1][1] if children else number + 1
        yield Round(receives=(Receive((parent + root) % size, _blocks(number, end, root, size)),))
    for child, end in reversed(children):
        yield Round(sends=(Send((child + root) % size, _blocks(child, end, root, size)),))

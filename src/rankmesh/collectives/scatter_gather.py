"""Scatter and gather (van de Geijn): broadcast and reduce of large arrays, to which every rank lends its link.

Idea. broadcast scatters a block to each rank, and all gather them; reduce scatters the reduction of the blocks over
the ranks, and gathers them at the root. The root, through which a tree sends the whole array log2(n) times, sends or
receives it once.

Cost, for B bytes and n ranks: what its two parts take, so B(n-1)/n bytes each. Scattering and gathering by binomial
trees take ceil(log2(n)) rounds. The other part is by the ring (n-1 rounds, neighbours only: for the largest arrays)
or by doubling and halving (log2(p) rounds, two more where n is no power of two: for large worlds). The root of a
broadcast is sent nothing: it has all, in memory that it may not write to.

reduce is as deterministic as ring.py and halving_doubling.py are: a block is reduced by one rank only, in an order
that depends on n alone: the same bits for every root.
"""

from __future__ import annotations

from rankmesh.collectives import binomial, halving_doubling, ring
from rankmesh.collectives.plan import Plan, Round


def _but_to(root: int, rank: int, plan: Plan) -> Plan:
    for sends, receives, _ in plan:
        sends = tuple(send for send in sends if send.to != root)
        if rank == root:
            receives = ()
        if sends or receives:
            yield Round(sends, receives)


def broadcast_by_ring(rank: int, size: int, root: int) -> Plan:
    """Over n blocks."""
    yield from binomial.scatter(rank, size, root)
    yield from _but_to(root, rank, ring.all_gather(rank, size))


def broadcast_by_doubling(rank: int, size: int, root: int) -> Plan:
    """Over n blocks."""
    yield from binomial.scatter(rank, size, root)
    yield from _but_to(root, rank, halving_doubling.all_gather(rank, size))


def reduce_by_ring(rank: int, size: int, root: int) -> Plan:
    """Over n blocks, which are spent on all ranks but the root."""
    yield from ring.reduce_scatter(rank, size)
    yield from binomial.gather(rank, size, root)


def reduce_by_halving(rank: int, size: int, root: int) -> Plan:
    """Over n blocks, which are spent on all ranks but the root."""
    yield from halving_doubling.reduce_scatter(rank, size)
    yield from binomial.gather(rank, size, root)

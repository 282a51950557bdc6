"""Direct: everybody sends what another needs straight to it, in one round.

Idea. No rank passes on what is another's, so nothing waits for a third rank.

Cost, for b bytes per block: one round; n-1 messages at whoever has all the blocks. all_reduce takes two rounds, one
towards a block's owner and one back. For few ranks, for blocks of very different sizes, and where a link is not the
bottleneck.

Where it reduces, the owner does so in the order of ranks, its own first: bit-identical on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from rankmesh.collectives.plan import Copy, Into, Plan, Receive, Round, Send

_ALL = ((0, 1),)


def _others(rank: int, size: int) -> Iterator[int]:
    """All other ranks, from the next on: not all begin with the same."""
    return ((rank + distance) % size for distance in range(1, size))


def broadcast(rank: int, size: int, root: int) -> Plan:
    """Over one block."""
    if rank == root:
        yield Round(sends=tuple(Send(other, _ALL) for other in _others(rank, size)))
    else:
        yield Round(receives=(Receive(root, _ALL),))


def reduce(rank: int, size: int, root: int) -> Plan:
    """Over one block."""
    if rank == root:
        yield Round(receives=tuple(Receive(other, _ALL, Into.RIGHT) for other in range(size) if other != rank))
    else:
        yield Round(sends=(Send(root, _ALL),))


def gather(rank: int, size: int, root: int) -> Plan:
    """Block r of n is rank r's."""
    if rank == root:
        yield Round(receives=tuple(Receive(other, ((other, other + 1),)) for other in _others(rank, size)))
    else:
        yield Round(sends=(Send(root, ((rank, rank + 1),)),))


def scatter(rank: int, size: int, root: int) -> Plan:
    """Block r of n is for rank r."""
    if rank == root:
        yield Round(sends=tuple(Send(other, ((other, other + 1),)) for other in _others(rank, size)))
    else:
        yield Round(receives=(Receive(root, ((rank, rank + 1),)),))


def all_gather(rank: int, size: int) -> Plan:
    """Block r of n is rank r's."""
    mine = ((rank, rank + 1),)
    yield Round(
        tuple(Send(other, mine) for other in _others(rank, size)),
        tuple(Receive(other, ((other, other + 1),)) for other in _others(rank, size)),
    )


def reduce_scatter(rank: int, size: int) -> Plan:
    """In block r of n: rank r's result. The other blocks are left as they are."""
    mine = ((rank, rank + 1),)
    yield Round(
        tuple(Send(other, ((other, other + 1),)) for other in _others(rank, size)),
        tuple(Receive(other, mine, Into.RIGHT) for other in range(size) if other != rank),
    )


def all_reduce(rank: int, size: int) -> Plan:
    """Over n blocks."""
    yield from reduce_scatter(rank, size)
    yield from all_gather(rank, size)


def all_to_all(rank: int, size: int) -> Plan:
    """Over 2n blocks: n to send, then n to receive."""
    yield Round(
        tuple(Send(other, ((other, other + 1),)) for other in _others(rank, size)),
        tuple(Receive(other, ((size + other, size + other + 1),)) for other in _others(rank, size)),
        (Copy((rank, rank + 1), (size + rank, size + rank + 1)),),
    )

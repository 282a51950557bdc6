"""Bruck: all_gather and all_to_all in as many rounds as the world has bits, for any world.

Idea of all_gather. In round k each rank has the blocks of the 2^k ranks from itself on, and sends them 2^k ranks
back. Idea of all_to_all. Blocks are numbered by how far they have to go. In round k those with bit k set go 2^k ranks
on, all in one message. n blocks are the input, n the output; the output serves as working space, and n more to turn
it round.

Cost, for b bytes from each rank to each other: ceil(log2(n)) rounds. all_gather sends b(n-1) from each rank, no more
than any other; all_to_all sends about b·n/2 in each round, which is log2(n)/2 times the least. For small blocks.

Blocks are moved, not reduced: what arrives is what was given, bit by bit.
"""

from __future__ import annotations

from functools import lru_cache

from rankmesh.collectives.plan import Copy, Plan, Receive, Round, Send, Span, spans


def _around(first: int, count: int, size: int) -> tuple[Span, ...]:
    """`count` blocks from `first` on, which may wrap round the end."""
    return spans([(first + i) % size for i in range(count)])


def all_gather(rank: int, size: int) -> Plan:
    """Block r of n is rank r's."""
    have = 1
    while have < size:
        count = min(have, size - have)
        back, ahead = (rank - have) % size, (rank + have) % size
        yield Round((Send(back, _around(rank, count, size)),), (Receive(ahead, _around(ahead, count, size)),))
        have *= 2


@lru_cache(maxsize=1024)
def _moving(size: int, distance: int, first: int) -> tuple[Span, ...]:
    """Blocks that go in a round, the same on all ranks: `first` is where those of distance 0 are."""
    return spans([first + far for far in range(size) if far & distance])


def all_to_all(rank: int, size: int) -> Plan:
    """Over 3n blocks of one size: n to send, n to receive, n to work in."""
    out, work = size, 2 * size
    beyond = work + size - rank  # where the blocks of the first ranks go
    yield Round(copies=(Copy((rank, size), (work, beyond)), Copy((0, rank), (beyond, work + size))))
    distance = 1
    while distance < size:
        sent, received = _moving(size, distance, work), _moving(size, distance, out)
        # received into the output, which is free until the end, since what is being sent must not be written to
        yield Round((Send((rank + distance) % size, sent),), (Receive((rank - distance) % size, received),))
        yield Round(copies=tuple(map(Copy, received, sent)))
        distance *= 2
    turned = ((work + far, out + (rank - far) % size) for far in range(size))
    yield Round(copies=tuple(Copy((source, source + 1), (target, target + 1)) for source, target in turned))

"""Bruck: all_gather and all_to_all in as many rounds as the world has bits, for any world.

Idea of all_gather. In round k each rank has the blocks of the 2^k ranks from itself on, and sends them 2^k ranks
back. Idea of all_to_all. Blocks are numbered by how far they have to go. In round k those with bit k set go 2^k ranks
on, all in one message. n blocks are the input, n the output; the output serves as working space, and n more to turn
it round.

Cost, for b bytes from each rank to each other: ceil(log2(n)) rounds. all_gather sends b(n-1) from each rank, no more
than any other; all_to_all sends about b·n/2 in each round, which is log2(n)/2 times the least. For small blocks.
"""

from __future__ import annotations

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


def all_to_all(rank: int, size: int) -> Plan:
    """Over 3n blocks of one size: n to send, n to receive, n to work in."""
    out, work = size, 2 * size

    def copies(pairs: list[tuple[int, int]]) -> tuple[Copy, ...]:
        return tuple(Copy((source, source + 1), (target, target + 1)) for source, target in pairs)

    yield Round(copies=copies([((rank + far) % size, work + far) for far in range(size)]))
    distance = 1
    while distance < size:
        moving = [far for far in range(size) if far & distance]
        send = Send((rank + distance) % size, spans([work + far for far in moving]))
        # received into the output, which is free until the end, since what is being sent must not be written to
        receive = Receive((rank - distance) % size, spans([out + far for far in moving]))
        yield Round((send,), (receive,))
        yield Round(copies=copies([(out + far, work + far) for far in moving]))
        distance *= 2
    yield Round(copies=copies([(work + far, out + (rank - far) % size) for far in range(size)]))

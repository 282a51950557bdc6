"""Pipelined ring: the ring, its blocks cut into segments, so that a rank reduces one while the next is under way.

Idea. As in ring.py, but a block travels in S messages, a round for each. What a round reduces is not what the next
one sends or receives, so the next one can begin first (rule 3 of plan.py): links do not rest while ranks compute.

Cost, for B bytes and n ranks: 2S(n-1) rounds and 2B(n-1)/n bytes sent by each rank, in messages of B/(nS). Against
the ring it takes S times as many messages, and hides the time of reducing: for large arrays, where links take less of
a processor than reducing does. (On one host, where every byte is copied by the same cores, it is no faster.)

A block is reduced by one rank only, in the order of the ring, beginning after its owner: bit-identical on all ranks.
"""

from __future__ import annotations

from typing import Final

from rankmesh.collectives import ring
from rankmesh.collectives.plan import Plan, Receive, Round, Send, Span
from rankmesh.config import MIB

#: Bytes of a segment: shorter ones cost more in messages than they hide, measured between two processes.
SEGMENT: Final = 2 * MIB
#: More segments hide nothing more.
MOST: Final = 16


def segments(nbytes: int, size: int) -> int:
    """Of each block. Two at least: with one there is nothing to overlap."""
    return min(max(2, nbytes // (size * SEGMENT)), MOST)


def all_reduce(rank: int, size: int, segments: int) -> Plan:
    """Over n·S blocks: the S segments of each of the ring's."""

    def cut(spans: tuple[Span, ...], at: int) -> tuple[Span, ...]:
        ((block, _),) = spans
        return ((block * segments + at, block * segments + at + 1),)

    for (send,), (receive,), _ in ring.all_reduce(rank, size):
        for at in range(segments):
            yield Round(
                (Send(send.to, cut(send.spans, at)),),
                (Receive(receive.source, cut(receive.spans, at), receive.into),),
            )

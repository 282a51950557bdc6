"""Plans: what one rank does in a collective, as data. Pure: no I/O, no clock, no arrays.

The memory of a rank is a row of blocks, numbered from 0; how long each is, is not a plan's business. A plan is a
sequence of rounds. The rules of a round, which the simulator checks and the executor relies on:

1. Its copies are made first. Then all of its sends and receives are under way at once.
2. It ends when all of them have ended; then what was received to be reduced is reduced, in the order of `receives`.
3. Where the next round touches none of the blocks that are then reduced, it may begin before: what is reduced is the
   same.
4. Nothing is received into a block that the same round sends. (To be reduced: it may be. It is kept aside until the
   end.)
5. Messages between two ranks are matched in order: the n-th that one sends is the n-th that the other receives. In
   one round a rank receives at most one from each.
6. No rank sends to itself: that is a copy.

A block that holds the result of a reduction over several ranks was reduced in an order that the plan fixes, so the
same inputs, world and algorithm give the same bits every time. Where a plan lets several ranks reduce the same block,
each takes the same operands in the same order: all get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple

#: Blocks from the first up to, but not including, the second.
Span = tuple[int, int]


class Into(Enum):
    """What becomes of a block that is received."""

    PLACE = auto()  #: it replaces what is there
    LEFT = auto()  #: received (op) what is there
    RIGHT = auto()  #: what is there (op) received


class Send(NamedTuple):
    to: int
    spans: tuple[Span, ...]


class Receive(NamedTuple):
    source: int
    spans: tuple[Span, ...]
    into: Into = Into.PLACE


class Copy(NamedTuple):
    source: Span
    target: Span


class Round(NamedTuple):
    sends: tuple[Send, ...] = ()
    receives: tuple[Receive, ...] = ()
    copies: tuple[Copy, ...] = ()


Plan = Iterator[Round]


def fold(source: int, rank: int) -> Into:
    """Ranks reduce in their order: what a lower rank sent stands left."""
    return Into.LEFT if source < rank else Into.RIGHT


def touches(this: Round, blocks: Sequence[Span]) -> bool:
    """Whether a round sends, receives or copies any of these."""
    used = [span for send in this.sends for span in send.spans]
    used += [span for receive in this.receives for span in receive.spans]
    used += [span for copy in this.copies for span in copy]
    return any(low < end and first < high for low, high in used for first, end in blocks)


def spans(blocks: list[int]) -> tuple[Span, ...]:
    """Blocks, in the order given, as few spans."""
    found: list[Span] = []
    for block in blocks:
        if found and found[-1][1] == block:
            found[-1] = (found[-1][0], block + 1)
        else:
            found.append((block, block + 1))
    return tuple(found)


def largest_power(size: int) -> int:
    """The largest power of two that is not above `size`."""
    return 1 << (size.bit_length() - 1)


def among(members: Sequence[int], plan: Plan, first: int = 0) -> Plan:
    """The plan of one of `members`, made for ranks 0 … of them alone and blocks from 0 on, as one for the world and
    blocks from `first` on."""

    def moved(given: tuple[Span, ...]) -> tuple[Span, ...]:
        return tuple((low + first, high + first) for low, high in given) if first else given

    for sends, receives, copies in plan:
        yield Round(
            tuple(Send(members[to], moved(given)) for to, given in sends),
            tuple(Receive(members[source], moved(given), into) for source, given, into in receives),
            tuple(Copy(*moved((source, target))) for source, target in copies),
        )

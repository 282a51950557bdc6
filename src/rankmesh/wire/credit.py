"""Eager credit: how many bytes a sender may have lying unreceived at its peer.

Rules, the same on both sides:

- An eager message costs its payload plus OVERHEAD (so that empty messages are bounded too).
- A lane is one (group, tag). A sender may have `lane_limit` outstanding in one lane and `peer_limit` in all. A message
  that would exceed the first waits in its lane at the sender; one that would exceed only the second is announced
  instead, which costs no credit, and waits for its receive.
- The receiver owes the cost back once the message has left its unexpected queue (at once if a receive was posted).
  It pays in batches: when a quarter of either limit is owed, everything owed goes out in one CREDIT frame. So a
  sender that is out of credit, and whose messages have all been received, always gets some back.
- Either side may deal with several messages of a lane at once (`batch`): the sender spends credit for them before the
  first is sent, the receiver accounts for them after the last came. A sixteenth of a lane's limit may be held back so
  on each side. With the quarter that may be owed, and the largest message (less than half), it is less than the limit.
- Neither side keeps an entry for a lane without outstanding bytes: finished tags cost nothing. (But for one lane: the
  one that was spent for in advance.)
"""

from __future__ import annotations

import struct
from typing import Final

from rankmesh.errors import ProtocolError
from rankmesh.wire.header import CONTROL_LIMIT

OVERHEAD: Final = 128
#: The most messages of a lane that are dealt with at once, and the part of the lane's limit they may make up.
BATCH: Final = 16

Lane = tuple[int, int]

_ENTRY = struct.Struct("<IqQ")
_ENTRIES_PER_FRAME: Final = CONTROL_LIMIT // _ENTRY.size


def batch(lane_limit: int, cost: int) -> int:
    """How many messages that cost so much may be spent for in advance, or be accounted for later. At least one."""
    return max(1, min(BATCH, lane_limit // BATCH // cost))


class CreditOut:
    """The sender's side: what it has outstanding at the peer."""

    __slots__ = ("lane_limit", "lanes", "peer_limit", "used")

    def __init__(self, lane_limit: int, peer_limit: int) -> None:
        self.lane_limit = lane_limit
        self.peer_limit = peer_limit
        self.used = 0
        self.lanes: dict[Lane, int] = {}

    def take(self, lane: Lane, cost: int) -> bool:
        """Spend `cost` on `lane`, or leave everything as it is and answer False."""
        outstanding = self.lanes.get(lane, 0) + cost
        used = self.used + cost
        if outstanding > self.lane_limit or used > self.peer_limit:
            return False
        self.lanes[lane] = outstanding
        self.used = used
        return True

    def take_batch(self, lane: Lane, cost: int) -> int:
        """Spend on `lane` for as many messages as may be spent for at once, or for one: how many, 0 if for none."""
        many = batch(self.lane_limit, cost)
        if many > 1 and self.take(lane, many * cost):
            return many
        return int(self.take(lane, cost))

    def lane_full(self, lane: Lane, cost: int) -> bool:
        """The lane itself has no room for `cost`, whatever the peer as a whole has."""
        return self.lanes.get(lane, 0) + cost > self.lane_limit

    def returned(self, payload: memoryview) -> None:
        """Account for a CREDIT frame. Raises ProtocolError when more comes back than was spent."""
        if payload.nbytes % _ENTRY.size:
            raise ProtocolError(f"a CREDIT frame of {payload.nbytes} bytes", reason="malformed credit")
        for group, tag, amount in _ENTRY.iter_unpack(payload):
            if amount > self.lanes.get((group, tag), 0):
                raise ProtocolError(
                    f"{amount} bytes of credit returned, more than spent, in lane {(group, tag)}",
                    reason="credit overflow",
                )
            self.give_back((group, tag), amount)

    def give_back(self, lane: Lane, amount: int) -> None:
        """Part of what was spent is free again."""
        self.used -= amount
        left = self.lanes.get(lane, 0) - amount
        if left > 0:
            self.lanes[lane] = left
        else:
            self.lanes.pop(lane, None)


class CreditIn:
    """The receiver's side: what lies here, and what it owes."""

    __slots__ = ("_lane_due", "_peer_due", "lane_limit", "limit", "outstanding", "owed", "total_owed")

    def __init__(self, lane_limit: int, peer_limit: int) -> None:
        self.lane_limit = lane_limit
        self._lane_due = lane_limit // 4
        self._peer_due = peer_limit // 4
        self.limit = peer_limit
        self.outstanding = 0
        self.owed: dict[Lane, int] = {}
        self.total_owed = 0

    def arrived(self, cost: int) -> None:
        """An eager message came in. Raises ProtocolError when the sender had no credit for it."""
        self.outstanding += cost
        if self.outstanding > self.limit:
            raise ProtocolError(
                f"{self.outstanding} unreceived bytes exceed the credit of {self.limit}", reason="credit exceeded"
            )

    def passed(self, lane: Lane, cost: int) -> bool:
        """Messages came in and went straight into their receives: `arrived` and `consumed` in one. True: it is time
        to pay."""
        self.outstanding += cost
        owed = self.owed.get(lane, 0) + cost
        self.owed[lane] = owed
        self.total_owed += cost
        if self.outstanding > self.limit:
            self.arrived(0)
        return owed >= self._lane_due or self.total_owed >= self._peer_due

    def consumed(self, lane: Lane, cost: int) -> bool:
        """The message left the queue. True: it is time to pay."""
        owed = self.owed.get(lane, 0) + cost
        self.owed[lane] = owed
        self.total_owed += cost
        return owed >= self._lane_due or self.total_owed >= self._peer_due

    def pay(self) -> list[bytes]:
        """The payloads of the CREDIT frames that pay everything owed."""
        self.outstanding -= self.total_owed
        self.total_owed = 0
        owed, self.owed = list(self.owed.items()), {}
        entries = [_ENTRY.pack(*lane, amount) for lane, amount in owed]
        return [b"".join(entries[at : at + _ENTRIES_PER_FRAME]) for at in range(0, len(entries), _ENTRIES_PER_FRAME)]

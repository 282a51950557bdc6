"""One connection per peer: what to do with a second one. Pure.

Both sides may connect to each other at the same moment. Each learns the other's uid from the first handshake
message, and both decide by the same rule: the connection that the side with the higher uid opened stays. A side that
does not yet know where one of its own attempts leads waits with its decision until it does; that attempt's first
answer never waits for anything, so this ends.

Where a connection exists, a further one is refused too: most likely it was under way when the first was made. If the
first is dead on the other side only, our heartbeat finds that out, and the other side, which tries again, gets
through then.
"""

from __future__ import annotations

from enum import Enum, auto


class Verdict(Enum):
    ACCEPT = auto()  # take this connection, and drop an attempt of our own at the same peer
    REFUSE = auto()  # the connection we have, or our own attempt, stays
    WAIT = auto()  # decide when our own attempts know whom they reached


def judge(mine: bytes, theirs: bytes, *, connected: bool, dialing: bool, dialing_unknown: bool) -> Verdict:
    """Decide on a connection opened by `theirs`, as the side that accepts it.

    connected: we have a connection with them, and did not agree to let it go. dialing: an attempt of ours at them is
    under way. dialing_unknown: an attempt of ours is under way that has not learnt whom it reached.
    """
    if connected or (dialing and mine > theirs):
        return Verdict.REFUSE
    if dialing:
        return Verdict.ACCEPT
    if dialing_unknown:
        return Verdict.WAIT
    return Verdict.ACCEPT

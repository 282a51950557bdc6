"""One connection per peer: what to do with a second one. Pure.

Both sides may connect to each other at the same moment. Each learns the other's uid from the first handshake message,
and both decide by the same rule: the connection that the side with the higher uid opened stays.

An attempt that has not learnt whom it reached counts for nothing: nobody may be kept out because an address does not
answer. If it turns out to lead to a peer that is connected by then, it is dropped before it has proved itself, so the
other side never has to decide on it.

Where a connection exists, a further one is refused too: most likely it was under way when the first was made. If the
first is dead on the other side only, our heartbeat finds that out, and the other side, which tries again, gets
through then.
"""

from __future__ import annotations

from enum import Enum, auto


class Verdict(Enum):
    ACCEPT = auto()  # take this connection, and drop an attempt of our own at the same peer
    REFUSE = auto()  # the connection we have, or our own attempt, stays


def judge(mine: bytes, theirs: bytes, *, connected: bool, dialing: bool) -> Verdict:
    """Decide on a connection opened by `theirs`, as the side that accepts it.

    connected: we have a connection with them, and did not agree to let it go. dialing: an attempt of ours at them is
    under way, and has learnt that it leads to them.
    """
    return Verdict.REFUSE if connected or (dialing and mine > theirs) else Verdict.ACCEPT

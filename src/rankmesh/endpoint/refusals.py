"""What is logged of connections that were refused: whoever knocks in a loop must not fill the log.

The first of an address is logged at once. Those that follow are counted, and told in one line when some seconds have
passed; and so on, until none came for that long. How many addresses and reasons are told apart is bounded too.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rankmesh.endpoint.progress import Engine

logger = logging.getLogger("rankmesh")

#: Why whoever closes takes no more connections: it leaves, and is not lost.
CLOSING: Final = "this endpoint is closing"
#: Seconds between two lines about one address.
QUIET: Final = 5.0
#: Addresses that are told apart; the rest share their lines.
MAX_ADDRESSES: Final = 64
OTHERS: Final = "other addresses"
#: Reasons that are told apart in one line: a stranger's bytes may be wrong in many ways.
MAX_REASONS: Final = 8
OTHER_REASONS: Final = "other reasons"

#: What differs between two connections from one place: a port, or a process.
_EACH_ITS_OWN = re.compile(r"[:#]\d+$")


class Refusals:
    """All methods need the engine's lock."""

    def __init__(self, engine: Engine, quiet: float = QUIET) -> None:
        self._engine = engine
        self.quiet = quiet
        #: Address → reasons → how many were refused since the last line about that address.
        self._unlogged: dict[str, Counter[str]] = {}

    def add(self, remote: str, reason: str) -> None:
        """A connection from there was refused."""
        address = _EACH_ITS_OWN.sub("", remote)
        if address not in self._unlogged and len(self._unlogged) >= MAX_ADDRESSES:
            address = OTHERS
        reasons = self._unlogged.get(address)
        if reasons is None:
            logger.warning("Refused the connection from %s: %s.", remote, reason)
            self._begin(address)
        else:
            reasons[reason if reason in reasons or len(reasons) < MAX_REASONS else OTHER_REASONS] += 1

    def close(self) -> None:
        """Tell what was not told yet."""
        for address in list(self._unlogged):
            self._tell(address)

    def _begin(self, address: str) -> None:
        self._unlogged[address] = Counter()
        self._engine.call_at(monotonic() + self.quiet, lambda: self._look(address))

    def _look(self, address: str) -> None:
        """The time is up."""
        if self._tell(address):
            self._begin(address)

    def _tell(self, address: str) -> bool:
        """False: there is nothing to tell."""
        reasons = self._unlogged.pop(address, None)
        if not reasons:
            return False
        told = ", ".join(f"{count} × {reason}" for reason, count in reasons.most_common())
        logger.warning("Refused more connections from %s within %g s: %s.", address, self.quiet, told)
        return True

"""How far apart ranks run, told by how long a rank's writes into its slots take, and what each of them does for that.
Pure. leading.py says what for."""

from __future__ import annotations

from typing import Final

from rankmesh.config import KIB

#: Smaller writes take no time, and say little.
LEAST: Final = 32 * KIB
#: Bytes a second. On AMD's Zen 4, 512 KiB: 35e9 where cores share a cache, 2.5e9 to 4.5e9 where they do not; 15e9 where
#: the other has just read the slot.
_FAR: Final = 6e9
#: So many slow writes in a row: one may have been interrupted.
_ENOUGH: Final = 3
#: A call goes through slots, to see, after 1, 2, 4 … so many that were pulled. (The first writes to new memory are slow
#: wherever ranks run.)
_LONGEST: Final = 64


class Distance:
    """Of one rank, in one group."""

    __slots__ = ("_left", "_pause", "_pulls", "_rank", "_slow")

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        #: This rank's writes that were slow, in a row.
        self._slow = 0
        #: Which way each of the others last had a call go.
        self._pulls = [False] * size
        #: Calls from one probe to the next, and those that are left of them.
        self._pause = self._left = 1

    def wrote(self, nbytes: int, seconds: float) -> None:
        """This rank has written so many bytes, LEAST at least, into a slot."""
        if seconds * _FAR > nbytes:
            self._slow += 1
        else:
            self._slow, self._pause, self._left = 0, 1, 1

    def pulls(self, leader: int) -> bool:
        """Whether the next call with that leader is pulled: it decides, or had the last one be."""
        if leader != self._rank:
            return self._pulls[leader]
        if self._slow < _ENOUGH:
            return False
        if not self._left:
            self._pause = self._left = min(2 * self._pause, _LONGEST)
            return False
        self._left -= 1
        return True

    def follow(self, leader: int, pulls: bool) -> None:
        """It has a call go that way."""
        self._pulls[leader] = pulls

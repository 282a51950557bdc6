"""Call: what a rank has called, as it is compared with the others' and shown in errors.

The tag of a collective's messages holds its sequence number and a digest of everything that all ranks must say alike.
So messages of calls that differ never match: nothing is computed from them, and nothing has to be compared on the
way. Ranks whose calls differ wait for each other; after a fraction of a second they ask each other what they called
(agent.py).
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from time import monotonic
from typing import Final, NamedTuple
from zlib import crc32

#: Tags above this are other parts' of rankmesh.
_FIRST_TAG: Final = -1024
_DIGEST_BITS: Final = 22
_SEQUENCE_BITS: Final = 39
_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TESTS: Final = os.path.join(_PACKAGE, "testing") + os.sep


class Signature(NamedTuple):
    """What all ranks must say alike."""

    collective: str
    what: str = ""
    op: str = ""
    root: int | None = None
    algorithm: str = ""

    def __str__(self) -> str:
        root = "" if self.root is None else f"root {self.root}"
        return ", ".join(filter(None, (self.what, self.op, root, self.algorithm)))


@lru_cache(maxsize=4096)
def digest(signature: Signature) -> int:
    return crc32(repr(tuple(signature)).encode()) & ((1 << _DIGEST_BITS) - 1)


class Call:
    """One call of one rank."""

    __slots__ = ("digest", "given_up", "line", "path", "sequence", "signature", "when")

    def __init__(self, sequence: int, signature: Signature) -> None:
        self.sequence = sequence
        self.signature = signature
        self.digest = digest(signature)
        self.path, self.line = _users_line()
        self.when = monotonic()
        #: Why this rank does not go on with it; empty while it does.
        self.given_up = ""

    @property
    def tag(self) -> int:
        return _FIRST_TAG - ((self.sequence % (1 << _SEQUENCE_BITS)) << _DIGEST_BITS | self.digest)

    def __str__(self) -> str:
        about = str(self.signature)
        place = f"{os.path.basename(self.path)}:{self.line}"
        return f"{self.signature.collective} #{self.sequence}{f' ({about})' if about else ''} at {place}"


def _users_line() -> tuple[str, int]:
    """The innermost line of code that is not rankmesh's own."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_PACKAGE) or path.startswith(_TESTS):
            break
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno

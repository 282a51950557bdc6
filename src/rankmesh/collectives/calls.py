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
from types import CodeType, FrameType
from typing import Final, NamedTuple
from zlib import crc32

#: Tags above this are other parts' of rankmesh.
_FIRST_TAG: Final = -1024
_DIGEST_BITS: Final = 22
_SEQUENCE_BITS: Final = 39
#: Calls that a group remembers: others may be that far behind.
REMEMBERED: Final = 1024
_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TESTS: Final = os.path.join(_PACKAGE, "testing") + os.sep
#: Folders whose code is not a user's.
_passed_over: tuple[str, ...] = (_PACKAGE,)


def pass_over(folder: str) -> None:
    """A library through which users call collectives: errors name who called the library."""
    global _passed_over  # noqa: PLW0603  # one per process, like the code it speaks of
    _passed_over = (*_passed_over, os.path.join(folder, ""))


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

    __slots__ = ("_code", "_instruction", "digest", "given_up", "sequence", "signature", "when")

    def __init__(
        self, sequence: int, signature: Signature, digest: int, code: CodeType, instruction: int, when: float
    ) -> None:
        """`instruction` of `code` called it: its line is looked up when somebody asks."""
        self.sequence = sequence
        self.signature = signature
        self.digest = digest
        self._code, self._instruction = code, instruction
        self.when = when
        #: Why this rank does not go on with it; empty while it does.
        self.given_up = ""

    @property
    def tag(self) -> int:
        return _FIRST_TAG - ((self.sequence % (1 << _SEQUENCE_BITS)) << _DIGEST_BITS | self.digest)

    @property
    def line(self) -> int:
        lines = (line for first, end, line in self._code.co_lines() if first <= self._instruction < end)
        return next(lines, None) or self._code.co_firstlineno

    def __str__(self) -> str:
        about = str(self.signature)
        place = f"{os.path.basename(self._code.co_filename)}:{self.line}"
        return f"{self.signature.collective} #{self.sequence}{f' ({about})' if about else ''} at {place}"


class CallLog:
    """The calls of a group on one rank, in their order, as far back as others may ask. A call is kept as what makes a
    Call of it: most are never asked about."""

    __slots__ = ("_calls", "_last", "count")

    def __init__(self) -> None:
        #: How many there were: the number of the next one.
        self.count = 0
        self._calls: list[Call | tuple[int, Signature, int, CodeType, int, float] | None] = [None] * REMEMBERED
        #: The user's code that called last.
        self._last: CodeType | None = None

    def note(self, signature: Signature, digest: int, depth: int) -> int:
        """The next sequence number is this call's. `depth`: how many frames up rankmesh's own code is sure to go."""
        try:
            frame = sys._getframe(depth)
        except ValueError:  # a thread, or the end of the program, calls it without anything between
            frame = sys._getframe(1)
        sequence = self.count
        self.count = sequence + 1
        code = frame.f_code
        if code is not self._last:  # most are called by the same again
            if code.co_filename.startswith(_passed_over):  # seldom: `depth` is right for most calls
                frame = _users_frame(frame)
                code = frame.f_code
            else:
                self._last = code
        self._calls[sequence % REMEMBERED] = (sequence, signature, digest, code, frame.f_lasti, monotonic())
        return sequence

    def __getitem__(self, sequence: int) -> Call:
        """KeyError: there was none, or it is long past."""
        call = self._calls[sequence % REMEMBERED]
        if isinstance(call, tuple):
            call = Call(*call)
            self._calls[sequence % REMEMBERED] = call
        if call is None or call.sequence != sequence:
            raise KeyError(sequence)
        return call


def _users_frame(frame: FrameType) -> FrameType:
    """The innermost, from this one on, of code that is a user's."""
    while frame.f_back is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_passed_over) or path.startswith(_TESTS):
            break
        frame = frame.f_back
    return frame

"""Call: what a rank has called, as it is compared with the others' and shown in errors.

The tag of a collective's messages holds its sequence number and part of a digest of everything that all ranks must say
alike; the words of a stage hold all of it. So messages of calls that differ never match: nothing is computed from
them, and nothing has to be compared on the way. Ranks whose calls differ wait for each other; after a fraction of a
second they ask each other what they called (agent.py).
"""

from __future__ import annotations

import os
import sys
from array import array
from functools import lru_cache
from hashlib import blake2b
from operator import index
from time import monotonic
from types import CodeType, FrameType
from typing import Final, NamedTuple

#: Tags above this are other parts' of rankmesh.
_FIRST_TAG: Final = -1024
#: Of a digest, and what a tag has room for of it; sequence numbers begin anew after so many bits.
_DIGEST_BITS: Final = 62
_TAG_DIGEST_BITS: Final = 33
_SEQUENCE_BITS: Final = 28
#: Calls that a group remembers; and those of which it knows the digests: others may be that far behind.
REMEMBERED: Final = 1024
DIGESTS: Final = 1 << 16
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
    """The same for signatures that are equal, and for no others: not even for those of one shape that differ in a
    digit or two, which checksums confuse."""
    root = None if signature.root is None else index(signature.root)  # equal, but not alike: numpy's integers
    text = repr(tuple(signature._replace(root=root)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 64 - _DIGEST_BITS


class Call:
    """One call of one rank."""

    __slots__ = ("_code", "_instruction", "digest", "given_up", "given_up_by", "sequence", "signature", "when")

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
        #: The rank because of which it does not; -1: by itself.
        self.given_up_by = -1

    @property
    def tag(self) -> int:
        sequence, part = self.sequence % (1 << _SEQUENCE_BITS), self.digest % (1 << _TAG_DIGEST_BITS)
        return _FIRST_TAG - (sequence << _TAG_DIGEST_BITS | part)

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

    __slots__ = ("_calls", "_digests", "_last", "count")

    def __init__(self) -> None:
        #: How many there were: the number of the next one.
        self.count = 0
        self._calls: list[Call | tuple[int, Signature, int, CodeType, int, float] | None] = [None] * REMEMBERED
        #: Of all but the last calls, by sequence number, modulo DIGESTS.
        self._digests = array("Q")
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
        at = sequence % REMEMBERED
        if not at and sequence:
            self._keep_digests(sequence)
        self._calls[at] = (sequence, signature, digest, code, frame.f_lasti, monotonic())
        return sequence

    @property
    def last(self) -> Call | None:
        return self[self.count - 1] if self.count else None

    def _keep_digests(self, sequence: int) -> None:
        """Those of the REMEMBERED calls before this one, which are about to be forgotten."""
        at = (sequence - REMEMBERED) % DIGESTS
        digests = (call[2] if isinstance(call, tuple) else call.digest for call in self._calls if call is not None)
        self._digests[at : at + REMEMBERED] = array("Q", digests)

    def digest(self, sequence: int) -> int | None:
        """That of a call; None: it is too long past."""
        kept = (self.count - 1) // REMEMBERED * REMEMBERED
        if kept - len(self._digests) <= sequence < kept:
            return self._digests[sequence % DIGESTS]
        try:
            return self[sequence].digest
        except KeyError:
            return None

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

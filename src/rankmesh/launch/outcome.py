"""Who failed first, how, and the exit code. Pure.

When a rank fails, those that wait for it raise PeerLost and fail too, often before it: they have no long traceback to
print, no native library to shut down. So the order of exits does not tell who began. Rules, the first that decides:

1. Whom the others name as lost. Who is named and names another itself passes the blame on, so that a chain of losses
   ends at its beginning; the majority wins. A rank that left in good order is not blamed for it.
   A named rank may be one that the launcher had to end: it hung, or was slow to exit.
2. A rank ended by a signal.
3. A rank whose standard error does not show a consequence: PeerLost, ConnectError, JoinError.
4. The order of exits; among those noticed together, the lowest rank.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

#: What timeout(1) answers.
TIMED_OUT = 124

#: What a signal usually means, for those whose name does not say it.
MEANINGS: Mapping[int, str] = {
    signal.SIGKILL: "killed, perhaps because the machine ran out of memory (see `dmesg`)",
    signal.SIGSEGV: "invalid memory access in native code (run it with PYTHONFAULTHANDLER=1)",
    signal.SIGBUS: "bus error: often /dev/shm is full (see `rankmesh doctor`)",
    signal.SIGABRT: "aborted by native code",
    signal.SIGILL: "illegal instruction: a wheel built for another CPU",
}


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # real-time signals have no names


@dataclass(frozen=True, slots=True)
class Exit:
    """How one rank ended. `returncode` as in subprocess: negative for a signal."""

    rank: int
    pid: int
    returncode: int
    #: It ended after the launcher had told it to.
    told: bool = False

    @property
    def failed(self) -> bool:
        return self.returncode != 0 and not self.told

    @property
    def by_signal(self) -> bool:
        return self.returncode < 0

    def describe(self) -> str:
        if self.told and self.by_signal:
            return "was lost to the others, and still there when the launcher ended it"
        if not self.by_signal:
            return f"exited with code {self.returncode}"
        number = -self.returncode
        meaning = MEANINGS.get(number)
        return f"was ended by {signal_name(number)}" + (f": {meaning}" if meaning else "")


#: The last line of the traceback of an error by which a rank tells of another's failure. Bars: exception groups.
_CONSEQUENCE: Final = re.compile(r"[ |]*(?:rankmesh\.errors\.)?(PeerLost|ConnectError|JoinError)(?:: |$)")
#: How rankmesh names a lost rank, in errors and in the log. If that one in turn lost another, the text has both.
_LOST: Final = re.compile(r"\brank (\d+) \(host [^)]*\) is lost: (?!it closed its endpoint)")
_TRACEBACK: Final = "Traceback (most recent call last):"
#: What Python prints, and an empty line, before the traceback of an exception that was raised because of another.
_CHAINED: Final = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)


@dataclass(frozen=True, slots=True)
class Consequence:
    """A rank failed because of another, by what it wrote last."""

    error: str
    #: The rank it names as lost.
    lost: int | None

    def __str__(self) -> str:
        return self.error if self.lost is None else f"{self.error}: rank {self.lost} is lost"


def consequence(lines: Sequence[str]) -> Consequence | None:
    """What the last lines of a rank's standard error say; None if its failure seems to be its own."""
    own = max((i for i, line in enumerate(lines) if _begins_traceback(lines, i, line)), default=0)
    for line in reversed(lines[own:]):
        if error := _CONSEQUENCE.match(line):
            return Consequence(error[1], _lost_in(line))
    # A program that catches PeerLost and exits leaves at least the log's sentence, or its own copy of it.
    lost = _lost_in(lines[-1]) if lines else None
    return None if lost is None else Consequence("PeerLost", lost)


def _begins_traceback(lines: Sequence[str], index: int, line: str) -> bool:
    return line == _TRACEBACK and not (index >= 2 and lines[index - 2] in _CHAINED)


def _lost_in(line: str) -> int | None:
    names = _LOST.findall(line)
    return int(names[-1]) if names else None


def culprit(exits: Sequence[Exit], consequences: Mapping[int, Consequence | None]) -> Exit | None:
    """The rank to blame, by the rules above; None if no rank failed of itself. `exits` in the order they came."""
    failures = [e for e in exits if e.failed]
    suspects = {e.rank: e for e in exits if e.returncode != 0}
    named = (_beginning(e.rank, consequences) for e in failures)
    votes = Counter(rank for rank in named if rank in suspects)
    accused = [suspects[rank] for rank in votes if votes[rank] == max(votes.values())]
    return min(
        accused or failures,
        key=lambda e: (not e.by_signal, consequences.get(e.rank) is not None, exits.index(e)),
        default=None,
    )


def _beginning(rank: int, consequences: Mapping[int, Consequence | None]) -> int | None:
    """Follow who names whom; None if this rank names nobody, or if the naming goes round in a circle."""
    seen = [rank]
    while (because := consequences.get(seen[-1])) is not None and because.lost is not None:
        if because.lost in seen:
            return None
        seen.append(because.lost)
    return seen[-1] if len(seen) > 1 else None


@dataclass(slots=True)
class Outcome:
    """What became of all ranks. The supervisor adds to it as things happen."""

    exits: list[Exit] = field(default_factory=list)
    #: The last lines of each rank's standard error, complete once its pipe is closed.
    last_lines: Mapping[int, Sequence[str]] = field(default_factory=dict)
    #: The first signal that told the launcher to end.
    interrupted: int | None = None
    timed_out: bool = False
    #: Why the launcher's own output could not be written any more; empty if it could.
    lost_output: str = ""
    #: Ranks, and their pids, that could not even be killed.
    stuck: dict[int, int] = field(default_factory=dict)

    def add(self, exits: Iterable[Exit]) -> None:
        """Add exits that were noticed together, so that their order is unknown."""
        self.exits += sorted(exits, key=lambda e: e.rank)

    @property
    def failures(self) -> list[Exit]:
        """The ranks that failed of themselves, in the order in which they ended."""
        return [e for e in self.exits if e.failed]

    @property
    def first(self) -> Exit | None:
        """The rank to blame. Final once `last_lines` are."""
        return culprit(self.exits, self._consequences())

    @property
    def code(self) -> int:
        """That of the first failure (128 + n for signal n). Ranks that end well although interrupted give 0; ranks that
        had not even begun do not."""
        first = self.first
        if first is not None:
            # The launcher's own signal says nothing of what went wrong.
            telling = self.failures[0] if first.told and first.by_signal else first
            return 128 - telling.returncode if telling.by_signal else telling.returncode
        if self.timed_out:
            return TIMED_OUT
        if self.lost_output:
            return 128 + signal.SIGPIPE
        ended_well = self.exits and not self.stuck and all(e.returncode == 0 for e in self.exits)
        if self.interrupted is not None and not ended_well:
            return 128 + self.interrupted
        return 0

    def report(self, *, timeout: float | None = None) -> list[str]:
        """The lines to show at the end; none if all went well."""
        stuck = [
            f"rankmesh: rank {rank} (pid {pid}) cannot be killed: it hangs in the kernel. Look at /proc/{pid}/wchan."
            for rank, pid in self.stuck.items()
        ]
        first = self.first
        if first is not None:
            return [*stuck, *self._failure(first)]
        if self.timed_out:
            return [*stuck, f"rankmesh: the ranks were ended after --timeout {timeout:g} s."]
        if self.lost_output:
            return [*stuck, f"rankmesh: the output cannot be written ({self.lost_output}): the ranks were ended."]
        if self.interrupted is not None:
            return [*stuck, f"rankmesh: {signal_name(self.interrupted)}: the ranks were ended."]
        return stuck

    def _consequences(self) -> dict[int, Consequence | None]:
        return {e.rank: consequence(self.last_lines.get(e.rank, ())) for e in self.failures}

    def _failure(self, first: Exit) -> list[str]:
        lines = [f"rankmesh: rank {first.rank} (pid {first.pid}) failed first: it {first.describe()}."]
        lines += self._followers(first)
        ended = [e.rank for e in self.exits if e.told and e is not first]
        if ended:
            lines.append(f"rankmesh: the launcher ended {_ranks(ended)}.")
        last_lines = self.last_lines.get(first.rank)
        if last_lines:
            lines.append(f"rankmesh: last lines of rank {first.rank}'s standard error:")
            lines += [f"  {line}" for line in last_lines]
        else:
            lines.append(f"rankmesh: rank {first.rank} wrote nothing to standard error.")
        return lines

    def _followers(self, first: Exit) -> list[str]:
        """A line for those that failed for one reason: a hundred ranks may have lost the first."""
        because = self._consequences()
        reasons: dict[str, list[int]] = {}
        for one in self.failures:
            if one is not first:
                reasons.setdefault(str(because[one.rank] or f"it {one.describe()}"), []).append(one.rank)
        return [f"rankmesh: {_ranks(ranks)} failed after it ({reason})." for reason, ranks in reasons.items()]


def _ranks(numbers: Iterable[int]) -> str:
    ranks = sorted(numbers)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

"""Who failed first, how, and the exit code. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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

    def describe(self) -> str:
        if self.returncode >= 0:
            return f"exited with code {self.returncode}"
        number = -self.returncode
        meaning = MEANINGS.get(number)
        return f"was ended by {signal_name(number)}" + (f": {meaning}" if meaning else "")


@dataclass(slots=True)
class Outcome:
    """What became of all ranks. The supervisor adds to it as things happen."""

    exits: list[Exit] = field(default_factory=list)
    first: Exit | None = None
    #: The first signal that told the launcher to end.
    interrupted: int | None = None
    timed_out: bool = False
    #: Why the launcher's own output could not be written any more; empty if it could.
    lost_output: str = ""
    #: Ranks, and their pids, that could not even be killed.
    stuck: dict[int, int] = field(default_factory=dict)

    def add(self, exits: Iterable[Exit]) -> None:
        """Add exits that were noticed together, so that their order is unknown.

        The one ended by a signal comes first among them: the others may well be the consequence of its death."""
        batch = sorted(exits, key=lambda e: (e.returncode >= 0, e.rank))
        self.exits += batch
        if self.first is None:
            self.first = next((e for e in batch if e.failed), None)

    @property
    def code(self) -> int:
        """That of the first failure (128 + n for signal n). Ranks that end well although interrupted give 0."""
        if self.first is not None:
            return self.first.returncode if self.first.returncode > 0 else 128 - self.first.returncode
        if self.timed_out:
            return TIMED_OUT
        if self.lost_output:
            return 128 + signal.SIGPIPE
        if self.interrupted is not None and (self.stuck or any(e.returncode != 0 for e in self.exits)):
            return 128 + self.interrupted
        return 0

    def report(self, last_lines: Sequence[str], *, timeout: float | None = None) -> list[str]:
        """The lines to show at the end; none if all went well. `last_lines`: of the first failing rank's stderr."""
        stuck = [
            f"rankmesh: rank {rank} (pid {pid}) cannot be killed: it hangs in the kernel. Look at /proc/{pid}/wchan."
            for rank, pid in self.stuck.items()
        ]
        if self.first is not None:
            return [*stuck, *self._failure(self.first, last_lines)]
        if self.timed_out:
            return [*stuck, f"rankmesh: the ranks were ended after --timeout {timeout:g} s."]
        if self.lost_output:
            return [*stuck, f"rankmesh: the output cannot be written ({self.lost_output}): the ranks were ended."]
        if self.interrupted is not None:
            return [*stuck, f"rankmesh: {signal_name(self.interrupted)}: the ranks were ended."]
        return stuck

    def _failure(self, first: Exit, last_lines: Sequence[str]) -> list[str]:
        lines = [f"rankmesh: rank {first.rank} (pid {first.pid}) failed first: it {first.describe()}."]
        also = [e for e in self.exits if e.failed and e is not first]
        if also:
            lines.append("rankmesh: then " + "; ".join(f"rank {e.rank} {e.describe()}" for e in also) + ".")
        ended = sorted(e.rank for e in self.exits if e.told)
        if ended:
            lines.append(f"rankmesh: the launcher ended rank{'s' * (len(ended) > 1)} {', '.join(map(str, ended))}.")
        if last_lines:
            lines.append(f"rankmesh: last lines of rank {first.rank}'s standard error:")
            lines += [f"  {line}" for line in last_lines]
        else:
            lines.append(f"rankmesh: rank {first.rank} wrote nothing to standard error.")
        return lines

"""The launcher's side of the stem, the interpreter from which the ranks branch off.

Ranks that are forked from one process have the same addresses for the same code. Where several of them share a core
that makes them twice as fast at passing messages to each other: what the processor has learned about the interpreter's
branches in one rank holds in the next, and is not lost with every switch (bench/README.md has the figures). They also
start sooner, and hash strings alike: sets iterate in the same order on all ranks of a host. As with any server that
forks, the addresses of a run are random, but one rank's tell those of its siblings.

The stem runs nothing of the user's but `site`. It ends once it has forked all ranks. They become children of the
launcher then, which is their nearest "subreaper" (prctl) for just that long; only after that they are given the word to
begin. Whoever fails meanwhile, nothing begins: a rank that finds the launcher gone, or its pipe closed, ends.

Here is the launcher's side; stem_main is the process.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, Any, Final, Self

from rankmesh.errors import JoinError
from rankmesh.launch import stem_main
from rankmesh.launch.plan import RankPlan

PR_SET_CHILD_SUBREAPER: Final = 36
PR_GET_CHILD_SUBREAPER: Final = 37
#: Seconds between looks for the end of a process that is ending.
LOOK: Final = 0.005
#: Seconds the stem has to end once its report is complete: there is nothing left for it to do.
END_TIMEOUT: Final = 10.0


@dataclass(frozen=True, slots=True)
class Process:
    """A rank's process, a child of this one; `stdout` and `stderr` are where it writes."""

    rank: int
    pid: int
    stdout: IO[bytes]
    stderr: IO[bytes]

    def reap(self, timeout: float = 0.0) -> int:
        """Its exit code, as in subprocess. TimeoutError: it has not ended by then."""
        deadline = time.monotonic() + timeout
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() >= deadline:
                raise TimeoutError(f"Process {self.pid} of rank {self.rank} has not ended.")
            time.sleep(LOOK)


class Stem:
    """A context manager around the start of ranks: `read` whenever there is something of the `report`, until it is
    `complete`; then `settle`, and `begin`. Whoever leaves without that leaves nothing behind."""

    def __init__(self, plans: Sequence[RankPlan], *, fork: bool = True) -> None:
        self._plans = plans
        self._fork = fork
        self._said = bytearray()
        self._settled = False
        self.complete = False

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(_subreaper())
            self._outputs = stack.enter_context(ExitStack())
            self._start(stack)
            stack.callback(self._end)
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def read(self) -> None:
        """Read what there is of the report."""
        said = os.read(self.report.fileno(), 1 << 16)
        self._said += said
        self.complete = not said

    def settle(self) -> list[Process]:
        """The ranks, which are children of this process from now on and wait for the word to begin."""
        try:
            self._stem.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise JoinError(f"The process that starts the ranks (pid {self._stem.pid}) does not end.") from None
        answers = self._answers()
        for plan in self._plans:
            answer = answers.get(plan.rank, f"its interpreter ended with code {self._stem.returncode}")
            if not answer.isdecimal():
                raise JoinError(
                    f"Rank {plan.rank} cannot be started: {answer}. Check the limits with `rankmesh doctor`."
                )
        self._settled = True
        self._outputs.pop_all()  # the ranks' now
        return [Process(rank, int(answers[rank]), *readers) for rank, readers in self._readers.items()]

    def begin(self) -> None:
        """Give the ranks the word."""
        os.write(self._word, bytes(len(self._plans)))

    def _start(self, stack: ExitStack) -> None:
        """Start the process. Its ends of all pipes are closed on this side then; ours are closed with `stack`."""
        with ExitStack() as theirs:

            def pipe(ours: ExitStack) -> tuple[IO[bytes], int]:
                reading, writing = os.pipe()
                theirs.callback(os.close, writing)
                return ours.enter_context(open(reading, "rb", 0)), writing

            self.report, report = pipe(stack)
            word, self._word = os.pipe()
            theirs.callback(os.close, word)
            stack.callback(os.close, self._word)
            null = os.open(os.devnull, os.O_RDONLY)
            theirs.callback(os.close, null)
            self._readers: dict[int, tuple[IO[bytes], IO[bytes]]] = {}
            common = dict(set.intersection(*(set(plan.env.items()) for plan in self._plans)))
            ranks: list[dict[str, Any]] = []
            for plan in self._plans:
                (stdout, out), (stderr, err) = pipe(self._outputs), pipe(self._outputs)
                self._readers[plan.rank] = stdout, stderr
                own = {name: value for name, value in plan.env.items() if name not in common}
                stdin = None if plan.rank == 0 else null
                ranks.append(
                    {
                        "rank": plan.rank,
                        "program": plan.argv[1:],
                        "environment": own,
                        "stdin": stdin,
                        "stdout": out,
                        "stderr": err,
                    }
                )
            passed = [null, *(rank[name] for rank in ranks for name in ("stdout", "stderr"))]
            orders = {"launcher": os.getpid(), "fork": self._fork, "ranks": ranks, "passed": passed}
            text = json.dumps({**orders, "report": report, "word": word}).encode()
            with open(os.memfd_create("rankmesh-orders"), "wb", 0) as file:
                file.write(text)
                file.seek(0)
                python, *program = self._plans[0].argv
                self._stem = subprocess.Popen(
                    [python, stem_main.__file__, str(file.fileno()), *program],  # the program is for readers of `ps`
                    env=common,
                    stdin=None if ranks[0]["stdin"] is None else subprocess.DEVNULL,
                    stdout=ranks[0]["stdout"],  # what `site` has to say the first rank says
                    stderr=ranks[0]["stderr"],
                    pass_fds=[file.fileno(), report, word, *passed],
                    start_new_session=True,
                )

    def _answers(self) -> dict[int, str]:
        """By rank: its process number, or why there is none."""
        answers = (line.split(maxsplit=1) for line in self._said.decode().splitlines())
        return {int(rank): answer for rank, answer in answers}

    def _end(self) -> None:
        """Nothing is left of a start that failed. A rank that has not reported yet ends for want of the word."""
        if not self._settled:
            self._stem.kill()
            self._stem.wait()
            for answer in self._answers().values():
                if answer.isdecimal():
                    os.kill(int(answer), signal.SIGKILL)
                    os.waitpid(int(answer), 0)


@contextmanager
def _subreaper() -> Iterator[None]:
    """Meanwhile whoever descends from this process and loses its parent becomes its child."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()

    def control(option: int, argument: object) -> None:
        if libc.prctl(option, argument, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    control(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    control(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        control(PR_SET_CHILD_SUBREAPER, before.value)

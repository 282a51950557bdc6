"""The launcher's side of the stem, the interpreter from which the ranks branch off.

Ranks that are forked from one process have the same addresses for the same code. Where several of them share a core
that makes them twice as fast at passing messages to each other: what the processor has learned about the interpreter's
branches in one rank holds in the next, and is not lost with every switch (bench/FINDINGS.md has the figures). They also
start sooner, and hash strings alike: sets iterate in the same order on all ranks of a host. As with any server that
forks, the addresses of a run are random, but one rank's tell those of its siblings.

The stem runs nothing of the user's but `site`, which so runs once, and does not know of ranks; what it prints the first
rank prints. The stem ends once it has forked all ranks. They become children of the launcher then, which is their
nearest "subreaper" (prctl) for just that long; only after that they are given the word to begin. Whoever fails
meanwhile, nothing begins: a rank that finds the launcher gone, or its pipe closed, ends.

Here is the launcher's side; stem_main is the process.
"""

from __future__ import annotations

import ctypes
import os
import resource
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
#: Seconds the stem has to end once its report is complete, and what is killed to be gone.
END_TIMEOUT: Final = 10.0
#: Descriptors of a launcher besides its ranks' pipes.
SPARE_DESCRIPTORS: Final = 64


@dataclass(frozen=True, slots=True)
class Process:
    """A rank's process, a child of this one."""

    rank: int
    pid: int

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
    `complete`; then `settle`, and `begin`. Whoever leaves without that ends all of them."""

    def __init__(self, plans: Sequence[RankPlan], *, fork: bool = True) -> None:
        self._plans = plans
        self._fork = fork
        self._said = bytearray()
        self._settled = False
        self.complete = False
        #: By rank: where its standard output and error can be read; closed in the end unless taken out.
        self.outputs: dict[int, tuple[IO[bytes], IO[bytes]]] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(_subreaper())
            stack.callback(self._close_outputs)
            self._start(stack)
            stack.callback(self._end)
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    @property
    def pid(self) -> int:
        return self._stem.pid

    def read(self) -> None:
        """Read what there is of the report."""
        said = os.read(self.report.fileno(), 1 << 16)
        self._said += said
        self.complete = not said or len(self._answers()) == len(self._plans)

    def settle(self) -> list[Process]:
        """The ranks, which are children of this process from now on and wait for the word to begin."""
        try:
            code = self._stem.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            message = (
                f"The process that starts the ranks (pid {self._stem.pid}) does not end. Start them with --no-fork."
            )
            raise JoinError(message) from None
        answers = self._answers()
        for plan in self._plans:
            answer = answers.get(plan.rank)
            if answer is None:
                reason = f"its interpreter ended with code {code}" if code else "it ended before it had begun"
                raise JoinError(f"Rank {plan.rank} cannot be started: {reason}. See what it wrote, and `dmesg`.")
            if not answer.isdecimal():
                message = f"Rank {plan.rank} cannot be started: {answer}. Check the limits with `rankmesh doctor`."
                raise JoinError(message)
        self._settled = True
        return [Process(rank, int(pid)) for rank, pid in answers.items()]

    def begin(self) -> None:
        """Give the ranks the word."""
        os.write(self._word, bytes(len(self._plans)))

    def _start(self, stack: ExitStack) -> None:
        """Start the process. Its ends of all pipes are closed on this side then; ours are closed with `stack`."""
        soft, hard = _room_for_descriptors(4 * len(self._plans) + SPARE_DESCRIPTORS)
        with ExitStack() as theirs:

            def pipe() -> tuple[IO[bytes], int]:
                reading, writing = os.pipe()
                theirs.callback(os.close, writing)
                return open(reading, "rb", 0), writing

            self.report, report = pipe()
            stack.callback(self.report.close)
            word, self._word = os.pipe()
            theirs.callback(os.close, word)
            stack.callback(os.close, self._word)
            null = os.open(os.devnull, os.O_RDONLY)
            theirs.callback(os.close, null)
            common = dict(set.intersection(*(set(plan.env.items()) for plan in self._plans)))
            ranks: list[dict[str, Any]] = []
            for plan in self._plans:
                (stdout, out), (stderr, err) = pipe(), pipe()
                self.outputs[plan.rank] = stdout, stderr
                ranks.append(
                    {
                        "rank": plan.rank,
                        "program": plan.argv[1:],
                        "environment": [f"{name}={text}" for name, text in plan.env.items() if name not in common],
                        "stdin": -1 if plan.rank == 0 else null,
                        "stdout": out,
                        "stderr": err,
                    }
                )
            passed = [null, *(rank[name] for rank in ranks for name in ("stdout", "stderr"))]
            orders = {
                "launcher": os.getpid(),
                "fork": int(self._fork),
                "soft": soft,
                "hard": hard,
                "ranks": ranks,
                "passed": passed,
                "report": report,
                "word": word,
            }
            python, *program = self._plans[0].argv
            with open(os.memfd_create("rankmesh-orders"), "wb", 0) as file:
                file.write(stem_main.write_orders(orders))
                file.seek(0)
                self._stem = subprocess.Popen(
                    [python, "-P", "-S", stem_main.__file__, str(file.fileno()), *program],  # the program is for `ps`
                    env=common,
                    stdin=None if ranks[0]["stdin"] < 0 else subprocess.DEVNULL,
                    stdout=ranks[0]["stdout"],
                    stderr=ranks[0]["stderr"],
                    pass_fds=[file.fileno(), report, word, *passed],
                    start_new_session=True,
                )

    def _answers(self) -> dict[int, str]:
        """By rank: its process number, or why there is none."""
        answers = (line.split(maxsplit=1) for line in self._said.decode().splitlines(keepends=True) if line[-1] == "\n")
        return {int(rank): answer.strip() for rank, answer in answers}

    def _end(self) -> None:
        """Nothing is left of a start that failed; a rank that has not reported ends by itself, for want of the word."""
        if self._settled:
            return
        self._stem.kill()
        self._stem.wait(END_TIMEOUT)
        for rank, answer in self._answers().items():
            if answer.isdecimal():
                os.kill(int(answer), signal.SIGKILL)
                Process(rank, int(answer)).reap(END_TIMEOUT)

    def _close_outputs(self) -> None:
        for pipes in self.outputs.values():
            for pipe in pipes:
                pipe.close()


def _room_for_descriptors(count: int) -> tuple[int, int]:
    """Raise this process's limit if need be, as far as it may be. What it was, for those who inherit it."""
    soft, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return before


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

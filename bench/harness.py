"""Worlds of worker processes, and rounds that interleave them.

A World is the processes of one subject, alive for the whole run and asleep while another is measured. A command goes to
all its ranks at once; it returns rank by rank what they answered, or raises SubjectFailed with a reason fit for the
table. Every wait has a deadline, and whatever happens the processes are gone when the World is closed.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rankmesh.membership.ports import free_port

from subjects import ENTRIES, MPIEXEC, RUN

WORKER = Path(__file__).with_name("worker.py")
#: Seconds for a process to start, and for its library to be imported and connected: torch takes its time.
START_TIMEOUT = 60.0
#: Seconds for one command; rounds are sized to take a fraction of one.
COMMAND_TIMEOUT = 90.0
#: Seconds a world has to close by itself before it is killed.
CLOSE_TIMEOUT = 10.0
#: The first finds a cold subject and a guess of the repetitions, the second corrects it.
SIZING_ROUNDS = 2

Reply = dict[str, Any]

PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


def _end_with_harness() -> None:
    """A measurement must not outlive its harness, not even when that is killed while a process spins: the kernel ends
    what we start, and a launcher's ranks end with the launcher."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class SubjectFailed(Exception):
    """A subject cannot be measured; the message is the reason."""


class Control:
    """The harness's end of one worker's command socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lines = connection.makefile("r", encoding="utf-8")

    def write(self, message: Reply) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> Reply | None:
        """The next reply, or None when the worker is gone."""
        line = self._lines.readline()
        reply: Reply | None = json.loads(line) if line else None
        return reply

    def close(self) -> None:
        self._lines.close()
        self.connection.close()


class World:
    """The processes of one subject. Use as a context manager."""

    def __init__(self, subject: str, size: int, cores: Sequence[int]) -> None:
        self.subject, self.size, self.cores = subject, size, cores
        self.version = ""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._controls: dict[int, Control] = {}
        self._pids: list[int] = []
        self._directory = tempfile.TemporaryDirectory(prefix="rankmesh-bench-")
        self._stderr = Path(self._directory.name, "stderr")

    def __enter__(self) -> Self:
        try:
            self._start()
            replies = self.call("open", timeout=START_TIMEOUT, port=free_port())
        except BaseException:
            self.kill()
            raise
        self.version = replies[0]["version"]
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._controls:
                self.call("close", timeout=CLOSE_TIMEOUT)
                self._wait_for_exit()
        except (SubjectFailed, subprocess.TimeoutExpired) as failure:
            print(f"{self.subject}: did not close cleanly: {failure}", file=sys.stderr)
        finally:
            self.kill()

    def call(self, command: str, *, timeout: float = COMMAND_TIMEOUT, **arguments: object) -> list[Reply]:
        """Run a command on all ranks and return their replies in order of rank."""
        if not self._controls:
            raise SubjectFailed("stopped after an earlier failure")
        try:
            for control in self._controls.values():
                control.write({"do": command, **arguments})
            replies = self._replies(command, timeout)
        except (SubjectFailed, OSError) as failure:
            self.kill()
            raise failure if isinstance(failure, SubjectFailed) else SubjectFailed(self._last_words()) from failure
        return [replies[rank] for rank in range(self.size)]

    def kill(self) -> None:
        """End every process at once. Harmless when they are gone already."""
        for control in self._controls.values():
            control.close()
        self._controls.clear()
        # The ranks of mpiexec are not our children; while it lives they are not reaped, and their pids are theirs. Ours
        # end with their launcher.
        if ENTRIES[self.subject].launcher == MPIEXEC and any(process.poll() is None for process in self._processes):
            for pid in self._pids:
                _kill(pid)
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._processes.clear()
        self._pids.clear()
        self._directory.cleanup()

    def _start(self) -> None:
        path = str(Path(self._directory.name, "control"))
        with socket.socket(socket.AF_UNIX) as listener, self._stderr.open("wb") as stderr:
            listener.bind(path)
            listener.listen(self.size)
            for command in self._command_lines(path):
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env={**os.environ, **ENTRIES[self.subject].env},
                        stdin=subprocess.DEVNULL,
                        stdout=stderr,
                        stderr=stderr,
                        preexec_fn=_end_with_harness,  # noqa: PLW1509  # one system call, through what is loaded already
                    )
                )
            self._accept_all(listener)

    def _command_lines(self, control: str) -> Iterable[list[str]]:
        options = ["--subject", self.subject, "--size", str(self.size), "--control", control]
        options += ["--cores", ",".join(map(str, self.cores))] if self.cores else []
        worker = [sys.executable, str(WORKER), *options]
        launcher = ENTRIES[self.subject].launcher
        if not launcher:
            return [[*worker, "--rank", str(rank)] for rank in range(self.size)]
        path = Path(sys.executable).with_name(launcher)
        if not path.exists():
            raise SubjectFailed(f"not installed: pip install -r bench/requirements.txt (no {path})")
        if launcher == RUN:
            return [[str(path), "run", "-n", str(self.size), *worker[1:]]]
        return [[str(path), "-n", str(self.size), *worker]]

    def _accept_all(self, listener: socket.socket) -> None:
        give_up = time.monotonic() + START_TIMEOUT
        listener.settimeout(0.2)
        while len(self._controls) < self.size:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if any(process.poll() is not None for process in self._processes):
                    raise SubjectFailed(self._last_words()) from None
                if time.monotonic() > give_up:
                    raise SubjectFailed(f"its processes did not start within {START_TIMEOUT:.0f} s") from None
                continue
            control = Control(connection)
            hello = self._read(control)
            self._controls[hello["rank"]] = control
            self._pids.append(hello["pid"])

    def _replies(self, command: str, timeout: float) -> dict[int, Reply]:
        give_up = time.monotonic() + timeout
        replies: dict[int, Reply] = {}
        with selectors.DefaultSelector() as selector:
            for rank, control in self._controls.items():
                selector.register(control.connection, selectors.EVENT_READ, rank)
            while len(replies) < self.size:
                ready = selector.select(max(0.0, give_up - time.monotonic()))
                if not ready:
                    raise SubjectFailed(f"{command} did not end within {timeout:.0f} s")
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    replies[key.data] = self._read(self._controls[key.data])
        return replies

    def _read(self, control: Control) -> Reply:
        reply = control.read()
        if reply is None:
            raise SubjectFailed(self._last_words())
        if "error" in reply:
            raise SubjectFailed(reply["error"])
        return reply

    def _wait_for_exit(self) -> None:
        give_up = time.monotonic() + CLOSE_TIMEOUT
        for process in self._processes:
            process.wait(max(0.1, give_up - time.monotonic()))

    def _last_words(self) -> str:
        lines = self._stderr.read_text(errors="replace").split("\n") if self._stderr.exists() else []
        said = [line.strip() for line in lines if line.strip()]
        return f"a process died: {said[-1]}" if said else "a process died without a word"


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it ended by itself


@dataclass
class Result:
    """What one subject did in one measure: a dictionary of figures per round."""

    subject: str
    measure: str
    nbytes: int
    rounds: list[Reply] = field(default_factory=list)
    failure: str = ""

    def figures(self, name: str) -> list[float]:
        return [reply[name] for reply in self.rounds]

    def median(self, name: str) -> float | None:
        return statistics.median(self.figures(name)) if self.rounds else None

    def spread(self, name: str) -> tuple[float, float] | None:
        return (min(self.figures(name)), max(self.figures(name))) if self.rounds else None


@dataclass(frozen=True)
class Plan:
    """One measure: the command that makes a round of it, and the bounds of a round's repetitions."""

    measure: str
    command: str
    nbytes: int
    least: int
    most: int
    ranks: int = 2


@dataclass(frozen=True)
class Effort:
    """Number and length of rounds. They are equal in time, not in repetitions: a slow subject does fewer."""

    rounds: int
    seconds: float


def _rotated(names: list[str], by: int) -> list[str]:
    first = by % len(names) if names else 0
    return names[first:] + names[:first]


def run_interleaved(
    plan: Plan, effort: Effort, worlds: Mapping[str, World], progress: Callable[[str], None]
) -> list[Result]:
    """Rounds of A, B, C, then of B, C, A and so on, so that a disturbance or a drift meets everybody alike."""
    results = {name: Result(name, plan.measure, plan.nbytes) for name in worlds}
    counts: dict[str, int] = {}

    def attempt(name: str, count: int) -> Reply | None:
        try:
            return worlds[name].call(plan.command, nbytes=plan.nbytes, count=count)[0]
        except SubjectFailed as failure:
            results[name].failure = str(failure)
            return None

    for name in worlds:
        progress(f"{plan.measure} {plan.nbytes} B: sizing {name}")
        count, per_item = plan.least, math.inf
        for _ in range(SIZING_ROUNDS):
            reply = None if results[name].failure else attempt(name, count)
            if reply is not None:
                per_item = min(per_item, reply["seconds"] / reply["count"])
                count = min(plan.most, max(plan.least, int(effort.seconds / per_item)))
        counts[name] = count
    for number in range(effort.rounds):
        for name in _rotated(list(worlds), number):
            progress(f"{plan.measure} {plan.nbytes} B: round {number + 1} of {effort.rounds}, {name}")
            reply = None if results[name].failure else attempt(name, counts[name])
            if reply is not None:
                results[name].rounds.append(reply)
    return list(results.values())

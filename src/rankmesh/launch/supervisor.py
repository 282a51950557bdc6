"""The event loop of the launcher: start, signals, exits, deadlines. One thread, nothing blocks.

Rules:

1. Each rank leads a session of its own: what the terminal sends to the launcher reaches a rank only through the
   launcher, and a rank is always signalled together with its children.
2. The ranks live and die together: the first failure, an ending signal, a time limit or a lost reader ends all.
3. After the first failure nobody is told to end for SETTLE seconds: who fails meanwhile has failed by itself, and may
   be the one that began (see outcome). Everything else ends them at once.
4. Ending is SIGTERM (or the signal that came), `grace` seconds, SIGKILL. A second Ctrl-C skips the grace.
5. A rank's group is killed before the rank is reaped: as long as it is a zombie its number cannot belong to others.
6. Once all ranks are gone, their pipes have DRAIN seconds to close; a process that left its session may hold them open.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, Final, Self

from rankmesh.errors import JoinError
from rankmesh.launch.guard import Guard
from rankmesh.launch.outcome import Exit, Outcome
from rankmesh.launch.output import Multiplexer, Stream
from rankmesh.launch.plan import RankPlan
from rankmesh.launch.stem import Process, Stem

#: Signals that end the ranks, and what is sent to them.
ENDING: Final[Mapping[int, int]] = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,  # the terminal is gone; programs that ignore SIGHUP must not live on without it
}
#: Signals that are only passed on: batch systems announce preemption by them.
FORWARDED: Final = (signal.SIGUSR1, signal.SIGUSR2)
DRAIN: Final = 1.0
#: A rank that raises ends its mesh before its interpreter prints the traceback and shuts down, so that those who wait
#: for it may exit sooner. Long enough for that on a crowded machine, short enough not to be felt after a failure.
SETTLE: Final = 0.5
#: Seconds until all ranks must have branched off: an interpreter must start, perhaps from a slow file system.
START_TIMEOUT: Final = 60.0
#: Seconds after SIGKILL when a process that is still there is given up: it hangs in the kernel, in a dead file system.
UNKILLABLE: Final = 10.0
#: Says where the standard output and error of a rank go.
OpenStreams = Callable[[int, IO[bytes], IO[bytes]], tuple[Stream, Stream]]


class Supervisor:
    """Runs the planned ranks to their end. A context manager for the main thread: it takes over the signal handlers."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        output: Multiplexer,
        *,
        grace: float,
        timeout: float | None,
        fork: bool = True,
    ) -> None:
        self._selector = selector
        self._output = output
        self._grace = grace
        self._timeout = timeout
        self._fork = fork
        self._give_up_at: float | None = None
        self._settled_at: float | None = None
        self._kill_at: float | None = None
        self._abandon_at: float | None = None
        self._ending = False
        self._alive: dict[int, Process] = {}
        self._errors: dict[int, Stream] = {}
        self._resources = ExitStack()
        self.outcome = Outcome()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            wakeups = stack.enter_context(_signals())
            self._selector.register(wakeups, selectors.EVENT_READ, wakeups)
            stack.callback(self._selector.unregister, wakeups)
            self._guard = stack.enter_context(Guard())
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever went wrong, no rank outlives the launcher."""
        with self._resources:
            self._signal_all(signal.SIGKILL)
            self._output.close_streams()
            for process in self._alive.values():
                try:
                    process.reap(UNKILLABLE)
                except TimeoutError:
                    pass  # it hangs in the kernel; the report says so
                self._guard.remove(process.pid)
            self._alive.clear()

    def run(self, plans: Sequence[RankPlan], open_streams: OpenStreams) -> Outcome:
        """Start the ranks, and return when all have ended and their output has been read."""
        try:
            self._start(plans, open_streams)
        except JoinError:  # what there is to read may tell why
            self._drain()
            self.flush()
            raise
        if self._timeout is not None:
            self._give_up_at = time.monotonic() + self._timeout
        self.outcome.add(list(self._reap()))  # one may have ended before it began, and the signal of that gone by
        self._check_ends(time.monotonic())
        while self._alive:
            before_the_end = () if self._ending else (self._give_up_at, self._settled_at)
            deadlines = (self._kill_at, self._abandon_at, *before_the_end)
            if self._pump(min((at for at in deadlines if at is not None), default=None)):
                self.outcome.add(list(self._reap()))
            now = time.monotonic()
            if self._abandon_at is not None and now >= self._abandon_at:
                self.outcome.stuck = {rank: process.pid for rank, process in self._alive.items()}
                break
            self._check_ends(now)
        self._drain()
        self.outcome.last_lines = {rank: stream.tail.text() for rank, stream in self._errors.items()}
        return self.outcome

    def flush(self) -> None:
        """Write what is left for the sinks. Waits for a slow reader, as any program that prints does; but only for the
        grace once the launcher has been told to end."""
        while self._output.writing:
            if self.outcome.interrupted is None:
                self._pump(None)
            else:
                deadline = self._kill_at = self._kill_at or time.monotonic() + self._grace
                if time.monotonic() >= deadline:
                    return
                self._pump(deadline)

    def _start(self, plans: Sequence[RankPlan], open_streams: OpenStreams) -> None:
        """Start the ranks; none if a signal that ends them comes before they begin."""
        try:
            with Stem(plans, fork=self._fork) as stem:
                for rank in tuple(stem.outputs):
                    out, err = open_streams(rank, *stem.outputs[rank])
                    self._output.add(out)
                    self._output.add(err)
                    self._errors[rank] = err
                    del stem.outputs[rank]  # the streams' from now on
                if self._await_report(stem):
                    for process in stem.settle():
                        self._alive[process.rank] = process
                        self._guard.add(process.pid)
                    stem.begin()
        except OSError as error:
            message = f"The ranks cannot be started: {error}. Check the limits with `rankmesh doctor`."
            raise JoinError(message) from error

    def _await_report(self, stem: Stem) -> bool:
        """Wait until all ranks have branched off. False: they are not to begin any more."""
        deadline = time.monotonic() + START_TIMEOUT
        self._selector.register(stem.report, selectors.EVENT_READ, stem)
        try:
            while not stem.complete:
                if time.monotonic() >= deadline:
                    raise JoinError(
                        f"The ranks' interpreter (pid {stem.pid}) did not start within {START_TIMEOUT:g} s. See what "
                        "site-packages or sitecustomize do at its start: `python -X importtime -c pass`."
                    )
                self._pump(deadline)
                if self._ending:
                    return False
        finally:
            self._selector.unregister(stem.report)
        return True

    def _pump(self, deadline: float | None) -> bool:
        """Wait for something to happen until then, and attend to it. True if signals came: ranks may have ended.

        Any signal counts: if very many come at once, the one for a rank's end may be lost among them."""
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        signals = b""
        for key, _ in self._selector.select(timeout):
            if isinstance(key.data, socket.socket):
                signals = key.data.recv(4096)
            elif isinstance(key.data, Stem):
                key.data.read()
            else:
                self._output.handle(key.data)
        for number in signals:
            self._on_signal(number)
        return bool(signals)

    def _reap(self) -> Iterator[Exit]:
        for rank, process in tuple(self._alive.items()):
            pid = process.pid
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                _signal_group(pid, signal.SIGKILL)
                self._guard.remove(pid)
                del self._alive[rank]
                yield Exit(rank, pid, process.reap(), told=self._ending)

    def _check_ends(self, now: float) -> None:
        if not self._ending:
            self.outcome.lost_output = self._output.broken
            self.outcome.timed_out = self._give_up_at is not None and now >= self._give_up_at
            if self._settled_at is None and self.outcome.failures:
                self._settled_at = now + SETTLE
            settled = self._settled_at is not None and now >= self._settled_at
            if settled or self.outcome.lost_output or self.outcome.timed_out:
                self._end(signal.SIGTERM, now)
        if self._kill_at is not None and now >= self._kill_at:
            self._signal_all(signal.SIGKILL)
            self._kill_at = None
            self._abandon_at = now + UNKILLABLE

    def _on_signal(self, number: int) -> None:
        if number in FORWARDED:
            if not self._ending:  # a rank that is on its way out has no handler any more, and would die of it
                self._signal_all(number)
        elif number in ENDING:
            if number == signal.SIGINT == self.outcome.interrupted:
                self._kill_at = time.monotonic()
            if self.outcome.interrupted is None:
                self.outcome.interrupted = number
            self._end(ENDING[number], time.monotonic())

    def _end(self, number: int, now: float) -> None:
        if not self._ending:
            self._ending = True
            self._kill_at = now + self._grace
            self._signal_all(number)

    def _signal_all(self, number: int) -> None:
        for process in self._alive.values():
            _signal_group(process.pid, number)

    def _drain(self) -> None:
        self._kill_at = None
        deadline = time.monotonic() + DRAIN
        while self._output.reading and time.monotonic() < deadline:
            self._pump(deadline)
            if self._output.blocked and self.outcome.interrupted is None:
                deadline = time.monotonic() + DRAIN  # the pipes are not late: a slow reader keeps us from reading them


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass  # nobody left in it, or only processes of another user


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """Catch signals; the socket given has a byte, its number, for each that came."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    # What is ignored stays so: nohup ignores SIGHUP, and a shell's background jobs SIGINT.
    heeded = (number for number in (*ENDING, *FORWARDED) if signal.getsignal(number) is not signal.SIG_IGN)
    watched = (*heeded, signal.SIGCHLD)
    previous = {number: signal.signal(number, _note) for number in watched}
    previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()


def _note(_number: int, _frame: object) -> None:
    """The wake-up descriptor carries the news; a handler must only exist for the interpreter to write to it."""

"""Processes that a test talks with by pipes, stops and kills: what the worlds of ranks.py and torch_world.py have in
common."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from time import monotonic
from typing import Any, Self

from timing import scaled

#: Seconds for which a stuck process may say where it is.
TIME_TO_SAY = 0.3


def say_where_on_failure() -> None:
    """In a process, first of all: the stacks of its threads, if the test fails while it runs."""
    faulthandler.register(signal.SIGUSR2)


class Processes:
    """`target(*arguments(rank, talk))` in a process for each rank. Leaving the block kills what still runs."""

    #: Seconds (scaled) a rank may take to say what it is about to say anyway, or to end.
    patience = 20.0

    def __init__(
        self,
        context: BaseContext,
        size: int,
        target: Callable[..., None],
        arguments: Callable[[int, Connection], tuple[Any, ...]],
    ) -> None:
        self.size = size
        self._talks: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            # only the contexts of a start method have it
            process = context.Process(  # type: ignore[attr-defined]
                target=target, args=arguments(rank, theirs), name=f"rank-{rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._talks.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._say_where()
        for process, talk in zip(self._processes, self._talks, strict=True):
            talk.close()
            process.kill()
            process.join()
            process.close()

    def _say_where(self) -> None:
        """A test has failed: who still runs may be stuck, and says on stderr where (`say_where_on_failure`)."""
        stuck = [process for process in self._processes if process.is_alive()]
        for process in stuck:
            os.kill(process.pid, signal.SIGUSR2)
        for process in stuck:
            process.join(TIME_TO_SAY)

    def pid(self, rank: int) -> int:
        pid = self._processes[rank].pid
        assert isinstance(pid, int)
        return pid

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Send a signal; the time just before."""
        when = monotonic()
        os.kill(self.pid(rank), number)
        return when

    def say(self, rank: int, what: Any = None) -> None:
        self._talks[rank].send(what)

    def hear(self, rank: int, timeout: float | None = None) -> Any:
        """What a rank says next, within `timeout` seconds (scaled here)."""
        talk, seconds = self._talks[rank], scaled(self.patience if timeout is None else timeout)
        assert talk.poll(seconds), f"rank {rank} said nothing within {seconds:g} s"
        return talk.recv()

    def exit_code(self, rank: int) -> int:
        """Wait for a rank's process to end."""
        self._processes[rank].join(scaled(self.patience))
        code = self._processes[rank].exitcode
        assert isinstance(code, int), f"rank {rank} did not end"
        return code

"""Ranks in processes of their own, which a test talks with, stops and kills.

    with Ranks(4, body, config) as ranks:       # body(mesh, talk, *args) runs in each process, after join()
        ranks.hear(2)                           # what rank 2 said by talk.send(…)
        ranks.signal(3, SIGKILL)

    run_ranks(4, fn, config)                    # fn(mesh, *args) runs in each process; the results by rank

A body is a function of a module. The processes are forked from a server that has imported rankmesh and holds nothing
else (tests/nursery.py): they are fresh, and start in a tenth of the time. Times that ranks report are
`time.monotonic()`, which is one clock for all processes of a host.
"""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_connections
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from nursery import nursery
from processes import Processes, say_where_on_failure
from rankmesh.config import Config
from rankmesh.errors import RankmeshError
from rankmesh.membership.ports import free_port
from rankmesh.mesh import Mesh, join
from timing import scaled

#: Seconds (scaled) a rank may take to say what it is about to say anyway.
PATIENCE = 20.0

Body = Callable[..., None]

#: pytest imports tests as `tests.folder.test_x` without this being on the path; the ranks' processes import them too.
ROOT = str(Path(__file__).parent.parent)
if ROOT not in sys.path:
    sys.path.append(ROOT)


class Outcome(NamedTuple):
    """How a call in a rank ended, and when."""

    when: float
    value: Any
    error: RankmeshError | None


class Crash(NamedTuple):
    """A body raised; the text of the traceback."""

    trace: str


def attempt(call: Callable[[], Any]) -> Outcome:
    """In a rank: make a call that may raise an error of rankmesh."""
    try:
        value = call()
    except RankmeshError as error:
        return Outcome(monotonic(), None, error)
    return Outcome(monotonic(), value, None)


def _main(url: str, rank: int, size: int, config: Config, talk: Connection, body: Body, args: Sequence[Any]) -> None:
    say_where_on_failure()
    try:
        with join(url, rank=rank, size=size, config=config, timeout=scaled(PATIENCE)) as mesh:
            body(mesh, talk, *args)
    except BaseException:  # the test shall see it, whatever it is
        talk.send(Crash(traceback.format_exc()))
        raise


class Ranks(Processes):
    """A world of processes."""

    patience = PATIENCE

    def __init__(self, size: int, body: Body, config: Config | None = None, args: Sequence[Any] = ()) -> None:
        url, settings = f"tcp://127.0.0.1:{free_port()}", config or Config()
        context = multiprocessing.get_context("forkserver")
        super().__init__(context, size, _main, lambda rank, talk: (url, rank, size, settings, talk, body, args))

    def hear(self, rank: int, timeout: float | None = None) -> Any:
        said = super().hear(rank, timeout)
        assert not isinstance(said, Crash), f"rank {rank} crashed:\n{said.trace}"
        return said

    def hear_all(self, ranks: Sequence[int] | None = None) -> list[Any]:
        return [self.hear(rank) for rank in (range(self.size) if ranks is None else ranks)]

    def hear_first_of_each(self, timeout: float) -> list[Any]:
        """What all ranks say next, heard as it comes: the first that crashes is the one to be shown."""
        deadline = monotonic() + scaled(timeout)
        said: dict[int, Any] = {}
        while len(said) < self.size:
            silent = {talk: rank for rank, talk in enumerate(self._talks) if rank not in said}
            ready = wait_for_connections(silent, max(deadline - monotonic(), 0.0))
            assert ready, f"ranks {[*silent.values()]} said nothing within {scaled(timeout):g} s"
            for talk in ready:
                rank = silent[talk]  # type: ignore[index]  # of what was given, these are ready
                said[rank] = self.hear(rank)
        return [said[rank] for rank in range(self.size)]


def _report(mesh: Mesh, talk: Connection, fn: Callable[..., Any], args: Sequence[Any]) -> None:
    talk.send(fn(mesh, *args))


def run_ranks(
    size: int,
    fn: Callable[..., Any],
    config: Config | None = None,
    args: Sequence[Any] = (),
    timeout: float = 2 * PATIENCE,
) -> list[Any]:
    """`run_world(…, processes=True)` with processes of the nursery: the results by rank, once all have ended in order.
    `timeout`: of the slowest, in seconds (scaled here)."""
    with Ranks(size, _report, config, (fn, args)) as ranks:
        results = ranks.hear_first_of_each(timeout)
        assert [ranks.exit_code(rank) for rank in range(size)] == [0] * size
    return results


Talk = Connection
__all__ = ["Mesh", "Outcome", "Ranks", "Talk", "attempt", "nursery", "run_ranks"]

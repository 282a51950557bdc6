"""Ranks that have torch, for tests: forked from a process that has imported it and holds nothing else.

Importing torch takes seconds, so one process (the fixture `nursery`) does it for the whole session. A test's scenario
runs there: `nursery.call(scenario, …)`. A scenario is a function of a module, and starts ranks with `run_ranks` or
`Ranks`.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import pytest

from processes import Processes
from timing import scaled

#: Seconds (scaled) a world may take for what it does in a fraction of them.
PATIENCE = 40.0
#: pytest imports tests as `tests.torch.test_x` without this being on the path; the nursery imports them too.
ROOT = str(Path(__file__).parent.parent)
if ROOT not in sys.path:
    sys.path.append(ROOT)

Body = Callable[..., Any]


class Outcome(NamedTuple):
    """What a call returned or raised, when it ended, and the traceback."""

    when: float
    value: Any
    error: BaseException | None = None
    trace: str = ""


def attempt(call: Callable[..., Any], *args: Any) -> Outcome:
    """Make a call that may raise anything."""
    try:
        value = call(*args)
    except BaseException as error:  # noqa: BLE001  # the test shall see it, whatever it is
        return Outcome(monotonic(), None, error, traceback.format_exc())
    return Outcome(monotonic(), value)


class Ranks(Processes):
    """Forked processes, each of which calls `body(rank, talk, *args)`."""

    patience = PATIENCE

    def __init__(self, size: int, body: Body, *args: Any) -> None:
        context = multiprocessing.get_context("fork")
        super().__init__(context, size, _rank_main, lambda rank, talk: (rank, talk, body, args))

    def outcome(self, rank: int) -> Any:
        """What a rank's body returned; fails with what it raised."""
        ended = self.hear(rank)
        assert isinstance(ended, Outcome), f"rank {rank} said {ended!r} before its end"
        assert ended.error is None, f"rank {rank} of {self.size} failed:\n{ended.trace}"
        return ended.value


def _rank_main(rank: int, talk: Connection, body: Body, args: Sequence[Any]) -> None:
    ended = attempt(body, rank, talk, *args)
    try:
        talk.send(ended)
    except Exception as error:  # noqa: BLE001  # a result that cannot be pickled
        talk.send(Outcome(ended.when, None, RuntimeError(f"{error!r} of {ended!r}"), ended.trace or repr(ended)))


def run_ranks(size: int, body: Body, *args: Any, timeout: float = PATIENCE) -> list[Any]:
    """`body(rank, *args)` on ranks with a default process group; what they return."""
    with tempfile.TemporaryDirectory() as folder, Ranks(size, _grouped, size, folder, timeout, body, args) as ranks:
        return [ranks.outcome(rank) for rank in range(size)]


def init(rank: int, size: int, folder: str, timeout: float = PATIENCE) -> None:
    """The default process group, by a file in a folder that all ranks know."""
    from torch import distributed as dist

    dist.init_process_group(
        "rankmesh",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=scaled(timeout)),
    )


def _grouped(rank: int, talk: Connection, size: int, folder: str, timeout: float, body: Body, args: Any) -> Any:
    from torch import distributed as dist

    init(rank, size, folder, timeout)
    result = body(rank, *args)
    dist.destroy_process_group()
    return result


class Nursery:
    """A process that has imported torch."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._talk, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()

    def call(self, scenario: Callable[..., Any], *args: Any, timeout: float = 2 * PATIENCE) -> Any:
        """Call a function there; its result, or an assertion with its traceback."""
        self._talk.send((scenario, args))
        assert self._talk.poll(scaled(timeout)), f"{scenario.__name__} took longer than {scaled(timeout):g} s"
        ended: Outcome = self._talk.recv()
        assert ended.error is None, ended.trace
        return ended.value

    def run(self, size: int, body: Body, *args: Any) -> list[Any]:
        """`run_ranks` there."""
        found: list[Any] = self.call(run_ranks, size, body, *args)
        return found

    def close(self) -> None:
        self._talk.close()
        self._process.join(scaled(PATIENCE))
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _serve(talk: Connection) -> None:
    # These are imported by DDP's constructor, or by tests: once here instead of on each rank.
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor

    import rankmesh.torch  # noqa: F401  # registers the backend

    torch.set_num_threads(1)  # ranks share the cores; and threads do not survive a fork
    while True:
        try:
            scenario, args = talk.recv()
        except EOFError:
            return
        ended = attempt(scenario, *args)
        talk.send(ended if ended.error is None else ended._replace(error=RuntimeError(str(ended.error))))


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Import it, with `torch` skipped where there is none: `pytest.importorskip("torch")`."""
    made = Nursery()
    yield made
    made.close()

"""run_world: a world of ranks for a test, in threads or in processes."""

from __future__ import annotations

import multiprocessing
import threading
import traceback
from collections.abc import Callable, Mapping
from time import monotonic
from types import MappingProxyType
from typing import Any, TypeVar
from uuid import uuid4

from rankmesh.config import Config
from rankmesh.errors import DeadlineError, RankmeshError
from rankmesh.membership.ports import free_port
from rankmesh.mesh import join

T = TypeVar("T")


class WorldFailed(RankmeshError):
    """A rank's function raised. Attributes: rank (the first that failed), traces (rank → traceback text)."""

    rank: int = -1
    traces: Mapping[int, str] = MappingProxyType({})


def run_world(
    size: int,
    fn: Callable[..., T],
    transport: str = "inproc://",
    processes: bool = False,
    *,
    args: tuple[Any, ...] = (),
    config: Config | None = None,
    timeout: float = 60.0,
) -> list[T]:
    """Run `fn(mesh, *args)` on `size` ranks and return their results by rank.

    `transport` is `inproc://`, `tcp://` or `tls://` (with `Config(tls=…)`): with processes=True `tcp://` or
    `tls://`, and `fn`, its arguments and its result must be picklable. Every mesh is closed. If ranks raise,
    WorldFailed carries all their tracebacks, and its cause is the exception of the rank that failed first.
    """
    scheme = transport.partition("://")[0]
    if processes and scheme == "inproc":
        scheme = "tcp"
    url = f"inproc://world-{uuid4().hex}" if scheme == "inproc" else f"{scheme}://127.0.0.1:{free_port()}"
    settings = (url, size, fn, args, config or Config(), timeout)
    outcomes = _in_processes(settings, timeout) if processes else _in_threads(settings, timeout)
    failed = sorted((when, rank) for rank, (when, _, error) in outcomes.items() if error is not None)
    if failed:
        first = failed[0][1]
        traces = {rank: error[1] for rank, (_, _, error) in outcomes.items() if error is not None}
        raise WorldFailed(f"Rank {first} of {size} failed.\n{traces[first]}", rank=first, traces=traces) from outcomes[
            first
        ][2][0]
    return [outcomes[rank][1] for rank in range(size)]


def _one_rank(
    rank: int, url: str, size: int, fn: Callable[..., Any], args: tuple[Any, ...], config: Config, timeout: float
) -> Any:
    """When it ended, the result, and the error with its traceback."""
    ended: float | None = None
    try:
        with join(url, rank=rank, size=size, config=config, timeout=timeout) as mesh:
            try:
                result = fn(mesh, *args)
            finally:
                ended = monotonic()  # before the others learn of it: they fail later
    except BaseException as error:  # noqa: BLE001  # carried to the caller, whatever it is
        return ended or monotonic(), None, (error, traceback.format_exc())
    return ended, result, None


def _in_threads(settings: tuple[Any, ...], timeout: float) -> dict[int, Any]:
    outcomes: dict[int, Any] = {}
    size = settings[1]

    def run(rank: int) -> None:
        outcomes[rank] = _one_rank(rank, *settings)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    deadline = monotonic() + timeout
    for thread in threads:
        thread.join(max(deadline - monotonic(), 0.0))
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if late:
        raise DeadlineError(
            f"Rank {', '.join(map(str, late))} did not end within {timeout:g} s.", op="run_world", timeout=timeout
        )
    return outcomes


def _process_main(rank: int, pipe: Any, settings: tuple[Any, ...]) -> None:
    outcome = _one_rank(rank, *settings)
    try:
        pipe.send(outcome)
    except Exception as error:  # noqa: BLE001  # a result or an exception that cannot be pickled
        text = f"Rank {rank}'s outcome cannot be pickled: {error!r}. It is {outcome}."
        pipe.send((monotonic(), None, (RankmeshError(text), text)))
    finally:
        pipe.close()


def _in_processes(settings: tuple[Any, ...], timeout: float) -> dict[int, Any]:
    context = multiprocessing.get_context("spawn")
    size = settings[1]
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_process_main, args=(rank, pipes[rank][1], settings), daemon=True)
        for rank in range(size)
    ]
    deadline = monotonic() + timeout
    outcomes: dict[int, Any] = {}
    try:
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()
        for rank, (receiver, _) in enumerate(pipes):
            if not receiver.poll(max(deadline - monotonic(), 0.0)):
                raise DeadlineError(f"Rank {rank} did not end within {timeout:g} s.", op="run_world", timeout=timeout)
            try:
                outcomes[rank] = receiver.recv()
            except EOFError:
                processes[rank].join(max(deadline - monotonic(), 0.1))
                code = processes[rank].exitcode
                died = RankmeshError(f"Rank {rank}'s process died (exit code {code}).")
                outcomes[rank] = (monotonic(), None, (died, str(died)))
    finally:
        for process, (receiver, _) in zip(processes, pipes, strict=True):
            receiver.close()
            if process.is_alive() and len(outcomes) < size:
                process.kill()
            if process.pid is not None:
                process.join()
                process.close()
    return outcomes

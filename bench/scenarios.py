"""What needs worlds of its own, of other sizes and not pinned: idle CPU, more ranks than cores, many on one region."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack

from harness import Plan, Result, SubjectFailed, World, run_interleaved
from session import Session

IDLE, OVERSUBSCRIBED = "idle", "oversubscribed"
IDLE_PEERS = 8
IDLE_SECONDS, QUICK_IDLE_SECONDS = 10.0, 2.0
OVERSUBSCRIBED_RANKS = 4
#: The names of the two worlds in the oversubscribed ping-pong.
PAIR, CROWD = "rankmesh-tcp, 2 ranks, unpinned", f"rankmesh-tcp, {OVERSUBSCRIBED_RANKS} ranks, unpinned"
PINGPONG_UNPINNED = Plan(OVERSUBSCRIBED, "pingpong", 64, least=200, most=50_000)
RANKMESH = "rankmesh-tcp"
#: An owner, a reader and a writer.
PAIR_RANKS = 3

Scenario = Callable[[Session], Iterable[Result]]


def idle_cpu(session: Session) -> Iterable[Result]:
    """Rank 0 does nothing with 8 connected peers, in 8 processes, each waiting in a receive. Nobody is pinned.

    The one round has rank 0's `cpu_percent`, and as `waiting_cpu_percent` that of the busiest of the waiting peers.
    """
    if RANKMESH not in session.subjects:
        return []
    result = Result(RANKMESH, IDLE, 0)
    seconds = QUICK_IDLE_SECONDS if session.quick else IDLE_SECONDS
    session.progress(f"{IDLE}: {IDLE_PEERS} peers for {seconds:.0f} s")
    try:
        with World(RANKMESH, 1 + IDLE_PEERS, cores=()) as world:
            hub, *waiting = world.call("idle", seconds=seconds, timeout=seconds + 60)
    except SubjectFailed as failure:
        result.failure = str(failure)
    else:
        result.rounds.append({**hub, "waiting_cpu_percent": max(reply["cpu_percent"] for reply in waiting)})
    return [result]


def oversubscribed_pingpong(session: Session) -> Iterable[Result]:
    """Ping-pong of ranks 0 and 1: in a world of 2, and in one of 4 whose other ranks wait in a receive."""
    if RANKMESH not in session.subjects:
        return []
    session.progress(f"{OVERSUBSCRIBED}: starting")
    try:
        with World(RANKMESH, 2, cores=()) as pair, World(RANKMESH, OVERSUBSCRIBED_RANKS, cores=()) as crowd:
            return run_interleaved(PINGPONG_UNPINNED, session.effort, {PAIR: pair, CROWD: crowd}, session.progress)
    except SubjectFailed as failure:
        return [Result(name, OVERSUBSCRIBED, PINGPONG_UNPINNED.nbytes, failure=str(failure)) for name in (PAIR, CROWD)]


def ring(plan: Plan, size: int, names: tuple[str, ...]) -> Scenario:
    """The ring of `size` ranks, each of them allowed on all cores."""

    def run(session: Session) -> Iterable[Result]:
        taking_part = [name for name in names if name in session.subjects]
        with ExitStack() as stack:
            worlds = session.start_worlds(stack, [plan], taking_part, size, cores=())
            return run_interleaved(plan, session.effort, worlds, session.progress)

    return run


def crowd(plan: Plan, size: int, names: tuple[str, ...]) -> Scenario:
    """Readers and writers of one region, `size` ranks with its owner, in turn with one reader and one writer."""

    def run(session: Session) -> Iterable[Result]:
        results: list[Result] = []
        for name in names:
            if name in session.subjects:
                results += one(session, name)
        return results

    def one(session: Session, name: str) -> list[Result]:
        titles = {ranks: crowd_title(name, ranks) for ranks in (PAIR_RANKS, size)}
        session.progress(f"{plan.measure}: starting {name}, {size} ranks")
        try:
            with ExitStack() as stack:
                worlds = {title: stack.enter_context(World(name, ranks, cores=())) for ranks, title in titles.items()}
                return run_interleaved(plan, session.effort, worlds, session.progress)
        except SubjectFailed as failure:
            return [Result(title, plan.measure, plan.nbytes, failure=str(failure)) for title in titles.values()]

    return run


def crowd_title(name: str, ranks: int) -> str:
    """Half of those beside the owner read, half write."""
    return f"{name}, {(ranks - 1) // 2} + {(ranks - 1) // 2}"

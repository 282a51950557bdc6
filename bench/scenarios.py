"""What only rankmesh is asked to show: CPU while idle, and a ping-pong on a machine with more ranks than cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from harness import Plan, Result, SubjectFailed, World, run_interleaved
from subjects import PINGPONG, RANKMESH

IDLE, OVERSUBSCRIBED = "idle", "oversubscribed"
IDLE_PEERS = 8
OVERSUBSCRIBED_RANKS = 4

Progress = Callable[[str], None]


def idle_cpu(seconds: float, progress: Progress) -> Result:
    """Rank 0 does nothing with 8 connected peers, in 8 processes, each waiting in a receive. Nobody is pinned.

    The one round has rank 0's `cpu_percent`, and as `waiting_cpu_percent` that of the busiest of the waiting peers.
    """
    result = Result(RANKMESH, IDLE, 0)
    progress(f"{IDLE}: {IDLE_PEERS} peers for {seconds:.0f} s")
    try:
        with World(RANKMESH, 1 + IDLE_PEERS, cores=()) as world:
            hub, *waiting = world.call("idle", seconds=seconds, timeout=seconds + 60)
    except SubjectFailed as failure:
        result.failure = str(failure)
    else:
        result.rounds.append({**hub, "waiting_cpu_percent": max(reply["cpu_percent"] for reply in waiting)})
    return result


def oversubscribed_pingpong(plan: Plan, progress: Progress) -> tuple[Result, Result]:
    """Unpinned ping-pong of ranks 0 and 1: in a world of 2, and in one of 4 whose other ranks wait in a receive."""
    plan = replace(plan, measure=PINGPONG)
    two, four = "2 ranks", f"{OVERSUBSCRIBED_RANKS} ranks"
    progress(f"{OVERSUBSCRIBED}: starting")
    try:
        with World(RANKMESH, 2, cores=()) as pair, World(RANKMESH, OVERSUBSCRIBED_RANKS, cores=()) as crowd:
            alone, crowded = run_interleaved(plan, {two: pair, four: crowd}, progress)
    except SubjectFailed as failure:
        alone, crowded = (Result(name, PINGPONG, plan.nbytes, failure=str(failure)) for name in (two, four))
    for result in (alone, crowded):
        result.subject, result.measure = f"{RANKMESH}, {result.subject}, unpinned", OVERSUBSCRIBED
    return alone, crowded

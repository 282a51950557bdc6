"""Servers in processes of their own, killed and stopped in the middle of thousands of calls."""

from __future__ import annotations

import signal
import threading
from time import monotonic
from typing import Any

from rankmesh import Config
from rankmesh.errors import DeadlineError, PeerLost
from ranks import Mesh, Outcome, Ranks, Talk, attempt
from timing import scaled

CALLS = 1000
THREADS = 20


def hang() -> None:
    threading.Event().wait(3600)


def caller(mesh: Mesh, talk: Talk) -> None:
    """Rank 0 has CALLS calls in flight at rank 1, and tells when and how each ended."""
    mesh.rpc.register(hang)
    mesh.rpc.register(lambda value: value, "echo", inline=True)
    mesh.barrier(timeout=scaled(20))
    if mesh.rank == 1:
        talk.send("serving")
        hang()
    works = [mesh.rpc.call_async(1, "hang", timeout=scaled(60)) for _ in range(CALLS)]
    assert mesh.rpc.call(1, "echo", 1, timeout=scaled(20)) == 1  # all others have arrived before it
    outcomes: list[Outcome] = []
    lock = threading.Lock()

    def wait(mine: list[Any]) -> None:
        for work in mine:
            outcome = attempt(work.result)
            with lock:
                outcomes.append(outcome)

    threads = [threading.Thread(target=wait, args=(works[at::THREADS],)) for at in range(THREADS)]
    for thread in threads:
        thread.start()
    talk.send("waiting")
    for thread in threads:
        thread.join()
    talk.send([(outcome.when, type(outcome.error).__name__) for outcome in outcomes])
    talk.recv()


def test_killed_server_ends_all_its_calls_within_a_second(nursery: None) -> None:
    with Ranks(2, caller) as ranks:
        assert (ranks.hear(1), ranks.hear(0)) == ("serving", "waiting")
        killed = ranks.signal(1, signal.SIGKILL)
        ends = ranks.hear(0)
        assert {name for _, name in ends} == {PeerLost.__name__}
        assert len(ends) == CALLS
        assert max(when for when, _ in ends) - killed < scaled(1.0)


def stopped(mesh: Mesh, talk: Talk) -> None:
    """Rank 0's calls have deadlines of their own; rank 1 is stopped."""
    mesh.rpc.register(lambda value: value, "echo", inline=True)
    mesh.rpc.register(lambda value: value, "pooled")
    mesh.barrier(timeout=scaled(20))
    talk.send("ready")
    if mesh.rank == 1:
        talk.recv()
        return
    talk.recv()
    timeouts = [0.2 + 0.01 * number for number in range(100)]
    ends: list[tuple[float, float, str]] = []
    lock = threading.Lock()

    def ask(timeout: float) -> None:
        began = monotonic()
        outcome = attempt(lambda: mesh.rpc.call(1, "pooled" if timeout > 0.7 else "echo", 1, timeout=timeout))
        with lock:
            ends.append((timeout, outcome.when - began, type(outcome.error).__name__))

    threads = [threading.Thread(target=ask, args=(timeout,)) for timeout in timeouts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    talk.send(ends)
    talk.recv()  # rank 1 runs again
    talk.send((mesh.rpc.call(1, "echo", "again", timeout=scaled(20)), mesh.rpc.statistics()["calls_waiting"]))
    talk.recv()


def test_stopped_server_lets_each_call_end_at_its_own_deadline(nursery: None) -> None:
    with Ranks(2, stopped, Config(heartbeat_interval=10, heartbeat_timeout=60)) as ranks:
        ranks.hear_all()
        ranks.signal(1, signal.SIGSTOP)
        ranks.say(0)
        ends = ranks.hear(0)
        assert {name for _, _, name in ends} == {DeadlineError.__name__}
        assert all(timeout <= took < timeout + scaled(1.0) for timeout, took, _ in ends), ends
        ranks.signal(1, signal.SIGCONT)
        ranks.say(0)
        assert ranks.hear(0) == ("again", 0)
        ranks.say(0)
        ranks.say(1)

"""A rank that is killed or stopped in the middle of a gibibyte over shared memory: the other learns of it in time, and
nothing is left behind."""

from __future__ import annotations

import os
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from time import monotonic
from typing import Any

import numpy as np
import pytest

from forked import shm_names
from rankmesh import Work
from rankmesh.config import GIB, MIB, Config
from rankmesh.endpoint.sharing import Copy
from rankmesh.endpoint.transfers import Landing
from rankmesh.errors import PeerLost
from ranks import Mesh, Outcome, Ranks, Talk, attempt
from timing import scaled, wait_until

pytestmark = pytest.mark.usefixtures("nursery")

#: Silence counts after a second instead of five, so that these tests are short.
QUICK = Config(heartbeat_interval=scaled(0.2), heartbeat_timeout=scaled(1.0), timeout=scaled(40))
DEFAULT = Config(timeout=scaled(40))
#: A death that the kernel tells of; it takes down a gibibyte of memory first.
AT_ONCE = 2.0
SENDER, RECEIVER = 0, 1
NBYTES = GIB


def memory() -> int:
    """Bytes of shared and anonymous memory files on this host."""
    (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("Shmem:"))
    return int(line.split()[1]) * 1024


def strike_in_the_middle(mesh: Mesh, talk: Talk, victim: int, number: Signals) -> None:
    """In the receiver: with the piece that makes a quarter full, say so, and send the signal."""
    pid = mesh.peers[victim].pid if victim != mesh.rank else os.getpid()
    assert pid is not None
    router: Any = mesh.peers[SENDER].router
    incoming = router.inbound.incoming
    landed, step = incoming._piece_landed, Copy.step

    def look(before: int, after: int) -> None:
        if before <= NBYTES // 4 < after:
            talk.send(monotonic())
            os.kill(pid, number)

    def landed_and_look(landing: Landing, nbytes: int) -> None:
        landed(landing, nbytes)
        look(landing.got - nbytes, landing.got)

    def step_and_look(copy: Copy) -> bool:
        before = copy.landing.got
        done = step(copy)
        look(before, copy.landing.got)
        return done

    incoming._piece_landed = landed_and_look
    Copy.step = step_and_look  # type: ignore[method-assign, assignment]


def transfer(mesh: Mesh, talk: Talk, victim: int, number: Signals, arena: bool) -> None:
    """Both say how it ended for them, if they still can."""
    other = 1 - mesh.rank
    make = mesh.empty if arena and mesh.rank == SENDER else np.empty
    array: np.ndarray[Any, Any] = make(NBYTES, np.uint8)
    if mesh.rank == SENDER:
        array[:] = 0xC3
    mesh.barrier()
    router: Any = mesh.peers[other].router
    link = router.link
    assert str(router.carrier) == "shm (same host)"
    if mesh.rank == SENDER:
        outcome = attempt(lambda: mesh.send(array, to=other, tag=1))
    else:
        strike_in_the_middle(mesh, talk, victim, number)
        outcome = attempt(lambda: mesh.recv(array, source=other, tag=1))
    if outcome.error is None:  # all of it had crossed: what comes next fails
        words = array.view(np.uint64)
        assert words.min() == words.max() == 0xC3C3C3C3C3C3C3C3, "what was delivered is not what was sent"
        outcome = attempt(lambda: mesh.recv(bytearray(1), source=other, tag=2))
    talk.send(outcome)
    talk.send((link._segment._map.closed, link.shared, link.fileno()))
    talk.recv()


def strike_test(victim: int, number: Signals, arena: bool, config: Config) -> None:
    names_before = shm_names()
    survivor = 1 - victim
    with Ranks(2, transfer, config, args=(victim, number, arena)) as ranks:
        struck = ranks.hear(RECEIVER, timeout=40)
        outcome = ranks.hear(survivor)
        assert isinstance(outcome, Outcome)
        assert isinstance(outcome.error, PeerLost), outcome
        assert outcome.error.rank == victim
        silence = config.heartbeat_timeout
        if number is SIGKILL:
            assert outcome.when - struck < scaled(AT_ONCE)
            assert "closed" in outcome.error.reason
        else:
            assert silence * 0.7 < outcome.when - struck < silence + scaled(2)
            assert "silent" in outcome.error.reason
        assert ranks.hear(survivor) == (True, {}, -1), "it still maps what it shared with the lost one"
        assert shm_names() == names_before
        if number is SIGSTOP:
            ranks.signal(victim, SIGCONT)
    assert shm_names() == names_before


# Of either signal: either side, and either way in which the bytes cross. `make soak` has all combinations, and the
# default heartbeat, which tests/failure/test_liveness.py has in every run.
@pytest.mark.parametrize(
    "victim, arena",
    [
        pytest.param(SENDER, False, id="sender-staged"),
        pytest.param(RECEIVER, True, id="receiver-arena"),
        pytest.param(SENDER, True, id="sender-arena", marks=pytest.mark.soak),
        pytest.param(RECEIVER, False, id="receiver-staged", marks=pytest.mark.soak),
    ],
)
def test_killed_in_the_middle_of_a_gibibyte(victim: int, arena: bool) -> None:
    strike_test(victim, SIGKILL, arena, DEFAULT)


@pytest.mark.parametrize(
    "victim, arena, config",
    [
        pytest.param(SENDER, True, QUICK, id="sender-arena"),
        pytest.param(RECEIVER, False, QUICK, id="receiver-staged"),
        pytest.param(SENDER, False, QUICK, id="sender-staged", marks=pytest.mark.soak),
        pytest.param(SENDER, True, DEFAULT, id="sender-arena-by-default", marks=pytest.mark.soak),
        pytest.param(RECEIVER, True, DEFAULT, id="receiver-arena-by-default", marks=pytest.mark.soak),
    ],
)
def test_stopped_in_the_middle_of_a_gibibyte(victim: int, arena: bool, config: Config) -> None:
    strike_test(victim, SIGSTOP, arena, config)


def hold(mesh: Mesh, talk: Talk) -> None:
    """Have all there is: arenas that were shared, messages half received, waits."""
    array = mesh.empty(128 * MIB, np.uint8)
    array[:] = mesh.rank
    others = [rank for rank in range(mesh.size) if rank != mesh.rank]
    outs = {rank: np.empty(128 * MIB, np.uint8) for rank in others}
    receives = [mesh.irecv(outs[rank], source=rank, tag=1) for rank in others]
    sends = [mesh.isend(array, to=rank, tag=1) for rank in others]
    works: list[Work[Any]] = [*receives, *sends]
    for work in works:
        work.wait()
    more = [mesh.isend(array, to=rank, tag=2) for rank in others]
    talk.send(len(more))
    mesh.recv(bytearray(1), tag=3)


def test_all_killed_at_once_leave_nothing() -> None:
    names_before, memory_before = shm_names(), memory()
    with Ranks(3, hold, DEFAULT) as ranks:
        assert ranks.hear_all() == [2] * 3
        for rank in range(3):
            ranks.signal(rank, SIGKILL)
        for rank in range(3):
            assert ranks.exit_code(rank) == -SIGKILL
        assert shm_names() == names_before
        wait_until(lambda: memory() < memory_before + 192 * MIB, 5, "384 MiB of arenas to be given back")

"""Mistakes and losses: ranks that call different things are told so, all and at once; who is missing is named."""

from __future__ import annotations

from collections.abc import Callable
from signal import SIGKILL, SIGSTOP
from threading import Event
from time import monotonic
from typing import Any

import numpy as np
import pytest

from rankmesh import Config, DeadlineError, DesyncError, Group, Mesh, PeerLost
from rankmesh.testing import run_world
from ranks import Ranks, Talk, attempt, run_ranks
from timing import scaled, wait_until

pytestmark = pytest.mark.usefixtures("nursery")

CONFIG = Config(timeout=scaled(30))
LIMIT = scaled(50)
#: Ranks that disagree learn of it within this.
SOON = 1.0
#: What other ranks do comes within this.
SOON_ENOUGH = scaled(20)

Calls = list[Callable[[Group], Any]]

#: What ranks call, rank by rank (the last for all further ones), and what the error says of the last.
MISTAKES: dict[str, tuple[Calls, str]] = {
    "collective": ([lambda g: g.all_reduce(np.zeros(4)), lambda g: g.barrier()], "called barrier #0"),
    "nobody sends": (
        [lambda g: g.reduce(np.zeros(4), root=0), lambda g: g.broadcast(np.zeros(4), root=0)],
        "broadcast #0",
    ),
    "count": ([lambda g: g.all_reduce(np.zeros(4)), lambda g: g.all_reduce(np.zeros(5))], "5 float64"),
    "large count": (
        [lambda g: g.all_reduce(np.zeros(100_000)), lambda g: g.all_reduce(np.zeros(100_001))],
        "100001 float64",
    ),
    "dtype": ([lambda g: g.all_gather(np.zeros(4, "f4")), lambda g: g.all_gather(np.zeros(4, "i4"))], "4 int32"),
    "op": ([lambda g: g.all_reduce(np.zeros(4), "max"), lambda g: g.all_reduce(np.zeros(4), "min")], "min"),
    "root": ([lambda g: g.gather(np.zeros(4), 0), lambda g: g.gather(np.zeros(4), 1)], "root 1"),
    "algorithm": (
        [lambda g: g.all_reduce(np.zeros(4), algorithm="ring"), lambda g: g.all_reduce(np.zeros(4))],
        "recursive_doubling",
    ),
    "counts": (
        [lambda g: g.all_to_all_v(np.zeros(g.size), [1] * g.size, [1] * g.size)] * 2
        + [lambda g: g.all_to_all_v(np.zeros(5), [2, 2, 1], [1, 1, 1])],
        "sent 16 bytes where 8 were expected",
    ),
}


def _mistake(mesh: Mesh, which: str) -> tuple[float, DesyncError]:
    calls, _ = MISTAKES[which]
    group = mesh.dup()
    mesh.barrier()
    began = monotonic()

    def call() -> None:
        calls[min(mesh.rank, len(calls) - 1)](group)
        group.barrier()  # who only sent has it behind it, and is told here

    with pytest.raises(DesyncError) as caught:
        call()
    took = monotonic() - began
    with pytest.raises(DesyncError):
        group.barrier()  # and from now on always
    group.close()
    assert mesh.all_reduce(1) == mesh.size
    return took, caught.value


@pytest.mark.parametrize("which", MISTAKES)
def test_ranks_that_disagree_are_told_so_at_once(which: str) -> None:
    for took, error in run_world(3, _mistake, args=(which,), config=CONFIG, timeout=LIMIT):
        assert took < scaled(SOON)
        assert len(error.calls) >= 2
        assert MISTAKES[which][1] in str(error)
        assert any("test_desync.py:" in call for call in error.calls.values())


def _other_order(mesh: Mesh) -> DesyncError:
    first, second = (mesh.all_reduce, mesh.all_gather)[:: 1 if mesh.rank != 2 else -1]
    mesh.all_reduce(1)

    def both() -> None:
        first(np.zeros(3))
        second(np.zeros(3))

    with pytest.raises(DesyncError) as caught:
        both()
    return caught.value


def test_another_order_is_shown_rank_by_rank_with_number_and_line() -> None:
    for error in run_ranks(4, _other_order, CONFIG):
        assert {rank: call.split(" (")[0] for rank, call in error.calls.items()} == {
            0: "called all_reduce #1",
            1: "called all_reduce #1",
            2: "called all_gather #1",
            3: "called all_reduce #1",
        } or "is in it" in error.calls.values()
        assert "rank 2 called all_gather #1 (3 float64, shared) at test_desync.py:" in str(error)


def _absent(mesh: Mesh) -> DeadlineError | None:
    mesh.all_reduce(1)
    if mesh.rank == 2:
        mesh.recv(b"", source=0, timeout=LIMIT)
        return None
    with pytest.raises(DeadlineError) as caught:
        mesh.all_reduce(np.zeros(4), timeout=scaled(1))
    mesh.sendrecv(b"", b"", to=1 - mesh.rank)  # who leaves first must not be missed by the other
    if mesh.rank == 0:
        mesh.send(b"", to=2)
    return caught.value


def test_who_is_absent_is_named_with_what_it_did_last() -> None:
    errors = run_world(3, _absent, config=CONFIG, timeout=LIMIT)
    late = [error for error in errors if error is not None]
    assert len(late) == 2
    for error in late:
        assert error.op == "all_reduce with"
        assert "rank 2" in error.known
        assert "has not called it: last in all_reduce #0" in error.known


def _late(mesh: Mesh, left: Event, asked: Event) -> list[int]:
    """A tree in which rank 3 waits for rank 2, and rank 1 for nobody but rank 0. Ranks 1 and 3 have never met."""
    array = np.full(3, mesh.rank)
    if mesh.rank == 2:
        assert asked.wait(SOON_ENOUGH)
    elif mesh.rank == 3:
        assert left.wait(SOON_ENOUGH)
    work = mesh.broadcast(array, root=0, algorithm="binomial", async_op=True)
    if mesh.rank == 3:
        stranger = mesh._routers[1]

        def was_asked() -> bool:
            with mesh._hub.engine:
                return bool(stranger.gone or (mesh._agent._asked and not stranger.requests))

        wait_until(was_asked, 10, "a question to who has left")
        asked.set()
    work.result()
    if mesh.rank == 1:
        mesh.close()
        left.set()
    else:
        mesh.group([0, 2, 3]).barrier()  # type: ignore[union-attr]  # nobody leaves before all have what they wait for
    return array.tolist()


@pytest.mark.parametrize("transport", ["inproc://", "tcp://"])
def test_who_has_finished_and_left_is_not_lost_to_those_who_never_met_it(transport: str) -> None:
    """A stalled collective asks everybody; who cannot be asked and is not waited for may have left in order."""
    made = run_world(4, _late, transport, args=(Event(), Event()), config=CONFIG, timeout=LIMIT)
    assert made == [[0, 0, 0]] * 4


def _wait_for_the_dead(mesh: Mesh, talk: Talk) -> None:
    """Without rank 0, of which the others would hear, and with no connection between them."""
    pair = mesh.group([1, 2])
    if pair is None:
        return
    assert pair.all_reduce(1) == 2
    other = mesh.peers[3 - mesh.rank]
    wait_until(lambda: mesh.peers[0].router.gone and not other.connected, 10, "the connections to go")
    talk.send("alone")
    talk.recv()
    began = monotonic()
    talk.send((began, attempt(lambda: pair.all_reduce(np.ones(4)))))


def test_who_is_waited_for_and_cannot_be_asked_is_lost() -> None:
    """On the stage nothing is sent that would fail: only the question finds out."""
    config = CONFIG.override(idle_timeout=0.1, heartbeat_interval=0.1)
    with Ranks(3, _wait_for_the_dead, config) as ranks:
        assert ranks.hear_all([1, 2]) == ["alone"] * 2
        ranks.signal(2, SIGKILL)
        assert ranks.exit_code(2) == -SIGKILL
        ranks.say(1)
        began, outcome = ranks.hear(1)
        assert isinstance(outcome.error, PeerLost), outcome
        assert (outcome.error.rank, outcome.error.op) == (2, "all_reduce with")
        assert outcome.when - began < scaled(5)


def _one_after_the_other(mesh: Mesh, talk: Talk) -> None:
    mesh.barrier()
    talk.send("ready")
    if mesh.rank == 2:
        talk.recv()
    began = monotonic()
    talk.send((began, attempt(lambda: mesh.all_reduce(np.zeros(10), algorithm="ring"))))
    talk.send(attempt(mesh.barrier))
    talk.recv()


@pytest.mark.parametrize("signal", [SIGKILL, SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_rank_ends_a_collective_on_every_rank(signal: Any) -> None:
    config = CONFIG.override(heartbeat_interval=scaled(0.3), heartbeat_timeout=scaled(1.5))
    with Ranks(4, _one_after_the_other, config) as ranks:
        assert ranks.hear_all() == ["ready"] * 4
        when = ranks.signal(2, signal)
        for rank in (0, 1, 3):
            outcome = ranks.hear(rank)[1]
            assert isinstance(outcome.error, PeerLost), outcome
            assert outcome.error.rank == 2
            assert outcome.error.op == "all_reduce with"
            assert outcome.when - when < scaled(5)
            later = ranks.hear(rank)
            assert isinstance(later.error, PeerLost)

"""The five mistakes, in processes, under the default heartbeat: whoever waits is told who is to blame within five
seconds. In the world and in a group, waiting and asynchronously."""

from __future__ import annotations

from collections.abc import Callable
from signal import SIGCONT, SIGKILL, SIGSTOP
from time import monotonic
from typing import Any

import numpy as np
import pytest

from rankmesh import Config, DeadlineError, DesyncError, Group, Mesh, PeerLost, RankmeshError
from ranks import Outcome, Ranks, Talk, attempt
from timing import scaled

pytestmark = pytest.mark.usefixtures("nursery")

#: The heartbeat is the default one. Deadlines are not: they end a mistake that nothing else ends.
CONFIG = Config(timeout=scaled(30))
#: Seconds within which the culprit is named.
BOUND = 5.0
SIZE = 4
CULPRIT = 2
#: The culprit is number 1 of the group.
MEMBERS = [3, 2, 1, 0]
#: Of who waits for the absent one.
PATIENCE = 1.5

Call = Callable[[Group, bool], Any]


def _right(group: Group, async_op: bool) -> Any:
    return group.all_reduce(np.ones(1000), async_op=async_op, timeout=scaled(PATIENCE))


def _reduce_all(group: Group, async_op: bool) -> Any:
    return group.all_reduce(np.ones(1000), async_op=async_op)


#: What the culprit calls where the others call all_reduce of 1,000 numbers.
WRONG: dict[str, Call] = {
    "wrong collective": lambda group, async_op: group.all_gather(np.ones(1000), async_op=async_op),
    "wrong size": lambda group, async_op: group.all_reduce(np.ones(1001), async_op=async_op),
}


def _err(mesh: Mesh, talk: Talk, mistake: str) -> None:
    group = mesh.group(MEMBERS)
    assert group is not None
    group.barrier()
    mesh.barrier()
    talk.send("ready")
    talk.recv()
    call: Call = _right if mistake == "absent" else _reduce_all
    if mesh.rank == CULPRIT:
        if mistake not in WRONG:
            talk.recv()  # here it is struck, or stays
            return
        call = WRONG[mistake]
    began = monotonic()
    started = attempt(lambda: call(group, True))  # a loss may be known already
    in_world = attempt(lambda: call(mesh, False))
    in_group = attempt(started.value.result) if started.error is None else started
    later = attempt(lambda: group.barrier(timeout=scaled(0.1)))
    talk.send((began, in_world, in_group, later))
    talk.recv()


def _outcomes(mistake: str) -> list[tuple[int, list[tuple[float, Outcome]]]]:
    """For each rank that lives: (seconds, outcome) of the call in the world, that in the group, and the next one."""
    found = []
    with Ranks(SIZE, _err, CONFIG, args=(mistake,)) as ranks:
        assert ranks.hear_all() == ["ready"] * SIZE
        struck = monotonic()
        for rank in range(SIZE):
            ranks.say(rank)
        if mistake in ("killed", "stopped"):
            struck = ranks.signal(CULPRIT, SIGKILL if mistake == "killed" else SIGSTOP)
        for rank in range(SIZE):
            if rank != CULPRIT or mistake in WRONG:
                began, *outcomes = ranks.hear(rank)
                found.append((rank, [(outcome.when - max(began, struck), outcome) for outcome in outcomes]))
        if mistake == "stopped":
            ranks.signal(CULPRIT, SIGCONT)
    return found


def _blames(error: RankmeshError | None, in_group: bool) -> bool:
    if isinstance(error, PeerLost):
        return error.rank == CULPRIT and f"rank {CULPRIT} " in str(error)
    if isinstance(error, DesyncError):
        number = MEMBERS.index(CULPRIT) if in_group else CULPRIT
        return len(set(error.calls.values())) > 1 and "test_mistakes.py:" in error.calls[number]
    return isinstance(error, DeadlineError) and f"rank {CULPRIT} " in error.known and "has not called" in error.known


@pytest.mark.parametrize(
    "mistake, kind",
    [
        ("killed", PeerLost),
        ("stopped", PeerLost),
        ("absent", DeadlineError),
        ("wrong collective", DesyncError),
        ("wrong size", DesyncError),
    ],
)
def test_the_culprit_is_named_on_every_rank(mistake: str, kind: type[RankmeshError]) -> None:
    outcomes = _outcomes(mistake)
    assert len(outcomes) == SIZE - (mistake not in WRONG)
    for rank, ended in outcomes:
        for at, (took, outcome) in enumerate(ended[:2]):
            print(f"rank {rank}: after {took:.3f} s {outcome.error}")
            assert isinstance(outcome.error, kind), (rank, outcome)
            assert _blames(outcome.error, in_group=at == 1), (rank, outcome.error)
            assert took < scaled(BOUND), (rank, outcome)
        assert ended[2][1].error is not None, "the group is used no further"

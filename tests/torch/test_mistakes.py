"""The five mistakes, through torch's API, in processes: whoever waits gets rankmesh's error, which names the culprit,
within seconds; in plain calls, in works and futures, in DDP's backward pass. No process is aborted."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from signal import SIGKILL, SIGSTOP
from time import monotonic
from typing import Any

import pytest

from rankmesh.errors import DeadlineError, DesyncError, PeerLost, RankmeshError
from timing import scaled
from torch_world import Nursery, Outcome, Ranks, attempt, init, nursery

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'rankmesh[torch]'")
dist = torch.distributed

__all__ = ["nursery"]

SIZE = 3
CULPRIT = 1
#: Seconds within which the culprit is named: the heartbeat's, and some.
BOUND = 8.0
#: Of who waits for the absent one.
PATIENCE = 1.0


def _ddp() -> Callable[[], Any]:
    """A step of training, up to the backward pass."""
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(50, 50))
    loss = net(torch.ones(4, 50)).sum()

    def backward() -> None:
        loss.backward()
        assert next(net.parameters()).grad is not None  # it lives, and so do its hooks

    return backward


def _calls() -> dict[str, Callable[[], Any]]:
    """Ways to wait for the others."""
    tensor = torch.ones(1000)
    return {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "work": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        "future": lambda: dist.all_reduce(tensor, async_op=True).get_future().wait(),
        "then": lambda: dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()).wait(),
        "backward": _ddp(),
    }


def _wrong(mistake: str) -> None:
    if mistake == "wrong collective":
        dist.broadcast(torch.ones(1000), 0)
    else:
        dist.all_reduce(torch.ones(1001))


def _err(rank: int, talk: Any, folder: str, mistake: str, way: str) -> Outcome | None:
    patience = PATIENCE if mistake == "absent" else 60.0
    init(rank, SIZE, folder, patience)
    call = _calls()[way]
    dist.barrier()
    talk.send("ready")
    talk.recv()
    if rank != CULPRIT:
        ended = attempt(call)
    elif mistake.startswith("wrong"):
        ended = attempt(_wrong, mistake)
    else:
        talk.recv()  # here it is struck, or stays
        return None
    talk.send("done")
    talk.recv()  # nobody leaves before all have found out
    return ended


def _outcomes(mistake: str, way: str) -> list[tuple[float, Outcome]]:
    """Of each rank that lives: seconds since the mistake, and how its call ended."""
    with tempfile.TemporaryDirectory() as folder, Ranks(SIZE, _err, folder, mistake, way) as ranks:
        assert [ranks.hear(rank) for rank in range(SIZE)] == ["ready"] * SIZE
        number = {"killed": SIGKILL, "stopped": SIGSTOP}.get(mistake)
        when = monotonic() if number is None else ranks.signal(CULPRIT, number)
        living = [rank for rank in range(SIZE) if rank != CULPRIT or mistake.startswith("wrong")]
        for rank in range(SIZE) if number is None else living:
            ranks.say(rank)
        for rank in living:
            assert ranks.hear(rank) == "done"
        for rank in living:
            ranks.say(rank)
        ended = [ranks.outcome(rank) for rank in living]
        codes = [ranks.exit_code(rank) for rank in living]
        assert codes == [0] * len(living), f"exit codes {codes}"
        return [(outcome.when - when, outcome) for outcome in ended]


MISTAKES: dict[str, type[RankmeshError]] = {
    "killed": PeerLost,
    "stopped": PeerLost,
    "absent": DeadlineError,
    "wrong collective": DesyncError,
    "wrong size": DesyncError,
}


#: Who is stopped is found out by the heartbeat, which takes its time; then it is as if it were killed.
#: Every mistake, and every way to meet it; `make soak` has all pairs.
CASES = {("killed", "all_reduce"), ("killed", "work"), ("stopped", "backward"), ("absent", "all_reduce"),
         ("wrong collective", "backward"), ("wrong collective", "all_reduce"), ("wrong size", "future")}  # fmt: skip


@pytest.mark.parametrize(
    "mistake, way",
    [
        pytest.param(mistake, way, marks=() if (mistake, way) in CASES else pytest.mark.soak)
        for mistake in MISTAKES
        for way in ("all_reduce", "work", "future", "backward")
    ],
)
def test_culprit_is_named(nursery: Nursery, mistake: str, way: str) -> None:
    for seconds, outcome in nursery.call(_outcomes, mistake, way):
        assert isinstance(outcome.error, MISTAKES[mistake]), outcome.trace
        assert f"rank {CULPRIT}" in str(outcome.error), outcome.error
        assert seconds < scaled(BOUND)
        if isinstance(outcome.error, DesyncError):
            assert "distributed_c10d.py" not in str(outcome.error), "the line of the program is named, not torch's"
            assert "test_mistakes.py:" in str(outcome.error)


def test_callbacks_of_a_failed_future_get_its_error(nursery: Nursery) -> None:
    """torch makes a RuntimeError of what a callback raises; its text names the culprit."""
    for _, outcome in nursery.call(_outcomes, "killed", "then"):
        assert type(outcome.error) is RuntimeError
        assert "PeerLost" in str(outcome.error)
        assert f"rank {CULPRIT}" in str(outcome.error)

"""Mistakes and losses: ranks that call different things are told so, all and at once; who is missing is named."""

from __future__ import annotations

from collections.abc import Callable
from signal import SIGKILL, SIGSTOP
from threading import Event
from time import monotonic
from typing import Any

import numpy as np
import pytest

from rankmesh import Config, DeadlineError, DesyncError, Group, Mesh, PeerLost, TransferAborted, UsageError
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
        }
        assert all(" at test_desync.py:" in call for call in error.calls.values())
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


def _one_element_fewer(mesh: Mesh) -> DesyncError:
    for _ in range(5):
        mesh.all_reduce(np.full(100_020, 1000.0, "f4"))
    with pytest.raises(DesyncError) as caught:
        mesh.all_reduce(np.arange(100_020 if mesh.rank else 20_598, dtype="f4"))
    return caught.value


def test_counts_whose_checksums_are_equal_are_told_apart() -> None:
    """A digest of 22 bits of a CRC was the same: on the stage both ranks took what lay in the slots for the result."""
    for error in run_ranks(2, _one_element_fewer, CONFIG):
        assert "20598 float32" in error.calls[0]
        assert "100020 float32" in error.calls[1]


def _calls_another_and_leaves(mesh: Mesh) -> tuple[float, DesyncError] | None:
    mesh.barrier()
    if mesh.rank == 0:
        mesh.broadcast(np.zeros(5), 0)  # it has done its part, and goes
        return None
    began = monotonic()
    with pytest.raises(DesyncError) as caught:
        mesh.broadcast(np.zeros(4), 0)
    return monotonic() - began, caught.value


def test_who_called_something_else_and_left_is_not_waited_for() -> None:
    """On the stage it had said so, with another digest; who waited looked at the number only, until the deadline."""
    _, *others = run_ranks(3, _calls_another_and_leaves, CONFIG)
    for rank, (took, error) in enumerate(others, 1):
        assert took < scaled(SOON)
        assert error.calls[0] == "called something else under that number, and has left"
        assert error.calls[rank].startswith("called broadcast #1 (4 float64, root 0, shared) at test_desync.py:")


def _gathers(mesh: Mesh) -> Any:
    pair = mesh.group([0, 1])
    if pair is not None:
        pair.gather(np.ones(4), 0)
    gathered = mesh.gather(np.ones(4), np.int64(0), timeout=scaled(5))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"no rank 0\.5"):
        mesh.reduce(np.ones(4), root=0.5)  # type: ignore[arg-type]
    return None if gathered is None else gathered.shape


def test_a_root_that_is_numpys_integer_is_the_same_root() -> None:
    """What such a call was called depended on what this process had called before."""
    assert run_world(3, _gathers, config=CONFIG, timeout=LIMIT) == [(3, 4), None, None]


def _far_ahead(mesh: Mesh, gone_ahead: Event) -> DesyncError:
    mesh.barrier()
    if mesh.rank == 0:
        for _ in range(1500):
            mesh.broadcast(np.zeros(2), 0)
        gone_ahead.set()
    assert gone_ahead.wait(SOON_ENOUGH)
    with pytest.raises(DesyncError) as caught:
        mesh.barrier()
    return caught.value


def test_who_is_more_than_a_thousand_calls_ahead_is_told_apart() -> None:
    """It was taken to be in the same call, for nobody remembered: all waited for their deadlines."""
    for error in run_world(2, _far_ahead, args=(Event(),), config=CONFIG, timeout=LIMIT):
        assert error.calls[0].startswith("called something else as #1: it is at b")
        assert any(f" #{number} " in error.calls[0] for number in (1500, 1501))
        assert error.calls[1].startswith("called barrier #1 ")


def _closes_the_group(mesh: Mesh) -> Any:
    group = mesh.dup()
    group.barrier()
    mesh.barrier()
    began = monotonic()
    if mesh.rank == 1:
        group.close()
        outcome: Any = None
    else:
        with pytest.raises(TransferAborted) as caught:
            group.all_reduce(np.ones(3))
        outcome = monotonic() - began, caught.value
    mesh.barrier()
    return outcome


def test_who_has_closed_the_group_is_not_waited_for() -> None:
    first, _, last = run_world(3, _closes_the_group, config=CONFIG, timeout=LIMIT)
    for took, error in (first, last):
        assert took < scaled(SOON)
        assert (error.rank, error.reason) == (1, "it has closed this group, after 1 collectives")


def _elsewhere(mesh: Mesh) -> DeadlineError | None:
    group = mesh.dup()
    group.barrier()
    if mesh.rank == 1:
        mesh.barrier()
        return None
    with pytest.raises(DeadlineError) as caught:
        group.all_reduce(np.ones(3), timeout=scaled(1))
    mesh.barrier()
    return caught.value


def test_who_is_in_a_collective_of_another_group_is_said_to_be_there() -> None:
    first, _, last = run_world(3, _elsewhere, config=CONFIG, timeout=LIMIT)
    for error in (first, last):
        assert error is not None
        assert error.peer.startswith("rank 1 ("), "not whom the algorithm waits for, who waits itself"
        assert "has not called it: last in barrier #0" in error.known
        assert "; it is in barrier #1 (dissemination) at test_desync.py:" in error.known
        assert " of the mesh, for " in error.known


def _nobody_waits(mesh: Mesh) -> Any:
    mesh.barrier()
    outcome: Any = None
    if mesh.rank == 0:
        done = Event()
        work = mesh.all_reduce(np.ones(3), async_op=True, timeout=scaled(0.5))
        work.add_done_callback(lambda _: done.set())
        assert done.wait(SOON_ENOUGH)
        with pytest.raises(DeadlineError) as caught:
            work.result()
        outcome = caught.value.timeout
        mesh.send(b"", to=1)
    else:
        mesh.recv(b"", source=0)
    return outcome


@pytest.mark.parametrize("transport", ["inproc://", "tcp://"])
def test_an_asynchronous_call_ends_in_its_time_though_nobody_waits(transport: str) -> None:
    assert run_world(2, _nobody_waits, transport, config=CONFIG, timeout=LIMIT) == [scaled(0.5), None]


def _counts(mesh: Mesh) -> DesyncError:
    mesh.barrier()
    gives = [2, 2, 1] if mesh.rank == 2 else [1, 1, 1]
    with pytest.raises(DesyncError) as caught:
        mesh.all_to_all_v(np.zeros(sum(gives)), gives, [1, 1, 1])
    return caught.value


def test_wrong_counts_are_shown_rank_by_rank_with_number_and_line() -> None:
    for error in run_world(3, _counts, config=CONFIG, timeout=LIMIT):
        assert set(error.calls) == {0, 1, 2}
        assert all(call.startswith("called all_to_all_v #1 (") for call in error.calls.values())
        assert ", and sent 16 bytes where 8 were expected" in error.calls[2]


def _ends_by(mesh: Mesh, how: Callable[[Mesh, Any], None]) -> Any:
    """What rank 0's error says, whose collective ends in that way while rank 1 does something else."""
    if mesh.rank == 1:
        mesh.recv(b"", source=0, timeout=LIMIT)
        return None
    work = mesh.all_reduce(np.ones(3), async_op=True)
    with mesh._hub.engine:
        how(mesh, work)
    with pytest.raises(DesyncError) as caught:
        work.result()
    mesh.send(b"", to=1)
    return caught.value.calls


def _is_told(mesh: Mesh, work: Any) -> None:
    mesh._context.told({1: "called barrier #0"})


def _loses_who_did_not_fit(mesh: Mesh, work: Any) -> None:
    work.doubts[1] = "sent 8 bytes where 24 were expected"
    work.stop(PeerLost("rank 1 is lost: it closed its endpoint."))


@pytest.mark.parametrize(
    "how, other", [(_is_told, "called barrier #0"), (_loses_who_did_not_fit, "sent 8 bytes where 24 were expected")]
)
def test_who_is_told_or_merely_loses_the_other_still_says_what_each_called(
    how: Callable[[Mesh, Any], None], other: str
) -> None:
    """Who was told did not say its own call; and who is told sooner leaves sooner: to those who asked it was lost."""
    calls, _ = run_world(2, _ends_by, args=(how,), config=CONFIG, timeout=LIMIT)
    assert calls[1] == other
    assert calls[0].startswith("called all_reduce #0 (3 float64, sum, ")

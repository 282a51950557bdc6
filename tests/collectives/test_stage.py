"""The stage in real processes: that it is there, that it is not where it cannot be, and what happens when a call on it
does not get on."""

from __future__ import annotations

import _thread
import asyncio
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  # numpy's bfloat16
import numpy as np
import pytest

from rankmesh import CancelledError, Config, DeadlineError, Group, Mesh, PeerLost, RankmeshError
from rankmesh.buffers import MID_PAGE, PAGE
from rankmesh.collectives import agent, stage
from rankmesh.collectives.founding import State
from rankmesh.endpoint.timers import Timers
from rankmesh.testing import run_world
from rankmesh.transport.shm import ShmLink
from ranks import Ranks, Talk, run_ranks
from timing import scaled, wait_until

pytestmark = pytest.mark.usefixtures("nursery")

CONFIG = Config(timeout=scaled(20))
LIMIT = scaled(40)
#: No heartbeat wakes anybody.
PATIENT = CONFIG.override(heartbeat_interval=scaled(100), heartbeat_timeout=scaled(300))


def _state(mesh: Mesh) -> tuple[State, str]:
    mesh.barrier()
    return mesh._context.founding.state, mesh._context.founding.reason


def test_ranks_of_one_host_have_one() -> None:
    states = run_ranks(3, _state, CONFIG)
    assert states == [(State.STAGE, "")] * 3


def _offsets(mesh: Mesh) -> set[int]:
    mesh.barrier()
    stage = mesh._context.founding.stage
    assert stage is not None
    return {slot.ctypes.data % PAGE for slots in stage.slots(np.dtype(np.float64)) for slot in slots}


def test_slots_begin_in_mid_page() -> None:
    """Of this rank and of the others: see MID_PAGE."""
    assert run_ranks(2, _offsets, CONFIG) == [{MID_PAGE}] * 2


def _state_with_one_against(mesh: Mesh) -> tuple[State, str, float]:
    """Which it finds out only when it is to found one."""
    if mesh.rank == 1:
        mesh._hub.config = mesh._hub.config.override(shm=False)
    total = mesh.all_reduce(np.ones(1000, np.float32))
    return *_state(mesh), float(total.sum())


def test_where_one_rank_has_none_nobody_has() -> None:
    for state, reason, total in run_ranks(3, _state_with_one_against, CONFIG):
        assert state is State.NONE
        assert "switched off" in reason
        assert total == 3000


def test_without_shared_memory_there_is_none() -> None:
    config = CONFIG.override(shm=False)
    in_threads = run_world(2, _state, config=config, timeout=LIMIT)
    for state, _ in [*in_threads, *run_ranks(2, _state, config)]:
        assert state is State.NONE


def _groups(mesh: Mesh) -> list[float]:
    """Groups that overlap, calls of which are under way at once, each begun before the stage is known."""
    with mesh.dup() as other, mesh.split(mesh.rank % 2) as half:  # type: ignore[union-attr]
        works = []
        for group in (mesh, other, half):
            assert isinstance(group, Group)
            works += [group.all_reduce(np.full(size, 1.0 + mesh.rank), async_op=True) for size in (1, 300_000, 7)]
        found = [float(work.result()[-1]) for work in reversed(works)]
        assert mesh._context.founding.state is State.STAGE
        return found


def test_many_calls_on_several_groups() -> None:
    for rank, found in enumerate(run_ranks(4, _groups, CONFIG)):
        half = 1.0 + 3.0 if rank % 2 == 0 else 2.0 + 4.0
        assert found == [half] * 3 + [10.0] * 6


@dataclass
class Unhashable:
    """An operation, as objects with an equality of their own are."""

    def __call__(self, left: Any, right: Any) -> Any:
        return left + right


def _out_of_place(mesh: Mesh, count: int) -> None:
    """Each form twice: the second call knows of the first, and takes a shorter way."""
    total = sum(range(1, mesh.size + 1))
    memory = np.empty(2 * count + 1, np.int64)
    for _ in range(2):
        own, out = memory[:count], memory[count : 2 * count]
        own[:], out[:] = mesh.rank + 1, -1
        assert mesh.all_reduce(own, out=out) is out
        assert np.all(out == total)
        assert np.all(own == mesh.rank + 1), "the array stays"
        work = mesh.all_reduce(own, "max", out=out, async_op=True)
        assert work.result() is out
        assert np.all(out == mesh.size)
        out[:] = -1
        mesh.reduce(own, root=mesh.size - 1, out=out)
        assert np.all(out == (total if mesh.rank == mesh.size - 1 else -1))
        assert np.all(own == mesh.rank + 1), "the array stays"
        own.flags.writeable = False
        assert np.all(mesh.all_reduce(own, out=out) == total)
    for _ in range(2):
        memory[:] = mesh.rank + 1
        shifted = memory[1 : count + 1]
        assert mesh.all_reduce(memory[:count], out=shifted) is shifted
        assert np.all(shifted == total), "they overlap"
        assert mesh.all_reduce(shifted, out=shifted) is shifted
        assert np.all(shifted == total * mesh.size)
    matrix = np.matrix(np.full((1, count), mesh.rank + 1))  # whose arrays of one dimension have two
    assert np.all(mesh.all_reduce(matrix, out=np.empty((1, count), np.int64)) == total)
    assert np.all(mesh.all_reduce(np.full(count, mesh.rank + 1), Unhashable(), out=np.empty(count, np.int64)) == total)
    assert np.all(mesh.reduce_scatter(np.full((mesh.size, count), mesh.rank + 1), Unhashable()) == total)
    averaged = mesh.all_reduce(np.full(count, mesh.rank, np.float32), "avg", out=np.empty(count, np.float32))
    assert np.all(averaged == (mesh.size - 1) / 2)
    assert mesh.size == 1 or mesh._context.founding.state is State.STAGE


def _new_results(mesh: Mesh) -> None:
    ranks = np.arange(mesh.size)
    results: list[tuple[Any, Any]] = []
    for step in range(3):  # those after the first take a shorter way
        table = np.repeat(10 * mesh.rank + ranks + 100 * step, 5).reshape(mesh.size, 5)
        given = table.copy()
        results += [
            (mesh.all_gather(table[0]), np.repeat(10 * ranks + 100 * step, 5).reshape(mesh.size, 5)),
            (mesh.all_to_all(table), np.repeat(10 * ranks + mesh.rank + 100 * step, 5).reshape(mesh.size, 5)),
            (mesh.reduce_scatter(table, "max"), np.full(5, 10 * (mesh.size - 1) + mesh.rank + 100 * step)),
        ]
        assert np.array_equal(table, given)
    for result, wanted in results:
        assert np.array_equal(result, wanted), "a later call has written to it"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_without_out_each_call_makes_a_new_array(size: int) -> None:
    run_ranks(size, _new_results, CONFIG)


@pytest.mark.parametrize("count", [1, 3, 100_000, 700_001])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_out_of_place(size: int, count: int) -> None:
    run_ranks(size, _out_of_place, CONFIG, (count,))


def _given_up(mesh: Mesh, how: str) -> str:
    """Rank 0 gives an all_reduce up before rank 1 has come; the next ones are right."""
    mesh.barrier()
    array, said = np.ones(500_000, np.float32), ""
    if mesh.rank == 0:
        work = mesh.all_reduce(array, async_op=True)
        if how == "cancelled":
            assert work.cancel()
        with pytest.raises(CancelledError if how == "cancelled" else DeadlineError) as raised:
            work.result(timeout=0.1)
        said = str(raised.value)
        assert np.all(array == 1), "nothing was written"
        mesh.send(b"", to=1)
    else:
        mesh.recv(bytearray(), source=0)
        with pytest.raises(RankmeshError) as failed:
            mesh.all_reduce(array)
        said = str(failed.value)
    for size in (3, 700_000, 5, 1 << 20):
        total = mesh.all_reduce(np.full(size, mesh.rank + 1, np.int64))
        assert np.all(total == 3)
    assert mesh._context.founding.state is State.STAGE
    return said


@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_one_that_is_given_up_spoils_no_other(how: str) -> None:
    first, second = run_ranks(2, _given_up, CONFIG, (how,))
    assert "rank 1" in first or how == "cancelled"
    assert "rank 0" in second
    assert "gave up all_reduce #1" in second


def _asleep(mesh: Mesh) -> float:
    """Rank 1 comes late, so the others sleep; how much of a core they used meanwhile."""
    mesh.barrier()
    began = time.process_time()
    if mesh.rank == 1:
        mesh.recv(bytearray(), source=0)
    elif mesh.rank == 0:
        work = mesh.all_reduce(np.ones(100), async_op=True)
        time.sleep(scaled(0.5))
        mesh.send(b"", to=1)
        work.result()
        return time.process_time() - began
    mesh.all_reduce(np.ones(100))
    return time.process_time() - began


def test_who_waits_long_sleeps_and_is_woken() -> None:
    used = run_ranks(3, _asleep, CONFIG)
    assert max(used) < scaled(0.5) / 2


def _raises(mesh: Mesh) -> None:
    """An error of numpy's in the middle is the caller's, and the other is told."""
    mesh.all_reduce(np.ones(4))
    with np.errstate(over="raise"), pytest.raises((FloatingPointError, RankmeshError)):
        mesh.all_reduce(np.full(4, 3e38, np.float32))
    assert np.all(mesh.all_reduce(np.ones(4)) == 2)


def _without_timers(mesh: Mesh) -> None:
    """Have a stage; from now on nobody asks what a call is waiting for."""
    assert _state(mesh) == (State.STAGE, "")
    agent.LOOK = scaled(100)  # type: ignore[misc]
    timer, mesh._context.agent._timer = mesh._context.agent._timer, None
    if timer is not None:
        timer.cancel()


def _begun_and_left(mesh: Mesh) -> None:
    """All_reduces that nobody waits for, begun at any moment of the background thread's."""
    _without_timers(mesh)
    moments = random.Random(mesh.rank)
    for _ in range(60):
        mesh.barrier()
        time.sleep(moments.choice([0.0, 0.001, 0.004, 0.01]))  # the moment is the subject
        work = mesh.all_reduce(np.ones(1_000_000, np.float32), async_op=True)
        wait_until(work.done, 10, "an all_reduce that all ranks have begun")


@pytest.mark.parametrize("size", [2, 4])
def test_what_nobody_waits_for_gets_on(size: int) -> None:
    """It took until the next heartbeat if the background thread slept, or was thought to be awake."""
    run_ranks(size, _begun_and_left, PATIENT)


def _postponed(mesh: Mesh, seconds: float, cores: int) -> Any:
    """An all_reduce that has begun everywhere, on a host of so many cores, and whose callers have said that they
    compute first."""
    _without_timers(mesh)
    assert mesh._context.founding.stage is not None
    stage._POSTPONED = seconds  # type: ignore[misc]
    mesh._context.founding.stage.crowded = cores <= mesh.size
    mesh.barrier()
    go = np.zeros(1)
    if mesh.rank != 0:  # without rank 0, who is the first, nobody comes to an end
        mesh.recv(go, source=0)
    work = mesh.all_reduce(np.ones(1_000_000, np.float32), async_op=True)
    work.postpone()
    for rank in range(1, mesh.size if mesh.rank == 0 else 0):
        mesh.send(go, rank)
    return work


def _compute_and_wait(mesh: Mesh) -> list[bool]:
    """In several ways: what was done before somebody waited, and whether all is well."""
    found = []

    async def awaited(work: Any) -> Any:
        return await work

    for how in ("result", "await", "a call behind it", "result"):
        work = _postponed(mesh, scaled(100), cores=2)
        end = time.monotonic() + 0.05  # what is not to happen would take some milliseconds
        while time.monotonic() < end:
            mesh.iprobe()  # looks at everything
        found.append(work.done())
        if how == "await":
            asyncio.run(awaited(work))
            assert work.done()
        elif how == "a call behind it":
            mesh.barrier()
            assert work.done()
        found.append(bool(np.all(work.result() == mesh.size)))
    return found


def test_what_is_postponed_is_left_to_who_waits() -> None:
    assert run_ranks(3, _compute_and_wait, PATIENT) == [[False, True] * 4] * 3


def _postpone_and_leave(mesh: Mesh, seconds: float, cores: int) -> None:
    work = _postponed(mesh, seconds, cores)
    wait_until(work.done, 10, "an all_reduce that all ranks have begun")


@pytest.mark.parametrize("seconds, cores", [(0.05, 2), (scaled(100), 4)], ids=["not for ever", "not with many cores"])
def test_what_is_postponed_gets_on(seconds: float, cores: int) -> None:
    run_ranks(3, _postpone_and_leave, PATIENT, (seconds, cores))


def _wait_beside_another(mesh: Mesh, talk: Talk) -> None:
    """One thread leads, and sleeps for something else, when another waits for what was postponed."""
    with ThreadPoolExecutor(1) as thread:
        work = _postponed(mesh, scaled(100), cores=2)
        other, engine = 1 - mesh.rank, mesh._hub.engine
        with engine:
            engine.timers = Timers()
        waiting = thread.submit(mesh.recv, np.zeros(1), other, 7)
        wait_until(lambda: getattr(engine.leader, "parker", None) is engine.waker, 10, "the thread leads, asleep")
        talk.send("asleep")
        assert talk.recv() == "go on"
        assert np.all(work.result() == mesh.size)
        mesh.send(np.zeros(1), other, 7)
        waiting.result()
    talk.send("done")


def test_what_is_postponed_gets_on_when_somebody_waits_beside_a_leader() -> None:
    with Ranks(2, _wait_beside_another, PATIENT) as ranks:
        assert ranks.hear_all() == ["asleep"] * 2, "both, before one gets on: it needs nothing more of the other"
        for rank in range(2):
            ranks.say(rank, "go on")
        assert ranks.hear_all() == ["done"] * 2


def _enter_one_by_one(mesh: Mesh) -> tuple[float, list[float]]:
    """When this rank entered, and when it rang for others meanwhile."""
    _without_timers(mesh)
    mesh.barrier()
    bells: list[float] = []
    ring = ShmLink.ring

    def note(link: ShmLink) -> None:
        bells.append(time.monotonic())
        ring(link)

    time.sleep(0.05 * mesh.rank)  # long enough for the others to sleep, on a machine that is not too slow
    ShmLink.ring = note  # type: ignore[method-assign, assignment]
    entered = time.monotonic()
    mesh.barrier()
    ShmLink.ring = ring  # type: ignore[method-assign]
    return entered, bells


def test_only_who_completes_what_a_sleeper_waits_for_rings() -> None:
    entered, bells = zip(*run_ranks(4, _enter_one_by_one, PATIENT), strict=True)
    rung = sorted(bell for one in bells for bell in one)
    assert rung
    assert rung[0] > max(entered), "somebody was woken in vain"


def test_an_error_of_a_reduction_is_the_callers() -> None:
    run_ranks(2, _raises, CONFIG)


def _left_alone(mesh: Mesh, when: str) -> float:
    """Rank 1 leaves without having called what rank 0 calls, before that or during it."""
    mesh.barrier()
    if mesh.rank == 1:
        if when == "during":
            mesh.recv(bytearray(), source=0)
        return 0.0
    if when == "before":
        wait_until(lambda: mesh._routers[1].gone, 10)
    work = mesh.all_reduce(np.ones(500_000), async_op=True)
    if when == "during":
        mesh.send(b"", to=1)
    began = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1"):
        work.result()
    return time.monotonic() - began


@pytest.mark.parametrize("when", ["before", "during"])
def test_who_waits_for_a_rank_that_left_is_told_at_once(when: str) -> None:
    took, _ = run_ranks(2, _left_alone, CONFIG, (when,))
    assert took < scaled(5)


def _odd_elements(mesh: Mesh) -> None:
    """Elements of no size, and of more than a slot is made for, go over messages."""
    for dtype in ("V0", "V5000", "V8", "S3", "M8[s]", "?"):
        for _ in range(2):
            got = mesh.all_gather(np.zeros(3, dtype))
            assert (got.shape, got.dtype) == ((2, 3), np.dtype(dtype))
    assert mesh._context.founding.state is State.STAGE


def test_elements_of_odd_sizes() -> None:
    run_ranks(2, _odd_elements, CONFIG)


def _mixed(mesh: Mesh, seed: int) -> None:
    """Calls of all kinds and sizes in a row, blocking and not, while another thread's messages go on."""
    rng, size, rank = np.random.default_rng(seed), mesh.size, mesh.rank
    own_way = np.random.default_rng((seed, rank))  # some wait where others do not: one call goes different ways
    pending: list[tuple[Any, Any]] = []
    for turn in range(80):
        part = int(rng.choice([0, 1, 5, 1000, 40_000, 150_000, 400_000], p=[0.16] * 6 + [0.04]))
        data = rng.integers(0, 100, (size, size, part)).astype(np.int64)
        waits = bool(own_way.integers(2))
        which = int(rng.integers(5))
        if which == 0:
            got, wanted = mesh.all_reduce(data[rank, 0].copy(), async_op=not waits), data[:, 0].sum(0)
        elif which == 1:
            got, wanted = mesh.all_gather(data[rank, 0], async_op=not waits), data[:, 0]
        elif which == 2:
            got, wanted = mesh.reduce_scatter(data[rank], async_op=not waits), data.sum(0)[rank]
        elif which == 3:
            got, wanted = mesh.all_to_all(data[rank], async_op=not waits), data[:, rank]
        else:
            root = turn % size
            own = data[rank, 0].copy()
            got, wanted = mesh.broadcast(own, root=root, async_op=not waits), data[root, 0]
        if waits:
            assert np.array_equal(got, wanted)
        else:
            pending.append((got, wanted))
    for work, wanted in pending:
        assert np.array_equal(work.result(), wanted)


def _now_and_then(mesh: Mesh, last: int) -> list[float]:
    """Small calls as many apart as there are slots: the others go over messages, and say nothing on the stage. Rank
    `last` is, so that it goes through them at once."""

    def small() -> None:
        if mesh.rank == last:
            mesh.recv(bytearray(), source=1 - last)
            assert mesh.all_reduce(np.ones(4))[0] == 2
        else:
            work = mesh.all_reduce(np.ones(4), async_op=True)
            mesh.send(b"", to=last)
            assert work.result()[0] == 2

    found = []
    mesh.barrier()
    for count in (1, 4, 300_000):
        for _ in range(3):
            small()
            for _ in range(stage.SLOTS - 1):
                mesh.all_reduce(np.ones(4), algorithm="ring")
        # the root stages, the other rank stages nothing
        found.append(float(mesh.broadcast(np.full(count, 2.0 - mesh.rank))[-1]))
    return found


def _overlapping(mesh: Mesh, dtype: str) -> None:
    """Small calls whose input and result share memory, each twice: the second knows of the first. Halves are reduced
    block by block."""
    size, rank, part = mesh.size, mesh.rank, 50_000
    rows = (np.arange(size * size * part).reshape(size, size, part) % 100).astype(dtype)
    memory = np.empty(2 * size * part, dtype)
    for shift in (0, 1, 1000, part):
        for _ in range(2):
            given, out = memory[: size * part].reshape(size, part), memory[shift : shift + part]
            given[:] = rows[rank]
            assert np.array_equal(mesh.reduce_scatter(given, out=out), rows.sum(0)[rank])
            given[:] = rows[rank]
            wide = memory[shift : shift + size * part].reshape(size, part)
            assert np.array_equal(mesh.all_to_all(given, out=wide), rows[:, rank])
            memory[shift : shift + part] = rows[rank, 0]
            assert np.array_equal(mesh.all_gather(memory[shift : shift + part], out=given), rows[:, 0])


@pytest.mark.parametrize("size, dtype", [(2, "bfloat16"), (2, "int64"), (3, "float32")])
def test_input_and_result_may_overlap(size: int, dtype: str) -> None:
    run_ranks(size, _overlapping, CONFIG, (dtype,))


def test_a_verb_may_be_the_outermost_call() -> None:
    """Of a thread: nothing of the user's called it."""
    run_ranks(2, _outermost, CONFIG)


def _outermost(mesh: Mesh) -> None:
    for _ in range(3):  # the last takes the short way
        mesh.barrier()
    before = mesh.sequence
    _thread.start_new_thread(mesh.barrier, ())
    wait_until(lambda: mesh.sequence > before, 10)
    mesh.barrier()


def _all_at_once(mesh: Mesh) -> float:
    """The same where all ranks go through them at once: nobody gives up waiting for a word."""

    def comes(stage: Any, its: memoryview, word: int, serial: int) -> bool:
        wait_until(lambda: its[word] >= serial, 10)
        return True

    mesh.barrier()
    stage.Stage.comes = comes  # type: ignore[method-assign, assignment]
    stage.Stage.may_run = lambda _: True  # type: ignore[method-assign, assignment]
    array = np.ones(4)
    for _ in range(3):
        mesh.all_reduce(array)
        for _ in range(stage.SLOTS - 1):
            mesh.all_reduce(np.ones(4), algorithm="ring")
    return float(array[0])


def test_all_ranks_are_done_with_a_slot_that_all_of_them_want() -> None:
    assert run_ranks(2, _all_at_once, CONFIG) == [8.0] * 2


@pytest.mark.parametrize("last", [0, 1])
def test_calls_with_others_between_them_that_are_not_on_the_stage(last: int) -> None:
    assert run_ranks(2, _now_and_then, CONFIG, (last,)) == [[2.0] * 3] * 2


@pytest.mark.parametrize("size", [2, 3, 4])
def test_calls_of_all_kinds_in_any_order(size: int) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    run_ranks(size, _mixed, CONFIG, (seed,))

"""Who polls, and when that is given up: what a wait's beginning says of its rest, and where others have the core."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from time import monotonic, perf_counter

import pytest

from peers import SOON, Call, Medium, blank, open_pair, pattern, router_of
from rankmesh import Config, Work
from rankmesh.endpoint import direct, waiting
from rankmesh.endpoint.direct import RingPath, SocketPath
from rankmesh.endpoint.progress import Engine
from rankmesh.endpoint.transfers import Receive
from rankmesh.endpoint.waiting import Courtesy
from timing import wait_until

TCP = Medium("tcp://127.0.0.1:0", Config(shm=False))
LOOP = "print(flush=True)\nwhile True: pass"


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Without its background thread: nobody but the test waits."""
    engine = Engine("test", 100e-6)
    yield engine
    engine.stop()


def test_a_process_that_computes_is_noticed() -> None:
    """Found: beside programs that compute, each message through a ring took 4 ms: that long they had the core when they
    were let run, while who sleeps would have got it at once."""
    mask = os.sched_getaffinity(0)
    core = min(mask)
    courtesy = Courtesy()
    with subprocess.Popen([sys.executable, "-c", LOOP], stdout=subprocess.PIPE) as loop:
        try:
            assert loop.stdout is not None
            loop.stdout.readline()
            os.sched_setaffinity(loop.pid, {core})
            os.sched_setaffinity(0, {core})  # of this thread
            deadline = monotonic() + SOON
            while perf_counter() >= courtesy.resumes:
                assert monotonic() < deadline, "the other process did not run"
                courtesy.let_others_run(perf_counter())
        finally:
            os.sched_setaffinity(0, mask)
            loop.kill()


class Turns:
    """Others take the core for so many seconds, one after the other, with so many of our own before each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.courtesy = Courtesy()
        self._now = 100.0
        monkeypatch.setattr(waiting, "sched_yield", lambda: None)
        monkeypatch.setattr(waiting, "perf_counter", lambda: self._now)

    def take(self, takes: list[float], own: float = 1e-5) -> bool:
        """Whether nobody lets others run any more, from some time on."""
        for took in takes:
            self._now += own
            if self._now < self.courtesy.resumes:
                return True
            began = self._now
            self._now += took
            assert self.courtesy.let_others_run(began) == self._now
        return self._now < self.courtesy.resumes

    def resume(self) -> None:
        self._now = self.courtesy.resumes


SLICE, COPY, BRIEF = 0.004, 0.0015, 1e-5


def test_who_computes_is_let_run_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(monkeypatch)
    assert not turns.take([BRIEF, SLICE] * 4)
    assert turns.take([BRIEF, SLICE])
    for _ in range(3):
        turns.resume()
        assert turns.take([BRIEF, SLICE]), "it still computes: once is enough"
    turns.resume()
    assert not turns.take([BRIEF] * 10_000), "it does not any more"
    assert not turns.take([SLICE]), "and that is forgotten"


@pytest.mark.parametrize("between", [[BRIEF] * 300, [0.9 * Courtesy.LONG] * 2, []])
def test_ranks_that_take_long_now_and_then_are_let_run(monkeypatch: pytest.MonkeyPatch, between: list[float]) -> None:
    """They copy much, and wait for us then."""
    assert not Turns(monkeypatch).take([*between, COPY] * 1000, own=1e-5 if between else 2 * COPY)


def test_who_waits_at_a_ring_sleeps_where_nobody_is_let_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pair(Medium("shm://", Config())) as pair:
        engine = pair.right.hub.engine
        assert isinstance(router_of(pair.back).inbound.direct, RingPath)
        with engine:
            engine.courtesy.resumes = float("inf")
            engine.spin.hit()
        monkeypatch.setattr(waiting, "sched_yield", lambda: pytest.fail("it let others run"))
        out = blank(64)
        receiving = Call(pair.back.recv, out, tag=1, timeout=SOON)
        wait_until(lambda: engine.leader is not None and engine.leader.parker is engine.waker, 5, "the waiter to sleep")
        monkeypatch.undo()  # who sends may let others run
        pair.there.send(pattern(64, 7), tag=1, timeout=SOON)
        receiving.result()
        assert (out == pattern(64, 7)).all()


class InTwoParts:
    """What a wait is for comes in two parts: the first when the test says so, the second right behind it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
        self.work: Work[int]
        with engine:
            engine.watch(self._bells[0], select.EPOLLIN, self._first)
            engine.watch(self._bells[1], select.EPOLLIN, self._second)

    def _first(self, mask: int) -> None:
        os.eventfd_read(self._bells[0])
        os.eventfd_write(self._bells[1], 1)

    def _second(self, mask: int) -> None:
        os.eventfd_read(self._bells[1])
        self.work.finish(1)

    def wait(self) -> None:
        self.work = work = Work[int](self._engine, "wait", None, None, SOON)
        waiting = Call(work.wait)
        wait_until(lambda: work.parker is self._engine.waker, 5, "the waiter to sleep")
        os.eventfd_write(self._bells[0], 1)
        waiting.result()

    def close(self) -> None:
        for bell in self._bells:
            with self._engine:
                self._engine.unwatch(bell)
            os.close(bell)


def test_how_a_wait_goes_on_says_nothing_of_how_it_begins(engine: Engine) -> None:
    """Found: a reader of large blocks from a busy owner polled for 100 us in vain at the beginning of each, and slept;
    then the rest was there at once, which forgave it all, time and again."""
    parts = InTwoParts(engine)
    try:
        for _ in range(3):
            parts.wait()
    finally:
        parts.close()
    assert engine.spin.misses >= 2, "a wait that was polled for in vain at its beginning was forgiven"
    assert not engine.later_spin.misses


def test_what_comes_late_was_polled_for_in_vain(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: where many processes shared a core, a poll that found something because another had the core meanwhile
    counted as one that paid off, and each went on polling."""
    work, bell = Work[int](engine, "wait", None, None, SOON), os.eventfd(0, os.EFD_NONBLOCK)
    poll, polls = engine.poll, [0]

    def interrupted(timeout: float | None, most: int) -> list[tuple[int, int]]:
        polls[0] += 1
        if polls[0] == 2:  # another process has the core until the message is there
            began = perf_counter()
            wait_until(lambda: perf_counter() > began + 2 * engine.patience, 5)
            os.eventfd_write(bell, 1)
        return poll(timeout, most)

    monkeypatch.setattr(engine, "poll", interrupted)
    with engine:
        engine.watch(bell, select.EPOLLIN, lambda mask: work.finish(1))
        engine.drives = 1  # not the wait in so many that looks at everything first
        engine.spin.misses = 1
        engine.drive(work, monotonic() + SOON)
        engine.unwatch(bell)
    os.close(bell)
    assert work.result() == 1
    assert engine.spin.misses == 2


def test_a_reply_that_was_slept_for_is_no_reason_to_poll_for_the_next(engine: Engine) -> None:
    """Found: replies count as signs of more to come, and so did the very one that was waited for, however long."""
    work, bell = Work[int](engine, "wait", None, None, SOON), os.eventfd(0, os.EFD_NONBLOCK)

    def reply(mask: int) -> None:
        engine.heralds += 1
        work.finish(1)

    with engine:
        engine.watch(bell, select.EPOLLIN, reply)
        engine.spin.misses, engine.spin.skip = 3, 2
    waiting = Call(work.wait)
    wait_until(lambda: work.parker is engine.waker, 5, "the waiter to sleep")
    threading.Event().wait(3 * engine.patience)  # a sleep that polling would not have spared
    os.eventfd_write(bell, 1)
    waiting.result()
    with engine:
        engine.unwatch(bell)
    os.close(bell)
    assert (engine.spin.misses, engine.spin.skip) == (3, 1)


@pytest.mark.parametrize("late", [True, False], ids=["late", "in time"])
def test_a_look_at_a_socket_that_another_process_delayed(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """What came meanwhile would have woken a sleeper as soon: it is no reason to go on polling."""
    with open_pair(TCP) as pair:
        path, link = router_of(pair.back).inbound.direct, router_of(pair.back).link
        assert isinstance(path, SocketPath)
        assert link is not None
        engine = pair.right.hub.engine
        receive, looks = path._recv, [0]

        def look(into: memoryview) -> int:
            looks[0] += 1
            if looks[0] == 1:
                raise BlockingIOError
            if looks[0] == 2:
                pair.there.send(pattern(64, 7), tag=1, timeout=SOON)
                select.select([link], [], [], SOON)
            return receive(into)

        monkeypatch.setattr(path, "_recv", look)
        clock = iter([0.0, 0.0, 1.0 if late else 0.0])
        monkeypatch.setattr(direct, "perf_counter", lambda: next(clock, 2.0))
        with engine:
            work = Receive(pair.right.hub, "recv", pair.back, 0, path._index, 1, blank(64).data, False, {}, SOON)
            pair.right.hub.post(work)
            assert path.attend(work) is late
            assert work.finished

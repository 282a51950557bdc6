"""The progress engine: who drives, who sleeps, timers, callbacks, and the end."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable, Iterator
from time import monotonic, process_time

import pytest

from peers import BRIEFLY, SOON, Call
from rankmesh import ClosedError, DeadlineError, Work
from rankmesh.endpoint import waiting
from rankmesh.endpoint.progress import Engine
from rankmesh.endpoint.requests import Lone
from rankmesh.endpoint.waiting import Look, Spin, Waited
from timing import scaled, wait_until


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine("test", 100e-6)
    engine.start()
    yield engine
    engine.stop()


def new_work(engine: Engine, name: str = "wait", timeout: float = SOON) -> Work[int]:
    return Work(engine, name, None, None, timeout)


class Source:
    """A descriptor that finishes Works when it is rung: what a connection is to the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        self.drivers: list[str] = []
        self.due: list[Work[int]] = []
        with engine:
            engine.watch(self._fd, select.EPOLLIN, self._ready)

    def _ready(self, mask: int) -> None:
        os.eventfd_read(self._fd)
        self.drivers.append(threading.current_thread().name)
        self.due.pop(0).finish(len(self.drivers))

    def ring(self) -> None:
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        with self._engine:
            self._engine.unwatch(self._fd)
        os.close(self._fd)


@pytest.fixture
def source(engine: Engine) -> Iterator[Source]:
    source = Source(engine)
    yield source
    source.close()


def test_waiter_drives(engine: Engine, source: Source) -> None:
    """The thread that waits reads its own event; no other has to wake it."""
    for _ in range(5):
        work = new_work(engine)
        source.due.append(work)

        def ring(work: Work[int] = work) -> None:
            wait_until(lambda: engine.leader is work, 5, "the waiter to lead")
            source.ring()

        ringing = Call(ring)
        work.result()
        ringing.result()
    assert set(source.drivers) == {threading.current_thread().name}


def test_a_flood_over_sockets_does_not_hide_what_came_over_a_ring(engine: Engine) -> None:
    """A leader that found something in epoll at every look did not look at rings until a timer ran."""
    work, turns = new_work(engine), 0
    flood = os.eventfd(1)  # ready for ever: nobody reads it

    def handle(mask: int) -> None:
        nonlocal turns
        turns += 1
        if turns == 1000 and not work.finished:
            work.finish(-1)

    def ready() -> bool:
        return turns > 10 and not work.finished  # once: the background thread goes on until nobody watches

    with engine:
        engine.watch(flood, select.EPOLLIN, handle)
        engine.look_at(flood, Look(ready, arm=lambda: False, serve=lambda: work.finish(turns)))
    try:
        assert 10 < work.result() < 100
    finally:
        with engine:
            engine.unwatch(flood)
        os.close(flood)


def test_background_thread_drives_when_nobody_waits(engine: Engine, source: Source) -> None:
    work = new_work(engine)
    source.due.append(work)
    source.ring()
    wait_until(work.done, 5)
    assert source.drivers == ["rankmesh-test"]


def test_background_thread_takes_over_after_waiters(engine: Engine, source: Source) -> None:
    for _ in range(3):
        waited, alone = new_work(engine), new_work(engine)
        source.due += [waited, alone]
        Call(source.ring)
        waited.result()
        source.ring()
        wait_until(alone.done, 5)


def test_nobody_else_takes_what_is_to_wake_the_background_thread() -> None:
    """It sleeps in epoll, no longer leads, and shall wake. Who led next saw the waker first, and cleared it: it slept
    on until the next timer, and nobody served what came meanwhile."""
    engine = Engine("test", 100e-6)
    try:
        engine.background.sleeping = True  # as far as others know: it never ran
        engine.waker.release()
        engine.dispatch(engine.poll(0, 8))
        assert engine.poll(0, 8), "it will not wake"
        engine.background.sleeping = False
        engine.dispatch(engine.poll(0, 8))
        assert not engine.poll(0, 8)
    finally:
        engine.stop()


def test_followers_are_woken_and_led_on(engine: Engine, source: Source) -> None:
    """Many wait; each event serves one of them, whoever drives; the lead is handed on until all are served."""
    works = [new_work(engine, str(number)) for number in range(8)]
    calls = [Call(work.result) for work in works]
    wait_until(lambda: len(engine._followers) == 7, 5, "all to wait")
    source.due += works
    for work in works:
        source.ring()
        wait_until(work.done, 5)
    assert [call.result() for call in calls] == list(range(1, 9))
    assert engine._followers == {}


def test_followers_keep_their_own_deadlines(engine: Engine) -> None:
    leading = Call(new_work(engine, timeout=10 * BRIEFLY).wait)
    wait_until(lambda: engine.leader is not None, 5)
    began = monotonic()
    with pytest.raises(DeadlineError):
        new_work(engine).wait(timeout=BRIEFLY)
    assert monotonic() - began < SOON / 2
    with pytest.raises(DeadlineError):
        leading.result()


def test_many_callbacks_during_one_wait(engine: Engine) -> None:
    """A thread that waits for long runs any number of other operations' callbacks meanwhile."""
    long = new_work(engine, "long")
    waiting = Call(long.result)
    wait_until(lambda: engine.leader is long, 5)
    ran = threading.Semaphore(0)
    for _ in range(1000):
        work = new_work(engine)
        work.add_done_callback(lambda _: ran.release())
        engine.call_soon(lambda work=work: work.finish(0))  # type: ignore[misc]  # the leader ends it
        assert ran.acquire(timeout=SOON)
    with engine:
        long.finish(7)
    assert waiting.result() == 7


def test_timers_run_in_order_and_cancelled_ones_do_not(engine: Engine) -> None:
    ran: list[int] = []
    now = monotonic()
    with engine:
        timers = {
            number: engine.call_at(now + delay, lambda number=number: ran.append(number))  # type: ignore[misc]
            for number, delay in enumerate((0.06, 0.02, 0.04, 0.02))
        }
        timers[2].cancel()
    wait_until(lambda: 0 in ran, 5)
    assert ran == [1, 3, 0]


def test_timers_run_while_somebody_waits(engine: Engine) -> None:
    work = new_work(engine)
    with engine:
        engine.call_at(monotonic() + 0.02, lambda: work.finish(1))
    assert work.result() == 1


def test_call_soon_reaches_a_sleeping_leader(engine: Engine) -> None:
    work = new_work(engine)
    waiting = Call(work.result)
    wait_until(lambda: engine.leader is work, 5)
    engine.call_soon(lambda: work.finish(3))
    assert waiting.result() == 3


def test_deadline_without_time_looks_once(engine: Engine, source: Source) -> None:
    with engine:  # so that the background thread does not
        work = new_work(engine)
        source.due.append(work)
        source.ring()
        for _ in range(40):  # whether it would poll or not
            engine.spin.miss()
        engine.drive(work, monotonic())
        assert work.finished


def test_stop_with_waiters_ends_cleanly() -> None:
    """As an endpoint closes: what waits is failed, then the engine stops; no waiter may touch what is closed."""
    for _ in range(50):
        engine = Engine("stopping", 0.0)
        engine.start()
        works = [new_work(engine) for _ in range(4)]
        calls = [Call(work.result) for work in works]
        wait_until(lambda engine=engine, works=works: engine.leader in works, 5)  # type: ignore[misc]
        with engine:
            for work in works:
                work.fail(ClosedError("the end"))
        engine.stop()
        for call in calls:
            with pytest.raises(ClosedError, match="the end"):
                call.result()


@pytest.mark.parametrize("waited", [False, True], ids=["nobody waits", "somebody waits"])
def test_idle_engine_sleeps(engine: Engine, waited: bool) -> None:
    """No timer, no event: almost no processor time, whoever drives."""
    work = new_work(engine)
    waiting = Call(work.result) if waited else None
    wait_until(lambda: engine.leader is work if waited else engine.leader is not None, 5, "a leader")
    began, used = monotonic(), process_time()
    threading.Event().wait(0.5)
    assert process_time() - used < 0.2 * (monotonic() - began)
    with engine:
        work.finish(1)
    assert waiting is None or waiting.result() == 1


def test_who_always_finds_something_to_do_lets_others_have_the_lock(engine: Engine) -> None:
    """A leader whose connection is ready at every look does not keep the lock until its wait ends."""
    served = threading.Event()
    with engine:
        engine.look_at(-7, Look(lambda: True, lambda: True, served.set))
    work = new_work(engine, timeout=scaled(2))
    waiting = Call(work.result)
    assert served.wait(SOON)
    for _ in range(20):
        with engine:
            assert not work.finished, "it had the lock until its deadline"
    with engine:
        engine.looks.clear()
        work.finish(7)
    assert waiting.result() == 7


def test_contended_lock_reaches_everyone(engine: Engine) -> None:
    """One thread that calls without pause does not keep others out."""
    stop = threading.Event()

    def hog() -> None:
        while not stop.is_set():
            with engine:
                pass

    hogs = [Call(hog) for _ in range(2)]
    try:
        for _ in range(50):
            with engine:
                pass
    finally:
        stop.set()
    for each in hogs:
        each.result(scaled(10))


def test_spin_backs_off_where_polling_is_in_vain_and_comes_back() -> None:
    spin = Spin(1e-4)
    skipped = []
    for _ in range(8):
        assert spin.worthwhile()
        spin.miss()
        count = 0
        while not spin.worthwhile():
            count += 1
        skipped.append(count)
    assert skipped == [0, 1, 2, 4, 8, 16, 32, 32], "one vain attempt is forgiven"
    spin.hit()
    spin.miss()
    assert spin.worthwhile(), "one success forgives all failures"
    spin.miss()
    assert not spin.worthwhile()
    assert not Spin(0.0).worthwhile()


class Looking:
    """A connection that is looked at in vain, and what there was to do when it was."""

    patience = 10

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.seen: list[int] = []
        self.came = 0

    def mark(self) -> int:
        return self.came

    def attend(self, work: Waited) -> bool:
        self.seen.append(len(self._engine.backlog))
        return True

    def await_reply(self, call: Lone) -> None:
        raise AssertionError("nobody waits for a reply here")


def test_polling_comes_back_after_a_sleep_that_it_would_have_spared(engine: Engine) -> None:
    """At a ring that is longer than at a socket: a sleep of half a millisecond said nothing, and so a receiver that had
    stopped polling slept on before every message."""
    spin, ring = Spin(1e-4), Looking(engine)
    cases = ((5e-4, None, False), (5e-4, ring, True), (2e-3, ring, False), (1e-4, None, True))
    for seconds, hint, back in cases:
        spin.skip = 5
        assert spin.slept(seconds, hint, mark=-1) is back
        assert spin.skip == (0 if back else 5)
    spin.skip = 5
    assert not spin.slept(5e-4, ring, ring.mark()), "what came over another connection ended it"


@pytest.mark.parametrize("here", [True, False], ids=["this one", "another"])
def test_only_what_came_over_its_own_connection_has_a_sleeper_poll(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    """Where others sent something every millisecond or two, half of a core went into looking at who was silent."""
    monkeypatch.setattr(waiting, "LEAST_PATIENCE", 0)
    bell, work, rung = os.eventfd(0, os.EFD_NONBLOCK), new_work(engine), threading.Event()
    work.hint = ring = Looking(engine)

    def ring_up(_mask: int) -> None:
        os.eventfd_read(bell)
        ring.came += here
        rung.set()

    with engine:
        engine.watch(bell, select.EPOLLIN, ring_up)
        engine.spin.skip, engine.spin.seconds = Spin.MOST, SOON
    waiting_for_it = Call(work.result)
    wait_until(lambda: work.parker is not None, 5, "the waiter to sleep")
    os.eventfd_write(bell, 1)
    assert rung.wait(SOON)
    if here:
        wait_until(lambda: bool(ring.seen), 5, "it to look at its connection")
    else:
        wait_until(lambda: work.parker is not None, 5, "the waiter to sleep again")
    with engine:
        assert bool(ring.seen) is here
        work.finish(1)
        engine.unwatch(bell)
    assert waiting_for_it.result() == 1
    os.close(bell)


def test_who_sleeps_and_is_told_that_more_is_coming_polls(engine: Engine) -> None:
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    work = new_work(engine)
    work.hint = ring = Looking(engine)

    def rung(_mask: int) -> None:
        os.eventfd_read(bell)
        engine.heralds += 1

    with engine:
        engine.watch(bell, select.EPOLLIN, rung)
        engine.spin.skip = Spin.MOST
        engine.spin.seconds = 1e-9  # no sleep is so short that it would poll for that reason
    waiter = Call(work.result)
    wait_until(lambda: work.parker is not None, 5, "the waiter to sleep")
    assert not ring.seen
    os.eventfd_write(bell, 1)
    wait_until(lambda: bool(ring.seen), 5, "it to look at its connection")
    with engine:
        work.finish(1)
    assert waiter.result() == 1
    with engine:
        engine.unwatch(bell)
    os.close(bell)


class Pieces:
    """Takes several turns, and is done then."""

    def __init__(self, engine: Engine, work: Work[int], count: int) -> None:
        self._engine, self._work, self._left = engine, work, count

    def work_off(self) -> None:
        self._left -= 1
        if self._left:
            self._engine.backlog.append(self)
        else:
            self._work.finish(1)


def test_nobody_polls_while_there_is_something_to_do(engine: Engine) -> None:
    """Who had just been woken looked at its connection for a millisecond between two pieces of a copy."""
    work = new_work(engine)
    work.hint = ring = Looking(engine)
    with engine:
        engine.spin.hit()
        engine.backlog.append(Pieces(engine, work, 20))
        engine.drive(work, monotonic() + SOON)
    assert work.result() == 1
    assert not any(ring.seen)
    assert not engine.spin.misses, "it polled in vain, and only then went on"


def test_handler_of_a_gone_descriptor_is_not_called(engine: Engine) -> None:
    """Unwatched between the poll and its turn."""
    fds = [os.eventfd(1, os.EFD_NONBLOCK) for _ in range(2)]
    called: list[int] = []

    def handler(fd: int) -> None:
        called.append(fd)
        for other in fds:
            engine.unwatch(other)

    with engine:
        for fd in fds:
            engine.watch(fd, select.EPOLLIN, lambda _, fd=fd: handler(fd))  # type: ignore[misc]
    wait_until(lambda: called, 5)
    with engine:
        assert len(called) == 1
    for fd in fds:
        os.close(fd)


def test_callbacks_of_users_do_not_stop_the_background_thread(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    def boom(_: Work[int]) -> None:
        raise RuntimeError("user error")

    with caplog.at_level(logging.CRITICAL, logger="rankmesh"):
        for _ in range(3):
            work = new_work(engine)
            work.add_done_callback(boom)
            engine.call_soon(lambda work=work: work.finish(1))  # type: ignore[misc]
            wait_until(work.done, 5)
    assert engine.background.thread.is_alive()


class Stepping:
    """Of the backlog: steps down in order to do something that takes a while."""

    def __init__(self, engine: Engine, action: Callable[[], object]) -> None:
        self._engine = engine
        self._action = action

    def work_off(self) -> None:
        leader = self._engine.step_down()
        try:
            self._action()
        finally:
            self._engine.step_up(leader)


def test_who_lost_the_lead_by_stepping_down_does_not_give_up_anothers(engine: Engine, source: Source) -> None:
    """It was given up, and taken for this thread's own afterwards: a lead that nobody had, and all followed."""
    mine, theirs = new_work(engine, "mine"), new_work(engine, "theirs")
    leading: list[Call[int]] = []

    def let_another_lead() -> None:
        leading.append(Call(theirs.result))
        wait_until(lambda: engine.leader is theirs and not engine.backlog, 5, "the other thread to lead")
        with engine:
            engine.backlog.append(Stepping(engine, end_all))

    def end_all() -> None:
        with engine:
            theirs.finish(1)
            mine.finish(2)
            engine.background.wake()
        assert leading[0].result() == 1

    with engine:
        engine.backlog.extend([Stepping(engine, let_another_lead), Stepping(engine, lambda: None)])
        engine.drive(mine, monotonic() + SOON)  # this thread works it off, and no other
    assert mine.result() == 2
    work = new_work(engine)
    source.due.append(work)
    source.ring()
    assert work.result() == 1
    assert engine.leader is not theirs


class Interrupted(BaseException):
    """As a signal's handler raises it."""


class InterruptedLock:
    """The engine's, of which one release by who leads is interrupted when it is done."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._lock = engine, engine.lock
        self.armed = True

    def acquire(self, blocking: bool = True) -> bool:
        return self._lock.acquire(blocking)

    def release(self) -> None:
        leads = self._engine.leader is not None and self._engine.leading_thread == threading.get_ident()
        self._lock.release()
        if leads and self.armed and threading.current_thread() is threading.main_thread():
            self.armed = False
            raise Interrupted


def test_a_signal_between_giving_the_lock_back_and_sleeping(engine: Engine) -> None:
    """The lock was given back twice: RuntimeError took the place of what the handler raised."""
    engine.lock = lock = InterruptedLock(engine)  # type: ignore[assignment]
    with pytest.raises(Interrupted):
        new_work(engine).wait()
    assert not lock.armed
    work = new_work(engine)
    finish = threading.Timer(BRIEFLY, lambda: engine.call_soon(lambda: work.finish(7)))
    finish.start()
    assert work.result() == 7
    finish.join()

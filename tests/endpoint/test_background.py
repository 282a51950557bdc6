"""The background thread: when it looks, when it is left alone, and that it comes when it is needed."""

from __future__ import annotations

import errno
import gc
import os
import select
import threading
import weakref
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import pytest

from peers import SOON, Call
from rankmesh import Work
from rankmesh.endpoint import background
from rankmesh.endpoint.background import NAP
from rankmesh.endpoint.progress import Engine
from rankmesh.endpoint.waiting import Hint, Parker
from timing import wait_until


class HandAlarm:
    """Goes off only when the test says so: how often a thread woke by it is known."""

    fd = -1

    def __init__(self) -> None:
        self._bell = threading.Semaphore(0)
        self.waits = 0
        #: What it was last set for; None: it was stopped.
        self.due: float | None = None
        self.before_set: Callable[[], None] | None = None

    def set(self, seconds: float) -> None:
        if self.before_set is not None:
            self.before_set()
        self._take_back(seconds)

    def stop(self) -> None:
        self._take_back(None)

    def _take_back(self, due: float | None) -> None:
        self.due = due
        while self._bell.acquire(blocking=False):
            pass

    def ring(self) -> None:
        self._bell.release()

    def wait(self) -> None:
        self.waits += 1
        self._bell.acquire()

    def close(self) -> None:
        pass


class Clocked:
    """An engine whose background thread sleeps by such an alarm, and what a wait of the test's ends by."""

    def __init__(self, engine: Engine, alarm: HandAlarm) -> None:
        self.engine = engine
        self.alarm = alarm
        self._work: Work[int] | None = None
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        with engine:
            engine.watch(self._fd, select.EPOLLIN, self._ready)

    def _ready(self, mask: int) -> None:
        os.eventfd_read(self._fd)
        work, self._work = self._work, None
        assert work is not None
        work.finish(0)

    def begin(self) -> Work[int]:
        self._work = Work(self.engine, "wait", None, None, SOON)
        self.last = weakref.ref(self._work)
        return self._work

    def end(self) -> None:
        os.eventfd_write(self._fd, 1)

    def fall_asleep(self) -> Call[None]:
        """A wait, by a thread that sleeps in the kernel now."""
        work = self.begin()
        waiting = Call(work.wait)
        wait_until(lambda: work.parker is self.engine.waker, 5, "the waiter to sleep")
        return waiting

    def look(self) -> None:
        """Let the background thread look, and wait until it naps again."""
        waits = self.alarm.waits
        self.alarm.ring()
        wait_until(lambda: self.alarm.waits > waits, 5, "the background thread to nap again")

    def close(self) -> None:
        with self.engine:
            self.engine.unwatch(self._fd)
        os.close(self._fd)


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clocked]:
    """Its background thread is parked: it has seen the same waiter asleep twice."""
    monkeypatch.setattr(background, "Alarm", HandAlarm)
    engine = Engine("test", 0.0)
    alarm = engine.background._alarm
    assert isinstance(alarm, HandAlarm)
    clocked = Clocked(engine, alarm)
    waiting = clocked.fall_asleep()
    engine.start()
    wait_until(lambda: alarm.waits == 1, 5, "the background thread to nap")
    clocked.look()
    assert engine.background.parked
    clocked.end()
    waiting.result()
    del waiting
    yield clocked
    clocked.close()
    engine.stop()


def test_who_leaves_sets_its_alarm_and_wakes_nobody(clocked: Clocked) -> None:
    assert clocked.alarm.due == NAP
    assert clocked.alarm.waits == 2


def test_long_waits_one_after_the_other_never_wake_it(clocked: Clocked) -> None:
    """Found: it was woken three times for each wait, by who left, and to look twice whether anybody waits."""
    for _ in range(5):
        waiting = clocked.fall_asleep()
        assert clocked.alarm.due is None, "who sleeps as the leader has not stopped its alarm"
        clocked.end()
        waiting.result()
        assert clocked.alarm.due == NAP
    assert clocked.alarm.waits == 2


def test_it_leads_at_the_end_of_a_nap_if_nobody_came(clocked: Clocked) -> None:
    work = clocked.begin()
    clocked.alarm.ring()
    wait_until(lambda: clocked.engine.leader is clocked.engine.background, 5, "the background thread to lead")
    clocked.end()
    wait_until(work.done, 5, "the background thread to serve")


def test_it_looks_once_more_if_somebody_came_and_left_without_a_sleep(clocked: Clocked) -> None:
    """Such waits follow each other quickly: it keeps out of their way, but naps again instead of being parked."""
    with clocked.engine:
        clocked.engine.drives += 1
    clocked.look()
    assert clocked.engine.leader is None
    assert not clocked.engine.background.parked
    assert clocked.alarm.due == NAP
    clocked.alarm.ring()
    wait_until(lambda: clocked.engine.leader is clocked.engine.background, 5, "the background thread to lead")


def test_a_waiter_that_sleeps_when_it_looks_parks_it_again(clocked: Clocked) -> None:
    waiting = clocked.fall_asleep()
    clocked.look()
    clocked.look()
    assert clocked.engine.background.parked
    assert clocked.alarm.due is None
    clocked.end()
    waiting.result()


def test_it_forgets_who_waited_before_it_sleeps_for_long(clocked: Clocked) -> None:
    """Found: it held the wait that it had seen, with its result and its peer, for as long as it was parked or led."""
    gc.collect()
    assert clocked.last() is None, "parked, it holds a wait that is over"
    waiting = clocked.fall_asleep()
    clocked.look()
    clocked.look()
    assert clocked.engine.background.parked
    clocked.end()
    waiting.result()
    del waiting
    clocked.alarm.ring()
    wait_until(lambda: clocked.engine.leader is clocked.engine.background, 5, "the background thread to lead")
    gc.collect()
    assert clocked.last() is None, "leading, it holds a wait that is over"


def test_it_is_woken_at_once_where_that_is_urgent(clocked: Clocked) -> None:
    ran = threading.Event()
    clocked.engine.call_soon(ran.set)
    assert ran.wait(SOON)
    wait_until(lambda: clocked.engine.leader is clocked.engine.background, 5, "the background thread to lead")


def test_a_ring_before_the_alarm_was_set_is_not_lost(clocked: Clocked) -> None:
    """Setting it anew takes the ring back: the thread must remember that there was one."""
    engine, alarm = clocked.engine, clocked.alarm

    def wake_it() -> None:
        alarm.before_set = None
        with engine:
            engine.background.wake()

    with engine:
        engine.drives += 1  # somebody came and left: it naps again
    alarm.before_set = wake_it
    alarm.ring()
    wait_until(lambda: engine.leader is engine.background, 5, "the background thread to lead")


class Lingering:
    """Leads on behalf of others, as a thread of the pool does that has nothing to do."""

    yields = True
    look_every = 1e9
    parker: Parker | None = None
    hint: Hint | None = None
    finished = False


def test_it_is_not_parked_behind_who_leads_for_others(clocked: Clocked) -> None:
    """Such a one runs a handler in its place: while that takes long, nobody else would lead."""
    with clocked.engine:
        clocked.engine.drive(Lingering(), monotonic() + 0.05)
    assert clocked.alarm.due == NAP, "its alarm was stopped"


@pytest.mark.parametrize("yields", [True, False])
def test_it_leads_while_who_led_runs_a_handler(clocked: Clocked, yields: bool) -> None:
    """Found: a slow handler, run by who led, stopped the whole endpoint: nobody had told that the lead was free."""
    engine = clocked.engine
    with engine:
        engine.background.expected = False  # as somebody left it who slept as the leader
        clocked.alarm.stop()
        leader: Any = Lingering() if yields else clocked.begin()
        engine.leader, engine.leading_thread = leader, threading.get_ident()
        assert engine.step_down() is leader
        assert clocked.alarm.due == NAP
        clocked.alarm.ring()
        work = clocked.begin()
        clocked.end()
        wait_until(work.done, 5, "the background thread to serve")
        engine.step_up(leader)
        engine.leader = None


def test_it_hears_of_a_follower_that_is_interrupted_when_it_is_to_lead(
    clocked: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: it was parked, and nobody led ever after."""
    engine = clocked.engine
    waiting = clocked.fall_asleep()
    clocked.look()
    clocked.look()
    assert engine.background.parked
    acquire = engine.acquire

    def interrupted() -> None:
        """The signal comes when the follower has slept, and has the lock again."""
        acquire()
        if threading.current_thread() is follower:
            monkeypatch.undo()
            raise Interrupted

    following = Call(Work[int](engine, "wait", None, None, SOON).wait)
    follower = following._thread
    wait_until(lambda: engine._followers, 5, "the other to follow")
    monkeypatch.setattr(engine, "acquire", interrupted)
    clocked.end()
    waiting.result()
    with pytest.raises(Interrupted):
        following.result()
    assert clocked.alarm.due == NAP


class Interrupted(BaseException):
    """As a signal's handler raises it."""


def test_no_descriptor_is_left_behind_where_none_is_left_for_its_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoAlarm:
        def __init__(self) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(background, "Alarm", NoAlarm)
    with pytest.raises(OSError, match="Too many open files"):  # leaks.py looks for descriptors
        Engine("test", 0.0)

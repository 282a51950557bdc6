"""The background thread of an engine: it leads when no one waits. See rule 3 of endpoint/progress.py.

While others drive it naps, and looks at the end of each nap whether anybody has driven since. While a waiter sleeps in
the kernel it is parked: it does not look at all. Who gives up the lead then sets its alarm, for the end of a nap, and
who comes and sleeps in turn stops it again: so a program that waits for long, time and again, never wakes this thread.
(Where 32 clients shared two cores, waking it three times for each wait took a seventh of what they got done.)

What must hold: if it is parked and nobody leads, its alarm is set, or a follower is on its way to lead. So whoever
gives up the lead says so (`lead_is_free`), also who steps down for a moment, or is interrupted.
"""

from __future__ import annotations

import math
import threading
from threading import get_ident
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Final

from rankmesh.endpoint import interrupts
from rankmesh.endpoint.alarm import Alarm
from rankmesh.endpoint.waiting import EVENTS, Hint, Parker, Spin, Waited, poll_timeout

if TYPE_CHECKING:
    from rankmesh.endpoint.progress import Engine

#: Seconds between looks while others drive: how late progress may be after the last waiter left.
NAP: Final = 0.001
#: What a nap grows to while others are busy in the engine at every look.
LONGEST_NAP: Final = 0.004
#: A poll that took this long was kept from the GIL by other threads: polling only disturbs them.
SLOW_POLL: Final = 0.002


class Background:
    """The thread, and its mark as the leader: something waited for that is never finished."""

    finished = False
    yields = True
    look_every = math.inf
    #: The connection that requests lately came over, if they came over one.
    hint: Hint | None = None
    parker: Parker | None = None

    def __init__(self, engine: Engine, spin: float) -> None:
        self._engine = engine
        #: Whether polling pays off for those who lead on behalf of everybody: what they wait for in vain says nothing
        #: about those who know what they wait for.
        self.spin = Spin(spin)
        self._alarm = Alarm()
        #: It sleeps until its alarm goes off, which others set. (Once that did, until this thread has the lock.)
        self.parked = False
        #: It is parked, and its alarm is set.
        self.expected = False
        #: How often somebody had driven when it last looked, or was told to look.
        self._seen_drives = -1
        #: It sleeps in epoll, where it was the leader.
        self.sleeping = False
        self._urgent = False
        #: It sleeps by its alarm, or is about to.
        self._napping = False
        #: Somebody has ended its nap, which may not have begun yet.
        self._rung = False
        self.thread = threading.Thread(target=self._run, name=f"rankmesh-{engine.name}", daemon=True)

    def start(self) -> None:
        interrupts.guard(self._engine.deferred)
        self.thread.start()

    def join(self) -> None:
        """Wait for its end, unless it is the thread that calls. Without the lock."""
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join()

    def free(self) -> None:
        """It naps no more: it has ended, never began, or is about to end."""
        interrupts.unguard(self._engine.deferred)
        self._alarm.close()

    @property
    def descriptor(self) -> int:
        """What it holds of the system's: a forked child gives that up."""
        return self._alarm.fd

    def wake(self) -> None:
        """End its nap: it shall lead at once if nobody does."""
        self._urgent = self._rung = True
        if self._napping:
            self._alarm.ring()

    def lead_is_free(self) -> None:
        """Nobody leads: look in a moment whether somebody does then. If it is not parked, it looks by itself."""
        if self.parked and not self.expected:
            self._seen_drives = self._engine.drives
            if self._urgent:
                self._alarm.ring()
            else:
                self._alarm.set(NAP)
            self.expected = True  # last: who is interrupted before is not believed to have set it

    def rearm(self) -> None:
        """If it still sleeps in epoll, where it was the leader, the bells that were to wake it may have been answered
        by others: it must arm them anew."""
        if self.sleeping and self._engine.looks:
            self._engine.waker.release()

    def lead_is_taken(self) -> None:
        """A waiter is about to sleep as the leader: there is nothing to look for. Only if it is `expected`."""
        self.expected = False
        self._alarm.stop()

    def woken(self, _mask: int) -> None:
        """Somebody has seen the engine's waker. If this thread still sleeps in epoll, it may be meant, and has yet to
        see it: then it stays."""
        if not self.sleeping:
            self._engine.waker.clear()

    def _run(self) -> None:
        engine = self._engine
        seen_leader: Waited | None = None  # dropped before a long sleep: it holds results, buffers and its peer
        nap = NAP
        while True:
            self._rung = False
            if not self._take_lock():
                nap = min(2 * nap, LONGEST_NAP)
                self._sleep(nap)
                continue
            nap = NAP
            self.parked = self.expected = False
            try:
                if engine.closed:
                    return
                if engine.leader is None:
                    seen_leader = None
                    if self._urgent or engine.drives == self._seen_drives:
                        self._urgent = False
                        self._lead()
                    self._seen_drives = engine.drives
                elif engine.leader is seen_leader and not engine.leader.yields:
                    seen_leader = None
                    self.parked = True  # a long wait: its leader sets the alarm when it leaves
                else:
                    seen_leader = engine.leader
                now = monotonic()
                if now >= engine.timers.next and engine.leader is None:
                    engine.timers.run(now)
                if engine.closed:
                    return
                if self.parked:
                    self._alarm.stop()  # with the lock: whoever leaves next sets it
            finally:
                engine.lock.release()
            if engine.deferred:
                engine.run_deferred()
                continue
            self._sleep(None if self.parked else nap)

    def _sleep(self, seconds: float | None) -> None:
        """Until the alarm goes off; None: which others set. Without the lock."""
        self._napping = True
        if seconds is not None:
            self._alarm.set(seconds)
        if not self._rung:  # if it was before the alarm was set, it is seen here
            self._alarm.wait()
        self._napping = False

    def _take_lock(self) -> bool:
        """Take the lock if it is free. If not, somebody drives, and waiting for it would only take the GIL from them:
        this thread does so only when it is needed."""
        engine = self._engine
        if engine.lock.acquire(False):
            return True
        if monotonic() < engine.timers.next and not self._urgent and not engine.closed:
            return False
        engine.acquire()
        return True

    def _take_lock_again(self) -> None:
        """After a poll. Somebody who has taken the lead meanwhile shall not be asked to make room."""
        if self._engine.leader is self:
            self._engine.acquire()
        else:
            self._engine.lock.acquire()

    def _lead(self) -> None:
        engine = self._engine
        engine.leader, engine.leading_thread = self, get_ident()
        try:
            while engine.leader is self and not engine.closed:
                if engine.backlog:
                    engine.work_off_backlog()
                now = monotonic()
                if now >= engine.timers.next:
                    engine.timers.run(now)
                    continue
                if engine.deferred:  # users' code runs while nobody leads
                    engine.leader = None
                    engine.lock.release()
                    try:
                        engine.run_deferred()
                    finally:
                        engine.acquire()
                    if self._taken():
                        return
                    engine.leader, engine.leading_thread = self, get_ident()
                    continue
                if engine.backlog:  # a copy goes on
                    engine.glance()
                    continue
                if self.spin.worthwhile() and (self._attend() or self._poll()):
                    continue
                if engine.looks and engine.looks.arm():
                    continue
                self.sleeping = True
                engine.lock.release()
                try:
                    events = engine.poll(poll_timeout(engine.timers.next - now), EVENTS)
                finally:
                    self.sleeping = False
                    self._take_lock_again()
                if engine.leader is self:
                    engine.dispatch(events)
        finally:
            if engine.leader is self:
                engine.leader = None

    def _taken(self) -> bool:
        """Somebody took the lead, or the end came, while the lock was free."""
        return self._engine.leader is not None or self._engine.closed

    def _attend(self) -> bool:
        """Look for the next request where the last came from. True: there was one."""
        engine, hint = self._engine, self.hint
        if hint is None or engine.writers:
            return False
        heralds = engine.heralds
        hint.attend(self)
        if engine.heralds == heralds:
            self.hint = None
            return False
        self.spin.hit()
        return True

    def _poll(self) -> bool:
        """Poll for the next event after one was served. The lock is free between polls: user threads come first."""
        engine = self._engine
        end = perf_counter() + engine.patience
        while True:
            began = perf_counter()
            engine.lock.release()
            try:
                events = engine.poll(0, EVENTS)
            finally:
                self._take_lock_again()
            if engine.leader is not self or engine.closed:
                return True
            if engine.looks.serve_ready() or events:
                engine.dispatch(events)
                self.spin.hit()
                return True
            now = perf_counter()
            if now >= end or now - began > SLOW_POLL:
                self.spin.miss()
                return False

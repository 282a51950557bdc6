"""The background thread of an engine: it leads when no one waits. See rule 3 of endpoint/progress.py."""

from __future__ import annotations

import math
import threading
from threading import get_ident
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Final

from rankmesh.endpoint.waiting import EVENTS, Hint, Parker, Spin, poll_timeout

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
        self._nap_lock = threading.Lock()
        self._nap_lock.acquire()
        #: It sleeps until it is woken: a leader that leaves does so.
        self.parked = False
        #: It sleeps in epoll, where it was the leader.
        self.sleeping = False
        self._urgent = False
        self.thread = threading.Thread(target=self._run, name=f"rankmesh-{engine.name}", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def join(self) -> None:
        """Wait for its end, unless it is the thread that calls. Without the lock."""
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join()

    def wake(self, urgent: bool = True) -> None:
        """End its nap; `urgent`: it shall lead at once if nobody does."""
        self._urgent = self._urgent or urgent
        if self._nap_lock.locked():
            self._nap_lock.release()

    def woken(self, _mask: int) -> None:
        """Somebody has seen the engine's waker. If this thread still sleeps in epoll, it may be meant, and has yet to
        see it: then it stays."""
        if not self.sleeping:
            self._engine.waker.clear()

    def _run(self) -> None:
        engine = self._engine
        seen_drives, seen_leader = -1, None
        nap = NAP
        while True:
            if not self._take_lock():
                nap = min(2 * nap, LONGEST_NAP)
                self._nap_lock.acquire(timeout=nap)
                continue
            nap = NAP
            try:
                if engine.closed:
                    return
                if engine.leader is None:
                    if self._urgent or engine.drives == seen_drives:
                        self._urgent = False
                        self._lead()
                    seen_drives, seen_leader = engine.drives, None
                elif engine.leader is seen_leader and not engine.leader.yields:
                    self.parked = True  # a long wait: its leader wakes us when it leaves
                else:
                    seen_leader = engine.leader
                now = monotonic()
                if now >= engine.timers.next and engine.leader is None:
                    engine.timers.run(now)
                parked = self.parked
                if engine.closed:
                    return
            finally:
                engine.lock.release()
            if engine.deferred:
                engine.run_deferred()
                continue
            self._nap_lock.acquire(timeout=-1 if parked else nap)
            self.parked = False

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
                if engine.looks and engine.arm():
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
            if engine.look_around() or events:
                engine.dispatch(events)
                self.spin.hit()
                return True
            now = perf_counter()
            if now >= end or now - began > SLOW_POLL:
                self.spin.miss()
                return False

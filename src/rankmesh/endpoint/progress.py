"""The progress engine: who reads the sockets, and when.

One engine per endpoint, one lock per engine. All state of an endpoint (matching, credit, queues) is guarded by
`lock`; a public call takes it once, and I/O happens under it in bounded pieces. The rules:

1. **The waiter drives.** At most one thread, the leader, polls. A thread that waits for its own Work becomes the leader
   if there is none, and does the reading itself: no other thread has to be woken to tell it that its data came.
2. **Followers.** Further waiters sleep on a lock of their own. Completing their Work wakes them; a leader that leaves
   wakes one of them to lead.
3. **The background thread** leads when no one waits, so that heartbeats, grants and requests are served while user code
   computes. It never takes the lead right after a waiter left (the next wait is usually microseconds away, and two
   threads fighting for the GIL cost more than the message): it looks every few milliseconds, and leads once nobody has
   driven since its last look. A waiter takes the lead from it without asking: the background thread may still sit in
   epoll then, finds on return that it no longer leads, and goes back to napping. While a waiter sleeps in epoll for
   long, the background thread is parked and costs nothing.
4. **Poll, then block.** A leader polls for `spin` seconds before it sleeps in the kernel, as long as that lately paid
   off (`Spin`). One that has served a request polls for the next.
5. **Fairness.** Python's locks are unfair. Whoever finds the lock taken says so in `contenders`; a leader that sees
   contenders stops polling, and a caller that sees them steps aside for a moment after its call.
6. **Users' code** (callbacks, handlers of RPC) runs when nobody leads and without the lock: deferred to whoever leaves
   the lock next (a leader stops polling for it), or by a leader that steps down, runs it, and steps up again.

Handlers, timers and `Work._finish` run with the lock held and must not block. Users' callbacks run without it
(`defer`). Readiness is level-triggered, so an event that a deposed leader ignored is seen by the next.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable
from time import monotonic, perf_counter, sleep
from typing import Final, Protocol

from rankmesh.endpoint.timers import Timer, Timers
from rankmesh.endpoint.waiting import Background, ForkedLock, Spin, Waited, Waker

logger = logging.getLogger("rankmesh")

#: Seconds between the background thread's looks while others drive: how late progress may be after the last waiter
#: left.
NAP: Final = 0.001
#: What a nap grows to while others are busy in the engine at every look.
LONGEST_NAP: Final = 0.004
#: Seconds a caller steps aside for when other threads wait for the lock.
STEP_ASIDE: Final = 20e-6
#: A poll that took this long was kept from the GIL by other threads: polling only disturbs them.
SLOW_POLL: Final = 0.002
#: Seconds between looks of a thread that waits for the same work as another.
SHARED_LOOK: Final = 0.005
#: A waiter that knows which connection its message comes over first looks there so many times: one system call instead
#: of two for each message. Every SWEEP-th wait looks at all connections, so that none is left out.
HINTED: Final = (None,) * 12
SWEEP: Final = 32
#: Events taken from one poll; the rest is there at the next. (The default allocates room for 1,023.)
EVENTS: Final = 64

Handler = Callable[[int], None]


class Backlogged(Protocol):
    """A connection with frames that were read and not yet looked at, because the leader already had what it wanted."""

    def work_off(self) -> None: ...


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """See the module's text. Methods need the lock unless they say otherwise."""

    def __init__(self, name: str, spin: float) -> None:
        self.lock: threading.Lock | ForkedLock = threading.Lock()
        self.contenders: deque[None] = deque()
        #: The Work whose waiter leads; None if nobody does; the engine's own marker if the background thread does.
        self.leader: Waited | None = None
        self.closed = False
        self.backlog: deque[Backlogged] = deque()
        self.name = name
        self._epoll = select.epoll()
        self._poll = self._epoll.poll
        self._handlers: dict[int, Handler] = {}
        self._timers = Timers()
        #: Users' callbacks to be run without the lock.
        self.deferred: deque[Callable[[], None]] = deque()
        self._followers: dict[threading.Lock, Waited] = {}
        self._spin = Spin(spin)
        self._waker = Waker()
        self._drives = 0
        self._stepped = False
        self._nap_lock = threading.Lock()
        self._nap_lock.acquire()
        self._parked = False
        self._urgent = False
        self._background_marker = Background()
        self.watch(self._waker.fd, select.EPOLLIN, self._waker.clear)
        self._thread = threading.Thread(target=self._background, name=f"rankmesh-{name}", daemon=True)
        _engines.add(self)

    def start(self) -> None:
        """Start the background thread. Without the lock."""
        self._thread.start()

    # ------------------------------------------------------------------ the lock

    def acquire(self) -> None:
        """Take the lock fairly: whoever holds it learns that someone waits."""
        if not self.lock.acquire(False):
            self.contenders.append(None)
            try:
                self.lock.acquire()
            finally:
                self.contenders.pop()

    def release(self) -> None:
        """Give the lock back, run what was deferred, and let others have it first if they wait."""
        self.lock.release()
        if self.deferred or self.contenders:
            self.after_release()

    def after_release(self) -> None:
        """What whoever gives the lock back owes the others. Without the lock."""
        if self.deferred:
            self._run_deferred()
        if self.contenders:
            sleep(STEP_ASIDE)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # ------------------------------------------------------------------ what is watched

    def watch(self, fd: int, mask: int, handler: Handler) -> None:
        self._epoll.register(fd, mask)
        self._handlers[fd] = handler

    def modify(self, fd: int, mask: int) -> None:
        self._epoll.modify(fd, mask)

    def unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        sooner = when < self._timers.next
        timer = self._timers.add(when, callback)
        if sooner:
            self._waker.release()  # whoever sleeps does so for too long now
        return timer

    def defer(self, callback: Callable[[], None]) -> None:
        """Run a user's callback soon, without the lock."""
        self.deferred.append(callback)

    def step_down(self) -> Waited | None:
        """Give up the lead and the lock for a moment, in order to run users' code right here. Whoever led goes on after
        `step_up`: it must not keep anything in its hands that others may change meanwhile."""
        leader, self.leader = self.leader, None
        self._stepped = True
        self.lock.release()
        return leader

    def step_up(self, leader: Waited | None) -> None:
        """Take the lock again, and the lead if nobody waits with it."""
        if not self.lock.acquire(False):
            self.acquire()
        if self.leader is None or self.leader.yields:
            self.leader = leader

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Run `callback` on whichever thread leads next, with the lock. May be called without the lock, from any
        thread."""
        with self:
            if not self.closed:
                self.call_at(0.0, callback)
                self.wake_background()

    # ------------------------------------------------------------------ waiting

    def drive(self, work: Waited, deadline: float) -> None:  # noqa: C901  # the hot path, written out for its speed
        """Return when `work` is done or the deadline has passed."""
        while True:
            leader = self.leader
            if leader is not None and not leader.yields:
                if work.yields:
                    return
                self._follow(work, deadline)
            else:
                self.leader = work
                try:
                    if self.backlog:
                        self._work_off_backlog()
                    if work.finished:
                        return
                    spin = self._spin
                    if spin.skip:
                        spin.skip -= 1
                    elif spin.seconds:  # poll until `work` is done, or for so long without an event
                        hint = work.hint
                        if hint is not None and self._drives % SWEEP:
                            for _ in HINTED:
                                if not hint.calm or self.deferred:
                                    break
                                hint.read_one()
                                if work.finished:
                                    spin.misses = 0
                                    return
                        poll, handlers, end = self._poll, self._handlers, 0.0
                        while True:
                            events = poll(0, EVENTS)
                            if events:
                                for fd, mask in events:
                                    if fd in handlers:
                                        handlers[fd](mask)
                                if self.backlog and not work.finished:
                                    self._work_off_backlog()
                                if work.finished:
                                    spin.misses = 0
                                    return
                                if work.yields:  # what it waits for is whatever comes
                                    spin.misses = 0
                                end = 0.0
                            now = perf_counter()
                            if not end:
                                end = now + spin.seconds
                            elif now >= end:
                                spin.miss()
                                break
                            if self.contenders or self.deferred:
                                break
                    self._block(work, deadline)
                finally:
                    if self.leader is work:
                        self.leader = None
                        self._drives += 1
                        if self._followers or self._parked:
                            self._hand_over()
            if work.finished or monotonic() >= deadline:
                return
            if self.deferred:  # users' callbacks run while nobody leads: one that waits itself must find the lead free
                self.lock.release()
                try:
                    self._run_deferred()
                finally:
                    self.acquire()

    def _hand_over(self) -> None:
        """The lead is free: a follower takes it, or the background thread looks for it again."""
        if not self._followers:
            self.wake_background(urgent=False)
            return
        for parker, work in self._followers.items():
            if not work.finished:
                if parker.locked():
                    parker.release()
                return

    def _block(self, work: Waited, deadline: float) -> None:
        while not work.finished and self.leader is work:
            if self.backlog:
                self._work_off_backlog()
                continue
            now = monotonic()
            if now >= self._timers.next:
                self._timers.run(now)
                continue
            if now >= deadline:
                self._dispatch(self._poll(0, EVENTS))  # what came while this thread was kept from running counts
                return
            if self.deferred:
                return
            work.parker = self._waker
            self.lock.release()
            try:
                events = self._poll(_poll_timeout(min(deadline, self._timers.next) - now), EVENTS)
            finally:
                self.acquire()
                work.parker = None
            self._dispatch(events)
            if work.yields or self._stepped:
                self._stepped = False
                self._spin.misses = 0
                return

    def _follow(self, work: Waited, deadline: float) -> None:
        """Sleep until `work` is done, the deadline has passed, the lead is free, or a callback is to be run."""
        parker = threading.Lock()
        parker.acquire()
        self._followers[parker] = work
        try:
            while not work.finished and not self.deferred:
                remaining = deadline - monotonic()
                if remaining <= 0:
                    return
                # Where another thread waits for the same work, only one of them is woken by it: the others look.
                shared = work.parker is not None or self.leader is work
                if not shared:
                    work.parker = parker
                self.lock.release()
                try:
                    parker.acquire(timeout=min(remaining, SHARED_LOOK if shared else work.look_every))
                finally:
                    self.acquire()
                    if work.parker is parker:
                        work.parker = None
                if self.leader is None or self.leader.yields:
                    return
        finally:
            del self._followers[parker]

    # ------------------------------------------------------------------ what a leader does

    def turn(self) -> None:
        """Look once at what is there, without waiting."""
        if self.leader is None or self.leader.yields:
            if self.backlog:
                self._work_off_backlog()
            self._dispatch(self._poll(0, EVENTS))

    def _dispatch(self, events: list[tuple[int, int]]) -> None:
        handlers = self._handlers
        for fd, mask in events:
            handler = handlers.get(fd)
            if handler is not None:
                handler(mask)

    def _work_off_backlog(self) -> None:
        for _ in range(len(self.backlog)):
            self.backlog.popleft().work_off()

    def _run_deferred(self) -> None:
        """Users' callbacks, without the lock. One that raises is logged and spoils nothing else."""
        while self.deferred:
            try:
                callback = self.deferred.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                callback()
            except Exception:  # a user's code: anything may come
                logger.exception("A callback of a Work raised.")

    # ------------------------------------------------------------------ the background thread

    def _background(self) -> None:
        seen_drives, seen_leader = -1, None
        nap = NAP
        while True:
            if not self._look():
                nap = min(2 * nap, LONGEST_NAP)
                self._nap_lock.acquire(timeout=nap)
                continue
            nap = NAP
            try:
                if self.closed:
                    return
                if self.leader is None:
                    if self._urgent or self._drives == seen_drives:
                        self._urgent = False
                        self._lead_in_background()
                    seen_drives, seen_leader = self._drives, None
                elif self.leader is seen_leader and not self.leader.yields:
                    self._parked = True  # a long wait: its leader wakes us when it leaves
                else:
                    seen_leader = self.leader
                now = monotonic()
                if now >= self._timers.next and self.leader is None:
                    self._timers.run(now)
                parked = self._parked
                if self.closed:
                    return
            finally:
                self.lock.release()
            if self.deferred:
                self._run_deferred()
                continue
            self._nap_lock.acquire(timeout=-1 if parked else nap)
            self._parked = False

    def _look(self) -> bool:
        """Take the lock if it is free. If not, somebody drives, and waiting for it would only take the GIL from them:
        the background thread does so only when it is needed."""
        if self.lock.acquire(False):
            return True
        if monotonic() < self._timers.next and not self._urgent and not self.closed:
            return False
        self.acquire()
        return True

    def _lead_in_background(self) -> None:
        marker = self._background_marker
        self.leader = marker
        try:
            while self.leader is marker and not self.closed:
                if self.backlog:
                    self._work_off_backlog()
                now = monotonic()
                if now >= self._timers.next:
                    self._timers.run(now)
                    continue
                if self.deferred:
                    return  # users' callbacks run while nobody leads
                if self._spin.worthwhile() and self._poll_in_background():
                    continue
                self.lock.release()
                try:
                    events = self._poll(_poll_timeout(self._timers.next - now), EVENTS)
                finally:
                    self.acquire()
                if self.leader is marker:
                    self._dispatch(events)
        finally:
            if self.leader is marker:
                self.leader = None

    def _poll_in_background(self) -> bool:
        """Poll for the next event after one was served. The lock is free between polls: user threads come first."""
        end = perf_counter() + self._spin.seconds
        while True:
            began = perf_counter()
            self.lock.release()
            try:
                events = self._poll(0, EVENTS)
            finally:
                self.acquire()
            if self.leader is not self._background_marker or self.closed:
                return True
            if events:
                self._dispatch(events)
                self._spin.hit()
                return True
            now = perf_counter()
            if now >= end or now - began > SLOW_POLL:
                self._spin.miss()
                return False

    def wake_background(self, urgent: bool = True) -> None:
        """End the background thread's nap; `urgent`: it shall lead at once if nobody does."""
        self._urgent = self._urgent or urgent
        if self._nap_lock.locked():
            self._nap_lock.release()

    # ------------------------------------------------------------------ the end

    def stop(self) -> None:
        """End the background thread and free the descriptors. Without the lock; the caller has closed what was watched
        and failed what anybody waits for."""
        with self:
            if self.closed:
                return
            self.closed = True
            self._handlers.clear()  # the waker's too: it stays ready, and wakes all who sleep in epoll, leader or not
            self._waker.release()
            self.wake_background()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        while self._occupied():  # waiters whose operation has failed are on their way out, and need the lock for it
            sleep(STEP_ASIDE)
        with self:
            self._epoll.close()
            os.close(self._waker.fd)
            _engines.discard(self)

    def _occupied(self) -> bool:
        with self:
            leading = self.leader is not None and self.leader is not self._background_marker
            return leading or bool(self._followers)

    def forked(self) -> None:
        """In a forked child: give up our copies of the descriptors, and nothing else."""
        self.lock = ForkedLock()
        self.closed = True
        self._epoll.close()
        # Each number goes on existing, for /dev/null: the objects that hold it close it sometime, and must hit nobody.
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in self._handlers:
            os.dup2(null, fd, inheritable=False)
        os.close(null)
        self._handlers.clear()


def _poll_timeout(seconds: float) -> float:
    """epoll takes milliseconds in an int: an endless wait becomes a long one."""
    return min(max(seconds, 0.0), 3600.0)


def _after_fork() -> None:
    for engine in list(_engines):
        engine.forked()


os.register_at_fork(after_in_child=_after_fork)

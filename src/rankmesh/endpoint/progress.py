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
   off (`Spin`). It did not if another process had the core meanwhile. What has been learnt of how a wait begins says
   nothing of how it goes on: the rest of a transfer comes soon. One that has served a request polls for the next.
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
from collections import deque
from collections.abc import Callable
from threading import get_ident
from time import monotonic, perf_counter, sleep
from typing import Final

from rankmesh.endpoint import forking, interrupts
from rankmesh.endpoint.background import Background
from rankmesh.endpoint.timers import Timer, Timers
from rankmesh.endpoint.waiting import (
    EVENTS,
    Backlogged,
    Courtesy,
    ForkedLock,
    Hint,
    Look,
    Looks,
    Spin,
    Waited,
    Waker,
    mark_of,
    poll_timeout,
)

logger = logging.getLogger("rankmesh")

#: Seconds a caller steps aside for when other threads wait for the lock.
STEP_ASIDE: Final = 20e-6
#: How much longer than for a message somebody polls who waits for room in a ring.
SLOT_PATIENCE: Final = 5
#: Seconds between looks of a thread that waits for the same work as another.
SHARED_LOOK: Final = 0.005
#: A waiter that knows which connection its message comes over first looks there: one system call instead of two for
#: each message, or none. Every SWEEP-th wait looks at all connections before, so that none is left out.
SWEEP: Final = 32

Handler = Callable[[int], None]


class Engine:
    """See the module's text. Methods need the lock unless they say otherwise."""

    def __init__(self, name: str, spin: float) -> None:
        self.lock: threading.Lock | ForkedLock = threading.Lock()
        self.contenders: deque[None] = deque()
        #: The Work whose waiter leads; None if nobody does; `background` if that thread does.
        self.leader: Waited | None = None
        #: The thread that took the lead last.
        self.leading_thread = 0
        self.closed = False
        self.backlog: deque[Backlogged] = deque()
        #: Whoever waits for room to write: while there is anybody, all connections are looked at, not just one.
        self.writers: set[object] = set()
        self.name = name
        self._epoll = select.epoll()
        self.poll, self.modify = self._epoll.poll, self._epoll.modify
        self._handlers: dict[int, Handler] = {}
        #: By descriptor: what can be looked at without a system call.
        self.looks = Looks()
        self.timers = Timers()
        #: Users' callbacks to be run without the lock.
        self.deferred: deque[Callable[[], None]] = deque()
        self._followers: dict[threading.Lock, Waited] = {}
        self.spin = Spin(spin)
        #: The same for who has slept already: more of a transfer comes soon, however long its beginning takes.
        self.later_spin = Spin(spin)
        self.courtesy = Courtesy()
        self.waker = Waker()
        self.drives = 0
        #: Signs of more to come: requests and replies that came alone (whence the last?), bells for what is not here.
        self.heralds = 0
        self.last_lone: Hint | None = None
        try:
            self.background = Background(self, spin)
        except OSError:  # no descriptor is left for its alarm
            os.close(self.waker.fd)
            raise
        self.watch(self.waker.fd, select.EPOLLIN, self.background.woken)
        forking.engines.add(self)

    def start(self) -> None:
        """Start the background thread. Without the lock."""
        self.background.start()

    # ------------------------------------------------------------------ the lock

    def acquire(self) -> None:
        """Take the lock fairly: whoever holds it learns that someone waits."""
        if not self.lock.acquire(False):
            try:
                self.contenders.append(None)
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
            self.run_deferred()
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

    def look_at(self, fd: int, look: Look) -> None:
        """Poll also this, for which the descriptor that is watched only rings while it is armed."""
        self.looks[fd] = look

    def unwatch(self, fd: int) -> None:
        self.looks.pop(fd, None)
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        sooner = when < self.timers.next
        timer = self.timers.add(when, callback)
        if sooner:
            self.waker.release()  # whoever sleeps does so for too long now
        return timer

    def defer(self, callback: Callable[[], None]) -> None:
        """Run a user's callback soon, without the lock."""
        self.deferred.append(callback)

    def step_down(self) -> Waited | None:
        """Give up the lead and the lock for a moment, in order to run users' code right here. Whoever led goes on after
        `step_up`: it must not keep anything in its hands that others may change meanwhile."""
        leader = None
        if self.leading_thread == get_ident():  # else this thread stepped down before, and the lead is another's now
            leader, self.leader = self.leader, None
            self.background.lead_is_free()  # and leads if this takes long
            self.background.rearm()
        self.lock.release()
        return leader

    def step_up(self, leader: Waited | None) -> None:
        """Take the lock again, and the lead if nobody waits with it. The engine may have been closed meanwhile, by the
        very code that ran."""
        self.acquire()
        if leader is not None and (self.leader is None or self.leader.yields):
            self.leader, self.leading_thread = leader, get_ident()

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Run `callback` on whichever thread leads next, with the lock. May be called without the lock, from any
        thread."""
        with self:
            if not self.closed:
                self.call_at(0.0, callback)
                self.background.wake()

    # ------------------------------------------------------------------ waiting

    def waited(self) -> list[Waited]:
        """What threads wait for."""
        return [work for work in (self.leader, *self._followers.values()) if work is not None]

    def drive(self, work: Waited, deadline: float) -> None:  # noqa: C901  # the hot path, written out for its speed
        """Return when `work` is done or the deadline has passed."""
        spin = self.background.spin if work.yields else self.spin  # who leads for everybody learns for itself
        while True:
            leader = self.leader
            if leader is not None and not leader.yields:
                if work.yields:
                    return
                self._follow(work, deadline)
            else:
                self.leader, self.leading_thread = work, get_ident()
                try:
                    if self.backlog:
                        self.work_off_backlog()
                    if work.finished:
                        return
                    if spin.skip:
                        spin.skip -= 1
                    elif spin.seconds:  # poll until `work` is done, or for so long without an event
                        hint = work.hint
                        if not self.drives % SWEEP:
                            self._sweep()
                        enough = hint is not None and not (self.writers or self.backlog) and hint.attend(work)
                        if enough:
                            spin.miss()
                        elif work.finished:
                            spin.misses = 0
                        elif self._poll_for(work, spin, deadline):
                            return
                        if work.finished:
                            return
                    self._block(work, deadline, spin)
                    if not work.yields:
                        spin = self.later_spin
                finally:
                    if self.leader is work:
                        self.leader = None
                        self.drives += 1
                        if self._followers or self.background.parked or self.background.sleeping:
                            self._hand_over()
            if work.finished or monotonic() >= deadline:
                if self.leader is None and self.background.parked:  # this follower was to lead, and has no need to
                    self._hand_over()
                return
            if self.deferred:  # users' callbacks run while nobody leads: one that waits itself must find the lead free
                try:
                    self.lock.release()
                    self.run_deferred()
                finally:
                    self.acquire()

    def forget(self, hint: Hint | None) -> None:
        """A connection is no more."""
        if self.last_lone is hint:
            self.last_lone = None
        if self.background.hint is hint:
            self.background.hint = None

    def _poll_for(self, work: Waited, spin: Spin, deadline: float) -> bool:
        """Poll all connections until `work` is done (True), or for so long without an event."""
        poll, end = self.poll, 0.0
        while True:
            events = poll(0, EVENTS)
            late = events and end and perf_counter() >= end
            if (self.looks and self.looks.serve_ready()) or events or self.backlog:  # none keeps the others waiting
                if self._handle(events, work):
                    if late:  # another process had the core meanwhile: a sleep would have done as well
                        spin.miss()
                    else:
                        spin.misses = 0
                    return True
                if work.yields:  # what it waits for is whatever comes
                    spin.misses = 0
                end = 0.0
            now = perf_counter()  # the clock of the timers, too
            if now >= self.timers.next:  # whoever receives for seconds on end shows life meanwhile
                self.timers.run(now)
                if work.finished:
                    return True
            if not end:
                end = now + self.patience
            elif now >= end:
                spin.miss()
                return False
            if self.contenders or self.deferred or now >= deadline:
                return False

    def _handle(self, events: list[tuple[int, int]], work: Waited) -> bool:
        """What a poll of all connections brought, and then what follows it where `work` expects something. True:
        `work` is done."""
        self.dispatch(events)
        if self.backlog and not work.finished:
            self.work_off_backlog()
        hint = work.hint
        if hint is not None and not (work.finished or self.writers or self.backlog):
            hint.attend(work)
        return work.finished

    @property
    def patience(self) -> float:
        """Seconds to poll for. Whoever waits for a slot of a ring waits for the other side to copy a whole one, which
        takes longer than a message, and less than to sleep and be woken."""
        return self.spin.seconds * (SLOT_PATIENCE if self.writers and self.looks else 1)

    def _hand_over(self) -> None:
        """The lead is free: a follower takes it, or the background thread looks for it."""
        for parker, work in self._followers.items():
            if not work.finished:  # else it has what it waits for, and is on its way out
                if parker.locked():
                    parker.release()
                break
        else:
            self.background.lead_is_free()
        self.background.rearm()

    @interrupts.sleeps
    def _block(self, work: Waited, deadline: float, spin: Spin) -> None:
        """Sleep until `work` is done, the deadline has passed, or polling may be worth while again."""
        while not work.finished and self.leader is work:
            if self.backlog:
                self.work_off_backlog()
                if work.finished:
                    return
            now = monotonic()
            if now >= self.timers.next:
                self.timers.run(now)
                continue
            if now >= deadline:
                self._sweep()  # what came while this thread was kept from running counts
                return
            if self.deferred:
                return
            if self.backlog:  # a copy goes on
                self.glance()
                continue
            if self.looks and self.looks.arm():  # something came just now: more of it may be polled for
                spin.skip = 0
                self._step_aside()
                return
            if self.background.expected and not work.yields:
                self.background.lead_is_taken()
            work.parker, heralds, mark = self.waker, self.heralds, mark_of(work.hint)
            try:  # a signal's handler that raises does so when a call has returned: the lock is given back then
                self.lock.release()
                events = self.poll(poll_timeout(min(deadline, self.timers.next) - now), EVENTS)
            finally:
                self.acquire()
                work.parker = None
            self.dispatch(events)
            if work.yields or (self.heralds != heralds and not work.finished):
                spin.hit()
                return
            if spin.slept(monotonic() - now, work.hint, mark):
                return
            spin = self.later_spin

    @interrupts.sleeps
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
                try:
                    self.lock.release()
                    parker.acquire(timeout=min(remaining, SHARED_LOOK if shared else work.look_every))
                finally:
                    self.acquire()
                    if work.parker is parker:
                        work.parker = None
                if self.leader is None or self.leader.yields:
                    return
        except BaseException:  # interrupted, perhaps when it was to lead
            del self._followers[parker]
            if self.leader is None:
                self._hand_over()
            raise
        finally:
            self._followers.pop(parker, None)

    # ------------------------------------------------------------------ what a leader does

    def turn(self) -> None:
        """Look once at what is there, without waiting."""
        if self.leader is None or self.leader.yields:
            if self.backlog:
                self.work_off_backlog()
            self._sweep()
            if self.looks and self.background.sleeping:  # and the bells that were to wake it may be answered now
                self.looks.arm()

    def glance(self) -> None:
        """Between two pieces of a long piece of work: look once at everything, and let others have the lock."""
        self._sweep()
        self._step_aside()

    def _step_aside(self) -> None:
        """Let others have the lock who wait for it."""
        if self.contenders:
            try:
                self.lock.release()
                sleep(STEP_ASIDE)
            finally:
                self.acquire()

    def may_look(self) -> bool:
        """Whether a caller that holds the lock may look at one connection itself instead of leading. The background
        thread, if it leads, no longer does then."""
        leader = self.leader
        if leader is not None:
            if not leader.yields:
                return False
            self.leader = None
            self.background.rearm()
        spin = self.spin
        if spin.skip or self.backlog or self.writers or not spin.seconds:
            return False
        self.drives += 1
        if not self.drives % SWEEP:
            self._sweep()
        return True

    def _sweep(self) -> None:
        """Look at all connections once, so that none is left out."""
        self.looks.serve_ready()
        if not self.closed:  # by a handler of a request that was served just now
            self.dispatch(self.poll(0, EVENTS))

    def dispatch(self, events: list[tuple[int, int]]) -> None:
        handlers = self._handlers
        for fd, mask in events:
            handler = handlers.get(fd)
            if handler is not None:
                handler(mask)

    def work_off_backlog(self) -> None:
        for _ in range(len(self.backlog)):
            if self.backlog:  # one of them may step down, and another thread work off the rest
                self.backlog.popleft().work_off()

    def run_deferred(self) -> None:
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

    # ------------------------------------------------------------------ the end

    def stop(self) -> None:
        """End the background thread and free the descriptors. Without the lock; the caller has closed what was watched
        and failed what anybody waits for."""
        with self:
            if self.closed:
                return
            self.closed = True
            self.looks.clear()
            self._handlers.clear()  # the waker's too: it stays ready, and wakes all who sleep in epoll, leader or not
            self.waker.release()
            self.background.wake()
        self.background.join()
        while self._occupied():  # waiters whose operation has failed are on their way out, and need the lock for it
            sleep(STEP_ASIDE)
        with self:
            forking.engines.discard(self)  # first: a fork must not find descriptors that are another's by now
            self._epoll.close()
            os.close(self.waker.fd)
            self.background.free()

    def _occupied(self) -> bool:
        with self:
            return any(work is not self.background for work in self.waited())

    def forked(self) -> None:
        """In a forked child: give up our copies of the descriptors, and nothing else; once, for they may be another's
        when that forks in turn."""
        forking.engines.discard(self)
        self.lock = ForkedLock()
        self.closed = True
        self._epoll.close()
        forking.divert([*self._handlers, self.background.descriptor])
        self._handlers.clear()

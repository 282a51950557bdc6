"""What threads wait on, what they look at meanwhile, and how long they poll before they sleep."""

from __future__ import annotations

import os
from collections.abc import Callable
from os import sched_yield
from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from rankmesh.errors import ClosedError

if TYPE_CHECKING:
    from rankmesh.endpoint.requests import Lone

#: Events taken from one poll; the rest is there at the next. (The default allocates room for 1,023.)
EVENTS: Final = 64
#: A sleep of less than so many times Config.spin was not worth it: a little more than is polled for.
LEAST_PATIENCE: Final = 2


def poll_timeout(seconds: float) -> float:
    """epoll takes milliseconds in an int: an endless wait becomes a long one."""
    return min(max(seconds, 0.0), 3600.0)


class Parker(Protocol):
    """What wakes a sleeping waiter."""

    def release(self) -> None: ...
    def locked(self) -> bool: ...


class Hint(Protocol):
    """A connection that can be looked at directly, on behalf of a waiter: see endpoint/direct.py."""

    #: A sleep of less than so many times Config.spin that it ended says that `attend` would have been worth while.
    patience: int

    def mark(self) -> int:
        """Another number after something has come over it."""

    def attend(self, work: Waited) -> bool: ...
    def await_reply(self, call: Lone) -> None: ...


def mark_of(hint: Hint | None) -> int:
    return 0 if hint is None else hint.mark()


class Waited(Protocol):
    """What a thread waits for."""

    @property
    def finished(self) -> bool: ...

    parker: Parker | None
    #: The connection that what it waits for comes over, if that is known.
    hint: Hint | None
    #: Seconds a follower sleeps at most before it looks itself whether it is finished.
    look_every: float
    #: Whoever waits for this leads for others: it is there when nobody else is, and steps back when somebody is.
    yields: bool


class Look(NamedTuple):
    """How to look at a connection without a system call: whether there is something to do, the same while asking to
    be woken by its descriptor from now on, and doing it."""

    ready: Callable[[], bool]
    arm: Callable[[], bool]
    serve: Callable[[], None]


class Looks(dict[int, Look]):
    """All that can be looked at without a system call, by descriptor."""

    def serve_ready(self) -> bool:
        """Serve what is there. True: something happened."""
        happened = False
        for ready, _, serve in list(self.values()):
            if ready():
                serve()
                happened = True
        return happened

    def any_ready(self) -> bool:
        """There is something to serve."""
        return any(ready() for ready, _, _ in self.values())

    def arm(self) -> bool:
        """Before sleeping: have everything ring that only rings on demand. True: something is there, and was served."""
        happened = False
        for _, arm, serve in list(self.values()):
            if arm():
                serve()
                happened = True
        return happened


class Backlogged(Protocol):
    """A connection with frames that were read and not yet looked at, because the leader already had what it wanted."""

    def work_off(self) -> None: ...


class Until:
    """Waits for a condition, looked at whenever something happened, and by a follower now and then."""

    look_every = 0.01
    yields = False
    hint: Hint | None = None

    def __init__(self, condition: Callable[[], bool]) -> None:
        self._condition = condition
        self.parker: Parker | None = None

    @property
    def finished(self) -> bool:
        return self._condition()


class Spin:
    """Decides whether polling pays off. One vain attempt is forgiven: a hiccup of the scheduler is no reason to change
    to a regime that is five times slower, and that the other side, waiting longer then, would follow into. From the
    second in a row on, the next 1, 2, 4 … up to MOST waits go without polling; a success forgives all. So a core is not
    burnt where the other side cannot run, and polling comes back by itself when traffic does. The engine reads and
    writes the fields itself: this is its hot path."""

    MOST: Final = 32

    __slots__ = ("misses", "seconds", "skip")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        #: Vain attempts in a row.
        self.misses = 0
        #: How many waits go without polling from now on.
        self.skip = 0

    def worthwhile(self) -> bool:
        if self.skip:
            self.skip -= 1
            return False
        return self.seconds > 0

    def hit(self) -> None:
        """It paid off, or would have."""
        self.misses = self.skip = 0

    def slept(self, seconds: float, hint: Hint | None, mark: int) -> bool:
        """A sleep that was this short says that polling would have paid off (True): it is tried again. So two sides
        that sleep for each other's answers, or pieces, find out of it. `mark`: the hint's, before; what came over other
        connections says nothing of it."""
        patience = hint.patience if hint is not None and hint.mark() != mark else 0
        if seconds < self.seconds * max(LEAST_PATIENCE, patience):
            self.skip = 0
            return True
        return False

    def miss(self) -> None:
        self.misses += 1
        self.skip = min((1 << min(self.misses, 8)) // 4, self.MOST)


class Courtesy:
    """Letting others run on this core between two looks (sched_yield): where ranks outnumber cores, one of them is who
    is waited for, and gives the core back soon. A process that computes keeps it for its whole slice, milliseconds in
    which the message lies there, while who sleeps in the kernel gets the core when it comes. So when most of the time
    goes by in that way, nobody lets others run for a while, and who waits sleeps. (Now and then a rank takes as long
    that has much to copy.)"""

    #: Seconds that ranks seldom need.
    LONG: Final = 0.001
    #: So many seconds were lost, and that is half of the time since; whatever lies further back than the third says
    #: nothing.
    LOST: Final = 0.02
    HALF: Final = 0.5
    MEMORY: Final = 0.05
    #: For how many times as long as it took nobody does so again.
    PAUSE: Final = 25

    __slots__ = ("_last", "_lost", "_since", "resumes")

    def __init__(self) -> None:
        #: When others may be let run again.
        self.resumes = 0.0
        #: Seconds that were lost to who took long, since when, and when the last did.
        self._lost = self._since = self._last = 0.0

    def let_others_run(self, began: float) -> float:
        """The time is `began`. What it is afterwards."""
        sched_yield()
        now = perf_counter()
        if now - began > self.LONG:
            self._took_long(began, now)
        return now

    def _took_long(self, began: float, now: float) -> None:
        if began - self._last > self.MEMORY:
            self._lost, self._since = 0.0, began
        self._last = now
        self._lost += now - began
        if self._lost >= self.LOST and self._lost >= self.HALF * (now - self._since):
            pause = self.PAUSE * (now - began)
            self.resumes = self._last = now + pause  # one that takes long right afterwards is enough then
            self._since += pause


class Waker:
    """Stands in for a sleeping leader's lock: releasing it ends the leader's epoll."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def release(self) -> None:
        os.eventfd_write(self.fd, 1)

    def locked(self) -> bool:
        return True

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:  # another leader cleared it first
            pass


class ForkedLock:
    """Takes the lock's place in a forked child: every use of the object there ends here."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        raise ClosedError(
            "this object belongs to the parent process and cannot be used after fork(). Make a new one in the child."
        )

    def release(self) -> None:
        """Nothing is held."""

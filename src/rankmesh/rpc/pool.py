"""The threads that handlers run on. They start when they are first needed, and run tasks outside of all locks.

How much may wait for them is the server's to bound. A handler that never returns keeps its thread; closing does not
wait for it longer than JOIN_SECONDS.

**Lingering.** Handing a request from the thread that reads to one that runs it costs more than everything else about a
small call. So a thread that has nothing left to do does not sleep at once: for a moment it leads the engine, reads the
next requests itself, and runs them where they were read if their handlers have lately been quick (`Server`). It leads
only where nobody waits for anything else, like the background thread, which takes over again when the lingering thread
has gone to sleep, or when a handler turns out to take longer than it used to. At most one thread lingers.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final

from rankmesh.endpoint.progress import Engine
from rankmesh.endpoint.waiting import Hint, Parker

logger = logging.getLogger("rankmesh")

#: Seconds that closing waits for handlers to notice it.
JOIN_SECONDS: Final = 1.0
#: Seconds a thread lingers after the last request.
LINGER: Final = 0.002

Task = Callable[[], None]


class Linger:
    """What a lingering thread waits for: a task, or the end."""

    yields = True
    look_every = threading.TIMEOUT_MAX
    parker: Parker | None = None
    #: The connection that the last request came over.
    hint: Hint | None = None

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        #: A thread lingers; it runs a handler; how many it has run.
        self.present = False
        self.busy = False
        self.served = 0

    @property
    def finished(self) -> bool:
        return bool(self._pool.tasks) or self._pool.closed


class Pool:
    """At most `most` threads. Methods need the engine's lock, but for `close`."""

    def __init__(self, engine: Engine, most: int) -> None:
        self._engine = engine
        self._most = most
        self.tasks: deque[Task] = deque()
        self._threads: list[threading.Thread] = []
        self._starting = 0
        #: What idle threads sleep on; the last to fall asleep is the first to be woken.
        self._asleep: list[threading.Lock] = []
        self.linger = Linger(self)
        self.closed = False

    @property
    def threads(self) -> int:
        return len(self._threads)

    @property
    def idle(self) -> bool:
        """Nothing waits, and no thread is busy."""
        lingering = self.linger.present and not self.linger.busy
        return not self.tasks and len(self._threads) == len(self._asleep) + lingering

    def submit(self, task: Task) -> None:
        """Have a task run by a thread: the one that lingers, one that sleeps, or a new one."""
        self.tasks.append(task)
        if self.linger.present and not self.linger.busy and len(self.tasks) == 1:
            parker = self.linger.parker
            if parker is not None and parker.locked():
                parker.release()
        else:
            self._rouse()

    def begin_here(self) -> None:
        """The thread that lingers is about to run a handler itself, which may take long: what it was to do is for
        others."""
        self.linger.busy = True
        self.linger.served += 1
        if self.tasks:
            self._rouse()

    def end_here(self) -> None:
        self.linger.busy = False

    def _rouse(self) -> None:
        if self._asleep:
            self._asleep.pop().release()
        elif len(self._threads) + self._starting < self._most and not self.closed:
            self._starting += 1
            self._engine.defer(self._start)

    def _start(self) -> None:
        name = f"rankmesh-rpc-{self._engine.name}-{len(self._threads)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._threads.append(thread)
        self._starting -= 1
        thread.start()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                task()
            except BaseException:  # tasks deal with what handlers raise: this is a defect, and must not end the pool
                logger.exception("A defect in rankmesh: a task of the RPC pool raised.")
            del task  # an idle thread keeps no arguments alive

    def _next(self) -> Task | None:
        """Wait for a task. Takes the lock. None: it is over."""
        engine = self._engine
        while True:
            with engine:
                if not self.tasks and not self.closed and not self.linger.present:
                    self._linger()
                if self.tasks:
                    return self.tasks.popleft()
                if self.closed:
                    return None
                asleep = threading.Lock()
                asleep.acquire()
                self._asleep.append(asleep)
            asleep.acquire()

    def _linger(self) -> None:
        linger = self.linger
        linger.present = True
        try:
            while not linger.finished:
                served = linger.served
                self._engine.drive(linger, monotonic() + LINGER)
                if linger.served == served:
                    break
        finally:
            linger.present = False
        if not self.tasks:
            self._engine.background.wake()

    def close(self) -> None:
        """Let the threads end, and wait for them. Takes the lock."""
        with self._engine:
            self.closed = True
            for asleep in self._asleep:
                asleep.release()
            self._asleep.clear()
            parker = self.linger.parker
            if parker is not None and parker.locked():
                parker.release()
            threads = list(self._threads)
        deadline = monotonic() + JOIN_SECONDS
        for thread in threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(max(deadline - monotonic(), 0.0))

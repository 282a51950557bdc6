"""The threads that handlers run on. They start when they are first needed, and run tasks outside of all locks.

How much may wait for them is the server's to bound. A handler that never returns keeps its thread; closing does not
wait for it longer than JOIN_SECONDS.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic
from typing import Final

from rankmesh.endpoint.progress import Engine

logger = logging.getLogger("rankmesh")

#: Seconds that closing waits for handlers to notice it.
JOIN_SECONDS: Final = 1.0

Task = Callable[[], None]


class Pool:
    """At most `most` threads. `submit` needs the engine's lock; a thread is started if all are busy."""

    def __init__(self, engine: Engine, most: int) -> None:
        self._engine = engine
        self._most = most
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        #: Tasks that wait or run.
        self.pending = 0
        self._starting = 0

    @property
    def threads(self) -> int:
        return len(self._threads)

    def submit(self, task: Task) -> None:
        self.pending += 1
        self._tasks.put(task)
        threads = len(self._threads) + self._starting
        if self.pending > threads and threads < self._most:
            self._starting += 1
            self._engine.defer(self._start)

    def done(self) -> None:
        """A task ended. With the lock: whoever runs one takes it anyway, to send its result."""
        self.pending -= 1

    def _start(self) -> None:
        name = f"rankmesh-rpc-{self._engine.name}-{len(self._threads)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._threads.append(thread)
        self._starting -= 1
        thread.start()

    def _run(self) -> None:
        get = self._tasks.get
        while (task := get()) is not None:
            try:
                task()
            except BaseException:  # tasks deal with what handlers raise: this is a defect, and must not end the pool
                logger.exception("A defect in rankmesh: a task of the RPC pool raised.")
            del task  # an idle thread keeps no arguments alive

    def close(self) -> None:
        """Without the lock."""
        threads = list(self._threads)
        for _ in threads:
            self._tasks.put(None)
        deadline = monotonic() + JOIN_SECONDS
        for thread in threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(max(deadline - monotonic(), 0.0))

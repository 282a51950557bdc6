"""Calls of functions of the pool that have lately been very quick: one thread runs all that wait, one after the other.

For a function that takes a few microseconds, waking a thread, taking the lock twice and a system call for its answer
cost ten times as much as the function itself. So such calls do not each become a task of the pool. One task, the drain,
runs those that wait, and answers several with one system call.

Nothing is held up by one that takes long this time. What waits stays in the queue, and a timer looks every millisecond
whether the drain got on: if not, it is deposed. Its answers leave, another thread goes on with the queue, and the
function counts as slow from then on, until it has been quick again.
"""

from __future__ import annotations

import math
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Final

from rankmesh.rpc.answers import Answer
from rankmesh.rpc.context import CallContext

if TYPE_CHECKING:
    from rankmesh.rpc.server import Server

#: Seconds that the last run of a function took at most, if its calls are drained.
BRIEF: Final = 25e-6
#: Seconds between looks at whether the drain gets on.
LOOK: Final = 0.001
#: Answers that leave together.
BATCH: Final = 64


class Drain:
    """See the module's text. Methods need the lock, but for `_run`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._engine = server.engine
        self._calls: deque[CallContext] = deque()
        #: What has been run and not answered.
        self._ended: deque[tuple[CallContext, Answer | None]] = deque()
        #: The call that is being run by the drain which is not deposed; None between two.
        self._now: CallContext | None = None
        #: Counts the drains: who finds another number is deposed.
        self._number = 0
        #: There is a drain that is not deposed; the timer is set.
        self._active = False
        self._watched = False

    def add(self, call: CallContext) -> None:
        self._calls.append(call)
        if not self._active:
            self._start()

    def _start(self) -> None:
        self._active = True
        self._number += 1
        number = self._number
        self._server.pool.submit(lambda: self._run(number))
        if not self._watched:
            self._watch()

    def _run(self, number: int) -> None:
        """On a thread of the pool, without the lock."""
        calls, ended, engine = self._calls, self._ended, self._engine
        while True:
            while calls and len(ended) < BATCH and number == self._number:
                try:
                    call = calls.popleft()
                except IndexError:  # another thread took the last one
                    break
                self._now = call
                ended.append((call, self._server.timed(call)))
            with engine:
                self._answer()
                if number != self._number:
                    return
                self._now = None
                if not calls:
                    self._active = False
                    return

    def _answer(self) -> None:
        ended = self._ended  # which a drain may be adding to
        self._server.answer_all([ended.popleft() for _ in range(len(ended))])

    def _watch(self) -> None:
        self._watched = True
        running = self._now
        self._engine.call_at(monotonic() + LOOK, lambda: self._look(running))

    def _look(self, before: CallContext | None) -> None:
        """Depose a drain that runs the same call as at the last look."""
        self._watched = False
        if not self._active:
            return
        call = self._now
        if call is not None and call is before:
            if call.function is not None:
                call.function.took = math.inf
            self._now = None
            self._number += 1
            self._answer()
            self._active = bool(self._calls)
            if self._active:
                self._start()
                return
        self._watch()

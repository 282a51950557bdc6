"""Callbacks due at a time. Pure: the time comes from outside."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable


class Timer:
    """A callback due at a time; `cancel()` makes it do nothing."""

    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Timers:
    """Timers in the order of their times; those of the same time in the order in which they were made."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        #: When the next one is due; infinite when there is none.
        self.next = math.inf

    def add(self, when: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(when, callback)
        heapq.heappush(self._heap, (when, next(self._order), timer))
        self.next = min(self.next, when)
        return timer

    def run(self, now: float) -> None:
        """Call those that are due. One may add others, which run now too if they are due."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            timer = heapq.heappop(heap)[2]
            if timer.callback is not None:
                timer.callback()
        while heap and heap[0][2].callback is None:
            heapq.heappop(heap)
        self.next = heap[0][0] if heap else math.inf

"""Many ranks on one region: every other one reads its part of it, the rest write theirs, and meanwhile the owner
registers and unregisters other regions."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from measures.base import change, check_equal
from measures.onesided import OWNER, OneSidedRank, Outcome, claim
from subjects.base import OneSided

#: An owner, a reader and a writer: nothing but transfers. Where there are more, regions come and go meanwhile.
PAIR_RANKS = 3
#: Seconds between a region that goes and the next that comes.
CHURN_PAUSE = 0.001
#: One read in so many is compared, and one write in so many has other contents than the one before: both take time.
CHECK_EVERY = 8


class CrowdRank(OneSidedRank):
    def __init__(self, subject: OneSided, rank: int, size: int) -> None:
        super().__init__(subject, rank, size)
        self.add(self.crowd, self._churn if size > PAIR_RANKS else self._wait)

    def crowd(self, nbytes: int, count: int) -> Outcome:
        """`count` transfers by each rank. The figure is the bytes of all by the time until the last has finished."""
        number = self.rank - (self.rank > OWNER)
        data, into = self.filled("data", nbytes), self.local("into", nbytes)
        data[:8] = self.rank  # nobody else's contents will do
        put, get = self.subject.writing([(data, number * nbytes)]), self.subject.reading([(into, number * nbytes)])
        put()
        self.meeting.exchange(None)
        began = time.perf_counter()
        for turn in range(count):
            if number % 2:
                if turn % CHECK_EVERY == 0:
                    change(data)
                put()
            else:
                get()
                if turn % CHECK_EVERY == 0:
                    check_equal(into, data)
                    into.fill(0)
        self.meeting.exchange(None)
        seconds = time.perf_counter() - began
        moved = (self.size - 1) * nbytes * count
        figures = {"gb_per_s": moved / seconds / 1e9, "count": count, "seconds": seconds}
        return figures, [claim(data, number * nbytes)]

    def _wait(self) -> None:
        for _ in ("prepared", "finished"):
            self.meeting.exchange(None)

    def _churn(self) -> None:
        """Register and unregister, in a thread beside the one that waits."""
        done = threading.Event()

        def come_and_go() -> None:
            while not done.wait(CHURN_PAUSE):
                self.subject.come_and_go()

        with ThreadPoolExecutor(1, "churn") as thread:
            churning = thread.submit(come_and_go)
            self._wait()
            done.set()
            churning.result()

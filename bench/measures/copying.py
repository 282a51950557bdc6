"""A copy inside one process, under the conditions in which messages are measured: the same data, changed and checked
in the same way, on the core of rank 0. Rank 1 sleeps."""

from __future__ import annotations

import time

import numpy as np

from measures.base import Rank, Reply, change, check_equal, random_bytes, warmup_of
from subjects.base import Copier


class CopyRank(Rank):
    def __init__(self, subject: Copier, rank: int, size: int) -> None:
        super().__init__(subject, rank, size)
        self.subject = subject
        for command in ("bandwidth", "large_read", "large_write"):
            self.commands[command] = self.bandwidth

    def bandwidth(self, nbytes: int, count: int) -> Reply:
        if self.rank > 0:
            return {}
        source, expected, into = random_bytes(nbytes), random_bytes(nbytes), np.ones(nbytes, np.uint8)
        copy, clock = self.subject.copy, time.perf_counter_ns
        samples = []
        for _ in range(warmup_of(count) + count):
            change(source)
            change(expected)
            began = clock()
            copy(into, source)
            samples.append(clock() - began)
            check_equal(into, expected)
        timed = samples[-count:]
        return {"gb_per_s": nbytes / float(np.median(timed)), "count": count, "seconds": sum(timed) / 1e9}

"""What all kinds of measurement share: the data, its checks, and the commands every process answers to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from subjects.base import Bytes, Subject

Reply = dict[str, Any]
SEED = 20240
#: Untimed repetitions before each timed loop: a tenth of it, and at least this many.
MIN_WARMUP = 2
#: Added to each word of a large array between two repetitions; odd, so that no value comes again.
STEP = np.uint64(0x9E3779B97F4A7C15)


class WrongData(Exception):
    """Data arrived with other contents than were sent; its subject's figures mean nothing."""


def warmup_of(count: int) -> int:
    return max(MIN_WARMUP, count // 10)


def random_bytes(nbytes: int) -> Bytes:
    """The same on every rank, so that a receiver can compare without being told; in memory as numpy allocates it."""
    array = np.empty(nbytes, np.uint8)
    array[:] = np.frombuffer(np.random.default_rng(SEED).bytes(nbytes), np.uint8)
    return array


def check_equal(received: Bytes, expected: Bytes) -> None:
    if not np.array_equal(received, expected):
        raise WrongData(f"A message of {expected.nbytes} bytes arrived with other contents than were sent.")


def change(array: Bytes) -> None:
    """Make every word of a large message differ from the one before it, in the same way at both ends."""
    words = array.view(np.uint64)
    np.add(words, STEP, out=words)


def latency_figures(samples: Sequence[int], seconds: float, nbytes: int) -> Reply:
    """Of round trips in nanoseconds; the bandwidth is that of `nbytes` there and back, one way at a time."""
    p50, p99 = (float(value) / 1e3 for value in np.percentile(samples, (50, 99)))
    return {
        "p50_us": p50,
        "p99_us": p99,
        "min_us": min(samples) / 1e3,
        "gb_per_s": 2e-3 * nbytes / p50,
        "count": len(samples),
        "seconds": seconds,
    }


class Rank:
    """The commands, as methods; each runs on all ranks of a world at once and answers with figures on rank 0."""

    def __init__(self, subject: Subject, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._opened = subject
        self.commands: dict[str, Callable[..., Reply]] = {"open": self.open, "close": self.close}

    def run(self, command: str, arguments: Reply) -> Reply:
        answer = self.commands[command](**arguments)
        if command != "close":
            self._opened.check()
        return answer

    def open(self, port: int) -> Reply:
        self._opened.open(self.rank, self.size, port)
        return {"version": self._opened.version()}

    def close(self) -> Reply:
        self._opened.close()
        return {}

"""Calls of a function that returns its argument: one at a time, or many in flight. Rank 1 serves in the background."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from measures.base import Rank, Reply, check_equal, latency_figures, random_bytes, warmup_of
from subjects.base import Bytes, Caller

#: Up to this size the payload is `bytes`; above, the array as the library likes it.
SMALL_BYTES = 64 * 1024
IN_FLIGHT = 64


class CallRank(Rank):
    def __init__(self, subject: Caller, rank: int, size: int) -> None:
        super().__init__(subject, rank, size)
        self.subject = subject
        for command in (self.pingpong, self.in_flight):
            self.commands[command.__name__] = command

    def pingpong(self, nbytes: int, count: int) -> Reply:
        """One call at a time; the same figures as for messages that go there and back."""
        if self.rank > 0:
            return {}
        data, payload = self._payload(nbytes)
        _, result = self.subject.time_calls(payload, warmup_of(count))
        self._check(result, data)
        began = time.perf_counter()
        samples, result = self.subject.time_calls(payload, count)
        seconds = time.perf_counter() - began
        self._check(result, data)
        return latency_figures(samples, seconds, nbytes)

    def in_flight(self, nbytes: int, count: int) -> Reply:
        """Calls per second with IN_FLIGHT of them under way at a time."""
        if self.rank > 0:
            return {}
        data, payload = self._payload(nbytes)
        self._check(self.subject.call_in_flight(payload, warmup_of(count), IN_FLIGHT), data)
        began = time.perf_counter()
        result = self.subject.call_in_flight(payload, count, IN_FLIGHT)
        seconds = time.perf_counter() - began
        self._check(result, data)
        return {"per_s": count / seconds, "count": count, "seconds": seconds}

    def _payload(self, nbytes: int) -> tuple[Bytes, Any]:
        data = random_bytes(nbytes)
        return data, data.tobytes() if nbytes <= SMALL_BYTES else self.subject.array(data)

    def _check(self, result: Any, expected: Bytes) -> None:
        """Bytes, an array, a tensor: whatever came back has to have a buffer with the same contents."""
        array = result if isinstance(result, np.ndarray) else np.frombuffer(_exported(result), np.uint8)
        check_equal(array, expected)


def _exported(result: Any) -> Any:
    return result.numpy() if hasattr(result, "numpy") else result

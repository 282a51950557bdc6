"""Collectives, as nccl-tests time them: a loop of calls, one after the other, its time divided by their number, of the
slowest rank.

A size is that of a rank's larger buffer: the array of all_reduce and broadcast, what all_gather gathers on a rank, what
a rank gives to reduce_scatter or all_to_all. It is rounded up to whole elements for each rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from measures.base import Reply, WrongData, warmup_of
from measures.meeting import MeetingRank
from subjects.base import Collectives, Floats, Transfer

FLOAT_BYTES = 4
#: Contents repeat after so many elements: a prime, so that no two blocks look alike.
PERIOD = 4099
#: Values are whole numbers below this: their sums are exact in every type, bfloat16 too.
VALUES = 13
#: Bytes that go over each rank's connection, per byte of the size, by the number of ranks.
BUS_SHARE: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
    "barrier": lambda ranks: 0.0,
}


@dataclass
class Prepared:
    """A collective with its buffers, kept from round to round: pages are touched once."""

    call: Transfer
    #: What is written before, and where the result has to be.
    given: Any
    result: Any
    values: Floats
    expected: Floats
    #: Its result is what the next call is given.
    accumulates: bool = False


class TogetherRank(MeetingRank):
    def __init__(self, subject: Collectives, rank: int, size: int) -> None:
        super().__init__(subject, rank, size)
        self.subject = subject
        self._kept: tuple[tuple[str, int], Prepared] | None = None
        for collective in BUS_SHARE:
            self._add(collective)

    def _add(self, collective: str) -> None:
        def command(nbytes: int, count: int) -> Reply:
            return self._measure(collective, nbytes, count)

        self.commands[collective] = command

    def _measure(self, collective: str, nbytes: int, count: int) -> Reply:
        prepared = self._prepared(collective, nbytes)
        self.meeting.exchange(None)
        self._run_checked(prepared)
        # Zeros stay what they are however often they are added up; all other results are the same every time.
        self._fill(prepared, np.zeros_like(prepared.values) if prepared.accumulates else prepared.values)
        call = prepared.call
        for _ in range(warmup_of(count) - 1):
            call()
        began = time.perf_counter()
        for _ in range(count):
            call()
        seconds = time.perf_counter() - began
        if prepared.accumulates:
            self._run_checked(prepared)
        else:
            self._check(prepared)
        slowest = max(self.meeting.exchange(seconds))
        return self._figures(collective, prepared, nbytes, count, slowest)

    def _figures(self, collective: str, prepared: Prepared, nbytes: int, count: int, seconds: float) -> Reply:
        per_call = seconds / count
        rate = max(len(prepared.values), len(prepared.expected)) / per_call / 1e9
        bandwidth = nbytes / per_call / 1e9
        return {
            "us": per_call * 1e6,
            "alg_gb_per_s": bandwidth,
            "bus_gb_per_s": bandwidth * BUS_SHARE[collective](self.size),
            "gelements_per_s": rate,
            "count": count,
            "seconds": seconds,
        }

    # ------------------------------------------------------------------ buffers and contents

    def _prepared(self, collective: str, nbytes: int) -> Prepared:
        key = (collective, nbytes)
        if self._kept is None or self._kept[0] != key:
            self._kept = None  # before the next is allocated
            self._kept = (key, self._prepare(collective, nbytes))
        return self._kept[1]

    def _prepare(self, collective: str, nbytes: int) -> Prepared:
        subject, whole = self.subject, nbytes // FLOAT_BYTES
        each = -(-whole // self.size)
        whole = each * self.size if collective in ("all_gather", "reduce_scatter", "all_to_all") else whole
        mine = slice(self.rank * each, (self.rank + 1) * each)
        if collective == "barrier":
            nothing = np.empty(0, np.float32)
            return Prepared(subject.barrier(), None, None, nothing, nothing)
        if collective in ("all_reduce", "broadcast"):
            buffer = subject.allocate(whole)
            values = contents(self.rank, whole)
            expected = self._sum(whole) if collective == "all_reduce" else contents(0, whole)
            call = getattr(subject, collective)(buffer)
            return Prepared(call, buffer, buffer, values, expected, accumulates=collective == "all_reduce")
        given, result = (each, whole) if collective == "all_gather" else (whole, whole)
        values = contents(self.rank, given)
        if collective == "all_gather":
            expected = np.concatenate([contents(rank, each) for rank in range(self.size)])
        elif collective == "reduce_scatter":
            result, expected = each, self._sum(whole)[mine]
        else:
            expected = np.concatenate([contents(rank, whole)[mine] for rank in range(self.size)])
        buffer, out = subject.allocate(given), subject.allocate(result)
        return Prepared(getattr(subject, collective)(buffer, out), buffer, out, values, expected)

    def _sum(self, count: int) -> Floats:
        total = contents(0, count)
        for rank in range(1, self.size):
            total += contents(rank, count)
        return total

    def _fill(self, prepared: Prepared, values: Floats) -> None:
        if prepared.given is None:
            return
        self.subject.write(prepared.given, values)
        if prepared.result is not prepared.given:
            self.subject.write(prepared.result, np.full_like(prepared.expected, -1))

    def _run_checked(self, prepared: Prepared) -> None:
        self._fill(prepared, prepared.values)
        prepared.call()
        self._check(prepared)

    def _check(self, prepared: Prepared) -> None:
        if prepared.result is None or not self.subject.checked:
            return
        if not np.array_equal(self.subject.read(prepared.result), prepared.expected):
            raise WrongData(f"Rank {self.rank} got another result than numpy's, of {prepared.expected.size} elements.")


def contents(rank: int, count: int) -> Floats:
    """What a rank gives: the same in every run."""
    tile = (np.arange(PERIOD) * 7 + rank * 5) % VALUES
    return np.resize(tile.astype(np.float32), count)

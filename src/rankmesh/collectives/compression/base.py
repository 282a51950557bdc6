"""Compressor: the interface of what makes an array smaller, and the memory of what it left out.

A compressor turns float32 numbers into a payload of a known size, and back into numbers near them. What it left out is
kept and added to the next array of the same name (error feedback): so nothing is lost for ever, only late. The sum of
all results differs from the sum of all inputs by no more than what is kept at the end.

For a compressor of your own derive from Compressor, and write `signature`, `nbytes`, `encode` and `decode`. They may
run on any thread, must not touch the group, and depend on their arguments alone: all ranks decode the same payloads,
and their results are the same to the bit because decoding is.
"""

from __future__ import annotations

import copy
import threading
from abc import ABC, abstractmethod
from enum import Enum, auto
from typing import Any, Self

import numpy as np

from rankmesh.errors import UsageError

Array = np.ndarray[Any, Any]


class Exchange(Enum):
    """How payloads become a sum (exchange.py has the costs)."""

    PARTS = auto()  #: each rank sums a part of the array and compresses the sum: for payloads a fixed fraction as long
    GATHER = auto()  #: each rank gets all payloads: for those of which the sum is longer than each
    REDUCE = auto()  #: payloads are float32 numbers that may be added: those of all ranks have the same meaning


class Memory:
    """What one group's arrays of one name have left behind on this rank. `lock` guards `of_sums`."""

    def __init__(self) -> None:
        self.steps = 0
        #: Left out of this rank's arrays; of the sums that it compressed for all.
        self.of_values: Array | None = None
        self.of_sums: Array | None = None
        self.lock = threading.Lock()


class Compressor(ABC):
    """One name, one array: each call with the same compressor continues the last. `named` gives others of the same
    settings. A list of arrays counts as one. Groups are kept apart. Of one name, one call is under way at a time; all
    ranks make the same calls. After a failed call, `reset` forgets what was left out.

    Sums and averages of floating-point arrays are computed in float32, whatever the arrays are.
    """

    exchange = Exchange.PARTS
    #: Elements that are encoded together: parts are cut at multiples.
    block = 1
    #: Whether `encode` and `decode` use the seed: then ranks that count their calls differently are no match.
    seeded = False

    def __init__(self, error_feedback: bool = True) -> None:
        self.error_feedback = error_feedback
        self._lock = threading.Lock()
        self._memories: dict[int, Memory] = {}
        self._named: dict[str, Self] = {}

    # ------------------------------------------------------------------ what a compressor is

    @property
    @abstractmethod
    def signature(self) -> str:
        """Its name and settings: what ranks must agree on."""

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """Of the payload of so many numbers, 0 too."""

    @abstractmethod
    def encode(self, values: Array, payload: Array, seed: int) -> None:
        """Write `values` (flat, float32, not to be changed) to `payload` (bytes, zero). `seed` is the same on all
        ranks and another in each call."""

    @abstractmethod
    def decode(self, payload: Array, out: Array, seed: int) -> None:
        """Overwrite `out` (flat, float32) with what the payload stands for."""

    def add(self, payload: Array, total: Array, seed: int) -> None:
        """Add that to `total`. Override it where most of it is zero."""
        decoded = np.empty_like(total)
        self.decode(payload, decoded, seed)
        np.add(total, decoded, out=total)

    # ------------------------------------------------------------------ what it remembers

    def named(self, name: str) -> Self:
        """The same compressor for another array: always the same one for a name."""
        with self._lock:
            found = self._named.get(name)
            if found is None:
                found = self._named[name] = copy.copy(self)
            return found

    def reset(self) -> None:
        """Forget what was left out, here and in all that were named. On all ranks, or seeds will differ."""
        with self._lock:
            self._memories.clear()
            for found in self._named.values():
                found.reset()

    def memory(self, group: int, count: int) -> Memory:
        """Of that group. Raises UsageError if it is of an array of another length."""
        with self._lock:
            memory = self._memories.setdefault(group, Memory())
        known = memory.of_values
        if known is not None and len(known) != count:
            raise UsageError(
                f"This {self.signature} remembers what it left out of {len(known)} numbers, and is given {count}. "
                "Use compressor.named(name) with a name for each array."
            )
        return memory

    def __repr__(self) -> str:
        return f"<{self.signature}{'' if self.error_feedback else ', no error feedback'}>"

    def __getstate__(self) -> dict[str, Any]:
        """Settings only: what was left out belongs to this rank."""
        return {key: value for key, value in self.__dict__.items() if key not in ("_lock", "_memories", "_named")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock, self._memories, self._named = threading.Lock(), {}, {}


def padded(nbytes: int) -> int:
    """To a multiple of 8, so that the numbers of each payload in a row are aligned."""
    return -(-nbytes // 8) * 8


def ratio_of(ratio: float, what: str) -> float:
    if not 0.0 < ratio <= 1.0:
        raise UsageError(
            f"{what} keeps a part of the numbers, above 0 and up to 1; this is {ratio}. Correct the ratio."
        )
    return float(ratio)


def kept(ratio: float, count: int) -> int:
    """How many of so many numbers: at least one."""
    return min(count, max(1, round(ratio * count))) if count else 0

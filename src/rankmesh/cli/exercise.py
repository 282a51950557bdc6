"""One collective with its buffers: what a rank gives, what it must get, and how long that takes.

Sizes as in nccl-tests: that of a rank's larger buffer, rounded up to whole elements for each rank. Times too: of a loop
of calls on the slowest rank, divided by their number. A result is compared with numpy's before and after the loop.

In place means what it does there: the result of a reduction takes the place of what was given, a rank's part lies in
its place of the larger buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, reduce
from importlib import import_module
from time import perf_counter
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from rankmesh.collectives.reducing import OPERATIONS
from rankmesh.errors import ConfigError, UsageError

Array = np.ndarray[Any, Any]
Call = Callable[[], object]

#: Untimed calls before the loop; all but the first tell how many fit into it.
WARMUP: Final = 4
#: Fewest and most calls of a loop, whatever the time.
LEAST: Final = 3
MOST: Final = 100_000
#: Contents repeat after so many elements: a prime, so that no two ranks' parts look alike.
_PERIOD: Final = 4099


class Kind(NamedTuple):
    """What a collective does with `whole` elements in a world of n."""

    #: Its larger buffer holds an equal part for each rank. Which of the two that is: what is given, or what comes.
    gives_parts: bool = False
    gets_parts: bool = False
    reduces: bool = False
    rooted: bool = False
    #: There is a form with a second array.
    out_of_place: bool = True
    #: Bytes on each rank's connection for each byte of the size: busbw / algbw.
    bus: Callable[[int], float] = lambda n: 1.0


def _all_but_own(n: int) -> float:
    return (n - 1) / n


KINDS: Final[dict[str, Kind]] = {
    "all_reduce": Kind(reduces=True, bus=lambda n: 2 * (n - 1) / n),
    "broadcast": Kind(rooted=True, out_of_place=False),
    "reduce": Kind(reduces=True, rooted=True),
    "all_gather": Kind(gets_parts=True, bus=_all_but_own),
    "reduce_scatter": Kind(gives_parts=True, reduces=True, bus=_all_but_own),
    "all_to_all": Kind(gives_parts=True, gets_parts=True, bus=_all_but_own),
    "gather": Kind(gets_parts=True, rooted=True, bus=_all_but_own),
    "scatter": Kind(gives_parts=True, rooted=True, bus=_all_but_own),
    "scan": Kind(reduces=True),
    "exscan": Kind(reduces=True),
    "barrier": Kind(out_of_place=False, bus=lambda n: 0.0),
}


@dataclass(frozen=True, slots=True)
class Task:
    """A collective, of what and how."""

    collective: str
    nbytes: int
    dtype: np.dtype[Any]
    op: str
    root: int

    @property
    def kind(self) -> Kind:
        return KINDS[self.collective]

    def part(self, size: int) -> int:
        """Elements of one rank's part of the larger buffer."""
        return -(-self.nbytes // (self.dtype.itemsize * size))

    def whole(self, size: int) -> int:
        """Elements of the larger buffer."""
        if self.kind.gives_parts or self.kind.gets_parts:
            return self.part(size) * size
        return -(-self.nbytes // self.dtype.itemsize)

    def chosen_by(self, size: int) -> int:
        """The bytes by which an algorithm is chosen (choosing.py): those of the array a rank gives or gets, where it is
        a part; reduce_scatter goes by the whole."""
        by_part = self.kind.gets_parts or self.collective == "scatter"
        return (self.part(size) if by_part else self.whole(size)) * self.dtype.itemsize


class Backend(Protocol):
    """A library with collectives, on one rank."""

    rank: int
    size: int
    #: The library with its version.
    title: str

    def call(self, task: Task, given: Array, out: Array, in_place: bool, algorithm: str | None) -> Call | None:
        """The call, ready to be made again and again; None if the library has none of this form. `out` is `given`
        where all of it is replaced."""

    def exchange(self, said: Any) -> list[Any]:
        """What each rank says, on all ranks."""

    def close(self) -> None: ...


class Timing(NamedTuple):
    """Mean time of a call on the slowest rank, number of calls, and elements that were wrong, of all ranks."""

    us: float
    iterations: int
    wrong: int


class Exercise:
    """A task on one rank, with its buffers."""

    def __init__(self, task: Task, rank: int, size: int, in_place: bool) -> None:
        self.task, self.rank, self.size, self.in_place = task, rank, size, in_place
        kind, whole, part = task.kind, task.whole(size), task.part(size)
        mine = slice(rank * part, (rank + 1) * part)
        if in_place:
            buffer = np.zeros(whole, task.dtype)
            self.given = buffer[mine] if kind.gets_parts and not kind.gives_parts else buffer
            self.out = buffer[mine] if kind.gives_parts and not kind.gets_parts else buffer
        else:
            self.given = np.zeros(part if kind.gets_parts and not kind.gives_parts else whole, task.dtype)
            self.out = np.zeros(part if kind.gives_parts and not kind.gets_parts else whole, task.dtype)
        self._contents = self._of(rank, 0, self.given.size)
        self._expected = self._result(part)

    @property
    def accumulates(self) -> bool:
        """A call is given what the last one made. Zeros stay zeros in every operation."""
        return self.in_place and (self.task.kind.reduces or self.task.collective == "all_to_all")

    def fill(self) -> None:
        """What comes must not be there already."""
        if not self.in_place:
            self.out.fill(0)
        np.copyto(self.given, self._contents)

    def clear(self) -> None:
        self.given.fill(0)

    def wrong(self) -> int:
        """Elements that are not as numpy has them."""
        if self._expected is None:
            return 0
        return int(np.count_nonzero(self.out != self._expected))

    def _of(self, rank: int, start: int, stop: int) -> Array:
        tile = _tile(self.task.dtype, self.task.op, rank)
        return np.resize(np.roll(tile, -start), stop - start)

    def _result(self, part: int) -> Array | None:
        """What has to be in `out`; None: nothing comes to this rank."""
        task, rank, size, whole = self.task, self.rank, self.size, self.task.whole(self.size)
        start, stop = rank * part, (rank + 1) * part
        if task.kind.rooted and task.collective in ("reduce", "gather") and rank != task.root:
            return None
        match task.collective:
            case "barrier":
                return None
            case "broadcast":
                return self._of(task.root, 0, whole)
            case "scatter":
                return self._of(task.root, start, stop)
            case "all_gather" | "gather":
                return np.concatenate([self._of(other, 0, part) for other in range(size)])
            case "all_to_all":
                return np.concatenate([self._of(other, start, stop) for other in range(size)])
            case "scan" | "exscan":
                ranks = range(rank + 1 if task.collective == "scan" else rank)
                return self._reduced(ranks, 0, whole) if ranks else None
            case "reduce_scatter":
                return self._reduced(range(size), start, stop)
            case _:
                return self._reduced(range(size), 0, whole)

    def _reduced(self, ranks: range, start: int, stop: int) -> Array:
        task = self.task
        tiles = [_tile(task.dtype, task.op, rank) for rank in ranks]
        total = reduce(OPERATIONS[task.op], tiles).astype(task.dtype)
        if task.op == "avg":
            np.divide(total, self.size, out=total, casting="unsafe")
        return np.resize(np.roll(total, -start), stop - start)


@lru_cache(maxsize=1024)
def _tile(dtype: np.dtype[Any], op: str, rank: int) -> Array:
    """Small whole numbers, none of them 0: exact in every type, in any order. A product's are 1 and 2."""
    values = (np.arange(_PERIOD) * 7 + rank * 5) % (2 if op == "prod" else 13) + 1
    return values.astype(dtype)


def dtype_of(name: str) -> np.dtype[Any]:
    """numpy's, or ml_dtypes' if that is installed. Raises ConfigError."""
    try:
        return np.dtype(name)
    except TypeError:
        try:
            found: np.dtype[Any] = np.dtype(getattr(import_module("ml_dtypes"), name))
            return found
        except (ImportError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"There is no dtype {name!r} ({error}). Use one of numpy's, or install the package ml_dtypes for "
                "bfloat16."
            ) from error


def measure(
    backend: Backend, task: Task, in_place: bool, algorithm: str | None, seconds: float, iterations: int | None
) -> Timing | None:
    """None: the library has none of this form, or the algorithm does not work here, which all ranks find alike."""
    exercise = Exercise(task, backend.rank, backend.size, in_place)
    call = backend.call(task, exercise.given, exercise.out, in_place, algorithm)
    if call is None:
        return None
    exercise.fill()
    try:
        call()
    except UsageError:
        return None
    wrong = exercise.wrong()
    (exercise.clear if exercise.accumulates else exercise.fill)()
    began = perf_counter()
    for _ in range(WARMUP - 1):
        call()
    one = (perf_counter() - began) / (WARMUP - 1)
    count = backend.exchange(iterations or min(max(int(seconds / one), LEAST), MOST))[0]
    began = perf_counter()
    for _ in range(count):
        call()
    elapsed = perf_counter() - began
    if exercise.accumulates:
        exercise.fill()
        call()
    wrong += exercise.wrong()
    said = backend.exchange([elapsed, wrong])
    return Timing(max(one[0] for one in said) / count * 1e6, count, sum(one[1] for one in said))

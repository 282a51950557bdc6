"""`rankmesh bench collectives --tune`: from the times of all algorithms to a table of the fastest.

An algorithm holds from its size half-way (geometrically) to the next measured one. Where the one of the size before is
as good as the best, within what noise makes of it, it stays: a table that changes its mind at every size is no better,
and harder to read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol

from rankmesh.collectives.tuning import Measured, Row, TunedWorld, TuningTable, read_table, write_table
from rankmesh.errors import ConfigError

#: Times that differ by less are the same.
NOISE: Final = 1.05
#: What is told of where a table was measured.
MACHINE: Final = ("rankmesh", "python", "system", "cores", "load_before", "pinned", "transport")


class Timed(Protocol):
    """A row of the benchmark."""

    @property
    def collective(self) -> str: ...
    @property
    def algorithm(self) -> str: ...
    @property
    def chosen_by(self) -> int: ...
    @property
    def out_us(self) -> float | None: ...
    @property
    def in_us(self) -> float | None: ...


def check_target(path: str) -> None:
    """Before anything is measured: the file can be made, or is a table already. Raises ConfigError."""
    if Path(path).exists():
        read_table(path)
    elif not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"The folder of {path!r} does not exist. Make it, or name another file after --tune.")


def table_of(rows: Iterable[Timed], document: dict[str, Any]) -> TunedWorld:
    """The fastest of each collective by size, for as many ranks and hosts as were measured."""
    times: dict[str, dict[int, dict[str, float]]] = {}
    for row in rows:
        known = [us for us in (row.out_us, row.in_us) if us is not None]
        if known:
            times.setdefault(row.collective, {}).setdefault(row.chosen_by, {})[row.algorithm] = sum(known) / len(known)
    return TunedWorld(
        ranks=document["ranks"],
        hosts=document["hosts"],
        date=document["date"],
        machine={name: document[name] for name in MACHINE},
        rows={collective: fastest(by_size) for collective, by_size in times.items()},
        measured=[
            Measured(collective, nbytes, algorithm, us)
            for collective, by_size in times.items()
            for nbytes, by_algorithm in by_size.items()
            for algorithm, us in by_algorithm.items()
        ],
    )


def fastest(by_size: dict[int, dict[str, float]]) -> list[Row]:
    """Rows of a table, from the times of each algorithm by size."""
    sizes = sorted(by_size)
    chosen: list[str] = []
    for nbytes in sizes:
        times = by_size[nbytes]
        best = min(times, key=times.__getitem__)
        before = chosen[-1] if chosen else best
        chosen.append(before if times.get(before, math.inf) <= NOISE * times[best] else best)
    limits = [math.isqrt(low * high) for low, high in pairwise(sizes)]
    rows = [
        Row(limit, algorithm)
        for limit, (algorithm, following) in zip(limits, pairwise(chosen), strict=True)
        if algorithm != following
    ]
    return [*rows, Row(None, chosen[-1])]


def write(path: str, world: TunedWorld) -> None:
    """Into the file, beside what it has of other worlds."""
    table = read_table(path) if Path(path).exists() else TuningTable(worlds=[])
    write_table(path, table.with_world(world))

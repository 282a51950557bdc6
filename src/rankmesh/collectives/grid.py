"""Grid: ranks as points of a box, for exchanges with those beside them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from rankmesh.errors import UsageError


class Grid:
    """Ranks 0 … in rows: the last coordinate counts fastest, as in a numpy array of shape `dims`. Along an axis that
    is `periodic` the last point is beside the first."""

    def __init__(self, dims: Sequence[int], periodic: Sequence[bool] | bool = False) -> None:
        self.dims = tuple(int(length) for length in dims)
        self.periodic = (periodic,) * len(self.dims) if isinstance(periodic, bool) else tuple(map(bool, periodic))
        if not self.dims or min(self.dims) < 1 or len(self.periodic) != len(self.dims):
            raise UsageError(
                f"A grid has lengths from 1 up, and for each whether it is periodic; not {dims}, {periodic}."
            )
        self.size = prod(self.dims)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        if not 0 <= rank < self.size:
            raise UsageError(f"There is no rank {rank} in a grid of {self.dims}. Correct the rank.")
        found = []
        for length in reversed(self.dims):
            rank, at = divmod(rank, length)
            found.append(at)
        return tuple(reversed(found))

    def rank(self, coordinates: Sequence[int]) -> int | None:
        """None: beyond the edge."""
        rank = 0
        for at, length, periodic in zip(coordinates, self.dims, self.periodic, strict=True):
            if not (periodic or 0 <= at < length):
                return None
            rank = rank * length + at % length
        return rank

    def shift(self, rank: int, axis: int, by: int = 1) -> int | None:
        """The rank that is so many points further along an axis. None: beyond the edge."""
        coordinates = list(self.coordinates(rank))
        coordinates[axis] += by
        return self.rank(coordinates)

    def neighbors(self, rank: int) -> list[int]:
        """All ranks one point away along one axis, each once."""
        found = [self.shift(rank, axis, by) for axis in range(len(self.dims)) for by in (-1, 1)]
        return list(dict.fromkeys(other for other in found if other is not None and other != rank))

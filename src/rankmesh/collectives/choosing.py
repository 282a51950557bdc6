"""Which algorithm a collective runs: every one there is, and a table that chooses among them.

The choice depends on nothing but what all ranks know alike: the collective, the bytes, the size of the world and the
number of its hosts. Settings come before the table: see tuning.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

from rankmesh.collectives import (
    binomial,
    bruck,
    direct,
    dissemination,
    halving_doubling,
    hierarchical,
    kary,
    neighbour,
    pairwise,
    pipelined_ring,
    recursive_doubling,
    ring,
    scan,
    scatter_gather,
)
from rankmesh.collectives.plan import Plan, Round
from rankmesh.config import KIB, MIB
from rankmesh.errors import UsageError


class World(NamedTuple):
    """What all ranks know alike, and plans are made of: `hosts[r]` is the host of rank r, as any number."""

    size: int
    hosts: tuple[int, ...]
    root: int = 0
    segments: int = 1


def _per_rank(world: World) -> int:
    return world.size


def _one(world: World) -> int:
    return 1


def _segments(world: World) -> int:
    return world.segments


class Algorithm(NamedTuple):
    """`plan(rank, world)`; over how many blocks of what is reduced or broadcast, where that is the algorithm's to say;
    in how many segments it travels (of so many bytes, in a world of that size)."""

    plan: Callable[[int, World], Plan]
    blocks: Callable[[World], int] = _per_rank
    segments: Callable[[int, int], int] = lambda nbytes, size: 1
    #: In memory that all ranks share, where there is such (staging.py); the plan is for where there is none.
    staged: bool = False


def _every(plan: Callable[[int, int], Plan], blocks: Callable[[World], int] = _per_rank) -> Algorithm:
    """All ranks are alike."""
    return Algorithm(lambda rank, world: plan(rank, world.size), blocks)


def _rooted(plan: Callable[[int, int, int], Plan], blocks: Callable[[World], int] = _per_rank) -> Algorithm:
    """One of them is the root."""
    return Algorithm(lambda rank, world: plan(rank, world.size, world.root), blocks)


def _tree(plan: Callable[[int, int, int, int, int], Plan], arity: int) -> Algorithm:
    return Algorithm(
        lambda rank, world: plan(rank, world.size, world.root, arity, world.segments), _segments, kary.segments
    )


ALGORITHMS: Final[dict[str, dict[str, Algorithm]]] = {
    "barrier": {
        "dissemination": _every(dissemination.barrier),
        "hierarchical": Algorithm(lambda rank, world: hierarchical.barrier(rank, world.hosts)),
    },
    "broadcast": {
        "binomial": _rooted(binomial.broadcast, _one),
        "direct": _rooted(direct.broadcast, _one),
        "chain": _tree(kary.broadcast, 1),
        "binary": _tree(kary.broadcast, 2),
        "quaternary": _tree(kary.broadcast, 4),
        "scatter_ring": _rooted(scatter_gather.broadcast_by_ring),
        "scatter_doubling": _rooted(scatter_gather.broadcast_by_doubling),
        "hierarchical": Algorithm(lambda rank, world: hierarchical.broadcast(rank, world.root, world.hosts), _one),
    },
    "reduce": {
        "binomial": _rooted(binomial.reduce, _one),
        "direct": _rooted(direct.reduce, _one),
        "chain": _tree(kary.reduce, 1),
        "binary": _tree(kary.reduce, 2),
        "quaternary": _tree(kary.reduce, 4),
        "ring_gather": _rooted(scatter_gather.reduce_by_ring),
        "halving_gather": _rooted(scatter_gather.reduce_by_halving),
        "hierarchical": Algorithm(lambda rank, world: hierarchical.reduce(rank, world.root, world.hosts), _one),
    },
    "all_reduce": {
        "recursive_doubling": _every(recursive_doubling.all_reduce, _one),
        "halving_doubling": _every(halving_doubling.all_reduce, lambda world: halving_doubling.blocks(world.size)),
        "ring": _every(ring.all_reduce),
        "pipelined_ring": Algorithm(
            lambda rank, world: pipelined_ring.all_reduce(rank, world.size, world.segments),
            lambda world: world.size * world.segments,
            pipelined_ring.segments,
        ),
        "direct": _every(direct.all_reduce),
        "hierarchical": Algorithm(
            lambda rank, world: hierarchical.all_reduce(rank, world.hosts),
            lambda world: hierarchical.blocks(world.hosts),
        ),
    },
    "reduce_scatter": {
        "ring": _every(ring.reduce_scatter),
        "recursive_halving": _every(halving_doubling.reduce_scatter),
        "pairwise": _every(pairwise.reduce_scatter),
        "direct": _every(direct.reduce_scatter),
    },
    "all_gather": {
        "bruck": _every(bruck.all_gather),
        "recursive_doubling": _every(halving_doubling.all_gather),
        "neighbour": _every(neighbour.all_gather),
        "ring": _every(ring.all_gather),
        "pairwise": _every(pairwise.all_gather),
        "direct": _every(direct.all_gather),
        "hierarchical": Algorithm(lambda rank, world: hierarchical.all_gather(rank, world.hosts)),
    },
    "gather": {"binomial": _rooted(binomial.gather), "direct": _rooted(direct.gather)},
    "scatter": {"binomial": _rooted(binomial.scatter), "direct": _rooted(direct.scatter)},
    "all_to_all": {
        "bruck": _every(bruck.all_to_all),
        "pairwise": _every(pairwise.all_to_all),
        "direct": _every(direct.all_to_all),
    },
    "scan": {"doubling": _every(scan.scan, _one)},
    "exscan": {"doubling": _every(scan.exscan, _one)},
}

for _collective, _plan in {
    "barrier": "dissemination",
    "broadcast": "binomial",
    "reduce": "binomial",
    "all_reduce": "halving_doubling",
    "reduce_scatter": "ring",
    "all_gather": "ring",
    "gather": "direct",
    "scatter": "direct",
    "all_to_all": "pairwise",
}.items():
    ALGORITHMS[_collective]["shared"] = ALGORITHMS[_collective][_plan]._replace(staged=True)

_ANY: Final = 1 << 62


class Choice(NamedTuple):
    """The algorithm for up to so many bytes (of the whole array; of one block for the last five), so many ranks, and so
    many hosts: 1 means that all are on one."""

    nbytes: int
    size: int
    algorithm: str
    hosts: int = _ANY


#: Where all are on one host, and few enough for a stage.
_SHARED: Final = Choice(_ANY, 16, "shared", 1)
#: The first row that holds is taken.
TABLE: Final[dict[str, tuple[Choice, ...]]] = {
    "barrier": (
        _SHARED,
        Choice(_ANY, _ANY, "dissemination"),
    ),
    "broadcast": (
        _SHARED,
        Choice(_ANY, _ANY, "binomial"),
    ),
    "reduce": (
        _SHARED,
        Choice(_ANY, _ANY, "binomial"),
    ),
    "all_reduce": (
        _SHARED,
        Choice(32 * KIB, _ANY, "recursive_doubling"),
        Choice(_ANY, 2, "halving_doubling"),
        Choice(MIB, _ANY, "halving_doubling"),
        Choice(_ANY, _ANY, "ring"),
    ),
    "reduce_scatter": (_SHARED, Choice(64 * KIB, 8, "direct"), Choice(_ANY, _ANY, "ring")),
    "all_gather": (_SHARED, Choice(16 * KIB, _ANY, "bruck"), Choice(_ANY, _ANY, "ring")),
    "gather": (_SHARED, Choice(16 * KIB, _ANY, "binomial"), Choice(_ANY, _ANY, "direct")),
    "scatter": (_SHARED, Choice(16 * KIB, _ANY, "binomial"), Choice(_ANY, _ANY, "direct")),
    "all_to_all": (_SHARED, Choice(256, 4, "direct"), Choice(256, _ANY, "bruck"), Choice(_ANY, _ANY, "pairwise")),
    "scan": (Choice(_ANY, _ANY, "doubling"),),
    "exscan": (Choice(_ANY, _ANY, "doubling"),),
}


def choose(
    collective: str, nbytes: int, size: int, algorithm: str | None = None, hosts: int = 1, shared: bool = True
) -> str:
    """The algorithm's name: `algorithm` if given and there is one of that name, otherwise the table's. `shared`: the
    ranks may share memory."""
    if algorithm is not None:
        if algorithm not in ALGORITHMS[collective]:
            raise UsageError(
                f"{collective} has no algorithm {algorithm!r}. Use one of {', '.join(ALGORITHMS[collective])}, or None."
            )
        return algorithm
    rows = (row for row in TABLE[collective] if nbytes <= row.nbytes and size <= row.size and hosts <= row.hosts)
    return next(row.algorithm for row in rows if shared or not ALGORITHMS[collective][row.algorithm].staged)


@lru_cache(maxsize=1024)
def rounds(collective: str, algorithm: str, rank: int, world: World) -> tuple[Round, ...]:
    """The plan, made once."""
    return tuple(ALGORITHMS[collective][algorithm].plan(rank, world))

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
    pairwise,
    recursive_doubling,
    ring,
    scan,
)
from rankmesh.collectives.plan import Plan, Round
from rankmesh.config import KIB, MIB
from rankmesh.errors import UsageError


class Algorithm(NamedTuple):
    """How a plan is made: (rank, size), or (rank, size, root) where `rooted`; over how many blocks of what is reduced
    or broadcast, where that is the algorithm's to say."""

    plan: Callable[..., Plan]
    rooted: bool = False
    blocks: Callable[[int], int] = lambda size: size


def _one(size: int) -> int:
    return 1


ALGORITHMS: Final[dict[str, dict[str, Algorithm]]] = {
    "barrier": {"dissemination": Algorithm(dissemination.barrier)},
    "broadcast": {
        "binomial": Algorithm(binomial.broadcast, True, _one),
        "direct": Algorithm(direct.broadcast, True, _one),
    },
    "reduce": {
        "binomial": Algorithm(binomial.reduce, True, _one),
        "direct": Algorithm(direct.reduce, True, _one),
    },
    "all_reduce": {
        "recursive_doubling": Algorithm(recursive_doubling.all_reduce, False, _one),
        "halving_doubling": Algorithm(halving_doubling.all_reduce, False, halving_doubling.blocks),
        "ring": Algorithm(ring.all_reduce),
        "direct": Algorithm(direct.all_reduce),
    },
    "reduce_scatter": {"ring": Algorithm(ring.reduce_scatter), "direct": Algorithm(direct.reduce_scatter)},
    "all_gather": {
        "bruck": Algorithm(bruck.all_gather),
        "ring": Algorithm(ring.all_gather),
        "direct": Algorithm(direct.all_gather),
    },
    "gather": {"binomial": Algorithm(binomial.gather, True), "direct": Algorithm(direct.gather, True)},
    "scatter": {"binomial": Algorithm(binomial.scatter, True), "direct": Algorithm(direct.scatter, True)},
    "all_to_all": {
        "bruck": Algorithm(bruck.all_to_all),
        "pairwise": Algorithm(pairwise.all_to_all),
        "direct": Algorithm(direct.all_to_all),
    },
    "scan": {"doubling": Algorithm(scan.scan, False, _one)},
    "exscan": {"doubling": Algorithm(scan.exscan, False, _one)},
}

_ANY: Final = 1 << 62


class Choice(NamedTuple):
    """The algorithm for up to so many bytes (of the whole array; of one block for the last five), so many ranks, and so
    many hosts: 1 means that all are on one."""

    nbytes: int
    size: int
    algorithm: str
    hosts: int = _ANY


#: The first row that holds is taken.
TABLE: Final[dict[str, tuple[Choice, ...]]] = {
    "barrier": (Choice(_ANY, _ANY, "dissemination"),),
    "broadcast": (Choice(_ANY, _ANY, "binomial"),),
    "reduce": (Choice(_ANY, _ANY, "binomial"),),
    "all_reduce": (
        Choice(32 * KIB, _ANY, "recursive_doubling"),
        Choice(_ANY, 2, "halving_doubling"),
        Choice(MIB, _ANY, "halving_doubling"),
        Choice(_ANY, _ANY, "ring"),
    ),
    "reduce_scatter": (Choice(64 * KIB, 8, "direct"), Choice(_ANY, _ANY, "ring")),
    "all_gather": (Choice(16 * KIB, _ANY, "bruck"), Choice(_ANY, _ANY, "ring")),
    "gather": (Choice(16 * KIB, _ANY, "binomial"), Choice(_ANY, _ANY, "direct")),
    "scatter": (Choice(16 * KIB, _ANY, "binomial"), Choice(_ANY, _ANY, "direct")),
    "all_to_all": (Choice(256, 4, "direct"), Choice(256, _ANY, "bruck"), Choice(_ANY, _ANY, "pairwise")),
    "scan": (Choice(_ANY, _ANY, "doubling"),),
    "exscan": (Choice(_ANY, _ANY, "doubling"),),
}


def choose(collective: str, nbytes: int, size: int, algorithm: str | None = None, hosts: int = 1) -> str:
    """The algorithm's name: `algorithm` if given and there is one of that name, otherwise the table's."""
    if algorithm is not None:
        if algorithm not in ALGORITHMS[collective]:
            raise UsageError(
                f"{collective} has no algorithm {algorithm!r}. Use one of {', '.join(ALGORITHMS[collective])}, or None."
            )
        return algorithm
    return next(
        row.algorithm for row in TABLE[collective] if nbytes <= row.nbytes and size <= row.size and hosts <= row.hosts
    )


@lru_cache(maxsize=1024)
def rounds(collective: str, algorithm: str, rank: int, size: int, root: int) -> tuple[Round, ...]:
    """The plan, made once."""
    chosen = ALGORITHMS[collective][algorithm]
    return tuple(chosen.plan(rank, size, root) if chosen.rooted else chosen.plan(rank, size))

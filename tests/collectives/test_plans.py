"""Every algorithm in the simulator: right for any world, with the steps and bytes that its file promises."""

from __future__ import annotations

from math import ceil, log2
from typing import Any

import numpy as np
import pytest

from rankmesh.collectives.choosing import ALGORITHMS, TABLE, choose
from rankmesh.collectives.plan import Into, Receive, Round, Send, largest_power
from rankmesh.collectives.simulator import Blocks, Outcome, simulate
from rankmesh.errors import InternalError, UsageError

SIZES = [1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 64]
#: Algorithms that send few messages are simulated up to 1,024 ranks, the others (n² messages) up to 100.
QUICK = {"recursive_doubling", "halving_doubling", "binomial", "bruck", "doubling", "dissemination"}
FEW_BLOCKS = {"broadcast", "reduce", "scan", "exscan", "barrier"}
ITEM = 8


def rounds_of(size: int) -> int:
    return ceil(log2(size))


def depth(size: int) -> int:
    """Of the binomial tree: what comes from all children at once takes no longer than from one."""
    return max(number.bit_count() for number in range(size))


def run(collective: str, algorithm: str, size: int, blocks: list[Blocks], root: int = 0) -> Outcome:
    chosen = ALGORITHMS[collective][algorithm]
    plans = [chosen.plan(rank, size, root) if chosen.rooted else chosen.plan(rank, size) for rank in range(size)]
    return simulate(plans, blocks)


def value(rank: int, block: int) -> Any:
    """What rank has in a block: exact in any order of adding."""
    return np.array([rank * 1000 + block])


def filled(size: int, count: int) -> list[Blocks]:
    return [[value(rank, block) for block in range(count)] for rank in range(size)]


def total(size: int, block: int) -> int:
    return 1000 * size * (size - 1) // 2 + size * block


def cases(*collectives: str) -> list[Any]:
    found = []
    for collective in collectives:
        for algorithm in ALGORITHMS[collective]:
            quick = algorithm in QUICK and collective != "all_to_all"
            sizes = [*SIZES, 100, *([1024] if quick else []), *([1000] if quick and collective in FEW_BLOCKS else [])]
            found += [
                pytest.param(collective, algorithm, size, id=f"{collective}-{algorithm}-{size}") for size in sizes
            ]
    return found


#: (collective, algorithm) → (steps, most blocks that a rank sends), for n ranks; p is the largest power of two up to n.
COSTS: dict[tuple[str, str], Any] = {
    ("all_reduce", "ring"): lambda n, p: (2 * (n - 1), 2 * (n - 1)),
    ("all_reduce", "direct"): lambda n, p: (2 * (n > 1), 2 * (n - 1)),
    ("all_reduce", "recursive_doubling"): lambda n, p: (log2(p) + 2 * (n > p), log2(p) + (n > p)),
    ("all_reduce", "halving_doubling"): lambda n, p: (2 * log2(p) + 2 * (n > p), 2 * (p - 1) + p * (n > p)),
    ("reduce_scatter", "ring"): lambda n, p: (n - 1, n - 1),
    ("reduce_scatter", "direct"): lambda n, p: (n > 1, n - 1),
    ("all_gather", "ring"): lambda n, p: (n - 1, n - 1),
    ("all_gather", "bruck"): lambda n, p: (rounds_of(n), n - 1),
    ("all_gather", "direct"): lambda n, p: (n > 1, n - 1),
    ("broadcast", "binomial"): lambda n, p: (rounds_of(n), rounds_of(n)),
    ("broadcast", "direct"): lambda n, p: (n > 1, n - 1),
    ("reduce", "binomial"): lambda n, p: (depth(n), n > 1),
    ("reduce", "direct"): lambda n, p: (n > 1, n > 1),
    ("gather", "binomial"): lambda n, p: (depth(n), p if n > p else p // 2),
    ("gather", "direct"): lambda n, p: (n > 1, n > 1),
    ("scatter", "binomial"): lambda n, p: (rounds_of(n), n - 1),
    ("scatter", "direct"): lambda n, p: (n > 1, n - 1),
    ("all_to_all", "pairwise"): lambda n, p: (n - 1, n - 1),
    ("all_to_all", "direct"): lambda n, p: (n > 1, n - 1),
    ("all_to_all", "bruck"): lambda n, p: (rounds_of(n), sum(f.bit_count() for f in range(n))),
    ("scan", "doubling"): lambda n, p: (rounds_of(n), rounds_of(n)),
    ("exscan", "doubling"): lambda n, p: (rounds_of(n - 1) + 1 if n > 1 else 0, None),
    ("barrier", "dissemination"): lambda n, p: (rounds_of(n), 0),
}


def check_cost(collective: str, algorithm: str, size: int, outcome: Outcome) -> None:
    steps, most = COSTS[collective, algorithm](size, largest_power(size))
    assert outcome.steps == steps
    if most is not None:
        if (collective, algorithm) == (
            "gather",
            "binomial",
        ):  # the largest subtree may be cut off by the end of the world
            assert max(outcome.nbytes) <= most * ITEM
        else:
            assert max(outcome.nbytes) == most * ITEM


def test_every_algorithm_has_its_cost_and_is_chosen_from() -> None:
    assert COSTS.keys() == {(c, a) for c, algorithms in ALGORITHMS.items() for a in algorithms}
    assert TABLE.keys() == ALGORITHMS.keys()
    assert all(row.algorithm in ALGORITHMS[c] for c, rows in TABLE.items() for row in rows)


@pytest.mark.parametrize("collective, algorithm, size", cases("all_reduce"))
def test_all_reduce(collective: str, algorithm: str, size: int) -> None:
    count = ALGORITHMS[collective][algorithm].blocks(size)
    blocks = filled(size, count)
    outcome = run(collective, algorithm, size, blocks)
    assert all(mine[block] == total(size, block) for mine in blocks for block in range(count))
    check_cost(collective, algorithm, size, outcome)


@pytest.mark.parametrize("collective, algorithm, size", cases("reduce_scatter"))
def test_reduce_scatter(collective: str, algorithm: str, size: int) -> None:
    blocks = filled(size, size)
    outcome = run(collective, algorithm, size, blocks)
    assert all(blocks[rank][rank] == total(size, rank) for rank in range(size))
    check_cost(collective, algorithm, size, outcome)


@pytest.mark.parametrize("collective, algorithm, size", cases("all_gather"))
def test_all_gather(collective: str, algorithm: str, size: int) -> None:
    blocks = [[value(rank, 0) if block == rank else np.array([-1]) for block in range(size)] for rank in range(size)]
    outcome = run(collective, algorithm, size, blocks)
    wanted = [1000 * rank for rank in range(size)]
    assert all([int(block[0]) for block in mine] == wanted for mine in blocks)
    check_cost(collective, algorithm, size, outcome)


@pytest.mark.parametrize("collective, algorithm, size", cases("broadcast", "reduce", "gather", "scatter"))
def test_rooted(collective: str, algorithm: str, size: int) -> None:
    for root in sorted({0, size // 2, size - 1}) if size < 1000 else [size // 3]:
        blocks = filled(size, 1 if collective in ("broadcast", "reduce") else size)
        outcome = run(collective, algorithm, size, blocks, root)
        if collective == "broadcast":
            assert all(mine[0] == value(root, 0) for mine in blocks)
        elif collective == "reduce":
            assert blocks[root][0] == total(size, 0)
        elif collective == "gather":
            assert all(blocks[root][rank] == value(rank, rank) for rank in range(size))
        else:
            assert all(blocks[rank][rank] == value(root, rank) for rank in range(size))
        check_cost(collective, algorithm, size, outcome)


@pytest.mark.parametrize("collective, algorithm, size", cases("all_to_all"))
def test_all_to_all(collective: str, algorithm: str, size: int) -> None:
    blocks = filled(size, 3 * size)
    outcome = run(collective, algorithm, size, blocks)
    for rank in range(size):
        assert [int(block[0]) for block in blocks[rank][size : 2 * size]] == [1000 * s + rank for s in range(size)]
    check_cost(collective, algorithm, size, outcome)


@pytest.mark.parametrize("collective, algorithm, size", cases("scan", "exscan", "barrier"))
def test_scans_and_barrier(collective: str, algorithm: str, size: int) -> None:
    blocks = filled(size, 2)
    outcome = run(collective, algorithm, size, blocks)
    for rank in range(size):
        if collective == "scan":
            assert blocks[rank][0] == total(rank + 1, 0)
        elif collective == "exscan" and rank:
            assert blocks[rank][1] == total(rank, 0)
    check_cost(collective, algorithm, size, outcome)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13])
@pytest.mark.parametrize("collective, algorithm", [("all_reduce", "recursive_doubling"), ("scan", "doubling")])
def test_order_of_ranks_is_kept(collective: str, algorithm: str, size: int) -> None:
    """Composition of functions does not commute: x → 2x + rank."""
    blocks: list[Blocks] = [[np.array([2.0, float(rank)])] for rank in range(size)]
    chosen = ALGORITHMS[collective][algorithm]

    def compose(left: Any, right: Any) -> Any:
        return np.array([left[0] * right[0], left[1] * right[0] + right[1]])

    simulate([chosen.plan(rank, size) for rank in range(size)], blocks, compose)
    through = np.array([2.0, 0.0])
    for rank in range(size):
        if rank:
            through = compose(through, np.array([2.0, float(rank)]))
        if collective == "scan":
            assert np.array_equal(blocks[rank][0], through)
    if collective == "all_reduce":
        assert all(np.array_equal(mine[0], through) for mine in blocks)


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
def test_all_ranks_get_the_same_bits(algorithm: str) -> None:
    rng = np.random.default_rng(7)
    for size in (2, 3, 5, 8, 13):
        count = ALGORITHMS["all_reduce"][algorithm].blocks(size)
        blocks: list[Blocks] = [[rng.standard_normal(3).astype(np.float32) for _ in range(count)] for _ in range(size)]
        run("all_reduce", algorithm, size, blocks)
        assert len({b"".join(block.tobytes() for block in mine) for mine in blocks}) == 1


@pytest.mark.parametrize(
    "plans, text",
    [
        ([[Round(receives=(Receive(1, ((0, 1),)),))], []], "do not fit"),
        ([[Round(sends=(Send(1, ((0, 1),)),))], []], "do not fit"),
        ([[Round(sends=(Send(0, ((0, 1),)),))], []], "to itself"),
        ([[Round((Send(1, ((0, 1),)),), (Receive(1, ((0, 1),)),))], []], "that it sends"),
        ([[Round(receives=(Receive(1, ()), Receive(1, ())))], []], "twice from one rank"),
    ],
)
def test_plans_that_break_the_rules_are_found(plans: list[list[Round]], text: str) -> None:
    with pytest.raises(InternalError, match=text):
        simulate([iter(plan) for plan in plans], filled(2, 1))


def test_what_is_reduced_may_be_sent_in_the_same_round() -> None:
    plan = Round((Send(1, ((0, 1),)),), (Receive(1, ((0, 1),), Into.LEFT),))
    other = Round((Send(0, ((0, 1),)),), (Receive(0, ((0, 1),), Into.RIGHT),))
    blocks = filled(2, 1)
    assert simulate([iter([plan]), iter([other])], blocks).steps == 1
    assert [mine[0] for mine in blocks] == [1000, 1000]


def test_choice() -> None:
    assert choose("all_reduce", 8, 16) == "recursive_doubling"
    assert choose("all_reduce", 1 << 30, 16) == "ring"
    assert choose("all_reduce", 8, 16, "direct") == "direct"
    with pytest.raises(UsageError, match="has no algorithm 'rign'"):
        choose("all_reduce", 8, 16, "rign")

"""Every algorithm in the simulator: right for any world, with the steps and bytes that its file promises."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2
from typing import Any

import numpy as np
import pytest

from rankmesh.collectives.choosing import ALGORITHMS, TABLE, World, choose
from rankmesh.collectives.plan import Into, Plan, Receive, Round, Send, largest_power
from rankmesh.collectives.simulator import Memory, Outcome, simulate
from rankmesh.collectives.symmetry import Content, Turning, check_turning, simulate_turning
from rankmesh.errors import InternalError, UsageError

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 24, 31, 64]
LARGE = 1024
#: The long form: every world up to 130, and those around large powers of two.
ALL_SIZES = [size for size in [*range(1, 131), 255, 256, 257, 511, 512, 513, 1000, 1023] if size not in SIZES]
ROOTED = {"broadcast", "reduce", "gather", "scatter"}
PARTS = {"gather", "scatter", "all_gather", "reduce_scatter", "all_to_all"}
ITEM = 8
SEGMENTS = 3

#: Those over messages; what runs in shared memory has its plans in test_staging.py, and falls back to one of these.
CASES = [
    (collective, name) for collective, found in ALGORITHMS.items() for name, made in found.items() if not made.staged
]
#: Ranks that are all alike, see symmetry.py: (blocks per rank, ranks that differ).
TURNING = {
    ("all_reduce", "ring"): (1, 1),
    ("all_reduce", "pipelined_ring"): (SEGMENTS, 1),
    ("all_reduce", "direct"): (1, 1),
    ("reduce_scatter", "ring"): (1, 1),
    ("reduce_scatter", "pairwise"): (1, 1),
    ("reduce_scatter", "direct"): (1, 1),
    ("all_gather", "ring"): (1, 1),
    ("all_gather", "neighbour"): (1, 2),
    ("all_gather", "pairwise"): (1, 1),
    ("all_gather", "direct"): (1, 1),
    ("all_to_all", "pairwise"): (1, 1),
    ("all_to_all", "direct"): (1, 1),
}


def world_of(size: int, root: int = 0) -> World:
    """On hosts of eight ranks."""
    return World(size, tuple(rank // 8 for rank in range(size)), root, SEGMENTS)


def run(collective: str, algorithm: str, world: World) -> Outcome:
    """On values that any error would show in, whatever the order of adding: whole numbers modulo 2^64."""
    chosen = ALGORITHMS[collective][algorithm]
    count = 3 * world.size if collective in PARTS else max(chosen.blocks(world), 2)
    values = np.random.default_rng(world.size).integers(-(2**62), 2**62, (world.size, count))
    memory = values.copy()
    if collective in ("gather", "all_gather"):
        memory[:] = -1
        np.fill_diagonal(memory, values.diagonal())
    elif collective in ("broadcast", "scatter"):
        memory[:] = -1
        memory[world.root] = values[world.root]
    outcome = simulate([chosen.plan(rank, world) for rank in range(world.size)], list(memory))
    check_result(collective, world, values, memory, 1 if collective in ("scan", "exscan") else chosen.blocks(world))
    return outcome


def check_result(collective: str, world: World, values: Memory, memory: Memory, count: int) -> None:
    n, root = world.size, world.root
    own, total = values.diagonal(), values.sum(0)
    checks: dict[str, Callable[[], tuple[Any, Any]]] = {
        "barrier": lambda: (0, 0),
        "broadcast": lambda: (memory[:, :count], np.tile(values[root, :count], (n, 1))),
        "reduce": lambda: (memory[root, :count], total[:count]),
        "all_reduce": lambda: (memory[:, :count], np.tile(total[:count], (n, 1))),
        "reduce_scatter": lambda: (memory.diagonal(), total[:n]),
        "all_gather": lambda: (memory[:, :n], np.tile(own, (n, 1))),
        "gather": lambda: (memory[root, :n], own),
        "scatter": lambda: (memory.diagonal(), values[root, :n]),
        "all_to_all": lambda: (memory[:, n : 2 * n], values[:, :n].T),
        "scan": lambda: (memory[:, 0], values[:, 0].cumsum()),
        "exscan": lambda: (memory[1:, 1], values[:-1, 0].cumsum()),
    }
    result, wanted = checks[collective]()
    assert np.array_equal(result, wanted)


# ---------------------------------------------------------------------- costs


def bits(size: int) -> int:
    return ceil(log2(size))


def depth(size: int) -> int:
    """Of the binomial tree: what comes from all children at once takes no longer than from one."""
    return max(number.bit_count() for number in range(size))


def levels(size: int, arity: int) -> int:
    """Of a k-ary tree below its root."""
    found, reached, row = 0, 1, 1
    while reached < size:
        row *= arity
        reached += row
        found += 1
    return found


def largest_child(size: int) -> int:
    """Ranks of the largest subtree below the root of a binomial tree."""
    return max((min(2 * bit, size) - bit for bit in (1 << at for at in range(bits(size)))), default=0)


def doubled(n: int, p: int) -> int:
    """Blocks that the number 0 of recursive doubling sends: those of the first 1, 2, 4 … numbers, which may be two
    each; and all to its partner in the fold."""
    return sum((1 << at) + min(1 << at, n - p) for at in range(bits(p))) + n * (n > p)


def tree(arity: int, n: int) -> tuple[int, int]:
    return (levels(n, arity) + SEGMENTS - 1 if n > 1 else 0), min(arity, n - 1) * SEGMENTS


def hosts_of(n: int) -> tuple[int, int]:
    """(hosts, ranks on the smallest) of `world_of`."""
    hosts = ceil(n / 8)
    return hosts, n - 8 * (hosts - 1)


def hosts_then_ranks(n: int) -> int:
    return bits(hosts_of(n)[0]) + bits(min(n, 8))


def halving_doubling_steps(n: int) -> int:
    p = largest_power(n)
    return 2 * bits(p) + 2 * (n > p)


#: (collective, algorithm) → (steps, most blocks that a rank sends), for n ranks; p is the largest power of two up to n.
COSTS: dict[tuple[str, str], Callable[[int, int], tuple[int, int]]] = {
    ("all_reduce", "ring"): lambda n, p: (2 * (n - 1), 2 * (n - 1)),
    ("all_reduce", "pipelined_ring"): lambda n, p: (2 * SEGMENTS * (n - 1), 2 * SEGMENTS * (n - 1)),
    ("all_reduce", "direct"): lambda n, p: (2 * (n > 1), 2 * (n - 1)),
    ("all_reduce", "recursive_doubling"): lambda n, p: (bits(p) + 2 * (n > p), bits(p) + (n > p)),
    ("all_reduce", "halving_doubling"): lambda n, p: (halving_doubling_steps(n), 2 * (p - 1) + p * (n > p)),
    ("all_reduce", "hierarchical"): lambda n, p: hierarchical_all_reduce(n),
    ("reduce_scatter", "ring"): lambda n, p: (n - 1, n - 1),
    ("reduce_scatter", "recursive_halving"): lambda n, p: (bits(p) + 2 * (n > p), n - (n == p)),
    ("reduce_scatter", "pairwise"): lambda n, p: (n - 1, n - 1),
    ("reduce_scatter", "direct"): lambda n, p: (n > 1, n - 1),
    ("all_gather", "ring"): lambda n, p: (n - 1, n - 1),
    ("all_gather", "neighbour"): lambda n, p: (n // 2 if n % 2 == 0 else n - 1, n - 1),
    ("all_gather", "bruck"): lambda n, p: (bits(n), n - 1),
    ("all_gather", "recursive_doubling"): lambda n, p: (bits(p) + 2 * (n > p), doubled(n, p)),
    ("all_gather", "pairwise"): lambda n, p: (n - 1, n - 1),
    ("all_gather", "direct"): lambda n, p: (n > 1, n - 1),
    ("all_gather", "hierarchical"): lambda n, p: (
        2 * (n > 1) + hosts_of(n)[0] - 1,
        (min(n, 8) - 1) * n + n - hosts_of(n)[1],
    ),
    ("broadcast", "binomial"): lambda n, p: (bits(n), bits(n)),
    ("broadcast", "direct"): lambda n, p: (n > 1, n - 1),
    ("broadcast", "chain"): lambda n, p: tree(1, n),
    ("broadcast", "binary"): lambda n, p: tree(2, n),
    ("broadcast", "quaternary"): lambda n, p: tree(4, n),
    ("broadcast", "scatter_ring"): lambda n, p: (bits(n) + n - 1, 2 * (n - 1)),
    ("broadcast", "scatter_doubling"): lambda n, p: (bits(n) + bits(p) + 2 * (n > p), n - 1 + doubled(n, p)),
    ("broadcast", "hierarchical"): lambda n, p: (hosts_then_ranks(n), hosts_then_ranks(n)),
    ("reduce", "binomial"): lambda n, p: (depth(n), n > 1),
    ("reduce", "direct"): lambda n, p: (n > 1, n > 1),
    ("reduce", "chain"): lambda n, p: (tree(1, n)[0], SEGMENTS * (n > 1)),
    ("reduce", "binary"): lambda n, p: (tree(2, n)[0], SEGMENTS * (n > 1)),
    ("reduce", "quaternary"): lambda n, p: (tree(4, n)[0], SEGMENTS * (n > 1)),
    ("reduce", "ring_gather"): lambda n, p: (n - 1 + depth(n), n - 1 + largest_child(n)),
    ("reduce", "halving_gather"): lambda n, p: (bits(p) + 2 * (n > p) + depth(n), n - (n == p) + largest_child(n)),
    ("reduce", "hierarchical"): lambda n, p: (hosts_then_ranks(n), n > 1),
    ("gather", "binomial"): lambda n, p: (depth(n), largest_child(n)),
    ("gather", "direct"): lambda n, p: (n > 1, n > 1),
    ("scatter", "binomial"): lambda n, p: (bits(n), n - 1),
    ("scatter", "direct"): lambda n, p: (n > 1, n - 1),
    ("all_to_all", "pairwise"): lambda n, p: (n - 1, n - 1),
    ("all_to_all", "direct"): lambda n, p: (n > 1, n - 1),
    ("all_to_all", "bruck"): lambda n, p: (bits(n), sum(far.bit_count() for far in range(n))),
    ("scan", "doubling"): lambda n, p: (bits(n), bits(n)),
    ("exscan", "doubling"): lambda n, p: (bits(n - 1) + 1, bits(n - 1) + 1) if n > 1 else (0, 0),
    ("barrier", "dissemination"): lambda n, p: (bits(n), 0),
    ("barrier", "hierarchical"): lambda n, p: (2 * (n > 1) + bits(hosts_of(n)[0]), 0),
}


def hierarchical_all_reduce(n: int) -> tuple[int, int]:
    """A slice is as many blocks as halving and doubling over the hosts has."""
    hosts, owners = hosts_of(n)
    p = largest_power(hosts)
    between = 2 * (p - 1) + p * (hosts > p)
    return 2 * (n > 1) + halving_doubling_steps(hosts), (owners - 1 + min(n, 8) - 1) * p + between


#: Where the root and the size of the world decide how near the bound it comes.
AT_MOST = {("broadcast", "scatter_doubling"), ("reduce", "halving_gather"), ("reduce", "hierarchical")}
#: Likewise where the last host has fewer ranks, and the root is there: it sends to all hosts, and to fewer ranks.
FEWER_BESIDE_ROOT = {("broadcast", "hierarchical")}


def check_cost(collective: str, algorithm: str, size: int, outcome: Outcome, item: int = ITEM, root: int = 0) -> None:
    steps, most = COSTS[collective, algorithm](size, largest_power(size))
    sent = max(outcome.nbytes) // item
    fewer = (collective, algorithm) in FEWER_BESIDE_ROOT and root >= size // 8 * 8
    if (collective, algorithm) in AT_MOST or fewer:
        assert outcome.steps <= steps
        assert sent <= most
    else:
        assert (outcome.steps, sent) == (steps, most)


def test_every_algorithm_has_its_cost_and_is_chosen_from() -> None:
    assert COSTS.keys() == set(CASES)
    assert TABLE.keys() == ALGORITHMS.keys()
    assert all(row.algorithm in ALGORITHMS[c] for c, rows in TABLE.items() for row in rows)
    assert TURNING.keys() <= set(CASES)


# ---------------------------------------------------------------------- right, at that cost


def simulate_world(collective: str, algorithm: str, size: int) -> None:
    roots = {0, size // 3, size - 1} if collective in ROOTED and size < 100 else {size // 3}
    for root in roots:
        check_cost(collective, algorithm, size, run(collective, algorithm, world_of(size, root)), root=root)


@pytest.mark.parametrize("size", SIZES)
def test_every_algorithm(size: int) -> None:
    for collective, algorithm in CASES:
        simulate_world(collective, algorithm, size)


@pytest.mark.soak
@pytest.mark.parametrize("size", ALL_SIZES)
def test_every_algorithm_in_every_world(size: int) -> None:
    for collective, algorithm in CASES:
        if size <= 130 or (collective, algorithm) not in TURNING:
            simulate_world(collective, algorithm, size)


#: A million messages between ranks that are not all alike: 1,024 ranks take a minute, and are left to the long form.
LONG = {("broadcast", "scatter_ring"), ("reduce", "ring_gather")}


@pytest.mark.parametrize("collective, algorithm", [case for case in CASES if case not in {*TURNING, *LONG}])
def test_1024_ranks(collective: str, algorithm: str) -> None:
    simulate_world(collective, algorithm, LARGE)


@pytest.mark.parametrize("size", [200, pytest.param(LARGE, marks=pytest.mark.soak)])
@pytest.mark.parametrize("collective, algorithm", LONG)
def test_many_ranks(collective: str, algorithm: str, size: int) -> None:
    simulate_world(collective, algorithm, size)


# ---------------------------------------------------------------------- ranks that are all alike


def run_turning(collective: str, algorithm: str, size: int) -> Outcome:
    unit, period = TURNING[collective, algorithm]
    if size % period:
        unit, period = 1, 1
    turning, world = Turning(size, unit, period), world_of(size)
    count, everyone = size * unit, (1 << size) - 1

    def plan(rank: int) -> Plan:
        return ALGORITHMS[collective][algorithm].plan(rank, world)

    def contents(rank: int, wanted: bool) -> list[Content | None]:
        """What a rank has in the beginning, or shall have in the end; None is not looked at."""
        owned = range(rank * unit, (rank + 1) * unit)
        if collective == "all_to_all":
            given = [Content(block, 1 << rank) for block in range(size)]
            return (
                [None] * size + [Content(rank, 1 << other) for other in range(size)]
                if wanted
                else given + [None] * size
            )
        if collective == "all_gather":
            return [Content(block, 1 << block) if wanted or block in owned else None for block in range(size)]
        if collective == "reduce_scatter" and wanted:
            return [Content(block, everyone) if block in owned else None for block in range(size)]
        return [Content(block, everyone if wanted else 1 << rank) for block in range(count)]

    check_turning(plan, turning, sorted({1 % size, 2 % size, size // 3, size // 2, size - 1}))
    memory = [contents(rank, wanted=False) for rank in range(period)]
    outcome = simulate_turning(plan, turning, memory)
    for rank, mine in enumerate(memory):
        wanted = contents(rank, wanted=True)
        assert all(got == want for got, want in zip(mine, wanted, strict=True) if want is not None)
    return outcome


@pytest.mark.parametrize("size", [1, 2, 3, 4, 12, 13, LARGE])
@pytest.mark.parametrize("collective, algorithm", TURNING)
def test_ranks_that_are_all_alike(collective: str, algorithm: str, size: int) -> None:
    check_cost(collective, algorithm, size, run_turning(collective, algorithm, size), item=1)


def test_plans_that_do_not_turn_are_found() -> None:
    with pytest.raises(InternalError, match="not that of rank 0, turned"):
        check_turning(
            lambda rank: ALGORITHMS["all_reduce"]["halving_doubling"].plan(rank, world_of(8)), Turning(8), [3]
        )
    send, receive = Send(1, ((0, 1),)), Receive(1, ((1, 2),), Into.LEFT)
    for rounds, text in (
        ([Round((send,), (receive,))] * 2, "counted twice"),
        ([Round((send,), (Receive(1, ((0, 1),), Into.LEFT),))], "Different blocks"),
        ([Round((), (receive,))], "sends it nothing"),
        ([Round((send,), ())], "nobody receives"),
    ):
        memory: list[Content | None] = [Content(0, 1), Content(1, 1)]
        with pytest.raises(InternalError, match=text):
            simulate_turning(lambda rank, rounds=rounds: iter(rounds), Turning(2), [memory])  # type: ignore[misc]


# ---------------------------------------------------------------------- hosts

LAYOUTS: dict[str, tuple[int, ...]] = {
    "one host": (0,) * 5,
    "hosts of one": (4, 2, 9),
    "pairs": (0, 0, 1, 1, 2, 2, 3, 3),
    "one more": (0, 0, 0, 1, 1, 2, 2),
    "in turn": (0, 1, 2, 0, 1, 2, 0, 1),
    "one alone": (5, 5, 5, 5, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hierarchical_crosses_between_hosts_as_little_as_can_be(layout: str) -> None:
    hosts = LAYOUTS[layout]
    size, count = len(hosts), len(set(hosts))
    for collective, found in ALGORITHMS.items():
        if "hierarchical" not in found:
            continue
        for root in range(size) if collective in ROOTED else (0,):
            world = World(size, hosts, root)
            outcome = run(collective, "hierarchical", world)
            crossed = sum(nbytes for (a, b), nbytes in outcome.links.items() if hosts[a] != hosts[b])
            blocks = found["hierarchical"].blocks(world)
            p = largest_power(count)
            least = {
                "barrier": 0,
                "broadcast": count - 1,
                "reduce": count - 1,
                "all_gather": size * (count - 1),
                "all_reduce": 2 * (count - 1) * blocks if count == p else 2 * (p - 1 + count - p) * blocks,
            }
            assert crossed == least[collective] * ITEM, collective


# ---------------------------------------------------------------------- order, and the same bits


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13])
@pytest.mark.parametrize("collective, algorithm", [("all_reduce", "recursive_doubling"), ("scan", "doubling")])
def test_order_of_ranks_is_kept(collective: str, algorithm: str, size: int) -> None:
    """Composition of functions does not commute: x → 2x + rank."""
    given = [np.array([2.0, float(rank)]) for rank in range(size)]

    def compose(left: Any, right: Any) -> Any:
        return np.stack([left[:, 0] * right[:, 0], left[:, 1] * right[:, 0] + right[:, 1]], axis=1)

    memory = [mine[None].copy() for mine in given]
    world = world_of(size)
    simulate([ALGORITHMS[collective][algorithm].plan(rank, world) for rank in range(size)], memory, compose)
    through = [given[0][None]]
    for mine in given[1:]:
        through.append(compose(through[-1], mine[None]))
    for rank in range(size):
        assert np.array_equal(memory[rank], through[rank if collective == "scan" else -1])


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
def test_all_ranks_get_the_same_bits(algorithm: str) -> None:
    rng = np.random.default_rng(7)
    chosen = ALGORITHMS["all_reduce"][algorithm]
    for size in (2, 3, 5, 8, 13, 20):
        world = world_of(size)
        memory = rng.standard_normal((size, chosen.blocks(world), 3)).astype(np.float32)
        simulate([chosen.plan(rank, world) for rank in range(size)], list(memory))
        assert len({mine.tobytes() for mine in memory}) == 1


# ---------------------------------------------------------------------- the simulator itself


def two(memory: int = 1) -> list[Memory]:
    return [np.array([1000 * rank + block for block in range(memory)]) for rank in range(2)]


@pytest.mark.parametrize(
    "plans, text",
    [
        ([[Round(receives=(Receive(1, ((0, 1),)),))], []], "do not fit"),
        ([[Round(sends=(Send(1, ((0, 1),)),))], []], "do not fit"),
        ([[Round(sends=(Send(0, ((0, 1),)),))], []], "to itself"),
        ([[Round((Send(1, ((0, 1),)),), (Receive(1, ((0, 1),)),))], []], "that it sends"),
        ([[Round((Send(1, ((0, 1), (3, 9))),), (Receive(1, ((1, 3), (4, 5))),))], []], "that it sends"),
        ([[Round(receives=(Receive(1, ()), Receive(1, ())))], []], "twice from one rank"),
        (
            [[Round(sends=(Send(1, ((0, 1),)),))], [Round(receives=(Receive(0, ((0, 2),)),))]],
            "expects 2 blocks of rank 0, which sends 1",
        ),
    ],
)
def test_plans_that_break_the_rules_are_found(plans: list[list[Round]], text: str) -> None:
    with pytest.raises(InternalError, match=text):
        simulate([iter(plan) for plan in plans], two(9))


def test_what_is_reduced_may_be_sent_in_the_same_round() -> None:
    plan = Round((Send(1, ((0, 1),)),), (Receive(1, ((0, 1),), Into.LEFT),))
    other = Round((Send(0, ((0, 1),)),), (Receive(0, ((0, 1),), Into.RIGHT),))
    memory = two()
    assert simulate([iter([plan]), iter([other])], memory).steps == 1
    assert [mine[0] for mine in memory] == [1000, 1000]


def test_choice() -> None:
    assert choose("all_reduce", 8, 16) == "shared"
    assert choose("all_reduce", 8, 16, shared=False) == choose("all_reduce", 8, 17) == "recursive_doubling"
    assert choose("all_reduce", 1 << 30, 16, hosts=2) == "ring"
    assert choose("all_reduce", 8, 16, "direct") == "direct"
    with pytest.raises(UsageError, match="has no algorithm 'rign'"):
        choose("all_reduce", 8, 16, "rign")

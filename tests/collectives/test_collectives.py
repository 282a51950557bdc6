"""Every collective with every algorithm, against numpy: in threads over inproc, in processes over tcp and shm."""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

import numpy as np
import pytest

from rankmesh import Config, Group, Mesh, UsageError
from rankmesh.collectives.choosing import ALGORITHMS
from rankmesh.collectives.reducing import OPERATIONS
from rankmesh.testing import run_world
from ranks import run_ranks
from timing import scaled

pytestmark = pytest.mark.usefixtures("nursery")

CONFIG = Config(timeout=scaled(30))
LIMIT = scaled(50)
SIZES = [1, 2, 3, 4, 5, 7, 8, 16]
DTYPES = ["int8", "uint8", "int16", "uint32", "int64", "float16", "float32", "float64", "complex64", "bool"]


def algorithms(collective: str) -> list[str | None]:
    return [None, *ALGORITHMS[collective]]


def given_by(rank: int, shape: tuple[int, ...], dtype: str = "int64") -> Any:
    """What a rank contributes: small whole numbers, exact in every dtype and in any order."""
    count = int(np.prod(shape))
    return ((np.arange(count) * 7 + rank * 3) % 5).astype(dtype).reshape(shape)


def check_equal(got: Any, wanted: Any) -> None:
    assert np.array_equal(got, wanted), (got, wanted)


# ---------------------------------------------------------------------- every algorithm and root


def _all_and_rooted(group: Group, shape: tuple[int, ...]) -> None:
    size, rank = group.size, group.rank
    everyone = [given_by(other, shape) for other in range(size)]
    mine, total = everyone[rank], sum(everyone)
    for algorithm in algorithms("all_reduce"):
        own = mine.copy()
        assert group.all_reduce(own, algorithm=algorithm) is own
        check_equal(own, total)
        out = np.empty_like(mine)
        assert group.all_reduce(mine, out=out, algorithm=algorithm) is out
        check_equal(out, total)
    for algorithm in algorithms("all_gather"):
        check_equal(group.all_gather(mine, algorithm=algorithm), np.array(everyone))
    for root in {0, size // 2, size - 1}:
        for algorithm in algorithms("broadcast"):
            own = mine.copy()
            check_equal(group.broadcast(own, root, algorithm=algorithm), everyone[root])
        for algorithm in algorithms("reduce"):
            own = mine.copy()
            result = group.reduce(own, root=root, algorithm=algorithm)
            assert (result is own) == (rank == root)
            check_equal(own, total if rank == root else mine)
        for algorithm in algorithms("gather"):
            result = group.gather(mine, root, algorithm=algorithm)
            assert (result is None) == (rank != root)
            if result is not None:
                check_equal(result, np.array(everyone))
        for algorithm in algorithms("scatter"):
            out = np.empty_like(mine)
            group.scatter(np.array(everyone) if rank == root else None, root, out=out, algorithm=algorithm)
            check_equal(out, mine)


def _parts(group: Group, shape: tuple[int, ...]) -> None:
    size, rank = group.size, group.rank
    table = given_by(1, (size, size, *shape))  # [from][to]
    for algorithm in algorithms("reduce_scatter"):
        given_before = table[rank].copy()
        check_equal(group.reduce_scatter(table[rank], algorithm=algorithm), table[:, rank].sum(0))
        check_equal(table[rank], given_before)
    for algorithm in algorithms("all_to_all"):
        check_equal(group.all_to_all(table[rank], algorithm=algorithm), table[:, rank])
        own = table[rank].copy()
        check_equal(group.all_to_all(own, out=own, algorithm=algorithm), table[:, rank])
    everyone = [given_by(other, shape) for other in range(size)]
    check_equal(group.scan(everyone[rank].copy()), sum(everyone[: rank + 1]))
    below = group.exscan(everyone[rank].copy())
    assert (below is None) == (rank == 0)
    if below is not None:
        check_equal(below, sum(everyone[:rank]))


def _everything(group: Group) -> None:
    group.barrier()
    for algorithm in algorithms("barrier"):
        group.barrier(algorithm=algorithm)
    with pytest.raises(UsageError, match="barrier"):
        group.barrier(algorithm="ring")
    shapes: list[tuple[int, ...]] = [(), (0,), (3,), (5, 7)] if group.size <= 4 else [(0,), (5, 7)]
    for shape in shapes if group.size < 16 else [(7,)]:
        _all_and_rooted(group, shape)
        _parts(group, shape)


@pytest.mark.parametrize("size", SIZES)
def test_every_algorithm_in_threads(size: int) -> None:
    run_world(size, _everything, config=CONFIG, timeout=LIMIT)


def _everything_and_large(mesh: Mesh) -> None:
    _everything(mesh)
    _all_and_rooted(mesh, (40_000,))  # by rendezvous, and reduced without the lock
    _parts(mesh, (30_000,))


@pytest.mark.parametrize("shm", [True, False], ids=["shm", "tcp"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_algorithm_in_processes(size: int, shm: bool) -> None:
    run_ranks(size, _everything_and_large, CONFIG.override(shm=shm))


# ---------------------------------------------------------------------- operations and dtypes


NUMPY = {name: ufunc for name, ufunc in OPERATIONS.items() if name != "avg"}


def _operations(mesh: Mesh) -> None:
    for dtype in DTYPES:
        everyone = [given_by(rank, (11,), dtype) for rank in range(mesh.size)]
        for name, ufunc in NUMPY.items():
            try:
                wanted = reduce(lambda a, b: ufunc(a, b).astype(dtype), everyone)
            except TypeError:
                with pytest.raises(UsageError, match=f"Arrays of {dtype} have no {name}"):
                    mesh.all_reduce(everyone[mesh.rank].copy(), name)
                continue
            check_equal(mesh.all_reduce(everyone[mesh.rank].copy(), name), wanted)
    average = mesh.all_reduce(np.full(3, float(mesh.rank)), "avg")
    check_equal(average, np.full(3, (mesh.size - 1) / 2))
    with pytest.raises(UsageError, match="int64 have no avg"):
        mesh.all_reduce(np.ones(3, np.int64), "avg")
    with pytest.raises(UsageError, match="no operation 'summ'"):
        mesh.all_reduce(np.ones(3), "summ")
    furthest = mesh.all_reduce(np.array([mesh.rank, -mesh.rank]), lambda a, b: np.where(abs(a) > abs(b), a, b))
    check_equal(furthest, [mesh.size - 1, 1 - mesh.size])


def test_operations_and_dtypes() -> None:
    run_world(3, _operations, config=CONFIG, timeout=LIMIT)


def _bfloat16(mesh: Mesh) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    result = mesh.all_reduce(np.full(100, 1.5, bfloat16))
    assert result.dtype == bfloat16
    check_equal(result.astype(float), np.full(100, 3.0))


def test_bfloat16() -> None:
    pytest.importorskip("ml_dtypes")
    run_world(2, _bfloat16, config=CONFIG, timeout=LIMIT)


def _order_is_kept(mesh: Mesh) -> None:
    """Two rows: x → a·x + b, composed. It does not commute."""

    def compose(left: Any, right: Any) -> Any:
        return np.array([left[0] * right[0], left[1] * right[0] + right[1]])

    everyone = [np.array([2, rank]) for rank in range(mesh.size)]
    check_equal(mesh.scan(everyone[mesh.rank].copy(), compose), reduce(compose, everyone[: mesh.rank + 1]))


def test_a_scan_keeps_the_order_of_ranks() -> None:
    run_world(5, _order_is_kept, config=CONFIG, timeout=LIMIT)


def _bad_function(mesh: Mesh) -> str:
    def explode(left: Any, right: Any) -> Any:
        raise ZeroDivisionError("the user's")

    with pytest.raises(ZeroDivisionError, match="the user's"):
        mesh.all_reduce(np.ones(3), explode)
    return mesh.all_gather_object("still in step")[0]  # type: ignore[no-any-return]


def test_what_a_users_function_raises_is_raised() -> None:
    assert run_world(2, _bad_function, config=CONFIG, timeout=LIMIT) == ["still in step"] * 2


def _same_bits(mesh: Mesh, seed: int) -> dict[str, bytes]:
    """What every algorithm that reduces makes of numbers for which the order of adding matters."""
    rows = np.random.default_rng(seed + mesh.rank).standard_normal((mesh.size, 1001)).astype(np.float32)
    mine, found = rows[0], {}
    for algorithm in ALGORITHMS["all_reduce"]:
        found[f"all_reduce {algorithm}"] = mesh.all_reduce(mine.copy(), algorithm=algorithm)
    for algorithm in ALGORITHMS["reduce"]:
        result = mesh.reduce(mine.copy(), root=1, algorithm=algorithm)
        found[f"reduce {algorithm}"] = mesh.all_gather(np.zeros_like(mine) if result is None else result)[1]
    for algorithm in ALGORITHMS["reduce_scatter"]:
        found[f"reduce_scatter {algorithm}"] = mesh.all_gather(mesh.reduce_scatter(rows, algorithm=algorithm))
    for scan in (mesh.scan, mesh.exscan):
        result = scan(mine.copy())
        found[scan.__name__] = mesh.all_gather(np.zeros_like(mine) if result is None else result)
    return {name: result.tobytes() for name, result in found.items()}


def test_all_ranks_and_runs_get_the_same_bits() -> None:
    runs = [
        run_world(4, _same_bits, args=(11,), config=CONFIG, timeout=LIMIT),
        run_world(4, _same_bits, args=(11,), config=CONFIG, timeout=LIMIT),
        run_ranks(4, _same_bits, CONFIG, (11,)),
        run_ranks(4, _same_bits, CONFIG.override(shm=False), (11,)),
    ]
    first = runs[0][0]
    assert len(set(first.values())) > len(ALGORITHMS), "the order of adding makes no difference to these numbers"
    shared = runs[2][0]
    for run in runs:
        for rank, found in enumerate(run):
            for name, result in found.items():
                # "shared" adds in another order where memory is shared; the same on all ranks there, and every time.
                other = run is runs[2] and name.endswith(" shared")
                assert result == (shared if other else first)[name], (name, rank)
    again = run_ranks(4, _same_bits, CONFIG, (11,))
    assert again == runs[2]


# ---------------------------------------------------------------------- uneven parts, objects, lists


def _uneven(mesh: Mesh) -> None:
    size, rank = mesh.size, mesh.rank
    counts = [(3 * other) % 4 for other in range(size)]
    rows = [given_by(other, (counts[other], 2)) for other in range(size)]
    joined = np.concatenate(rows)
    for algorithm in algorithms("all_gather"):
        check_equal(mesh.all_gather_v(rows[rank], algorithm=algorithm), joined)
        check_equal(mesh.all_gather_v(rows[rank], counts, algorithm=algorithm, async_op=True).result(), joined)
    for root in range(size):
        for algorithm in algorithms("gather"):
            gathered = mesh.gather_v(rows[rank], counts, root, algorithm=algorithm)
            assert (gathered is None) == (rank != root)
            if gathered is not None:
                check_equal(gathered, joined)
            out = np.empty_like(rows[rank])
            given = joined if rank == root else None
            check_equal(mesh.scatter_v(given, counts, root, out=out, algorithm=algorithm), rows[rank])
    first = sum(counts[:rank])
    for algorithm in algorithms("reduce_scatter"):
        mine = mesh.reduce_scatter_v(joined * (rank + 1), counts, algorithm=algorithm)
        check_equal(mine, joined[first : first + counts[rank]] * (size * (size + 1) // 2))
    table = [[given_by(a + b, ((a * b) % 3, 2)) for b in range(size)] for a in range(size)]  # [from][to]
    wanted = np.concatenate([table[other][rank] for other in range(size)])
    sent = [len(part) for part in table[rank]]
    for algorithm in (None, "pairwise", "direct"):
        check_equal(mesh.all_to_all_v(np.concatenate(table[rank]), sent, algorithm=algorithm), wanted)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_uneven_parts(size: int) -> None:
    run_world(size, _uneven, config=CONFIG, timeout=LIMIT)


def _objects(mesh: Mesh) -> None:
    size, rank = mesh.size, mesh.rank
    for root in range(size):
        assert mesh.broadcast_object({"from": rank} if rank == root else None, root) == {"from": root}
        gathered = mesh.gather_object(["x"] * rank, root)
        assert gathered == ([["x"] * other for other in range(size)] if rank == root else None)
        assert mesh.scatter_object([(r, "y" * r) for r in range(size)] if rank == root else None, root) == (
            rank,
            "y" * rank,
        )
    arrays = mesh.all_gather_object({"a": np.arange(rank)})
    for other, got in enumerate(arrays):
        check_equal(got["a"], np.arange(other))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_objects(size: int) -> None:
    run_world(size, _objects, config=CONFIG, timeout=LIMIT)


def _list(mesh: Mesh) -> None:
    arrays = [np.full((2, 3), mesh.rank), np.zeros((0,), int), np.array(mesh.rank), np.arange(8)[::2]]
    assert mesh.all_reduce(arrays) is not None
    total = sum(range(mesh.size))
    check_equal(arrays[0], np.full((2, 3), total))
    check_equal(arrays[2], total)
    check_equal(arrays[3], np.arange(8)[::2] * mesh.size)
    with pytest.raises(UsageError, match="without arrays"):
        mesh.all_reduce([])


def test_a_list_of_arrays_travels_as_one() -> None:
    run_world(3, _list, config=CONFIG, timeout=LIMIT)


# ---------------------------------------------------------------------- arguments


def _refusals(mesh: Mesh) -> None:
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    refused: dict[str, Any] = {
        "read-only": lambda: mesh.all_reduce(frozen),
        "not contiguous": lambda: mesh.all_reduce(np.zeros((4, 4))[:, 1]),
        "no rank 2 in a group of 2": lambda: mesh.broadcast(np.zeros(1), root=2),
        "Correct out": lambda: mesh.all_reduce(np.zeros(4), out=np.zeros(3)),
        "entry per rank": lambda: mesh.all_to_all(np.zeros(3)),
        "object forms": lambda: mesh.all_gather(np.array([{}])),
        "no algorithm 'best'": lambda: mesh.all_reduce(np.zeros(1), algorithm="best"),
        "needs counts": lambda: mesh.all_gather_v(np.zeros(1), async_op=True),
        "count of rows": lambda: mesh.all_gather_v(np.zeros(1), [1]),
        "rows here": lambda: mesh.all_gather_v(np.zeros(1), [2, 2]),
        "scan has no algorithm 'best'. Use one of doubling": lambda: mesh.scan(np.zeros(1), algorithm="best"),
        "exscan has no algorithm 'ring'": lambda: mesh.exscan(np.zeros(1), algorithm="ring"),
        "no average": lambda: mesh.scan(np.zeros(1), "avg"),
        "blocks of one size": lambda: mesh.all_to_all_v(np.zeros(2), [1, 1], algorithm="bruck"),
    }
    for text, call in refused.items():
        with pytest.raises(UsageError, match=text):
            call()
    mesh.barrier()  # nothing was sent, and no number was used


def test_what_cannot_be_right_is_refused_before_anything_is_sent() -> None:
    run_world(2, _refusals, config=CONFIG, timeout=LIMIT)


def _plain_values(mesh: Mesh) -> None:
    assert mesh.all_reduce(2.5) == 5.0
    buffer = bytearray(b"ab" if mesh.rank == 0 else b"..")
    mesh.broadcast(buffer)
    assert buffer == b"ab"
    swapped = np.arange(6, dtype=">i4").reshape(2, 3).T  # of the other byte order, and not contiguous
    check_equal(mesh.all_gather(swapped), np.array([swapped, swapped]))
    assert operator.index(mesh.all_reduce(np.int64(3))) == 6


def test_numbers_buffers_and_unusual_arrays() -> None:
    run_world(2, _plain_values, config=CONFIG, timeout=LIMIT)

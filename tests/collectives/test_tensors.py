"""torch's tensors in every collective, and halves: of the library that owns them, and rounded the same by all."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from rankmesh import Config, Mesh, UsageError
from rankmesh.collectives.kinds import Kind, _through_float32, kind_of
from rankmesh.collectives.reducing import Reduction
from rankmesh.collectives.tensors import tensor_kind
from rankmesh.testing import run_world
from ranks import run_ranks
from timing import scaled

pytestmark = pytest.mark.usefixtures("nursery")

CONFIG = Config(timeout=scaled(30))
LIMIT = scaled(50)
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip


def given_by(rank: int, dtype: Any, shape: tuple[int, ...] = (7, 3)) -> Any:
    count = int(np.prod(shape))
    return ((torch.arange(count) * 5 + rank) % 4).to(dtype).reshape(shape)


def check_equal(got: Any, wanted: Any) -> None:
    assert isinstance(got, torch.Tensor)
    assert got.dtype == wanted.dtype
    assert torch.equal(got, wanted), (got, wanted)


def _collectives(mesh: Mesh) -> None:
    size, rank = mesh.size, mesh.rank
    for dtype in DTYPES:
        everyone = [given_by(other, dtype) for other in range(size)]
        mine, stacked = everyone[rank], torch.stack(everyone)
        total = everyone[0].clone()
        for other in everyone[1:]:
            total += other
        own = mine.clone()
        assert mesh.all_reduce(own) is own
        check_equal(own, total)
        out = torch.empty_like(mine)
        assert mesh.all_reduce(mine, out=out, async_op=True).result() is out
        check_equal(out, total)
        reduced = mesh.reduce(mine.clone(), root=1)
        assert (reduced is None) == (rank != 1)
        check_equal(total if reduced is None else reduced, total)
        check_equal(mesh.broadcast(mine.clone(), 2), everyone[2])
        check_equal(mesh.all_gather(mine), stacked)
        gathered = mesh.gather(mine, 1)
        check_equal(stacked if gathered is None else gathered, stacked)
        check_equal(mesh.scatter(stacked if rank == 0 else None, out=torch.empty_like(mine)), mine)
        check_equal(mesh.reduce_scatter(torch.stack([mine] * size)), total)
        check_equal(mesh.all_to_all(torch.stack([mine] * size)), stacked)
        scanned = everyone[0].clone()
        for other in everyone[1 : rank + 1]:
            scanned += other
        check_equal(mesh.scan(mine.clone()), scanned)
        below = mesh.exscan(mine.clone())
        assert (below is None) == (rank == 0)
        joined = torch.cat(everyone)
        check_equal(mesh.all_gather_v(mine), joined)
        rows = [7] * size
        check_equal(mesh.reduce_scatter_v(torch.cat([mine] * size), rows), total)
        check_equal(mesh.scatter_v(joined, rows, out=torch.empty_like(mine)), mine)
        check_equal(mesh.all_to_all_v(torch.cat([mine] * size), rows), joined)


def test_tensors_in_every_collective() -> None:
    run_world(3, _collectives, config=CONFIG, timeout=LIMIT)


def _shapes(mesh: Mesh) -> None:
    check_equal(mesh.all_reduce(torch.tensor(1.5, dtype=torch.bfloat16)), torch.tensor(3.0, dtype=torch.bfloat16))
    check_equal(mesh.all_reduce(torch.empty(0, 3, dtype=torch.float16)), torch.empty(0, 3, dtype=torch.float16))
    check_equal(mesh.all_gather(torch.tensor(mesh.rank)), torch.arange(mesh.size))
    turned = torch.arange(6).reshape(2, 3).T
    check_equal(mesh.all_gather(turned), torch.stack([turned] * mesh.size))
    parameter = torch.nn.Parameter(torch.ones(3))
    assert mesh.all_reduce(parameter) is parameter
    check_equal(parameter.detach(), torch.full((3,), 2.0))
    into = np.empty(3, np.float32)
    assert mesh.all_reduce(torch.ones(3), out=into) is into
    assert into.tolist() == [2.0, 2.0, 2.0]
    average = mesh.all_reduce(torch.full((5,), float(mesh.rank), dtype=torch.bfloat16), "avg")
    check_equal(average, torch.full((5,), 0.5, dtype=torch.bfloat16))
    both = mesh.all_reduce(torch.tensor([0.0, 1.0], dtype=torch.bfloat16), "land")
    check_equal(both, torch.tensor([0.0, 1.0], dtype=torch.bfloat16))
    furthest = mesh.all_reduce(
        torch.tensor([mesh.rank, -mesh.rank], dtype=torch.bfloat16), lambda a, b: torch.where(a.abs() > b.abs(), a, b)
    )
    check_equal(furthest, torch.tensor([1, -1], dtype=torch.bfloat16))
    moved = torch.full((4,), float(mesh.rank)).to(torch.float8_e5m2)  # nobody computes with it, but it travels
    check_equal(mesh.broadcast(moved, 1).float(), torch.ones(4))


def test_tensors_of_unusual_shapes_and_kinds() -> None:
    run_world(2, _shapes, config=CONFIG, timeout=LIMIT)


def _mixed(mesh: Mesh) -> None:
    """Rank 0 has tensors, rank 1 arrays of the same elements: the same bits for both."""
    values = np.random.default_rng(3).standard_normal(1000).astype(np.float32)
    tensor = torch.from_numpy(values).to(torch.bfloat16)
    total = tensor + tensor
    if mesh.rank == 0:
        check_equal(mesh.all_reduce(tensor), total)
    else:
        got = mesh.all_reduce(values.astype(ml_dtypes.bfloat16))
        assert got.dtype == ml_dtypes.bfloat16
        assert np.array_equal(got.view(np.int16), total.view(torch.int16).numpy())


def test_a_rank_with_tensors_and_one_with_arrays() -> None:
    run_world(2, _mixed, config=CONFIG, timeout=LIMIT)


def _refusals(mesh: Mesh) -> None:
    refused: dict[str, Any] = {
        "on meta": lambda: mesh.all_reduce(torch.empty(3, device="meta")),
        "conjugate True": lambda: mesh.all_reduce(torch.ones(3, dtype=torch.complex64).conj()),
        "layout torch.sparse_coo": lambda: mesh.all_reduce(torch.eye(3).to_sparse()),
        "not contiguous": lambda: mesh.all_reduce(torch.ones(4, 4)[:, 1]),
        "float8_e5m2 have no sum": lambda: mesh.all_reduce(torch.ones(3).to(torch.float8_e5m2)),
        "bfloat16 have no bor": lambda: mesh.all_reduce(torch.ones(3, dtype=torch.bfloat16), "bor"),
        "out is float32": lambda: mesh.all_reduce(torch.ones(3, dtype=torch.bfloat16), out=torch.ones(3)),
        "out is int16": lambda: mesh.all_reduce(
            torch.ones(3, dtype=torch.bfloat16), out=torch.ones(3, dtype=torch.int16)
        ),
    }
    for text, call in refused.items():
        with pytest.raises(UsageError, match=text):
            call()
    mesh.barrier()


def test_tensors_that_cannot_be_reduced_are_refused() -> None:
    run_world(2, _refusals, config=CONFIG, timeout=LIMIT)


def _halves(mesh: Mesh) -> None:
    _collectives(mesh)
    large = torch.full((300_000,), 0.25 + mesh.rank, dtype=torch.bfloat16)  # by rendezvous, reduced without the lock
    check_equal(mesh.all_reduce(large), torch.full((300_000,), 3.75, dtype=torch.bfloat16))


def test_tensors_in_processes() -> None:
    run_ranks(3, _halves, CONFIG)


# ---------------------------------------------------------------------- one operation


def patterns(seed: int) -> tuple[Any, Any]:
    """Two arrays of all kinds of halves: tiny, large, infinite, none a number."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 1 << 16, 100_001).astype(np.uint16), rng.integers(0, 1 << 16, 100_001).astype(np.uint16)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
def test_halves_are_rounded_after_each_operation_whoever_computes(name: str, op: str) -> None:
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else np.float16)
    left, right = (bits.view(dtype) for bits in patterns(5))
    function = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    with np.errstate(all="ignore"):
        wide = function(left.astype(np.float64), right.astype(np.float64))
        wanted = wide.astype(np.float32).astype(dtype)
        reductions = {
            "numpy's kind": Reduction(op, kind_of(dtype), 2).apply,
            "torch's kind": Reduction(op, tensor_kind(getattr(torch, name)), 2).apply,
            "by float32": _through_float32(function),
        }
        for who, apply in reductions.items():
            for into in range(3):
                arrays = [left.copy(), right.copy(), np.empty_like(left)]
                apply(arrays[0], arrays[1], arrays[into])
                got = arrays[into]
                assert np.array_equal(got.astype(np.float32), wanted.astype(np.float32), equal_nan=True), (who, into)


def test_an_operation_of_numpys_is_the_ufunc_itself() -> None:
    assert Reduction("sum", Kind(np.dtype(np.float32)), 4).apply is np.add


def test_arrays_of_the_other_byte_order_are_another_kind() -> None:
    assert kind_of(np.dtype(">f4")).name == ">f4"


def test_torch_is_not_imported_by_halves() -> None:
    program = """
import sys, numpy as np
from rankmesh.testing import run_world
print(run_world(2, lambda mesh: mesh.all_reduce(np.full(3, 1.5, np.float16)).tolist()), "torch" in sys.modules)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=scaled(30), check=True
    )
    assert ended.stdout == "[[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]] False\n"

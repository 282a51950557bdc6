"""Every call of torch.distributed on CPU tensors, against values worked out beside it: operations, dtypes, layouts,
sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from torch_world import Nursery, nursery

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'rankmesh[torch]'")
dist = torch.distributed

__all__ = ["nursery"]

SIZE = 3
SIZES = (0, 1, 7, 5000, 70_000)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
OPERATIONS = {
    "SUM": lambda all_: all_.sum(0),
    "PRODUCT": lambda all_: all_.prod(0),
    "MIN": lambda all_: all_.amin(0),
    "MAX": lambda all_: all_.amax(0),
    "AVG": lambda all_: all_.sum(0) / SIZE,
    "BAND": lambda all_: all_[0] & all_[1] & all_[2],
    "BOR": lambda all_: all_[0] | all_[1] | all_[2],
    "BXOR": lambda all_: all_[0] ^ all_[1] ^ all_[2],
}


def values(dtype: Any, count: int, shift: int = 0) -> Any:
    """One row for each rank: small whole numbers, exact in every dtype."""
    rows = [(torch.arange(count) * (rank + 1) + rank + shift) % 4 for rank in range(SIZE)]
    return torch.stack(rows).to(dtype)


def expected(op: str, dtype: Any, count: int) -> Any:
    wide = values(torch.float64 if dtype.is_floating_point else torch.int64, count)
    return OPERATIONS[op](wide).to(dtype)


def equal(found: Any, wanted: Any) -> None:
    assert found.dtype == wanted.dtype, (found.dtype, wanted.dtype)
    assert torch.equal(found, wanted), (found, wanted)


def _reductions(rank: int) -> None:
    for dtype, op, count in itertools.product(FLOATS + INTEGERS, OPERATIONS, SIZES):
        if op == "AVG" if dtype in INTEGERS else op.startswith("B"):
            continue
        mine, wanted = values(dtype, count)[rank], expected(op, dtype, count)
        operation = getattr(dist.ReduceOp, op)
        for async_op in (False, True):
            tensor = mine.clone()
            work = dist.all_reduce(tensor, operation, async_op=async_op)
            if async_op:
                assert work.wait() is True
                assert work.is_completed()
            equal(tensor, wanted)
        tensor = mine.clone()
        dist.reduce(tensor, 1, operation)
        equal(tensor, wanted if rank == 1 else mine)
        if count:
            whole = torch.stack([mine] * SIZE)
            part = torch.empty_like(mine)
            dist.reduce_scatter_tensor(part, whole, operation)
            equal(part, wanted)


def test_reductions_of_every_operation_and_dtype(nursery: Nursery) -> None:
    nursery.run(SIZE, _reductions)


def _moves(rank: int) -> None:
    others = (torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16)
    for dtype, count in itertools.product((*FLOATS, *INTEGERS, *others), SIZES):
        all_ = values(torch.uint8, count).to(dtype)
        mine = all_[rank].clone()
        tensor = mine.clone()
        dist.broadcast(tensor, 2)
        _same(tensor, all_[2])
        gathered = [torch.empty_like(mine) for _ in range(SIZE)]
        dist.all_gather(gathered, mine)
        _same(torch.stack(gathered), all_)
        into = torch.empty((SIZE, count), dtype=dtype)
        dist.all_gather_into_tensor(into, mine)
        _same(into, all_)
        chunks = list(torch.empty((SIZE, count), dtype=dtype).unbind())  # adjacent: received in place
        dist.all_gather(chunks, mine)
        _same(torch.stack(chunks), all_)
        dist.gather(mine, gathered if rank == 0 else None, 0)
        dist.scatter(tensor, list(all_) if rank == 1 else None, 1)
        _same(tensor, all_[rank])
        rows = torch.stack([all_[rank]] * SIZE)
        out = torch.empty_like(rows)
        dist.all_to_all_single(out, rows)
        _same(out, all_)


def _same(found: Any, wanted: Any) -> None:
    """Bit by bit: some dtypes can be moved, but not compared."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert found.contiguous().view(torch.uint8).equal(wanted.contiguous().view(torch.uint8)), (found, wanted)


def test_what_is_moved_arrives_whatever_its_dtype(nursery: Nursery) -> None:
    nursery.run(SIZE, _moves)


def _uneven(rank: int) -> None:
    counts = [2, 0, 5]
    mine = torch.full((counts[rank], 3), float(rank))
    outs = [torch.empty(count, 3) for count in counts]
    dist.all_gather(outs, mine)
    assert [out.tolist() for out in outs] == [[[float(r)] * 3] * count for r, count in enumerate(counts)]
    part = torch.empty(counts[rank], 3)
    dist.reduce_scatter(part, [torch.full((count, 3), float(rank)) for count in counts])
    assert part.tolist() == [[3.0] * 3] * counts[rank]
    # rank r sends r + s rows to rank s
    sizes = [rank + other for other in range(SIZE)]
    rows = torch.cat([torch.full((size, 2), 10.0 * rank + other) for other, size in enumerate(sizes)])
    out = torch.empty(sum(sizes), 2)
    dist.all_to_all_single(out, rows, sizes, sizes)
    assert out[:, 0].tolist() == [10.0 * s + rank for s in range(SIZE) for _ in range(s + rank)]
    outs = [torch.empty(size) for size in sizes]
    dist.all_to_all(outs, [torch.full((size,), 10.0 * rank + other) for other, size in enumerate(sizes)])
    assert [out.tolist() for out in outs] == [[10.0 * s + rank] * size for s, size in enumerate(sizes)]


def test_parts_of_different_sizes(nursery: Nursery) -> None:
    nursery.run(SIZE, _uneven)


VIEWS: list[Callable[[Any], Any]] = [lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:3], lambda t: t[::2, 1]]


def _layouts(rank: int) -> None:
    """Strides, conjugates, tensors that require gradients."""
    whole = torch.arange(24.0).view(4, 6) + rank
    wanted = sum(torch.arange(24.0).view(4, 6) + r for r in range(SIZE))
    for view in VIEWS:
        tensor = whole.clone()
        dist.all_reduce(view(tensor))
        equal(view(tensor), view(wanted))
        tensor = whole.clone()
        work = dist.all_reduce(view(tensor), async_op=True)
        equal(work.get_future().wait()[0], view(wanted))
        tensor = whole.clone()
        dist.broadcast(view(tensor), 1)
        equal(view(tensor), view(torch.arange(24.0).view(4, 6) + 1))
    into = torch.zeros(SIZE, 12).t()
    dist.all_gather_into_tensor(into, whole[:, ::2])
    assert into.reshape(-1)[:12].tolist() == whole[:, ::2].reshape(-1).sub(rank).tolist()
    complex_ = torch.complex(whole, -whole)
    group = dist.group.WORLD
    conjugated = complex_.conj()
    assert conjugated.is_conj()
    group.allreduce([conjugated]).wait()
    equal(conjugated.resolve_conj(), torch.complex(wanted, wanted))
    parameter = torch.nn.Parameter(whole.clone())
    dist.all_reduce(parameter)
    equal(parameter.detach(), wanted)


def test_tensors_of_any_layout(nursery: Nursery) -> None:
    nursery.run(SIZE, _layouts)


def _lists(rank: int) -> None:
    """Several tensors in one call."""
    tensors = [torch.full((count,), float(rank + 1)) for count in (1, 0, 3000)]
    dist.all_reduce_coalesced(tensors)
    assert all(tensor.eq(6).all() for tensor in tensors)
    mixed = [torch.full((5,), rank + 1, dtype=dtype) for dtype in (torch.float32, torch.int64, torch.float32)]
    dist.group.WORLD.allreduce_coalesced(mixed).wait()
    assert all(tensor.eq(6).all() for tensor in mixed)
    outs = [[torch.empty(2), torch.empty(3, 1)] for _ in range(SIZE)]
    dist.all_gather_coalesced(outs, [torch.full((2,), float(rank)), torch.full((3, 1), -float(rank))])
    assert [[out.sum().item() for out in one] for one in outs] == [[2.0 * r, -3.0 * r] for r in range(SIZE)]
    from torch.distributed.distributed_c10d import _coalescing_manager

    parts, wholes = [torch.empty(SIZE * 2), torch.empty(SIZE)], [torch.full((2,), float(rank)), torch.ones(1)]
    with _coalescing_manager():
        for part, whole in zip(parts, wholes, strict=True):
            dist.all_gather_into_tensor(part, whole)
    assert [part.tolist() for part in parts] == [[0, 0, 1, 1, 2, 2], [1, 1, 1]]
    reduced = [torch.empty(1), torch.empty(2)]
    with _coalescing_manager(async_ops=True) as manager:
        for out in reduced:
            dist.reduce_scatter_tensor(out, torch.ones(SIZE * len(out)))
    manager.wait()
    assert [out.tolist() for out in reduced] == [[3.0], [3.0, 3.0]]
    ours = [torch.ones(4), torch.ones(5)]
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in ours:
            dist.broadcast(tensor, 0, async_op=True)
    manager.wait()


def test_several_tensors_in_one_call(nursery: Nursery) -> None:
    nursery.run(SIZE, _lists)


def _sparse(rank: int) -> None:
    tensor: Any = None
    for dense in ((), (2,)):
        indices = torch.tensor([[0, rank], [1, 2 + rank]])
        tensor = torch.sparse_coo_tensor(indices, torch.ones((2, *dense)), (4, 6, *dense))
        wanted = sum(
            torch.sparse_coo_tensor(
                torch.tensor([[0, r], [1, 2 + r]]), torch.ones((2, *dense)), (4, 6, *dense)
            ).to_dense()
            for r in range(SIZE)
        )
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        equal(tensor.to_dense(), wanted)
    with pytest.raises(ValueError, match=r"sum or an average"):
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    culprit = 1 if rank == 0 else 0
    with pytest.raises(
        ValueError, match=rf"Rank {culprit} passed a sparse tensor of shape .* Pass tensors of one shape"
    ):
        dist.all_reduce(torch.eye(3 + rank).to_sparse_coo())


def test_sparse_tensors_are_added(nursery: Nursery) -> None:
    nursery.run(SIZE, _sparse)


def _objects(rank: int) -> None:
    mine = {"rank": rank, "tensor": torch.full((3,), float(rank))}
    everyone: list[Any] = [None] * SIZE
    dist.all_gather_object(everyone, mine)
    assert [one["rank"] for one in everyone] == [0, 1, 2]
    listed: list[Any] = [mine if rank == 1 else None]
    dist.broadcast_object_list(listed, 1)
    assert listed[0]["tensor"].tolist() == [1.0] * 3
    gathered: list[Any] | None = [None] * SIZE if rank == 2 else None
    dist.gather_object(mine, gathered, 2)
    assert gathered is None or [one["rank"] for one in gathered] == [0, 1, 2]
    out: list[Any] = [None]
    dist.scatter_object_list(out, ["a", "b", "c"] if rank == 0 else None, 0)
    assert out == ["abc"[rank]]


def test_objects(nursery: Nursery) -> None:
    nursery.run(SIZE, _objects)


def _short_forms(rank: int) -> None:
    """Calls on the process group itself."""
    from datetime import timedelta

    group, one = dist.group.WORLD, torch.ones(2)
    group.allreduce(one).wait()
    group.allreduce([one], dist.ReduceOp.MAX).wait()
    group.allreduce(one, op=dist.ReduceOp.SUM, timeout=timedelta(seconds=9)).wait()
    assert one.tolist() == [9.0, 9.0]
    own = torch.full((2,), float(rank))
    group.broadcast(own, 1).wait()
    assert own.tolist() == [1.0, 1.0]
    outs = [torch.empty(2) for _ in range(SIZE)]
    group.allgather(outs, own).wait()
    group.reduce(own, root=2).wait()
    group.barrier().wait()
    new, old = torch.empty(SIZE * 2), torch.empty(SIZE * 2)
    group.all_gather_single(new, own).wait()
    group._allgather_base(old, own).wait()
    equal(new, old)
    group.reduce_scatter_single(own, new).wait()
    group._reduce_scatter_base(own, old).wait()
    group.all_to_all_single(old, new, [], []).wait()
    group.alltoall_base(old, new, [], []).wait()
    for name in ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"):
        getattr(group, name)([old], [own]).wait()
    for name in ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"):
        getattr(group, name)([own], [old]).wait()
    before = group._get_sequence_number_for_group()
    group.barrier().wait()
    assert group._get_sequence_number_for_group() == before + 1
    assert (group.name(), group.rank(), group.size()) == ("rankmesh", rank, SIZE)
    assert (group.group_name, group.group_desc) == ("0", "default_pg")
    with pytest.raises(ValueError, match="takes no root"):
        group.allreduce(one, root=1)


def test_calls_of_the_process_group_by_old_and_new_names(nursery: Nursery) -> None:
    nursery.run(SIZE, _short_forms)


def _staged(rank: int) -> None:
    """Tensors that do not lie in host memory: here, none is taken to."""
    from rankmesh.torch import staging, verbs

    staging.lies_flat = lambda tensor: False
    vars(verbs)["in_place"] = lambda tensor: None
    _uneven(rank)
    _lists(rank)
    _objects(rank)
    for op in ("SUM", "MAX"):
        tensor = values(torch.float32, 1000)[rank].clone()
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
        equal(tensor, expected(op, torch.float32, 1000))
    tensor = torch.full((9,), float(rank))
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
        assert tensor.tolist() == [0.0] * 9


def test_tensors_elsewhere_are_staged_through_host_memory(nursery: Nursery) -> None:
    nursery.run(SIZE, _staged)

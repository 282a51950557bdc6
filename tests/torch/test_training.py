"""What unmodified programs do: DDP, its hooks and joins, FSDP2, DTensor, functional collectives, the sharded optimizer,
checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest

from torch_world import Nursery, nursery

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'rankmesh[torch]'")
dist = torch.distributed

__all__ = ["nursery"]


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))


def batches(steps: int = 4) -> list[Any]:
    """Of all ranks; each takes its rows."""
    torch.manual_seed(1)
    return [torch.randn(8, 16) for _ in range(steps)]


def alone(optimizer: Callable[..., Any] = torch.optim.SGD) -> list[Any]:
    """Parameters after training on one rank."""
    net = model()
    steps = optimizer(net.parameters(), lr=0.1)
    for batch in batches():
        steps.zero_grad()
        net(batch).pow(2).mean().backward()
        steps.step()
    return [parameter.detach() for parameter in net.parameters()]


def close(found: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def train(net: Any, steps: Any, rank: int) -> None:
    size = dist.get_world_size()
    for batch in batches():
        steps.zero_grad()
        net(batch.chunk(size)[rank]).pow(2).mean().backward()
        steps.step()


def _ddp(rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    wanted = alone()
    for keywords in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 0.001}):
        net = DistributedDataParallel(model(), **keywords)
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), rank)
        close([parameter.detach() for parameter in net.parameters()], wanted)
    net = DistributedDataParallel(model())
    train(net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1), rank)
    close([parameter.detach() for parameter in net.parameters()], wanted)
    net = DistributedDataParallel(model())
    net.register_comm_hook(None, default_hooks.allreduce_hook)
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), rank)
    close([parameter.detach() for parameter in net.parameters()], wanted)
    net = DistributedDataParallel(model())  # waits for collectives within callbacks of others
    net.register_comm_hook(
        powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=16, start_powerSGD_iter=2),
        powerSGD_hook.powerSGD_hook,
    )
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), rank)
    net = DistributedDataParallel(model())
    with net.join():  # rank 1 has one batch less
        for batch in batches()[rank:]:
            net(batch).mean().backward()
    sparse = torch.nn.EmbeddingBag(10, 3, sparse=True)
    net = DistributedDataParallel(sparse)
    net(torch.tensor([[rank, 5]])).sum().backward()
    grad = sparse.weight.grad.coalesce()
    assert grad.indices().tolist() == [[0, 1, 5]]
    assert grad.values()[:, 0].tolist() == [0.25, 0.25, 0.5]


def test_ddp_trains_as_one_process_does(nursery: Nursery) -> None:
    nursery.run(2, _ddp)


def _postponing(rank: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    from rankmesh.collectives.staged import StagedCollective

    postponed = []
    postpone = StagedCollective.postpone

    def note(call: StagedCollective) -> None:
        postponed.append(call)
        postpone(call)

    StagedCollective.postpone = note  # type: ignore[method-assign, assignment]
    dist.all_reduce(torch.ones(1000), async_op=True).get_future().wait()
    assert not postponed, "its caller may do anything but wait"
    net = DistributedDataParallel(model())
    net(batches()[rank]).mean().backward()
    assert len(postponed) == 1
    assert postponed[0].done()


def test_while_a_backward_pass_computes_nobody_hurries_with_its_gradients(nursery: Nursery) -> None:
    nursery.run(2, _postponing)


def _fsdp(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = model()
    mesh = init_device_mesh("cpu", (2,))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), rank)
    close([parameter.full_tensor().detach() for parameter in net.parameters()], alone())


def test_fsdp2_trains_as_one_process_does(nursery: Nursery) -> None:
    nursery.run(2, _fsdp)


def _dtensor(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (3,))
    torch.manual_seed(0)
    left, right = torch.randn(9, 6), torch.randn(6, 12)
    rows = distribute_tensor(left, mesh, [Shard(0)])
    columns = distribute_tensor(right, mesh, [Shard(1)])
    product: Any = rows @ columns.redistribute(mesh, [Replicate()])
    torch.testing.assert_close(product.full_tensor(), left @ right)
    inner: Any = distribute_tensor(left, mesh, [Shard(1)]) @ distribute_tensor(
        right, mesh, [Shard(0)]
    )  # a sum over ranks
    torch.testing.assert_close(inner.full_tensor(), left @ right)
    turned = rows.redistribute(mesh, [Shard(1)])
    torch.testing.assert_close(turned.full_tensor(), left)


def test_dtensor(nursery: Nursery) -> None:
    nursery.run(3, _dtensor)


def _functional(rank: int) -> None:
    from torch.distributed import _functional_collectives as functional

    size, group = dist.get_world_size(), dist.group.WORLD
    mine = torch.full((4,), float(rank))
    assert functional.all_reduce(mine, "sum", group).tolist() == [3.0] * 4
    assert functional.all_reduce(mine, "avg", group).tolist() == [1.0] * 4
    assert functional.all_gather_tensor(mine, 0, group).tolist() == [float(r) for r in range(size) for _ in range(4)]
    assert functional.reduce_scatter_tensor(torch.ones(6), "sum", 0, group).tolist() == [3.0] * 2
    assert functional.broadcast(mine, 2, group).tolist() == [2.0] * 4
    out = functional.all_to_all_single(torch.full((3,), float(rank)), [1] * 3, [1] * 3, group)
    assert out.tolist() == [0.0, 1.0, 2.0]
    both = functional.all_reduce_coalesced([mine, mine + 1], "sum", group)
    assert [one.tolist() for one in both] == [[3.0] * 4, [6.0] * 4]
    both = functional.all_gather_into_tensor_coalesced([mine, mine[:1]], group)
    assert [one.sum().item() for one in both] == [12.0, 3.0]
    both = functional.reduce_scatter_tensor_coalesced([torch.ones(3), torch.ones(6)], "sum", [0, 0], group)
    assert [one.tolist() for one in both] == [[3.0], [3.0, 3.0]]
    weights = torch.ones(3, requires_grad=True)
    functional.all_reduce(weights * rank, "sum", group).sum()


def test_functional_collectives(nursery: Nursery) -> None:
    nursery.run(3, _functional)


def _checkpoint(rank: int, folder: str) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(24.0).view(12, 2)
    state = {"weights": distribute_tensor(whole, mesh, [Shard(0)]), "step": 7}
    save(state, checkpoint_id=folder)
    empty: dict[str, Any] = {"weights": distribute_tensor(torch.zeros(12, 2), mesh, [Shard(0)]), "step": 0}
    load(empty, checkpoint_id=folder)
    assert empty["step"] == 7
    assert empty["weights"].full_tensor().equal(whole)


def test_checkpoints(nursery: Nursery) -> None:
    with tempfile.TemporaryDirectory() as folder:
        nursery.run(3, _checkpoint, folder)

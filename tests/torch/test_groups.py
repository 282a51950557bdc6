"""Groups of ranks, meshes of devices, timeouts, the monitored barrier."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

from rankmesh.errors import ClosedError, DeadlineError
from timing import scaled
from torch_world import Nursery, nursery

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'rankmesh[torch]'")
dist = torch.distributed

__all__ = ["nursery"]


def _groups(rank: int) -> None:
    size = dist.get_world_size()
    evens, odds = dist.new_group([0, 2]), dist.new_group([1, 3])
    mine = evens if rank % 2 == 0 else odds
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=mine)
    assert tensor.item() == (2.0 if rank % 2 == 0 else 4.0)
    assert dist.get_rank(mine) == rank // 2
    assert dist.get_process_group_ranks(mine) == [rank % 2, rank % 2 + 2]
    # those made by their members alone, while others make others
    pair = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    tensor = torch.tensor([1.0])
    dist.broadcast(tensor.mul_(rank), rank // 2 * 2, group=pair)
    assert tensor.item() == rank // 2 * 2
    # one mesh carries them all
    assert mine.place.mesh is pair.place.mesh is dist.group.WORLD.place.mesh
    for each in (mine, pair):
        dist.destroy_process_group(each)
    dist.barrier()
    alone = dist.new_group([rank], use_local_synchronization=True)
    dist.all_reduce(tensor, group=alone)
    dist.barrier(alone)
    part = dist.group.WORLD.split_group([1, 3, 0])
    assert (part is None) == (rank == 2)
    if part is not None:
        assert part.rank() == [1, 3, 0].index(rank)
        tensor = torch.ones(1)
        part.allreduce([tensor]).wait()
        assert tensor.item() == 3.0
        part.shutdown()
        with pytest.raises(ClosedError, match="closed"):
            part.allreduce([tensor])
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size


def test_groups_stand_on_one_mesh(nursery: Nursery) -> None:
    nursery.run(4, _groups)


def _threads(rank: int) -> None:
    """Each thread calls in a group of its own, at its own pace."""
    groups = [dist.new_group() for _ in range(4)]
    sums: dict[int, float] = {}

    def work(at: int) -> None:
        for step in range(20):
            tensor = torch.full((100 * (at + 1),), float(step))
            dist.all_reduce(tensor, group=groups[at])
            sums[at] = sums.get(at, 0.0) + tensor[-1].item()

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == dict.fromkeys(range(4), 190.0 * dist.get_world_size())


def test_threads_with_groups_of_their_own(nursery: Nursery) -> None:
    nursery.run(3, _threads)


def _device_mesh(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert [mesh.get_local_rank(name) for name in ("replicate", "shard")] == [rank // 2, rank % 2]
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=mesh.get_group("shard"))
    assert tensor.item() == (1.0 if rank < 2 else 5.0)
    dist.all_reduce(tensor, group=mesh.get_group("replicate"))
    assert tensor.item() == 6.0


def test_device_mesh(nursery: Nursery) -> None:
    nursery.run(4, _device_mesh)


def _timeouts(rank: int) -> None:
    short = dist.new_group(timeout=timedelta(seconds=scaled(0.5)))
    if rank == 0:
        with pytest.raises(DeadlineError, match=r"within 0.5 s|within \d") as caught:
            dist.all_reduce(torch.ones(1), group=short)
        assert "rank 1" in str(caught.value)
        with pytest.raises(DeadlineError):
            dist.barrier(timeout=timedelta(seconds=scaled(0.3)))
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("done", "1")
    store.wait(["done"])


def test_timeouts_of_a_group_and_of_a_call(nursery: Nursery) -> None:
    nursery.run(2, _timeouts)


def _monitored(rank: int) -> list[Any]:
    group = dist.group.WORLD
    group.monitored_barrier(timedelta(seconds=scaled(20)))
    said = []
    for wait_all in (False, True):
        if rank in (0, 3):
            with pytest.raises(DeadlineError) as caught:
                group.monitored_barrier(timedelta(seconds=scaled(0.3)), wait_all_ranks=wait_all)
            said.append(str(caught.value))
    store = dist.distributed_c10d._get_default_store()
    if store.add("done", int(rank in (0, 3))) == 2:
        store.set("all", "1")
    store.wait(["all"])
    return said


def test_monitored_barrier_names_who_did_not_come(nursery: Nursery) -> None:
    said = nursery.run(4, _monitored)
    assert said[1] == said[2] == []
    for rank in (0, 3):
        first, everyone = said[rank]
        assert first.startswith("Rank 1 did not reach the monitored barrier within")
        assert everyone.startswith("Ranks 1, 2 did not reach")

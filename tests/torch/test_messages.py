"""Messages between ranks by torch's calls: tags, any source, oneself, batches, sizes that differ, timeouts."""

from __future__ import annotations

from datetime import timedelta

import pytest

from rankmesh.errors import DeadlineError, TruncationError, UsageError
from timing import scaled
from torch_world import Nursery, nursery

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'rankmesh[torch]'")
dist = torch.distributed

__all__ = ["nursery"]

SIZE = 3


def _pairs(rank: int) -> None:
    after, before = (rank + 1) % SIZE, (rank - 1) % SIZE
    for count in (0, 1, 5000, 1_000_000):
        mine, got = torch.full((count,), float(rank)), torch.empty(count)
        work = dist.isend(mine, after, tag=3)
        assert dist.recv(got, before, tag=3) == before
        work.wait()
        assert got.eq(before).all()
    # tags are matched, whatever the order
    sends = [dist.isend(torch.tensor([rank, tag]), after, tag=tag) for tag in (1, 2)]
    for tag in (2, 1):
        got = torch.empty(2, dtype=torch.int64)
        dist.recv(got, before, tag=tag)
        assert got.tolist() == [before, tag]
    for send in sends:
        send.wait()
    # strided, on both sides
    grid, into = torch.arange(12.0).view(3, 4) + rank, torch.zeros(4, 3)
    work = dist.isend(grid.t(), after)
    dist.recv(into, before)
    work.wait()
    assert into.equal((torch.arange(12.0).view(3, 4) + before).t())


def test_pairs_of_ranks(nursery: Nursery) -> None:
    nursery.run(SIZE, _pairs)


def _any_source(rank: int) -> None:
    if rank == 0:
        seen = {}
        for _ in range(SIZE - 1):
            got = torch.empty(2, dtype=torch.int32)
            sender = dist.recv(got, tag=5)
            seen[sender] = got.tolist()
        assert seen == {1: [1, 10], 2: [2, 20]}
        got = torch.empty(1)
        work = dist.irecv(got, tag=6)
        work.wait()
        assert work.source_rank() == 2
    else:
        dist.send(torch.tensor([rank, 10 * rank], dtype=torch.int32), 0, tag=5)
        if rank == 2:
            dist.send(torch.ones(1), 0, tag=6)
    # within a group its ranks count, in dist.recv's result the world's
    group = dist.new_group([1, 2])
    if rank == 1:
        assert dist.recv(torch.empty(1), group=group) == 2
    elif rank == 2:
        dist.send(torch.ones(1), 1, group=group)


def test_receive_from_any_source(nursery: Nursery) -> None:
    nursery.run(SIZE, _any_source)


def _batches(rank: int) -> None:
    outs = {other: torch.empty(1000) for other in range(SIZE)}
    operations = []
    for other in range(SIZE):
        operations.append(dist.P2POp(dist.irecv, outs[other], other))
        operations.append(dist.P2POp(dist.isend, torch.full((1000,), float(rank)), other))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert all(out.eq(other).all() for other, out in outs.items())  # its own too
    objects = [None] * 2
    if rank == 0:
        dist.send_object_list([{"a": 1}, "b"], 1)
    elif rank == 1:
        dist.recv_object_list(objects, 0)
        assert objects == [{"a": 1}, "b"]


def test_batches_and_objects(nursery: Nursery) -> None:
    nursery.run(SIZE, _batches)


def _wrong_sizes(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(4), 1)
        dist.send(torch.ones(4), 1)
        dist.send(torch.full((4,), 7.0), 1)
    elif rank == 1:
        with pytest.raises(UsageError, match=r"Rank 0 sent 16 bytes under tag 0, .*a tensor of 20") as caught:
            dist.recv(torch.empty(5), 0)
        assert "Send and receive tensors of one size" in str(caught.value)
        with pytest.raises(TruncationError):
            dist.recv(torch.empty(3), 0)
        got = torch.empty(4)
        dist.recv(got, 0)  # nothing after it is misread
        assert got.tolist() == [7.0] * 4
    dist.barrier()
    work = dist.irecv(torch.empty(1), (rank + 1) % SIZE)
    with pytest.raises(DeadlineError, match=rf"recv from rank {(rank + 1) % SIZE}"):
        work.wait(timedelta(seconds=scaled(0.2)))
    assert not work.is_success()
    assert isinstance(work.exception(), DeadlineError)
    dist.barrier()  # who leaves earlier is lost to who waits for it


def test_sizes_that_differ_and_messages_that_do_not_come(nursery: Nursery) -> None:
    nursery.run(SIZE, _wrong_sizes)

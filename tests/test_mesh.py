"""Messages between ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from peers import BRIEFLY, SOON, Call, blank, pattern
from rankmesh import (
    ANY_SOURCE,
    ANY_TAG,
    BusyError,
    CancelledError,
    ClosedError,
    Config,
    DeadlineError,
    Mesh,
    PeerLost,
    TruncationError,
    UsageError,
)
from rankmesh.config import KIB, MIB
from rankmesh.endpoint.messages import MAX_TAG
from rankmesh.testing.world import run_world

pytestmark = pytest.mark.parametrize("transport", ["inproc://", "tcp://"])


def _ring(mesh: Mesh, nbytes: int) -> None:
    ahead, behind = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size
    out = blank(nbytes)
    status = mesh.sendrecv(pattern(nbytes, mesh.rank), out, to=ahead, source=behind, tag=3, timeout=SOON)
    assert status == (behind, 3, nbytes)
    assert np.array_equal(out, pattern(nbytes, behind))


@pytest.mark.parametrize("size, nbytes", [(2, 0), (2, 4 * MIB), (5, 10), (5, 200 * KIB)])
def test_ring_of_sendrecv_does_not_deadlock(transport: str, size: int, nbytes: int) -> None:
    run_world(size, _ring, transport, args=(nbytes,))


def _exchange_in_place(mesh: Mesh) -> None:
    """What came would have been mixed into what was still to be sent."""
    memory = pattern(2_400_000, mesh.rank)
    other, group = 1 - mesh.rank, mesh.dup()
    peer = mesh.peers[other]
    for data, out in ((memory, memory), (memory, memory.view(np.int64)), (memory[:1000], memory[999:2000])):
        for exchange in (partial(mesh.sendrecv, to=other), partial(group.sendrecv, to=other), peer.sendrecv):
            with pytest.raises(UsageError, match=r"data and out that share memory.* Pass an out of its own"):
                exchange(data, out)
    assert np.array_equal(memory, pattern(2_400_000, mesh.rank))
    half = len(memory) // 2
    mesh.sendrecv(memory[:half], memory[half:], to=other, timeout=SOON)  # side by side, which is no overlap
    assert np.array_equal(memory[half:], pattern(2_400_000, other)[:half])


def test_sendrecv_of_overlapping_memory_is_refused(transport: str) -> None:
    run_world(2, _exchange_in_place, transport)


def _everybody_to_everybody(mesh: Mesh) -> None:
    sizes = (0, 10, 100 * KIB)
    sends = [
        mesh.isend(pattern(nbytes, 100 * mesh.rank + to), to=to, tag=tag)
        for to in range(mesh.size)
        for tag, nbytes in enumerate(sizes)
    ]
    for tag, nbytes in reversed(list(enumerate(sizes))):
        for source in range(mesh.size):
            out = blank(nbytes)
            assert mesh.recv(out, source=source, tag=tag, timeout=SOON) == (source, tag, nbytes)
            assert np.array_equal(out, pattern(nbytes, 100 * source + mesh.rank))
    for send in sends:
        send.wait(SOON)


def test_everybody_sends_to_everybody_and_oneself(transport: str) -> None:
    run_world(4, _everybody_to_everybody, transport)


def _any_source(mesh: Mesh) -> list[tuple[int, int, int]]:
    if mesh.rank:
        mesh.send(bytes(mesh.rank), to=0, tag=10 + mesh.rank)
        return []
    seen = []
    for _ in range(1, mesh.size):
        probed = mesh.probe(timeout=SOON)
        status = mesh.recv(bytearray(10), source=ANY_SOURCE, tag=ANY_TAG, timeout=SOON)
        assert status == probed
        seen.append(tuple(status))
    assert mesh.iprobe() is None
    return sorted(seen)


def test_any_source_and_any_tag(transport: str) -> None:
    assert run_world(4, _any_source, transport)[0] == [(1, 11, 1), (2, 12, 2), (3, 13, 3)]


def _objects(mesh: Mesh) -> None:
    for size in (0, 1000, 100_000):
        if mesh.rank == 0:
            mesh.send_object({"array": pattern(size), "rank": mesh.rank}, to=1, timeout=SOON)
        else:
            got = mesh.recv_object(timeout=SOON)
            assert got["rank"] == 0
            assert np.array_equal(got["array"], pattern(size))


def test_objects(transport: str) -> None:
    run_world(2, _objects, transport)


def _barriers(mesh: Mesh) -> None:
    """Whoever leaves a barrier finds that all have entered it: each says so before, and nobody after."""
    for number in range(5):
        for to in range(mesh.size):
            mesh.send(bytes([number]), to=to, tag=1, timeout=SOON)
        mesh.barrier(timeout=SOON)
        for source in range(mesh.size):
            out = bytearray(1)
            mesh.recv(out, source=source, tag=1, timeout=SOON)
            assert out[0] == number


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_barrier(transport: str, size: int) -> None:
    run_world(size, _barriers, transport)


def _barrier_without_rank_1(mesh: Mesh) -> DeadlineError | None:
    if mesh.rank == 1:
        mesh.recv(bytearray(1), source=0, timeout=SOON)
        return None
    with pytest.raises(DeadlineError) as caught:
        mesh.barrier(timeout=5 * BRIEFLY)
    if mesh.rank == 0:
        mesh.send(b"x", to=1)
    return caught.value


def test_barrier_names_a_rank_that_does_not_come(transport: str) -> None:
    error = run_world(2, _barrier_without_rank_1, transport)[0]
    assert error is not None
    assert error.op == "barrier with"
    assert "rank 1" in error.peer


def _refusals(mesh: Mesh) -> None:
    out = bytearray(1)
    for rank in (-2, -1, mesh.size, 1000):
        with pytest.raises(UsageError, match=f"no rank {rank} in a world of {mesh.size}"):
            mesh.send(b"x", to=rank)
        with pytest.raises(UsageError, match="no rank"):
            mesh.isend(b"x", to=rank)
        with pytest.raises(UsageError, match="no rank"):
            mesh.send_object(1, to=rank)
        if rank != ANY_SOURCE:
            for call in (mesh.recv, mesh.irecv):
                with pytest.raises(UsageError, match="no rank"):
                    call(out, source=rank)
            for look in (mesh.probe, mesh.iprobe, mesh.recv_object):
                with pytest.raises(UsageError, match="no rank"):
                    look(source=rank)
    for tag in (-1, -2, MAX_TAG + 1):
        with pytest.raises(UsageError, match="is not a tag"):
            mesh.send(b"x", to=0, tag=tag)
    with pytest.raises(UsageError, match="not contiguous"):
        mesh.send(np.arange(10)[::2], to=0)
    mesh.barrier(timeout=SOON)


def test_what_cannot_be_right_is_refused(transport: str) -> None:
    run_world(2, _refusals, transport)


def _truncation(mesh: Mesh) -> None:
    if mesh.rank == 0:
        for nbytes in (100, 100 * KIB):
            mesh.send(pattern(nbytes), to=1, tag=1, timeout=SOON)
        mesh.send(b"after", to=1, tag=1, timeout=SOON)
        return
    for nbytes in (100, 100 * KIB):
        with pytest.raises(TruncationError) as caught:
            mesh.recv(bytearray(10), source=0, tag=1, timeout=SOON)
        assert (caught.value.nbytes, caught.value.capacity, caught.value.tag) == (nbytes, 10, 1)
        assert "rank 0" in caught.value.peer
    out = bytearray(5)
    mesh.recv(out, source=0, tag=1, timeout=SOON)
    assert out == b"after"


def test_truncation(transport: str) -> None:
    run_world(2, _truncation, transport)


def _deadline(mesh: Mesh) -> None:
    if mesh.rank == 0:
        with pytest.raises(DeadlineError) as caught:
            mesh.recv(bytearray(1), source=1, tag=4, timeout=BRIEFLY)
        assert (caught.value.op, caught.value.tag, caught.value.timeout) == ("recv from", 4, BRIEFLY)
        assert "rank 1" in caught.value.peer
        assert "pid" in str(caught.value)
        with pytest.raises(DeadlineError) as caught:
            mesh.recv(bytearray(1), tag=4, timeout=BRIEFLY)
        assert caught.value.peer == "any rank"
        assert "No rank is lost" in caught.value.known
    mesh.barrier(timeout=SOON)


def test_deadline_names_the_rank(transport: str) -> None:
    run_world(2, _deadline, transport)


def _rank_1_leaves(mesh: Mesh) -> PeerLost | None:
    if mesh.rank == 1:
        return None
    if mesh.rank == 0:
        mesh.recv(bytearray(1), source=2, timeout=SOON)
        return None
    with pytest.raises(PeerLost) as caught:
        mesh.recv(bytearray(1), source=1, tag=6, timeout=SOON)
    with pytest.raises(PeerLost):
        mesh.send(b"x", to=1)
    assert "1 lost" in repr(mesh)
    mesh.send(b"x", to=0)
    return caught.value


def test_rank_that_leaves_is_lost_to_those_who_wait_for_it(transport: str) -> None:
    error = run_world(3, _rank_1_leaves, transport)[2]
    assert error is not None
    assert (error.rank, error.op, error.tag) == (1, "recv from", 6)
    assert error.pid is not None


def _nobody_left(mesh: Mesh) -> None:
    if mesh.rank == 0:
        with pytest.raises(PeerLost, match="every other member"):
            mesh.recv(bytearray(1), timeout=SOON)
        with pytest.raises(PeerLost, match="every other member"):
            mesh.probe(timeout=SOON)


def test_wildcard_receive_ends_when_nobody_is_left(transport: str) -> None:
    run_world(3, _nobody_left, transport)


def _works(mesh: Mesh) -> None:
    if mesh.rank == 0:
        out: Any = blank(10)
        seen: list[Any] = []
        receive = mesh.irecv(out, source=1, tag=1)
        receive.add_done_callback(seen.append)
        assert not receive.done()
        mesh.send(b"go", to=1)
        assert receive.result(SOON) == (1, 1, 10)
        assert receive.done()
        assert np.array_equal(out, pattern(10))
        cancelled = mesh.irecv(out, source=1, tag=2)
        assert cancelled.cancel()
        with pytest.raises(CancelledError):
            cancelled.wait()
        assert seen == [receive]
    else:
        mesh.recv(bytearray(2), source=0, timeout=SOON)
        send = mesh.isend(pattern(10), to=0, tag=1)
        send.wait(SOON)
        assert send.done()
    mesh.barrier(timeout=SOON)


def test_works(transport: str) -> None:
    run_world(2, _works, transport)


def _busy(mesh: Mesh) -> None:
    if mesh.rank == 0:
        sends = [mesh.isend(bytes(100 * KIB), to=1) for _ in range(8)]
        with pytest.raises(BusyError, match="send_queue_bytes"):
            mesh.isend(bytes(100 * KIB), to=1)
        for send in sends:
            send.cancel()
    mesh.barrier(timeout=SOON)


def test_bound_on_waiting_sends(transport: str) -> None:
    run_world(2, _busy, transport, config=Config(send_queue_bytes=8 * 512))


def _closed(mesh: Mesh) -> None:
    mesh.barrier(timeout=SOON)
    waiting = Call(mesh.recv, bytearray(1), timeout=SOON)
    mesh.close()
    with pytest.raises((ClosedError, PeerLost)):
        waiting.result()
    for call in (lambda: mesh.send(b"x", to=mesh.rank), mesh.probe, mesh.iprobe, lambda: mesh.recv(bytearray(1))):
        with pytest.raises(ClosedError):
            call()
    mesh.close()
    assert "closed" in repr(mesh)


def test_closed_mesh(transport: str) -> None:
    run_world(2, _closed, transport)


def _describe(mesh: Mesh) -> tuple[int, int, int, str]:
    described = mesh.rank, mesh.size, mesh.epoch, repr(mesh)
    mesh.barrier(timeout=SOON)  # nobody leaves before all have looked
    return described


def test_status(transport: str) -> None:
    assert run_world(2, _describe, transport) == [
        (0, 2, 0, "<Mesh rank 0 of 2, epoch 0: all well>"),
        (1, 2, 0, "<Mesh rank 1 of 2, epoch 0: all well>"),
    ]

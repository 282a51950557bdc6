"""Messages to oneself: matched like all others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from peers import BRIEFLY, SOON, Call, blank, is_blank, pattern
from rankmesh import (
    ANY_SOURCE,
    ANY_TAG,
    CancelledError,
    ClosedError,
    Config,
    DeadlineError,
    Mesh,
    TruncationError,
    UsageError,
    join,
)
from rankmesh.config import KIB, MIB
from rankmesh.wire.credit import OVERHEAD
from timing import wait_until

EAGER = Config().eager_bytes
CREDIT = 64 * KIB


@pytest.fixture
def alone() -> Iterator[Mesh]:
    """A world of one; it keeps little for itself, so that the bound is met soon."""
    config = Config(eager_bytes=4 * KIB, lane_credit_bytes=CREDIT, peer_credit_bytes=CREDIT)
    with join(rank=0, size=1, config=config) as mesh:
        yield mesh


@pytest.mark.parametrize("nbytes", [0, 1, 4 * KIB, 4 * KIB + 1, MIB])
@pytest.mark.parametrize("posted_first", [True, False], ids=["posted", "unexpected"])
def test_content(alone: Mesh, nbytes: int, posted_first: bool) -> None:
    data, out = pattern(nbytes), blank(nbytes + 8)
    if posted_first:
        receive = alone.irecv(out, source=0, tag=1)
        alone.send(data, to=0, tag=1, timeout=SOON)
        status = receive.result(SOON)
    else:
        send = alone.isend(data, to=0, tag=1)
        assert alone.probe(source=0, tag=1, timeout=SOON) == (0, 1, nbytes)
        status = alone.recv(out, timeout=SOON)
        send.wait(SOON)
    assert status == (0, 1, nbytes)
    assert np.array_equal(out[:nbytes], data)
    assert is_blank(out[nbytes:])


@pytest.mark.parametrize("nbytes", [10, 100 * KIB])
@pytest.mark.parametrize("posted_first", [True, False], ids=["posted", "unexpected"])
def test_objects_are_like_those_from_others(alone: Mesh, nbytes: int, posted_first: bool) -> None:
    obj: dict[str, Any] = {"array": pattern(nbytes), "text": "x"}
    if posted_first:
        receiving = Call(alone.recv_object, source=0, tag=2, timeout=SOON)
        wait_until(alone.peers[0]._hub.matcher.posted, 5)
        alone.send_object(obj, to=0, tag=2, timeout=SOON)
        got = receiving.result()
    else:
        sending = Call(alone.send_object, obj, to=0, tag=2, timeout=SOON)
        alone.probe(source=0, tag=2, timeout=SOON)
        got = alone.recv_object(source=0, tag=2, timeout=SOON)
        sending.result()
    assert np.array_equal(got["array"], obj["array"])
    assert got["text"] == "x"
    assert got["array"].flags.writeable
    assert not np.shares_memory(got["array"], obj["array"])


def test_sent_memory_may_be_reused(alone: Mesh) -> None:
    data, out = pattern(100), blank(100)
    alone.send(data, to=0, tag=1)
    data[:] = 0
    alone.recv(out, tag=1, timeout=SOON)
    assert np.array_equal(out, pattern(100))


def test_order_and_wildcards(alone: Mesh) -> None:
    sends = [alone.isend(pattern(size, at), to=0, tag=at % 2) for at, size in enumerate((10, 10 * KIB, 0, 20 * KIB))]
    out = blank(20 * KIB)
    assert [alone.recv(out, source=ANY_SOURCE, tag=tag, timeout=SOON).nbytes for tag in (1, 0, ANY_TAG, ANY_TAG)] == [
        10 * KIB, 10, 0, 20 * KIB,
    ]  # fmt: skip
    for send in sends:
        send.wait(SOON)


@pytest.mark.parametrize("nbytes", [100, 10 * KIB])
@pytest.mark.parametrize("posted_first", [True, False], ids=["posted", "unexpected"])
def test_truncation(alone: Mesh, nbytes: int, posted_first: bool) -> None:
    small = blank(nbytes - 1)
    if posted_first:
        receive = alone.irecv(small, tag=1)
        send = alone.isend(pattern(nbytes), to=0, tag=1)
    else:
        send = alone.isend(pattern(nbytes), to=0, tag=1)
        receive = alone.irecv(small, tag=1)
    with pytest.raises(TruncationError) as caught:
        receive.result(SOON)
    assert (caught.value.nbytes, caught.value.capacity) == (nbytes, nbytes - 1)
    send.wait(SOON)
    assert is_blank(small)
    alone.send(b"next", to=0, tag=1)
    assert alone.recv(bytearray(4), tag=1, timeout=SOON).nbytes == 4


def test_wrong_kind_stays(alone: Mesh) -> None:
    alone.send_object([1], to=0, tag=1)
    with pytest.raises(UsageError, match="recv_object"):
        alone.recv(bytearray(100), tag=1, timeout=SOON)
    assert alone.recv_object(tag=1, timeout=SOON) == [1]


@pytest.mark.parametrize("give_up", ["cancel", "timeout"])
def test_send_given_up(alone: Mesh, give_up: str) -> None:
    data = pattern(10 * KIB)
    send = alone.isend(data, to=0, tag=1)
    if give_up == "cancel":
        assert send.cancel()
        with pytest.raises(CancelledError):
            send.wait()
    else:
        with pytest.raises(DeadlineError) as caught:
            send.wait(timeout=BRIEFLY)
        assert "this process itself" in caught.value.known
    data[:] = 0
    assert alone.iprobe(tag=1) is None
    alone.send(b"next", to=0, tag=1)
    assert alone.recv(bytearray(4), tag=1, timeout=SOON).nbytes == 4


def test_receive_given_up(alone: Mesh) -> None:
    out, later = blank(10), blank(10)
    assert alone.irecv(out, tag=1).cancel()
    alone.send(pattern(10), to=0, tag=1)
    alone.recv(later, tag=1, timeout=SOON)
    assert is_blank(out)
    assert np.array_equal(later, pattern(10))


@pytest.mark.parametrize("nbytes", [0, 1000])
def test_what_is_kept_is_bounded(alone: Mesh, nbytes: int) -> None:
    sent = CREDIT // (nbytes + OVERHEAD)
    for tag in range(sent):
        alone.send(bytes(nbytes), to=0, tag=tag, timeout=SOON)
    with pytest.raises(DeadlineError):
        alone.send(bytes(nbytes), to=0, tag=0, timeout=BRIEFLY)
    for tag in range(sent):
        assert alone.recv(bytearray(nbytes), tag=tag, timeout=SOON).nbytes == nbytes
    alone.send(bytes(nbytes), to=0, tag=1, timeout=SOON)


def test_close_ends_what_waits() -> None:
    mesh = join(rank=0, size=1)
    receiving = mesh.irecv(bytearray(1), source=0, tag=1)
    sending = mesh.isend(bytes(MIB), to=0, tag=2)
    mesh.close()
    for work in (receiving, sending):
        with pytest.raises(ClosedError):
            work.wait(SOON)
    with pytest.raises(ClosedError):
        mesh.send(b"x", to=0)


def test_sendrecv_and_barrier_alone(alone: Mesh) -> None:
    out = bytearray(3)
    assert alone.sendrecv(b"abc", out, to=0, timeout=SOON) == (0, 0, 3)
    assert out == b"abc"
    alone.barrier(timeout=SOON)

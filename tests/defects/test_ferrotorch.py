"""Defects found in ferrotorch-distributed, each with the test that would fail if rankmesh had it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from peers import FAULTY, SOON, Call, Medium, Pair, blank, faulty, is_blank, open_pair, pattern, router_of
from rankmesh import ClosedError, Config, ConnectError, DeadlineError, PeerLost, TruncationError, UsageError
from rankmesh.config import MIB
from rankmesh.testing.world import run_world
from timing import scaled, wait_until

TCP = Medium("tcp://127.0.0.1:0", Config(shm=False))


@pytest.fixture
def pair() -> Iterator[Pair]:
    with open_pair(TCP) as both:
        yield both


def test_ferrotorch_a_waiting_receive_does_not_keep_the_same_peer_from_being_sent_to(pair: Pair) -> None:
    """ferrotorch had one lock per socket for both directions: whoever waited for a message kept everybody else from
    sending."""
    waiting = Call(pair.there.recv, bytearray(8), tag=1)
    wait_until(lambda: len(pair.left.hub.matcher._posted) == 1, 10, "the posted receive")
    for n in range(100):
        pair.there.send(b"%d" % n, tag=2)
        assert pair.back.recv(bytearray(8), tag=2).nbytes == len(str(n))
    assert waiting.running
    pair.back.send(b"at last", tag=1)
    assert waiting.result().nbytes == 7


def test_ferrotorch_both_directions_move_at_once(pair: Pair) -> None:
    """With that lock, two sides that sent large messages to each other waited for each other for ever."""
    one, other = pattern(16 * MIB, 1), pattern(16 * MIB, 2)
    here, there = np.empty_like(one), np.empty_like(one)
    moving = Call(pair.there.sendrecv, one, here, tag=3)
    pair.back.sendrecv(other, there, tag=3)
    assert moving.result().nbytes == 16 * MIB
    assert (here == other).all()
    assert (there == one).all()


def test_ferrotorch_no_delay_is_on_at_both_ends(pair: Pair) -> None:
    """ferrotorch left Nagle's algorithm on, which makes a small message wait for the acknowledgement of another."""
    for peer in (pair.there, pair.back):
        link = router_of(peer).link
        assert link is not None
        with socket.socket(fileno=os.dup(link.fileno())) as sock:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


@pytest.mark.parametrize("nbytes", [60_000, 8 * MIB])
def test_ferrotorch_a_timeout_leaves_the_stream_in_step(nbytes: int) -> None:
    """A timeout in ferrotorch left the stream in the middle of a message, and the next read took the rest of it for a
    header. Here the connection stands still within a message, eager or in pieces; the receive gives up; then the
    connection goes on."""
    with faulty() as faults, open_pair(FAULTY, heartbeat_timeout=scaled(30)) as pair:
        out = blank(nbytes)
        receiving = pair.back.irecv(out, tag=1)
        for link in faults.links:
            link.stall(after_bytes=nbytes // 2)
        sending = pair.there.isend(pattern(nbytes), tag=1)
        with pytest.raises(DeadlineError):
            receiving.wait(timeout=0.3)
        out[:] = blank(nbytes)
        for link in faults.links:
            link.resume()
        sending.wait(SOON)
        after = pattern(nbytes, seed=2)
        following = pair.there.isend(after, tag=1)
        arrived = blank(nbytes)
        assert pair.back.recv(arrived, tag=1).nbytes == nbytes
        following.wait(SOON)
        assert (arrived == after).all()
        assert is_blank(out)


def exchange_directly(mesh: object) -> list[bool]:
    rank, size = mesh.rank, mesh.size  # type: ignore[attr-defined]
    for other in range(1, size):
        if other != rank and rank:
            mesh.send(bytes([rank]), to=other)  # type: ignore[attr-defined]
            out = bytearray(1)
            mesh.recv(out, source=other)  # type: ignore[attr-defined]
            assert out[0] == other
    connected = [peer.connected for peer in mesh.peers]  # type: ignore[attr-defined]
    mesh.barrier()  # type: ignore[attr-defined]
    return connected


def test_ferrotorch_ranks_reach_each_other_directly() -> None:
    """In ferrotorch all traffic went through rank 0, and other ranks could not reach each other at all."""
    connected = run_world(4, exchange_directly, "tcp://")
    for rank in (1, 2, 3):
        assert all(connected[rank][other] for other in (1, 2, 3) if other != rank)


def test_ferrotorch_what_goes_wrong_can_be_told_apart(pair: Pair) -> None:
    """All errors of ferrotorch were one type with a text. Here six causes have six types, with attributes."""
    with pytest.raises(UsageError):
        pair.there.send(np.zeros((4, 4))[:, 1], tag=1)
    with pytest.raises(DeadlineError) as late:
        pair.there.recv(bytearray(1), tag=1, timeout=0.01)
    assert (late.value.op, late.value.tag, late.value.timeout) == ("recv from", 1, 0.01)
    pair.back.send(bytes(10), tag=2)
    with pytest.raises(TruncationError) as cut:
        pair.there.recv(bytearray(4), tag=2)
    assert (cut.value.nbytes, cut.value.capacity) == (10, 4)
    with pytest.raises(ConnectError) as refused:
        pair.left.connect("tcp://127.0.0.1:1", timeout=0.2)
    assert refused.value.address == "tcp://127.0.0.1:1"
    pair.right.abort()
    with pytest.raises(PeerLost) as lost:
        pair.there.recv(bytearray(1), tag=3)
    assert (lost.value.pid, lost.value.tag) == (os.getpid(), 3)
    pair.left.close()
    with pytest.raises(ClosedError):
        pair.there.recv(bytearray(1), tag=4)
    kinds = [UsageError, DeadlineError, TruncationError, ConnectError, PeerLost, ClosedError]
    assert not any(issubclass(a, b) for a in kinds for b in kinds if a is not b)

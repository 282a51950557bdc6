"""Pieces of a large message through a ring: straight into slots and out of them, and others get their turn."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from peers import PATIENT, SOON, Call, Medium, blank, open_pair, pattern, router_of
from rankmesh import Config, DeadlineError, Endpoint, Mesh
from rankmesh.config import MIB
from rankmesh.endpoint.frames import FIRST_PIECE, TURN_BYTES
from rankmesh.transport.ring import SLOT_BYTES, SLOTS, RingWriter
from ranks import run_ranks
from timing import wait_until

pytestmark = pytest.mark.usefixtures("nursery")

SHM = Medium("shm://", Config())
#: Several turns, and many times as much as there are slots.
LARGE = 6 * max(TURN_BYTES, SLOTS * SLOT_BYTES) + 5


def test_no_piece_takes_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at the end of a turn nor for want of a slot: the queue's way costs twice as much."""
    written: list[int] = []
    real = RingWriter.write

    def write(self: RingWriter, buffers: Sequence[memoryview]) -> int:
        written.append(sum(map(len, buffers)))
        return real(self, buffers)

    monkeypatch.setattr(RingWriter, "write", write)
    data, out = pattern(LARGE), blank(LARGE)
    with open_pair(SHM) as pair:
        sending = Call(pair.there.send, data, tag=1)
        pair.back.recv(out, tag=1, timeout=SOON)
        sending.result()
    np.testing.assert_array_equal(out, data)
    assert max(written, default=0) < SLOT_BYTES // 4


def test_another_peer_is_served_in_the_middle_of_a_transfer() -> None:
    """Whoever receives a large message leads, and serves everybody between two turns, not only at its end."""
    nbytes = 256 * MIB
    data, out = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    with open_pair(SHM) as pair, Endpoint("shm://", name="third") as third:
        seen: list[int] = []
        inbound = router_of(pair.back).inbound
        pair.right.rpc.register(lambda: seen.append(inbound.bytes), "look", inline=True)
        server = third.connect(pair.right.address, timeout=SOON)
        server.call("look", timeout=SOON)
        over = threading.Event()

        def ask() -> None:
            while not over.is_set():
                server.call("look", timeout=SOON)

        asking = Call(ask)
        sending = Call(pair.there.send, data, tag=1)
        pair.back.recv(out, tag=1, timeout=SOON)
        over.set()
        sending.result()
        asking.result()
    assert out.all()
    assert any(0 < got < nbytes for got in seen), f"served at {seen}"


def test_a_transfer_that_nobody_waits_for_goes_on() -> None:
    """The background thread sleeps when a write is begun, and has to learn of what is left of it: no timer wakes it."""
    nbytes = 4 * TURN_BYTES
    data, memory = pattern(nbytes), np.zeros(nbytes, np.uint8)
    with open_pair(SHM, **PATIENT) as pair:
        pair.right.memory.register("there", memory)
        remote = pair.there.open("there", timeout=SOON)
        for _ in range(20):
            write = remote.write(data, async_op=True)
            wait_until(write.done, 5)
            write.result()
    np.testing.assert_array_equal(memory, data)


def _short_wait(mesh: Mesh) -> bool:
    """Whether, of a few, one wait ended in the middle of a transfer: beside others a transfer may be over too soon."""
    nbytes = 512 * MIB
    data = np.ones(nbytes, np.uint8)
    for _ in range(5):
        if mesh.rank == 0:
            mesh.send(data, to=1, tag=1, timeout=SOON)
            in_the_middle = bool(mesh.recv_object(source=1, tag=3, timeout=SOON))
        else:
            inbound = router_of(mesh.peers[0]).inbound
            before = inbound.bytes
            receive = mesh.irecv(data, source=0, tag=1)
            wait_until(lambda: inbound.bytes > before + MIB, 20)  # noqa: B023  # it is called right here
            with pytest.raises(DeadlineError):
                mesh.recv(bytearray(1), source=0, tag=2, timeout=0.002)
            in_the_middle = inbound.bytes < before + nbytes
            receive.result(SOON)
            mesh.send_object(in_the_middle, to=0, tag=3)
        if in_the_middle:
            return True
    return False


def test_a_wait_ends_in_time_beside_a_transfer() -> None:
    assert run_ranks(2, _short_wait) == [True, True]


def test_a_transfer_that_has_left_is_forgotten_although_all_slots_are_taken() -> None:
    """Else small messages behind it would wait for the reader to free one."""
    data, out = pattern(FIRST_PIECE + (SLOTS - 1) * SLOT_BYTES), blank(FIRST_PIECE + (SLOTS - 1) * SLOT_BYTES)
    with open_pair(SHM) as pair:
        send = pair.there.isend(data, tag=1)
        pair.back.probe(1, timeout=SOON)
        with pair.left.hub.engine:  # it does not see the grant yet
            receive = pair.back.irecv(out, tag=1)
            pair.right.hub.engine.acquire()  # and then nobody reads what it sends
        try:
            send.result(SOON)
            with pair.left.hub.engine:
                assert not router_of(pair.there).outbound._queue
        finally:
            pair.right.hub.engine.release()
        receive.result(SOON)
    np.testing.assert_array_equal(out, data)

"""Pieces of a large message through a ring: straight into slots and out of them, and others get their turn."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from peers import SOON, Call, Medium, blank, open_pair, pattern, router_of
from rankmesh import Config, Endpoint
from rankmesh.config import MIB
from rankmesh.endpoint.frames import TURN_BYTES
from rankmesh.transport.ring import SLOT_BYTES, SLOTS, RingWriter

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

"""Messages from an arena: copied once, by the receiver, and never torn, whoever gives up or is wrong in between."""

from __future__ import annotations

import gc
import logging
import os
import struct
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import numpy as np
import pytest

from forked import Child
from peers import BRIEFLY, PATIENT, SOON, Call, Medium, Pair, blank, is_blank, open_pair, pattern, router_of
from rankmesh import (
    CancelledError,
    ClosedError,
    Config,
    DeadlineError,
    Endpoint,
    Peer,
    PeerLost,
    TruncationError,
    Work,
)
from rankmesh.buffers import readable
from rankmesh.config import KIB, MIB
from rankmesh.endpoint import sharing
from rankmesh.endpoint.incoming import Incoming
from rankmesh.endpoint.lanes import Frame, Lane
from rankmesh.endpoint.sharing import PIECE_BYTES, Copy
from rankmesh.endpoint.transfers import Landing
from rankmesh.errors import TransferAborted
from rankmesh.transport.arena import SEGMENT_BYTES
from rankmesh.transport.base import PolledLink
from rankmesh.transport.ring import BELL
from rankmesh.transport.segment import CELLS
from rankmesh.wire.header import Flag, Kind, pack
from ranks import run_ranks
from timing import scaled, wait_until

pytestmark = pytest.mark.usefixtures("nursery")

SHM = Medium("shm://", Config())
EAGER = SHM.config.eager_bytes
#: Copied in three pieces.
LARGE = 2 * PIECE_BYTES + 5
REFERENCE = struct.Struct("<QQQQ")

Array = np.ndarray[Any, Any]


@pytest.fixture
def data_frames(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all pieces that arrive in DATA frames."""
    sizes: list[int] = []
    real = Incoming._piece_landed

    def count(self: Incoming, landing: Landing, nbytes: int) -> None:
        sizes.append(nbytes)
        real(self, landing, nbytes)

    monkeypatch.setattr(Incoming, "_piece_landed", count)
    return sizes


@pytest.fixture
def pair(data_frames: list[int]) -> Iterator[Pair]:
    with open_pair(SHM) as both:
        yield both


def filled(owner: Endpoint, nbytes: int, seed: int = 0) -> Array:
    """Random bytes in the endpoint's arena."""
    array = owner.empty(nbytes, np.uint8)
    array[:] = pattern(nbytes, seed)
    assert in_arena(owner, array)
    return array


def in_arena(owner: Endpoint, array: Array) -> bool:
    return owner.hub.arena.locate(readable(array)) is not None


def polled(peer: Peer) -> PolledLink:
    link = router_of(peer).link
    assert isinstance(link, PolledLink)
    return link


def incoming(peer: Peer) -> Incoming:
    return router_of(peer).inbound.incoming


def free_cells(peer: Peer) -> int:
    cells = router_of(peer).outbound.cells
    assert cells is not None
    return len(cells._free)


def check_traffic(pair: Pair) -> None:
    """Both ways, from the arena and not, and all is given back."""
    for here, there, owner in ((pair.there, pair.back, pair.left), (pair.back, pair.there, pair.right)):
        for data in (filled(owner, LARGE, 77), pattern(LARGE, 78), pattern(10, 79)):
            out = blank(len(data))
            receive = there.irecv(out, tag=99)
            here.send(data, tag=99, timeout=SOON)
            receive.wait(SOON)
            assert np.array_equal(out, data)
        wait_until(lambda here=here: free_cells(here) == CELLS, 5, "all cells to be free again")  # type: ignore[misc]


class Stepper:
    """The right side stands still, but for what the test has it do: it holds that engine's lock."""

    def __init__(self, pair: Pair) -> None:
        self.engine = pair.right.hub.engine
        self.router = router_of(pair.back)

    def __enter__(self) -> Stepper:
        self.engine.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.background.wake()
        self.engine.release()

    def read(self) -> None:
        self.router.ready(1)

    def step(self) -> None:
        """Copy one piece."""
        self.engine.work_off_backlog()

    def copied(self) -> int:
        (copy,) = self.router.inbound.incoming._copies.values()
        return copy.landing.got

    @property
    def copying(self) -> bool:
        return bool(self.router.inbound.incoming._copies)


# ---------------------------------------------------------------------- Endpoint.empty and mesh.empty


@pytest.mark.parametrize(
    "shape, dtype, arena",
    [
        ((200, 100), float, True),
        (EAGER + 1, np.uint8, True),
        ((3, EAGER, 2), "i2", True),
        (EAGER, np.uint8, False),
        ((), float, False),
        (0, float, False),
        ((0, 1000, 1000), float, False),
        ((5, 5), np.float32, False),
        (EAGER, object, False),
        (EAGER, [("x", "f4"), ("y", "i8")], True),
    ],
)
def test_empty_is_like_numpys(pair: Pair, shape: int | tuple[int, ...], dtype: Any, arena: bool) -> None:
    array, like = pair.left.empty(shape, dtype), np.empty(shape, dtype)
    assert (array.shape, array.dtype, array.strides) == (like.shape, like.dtype, like.strides)
    assert array.flags.writeable
    if dtype is not object and array.nbytes:
        assert in_arena(pair.left, array) == arena


def test_empty_is_float_by_default(pair: Pair) -> None:
    assert pair.left.empty(3).dtype == np.float64


@pytest.mark.parametrize("shape", [-1, (-1, -1), (5, -(1 << 20))])
def test_empty_refuses_what_numpy_refuses(pair: Pair, shape: int | tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="negative"):
        pair.left.empty(shape)


def test_empty_without_shared_memory() -> None:
    with Endpoint("tcp://127.0.0.1:0", config=Config(shm=False)) as endpoint:
        assert not in_arena(endpoint, endpoint.empty(MIB))


def test_empty_where_there_is_no_more_memory(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: object) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "rankmesh"):
        patch.setattr(os, "memfd_create", none)
        array = pair.left.empty(MIB)
    assert not in_arena(pair.left, array)
    assert "Too many open files" in caplog.text


def test_empty_of_a_closed_endpoint(pair: Pair) -> None:
    array = filled(pair.left, LARGE)
    pair.left.close()
    with pytest.raises(ClosedError):
        pair.left.empty(MIB)
    assert np.array_equal(array, pattern(LARGE)), "arrays outlive the endpoint"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # of Python 3.12: it is what is tested
def test_empty_in_a_forked_child(pair: Pair) -> None:
    """Its arrays would lie in the parent's memory, over the parent's arrays."""
    array = filled(pair.left, LARGE)

    def child() -> None:
        with pytest.raises(ClosedError, match="fork"):
            pair.left.empty(LARGE)

    with Child(child):
        pass
    assert np.array_equal(array, pattern(LARGE))


def _ring(mesh: Any) -> tuple[bool, float, str]:
    array = mesh.empty((1000, 1000), "f4")
    array[:] = mesh.rank
    out = np.zeros((1000, 1000), "f4")
    mesh.sendrecv(array, out, to=(mesh.rank + 1) % mesh.size, source=(mesh.rank - 1) % mesh.size)
    return array.dtype == "f4", float(out.mean()), str(mesh.peers[(mesh.rank + 1) % mesh.size].transport)


def test_mesh_empty_between_processes() -> None:
    expected = [(True, float(source), "shm (same host)") for source in (1, 0)]
    assert run_ranks(2, _ring) == expected


# ---------------------------------------------------------------------- a single copy


@pytest.mark.parametrize("nbytes", [EAGER + 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, LARGE])
def test_a_message_from_the_arena_is_copied_and_not_sent(pair: Pair, data_frames: list[int], nbytes: int) -> None:
    array, out = filled(pair.left, nbytes), blank(nbytes + 100)
    receive = pair.back.irecv(out, tag=1)
    pair.there.send(array, tag=1, timeout=SOON)
    status = receive.result(SOON)
    assert (status.tag, status.nbytes) == (1, nbytes)
    assert np.array_equal(out[:nbytes], array)
    assert is_blank(out[nbytes:])
    assert data_frames == []
    assert pair.back.stats()["bytes_received"] == pair.there.stats()["bytes_sent"] == nbytes


def test_other_messages_are_sent_as_before(pair: Pair, data_frames: list[int]) -> None:
    out = blank(LARGE)
    receive = pair.back.irecv(out, tag=1)
    pair.there.send(pattern(LARGE), tag=1, timeout=SOON)
    receive.wait(SOON)
    assert sum(data_frames) == LARGE


def test_a_part_of_an_array(pair: Pair, data_frames: list[int]) -> None:
    array = filled(pair.left, LARGE).reshape(-1, 1)[100_001:-7]
    out = blank(array.nbytes)
    receive = pair.back.irecv(out, tag=1)
    pair.there.send(array, tag=1, timeout=SOON)
    receive.wait(SOON)
    assert np.array_equal(out, array.ravel())
    assert data_frames == []


def test_both_ways_at_once_and_from_arena_to_arena(pair: Pair, data_frames: list[int]) -> None:
    sides = []
    for seed, (here, owner) in enumerate(((pair.there, pair.left), (pair.back, pair.right))):
        array, out = filled(owner, 16 * MIB, seed), owner.empty(16 * MIB, np.uint8)
        sides.append((out, Call(here.sendrecv, array, out, tag=1, timeout=SOON)))
    for seed, (out, call) in zip((1, 0), sides, strict=True):
        call.result()
        assert np.array_equal(out, pattern(16 * MIB, seed))
    assert data_frames == []


def test_an_object_with_an_array_of_the_arena(pair: Pair) -> None:
    array = filled(pair.left, LARGE)
    sending = Call(pair.there.send_object, {"array": array}, tag=1, timeout=SOON)
    assert np.array_equal(pair.back.recv_object(tag=1, timeout=SOON)["array"], array)
    sending.result()


def test_to_oneself_and_over_other_transports(inproc: Medium) -> None:
    with open_pair(inproc) as pair:
        array, out = filled(pair.left, LARGE), blank(LARGE)
        receive = pair.back.irecv(out, tag=1)
        pair.there.send(array, tag=1, timeout=SOON)
        receive.wait(SOON)
        assert np.array_equal(out, array)


def test_received_later_probed_and_in_order(pair: Pair, data_frames: list[int]) -> None:
    arrays = [filled(pair.left, LARGE, seed) for seed in range(3)]
    sends = [pair.there.isend(array, tag=1) for array in arrays]
    status = pair.back.probe(tag=1, timeout=SOON)
    assert (status.tag, status.nbytes) == (1, LARGE)
    assert not any(send.done() for send in sends)
    for array, send in zip(arrays, sends, strict=True):
        out = blank(LARGE)
        pair.back.recv(out, tag=1, timeout=SOON)
        assert np.array_equal(out, array)
        send.wait(SOON)
    assert data_frames == []


def test_a_buffer_that_is_too_small(pair: Pair, data_frames: list[int]) -> None:
    out = blank(LARGE - 1)
    receive = pair.back.irecv(out, tag=1)
    pair.there.send(filled(pair.left, LARGE), tag=1, timeout=SOON)
    with pytest.raises(TruncationError) as caught:
        receive.wait(SOON)
    assert (caught.value.nbytes, caught.value.capacity) == (LARGE, LARGE - 1)
    assert is_blank(out)
    assert data_frames == []
    check_traffic(pair)


def test_an_empty_message_that_is_announced(data_frames: list[int]) -> None:
    """While the peer's credit is spent small messages are announced, empty ones too."""
    with open_pair(SHM, peer_credit_bytes=MIB, lane_credit_bytes=MIB) as pair:
        array = filled(pair.left, LARGE)
        for tag in range(1, 20):
            pair.there.isend(array[:60_000], tag=tag)
        send = pair.there.isend(array[:0], tag=100)
        pair.back.recv(bytearray(0), tag=100, timeout=SOON)
        send.wait(SOON)
        for tag in range(1, 20):
            out = blank(60_000)
            pair.back.recv(out, tag=tag, timeout=SOON)
            assert np.array_equal(out, array[:60_000])


def test_more_at_once_than_there_are_cells(pair: Pair, data_frames: list[int]) -> None:
    """The rest takes the other way; all arrive."""
    count, nbytes = CELLS + 20, EAGER + 1000
    arrays = [filled(pair.left, nbytes, seed) for seed in range(count)]
    sends = [pair.there.isend(array, tag=tag) for tag, array in enumerate(arrays)]
    assert free_cells(pair.there) == 0
    outs = [blank(nbytes) for _ in arrays]
    receives = [pair.back.irecv(out, tag=tag) for tag, out in enumerate(outs)]
    works: list[Work[Any]] = [*receives, *sends]
    for work in works:
        work.wait(SOON)
    assert all(np.array_equal(out, array) for out, array in zip(outs, arrays, strict=True))
    assert sum(data_frames) == 20 * nbytes
    check_traffic(pair)


def test_a_copy_is_in_the_backlog_once(pair: Pair) -> None:
    """However many there are: other work has its turn between two pieces of each."""
    count = 10
    receives = [pair.back.irecv(blank(LARGE), tag=tag) for tag in range(count)]
    with Stepper(pair) as right:
        sends = [pair.there.isend(filled(pair.left, LARGE, tag), tag=tag) for tag in range(count)]
        while len(right.router.inbound.incoming._copies) < count:
            right.read()
        assert list(right.engine.backlog).count(right.router.inbound.incoming) == 1
        right.step()
        assert {copy.landing.got for copy in right.router.inbound.incoming._copies.values()} == {PIECE_BYTES}
        assert list(right.engine.backlog).count(right.router.inbound.incoming) == 1
    works: list[Work[Any]] = [*receives, *sends]
    for work in works:
        work.wait(SOON)


# ---------------------------------------------------------------------- who drives the copy


def test_the_background_thread_copies_without_pauses(pair: Pair) -> None:
    """Nobody waits for it. A pause of a heartbeat's length between pieces would take 10 s."""
    done = threading.Event()
    array, out = filled(pair.left, 40 * PIECE_BYTES), np.zeros(40 * PIECE_BYTES, np.uint8)
    receive = pair.back.irecv(out, tag=1)
    receive.add_done_callback(lambda _: done.set())
    send = pair.there.isend(array, tag=1)
    assert done.wait(scaled(5))
    send.wait(SOON)
    assert np.array_equal(out, array)


@pytest.mark.parametrize("waits", [True, False], ids=["recv", "irecv"])
def test_a_leader_that_sleeps_is_woken_for_a_copy(waits: bool) -> None:
    """Another thread posts the receive, and waits behind the leader: which slept until the next heartbeat."""
    with open_pair(SHM, **PATIENT) as pair:
        array, out = filled(pair.left, LARGE), blank(LARGE)
        engine, done = pair.right.hub.engine, threading.Event()
        leading = Call(pair.back.recv, bytearray(8), tag=99, timeout=SOON)
        send = pair.there.isend(array, tag=1)
        wait_until(lambda: bool(incoming(pair.back)._announced), 5, "the announcement")
        wait_until(lambda: engine.leader is not None and engine.leader.parker is not None, 5, "the other to sleep")
        if waits:
            pair.back.recv(out, tag=1, timeout=scaled(2))
        else:
            pair.back.irecv(out, tag=1).add_done_callback(lambda _: done.set())
            assert done.wait(scaled(2))
        send.wait(SOON)
        assert np.array_equal(out, array)
        pair.there.send(bytes(8), tag=99)
        leading.result()


def test_a_waiter_that_copies_runs_timers_and_lets_others_in(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats go out, and other threads have the lock, while a large message is copied."""
    monkeypatch.setattr(sharing, "PIECE_BYTES", 4 * KIB)
    nbytes = 64 * MIB
    array, out = filled(pair.left, nbytes), np.zeros(nbytes, np.uint8)
    seen: list[int] = []
    engine, copies = pair.right.hub.engine, incoming(pair.back)._copies

    def note() -> None:
        seen.extend(copy.landing.got for copy in copies.values())

    receiving = Call(pair.back.recv, out, tag=1, timeout=SOON)
    send = pair.there.isend(array, tag=1)
    while not seen and receiving.running:
        with engine:
            if copies:
                engine.call_at(monotonic(), note)
    receiving.result()
    send.wait(SOON)
    assert seen, "nobody else had the lock, or the timer ran when the copy was over"
    assert 0 < seen[0] < nbytes
    assert np.array_equal(out, array)


@pytest.mark.parametrize("nbytes", [LARGE, 2 * PIECE_BYTES, PIECE_BYTES])
def test_a_sender_that_sleeps_is_woken_before_the_last_piece(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """To wake it takes as long as to copy a MiB. What is copied at once leaves no time for it."""
    array, out = filled(pair.left, nbytes), blank(nbytes)
    link, left, asleep = polled(pair.back), pair.left.hub.engine, []
    real, before = Copy.step, left.heralds

    def look(self: Copy) -> bool:
        assert link.writer is not None
        asleep.append(bool(link.writer.control[BELL]))
        if not asleep[-1]:
            wait_until(lambda: left.heralds > before, 5, "the sender to be woken, and to poll")
        return real(self)

    monkeypatch.setattr(Copy, "step", look)
    receive = pair.back.irecv(out, tag=1)
    with Stepper(pair) as right:
        sending = Call(pair.there.send, array, tag=1, timeout=SOON)
        wait_until(link.ready, 5, "the announcement")
        right.read()
        for _ in range(-(-nbytes // PIECE_BYTES)):
            wait_until(lambda: left.leader is not None and left.leader.parker is not None, 5, "the sender to sleep")
            right.step()
    sending.result()
    receive.wait(SOON)
    assert asleep == [True] * (len(asleep) - 1) + [nbytes == PIECE_BYTES]
    assert np.array_equal(out, array)


# ---------------------------------------------------------------------- giving up


def test_a_sender_that_gives_up_in_the_middle_is_never_seen(pair: Pair) -> None:
    """The sender overwrites its buffer at once; what was copied so far and after is worth nothing."""
    array, out = filled(pair.left, LARGE), blank(LARGE)
    receive = pair.back.irecv(out, tag=1)
    with Stepper(pair) as right:
        send = pair.there.isend(array, tag=1)
        right.read()
        right.step()
        assert right.copied() == PIECE_BYTES
        assert send.cancel()
        array[:] = 0
        while right.copying:
            right.step()
        assert not receive.finished, "torn bytes were delivered"
    with pytest.raises(CancelledError):
        send.wait()
    array[:] = pattern(LARGE, 5)
    pair.there.send(array, tag=1, timeout=SOON)
    assert receive.result(SOON).nbytes == LARGE
    assert np.array_equal(out, pattern(LARGE, 5))
    check_traffic(pair)


def test_a_sender_whose_time_is_up_in_the_middle(pair: Pair) -> None:
    array, out = filled(pair.left, LARGE), blank(LARGE)
    receive = pair.back.irecv(out, tag=1)
    with Stepper(pair) as right:
        send = pair.there.isend(array, tag=1, timeout=BRIEFLY)
        right.read()
        right.step()
        with pytest.raises(DeadlineError):
            send.wait()
        array[:] = 0
        right.read()  # WITHDRAW comes while it copies
        assert not right.copying
        assert not receive.finished
    pair.there.send(pattern(10), tag=1, timeout=SOON)
    assert receive.result(SOON).nbytes == 10
    check_traffic(pair)


def test_a_sender_that_gives_up_before_the_receive(pair: Pair) -> None:
    array = filled(pair.left, LARGE)
    send = pair.there.isend(array, tag=1)
    pair.back.probe(tag=1, timeout=SOON)
    assert send.cancel()
    wait_until(lambda: pair.back.iprobe(tag=1) is None, 5, "the announcement to go")
    wait_until(lambda: free_cells(pair.there) == CELLS, 5, "the cell to come back")
    check_traffic(pair)


def test_a_sender_that_gives_up_when_all_is_copied_is_too_late(pair: Pair) -> None:
    """As over any connection: the last word had not come back yet."""
    array, out = filled(pair.left, LARGE), blank(LARGE)
    receive = pair.back.irecv(out, tag=1)
    left = pair.left.hub.engine
    with Stepper(pair) as right:
        send = pair.there.isend(array, tag=1)
        left.acquire()  # the left side does not read the answer
        try:
            right.read()
            while right.copying:
                right.step()
            assert receive.finished
            send._give_up(CancelledError("too late"))  # cancel(), with the lock held
        finally:
            left.release()
    assert receive.result(SOON).nbytes == LARGE
    assert np.array_equal(out, array)
    check_traffic(pair)


def test_a_receiver_that_gives_up_in_the_middle(pair: Pair) -> None:
    array, out = filled(pair.left, LARGE), blank(LARGE)
    receive = pair.back.irecv(out, tag=1)
    with Stepper(pair) as right:
        send = pair.there.isend(array, tag=1)
        right.read()
        right.step()
        receive._give_up(CancelledError("cancelled"))  # cancel(), with the lock held
        before = out.copy()
        while right.copying:
            right.step()
        assert np.array_equal(out, before), "the buffer was touched afterwards"
    send.wait(SOON)
    with pytest.raises(CancelledError):
        receive.wait()
    check_traffic(pair)


def test_both_give_up_in_the_middle(pair: Pair) -> None:
    receive = pair.back.irecv(blank(LARGE), tag=1)
    with Stepper(pair) as right:
        send = pair.there.isend(filled(pair.left, LARGE), tag=1)
        right.read()
        right.step()
        send.cancel()
        receive._give_up(CancelledError("cancelled"))  # cancel(), with the lock held
    check_traffic(pair)


def test_a_receiver_that_gives_up_before_the_message(pair: Pair) -> None:
    receive = pair.back.irecv(blank(LARGE), tag=1)
    receive.cancel()
    send = pair.there.isend(filled(pair.left, LARGE), tag=1)
    out = blank(LARGE)
    pair.back.recv(out, tag=1, timeout=SOON)
    send.wait(SOON)
    assert np.array_equal(out, pattern(LARGE))


def test_a_cell_that_is_used_again_does_not_vouch_for_the_old_message(pair: Pair) -> None:
    """64 messages later it is the same cell, and the receiver still copies the first."""
    array, out = filled(pair.left, LARGE), blank(LARGE)
    receive = pair.back.irecv(out, tag=1)
    cells = polled(pair.there).cells
    with Stepper(pair) as right:
        before = cells.tolist()
        send = pair.there.isend(array, tag=1)
        right.read()
        right.step()
        send.cancel()
        changed = [cell for cell in range(CELLS) if cells[cell] != before[cell]]
        assert len(changed) == 1
        assert changed[0] not in list(router_of(pair.there).outbound.cells._free), (  # type: ignore[union-attr]
            "free while the other side may still look at it"
        )
    assert not receive.done()
    receive.cancel()
    check_traffic(pair)


# ---------------------------------------------------------------------- the end of a side in the middle

ENDS: dict[str, Callable[[Endpoint], None]] = {
    "abort": lambda endpoint: endpoint.abort(),
    "abort with a reason": lambda endpoint: endpoint.abort("it raised ValueError"),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("pieces", [0, 1, 2])
def test_a_sender_that_ends_in_the_middle(
    pair: Pair, end: Callable[[Endpoint], None], pieces: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever it ends: the receive fails at once, and does not wait for its deadline."""
    array, out = filled(pair.left, LARGE), blank(LARGE)
    receive = pair.back.irecv(out, tag=1)
    with caplog.at_level(logging.ERROR, "rankmesh"):
        with Stepper(pair) as right:
            pair.there.isend(array, tag=1)
            right.read()
            for _ in range(pieces):
                right.step()
            end(pair.left)
            right.step()
        began = monotonic()
        with pytest.raises(PeerLost):
            receive.wait(SOON)
    assert monotonic() - began < scaled(2)
    assert caplog.records == []


def test_two_copies_of_a_sender_that_ends(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """The first that finds it out takes the other with it."""
    receives = [pair.back.irecv(blank(PIECE_BYTES), tag=tag) for tag in range(3)]
    with caplog.at_level(logging.ERROR, "rankmesh"):
        with Stepper(pair) as right:
            for tag in range(3):
                pair.there.isend(filled(pair.left, PIECE_BYTES, tag), tag=tag)
            while len(right.router.inbound.incoming._copies) < 3:
                right.read()
            pair.left.abort()
            right.step()
        for receive in receives:
            with pytest.raises(PeerLost):
                receive.wait(SOON)
    assert caplog.records == []


def test_a_message_that_was_copied_whole_is_delivered_although_its_sender_is_killed(pair: Pair) -> None:
    """It took nothing back: what was copied is what was sent."""
    array, out = filled(pair.left, LARGE), blank(LARGE)
    receive = pair.back.irecv(out, tag=1)
    with Stepper(pair) as right:
        pair.there.isend(array, tag=1)
        right.read()
        right.step()
        link: Any = router_of(pair.back).link
        link._hung_up = True  # as a bell to a process that is gone shows it
        while right.copying:
            right.step()
    assert receive.result(SOON).nbytes == LARGE
    assert np.array_equal(out, array)


def test_a_receiver_that_ends_in_the_middle(pair: Pair) -> None:
    receive = pair.back.irecv(blank(LARGE), tag=1)
    with Stepper(pair) as right:
        send = pair.there.isend(filled(pair.left, LARGE), tag=1)
        right.read()
        right.step()
        right.router.lose("the test ends it")
    with pytest.raises(PeerLost, match="connection was closed"):
        send.wait(SOON)
    with pytest.raises(PeerLost, match="the test ends it"):
        receive.wait(SOON)


def test_closing_waits_until_the_message_was_copied(pair: Pair) -> None:
    array, out = filled(pair.left, 4 * LARGE), blank(4 * LARGE)
    receive = pair.back.irecv(out, tag=1)
    pair.there.isend(array, tag=1)
    pair.left.close()
    array[:] = 0
    assert receive.result(SOON).nbytes == 4 * LARGE
    assert np.array_equal(out, pattern(4 * LARGE))


# ---------------------------------------------------------------------- segments come and go


def test_peers_let_go_of_segments_that_are_no_more(pair: Pair) -> None:
    arrays = [filled(pair.left, 40 * MIB, seed) for seed in range(3)]
    out = np.empty(40 * MIB, np.uint8)
    for array in arrays:
        receive = pair.back.irecv(out, tag=1)
        pair.there.send(array, tag=1, timeout=SOON)
        receive.wait(SOON)
    assert len(polled(pair.back).shared) == 3
    del arrays, array
    gc.collect()
    extra = pair.left.empty(MIB, np.uint8)
    wait_until(lambda: len(polled(pair.back).shared) == 1, 5, "the other side to let go")
    extra[:] = pattern(MIB, 9)
    receive = pair.back.irecv(out, tag=1)
    pair.there.send(extra, tag=1, timeout=SOON)
    receive.wait(SOON)
    assert np.array_equal(out[:MIB], extra)


def test_memory_of_a_message_under_way_is_not_given_to_others(pair: Pair) -> None:
    send = pair.there.isend(filled(pair.left, LARGE), tag=1)
    gc.collect()
    others = [pair.left.empty(LARGE, np.uint8) for _ in range(4)]
    for other in others:
        other[:] = 0
    out = blank(LARGE)
    pair.back.recv(out, tag=1, timeout=SOON)
    send.wait(SOON)
    assert np.array_equal(out, pattern(LARGE))


def test_a_segment_that_cannot_be_shared_now(
    pair: Pair, data_frames: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    array, out = filled(pair.left, LARGE), blank(LARGE)
    with monkeypatch.context() as patch:
        patch.setattr(type(polled(pair.there)), "share", lambda *_: False)
        receive = pair.back.irecv(out, tag=1)
        pair.there.send(array, tag=1, timeout=SOON)
        receive.wait(SOON)
    assert np.array_equal(out, array)
    assert sum(data_frames) == LARGE
    data_frames.clear()
    receive = pair.back.irecv(out, tag=1)
    pair.there.send(array, tag=1, timeout=SOON)
    receive.wait(SOON)
    assert data_frames == []


# ---------------------------------------------------------------------- forged references


def forge(pair: Pair, flags: int, body: bytes, nbytes: int = LARGE, ident: int = 1000) -> None:
    """The left side announces what it should not."""
    outbound = router_of(pair.there).outbound
    header = pack(Kind.ANNOUNCE, flags, 0, 1, ident, len(body), nbytes)
    with pair.left.hub.engine:
        outbound._queue.push(Lane.MESSAGE, Frame([header + body], len(header + body)))
        outbound.flush()


S, TOP = int(Flag.SHARED), (1 << 64) - 1
FORGED: dict[str, tuple[int, bytes, str]] = {
    "beyond the end": (S, REFERENCE.pack(1, SEGMENT_BYTES - LARGE + 1, 0, 0), "a reference to"),
    "far beyond the end": (S, REFERENCE.pack(1, TOP, 0, 0), "a reference to"),
    "no such cell": (S, REFERENCE.pack(1, 0, CELLS, 0), "a reference to"),
    "a huge cell": (S, REFERENCE.pack(1, 0, TOP, 0), "a reference to"),
    "too short": (S, REFERENCE.pack(1, 0, 0, 0)[:31], "a reference of 31 bytes"),
    "none": (S, b"", "a reference of 0 bytes"),
    "too long": (S, bytes(33), "exceeds the limit"),
    "not said to be one": (0, REFERENCE.pack(1, 0, 0, 0), "not shared"),
    "of a request": (S | Flag.REQUEST, REFERENCE.pack(1, 0, 0, 0), "not shared"),
}


@pytest.mark.parametrize("flags, body, why", FORGED.values(), ids=FORGED)
def test_a_forged_reference_ends_that_connection_only(
    pair: Pair, flags: int, body: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    receive = pair.back.irecv(blank(LARGE), tag=1)
    pair.there.send(filled(pair.left, LARGE), tag=1, timeout=SOON)
    receive.wait(SOON)
    with Endpoint("shm://", name="third") as third:
        there = third.connect(pair.right.address, timeout=SOON)
        back = pair.right.accept(timeout=SOON)
        out = blank(LARGE)
        receive = pair.back.irecv(out, tag=1)
        with caplog.at_level(logging.WARNING, "rankmesh"):
            forge(pair, flags, body)
            began = monotonic()
            with pytest.raises(PeerLost, match="broke the protocol") as caught:
                receive.wait(SOON)
        assert why in caught.value.reason
        assert monotonic() - began < scaled(2), "it waited for its deadline"
        assert all(record.levelno == logging.WARNING for record in caplog.records)
        assert is_blank(out)
        check_traffic(Pair(third, pair.right, there, back))


def test_a_reference_to_an_unknown_segment_is_answered_by_asking_for_the_bytes(pair: Pair) -> None:
    receive = pair.back.irecv(blank(LARGE), tag=1)
    forge(pair, S, REFERENCE.pack(99, 0, 0, 0))
    with pytest.raises(PeerLost):  # the forger does not know the transfer that it is asked for
        receive.wait(SOON)
    assert "a grant for transfer 1000" in router_of(pair.there).gone


def test_a_reference_where_nothing_is_shared(tcp: Medium) -> None:
    with open_pair(tcp) as pair:
        receive = pair.back.irecv(blank(LARGE), tag=1)
        forge(pair, S, REFERENCE.pack(1, 0, 0, 0))
        with pytest.raises(PeerLost, match="memory that is not shared"):
            receive.wait(SOON)


def frame(pair: Pair, kind: Kind, ident: int, body: bytes = b"", extra: int = 0) -> None:
    outbound = router_of(pair.there).outbound
    header = pack(kind, ident=ident, nbytes=len(body), extra=extra)
    outbound._queue.push(Lane.MESSAGE, Frame([header + body], len(header + body)))
    outbound.flush()


def test_data_for_what_is_copied_is_against_the_protocol(pair: Pair) -> None:
    receive = pair.back.irecv(blank(LARGE), tag=1)
    with Stepper(pair) as right:
        pair.there.isend(filled(pair.left, LARGE), tag=1)
        right.read()
        right.step()
        (ident,) = right.router.inbound.incoming._copies
        with pair.left.hub.engine:
            frame(pair, Kind.DATA, ident, b"forged", PIECE_BYTES)
        right.read()
    with pytest.raises(PeerLost, match="not granted"):
        receive.wait(SOON)


def test_an_abort_of_what_is_copied_ends_the_copy(pair: Pair) -> None:
    out = blank(LARGE)
    receive = pair.back.irecv(out, tag=1)
    with Stepper(pair) as right:
        pair.there.isend(filled(pair.left, LARGE), tag=1)
        right.read()
        right.step()
        (ident,) = right.router.inbound.incoming._copies
        with pair.left.hub.engine:
            frame(pair, Kind.ABORT, ident)
        right.read()
        assert not right.copying
        before = out.copy()
        right.step()
    with pytest.raises(TransferAborted):
        receive.wait(SOON)
    assert np.array_equal(out, before)
    pair.left.abort()  # its send waits for an answer

"""The hot paths over rings, and that nobody sleeps over a message: waiters, the background thread, many threads."""

from __future__ import annotations

import logging
import random
import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from time import monotonic
from typing import Any

import numpy as np
import pytest

from peers import PATIENT, SOON, Call, Medium, Pair, blank, open_pair, pattern, router_of
from rankmesh import Config, Endpoint, Mesh, PeerLost, TruncationError
from rankmesh.config import KIB, MIB
from rankmesh.endpoint.direct import STREAK, RingPath, SocketPath
from rankmesh.transport import shm
from rankmesh.transport.ring import FREED, HEAD, RING_BYTES, TAIL
from rankmesh.wire.messages import Lost
from ranks import run_ranks
from timing import scaled, wait_until

pytestmark = pytest.mark.usefixtures("nursery")

SHM = Medium("shm://", Config())
EAGER = SHM.config.eager_bytes
LATE = scaled(5)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with open_pair(SHM) as both:
        yield both


@pytest.fixture(params=[True, False], ids=["ordered", "unordered"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Over rings that are polled, and over such that must ring for every message."""
    monkeypatch.setattr(shm, "ORDERED", request.param)
    with open_pair(SHM, **PATIENT) as both:
        path = router_of(both.there).inbound.direct
        assert isinstance(path, RingPath if request.param else SocketPath)
        yield both


def ring(pair: Pair) -> Any:
    """The reading end of the right side."""
    link: Any = router_of(pair.back).link
    return link.reader


# ---------------------------------------------------------------------- one message


@pytest.mark.parametrize("nbytes", [0, 1, 8, 63, 64, 1000, EAGER - 1, EAGER, EAGER + 1])
@pytest.mark.parametrize("verb", ["recv", "irecv", "late"])
def test_messages_of_any_size(either: Pair, nbytes: int, verb: str) -> None:
    out = blank(nbytes)
    receive = either.back.irecv(out, tag=3) if verb == "irecv" else None
    receiving = Call(either.back.recv, out, tag=3, timeout=LATE) if verb == "recv" else None
    send = either.there.isend(pattern(nbytes), tag=3)
    if receive is not None:
        status = receive.result(LATE)
    elif receiving is not None:
        status = receiving.result()
    else:
        status = either.back.recv(out, tag=3, timeout=LATE)
    send.wait(LATE)
    assert (status.source, status.tag, status.nbytes) == (either.back, 3, nbytes)
    assert np.array_equal(out, pattern(nbytes))


def test_every_offset_of_the_ring(either: Pair) -> None:
    """Sizes that are no multiple of anything, many times round; now and then the reader is behind."""
    rng = random.Random(11)
    sizes = [rng.choice([rng.randrange(200), rng.randrange(20_000)]) for _ in range(1500)]
    assert sum(sizes) > 20 * RING_BYTES
    out = blank(20_000)
    sent = 0
    for at, nbytes in enumerate(sizes):
        ahead = rng.choice([1, 1, 1, 8])
        while sent < min(at + ahead, len(sizes)):
            either.there.send(pattern(sizes[sent], sent), tag=1, timeout=LATE)
            sent += 1
        assert either.back.recv(out, tag=1, timeout=LATE).nbytes == nbytes
        assert zlib.crc32(out[:nbytes].data) == zlib.crc32(pattern(nbytes, at).data), f"message {at}"


def test_a_timer_that_is_due_interrupts_who_reads_on_and_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever receives for long shows life meanwhile."""
    reads: list[bool] = []

    def read_nothing(_: RingPath) -> bool:
        reads.append(True)
        return True

    with open_pair(SHM, **PATIENT) as pair:
        engine, path = pair.right.hub.engine, router_of(pair.back).inbound.direct
        assert isinstance(path, RingPath)
        receive = pair.back.irecv(bytearray(8), tag=1)
        with engine, monkeypatch.context() as patch:
            pair.there.send(b"12345678", tag=1)  # it stays where it is: there is always more to read
            patch.setattr(RingPath, "read_one", read_nothing)
            path.attend(receive)
            assert len(reads) == STREAK
            engine.timers.add(0.0, lambda: None)
            path.attend(receive)
            assert len(reads) == STREAK + 1
        receive.wait(LATE)


def test_what_does_not_fit_takes_the_general_way(either: Pair) -> None:
    """A larger buffer, a smaller one, another tag, an object, a receive from anyone: the stream stays in step."""
    there, back = either.there, either.back
    for number in range(20):
        there.send(b"12345678", tag=1, timeout=LATE)
        there.send(b"12345678", tag=2, timeout=LATE)
        there.send_object({"number": number}, tag=3, timeout=LATE)
        there.send(b"12345678", tag=4, timeout=LATE)
        there.send(b"12345678", tag=5, timeout=LATE)
        out = bytearray(16)
        with pytest.raises(TruncationError):
            back.recv(bytearray(4), tag=4, timeout=LATE)
        assert back.recv(out, tag=2, timeout=LATE).nbytes == 8
        assert back.recv_object(tag=3, timeout=LATE) == {"number": number}
        assert either.right.recv(out, tag=5, timeout=LATE).nbytes == 8
        assert back.recv(out, tag=1, timeout=LATE).nbytes == 8


def test_counters_are_exact(pair: Pair) -> None:
    for number in range(100):
        receive = pair.back.irecv(blank(number), tag=1) if number % 2 else None
        pair.there.send(pattern(number), tag=1)
        if receive is not None:
            receive.wait(SOON)
        else:
            pair.back.recv(blank(number), tag=1, timeout=SOON)
    for _ in range(21):  # which is no multiple of what is accounted for at once
        pair.there.send(pattern(8), tag=1)
        pair.back.recv(blank(8), tag=1, timeout=SOON)
    sent, received = pair.there.stats(), pair.back.stats()
    assert sent["frames_sent"] == received["frames_received"] == 121
    assert sent["bytes_sent"] == received["bytes_received"] == sum(range(100)) + 21 * 8


# ---------------------------------------------------------------------- nobody sleeps over a message


def test_the_background_thread_is_woken_although_a_waiter_answered_its_bells() -> None:
    """Found: a waiter took the lead from the background thread, answered the bell that was to wake it, and left. The
    thread slept on until its next timer, and what came meanwhile was not seen."""
    with open_pair(SHM, **PATIENT) as pair:
        for number in range(150):
            for here, there in ((pair.there, pair.back), (pair.back, pair.there)):
                out = blank(EAGER + 1)
                receive = there.irecv(out, tag=1)
                here.send(pattern(EAGER + 1, number), tag=1, timeout=LATE)  # the background thread over there grants it
                receive.wait(LATE)
                assert np.array_equal(out, pattern(EAGER + 1, number))


def test_the_background_thread_is_woken_although_a_probe_answered_its_bells() -> None:
    with open_pair(SHM, **PATIENT) as pair:
        for _ in range(50):
            done = threading.Event()
            assert pair.back.iprobe(tag=7) is None
            receive = pair.back.irecv(bytearray(1), tag=1)
            receive.add_done_callback(lambda _, done=done: done.set())  # type: ignore[misc]
            pair.there.send(b"x", tag=2)
            while pair.back.iprobe(tag=2) is None:
                pass
            pair.there.send(b"x", tag=1)
            assert done.wait(LATE)
            pair.back.recv(bytearray(1), tag=2, timeout=LATE)


def test_pauses_of_any_length(either: Pair) -> None:
    """So that the other side polls, is about to sleep, sleeps, or naps when the message comes."""
    rng = random.Random(7)
    out = bytearray(8)
    never = threading.Event()

    def echo() -> None:
        answer = bytearray(8)
        for _ in range(400):
            either.back.recv(answer, tag=1, timeout=LATE)
            either.back.send(answer, tag=1, timeout=LATE)

    echoing = Call(echo)
    for number in range(400):
        never.wait(rng.choice([0, 0, 1e-6, 50e-6, 200e-6, 1e-3, 3e-3]))  # the pause is the subject here
        either.there.sendrecv(number.to_bytes(8, "little"), out, tag=1, timeout=LATE)
        assert int.from_bytes(out, "little") == number
    echoing.result()


def _ping(mesh: Mesh, count: int) -> int:
    rng = random.Random(mesh.rank)
    never = threading.Event()
    other, out, data = 1 - mesh.rank, bytearray(16), bytearray(16)
    for number in range(count):
        if rng.random() < 0.05:
            never.wait(rng.choice([100e-6, 2e-3, 10e-3]))
        data[:] = number.to_bytes(16, "little")
        if mesh.rank == 0:
            mesh.send(data, to=other, tag=1, timeout=LATE)
        mesh.recv(out, source=other, tag=1, timeout=LATE)
        assert out == data
        if mesh.rank == 1:
            mesh.send(data, to=other, tag=1, timeout=LATE)
    assert str(mesh.peers[other].transport) == "shm (same host)"
    return count


def test_ping_pong_of_two_processes() -> None:
    assert run_ranks(2, _ping, Config(**PATIENT), (1500,)) == [1500] * 2


def _hop(mesh: Mesh, rounds: int) -> int:
    """A token goes round all ranks, of which there are more than cores."""
    out = bytearray(8)
    for number in range(rounds):
        if mesh.rank == 0:
            mesh.send(number.to_bytes(8, "little"), to=1, tag=1, timeout=LATE)
        mesh.recv(out, source=(mesh.rank - 1) % mesh.size, tag=1, timeout=LATE)
        if mesh.rank:
            mesh.send(out, to=(mesh.rank + 1) % mesh.size, tag=1, timeout=LATE)
    return int.from_bytes(out, "little")


def test_more_ranks_than_cores() -> None:
    said = run_ranks(5, _hop, Config(**PATIENT), (200,))
    assert said == [199] * 5


# ---------------------------------------------------------------------- threads


def test_waiters_in_many_threads(either: Pair) -> None:
    """Each waits for its own tag, in both directions at once; small, large, and from the arena."""
    tags, rounds = 8, 12

    def serve(tag: int) -> None:
        rng = random.Random(tag)
        for at in range(rounds):
            nbytes = rng.choice([8, 5000, 200 * KIB, 2 * MIB])
            out = blank(nbytes)
            either.back.recv(out, tag=tag, timeout=SOON)
            assert zlib.crc32(out.data) == zlib.crc32(pattern(nbytes, 100 * tag + at).data)
            either.back.send(out[:16], tag=tag, timeout=SOON)

    def ask(tag: int) -> None:
        rng = random.Random(tag)
        for at in range(rounds):
            nbytes = rng.choice([8, 5000, 200 * KIB, 2 * MIB])
            data = either.left.empty(nbytes, np.uint8) if at % 2 else np.empty(nbytes, np.uint8)
            data[:] = pattern(nbytes, 100 * tag + at)
            out = blank(min(nbytes, 16))
            either.there.send(data, tag=tag, timeout=SOON)
            either.there.recv(out, tag=tag, timeout=SOON)
            assert np.array_equal(out, data[:16])
            data[:] = 0

    for call in [Call(work, tag) for tag in range(tags) for work in (serve, ask)]:
        call.result()
    # Found: the last waiter handed the lead to others that left too, and the background thread was never woken again.
    receive = either.back.irecv(bytearray(1), tag=100)
    either.there.send(b"x", tag=100, timeout=LATE)
    wait_until(lambda: receive.finished, 5, "the background thread to serve again")


def _storm(mesh: Mesh, threads: int, rounds: int, seed: int) -> int:
    other = 1 - mesh.rank

    def sizes(rank: int, tag: int) -> list[int]:
        rng = random.Random(f"{seed} {rank} {tag}")
        return [int((MIB + 1) ** rng.random()) - 1 for _ in range(rounds)]

    def send(tag: int) -> None:
        arena = mesh.empty(MIB, np.uint8)
        for at, nbytes in enumerate(sizes(mesh.rank, tag)):
            arena[:nbytes] = pattern(nbytes, 1000 * tag + at)
            mesh.send(arena[:nbytes], to=other, tag=tag, timeout=scaled(40))
            arena[:nbytes] = 0  # a completed send has let go of the buffer

    def receive(tag: int) -> None:
        out = np.zeros(MIB, np.uint8)
        for at, nbytes in enumerate(sizes(other, tag)):
            assert mesh.recv(out, source=other, tag=tag, timeout=scaled(40)).nbytes == nbytes
            assert zlib.crc32(out[:nbytes].data) == zlib.crc32(pattern(nbytes, 1000 * tag + at).data), (tag, at)

    for call in [Call(work, tag) for tag in range(threads // 2) for work in (send, receive)]:
        call.result(scaled(45))
    return threads


def test_64_threads_on_one_pair_of_processes() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    assert run_ranks(2, _storm, args=(64, 12, seed)) == [64] * 2


def _compute(mesh: Mesh) -> int:
    """Rank 0 computes in pure Python; what rank 1 sends and asks for is served meanwhile."""
    if mesh.rank == 1:
        array = mesh.empty(8 * MIB, np.uint8)
        array[:] = 5
        for _ in range(20):
            mesh.send(array, to=0, tag=1, timeout=scaled(20))
        mesh.send(b"done", to=0, tag=2)
        return 0
    outs = [np.zeros(8 * MIB, np.uint8) for _ in range(20)]
    receives = [mesh.irecv(out, source=1, tag=1) for out in outs]
    last = mesh.irecv(bytearray(4), source=1, tag=2)
    count, end = 0, monotonic() + scaled(20)
    while not last.finished and monotonic() < end:
        count += 1
    assert last.finished, "nothing was served while this thread computed"
    assert all(receive.finished for receive in receives)
    assert all(int(out[0]) == int(out[-1]) == 5 for out in outs)
    return count


def test_the_background_thread_serves_while_the_main_thread_computes() -> None:
    assert run_ranks(2, _compute)[0] > 0


# ---------------------------------------------------------------------- connections that go


def test_a_receive_posted_on_a_connection_that_was_let_go_is_served_by_the_next() -> None:
    """Found: the path to look at was that of the old connection, whose memory was gone."""
    with open_pair(Medium("tcp://127.0.0.1:0", Config())) as pair:
        out = bytearray(5)
        receive = pair.there.irecv(out, tag=1)
        direct = router_of(pair.there).inbound.direct
        with pair.left.hub.engine, pair.right.hub.engine:  # as if each had asked, and the other agreed
            router_of(pair.there).rest()
            router_of(pair.back).rest()
        pair.back.send(b"x", tag=2, timeout=SOON)
        pair.there.recv(bytearray(1), tag=2, timeout=SOON)
        assert router_of(pair.there).inbound.direct not in (None, direct)
        engine = pair.left.hub.engine
        with engine:
            engine.spin.skip, engine.drives = 0, 1  # the next waiter looks at the connection it knows of first
        receiving = Call(receive.wait, SOON)
        wait_until(lambda: engine.leader is receive, 5, "the waiter to lead")
        pair.back.send(b"again", tag=1, timeout=SOON)
        receiving.result()
        assert out == b"again"
        assert router_of(pair.there).gone == ""


def test_a_link_that_another_one_ends_is_not_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    """Found: a peer told of the loss of another while both were on the list of rings to look at."""
    with ExitStack() as stack:
        right = stack.enter_context(Endpoint("shm://", name="right"))
        lefts = [stack.enter_context(Endpoint("shm://", name=f"left-{number}")) for number in range(3)]
        theres = [left.connect(right.address, timeout=SOON) for left in lefts]
        backs = [right.accept(timeout=SOON) for _ in lefts]
        waits = [back.irecv(bytearray(1), tag=1) for back in backs]
        with right.hub.engine:
            router = router_of(backs[-1])
            router_of(backs[0]).hub.on_control = lambda peer, message: router.lose("the first says so")
            with lefts[0].hub.engine:
                router_of(theres[0]).outbound.message(Lost(bytes(16), "gone"))
            right.hub.engine.looks.serve_ready()
            assert router.gone == "the first says so"
        with pytest.raises(PeerLost, match="the first says so"):
            waits[-1].wait(SOON)
        for there, wait in zip(theres[:-1], waits[:-1], strict=True):
            there.send(b"x", tag=1)
            wait.wait(SOON)


@pytest.mark.parametrize("word", [TAIL, HEAD])
def test_a_ring_that_the_other_side_spoilt_ends_that_conversation_only(pair: Pair, word: int) -> None:
    """Whichever thread happens to look must not suffer from it."""
    with Endpoint("shm://", name="third") as third:
        there = third.connect(pair.right.address, timeout=SOON)
        back = pair.right.accept(timeout=SOON)
        link: Any = router_of(pair.there).link
        receive = pair.back.irecv(bytearray(1), tag=1)
        with pair.left.hub.engine:  # which reads nothing: the ring to it is full
            sends = [pair.back.isend(bytes(EAGER), tag=1) for _ in range(2 * RING_BYTES // EAGER)]
            end = link.writer if word == TAIL else link.reader
            end.control[word] = (1 << 64) - 64
            if word == TAIL:
                link.ring()  # else whoever looks for room finds it
            for work in (receive, sends[-1]):
                with pytest.raises(PeerLost, match="corrupt"):
                    work.wait(SOON)
        for _ in range(10):
            there.send(b"x", tag=1, timeout=SOON)
            assert back.recv(bytearray(1), tag=1, timeout=SOON).nbytes == 1


def test_a_count_of_slots_that_the_other_side_spoilt_is_found_by_who_sends(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    link: Any = router_of(pair.there).link
    receive = pair.back.irecv(blank(1 << 20), tag=1)
    link.writer.control[FREED] = 77
    with pytest.raises(PeerLost, match="corrupt"):
        pair.there.send(pattern(1 << 20), tag=1, timeout=SOON)
    with pytest.raises(PeerLost):
        receive.wait(SOON)
    assert "defect" not in caplog.text, "it is the other side's"


def test_rubbish_beside_the_rings_ends_that_conversation_only(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with Endpoint("shm://", name="third") as third:
        there = third.connect(pair.right.address, timeout=SOON)
        back = pair.right.accept(timeout=SOON)
        receive = pair.back.irecv(bytearray(1), tag=1)
        link: Any = router_of(pair.there).link
        with caplog.at_level(logging.ERROR, "rankmesh"):
            link._sock.send(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
            with pytest.raises(PeerLost, match="corrupt"):
                receive.wait(SOON)
        assert caplog.records == []
        for _ in range(10):
            there.send(b"x", tag=1, timeout=SOON)
            assert back.recv(bytearray(1), tag=1, timeout=SOON).nbytes == 1


def test_the_ring_reader_is_told_in_time(pair: Pair) -> None:
    """A sender that is never told how far the reader is would stand still with a full ring."""
    out = bytearray(1000)
    for _ in range(5 * RING_BYTES // 1000):
        pair.there.send(bytes(1000), tag=1, timeout=SOON)
        pair.back.recv(out, tag=1, timeout=SOON)
    reader = ring(pair)
    assert reader.head - reader.control[HEAD] < RING_BYTES // 2

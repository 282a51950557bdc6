"""Many threads on one pair of endpoints at once, within a process and between two."""

from __future__ import annotations

import math
import random
import resource
import zlib
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

import numpy as np
import pytest

from peers import SOON, Bytes, Call, Medium, Pair, open_pair, pattern
from rankmesh import ClosedError, DeadlineError, Mesh, Peer, PeerLost
from rankmesh.config import KIB, MIB
from rankmesh.testing.world import run_world
from ranks import run_ranks
from timing import scaled, wait_until

pytestmark = pytest.mark.usefixtures("nursery")


@dataclass(frozen=True)
class Storm:
    """How much traffic. Half of each side's threads send, each on its own tag; a thread there receives it."""

    seed: int
    #: On each side.
    threads: int
    #: In all, half of them each way.
    messages: int
    largest: int

    @property
    def tags(self) -> int:
        return self.threads // 2

    def sizes(self, rank: int, tag: int) -> list[int]:
        """Log-uniform from 0 to `largest`, known to both sides by the seed."""
        rng = random.Random(f"{self.seed} {rank} {tag}")
        count = math.ceil(self.messages / 2 / self.tags)
        return [int((self.largest + 1) ** rng.random()) - 1 for _ in range(count)]


def stamp(buffer: Bytes, seed: int) -> None:
    """Mark start, middle and end so that a message is told from any other, cheaply."""
    mark = pattern(16, seed)
    for at in (0, len(buffer) // 2, max(len(buffer) - 16, 0)):
        piece = buffer[at : at + 16]
        piece[:] = mark[: len(piece)]


def check(buffer: Bytes, seed: int, what: str) -> None:
    expected = buffer.copy() if len(buffer) <= 64 * KIB else None
    if expected is None:
        mark = pattern(16, seed)
        assert np.array_equal(buffer[-16:], mark), f"{what}: its end is wrong"
        assert np.array_equal(buffer[:16], mark), f"{what}: its start is wrong"
        assert np.array_equal(buffer[len(buffer) // 2 :][:16], mark), f"{what}: its middle is wrong"
        return
    expected[:] = 0
    stamp(expected, seed)
    assert zlib.crc32(buffer.data) == zlib.crc32(expected.data), f"{what}: its content is wrong"


def storm(mesh: Mesh, plan: Storm) -> int:
    """Both ranks send and receive with `threads` threads; returns the growth of this process in bytes."""
    other = 1 - mesh.rank
    began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def send(tag: int) -> None:
        buffer = np.zeros(plan.largest, np.uint8)
        for at, nbytes in enumerate(plan.sizes(mesh.rank, tag)):
            view = buffer[:nbytes]
            stamp(view, plan.seed + 1000 * tag + at)
            mesh.send(view, to=other, tag=tag, timeout=scaled(60))
            view[:] = 0  # a completed send has let go of the buffer

    def receive(tag: int) -> None:
        buffer = np.zeros(plan.largest, np.uint8)
        for at, nbytes in enumerate(plan.sizes(other, tag)):
            status = mesh.recv(buffer, source=other, tag=tag, timeout=scaled(60))
            assert status == (other, tag, nbytes), f"message {at} of tag {tag}: {status} instead of {nbytes} bytes"
            check(buffer[:nbytes], plan.seed + 1000 * tag + at, f"message {at} of tag {tag} ({nbytes} bytes)")
            buffer[:nbytes] = 0

    calls = [Call(work, tag) for tag in range(plan.tags) for work in (send, receive)]
    for call in calls:
        call.result(scaled(170))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began) * KIB


def run_storm(plan: Storm, processes: bool = False) -> None:
    print(plan)
    buffers = plan.threads * plan.largest
    if processes:
        growth = run_ranks(2, storm, args=(plan,), timeout=175)
    else:
        growth = run_world(2, storm, "tcp://", args=(plan,), timeout=scaled(175))
    assert max(growth) < buffers + 64 * MIB, (
        f"{max(growth) // MIB} MiB beyond the start, {buffers // MIB} of them buffers"
    )


def test_16_threads_on_one_pair_of_processes() -> None:
    run_storm(Storm(random.randrange(2**32), threads=16, messages=2_000, largest=1 * MIB), processes=True)


@pytest.mark.timeout(scaled(180))
@pytest.mark.parametrize("messages, largest", [(4_000, 4 * MIB), pytest.param(20_000, 8 * MIB, marks=pytest.mark.soak)])
def test_64_threads_on_one_pair_of_processes(messages: int, largest: int) -> None:
    run_storm(Storm(random.randrange(2**32), threads=64, messages=messages, largest=largest), processes=True)


def test_threads_of_one_process() -> None:
    run_storm(Storm(random.randrange(2**32), threads=8, messages=400, largest=300 * KIB))


def test_many_threads_may_receive_with_one_tag(pair: Pair) -> None:
    """Each message goes to exactly one of them."""
    count, threads = 400, 8
    got: list[int] = []

    def receive() -> None:
        out = bytearray(4)
        for _ in range(count // threads):
            pair.back.recv(out, tag=1, timeout=SOON)
            got.append(int.from_bytes(out, "little"))

    calls = [Call(receive) for _ in range(threads)]
    for number in range(count):
        pair.there.send(number.to_bytes(4, "little"), tag=1, timeout=SOON)
    for call in calls:
        call.result()
    assert sorted(got) == list(range(count))


@pytest.mark.parametrize("way", ["close", "abort"])
def test_close_ends_waits_of_other_threads_at_once(medium: Medium, way: str) -> None:
    with open_pair(medium) as pair:
        waits = [
            Call(pair.there.recv, bytearray(1), tag=1, timeout=SOON),
            Call(pair.there.recv, bytearray(1), tag=2, timeout=SOON),
            Call(pair.left.recv, bytearray(1), tag=3, timeout=SOON),
            Call(pair.there.recv_object, tag=4, timeout=SOON),
            Call(pair.there.probe, tag=5, timeout=SOON),
            Call(pair.left.accept, timeout=SOON),
        ]
        if way == "abort":
            waits.append(Call(pair.there.send, bytes(MIB), tag=1, timeout=SOON))
        hub = pair.left.hub
        wait_until(lambda: len(hub.matcher.posted()) == 4 and hub.probes and pair.left._accepts, 5, "all to wait")
        began = monotonic()
        getattr(pair.left, way)()
        for wait in waits:
            with pytest.raises(ClosedError):
                wait.result()
        assert monotonic() - began < scaled(2), "closing took as long as a deadline"


def test_closing_while_others_send_and_receive(medium: Medium) -> None:
    """No thread hangs, and each learns that it is over, on either side."""
    for _ in range(10):
        with open_pair(medium, close_timeout=scaled(1)) as pair:

            def exchange(peer: Peer, nbytes: int, tag: int) -> None:
                out = bytearray(100_000)
                while True:
                    peer.sendrecv(bytes(nbytes), out, tag=tag, timeout=SOON)

            sides = ((pair.there, 100_000), (pair.back, 100))
            calls = [Call(exchange, peer, nbytes, tag) for tag in range(3) for peer, nbytes in sides]
            pair.there.send(b"x", tag=100)
            pair.back.recv(bytearray(1), tag=100, timeout=SOON)
            with suppress(DeadlineError):  # traffic does not stop by itself
                pair.left.close()
            for call in calls:
                with pytest.raises((ClosedError, PeerLost)):
                    call.result()


def test_one_thread_waits_while_others_come_and_go(pair: Pair) -> None:
    long = Call(pair.back.recv, bytearray(1), tag=9, timeout=SOON)

    def ping(tag: int) -> None:
        out = bytearray(8)
        for _ in range(50):
            pair.there.send(bytes(8), tag=tag, timeout=SOON)
            pair.back.recv(out, tag=tag, timeout=SOON)

    for _ in range(2):
        for call in [Call(ping, tag) for tag in range(4)]:
            call.result()
    assert long.running
    pair.there.send(b"x", tag=9)
    assert long.result().nbytes == 1

"""Ranks that die, stop, fall silent or leave, and what the others learn of it: who, during what, and how soon."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import SIGCONT, SIGKILL, SIGSTOP
from time import monotonic, sleep
from typing import Any

import pytest

from rankmesh.config import MIB, Config
from rankmesh.endpoint import ANY_SOURCE, Endpoint
from rankmesh.errors import DeadlineError, PeerLost
from rankmesh.testing.proxy import FaultProxy
from ranks import Mesh, Outcome, Ranks, Talk, attempt
from timing import scaled, wait_until

pytestmark = pytest.mark.usefixtures("nursery")

#: Silence counts after a second instead of five, so that these tests are short.
QUICK = Config(heartbeat_interval=scaled(0.2), heartbeat_timeout=scaled(1.0), timeout=scaled(30))
#: A death that the kernel tells of is known in less than this.
AT_ONCE = 1.0
BIG = 8 * MIB
VICTIM = 3

#: What a rank can wait for: the call, and the operation and tag that its error names. Where it may be one of two, the
#: victim may have died before the first.
Wait = Callable[[Mesh, int], Any]
WAITS: dict[str, tuple[Wait, str, int | None]] = {
    "recv": (lambda mesh, victim: mesh.recv(bytearray(8), source=victim, tag=7), "recv from", 7),
    "irecv": (lambda mesh, victim: mesh.irecv(bytearray(8), source=victim, tag=8).wait(), "recv from", 8),
    "recv_object": (lambda mesh, victim: mesh.recv_object(source=victim, tag=9), "recv_object from", 9),
    "probe": (lambda mesh, victim: mesh.probe(source=victim, tag=10), "probe of", 10),
    "send": (lambda mesh, victim: mesh.send(bytearray(BIG), to=victim, tag=11), "send to", 11),
    "sendrecv": (lambda mesh, victim: mesh.sendrecv(b"", bytearray(8), to=victim, tag=12), "send to|recv from", 12),
    "barrier": (lambda mesh, victim: mesh.barrier(), "barrier with", None),
}


def busy(seconds: float) -> int:
    """A computation in Python alone, which never waits for anything."""
    count, end = 0, monotonic() + seconds
    while monotonic() < end:
        count += 1
    return count


def wait_for_victim(mesh: Mesh, talk: Talk, victim: int, waits: dict[int, str], acquainted: int) -> None:
    """Each rank waits for the victim in its own way; `acquainted` has had a message of it before."""
    if mesh.rank == victim:
        mesh.send(b"we have met", to=acquainted, tag=1)
        talk.send("ready")
        talk.recv()
        return
    if mesh.rank == acquainted:
        mesh.recv(bytearray(16), source=victim, tag=1)
    talk.send("ready")
    talk.send(attempt(lambda: WAITS[waits[mesh.rank]][0](mesh, victim)))
    talk.recv()


def check_loss(outcome: Outcome, ranks: Ranks, victim: int, op: str, tag: int | None) -> PeerLost:
    """The error names the lost rank, its host and pid, the operation and the tag: as attributes and in its text."""
    error = outcome.error
    assert isinstance(error, PeerLost), outcome
    assert (error.rank, error.host, error.pid) == (victim, socket.gethostname(), ranks.pid(victim))
    assert error.op in op.split("|")
    assert error.tag == tag
    assert f"rank {victim} (host {socket.gethostname()}, pid {ranks.pid(victim)}) is lost" in str(error)
    assert f"during {error.op}" in str(error)
    assert tag is None or f"tag {tag}" in str(error)
    return error


@pytest.mark.parametrize(
    "victim, waits",
    [
        (VICTIM, {0: "recv", 1: "send", 2: "probe"}),
        (VICTIM, {2: "sendrecv", 0: "recv_object", 1: "irecv"}),
        (0, {1: "recv", 2: "send", 3: "recv_object"}),
    ],
)
def test_a_killed_rank_ends_every_wait_at_once(victim: int, waits: dict[int, str]) -> None:
    acquainted = next(iter(waits))
    with Ranks(4, wait_for_victim, args=(victim, waits, acquainted)) as ranks:
        assert ranks.hear_all() == ["ready"] * 4
        killed = ranks.signal(victim, SIGKILL)
        for rank, wait in waits.items():
            outcome = ranks.hear(rank)
            error = check_loss(outcome, ranks, victim, *WAITS[wait][1:])
            assert "closed" in error.reason or "refused" in error.reason
            assert outcome.when - killed < scaled(AT_ONCE)


def test_a_killed_rank_ends_a_barrier_on_every_rank() -> None:
    """Also on those that wait for a third rank, which cannot come because the dead one did not."""
    waits = dict.fromkeys(range(3), "barrier")
    with Ranks(4, wait_for_victim, args=(VICTIM, waits, 0)) as ranks:
        assert ranks.hear_all() == ["ready"] * 4
        killed = ranks.signal(VICTIM, SIGKILL)
        for rank in waits:
            outcome = ranks.hear(rank, timeout=40)
            check_loss(outcome, ranks, VICTIM, "barrier with", None)
            assert outcome.when - killed < scaled(AT_ONCE)


def wait_for_anyone(mesh: Mesh, talk: Talk) -> None:
    if mesh.rank == 0:
        talk.send("ready")
        talk.send(attempt(lambda: mesh.recv(bytearray(8), source=ANY_SOURCE, tag=5)))
    elif mesh.rank == 1:
        talk.send("ready")
        talk.recv()


def test_a_receive_from_anyone_fails_when_nobody_is_left() -> None:
    """Rank 2 leaves in order, which alone changes nothing; rank 1 is killed, and then no message can come."""
    with Ranks(3, wait_for_anyone) as ranks:
        assert ranks.hear_all((0, 1)) == ["ready"] * 2
        assert ranks.exit_code(2) == 0
        killed = ranks.signal(1, SIGKILL)
        outcome = ranks.hear(0)
        check_loss(outcome, ranks, 1, "recv from", 5)
        assert outcome.when - killed < scaled(AT_ONCE)
        assert "every other" in str(outcome.error)


def go_on_without_victim(mesh: Mesh, talk: Talk) -> None:
    talk.send("ready")
    talk.recv()
    if mesh.rank == VICTIM:
        return
    wait_until(lambda: "1 lost" in repr(mesh), 5, "the news of the loss")
    began = monotonic()
    outcome = attempt(lambda: mesh.send(b"anybody there?", to=VICTIM, tag=2))
    assert monotonic() - began < scaled(0.2)
    total = bytearray(8)
    mesh.sendrecv(bytes([mesh.rank] * 8), total, to=(mesh.rank + 1) % 3, source=(mesh.rank - 1) % 3, tag=3)
    talk.send((outcome, total[0]))
    talk.recv()


def test_ranks_without_a_connection_to_the_dead_one_are_told_and_go_on() -> None:
    """No rank but rank 0 ever spoke with the victim; each knows, fails at once, and reaches the other survivors."""
    with Ranks(4, go_on_without_victim) as ranks:
        assert ranks.hear_all() == ["ready"] * 4
        ranks.signal(VICTIM, SIGKILL)
        for rank in range(3):
            ranks.say(rank)
        for rank in range(3):
            outcome, from_left = ranks.hear(rank)
            check_loss(outcome, ranks, VICTIM, "send to", 2)
            assert from_left == (rank - 1) % 3


def stop_test(config: Config, victim: int = 2) -> None:
    waits = {0: "recv", 1: "send"}
    with Ranks(3, wait_for_victim, config, args=(victim, waits, 0)) as ranks:
        assert ranks.hear_all() == ["ready"] * 3
        stopped = ranks.signal(victim, SIGSTOP)
        for rank, wait in waits.items():
            outcome = ranks.hear(rank)
            error = check_loss(outcome, ranks, victim, *WAITS[wait][1:])
            assert "silent for" in error.reason
            waited = outcome.when - stopped
            assert config.heartbeat_timeout - config.heartbeat_interval < waited < config.heartbeat_timeout + scaled(1)


def test_a_stopped_rank_is_lost_after_the_heartbeat_timeout() -> None:
    stop_test(QUICK)


def compute(mesh: Mesh, talk: Talk, seconds: float) -> None:
    """Rank 1 computes while the others wait for it; rank 2 has nothing to do with it."""
    if mesh.rank == 1:
        mesh.send(b"busy now", to=0, tag=1)
        assert busy(seconds) > 0
        mesh.send(b"done!", to=0, tag=2)
    elif mesh.rank == 0:
        mesh.recv(bytearray(8), source=1, tag=1)
        status = mesh.recv(bytearray(8), source=1, tag=2, timeout=seconds + scaled(20))
        assert (status.source, status.nbytes) == (1, 5)
    mesh.barrier(timeout=seconds + scaled(20))
    talk.send(repr(mesh))
    talk.recv()


@contextmanager
def compute_test(config: Config, seconds: float) -> Iterator[None]:
    """While the block runs, and beyond."""
    with Ranks(3, compute, config, args=(seconds,)) as ranks:
        yield
        for rank in range(3):
            assert "all well" in ranks.hear(rank, timeout=seconds + 30)


def test_a_rank_that_computes_in_python_is_alive() -> None:
    with compute_test(QUICK, seconds=QUICK.heartbeat_timeout * 2):
        pass


@pytest.mark.timeout(scaled(120))
@pytest.mark.parametrize("timeouts", [1.3, pytest.param(4, marks=pytest.mark.soak)])
def test_by_default_a_stopped_rank_is_lost_and_one_that_computes_is_alive(timeouts: float) -> None:
    """One computes for so many times the silence that is tolerated, 20 seconds in the long form; meanwhile, in another
    world, one is stopped."""
    with compute_test(Config(), seconds=Config().heartbeat_timeout * timeouts):
        stop_test(Config())


def be_stopped(mesh: Mesh, talk: Talk) -> None:
    talk.send("ready")
    talk.send(attempt(lambda: mesh.recv(bytearray(8), source=1 - mesh.rank, tag=4)))
    talk.recv()


def receive_slowly(mesh: Mesh, talk: Talk) -> None:
    """Rank 1 takes 20 ms for each piece, which is two seconds for all of them, and lets nothing be heard meanwhile."""
    array = bytearray(100 * MIB)
    mesh.barrier()
    router: Any = mesh.peers[1 - mesh.rank].router
    if mesh.rank == 1:
        incoming = router.inbound.incoming
        landed = incoming._piece_landed

        def landed_slowly(*args: Any) -> None:
            landed(*args)
            sleep(0.02)  # the subject here

        incoming._piece_landed = landed_slowly
        router.outbound.ping = lambda: None
        talk.send(attempt(lambda: mesh.recv(array, source=0, tag=1)))
    else:
        talk.send(attempt(lambda: mesh.send(array, to=1, tag=1)))
    talk.recv()


def test_a_rank_that_takes_pieces_out_of_a_ring_is_alive() -> None:
    with Ranks(2, receive_slowly, QUICK) as ranks:
        assert [outcome.error for outcome in ranks.hear_all()] == [None, None]


def test_a_rank_that_was_stopped_for_too_long_learns_what_happened_to_it() -> None:
    with Ranks(2, be_stopped, QUICK) as ranks:
        assert ranks.hear_all() == ["ready"] * 2
        ranks.signal(1, SIGSTOP)
        assert "silent for" in ranks.hear(0).error.reason
        ranks.signal(1, SIGCONT)
        outcome = ranks.hear(1)
        error = check_loss(outcome, ranks, 0, "recv from", 4)
        pause = re.search(r"this process itself did not run for ([0-9.]+) s", str(error))
        assert pause is not None, error
        assert float(pause[1]) > QUICK.heartbeat_timeout / 2


def survive_a_pause(mesh: Mesh, talk: Talk) -> None:
    talk.send("ready")
    talk.recv()
    mesh.barrier()
    talk.send(repr(mesh))
    talk.recv()


def test_a_rank_that_was_stopped_briefly_blames_nobody() -> None:
    """After SIGCONT all clocks have jumped: it must read what came meanwhile before it judges anybody silent."""
    with Ranks(3, survive_a_pause, QUICK) as ranks:
        assert ranks.hear_all() == ["ready"] * 3
        stopped = ranks.signal(2, SIGSTOP)
        wait_until(lambda: monotonic() - stopped > QUICK.heartbeat_timeout * 0.7, 5, "the pause")
        ranks.signal(2, SIGCONT)
        for rank in range(3):
            ranks.say(rank)
        assert all("all well" in said for said in ranks.hear_all())


def leave(mesh: Mesh, talk: Talk) -> None:
    """Rank 1 leaves, having sent a small and a large message; rank 0 waits for more than it gets."""
    if mesh.rank == 1:
        large = mesh.isend(bytes([1]) * BIG, to=0, tag=2)
        mesh.send(b"the last", to=0, tag=1)
        large.wait()
        return
    out = bytearray(BIG)
    received = [mesh.recv(out, source=1, tag=2), attempt(lambda: mesh.recv(bytearray(8), source=1, tag=3))]
    received.append(mesh.recv(out, source=1, tag=1))
    talk.send((received, bytes(out[:9])))
    began = monotonic()
    talk.send(attempt(lambda: mesh.send(b"too late", to=1, tag=3)))
    assert monotonic() - began < scaled(AT_ONCE)


def test_a_rank_that_leaves_in_order_has_everything_it_sent_received() -> None:
    with Ranks(2, leave) as ranks:
        (large, lost, last), start = ranks.hear(0)
        assert large == (1, 2, BIG)
        assert last == (1, 1, 8)
        assert start == b"the last\x01"
        error = check_loss(lost, ranks, 1, "recv from", 3)
        assert "closed its endpoint" in error.reason
        assert isinstance(ranks.hear(0).error, PeerLost)
        assert ranks.exit_code(0) == ranks.exit_code(1) == 0


def fail_in_user_code(mesh: Mesh, talk: Talk) -> None:
    if mesh.rank == 1:
        mesh.recv(bytearray(8), source=0, tag=1)
        raise RuntimeError("a defect in the user's program")
    mesh.send(b"go", to=1, tag=1) if mesh.rank == 0 else None
    talk.send(attempt(lambda: mesh.recv(bytearray(8), source=1, tag=2)))


def test_an_exception_inside_the_block_aborts_and_the_others_are_told() -> None:
    with Ranks(3, fail_in_user_code) as ranks:
        for rank in (0, 2):
            check_loss(ranks.hear(rank), ranks, 1, "recv from", 2)
        assert ranks.exit_code(1) == 1
        assert ranks.exit_code(0) == ranks.exit_code(2) == 0


# --- silence of the network, within one process -----------------------------------------------------------------------


@pytest.fixture
def silenced() -> Iterator[tuple[Endpoint, Endpoint, FaultProxy]]:
    """Two endpoints that speak through a proxy, and would pass it by over shared memory."""
    config = QUICK.override(shm=False)
    with (
        Endpoint(name="server", config=config) as server,
        FaultProxy(server.address) as proxy,
        Endpoint(address=None, name="client", config=config) as client,
    ):
        yield server, client, proxy


def test_a_silent_network_is_noticed_by_both_sides(silenced: tuple[Endpoint, Endpoint, FaultProxy]) -> None:
    server, client, proxy = silenced
    there = client.connect(str(proxy.address))
    here = server.accept()
    works = {"client": there.irecv(bytearray(1), tag=1), "server": here.irecv(bytearray(1), tag=2)}
    proxy.freeze()
    frozen = monotonic()
    for name, tag, other in (("client", 1, there), ("server", 2, here)):
        with pytest.raises(PeerLost, match=r"silent for \d") as caught:
            works[name].wait()
        assert (caught.value.tag, caught.value.pid, caught.value.peer) == (tag, os.getpid(), str(other))
    assert monotonic() - frozen < QUICK.heartbeat_timeout + scaled(1)


def test_a_deadline_on_a_frozen_network_says_what_is_known(silenced: tuple[Endpoint, Endpoint, FaultProxy]) -> None:
    _, client, proxy = silenced
    peer = client.connect(str(proxy.address))
    proxy.freeze()
    with pytest.raises(DeadlineError, match="last heard") as caught:
        peer.recv(bytearray(1), tag=3, timeout=QUICK.heartbeat_timeout / 4)
    proxy.resume()
    assert (caught.value.tag, caught.value.op) == (3, "recv from")


def test_heartbeats_keep_a_quiet_connection_alive(
    silenced: tuple[Endpoint, Endpoint, FaultProxy], caplog: pytest.LogCaptureFixture
) -> None:
    server, client, proxy = silenced
    there = client.connect(str(proxy.address))
    here = server.accept()
    with caplog.at_level(logging.WARNING, "rankmesh"):
        threading.Event().wait(1.5 * QUICK.heartbeat_timeout)  # the time is the subject here: nothing is to happen
    assert caplog.records == []
    there.send(b"still there", tag=1)
    assert here.recv(bytearray(16), tag=1).nbytes == 11

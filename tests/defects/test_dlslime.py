"""Defects found in DLSlime, each with the test that would fail if rankmesh had it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from time import monotonic, process_time

import numpy as np
import pytest

from peers import FAULTY, SOON, Call, Medium, Pair, faulty, open_pair, pattern, router_of
from rankmesh import (
    Config,
    ConfigError,
    ConnectError,
    DeadlineError,
    Endpoint,
    OutOfBounds,
    PeerLost,
    RegionNotFound,
    TruncationError,
)
from rankmesh.endpoint.router import PeerRouter
from ranks import Mesh, Ranks, Talk
from timing import scaled, wait_until

TCP = Medium("tcp://127.0.0.1:0", Config(shm=False))


@pytest.fixture
def pair() -> Iterator[Pair]:
    with open_pair(TCP) as both:
        yield both


def test_dlslime_nobody_gets_in_without_the_token() -> None:
    """Anybody who reached a DLSlime endpoint could use it."""
    with Endpoint(name="server", token="right") as server:
        for token in ("wrong", ""):
            with (
                Endpoint(address=None, name="client", token=token) as client,
                pytest.raises(ConnectError, match=r"wrong or missing token.*Give both sides the same token"),
            ):
                client.connect(server.address, timeout=SOON)
        assert server.peers == []


@pytest.mark.parametrize("nbytes", [5, 1 << 20])
def test_dlslime_a_send_without_a_posted_receive_is_kept(pair: Pair, nbytes: int) -> None:
    """In DLSlime such a message was lost and put the stream out of step, while the sender saw success."""
    contents = [pattern(nbytes, seed) for seed in range(3)]
    sends = [pair.there.isend(content, tag=7) for content in contents]
    pair.there.send(b"later", tag=8)
    assert pair.back.recv(bytearray(8), tag=8).nbytes == 5
    for content in contents:
        out = np.empty(nbytes, np.uint8)
        assert pair.back.recv(out, tag=7).nbytes == nbytes
        assert (out == content).all()
    for send in sends:
        send.wait()


def test_dlslime_timeouts_count(pair: Pair) -> None:
    """DLSlime took a timeout and ignored it."""
    for call in (
        lambda: pair.there.recv(bytearray(1), tag=1, timeout=0.2),
        lambda: pair.there.send(bytes(1 << 20), tag=1, timeout=0.2),
        lambda: pair.there.probe(tag=1, timeout=0.2),
        lambda: pair.there.irecv(bytearray(1), tag=1).wait(timeout=0.2),
        lambda: pair.there.barrier(timeout=0.2),
    ):
        began = monotonic()
        with pytest.raises(DeadlineError):
            call()
        assert 0.19 < monotonic() - began < 0.2 + scaled(1)


def wait_quietly(mesh: Mesh, talk: Talk) -> None:
    """Rank 1 waits in recv, with a second thread that waits too, and tells what that cost."""
    if mesh.rank == 0:
        talk.recv()
        mesh.send(b"", to=1, tag=1)
        mesh.send(b"", to=1, tag=2)
        return
    other = threading.Thread(target=mesh.recv, args=(bytearray(1),), kwargs={"source": 0, "tag": 2})
    other.start()
    talk.send("waiting")
    began, cpu = monotonic(), process_time()
    mesh.recv(bytearray(1), source=0, tag=1)
    talk.send((monotonic() - began, process_time() - cpu))
    other.join()


def test_dlslime_waiting_burns_no_core(nursery: None) -> None:
    """DLSlime waited in a loop that kept a core busy."""
    with Ranks(2, wait_quietly) as ranks:
        assert ranks.hear(1) == "waiting"
        threading.Event().wait(1.5)  # the time is the subject: nothing happens in it
        ranks.say(0)
        elapsed, cpu = ranks.hear(1)
        assert elapsed > 1.4
        assert cpu < 0.1 * elapsed


def test_dlslime_a_broken_connection_wakes_a_receive() -> None:
    """In DLSlime a receive stayed pending when the connection under it broke; here also in the middle of a message."""
    with faulty() as faults, open_pair(FAULTY) as pair:
        idle = pair.back.irecv(bytearray(1), tag=1)
        moving = pair.back.irecv(bytearray(8 << 20), tag=2)
        sending = pair.there.isend(bytes(8 << 20), tag=2)
        for link in faults.links:
            link.cut(after_bytes=1 << 20)
        for work, tag in ((idle, 1), (moving, 2), (sending, 2)):
            with pytest.raises(PeerLost, match="connection") as caught:
                work.wait(timeout=SOON)
            assert caught.value.tag == tag


def test_dlslime_a_connection_is_reused() -> None:
    """DLSlime's pool never gave a connection out twice."""
    with faulty() as faults, open_pair(FAULTY) as pair:
        for n in range(200):
            pair.there.send(b"x" * n, tag=n)
            pair.back.send(b"y" * n, tag=n)
        for n in range(200):
            assert pair.back.recv(bytearray(200), tag=n).nbytes == n
            assert pair.there.recv(bytearray(200), tag=n).nbytes == n
        assert pair.left.connect(pair.right.address, timeout=SOON) is pair.there
        assert pair.right.connect(pair.left.address, timeout=SOON) is pair.back
        standing = [router_of(peer).link for peer in (pair.there, pair.back)]
        assert faults.links[:2] == sorted(standing, key=faults.links.index)  # type: ignore[arg-type]
        assert len(pair.left.peers) == len(pair.right.peers) == 1
        routers = [router for router in pair.left.hub.routers.values() if isinstance(router, PeerRouter)]
        assert len(routers) == 1


def test_dlslime_nobody_is_kept_out_by_an_address_that_does_not_answer() -> None:
    """A connection attempt of one's own that leads nowhere concerns nobody else."""
    with socket.create_server(("127.0.0.1", 0)) as silent, Endpoint(name="busy") as busy, Endpoint() as other:
        dialing = Call(busy.connect, f"tcp://127.0.0.1:{silent.getsockname()[1]}", timeout=scaled(1.5))
        accepted, _ = silent.accept()
        with accepted:
            began = monotonic()
            other.connect(busy.address).send(b"hello", tag=1)
            assert busy.recv(bytearray(8), tag=1).nbytes == 5
            assert monotonic() - began < scaled(1)
            assert dialing.running
        with pytest.raises(ConnectError):
            dialing.result()


@pytest.mark.parametrize("nbytes", [10, 1 << 20])
def test_dlslime_short_and_long_messages_are_reported(pair: Pair, nbytes: int) -> None:
    """DLSlime said nothing when a message was shorter or longer than the receive."""
    first = pair.there.isend(bytes(nbytes), tag=1)
    second = pair.there.isend(bytes(nbytes), tag=1)
    assert pair.back.recv(bytearray(nbytes + 5), tag=1).nbytes == nbytes
    with pytest.raises(TruncationError) as caught:
        pair.back.recv(bytearray(nbytes - 5), tag=1)
    assert (caught.value.nbytes, caught.value.capacity) == (nbytes, nbytes - 5)
    first.wait()
    second.wait()


def test_dlslime_bind_and_connect_failures_raise() -> None:
    """DLSlime logged them and went on."""
    with (
        Endpoint(name="first") as first,
        pytest.raises(ConfigError, match=rf"Cannot listen on {first.address}.*in use.*port 0"),
    ):
        Endpoint(first.address)
    with Endpoint(address=None, name="client") as client:
        began = monotonic()
        with pytest.raises(ConnectError, match=r"refused.*Check that the process runs there") as caught:
            client.connect(first.address, timeout=0.3)
        assert caught.value.address == first.address
        assert monotonic() - began < 0.3 + scaled(1)
        with pytest.raises(ConfigError, match="is not an address"):
            client.connect("nowhere")


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "[::]"])
def test_dlslime_a_wildcard_address_is_never_handed_out(wildcard: str) -> None:
    """DLSlime told others to connect to 0.0.0.0."""
    with pytest.raises(ConfigError, match=r"none that others can connect to.*advertise"):
        Endpoint(f"tcp://{wildcard}:0", token="secret")
    with Endpoint(f"tcp://{wildcard}:0", token="secret", advertise="tcp://127.0.0.1:0", name="wide") as wide:
        assert wide.info()["addresses"] == [wide.address]
        assert wide.address.startswith("tcp://127.0.0.1:")
        assert not wide.address.endswith(":0")
        with Endpoint(address=None, token="secret") as client:
            peer = client.connect(wide.info())
            assert [str(address) for address in peer.addresses] == [wide.address]
            with pytest.raises(ConfigError, match="to listen on, not to connect to"):
                client.connect(f"tcp://{wildcard}:7000", timeout=1)
    wait_until(lambda: not wide.peers, 5, "the end")


def test_dlslime_memory_is_reached_by_name_and_never_by_address(pair: Pair) -> None:
    """A peer of a DLSlime endpoint could read and write any address of the process."""
    memory, secret = pattern(64), pattern(64, 1)
    pair.right.memory.register("kv", memory)
    remote = pair.there.open("kv")
    address = secret.__array_interface__["data"][0] - memory.__array_interface__["data"][0]
    for offset in (address, secret.__array_interface__["data"][0], -8, 64):
        with pytest.raises(OutOfBounds):
            remote.read(bytearray(8), offset)
        with pytest.raises(OutOfBounds):
            remote.write(bytes(8), offset)
    with pytest.raises(RegionNotFound):
        pair.there.open(hex(address))
    assert (secret == pattern(64, 1)).all()


@pytest.mark.parametrize("nbytes", [8, 4 << 20])
def test_dlslime_a_completed_write_is_there(pair: Pair, nbytes: int) -> None:
    """DLSlime did not acknowledge writes: done meant that the bytes were on their way."""
    memory = np.zeros(nbytes, np.uint8)
    pair.right.memory.register("kv", memory)
    remote = pair.there.open("kv")
    for seed in range(5):
        remote.write(pattern(nbytes, seed))
        assert (memory == pattern(nbytes, seed)).all()


def test_dlslime_a_batch_of_any_size_is_whole_when_it_completes(pair: Pair) -> None:
    """In DLSlime a batch of more than 32 items completed early."""
    memory = pattern(1 << 20)
    pair.right.memory.register("kv", memory)
    remote = pair.there.open("kv")
    for count in (1, 32, 33, 64, 1000, 10_000):
        outs = [np.zeros(100, np.uint8) for _ in range(count)]
        remote.read_batch([(out, 100 * at) for at, out in enumerate(outs)])
        assert (np.concatenate(outs) == memory[: 100 * count]).all()


def test_dlslime_regions_registered_after_connecting_are_found(pair: Pair) -> None:
    """Regions were exchanged once, with the connection."""
    with pytest.raises(RegionNotFound):
        pair.there.open("late")
    pair.right.memory.register("late", bytearray(b"here"))
    out = bytearray(4)
    pair.there.open("late").read(out)
    assert out == b"here"


def test_dlslime_one_sided_timeouts_count_and_a_lost_owner_wakes_who_waits() -> None:
    """Timeouts were ignored, and a broken connection left operations pending."""
    with faulty() as transport, open_pair(FAULTY) as pair:
        pair.right.memory.register("kv", pattern(8 << 20))
        remote = pair.there.open("kv")
        for link in transport.links:
            link.stall()
        with pytest.raises(DeadlineError):
            remote.read(bytearray(64), timeout=0.1)
        work = remote.read(np.empty(8 << 20, np.uint8), async_op=True)
        for link in transport.links:
            link.cut()
        with pytest.raises(PeerLost):
            work.wait(SOON)

"""Peers of one host find shared memory by themselves, and go on without it, with a reason, where it cannot be had."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

from forked import Child, shm_names
from hosts import TwoHosts, finish, needs_namespaces
from peers import SOON, Call, Medium, Pair, blank, open_pair, pattern, router_of
from rankmesh import Config, ConnectError, Endpoint, TlsFiles
from rankmesh.config import KIB, MIB
from rankmesh.endpoint.shortcut import Carrier
from rankmesh.transport import segment
from rankmesh.transport.base import Link
from rankmesh.transport.place import Place
from rankmesh.transport.shm import ShmListener, ShmTransport
from rankmesh.wire.messages import Identity
from ranks import run_ranks
from timing import scaled, wait_until

pytestmark = pytest.mark.usefixtures("nursery")

SHARED = Carrier("shm", "same host")
TOKEN = "the token of this cluster"
TCP, TLS = "tcp://127.0.0.1:0", "tls://127.0.0.1:0"
OFF = "switched off by Config.shm"

# Python 3.12 warns of every fork() in a process with threads, and here that is what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


@contextmanager
def two(right: Config, left: Config, address: str = TCP, left_address: str | None = TCP) -> Iterator[Pair]:
    """Left connects to right, each with settings of its own."""
    with ExitStack() as stack:
        server = stack.enter_context(Endpoint(address, name="right", config=right))
        client = stack.enter_context(Endpoint(left_address, name="left", config=left))
        there = client.connect(server.address, timeout=SOON)
        yield Pair(client, server, there, server.accept(timeout=SOON))


def check_traffic(pair: Pair) -> None:
    for here, there in ((pair.there, pair.back), (pair.back, pair.there)):
        for nbytes in (10, 300 * KIB):
            out = blank(nbytes)
            receive = there.irecv(out, tag=5)
            here.send(pattern(nbytes, 3), tag=5, timeout=SOON)
            receive.wait(SOON)
            assert np.array_equal(out, pattern(nbytes, 3))


def check(pair: Pair, there: Carrier, back: Carrier) -> None:
    """What each side says carries the conversation, and that it does."""
    for peer, carrier in ((pair.there, there), (pair.back, back)):
        assert peer.transport == carrier
        stats = peer.stats()
        assert (stats["transport"], stats["reason"]) == carrier
    check_traffic(pair)


def with_tls(config: Config, certificates: TlsFiles) -> Config:
    return config.override(tls=certificates)


# ---------------------------------------------------------------------- found without a setting


@pytest.mark.parametrize("token", ["", TOKEN], ids=["no token", "a token"])
@pytest.mark.parametrize("left_address", [TCP, None], ids=["both listen", "one listens"])
def test_tcp_peers_move_to_shared_memory(token: str, left_address: str | None) -> None:
    config = Config(token=token)
    with two(config, config, left_address=left_address) as pair:
        check(pair, SHARED, SHARED)
        assert str(pair.there.transport) == "shm (same host)"


def test_tls_peers_with_a_token_move_to_shared_memory(certificates: TlsFiles) -> None:
    config = Config(token=TOKEN, tls=certificates)
    with two(config, config, TLS, TLS) as pair:
        check(pair, SHARED, SHARED)


def test_tls_peers_without_a_token_stay(certificates: TlsFiles) -> None:
    """Their certificates say who may connect, and shared memory has none."""
    config = Config(tls=certificates)
    why = "tls:// without a token: shared memory could not tell who may connect"
    with two(config, config, TLS, TLS) as pair:
        check(pair, Carrier("tls", f"no shared memory here: {why}"), Carrier("tls", f"no shared memory here: {why}"))
    with two(config, config, TLS, None) as pair:
        check(pair, Carrier("tls", f"no shared memory there: {why}"), Carrier("tls", f"no shared memory here: {why}"))


@pytest.mark.parametrize("address, carrier", [("inproc://", "inproc"), ("shm://", "shm")])
def test_what_was_asked_for_is_what_carries(address: str, carrier: str) -> None:
    with open_pair(Medium(address, Config())) as pair:
        check(pair, *[Carrier(carrier, "same host" if carrier == "shm" else "as addressed")] * 2)


def _carriers(mesh: Any) -> list[str]:
    mesh.barrier()
    out = bytearray(1)
    for other in range(mesh.size):
        if other != mesh.rank:
            mesh.sendrecv(b"x", out, to=other, source=other, tag=1)
    return [str(peer.transport) for peer in mesh.peers if peer.rank != mesh.rank]


def test_every_pair_of_processes() -> None:
    assert run_ranks(3, _carriers) == [["shm (same host)"] * 2] * 3


# ---------------------------------------------------------------------- switched off

ON, WITHOUT = Config(), Config(shm=False)


@pytest.mark.parametrize(
    "right, left, there, back",
    [
        (WITHOUT, WITHOUT, "here", "here"),
        (ON, WITHOUT, "here", "there"),
        (WITHOUT, ON, "there", "here"),
    ],
)
def test_either_side_can_do_without(right: Config, left: Config, there: str, back: str) -> None:
    reasons = {where: Carrier("tcp", f"no shared memory {where}: {OFF}") for where in ("here", "there")}
    with two(right, left) as pair:
        check(pair, reasons[there], reasons[back])


@pytest.mark.parametrize("value, carrier", [("0", "tcp"), ("1", "shm"), ("false", "tcp")])
def test_the_environment_switches_it_off(value: str, carrier: str) -> None:
    config = Config.from_env({"RANKMESH_SHM": value})
    with two(config, config) as pair:
        assert pair.there.stats()["transport"] == pair.back.stats()["transport"] == carrier


# ---------------------------------------------------------------------- other places


@pytest.mark.parametrize(
    "part, why",
    [
        ("boot", "another host"),
        ("network", "another network namespace, such as another container's"),
        ("user", r"another user (uid 4711 there, 0 here)"),
    ],
)
def test_peers_in_another_place(part: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they would say it; the real thing is below."""
    with ExitStack() as stack:
        right = stack.enter_context(Endpoint(TCP, name="right"))
        place = Place.here()
        elsewhere = place._replace(**{part: "4711"})
        monkeypatch.setattr(Place, "here", lambda: elsewhere)
        left = stack.enter_context(Endpoint(TCP, name="left"))
        there = left.connect(right.address, timeout=SOON)
        pair = Pair(left, right, there, right.accept(timeout=SOON))
        swapped = why.replace("4711 there, 0 here", "0 there, 4711 here").replace("0 there", f"{place.user} there")
        check(pair, Carrier("tcp", swapped), Carrier("tcp", why.replace("0 here", f"{place.user} here")))


def test_a_system_that_does_not_tell_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden() -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(Place, "here", hidden)
    why = "the system does not tell where this process is (No such file or directory)"
    with two(ON, ON) as pair:
        check(pair, *[Carrier("tcp", f"no shared memory here: {why}")] * 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user() -> None:
    with Endpoint(TCP, name="right") as right:
        address = right.address

        def child() -> None:
            os.setuid(65534)
            with Endpoint(TCP, name="left") as left:
                peer = left.connect(address, timeout=SOON)
                assert peer.transport == ("tcp", "another user (uid 0 there, 65534 here)")
                peer.send(pattern(MIB), tag=1, timeout=SOON)

        with Child(child):
            back = right.accept(timeout=SOON)
            out = blank(MIB)
            back.recv(out, tag=1, timeout=SOON)
            assert np.array_equal(out, pattern(MIB))
            assert back.transport == ("tcp", "another user (uid 65534 there, 0 here)")


PROGRAM = """
import sys, rankmesh as rm
rank, url = int(sys.argv[1]), sys.argv[2]
with rm.join(url, rank=rank, size=2) as mesh:
    out = bytearray(100_000)
    mesh.sendrecv(bytes([rank]) * 100_000, out, to=1 - rank, tag=1)
    assert out == bytes([1 - rank]) * 100_000
    mesh.barrier()
    print(mesh.peers[1 - rank].transport)
"""


@needs_namespaces
def test_another_network_namespace() -> None:
    """What two containers usually are to each other."""
    with TwoHosts() as both:
        url = f"tcp://{both.hosts[0].ipv4}:7500"
        programs = [
            host.start("-c", PROGRAM, str(rank), url, RANKMESH_TOKEN=TOKEN) for rank, host in enumerate(both.hosts)
        ]
        for said in finish(*programs):
            assert said.strip() == "tcp (another network namespace, such as another container's)"


# ---------------------------------------------------------------------- where it fails

Trouble = Callable[[pytest.MonkeyPatch], None]


def failing(target: object, name: str, number: int) -> Trouble:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return lambda patch: patch.setattr(target, name, fail)


FAILURES: dict[str, tuple[Trouble, str]] = {
    "no space": (failing(ShmTransport, "connect", errno.ENOSPC), "No space left on device"),
    "no descriptors": (failing(ShmTransport, "connect", errno.EMFILE), "Too many open files"),
    "no memory for it": (failing(os, "memfd_create", errno.ENOMEM), "Cannot allocate memory"),
    "not allowed to make it": (failing(os, "memfd_create", errno.EPERM), "Operation not permitted"),
    "no mapping for the other side": (
        failing(segment, "attach", errno.ENOMEM),
        "shm://{name} refused to share memory",
    ),
    "memory that is not the same": (
        lambda patch: patch.setattr(segment.Segment, "proof", lambda self: os.urandom(16)),
        "",
    ),
}


@pytest.mark.parametrize("trouble, why", FAILURES.values(), ids=FAILURES)
def test_shared_memory_that_fails_is_done_without(
    trouble: Trouble, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both sides know why, and the messages go by tcp."""
    trouble(monkeypatch)
    with two(ON, ON) as pair:
        for peer in (pair.there, pair.back):
            assert peer.transport is not None
            assert peer.transport.transport == "tcp"
            assert peer.transport.reason.startswith("shared memory failed (")
            assert why.partition("{")[0] in peer.transport.reason
            assert peer.stats()["reason"] == peer.transport.reason
        check_traffic(pair)


def test_a_listener_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(ShmTransport, "listen", errno.EACCES)(monkeypatch)
    with two(ON, ON) as pair:
        check(pair, *[Carrier("tcp", "no shared memory here: no shared memory to be had (Permission denied)")] * 2)


def test_a_shortcut_that_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for a handshake is up; the way back is still open."""
    monkeypatch.setattr(ShmListener, "accept", failing_accept)
    config = Config(handshake_timeout=scaled(0.5))
    with two(config, config) as pair:
        assert pair.there.stats()["transport"] == "tcp"
        assert "shared memory failed" in pair.there.stats()["reason"]
        check_traffic(pair)


def failing_accept(self: ShmListener) -> Link:
    raise BlockingIOError


def test_a_listener_that_is_gone_is_not_tried_forever() -> None:
    """Refused over the shortcut, then refused by the network: each failure is told as what it was."""
    with Endpoint(TCP, name="right") as right, Endpoint(TCP, name="left") as left:
        connector = right._connector
        with right.hub.engine:
            listener = next(door for door in connector._listeners if door.address.scheme == "shm")
            right.hub.engine.unwatch(listener.fileno())
            connector._listeners.remove(listener)
            listener.close()
        peer = left.connect(right.address, timeout=SOON)
        assert peer.transport == ("tcp", "shared memory failed (Connection refused)")


def test_a_refusal_over_the_shortcut_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory worked: who is not wanted there is not wanted by the network either, and does not ask again."""
    with Endpoint(TCP, name="right") as right, Endpoint(TCP, name="left") as left:
        asked: list[str] = []

        def object_to(identity: Identity) -> str:
            asked.append(identity.no_shm)
            return "no strangers here"

        monkeypatch.setattr(right._connector, "_objection", object_to)
        with pytest.raises(ConnectError, match="no strangers here"):
            left.connect(right.address, timeout=SOON)
        assert asked == [""]


# ---------------------------------------------------------------------- tokens


def test_a_wrong_token_is_refused_by_the_network_already() -> None:
    with (
        Endpoint(TCP, config=Config(token="one")) as right,
        Endpoint(TCP, config=Config(token="other")) as left,
        pytest.raises(ConnectError, match="token"),
    ):
        left.connect(right.address, timeout=SOON)


def test_a_wrong_token_is_refused_over_shared_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who learnt the name of the shortcut gets no further."""
    with Endpoint(TCP, name="right", config=Config(token=TOKEN)) as right:
        name = right._connector.shortcut.name.hex()
        for token in ("", "another"):
            with (
                Endpoint(None, name="left", config=Config(token=token)) as left,
                pytest.raises(ConnectError, match="token"),
            ):
                left.connect(f"shm://{name}", timeout=SOON)
        with Endpoint(None, name="left", config=Config(token=TOKEN)) as left:
            assert left.connect(f"shm://{name}", timeout=SOON).transport == SHARED


def test_no_offer_is_made_over_shared_memory_itself() -> None:
    with Endpoint("shm://", name="right") as right:
        assert right._connector.shortcut.name == b""


# ---------------------------------------------------------------------- at once, and again


def test_both_connect_at_once() -> None:
    for _ in range(10):
        with Endpoint(TCP, name="right") as right, Endpoint(TCP, name="left") as left:
            start = threading.Barrier(2)

            def meet(here: Endpoint, there: Endpoint, start: threading.Barrier = start) -> Any:
                start.wait(SOON)
                return here.connect(there.address, timeout=SOON)

            other = Call(meet, right, left)
            there = meet(left, right)
            back = other.result()
            check(Pair(left, right, there, back), SHARED, SHARED)
            assert len(left.hub.routers) == len(right.hub.routers) == 1


def test_many_connect_at_once() -> None:
    with Endpoint(TCP, name="right") as right, ExitStack() as stack:
        lefts = [stack.enter_context(Endpoint(TCP, name=f"left-{number}")) for number in range(10)]
        calls = [Call(left.connect, right.address, timeout=SOON) for left in lefts]
        assert {call.result().transport for call in calls} == {SHARED}


def test_a_connection_that_was_let_go_comes_back_over_shared_memory() -> None:
    idle: dict[str, Any] = {"idle_timeout": 0.1, "heartbeat_interval": 0.1, "heartbeat_timeout": 2.0}
    config = Config(**idle)
    with two(config, config) as pair:
        for here, there in ((pair.there, pair.back), (pair.back, pair.there)):
            wait_until(lambda: not pair.there.connected and not pair.back.connected, 10, "the connection to be let go")
            array = pair.left.empty(MIB, np.uint8)
            array[:] = pattern(MIB)
            out = blank(MIB)
            send = here.isend(array, tag=1)
            there.recv(out, tag=1, timeout=SOON)
            send.wait(SOON)
            assert np.array_equal(out, pattern(MIB))
            assert pair.there.transport == pair.back.transport == SHARED
            assert router_of(pair.there).gone == router_of(pair.back).gone == ""


def test_nobody_is_alarmed(caplog: pytest.LogCaptureFixture) -> None:
    """Leaving the network's connection for the shortcut is no refusal."""
    with caplog.at_level(logging.INFO, "rankmesh"), two(ON, ON) as pair:
        check_traffic(pair)
    assert caplog.records == []


# ---------------------------------------------------------------------- small /dev/shm


def test_nothing_is_ever_made_in_dev_shm() -> None:
    """A container's 64 MiB do not matter: all of it is anonymous memory."""
    before = shm_names()
    with two(ON, ON) as pair:
        array, out = pair.left.empty(64 * MIB, np.uint8), np.empty(64 * MIB, np.uint8)
        array[:] = 7
        for data in (array, np.full(64 * MIB, 8, np.uint8)):
            receive = pair.back.irecv(out, tag=1)
            pair.there.send(data, tag=1, timeout=SOON)
            receive.wait(SOON)
            assert out[0] == out[-1] == data[0]
            assert shm_names() == before
        assert pair.there.transport == SHARED

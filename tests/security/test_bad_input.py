"""Attacks on a live endpoint over real sockets. Each is refused with a reason in the log, within the handshake's
deadline, at a bounded cost; a genuine peer beside it notices nothing."""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import pytest

from attack import (
    CONFIG,
    ECHO,
    HANDSHAKE,
    TOKEN,
    Target,
    admitted,
    dial,
    identity,
    refused,
    shake,
    undisturbed,
    wait_for_end,
)
from initiator import receive
from rankmesh import codec
from rankmesh.config import MIB, Config
from rankmesh.endpoint import Endpoint
from rankmesh.endpoint.frames import MAX_ANNOUNCED
from rankmesh.errors import CodecError, ConfigError, ConnectError
from rankmesh.membership.store import SERVICE, Get, Set, StoreClient, StoreServer
from rankmesh.testing.world import run_world
from rankmesh.wire.handshake import MAGIC, Refused, Type
from rankmesh.wire.header import Flag, Kind, pack
from rankmesh.wire.messages import IdleAsk, encode
from timing import scaled, wait_until

#: What the target may grow by in one attack. The attacks here would cost it far more if anything were kept.
GROWTH = 32 * MIB
#: Each attack is made by this many connections at once.
CROWD = 20


@pytest.fixture(scope="module")
def target(nursery: None) -> Iterator[Target]:
    with Target() as made:
        yield made


# --- strangers --------------------------------------------------------------------------------------------------------


def prefix(kind: int, length: int, code: int = 0) -> bytes:
    return struct.pack("<4sBBH", MAGIC, kind, code, length)


def hello(lowest: int = 1, highest: int = 1) -> bytes:
    return prefix(Type.HELLO, 50) + struct.pack("<BB16s32s", lowest, highest, os.urandom(16), os.urandom(32))


def wrong_token(sock: socket.socket) -> None:
    with pytest.raises(Refused, match="wrong or missing token"):
        shake(sock, token="guessed")


def no_token(sock: socket.socket) -> None:
    with pytest.raises(Refused, match="wrong or missing token"):
        shake(sock, token="")


def slow_loris(sock: socket.socket) -> None:
    """A byte now and then, for ever."""
    never = threading.Event()
    with suppress(OSError):
        for byte in hello() * 100:
            sock.sendall(bytes([byte]))
            never.wait(HANDSHAKE / 20)


Attack = Callable[[socket.socket], object]
STRANGERS: dict[str, tuple[Attack, str]] = {
    "nothing": (lambda sock: None, "said nothing within"),
    "garbage": (lambda sock: sock.sendall(os.urandom(4000)), "does not speak rankmesh"),
    "another protocol": (lambda sock: sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"), "does not speak rankmesh"),
    "half a header": (lambda sock: sock.sendall(hello()[:5]), "said too little within"),
    "half a message": (lambda sock: sock.sendall(hello()[:30]), "said too little within"),
    "no proof": (lambda sock: sock.sendall(hello()), "said too little within"),
    "an oversize length": (lambda sock: sock.sendall(prefix(Type.HELLO, 65535)), "a HELLO message of 65535 bytes"),
    "an oversize proof": (
        lambda sock: sock.sendall(hello() + prefix(Type.AUTH, 65535)),
        "an AUTH message of 65535 bytes".replace("an ", "a "),
    ),
    "out of turn": (lambda sock: sock.sendall(prefix(Type.AUTH, 100)), "handshake message 3 out of turn"),
    "a wrong version": (lambda sock: sock.sendall(hello(9, 12)), "it speaks versions 9 to 12 of the protocol"),
    "a wrong token": (wrong_token, "the cluster token differs"),
    "no token": (no_token, "the cluster token differs"),
    "a slow loris": (slow_loris, "said too little within"),
    "hanging up": (lambda sock: sock.shutdown(socket.SHUT_WR), "closed the connection during the handshake"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_refused(target: Target, name: str) -> None:
    misbehave, reason = STRANGERS[name]
    target.forget()
    before = target.memory
    with undisturbed(target) as genuine, ExitStack() as stack:
        descriptors = target.descriptors
        began = monotonic()
        crowd = [stack.enter_context(closing(dial(target))) for _ in range(CROWD)]
        threads = [threading.Thread(target=misbehave, args=(sock,)) for sock in crowd]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(scaled(20))
        for sock in crowd:
            wait_for_end(sock)
        assert monotonic() - began < HANDSHAKE + scaled(3)
        target.wait_for_refusals(CROWD, reason)
        wait_until(lambda: target.descriptors == descriptors, 5, "the end of the attackers' descriptors")
        assert refused(target.look(), reason) == CROWD
        assert "from tcp://127.0.0.1" in target.log
        assert genuine.peer.connected
    assert target.memory - before < GROWTH


def test_a_replayed_proof_is_refused(target: Target) -> None:
    """What a genuine peer once said, byte for byte: the challenge is another one now."""

    class Recording:
        def __init__(self, sock: socket.socket) -> None:
            self.recv, self._sock, self.sent = sock.recv, sock, b""

        def sendall(self, data: bytes) -> None:
            self.sent += data
            self._sock.sendall(data)

    target.forget()
    with closing(dial(target)) as first:
        recording: Any = Recording(first)
        shake(recording)
    with undisturbed(target), closing(dial(target)) as second:
        second.sendall(recording.sent)
        assert b"wrong or missing token" in wait_for_end(second)
    target.wait_for_log("the cluster token differs")


def test_proofs_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hmac.compare_digest, and by nothing else: one that always says yes would let a wrong token in."""
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return True

    monkeypatch.setattr("rankmesh.wire.handshake.hmac.compare_digest", compare)
    config = Config(shm=False)  # one handshake, with no shortcut to compare
    with Endpoint(name="a", token="one", config=config) as a, Endpoint(name="b", token="another", config=config) as b:
        assert b.connect(a.address).name == "a"
    assert compared == [(32, 32)] * 2


# --- peers that know the token ----------------------------------------------------------------------------------------


def eager(nbytes: int, tag: int = 99) -> bytes:
    return pack(Kind.EAGER, tag=tag, nbytes=nbytes) + bytes(nbytes)


def announce(ident: int, nbytes: int = 1 << 20, flags: int = 0) -> bytes:
    return pack(Kind.ANNOUNCE, tag=99, ident=ident, extra=nbytes, flags=flags)


FLOOD = MAX_ANNOUNCED + 10
PEERS: dict[str, tuple[bytes, str]] = {
    "garbage": (b"\xff" * 4000, "frame version 255"),
    "an unknown kind": (pack(200), "unknown frame kind 200"),
    "an oversize frame": (pack(Kind.EAGER, nbytes=2**63), "EAGER frame of 9223372036854775808 bytes exceeds the limit"),
    "an oversize control message": (pack(Kind.CONTROL, nbytes=1 << 20), "CONTROL frame of 1048576 bytes exceeds"),
    "a malformed control message": (pack(Kind.CONTROL, nbytes=4) + b"\xc1" * 4, "control message cannot be read"),
    "an oversize announcement": (announce(1, 2**62), "over the limit of 1048576"),
    "an announcement made twice": (announce(7) + announce(7), "transfer 7 was announced twice"),
    "a flood of announcements": (b"".join(map(announce, range(1, FLOOD))), f"more than {MAX_ANNOUNCED} transfers"),
    "data never granted": (pack(Kind.DATA, ident=5, nbytes=4) + b"data", "data of transfer 5, which was not granted"),
    "data of a mere announcement": (
        announce(5, 4) + pack(Kind.DATA, ident=5, nbytes=4) + b"data",
        "data of transfer 5, which was not granted",
    ),
    "a grant nobody asked for": (pack(Kind.GRANT, ident=9), "grant for transfer 9, which is not announced"),
    "credit never spent": (
        pack(Kind.CREDIT, nbytes=20) + struct.pack("<IqQ", 0, 99, 1 << 40),
        "more than spent",
    ),
    "half a credit": (pack(Kind.CREDIT, nbytes=7) + bytes(7), "CREDIT frame of 7 bytes"),
    "messages beyond all credit": (eager(60_000) * 300, "exceed the credit"),
    "a flood of large requests": (
        b"".join(announce(n, 1 << 20, Flag.REQUEST) for n in range(1, FLOOD)),
        f"more than {MAX_ANNOUNCED} transfers",
    ),
    "an empty large request": (announce(1, 0, Flag.REQUEST), "an empty request or reply was announced"),
}


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_that_breaks_the_protocol_is_dropped(target: Target, name: str) -> None:
    stream, reason = PEERS[name]
    target.forget()
    before = target.memory
    with undisturbed(target), closing(admitted(target)) as sock:
        sock.settimeout(scaled(10))
        with suppress(ConnectionResetError, BrokenPipeError):  # dropped in the middle of the flood
            sock.sendall(stream)
        wait_for_end(sock)
        target.wait_for_log(reason)
        assert "Closing the connection with peer 'attacker' (host elsewhere, pid 1): " in target.log
        assert "defect" not in target.log
    assert target.memory - before < 2 * GROWTH


ANSWERED: dict[str, tuple[bytes, int]] = {
    "withdrawn announcements": (b"".join(announce(n) + pack(Kind.WITHDRAW, ident=n) for n in range(1, 1000)), 400),
    "questions about idleness": ((pack(Kind.CONTROL, nbytes=len(encode(IdleAsk()))) + encode(IdleAsk())) * 1000, 400),
    "requests to no service": (pack(Kind.REQUEST, group=77) * 1000, 400),
}


@pytest.mark.parametrize("name", ANSWERED)
def test_a_peer_that_never_reads_its_answers_costs_little(target: Target, name: str) -> None:
    """Everything it sends asks for an answer, which it does not read."""
    stream, times = ANSWERED[name]
    before = target.memory
    with undisturbed(target), closing(admitted(target)) as sock:
        sock.settimeout(scaled(0.5))
        with suppress(TimeoutError, ConnectionResetError, BrokenPipeError):  # it is no longer read, or dropped
            for _ in range(times):
                sock.sendall(stream)
                assert target.memory - before < 4 * GROWTH


# --- crowds -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_silent_connections_keep_nobody_out(target: Target, many_descriptors: None) -> None:
    target.forget()
    before = target.memory
    with undisturbed(target), ExitStack() as stack:
        descriptors = target.descriptors
        crowd = [stack.enter_context(closing(dial(target))) for _ in range(1000)]
        with Endpoint(address=None, name="late", config=CONFIG) as late:
            began = monotonic()
            peer = late.connect(str(target.address))
            assert monotonic() - began < scaled(2)
            peer.send(b"let me in", tag=ECHO)
            assert peer.recv(bytearray(64), tag=ECHO).nbytes == 9
            assert target.descriptors < descriptors + CONFIG.max_handshakes + 10
        for sock in crowd:
            wait_for_end(sock)
        wait_until(lambda: target.descriptors <= descriptors, 5, "the end of the crowd's descriptors")
        target.wait_for_refusals(1000)
        assert refused(target.log, "too many connections are in the handshake") >= 1000 - CONFIG.max_handshakes
        assert refused(target.log, "said nothing within") >= 1
    assert target.memory - before < GROWTH


def test_connections_that_come_and_go_leave_nothing_behind(target: Target) -> None:
    before = target.memory
    with undisturbed(target):
        descriptors = target.descriptors
        for _ in range(1500):
            dial(target).close()
        wait_until(lambda: target.descriptors == descriptors, 10, "the end of their descriptors")
    assert target.memory - before < GROWTH


def test_peers_that_come_and_go_leave_nothing_behind(target: Target) -> None:
    """A service lives for months, and its clients for minutes: one that has left costs nothing."""
    with undisturbed(target):
        descriptors = target.descriptors
        memory = []
        for _ in range(3):
            for _ in range(300):
                with closing(admitted(target)) as sock:
                    sock.sendall(eager(10, tag=ECHO))
                    receive(sock, 50)
            wait_until(lambda: target.descriptors == descriptors, 10, "the end of their descriptors")
            memory.append(target.memory)
    assert memory[-1] - memory[0] < 8 * MIB, memory


# --- who is who -------------------------------------------------------------------------------------------------------


def claim(mesh: Any, changes: dict[str, Any]) -> str:
    """Rank 0 is spoken to by one that claims to be rank 1, while rank 1 goes on."""
    text = ""
    if mesh.rank == 0:
        host, port = mesh._endpoint.address.removeprefix("tcp://").split(":")
        if changes.pop("known", False):
            changes["uid"] = mesh.peers[1].uid
        with closing(socket.create_connection((host, int(port)), timeout=scaled(10))) as sock:
            try:
                shake(sock, token="", who=identity(**changes))
            except ConnectError as error:
                text = error.reason
    mesh.barrier()
    assert [peer.rank for peer in mesh.peers] == [0, 1]
    assert mesh.peers[1].identity.name == "rank 1"
    return text


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"rank": 1}, "it claims to be rank 1, which it is not in this world"),
        ({"rank": 7}, "it claims to be rank 7, which it is not in this world"),
        ({"rank": 0, "known": True}, "it claims to be rank 0, which it is not in this world"),
        ({"rank": 1, "known": True}, "both sides connected at once, and the other connection is kept"),
    ],
)
def test_nobody_becomes_a_rank_by_claiming_to_be_one(changes: dict[str, Any], reason: str) -> None:
    assert run_world(2, claim, "tcp://", args=(dict(changes),)) == [reason, ""]


@pytest.mark.parametrize(
    "addresses",
    [("rubbish",), ("smtp://127.0.0.1:25",), ("tcp://0.0.0.0:7000",), ("tcp://[::]:7000",), ("tcp://127.0.0.1:99999",)],
)
def test_addresses_that_make_no_sense_are_ignored(target: Target, addresses: tuple[str, ...]) -> None:
    """A peer says where it can be found: it is served all the same, and nobody connects there."""
    target.forget()
    with undisturbed(target):
        descriptors = target.descriptors
        with closing(admitted(target, addresses=addresses)) as sock:
            sock.sendall(eager(10, tag=ECHO))
            assert len(receive(sock, 50)) == 50
        wait_until(lambda: target.descriptors == descriptors, 5, "the end of its descriptor")
    assert "defect" not in target.look()


def test_without_a_token_nobody_leads_an_endpoint_off_its_host() -> None:
    """Who may connect because it is on this host cannot name another host as its address."""
    with Endpoint(name="careful") as careful:
        host, port = careful.address.removeprefix("tcp://").split(":")
        with closing(socket.create_connection((host, int(port)), timeout=scaled(10))) as sock:
            shake(sock, token="", who=identity(addresses=("tcp://10.1.2.3:7000", "tcp://127.0.0.1:7000")))
            assert [str(address) for address in careful.accept().addresses] == ["tcp://127.0.0.1:7000"]


def intrude(mesh: Any) -> Any:
    """One that knows the token, but is no rank, sends into the world's tag space."""
    if mesh.rank == 0:
        host, port = mesh._endpoint.address.removeprefix("tcp://").split(":")
        with closing(socket.create_connection((host, int(port)), timeout=scaled(10))) as sock:
            shake(sock, token="")
            sock.sendall(pack(Kind.EAGER, group=1, tag=4, nbytes=8) + b"intruder")
            wait_for_end(sock)
        mesh.send(b"go", to=1)
    else:
        mesh.recv(bytearray(2), source=0)
        mesh.send(b"the rank", to=0, tag=4)
        return None
    out = bytearray(8)
    return mesh.recv(out, tag=4), bytes(out)


def test_a_stranger_cannot_send_into_a_world() -> None:
    (status, content), _ = run_world(2, intrude, "tcp://")
    assert status == (1, 4, 8)
    assert content == b"the rank"


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://[::]:0", "tcp://10.1.2.3:0", "tcp://node7.example:7000"])
def test_off_loopback_a_token_is_required(address: str) -> None:
    with pytest.raises(ConfigError, match=r"needs a cluster token.*RANKMESH_TOKEN"):
        Endpoint(address, advertise="tcp://10.1.2.3:0")
    with (
        Endpoint(address=None, name="client") as client,
        pytest.raises(ConfigError, match=r"needs a cluster token.*RANKMESH_TOKEN|an address to listen on"),
    ):
        client.connect(address.replace(":0", ":7000"))


# --- pickle -----------------------------------------------------------------------------------------------------------


class Bomb:
    """Loading it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_is_never_loaded_unless_allowed(tmp_path: Path) -> None:
    """From a peer that says it allows pickle, and sends one: it is refused, and what follows is received."""
    mark = tmp_path / "loaded"
    payload = b"".join(codec.encode(Bomb(mark), allow_pickle=True))
    after = b"".join(codec.encode({"harmless": 1}))
    with Endpoint(name="receiver", config=CONFIG) as receiver:
        host, port = receiver.address.removeprefix("tcp://").split(":")
        with closing(socket.create_connection((host, int(port)), timeout=scaled(10))) as sock:
            shake(sock, token=TOKEN, who=identity(allow_pickle=True))
            for data in (payload, after):
                sock.sendall(pack(Kind.EAGER, Flag.OBJECT, tag=3, nbytes=len(data)) + data)
            peer = receiver.accept()
            with pytest.raises(CodecError, match="pickle"):
                peer.recv_object(tag=3)
            assert peer.recv_object(tag=3) == {"harmless": 1}
    assert not mark.exists()


def test_a_pickle_is_loaded_where_both_sides_allow_it(tmp_path: Path) -> None:
    """Which also shows that the bomb above is one."""
    mark = tmp_path / "loaded"
    allowing = CONFIG.override(allow_pickle=True)
    with Endpoint(name="a", config=allowing) as a, Endpoint(name="b", config=allowing) as b:
        b.connect(a.address).send_object(Bomb(mark), tag=3)
        a.accept().recv_object(tag=3)
    assert mark.exists()


def test_the_store_survives_requests_that_make_no_sense() -> None:
    """Waits of nan or infinite seconds, text that is not UTF-8, nesting too deep: others are served all the same."""
    bodies = [
        msgspec.msgpack.encode(Get(["absent"], float("nan"))),
        msgspec.msgpack.encode(Get(["absent"], float("inf"))),
        msgspec.msgpack.encode(Get(["absent"], -1.0)),
        msgspec.msgpack.encode(Set("\ufffd", b"")).replace("\ufffd".encode(), b"\xff\xfe\xfd"),
        b"\x91" * 20_000,
        b"",
    ]
    config = Config(token=TOKEN, timeout=scaled(10), heartbeat_interval=scaled(0.2), heartbeat_timeout=scaled(1.0))
    with StoreServer("tcp://127.0.0.1:0", config) as server, Endpoint(address=None, config=config) as client:
        host, port = server.address.removeprefix("tcp://").split(":")
        with closing(socket.create_connection((host, int(port)), timeout=scaled(10))) as sock:
            shake(sock, token=TOKEN)
            for body in bodies:
                sock.sendall(pack(Kind.REQUEST, group=SERVICE, tag=1, nbytes=len(body)) + body)
            store = StoreClient(client, client.connect(server.address))
            store.set("key", b"value")
            assert store.get("key") == b"value"
            assert store.get_many(["key", "absent"], timeout=scaled(0.3)) == {"key": b"value"}
            sock.settimeout(scaled(0.2))
            answers = b""
            with suppress(TimeoutError):
                while piece := sock.recv(65536):
                    answers += piece
        assert answers.count(b"the request cannot be read") == 3
        assert "2 keys" not in repr(server)

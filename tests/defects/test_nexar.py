"""Defects found in nexar, each with the test that would fail if rankmesh had it."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from peers import FAULTY, SOON, Call, Medium, Pair, faulty, open_pair, pattern, router_of
from rankmesh import Config, ConnectError, DeadlineError, Endpoint, PeerLost
from rankmesh.testing.faults import FaultLink
from rankmesh.wire.credit import OVERHEAD
from rankmesh.wire.handshake import NONCE_BYTES, Handshake, Type
from rankmesh.wire.header import HEADER_BYTES
from rankmesh.wire.messages import Identity, encode
from ranks import Mesh, Ranks, Talk
from timing import scaled, wait_until

TCP = Medium("tcp://127.0.0.1:0", Config(shm=False))


@pytest.fixture
def pair() -> Iterator[Pair]:
    with open_pair(TCP) as both:
        yield both


def tell_who_is_there(mesh: Mesh, talk: Talk) -> None:
    others = [rank for rank in range(mesh.size) if rank != mesh.rank]
    for rank in others:
        mesh.send_object((mesh.rank, os.getpid()), to=rank)
    talk.send({mesh.rank: os.getpid(), **dict(mesh.recv_object(source=rank) for rank in others)})
    mesh.barrier()


def test_nexar_a_mesh_spans_processes(nursery: None) -> None:
    """nexar's mesh was made inside one process, and could not be had across several."""
    with Ranks(3, tell_who_is_there) as ranks:
        there = {rank: ranks.pid(rank) for rank in range(3)}
        assert ranks.hear_all() == [there] * 3
    assert len({*there.values(), os.getpid()}) == 4


def _has_sent(link: FaultLink, nbytes: int) -> bool:
    return link.sent > nbytes


def test_nexar_heartbeats_are_drained_and_never_stall_lanes() -> None:
    """nexar put heartbeats into a bounded channel that nobody read: barriers failed after a second, and in the end
    every lane stood still. Here more of them come than nexar's channel held, nobody calls anything meanwhile, and
    everything works afterwards."""
    with faulty() as faults, open_pair(FAULTY, heartbeat_interval=0.005, heartbeat_timeout=scaled(5)) as pair:
        before = [(link, link.sent) for link in faults.links]
        for link, sent in before:
            wait_until(partial(_has_sent, link, sent + 300 * HEADER_BYTES), 20, "300 heartbeats")
        routers = [router_of(peer) for peer in (pair.there, pair.back)]
        wait_until(lambda: all(it.inbound.idle and it.outbound.idle for it in routers), 5, "a moment without heartbeat")
        waiting = Call(pair.there.barrier)
        pair.back.barrier()
        waiting.result()
        pair.there.send(b"on a lane", tag=3)
        assert pair.back.recv(bytearray(16), tag=3).nbytes == 9


def test_nexar_a_hung_peer_is_noticed() -> None:
    """For nexar a peer was alive as long as local writes succeeded, so that a hung one was noticed after 35 seconds.
    Here all writes succeed and vanish."""
    quick = Medium(
        FAULTY.address, Config(heartbeat_interval=scaled(0.1), heartbeat_timeout=scaled(0.5), close_timeout=0.5)
    )
    with faulty() as faults, open_pair(quick) as pair:
        waiting = pair.there.irecv(bytearray(1), tag=1)
        began = monotonic()
        for link in faults.links:
            link.drop()
        pair.there.send(b"this succeeds, as far as this side can tell", tag=1)
        with pytest.raises(PeerLost, match="silent for") as caught:
            waiting.wait()
        assert caught.value.pid == os.getpid()
        assert monotonic() - began < scaled(0.5 + 1)


def test_nexar_a_full_tag_blocks_nobody(pair: Pair) -> None:
    """nexar held the lock of its map of channels while one of them was full: that blocked all others, for ever."""
    full = TCP.config.lane_credit_bytes // (60_000 + OVERHEAD)
    for _ in range(full):
        pair.there.send(bytes(60_000), tag=1, timeout=SOON)
    with pytest.raises(DeadlineError):
        pair.there.send(bytes(60_000), tag=1, timeout=0.05)
    pair.there.send(b"another tag", tag=2, timeout=SOON)
    assert pair.back.recv(bytearray(16), tag=2).nbytes == 11
    pair.back.send(b"the other way", tag=1, timeout=SOON)
    assert pair.there.recv(bytearray(16), tag=1).nbytes == 13
    large = pair.there.isend(bytes(1 << 20), tag=3)
    assert pair.back.recv(bytearray(1 << 20), tag=3).nbytes == 1 << 20
    large.wait()
    with open_pair(TCP) as other:
        there = pair.left.connect(other.right.address)
        there.send(b"another peer", tag=1)
    for _ in range(full):
        assert pair.back.recv(bytearray(60_000), tag=1).nbytes == 60_000


def test_nexar_finished_tags_are_freed(pair: Pair) -> None:
    """nexar never freed the channel of a tag that was done with. Here thousands of tags leave nothing behind."""
    for tag in range(3000):
        pair.there.send(b"x", tag=tag)
        pair.back.recv(bytearray(1), tag=tag)
    matcher = pair.right.hub.matcher
    assert not matcher._posted
    assert not matcher._unexpected
    out, back = router_of(pair.there).outbound, router_of(pair.back).inbound
    assert out.idle
    assert back.idle
    # What the receiver owes is paid in batches: as much as is not worth a frame may remain on the books.
    owed = TCP.config.peer_credit_bytes // 4
    assert out._credit.used <= owed
    with pair.right.hub.engine:
        back.settle()  # the last message's account
    assert len(out._credit.lanes) == len(back._credit.owed)


def test_nexar_waiters_are_woken_when_the_peer_disconnects(pair: Pair) -> None:
    """In nexar whoever waited on a tag was not woken when the peer went away. Here 100 tags, 8 of them by threads."""
    works = [pair.there.irecv(bytearray(1), tag=tag) for tag in range(100)]
    threads = [Call(pair.there.recv, bytearray(1), tag=1000 + n) for n in range(8)]
    wait_until(lambda: len(pair.left.hub.matcher._posted) == 108, 10, "108 posted receives")
    began = monotonic()
    pair.right.abort()
    for thread in threads:
        with pytest.raises(PeerLost):
            thread.result()
    for tag, work in enumerate(works):
        with pytest.raises(PeerLost) as caught:
            work.wait()
        assert caught.value.tag == tag
    assert monotonic() - began < scaled(1)


def test_nexar_no_overtaking_and_no_dropping_on_tag_mismatch(pair: Pair) -> None:
    """In nexar messages between two ranks could overtake each other, and a receive with another tag consumed the
    message and dropped it. Here large and small ones alternate, and receives for other tags come first."""
    sizes = [0, 1, 70_000, 64, 300_000, 8, 65_536, 65_537, 5000] * 4
    contents = [pattern(nbytes, seed=n) for n, nbytes in enumerate(sizes)]
    never = pair.back.irecv(bytearray(1), tag=99)
    sends = [pair.there.isend(content, tag=5 + n % 2) for n, content in enumerate(contents)]
    for wanted in (6, 5):  # first all of the tag that was sent second
        for n, content in enumerate(contents):
            if 5 + n % 2 == wanted:
                out = np.empty(content.nbytes, np.uint8)
                assert pair.back.recv(out, tag=wanted).nbytes == content.nbytes
                assert (out == content).all()
    for send in sends:
        send.wait()
    assert not never.done()
    assert never.cancel()


def test_nexar_the_join_token_is_no_constant(tmp_path: Path) -> None:
    """nexar's default token was a constant in its source, so that everybody knew it. The launcher makes a new one for
    each run, long enough not to be guessed."""
    script = tmp_path / "show.py"
    script.write_text("import os; print(os.environ['RANKMESH_TOKEN'])")
    command = [sys.executable, "-m", "rankmesh", "run", "-n", "1", "--no-prefix", str(script)]
    environment = {name: value for name, value in os.environ.items() if name != "RANKMESH_TOKEN"}
    runs = [
        subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SOON, check=True)
        for _ in range(2)
    ]
    first, second = (run.stdout.strip() for run in runs)
    assert first != second
    assert len(first) == len(second) == 64
    assert Config().token == ""


def test_nexar_no_secret_travels_to_one_that_has_not_proved_itself() -> None:
    """nexar sent the nodes' keys over a connection that nobody had verified. Here an impostor that accepts a connection
    sees a uid, a nonce and a proof that it cannot use, and its own proof, made with a guess, is refused."""
    token = "a secret that must not travel"
    client = open_impostors_view(token)
    assert len(client.seen) > 100
    assert token.encode() not in client.seen
    assert isinstance(client.error, ConnectError)
    assert "wrong or missing token" in client.error.reason


class View(NamedTuple):
    seen: bytes
    error: BaseException


def open_impostors_view(token: str) -> View:
    """What one sees that accepts a connection without the token, and what the other side makes of its proof."""
    limits = {"eager_bytes": 1 << 16, "lane_credit": 1 << 20, "peer_credit": 1 << 24}
    who = msgspec.convert(
        {"uid": os.urandom(16), "name": "impostor", "host": "", "pid": 1, "max_message": 1, "max_rpc": 1, **limits},
        Identity,
    )
    side = Handshake(initiator=False, token="guessed", identity=who, nonce=os.urandom(NONCE_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as impostor, Endpoint(address=None, token=token) as honest:
        dialing = Call(honest.connect, f"tcp://127.0.0.1:{impostor.getsockname()[1]}", timeout=SOON)
        sock, _ = impostor.accept()
        with sock:
            sock.settimeout(SOON)
            seen = b""
            while side.remote_uid is None:
                data = sock.recv(side.wanted)
                seen += data
                sock.sendall(side.receive(data))
            seen += sock.recv(1 << 16)
            identity = encode(who)
            proof = os.urandom(32) + identity
            sock.sendall(b"RMSH" + struct.pack("<BBH", Type.WELCOME, 0, len(proof)) + proof)
            seen += sock.recv(1 << 16)
        with pytest.raises(ConnectError) as caught:
            dialing.result()
    return View(seen, caught.value)

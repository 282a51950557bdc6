"""Quiet connections are let go by agreement and come back on demand; nothing is lost on the way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import Any

import numpy as np
import pytest

from peers import FAULTY, SOON, Call, Medium, Pair, blank, faulty, open_pair, pattern, router_of
from rankmesh import Config, Endpoint, Peer, PeerLost
from rankmesh.config import KIB
from rankmesh.mesh import Mesh
from rankmesh.testing.faults import FaultLink
from rankmesh.testing.proxy import FaultProxy
from rankmesh.testing.world import run_world
from rankmesh.wire.messages import IdleAsk
from timing import wait_until

IDLE: dict[str, Any] = {"idle_timeout": 0.05, "heartbeat_interval": 0.05, "heartbeat_timeout": 2.0}


@pytest.fixture
def idle_pair(medium: Medium) -> Iterator[Pair]:
    with open_pair(medium, **IDLE) as pair:
        yield pair


def wait_closed(pair: Pair) -> None:
    wait_until(lambda: not pair.there.connected and not pair.back.connected, 10, "the connection to be let go")


def check_well(pair: Pair) -> None:
    for peer in (pair.there, pair.back):
        assert router_of(peer).gone == ""
    assert len(pair.left.hub.routers) == len(pair.right.hub.routers) == 1


def test_connection_closes_and_comes_back_from_either_side(idle_pair: Pair) -> None:
    pair = idle_pair
    for here, there in ((pair.there, pair.back), (pair.back, pair.there)) * 2:
        wait_closed(pair)
        check_well(pair)
        for nbytes in (10, 200 * KIB):
            out = blank(nbytes)
            send = here.isend(pattern(nbytes), tag=1)
            there.recv(out, tag=1, timeout=SOON)
            send.wait(SOON)
            assert np.array_equal(out, pattern(nbytes))


def test_first_use_after_an_idle_spell_may_come_from_both_sides_at_once(idle_pair: Pair) -> None:
    """FEATURES: Mooncake refuses the first transfer after an idle spell."""
    pair = idle_pair
    for number in range(3):
        wait_closed(pair)
        start = threading.Barrier(2)
        outs = [bytearray(1), bytearray(1)]

        def talk(peer: Peer, out: bytearray, number: int = number, start: threading.Barrier = start) -> None:
            start.wait(SOON)
            peer.sendrecv(bytes([number]), out, tag=1, timeout=SOON)

        other = Call(talk, pair.back, outs[1])
        talk(pair.there, outs[0])
        other.result()
        assert outs == [bytes([number])] * 2
        check_well(pair)


def test_posted_receive_keeps_the_connection(idle_pair: Pair) -> None:
    """Whoever waits for a peer must learn of its end."""
    pair = idle_pair
    receive = pair.there.irecv(bytearray(1), tag=1)
    router = router_of(pair.there)
    seen = router.inbound.frames
    wait_until(lambda: router.inbound.frames >= seen + 3 or not pair.there.connected, 10, "questions of the other side")
    assert pair.there.connected
    pair.back.send(b"x", tag=1)
    receive.wait(SOON)
    wait_closed(pair)


def test_waiting_probe_keeps_the_connection(idle_pair: Pair) -> None:
    pair = idle_pair
    probing = Call(pair.there.probe, tag=1, timeout=SOON)
    wait_until(lambda: pair.left.hub.probes, 5)
    router = router_of(pair.there)
    seen = router.inbound.frames
    wait_until(lambda: router.inbound.frames >= seen + 3 or not pair.there.connected, 10, "questions of the other side")
    assert pair.there.connected
    pair.right.abort()
    with pytest.raises(PeerLost):
        probing.result()


def test_unreceived_message_keeps_the_connection(idle_pair: Pair) -> None:
    """Its credit is still to be paid back."""
    pair = idle_pair
    pair.there.send(b"x", tag=1)
    router = router_of(pair.back)
    wait_until(lambda: not router.inbound.idle, 5)
    frames = router.outbound.frames
    asked = router_of(pair.there).inbound.frames
    wait_until(lambda: router_of(pair.there).inbound.frames >= asked + 2 or not pair.there.connected, 10)
    assert pair.there.connected
    assert router.outbound.frames >= frames
    pair.back.recv(bytearray(1), tag=1, timeout=SOON)
    wait_closed(pair)


def test_pinned_connection_stays(idle_pair: Pair) -> None:
    pair = idle_pair
    router = router_of(pair.back)
    router.pinned = True
    asked = router.inbound.frames
    wait_until(lambda: router.inbound.frames >= asked + 3 or not pair.back.connected, 10, "the other side to ask")
    assert pair.back.connected
    router.pinned = False
    wait_closed(pair)


def test_peer_that_cannot_be_reached_again_is_kept(medium: Medium) -> None:
    """It listens nowhere: without its connection it could not be sent to."""
    config = medium.config.override(**IDLE)
    with Endpoint(medium.address, config=config) as right, Endpoint(None, config=config) as left:
        left.connect(right.address, timeout=SOON)
        back = right.accept(timeout=SOON)
        router = router_of(back)
        asked = router.inbound.frames
        wait_until(lambda: router.inbound.frames >= asked + 3 or not back.connected, 10, "the other side to ask")
        back.send(b"x", tag=1, timeout=SOON)
        assert left.recv(bytearray(1), tag=1, timeout=SOON).nbytes == 1


def test_peer_that_died_meanwhile_is_noticed_by_the_next_use(medium: Medium) -> None:
    with open_pair(medium, **IDLE) as pair:
        wait_closed(pair)
        pair.right.close()
        for call in (lambda: pair.there.send(b"x", timeout=SOON), lambda: pair.there.recv(bytearray(1), timeout=SOON)):
            with pytest.raises(PeerLost) as caught:
                call()
            assert "right" in caught.value.peer
            assert "cannot be reached" in caught.value.reason


def test_a_request_to_a_peer_that_died_meanwhile_ends_at_once(medium: Medium) -> None:
    """Its connection may be refused before the request is known: it waited for its deadline."""
    with open_pair(medium, **IDLE) as pair:
        wait_closed(pair)
        pair.right.close()
        began = monotonic()
        with pytest.raises(PeerLost, match="cannot be reached"):
            pair.left.request(pair.there, 99, b"x", "question to", SOON)
        assert monotonic() - began < SOON / 2
        assert router_of(pair.there).requests == {}


def test_traffic_keeps_the_connection_and_its_credit(tcp: Medium) -> None:
    """Credit is counted per connection: many spells, many more bytes than one connection's credit."""
    with open_pair(tcp, **IDLE, eager_bytes=1 * KIB, lane_credit_bytes=4 * KIB, peer_credit_bytes=4 * KIB) as pair:
        for spell in range(4):
            for number in range(20):
                pair.there.send(pattern(500, number), tag=1, timeout=SOON)
                out = blank(500)
                pair.back.recv(out, tag=1, timeout=SOON)
                assert np.array_equal(out, pattern(500, number)), (spell, number)
            wait_closed(pair)
        check_well(pair)


class TestCrossing:
    """The question and something else meet on the way; a proxy holds both back until they do."""

    @contextmanager
    def proxied(self, tcp: Medium) -> Iterator[tuple[Pair, FaultProxy]]:
        with ExitStack() as stack:
            proxies: list[FaultProxy] = []

            def through(address: str) -> str:
                proxies.append(stack.enter_context(FaultProxy(address)))
                return str(proxies[0].address)

            settings = {"eager_bytes": 1 * KIB, "lane_credit_bytes": 4 * KIB, "peer_credit_bytes": 8 * KIB}
            with open_pair(tcp, through, **settings) as pair:
                yield pair, proxies[0]

    def ask(self, endpoint: Endpoint, peer: Peer) -> None:
        """As the heartbeat does it."""
        with endpoint.hub.engine:
            outbound = router_of(peer).outbound
            outbound.message(IdleAsk())
            outbound.pause()

    def cross(self, tcp: Medium, messages: int) -> None:
        with self.proxied(tcp) as (pair, proxy):
            proxy.freeze()
            self.ask(pair.left, pair.there)
            for number in range(messages):
                pair.back.send(pattern(500, number), tag=1, timeout=SOON)
            proxy.resume()
            wait_closed(pair)
            pair.back.send(b"again", tag=2, timeout=SOON)
            pair.there.recv(bytearray(5), tag=2, timeout=SOON)
            for number in range(messages):  # they came on the old connection, and are received on the new one
                out = blank(500)
                pair.there.recv(out, tag=1, timeout=SOON)
                assert np.array_equal(out, pattern(500, number))
            for number in range(60):  # as much as makes credit come back
                out = blank(500)
                pair.back.send(pattern(500, number), tag=1, timeout=SOON)
                pair.there.recv(out, tag=1, timeout=SOON)
                assert np.array_equal(out, pattern(500, number))
            check_well(pair)
            credit = router_of(pair.back).outbound._credit
            assert 0 <= credit.used <= credit.peer_limit

    @pytest.mark.parametrize("messages", [1, 5])
    def test_messages_that_cross_the_question_are_kept(self, tcp: Medium, messages: int) -> None:
        self.cross(tcp, messages)

    def test_both_ask_at_once(self, tcp: Medium) -> None:
        with self.proxied(tcp) as (pair, proxy):
            proxy.freeze()
            self.ask(pair.left, pair.there)
            self.ask(pair.right, pair.back)
            sends = [pair.there.isend(b"a", tag=1), pair.back.isend(b"b", tag=1)]
            proxy.resume()
            outs = bytearray(1), bytearray(1)
            pair.back.recv(outs[0], tag=1, timeout=SOON)
            pair.there.recv(outs[1], tag=1, timeout=SOON)
            assert [bytes(out) for out in outs] == [b"a", b"b"]
            for send in sends:
                send.wait(SOON)
            check_well(pair)


def test_sends_given_up_while_the_connection_is_made_again() -> None:
    """The new connection's handshake is stalled; one waiting send is given up, the others go out in order."""
    stalled: list[FaultLink] = []

    def prepare(link: FaultLink) -> None:
        if stall and not link.accepted:
            link.stall()
            stalled.append(link)

    stall = False
    with faulty(prepare), open_pair(FAULTY, **IDLE) as pair:
        wait_closed(pair)
        stall = True
        datas = [pattern(nbytes, nbytes) for nbytes in (10, 300 * KIB, 20)]
        sends = [pair.there.isend(data, tag=1) for data in datas]
        wait_until(lambda: stalled, 5)
        assert sends[1].cancel() is True
        datas[1][:] = 0
        stall = False
        for link in stalled:
            link.resume()
        for nbytes in (10, 20):
            out = blank(nbytes)
            assert pair.back.recv(out, tag=1, timeout=SOON).nbytes == nbytes
            assert np.array_equal(out, pattern(nbytes, nbytes))
        for send in (sends[0], sends[2]):
            send.wait(SOON)
        check_well(pair)


def _spells(mesh: Mesh, rested: threading.Barrier) -> None:
    """All ranks talk, rest, and talk again. They meet outside the mesh: waiting for messages would keep connections."""
    others = [peer for peer in mesh.peers if 0 not in (mesh.rank, peer.rank)]
    for number in range(3):
        outs = {rank: bytearray(1) for rank in range(mesh.size) if rank != mesh.rank}
        receives = [mesh.irecv(out, source=rank, tag=number) for rank, out in outs.items()]
        for rank in outs:
            mesh.send(bytes([mesh.rank]), to=rank, tag=number, timeout=SOON)
        for receive in receives:
            receive.wait(SOON)
        assert {rank: out[0] for rank, out in outs.items()} == {rank: rank for rank in outs}
        wait_until(lambda: not any(peer.connected for peer in others), 10, "idle connections to be let go")
        rested.wait(SOON)


def test_mesh_keeps_only_the_connections_with_rank_0() -> None:
    run_world(4, _spells, args=(threading.Barrier(4),), config=Config(**IDLE), timeout=2 * SOON)

"""How connections come about: late listeners, dead ones, two at once, and what an error says."""

from __future__ import annotations

import socket
import threading
from time import monotonic

import pytest
from msgspec.structs import replace

from peers import BRIEFLY, FAULTY, PATIENT, SOON, Call, Medium, Pair, blank, faulty, open_pair, pattern, router_of
from rankmesh import ClosedError, Config, ConfigError, ConnectError, DeadlineError, Endpoint, Peer, PeerLost, UsageError
from rankmesh.endpoint.admission import Admission
from rankmesh.endpoint.connector import Dial
from rankmesh.membership.ports import free_port
from rankmesh.testing.faults import FaultLink
from rankmesh.wire.messages import IdleAsk
from timing import scaled, wait_until


def test_listener_may_be_late(tcp: Medium) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with Endpoint(tcp.address, name="early") as early:
        connecting = Call(early.connect, address, timeout=SOON)
        wait_until(lambda: early._connector._dials, 5, "the attempt")
        with Endpoint(address, name="late") as late:
            peer = connecting.result()
            assert peer.name == "late"
            peer.send(b"x")
            assert late.recv(bytearray(1), timeout=SOON).source.name == "early"


def test_dead_address_is_named_with_the_reason(tcp: Medium) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with Endpoint(tcp.address) as endpoint:
        began = monotonic()
        with pytest.raises(ConnectError) as caught:
            endpoint.connect(address, timeout=5 * BRIEFLY)
        assert 5 * BRIEFLY <= monotonic() - began < SOON
        assert caught.value.address == address
        assert caught.value.reason.endswith("Connection refused")
        for part in (address, "Connection refused", "rankmesh doctor"):
            assert part in str(caught.value)
        assert endpoint.peers == []
        assert endpoint.hub.routers == {}, "a peer that never came is kept"


def test_address_that_never_answers(tcp: Medium) -> None:
    """It accepts, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent, Endpoint(tcp.address) as endpoint:
        with pytest.raises(ConnectError) as caught:
            endpoint.connect(f"tcp://127.0.0.1:{silent.getsockname()[1]}", timeout=5 * BRIEFLY)
        assert "within" in caught.value.reason or "handshake" in caught.value.reason


def by_uid(pair: Pair) -> list[tuple[Endpoint, Peer]]:
    """Both sides, and how each sees the other. Where both connect at once, the second one's connection is kept."""
    return sorted([(pair.left, pair.there), (pair.right, pair.back)], key=lambda side: side[0].uid)


def let_go(pair: Pair) -> None:
    """Both sides agree to let their connection go, as the heartbeat has them do when it is idle."""
    with pair.left.hub.engine:
        outbound = router_of(pair.there).outbound
        outbound.message(IdleAsk())
        outbound.pause()
    wait_until(lambda: not pair.there.connected and not pair.back.connected, 10, "the connection to be let go")


def test_who_closes_takes_the_connection_that_its_last_messages_wait_for(medium: Medium) -> None:
    """Both sides connect at once, and agree on the other side's connection, which comes when this side is closing. It
    was refused then, and what was to be sent waited for it in vain."""
    with open_pair(medium, **PATIENT) as pair:
        let_go(pair)
        (closing, its), (_, theirs) = by_uid(pair)
        decide, held = closing._connector._judge, []

        def decide_late(admission: Admission) -> None:
            if not closing.hub.closed:
                held.append(admission)
                raise BlockingIOError  # as if the rest of the handshake had not come yet
            decide(admission)

        closing._connector._judge = decide_late  # type: ignore[method-assign]
        back = theirs.isend(b"b", tag=2)
        wait_until(lambda: held, 10, "the other side's attempt")
        its.isend(b"a", tag=1)
        refused = "waiting for the connection that the other side opened"
        wait_until(lambda: refused in closing._connector.trouble(router_of(its)), 10, "the refusal")
        end = Call(closing.close)
        wait_until(lambda: closing.hub.closed, 10)
        with closing.hub.engine:
            held[0].ready()
        end.result()
        out = bytearray(1)
        theirs.recv(out, tag=1, timeout=SOON)
        assert out == b"a"
        back.wait(SOON)
        wait_until(lambda: router_of(theirs).gone, 10, "the goodbye")
        assert router_of(theirs).gone == "it closed its endpoint"


def test_who_closes_and_has_nothing_to_send_says_so(medium: Medium, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was about to connect: it is dropping that attempt, for which the other side would wait."""
    with open_pair(medium, **PATIENT) as pair:
        let_go(pair)
        (_, theirs), (closing, its) = by_uid(pair)
        with monkeypatch.context() as patch:
            patch.setattr(Dial, "start", lambda self: None)
            its.irecv(bytearray(1), tag=1)
        assert closing._connector._dials
        with monkeypatch.context() as patch:
            patch.setattr(closing.hub, "closed", "It is closing.")
            with pytest.raises(PeerLost, match="this endpoint is closing"):
                theirs.isend(b"b", tag=2).wait(0.8 * closing.config.handshake_timeout)


def test_who_closes_lets_no_stranger_in(inproc: Medium, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with one in any case comes before the closing, from which there are exceptions."""
    with Endpoint(inproc.address) as endpoint, Endpoint(inproc.address) as other, monkeypatch.context() as patch:
        patch.setattr(endpoint, "_run", "this run")
        stranger = replace(other._identity(), run="another")
        for closed in ("", "It is closing."):
            patch.setattr(endpoint.hub, "closed", closed)
            assert "belongs to another run" in endpoint.objection(stranger)


def test_an_attempt_that_succeeds_while_its_side_closes_ends_in_order() -> None:
    """The other side had the connection, saw it end without a goodbye, and took that for a loss."""
    made: list[FaultLink] = []
    proved = 0

    def prepare(link: FaultLink) -> None:
        if not link.accepted:
            made.append(link)
            if proved:
                link.stall(after_bytes=proved)

    with faulty(prepare), open_pair(FAULTY, **PATIENT) as pair:
        proved = made[0].sent
        let_go(pair)
        pair.there.irecv(bytearray(1), tag=1)
        wait_until(lambda: pair.back.connected, 10, "the connection, of which this side does not know")
        assert not pair.there.connected
        closing = Call(pair.left.close)
        made[1].resume()
        closing.result()
        wait_until(lambda: router_of(pair.back).gone, 10, "the goodbye")
        assert router_of(pair.back).gone == "it closed its endpoint"


def test_unknown_name(tcp: Medium) -> None:
    with Endpoint(tcp.address, token="secret") as endpoint:
        with pytest.raises(ConnectError) as caught:
            endpoint.connect("tcp://no-such-host.invalid:7000", timeout=5 * BRIEFLY)
        assert "no-such-host.invalid" in str(caught.value)


def test_info_of_an_endpoint_is_an_address(medium: Medium) -> None:
    config = medium.config
    with (
        Endpoint(medium.address, name="right", config=config) as right,
        Endpoint(None, name="left", config=config) as left,
    ):
        info = right.info()
        assert info["addresses"] == [right.address]
        assert left.address == ""
        peer = left.connect(info, timeout=SOON)
        assert (peer.name, peer.uid) == ("right", right.uid)
        assert right.accept(timeout=SOON).name == "left"


def test_endpoint_that_does_not_listen_cannot_be_connected_to(inproc: Medium) -> None:
    with Endpoint(None, name="deaf") as deaf, Endpoint(inproc.address) as endpoint:
        info = deaf.info()
        with pytest.raises(ConfigError, match="no address to connect to"):
            endpoint.connect(info)


def test_connecting_twice_gives_the_same_peer(medium: Medium) -> None:
    with open_pair(medium) as pair:
        began = monotonic()
        assert pair.left.connect(pair.right.address, timeout=SOON) is pair.there
        assert pair.right.connect(pair.left.address, timeout=SOON) is pair.back
        assert monotonic() - began < scaled(4), "it waited for something that cannot come"
        assert len(pair.left.hub.routers) == len(pair.right.hub.routers) == 1
        pair.there.send(b"x")
        pair.back.recv(bytearray(1), timeout=SOON)


def test_many_threads_may_connect_to_one_address(medium: Medium) -> None:
    with (
        Endpoint(medium.address, config=medium.config) as right,
        Endpoint(medium.address, config=medium.config) as left,
    ):
        calls = [Call(left.connect, right.address, timeout=SOON) for _ in range(8)]
        peers = {call.result() for call in calls}
        assert len(peers) == 1
        assert left.peers == list(peers)
        assert len(right.peers) == len(right.hub.routers) == len(left.hub.routers) == 1


def test_attempt_at_a_dead_address_keeps_nobody_out(tcp: Medium) -> None:
    """While an endpoint tries in vain to reach somebody, others reach it at once."""
    with Endpoint(tcp.address, name="trying") as trying, Endpoint(tcp.address) as other:
        attempt = Call(trying.connect, f"tcp://127.0.0.1:{free_port()}", timeout=SOON)
        wait_until(lambda: trying._connector._dials, 5, "the attempt")
        assert other.connect(trying.address, timeout=scaled(3)).name == "trying"
        assert attempt.running
        trying.abort()
        with pytest.raises(ClosedError):
            attempt.result()


@pytest.mark.parametrize("way", ["close", "abort"])
def test_closing_ends_attempts_and_accepts_under_way(tcp: Medium, way: str) -> None:
    endpoint = Endpoint(tcp.address)
    attempt = Call(endpoint.connect, f"tcp://127.0.0.1:{free_port()}", timeout=SOON)
    accepting = Call(endpoint.accept, timeout=SOON)
    wait_until(lambda: endpoint._connector._dials and endpoint._accepts, 5, "both")
    getattr(endpoint, way)()
    for call in (attempt, accepting):
        with pytest.raises(ClosedError):
            call.result(scaled(5))


def test_accept_that_nobody_answers(inproc: Medium) -> None:
    with Endpoint(inproc.address) as endpoint:
        with pytest.raises(DeadlineError) as caught:
            endpoint.accept(timeout=BRIEFLY)
        assert caught.value.op == "accept"
        with Endpoint(inproc.address, name="late") as late:
            late.connect(endpoint.address, timeout=SOON)
            assert endpoint.accept(timeout=SOON).name == "late", "an accept that had given up took the peer"


def test_wrong_token_is_told_at_once(tcp: Medium) -> None:
    with Endpoint(tcp.address, token="one") as right, Endpoint(tcp.address, token="another") as left:
        began = monotonic()
        with pytest.raises(ConnectError) as caught:
            left.connect(right.address, timeout=SOON)
        assert monotonic() - began < SOON / 2, "trying again cannot mend a wrong token"
        assert caught.value.reason == "wrong or missing token"
        assert "RANKMESH_TOKEN" in str(caught.value)
        assert right.peers == []


def test_token_is_required_off_loopback() -> None:
    with pytest.raises(ConfigError, match="RANKMESH_TOKEN"):
        Endpoint("tcp://0.0.0.0:0", advertise="tcp://10.0.0.1:0")
    with Endpoint(None) as endpoint, pytest.raises(ConfigError, match="RANKMESH_TOKEN"):
        endpoint.connect("tcp://10.255.255.1:7000")


def test_address_in_use_is_told(tcp: Medium) -> None:
    with Endpoint(tcp.address) as endpoint, pytest.raises(ConfigError, match="in use"):
        Endpoint(endpoint.address)


def test_wildcard_address_is_never_handed_out() -> None:
    """FEATURES: DLSlime hands out 0.0.0.0 as the address to connect to."""
    with pytest.raises(ConfigError, match="advertise"):
        Endpoint("tcp://0.0.0.0:0", token="secret")
    with Endpoint("tcp://0.0.0.0:0", token="secret", advertise="tcp://127.0.0.1:0") as endpoint:
        assert endpoint.address.startswith("tcp://127.0.0.1:")
        assert not endpoint.address.endswith(":0")
        with Endpoint(None, token="secret") as other:
            assert other.connect(endpoint.address, timeout=SOON).name == endpoint.name


def test_endpoint_does_not_connect_to_itself(medium: Medium) -> None:
    with Endpoint(medium.address, config=medium.config) as endpoint, pytest.raises(ConnectError, match="itself"):
        endpoint.connect(endpoint.address, timeout=SOON)


class TestSimultaneous:
    """Both sides connect to each other at once."""

    ROUNDS = 200

    def test_one_connection_comes_of_it_and_every_message_arrives(self, inproc: Medium) -> None:
        for _ in range(self.ROUNDS):
            self.meet(inproc)

    def test_over_tcp(self, tcp: Medium) -> None:
        for _ in range(self.ROUNDS // 4):
            self.meet(tcp)

    def meet(self, medium: Medium) -> None:
        with Endpoint(medium.address, name="one") as one, Endpoint(medium.address, name="two") as two:
            start = threading.Barrier(2)

            def run(here: Endpoint, there: Endpoint) -> bytes:
                start.wait(SOON)
                peer = here.connect(there.address, timeout=SOON)
                peer.send(here.name.encode(), tag=1)
                out = bytearray(3)
                peer.recv(out, tag=1, timeout=SOON)
                return bytes(out)

            other = Call(run, two, one)
            assert run(one, two) == b"two"
            assert other.result() == b"one"
            assert len(one.peers) == len(two.peers) == len(one.hub.routers) == len(two.hub.routers) == 1
            link, far = router_of(one.peers[0]).link, router_of(two.peers[0]).link
            assert link is not None
            assert far is not None
            assert {link.local, link.remote} == {far.local, far.remote}, "the sides kept different connections"


def test_closing_tells_the_peer(pair: Pair) -> None:
    waiting = Call(pair.back.recv, bytearray(1), timeout=SOON)
    wait_until(pair.right.hub.matcher.posted, 5)
    pair.left.close()
    with pytest.raises(PeerLost) as caught:
        waiting.result()
    assert caught.value.reason == "it closed its endpoint"
    assert "left" in caught.value.peer
    with pytest.raises(PeerLost):
        pair.back.send(b"x")
    assert pair.right.peers == []


def test_close_lets_what_was_sent_arrive(medium: Medium) -> None:
    with Endpoint(medium.address, name="right", config=medium.config) as right:
        with Endpoint(medium.address, name="left", config=medium.config) as left:
            peer = left.connect(right.address, timeout=SOON)
            sends = [peer.isend(pattern(200_000, at), tag=at) for at in range(10)]
            back = right.accept(timeout=SOON)
            outs = [blank(200_000) for _ in sends]
            receives = [back.irecv(out, tag=at) for at, out in enumerate(outs)]
        for at, receive in enumerate(receives):
            receive.wait(SOON)
            assert (outs[at] == pattern(200_000, at)).all()


def test_close_says_what_could_not_be_sent(medium: Medium) -> None:
    with open_pair(medium, close_timeout=BRIEFLY) as pair:
        send = pair.there.isend(pattern(200_000), tag=1)
        with pytest.raises(DeadlineError, match="right") as caught:
            pair.left.close()
        assert caught.value.op == "close"
        with pytest.raises(ClosedError):
            send.wait(SOON)
        pair.left.close()  # again: nothing happens


def test_closed_endpoint_says_so(medium: Medium) -> None:
    with open_pair(medium) as pair:
        pair.left.close()
        out = bytearray(1)
        for call in (
            lambda: pair.there.send(b"x"),
            lambda: pair.there.send(bytes(100_000)),
            lambda: pair.there.isend(b"x"),
            lambda: pair.there.recv(out),
            lambda: pair.there.irecv(out),
            lambda: pair.there.send_object(1),
            pair.there.recv_object,
            pair.there.probe,
            pair.there.iprobe,
            lambda: pair.left.recv(out),
            lambda: pair.left.connect(pair.right.address),
            pair.left.accept,
            pair.there.barrier,
        ):
            with pytest.raises(ClosedError, match="closed"):
                call()
        assert repr(pair.left) == "<Endpoint 'left': closed>"


@pytest.mark.parametrize(
    "error, reason",
    [
        (ZeroDivisionError(), "it raised ZeroDivisionError"),
        (UsageError("Too long. Correct out."), "it raised UsageError: Too long. Correct out"),
        (ValueError("x = 0"), "it raised ValueError: x = 0"),
    ],
)
def test_error_inside_the_block_aborts(medium: Medium, error: Exception, reason: str) -> None:
    """The peer is not kept waiting for a goodbye. It quotes the error in a sentence, which ended in two full stops."""
    with Endpoint(medium.address, config=medium.config) as right:
        peers = []

        def fail() -> None:
            with Endpoint(medium.address, config=medium.config) as left:
                left.connect(right.address, timeout=SOON)
                peers.append(right.accept(timeout=SOON))
                raise error

        with pytest.raises(type(error)):
            fail()
        with pytest.raises(PeerLost) as caught:
            peers[0].recv(bytearray(1), timeout=SOON)
        assert caught.value.reason == reason
        assert str(caught.value).split(", during")[0].endswith(f"is lost: {reason}")


def test_status_lines(tcp: Medium) -> None:
    with open_pair(tcp) as pair:
        assert repr(pair.left) == f"<Endpoint 'left' at {pair.left.address}: 1 peers>"
        assert repr(pair.there).startswith("<Peer peer 'right' (host ")
        assert repr(pair.there).endswith(": connected>")
        pair.right.close()
        wait_until(lambda: not pair.there.connected, 5)
        assert "lost: it closed its endpoint" in repr(pair.there)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="no field colour"):
        Endpoint("inproc://", config=Config(), colour="red")


def test_two_that_close_at_once_do_not_wait_for_what_neither_takes(medium: Medium) -> None:
    """Each has announced a large message, and has no receive for the other's: both waited for the deadline of close,
    and raised DeadlineError (seen with asynchronous collectives that were never waited for)."""
    with open_pair(medium, **PATIENT) as pair:
        big = blank(1 << 20)
        sends = [pair.there.isend(big, tag=1), pair.back.isend(big, tag=1)]
        wait_until(lambda: all(router_of(peer).outbound.announced for peer in (pair.there, pair.back)), 10)
        ends = [Call(pair.left.close), Call(pair.right.close)]
        for end in ends:
            end.result()
        for send in sends:
            with pytest.raises((ClosedError, PeerLost)):
                send.result()

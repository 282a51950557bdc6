"""Requests and replies between endpoints: the ground on which the store stands, and RPC will."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from peers import BRIEFLY, SOON, Call, Medium
from rankmesh import DeadlineError, Endpoint, Peer, PeerLost, UsageError
from rankmesh.config import KIB, MIB
from rankmesh.endpoint.hub import Service
from rankmesh.endpoint.router import Router
from timing import wait_until

ECHO, FAIL, SILENT, DOUBLE = 101, 102, 103, 104  # numbers of our own: rankmesh has the first ones


def reply(router: Router, ident: int, body: bytes, failed: bool = False) -> None:
    router.reply(ident, [memoryview(body)], len(body), failed)


class Server:
    """What the services of the tests do, and what they were asked."""

    def __init__(self) -> None:
        self.silent: list[tuple[Router, int]] = []

    def services(self) -> dict[int, Service]:
        return {
            ECHO: lambda router, ident, payload, owned: reply(router, ident, bytes(payload)),
            FAIL: lambda router, ident, payload, owned: reply(router, ident, b"it is broken", failed=True),
            SILENT: lambda router, ident, payload, owned: self.silent.append((router, ident)),
            DOUBLE: lambda router, ident, payload, owned: reply(router, ident, bytes(payload) * 2),
        }


@contextmanager
def serving(medium: Medium, **settings: object) -> Iterator[tuple[Endpoint, Peer, Server, Endpoint]]:
    config = medium.config.override(**settings)
    server = Server()
    with (
        Endpoint(medium.address, name="server", config=config, services=server.services()) as right,
        Endpoint(medium.address, name="client", config=config) as left,
    ):
        yield left, left.connect(right.address, timeout=SOON), server, right


@pytest.mark.parametrize("nbytes", [0, 1, 64 * KIB, 64 * KIB + 1, 5 * MIB])
def test_request_and_reply(medium: Medium, nbytes: int) -> None:
    body = bytes(range(256)) * (nbytes // 256) + bytes(nbytes % 256)
    with serving(medium) as (client, peer, _, _):
        answer = client.request(peer, ECHO, body, "ask", timeout=SOON)
        assert bytes(answer.payload) == body
        assert answer.failed is False


def test_failure_is_told(medium: Medium) -> None:
    with serving(medium) as (client, peer, _, _):
        answer = client.request(peer, FAIL, b"", "ask", timeout=SOON)
        assert answer.failed is True
        assert bytes(answer.payload) == b"it is broken"


def test_unknown_service_is_told_at_once_and_ends_nothing(medium: Medium) -> None:
    """FEATURES: in nexar an unknown function means silence until the timeout, and ends the server's loop."""
    with serving(medium) as (client, peer, _, _):
        answer = client.request(peer, 99, b"", "ask", timeout=SOON)
        assert answer.failed is True
        assert b"no service 99" in bytes(answer.payload)
        assert bytes(client.request(peer, ECHO, b"still there", "ask", timeout=SOON).payload) == b"still there"


def test_concurrent_requests_get_their_own_replies(medium: Medium) -> None:
    """FEATURES: in ferrotorch two concurrent calls can take each other's replies."""
    with serving(medium) as (client, peer, _, _):

        def ask(number: int) -> None:
            for size in (4, 100 * KIB, 8):
                body = number.to_bytes(4, "little") * (size // 4)
                assert bytes(client.request(peer, DOUBLE, body, "ask", timeout=SOON).payload) == body * 2

        for call in [Call(ask, number) for number in range(16)]:
            call.result()


def test_late_reply_finds_nobody_and_harms_nothing(medium: Medium) -> None:
    with serving(medium) as (client, peer, server, right):
        with pytest.raises(DeadlineError) as caught:
            client.request(peer, SILENT, b"", "ask the sphinx at", timeout=BRIEFLY)
        assert caught.value.op == "ask the sphinx at"
        wait_until(lambda: server.silent, 5)
        router, ident = server.silent.pop()
        with right.hub.engine:
            reply(router, ident, b"too late")
        assert bytes(client.request(peer, ECHO, b"now", "ask", timeout=SOON).payload) == b"now"
        assert peer.router.requests == {}


def test_requests_pass_messages_that_nobody_receives(medium: Medium) -> None:
    with serving(medium, eager_bytes=4 * KIB, lane_credit_bytes=16 * KIB, peer_credit_bytes=16 * KIB) as served:
        client, peer, _, _ = served
        stuck = [peer.isend(bytes(4 * KIB), tag=1) for _ in range(50)]
        for nbytes in (10, 100 * KIB):
            assert client.request(peer, ECHO, bytes(nbytes), "ask", timeout=SOON).payload.nbytes == nbytes
        assert not all(send.done() for send in stuck)
        for send in stuck:
            send.cancel()


def test_large_requests_share_a_bound(medium: Medium) -> None:
    """Only as many as fit are granted at once; the others wait for their turn and all are answered."""
    with serving(medium, rpc_inflight_bytes=1 * MIB) as (client, peer, _, right):
        calls = [Call(client.request, peer, ECHO, bytes([at]) * (700 * KIB), "ask", timeout=SOON) for at in range(6)]
        for at, call in enumerate(calls):
            assert bytes(call.result().payload) == bytes([at]) * (700 * KIB)
        assert vars(right.hub)["_rpc_bytes"] == 0


def test_request_over_the_limit_is_refused(medium: Medium) -> None:
    with serving(medium, max_rpc_bytes=1 * MIB) as (client, peer, _, _):
        with pytest.raises(UsageError, match="max_rpc_bytes"):
            client.request(peer, ECHO, bytes(MIB + 1), "ask", timeout=SOON)
        assert client.request(peer, ECHO, bytes(MIB), "ask", timeout=SOON).payload.nbytes == MIB
        assert peer.router.requests == {}


def test_end_of_the_server_ends_requests(medium: Medium) -> None:
    with serving(medium) as (client, peer, server, right):
        asking = Call(client.request, peer, SILENT, b"", "ask", timeout=SOON)
        wait_until(lambda: server.silent, 5)
        right.abort()
        with pytest.raises(PeerLost) as caught:
            asking.result()
        assert caught.value.op == "ask"
        assert "server" in caught.value.peer

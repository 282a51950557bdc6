"""A call is tried again only where that is safe, and only once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from peers import SOON, Medium
from rankmesh import Endpoint, Peer, PeerLost
from rankmesh.membership.ports import free_port
from timing import wait_until


class Flaky:
    """A server on one address that dies in the middle of a call, and comes back at once."""

    def __init__(self) -> None:
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.calls = 0
        self.die_at = 2
        self.endpoint = self._open()
        self.changing = threading.Lock()

    def _open(self) -> Endpoint:
        endpoint = Endpoint(self.address, name="flaky")
        endpoint.rpc.register(self.work, "safe", idempotent=True)
        endpoint.rpc.register(self.work, "unsafe")
        return endpoint

    def work(self, value: int) -> int:
        self.calls += 1
        if self.calls == self.die_at:
            with self.changing:
                self.endpoint.abort()
                self.endpoint = self._open()
        return value


@contextmanager
def flaky() -> Iterator[tuple[Flaky, Endpoint, Peer]]:
    server = Flaky()
    with Endpoint(None, name="client") as client:
        try:
            yield server, client, client.connect(server.address, timeout=SOON)
        finally:
            with server.changing:
                server.endpoint.abort()


def test_idempotent_call_is_tried_again_after_a_reconnect() -> None:
    with flaky() as (server, _, peer):
        assert peer.call("safe", 1, timeout=SOON) == 1
        assert peer.call("safe", 2, timeout=SOON) == 2
        assert server.calls == 3
        assert peer.call("unsafe", 3, timeout=SOON) == 3  # the lost peer's successor takes its place


def test_lost_peers_are_forgotten_with_their_last_reference() -> None:
    """A client may outlive thousands of servers."""
    with flaky() as (server, client, peer):
        successors = client.rpc._successors
        for lives in range(1, 4):
            server.die_at = server.calls + 2
            assert [peer.call("safe", value, timeout=SOON) for value in (1, 2)] == [1, 2]
            assert [*successors] == [peer]
            assert server.calls == 3 * lives
            successor = successors[peer]
            assert isinstance(successor, Peer)
            peer = successor
            wait_until(lambda: gc.collect() >= 0 and not successors, 10)  # a peer and its router know each other


def test_other_calls_are_not_tried_again() -> None:
    with flaky() as (server, _, peer):
        assert peer.call("unsafe", 1, timeout=SOON) == 1
        with pytest.raises(PeerLost):
            peer.call("unsafe", 2, timeout=SOON)
        assert server.calls == 2


def test_function_that_is_no_longer_idempotent_is_not_tried_again() -> None:
    with flaky() as (server, _, peer):
        assert peer.call("safe", 1, timeout=SOON) == 1
        server._open = lambda: _without_promise(server)  # type: ignore[method-assign]
        with pytest.raises(PeerLost):
            peer.call("safe", 2, timeout=SOON)
        assert server.calls == 2


def _without_promise(server: Flaky) -> Endpoint:
    endpoint = Endpoint(server.address, name="flaky")
    endpoint.rpc.register(server.work, "safe")
    return endpoint


def test_lost_peer_is_told_where_nobody_comes_back(tcp: Medium) -> None:
    with Endpoint(None) as client:
        server = Endpoint(tcp.address)
        server.rpc.register(lambda: 1, "safe", idempotent=True)
        peer = client.connect(server.address, timeout=SOON)
        assert peer.call("safe", timeout=SOON) == 1
        server.abort()
        wait_until(lambda: not peer.connected, 10)
        with pytest.raises(PeerLost):
            peer.call("safe", timeout=1)

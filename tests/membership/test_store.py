"""The embedded store: values, counters, waits, bounds, and who may use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic

import pytest

from peers import BRIEFLY, SOON, Call
from rankmesh import Config, ConnectError, DeadlineError, Endpoint, PeerLost, RemoteError
from rankmesh.membership import store as store_module
from rankmesh.membership.store import SERVICE, StoreClient, StoreServer
from timing import wait_until

SCHEMES = ["inproc://", "tcp://127.0.0.1:0"]


@contextmanager
def clients(count: int, address: str = "inproc://") -> Iterator[tuple[StoreServer, list[StoreClient]]]:
    with ExitStack() as stack:
        server = stack.enter_context(StoreServer(address, Config()))
        endpoints = [stack.enter_context(Endpoint(None, name=f"client {at}")) for at in range(count)]
        yield server, [StoreClient(endpoint, endpoint.connect(server.address, SOON)) for endpoint in endpoints]


@pytest.fixture(params=SCHEMES)
def store(request: pytest.FixtureRequest) -> Iterator[StoreClient]:
    with clients(1, request.param) as (_, (client,)):
        yield client


def test_set_get_delete(store: StoreClient) -> None:
    store.set("a", b"1")
    assert store.get("a", timeout=SOON) == b"1"
    store.set("a", b"2")
    assert store.get("a", timeout=SOON) == b"2"
    assert store.delete("a") is True
    assert store.delete("a") is False
    with pytest.raises(DeadlineError, match="'a'") as caught:
        store.get("a", timeout=BRIEFLY)
    assert caught.value.op == "store get"


def test_keys_by_prefix(store: StoreClient) -> None:
    for key in ("run/2", "run/1", "other", "run"):
        store.set(key, b"")
    assert store.keys("run/") == ["run/1", "run/2"]
    assert store.keys() == ["other", "run", "run/1", "run/2"]


def test_claim_is_for_the_first(store: StoreClient) -> None:
    assert store.claim("rank/0", b"me") == b"me"
    assert store.claim("rank/0", b"you") == b"me"
    assert store.get("rank/0", timeout=SOON) == b"me"


def test_swap_needs_the_expected_value(store: StoreClient) -> None:
    assert store.swap("state", b"", b"1") is None
    store.set("state", b"1")
    assert store.swap("state", b"0", b"2") == b"1"
    assert store.swap("state", b"1", b"2") == b"2"
    assert store.get("state", timeout=SOON) == b"2"


def test_swaps_of_many_are_one_after_the_other() -> None:
    with clients(4) as (_, stores):
        stores[0].set("n", b"0")

        def count(client: StoreClient, name: str) -> None:
            for _ in range(25):
                found: bytes | None = client.get("n", timeout=SOON)
                wanted = None
                while found != wanted:
                    assert found is not None
                    expected, wanted = found, b"%d %s" % (int(found.split()[0]) + 1, name.encode())
                    found = client.swap("n", expected, wanted)

        for call in [Call(count, client, str(at)) for at, client in enumerate(stores)]:
            call.result()
        assert stores[0].get("n", timeout=SOON).split()[0] == b"100"


def test_only_one_of_many_claims_succeeds() -> None:
    with clients(6) as (_, stores):
        calls = [Call(client.claim, "key", str(at).encode()) for at, client in enumerate(stores)]
        assert len({call.result() for call in calls}) == 1


def test_counter() -> None:
    with clients(4) as (_, stores):

        def count(client: StoreClient) -> list[int]:
            return [client.add("n", 1) for _ in range(25)]

        seen = [value for call in [Call(count, client) for client in stores] for value in call.result()]
        assert sorted(seen) == list(range(1, 101))
        assert stores[0].add("n", -100) == 0
        assert stores[0].get("n", timeout=SOON) == b"0"


def test_what_is_no_counter_is_refused(store: StoreClient) -> None:
    store.set("text", b"hello")
    with pytest.raises(RemoteError, match="not a counter") as caught:
        store.add("text", 1)
    assert caught.value.remote_type == "StoreError"
    assert "store" in caught.value.peer


def test_get_waits_for_the_key() -> None:
    with clients(2) as (server, (one, other)):
        waiting = Call(one.get, "late", timeout=SOON)
        wait_until(lambda: vars(server)["_waiters"], 5)
        other.set("late", b"here")
        assert waiting.result() == b"here"
        assert vars(server)["_waiters"] == {}


def test_get_many_tells_what_is_there_by_the_deadline() -> None:
    with clients(2) as (server, (one, other)):
        waiting = Call(one.get_many, ["a", "b", "c"], timeout=1.0)
        wait_until(lambda: vars(server)["_waiters"], 5)
        other.set("b", b"2")
        assert waiting.result() == {"b": b"2"}
        assert vars(server)["_waiters"] == {}, "a read that ended is kept"
        assert one.get_many(["b"], timeout=0) == {"b": b"2"}
        assert one.get_many([], timeout=SOON) == {}


def test_many_wait_for_one_key() -> None:
    with clients(8) as (_, stores):
        waiting = [Call(client.get, "go", timeout=SOON) for client in stores]
        stores[0].set("go", b"x")
        assert [call.result() for call in waiting] == [b"x"] * 8


def test_values_of_any_size(store: StoreClient) -> None:
    for nbytes in (0, 1, 100_000, 3_000_000):
        store.set("k", bytes(nbytes))
        assert store.get("k", timeout=SOON) == bytes(nbytes)


def test_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "STORE_BYTES", 1000)
    with clients(1) as (server, (store,)):
        store.set("a", bytes(500))
        with pytest.raises(RemoteError, match="full"):
            store.set("b", bytes(500))
        with pytest.raises(RemoteError, match="full"):
            store.claim("b", bytes(500))
        store.set("a", bytes(100))
        store.set("b", bytes(500))
        assert vars(server)["_nbytes"] == 602
        with pytest.raises(RemoteError, match="full"):
            store.add("x" * 600, 1)
        store.delete("b")
        assert vars(server)["_nbytes"] == 101


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"rubbish", b"\x81\xa4type\xa3set", b"\x82\xa4type\xa6delete\xa3key\xa1\xff"]
)
def test_malformed_request_is_refused_and_ends_nothing(body: bytes) -> None:
    with StoreServer("inproc://", Config()) as server, Endpoint(None) as endpoint:
        peer = endpoint.connect(server.address, SOON)
        answer = endpoint.request(peer, SERVICE, body, "ask", timeout=SOON)
        assert answer.failed
        assert b"cannot be read" in bytes(answer.payload)
        assert StoreClient(endpoint, peer).keys() == []


def test_end_of_the_store_is_noticed() -> None:
    with clients(1) as (server, (store,)):
        waiting = Call(store.get, "never", timeout=SOON)
        wait_until(lambda: vars(server)["_waiters"], 5)
        began = monotonic()
        server.close()
        with pytest.raises(PeerLost) as caught:
            waiting.result()
        assert caught.value.op == "store get at"
        assert monotonic() - began < SOON / 2


def test_client_that_went_away_is_not_waited_for() -> None:
    with clients(2) as (server, (store, other)):
        waiting = Call(store.get, "late", timeout=SOON)
        wait_until(lambda: vars(server)["_waiters"], 5)
        vars(store)["_endpoint"].abort()
        with pytest.raises(Exception, match="aborted"):
            waiting.result()
        other.set("late", b"x")
        assert other.get("late", timeout=SOON) == b"x"


def test_wrong_token_is_kept_out() -> None:
    with StoreServer("tcp://127.0.0.1:0", Config(token="right")) as server, Endpoint(None, token="wrong") as endpoint:
        address = server.address
        with pytest.raises(ConnectError, match="token"):
            endpoint.connect(address, SOON)


def test_status_line() -> None:
    with clients(2) as (server, stores):
        stores[0].set("a", b"")
        assert repr(server) == f"<StoreServer at {server.address}: 1 keys, 2 clients>"

"""A handler may end its own endpoint. Whichever thread happens to run it, and wherever that was just looking, leaves in
order: nothing hangs, and no thread dies with a traceback (pytest and tests/leaks.py would tell)."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator

import pytest

from peers import SOON, Call
from rankmesh import ClosedError, Config, DeadlineError, Endpoint, PeerLost
from timing import scaled

#: More calls than there are waits between two looks at all connections.
CALLS = 40
ADDRESSES = {"shm": "shm://", "tcp": "tcp://127.0.0.1:0"}


def nobody(server: Endpoint) -> None:
    """Only rankmesh's own threads read."""


def one_long_wait(server: Endpoint) -> None:
    with pytest.raises(ClosedError):
        server.recv(bytearray(1), timeout=SOON)


def many_short_waits(server: Endpoint) -> None:
    while True:
        try:
            server.recv(bytearray(1), timeout=0.0002)
        except DeadlineError:
            continue
        except ClosedError:
            return


@pytest.fixture(autouse=True)
def _no_complaints(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, "rankmesh"):
        yield
    assert caplog.text == ""


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("waiting", [nobody, one_long_wait, many_short_waits])
@pytest.mark.parametrize("inline", [True, False], ids=["inline", "pooled"])
@pytest.mark.parametrize("address", ADDRESSES.values(), ids=ADDRESSES)
def test_handler_ends_its_own_endpoint_at_any_call(
    address: str, inline: bool, waiting: Callable[[Endpoint], None], step: int
) -> None:
    """At each call by which it may be found at another place; of three calls at one, which differs from run to run."""
    config = Config(shm=False)
    first = random.randint(1, step)
    print(f"from call {first} on")
    with Endpoint(address, name="client", config=config) as client:
        for last in range(first, CALLS + 1, step):
            server = Endpoint(address, name="server", config=config)

            def count(number: int, server: Endpoint = server, last: int = last) -> int:
                if number == last:
                    server.abort()
                return number

            server.rpc.register(count, inline=inline)
            waiter = Call(waiting, server)
            peer = client.connect(server.address, timeout=SOON)
            for number in range(1, last):
                assert peer.call("count", number, timeout=SOON) == number
            with pytest.raises(PeerLost):
                peer.call("count", last, timeout=SOON)
            waiter.result(scaled(10))
            server.close()  # which was done


@pytest.mark.parametrize("address", ADDRESSES.values(), ids=ADDRESSES)
def test_handler_ends_its_own_endpoint_while_all_connections_are_looked_at(address: str) -> None:
    """The engine's descriptors are gone when the look at the first connection returns."""
    config = Config(shm=False)
    with Endpoint(address, name="client", config=config) as client:
        server = Endpoint(address, name="server", config=config)
        server.rpc.register(server.abort, "end", inline=True)
        peer = client.connect(server.address, timeout=SOON)
        server.accept(timeout=SOON)
        engine = server.hub.engine
        with engine:
            work = peer.call_async("end", timeout=SOON)
            engine.turn()
        assert engine.closed
        with pytest.raises(PeerLost):
            work.result()

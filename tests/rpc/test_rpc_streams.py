"""Streams and channels: in order, under back-pressure, and stopped from either end."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from calls import Served, serving
from peers import BRIEFLY, SOON, Call, Medium, pattern
from rankmesh import ClosedError, DeadlineError, FunctionNotFound, RemoteError
from rankmesh.config import KIB, MIB
from rankmesh.rpc.streams import OVERHEAD, WINDOW
from timing import wait_until


@pytest.mark.parametrize("name", ["count", "acount"])
@pytest.mark.parametrize("n", [0, 1, 2500])
def test_items_come_in_order(served: Served, name: str, n: int) -> None:
    assert list(served.peer.stream(name, n, timeout=SOON)) == list(range(n))
    wait_until(lambda: served.functions.log == ["closed"], 10)
    assert served.client.rpc.statistics()["calls_waiting"] == 0
    wait_until(lambda: served.server.rpc.statistics()["serving"] == 0, 10)


@pytest.mark.parametrize("name", ["count", "acount"])
def test_items_come_to_tasks(served: Served, name: str) -> None:
    async def main() -> list[int]:
        return [item async for item in served.peer.stream(name, 1500, timeout=SOON)]

    assert asyncio.run(main()) == list(range(1500))


def test_large_and_small_items_keep_their_order(served: Served) -> None:
    """A large item travels beside the small ones after it, and comes later."""
    sizes = [10, 3 * MIB, 10, 100 * KIB, 0, 2 * MIB, 20 * KIB, 1]

    def mixed() -> Iterator[Any]:
        for seed, nbytes in enumerate(sizes):
            yield pattern(nbytes, seed)

    served.server.rpc.register(mixed)
    got = list(served.peer.stream("mixed", timeout=SOON))
    assert [item.nbytes for item in got] == sizes
    assert all(np.array_equal(item, pattern(item.nbytes, seed)) for seed, item in enumerate(got))


@pytest.mark.parametrize("nbytes", [100, 10_000, 2 * MIB])
def test_producer_waits_for_its_consumer(served: Served, nbytes: int) -> None:
    stream = served.peer.stream("forever", nbytes, timeout=SOON)
    for number in range(3):
        assert next(stream)[-1] == number
    most = 3 + max(WINDOW // (nbytes + OVERHEAD), 1) + 2
    wait_until(lambda: served.server.rpc._server.pool.idle, 10)  # put aside: it keeps no thread
    assert len(served.functions.log) <= most
    produced = len(served.functions.log)
    for number in range(3, produced + 3):
        assert next(stream)[-1] == number % 256
    stream.close()
    wait_until(lambda: served.functions.log[-1] == "closed", 10)


@pytest.mark.parametrize("how", ["close", "with", "let go", "break"])
def test_leaving_early_stops_the_generator(served: Served, how: str) -> None:
    stream = served.peer.stream("forever", 10, timeout=SOON)
    assert next(stream)[0] == 0
    if how == "close":
        stream.close()
        with pytest.raises(ClosedError):
            next(stream)
    elif how == "with":
        with stream:
            next(stream)
    elif how == "break":
        for _ in stream:
            break
    del stream
    gc.collect()
    wait_until(lambda: served.functions.log[-1] == "closed", 10)
    wait_until(lambda: served.server.rpc.statistics()["serving"] == 0, 10)
    assert served.client.rpc.statistics()["calls_waiting"] == 0


def test_leaving_an_async_stream_early_stops_it(served: Served) -> None:
    with served.peer.stream("acount", 10**9, timeout=SOON) as stream:
        assert [next(stream) for _ in range(5)] == [0, 1, 2, 3, 4]
    wait_until(lambda: served.functions.log == ["closed"], 10)
    wait_until(lambda: served.server.rpc.statistics()["serving"] == 0, 10)


def test_lost_consumer_stops_the_generator(served: Served) -> None:
    stream = served.peer.stream("forever", 10, timeout=SOON)
    next(stream)
    served.client.abort()
    wait_until(lambda: served.functions.log[-1] == "closed", 10)
    wait_until(lambda: served.server.rpc.statistics()["serving"] == 0, 10)


@pytest.mark.parametrize("at", [0, 3])
def test_error_comes_after_the_items_before_it(served: Served, at: int) -> None:
    def broken() -> Iterator[Any]:
        for number in range(at):
            yield pattern(MIB, number)
        raise ValueError("no more")

    served.server.rpc.register(broken)
    got: list[Any] = []
    with pytest.raises(ValueError, match="no more") as caught:
        got.extend(served.peer.stream("broken", timeout=SOON))
    assert isinstance(caught.value, RemoteError)
    assert len(got) == at


def test_item_that_cannot_travel_ends_the_stream(served: Served) -> None:
    served.server.rpc.register(lambda: iter([1, object(), 3]), "rubbish")
    got: list[Any] = []
    with pytest.raises(RemoteError, match="cannot be sent"):
        got.extend(served.peer.stream("rubbish", timeout=SOON))
    assert got == [1]


def test_plain_function_may_return_what_is_streamed(served: Served) -> None:
    served.server.rpc.register(lambda n: [n] * n, "repeat")
    assert list(served.peer.stream("repeat", 3, timeout=SOON)) == [3, 3, 3]


def test_item_that_does_not_come_in_time_ends_the_stream(served: Served) -> None:
    def slow() -> Iterator[int]:
        yield 1
        served.functions.wait(SOON)
        yield 2

    served.server.rpc.register(slow)
    stream = served.peer.stream("slow", timeout=SOON)
    assert stream.recv() == 1
    with pytest.raises(DeadlineError):
        stream.recv(timeout=BRIEFLY)
    wait_until(lambda: served.server.rpc.statistics()["serving"] == 0, 10)


def test_unknown_stream_is_told_at_once(served: Served) -> None:
    with pytest.raises(FunctionNotFound):
        next(served.peer.stream("cuont", 1, timeout=SOON))


def test_many_streams_share_few_threads(tcp: Medium) -> None:
    with serving(tcp, {"rpc_threads": 2}) as served:
        streams = [served.peer.stream("forever", 20 * KIB, timeout=SOON) for _ in range(20)]
        for number in range(30):
            assert {int(next(stream)[0]) for stream in streams} == {number}
        assert served.server.rpc.statistics()["threads"] <= 2
        for stream in streams:
            stream.close()
        wait_until(lambda: served.functions.log.count("closed") == 20, 10)


@pytest.mark.parametrize("name", ["chat", "achat"])
def test_channel_converses(served: Served, name: str) -> None:
    with served.peer.channel(name, "hello", timeout=SOON) as channel:
        assert channel.recv() == "hello"
        for item in (1, "two", {"three": 3}):
            channel.send(item)
            assert channel.recv() == [item, item]
        large = pattern(2 * MIB)
        channel.send(large)
        channel.send("after")
        echoed = channel.recv()
        assert np.array_equal(echoed[0], large)
        assert channel.recv() == ["after", "after"]
        channel.end()
        assert list(channel) == []
    wait_until(lambda: served.server.rpc.statistics()["serving"] == 0, 10)


def test_channel_converses_with_tasks(served: Served) -> None:
    async def main() -> list[Any]:
        channel = served.peer.channel("achat", "hello", timeout=SOON)
        got = [await channel.arecv()]
        for item in range(3):
            await channel.asend(item)
        channel.end()
        return got + [item async for item in channel]

    assert asyncio.run(main()) == ["hello", [0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize("name", ["chat", "achat"])
def test_sender_waits_for_the_other_side_of_a_channel(served: Served, name: str) -> None:
    """Nobody takes what comes back, so the handler stops taking, so the sender has to wait."""
    with served.peer.channel(name, "hello", timeout=SOON) as channel:
        sent: list[int] = []

        def send(number: int) -> int:
            channel.send(bytes(4 * KIB), timeout=BRIEFLY)
            return number

        with pytest.raises(DeadlineError):
            sent.extend(map(send, range(10_000)))
        assert len(sent) <= 4 * WINDOW // (4 * KIB)
    wait_until(lambda: served.server.rpc.statistics()["serving"] == 0, 10)


@pytest.mark.parametrize("name", ["chat", "achat"])
def test_closing_a_channel_ends_its_handler(served: Served, name: str) -> None:
    channel = served.peer.channel(name, "hello", timeout=SOON)
    assert channel.recv() == "hello"
    waiting = Call(channel.recv)
    channel.close()
    with pytest.raises(ClosedError):
        waiting.result()
    with pytest.raises(ClosedError):
        channel.send(1)
    wait_until(lambda: served.server.rpc.statistics()["serving"] == 0, 10)


def test_stream_to_oneself(inproc: Medium) -> None:
    with serving(inproc) as served:
        assert list(served.server.rpc.stream(served.server, "count", 2000, timeout=SOON)) == list(range(2000))
        with served.server.rpc.channel(served.server, "chat", "hello", timeout=SOON) as channel:
            channel.send(1)
            assert [channel.recv(), channel.recv()] == ["hello", [1, 1]]

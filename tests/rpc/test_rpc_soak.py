"""Calls of every kind, with cancellations and disconnects by chance, for a while: nothing may be left afterwards.

Two minutes: `make soak`, or `pytest -m soak tests/rpc`.
"""

from __future__ import annotations

import gc
import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest

from calls import Functions
from peers import SOON, Call
from rankmesh import Endpoint, Peer, RankmeshError
from rankmesh.config import KIB, MIB
from timing import scaled, wait_until

THREADS = 4
#: What this process may grow by once it has warmed up: buffers kept for reuse, and the allocator's slack.
GROWTH = 96 * MIB


class Client(threading.Thread):
    """Does whatever its Random says, over connections that it drops now and then."""

    def __init__(self, address: str, seed: str, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._random = random.Random(seed)
        self._stop_soon = stop
        self.done: Counter[str] = Counter()
        self.trouble: list[BaseException] = []
        self._acts: list[Callable[[Peer], None]] = [
            self._call, self._call, self._call, self._large, self._cancel, self._late, self._stream, self._channel,
            self._notify, self._reference, self._error,
        ]  # fmt: skip

    def run(self) -> None:
        try:
            while not self._stop_soon.is_set():
                self._one_connection()
        except BaseException as error:  # noqa: BLE001  # told by the test
            self.trouble.append(error)

    def _one_connection(self) -> None:
        rnd = self._random
        endpoint = Endpoint(None, name="soaking")
        peer = endpoint.connect(self._address, timeout=SOON)
        for _ in range(rnd.randint(20, 400)):
            act = rnd.choice(self._acts)
            act(peer)
            self.done[act.__name__] += 1
            if self._stop_soon.is_set():
                break
        left = endpoint.rpc.statistics()["calls_waiting"]
        if rnd.random() < 0.5:
            unfinished = [peer.call_async("wait", timeout=SOON) for _ in range(rnd.randint(0, 5))]
            endpoint.abort()
            assert all(work.done() for work in unfinished)
        else:
            assert left == 0, f"{left} calls are left"
            endpoint.close()
        self.done["disconnect"] += 1

    def _kind(self) -> str:
        return self._random.choice(("echo", "pooled", "aecho"))

    def _call(self, peer: Peer) -> None:
        value = [self._random.random(), {"text": "x" * self._random.randrange(3000)}]
        assert peer.call(self._kind(), value, timeout=SOON) == value

    def _large(self, peer: Peer) -> None:
        array = np.full(self._random.choice((70 * KIB, MIB, 3 * MIB)), self._random.randrange(256), np.uint8)
        assert np.array_equal(peer.call(self._kind(), array, timeout=SOON), array)

    def _cancel(self, peer: Peer) -> None:
        name = self._random.choice(("wait", "await_cancel"))
        works = [peer.call_async(name, timeout=SOON) for _ in range(self._random.randint(1, 4))]
        for work in works:
            work.cancel()

    def _late(self, peer: Peer) -> None:
        try:
            peer.call(self._random.choice(("wait", "await_cancel")), timeout=0.005)
        except RankmeshError:
            pass

    def _stream(self, peer: Peer) -> None:
        take = self._random.randrange(100)
        with peer.stream(self._random.choice(("count", "acount")), 100, timeout=SOON) as stream:
            assert [item for item, _ in zip(stream, range(take), strict=False)] == list(range(take))

    def _channel(self, peer: Peer) -> None:
        with peer.channel(self._random.choice(("chat", "achat")), "hello", timeout=SOON) as channel:
            assert channel.recv() == "hello"
            for number in range(self._random.randrange(5)):
                channel.send(number)
                assert channel.recv() == [number, number]

    def _notify(self, peer: Peer) -> None:
        peer.notify("echo", b"x" * self._random.randrange(1000))

    def _reference(self, peer: Peer) -> None:
        reference = peer.remote("make", 3, timeout=SOON)
        assert reference.call("add", 4, timeout=SOON) == 7
        if self._random.random() < 0.5:
            reference.release()

    def _error(self, peer: Peer) -> None:
        for args in (("fail", "ValueError"), ("nothing",), ("add",)):
            with pytest.raises((RankmeshError, ValueError)):
                peer.call(*args, timeout=SOON)


def soak(seconds: float, seed: int) -> None:
    functions = Functions()
    with Endpoint("tcp://127.0.0.1:0", name="server", rpc_threads=8) as server:
        functions.register(server.rpc)
        most = threading.active_count() + server.config.rpc_threads + 2  # its pool, an event loop, a lookup
        _session(server, functions, min(seconds / 4, 10), f"{seed}/warm")
        warm = _memory()
        done = _session(server, functions, seconds, f"{seed}/soak")
        assert done["disconnect"] >= THREADS, done
        wait_until(lambda: threading.active_count() <= most, 10)  # of those that were aborted the last ones end
        assert _memory() - warm < GROWTH, (warm, _memory(), done)


def _session(server: Endpoint, functions: Functions, seconds: float, seed: str) -> Counter[str]:
    stop = threading.Event()
    clients = [Client(server.address, f"{seed}/{number}", stop) for number in range(THREADS)]
    for client in clients:
        client.start()
    deadline = monotonic() + seconds
    wait_until(lambda: monotonic() >= deadline or any(client.trouble for client in clients), seconds + 10)
    stop.set()
    for client in clients:
        client.join(SOON)
        assert not client.is_alive(), "a client hangs"
        for error in client.trouble:
            raise error
    functions.log.clear()
    gc.collect()
    wait_until(lambda: _left(server) == {}, 20, "the end of everything that was served")
    return sum((client.done for client in clients), Counter())


def _left(server: Endpoint) -> dict[str, Any]:
    numbers = server.rpc.statistics()
    left = {
        what: numbers[what] for what in ("serving", "serving_bytes", "references", "calls_waiting") if numbers[what]
    }
    return left | ({"peers": server.peers} if server.peers else {})


def _memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_soak_briefly() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    Call(soak, 2.0, seed).result(timeout=scaled(50))


@pytest.mark.soak
@pytest.mark.timeout(scaled(300))
def test_soak() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    Call(soak, 120.0, seed).result(timeout=scaled(280))

"""Every queue of RPC has its bound, and thousands of calls fit into them."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np
import pytest

from calls import Served, serving
from peers import SOON, Medium, router_of
from rankmesh import BusyError, DeadlineError, RemoteError, Work
from rankmesh.config import KIB, MIB
from rankmesh.endpoint.frames import BRIEF_ANSWER
from rankmesh.endpoint.lanes import Lane
from rankmesh.wire.header import HEADER_BYTES
from timing import wait_until

FLOOD = 10_000


@pytest.mark.parametrize("name", ["echo", "pooled", "aecho"])
def test_ten_thousand_calls_in_flight(tcp: Medium, name: str) -> None:
    with serving(tcp) as served:
        before = threading.active_count()
        works = deque(served.peer.call_async(name, number, timeout=3 * SOON) for number in range(FLOOD))
        most = max(threading.active_count() for _ in range(10)) - before
        assert [work.result() for work in works] == list(range(FLOOD))
        assert most <= served.server.config.rpc_threads + 2
        wait_until(lambda: served.server.rpc.statistics()["serving"] == 0, 10)
        assert served.client.rpc.statistics()["calls_waiting"] == 0


def fill(served: Served, calls: int) -> list[Any]:
    works = [served.peer.call_async("wait", timeout=SOON) for _ in range(calls)]
    wait_until(lambda: served.server.rpc.statistics()["serving"] == calls, 10)
    return works


def test_full_queue_is_busy_at_once(tcp: Medium) -> None:
    with serving(tcp, {"rpc_threads": 2, "rpc_queue_items": 5}) as served:
        works = fill(served, 5)
        for name in ("pooled", "aecho"):
            with pytest.raises(BusyError, match=r"rpc_queue_items \(5\)"):
                served.peer.call(name, 1, timeout=SOON)
        served.functions.gate.set()
        assert [work.result() for work in works] == ["waited"] * 5
        assert served.peer.call("pooled", 1, timeout=SOON) == 1
        assert served.server.rpc.statistics()["served_busy"] == 2


def test_queue_is_bounded_in_bytes(tcp: Medium) -> None:
    with serving(tcp, {"rpc_queue_bytes": MIB}) as served:
        works = fill(served, 3)
        with pytest.raises(BusyError, match="rpc_queue_bytes"):
            served.peer.call("pooled", np.zeros(MIB, np.uint8), timeout=SOON)
        served.functions.gate.set()
        for work in works:
            work.result()
        assert served.peer.call("pooled", np.zeros(2 * MIB, np.uint8), timeout=SOON).nbytes == 2 * MIB


def test_callers_wait_for_a_full_queue_if_so_configured(tcp: Medium) -> None:
    with serving(tcp, {"rpc_threads": 2, "rpc_queue_items": 5, "rpc_when_full": "wait"}) as served:
        works = fill(served, 5)
        patient = [served.peer.call_async("pooled", number, timeout=SOON) for number in range(50)]
        large = served.peer.call_async("pooled", np.ones(MIB), timeout=SOON)
        with pytest.raises(DeadlineError):
            served.peer.call("pooled", "late", timeout=0.2)
        assert not any(work.done() for work in patient)
        served.functions.gate.set()
        assert [work.result() for work in patient] == list(range(50))
        assert large.result().sum() == MIB
        for work in works:
            work.result()


def _call_until_busy(served: Served, value: Any) -> list[Work[Any]]:
    works: list[Work[Any]] = []
    for _ in range(100_000):
        try:
            works.append(served.peer.call_async("echo", value, timeout=SOON))
        except BusyError as busy:
            assert "rpc_send_bytes" in str(busy)  # noqa: PT017  # it comes sometime, and ends the loop
            return works
    raise AssertionError("there is no bound")


def test_requests_that_cannot_leave_are_bounded_in_bytes(tcp: Medium) -> None:
    """What waits to be sent to a peer that does not read is bounded by bytes, not by number."""
    with serving(tcp, {"rpc_send_bytes": 256 * MIB}, rpc_send_bytes=MIB) as served:
        with served.server.hub.engine:  # the server's thread can read nothing
            works = _call_until_busy(served, bytes(10 * KIB))
            assert served.client.rpc.statistics()["calls_waiting"] == len(works)
        assert all(work.result() == bytes(10 * KIB) for work in works)
        outbound = router_of(served.peer).outbound
        assert outbound.rpc_bytes == 0


def test_large_requests_that_cannot_leave_are_bounded_in_bytes(tcp: Medium) -> None:
    with serving(tcp, {"rpc_send_bytes": 256 * MIB}, rpc_send_bytes=4 * MIB) as served:
        array = np.ones(MIB, np.uint8)
        with served.server.hub.engine:
            works = _call_until_busy(served, array)
            assert 3 <= len(works) <= 4
        assert all(work.result().sum() == MIB for work in works)
        assert router_of(served.peer).outbound.rpc_bytes == 0


@pytest.mark.parametrize("nbytes, calls", [(MIB, 40), (10 * KIB, 4000)])
def test_caller_that_does_not_read_its_replies_cannot_fill_memory(tcp: Medium, nbytes: int, calls: int) -> None:
    """Results for it wait up to a bound in bytes; beyond, it gets errors instead, and never silence."""
    begin = threading.Event()

    def ones() -> Any:
        assert begin.wait(SOON)
        return np.ones(nbytes, np.uint8)

    with serving(tcp, {"rpc_send_bytes": 4 * MIB}) as served:
        served.server.rpc.register(ones)
        works = [served.peer.call_async("ones", timeout=2 * SOON) for _ in range(calls)]
        outbound = router_of(served.server.accept(timeout=SOON)).outbound
        wait_until(lambda: served.server.rpc.statistics()["serving"] == calls, 10)
        with served.client.hub.engine:  # the client's threads can read nothing
            begin.set()
            wait_until(lambda: served.server.rpc.statistics()["serving"] == 0, 10)
            assert outbound.rpc_bytes <= 4 * MIB
            assert outbound._queue.nbytes(Lane.RPC) <= 4 * MIB + calls * (BRIEF_ANSWER + HEADER_BYTES)
        outcomes = [_outcome(work, nbytes) for work in works]
        assert set(outcomes) == {"result", "refused"}
        wait_until(lambda: outbound.rpc_bytes == 0, 10)


def _outcome(work: Work[Any], nbytes: int) -> str:
    try:
        assert work.result().nbytes == nbytes
    except RemoteError as error:
        assert "rpc_send_bytes" in str(error)  # noqa: PT017  # one outcome of two
        return "refused"
    return "result"


def test_memory_of_large_calls_is_used_again(tcp: Medium) -> None:
    with serving(tcp) as served:
        array = np.ones(8 * MIB, np.uint8)
        for _ in range(10):
            assert served.peer.call("pooled", array, timeout=SOON).sum() == array.nbytes
        pool = served.server.hub.large_pool
        wait_until(lambda: 0 < pool.held <= pool.limit, 10)
        assert pool.held <= 3 * 16 * MIB

"""One call to many: results as they come, failures among them, and the rest given up when nobody wants it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from calls import Served, serving
from peers import BRIEFLY, SOON, Medium
from rankmesh import DeadlineError, Mesh, UsageError
from rankmesh.testing import run_world
from timing import wait_until


def test_all_ranks_answer() -> None:
    def body(mesh: Mesh) -> Any:
        mesh.rpc.register(lambda x: x * mesh.rank, "times")
        mesh.barrier(timeout=SOON)
        results = mesh.rpc.broadcast_call(None, "times", 10, timeout=SOON).results()
        some = {to: work.result() for to, work in mesh.rpc.broadcast_call([2, 0], "times", 3, timeout=SOON)}
        mesh.barrier(timeout=SOON)
        return results, some

    for results, some in run_world(3, body, "tcp://"):
        assert results == {0: 0, 1: 10, 2: 20}
        assert some == {0: 0, 2: 6}


def test_results_come_as_they_end_and_failures_are_among_them() -> None:
    release = threading.Event()

    def body(mesh: Mesh) -> Any:
        def act() -> str:
            if mesh.rank == 1:
                assert release.wait(SOON)
            if mesh.rank == 2:
                raise ValueError("rank 2 will not")
            return f"rank {mesh.rank}"

        if mesh.rank != 3:
            mesh.rpc.register(act)
        mesh.barrier(timeout=SOON)
        order: list[Any] = []
        if mesh.rank == 0:
            for to, work in mesh.rpc.broadcast_call(range(4), "act", timeout=SOON):
                order.append((to, _outcome(work)))
                if len(order) == 3:
                    release.set()
        mesh.barrier(timeout=SOON)
        return order

    order = run_world(4, body)[0]
    assert order[-1] == (1, "rank 1")
    assert sorted(order[:3]) == [(0, "rank 0"), (2, "ValueError"), (3, "FunctionNotFound")]


def _outcome(work: Any) -> str:
    try:
        return str(work.result())
    except Exception as error:  # noqa: BLE001  # the outcome is what is asked for
        return type(error).__name__


def test_results_come_to_tasks(tcp: Medium) -> None:
    with serving(tcp) as served:

        async def main() -> list[Any]:
            calls = served.client.rpc.broadcast_call([served.peer] * 5, "aecho", "x", timeout=SOON)
            return [work.result() async for _, work in calls]

        assert asyncio.run(main()) == ["x"] * 5


def test_those_that_do_not_answer_are_late(tcp: Medium) -> None:
    with serving(tcp) as served:
        works = [work for _, work in served.client.rpc.broadcast_call([served.peer] * 3, "wait", timeout=BRIEFLY)]
        for work in works:
            with pytest.raises(DeadlineError):
                work.result()


def test_cancelling_gives_up_the_rest(tcp: Medium) -> None:
    with serving(tcp) as served:
        both = served.client.rpc.broadcast_call([served.peer, served.peer], "await_cancel", timeout=SOON)
        wait_until(lambda: served.functions.log.count("waiting") == 2, 10)
        both.cancel()
        wait_until(lambda: served.functions.log.count("cancelled") == 2, 10)
        assert served.client.rpc.statistics()["calls_waiting"] == 0


def test_an_endpoint_has_no_everybody(served: Served) -> None:
    with pytest.raises(UsageError, match="everybody"):
        served.client.rpc.broadcast_call(None, "echo", 1)


def test_async_handlers_run_on_the_loop_they_are_given(tcp: Medium) -> None:
    with serving(tcp) as served:

        async def where() -> bool:
            return asyncio.get_running_loop() is mine

        served.server.rpc.register(where)

        async def main() -> Any:
            served.server.rpc.use_loop(asyncio.get_running_loop())
            return await served.peer.call_async("where", timeout=SOON)

        with asyncio.Runner() as runner:
            mine = runner.get_loop()
            assert runner.run(main()) is True

"""Deadlines travel and shorten; cancellation reaches handlers; what comes too late is dropped and counted."""

from __future__ import annotations

import asyncio
import threading
from time import monotonic
from typing import Any

import pytest

from calls import Served, serving
from peers import BRIEFLY, SOON, Call, Medium
from rankmesh import CancelledError, DeadlineError, UsageError, current_call
from timing import wait_until


@pytest.mark.parametrize("name", ["linger", "await_cancel"])
def test_call_ends_at_its_deadline(served: Served, name: str) -> None:
    gate = threading.Event()

    def linger() -> None:
        """One that does not answer just when its caller's time is up."""
        served.functions.wait()
        gate.wait(SOON)

    served.server.rpc.register(linger, "linger")
    with pytest.raises(DeadlineError) as caught:
        served.peer.call(name, timeout=BRIEFLY)
    assert caught.value.op == f"call of {name!r} at"
    assert caught.value.timeout == BRIEFLY
    wait_until(lambda: "cancelled" in served.functions.log, 10)
    gate.set()
    assert served.client.rpc.statistics()["calls_waiting"] == 0
    wait_until(lambda: served.server.rpc.statistics()["serving"] == 0, 10)


@pytest.mark.parametrize("name", ["wait", "await_cancel"])
def test_cancellation_reaches_the_handler(served: Served, name: str) -> None:
    work = served.peer.call_async(name, timeout=SOON)
    wait_until(lambda: "waiting" in served.functions.log, 10)
    assert work.cancel()
    with pytest.raises(CancelledError):
        work.result()
    wait_until(lambda: "cancelled" in served.functions.log, 10)
    wait_until(lambda: served.server.rpc.statistics()["serving"] == 0, 10)


def test_cancelling_the_task_cancels_the_call(served: Served) -> None:
    async def main() -> None:
        task = asyncio.ensure_future(asyncio.wait_for(served.peer.call_async("await_cancel", timeout=SOON), BRIEFLY))
        with pytest.raises(TimeoutError):
            await task

    asyncio.run(main())
    wait_until(lambda: "cancelled" in served.functions.log, 10)


def test_lost_caller_cancels_its_calls(served: Served) -> None:
    served.peer.call_async("wait", timeout=SOON)
    served.peer.call_async("await_cancel", timeout=SOON)
    wait_until(lambda: served.functions.log.count("waiting") == 2, 10)
    served.client.abort()
    wait_until(lambda: served.functions.log.count("cancelled") == 2, 10)
    wait_until(lambda: served.server.rpc.statistics()["serving"] == 0, 10)


def test_call_past_its_deadline_is_not_started(tcp: Medium) -> None:
    with serving(tcp, {"rpc_threads": 1}) as served:
        blocker = served.peer.call_async("wait", timeout=SOON)
        wait_until(lambda: "waiting" in served.functions.log, 10)
        with pytest.raises(DeadlineError):
            served.peer.call("note", "started", timeout=BRIEFLY)
        served.functions.gate.set()
        blocker.result()
        assert served.peer.call("pooled", 1, timeout=SOON) == 1
        assert "started" not in served.functions.log


def test_late_reply_is_dropped_and_counted(tcp: Medium) -> None:
    """The server's answer and the caller's cancellation cross."""
    with serving(tcp) as served:
        sent = threading.Event()
        finish = served.server.rpc._server.finish

        def stubborn(call: Any, *answer: Any, **options: Any) -> None:
            call.given_up = False  # as if the cancellation were still on its way
            finish(call, *answer, **options)
            sent.set()

        served.server.rpc._server.finish = stubborn  # type: ignore[method-assign]
        gate = threading.Event()
        served.server.rpc.register(lambda: gate.wait(SOON), "hold")  # one that does not end by itself at the deadline
        with pytest.raises(DeadlineError):
            served.peer.call("hold", timeout=BRIEFLY)
        gate.set()
        assert sent.wait(SOON)
        wait_until(lambda: served.client.rpc.statistics()["late_replies"] == 1, 10)
        assert served.peer.call("echo", 1, timeout=SOON) == 1


def test_deadline_shortens_in_nested_calls(served: Served) -> None:
    seen: list[float] = []
    served.client.rpc.register(lambda: seen.append(current_call().remaining), "inner")
    back = served.server.accept(timeout=SOON)

    def outer(timeout: float | None) -> float:
        remaining = current_call().remaining
        back.call("inner", timeout=timeout)
        return remaining

    served.server.rpc.register(outer)
    for timeout in (None, 1000.0):
        remaining = served.peer.call("outer", timeout, timeout=5)
        assert remaining <= 5
        assert seen.pop() <= remaining


def test_nested_call_ends_with_the_outer_one(served: Served) -> None:
    forever = threading.Event()
    served.client.rpc.register(lambda: forever.wait(SOON), "inner")
    back = served.server.accept(timeout=SOON)
    ended: list[Any] = []

    def outer() -> None:
        began = monotonic()
        try:
            back.call("inner", timeout=SOON)
        except DeadlineError:
            ended.append(monotonic() - began)

    served.server.rpc.register(outer)
    served.peer.call_async("outer", timeout=0.3)
    try:
        wait_until(lambda: ended, 10)
    finally:
        forever.set()
    assert ended[0] < SOON / 2


def test_context_tells_who_calls(served: Served) -> None:
    for inline in (True, False):

        def who() -> list[Any]:
            call = current_call()
            return [call.caller.name, call.name, call.cancelled, 0 < call.remaining <= 7, repr(call)[:14]]

        served.server.rpc.register(who, f"who{inline}", inline=inline)
        answer = served.peer.call(f"who{inline}", timeout=7)
        assert answer == ["client", f"who{inline}", False, True, "<call of 'whoT" if inline else "<call of 'whoF"]
    with pytest.raises(UsageError, match="no current call"):
        current_call()


def test_each_of_many_ends_at_its_own_deadline(tcp: Medium) -> None:
    with serving(tcp) as served:
        timeouts = [0.1, 0.2, 0.4, 0.6]

        def ask(timeout: float) -> float:
            began = monotonic()
            with pytest.raises(DeadlineError):
                served.peer.call("await_cancel", timeout=timeout)
            return monotonic() - began

        for timeout, call in [(timeout, Call(ask, timeout)) for timeout in timeouts]:
            assert timeout <= call.result() < timeout + SOON / 2

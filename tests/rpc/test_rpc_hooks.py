"""Hooks see calls on both sides, may refuse them, and carry trace context."""

from __future__ import annotations

from typing import Any

import pytest

from calls import Served, serving
from peers import SOON, Medium
from rankmesh import FunctionNotFound, Hook, RemoteError, current_call, trace, trace_context
from rankmesh.rpc import CallContext, CallInfo
from timing import wait_until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Recorder(Hook):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def before_call(self, call: CallInfo) -> None:
        call.notes["mine"] = len(self.seen)
        self.seen.append(("before_call", call.function))

    def after_call(self, call: CallInfo, error: BaseException | None) -> None:
        assert "mine" in call.notes
        assert call.seconds >= 0
        self.seen.append(("after_call", call.function, type(error).__name__))

    def before_serve(self, call: CallContext) -> None:
        self.seen.append(("before_serve", call.name, call.caller.name))

    def after_serve(self, call: CallContext, error: BaseException | None) -> None:
        self.seen.append(("after_serve", call.name, type(error).__name__))


@pytest.mark.parametrize("name", ["echo", "pooled", "aecho"])
def test_hooks_see_calls_before_and_after_on_both_sides(served: Served, name: str) -> None:
    here, there = Recorder(), Recorder()
    served.client.rpc.add_hook(here)
    served.server.rpc.add_hook(there)
    assert served.peer.call(name, 1, timeout=SOON) == 1
    wait_until(lambda: len(here.seen) == len(there.seen) == 2, 10)
    assert here.seen == [("before_call", name), ("after_call", name, "NoneType")]
    assert there.seen == [("before_serve", name, "client"), ("after_serve", name, "NoneType")]
    served.client.rpc.remove_hook(here)
    served.server.rpc.remove_hook(there)
    assert served.peer.call(name, 1, timeout=SOON) == 1
    assert len(here.seen) == len(there.seen) == 2


def test_hooks_hear_of_errors(served: Served) -> None:
    here, there = Recorder(), Recorder()
    served.client.rpc.add_hook(here)
    served.server.rpc.add_hook(there)
    for name in ("fail", "inline_fail"):
        with pytest.raises(ValueError, match="on purpose"):
            served.peer.call(name, "ValueError", timeout=SOON)
    with pytest.raises(FunctionNotFound):
        served.peer.call("nothing", timeout=SOON)
    wait_until(lambda: len(here.seen) == 6, 10)
    assert here.seen[1::2] == [
        ("after_call", "fail", "ValueError"),
        ("after_call", "inline_fail", "ValueError"),
        ("after_call", "nothing", "FunctionNotFound"),
    ]
    assert there.seen[1::2] == [("after_serve", "fail", "ValueError"), ("after_serve", "inline_fail", "ValueError")]


@pytest.mark.parametrize("name", ["echo", "pooled", "aecho"])
def test_hook_refuses_by_who_calls(served: Served, name: str) -> None:
    class Guard(Hook):
        def before_serve(self, call: CallContext) -> None:
            if call.caller.name == "client" and call.name == name:
                raise PermissionError(f"{call.caller.name} may not")

    served.server.rpc.add_hook(Guard())
    with pytest.raises(PermissionError, match="client may not") as caught:
        served.peer.call(name, 1, timeout=SOON)
    assert isinstance(caught.value, RemoteError)
    assert served.peer.call("add", 1, timeout=SOON) == 2


def test_hook_refuses_streams_and_channels(served: Served) -> None:
    class Guard(Hook):
        def before_serve(self, call: CallContext) -> None:
            raise PermissionError("closed today")

    served.server.rpc.add_hook(Guard())
    for name in ("count", "acount"):
        with pytest.raises(PermissionError, match="closed today"):
            list(served.peer.stream(name, 3, timeout=SOON))
    for name in ("chat", "achat"):
        with pytest.raises(PermissionError, match="closed today"):
            served.peer.channel(name, "hello", timeout=SOON).recv()


def test_hook_that_fails_before_a_call_ends_it(served: Served) -> None:
    class Broken(Hook):
        def before_call(self, call: CallInfo) -> None:
            raise RuntimeError("not today")

    served.client.rpc.add_hook(Broken())
    with pytest.raises(RuntimeError, match="not today"):
        served.peer.call("echo", 1)
    assert served.client.rpc.statistics()["calls_waiting"] == 0


def test_hook_that_fails_afterwards_is_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Hook):
        def after_call(self, call: CallInfo, error: BaseException | None) -> None:
            raise RuntimeError("too late")

    served.client.rpc.add_hook(Broken())
    assert served.peer.call("echo", 1, timeout=SOON) == 1
    wait_until(lambda: "raised after the call" in caplog.text, 10)


def test_trace_context_travels_and_is_carried_on(tcp: Medium) -> None:
    with serving(tcp) as served:
        served.client.rpc.register(lambda: [current_call().traceparent, current_call().tracestate], "seen")
        back = served.server.accept(timeout=SOON)
        for inline in (True, False):
            served.server.rpc.register(lambda: back.call("seen", timeout=SOON), f"relay{inline}", inline=inline)
        with trace_context(PARENT, "vendor=1"):
            assert served.peer.call("relayFalse", timeout=SOON) == [PARENT, "vendor=1"]
            assert served.peer.call("relayTrue", timeout=SOON) == [PARENT, "vendor=1"]
            with trace_context(PARENT):
                assert served.peer.call("relayTrue", timeout=SOON) == [PARENT, ""]
        assert served.peer.call("relayTrue", timeout=SOON) == ["", ""]


def test_hook_sets_the_trace_context(tcp: Medium) -> None:
    class Tracer(Hook):
        def before_call(self, call: CallInfo) -> None:
            call.traceparent = PARENT

    with serving(tcp) as served:
        served.server.rpc.register(lambda: current_call().traceparent, "seen")
        served.client.rpc.add_hook(Tracer())
        assert served.peer.call("seen", timeout=SOON) == PARENT


def test_process_wide_trace_hears_of_calls(tcp: Medium) -> None:
    class Observer:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def started(self, op: str, /, **about: object) -> Any:
            self.seen.append((op, about["function"]))
            return op

        def completed(self, token: Any, /) -> None:
            self.seen.append(("completed", token))

        def failed(self, token: Any, error: BaseException, /) -> None:
            self.seen.append(("failed", token, type(error).__name__))

    with serving(tcp) as served:
        observer = Observer()
        trace.install(observer)
        try:
            served.peer.call("echo", 1, timeout=SOON)
            wait_until(lambda: len(observer.seen) == 4, 10)
        finally:
            trace.uninstall(observer)
        assert sorted(observer.seen) == sorted(
            [("rpc call", "echo"), ("completed", "rpc call"), ("rpc serve", "echo"), ("completed", "rpc serve")]
        )

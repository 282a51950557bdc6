"""Whatever goes wrong, the caller hears why, at once, and the server goes on."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from calls import Served, serving
from peers import SOON, Medium
from rankmesh import (
    BusyError,
    ClosedError,
    CodecError,
    Endpoint,
    FunctionNotFound,
    InvalidMessage,
    NoConnection,
    PeerLost,
    RemoteError,
    UsageError,
    Work,
)
from rankmesh.config import MIB
from rankmesh.errors import remote_error
from timing import wait_until


def still_serves(served: Served) -> bool:
    return all(served.peer.call(name, 7, timeout=SOON) == 7 for name in ("echo", "pooled", "aecho"))


def test_unknown_function_is_told_at_once_with_the_nearest_names(served: Served) -> None:
    """FEATURES: in nexar an unknown function means silence until the timeout, and ends the server's loop."""
    with pytest.raises(FunctionNotFound) as caught:
        served.peer.call("ecko", 1, timeout=SOON)
    assert caught.value.function == "ecko"
    assert caught.value.nearest[0] == "echo"
    assert "server" in caught.value.peer
    assert isinstance(caught.value, LookupError)
    assert still_serves(served)


@pytest.mark.parametrize("name", ["fail", "inline_fail"])
def test_builtin_exception_comes_back_as_itself(served: Served, name: str) -> None:
    with pytest.raises(ValueError, match="on purpose") as caught:
        served.peer.call(name, "ValueError", timeout=SOON)
    error = caught.value
    assert isinstance(error, RemoteError)
    assert (error.remote_type, error.remote_message) == ("ValueError", "on purpose")
    assert "in fail" in error.remote_traceback
    assert "rankmesh" not in error.remote_traceback
    assert "server" in error.peer
    assert any("in fail" in note for note in error.__notes__)


def test_other_exceptions_come_back_as_remote_errors(served: Served) -> None:
    with pytest.raises(RemoteError) as caught:
        served.peer.call("fail", "Custom", timeout=SOON)
    assert type(caught.value) is RemoteError
    assert caught.value.remote_type == "calls.Custom"


def test_exit_in_a_handler_ends_nothing(served: Served) -> None:
    for name in ("fail", "inline_fail"):
        with pytest.raises(RemoteError) as caught:
            served.peer.call(name, "SystemExit", timeout=SOON)
        assert type(caught.value) is RemoteError
        assert caught.value.remote_type == "SystemExit"
    assert still_serves(served)


@pytest.mark.parametrize("kind", ["KeyError", "OSError", "ZeroDivisionError", "TimeoutError", "RecursionError"])
def test_remote_builtins_survive_pickling(kind: str) -> None:
    error = remote_error(kind, "it raised.", remote_traceback="…", peer="rank 1")
    error.add_note("a note")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert again.__dict__ == error.__dict__
    assert str(again) == "it raised."


@pytest.mark.parametrize(
    "kind", ["UnicodeDecodeError", "StopIteration", "SystemExit", "ExceptionGroup", "print", "x.Y"]
)
def test_others_are_remote_errors_only(kind: str) -> None:
    error = remote_error(kind, "it raised.")
    assert type(error) is RemoteError
    assert error.remote_type == kind


@pytest.mark.parametrize(
    "args, kwargs, reason",
    [
        ((), {}, "missing a required argument: 'a'"),
        ((1, 2, 3), {}, "too many positional arguments"),
        ((1,), {"d": 1}, "unexpected keyword argument 'd'"),
        ((1,), {"a": 1}, "multiple values for argument 'a'"),
    ],
)
def test_wrong_arguments_are_told_before_the_handler_runs(served: Served, args: Any, kwargs: Any, reason: str) -> None:
    with pytest.raises(InvalidMessage, match=reason) as caught:
        served.peer.call("add", *args, timeout=SOON, **kwargs)
    assert caught.value.function == "add"
    assert still_serves(served)


def test_arguments_are_converted_and_validated_by_hints(served: Served) -> None:
    result = served.peer.call("typed", {"x": 2, "y": 1.5}, ["a"], scale=3, timeout=SOON)
    assert result == {"x": 6.0, "names": ["a"]}
    for args in (({"x": "two"}, ["a"]), ({"x": 2}, "a"), ({"x": 2}, [1]), ({"x": 2}, ["a"], "wide")):
        with pytest.raises(InvalidMessage, match="'typed' cannot be called like that: argument"):
            served.peer.call("typed", *args, timeout=SOON)


def test_result_is_validated_by_the_caller(served: Served) -> None:
    assert served.peer.call("echo", {"x": 1, "y": 2.0}, returns=dict[str, float], timeout=SOON) == {"x": 1, "y": 2}
    with pytest.raises(InvalidMessage, match="cannot be read"):
        served.peer.call("echo", {"x": "one"}, returns=dict[str, float], timeout=SOON)


@pytest.mark.parametrize("inline", [True, False])
def test_rubbish_results_are_told(served: Served, inline: bool) -> None:
    class Hostile:
        def __str__(self) -> str:
            raise RuntimeError("no")

        __repr__ = __str__

    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    def raise_unprintable() -> None:
        raise Unprintable

    loop: list[Any] = []
    loop.append(loop)
    rubbish: list[Any] = [object(), Hostile(), threading.Lock(), loop, lambda: 1, open]
    for number, value in enumerate(rubbish):
        served.server.rpc.register(lambda value=value: value, f"rubbish{number}", inline=inline)
        with pytest.raises(RemoteError, match="returned what cannot be sent"):
            served.peer.call(f"rubbish{number}", timeout=SOON)
    served.server.rpc.register(raise_unprintable, inline=inline)
    with pytest.raises(RemoteError, match="whose text cannot be had"):
        served.peer.call("raise_unprintable", timeout=SOON)
    assert still_serves(served)


@pytest.mark.parametrize("inline", [True, False])
def test_result_over_the_limit_is_refused(tcp: Medium, inline: bool) -> None:
    with serving(tcp, max_rpc_bytes=MIB) as served:
        served.server.rpc.register(lambda n: np.zeros(n, np.uint8), "zeros", inline=inline)
        with pytest.raises(RemoteError, match="max_rpc_bytes"):
            served.peer.call("zeros", 2 * MIB, timeout=SOON)
        assert served.peer.call("zeros", MIB // 2, timeout=SOON).nbytes == MIB // 2
        assert still_serves(served)


def test_memory_that_runs_out_is_told(tcp: Medium) -> None:
    with serving(tcp) as served:
        served.server.rpc.register(lambda: b"x" * (1 << 62), "huge")
        with pytest.raises(MemoryError):
            served.peer.call("huge", timeout=SOON)
        assert still_serves(served)


def test_arguments_that_cannot_travel_are_refused_here(served: Served) -> None:
    with pytest.raises(CodecError, match="cannot travel"):
        served.peer.call("echo", object(), timeout=SOON)
    assert served.client.rpc.statistics()["calls_waiting"] == 0


def test_arguments_over_the_limit_are_refused_here(tcp: Medium) -> None:
    with serving(tcp, max_rpc_bytes=MIB) as served:
        with pytest.raises(UsageError, match="max_rpc_bytes"):
            served.peer.call("echo", np.zeros(2 * MIB, np.uint8), timeout=SOON)
        assert served.client.rpc.statistics()["calls_waiting"] == 0


def test_wrong_verb_is_told(served: Served) -> None:
    for name, verb in (("count", "stream"), ("acount", "stream"), ("chat", "channel")):
        with pytest.raises(InvalidMessage, match=verb):
            served.peer.call(name, 1, timeout=SOON)
    with pytest.raises(InvalidMessage, match="call"):
        next(served.peer.stream("aecho", 1, timeout=SOON))
    with pytest.raises(InvalidMessage, match="call"):
        next(served.peer.stream("add", 1, timeout=SOON))
    with pytest.raises(InvalidMessage, match="stream"):
        next(served.peer.channel("count", 1, timeout=SOON))
    assert still_serves(served)


ASYNC: dict[str, Callable[[Served], object]] = {
    "call": lambda served: served.peer.call("aecho", 1, timeout=SOON),
    "stream": lambda served: next(served.peer.stream("acount", 3, timeout=SOON)),
    "channel": lambda served: next(served.peer.channel("achat", "hello", timeout=SOON)),
}


@pytest.mark.parametrize("use", ASYNC.values(), ids=ASYNC)
def test_event_loop_that_is_closed_is_told(
    served: Served, use: Callable[[Served], object], caplog: pytest.LogCaptureFixture
) -> None:
    """The caller does not wait until its deadline, and the server keeps no place for what cannot run."""
    closed = asyncio.new_event_loop()
    closed.close()
    served.server.rpc.use_loop(closed)
    with pytest.raises(RuntimeError, match=r"use_loop\(\) is closed"):
        use(served)
    served.peer.notify("aecho", 1)
    wait_until(lambda: served.server.rpc.statistics().get("served_raised") == 2, 10)
    assert served.server.rpc.statistics()["serving"] == 0
    assert served.server.rpc.statistics()["serving_bytes"] == 0
    assert caplog.text.count("use_loop() is closed") == 2
    with asyncio.Runner() as runner:
        served.server.rpc.use_loop(runner.get_loop())
        assert runner.run(_awaited(served.peer.call_async("aecho", 2, timeout=SOON))) == 2


async def _awaited(work: Work[Any]) -> Any:
    return await work


def test_lost_server_ends_calls_and_streams(served: Served) -> None:
    call = served.peer.call_async("wait", timeout=SOON)
    stream = served.peer.stream("forever", 10, timeout=SOON)
    next(stream)
    wait_until(lambda: "waiting" in served.functions.log, 10)
    served.server.abort()
    with pytest.raises(PeerLost) as caught:
        call.result()
    assert caught.value.op == "call of 'wait' at"
    with pytest.raises(PeerLost):
        list(stream)
    with pytest.raises(PeerLost):
        served.peer.call("echo", 1, timeout=SOON)


def test_nobody_there_is_no_connection(tcp: Medium) -> None:
    with serving(tcp, idle_timeout=0.05, heartbeat_interval=0.1, heartbeat_timeout=5) as served:
        assert served.peer.call("echo", 1, timeout=SOON) == 1
        wait_until(lambda: not served.peer.connected, 10)
        assert served.peer.call("echo", 2, timeout=SOON) == 2  # it is made again
        wait_until(lambda: not served.peer.connected, 10)
        served.server.close()
        with pytest.raises(NoConnection) as caught:
            served.peer.call("echo", 3, timeout=SOON)
        assert caught.value.op == "call of 'echo' at"


def test_closed_endpoint_calls_nobody(served: Served) -> None:
    pending = served.peer.call_async("wait", timeout=SOON)
    served.client.close()
    with pytest.raises(ClosedError):
        pending.result()
    with pytest.raises(ClosedError):
        served.peer.call("echo", 1)


def test_calls_to_oneself_end_with_the_endpoint(inproc: Medium) -> None:
    with serving(inproc) as served:
        pending = served.server.rpc.call_async(served.server, "wait", timeout=SOON)
        served.server.close()
        with pytest.raises(ClosedError):
            pending.result()


def test_too_many_calls_at_once_are_refused_here(tcp: Medium) -> None:
    with serving(tcp, send_queue_bytes=8 * 512) as served:
        works = [served.peer.call_async("wait", timeout=SOON) for _ in range(8)]
        with pytest.raises(BusyError, match="send_queue_bytes"):
            served.peer.call("echo", 1, timeout=SOON)
        served.functions.gate.set()
        assert [work.result() for work in works] == ["waited"] * 8


def test_endpoint_is_named_in_errors_of_registration(inproc: Medium) -> None:
    with Endpoint(inproc.address) as endpoint:
        endpoint.rpc.register(len, "len")
        with pytest.raises(UsageError, match="registered already"):
            endpoint.rpc.register(len, "len")
        endpoint.rpc.unregister("len")
        with pytest.raises(UsageError, match="not registered"):
            endpoint.rpc.unregister("len")

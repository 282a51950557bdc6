"""Calls, over every transport: values there and back, from threads and tasks, to oneself, to ranks."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from calls import Served, serving
from peers import SOON, Call, Medium, pattern
from rankmesh import (
    Endpoint,
    FunctionNotFound,
    Mesh,
    TruncationError,
    UsageError,
    Work,
)
from rankmesh.config import KIB, MIB
from rankmesh.testing import run_world
from timing import wait_until

VALUES: list[Any] = [
    None, True, 7, -1.5, "text", b"bytes", 2**80, "\udc80", [], [1, [2, "three"]], (1, 2), {"a": {"b": [1]}}, {3, 4},
    {(1, 2): "key"}, b"x" * 100_000, "y" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("name", ["echo", "pooled", "aecho"])
def test_values_come_back_as_they_were(served: Served, name: str) -> None:
    for value in VALUES:
        result = served.peer.call(name, value, timeout=SOON)
        assert result == value
        assert type(result) is type(value)


@pytest.mark.parametrize("name", ["echo", "pooled", "aecho"])
@pytest.mark.parametrize("nbytes", [0, 1, 1000, 64 * KIB, 3 * MIB + 1])
def test_arrays_come_back_writable_and_nested(served: Served, name: str, nbytes: int) -> None:
    array = pattern(nbytes)
    result = served.peer.call(name, {"deep": [array, array[: nbytes // 2]]}, timeout=SOON)
    assert np.array_equal(result["deep"][0], array)
    assert np.array_equal(result["deep"][1], array[: nbytes // 2])
    if nbytes:
        result["deep"][0][0] ^= 1
        assert not np.array_equal(result["deep"][0], array)


Array = np.ndarray[Any, Any]
DTYPES: list[Any] = [
    *"?bBhHiIlLqQefdFD", ">i2", ">f8", "S5", "U3", "V4", "M8[ns]", "m8[s]",
    [("x", "f4"), ("y", "i8", (2,)), ("name", "S3")],
]  # fmt: skip
#: What becomes of an array of 24 items.
LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "flat": lambda array: array,
    "0-d": lambda array: array[5:6].reshape(()),
    "empty": lambda array: array[:0],
    "empty, of three dimensions": lambda array: array[:0].reshape(4, 0, 3),
    "Fortran's order": lambda array: np.asfortranarray(array.reshape(4, 6)),
    "every second": lambda array: array[::2],
    "backwards": lambda array: array[::-1],
    "a part": lambda array: array.reshape(4, 6)[1:3, 2:5],
    "repeated by strides": lambda array: np.broadcast_to(array, (3, 24)),
    "large": lambda array: np.resize(array, 50_000),
}


def sample(dtype: Any) -> Array:
    """24 items of which no two are alike, but for booleans."""
    kind = np.dtype(dtype)
    return pattern(24 * kind.itemsize).view(kind) if kind.kind == "V" else np.arange(24).astype(kind)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_arrays_of_every_dtype_and_layout(served: Served, layout: Callable[[Array], Array]) -> None:
    """Alone and all at once, from read-only memory too; what comes back is the caller's own."""
    arrays = [layout(sample(dtype)) for dtype in DTYPES]
    for array in arrays[::2]:
        array.flags.writeable = False
    names = itertools.cycle(("echo", "pooled"))
    alone = [served.peer.call(next(names), array, timeout=SOON) for array in arrays]
    together = served.peer.call("echo", arrays, timeout=SOON)
    for result, array in zip([*alone, *together], [*arrays, *arrays], strict=True):
        assert (type(result), result.dtype, result.shape) == (np.ndarray, array.dtype, array.shape)
        assert result.tobytes() == array.tobytes()
        assert result.flags.writeable


def test_arguments_by_place_and_name(served: Served) -> None:
    assert served.peer.call("add", 1, timeout=SOON) == 2
    assert served.peer.call("add", 1, 2, timeout=SOON) == 3
    assert served.peer.call("add", 1, b=2, c=3, timeout=SOON) == 6
    assert served.peer.call("add", b="b", a="a", c="c", timeout=SOON) == "abc"


def test_many_threads_get_their_own_results(served: Served) -> None:
    """FEATURES: in ferrotorch two concurrent calls can take each other's replies."""

    def ask(number: int) -> None:
        for name in ("echo", "pooled", "aecho"):
            for size in (1, 50, 20_000):
                assert served.peer.call(name, [number] * size, timeout=SOON) == [number] * size

    for call in [Call(ask, number) for number in range(12)]:
        call.result()


def test_replies_in_any_order(served: Served) -> None:
    slow = served.peer.call_async("wait", timeout=SOON)
    quick = [served.peer.call_async("echo", number, timeout=SOON) for number in range(20)]
    assert [work.result() for work in quick] == list(range(20))
    assert not slow.done()
    served.functions.gate.set()
    assert slow.result() == "waited"


def test_work_is_awaited(served: Served) -> None:
    async def main() -> list[Any]:
        works = [served.peer.call_async(name, 7, timeout=SOON) for name in ("echo", "pooled", "aecho")]
        return [await work for work in works]

    assert asyncio.run(main()) == [7, 7, 7]


def test_work_calls_back(served: Served) -> None:
    seen: list[Work[Any]] = []
    work = served.peer.call_async("pooled", "x", timeout=SOON)
    work.add_done_callback(seen.append)
    wait_until(lambda: seen, 10)
    assert seen == [work]
    assert seen[0].result() == "x"


def test_requests_pass_bulk_data(served: Served) -> None:
    stuck = served.peer.isend(pattern(40 * MIB), tag=3)
    assert served.peer.call("echo", 1, timeout=SOON) == 1
    assert not stuck.done()
    stuck.cancel()


@pytest.mark.parametrize("nbytes", [8, 4 * MIB])
def test_result_lands_in_a_buffer(served: Served, nbytes: int) -> None:
    array, out = pattern(nbytes), np.zeros(nbytes, np.uint8)
    assert served.peer.call("echo", array, out=out, timeout=SOON) is out
    assert np.array_equal(out, array)


def test_result_of_another_size_does_not_land(served: Served) -> None:
    out = np.zeros(7, np.uint8)
    with pytest.raises(TruncationError) as caught:
        served.peer.call("echo", pattern(8), out=out, timeout=SOON)
    assert (caught.value.nbytes, caught.value.capacity) == (8, 7)
    assert not out.any()


def test_notification_is_served_and_not_answered(served: Served) -> None:
    served.peer.notify("note", "small")
    served.peer.notify("note", what=pattern(MIB))
    wait_until(lambda: len(served.functions.log) == 2, 10)
    small, large = sorted(served.functions.log, key=lambda item: not isinstance(item, str))
    assert small == "small"
    assert np.array_equal(large, pattern(MIB))
    assert served.client.rpc.statistics()["calls_waiting"] == 0


def test_notification_is_served_although_its_sender_left(served: Served) -> None:
    blockers = [served.peer.call_async("wait", timeout=SOON) for _ in range(served.server.config.rpc_threads)]
    served.peer.notify("note", "the last word")
    served.client.close()
    served.functions.gate.set()
    wait_until(lambda: "the last word" in served.functions.log, 10)
    assert all(work.done() for work in blockers)


def test_notification_that_fails_is_nobodys_trouble(served: Served) -> None:
    served.peer.notify("fail", "ValueError")
    served.peer.notify("nothing of that name")
    served.peer.notify("add", "too", "many", "arguments")
    assert served.peer.call("echo", 1, timeout=SOON) == 1


def test_endpoint_without_functions_says_so(tcp: Medium) -> None:
    with Endpoint(tcp.address, name="mute") as server, Endpoint(None) as client:
        peer = client.connect(server.address, timeout=SOON)
        with pytest.raises(FunctionNotFound) as caught:
            peer.call("add", 1, timeout=SOON)
        assert caught.value.function == "add"
        assert "no functions" in str(caught.value)


def test_server_calls_its_client_back(served: Served) -> None:
    """In a handler, while the client waits for it."""
    served.client.rpc.register(lambda: "from the client", "hello")
    back = served.server.accept(timeout=SOON)
    served.server.rpc.register(lambda: back.call("hello", timeout=SOON), "ask_back")
    served.server.rpc.register(lambda: back.call("hello", timeout=SOON), "ask_back_inline", inline=True)
    assert served.peer.call("ask_back", timeout=SOON) == "from the client"
    assert served.peer.call("ask_back_inline", timeout=SOON) == "from the client"


def test_inline_handler_may_use_the_endpoint(served: Served) -> None:
    back = served.server.accept(timeout=SOON)

    def relay(value: int) -> int:
        back.send(bytes([value]), tag=5)
        return value + 1

    served.server.rpc.register(relay, inline=True)
    for value in range(50):
        out = bytearray(1)
        assert served.peer.call("relay", value, timeout=SOON) == value + 1
        served.peer.recv(out, tag=5, timeout=SOON)
        assert out[0] == value


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("nbytes", [0, 100, 20_000, 3 * MIB])
def test_plain_arguments_and_a_result_that_is_an_array(served: Served, inline: bool, nbytes: int) -> None:
    served.server.rpc.register(lambda n: [np.ones(n, np.uint8), np.zeros(n, np.uint8)], "arrays", inline=inline)
    for _ in range(5):
        ones, zeros = served.peer.call("arrays", nbytes, timeout=SOON)
        assert (ones.nbytes, int(ones.sum()), zeros.nbytes, int(zeros.sum())) == (nbytes, nbytes, nbytes, 0)


def test_inline_handler_runs_although_the_server_waits_for_something_else(served: Served) -> None:
    waiting = Call(served.server.recv, bytearray(1), 9)
    for value in range(200):
        assert served.peer.call("echo", value, timeout=SOON) == value
    served.peer.send(b"x", tag=9)
    waiting.result()


@pytest.mark.parametrize("name", ["echo", "pooled", "aecho"])
def test_call_to_oneself(name: str, inproc: Medium) -> None:
    with serving(inproc) as served:
        rpc = served.server.rpc
        for value in (7, {"a": [1, (2, 3)]}):
            assert rpc.call(served.server, name, value, timeout=SOON) == value
        array = pattern(3 * MIB)
        result = rpc.call(served.server, name, array, timeout=SOON)
        assert np.array_equal(result, array)
        assert not np.shares_memory(result, array)


def test_handler_that_was_quick_and_now_waits_delays_nobody(tcp: Medium) -> None:
    """A thread of the pool that lingers runs quick handlers where it reads; one that turns slow must not stop it all,
    and can be cancelled like any other."""
    with serving(tcp) as served:
        gate = threading.Event()
        gate.set()
        served.server.rpc.register(lambda: gate.wait(SOON), "moody")
        for _ in range(200):
            assert served.peer.call("moody", timeout=SOON)
        gate.clear()
        slow = [served.peer.call_async("moody", timeout=SOON) for _ in range(3)]
        for number in range(20):
            for name in ("echo", "pooled", "aecho"):
                assert served.peer.call(name, number, timeout=SOON) == number
        assert not any(work.done() for work in slow)
        assert served.server.rpc.statistics()["serving"] == 3
        gate.set()
        assert [work.result() for work in slow] == [True] * 3


def test_ranks_call_each_other() -> None:
    def body(mesh: Mesh) -> list[Any]:
        mesh.rpc.register(lambda who: f"{who} → {mesh.rank}", "greet", inline=mesh.rank % 2 == 0)
        mesh.barrier(timeout=SOON)
        answers = [mesh.rpc.call(rank, "greet", mesh.rank, timeout=SOON) for rank in range(mesh.size)]
        mesh.barrier(timeout=SOON)
        return answers

    for transport in ("inproc://", "tcp://"):
        assert run_world(3, body, transport) == [[f"{a} → {b}" for b in range(3)] for a in range(3)]


@pytest.mark.parametrize("to", [7, -1, "server", None])
def test_nobody_by_that_name(served: Served, to: Any) -> None:
    with pytest.raises(UsageError):
        served.client.rpc.call(to, "echo", 1)


def test_unknown_rank_is_refused() -> None:
    def body(mesh: Mesh) -> str:
        with pytest.raises(UsageError, match="no rank 2"):
            mesh.rpc.call(2, "echo")
        return "well"

    assert run_world(2, body) == ["well", "well"]

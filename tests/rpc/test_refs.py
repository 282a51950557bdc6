"""References: objects stay where they are, and live as long as somebody holds them."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from calls import Counter, Served, serving
from peers import FAULTY, SOON, Medium, router_of
from rankmesh import BusyError, Endpoint, Mesh, RemoteError, UsageError
from rankmesh.config import MIB
from rankmesh.testing import run_world
from rankmesh.testing.faults import FaultTransport
from timing import wait_until


def held(served: Served) -> int:
    return served.server.rpc.statistics()["references"]


def test_methods_are_called_where_the_object_is(served: Served) -> None:
    ref = served.peer.remote("make", 10, timeout=SOON)
    assert [ref.call("add", 5, timeout=SOON), ref.call("add", amount=1, timeout=SOON)] == [15, 16]
    assert ref.owner is served.peer
    assert held(served) == 1
    ref.release()
    wait_until(lambda: held(served) == 0, 10)
    ref.release()
    with pytest.raises(UsageError, match="released"):
        ref.call("add", 1)
    assert "released" in repr(ref)


def test_value_is_fetched_as_a_copy(served: Served) -> None:
    served.server.rpc.register(np.arange, "numbers")
    with served.peer.remote("numbers", MIB, timeout=SOON) as ref:
        assert np.array_equal(ref.fetch(timeout=SOON), np.arange(MIB))
    wait_until(lambda: held(served) == 0, 10)


@pytest.mark.parametrize("how", ["let go", "closed", "died"])
def test_object_is_freed_when_its_holder_goes(served: Served, how: str) -> None:
    refs = [served.peer.remote("make", start, timeout=SOON) for start in range(5)]
    assert held(served) == 5
    if how == "let go":
        refs.clear()
        gc.collect()
    elif how == "closed":
        served.client.close()
    else:
        served.client.abort()
    wait_until(lambda: held(served) == 0, 10)


def test_object_lives_until_the_last_holder_lets_go(tcp: Medium) -> None:
    with serving(tcp) as served, Endpoint(None, name="second") as second:
        peer = second.connect(served.server.address, timeout=SOON)
        first = served.peer.remote("make", 1, timeout=SOON)
        other = second.rpc.adopt(first.handle, timeout=SOON)
        assert other.owner is peer
        first.call("add", 1, timeout=SOON)
        first.release()
        assert other.call("add", 1, timeout=SOON) == 3
        assert held(served) == 1
        second.abort()
        wait_until(lambda: held(served) == 0, 10)


def test_only_holders_reach_an_object(tcp: Medium) -> None:
    with serving(tcp) as served, Endpoint(None, name="stranger") as stranger:
        peer = stranger.connect(served.server.address, timeout=SOON)
        ref = served.peer.remote("make", 1, timeout=SOON)
        number = ref.handle.number
        with pytest.raises(LookupError, match="not held by the caller"):
            peer.call("rankmesh.ref.fetch", number, timeout=SOON)
        for private in ("_hidden", "__init__", "__class__"):
            with pytest.raises(PermissionError, match="private"):
                ref.call(private, timeout=SOON)
        with pytest.raises(AttributeError):
            ref.call("nothing", timeout=SOON)
        handle = ref.handle
        ref.release()
        wait_until(lambda: held(served) == 0, 10)
        with pytest.raises(LookupError, match="is gone"):
            stranger.rpc.adopt(handle, timeout=SOON)


def test_connection_stays_while_references_are_held(tcp: Medium) -> None:
    with serving(tcp, idle_timeout=0.1, heartbeat_interval=0.1, heartbeat_timeout=5) as served:
        ref = served.peer.remote("make", 1, timeout=SOON)
        asked = [False]
        on_control = served.peer.router.on_control  # type: ignore[union-attr]

        def watch(message: Any) -> None:
            asked[0] = True
            on_control(message)

        served.peer.router.on_control = watch  # type: ignore[union-attr, method-assign]
        wait_until(lambda: asked[0], 10, "the question whether the quiet connection may go")
        assert served.peer.connected
        ref.release()
        wait_until(lambda: not served.peer.connected, 10)
        assert held(served) == 0


def test_release_waits_until_something_may_be_sent(served: Served) -> None:
    """While the other side is asked whether a quiet connection may go, nothing is sent: nor is it forgotten."""
    refs = [served.peer.remote("make", start, timeout=SOON) for start in range(3)]
    outbound, engine = router_of(served.peer).outbound, served.client.hub.engine
    with engine:
        outbound.pause()
    refs.pop().release()
    refs.clear()
    gc.collect()
    wait_until(lambda: not engine.deferred, 10)
    assert held(served) == 3
    with engine:
        outbound.resume()
    wait_until(lambda: held(served) == 0, 10)


def test_release_waits_where_requests_may_not(faults: FaultTransport) -> None:
    """As many wait as Config.rpc_send_bytes allows, and then some."""
    with serving(FAULTY, {"rpc_send_bytes": MIB}, rpc_send_bytes=1) as served:
        refs = [served.peer.remote("make", start, timeout=SOON) for start in range(4)]
        for link in faults.links:
            link.stall()
        send = served.peer.isend(b"the link takes nothing, so this waits, and all behind it")
        with pytest.raises(BusyError, match="rpc_send_bytes"):
            served.peer.notify("note", 1)
        for ref in refs:
            ref.release()
        assert held(served) == 4
        for link in faults.links:
            link.resume()
        send.wait(SOON)
        wait_until(lambda: held(served) == 0, 10)


def test_function_that_fails_leaves_no_reference(served: Served) -> None:
    with pytest.raises(ValueError, match="on purpose"):
        served.peer.remote("fail", "ValueError", timeout=SOON)
    assert held(served) == 0


def test_result_that_cannot_travel_can_be_kept(served: Served) -> None:
    ref = served.peer.remote("make", 7, timeout=SOON)
    with pytest.raises(RemoteError, match="cannot be sent"):
        ref.fetch(timeout=SOON)
    assert ref.call("add", 0, timeout=SOON) == 7


def test_ranks_keep_objects_for_each_other() -> None:
    def body(mesh: Mesh) -> int:
        mesh.rpc.register(Counter, "counter")
        mesh.barrier(timeout=SOON)
        to_the_right = mesh.rpc.remote((mesh.rank + 1) % mesh.size, "counter", mesh.rank, timeout=SOON)
        to_itself = mesh.rpc.remote(mesh.rank, "counter", 100, timeout=SOON)
        total = int(to_the_right.call("add", 10, timeout=SOON) + to_itself.call("add", 1, timeout=SOON))
        to_the_right.release()
        to_itself.release()
        mesh.barrier(timeout=SOON)
        wait_until(lambda: mesh.rpc.statistics()["references"] == 0, 10)
        return total

    assert run_world(3, body, "tcp://") == [111, 112, 113]

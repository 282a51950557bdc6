"""What a type checker tells users. Never run: mypy checks this file with the rest of tests/, in strict mode.

`assert_type` pins what an expression is. A `type: ignore` pins a mistake that must be reported: strict mode complains
about one that silences nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, assert_type

import numpy as np

import rankmesh as rm
from rankmesh.buffers import BufferPool, readable, writable
from rankmesh.config import Config, TlsFiles
from rankmesh.endpoint.work import Work
from rankmesh.errors import ConnectError, DeadlineError, DesyncError, JoinError, PeerError, PeerLost, TruncationError


def settings_are_checked(config: Config) -> None:
    assert_type(config.timeout, float)
    assert_type(config.eager_bytes, int)
    assert_type(config.tls, TlsFiles | None)
    assert_type(config.connect_backoff, tuple[float, float])
    assert_type(config.override(timeout=3), Config)
    assert_type(Config.from_env(), Config)
    assert_type(Config.from_env({"RANKMESH_TIMEOUT": "3"}), Config)

    Config(tiemout=3)  # type: ignore[call-arg]
    Config("token")  # type: ignore[call-arg]
    Config(timeout="3")  # type: ignore[arg-type]
    config.timeout = 3  # type: ignore[misc]


def errors_carry_typed_attributes(late: DeadlineError, lost: PeerLost, refused: ConnectError) -> None:
    assert_type(late.timeout, float | None)
    assert_type(late.elapsed, float)
    assert_type(lost.rank, int | None)
    assert_type(lost.host, str)
    assert_type(refused.address, str)
    assert_type(TruncationError("it was larger.").capacity, int)
    assert_type(JoinError("it did not come together.").missing, tuple[int, ...])
    assert_type(DesyncError("they disagree.").calls, Mapping[int, str])

    as_parent: PeerError = lost
    as_builtin: TimeoutError = late
    print(as_parent, as_builtin)
    print(lost.address)  # type: ignore[attr-defined]


def buffers_are_views(array: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    assert_type(readable(array), memoryview)
    assert_type(writable(bytearray(4)), memoryview)
    assert_type(BufferPool(4096).take(1), bytearray)


async def work_knows_its_result(work: Work[int]) -> None:
    assert_type(work.result(timeout=1), int)
    assert_type(await work, int)
    assert_type(work.done(), bool)
    assert_type(work.cancel(), bool)
    work.add_done_callback(lambda ended: assert_type(ended, Work[int]))

    as_awaitable: Awaitable[int] = work
    print(as_awaitable)
    work.result("soon")  # type: ignore[arg-type]


def calls_are_typed(mesh: rm.Mesh, group: rm.Group, endpoint: rm.Endpoint, peer: rm.Peer) -> None:
    assert_type(mesh.rpc, rm.RpcAgent)
    assert_type(group.rpc, rm.RpcAgent)
    assert_type(group.memory, rm.MemoryAgent)
    assert_type(group.peers.index(rm.current_call().caller), int)
    assert_type(group.split(np.int64(1)), rm.Group | None)
    assert_type(endpoint.rpc.call_async(peer, "f", 1), Work[Any])
    assert_type(endpoint.connect("tcp://127.0.0.1:1"), rm.Peer)
    assert_type(peer.stream("f"), rm.Stream)
    assert_type(peer.remote("f"), rm.Ref)

    @mesh.rpc.register
    def bare(a: int) -> str:
        return str(a)

    @mesh.rpc.register(inline=True)
    def decorated(a: int) -> str:
        return str(a)

    assert_type(bare(1), str)
    assert_type(decorated(1), str)
    bare("one")  # type: ignore[arg-type]
    peer.call(7)  # type: ignore[arg-type]
    mesh.rpc.register(bare, inlin=True)  # type: ignore[call-overload]

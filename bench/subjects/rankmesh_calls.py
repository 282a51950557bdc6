"""rankmesh's RPC by the calls a user writes: `mesh.rpc.register`, `call` and `call_async`."""

from __future__ import annotations

from functools import partial
from typing import Any

from subjects.base import Bytes, Call, Caller, keep_in_flight
from subjects.rankmesh_messages import Rankmesh, RankmeshShm, RankmeshTcp, check_transport

SERVER = 1


def echo(data: Any) -> Any:
    return data


class RankmeshCaller(Caller):
    """A mesh of two, joined as for messages."""

    messages: type[Rankmesh]
    inline: bool

    def open(self, rank: int, size: int, port: int) -> None:
        self.joined = self.messages()
        self.joined.open(rank, size, port)
        self.mesh = self.joined.mesh
        self.mesh.rpc.register(echo, inline=self.inline)
        self.mesh.barrier()  # nobody calls before the function is there

    def close(self) -> None:
        self.joined.close()

    def version(self) -> str:
        return self.joined.version()

    def check(self) -> None:
        check_transport(self.mesh, 1 - self.mesh.rank, self.messages.expected)

    def array(self, array: Bytes) -> Bytes:
        return array

    def caller(self) -> Call:
        return partial(self.mesh.rpc.call, SERVER, "echo")

    def call_in_flight(self, payload: Any, count: int, window: int) -> Any:
        start = partial(self.mesh.rpc.call_async, SERVER, "echo")
        return keep_in_flight(start, lambda work: work.result(), payload, count, window)


class InlineTcp(RankmeshCaller):
    messages, inline = RankmeshTcp, True


class PooledTcp(RankmeshCaller):
    messages, inline = RankmeshTcp, False


class InlineShm(RankmeshCaller):
    messages, inline = RankmeshShm, True


class PooledShm(RankmeshCaller):
    messages, inline = RankmeshShm, False

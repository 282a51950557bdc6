"""rankmesh's one-sided memory by the calls a user writes: `mesh.memory.register` or `allocate`, `open`, `read`, `write`
and their batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from subjects.base import OPEN_TIMEOUT, Bytes, OneSided, Piece, Transfer
from subjects.rankmesh_messages import Rankmesh, RankmeshShm, RankmeshTcp, WrongTransport, check_transport

OWNER = 1
REGION = "bench"
PASSING_BYTES = 64 * 1024


class RankmeshMemory(OneSided):
    """A mesh, joined as for messages."""

    messages: type[Rankmesh]
    #: Whether transfers shall be plain copies through a mapping.
    mapped: bool

    def open(self, rank: int, size: int, port: int) -> None:
        self.joined = self.messages()
        self.joined.open(rank, size, port)
        self.mesh = self.joined.mesh

    def close(self) -> None:
        self.joined.close()

    def version(self) -> str:
        return self.joined.version()

    def check(self) -> None:
        if self.mesh.rank == OWNER:
            return
        check_transport(self.mesh, OWNER, self.messages.expected)
        if self.remote.mapped != self.mapped:
            raise WrongTransport(f"{self.remote!r} is {'' if self.remote.mapped else 'not '}mapped")

    def share(self, nbytes: int, tell: Callable[[Any], Any]) -> Bytes | None:
        if self.mesh.rank == OWNER:
            return self.offer(nbytes)
        self.remote = self.mesh.memory.open(OWNER, REGION, wait=True, timeout=OPEN_TIMEOUT)
        return None

    def offer(self, nbytes: int) -> Bytes:
        memory = np.ones(nbytes, np.uint8)
        self.mesh.memory.register(REGION, memory)
        return memory

    def come_and_go(self) -> None:
        self.mesh.memory.register("passing", np.ones(PASSING_BYTES, np.uint8)).unregister()

    def reading(self, pieces: Sequence[Piece]) -> Transfer:
        return partial(self.remote.read, *pieces[0]) if len(pieces) == 1 else partial(self.remote.read_batch, pieces)

    def writing(self, pieces: Sequence[Piece]) -> Transfer:
        return partial(self.remote.write, *pieces[0]) if len(pieces) == 1 else partial(self.remote.write_batch, pieces)


class RegisteredTcp(RankmeshMemory):
    messages, mapped = RankmeshTcp, False


class RegisteredShm(RankmeshMemory):
    """Default settings: the two find out by themselves that they share a host."""

    messages, mapped = RankmeshShm, False


class AllocatedShm(RankmeshMemory):
    messages, mapped = RankmeshShm, True

    def offer(self, nbytes: int) -> Bytes:
        memory: Bytes = self.mesh.memory.allocate(REGION, (nbytes,), "uint8").array
        memory.fill(1)
        return memory

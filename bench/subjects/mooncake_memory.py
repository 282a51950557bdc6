"""Mooncake's transfer engine with its TCP transport. Its threads serve; the owner has nothing to do.

Memory is named by address at both ends, and both ends are registered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
from mooncake.engine import TransferEngine

from subjects.base import HOST, Bytes, OneSided, Piece, Transfer

OWNER = 1


class MooncakeError(Exception):
    """A call returned something else than 0."""


def checked(code: int, what: str) -> None:
    if code != 0:
        raise MooncakeError(f"{what} returned {code}")


class Mooncake(OneSided):
    def open(self, rank: int, size: int, port: int) -> None:
        self.rank = rank
        self.engine = TransferEngine()
        checked(self.engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""), "initialize")
        #: Registered memory stays: the engine knows it by address only.
        self.registered: list[Bytes] = []

    def close(self) -> None:
        for memory in self.registered:
            checked(self.engine.unregister_memory(memory.ctypes.data), "unregister_memory")

    def version(self) -> str:
        return f"mooncake {version('mooncake-transfer-engine-non-cuda')}"

    def share(self, nbytes: int, tell: Callable[[Any], Any]) -> Bytes | None:
        if self.rank == OWNER:
            memory = self.local(nbytes)
            tell([f"{HOST}:{self.engine.get_rpc_port()}", memory.ctypes.data])
            return memory
        self.segment, self.address = tell(None)
        return None

    def local(self, nbytes: int) -> Bytes:
        memory = np.ones(nbytes, np.uint8)
        checked(self.engine.register_memory(memory.ctypes.data, nbytes), "register_memory")
        self.registered.append(memory)
        return memory

    def reading(self, pieces: Sequence[Piece]) -> Transfer:
        return self._transfer("transfer_sync_read", pieces)

    def writing(self, pieces: Sequence[Piece]) -> Transfer:
        return self._transfer("transfer_sync_write", pieces)

    def _transfer(self, verb: str, pieces: Sequence[Piece]) -> Transfer:
        here = [array.ctypes.data for array, _ in pieces]
        there = [self.address + offset for _, offset in pieces]
        sizes = [array.nbytes for array, _ in pieces]
        if len(pieces) == 1:
            call = partial(getattr(self.engine, verb), self.segment, here[0], there[0], sizes[0])
        else:
            call = partial(getattr(self.engine, f"batch_{verb}"), self.segment, here, there, sizes)

        def transfer() -> None:
            if (code := call()) != 0:
                raise MooncakeError(f"{verb} returned {code}")

        return transfer

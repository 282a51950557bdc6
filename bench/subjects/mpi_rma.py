"""mpi4py's one-sided `Win.Get` and `Win.Put` on MPICH, in a passive epoch (`Lock_all`) that lasts for the whole run:
each transfer, or batch of them, is completed by `Flush`.

Over TCP MPICH moves nothing while the owner is outside MPI (a `Get` from an owner asleep in `time.sleep` does not end),
so the owner waits in `Barrier`, which spins. That is more than "passive" says, and the best it can do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from subjects.base import Bytes, OneSided, Piece, Transfer
from subjects.mpi import Mpi

OWNER = 1


class Created(OneSided):
    """`Win.Create` over memory that the owner already has: what registering is elsewhere."""

    def open(self, rank: int, size: int, port: int) -> None:
        self.started = Mpi()
        self.started.open(rank, size, port)
        self.comm = self.started.comm

    def close(self) -> None:
        if self.comm.rank != OWNER:
            self.window.Unlock_all()
        self.window.Free()
        self.started.close()

    def version(self) -> str:
        return self.started.version()

    def share(self, nbytes: int, tell: Callable[[Any], Any]) -> Bytes | None:
        memory = np.ones(nbytes, np.uint8) if self.comm.rank == OWNER else None
        self.window = MPI.Win.Create(memory, comm=self.comm)
        self.begin_epoch()
        return memory

    def begin_epoch(self) -> None:
        if self.comm.rank != OWNER:
            self.window.Lock_all()
        self.comm.Barrier()  # the owner has to answer

    def reading(self, pieces: Sequence[Piece]) -> Transfer:
        return self._flushed(self.window.Get, pieces)

    def writing(self, pieces: Sequence[Piece]) -> Transfer:
        return self._flushed(self.window.Put, pieces)

    def _flushed(self, verb: Callable[[Any, int, Any], object], pieces: Sequence[Piece]) -> Transfer:
        flush = self.window.Flush
        named = [([array, MPI.BYTE], (offset, array.nbytes, MPI.BYTE)) for array, offset in pieces]
        ((first, target), *others) = named

        def one() -> None:
            verb(first, OWNER, target)
            flush(OWNER)

        def all_of_them() -> None:
            for array, place in named:
                verb(array, OWNER, place)
            flush(OWNER)

        return all_of_them if others else one

    def attend(self) -> None:
        self.comm.Barrier()

    def dismiss(self) -> None:
        self.comm.Barrier()


class Allocated(Created):
    """`Win.Allocate`, which processes of one host map."""

    def share(self, nbytes: int, tell: Callable[[Any], Any]) -> Bytes | None:
        owner = self.comm.rank == OWNER
        self.window = MPI.Win.Allocate(nbytes if owner else 0, comm=self.comm)
        self.begin_epoch()
        if not owner:
            return None
        memory: Bytes = np.frombuffer(self.window, np.uint8)
        memory.fill(1)
        return memory

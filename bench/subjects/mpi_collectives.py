"""mpi4py's upper-case collectives (buffers, no pickle) on MPICH, with MPI.IN_PLACE where the result takes the place of
what was given. Started by mpiexec."""

from __future__ import annotations

from functools import partial
from typing import Any

from mpi4py import MPI

from subjects.base import Collectives, Transfer
from subjects.mpi import Mpi


class MpiCollectives(Collectives):
    def open(self, rank: int, size: int, port: int) -> None:
        self.started = Mpi()
        self.started.open(rank, size, port)
        self.comm = self.started.comm

    def close(self) -> None:
        self.started.close()

    def version(self) -> str:
        return self.started.version()

    def all_reduce(self, buffer: Any) -> Transfer:
        return partial(self.comm.Allreduce, MPI.IN_PLACE, buffer, MPI.SUM)

    def broadcast(self, buffer: Any) -> Transfer:
        return partial(self.comm.Bcast, buffer, 0)

    def all_gather(self, buffer: Any, out: Any) -> Transfer:
        return partial(self.comm.Allgather, buffer, out)

    def reduce_scatter(self, buffer: Any, out: Any) -> Transfer:
        return partial(self.comm.Reduce_scatter_block, buffer, out, MPI.SUM)

    def all_to_all(self, buffer: Any, out: Any) -> Transfer:
        return partial(self.comm.Alltoall, buffer, out)

    def barrier(self) -> Transfer:
        transfer: Transfer = self.comm.Barrier
        return transfer

"""mpi4py's upper-case `Send`/`Recv` (buffers, no pickle) on MPICH. Started by mpiexec; the import initialises MPI."""

from __future__ import annotations

from functools import partial

import mpi4py
from mpi4py import MPI

from subjects.base import Messenger, Verb

TAG = 7


class Mpi(Messenger):
    def open(self, rank: int, size: int, port: int) -> None:
        self.comm = MPI.COMM_WORLD
        if (self.comm.rank, self.comm.size) != (rank, size):
            raise RuntimeError(
                f"mpiexec and mpi4py belong to different MPI libraries: rank {self.comm.rank} of {self.comm.size}, "
                f"not {rank} of {size}. Install both into one environment from bench/requirements.txt."
            )
        self.comm.Barrier()

    def close(self) -> None:
        MPI.Finalize()

    def version(self) -> str:
        library = MPI.Get_library_version().splitlines()[0].split()
        return f"mpi4py {mpi4py.__version__}, {library[0]} {library[-1]}"

    def sender(self, peer: int) -> Verb:
        return partial(self.comm.Send, dest=peer, tag=TAG)

    def receiver(self, peer: int) -> Verb:
        return partial(self.comm.Recv, source=peer, tag=TAG)

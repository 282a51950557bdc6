"""What `rankmesh bench collectives` can measure: rankmesh, and gloo and mpi4py where they are installed. Each foreign
library is imported in its own class, in the processes that measure it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, Final

from rankmesh import Config, Mesh
from rankmesh.cli.exercise import Array, Backend, Call, Task
from rankmesh.collectives.tuning import Chooser
from rankmesh.errors import ConfigError

#: backend → the package it needs, and how it is installed.
OTHERS: Final = {"gloo": ("torch", "pip install torch"), "mpi4py": ("mpi4py", "pip install mpi4py mpich")}


def check_installed(names: list[str]) -> None:
    """Before anything is measured. Raises ConfigError."""
    for name in names:
        package, command = OTHERS[name]
        missing = package if find_spec(package) is None else "mpiexec" if name == "mpi4py" and not mpiexec() else ""
        if missing:
            raise ConfigError(
                f"{name} cannot be measured: {missing} is not installed here. Install it with `{command}`, or leave "
                f"{name} out."
            )


def mpiexec() -> str | None:
    """That of the environment in which this Python runs comes first: it belongs to its MPI."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


class RankmeshBackend:
    """rankmesh's own, by the calls a user writes."""

    def __init__(self, mesh: Mesh) -> None:
        from rankmesh import __version__

        self.mesh, self.rank, self.size = mesh, mesh.rank, mesh.size
        self.title = f"rankmesh {__version__}"
        self.hosts = len({peer.host for peer in mesh.peers})
        self._chooser = Chooser(Config.from_env())

    def algorithm(self, task: Task) -> str:
        """The one that is chosen where none is named."""
        return self._chooser.choose(task.collective, task.chosen_by(self.size), self.size, self.hosts)

    def names(self, collective: str) -> bool:
        """Its algorithm can be named by the call."""
        return "algorithm" in signature(getattr(self.mesh, collective)).parameters

    def transport(self) -> str:
        """What carries the messages: known once there were some."""
        self.mesh.barrier()
        others = [peer for rank, peer in enumerate(self.mesh.peers) if rank != self.rank]
        return " and ".join(sorted({peer.transport.transport for peer in others if peer.transport is not None}))

    def call(self, task: Task, given: Array, out: Array, in_place: bool, algorithm: str | None) -> Call | None:
        if not in_place and not task.kind.out_of_place:
            return None
        verb: Callable[..., Any] = getattr(self.mesh, task.collective)
        if algorithm is not None and self.names(task.collective):
            verb = partial(verb, algorithm=algorithm)
        at_root = self.rank == task.root
        other = None if in_place else out
        calls: dict[str, Callable[[], Call]] = {
            "barrier": lambda: partial(verb),
            "broadcast": lambda: partial(verb, given, task.root),
            "reduce": lambda: partial(verb, given, task.op, task.root, out=other if at_root else None),
            "all_gather": lambda: partial(verb, given, out=self._by_rank(out)),
            "gather": lambda: partial(verb, given, task.root, out=self._by_rank(out) if at_root else None),
            "scatter": lambda: partial(verb, self._by_rank(given) if at_root else None, task.root, out=out),
            "reduce_scatter": lambda: partial(verb, self._by_rank(given), task.op, out=out),
            "all_to_all": lambda: partial(verb, self._by_rank(given), out=self._by_rank(out)),
        }
        make: Callable[[], Call] = calls.get(task.collective, lambda: partial(verb, given, task.op, out=other))
        return make()

    def exchange(self, said: Any) -> list[Any]:
        return list(self.mesh.all_gather_object(said))

    def close(self) -> None:
        """The mesh is closed by whoever joined."""

    def _by_rank(self, array: Array) -> Array:
        return array.reshape(self.size, -1)


class GlooBackend:
    """torch.distributed on gloo. In place where torch has it so, otherwise into another tensor."""

    IN_PLACE: Final = ("all_reduce", "broadcast", "reduce", "barrier")
    OPS: Final = {
        "sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX", "avg": "AVG", "band": "BAND", "bor": "BOR",
        "bxor": "BXOR",
    }  # fmt: skip

    def __init__(self) -> None:
        if os.environ.get("MASTER_ADDR", "").startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch, dist = import_module("torch"), import_module("torch.distributed")
        torch.set_num_threads(1)
        self._torch, self._dist = torch, dist
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.title = f"gloo (torch {torch.__version__})"

    def call(self, task: Task, given: Array, out: Array, in_place: bool, algorithm: str | None) -> Call | None:
        if in_place != (task.collective in self.IN_PLACE) or (task.kind.reduces and task.op not in self.OPS):
            return None
        dist, tensor = self._dist, self._torch.from_numpy
        source, target = tensor(given), tensor(out)
        op = getattr(dist.ReduceOp, self.OPS.get(task.op, "SUM"))
        parts = list(target.chunk(self.size)) if self.rank == task.root else None
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 has new names
        reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        calls: dict[str, Callable[[], Call]] = {
            "barrier": lambda: partial(dist.barrier),
            "all_reduce": lambda: partial(dist.all_reduce, source, op),
            "broadcast": lambda: partial(dist.broadcast, source, task.root),
            "reduce": lambda: partial(dist.reduce, source, task.root, op),
            "all_gather": lambda: partial(gather, target, source),
            "reduce_scatter": lambda: partial(reduce_scatter, target, source, op),
            "all_to_all": lambda: partial(dist.all_to_all_single, target, source),
            "gather": lambda: partial(dist.gather, source, parts, task.root),
            "scatter": lambda: partial(
                dist.scatter, target, list(source.chunk(self.size)) if self.rank == task.root else None, task.root
            ),
        }
        make = calls.get(task.collective)
        return None if make is None else make()

    def exchange(self, said: Any) -> list[Any]:
        everything: list[Any] = [None] * self.size
        self._dist.all_gather_object(everything, said)
        return everything

    def close(self) -> None:
        self._dist.destroy_process_group()


class MpiBackend:
    """mpi4py's upper-case methods, on whatever MPI it was built for."""

    OPS: Final = {
        "sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX", "band": "BAND", "bor": "BOR", "bxor": "BXOR",
        "land": "LAND", "lor": "LOR", "lxor": "LXOR",
    }  # fmt: skip

    def __init__(self) -> None:
        mpi4py, MPI = import_module("mpi4py"), import_module("mpi4py.MPI")  # noqa: N806 - its name
        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        self.rank, self.size = self._comm.rank, self._comm.size
        library = MPI.Get_library_version().splitlines()[0].split()
        self.title = f"mpi4py {mpi4py.__version__} ({library[0]} {library[-1]})"

    def call(self, task: Task, given: Array, out: Array, in_place: bool, algorithm: str | None) -> Call | None:
        collective, comm = task.collective, self._comm
        absent = collective == "reduce_scatter" if in_place else not task.kind.out_of_place
        if absent or (task.kind.reduces and task.op not in self.OPS):
            return None  # in place, MPI leaves the part of a reduce_scatter at the beginning
        op = getattr(self._mpi, self.OPS.get(task.op, "SUM"))
        here, at_root = self._mpi.IN_PLACE, self.rank == task.root
        source = here if in_place else given
        calls: dict[str, Callable[[], Call]] = {
            "barrier": lambda: partial(comm.Barrier),
            "broadcast": lambda: partial(comm.Bcast, given, task.root),
            "all_reduce": lambda: partial(comm.Allreduce, source, out, op),
            "reduce": lambda: partial(
                comm.Reduce, source if at_root else given, out if at_root else None, op, task.root
            ),
            "all_gather": lambda: partial(comm.Allgather, source, out),
            "reduce_scatter": lambda: partial(comm.Reduce_scatter_block, given, out, op),
            "all_to_all": lambda: partial(comm.Alltoall, source, out),
            "gather": lambda: partial(comm.Gather, source if at_root else given, out if at_root else None, task.root),
            "scatter": lambda: partial(
                comm.Scatter, given if at_root else None, here if in_place and at_root else out, task.root
            ),
            "scan": lambda: partial(comm.Scan, source, out, op),
            "exscan": lambda: partial(comm.Exscan, source, out, op),
        }
        return calls[collective]()

    def exchange(self, said: Any) -> list[Any]:
        return list(self._comm.allgather(said))

    def close(self) -> None:
        self._mpi.Finalize()


#: backend → what makes it in a process that belongs to its world.
FOREIGN: Final[dict[str, Callable[[], Backend]]] = {"gloo": GlooBackend, "mpi4py": MpiBackend}

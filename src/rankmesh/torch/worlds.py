"""Which mesh a process group stands on.

1. The default group brings a mesh: one endpoint, one thread, one connection to each rank it speaks to.
2. A group of `new_group` is a Group on the default group's mesh, if that is rankmesh's: no rendezvous, no further
   connections, and a lost rank is known to all groups at once. Its first member gives it its number by a message, so
   groups of different ranks can be made at the same time, by different threads.
3. Any other group (of a program whose default group is gloo's, say) brings a mesh of its own, by the store it was
   given.

Whoever brought a mesh closes it. What is left at the interpreter's end is closed before threads are stopped there: a
thread that returns from torch's code into an interpreter that is gone ends the process with a signal.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakSet

import torch
from torch import distributed as dist

from rankmesh.collectives.calls import pass_over
from rankmesh.errors import DeadlineError, RankmeshError
from rankmesh.group import Group
from rankmesh.mesh import Mesh
from rankmesh.torch.meeting import meet_at

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _DistributedBackendOptions

logger = logging.getLogger("rankmesh")

pass_over(os.path.dirname(torch.__file__))  # errors name the line of the program, not torch's

#: Seconds for goodbyes at the interpreter's end, where a process group was not destroyed.
_PARTING: Final = 1.0
_open: WeakSet[Mesh] = WeakSet()


class Place(NamedTuple):
    """Where a process group is: its ranks, and the mesh they are part of."""

    group: Group
    mesh: Mesh

    @property
    def owns_mesh(self) -> bool:
        return self.group is self.mesh

    def close(self) -> None:
        """Let what was sent leave, and say goodbye. What nobody received is given up: an error would keep torch from
        forgetting its groups."""
        if not self.owns_mesh:
            self.group.close()
            return
        _open.discard(self.mesh)
        try:
            self.mesh.close()
        except DeadlineError as error:
            logger.warning("A process group was destroyed with messages under way: %s", error)

    def abort(self) -> None:
        """End what is under way at once."""
        if self.owns_mesh:
            _open.discard(self.mesh)
            self.mesh.abort("its process group was aborted")
        else:
            self.group.close()

    def subgroup(self, ranks: list[int], timeout: float) -> Place | None:
        """Of these ranks of this one; None if this process is not one of them. All of them call it."""
        made = self.group.group(ranks, timeout)
        return None if made is None else Place(made, self.mesh)


def place_for(about: _DistributedBackendOptions) -> Place:
    """The place of a new process group, on one of its ranks."""
    timeout = about.timeout.total_seconds()
    ranks = list(about.global_ranks_in_group)
    world = _default_place() if ranks else None
    if world is not None:
        made = world.subgroup(ranks, timeout)
        assert made is not None, "torch makes process groups on their ranks only"
        return made
    mesh = meet_at(about.store, about.group_rank, about.group_size, timeout)
    if not _open:
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # last registered, first called: before what the program registered earlier goes
    _open.add(mesh)
    return Place(mesh, mesh)


def _default_place() -> Place | None:
    """Of the default group, if it is rankmesh's."""
    group: Any = dist.group.WORLD
    try:
        backend = group._get_backend(torch.device("cpu"))
    except (RuntimeError, AttributeError):  # there is no default group, or it has nothing for CPU tensors
        return None
    place = getattr(backend, "place", None)
    return place if isinstance(place, Place) else None


def _close_all() -> None:
    failure = getattr(sys, "last_value", None)
    for mesh in list(_open):
        try:
            if failure is not None:
                mesh.abort(f"{type(failure).__name__}: {failure}")
            else:
                mesh.close(_PARTING)
        except RankmeshError as error:  # the process ends anyway, and the others learn of it
            logger.debug("At the end of the interpreter: %s", error)
    _open.clear()

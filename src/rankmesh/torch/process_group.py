"""ProcessGroup: rankmesh under torch 2.6 to 2.13, where a backend in Python takes the place of the process group.

torch calls it from Python by attribute, and from C++ (DDP's reducer, functional collectives) through a trampoline,
which finds overrides by these names. What the base would look for in a backend of its own, this says itself.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from rankmesh.torch.plugin import Plugin
from rankmesh.torch.worlds import Place


class ProcessGroup(Plugin, dist.ProcessGroup):  # type: ignore[misc]  # torch's stubs name the same arguments differently
    """A process group over a Group of rankmesh. `init_process_group("rankmesh")` and `new_group` make them."""

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False
    #: Of a backend: there are none.
    options = None

    def __init__(self, place: Place, store: Store, seconds: float) -> None:
        dist.ProcessGroup.__init__(self, place.group.rank, place.group.size)  # type: ignore[call-arg]
        Plugin.__init__(self, place, store, seconds)
        self._name = ""
        self._description = ""

    def setGroupName(self, name: str) -> None:  # noqa: N802  # c10d's
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802  # c10d's
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802  # c10d's
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802  # c10d's
        return self._description

    def get_group_store(self) -> Store:
        return self.store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> ProcessGroup:  # type: ignore[override]  # it is its own backend
        return self

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> ProcessGroup | None:
        """A process group of some of this one's ranks; None on the others, which need not call it."""
        seconds = self.seconds if timeout is None else timeout.total_seconds()
        place = self.place.subgroup(list(new_ranks), seconds)
        if place is None:
            return None
        name = group_name or f"{self._name}:split:{'-'.join(map(str, new_ranks))}"
        made = ProcessGroup(place, PrefixStore(f"{name}/", self.store), seconds)
        made.setGroupName(name)
        made.setGroupDesc(group_desc or f"{self._description}:split")
        return made

    splitGroup = split_group  # noqa: N815  # c10d's

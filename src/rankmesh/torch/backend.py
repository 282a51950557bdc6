"""Backend: rankmesh under torch 2.14 and later, where a backend can be written in Python and an ordinary ProcessGroup
stands above it.

Written from torch's documentation of custom backends and its tests of Python backends; no released torch was there to
run it with. The calls themselves are those of process_group.py, which is tested.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store

from rankmesh.torch.plugin import Plugin
from rankmesh.torch.registration import NAME
from rankmesh.torch.worlds import Place


class Backend(Plugin, c10d.Backend):  # type: ignore[misc]  # torch's stubs name the same arguments differently
    """A backend over a Group of rankmesh. Torch makes them by `init_process_group("rankmesh")` and `new_group`."""

    def __init__(self, place: Place, store: Store, seconds: float) -> None:
        c10d.Backend.__init__(self, place.group.rank, place.group.size)
        Plugin.__init__(self, place, store, seconds)

    @property
    def supports_splitting(self) -> bool:
        return True

    @property
    def supports_coalescing(self) -> bool:
        return True

    @property
    def options(self) -> Any:
        return c10d.Backend.Options(NAME, timeout=timedelta(seconds=self.seconds))

    def split(self, store: Store, ranks: list[int], opts: Any) -> Backend | None:
        """Of some of this one's ranks; None on the others."""
        place = self.place.subgroup(list(ranks), self.seconds)
        return None if place is None else Backend(place, store, self.seconds)

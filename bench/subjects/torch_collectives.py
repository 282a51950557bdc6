"""rankmesh's collectives by torch.distributed: the calls of gloo's subject, over another backend.

After each measure the group is asked what it used for every peer it talked to, as for rankmesh's own calls.
"""

from __future__ import annotations

import rankmesh.torch  # noqa: F401  # the backend, also where rankmesh is not installed but on the path
import torch.distributed as dist

from subjects.gloo import Gloo
from subjects.gloo_collectives import GlooCollectives
from subjects.rankmesh_messages import check_transport, rankmesh_version


class _Rankmesh(Gloo):
    backend = "rankmesh"


class RankmeshTorch(GlooCollectives):
    def library(self) -> Gloo:
        return _Rankmesh()

    def version(self) -> str:
        return f"{rankmesh_version()} in {super().version()}"

    def check(self) -> None:
        group = dist.group.WORLD.group
        for rank, peer in enumerate(group.peers):
            if rank != group.rank and peer.transport is not None:
                check_transport(group, rank, "shm")

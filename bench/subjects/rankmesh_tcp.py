"""rankmesh over tcp://, by the calls a user writes: `mesh.send` and `mesh.recv`, default settings."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import rankmesh as rm

from subjects.base import HOST, OPEN_TIMEOUT, Subject, Verb

TAG = 7


class RankmeshTcp(Subject):
    def open(self, rank: int, size: int, port: int) -> None:
        with ExitStack() as stack:
            self.mesh = stack.enter_context(rm.join(f"tcp://{HOST}:{port}", rank=rank, size=size, timeout=OPEN_TIMEOUT))
            self.mesh.barrier()
            self.held = stack.pop_all()

    def close(self) -> None:
        self.held.close()

    def version(self) -> str:
        try:
            return f"rankmesh {version('rankmesh')}"
        except PackageNotFoundError:  # run from the source tree by PYTHONPATH
            return "rankmesh (source tree)"

    def sender(self, peer: int) -> Verb:
        return partial(self.mesh.send, to=peer, tag=TAG)

    def receiver(self, peer: int) -> Verb:
        return partial(self.mesh.recv, source=peer, tag=TAG)

"""rankmesh's collectives by the calls a user writes, on numpy arrays and on torch's tensors.

After each measure the mesh is asked what it used for every peer it talked to, as for messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from subjects.base import Collectives, Floats, Transfer
from subjects.rankmesh_messages import check_transport, join, rankmesh_version, transport_of

if TYPE_CHECKING:
    import torch


class SameHost(Collectives):
    """Default settings: nobody asked for shared memory."""

    expected = "shm"
    settings: Mapping[str, Any] = MappingProxyType({})

    def open(self, rank: int, size: int, port: int) -> None:
        with ExitStack() as stack:
            self.mesh = stack.enter_context(join(rank, size, port, **self.settings))
            self.mesh.barrier()
            self.held = stack.pop_all()

    def close(self) -> None:
        self.held.close()

    def version(self) -> str:
        return f"{rankmesh_version()} over {transport_of(self.mesh, (self.mesh.rank + 1) % self.mesh.size)}"

    def check(self) -> None:
        for rank, peer in enumerate(self.mesh.peers):
            if rank != self.mesh.rank and peer.transport is not None:
                check_transport(self.mesh, rank, self.expected)

    def all_reduce(self, buffer: Any) -> Transfer:
        return partial(self.mesh.all_reduce, buffer)

    def broadcast(self, buffer: Any) -> Transfer:
        return partial(self.mesh.broadcast, buffer)

    def all_gather(self, buffer: Any, out: Any) -> Transfer:
        return partial(self.mesh.all_gather, buffer, out=self._by_rank(out))

    def reduce_scatter(self, buffer: Any, out: Any) -> Transfer:
        return partial(self.mesh.reduce_scatter, self._by_rank(buffer), out=out)

    def all_to_all(self, buffer: Any, out: Any) -> Transfer:
        return partial(self.mesh.all_to_all, self._by_rank(buffer), out=self._by_rank(out))

    def barrier(self) -> Transfer:
        return self.mesh.barrier

    def _by_rank(self, buffer: Any) -> Any:
        return buffer.reshape(self.mesh.size, -1)


class Tcp(SameHost):
    expected = "tcp"
    settings: Mapping[str, Any] = MappingProxyType({"shm": False})


class Float32(SameHost):
    """Tensors of torch. It is imported in `open`, on the core of this rank, with one thread as for gloo."""

    dtype = "float32"

    def open(self, rank: int, size: int, port: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.torch = torch
        super().open(rank, size, port)

    def allocate(self, count: int) -> torch.Tensor:
        return self.torch.ones(count, dtype=getattr(self.torch, self.dtype))

    def write(self, buffer: torch.Tensor, values: Floats) -> None:
        buffer.copy_(self.torch.from_numpy(values))

    def read(self, buffer: torch.Tensor) -> Floats:
        return buffer.float().numpy()


class Float16(Float32):
    dtype = "float16"


class BFloat16(Float32):
    dtype = "bfloat16"

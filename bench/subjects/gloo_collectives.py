"""gloo's collectives by torch.distributed, on tensors, on the loopback interface."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from subjects.base import Collectives, Floats, Transfer
from subjects.gloo import Gloo


class GlooCollectives(Collectives):
    def open(self, rank: int, size: int, port: int) -> None:
        self.started = Gloo()
        self.started.open(rank, size, port)

    def close(self) -> None:
        self.started.close()

    def version(self) -> str:
        return self.started.version()

    def allocate(self, count: int) -> torch.Tensor:
        return torch.ones(count, dtype=torch.float32)

    def write(self, buffer: torch.Tensor, values: Floats) -> None:
        buffer.copy_(torch.from_numpy(values))

    def read(self, buffer: torch.Tensor) -> Floats:
        return buffer.numpy()

    def all_reduce(self, buffer: torch.Tensor) -> Transfer:
        return partial(dist.all_reduce, buffer)

    def broadcast(self, buffer: torch.Tensor) -> Transfer:
        return partial(dist.broadcast, buffer, src=0)

    def all_gather(self, buffer: torch.Tensor, out: torch.Tensor) -> Transfer:
        return partial(dist.all_gather_single, out, buffer)

    def reduce_scatter(self, buffer: torch.Tensor, out: torch.Tensor) -> Transfer:
        return partial(dist.reduce_scatter_single, out, buffer)

    def all_to_all(self, buffer: torch.Tensor, out: torch.Tensor) -> Transfer:
        return partial(dist.all_to_all_single, out, buffer)

    def barrier(self) -> Transfer:
        return dist.barrier

"""DistributedDataParallel, over gloo and over rankmesh: the same program but for the name of the backend."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from subjects.base import Trainer
from subjects.gloo import open_process_group
from subjects.rankmesh_messages import rankmesh_version

#: 25.2 million parameters: 3.1 + 9.4 + 9.4 + 3.1.
WIDTHS = (1024, 3072, 3072, 3072, 1024)
#: A batch is small enough for communication to count, as where a model is trained by many ranks.
BATCH = 16
BATCHES = 8
RATE = 5.0


class Ddp(Trainer):
    backend = "gloo"

    def open(self, rank: int, size: int, port: int) -> None:
        open_process_group(self.backend, rank, size, port)
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(WIDTHS):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.model = DistributedDataParallel(nn.Sequential(*layers[:-1]))
        self.optimiser = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.initial = [parameter.detach().clone() for parameter in self.model.parameters()]
        data = torch.Generator().manual_seed(1 + rank)
        self.batches = [torch.randn(BATCH, WIDTHS[0], generator=data) for _ in range(BATCHES)]

    def close(self) -> None:
        dist.destroy_process_group()

    def version(self) -> str:
        return f"torch {torch.__version__}, {self.parameters / 1e6:.1f} M parameters, batch {BATCH}"

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def reset(self, learning: bool) -> None:
        with torch.no_grad():
            for parameter, initial in zip(self.model.parameters(), self.initial, strict=True):
                parameter.copy_(initial)
        self.optimiser.param_groups[0]["lr"] = RATE if learning else 0.0

    def step(self, number: int) -> float:
        inputs = self.batches[number % BATCHES]
        loss: Any = nn.functional.mse_loss(self.model(inputs), inputs.roll(1, dims=1))
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        return float(loss.detach())

    def alone(self) -> AbstractContextManager[None]:
        return self.model.no_sync()


class RankmeshDdp(Ddp):
    backend = "rankmesh"

    def open(self, rank: int, size: int, port: int) -> None:
        import rankmesh.torch  # noqa: F401  # the backend, also where rankmesh is not installed but on the path

        super().open(rank, size, port)

    def version(self) -> str:
        return f"{rankmesh_version()} in {super().version()}"

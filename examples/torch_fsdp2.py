"""FSDP2 over rankmesh: each rank holds its part of every parameter, gathers those of a layer to compute it, and
scatters their gradients.

    rankmesh run -n 4 examples/torch_fsdp2.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import rankmesh.torch  # noqa: F401  # the backend; where rankmesh is installed, torch finds it without this line

STEPS = 20


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("rankmesh")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(64, 1))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)

    held = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    whole = sum(p.numel() for p in model.parameters())
    data = torch.Generator().manual_seed(1 + rank)
    losses = []
    for _ in range(STEPS):
        inputs = torch.randn(64, 64, generator=data)
        loss = nn.functional.mse_loss(model(inputs), inputs[:, :4].sum(1, keepdim=True))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    print(f"rank {rank} holds {held} of {whole} numbers; its loss fell: {losses[-1] < losses[0] / 2}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

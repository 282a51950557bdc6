"""DistributedDataParallel over rankmesh. Nothing in it is rankmesh's but the name of the backend, and, if you like,

    rankmesh.torch.compress(model, "int8")

by which gradients travel in a quarter of the bytes.

    torchrun --nproc-per-node 2 examples/torch_ddp.py
    rankmesh run -n 2 examples/torch_ddp.py --compress int8
    rankmesh run -n 2 examples/torch_ddp.py --backend gloo      # the same losses
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankmesh.torch

STEPS = 30


def train(backend: str, compression: str | None) -> None:
    dist.init_process_group(backend)
    torch.manual_seed(0)  # the same weights on all ranks, and data of its own on each
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)))
    if compression is not None:
        rankmesh.torch.compress(model, compression)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(1 + dist.get_rank())

    for step in range(STEPS):
        inputs = torch.randn(64, 32, generator=data)
        loss = nn.functional.mse_loss(model(inputs), inputs[:, :4].sum(1, keepdim=True))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 10 == 9:
            dist.all_reduce(loss.detach_())
            if dist.get_rank() == 0:
                print(f"{backend}, step {step + 1}: loss {loss.item() / dist.get_world_size():.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="rankmesh")
    parser.add_argument("--compress", choices=["fp16", "bf16", "int8", "topk", "randomk"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train(arguments.backend, arguments.compress)

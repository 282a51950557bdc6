"""A checkpoint that is saved by some ranks and loaded by others, by torch.distributed.checkpoint over rankmesh.

rankmesh run -n 4 examples/torch_checkpoint.py save /tmp/checkpoint
rankmesh run -n 2 examples/torch_checkpoint.py load /tmp/checkpoint
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rankmesh.torch  # noqa: F401  # the backend; where rankmesh is installed, torch finds it without this line


def train_one_step(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    torch.manual_seed(1)
    model(torch.randn(8, 32)).square().mean().backward()
    optimiser.step()
    optimiser.zero_grad()


def main(what: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("rankmesh")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0 if what == "save" else 99)  # what is loaded was not there before
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    if what == "save":
        train_one_step(model, optimiser)

    weights, moments = get_state_dict(model, optimiser)
    state = {"model": weights, "optimiser": moments}
    if what == "save":
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimiser, model_state_dict=weights, optim_state_dict=moments)

    train_one_step(model, optimiser)  # shows that the optimiser's moments came along
    total = sum(parameter.full_tensor().double().sum() for parameter in model.parameters())
    if rank == 0:
        print(f"{what} with {size} ranks; after one more step the weights add up to {total:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3])

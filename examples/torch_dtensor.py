"""A product of matrices that are spread over the ranks, by DTensor over rankmesh.

rankmesh run -n 4 examples/torch_dtensor.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import rankmesh.torch  # noqa: F401  # the backend; where rankmesh is installed, torch finds it without this line


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("rankmesh")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))

    torch.manual_seed(0)
    left, right = torch.randn(96, 128), torch.randn(128, 64)
    columns = distribute_tensor(left, mesh, [Shard(1)])  # scattered from rank 0
    rows = distribute_tensor(right, mesh, [Shard(0)])
    product = columns @ rows  # each rank's is a term of the sum
    by_rows = product.redistribute(mesh, [Shard(0)])  # reduce_scatter
    whole = by_rows.redistribute(mesh, [Replicate()]).to_local()  # all_gather

    right_everywhere = torch.allclose(whole, left @ right, atol=1e-4)
    print(
        f"rank {rank}: {tuple(columns.to_local().shape)} @ {tuple(rows.to_local().shape)} is {product.placements[0]}, "
        f"then {tuple(by_rows.to_local().shape)}; right: {right_everywhere}"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

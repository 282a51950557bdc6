"""gloo by torch.distributed `send`/`recv`, on the loopback interface (GLOO_SOCKET_IFNAME is set by the entry)."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from subjects.base import HOST, OPEN_TIMEOUT, Bytes, Messenger, Verb


def open_process_group(backend: str, rank: int, size: int, port: int) -> None:
    """The default group of a world on this host, whose ranks have one thread each."""
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"tcp://{HOST}:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=OPEN_TIMEOUT),
    )


class Gloo(Messenger):
    #: Of torch.distributed.
    backend = "gloo"

    def open(self, rank: int, size: int, port: int) -> None:
        open_process_group(self.backend, rank, size, port)
        dist.barrier()

    def close(self) -> None:
        dist.destroy_process_group()

    def version(self) -> str:
        return f"torch {torch.__version__}"

    def buffer(self, array: Bytes) -> torch.Tensor:
        return torch.from_numpy(array)

    def sender(self, peer: int) -> Verb:
        return partial(dist.send, dst=peer)

    def receiver(self, peer: int) -> Verb:
        return partial(dist.recv, src=peer)

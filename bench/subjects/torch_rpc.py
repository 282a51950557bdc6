"""torch.distributed.rpc (TensorPipe). Large arrays are tensors.

As it comes it picks shared memory inside one host; the TCP row leaves it the transport and channel it uses between
hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed import rpc

from subjects.base import HOST, OPEN_TIMEOUT, Bytes, Call, Caller, keep_in_flight

NAMES = ("client", "server")


def echo(data: Any) -> Any:
    """Sent by name: both processes import this file."""
    return data


def call(payload: Any) -> Any:
    return rpc.rpc_sync(NAMES[1], echo, args=(payload,))


def start(payload: Any) -> Any:
    return rpc.rpc_async(NAMES[1], echo, args=(payload,))


class TorchRpc(Caller):
    options: Mapping[str, Any] = MappingProxyType({})

    def open(self, rank: int, size: int, port: int) -> None:
        torch.set_num_threads(1)
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://{HOST}:{port}", rpc_timeout=OPEN_TIMEOUT, **self.options
        )
        rpc.init_rpc(NAMES[rank], rank=rank, world_size=size, rpc_backend_options=options)

    def close(self) -> None:
        rpc.shutdown()

    def version(self) -> str:
        return f"torch {torch.__version__}"

    def array(self, array: Bytes) -> torch.Tensor:
        return torch.from_numpy(array)

    def caller(self) -> Call:
        return call

    def call_in_flight(self, payload: Any, count: int, window: int) -> Any:
        return keep_in_flight(start, lambda future: future.wait(), payload, count, window)


class TorchRpcTcp(TorchRpc):
    options = MappingProxyType({"_transports": ["uv"], "_channels": ["basic"]})

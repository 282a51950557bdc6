"""A server whose functions others call, without ranks and without a launcher.

python examples/rpc_server.py serve                          # prints its address
python examples/rpc_server.py ask tcp://127.0.0.1:40123      # in another shell, any number of times
"""

import asyncio
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import rankmesh as rm


@dataclass
class Batch:
    """What `predict` wants: the hint of its parameter makes one of what comes, and refuses anything else."""

    features: Any
    threshold: float = 0.5


def predict(batch: Batch) -> Any:
    return batch.features.mean(axis=1) > batch.threshold


def countdown(start: int) -> Iterator[int]:
    """A stream. It stops when its consumer does."""
    yield from range(start, 0, -1)


async def slow_add(a: int, b: int) -> int:
    await asyncio.sleep(0.01)
    return a + b


def accumulate(channel: rm.Channel) -> None:
    """A conversation: answers each number with the total so far."""
    total = 0
    for number in channel:
        total += number
        channel.send(total)


def serve() -> None:
    with rm.Endpoint("tcp://127.0.0.1:0", name="server") as endpoint:
        done = threading.Event()
        for fn in (predict, countdown, slow_add):
            endpoint.rpc.register(fn)
        endpoint.rpc.register(accumulate, channel=True)
        endpoint.rpc.register(done.set, "shutdown")
        print(endpoint.address, flush=True)
        done.wait(60)


def ask(address: str) -> None:
    with rm.Endpoint(None, name="client") as endpoint:
        server = endpoint.connect(address, timeout=10)
        print("predict", server.call("predict", Batch(np.array([[0.2, 0.4], [0.9, 0.7]])), timeout=10).tolist())
        print("countdown", list(server.stream("countdown", 3)))
        works = [server.call_async("slow_add", n, n) for n in range(3)]
        print("slow_add", [work.result() for work in works])
        with server.channel("accumulate") as channel:
            for number in (1, 2, 3):
                channel.send(number)
            print("accumulate", [channel.recv() for _ in range(3)])
        try:
            server.call("predict", "not a batch")
        except rm.InvalidMessage as error:
            print("refused", error.function)
        server.notify("shutdown")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve"]:
            serve()
        case ["ask", address]:
            ask(address)
        case _:
            sys.exit(__doc__)

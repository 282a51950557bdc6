"""A prefill process hands the pages of its KV cache to a decode process, without ranks and without a launcher.

python examples/kv_handover.py prefill                          # prints its address
python examples/kv_handover.py decode tcp://127.0.0.1:40123     # in another shell, any number of times

Prefill computes a prompt's keys and values into blocks of its cache and answers with their numbers. Decode reads these
blocks straight into blocks of its own cache, all layers of all blocks in one request, and tells prefill that it may use
them again. Nobody copies a page in Python, and prefill's main thread takes no part in the transfer.
"""

import itertools
import sys
import threading
from collections import deque
from typing import Any

import numpy as np

import rankmesh as rm

LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, HEAD_DIM = 4, 64, 16, 8, 64
#: Of one layer, as vLLM has it: a block's keys and values for BLOCK_TOKENS tokens lie together, layers lie apart.
CACHE = (LAYERS, BLOCKS, 2, BLOCK_TOKENS, HEADS, HEAD_DIM)
BLOCK_BYTES = np.empty(CACHE[2:], np.float16).nbytes
LAYER_BYTES = BLOCKS * BLOCK_BYTES


def keys_and_values(tokens: list[int]) -> Any:
    """What a model would compute: [layer, block, key or value, token, head, dim]. Both sides know it, to compare."""
    padded = np.zeros(-(-len(tokens) // BLOCK_TOKENS) * BLOCK_TOKENS)
    padded[: len(tokens)] = tokens
    of_token = np.sin(padded).reshape(1, -1, 1, BLOCK_TOKENS, 1, 1)
    of_place = np.cos(np.arange(LAYERS * 2 * HEADS * HEAD_DIM)).reshape(LAYERS, 1, 2, 1, HEADS, HEAD_DIM)
    return (of_token * of_place).astype(np.float16)


class Blocks:
    """The numbers of free blocks."""

    def __init__(self) -> None:
        self._free = deque(np.random.default_rng().permutation(BLOCKS).tolist())
        self._changed = threading.Condition()

    def take(self, count: int) -> list[int]:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._free) >= count, timeout=30):
                raise MemoryError(f"{count} blocks were not free within 30 s")
            return [self._free.popleft() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        with self._changed:
            self._free.extend(blocks)
            self._changed.notify_all()


def prefill() -> None:
    with rm.Endpoint("tcp://127.0.0.1:0", name="prefill") as endpoint:
        cache = endpoint.memory.allocate("kv", CACHE, np.float16)  # decode processes on this host map it
        blocks, requests, done = Blocks(), itertools.count(1), threading.Event()

        def compute(tokens: list[int]) -> dict[str, Any]:
            values = keys_and_values(tokens)
            chosen = blocks.take(values.shape[1])
            cache.array[:, chosen] = values
            request = next(requests)
            read = cache.wait_notification(request, timeout=60, async_op=True)
            read.add_done_callback(lambda _: blocks.give_back(chosen))  # also when decode is gone: after 60 s
            return {"request": request, "blocks": chosen}

        endpoint.rpc.register(compute)
        endpoint.rpc.register(done.set, "shutdown")
        print(endpoint.address, flush=True)
        done.wait(60)


def decode(address: str) -> None:
    with rm.Endpoint(None, name="decode") as endpoint:
        server = endpoint.connect(address, timeout=10)
        remote = server.open("kv")
        cache, blocks = np.empty(remote.shape, remote.dtype), Blocks()
        for length in (5, 200, 333):
            tokens = list(range(length, 2 * length))
            answer = server.call("compute", tokens, timeout=10)
            mine = blocks.take(len(answer["blocks"]))
            remote.read_batch(  # a block is LAYERS rows, LAYER_BYTES apart, here and there
                [
                    (cache[:, here], there * BLOCK_BYTES, LAYER_BYTES)
                    for here, there in zip(mine, answer["blocks"], strict=True)
                ]
            )
            remote.write(b"", notify=answer["request"])  # nothing to write: the blocks may be used again
            assert np.array_equal(cache[:, mine], keys_and_values(tokens))
            print(f"{length} tokens in {len(mine)} blocks, {cache[:, mine].nbytes} bytes, as they were computed")
            blocks.give_back(mine)
        server.notify("shutdown")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["prefill"]:
            prefill()
        case ["decode", address]:
            decode(address)
        case _:
            sys.exit(__doc__)

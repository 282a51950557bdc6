"""Top-k: the largest numbers, and where they stand.

Idea. Of gradients a few large numbers carry most; the others wait, and add up (error feedback), until they are large
too. Each rank chooses its own, so a sum has up to n times as many: payloads are gathered, and added on every rank.

Cost: 8 bytes for each number that is kept (12 beyond 2³² numbers), received from all n-1 others: ratio times n of what
a float32 all_reduce sends, so it pays below a ratio of 1/n. Choosing takes about 5 ns a number, on one core.

inf and NaN count as the largest, and are sent as they are. Any that find no place are dropped.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rankmesh.collectives.compression.base import Compressor, Exchange, kept, padded, ratio_of

Array = np.ndarray[Any, Any]


class TopK(Compressor):
    """`ratio`: of the numbers that are kept, above 0 and up to 1; at least one number is."""

    exchange = Exchange.GATHER

    def __init__(self, ratio: float, error_feedback: bool = True) -> None:
        super().__init__(error_feedback)
        self.ratio = ratio_of(ratio, "TopK")

    @property
    def signature(self) -> str:
        return f"topk(ratio={self.ratio:g})"

    def nbytes(self, count: int) -> int:
        return padded(kept(self.ratio, count) * (4 + _index(count).itemsize))

    def encode(self, values: Array, payload: Array, seed: int) -> None:
        many = kept(self.ratio, len(values))
        if not many:
            return
        places = np.argpartition(np.abs(values), len(values) - many)[len(values) - many :]  # NaN is last
        places.sort()  # to be read and added in the order of memory
        indices, chosen = self._layout(payload, len(values))
        indices[:] = places
        np.take(values, places, out=chosen)

    def decode(self, payload: Array, out: Array, seed: int) -> None:
        out.fill(0.0)
        self.add(payload, out, seed)

    def add(self, payload: Array, total: Array, seed: int) -> None:
        indices, chosen = self._layout(payload, len(total))
        total[indices] += chosen  # no index occurs twice

    def _layout(self, payload: Array, count: int) -> tuple[Array, Array]:
        many, index = kept(self.ratio, count), _index(count)
        ends = many * index.itemsize
        return payload[:ends].view(index), payload[ends : ends + 4 * many].view(np.float32)


def _index(count: int) -> np.dtype[Any]:
    return np.dtype(np.uint32 if count <= 1 << 32 else np.uint64)

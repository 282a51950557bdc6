"""Random-k: numbers at random places, the same on all ranks.

Idea. The array is cut into k equal strata, and one number of each is sent, at a place that all ranks draw alike, from
the compressor's seed and the count of calls: places need not be sent, and payloads are added number by number, by an
ordinary all_reduce. Each number has the same chance, and no region is left out. Drawn from raw bits of a generator
whose stream numpy does not change: ranks may have different versions.

Cost: that of an all_reduce of k float32 numbers; no choosing, and no decoding of others' payloads. Converges more
slowly than top-k for the same ratio, and is much cheaper.

With error feedback the rest waits until its place is drawn. Without, what is sent is scaled by count/k, so that
the expected result is right. inf and NaN at places that are drawn are sent as they are; others are dropped.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rankmesh.collectives.compression.base import Compressor, Exchange, kept, padded, ratio_of

Array = np.ndarray[Any, Any]


class RandomK(Compressor):
    """`ratio`: of the numbers that are sent. `seed`: the same on all ranks."""

    exchange = Exchange.REDUCE
    seeded = True

    def __init__(self, ratio: float, seed: int = 0, error_feedback: bool = True) -> None:
        super().__init__(error_feedback)
        self.ratio = ratio_of(ratio, "RandomK")
        self.seed = seed

    @property
    def signature(self) -> str:
        return f"randomk(ratio={self.ratio:g}, seed={self.seed})"

    def nbytes(self, count: int) -> int:
        return padded(4 * kept(self.ratio, count))

    def encode(self, values: Array, payload: Array, seed: int) -> None:
        places = self._places(len(values), seed)
        chosen = payload[: 4 * len(places)].view(np.float32)
        np.take(values, places, out=chosen)
        if not self.error_feedback and len(places):
            np.multiply(chosen, np.float32(len(values) / len(places)), out=chosen)

    def decode(self, payload: Array, out: Array, seed: int) -> None:
        places = self._places(len(out), seed)
        out.fill(0.0)
        out[places] = payload[: 4 * len(places)].view(np.float32)

    def _places(self, count: int, seed: int) -> Array:
        many = kept(self.ratio, count)
        if not many:
            return np.empty(0, np.intp)
        bounds = np.arange(many + 1, dtype=np.int64) * count // many
        drawn = np.random.PCG64(np.random.SeedSequence([self.seed, seed, count])).random_raw(many)
        lengths = (bounds[1:] - bounds[:-1]).astype(np.uint64)
        return bounds[:-1] + (drawn % lengths).astype(np.int64)

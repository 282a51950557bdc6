"""Cast: numbers as float16 or bfloat16.

Idea. Half of the bytes, by rounding to nearest even. float16 keeps 11 bits of a number between 6e-8 and 65,504,
bfloat16 8 bits of any. Sums are computed in float32 and rounded once: an all_reduce in the smaller type itself would
round at each of its n-1 additions, for the same bytes.

Cost: 2 bytes a number; an error of at most 2⁻¹¹ or 2⁻⁸ of a number in its payload, and once more in the sum. About 2 ns
a number to encode where torch is imported, up to 4 where it is not.

What is finite but too large is sent as the largest there is, the rest later (error feedback). inf and NaN are sent as
they are, and leave nothing behind.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from rankmesh.collectives.compression.base import Compressor, padded
from rankmesh.collectives.compression.halves import narrow, widen
from rankmesh.collectives.kinds import BLOCK
from rankmesh.errors import UsageError

Array = np.ndarray[Any, Any]

_LARGEST: Final = {"float16": np.float32(65504.0), "bfloat16": np.float32(3.3895313892515355e38)}


class Cast(Compressor):
    """`dtype`: "float16" or "bfloat16"."""

    def __init__(self, dtype: str = "bfloat16", error_feedback: bool = True) -> None:
        super().__init__(error_feedback)
        if dtype not in _LARGEST:
            raise UsageError(f"Numbers are cast to {' or '.join(_LARGEST)}, not to {dtype!r}. Correct dtype.")
        self.dtype = dtype

    @property
    def signature(self) -> str:
        return f"cast(dtype={self.dtype})"

    def nbytes(self, count: int) -> int:
        return padded(2 * count)

    def encode(self, values: Array, payload: Array, seed: int) -> None:
        bits, largest = payload[: 2 * len(values)].view(np.uint16), _LARGEST[self.dtype]
        for first in range(0, len(values), BLOCK):
            block = values[first : first + BLOCK]
            held = np.clip(block, -largest, largest)
            np.copyto(held, block, where=np.isinf(block))
            narrow(held, self.dtype, bits[first : first + BLOCK])

    def decode(self, payload: Array, out: Array, seed: int) -> None:
        widen(payload[: 2 * len(out)].view(np.uint16), self.dtype, out)

"""float32 to float16 and bfloat16 and back, rounded to nearest even. By torch if the program has imported it; otherwise
float16 by numpy, and bfloat16, which numpy does not have, as the upper half of a float32's bits."""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np

from rankmesh.collectives.kinds import BLOCK

Array = np.ndarray[Any, Any]

_SHIFT: Final = np.uint32(16)
_QUIET: Final = np.uint32(0x0040)  # of bits shifted down: makes a NaN of any bits one whose upper half is a NaN too


def widen(bits: Array, name: str, out: Array) -> None:
    """`bits`: flat uint16. `name`: "float16" or "bfloat16"."""
    torch = sys.modules.get("torch")
    if torch is not None:
        given = torch.from_numpy(bits.view(np.int16)).view(getattr(torch, name))
        _copy(torch.from_numpy(out), given)
    elif name == "float16":
        np.copyto(out, bits.view(np.float16))
    else:
        wide = out.view(np.uint32)
        np.copyto(wide, bits)
        np.left_shift(wide, _SHIFT, out=wide)


def narrow(values: Array, name: str, bits: Array) -> None:
    """What is too large becomes infinite."""
    torch = sys.modules.get("torch")
    if torch is not None:
        target = torch.from_numpy(bits.view(np.int16)).view(getattr(torch, name))
        _copy(target, torch.from_numpy(values))
    elif name == "float16":
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(bits.view(np.float16), values, casting="same_kind")
    else:
        for first in range(0, len(bits), BLOCK):
            _narrow_block(values[first : first + BLOCK], bits[first : first + BLOCK])


def _copy(target: Any, given: Any) -> None:
    for one, other in zip(target.split(BLOCK), given.split(BLOCK), strict=True):
        one.copy_(other)


def _narrow_block(values: Array, bits: Array) -> None:
    wide = values.view(np.uint32)
    upper = wide >> _SHIFT
    rounded = (wide + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> _SHIFT
    np.copyto(bits, np.where(np.isnan(values), upper | _QUIET, rounded), casting="same_kind")

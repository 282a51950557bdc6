"""What reduces two arrays to one: the operations by name, and users' functions.

Every operation is associative and commutes, and so must a user's function be, except in scan and exscan, which keep
the order of ranks. A function is called as f(left, right) with two arrays of one dimension, and returns one of the
same length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import numpy as np

from rankmesh.errors import UsageError

Array = np.ndarray[Any, Any]
#: A name of OPERATIONS, or a function of two arrays.
Op = str | Callable[[Any, Any], Any]

OPERATIONS: Final[dict[str, np.ufunc]] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "avg": np.add,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "land": np.logical_and,
    "lor": np.logical_or,
    "lxor": np.logical_xor,
}


class Reduction:
    """An operation on arrays of one dtype. `name` is what ranks must agree on."""

    __slots__ = ("_function", "_size", "_ufunc", "name")

    def __init__(self, op: Op, dtype: np.dtype[Any], size: int) -> None:
        if callable(op):
            self.name = f"function {getattr(op, '__qualname__', type(op).__qualname__)}"
            self._function: Callable[[Any, Any], Any] | None = op
            return
        self._function = None
        self._ufunc = _ufunc(op, dtype)
        self.name = op
        self._size = size if op == "avg" else 1

    @property
    def is_users(self) -> bool:
        return self._function is not None

    def apply(self, left: Array, right: Array, out: Array) -> None:
        """`out` is one of the two."""
        if self._function is None:
            self._ufunc(left, right, out=out)
            return
        made = np.asarray(self._function(left, right))
        if made.shape != out.shape:
            raise UsageError(
                f"The reduction {self.name} made an array of shape {made.shape} of two of {out.shape}. "
                "Return one of the same shape."
            )
        out[...] = made

    def finish(self, array: Array) -> None:
        """Once all ranks' are in it."""
        if self._function is None and self._size > 1:
            np.divide(array, self._size, out=array, casting="unsafe")


@lru_cache(maxsize=256)
def _ufunc(op: str, dtype: np.dtype[Any]) -> np.ufunc:
    ufunc = OPERATIONS.get(op)
    if ufunc is None:
        raise UsageError(f"There is no operation {op!r}. Use one of {', '.join(OPERATIONS)}, or a function.")
    one = np.zeros(1, dtype)
    try:
        if op == "avg":
            np.divide(one, 1, out=one)  # refuses integers, of which an average is none
        ufunc(one, one, out=one)
    except TypeError as error:
        raise UsageError(f"Arrays of {dtype} have no {op}: {error}. Use another operation, or a function.") from error
    return ufunc

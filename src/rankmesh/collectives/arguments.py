"""Arguments of collectives: what users pass, as flat arrays, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rankmesh.errors import UsageError

Array = np.ndarray[Any, Any]


def as_array(data: Any) -> Array:
    """An array over the memory of `data` where it has any; a number becomes a new one."""
    if not isinstance(data, np.ndarray):
        data = np.frombuffer(data, np.uint8) if isinstance(data, bytes | bytearray | memoryview) else np.asarray(data)
    if data.dtype.hasobject:
        raise UsageError(
            "This array holds references to Python objects, not their bytes. Use the object forms, such as "
            "all_gather_object()."
        )
    found: Array = data
    return found


def flat_input(array: Array) -> Array:
    """Its elements in one dimension: where they lie, or copied if they are not contiguous."""
    return np.ascontiguousarray(array).reshape(-1)


def flat_output(array: Array, what: str = "out") -> Array:
    """The same for what is written to."""
    if not array.flags.c_contiguous:
        raise UsageError(
            f"{what} of shape {array.shape} is not contiguous. Pass numpy.ascontiguousarray(x) and copy back."
        )
    if not array.flags.writeable:
        raise UsageError(f"{what} is read-only, and the result goes there. Pass a writable array, or out=.")
    return array.reshape(-1)


def output(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """`out` if it fits, or a new array if it is None."""
    if out is None:
        return np.empty(shape, dtype)
    array = as_array(out)
    if array.shape != shape or array.dtype != dtype:
        raise UsageError(
            f"out is {array.dtype} of shape {array.shape}, the result {dtype} of shape {shape}. Correct out."
        )
    return array


def by_rank(array: Array, size: int, what: str) -> tuple[int, ...]:
    """The shape of one rank's part of an array whose first dimension is the ranks."""
    if not array.ndim or array.shape[0] != size:
        raise UsageError(
            f"{what} takes an array with an entry per rank, {size}, in its first dimension; this one's shape is "
            f"{array.shape}."
        )
    shape: tuple[int, ...] = array.shape[1:]
    return shape


def row_counts(counts: Sequence[int], size: int, what: str) -> list[int]:
    """Rows per rank."""
    rows = [int(count) for count in counts]
    if len(rows) != size or min(rows) < 0:
        raise UsageError(f"{what} takes a count of rows for each of {size} ranks, none negative; these are {rows}.")
    return rows


def rows_of(array: Array, rows: int, what: str) -> int:
    """Elements of a row of an array that must have so many rows."""
    if not array.ndim or array.shape[0] != rows:
        raise UsageError(f"{what} takes {rows} rows here by its counts; this array's shape is {array.shape}.")
    return int(np.prod(array.shape[1:], dtype=np.int64))

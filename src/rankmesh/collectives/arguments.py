"""Arguments of collectives: what users pass, as flat arrays, checked before anything is sent."""

from __future__ import annotations

from array import array as typed_array
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from rankmesh.buffers import is_tensor
from rankmesh.collectives.kinds import Array, Kind, kind_of
from rankmesh.collectives.tensors import tensor_kind
from rankmesh.errors import UsageError

__all__ = [
    "Array",
    "Operand",
    "by_rank",
    "check_writable",
    "flat_input",
    "flat_output",
    "flat_target",
    "operand",
    "output",
    "parts_apart",
    "roots",
    "row_counts",
    "rows_of",
]

#: What has memory to write to, tensors aside.
_WRITTEN: Final = (np.ndarray, bytearray, memoryview, typed_array)


class Operand:
    """An array or a tensor: as its user has it (`value`), as memory (`array`), and what its elements are (`kind`)."""

    __slots__ = ("array", "kind", "value")

    def __init__(self, value: Any, array: Array, kind: Kind) -> None:
        self.value = value
        self.array = array
        self.kind = kind

    @property
    def what(self) -> str:
        """How ranks call it."""
        return f"{self.array.size} {self.kind.name}"

    @property
    def rows(self) -> str:
        """The same of one whose number of rows may differ from rank to rank."""
        return f"rows of {self.array.shape[1:]} {self.kind.name}"


def operand(data: Any) -> Operand:
    """Over the memory of `data` where it has any; a number becomes a new array. A memoryview or array.array has the
    elements that its format says. What is more than its memory to numpy (a matrix) is a plain array here."""
    if type(data) is np.ndarray:
        return Operand(data, data, kind_of(data.dtype))
    if is_tensor(data):
        kind = tensor_kind(data.dtype)
        return Operand(data, kind.memory(data), kind)
    array = np.frombuffer(data, np.uint8) if isinstance(data, bytes | bytearray) else _array_of(data)
    return Operand(data if isinstance(data, np.ndarray) else array, array, kind_of(array.dtype))


def _array_of(data: Any) -> Array:
    try:
        return np.asarray(data)
    except ValueError as error:
        if not isinstance(data, memoryview):
            raise
        raise UsageError(
            f"Elements of the format {data.format!r} are of no type of numpy's. Pass memoryview(x).cast('B'), their "
            "bytes."
        ) from error


def output(out: Any, shape: tuple[int, ...], kind: Kind) -> Operand:
    """`out` if it fits, or a new one if it is None."""
    if out is None:
        array = np.empty(shape, kind.dtype)
        return Operand(kind.value(array), array, kind)
    if not isinstance(out, _WRITTEN) and not is_tensor(out):
        raise UsageError(f"out is a {type(out).__name__}, which has no memory to write to. Pass an array or a tensor.")
    found = operand(out)
    if found.array.shape != shape or found.kind.name != kind.name or found.array.dtype != kind.dtype:
        raise UsageError(
            f"out is {found.kind.name} of shape {found.array.shape}, the result {kind.name} of shape {shape}. "
            "Correct out."
        )
    return found


def flat_input(array: Array) -> Array:
    """Its elements in one dimension: where they lie, or copied if they are not contiguous."""
    return np.ascontiguousarray(array).reshape(-1)


def flat_output(array: Array, what: str = "out", instead: str = "") -> Array:
    """The same for what is written to. `what`: how its user knows it; `instead`: what else could be passed."""
    if not array.flags.c_contiguous:
        raise UsageError(
            f"{what} of shape {array.shape} is not contiguous. Pass numpy.ascontiguousarray(x) and copy back{instead}."
        )
    check_writable(array, what, instead)
    return array.reshape(-1)


def check_writable(array: Array, what: str = "out", instead: str = "") -> None:
    if not array.flags.writeable:
        raise UsageError(f"{what} is read-only, and the result goes there. Pass a writable array{instead}.")


def flat_target(target: Operand, given: Operand) -> Array:
    """The same of where a result goes: `out`, or in place."""
    if target is given:
        return flat_output(target.array, "The array", ", or out=")
    return flat_output(target.array)


def parts_apart(array: Array, own: Array, counts: Sequence[int], root: int) -> Array:
    """The ranks' parts of an array, flat, so that to write the root's to `own` changes no other's: a copy if it lies
    where others do."""
    flat = flat_input(array)
    in_place = flat.ctypes.data + sum(counts[:root]) * flat.itemsize == own.ctypes.data
    return flat.copy() if not in_place and np.may_share_memory(flat, own) else flat


def roots(array: Any, name: str) -> Operand:
    """What the root of a scatter passes."""
    if array is None:
        raise UsageError(f"{name} takes the array to scatter at its root, and this rank is it. Pass it here.")
    return operand(array)


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

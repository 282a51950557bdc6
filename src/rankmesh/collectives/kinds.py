"""Kinds of elements: what the numbers of an array are called among ranks, and who computes with them.

Collectives move and reduce memory, which numpy sees as flat arrays. A kind says what that memory means:

- numpy's own dtypes are computed with by numpy.
- float16 and bfloat16 are computed with by torch where the program has imported it, because numpy does so element by
  element: measured on one core, in millions of additions a second, numpy 150 and 580 (ml_dtypes), torch 3,200 and
  2,600, float32 3,500. Without torch, bfloat16 goes through float32 block by block (970); for float16 that gains
  nothing, since numpy converts it element by element too. All of these round the exact sum of two numbers to nearest
  even, so they agree bit by bit, whichever rank uses which.
- torch's tensors are viewed as numpy arrays; of a dtype that numpy does not have, as integers of its size (tensors.py).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final
from zlib import crc32

import numpy as np

from rankmesh.errors import UsageError

Array = np.ndarray[Any, Any]
#: Called as (left, right, out) with flat arrays; `out` may be one of the two.
Operation = Callable[[Array, Array, Array], Any]

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
#: What torch calls them, of those that have a meaning for halves.
_TORCH: Final = {
    "sum": "add",
    "prod": "mul",
    "min": "minimum",
    "max": "maximum",
    "avg": "add",
    "land": "logical_and",
    "lor": "logical_or",
    "lxor": "logical_xor",
}
#: Characters up to which the fields of a structured dtype are named one by one.
_NAMED: Final = 72
#: Elements that are computed with at a time: what stays in the cache, costs few calls, and is too little for torch to
#: call its other threads. Those would take the cores of other ranks, and go on spinning there: on 2 cores an all_reduce
#: of 512 KiB with 2 ranks took twice as long.
BLOCK: Final = 32 * 1024 - 64


def no_operation(op: object) -> UsageError:
    return UsageError(f"There is no operation {op!r}. Use one of {', '.join(OPERATIONS)}, or a function.")


def name_of(dtype: np.dtype[Any]) -> str:
    """What ranks compare: two dtypes that hold their values differently have different names."""
    if dtype.names is None:
        return str(dtype.name if dtype.isnative else dtype.str)
    layout = _layout(dtype)
    if len(layout) <= _NAMED:
        return layout
    return f"{{{len(dtype.names)} fields in {dtype.itemsize} bytes, layout {crc32(layout.encode()):08x}}}"


def _layout(dtype: np.dtype[Any]) -> str:
    """Every field: its name, its dtype, and where it lies."""
    if dtype.subdtype is not None:
        return f"{_layout(dtype.base)} of {dtype.shape}"
    if dtype.fields is None or dtype.names is None:
        return name_of(dtype)
    fields = (f"{name!a}: {_layout(dtype.fields[name][0])} at {dtype.fields[name][1]}" for name in dtype.names)
    return f"{{{', '.join(fields)} in {dtype.itemsize} bytes}}"


class Kind:
    """Elements of numpy arrays of one dtype."""

    def __init__(self, dtype: np.dtype[Any], name: str = "") -> None:
        #: Of the memory, as numpy sees it.
        self.dtype = dtype
        #: What ranks agree on.
        self.name = name or name_of(dtype)
        self._operations: dict[str, Operation] = {}

    def operation(self, op: str) -> Operation:
        """Raises UsageError if these elements have none of that name."""
        if self.name in _HALVES and op in _TORCH and "torch" in sys.modules:
            return _by_torch(op, self.name)
        found = self._operations.get(op)
        if found is None:
            found = self._operations[op] = self._find(op)
        return found

    def _find(self, op: str) -> Operation:
        ufunc = OPERATIONS.get(op)
        if ufunc is None:
            raise no_operation(op)
        if issubclass(self.dtype.type, np.flexible):
            raise self._none(op, "what numpy makes of two texts, or of bytes, has another length or meaning")
        one = np.zeros(1, self.dtype)
        try:
            if op == "avg":
                np.divide(one, 1, out=one)  # refuses integers, of which an average is none
            ufunc(one, one, out=one)
        except TypeError as error:
            raise self._none(op, error) from error
        if self.name == "bfloat16" and op in _TORCH:
            return _through_float32(ufunc)
        return _by_keyword(ufunc) if ufunc in (np.minimum, np.maximum) else ufunc

    def _none(self, op: str, why: object) -> UsageError:
        return UsageError(f"Arrays of {self.name} have no {op}: {why}. Use another operation, or a function.")

    def divide(self, array: Array, by: int) -> None:
        """In place."""
        if self.name in _HALVES and "torch" in sys.modules:
            for block in _tensor(array, self.name).split(BLOCK):
                block.div_(by)
        else:
            np.divide(array, by, out=array, casting="unsafe")

    def value(self, array: Array) -> Any:
        """The array as its user has it: shares the memory."""
        return array

    def memory(self, value: Any) -> Array:
        """The other way round, of what a user's function returned. Raises TypeError for what these elements cannot
        hold: another kind of number."""
        made = np.asarray(value)
        if not self._holds(made.dtype):
            raise TypeError(f"{self.name} cannot hold {name_of(made.dtype)}")
        return made

    def _holds(self, dtype: np.dtype[Any]) -> bool:
        """As numpy's `a += b` has it: rounded perhaps, but no fraction, sign, imaginary part or text is lost."""
        return np.can_cast(dtype, self.dtype, "safe" if issubclass(self.dtype.type, np.flexible) else "same_kind")


@lru_cache(maxsize=256)
def kind_of(dtype: np.dtype[Any]) -> Kind:
    if dtype.hasobject:
        raise UsageError(
            "This array holds references to Python objects, not their bytes. Use the object forms, such as "
            "all_gather_object()."
        )
    return Kind(dtype)


def _by_keyword(ufunc: np.ufunc) -> Operation:
    """For those that numpy wants to take more than two inputs some day."""

    def operation(left: Array, right: Array, out: Array) -> None:
        ufunc(left, right, out=out)

    return operation


# ---------------------------------------------------------------------- halves


#: Name → how torch sees the memory before it is told the dtype.
_HALVES: Final = {"float16": np.float16, "bfloat16": np.int16}


def _tensor(array: Array, name: str) -> Any:
    """A tensor over a flat array of halves. (From one that is read-only torch makes one too, and warns.)"""
    torch = sys.modules["torch"]
    return torch.from_numpy(array.view(_HALVES[name])).view(getattr(torch, name))


@lru_cache(maxsize=16)
def _by_torch(op: str, name: str) -> Operation:
    torch = sys.modules["torch"]
    function, dtype, seen, over = getattr(torch, _TORCH[op]), getattr(torch, name), _HALVES[name], torch.from_numpy

    def operation(left: Array, right: Array, out: Array) -> None:
        blocks = (over(array.view(seen)).view(dtype).split(BLOCK) for array in (left, right, out))
        for one, other, target in zip(*blocks, strict=True):
            function(one, other, out=target)

    return operation


class _Scratch(threading.local):
    """Two blocks of float32 for each thread that reduces: no operation allocates."""

    def __init__(self) -> None:
        self.left = np.empty(BLOCK, np.float32)
        self.right = np.empty(BLOCK, np.float32)


_scratch = _Scratch()


def _through_float32(ufunc: np.ufunc) -> Operation:
    def operation(left: Array, right: Array, out: Array) -> None:
        for first in range(0, len(out), BLOCK):
            here = slice(first, first + BLOCK)
            wide = _scratch.left[: len(out[here])]
            other = _scratch.right[: len(wide)]
            np.copyto(wide, left[here], casting="unsafe")
            np.copyto(other, right[here], casting="unsafe")
            ufunc(wide, other, out=wide)
            np.copyto(out[here], wide, casting="unsafe")

    return operation

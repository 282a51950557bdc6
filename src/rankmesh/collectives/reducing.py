"""What reduces two arrays to one: the operations by name, and users' functions.

Every operation is associative and commutes, and so must a user's function be, except in scan and exscan, which keep
the order of ranks. A function is called as f(left, right) with two arrays of one dimension (tensors, where tensors
were passed), and returns one of the same length, of a dtype that can be added to theirs in place (numpy's same_kind).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rankmesh.collectives.kinds import OPERATIONS, Array, Kind, Operation, no_operation
from rankmesh.errors import UsageError

__all__ = ["OPERATIONS", "Op", "Reducer", "Reduction"]

#: A name of OPERATIONS, or a function of two arrays.
Op = str | Callable[[Any, Any], Any]


class Reducer(Protocol):
    """What the executor needs to know of a reduction. `name` is what ranks must agree on; `apply(left, right, out)`
    takes flat arrays, of which `out` may be one; `is_users`: it runs a user's code."""

    @property
    def name(self) -> str: ...

    @property
    def is_users(self) -> bool: ...

    @property
    def apply(self) -> Operation: ...


class Reduction:
    """An operation on elements of one kind."""

    __slots__ = ("_by", "_kind", "apply", "is_users", "name")

    def __init__(self, op: Op, kind: Kind, size: int) -> None:
        self._kind = kind
        self.is_users = not isinstance(op, str)
        if isinstance(op, str):
            self.name = op
            #: No allocation, and for what numpy computes with no Python either: it is the ufunc.
            self.apply: Operation = kind.operation(op)
        elif not callable(op):
            raise no_operation(op)
        else:
            self.name = f"function {getattr(op, '__qualname__', type(op).__qualname__)}"
            self.apply = _applied(op, kind, self.name)
        self._by = size if op == "avg" else 1

    def finish(self, array: Array) -> None:
        """Once all ranks' are in it."""
        if self._by > 1:
            self._kind.divide(array, self._by)


def _applied(function: Callable[[Any, Any], Any], kind: Kind, name: str) -> Operation:
    def operation(left: Array, right: Array, out: Array) -> None:
        returned = function(kind.value(left), kind.value(right))
        try:
            made = kind.memory(returned)
        except TypeError as error:
            raise UsageError(
                f"What the reduction {name} made of two arrays is of another kind: {error}. Return what astype() made "
                "of it, in their dtype."
            ) from error
        if made.shape != out.shape:
            raise UsageError(
                f"The reduction {name} made an array of shape {made.shape} of two of {out.shape}. "
                "Return one of the same shape."
            )
        out[...] = made

    return operation

"""torch's reduce operations by rankmesh's names, and torch's options from their short forms."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, TypeVar

from torch.distributed import ReduceOp

from rankmesh.errors import UsageError

Options = TypeVar("Options")

#: By number: reading that from an operation costs less than comparing operations.
_NAMES: Final = {
    hash(ReduceOp(op)): name
    for op, name in (
        (ReduceOp.SUM, "sum"),
        (ReduceOp.AVG, "avg"),
        (ReduceOp.PRODUCT, "prod"),
        (ReduceOp.MIN, "min"),
        (ReduceOp.MAX, "max"),
        (ReduceOp.BAND, "band"),
        (ReduceOp.BOR, "bor"),
        (ReduceOp.BXOR, "bxor"),
    )
}


def name_of(op: Any) -> str:
    """What rankmesh calls an operation. Raises UsageError for PREMUL_SUM, which is NCCL's."""
    name = _NAMES.get(hash(op))
    if name is None:
        raise UsageError(f"rankmesh has no {op}. Multiply first, and use SUM.")
    return name


def options(kind: type[Options], given: Any, short: dict[str, Any]) -> Options:
    """`given` if it is of that kind; else made from what the short forms of a call pass: an operation, a root, a
    timeout, by position or by keyword."""
    if isinstance(given, kind) and not short:
        return given
    made: Any = kind()
    if given is not None:
        short = {_keyword(given): given, **short}
    for keyword, value in short.items():
        field = _FIELDS.get(keyword, "")
        if not hasattr(made, field):
            raise UsageError(f"This call takes no {keyword}={value!r}. Pass {kind.__name__}.")
        if value is not None:
            setattr(made, field, value)
    return made  # type: ignore[no-any-return]


_FIELDS: Final = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}


def _keyword(value: Any) -> str:
    if isinstance(value, timedelta):
        return "timeout"
    return "root" if isinstance(value, int) else "op"

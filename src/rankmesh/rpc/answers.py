"""What a server answers when there is no result."""

from __future__ import annotations

import traceback
from typing import Any

from rankmesh.rpc.protocol import Why, failure

Parts = list[memoryview | bytes]
#: The parts of a reply, and their size.
Answer = tuple[Parts, int]


class Refusal(Exception):
    """A request that is answered with a failure."""

    def __init__(self, why: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.why = why
        self.details = details

    def answer(self, number: int = 0) -> Answer:
        body = failure(self.why, str(self), number=number, **self.details)
        return [body], len(body)


def raised(error: BaseException, number: int = 0) -> Answer:
    """What a handler raised, with its traceback from the handler on; `number` items of its stream came before."""
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    try:
        text = "".join(traceback.format_exception(type(error), error, frames))
    except Exception:  # noqa: BLE001  # it asks the exception for its text, and whatever that is made of
        text = "".join(traceback.format_tb(frames))
    body = failure(Why.RAISED, describe(error), type_name(error), text, number=number)
    return [body], len(body)


def type_name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def describe(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  # __str__ of an exception is the user's code
        return f"(a {type_name(error)} whose text cannot be had)"

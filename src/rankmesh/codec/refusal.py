"""What cannot travel: why, and where it is in the object. A path reads like Python: `$['a'][3].x`."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from rankmesh.errors import CodecError

#: Names the step to each item.
Steps = Callable[[Sequence[Any]], Iterable[str]]

ADVICE: Final = (
    "Send a dataclass, a dict or an array instead, or pass allow_pickle=True on both sides (authenticated peers only)."
)


class Unsupported(Exception):
    """Why a value cannot travel, as a clause of a sentence, and what to do if it is not the usual `ADVICE`."""

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(why)
        self.hint = hint


class Refused(Exception):
    """Something cannot travel. On its way up each container adds the step that leads to it."""

    def __init__(self, culprit: object, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.type_name = f"{type(culprit).__module__}.{type(culprit).__qualname__}".removeprefix("builtins.")
        self.reason = reason
        self.hint = hint
        self.child = culprit
        self.steps: list[str] = []

    def passed(self, owner: object, items: Iterable[object], steps: Iterable[str]) -> None:
        """Note the step from `owner` to the child: the first item that is it, since that one is refused first."""
        self.steps.append(next(step for item, step in zip(items, steps, strict=True) if item is self.child))
        self.child = owner

    def explained(self) -> CodecError:
        path = "$" + "".join(reversed(self.steps))
        message = f"{path} is a {self.type_name}, which cannot travel: {self.reason}."
        return CodecError(message, path=path, type_name=self.type_name, hint=self.hint)


def indexes(items: Sequence[object]) -> Iterable[str]:
    return (f"[{index}]" for index in range(len(items)))


def elements(items: Sequence[object]) -> Iterable[str]:
    """A set's elements have no place to name."""
    return ("{…}" for _ in items)


def turns(items: Sequence[object]) -> Iterable[str]:
    """Keys and values take turns."""
    return (key(items[i - 1]) if i % 2 else f".keys()[{i // 2}]" for i in range(len(items)))


def key(value: object) -> str:
    try:
        return f"[{reprlib.repr(value)}]"
    except Exception:  # noqa: BLE001  # a key's repr is the user's code; Python itself refuses that of a huge int
        return f"[<{type(value).__name__}>]"


def attribute(name: object) -> str:
    return f".{name}"

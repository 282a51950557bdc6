"""The functions that others may call, and what their signatures ask for.

Arguments are checked before the handler runs: their number and names against the signature, their types against its
hints. Plain types are compared, arrays and tensors must be instances, everything else that msgspec knows (dataclasses,
Structs, lists and dicts of these, Literals …) is converted and validated by it. A hint that it does not know is not
checked. So is a parameter without one.
"""

from __future__ import annotations

import difflib
import inspect
import math
import threading
import typing
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np

from rankmesh.errors import InvalidMessage, UsageError
from rankmesh.rpc.protocol import NAME_LIMIT

#: Hints that a comparison of types settles.
_EXACT: Final = frozenset({int, float, str, bool, bytes})
_PARAMETER = inspect.Parameter
#: What a conversion raises for a value that does not fit.
_MISFIT: Final = (msgspec.ValidationError, ValueError, TypeError, ArithmeticError, RecursionError)

#: How the names of rankmesh's own functions begin.
_OWN: Final = "rankmesh."

Convert = Callable[[Any], Any]


class Function:
    """A registered function, ready to be called."""

    __slots__ = (
        "_by_name",
        "_by_place",
        "_signature",
        "channel",
        "fn",
        "hinted",
        "idempotent",
        "inline",
        "is_async",
        "key",
        "least",
        "most",
        "name",
        "plain",
        "streams",
        "took",
    )  # fmt: skip

    def __init__(self, fn: Callable[..., Any], name: str, *, inline: bool, idempotent: bool, channel: bool) -> None:
        self.fn = fn
        self.name = name
        self.key = name.encode()
        self.inline = inline
        self.idempotent = idempotent
        self.channel = channel
        plain = inspect.unwrap(fn)
        target = plain if not isinstance(plain, type) and hasattr(plain, "__code__") else getattr(fn, "__func__", fn)
        self.is_async = inspect.iscoroutinefunction(target) or inspect.isasyncgenfunction(target)
        self.streams = inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target)
        #: It is called, and runs in a thread.
        self.plain = not (self.is_async or self.streams or channel)
        #: Seconds that its last run took; unknown is endless.
        self.took = math.inf
        if inline and (self.is_async or self.streams or channel):
            raise UsageError(f"{name!r} cannot be inline: async functions, generators and channels take their time.")
        self._read_signature(fn)

    def _read_signature(self, fn: Callable[..., Any]) -> None:
        try:
            self._signature: inspect.Signature | None = inspect.signature(fn)
        except (TypeError, ValueError):  # a builtin that does not tell: it checks its arguments itself
            self._signature = None
        parameters = list(self._signature.parameters.values()) if self._signature is not None else []
        hints = _hints(fn)
        places = [p for p in parameters if p.kind in (_PARAMETER.POSITIONAL_ONLY, _PARAMETER.POSITIONAL_OR_KEYWORD)]
        if self.channel:
            places = places[1:]
        variadic = self._signature is None or any(p.kind is _PARAMETER.VAR_POSITIONAL for p in parameters)
        required_names = any(p.kind is _PARAMETER.KEYWORD_ONLY and p.default is p.empty for p in parameters)
        #: How many arguments by place are right without a look at the signature; none if a name is required.
        self.least = sum(p.default is p.empty for p in places) if self._signature is not None else 0
        self.most = -1 if required_names else 1 << 30 if variadic else len(places)
        converters = {p.name: converter(hints.get(p.name, Any)) for p in parameters}
        self._by_place = [(p.name, converters[p.name]) for p in places]
        self._by_name = {name: convert for name, convert in converters.items() if convert is not None}
        self.hinted = bool(self._by_name)

    def check(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Convert the arguments in place as the hints say. Raises InvalidMessage."""
        if kwargs or not self.least <= len(args) <= self.most:
            self._bind(args, kwargs)
        if not self.hinted:
            return
        for at, (name, convert) in enumerate(self._by_place[: len(args)]):
            if convert is not None:
                args[at] = self._converted(name, convert, args[at])
        for name in kwargs.keys() & self._by_name.keys():
            kwargs[name] = self._converted(name, self._by_name[name], kwargs[name])

    def _bind(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        if self._signature is None:
            return
        try:
            self._signature.bind(*([None] if self.channel else []), *args, **kwargs)
        except TypeError as error:
            raise self._misfit(f"{error}") from None

    def _converted(self, name: str, convert: Convert, value: Any) -> Any:
        try:
            return convert(value)
        except _MISFIT as error:
            raise self._misfit(f"argument {name!r}: {error}") from None

    def _misfit(self, reason: str) -> InvalidMessage:
        return InvalidMessage(f"{self.name!r} cannot be called like that: {reason}.", function=self.name, reason=reason)

    def __repr__(self) -> str:
        return f"<Function {self.name}{self._signature or '(…)'}>"


def _hints(fn: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(fn)
    except (NameError, TypeError, AttributeError):  # a hint that names something not importable: nothing is checked
        return {}


def converter(hint: Any) -> Convert | None:
    """What an argument goes through; None: nothing."""
    if hint is Any or isinstance(hint, typing.TypeVar) or hint is inspect.Parameter.empty:
        return None
    if hint in _EXACT:
        return _exact(hint)
    origin = typing.get_origin(hint) or hint
    if isinstance(origin, type) and _is_array(origin):
        return _instance(origin)
    try:
        msgspec.msgpack.Decoder(hint)  # it refuses what it cannot check
    except (TypeError, NameError, ValueError, RecursionError):
        return None
    return lambda value: msgspec.convert(value, hint)


def _is_array(kind: type) -> bool:
    return issubclass(kind, np.ndarray | np.generic) or kind.__module__.partition(".")[0] == "torch"


def _exact(kind: type) -> Convert:
    def convert(value: Any) -> Any:
        return value if type(value) is kind else msgspec.convert(value, kind)

    return convert


def _instance(kind: type) -> Convert:
    def convert(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")
        return value

    return convert


class Registry:
    """Name → Function. Looked up by the thread that leads, changed by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By the bytes of the name, as they come from the wire.
        self.functions: dict[bytes, Function] = {}

    def add(self, function: Function) -> None:
        if not function.name or len(function.key) > NAME_LIMIT:
            raise UsageError(f"A function's name has 1 to {NAME_LIMIT} bytes. Pass another name=.")
        with self._lock:
            if function.key in self.functions:
                raise UsageError(
                    f"{function.name!r} is registered already. Unregister it first, or pass another name=."
                )
            self.functions[function.key] = function

    def remove(self, name: str) -> None:
        with self._lock:
            if self.functions.pop(name.encode(), None) is None:
                raise UsageError(f"{name!r} is not registered. {self.names()} are.")

    def names(self) -> list[str]:
        """Those of users; rankmesh's own are nobody's business."""
        names = (function.name for function in list(self.functions.values()))
        return sorted(name for name in names if not name.startswith(_OWN))

    def nearest(self, name: str) -> list[str]:
        """Registered names that may have been meant; all of them if they are few."""
        names = self.names()
        return difflib.get_close_matches(name, names, 5, 0.5) or (names if len(names) <= 5 else [])

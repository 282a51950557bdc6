"""Functions and their signatures: what is checked, converted, and left alone."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from calls import Counter
from peers import Medium
from rankmesh import Endpoint, InvalidMessage, UsageError
from rankmesh.rpc.registry import Function, Registry, converter

T = TypeVar("T")


@dataclass
class Part:
    name: str
    data: Any = None


class Whole(msgspec.Struct):
    parts: list[Part]


def function(fn: Callable[..., Any], name: str = "f", **options: Any) -> Function:
    return Function(fn, name, **{"inline": False, "idempotent": False, "channel": False, **options})


@pytest.mark.parametrize(
    "hint, good, bad",
    [
        (int, [1], ["1", 1.5, None]),
        (float, [1.5, 1], ["1", None]),
        (str, ["a"], [1, b"a"]),
        (bool, [True], [1, "yes"]),
        (bytes, [b"a"], [1]),
        (int | None, [None, 1], ["1"]),
        (list[int], [[1, 2]], [["1"], 3]),
        (dict[str, int], [{"a": 1}], [{"a": "b"}]),
        (Literal["on", "off"], ["on"], ["other"]),
        (np.ndarray, [np.ones(3)], [[1, 2, 3]]),
        (npt.NDArray[np.float64], [np.ones(3)], ["x"]),
        (tuple[int, str], [(1, "a")], [(1, 2)]),
    ],
)
def test_hints_are_checked(hint: Any, good: list[Any], bad: list[Any]) -> None:
    convert = converter(hint)
    assert convert is not None
    for value in good:
        assert np.all(convert(value) == value)
    for value in bad:
        with pytest.raises((TypeError, ValueError)):
            convert(value)


@pytest.mark.parametrize("hint", [Any, T])
def test_hints_that_say_nothing_check_nothing(hint: Any) -> None:
    assert converter(hint) is None


def test_dataclasses_and_structs_are_made_from_what_comes() -> None:
    def fn(part: Part, whole: Whole, *, also: Part | None = None) -> None: ...

    args: list[Any] = [{"name": "a", "data": np.ones(2)}, {"parts": [{"name": "b"}]}]
    kwargs: dict[str, Any] = {"also": {"name": "c"}}
    function(fn).check(args, kwargs)
    assert isinstance(args[0], Part)
    assert isinstance(args[0].data, np.ndarray)
    assert isinstance(args[1].parts[0], Part)
    assert kwargs["also"] == Part("c")
    with pytest.raises(InvalidMessage, match=r"argument 'part'.*name"):
        function(fn).check([{"nome": "a"}, {"parts": []}], {})


def test_arity_is_checked_against_the_signature() -> None:
    def fixed(a: Any, b: Any = 1) -> None: ...
    def variadic(a: Any, *more: Any, **others: Any) -> None: ...
    def named(a: Any, *, b: Any) -> None: ...

    def fits(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        try:
            function(fn).check(list(args), kwargs)
        except InvalidMessage:
            return False
        return True

    assert [fits(fixed, *range(n)) for n in range(4)] == [False, True, True, False]
    assert [fits(variadic, *range(n), x=1) for n in range(3)] == [False, True, True]
    assert (fits(named, 1), fits(named, 1, b=2), fits(named, 1, 2), fits(named, a=1, b=2)) == (False, True, False, True)
    assert fits(max, 1, 2, 3)  # a builtin checks for itself


def test_kinds_of_functions_are_recognised() -> None:
    async def coroutine() -> None: ...
    def generator() -> Iterator[int]:
        yield 1

    async def async_generator() -> AsyncIterator[int]:
        yield 1

    @functools.wraps(generator)
    def wrapped() -> Iterator[int]:
        return generator()

    made = [function(fn) for fn in (len, coroutine, generator, async_generator, wrapped, functools.partial(generator))]
    assert [fn.is_async for fn in made] == [False, True, False, True, False, False]
    assert [fn.streams for fn in made] == [False, False, True, True, True, True]
    for fn in (coroutine, generator, async_generator):
        with pytest.raises(UsageError, match="cannot be inline"):
            function(fn, inline=True)


def test_nearest_names() -> None:
    registry = Registry()
    assert registry.nearest("anything") == []
    for name in ("all_reduce", "all_gather", "barrier", "rankmesh.ref.call"):
        registry.add(function(len, name))
    assert registry.nearest("all_redduce")[0] == "all_reduce"
    assert registry.nearest("zzz") == ["all_gather", "all_reduce", "barrier"]
    assert registry.names() == ["all_gather", "all_reduce", "barrier"]


@pytest.mark.parametrize("name", ["", "x" * 1025])
def test_names_have_a_length(name: str) -> None:
    with pytest.raises(UsageError, match="name has 1 to"):
        Registry().add(function(len, name))


def test_registration_in_all_its_forms(inproc: Medium) -> None:
    with Endpoint(inproc.address) as endpoint:
        rpc = endpoint.rpc

        @rpc.register
        def bare() -> int:
            return 1

        @rpc.register(name="renamed", inline=True)
        def decorated() -> int:
            return 2

        rpc.register(lambda: 3, "third")
        assert rpc.register_object(Counter(5), "counter") == ["counter.add"]
        assert rpc.functions == ["bare", "counter.add", "renamed", "third"]
        assert [rpc.call(endpoint, name) for name in ("bare", "renamed", "third")] == [1, 2, 3]
        assert rpc.call(endpoint, "counter.add", 2) == 7
        assert (bare(), decorated()) == (1, 2)
        with pytest.raises(UsageError, match="not a function"):
            rpc.register(Counter(5))  # type: ignore[call-overload]
        rpc.unregister("bare")
        assert "bare" not in rpc.functions
        assert "3 functions" in repr(rpc)

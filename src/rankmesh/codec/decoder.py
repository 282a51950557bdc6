"""From a payload to an object. Every number in it is a peer's claim, and is checked before it is used:

1. the prefix and the table of sizes against the payload's length, to the byte;
2. the head by msgspec, which checks every count against the bytes that are left, and stops at the interpreter's limit
   of recursion;
3. each extension by the function in `_EXTENSIONS`: the buffer it names exists and was not used before, its dtype is on
   the list, its shape fits its size.

Bad claims surface as the exceptions of those who notice them (`MALFORMED`), and leave `decode` as CodecError.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, Final, TypeVar, overload

import msgspec
import numpy as np

from rankmesh import buffers
from rankmesh.codec import dtypes, layout, pickling, tensors
from rankmesh.codec.layout import FORMAT, MAX_DEPTH, PICKLED, PREFIX, Code, aligned, u64s
from rankmesh.codec.values import CONTAINERS, LEAVES
from rankmesh.errors import CodecError

T = TypeVar("T")
Payload = memoryview | bytearray | bytes

#: What msgspec, struct, numpy, torch, and the constructors in `values` raise for arguments that cannot be.
MALFORMED: Final = (msgspec.MsgspecError, ValueError, TypeError, ArithmeticError, struct.error, RuntimeError)
_HINT: Final = "Send with rankmesh's send_object() or encode(), of the same version."

_unpack: Final = msgspec.msgpack.decode


@overload
def decode(payload: Payload, *, allow_pickle: bool = ...) -> Any: ...
@overload
def decode(payload: Payload, *, type: type[T], allow_pickle: bool = ...) -> T: ...
def decode(payload: Payload, *, type: Any = Any, allow_pickle: bool = False) -> Any:  # noqa: A002  # msgspec's word
    """The object that `encode` made `payload` of. Arrays in it are views into `payload`, and keep it alive.

    With `type`, the object is converted to it and validated: dataclasses, msgspec Structs, and what they are made of.
    `allow_pickle` runs code that the sender chose: only for authenticated peers. Raises CodecError for anything wrong.
    """
    view = buffers.readable(payload)
    try:
        obj = _Reader(view, allow_pickle).read()
    except CodecError:
        raise
    except MALFORMED as error:
        raise CodecError(f"This payload of {view.nbytes} bytes is not an object: {error}.", hint=_HINT) from error
    return obj if type is Any else _convert(obj, type)


def _convert(obj: object, target: Any) -> Any:
    try:
        return msgspec.convert(obj, target)
    except (*MALFORMED, NameError) as error:  # NameError: an annotation of the type that cannot be resolved
        name = getattr(target, "__qualname__", str(target))
        raise CodecError(f"The object is not a {name}: {error}.", hint="Send what the type declares.") from error


class _Reader:
    """One payload on its way to an object."""

    __slots__ = ("_buffers", "_depth", "_head", "_pickled", "_view")

    def __init__(self, view: memoryview, allow_pickle: bool) -> None:
        if view.nbytes < PREFIX.size:
            raise ValueError("it is shorter than the prefix")
        form, flags, head_bytes, count = PREFIX.unpack_from(view)
        if form != FORMAT or flags & ~PICKLED:
            raise ValueError(f"it starts with {form:#04x} {flags:#04x}, which no encoded object of this version does")
        if flags & PICKLED and not allow_pickle:
            raise CodecError(
                "The payload holds pickled objects, and pickle is not allowed here.",
                hint="Send dataclasses, dicts and arrays, or pass allow_pickle=True here too if you trust every peer.",
            )
        start = PREFIX.size + 8 * count
        if start + head_bytes > view.nbytes:
            raise ValueError(f"its table of {count} buffers and its head of {head_bytes} bytes do not fit into it")
        self._view = view
        self._head = view[start : start + head_bytes]
        self._buffers = self._locate(start + head_bytes, count)
        self._pickled = bool(flags & PICKLED)
        self._depth = 0

    def _locate(self, end: int, count: int) -> list[tuple[int, int] | None]:
        """First and last byte of each buffer. They fill the payload to its end."""
        places: list[tuple[int, int] | None] = []
        for size in u64s(count).unpack_from(self._view, PREFIX.size) if count else ():
            start = aligned(end)
            end = start + size
            places.append((start, end))
        if end != self._view.nbytes:
            raise ValueError(f"its parts add up to {end} bytes")
        return places

    def read(self) -> Any:
        return _unpack(self._head, ext_hook=self._extension)

    def _extension(self, code: int, data: memoryview) -> Any:
        extension = _EXTENSIONS.get(code)
        if extension is None:
            raise ValueError(f"extension {code} is unknown")
        return extension(self, data)

    def _take(self, index: int) -> memoryview:
        """Buffer `index`, once: what is copied out of buffers is never more than the payload."""
        place = self._buffers[index] if index < len(self._buffers) else None
        if place is None:
            raise ValueError(f"buffer {index} of {len(self._buffers)} is used twice or does not exist")
        self._buffers[index] = None
        return self._view[place[0] : place[1]]

    def children(self, data: memoryview) -> list[Any]:
        if self._depth > MAX_DEPTH:  # the encoder does not count a container of atoms, which can only be the innermost
            raise ValueError(f"containers are nested deeper than {MAX_DEPTH}")
        self._depth += 1
        items = _unpack(data, ext_hook=self._extension)
        self._depth -= 1
        if type(items) is not list:
            raise ValueError("a container does not hold a list")
        return items

    def blob(self, data: memoryview) -> bytes:
        return self._take(*layout.BYTES.unpack(data)).tobytes()

    def _fields(self, data: memoryview) -> tuple[memoryview, bool, tuple[int, ...], bytes]:
        """What arrays and tensors have in common: memory, order, shape, dtype."""
        index, fortran, ndim = layout.ARRAY.unpack_from(data)
        end = layout.ARRAY.size + 8 * ndim
        shape = u64s(ndim).unpack(data[layout.ARRAY.size : end])
        return self._take(index), fortran, shape, data[end:].tobytes()

    def array(self, data: memoryview) -> np.ndarray[Any, Any]:
        view, fortran, shape, description = self._fields(data)
        dtype = dtypes.parse(description)
        if math.prod(shape) * dtype.itemsize != view.nbytes:
            raise ValueError(f"an array of shape {shape} and dtype {dtype} does not have {view.nbytes} bytes")
        array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, view, order="F" if fortran else "C")
        # Only if the payload itself lies at an odd address, which no allocator gives.
        return array if array.flags.aligned else array.copy(order="K")

    def scalar(self, data: memoryview) -> Any:
        (size,) = layout.SCALAR.unpack_from(data)
        start = layout.SCALAR.size
        dtype = dtypes.parse(data[start : start + size].tobytes())
        # A writable copy, since a structured scalar refers to the memory it was made from.
        (item,) = np.frombuffer(bytearray(data[start + size :]), dtype)
        return item

    def tensor(self, data: memoryview) -> Any:
        view, _, shape, name = self._fields(data)
        return tensors.rebuild(view, str(name, "ascii"), shape, math.prod(shape))

    def pickle(self, data: memoryview) -> Any:
        if not self._pickled:
            raise ValueError("it holds a pickle without saying so")
        first, count = layout.PICKLE.unpack_from(data)
        return pickling.load(data[layout.PICKLE.size :], [self._take(index) for index in range(first, first + count)])


_Extension = Callable[[_Reader, memoryview], Any]


def _leaf(unpack: Callable[[memoryview], Any]) -> _Extension:
    return lambda reader, data: unpack(data)


def _container(rebuild: Callable[[list[Any]], Any]) -> _Extension:
    return lambda reader, data: rebuild(reader.children(data))


_EXTENSIONS: Final[dict[int, _Extension]] = {
    **{leaf.code: _leaf(leaf.unpack) for leaf in LEAVES},
    **{container.code: _container(container.rebuild) for container in CONTAINERS},
    Code.BYTES: _Reader.blob,
    Code.ARRAY: _Reader.array,
    Code.SCALAR: _Reader.scalar,
    Code.TENSOR: _Reader.tensor,
    Code.PICKLE: _Reader.pickle,
}

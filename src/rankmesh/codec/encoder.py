"""From an object to parts.

msgspec writes msgpack fast, but it also writes tuples, sets, dates and dataclasses as something they do not come back
from. So `_Walk` goes through the object first and puts an extension in the place of what msgpack has no type for. What
needs no change is not copied, and a container of atoms only is recognised without a loop in Python.

Atoms include int and str, and a few of those msgpack cannot take either: integers beyond 64 bits, lone surrogates.
msgspec notices, and then a second walk looks at every int and str. So the usual case pays nothing for the rare one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Final

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from rankmesh import buffers
from rankmesh.codec import dtypes, layout, pickling, tensors
from rankmesh.codec.layout import (
    ALIGNMENT,
    FORMAT,
    MAX_DEPTH,
    MAX_HEAD_BYTES,
    OUT_OF_BAND_BYTES,
    PREFIX,
    Code,
    u64s,
)
from rankmesh.codec.refusal import ADVICE, Refused, Steps, Unsupported, attribute, elements, indexes, key, turns
from rankmesh.codec.values import CONTAINERS, LEAVES, Container, Leaf, key_value_turns
from rankmesh.errors import CodecError

Part = memoryview | bytes
_Array = np.ndarray[Any, Any]

_ATOMS: Final = frozenset({type(None), bool, int, float, str})
#: The second walk's: int and str are looked at one by one.
_SAFE_ATOMS: Final = _ATOMS - {int, str}
_PADDING: Final = bytes(ALIGNMENT)

_pack: Final = msgspec.msgpack.Encoder().encode


def encode(obj: object, *, allow_pickle: bool = False) -> list[Part]:
    """The parts of `obj`'s payload, in order. They refer to its arrays' memory: leave that alone until they are sent.

    `allow_pickle` pickles what cannot travel otherwise; the receiver has to allow it too. Raises CodecError for what
    cannot travel at all, with its `path` in the object and its `type_name`.
    """
    try:
        try:
            walk = _Walk(_ATOMS, allow_pickle)
            head = _pack(walk.value(obj))
        except (OverflowError, UnicodeEncodeError):
            walk = _Walk(_SAFE_ATOMS, allow_pickle)
            head = _pack(walk.value(obj))
    except Refused as refused:
        raise refused.explained() from refused.__cause__
    except RecursionError as error:
        raise CodecError(
            "The object is nested too deeply for what is left of the stack.", hint="Flatten it."
        ) from error
    return _assemble(head, walk.buffers, layout.PICKLED if walk.pickled else 0)


def nbytes(parts: Iterable[Part]) -> int:
    """The size of the payload that `parts` make."""
    return sum(map(len, parts))


def _assemble(head: bytes, views: list[memoryview], flags: int) -> list[Part]:
    if len(head) > MAX_HEAD_BYTES:
        raise CodecError(
            f"The object takes {len(head)} bytes without its arrays, and the limit is {MAX_HEAD_BYTES}.",
            hint="Send it in pieces, or put its numbers into arrays.",
        )
    prefix = PREFIX.pack(FORMAT, flags, len(head), len(views))
    if not views:
        return [prefix + head]
    start = prefix + u64s(len(views)).pack(*map(len, views)) + head
    parts: list[Part] = [start + _PADDING[: -len(start) % ALIGNMENT]]
    for view in views[:-1]:
        parts.append(view)
        if len(view) % ALIGNMENT:
            parts.append(_PADDING[: -len(view) % ALIGNMENT])
    parts.append(views[-1])
    return parts


class _Walk:
    """One pass over an object: gives what msgspec shall pack, and collects the buffers."""

    __slots__ = ("allow_pickle", "atoms", "buffers", "open", "pickled")

    def __init__(self, atoms: frozenset[type], allow_pickle: bool) -> None:
        self.atoms = atoms
        self.allow_pickle = allow_pickle
        self.pickled = False
        self.buffers: list[memoryview] = []
        #: The containers that this walk is inside of, by identity.
        self.open: set[int] = set()

    def value(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in self.atoms:
            return obj
        handler = _BY_TYPE.get(kind) or _by_base(obj)
        try:
            return handler(self, obj)
        except Unsupported as error:
            return self.last_resort(obj, error)

    def last_resort(self, obj: object, error: Unsupported) -> Ext:
        """Pickle what cannot travel otherwise, if that is allowed."""
        if not self.allow_pickle:
            raise Refused(obj, str(error), error.hint or ADVICE) from error.__cause__
        first = len(self.buffers)
        try:
            data = pickling.dump(obj, self.add)
        except Unsupported as refusal:
            hint = "Send a dataclass, a dict or an array instead."
            raise Refused(obj, f"{error}, and {refusal}", hint) from refusal.__cause__
        self.pickled = True
        return Ext(Code.PICKLE, layout.PICKLE.pack(first, len(self.buffers) - first) + data)

    def add(self, view: memoryview) -> int:
        """The number of the buffer that `view` becomes."""
        self.buffers.append(view)
        return len(self.buffers) - 1

    def enter(self, owner: object) -> None:
        if id(owner) in self.open:
            raise Refused(owner, "it contains itself", "Take out the reference back.")
        if len(self.open) == MAX_DEPTH:
            raise Refused(owner, f"it is nested deeper than {MAX_DEPTH} containers", "Flatten the object.")
        self.open.add(id(owner))

    def sequence(self, owner: object, items: Sequence[Any], steps: Steps = indexes) -> Sequence[Any]:
        atoms = self.atoms
        if atoms.issuperset(map(type, items)):
            return items
        self.enter(owner)
        try:
            packed = [item if type(item) in atoms else self.value(item) for item in items]
        except Refused as refused:
            refused.passed(owner, items, steps(items))
            raise
        self.open.discard(id(owner))
        return packed

    def mapping(self, owner: object, items: dict[Any, Any], step: Callable[[Any], str] = key) -> dict[Any, Any] | Ext:
        atoms = self.atoms
        if not atoms.issuperset(map(type, items)):
            return Ext(Code.MAP, _pack(self.sequence(owner, key_value_turns(items), turns)))
        if atoms.issuperset(map(type, items.values())):
            return items
        self.enter(owner)
        try:
            packed = {name: item if type(item) in atoms else self.value(item) for name, item in items.items()}
        except Refused as refused:
            refused.passed(owner, items.values(), map(step, items))
            raise
        self.open.discard(id(owner))
        return packed


_Handler = Callable[[_Walk, Any], Any]


def _atom(leaf: Leaf) -> _Handler:
    """An int or a str, in the second walk: msgspec says whether it needs the extension."""

    def handle(walk: _Walk, obj: Any) -> Any:
        try:
            _pack(obj)
        except (OverflowError, UnicodeEncodeError):
            return Ext(leaf.code, leaf.pack(obj))
        return obj

    return handle


def _leaf(leaf: Leaf) -> _Handler:
    return lambda walk, obj: Ext(leaf.code, leaf.pack(obj))


def _container(container: Container) -> _Handler:
    steps = elements if container.kind in (set, frozenset) else indexes
    return lambda walk, obj: Ext(container.code, _pack(walk.sequence(obj, container.children(obj), steps)))


def _list(walk: _Walk, obj: list[Any]) -> Sequence[Any]:
    return walk.sequence(obj, obj if type(obj) is list else list(obj))


def _dict(walk: _Walk, obj: dict[Any, Any]) -> Any:
    return walk.mapping(obj, obj if type(obj) is dict else dict(obj))


def _bytes(walk: _Walk, obj: bytes | bytearray | memoryview) -> Any:
    view = memoryview(obj)
    if view.nbytes < OUT_OF_BAND_BYTES:
        return view.tobytes()
    flat = buffers.readable(view) if view.c_contiguous else memoryview(view.tobytes())
    return Ext(Code.BYTES, layout.BYTES.pack(walk.add(flat)))


def _array(walk: _Walk, obj: _Array) -> Ext:
    description = dtypes.describe(obj.dtype)
    fortran = not obj.flags.c_contiguous and obj.flags.f_contiguous
    flat = (obj.T if fortran else np.ascontiguousarray(obj)).reshape(-1).view(np.uint8)
    fields = layout.ARRAY.pack(walk.add(flat.data), fortran, obj.ndim)
    return Ext(Code.ARRAY, fields + u64s(obj.ndim).pack(*obj.shape) + description)


def _other_array(walk: _Walk, obj: _Array) -> Ext:
    if isinstance(obj, np.ma.MaskedArray):
        raise Unsupported("its mask would be lost", "Send x.data and x.mask, or x.filled().")
    return _array(walk, np.asarray(obj))


def _scalar(walk: _Walk, obj: np.generic) -> Ext:
    description = dtypes.describe(obj.dtype)
    return Ext(Code.SCALAR, layout.SCALAR.pack(len(description)) + description + obj.tobytes())


def _tensor(walk: _Walk, obj: Any) -> Ext:
    view, name = tensors.memory(obj)
    fields = layout.ARRAY.pack(walk.add(view), False, obj.ndim)
    return Ext(Code.TENSOR, fields + u64s(obj.ndim).pack(*obj.shape) + name)


def _dataclass(walk: _Walk, obj: Any) -> Any:
    return walk.mapping(obj, {field.name: _field(getattr(obj, field.name)) for field in fields(obj)}, attribute)


def _struct(walk: _Walk, obj: msgspec.Struct) -> Any:
    """As msgspec lays it out itself, so that `decode` can convert it back: new names, the tag, a list if array_like."""
    config = obj.__struct_config__
    names = zip(obj.__struct_encode_fields__, obj.__struct_fields__, strict=True)
    values: dict[Any, Any] = {} if config.tag is None else {config.tag_field: config.tag}
    values |= {name: _field(getattr(obj, field)) for name, field in names}
    if config.array_like:
        return walk.sequence(obj, list(values.values()))
    return walk.mapping(obj, {name: value for name, value in values.items() if value is not msgspec.UNSET}, attribute)


def _field(value: Any) -> Any:
    """The type that is given to `decode` names the Enum, so that its value is enough."""
    return value.value if isinstance(value, Enum) else value


def _enum(walk: _Walk, obj: Enum) -> Ext:
    raise Unsupported("an Enum comes back only with its type", "Send its .value, or a dataclass that holds it.")


def _unknown(walk: _Walk, obj: object) -> Ext:
    raise Unsupported("there is no encoding for it")


def _plain(base: type, convert: Callable[[Any], Any]) -> _Handler:
    """A subclass of an atom: the base class's own conversion, whatever the subclass makes of it."""
    return lambda walk, obj: _BY_TYPE[base](walk, convert(obj))


_BY_TYPE: Final[dict[type, _Handler]] = {
    **{leaf.kind: _leaf(leaf) for leaf in LEAVES},
    **{leaf.kind: _atom(leaf) for leaf in LEAVES if leaf.kind in _ATOMS},
    **{container.kind: _container(container) for container in CONTAINERS},
    bytes: _bytes,
    bytearray: _bytes,
    memoryview: _bytes,
    list: _list,
    dict: _dict,
    np.ndarray: _array,
}

#: For the rest, the first base that fits. numpy's scalars come before the Python types that some of them derive from.
_BY_BASE: Final[tuple[tuple[type, _Handler], ...]] = (
    (Enum, _enum),
    (np.ndarray, _other_array),
    (np.str_, _plain(str, str.__str__)),
    (np.bytes_, _bytes),
    (np.generic, _scalar),
    (dict, _dict),
    (list, _list),
    (tuple, _BY_TYPE[tuple]),
    (set, _BY_TYPE[set]),
    (frozenset, _BY_TYPE[frozenset]),
    (bytes, _bytes),
    (bytearray, _bytes),
    (str, _plain(str, str.__str__)),
    (int, _plain(int, int.__int__)),
    (float, lambda walk, obj: float.__float__(obj)),
    (msgspec.Struct, _struct),
)


def _by_base(obj: object) -> _Handler:
    for base, handler in _BY_BASE:
        if isinstance(obj, base):
            return handler
    if is_dataclass(obj) and not isinstance(obj, type):
        return _dataclass
    return _tensor if tensors.is_tensor(obj) else _unknown

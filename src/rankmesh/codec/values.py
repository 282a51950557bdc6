"""Small values and containers that msgpack has no type for: one table each, read in both directions.

A leaf is packed into bytes, a container as the msgpack list of its children. The unpackers see a peer's bytes: they may
raise any of `decoder.MALFORMED`, and take no more memory than those bytes warrant.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple
from uuid import UUID

from rankmesh.codec.layout import Code
from rankmesh.codec.refusal import Unsupported

#: Largest integer. Arithmetic on larger ones takes so long that nobody sends them on purpose.
MAX_INT_BYTES: Final = 1024 * 1024

_COMPLEX = struct.Struct("<dd")
_TIMEDELTA = struct.Struct("<iii")


class Leaf(NamedTuple):
    kind: type
    code: int
    pack: Callable[[Any], bytes]
    unpack: Callable[[memoryview], Any]


class Container(NamedTuple):
    kind: type
    code: int
    children: Callable[[Any], list[Any] | tuple[Any, ...]]
    rebuild: Callable[[list[Any]], Any]


def _pack_int(value: int) -> bytes:
    size = value.bit_length() // 8 + 1
    if size > MAX_INT_BYTES:
        raise Unsupported(f"it has {size} bytes and the limit is {MAX_INT_BYTES}", "Send its bytes.")
    return value.to_bytes(size, "little", signed=True)


def _unpack_int(data: memoryview) -> int:
    if data.nbytes > MAX_INT_BYTES:
        raise ValueError(f"an integer of {data.nbytes} bytes exceeds the limit of {MAX_INT_BYTES}")
    return int.from_bytes(data, "little", signed=True)


def _pack_iso(value: datetime | time) -> bytes:
    if value.tzinfo is not None and value.utcoffset() is None:
        raise Unsupported("its time zone has no offset from UTC without a date", "Send a datetime.")
    return value.isoformat().encode()


def _pack_timedelta(value: timedelta) -> bytes:
    return _TIMEDELTA.pack(value.days, value.seconds, value.microseconds)


def _text(data: memoryview) -> str:
    return str(data, "utf-8")


def key_value_turns(items: dict[Any, Any]) -> list[Any]:
    return [child for pair in items.items() for child in pair]


def _map(items: list[Any]) -> dict[Any, Any]:
    pairs = iter(items)
    return dict(zip(pairs, pairs, strict=True))


LEAVES: Final = (
    Leaf(int, Code.INT, _pack_int, _unpack_int),
    # A str with lone surrogates, such as the name of a file that is not UTF-8.
    Leaf(str, Code.STR, lambda v: v.encode("utf-8", "surrogatepass"), lambda d: str(d, "utf-8", "surrogatepass")),
    Leaf(complex, Code.COMPLEX, lambda v: _COMPLEX.pack(v.real, v.imag), lambda d: complex(*_COMPLEX.unpack(d))),
    Leaf(datetime, Code.DATETIME, _pack_iso, lambda d: datetime.fromisoformat(_text(d))),
    Leaf(date, Code.DATE, lambda v: v.isoformat().encode(), lambda d: date.fromisoformat(_text(d))),
    Leaf(time, Code.TIME, _pack_iso, lambda d: time.fromisoformat(_text(d))),
    Leaf(timedelta, Code.TIMEDELTA, _pack_timedelta, lambda d: timedelta(*_TIMEDELTA.unpack(d))),
    Leaf(Decimal, Code.DECIMAL, lambda v: str(v).encode(), lambda d: Decimal(_text(d))),
    Leaf(UUID, Code.UUID, lambda v: v.bytes, lambda d: UUID(bytes=bytes(d))),
)

CONTAINERS: Final = (
    Container(tuple, Code.TUPLE, tuple, tuple),
    Container(set, Code.SET, list, set),
    Container(frozenset, Code.FROZENSET, list, frozenset),
    # A dict with keys that need an extension themselves.
    Container(dict, Code.MAP, key_value_turns, _map),
    Container(range, Code.RANGE, lambda v: (v.start, v.stop, v.step), lambda c: range(*c)),
    Container(slice, Code.SLICE, lambda v: (v.start, v.stop, v.step), lambda c: slice(*c)),
)

"""The bytes of a payload, little-endian:

    u8 format | u8 flags | u32 size of the head | u32 number of buffers     the prefix
    u64 …                                                                   the size of each buffer
    head                                                                    msgpack
    0 … | buffer | 0 … | buffer …                                           each at a multiple of 64

The head is one msgpack value: the object, with everything msgpack has no type for as an extension (`Code`). Buffers
follow in the order of the table, each at the next multiple of `ALIGNMENT`; an extension names its buffer by number. The
payload ends with its last buffer: every byte has one place, and all sizes can be checked before the head is looked at.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final

#: Magic and version in one byte; a text or a pickle does not start with it.
FORMAT: Final = 0xA1
PREFIX: Final = struct.Struct("<BBII")
#: Flag: some extension is a pickle, so a receiver that does not allow it can say so at once.
PICKLED: Final = 1
#: A cache line, and the widest vector register: arrays may be used where they lie.
ALIGNMENT: Final = 64
#: The head's size is a u32.
MAX_HEAD_BYTES: Final = (1 << 32) - 1
#: Bytes-likes from this size on are not copied into the head.
OUT_OF_BAND_BYTES: Final = 16 * 1024
#: Containers within containers: well below what the interpreter's stack takes on either side.
MAX_DEPTH: Final = 100

#: Extension BYTES: the buffer.
BYTES: Final = struct.Struct("<I")
#: Extensions ARRAY and TENSOR: the buffer, whether in Fortran's order, dimensions; then the shape, then the dtype.
ARRAY: Final = struct.Struct("<I?B")
#: Extension SCALAR: size of the dtype's description; then that, then the value.
SCALAR: Final = struct.Struct("<H")
#: Extension PICKLE: the first buffer and how many; then the pickle.
PICKLE: Final = struct.Struct("<II")


class Code:
    """Extension types of the head; plain integers, since msgspec takes no Enum here. Negative ones are msgpack's."""

    TUPLE: Final = 1
    SET: Final = 2
    FROZENSET: Final = 3
    MAP: Final = 4
    RANGE: Final = 5
    SLICE: Final = 6
    INT: Final = 16
    STR: Final = 17
    COMPLEX: Final = 18
    DATETIME: Final = 19
    DATE: Final = 20
    TIME: Final = 21
    TIMEDELTA: Final = 22
    DECIMAL: Final = 23
    UUID: Final = 24
    BYTES: Final = 32
    ARRAY: Final = 33
    SCALAR: Final = 34
    TENSOR: Final = 35
    PICKLE: Final = 48


@lru_cache(128)
def u64s(count: int) -> struct.Struct:
    """A shape, or the table of sizes."""
    return struct.Struct(f"<{count}Q")


def aligned(offset: int) -> int:
    """The first place for a buffer at or after `offset`."""
    return (offset + ALIGNMENT - 1) & -ALIGNMENT

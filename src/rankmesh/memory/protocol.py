"""What requests for memory say on the wire, and what comes back.

A request is 32 bytes, little-endian, and what its operation needs:

    0   u8   op          one of Op
    1   u8   bits        of Bit
    2   u16  key         bytes of the key (of a notification) or name (of a region) that follows these 32
    4   u32  pieces      with Bit.BATCH: how many follow the key, each (offset, length), or with Bit.STRIDED
                         (offset, length, stride, count): `count` stretches of `length` bytes, `stride` apart
    8   u64  generation  which region: the number that its owner gave it when it was registered, and gives no other
    16  u64  offset      where, unless there are pieces
    24  u64  nbytes      how much, in all

What is read comes back as the reply's payload, what is written comes after the key, as long as it is small. With
Bit.STREAMED it travels as DATA frames (endpoint/posted.py), from where it lies to where it shall lie; what is written
with Bit.PULLED is fetched by the owner from where it lies, inside one host (memory/pulling.py). A reply to anything
else is msgpack, eight bytes (the old value of a cell), or one byte (done). One with Flag.ERROR is a Failure.

Everything here comes from another process: sizes are checked before anything is done with them.
"""

from __future__ import annotations

import struct
from enum import IntEnum, StrEnum
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from rankmesh.codec.dtypes import describe, parse
from rankmesh.codec.refusal import Unsupported
from rankmesh.errors import CodecError, ProtocolError, UsageError

#: The number of this service on its endpoint (1: the store, 2: RPC).
SERVICE: Final = 3
REQUEST: Final = struct.Struct("<BBHIQQQ")
CELL: Final = struct.Struct("<Q")
SWAP: Final = struct.Struct("<QQ")
#: Bytes of a piece, and of one with Bit.STRIDED.
PIECE_BYTES: Final = 16
BLOCK_BYTES: Final = 32
#: Names and keys are short: owners keep them.
KEY_LIMIT: Final = 255
#: Pieces of one request; each costs its owner the bytes it takes on the wire.
MAX_PIECES: Final = 1 << 20
#: No memory is larger: what is, is an overflow.
MOST: Final = 1 << 62
DONE: Final = b"\x01"


class Op(IntEnum):
    READ = 1
    WRITE = 2
    FETCH_ADD = 3
    COMPARE_AND_SWAP = 4
    NOTIFY = 5
    OPEN = 8
    LIST = 9
    WATCH = 10
    #: Sent under the ident of what is given up.
    CANCEL = 11
    #: A handle that had the region mapped is closed.
    CLOSE = 12
    #: A ticket for further connections is asked for; or one is shown, on such a connection.
    RAIL = 13
    #: An owner's word to those that have a region mapped: it was unregistered. There is no answer.
    GONE = 14


class Bit(IntEnum):
    """Like wire.header.Flag."""

    BATCH = 1
    STRIDED = 2
    STREAMED = 4
    #: An OPEN waits for its region: if there is none yet, DONE says so, and what it asks for follows.
    WAIT = 8
    #: A WRITE tells of itself: the key counts, even if it is empty.
    NOTIFY = 16
    #: Whoever OPENs would map the region, or read it where it lies, if that is possible.
    MAP = 32
    #: A WRITE brings no bytes: after the key it says where they lie (memory/pulling.py).
    PULLED = 64


class Why(StrEnum):
    """Why a request failed."""

    MISSING = "missing"
    STALE = "stale"
    DENIED = "denied"
    BOUNDS = "bounds"
    INVALID = "invalid"
    #: A bound of Config's is reached; or one that nobody can raise.
    BUSY = "busy"
    FULL = "full"
    CANCELLED = "cancelled"


class Ask(NamedTuple):
    """The first 32 bytes of a request."""

    op: int
    bits: int
    key: int
    pieces: int
    generation: int
    offset: int
    nbytes: int


class Failure(msgspec.Struct, array_like=True, frozen=True):
    why: str
    message: str
    names: tuple[str, ...] = ()


class Description(msgspec.Struct, array_like=True, frozen=True):
    """A region as it travels."""

    name: str
    nbytes: int
    dtype: bytes
    shape: tuple[int, ...]
    access: str
    generation: int
    #: Peers on its host may map it.
    mappable: bool = False
    #: Where this one may: a segment's number, and the word by which it says that it is writing; 0: nowhere.
    segment: int = 0
    slot: int = 0
    #: Where it lies, if this one may read it there: the segment has no more than the words, then. And its owner's
    #: guard, if it may write there, too.
    address: int = 0
    guard: int = 0


class Event(msgspec.Struct, array_like=True, frozen=True):
    """What a watcher is told."""

    kind: str
    region: Description


class RegionInfo(NamedTuple):
    """What is known of a region: its dtype and shape describe it, and bind nobody."""

    name: str
    nbytes: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    access: str
    generation: int
    #: Same-host peers may map it.
    mappable: bool


encode: Final = msgspec.msgpack.Encoder().encode
decode_failure: Final = msgspec.msgpack.Decoder(Failure).decode
decode_description: Final = msgspec.msgpack.Decoder(Description).decode
decode_list: Final = msgspec.msgpack.Decoder(list[Description]).decode
decode_event: Final = msgspec.msgpack.Decoder(Event).decode


def read_ask(payload: memoryview) -> Ask:
    """Raises ProtocolError for what is no request."""
    try:
        return Ask._make(REQUEST.unpack_from(payload))
    except struct.error:
        raise ProtocolError(f"a request for memory of {len(payload)} bytes", reason="malformed request") from None


def info_of(description: Description) -> RegionInfo:
    """Raises ProtocolError for what describes no region."""
    try:
        dtype = parse(description.dtype) if description.dtype else np.dtype(np.uint8)
    except CodecError:  # a dtype that only the other side knows: its bytes can be moved all the same
        dtype = np.dtype(np.uint8)
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"a region with a dtype that is none: {error}", reason="malformed region") from error
    shape = description.shape
    count = 1
    for extent in shape:
        count *= extent
        if not 0 <= extent <= MOST or count > MOST:
            raise ProtocolError(f"a region of shape {shape[:8]}", reason="malformed region")
    if not 0 < description.nbytes <= MOST or count * dtype.itemsize != description.nbytes:
        shape, dtype = (description.nbytes,), np.dtype(np.uint8)
    name, access, generation = description.name, description.access, description.generation
    return RegionInfo(name, description.nbytes, dtype, tuple(shape), access, generation, description.mappable)


def describe_dtype(dtype: np.dtype[Any]) -> bytes:
    """As it travels; empty if it means nothing elsewhere: the bytes can be moved all the same."""
    try:
        return describe(dtype)
    except Unsupported:
        return b""


def encode_name(name: str) -> bytes:
    """Raises UsageError for what cannot be a region's name."""
    if not name or not isinstance(name, str):
        raise UsageError(f"A region's name is a text that is not empty, not {name!r}. Give it one.")
    encoded = name.encode(errors="surrogatepass")
    if len(encoded) > KEY_LIMIT:
        raise UsageError(f"The name {name[:40]!r}… has {len(encoded)} bytes. Take one of at most {KEY_LIMIT}.")
    return encoded


def encode_key(key: str | int) -> bytes:
    """A notification's key; a text and a number are never the same key."""
    if isinstance(key, str):
        encoded = b"s" + key.encode(errors="surrogatepass")
    elif isinstance(key, int | np.integer):
        encoded = b"i%d" % int(key)
    else:
        raise UsageError(f"A notification's key is a str or an int, not {key!r}. Pass one of these.")
    if len(encoded) > KEY_LIMIT:
        raise UsageError(f"The key {str(key)[:40]!r}… is too long. Take one of at most {KEY_LIMIT - 1} bytes.")
    return encoded

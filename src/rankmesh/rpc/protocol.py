"""What RPC says inside REQUEST and REPLY frames. Pure. Everything that comes from a peer is checked here.

A frame's tag is the ident of the call it belongs to, chosen by the caller; everything about one call carries it.

    request   u8 kind | u8 flags | u16 name | u16 trace | u16 body | f64 seconds | name … | trace … | 0 … | body …
    reply     u8 kind | u8 flags | u16 body | u64 number | 0 … | body …

`name` and `trace` are sizes, `body` is where the body starts. `seconds` is the time the caller still gives: clocks of
two hosts do not agree, so deadlines travel as what is left of them. Infinite: the caller waits as it goes along.
`number` counts the items of a stream: a large item travels beside the small ones after it, and may come later. END and
FAILURE carry the number of items before them. In a caller's ITEM and END it stands in the place of `seconds`.

Caller to server:
    CALL      answered once, by RESULT or FAILURE
    NOTIFY    never answered
    STREAM    answered by any number of ITEMs, as far as credit goes, then by END or FAILURE
    CHANNEL   like STREAM, and the caller sends ITEMs and END too
    ITEM END CREDIT CANCEL      belong to one of these that is under way; of another they are ignored: they crossed its
              end
    RELEASE   the body names references that the caller no longer holds
Server to caller:
    RESULT FAILURE ITEM END     as above
    CREDIT    of a channel: bytes the server has taken of what the caller sent

A body is either plain msgpack (a list of arguments, or of one result) or, with PACKED, a payload of the codec: then it
starts at a multiple of 64, so that arrays in it can be used where they lie. FAILURE's is a `Failure`, CREDIT's 8 bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from rankmesh import codec
from rankmesh.errors import CodecError, InvalidMessage

#: The number of this service on the wire.
SERVICE: Final = 2

REQUEST: Final = struct.Struct("<BBHHHd")
REPLY: Final = struct.Struct("<BBHQ")
AMOUNT: Final = struct.Struct("<Q")
#: A codec's payload starts at a multiple of this.
ALIGNMENT: Final = 64
#: Longest function name in bytes, and longest traceparent and tracestate together.
NAME_LIMIT: Final = 1024
TRACE_LIMIT: Final = 1024
#: A failure is told in full up to these sizes: it must always fit where a result did not.
MESSAGE_LIMIT: Final = 4096
TRACEBACK_LIMIT: Final = 8192


class Kind:
    """Plain integers: they are compared for every call."""

    CALL: Final = 1
    NOTIFY: Final = 2
    STREAM: Final = 3
    CHANNEL: Final = 4
    ITEM: Final = 5
    END: Final = 6
    CREDIT: Final = 7
    CANCEL: Final = 8
    RELEASE: Final = 9
    RESULT: Final = 16
    FAILURE: Final = 17


class Bit:
    """Flags of a request or a reply."""

    #: The body is a payload of the codec.
    PACKED: Final = 1
    #: A second attempt, after the connection was lost during the first: only for idempotent functions.
    RETRY: Final = 2
    #: The result stays where it is; the reply is the number of a reference to it.
    KEEP: Final = 4
    #: In a result: the function is idempotent.
    IDEMPOTENT: Final = 8
    #: The body's first argument is the function itself, pickled; the name only describes it.
    SHIPPED: Final = 16


class Why:
    """What a failure is about. The caller's side makes an exception of it by a table."""

    RAISED: Final = "raised"
    MISSING: Final = "missing"
    INVALID: Final = "invalid"
    BUSY: Final = "busy"
    #: Busy, and the caller shall try again.
    WAIT: Final = "wait"
    LATE: Final = "late"
    CANCELLED: Final = "cancelled"
    REFUSED: Final = "refused"
    #: The result cannot travel, or is too large.
    RESULT: Final = "result"
    NOT_IDEMPOTENT: Final = "not idempotent"
    INTERNAL: Final = "internal"


class Failure(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """Why there is no result."""

    why: str
    message: str = ""
    type_name: str = ""
    traceback: str = ""
    names: tuple[str, ...] = ()


_encode_failure = msgspec.msgpack.Encoder().encode
_failures = msgspec.msgpack.Decoder(Failure)


def failure(
    why: str, message: str, type_name: str = "", traceback: str = "", names: Sequence[str] = (), number: int = 0
) -> bytes:
    """The reply that says so. Never too large, whatever the texts are."""
    body = Failure(
        why, _text(message, MESSAGE_LIMIT), _text(type_name, 256), _tail(traceback), tuple(_text(n, 256) for n in names)
    )
    return REPLY.pack(Kind.FAILURE, 0, REPLY.size, number) + _encode_failure(body)


def read_failure(body: memoryview | bytes) -> Failure:
    try:
        return _failures.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(f"a failure that cannot be read ({error})") from error


def _text(text: str, limit: int) -> str:
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return cut.encode("utf-8", "backslashreplace").decode()


def _tail(traceback: str) -> str:
    """The end of a traceback says what happened."""
    cut = traceback if len(traceback) <= TRACEBACK_LIMIT else "…" + traceback[1 - TRACEBACK_LIMIT :]
    return cut.encode("utf-8", "backslashreplace").decode()


def malformed(what: str) -> InvalidMessage:
    return InvalidMessage(
        f"The other side sent {what}.", reason=what, hint="Use the same version of rankmesh on both sides."
    )


# --- bodies -----------------------------------------------------------------------------------------------------------


class Body(NamedTuple):
    """Encoded arguments or an encoded item: PACKED or 0, and the parts."""

    flags: int
    parts: list[memoryview | bytes]
    nbytes: int


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any], allow_pickle: bool) -> Body:
    if not kwargs:
        plain = codec.pack_plain(args)
        if plain is not None:
            return Body(0, [plain], len(plain))
    parts = codec.encode([list(args), kwargs], allow_pickle=allow_pickle)
    return Body(Bit.PACKED, parts, codec.nbytes(parts))


def item(value: object, allow_pickle: bool) -> Body:
    plain = codec.pack_plain((value,))
    if plain is not None:
        return Body(0, [plain], len(plain))
    parts = codec.encode(value, allow_pickle=allow_pickle)
    return Body(Bit.PACKED, parts, codec.nbytes(parts))


def read_arguments(flags: int, body: memoryview | bytes, allow_pickle: bool) -> tuple[list[Any], dict[str, Any]]:
    """Raises CodecError."""
    if not flags & Bit.PACKED:
        return codec.unpack_plain(body), {}
    value = codec.decode(body, allow_pickle=allow_pickle)
    if type(value) is not list or len(value) != 2 or type(value[0]) is not list or type(value[1]) is not dict:
        raise CodecError("The arguments are not a list and a dict.", hint="Use the same version on both sides.")
    if not all(type(name) is str for name in value[1]):
        raise CodecError("The names of keyword arguments are not all text.", hint="Use the same version on both sides.")
    return value[0], value[1]


def read_item(flags: int, body: memoryview | bytes, allow_pickle: bool) -> Any:
    """Raises CodecError."""
    if flags & Bit.PACKED:
        return codec.decode(body, allow_pickle=allow_pickle)
    values = codec.unpack_plain(body)
    if len(values) != 1:
        raise CodecError(f"{len(values)} results instead of one.", hint="Use the same version on both sides.")
    return values[0]


# --- requests and replies ---------------------------------------------------------------------------------------------


def request(
    kind: int, body: Body, name: bytes = b"", seconds: float = math.inf, flags: int = 0, trace: bytes = b""
) -> tuple[list[memoryview | bytes], int]:
    """The parts of a request, and their size."""
    start = REQUEST.size + len(name) + len(trace)
    flags |= body.flags
    if not flags & Bit.PACKED:
        prefix = REQUEST.pack(kind, flags, len(name), len(trace), start, seconds)
        return [b"".join((prefix, name, trace, *body.parts))], start + body.nbytes
    padding = -start % ALIGNMENT
    prefix = REQUEST.pack(kind, flags, len(name), len(trace), start + padding, seconds)
    first, *rest = body.parts
    return [b"".join((prefix, name, trace, bytes(padding), first)), *rest], start + padding + body.nbytes


def reply(kind: int, body: Body, flags: int = 0, number: int = 0) -> tuple[list[memoryview | bytes], int]:
    """The parts of a reply, and their size."""
    if not body.flags & Bit.PACKED:
        return [b"".join((REPLY.pack(kind, flags, REPLY.size, number), *body.parts))], REPLY.size + body.nbytes
    prefix = REPLY.pack(kind, flags | body.flags, ALIGNMENT, number)
    first, *rest = body.parts
    return [b"".join((prefix, bytes(ALIGNMENT - REPLY.size), first)), *rest], ALIGNMENT + body.nbytes


def end_reply(number: int) -> bytes:
    """A server's END."""
    return REPLY.pack(Kind.END, 0, REPLY.size, number)


def credit_reply(nbytes: int) -> bytes:
    """A server's CREDIT."""
    return REPLY.pack(Kind.CREDIT, 0, REPLY.size, 0) + AMOUNT.pack(nbytes)


def signal(kind: int, number: int = 0) -> bytes:
    """A caller's END or CANCEL."""
    return REQUEST.pack(kind, 0, 0, 0, REQUEST.size, number)


def credit(nbytes: int) -> bytes:
    """A caller's CREDIT."""
    return signal(Kind.CREDIT) + AMOUNT.pack(nbytes)


def release(numbers: Sequence[int]) -> bytes:
    """The references that the caller no longer holds."""
    return signal(Kind.RELEASE) + b"".join(map(AMOUNT.pack, numbers))


def read_release(body: memoryview) -> list[int]:
    if len(body) % AMOUNT.size:
        raise malformed(f"a release of {len(body)} bytes")
    return [number for (number,) in AMOUNT.iter_unpack(body)]


def plain_prefix(kind: int, name: bytes, seconds: float) -> bytes:
    """How a request of a plain body begins, without a trace."""
    return REQUEST.pack(kind, 0, len(name), 0, REQUEST.size + len(name), seconds) + name


#: How a reply with a plain result begins, by its flags.
PLAIN_RESULT: Final = {flags: REPLY.pack(Kind.RESULT, flags, REPLY.size, 0) for flags in (0, Bit.IDEMPOTENT)}


#: Kind, flags, name, trace, where the body starts, and seconds (or the item's number).
RequestHead = tuple[int, int, bytes, bytes, int, float]

_REQUEST_BYTES: Final = REQUEST.size
_unpack_request: Final = REQUEST.unpack_from


def read_request(payload: memoryview) -> RequestHead:
    """Raises InvalidMessage."""
    if len(payload) < _REQUEST_BYTES:
        raise malformed(f"a request of {len(payload)} bytes")
    kind, flags, name, trace, body_at, seconds = _unpack_request(payload)
    named = _REQUEST_BYTES + name
    if name > NAME_LIMIT or trace > TRACE_LIMIT or not named + trace <= body_at <= len(payload) or not seconds >= 0:
        raise malformed("a request whose parts do not fit")
    name = bytes(payload[_REQUEST_BYTES:named])
    return kind, flags, name, bytes(payload[named : named + trace]) if trace else b"", body_at, seconds


def read_reply(payload: memoryview) -> tuple[int, int, int, int]:
    """Kind, flags, where the body starts, and the number. Raises InvalidMessage."""
    if len(payload) < REPLY.size:
        raise malformed(f"a reply of {len(payload)} bytes")
    kind, flags, body_at, number = REPLY.unpack_from(payload)
    if not REPLY.size <= body_at <= len(payload):
        raise malformed("a reply whose body is not in it")
    return kind, flags, body_at, number


def read_amount(body: memoryview | bytes) -> int:
    if len(body) != AMOUNT.size:
        raise malformed(f"credit of {len(body)} bytes")
    return int(AMOUNT.unpack(body)[0])

"""The frame header: fixed, versioned, 40 bytes, little-endian.

    0   u8   version     of the framing, fixed by the handshake and repeated so that garbage is noticed at once
    1   u8   kind        one of Kind
    2   u16  flags       bits of Flag
    4   u32  group       communicator of a message; service of a request
    8   i64  tag         of a message; negative tags are rankmesh's own
    16  u64  ident       of a transfer or a request, unique per sender and connection
    24  u64  nbytes      payload that follows this header
    32  u64  extra       ANNOUNCE: size of the transfer announced; DATA: offset of the payload in it

A frame is a header and `nbytes` of payload. Which kinds may carry how much is a table (`Limits.payloads`), checked
before anything is allocated. Rules of the conversation:

- EAGER carries a whole message. The sender must hold credit for it (see wire/credit.py).
- ANNOUNCE offers a transfer (message, request or reply) too large for EAGER. The receiver answers GRANT when it
  has memory for it, or REFUSE when it does not want the bytes; then DATA frames carry the pieces in order, and
  the transfer ends with its last byte or with ABORT.
- An announcement with Flag.SHARED carries a reference to memory that both sides map (endpoint/sharing.py): the
  receiver may copy the message from there, and then answers REFUSE, because it needs no bytes.
- DATA of a transfer that a request asked for, or brings with it, needs no announcement: its ident is the request's
  with one of the two highest bits (endpoint/posted.py).
- WITHDRAW takes back an announcement. Every announcement is answered once, by GRANT or REFUSE: a GRANT that crossed
  the WITHDRAW is the answer (and the receiver posts its receive anew), otherwise the receiver answers REFUSE.
- REQUEST and REPLY carry a whole RPC message, or are announced with Flag.REQUEST or Flag.REPLY.
- CREDIT returns credit; PING only shows life; CONTROL carries a typed message; GOODBYE ends the conversation.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from rankmesh.errors import ProtocolError

VERSION: Final = 1
HEADER: Final = struct.Struct("<BBHIqQQQ")
HEADER_BYTES: Final = HEADER.size
assert HEADER_BYTES == 40


class Kind(IntEnum):
    PING = 1
    CREDIT = 2
    CONTROL = 3
    GOODBYE = 4
    EAGER = 8
    ANNOUNCE = 9
    GRANT = 10
    REFUSE = 11
    WITHDRAW = 12
    DATA = 13
    ABORT = 14
    REQUEST = 16
    REPLY = 17


class Flag(IntEnum):
    """To be tested with &, which for an IntFlag takes a microsecond, as it makes a Flag of the result."""

    OBJECT = 1  # a message is an encoded object
    REQUEST = 2  # an announced transfer is a request
    REPLY = 4  # an announced transfer is a reply
    ERROR = 8  # a reply tells of a failure
    SHARED = 16  # an announcement refers to memory that both sides map


#: Largest CONTROL, CREDIT or GOODBYE payload: they are small by nature.
CONTROL_LIMIT: Final = 64 * 1024
#: What an announcement with Flag.SHARED carries.
REFERENCE_BYTES: Final = 32
#: Largest DATA payload: bounds how long a lane with precedence waits for the frame before it.
DATA_LIMIT: Final = 1024 * 1024


class Header(NamedTuple):
    version: int
    kind: int
    flags: int
    group: int
    tag: int
    ident: int
    nbytes: int
    extra: int


def pack(
    kind: int, flags: int = 0, group: int = 0, tag: int = 0, ident: int = 0, nbytes: int = 0, extra: int = 0
) -> bytes:
    return HEADER.pack(VERSION, kind, flags, group, tag, ident, nbytes, extra)


class Limits(NamedTuple):
    """What the receiver allows, from its Config."""

    eager: int
    message: int
    rpc: int

    def payloads(self) -> dict[int, int]:
        """Largest payload by kind; a kind that is not listed is unknown."""
        none = dict.fromkeys((Kind.PING, Kind.GRANT, Kind.REFUSE, Kind.WITHDRAW, Kind.ABORT), 0)
        small = dict.fromkeys((Kind.CREDIT, Kind.CONTROL, Kind.GOODBYE), CONTROL_LIMIT)
        eager = dict.fromkeys((Kind.EAGER, Kind.REQUEST, Kind.REPLY), self.eager)
        other = {Kind.ANNOUNCE: REFERENCE_BYTES, Kind.DATA: DATA_LIMIT}
        return {int(kind): limit for kind, limit in (none | small | eager | other).items()}


def explain(header: tuple[int, ...], payload_limit: dict[int, int]) -> ProtocolError:
    """Why a header that failed the check is bad."""
    version, kind, _, _, _, _, nbytes, _ = header
    if version != VERSION:
        return ProtocolError(f"frame version {version} instead of {VERSION}", reason="wrong frame version")
    if kind not in payload_limit:
        return ProtocolError(f"unknown frame kind {kind}", reason="unknown frame kind")
    return ProtocolError(
        f"a {Kind(kind).name} frame of {nbytes} bytes exceeds the limit of {payload_limit[kind]}",
        reason="frame too large",
    )

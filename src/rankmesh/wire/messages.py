"""Typed messages that ride inside the handshake and CONTROL frames: msgspec structs, validated on arrival."""

from __future__ import annotations

from typing import Final

import msgspec

from rankmesh.errors import ProtocolError
from rankmesh.wire.credit import OVERHEAD

#: Longest text a peer may make us show or log.
TEXT_LIMIT: Final = 512


def plain(text: str) -> str:
    """Text as it may travel: what cannot be shown is replaced, and it is cut to TEXT_LIMIT."""
    return "".join(c if c.isprintable() else "?" for c in text[:TEXT_LIMIT])


def _plain(text: str) -> bool:
    """Text of a peer's that can be shown: no control characters, not too long."""
    return len(text) <= TEXT_LIMIT and text.isprintable()


class Identity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who an endpoint is and what it allows; proved by the handshake's HMAC."""

    uid: bytes
    name: str
    host: str
    pid: int
    addresses: tuple[str, ...] = ()
    #: Place in a world, if it has one.
    rank: int | None = None
    run: str = ""
    #: What this side accepts: the other side's sends keep to it.
    eager_bytes: int
    lane_credit: int
    peer_credit: int
    max_message: int
    max_rpc: int
    allow_pickle: bool = False
    #: Where it is, for sharing memory: see transport/place.py. Empty, with a reason, where it does not.
    place: str = ""
    no_shm: str = ""
    #: It only carries more of what another connection of the same process is about; nobody accepts it.
    rail: bool = False

    def __post_init__(self) -> None:
        texts = (self.name, self.host, self.run, self.place, self.no_shm, *self.addresses)
        if not all(map(_plain, texts)):
            raise ValueError(f"an identity's texts are printable and have at most {TEXT_LIMIT} characters")
        if self.eager_bytes and 2 * (self.eager_bytes + OVERHEAD) > min(self.lane_credit, self.peer_credit):
            raise ValueError("an identity's credit holds two eager messages, or its small messages would never leave")
        if len(self.uid) != 16 or len(self.name) > 256 or len(self.host) > 256 or len(self.addresses) > 32:
            raise ValueError(
                "an identity's uid has 16 bytes, its names at most 256 characters, and at most 32 addresses"
            )
        if min(self.eager_bytes, self.lane_credit, self.peer_credit, self.max_message, self.max_rpc) < 0:
            raise ValueError("an identity's limits are not negative")


class Goodbye(msgspec.Struct, tag="goodbye", frozen=True):
    """This side will send nothing more, and why; `failed`: because of an error, so the rest of the world is told."""

    reason: str = ""
    failed: bool = False

    def __post_init__(self) -> None:
        if not _plain(self.reason):
            raise ValueError(f"a reason is printable and has at most {TEXT_LIMIT} characters")


class Closing(msgspec.Struct, tag="closing", frozen=True):
    """This side says goodbye as soon as it has sent all it has to: it takes nothing that it has not granted yet."""


class Lost(msgspec.Struct, tag="lost", frozen=True):
    """A third party is gone: whoever learns first tells the rest."""

    uid: bytes
    reason: str

    def __post_init__(self) -> None:
        if len(self.uid) != 16 or not _plain(self.reason):
            raise ValueError(f"a uid has 16 bytes; a reason is printable and has at most {TEXT_LIMIT} characters")


class IdleAsk(msgspec.Struct, tag="idle?", frozen=True):
    """May this quiet connection be closed? Nothing else is sent until the answer."""


class IdleAnswer(msgspec.Struct, tag="idle!", frozen=True):
    """Yes: nothing was or will be sent. No: there is something on its way."""

    agreed: bool


Control = Goodbye | Closing | Lost | IdleAsk | IdleAnswer

_encoder = msgspec.msgpack.Encoder()
_control = msgspec.msgpack.Decoder(Control)
_identity = msgspec.msgpack.Decoder(Identity)

#: What malformed bytes raise: msgspec does not translate text that is not UTF-8, nor nesting too deep to skip.
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encode(message: Control | Identity) -> bytes:
    return _encoder.encode(message)


def decode_control(payload: memoryview) -> Control:
    try:
        message: Control = _control.decode(payload)
    except _MALFORMED as error:
        raise ProtocolError(f"a control message cannot be read: {error}", reason="malformed control message") from error
    return message


def decode_identity(payload: bytes) -> Identity:
    try:
        return _identity.decode(payload)
    except _MALFORMED as error:
        raise ProtocolError(f"an identity cannot be read: {error}", reason="malformed identity") from error

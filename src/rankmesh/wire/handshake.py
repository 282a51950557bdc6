"""The handshake: both sides prove that they know the cluster token before anything else is parsed.

    initiator                                   acceptor
    HELLO      versions, uid, nonce      →
                                         ←      CHALLENGE   version, uid, nonce  (and perhaps a shortcut)
    AUTH       HMAC, identity            →
                                         ←      WELCOME     HMAC, identity     (or REFUSE: code, reason)

Rules:

- Each message is an 8-byte prefix (magic, type, code, body length) and a body. Which type may come next, and how
  long its body may be, is fixed by the state, and checked on the prefix alone: a stranger costs at most LONGEST bytes.
- The HMAC-SHA256 (key: the token) covers the role, the versions offered and the one chosen, both uids and nonces, and
  the identity. Role and nonces keep a proof from being replayed or reflected, the versions keep one in between from
  narrowing the choice. An identity is decoded only after its HMAC was found right, in constant time.
- The initiator proves itself first: the acceptor shows nothing to strangers but its uid and a nonce.
- A shortcut is the name of a better way to the acceptor, for those in the same place (host, name space, user). It comes
  with an HMAC of the place, so that only who is there and knows the token understands it. The initiator may leave this
  handshake for one over there; the proofs of whoever stays cover the offer.
- `wanted` says how many bytes to read next; reading no more leaves the first frame for the frame parser.
- After AUTH the acceptor's owner decides: `accept()` or `refuse()` (a second connection to the same peer, a wrong
  world).
- REFUSE before authentication is unproved: it is shown to the user as a reason, and nothing else follows from it.

Pure: nonces and uids come from outside.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from enum import IntEnum
from typing import Final

from rankmesh.errors import ConnectError, InternalError, ProtocolError
from rankmesh.wire.header import VERSION
from rankmesh.wire.messages import Identity, decode_identity, encode, plain

MAGIC: Final = b"RMSH"
NONCE_BYTES: Final = 32
UID_BYTES: Final = 16
_MAC_BYTES: Final = 32

_PREFIX = struct.Struct("<4sBBH")
_HELLO = struct.Struct(f"<BB{UID_BYTES}s{NONCE_BYTES}s")
_CHALLENGE = struct.Struct(f"<{UID_BYTES}s{NONCE_BYTES}s")
SHORTCUT_BYTES: Final = 16
#: HMAC of the place, and the shortcut's name.
_OFFER_BYTES: Final = _MAC_BYTES + SHORTCUT_BYTES
_IDENTITY_LIMIT: Final = 4096
_REASON_LIMIT: Final = 512


class Type(IntEnum):
    HELLO = 1
    CHALLENGE = 2
    AUTH = 3
    WELCOME = 4
    REFUSE = 5


class Refusal(IntEnum):
    """Why a connection is refused; the number travels."""

    PROTOCOL = 1
    VERSION = 2
    TOKEN = 3
    DUPLICATE = 4
    WORLD = 5
    CLOSING = 6


_BODY_LIMIT: Final = {
    Type.HELLO: (_HELLO.size, _HELLO.size),
    Type.CHALLENGE: (_CHALLENGE.size, _CHALLENGE.size + _OFFER_BYTES),
    Type.AUTH: (_MAC_BYTES, _MAC_BYTES + _IDENTITY_LIMIT),
    Type.WELCOME: (_MAC_BYTES, _MAC_BYTES + _IDENTITY_LIMIT),
    Type.REFUSE: (0, _REASON_LIMIT),
}
LONGEST: Final = _PREFIX.size + _MAC_BYTES + _IDENTITY_LIMIT


class Refused(ConnectError):
    """The other side refused. Attribute: code (a Refusal, or a number this version does not know)."""

    code: int = 0


class Handshake:
    """One side of one handshake. Feed it exactly `wanted` bytes at a time; send what it answers."""

    def __init__(self, *, initiator: bool, token: str, identity: Identity, nonce: bytes, shortcut: bytes = b"") -> None:
        """`shortcut`: what the acceptor offers to those in the same place as its identity says."""
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes")
        if len(shortcut) not in (0, SHORTCUT_BYTES):
            raise ValueError(f"a shortcut has {SHORTCUT_BYTES} bytes")
        self.initiator = initiator
        self.identity = identity
        #: Who claims to be there (from the first message), and who it proved to be.
        self.remote_uid: bytes | None = None
        self.remote: Identity | None = None
        #: The acceptor has verified the initiator and waits for `accept()` or `refuse()`.
        self.undecided = False
        self.done = False
        self._key = token.encode()
        self._nonce = nonce
        self._remote_nonce = b""
        self._expected: tuple[Type, ...] = (Type.CHALLENGE, Type.REFUSE) if initiator else (Type.HELLO,)
        self._prefix: tuple[Type, int, int] | None = None
        #: The versions that the initiator offered; the proof covers them: nobody in between can narrow the choice.
        self._offered = (VERSION, VERSION)
        #: To the initiator: the shortcut it was offered, if it is in the same place as the acceptor.
        self.shortcut = shortcut
        self._offer = b""
        self.wanted = _PREFIX.size

    def start(self) -> bytes:
        """The initiator's first message."""
        return _message(Type.HELLO, _HELLO.pack(VERSION, VERSION, self.identity.uid, self._nonce))

    def receive(self, data: bytes) -> bytes:
        """Take exactly `wanted` bytes; return what to send (perhaps nothing). Raises Refused or ProtocolError."""
        if self._prefix is None:
            self._prefix = self._read_prefix(data)
            self.wanted = self._prefix[2]
            if self.wanted:
                return b""
            data = b""
        kind, code, _ = self._prefix
        self._prefix = None
        self.wanted = _PREFIX.size
        match kind:
            case Type.HELLO:
                return self._on_hello(data)
            case Type.CHALLENGE:
                return self._on_challenge(code, data)
            case Type.AUTH:
                self._verify(b"initiator", data)
                self.undecided = True
                self._expected = ()
                self.wanted = 0
                return b""
            case Type.WELCOME:
                self._verify(b"acceptor", data)
                self._finish()
                return b""
            case Type.REFUSE:
                raise _refusal(code, data)

    def accept(self) -> bytes:
        """The acceptor's yes, to an initiator that proved itself."""
        if not self.undecided:
            raise InternalError("accept() before the initiator proved itself.")
        self.undecided = False
        self._finish()
        return self._proof(Type.WELCOME, b"acceptor")

    @staticmethod
    def refuse(code: Refusal, reason: str) -> bytes:
        """The acceptor's no; the connection ends with it."""
        return _message(Type.REFUSE, plain(reason).encode()[:_REASON_LIMIT], code)

    def _finish(self) -> None:
        self.done = True
        self._expected = ()
        self.wanted = 0

    def _read_prefix(self, data: bytes) -> tuple[Type, int, int]:
        magic, number, code, length = _PREFIX.unpack(data)
        if magic != MAGIC:
            raise ProtocolError("the other side does not speak rankmesh", reason="not a rankmesh handshake")
        if number not in self._expected:
            raise ProtocolError(f"handshake message {number} out of turn", reason="handshake out of turn")
        if code and number not in (Type.CHALLENGE, Type.REFUSE):
            raise ProtocolError(f"a {Type(number).name} message with code {code}", reason="unknown handshake code")
        shortest, longest = _BODY_LIMIT[Type(number)]
        if not shortest <= length <= longest:
            raise ProtocolError(
                f"a {Type(number).name} message of {length} bytes", reason="handshake message of a wrong length"
            )
        return Type(number), code, length

    def _on_hello(self, data: bytes) -> bytes:
        lowest, highest, self.remote_uid, self._remote_nonce = _HELLO.unpack(data)
        self._offered = (lowest, highest)
        if not lowest <= VERSION <= highest:
            raise Refused(
                f"it speaks versions {lowest} to {highest} of the protocol, this side {VERSION}",
                code=Refusal.VERSION,
                reason="protocol version",
            )
        self._expected = (Type.AUTH,)
        if self.shortcut:
            self._offer = self._place_mac(self._remote_nonce) + self.shortcut
        return _message(Type.CHALLENGE, _CHALLENGE.pack(self.identity.uid, self._nonce) + self._offer, VERSION)

    def _on_challenge(self, version: int, data: bytes) -> bytes:
        if version != VERSION:
            raise ProtocolError(
                f"the acceptor chose version {version}, which was not offered", reason="protocol version"
            )
        self._offer = data[_CHALLENGE.size :]
        if len(self._offer) not in (0, _OFFER_BYTES):
            raise ProtocolError(
                f"a CHALLENGE message of {len(data)} bytes", reason="handshake message of a wrong length"
            )
        self.remote_uid, self._remote_nonce = _CHALLENGE.unpack_from(data)
        if (
            self._offer
            and self.identity.place
            and hmac.compare_digest(self._offer[:_MAC_BYTES], self._place_mac(self._nonce))
        ):
            self.shortcut = self._offer[_MAC_BYTES:]
        self._expected = (Type.WELCOME, Type.REFUSE)
        return self._proof(Type.AUTH, b"initiator")

    def _place_mac(self, nonce: bytes) -> bytes:
        return hmac.new(self._key, b"rankmesh place" + nonce + self.identity.place.encode(), hashlib.sha256).digest()

    def _mac(self, role: bytes, identity: bytes) -> bytes:
        mine, theirs = (self.identity.uid, self._nonce), (self.remote_uid or b"", self._remote_nonce)
        first, second = (mine, theirs) if self.initiator else (theirs, mine)
        text = b"".join((b"rankmesh ", role, bytes([*self._offered, VERSION]), self._offer, *first, *second, identity))
        return hmac.new(self._key, text, hashlib.sha256).digest()

    def _proof(self, kind: Type, role: bytes) -> bytes:
        identity = encode(self.identity)
        if len(identity) > _IDENTITY_LIMIT:
            raise ProtocolError(
                f"this endpoint's identity has {len(identity)} bytes, over {_IDENTITY_LIMIT}: give it a shorter name"
            )
        return _message(kind, self._mac(role, identity) + identity)

    def _verify(self, role: bytes, data: bytes) -> None:
        mac, identity = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(role, identity)):
            raise Refused(
                "the cluster token differs", code=Refusal.TOKEN, reason="wrong or missing token", hint=_TOKEN_HINT
            )
        remote = decode_identity(identity)
        if remote.uid != self.remote_uid:
            raise ProtocolError("the identity's uid is not the one announced", reason="identity mismatch")
        self.remote = remote


_TOKEN_HINT = "Give both sides the same token (token=, Config(token=…) or RANKMESH_TOKEN)."
_HINTS: Final = {
    Refusal.TOKEN: _TOKEN_HINT,
    Refusal.VERSION: "Install the same version of rankmesh on both sides.",
    Refusal.WORLD: "Check that both sides belong to the same run.",
}


def _message(kind: Type, body: bytes, code: int = 0) -> bytes:
    return _PREFIX.pack(MAGIC, kind, code, len(body)) + body


def _refusal(code: int, body: bytes) -> Refused:
    reason = plain(body.decode(errors="replace"))
    hint = _HINTS.get(Refusal(code), "") if code in Refusal.__members__.values() else ""
    return Refused(f"the other side refused: {reason}.", code=code, reason=reason, hint=hint)

"""Byte strings for the fuzzers, made from a Random: valid ones, and mutated ones.

Rules:

- Every function takes the `Random` it draws from, so that a seed replays everything.
- Valid means that a correct peer could have sent it. `frames`, `initiator_stream` and `acceptor_stream` are streams of
  one direction of a connection; `control`, `identity` and `credit` are payloads; `value` is an object for the codec.
- `mutate` knows bytes only and works on all of them. `mutate_frames` also knows where header fields lie, because blind
  mutation of a 40-byte header rarely gets past its first check.
- Nothing here does I/O: the pure fuzzer (fuzz/wire.py) and one that writes to sockets use the same functions.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable
from random import Random
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from rankmesh.wire.credit import OVERHEAD
from rankmesh.wire.handshake import NONCE_BYTES, Handshake
from rankmesh.wire.header import DATA_LIMIT, HEADER, HEADER_BYTES, VERSION, Flag, Kind, Limits, pack
from rankmesh.wire.messages import TEXT_LIMIT, Control, Goodbye, Identity, IdleAnswer, IdleAsk, Lost, encode

#: Small enough that inputs just below and just above every limit are cheap to make.
LIMITS: Final = Limits(eager=4096, message=1 << 20, rpc=1 << 18)
TOKEN: Final = "the cluster's token"
#: Numbers at which lengths, counts and offsets tend to go wrong.
EDGES: Final = (0, 1, 2, 39, 40, 41, 127, 128, 255, 256, 4095, 4096, 4097, 65535, 65536, DATA_LIMIT, DATA_LIMIT + 1)
HUGE: Final = (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)

Maker = Callable[[Random], bytes]


# --- payloads ---------------------------------------------------------------------------------------------------------


def text(random: Random, longest: int = 24, alphabet: str = "abc /\\\n\0\x7fé漢😀\u202e") -> str:
    return "".join(random.choice(alphabet) for _ in range(random.randint(0, longest)))


def printable(random: Random, longest: int = 24) -> str:
    """What a message may say."""
    return text(random, longest, alphabet="abc /\\é漢😀")


def control(random: Random) -> bytes:
    """The payload of a CONTROL or GOODBYE frame."""
    message: Control = random.choice(
        (
            Goodbye(printable(random, TEXT_LIMIT)),
            Lost(random.randbytes(16), printable(random)),
            IdleAsk(),
            IdleAnswer(random.random() < 0.5),
        )
    )
    return encode(message)


def make_identity(random: Random) -> Identity:
    eager = random.choice(EDGES)
    credit = [limit for limit in EDGES + HUGE if not eager or limit >= 2 * (eager + OVERHEAD)]
    return Identity(
        uid=random.randbytes(16),
        name=printable(random),
        host=printable(random),
        pid=random.choice((0, 1, 2**22, 2**63)),
        addresses=tuple(f"tcp://10.0.0.{n}:{random.randrange(1 << 16)}" for n in range(random.choice((0, 1, 2, 32)))),
        rank=random.choice((None, 0, 1023)),
        run=printable(random, TEXT_LIMIT),
        eager_bytes=eager,
        lane_credit=random.choice(credit),
        peer_credit=random.choice(credit),
        max_message=random.choice(EDGES + HUGE),
        max_rpc=random.choice(EDGES + HUGE),
        allow_pickle=random.random() < 0.5,
    )


def identity(random: Random) -> bytes:
    return encode(make_identity(random))


def credit(random: Random) -> bytes:
    """The payload of a CREDIT frame: (group, tag, amount) each."""
    lanes = random.randint(0, 8)
    return b"".join(
        struct.pack("<IqQ", random.randrange(4), random.randrange(-2, 6), random.choice(EDGES)) for _ in range(lanes)
    )


# --- frames -----------------------------------------------------------------------------------------------------------

_PAYLOAD: Final[dict[Kind, Maker]] = {Kind.CONTROL: control, Kind.GOODBYE: control, Kind.CREDIT: credit}


def frame(random: Random, kind: Kind | None = None) -> bytes:
    """One valid frame; mostly small, now and then as large as its kind allows."""
    kind = kind or random.choice(list(Kind))
    if kind in _PAYLOAD:
        payload = _PAYLOAD[kind](random)
    else:
        limit = LIMITS.payloads()[kind]
        nbytes = random.choice((0, 1, random.randint(0, 200), limit if kind is not Kind.DATA else 70_000))
        payload = random.randbytes(min(nbytes, limit))
    return (
        pack(
            kind,
            flags=random.choice((0, *Flag)),
            group=random.choice((0, 1, 2**32 - 1)),
            tag=random.choice((0, 7, -1, 2**63 - 1, -(2**63))),
            ident=random.choice((0, 1, 2**64 - 1)),
            nbytes=len(payload),
            extra=random.choice((0, 1, LIMITS.message, 2**64 - 1)),
        )
        + payload
    )


def frames(random: Random) -> bytes:
    """A stream of frames, as it comes after the handshake: a mixture, or one transfer in pieces."""
    if random.random() < 0.3:
        return transfer(random)
    return b"".join(frame(random) for _ in range(random.randint(1, 6)))


def transfer(random: Random) -> bytes:
    """An announced message and its DATA frames, with small frames between them."""
    ident, piece = random.randrange(1 << 32), random.choice((1, 100, 5000, 70_000))
    pieces = random.randint(1, 4)
    parts = [pack(Kind.ANNOUNCE, tag=random.randrange(100), ident=ident, extra=piece * pieces)]
    for n in range(pieces):
        parts.append(pack(Kind.DATA, ident=ident, nbytes=piece, extra=n * piece) + random.randbytes(piece))
        if random.random() < 0.3:
            parts.append(frame(random, random.choice((Kind.PING, Kind.CREDIT, Kind.EAGER))))
    return b"".join(parts)


# --- handshakes -------------------------------------------------------------------------------------------------------


class Sides(NamedTuple):
    """Two sides of one handshake. Their nonces come from the Random, so what they say can be recorded and replayed."""

    initiator: Handshake
    acceptor: Handshake


def sides(random: Random, initiator: Identity, acceptor: Identity, token: str = TOKEN) -> Sides:
    nonces = random.randbytes(NONCE_BYTES), random.randbytes(NONCE_BYTES)
    return Sides(
        Handshake(initiator=True, token=token, identity=initiator, nonce=nonces[0]),
        Handshake(initiator=False, token=token, identity=acceptor, nonce=nonces[1]),
    )


def feed(side: Handshake, stream: bytes) -> tuple[list[bytes], bytes]:
    """Give `stream` to one side as it asks for it. The answers, and what it did not ask for."""
    answers = []
    while side.wanted and len(stream) >= side.wanted:
        piece, stream = stream[: side.wanted], stream[side.wanted :]
        answers.append(side.receive(piece))
    return answers, stream


def initiator_stream(pair: Sides) -> bytes:
    """All that the initiator sends: HELLO and AUTH. Both sides have then seen each other's first message."""
    hello = pair.initiator.start()
    challenge = b"".join(feed(pair.acceptor, hello)[0])
    return hello + b"".join(feed(pair.initiator, challenge)[0])


def acceptor_stream(pair: Sides) -> bytes:
    """All that the acceptor sends: CHALLENGE and WELCOME."""
    hello = pair.initiator.start()
    challenge = b"".join(feed(pair.acceptor, hello)[0])
    auth = b"".join(feed(pair.initiator, challenge)[0])
    feed(pair.acceptor, auth)
    return challenge + pair.acceptor.accept()


def auth_stream(pair: Sides, identity: bytes) -> bytes:
    """HELLO and AUTH of one who knows the token and proves whatever bytes it likes as its identity."""
    hello = pair.initiator.start()
    challenge = b"".join(feed(pair.acceptor, hello)[0])
    return hello + proof(hello, challenge[8:], identity)


def proof(hello: bytes, challenge: bytes, identity: bytes) -> bytes:
    """The AUTH that answers the body of a CHALLENGE.

    It is made here from the handshake's description, not by its code: an independent reading of the protocol.
    """
    offered, uid_and_nonce = hello[8:10], hello[10:]
    proved = b"rankmesh initiator" + offered + bytes([VERSION]) + uid_and_nonce + challenge + identity
    body = hmac.digest(TOKEN.encode(), proved, "sha256") + identity
    return b"RMSH" + struct.pack("<BBH", 3, 0, len(body)) + body


# --- objects for the codec --------------------------------------------------------------------------------------------


def value(random: Random, depth: int = 3) -> Any:
    """Something that send_object() takes."""
    leaves: tuple[Callable[[], Any], ...] = (
        lambda: None,
        lambda: random.random() < 0.5,
        lambda: random.choice((0, -1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1)),
        lambda: random.choice((0.0, -1.5, float("inf"))),
        lambda: text(random),
        lambda: random.randbytes(random.choice((0, 1, 40, 5000))),
        lambda: array(random),
    )
    nodes: tuple[Callable[[], Any], ...] = (
        lambda: [value(random, depth - 1) for _ in range(random.randint(0, 4))],
        lambda: tuple(value(random, depth - 1) for _ in range(random.randint(0, 4))),
        lambda: {text(random, 6): value(random, depth - 1) for _ in range(random.randint(0, 4))},
    )
    return random.choice(leaves + nodes if depth else leaves)()


def array(random: Random) -> np.ndarray[Any, Any]:
    dtype = random.choice(("u1", "<i4", ">i2", "<f4", "<f8", "?", "<c16"))
    shape = random.choice(((), (0,), (3,), (2, 3), (1, 0, 2), (17, 5)))
    return np.zeros(shape, dtype)


# --- mutation ---------------------------------------------------------------------------------------------------------


def _flip(random: Random, data: bytearray) -> None:
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _set(random: Random, data: bytearray) -> None:
    # ends of the byte range, and the bytes with which msgpack starts its largest arrays, maps, strings and extensions
    data[random.randrange(len(data))] = random.choice(b"\x00\x01\x7f\x80\xff\x91\xc6\xc9\xd9\xdb\xdd\xdf")


def _insert(random: Random, data: bytearray) -> None:
    at = random.randint(0, len(data))
    data[at:at] = random.randbytes(random.choice((1, 2, 4, 8, 40)))


def _delete(random: Random, data: bytearray) -> None:
    at = random.randrange(len(data))
    del data[at : at + random.choice((1, 2, 4, 8, 40))]


def _truncate(random: Random, data: bytearray) -> None:
    del data[random.randrange(len(data)) :]


def _number(random: Random, data: bytearray) -> None:
    width = random.choice((1, 2, 4, 8))
    at = random.randrange(len(data))
    number = random.choice(EDGES + HUGE) % (1 << 8 * width)
    data[at : at + width] = number.to_bytes(width, random.choice(("little", "big")))


def _repeat(random: Random, data: bytearray) -> None:
    at = random.randrange(len(data))
    piece = data[at : at + random.choice((1, 8, 40, 48))]
    data[at:at] = piece * random.choice((1, 2, 2000 // len(piece)))


def _swap(random: Random, data: bytearray) -> None:
    at, to, size = random.randrange(len(data)), random.randrange(len(data)), random.choice((1, 8, 40))
    first, second = data[at : at + size], data[to : to + size]
    data[at : at + size], data[to : to + size] = second, first


MUTATIONS: Final = (_flip, _set, _insert, _delete, _truncate, _number, _repeat, _swap)


def mutate(random: Random, data: bytes) -> bytes:
    """One to four random changes."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        if changed:
            random.choice(MUTATIONS)(random, changed)
    return bytes(changed)


def mutate_frames(random: Random, stream: bytes) -> bytes:
    """Change fields of headers where headers are, then perhaps anything."""
    changed = bytearray(stream)
    at = 0
    while at + HEADER_BYTES <= len(changed):
        fields = list(HEADER.unpack_from(changed, at))
        nbytes = fields[6]
        if random.random() < 0.3:
            which = random.choice((1, 2, 3, 5, 6, 7) if random.random() < 0.9 else (0,))
            width = (8, 8, 16, 32, 64, 64, 64, 64)[which]
            fields[which] = random.choice((VERSION, *Kind, *EDGES, *HUGE)) % (1 << width)
            HEADER.pack_into(changed, at, *fields)
        at += HEADER_BYTES + nbytes
    return mutate(random, bytes(changed)) if random.random() < 0.3 else bytes(changed)


def garbage(random: Random) -> bytes:
    """Bytes that nobody meant: noise, other protocols, a flood of one byte, msgpack nested too deep."""
    return random.choice(
        (
            random.randbytes(random.choice((0, 1, 8, 39, 40, 200, 5000))),
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random.randbytes(300),
            bytes([random.randrange(256)]) * random.choice((1, 40, 3000)),
            b"RMSH" + random.randbytes(random.choice((0, 4, 60))),
            b"\x82\xa4type\xa7goodbye\xa1z" + b"\x91" * 3000,
            msgspec.msgpack.encode({"type": "lost", "uid": 1}),
        )
    )

"""A hand-made client on the wire: every bad request is refused with the right error, and nothing is touched."""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from attack import TOKEN, identity, shake, wait_for_end
from initiator import receive
from peers import SOON, pattern
from rankmesh import Config, Endpoint, Peer, Region
from rankmesh.endpoint.posted import ANSWER, BROUGHT
from rankmesh.memory.finding import MAX_WAITING
from rankmesh.memory.protocol import DONE, MAX_PIECES, REQUEST, SERVICE, Bit, Op, Why, decode_failure
from rankmesh.transport.address import Address
from rankmesh.wire.header import HEADER, HEADER_BYTES, Flag, Kind, pack
from timing import scaled, wait_until

NBYTES = 1 << 20
MOST = (1 << 64) - 1


class Raw:
    """A peer that went through the handshake and now says what it likes."""

    def __init__(self, owner: Endpoint) -> None:
        address = Address.parse(owner.address)
        self.sock = socket.create_connection((address.host, address.port), timeout=scaled(10))
        shake(self.sock, who=identity(no_shm="raw"))
        self._ident = 0

    def ask(self, body: bytes, *more: bytes) -> int:
        self._ident += 1
        header = pack(Kind.REQUEST, 0, SERVICE, self._ident, 0, len(body))
        self.sock.sendall(b"".join((header, body, *more)))
        return self._ident

    def hear(self) -> tuple[tuple[int, ...], bytes]:
        """The next frame that is no heartbeat or credit."""
        while True:
            header = HEADER.unpack(receive(self.sock, HEADER_BYTES))
            payload = receive(self.sock, header[6])
            if header[1] not in (Kind.PING, Kind.CREDIT):
                return header, payload

    def refused(self) -> str:
        header, payload = self.hear()
        assert (header[1], header[3], header[4]) == (Kind.REPLY, SERVICE, self._ident)
        assert header[2] & Flag.ERROR
        return decode_failure(payload).why


class Place:
    def __init__(self, owner: Endpoint, region: Region, raw: Raw, genuine: Peer) -> None:
        self.owner, self.region, self.raw, self.genuine = owner, region, raw, genuine
        self.generation = region.generation
        self.private = owner.memory.regions["private"].generation

    def request(
        self,
        op: int,
        bits: int = 0,
        key: int = 0,
        pieces: int = 0,
        offset: int = 0,
        nbytes: int = 0,
        generation: int = 0,
    ) -> bytes:
        return REQUEST.pack(op, bits, key, pieces, generation or self.generation, offset, nbytes)


@pytest.fixture
def place() -> Iterator[Place]:
    config = Config(token=TOKEN, shm=False)
    with (
        Endpoint("tcp://127.0.0.1:0", name="owner", config=config) as owner,
        Endpoint("tcp://127.0.0.1:0", name="genuine", config=config) as other,
    ):
        region = owner.memory.register("kv", pattern(NBYTES))
        owner.memory.register("readable", pattern(NBYTES), access="r")
        owner.memory.register("writable", pattern(NBYTES), access="w")
        owner.memory.register("private", pattern(NBYTES), allow=[])
        raw = Raw(owner)
        genuine = other.connect(owner.address, timeout=SOON)
        yield Place(owner, region, raw, genuine)
        raw.sock.close()
        for name in ("kv", "readable", "writable", "private"):
            assert (owner.memory.regions[name].array == pattern(NBYTES)).all(), f"{name} was touched"
        out = np.empty(NBYTES, np.uint8)
        genuine.open("kv", timeout=SOON).read(out, timeout=SOON)
        assert (out == pattern(NBYTES)).all()


def pieces(*table: int) -> bytes:
    return struct.pack(f"<{len(table)}Q", *table)


Case = Callable[[Place], bytes]
#: What is asked for, and why it is refused.
REFUSED: dict[str, tuple[Case, Why]] = {
    "read past the end": (lambda p: p.request(Op.READ, offset=NBYTES - 7, nbytes=8), Why.BOUNDS),
    "read far out": (lambda p: p.request(Op.READ, offset=1 << 61, nbytes=8), Why.BOUNDS),
    "read at minus one": (lambda p: p.request(Op.READ, offset=MOST, nbytes=8), Why.BOUNDS),
    "read that overflows": (lambda p: p.request(Op.READ, offset=MOST - 3, nbytes=MOST), Why.BOUNDS),
    "streamed read that overflows": (lambda p: p.request(Op.READ, Bit.STREAMED, nbytes=MOST), Why.BOUNDS),
    "read too large for a reply": (lambda p: p.request(Op.READ, nbytes=NBYTES), Why.INVALID),
    "streamed read of nothing": (lambda p: p.request(Op.READ, Bit.STREAMED), Why.INVALID),
    "read of an old generation": (lambda p: p.request(Op.READ, nbytes=8, generation=12345), Why.STALE),
    "write of an old generation": (lambda p: p.request(Op.WRITE, nbytes=1, generation=MOST) + b"x", Why.STALE),
    "read of what may only be written": (
        lambda p: p.request(Op.READ, nbytes=8, generation=p.owner.memory.regions["writable"].generation), Why.DENIED),
    "write of what may only be read": (
        lambda p: p.request(Op.WRITE, nbytes=1, generation=p.owner.memory.regions["readable"].generation) + b"x",
        Why.DENIED),
    "read of what is not allowed": (
        lambda p: p.request(Op.READ, nbytes=8, generation=p.owner.memory.regions["private"].generation), Why.DENIED),
    "cell of what may only be read": (
        lambda p: p.request(Op.FETCH_ADD, nbytes=8, generation=p.owner.memory.regions["readable"].generation)
        + pieces(1), Why.DENIED),
    "write past the end": (lambda p: p.request(Op.WRITE, offset=NBYTES - 1, nbytes=2) + b"xx", Why.BOUNDS),
    "write at minus one": (lambda p: p.request(Op.WRITE, offset=MOST, nbytes=2) + b"xx", Why.BOUNDS),
    "write that brings less": (lambda p: p.request(Op.WRITE, nbytes=8) + b"xx", Why.INVALID),
    "write that brings more": (lambda p: p.request(Op.WRITE, nbytes=2) + b"xxxxxxxx", Why.INVALID),
    "write with a key beyond its end": (lambda p: p.request(Op.WRITE, Bit.NOTIFY, 200, nbytes=2) + b"xx", Why.INVALID),
    "batch past the end": (
        lambda p: p.request(Op.WRITE, Bit.BATCH, 0, 2, 0, 4) + pieces(0, 2, NBYTES - 1, 2) + b"xxxx", Why.BOUNDS),
    "batch that overflows": (
        lambda p: p.request(Op.READ, Bit.BATCH, 0, 2, 0, 4) + pieces(0, 2, MOST, 2), Why.BOUNDS),
    "batch of fewer pieces than it says": (
        lambda p: p.request(Op.READ, Bit.BATCH, 0, 9, 0, 4) + pieces(0, 2, 8, 2), Why.INVALID),
    "batch of too many pieces": (
        lambda p: p.request(Op.READ, Bit.BATCH, 0, MAX_PIECES + 1, 0, 4) + pieces(0, 4), Why.INVALID),
    "batch that does not add up": (
        lambda p: p.request(Op.READ, Bit.BATCH, 0, 2, 0, 5) + pieces(0, 2, 8, 2), Why.INVALID),
    "batch without pieces": (lambda p: p.request(Op.READ, Bit.BATCH, nbytes=5), Why.INVALID),
    "rows past the end": (
        lambda p: p.request(Op.READ, Bit.BATCH | Bit.STRIDED, 0, 1, 0, 200) + pieces(0, 2, NBYTES // 99, 101),
        Why.BOUNDS),
    "rows whose stride overflows": (
        lambda p: p.request(Op.READ, Bit.BATCH | Bit.STRIDED, 0, 1, 0, 4) + pieces(0, 2, 1 << 63, 3), Why.BOUNDS),
    "rows whose count overflows": (
        lambda p: p.request(Op.READ, Bit.BATCH | Bit.STRIDED, 0, 1, 0, 8) + pieces(0, 8, 0, (1 << 61) + 1),
        Why.INVALID),
    "rows of nothing, for ever": (
        lambda p: p.request(Op.READ, Bit.BATCH | Bit.STRIDED, 0, 1, 0, 8) + pieces(0, 0, 0, MOST), Why.INVALID),
    "rows of nothing beside some": (
        lambda p: p.request(Op.READ, Bit.BATCH | Bit.STRIDED, 0, 2, 0, 8) + pieces(0, 8, 0, 1, 0, 0, 0, 8),
        Why.INVALID),
    "batch of what is not allowed": (
        lambda p: p.request(Op.WRITE, Bit.BATCH, 0, 1, 0, 2, p.private) + pieces(0, 2) + b"xx", Why.DENIED),
    "streamed read of what is not allowed": (
        lambda p: p.request(Op.READ, Bit.STREAMED, nbytes=NBYTES, generation=p.private), Why.DENIED),
    "streamed write of what is not allowed": (
        lambda p: p.request(Op.WRITE, Bit.STREAMED, nbytes=NBYTES, generation=p.private), Why.DENIED),
    "cell of what is not allowed": (
        lambda p: p.request(Op.FETCH_ADD, nbytes=8, generation=p.private) + pieces(1), Why.DENIED),
    "swap of what is not allowed": (
        lambda p: p.request(Op.COMPARE_AND_SWAP, nbytes=8, generation=p.private) + pieces(0, 1), Why.DENIED),
    "notification of what is not allowed": (
        lambda p: p.request(Op.NOTIFY, Bit.NOTIFY, 2, generation=p.private) + b"sx", Why.DENIED),
    "notification with a long key": (lambda p: p.request(Op.NOTIFY, Bit.NOTIFY, 256) + b"s" * 256, Why.INVALID),
    "notification with a key beyond its end": (lambda p: p.request(Op.NOTIFY, Bit.NOTIFY, 200) + b"xx", Why.INVALID),
    "streamed write with a long key": (
        lambda p: p.request(Op.WRITE, Bit.STREAMED | Bit.NOTIFY, 60_000, nbytes=9) + b"s" * 60_000, Why.INVALID),
    "open of a long name": (lambda p: p.request(Op.OPEN, Bit.WAIT, 256) + b"n" * 256, Why.INVALID),
    "cell that is not aligned": (lambda p: p.request(Op.FETCH_ADD, offset=4, nbytes=8) + pieces(1), Why.INVALID),
    "cell past the end": (lambda p: p.request(Op.FETCH_ADD, offset=NBYTES, nbytes=8) + pieces(1), Why.BOUNDS),
    "cell without a value": (lambda p: p.request(Op.FETCH_ADD, nbytes=8), Why.INVALID),
    "swap with one value": (lambda p: p.request(Op.COMPARE_AND_SWAP, nbytes=8) + pieces(1), Why.INVALID),
    "open of an unknown name": (lambda p: p.request(Op.OPEN, 0, 2) + b"no", Why.MISSING),
    "open of what is not allowed": (lambda p: p.request(Op.OPEN, 0, 7) + b"private", Why.DENIED),
    "open of what is no text": (lambda p: p.request(Op.OPEN, 0, 2) + b"\xff\xfe", Why.INVALID),
    "write to be fetched from another host": (
        lambda p: p.request(Op.WRITE, Bit.PULLED, nbytes=8) + pieces(4096, 0, 0), Why.INVALID),
    "streamed write past the end": (
        lambda p: p.request(Op.WRITE, Bit.STREAMED, offset=NBYTES - 1, nbytes=1000), Why.BOUNDS),
    "streamed write of an old generation": (
        lambda p: p.request(Op.WRITE, Bit.STREAMED, nbytes=1000, generation=7), Why.STALE),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_the_connection_goes_on(place: Place, case: str) -> None:
    make, why = REFUSED[case]
    for _ in range(3):
        place.raw.ask(make(place))
        assert place.raw.refused() == why
    place.raw.ask(place.request(Op.READ, offset=8, nbytes=100))
    assert place.raw.hear()[1] == pattern(NBYTES)[8:108].tobytes()
    assert place.region.idle


def data(ident: int, nbytes: int, offset: int = 0) -> bytes:
    return pack(Kind.DATA, ident=ident, nbytes=nbytes, extra=offset) + bytes(nbytes)


#: What breaks the protocol, and what is said of it.
BROKEN: dict[str, tuple[Callable[[Place], bytes], str]] = {
    "half a request": (lambda p: frame(b"x" * 31), "a request for memory of 31 bytes"),
    "an unknown operation": (lambda p: frame(p.request(99)), "operation 99"),
    "data that nobody asked for": (lambda p: data(77 | BROUGHT, 10), "which nobody asked for"),
    "an answer to nothing": (lambda p: data(77 | ANSWER, 10), "which nobody asked for"),
    "a streamed write of nothing": (lambda p: frame(p.request(Op.WRITE, Bit.STREAMED)), "a streamed write of 0 bytes"),
    "a streamed write without end": (
        lambda p: frame(p.request(Op.WRITE, Bit.STREAMED, nbytes=MOST)), "a streamed write of"),
    "more data than was said": (
        lambda p: frame(refused_write(p)) + data(1 | BROUGHT, 900) + data(1 | BROUGHT, 200, 900), "piece 900\\+200"),
    "data out of order": (lambda p: frame(refused_write(p)) + data(1 | BROUGHT, 10, 500), "piece 500\\+10"),
    "two writes of one number": (lambda p: frame(refused_write(p)) * 2, "asked for twice"),
}  # fmt: skip


def frame(body: bytes) -> bytes:
    return pack(Kind.REQUEST, 0, SERVICE, 1, 0, len(body)) + body


def refused_write(place: Place) -> bytes:
    return place.request(Op.WRITE, Bit.STREAMED, nbytes=1000, generation=7)


@pytest.mark.parametrize("case", BROKEN)
def test_what_breaks_the_protocol_ends_that_connection(
    place: Place, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, said = BROKEN[case]
    place.raw.sock.sendall(make(place))
    wait_for_end(place.raw.sock)
    assert any(re.search(said, record.getMessage()) for record in caplog.records), caplog.text


def test_bytes_of_a_refused_write_are_read_past(place: Place) -> None:
    ident = place.raw.ask(place.request(Op.WRITE, Bit.STREAMED, nbytes=1000, generation=7))
    assert place.raw.refused() == Why.STALE
    place.raw.sock.sendall(data(ident | BROUGHT, 600) + data(ident | BROUGHT, 400, 600))
    place.raw.ask(place.request(Op.READ, nbytes=8))
    assert place.raw.hear()[1] == pattern(NBYTES)[:8].tobytes()


def test_transfers_that_wait_are_bounded_in_bytes(place: Place) -> None:
    """Streamed writes whose bytes never come: beyond the bound they are refused, and the end frees them."""
    bound = 64 << 20
    table = pieces(*(0, 1) * 4000)
    body = place.request(Op.WRITE, Bit.BATCH | Bit.STREAMED, 0, 4000, 0, 4000) + table
    count = bound // len(body) + 2
    for _ in range(count):
        place.raw.ask(body)
    header, payload = place.raw.hear()
    assert header[2] & Flag.ERROR
    assert decode_failure(payload).why == Why.BUSY
    place.raw.sock.close()
    wait_until(lambda: place.region.idle, 10)
    assert place.owner.memory._server._cost == {}


def test_requests_that_wait_for_a_region_are_bounded(place: Place) -> None:
    for _ in range(MAX_WAITING):
        place.raw.ask(place.request(Op.OPEN, Bit.WAIT, 2) + b"no")
        assert place.raw.hear()[1] == DONE
    place.raw.ask(place.request(Op.OPEN, Bit.WAIT, 2) + b"no")
    assert place.raw.refused() == Why.FULL
    place.raw.sock.close()
    wait_until(lambda: not place.owner.memory._server._awaited, 10)


def test_an_answer_that_leaves_late_is_of_its_time(place: Place) -> None:
    """One that asks for much and reads nothing: what it is sent once the region is taken back was read before."""
    memory = pattern(60_000, 1)
    region = place.owner.memory.register("brief", memory)
    place.raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 256 << 10)
    served = place.owner.memory.stats()["served"]
    count = 0
    while not any(router.outbound.blocked for router in place.owner.hub.routers.values()):
        count += 1
        place.raw.ask(place.request(Op.READ, nbytes=len(memory), generation=region.generation))
        wait_until(lambda: place.owner.memory.stats()["served"] == served + count, 10)  # noqa: B023  # called here
    region.unregister(timeout=SOON)
    memory[:] = 7
    assert all(place.raw.hear()[1] == pattern(60_000, 1).tobytes() for _ in range(count))

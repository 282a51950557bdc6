"""The parser, fed whole, byte by byte, with trailing bytes and at random splits: out come the frames that went in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain, cycle, repeat
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.errors import InternalError, ProtocolError
from rankmesh.wire.header import CONTROL_LIMIT, DATA_LIMIT, HEADER_BYTES, VERSION, Kind, Limits, pack
from rankmesh.wire.parser import SINK_BYTES, STAGING_BYTES, Parser

EAGER = 3 * STAGING_BYTES
PAYLOAD_LIMIT = Limits(eager=EAGER, message=1 << 32, rpc=1 << 30).payloads()
WHOLE = 1 << 30


@dataclass(frozen=True)
class Frame:
    kind: Kind
    payload: bytes = b""
    tag: int = 0

    @property
    def header(self) -> tuple[int, ...]:
        return (VERSION, self.kind, 0, 0, self.tag, 0, len(self.payload), 0)

    @property
    def wire(self) -> bytes:
        return pack(self.kind, tag=self.tag, nbytes=len(self.payload)) + self.payload


NOISE = Random(0).randbytes(4 * DATA_LIMIT + 256)


def content(nbytes: int, salt: int = 0) -> bytes:
    """Bytes of which no two pieces are alike, so that a shifted or repeated one is noticed."""
    return NOISE[salt : salt + nbytes]


@dataclass
class Link:
    """A stream in memory: `read` does what `recv_into` would, at most the next of `sizes` bytes at a time."""

    stream: bytes
    sizes: Iterator[int]
    at: int = 0
    #: Every read: where it went, and how much was asked for and given.
    reads: list[tuple[object, int, int]] = field(default_factory=list)

    def read(self, parser: Parser) -> bool:
        target = view(parser)
        assert target.nbytes > 0, "recv_into an empty view would look like the end of the stream"
        given_bytes = min(target.nbytes, len(self.stream) - self.at, next(self.sizes))
        target[:given_bytes] = self.stream[self.at : self.at + given_bytes]
        self.at += given_bytes
        if given_bytes:
            self.reads.append((target.obj, target.nbytes, given_bytes))
            parser.received(given_bytes)
        return given_bytes > 0


Consume = Callable[[Parser, Link], bytes | None]


def by_take(parser: Parser, link: Link) -> bytes | None:
    view = parser.take()
    return bytes(view) if view is not None else by_into(parser, link)


def by_into(parser: Parser, link: Link) -> bytes | None:
    place = bytearray(parser.header[6])
    complete = parser.into(memoryview(place))
    assert complete is not parser.pending
    while parser.pending and link.read(parser):
        pass
    return None if parser.pending else bytes(place)


def by_drop(parser: Parser, link: Link) -> bytes | None:
    complete = parser.drop()
    assert complete is not parser.pending
    while parser.pending and link.read(parser):
        pass
    return None


def by_divert(parser: Parser, link: Link) -> bytes | None:
    """Begin to receive into a place, and give the place up after the first read: it must not change any more."""
    place = bytearray(parser.header[6])
    parser.into(memoryview(place))
    if parser.pending:
        link.read(parser)
    parser.divert()
    before = bytes(place)
    while parser.pending and link.read(parser):
        pass
    assert place == before
    return None


WAYS: list[Consume] = [by_take, by_into, by_drop, by_divert]


def read_all(parser: Parser, link: Link, ways: Iterable[Consume]) -> list[tuple[tuple[int, ...], bytes | None]]:
    """The loop of the module's text, to the end of the stream: complete frames only."""
    found: list[tuple[tuple[int, ...], bytes | None]] = []
    for consume in ways:
        while (header := parser.next_header()) is None:
            if not link.read(parser):
                return found
        payload = consume(parser, link)
        if parser.pending:
            return found
        found.append((header, payload))
    raise AssertionError("more frames than ways to consume them")


def parse(
    stream: bytes, sizes: Iterable[int] = (), ways: Iterable[Consume] = ()
) -> list[tuple[tuple[int, ...], bytes | None]]:
    link = Link(stream, cycle([*sizes] or [WHOLE]))
    return read_all(Parser(PAYLOAD_LIMIT), link, [*ways] or repeat(by_take))


SAMPLE = [
    Frame(Kind.PING),
    Frame(Kind.EAGER, b"", tag=1),
    Frame(Kind.EAGER, content(1), tag=-1),
    Frame(Kind.CONTROL, content(41, 3)),
    Frame(Kind.DATA, content(100, 5)),
    Frame(Kind.DATA, content(7, 6)),
    Frame(Kind.GRANT),
    Frame(Kind.REPLY, content(39, 9)),
]
SAMPLE_STREAM = b"".join(frame.wire for frame in SAMPLE)

frames_of_any_kind = st.lists(
    st.sampled_from(Kind).flatmap(
        lambda kind: st.builds(
            lambda size, salt, tag: Frame(kind, content(size, salt), tag),
            st.sampled_from([0, 1, 39, 40, 41, 500, STAGING_BYTES - HEADER_BYTES, STAGING_BYTES + 1]).map(
                lambda size: min(size, PAYLOAD_LIMIT[kind])
            ),
            st.integers(0, 255),
            st.integers(-(2**63), 2**63 - 1),
        )
    ),
    max_size=8,
)
read_sizes = st.lists(
    st.one_of(st.integers(1, 100), st.sampled_from([39, 40, 41, STAGING_BYTES, WHOLE])), min_size=1, max_size=20
).filter(lambda sizes: sum(sizes) > 30 * len(sizes))  # one byte at a time has its own test, with a short stream


@pytest.mark.parametrize("size", [1, 2, 7, 39, 40, 41, 79, 80, 81, WHOLE])
@pytest.mark.parametrize("way", [by_take, by_into])
def test_frames_come_out_as_they_went_in_whatever_the_size_of_reads(size: int, way: Consume) -> None:
    assert parse(SAMPLE_STREAM, [size], repeat(way, 20)) == [(frame.header, frame.payload) for frame in SAMPLE]


@given(frames_of_any_kind, read_sizes, st.data())
def test_frames_come_out_as_they_went_in_at_random_splits(
    frames: list[Frame], sizes: list[int], data: st.DataObject
) -> None:
    ways = data.draw(st.lists(st.sampled_from(WAYS), min_size=len(frames) + 1, max_size=len(frames) + 1))
    found = parse(b"".join(frame.wire for frame in frames), sizes, ways)
    assert [header for header, _ in found] == [frame.header for frame in frames]
    for frame, way, (_, payload) in zip(frames, ways, found, strict=False):
        assert payload == (frame.payload if way in (by_take, by_into) else None)


@given(st.binary(min_size=1, max_size=HEADER_BYTES - 1), read_sizes)
def test_trailing_bytes_wait_for_the_rest_of_their_header(trailing: bytes, sizes: list[int]) -> None:
    parser = Parser(PAYLOAD_LIMIT)
    found = read_all(parser, Link(SAMPLE_STREAM + trailing, cycle(sizes)), repeat(by_take))
    assert len(found) == len(SAMPLE)
    assert not parser.at_boundary()
    assert not parser.buffered
    assert f"{len(trailing)} bytes waiting" in repr(parser)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 13, WHOLE])
def test_truncation_is_noticed_at_every_byte(way: Consume, size: int) -> None:
    boundaries = [0, *accumulate(len(frame.wire) for frame in SAMPLE)]
    for cut in range(len(SAMPLE_STREAM) + 1):
        parser = Parser(PAYLOAD_LIMIT)
        found = read_all(parser, Link(SAMPLE_STREAM[:cut], repeat(size)), repeat(way, 20))
        assert parser.at_boundary() is (cut in boundaries), f"cut at {cut}"
        assert len(found) == sum(0 < end <= cut for end in boundaries), f"cut at {cut}"


def test_one_read_serves_many_small_frames() -> None:
    count = 1000
    link = Link(Frame(Kind.EAGER, b"abc").wire * count, repeat(WHOLE))
    found = read_all(Parser(PAYLOAD_LIMIT), link, repeat(by_take))
    assert len(found) == count
    assert len(link.reads) == 1


def test_buffered_says_whether_a_header_waits() -> None:
    parser = Parser(PAYLOAD_LIMIT)
    link = Link(Frame(Kind.PING).wire * 2 + Frame(Kind.EAGER, content(9)).wire[:-1], repeat(WHOLE))
    assert parser.buffered is False
    link.read(parser)
    for expected in (True, True, False):
        assert parser.next_header() is not None
        assert parser.buffered is expected
    parser.into(memoryview(bytearray(9)))
    assert parser.buffered is False


def test_what_take_gave_stays_until_the_next_target() -> None:
    frames = [Frame(Kind.EAGER, content(500, salt)) for salt in range(5)]
    parser = Parser(PAYLOAD_LIMIT)
    Link(b"".join(frame.wire for frame in frames), repeat(WHOLE)).read(parser)
    views = []
    while parser.next_header():
        view = parser.take()
        assert view is not None
        views.append(view)
    assert [bytes(view) for view in views] == [frame.payload for frame in frames]


def test_take_answers_none_and_leaves_everything_while_the_payload_is_not_here() -> None:
    frame = Frame(Kind.EAGER, content(100))
    parser = Parser(PAYLOAD_LIMIT)
    link = Link(frame.wire, iter([HEADER_BYTES + 99, WHOLE]))
    link.read(parser)
    assert parser.next_header() == frame.header
    assert parser.take() is None
    assert parser.take() is None
    assert by_into(parser, link) == frame.payload
    assert parser.at_boundary()


def test_a_payload_larger_than_staging_is_received_in_place() -> None:
    frame = Frame(Kind.EAGER, content(EAGER))
    place = bytearray(EAGER)
    parser = Parser(PAYLOAD_LIMIT)
    link = Link(frame.wire + Frame(Kind.PING).wire, repeat(WHOLE))
    link.read(parser)
    assert parser.next_header() == frame.header
    assert parser.take() is None
    assert parser.into(memoryview(place)) is False
    assert "payload of Header(version=1, kind=8" in repr(parser)
    link.read(parser)
    assert parser.pending is False
    assert place == frame.payload
    assert link.reads[1] == (place, EAGER - (STAGING_BYTES - HEADER_BYTES), EAGER - (STAGING_BYTES - HEADER_BYTES))
    assert read_all(parser, link, repeat(by_take)) == [(Frame(Kind.PING).header, b"")]


def test_the_largest_control_frame_can_be_taken_whole_or_received() -> None:
    frame = Frame(Kind.CONTROL, content(CONTROL_LIMIT))
    assert parse(frame.wire) == [(frame.header, frame.payload)]


# --- one step: feed ---------------------------------------------------------------------------------------------------


def view(parser: Parser) -> memoryview:
    """Where the next bytes go: one stretch, wherever no payload is scattered."""
    target = parser.target()
    assert isinstance(target, memoryview)
    return target


def put(parser: Parser, data: bytes) -> int:
    """The bytes are in their place, and the parser does not know of them yet."""
    target = view(parser)
    target[: len(data)] = data
    return len(data)


def test_feed_gives_the_header_that_the_bytes_complete() -> None:
    parser, wire = Parser(PAYLOAD_LIMIT), SAMPLE[3].wire
    assert parser.feed(put(parser, wire[:39])) is None
    assert parser.feed(put(parser, wire[39:40])) == parser.header == SAMPLE[3].header
    assert parser.at_boundary()  # of what has come: the payload is asked for with into() or drop()


def test_feed_gives_one_header_of_many() -> None:
    parser, frames = Parser(PAYLOAD_LIMIT), [Frame(Kind.PING, tag=tag) for tag in range(3)]
    assert parser.feed(put(parser, b"".join(frame.wire for frame in frames))) == frames[0].header
    assert [parser.next_header(), parser.next_header(), parser.next_header()] == [
        frames[1].header,
        frames[2].header,
        None,
    ]


@pytest.mark.parametrize("drop", [False, True])
def test_feed_gives_no_header_while_a_payload_is_pending_nor_with_its_last_byte(drop: bool) -> None:
    frame, place = Frame(Kind.EAGER, content(100)), bytearray(100)
    parser = Parser(PAYLOAD_LIMIT)
    assert parser.feed(put(parser, frame.wire[:50])) == frame.header
    assert (parser.drop() if drop else parser.into(memoryview(place))) is False
    assert parser.feed(put(parser, frame.wire[50:100])) is None
    assert parser.pending is True
    assert parser.feed(put(parser, frame.wire[100:])) is None
    assert parser.pending is False
    assert place == (bytes(100) if drop else frame.payload)
    assert parser.feed(put(parser, SAMPLE[0].wire)) == SAMPLE[0].header


@given(frames_of_any_kind, read_sizes, st.data())
def test_feed_is_received_and_then_next_header(frames: list[Frame], sizes: list[int], data: st.DataObject) -> None:
    """Two parsers, the same bytes: after every step they ask for as much and have found the same."""
    stream, cut = b"".join(frame.wire for frame in frames), cycle(sizes)
    one, two, at, found = Parser(PAYLOAD_LIMIT), Parser(PAYLOAD_LIMIT), 0, 0
    while at < len(stream):
        asked = one.target().nbytes
        assert two.target().nbytes == asked
        piece = stream[at : at + min(asked, next(cut))]
        at += len(piece)
        pending = one.pending
        header = one.feed(put(one, piece))
        two.received(put(two, piece))
        if not pending:
            assert two.next_header() == header
        while header is not None:
            found += 1
            place = memoryview(bytearray(header[6]))
            by_drop = data.draw(st.booleans())
            assert [parser.drop() if by_drop else parser.into(place) for parser in (one, two)] == [not one.pending] * 2
            header = None if one.pending else one.next_header()
            assert one.pending or two.next_header() == header
        assert (one.pending, one.buffered, one.at_boundary()) == (two.pending, two.buffered, two.at_boundary())
    assert found == len(frames)


def test_feed_refuses_what_next_header_refuses() -> None:
    parser = Parser(PAYLOAD_LIMIT)
    with pytest.raises(ProtocolError) as refused:
        parser.feed(put(parser, pack(Kind.PING, nbytes=1)))
    assert refused.value.reason == "frame too large"
    with pytest.raises(ProtocolError):
        parser.feed(0)


def test_who_reads_into_staging_itself_may_feed_it_when_the_parser_is_at_rest() -> None:
    ping, eager = Frame(Kind.PING), Frame(Kind.EAGER, content(10))
    parser = Parser(PAYLOAD_LIMIT)
    for frame in (ping, eager, eager, ping):
        assert parser.at_rest() is True
        parser.staging[: len(frame.wire)] = frame.wire
        assert view(parser).obj is parser.staging.obj
        assert parser.feed(len(frame.wire)) == frame.header
        assert parser.at_rest() is (frame is ping)
        assert bytes(parser.take() or b"") == frame.payload


def test_at_rest_only_between_frames_and_not_within_a_transfer() -> None:
    parser, data = Parser(PAYLOAD_LIMIT), Frame(Kind.DATA, content(10))
    for piece in (data.wire[:39], data.wire[39:45], data.wire[45:]):
        if parser.feed(put(parser, piece)):
            parser.into(memoryview(bytearray(10)))
        assert parser.at_rest() is False
    assert parser.at_boundary()  # yet after a piece only the next header is asked for
    parser.feed(put(parser, Frame(Kind.PING).wire))
    assert parser.at_rest() is True


@pytest.mark.parametrize("here", [0, 1, 50, 99, 100], ids="{} bytes here".format)
@pytest.mark.parametrize("place", [0, 1, 49, 99, 101, 1000], ids="a place of {}".format)
def test_a_place_of_another_size_is_this_sides_defect(here: int, place: int) -> None:
    """And nothing has happened: neither the place nor the stream."""
    frame, wrong = Frame(Kind.EAGER, content(100)), bytearray(place)
    parser = Parser(PAYLOAD_LIMIT)
    link = Link(frame.wire, chain([HEADER_BYTES + here], repeat(WHOLE)))
    link.read(parser)
    parser.next_header()
    with pytest.raises(InternalError, match=f"a payload of 100 bytes was given a place of {place}"):
        parser.into(memoryview(wrong))
    assert wrong == bytes(place)
    assert by_into(parser, link) == frame.payload


def test_an_empty_payload_has_an_empty_place() -> None:
    parser = Parser(PAYLOAD_LIMIT)
    parser.feed(put(parser, Frame(Kind.EAGER).wire))
    with pytest.raises(InternalError):
        parser.into(memoryview(bytearray(1)))
    assert parser.into(memoryview(b"")) is True  # nothing is written: it may be read-only


# --- bulk -------------------------------------------------------------------------------------------------------------


def receive_transfer(stream: bytes, sizes: Iterator[int], nbytes: int) -> tuple[bytearray, Link]:
    """What the endpoint does with DATA frames: each payload goes to its place in the transfer's buffer."""
    place, at = bytearray(nbytes), 0
    parser, link = Parser(PAYLOAD_LIMIT), Link(stream, sizes)
    while at < nbytes:
        while (header := parser.next_header()) is None:
            assert link.read(parser)
        parser.into(memoryview(place)[at : at + header[6]])
        while parser.pending:
            assert link.read(parser)
        at += header[6]
    assert parser.at_boundary()
    return place, link


@pytest.mark.parametrize("piece", [1000, STAGING_BYTES, DATA_LIMIT])
def test_data_goes_straight_to_its_place(piece: int) -> None:
    body = content(4 * piece)
    stream = b"".join(Frame(Kind.DATA, body[n * piece : (n + 1) * piece]).wire for n in range(4))
    place, link = receive_transfer(stream, repeat(WHOLE), 4 * piece)
    assert place == body
    # the first read cannot know what comes; after it, nothing but headers passes through the parser's own memory
    staged = [given_bytes for memory, _, given_bytes in link.reads if memory is not place]
    first = staged[0]
    assert first <= STAGING_BYTES
    assert all(given_bytes <= HEADER_BYTES for given_bytes in staged[1:])
    assert sum(staged) <= first + 3 * HEADER_BYTES


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=10), read_sizes)
def test_after_data_only_the_next_header_is_asked_for(pieces: list[int], sizes: list[int]) -> None:
    body = content(sum(pieces))
    ends = list(accumulate(pieces))
    stream = b"".join(Frame(Kind.DATA, body[end - size : end]).wire for end, size in zip(ends, pieces, strict=True))
    # The first header alone: from then on every byte that is not a header must have gone straight to its place.
    place, link = receive_transfer(stream, chain([HEADER_BYTES], cycle(sizes)), len(body))
    assert place == body
    assert sum(given_bytes for memory, _, given_bytes in link.reads if memory is place) == len(body)
    assert sum(given_bytes for memory, _, given_bytes in link.reads if memory is not place) == HEADER_BYTES * len(
        pieces
    )


def test_after_other_frames_the_whole_staging_buffer_is_asked_for_again() -> None:
    parser = Parser(PAYLOAD_LIMIT)
    assert view(parser).nbytes == STAGING_BYTES
    link = Link(Frame(Kind.DATA, b"x").wire + Frame(Kind.PING).wire, repeat(HEADER_BYTES + 1))
    link.read(parser)
    assert read_all(parser, link, repeat(by_into, 3)) == [
        (Frame(Kind.DATA, b"x").header, b"x"),
        (Frame(Kind.PING).header, b""),
    ]
    assert [asked for _, asked, _ in link.reads] == [STAGING_BYTES, HEADER_BYTES]
    assert view(parser).nbytes == STAGING_BYTES


# --- dropping ---------------------------------------------------------------------------------------------------------


def test_divert_gives_the_place_back_in_the_middle_of_a_payload() -> None:
    frame, after = Frame(Kind.EAGER, content(1000)), Frame(Kind.EAGER, b"next")
    place = bytearray(1000)
    parser = Parser(PAYLOAD_LIMIT)
    link = Link(frame.wire + after.wire, chain([HEADER_BYTES + 300, 200, 100], repeat(WHOLE)))
    link.read(parser)
    parser.next_header()
    parser.into(memoryview(place))
    link.read(parser)
    parser.divert()
    assert "payload of" in repr(parser)  # pending still: its bytes have to be read past
    parser.divert()
    while parser.pending:
        link.read(parser)
    assert place == frame.payload[:500] + bytes(500)
    assert read_all(parser, link, repeat(by_take)) == [(after.header, b"next")]
    place.clear()  # no view of it is left in the parser: a bytearray that is still exported would raise BufferError


def test_divert_without_a_pending_payload_changes_nothing() -> None:
    parser = Parser(PAYLOAD_LIMIT)
    parser.divert()
    assert parser.pending is False
    assert read_all(parser, Link(SAMPLE_STREAM, repeat(WHOLE)), repeat(by_take))[-1] == (
        SAMPLE[-1].header,
        SAMPLE[-1].payload,
    )


def test_a_received_place_is_released() -> None:
    place = bytearray(50)
    parser = Parser(PAYLOAD_LIMIT)
    link = Link(Frame(Kind.EAGER, content(50)).wire, iter([HEADER_BYTES, 30, 20]))
    link.read(parser)
    parser.next_header()
    parser.into(memoryview(place))
    while parser.pending:
        link.read(parser)
    del link
    place.clear()


def test_dropping_a_large_payload_takes_one_small_buffer(peak_bytes: Callable[[], int]) -> None:
    parser = Parser({int(Kind.EAGER): 1 << 40})
    view(parser)[:HEADER_BYTES] = pack(Kind.EAGER, nbytes=1 << 28)
    parser.received(HEADER_BYTES)
    parser.next_header()
    peak_bytes()
    assert parser.drop() is False
    dropped = 0
    while parser.pending:
        target = view(parser)
        assert 0 < target.nbytes <= SINK_BYTES
        dropped += target.nbytes
        parser.received(target.nbytes)
    assert dropped == 1 << 28
    assert peak_bytes() < SINK_BYTES + 4096
    assert parser.at_boundary()


# --- refusing ---------------------------------------------------------------------------------------------------------

BAD_HEADERS = [
    pytest.param(b"\x02" + pack(Kind.PING)[1:], "wrong frame version", id="version 2"),
    pytest.param(bytes(HEADER_BYTES), "wrong frame version", id="zeros"),
    pytest.param(b"GET / HTTP/1.1\r\n".ljust(HEADER_BYTES, b"x"), "wrong frame version", id="http"),
    pytest.param(b"\xff" * HEADER_BYTES, "wrong frame version", id="ones"),
    *(pytest.param(pack(kind), "unknown frame kind", id=f"kind {kind}") for kind in (0, 5, 7, 15, 18, 127, 255)),
    *(
        pytest.param(pack(kind, nbytes=nbytes), "frame too large", id=f"{kind.name} {nbytes}")
        for kind in Kind
        for nbytes in (PAYLOAD_LIMIT[kind] + 1, 2**32, 2**63, 2**64 - 1)
    ),
]


@pytest.mark.parametrize("header, reason", BAD_HEADERS)
def test_a_bad_header_is_refused_before_anything_is_allocated(
    header: bytes, reason: str, peak_bytes: Callable[[], int]
) -> None:
    parser = Parser(PAYLOAD_LIMIT)
    Link(Frame(Kind.EAGER, b"good").wire + header, repeat(WHOLE)).read(parser)
    assert parser.next_header() is not None
    assert parser.drop()
    peak_bytes()
    with pytest.raises(ProtocolError) as refused:
        parser.next_header()
    assert peak_bytes() < 64 * 1024  # the error and its traceback, and nothing of the size the header speaks of
    assert refused.value.reason == reason
    with pytest.raises(ProtocolError):
        parser.next_header()  # there is no way past it


def test_a_payload_of_exactly_the_limit_is_allowed() -> None:
    for kind, limit in PAYLOAD_LIMIT.items():
        parser = Parser(PAYLOAD_LIMIT)
        Link(pack(kind, nbytes=limit), repeat(WHOLE)).read(parser)
        header = parser.next_header()
        assert header is not None
        assert header[6] == limit


@given(st.binary(max_size=300), st.integers(1, 60))
def test_garbage_is_refused_or_waited_for(garbage: bytes, size: int) -> None:
    try:
        found = parse(garbage, [size])
    except ProtocolError:
        found = []
    assert sum(HEADER_BYTES + header[6] for header, _ in found) <= len(garbage)


def test_a_partial_header_is_never_judged() -> None:
    """Also not when its first byte is already wrong: the reason given is then the whole header's."""
    parser = Parser(PAYLOAD_LIMIT)
    link = Link(bytes(HEADER_BYTES), repeat(1))
    for _ in range(HEADER_BYTES - 1):
        link.read(parser)
        assert parser.next_header() is None
    link.read(parser)
    with pytest.raises(ProtocolError, match="frame version 0 instead of 1"):
        parser.next_header()


def test_take_eager_takes_just_that_message_and_nothing_else() -> None:
    """The short cut for a stream of small messages: the frame must fit in every respect, or nothing happens."""
    payload = b"abcdefgh"
    frames = pack(Kind.EAGER, group=1, tag=7, nbytes=len(payload)) + payload
    after = pack(Kind.PING)
    parser = Parser(Limits(1024, 1024, 1024).payloads())
    target = view(parser)
    target[: len(frames + after)] = frames + after
    assert not parser.take_eager(1, 7, memoryview(bytearray(8))), "nothing has been received yet"
    parser.received(len(frames) + len(after))
    for group, tag, size in ((2, 7, 8), (1, 8, 8), (1, 7, 7), (1, 7, 9), (1, 7, 0)):
        out = bytearray(b"." * size)
        assert not parser.take_eager(group, tag, memoryview(out))
        assert out == b"." * size
    out = bytearray(8)
    assert parser.take_eager(1, 7, memoryview(out))
    assert out == payload
    header = parser.next_header()
    assert header is not None
    assert header[1] == Kind.PING


@pytest.mark.parametrize("change", [(0, 9), (1, Kind.ANNOUNCE), (2, 1)], ids=["version", "kind", "flags"])
def test_take_eager_leaves_other_frames_to_the_parser(change: tuple[int, int]) -> None:
    frame = bytearray(pack(Kind.EAGER, group=1, tag=7, nbytes=4) + b"abcd")
    frame[change[0]] = change[1]
    parser = Parser(Limits(1024, 1024, 1024).payloads())
    view(parser)[: len(frame)] = frame
    parser.received(len(frame))
    assert not parser.take_eager(1, 7, memoryview(bytearray(4)))

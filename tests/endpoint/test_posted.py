"""Places for bytes that need no announcement: pure, against one flat run of bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.endpoint.lanes import Cursor
from rankmesh.endpoint.posted import ANSWER, MOST_JOINED, Arrivals, Outflow, Scatter
from rankmesh.errors import ProtocolError

sizes = st.lists(st.integers(0, 300), max_size=60)


def cut(content: bytes, parts: list[int]) -> list[memoryview]:
    """Views of a copy, as large as `parts` says; the last takes the rest."""
    memory, views, at = memoryview(bytearray(content)), [], 0
    for size in parts:
        views.append(memory[at : at + size])
        at += size
    return [*views, memory[at:]]


class Link:
    """What an Outflow asks its connection."""

    def __init__(self, join_below: int) -> None:
        self.join_below = join_below

    def joining(self) -> memoryview:
        return memoryview(bytearray(1 << 20))


@given(parts=sizes, limit=st.integers(1, 2000), join_below=st.sampled_from([0, 50, 1 << 16]), extra=st.integers(1, 99))
def test_an_outflow_hands_out_everything_in_order(parts: list[int], limit: int, join_below: int, extra: int) -> None:
    content = bytes(at % 251 for at in range(sum(parts) + extra))
    outflow = Outflow(Link(join_below), 5, cut(content, parts), len(content))
    got, offsets = b"", []
    while True:
        offset, pieces, nbytes = outflow.next_piece(limit)
        if not pieces:
            break
        piece = b"".join(pieces)
        assert 0 < len(piece) == nbytes <= limit
        assert offset == len(got)
        got += piece
        offsets.append(offset)
        outflow.frame_sent(len(piece))
    assert got == content
    assert outflow.left == 0


def test_a_frame_is_not_joined_of_a_million_pieces() -> None:
    """A read of every other byte of 64 MiB was served in frames of 1 MiB, each of which took 0.6 s: everybody else of
    that owner waited for it."""
    content = memoryview(bytes(range(256)) * 64)
    outflow, came = Outflow(Link(1024), 5, (content[at : at + 1] for at in range(len(content))), len(content)), b""
    while outflow.left:
        offset, pieces, nbytes = outflow.next_piece(1 << 20)
        assert offset == len(came)
        assert 0 < nbytes < MOST_JOINED + 256
        came += b"".join(pieces)
        outflow.frame_sent(nbytes)
    assert came == content


@given(parts=sizes, frames=st.lists(st.integers(1, 700), max_size=40), gives_up=st.booleans())
def test_what_lands_lies_where_it_belongs(parts: list[int], frames: list[int], gives_up: bool) -> None:
    content = bytes(at % 251 for at in range(sum(parts) + 50))
    views = cut(bytes(len(content)), parts)
    ended: list[bool] = []
    arrivals = Arrivals()
    posted = arrivals.expect(ANSWER | 1, len(content), views, ended.append)
    at = 0
    for size in [*frames, len(content)]:
        size = min(size, len(content) - at)
        if not size:
            break
        assert arrivals.get(ANSWER | 1, at, size) is posted
        if gives_up and at > len(content) // 2:
            posted.discard()
        view = posted.place(size)
        if view is not None:
            view[:] = memoryview(content)[at : at + size]
        posted.landed(size)
        at += size
    assert ended == [True]
    assert arrivals.posted == {}
    if not gives_up:
        assert b"".join(views) == content


@given(
    parts=st.lists(st.integers(0, 5000), min_size=1, max_size=80),
    frames=st.lists(st.integers(1, 60_000), max_size=10),
    reads=st.lists(st.integers(1, 9000), min_size=1, max_size=20),
    here=st.integers(0, 3000),
)
def test_a_link_that_scatters_fills_the_views_themselves(
    parts: list[int], frames: list[int], reads: list[int], here: int
) -> None:
    """However the stream is cut into frames and reads, and however much came with a frame's header."""
    content = bytes(at % 251 for at in range(sum(parts) + 50))
    views = cut(bytes(len(content)), parts)
    stream, sizes = memoryview(content), itertools.cycle(reads)
    at = 0

    def recvmsg(buffers: list[memoryview]) -> int:
        assert 0 < len(buffers) <= Scatter.WINDOW
        got = min(next(sizes), sum(map(len, buffers)))
        left = stream[at : at + got]
        for buffer in buffers:
            buffer[: len(left)] = left[: len(buffer)]
            left = left[len(buffer) :]
        return got

    arrivals, ended = Arrivals(), list[bool]()
    arrivals.recvmsg = recvmsg
    posted = arrivals.expect(ANSWER | 1, len(content), views, ended.append)
    for size in [*frames, len(content)]:
        size = min(size, len(content) - at)
        if not size:
            break
        place, end = posted.place(size), at + size
        assert place is not None
        assert place.nbytes == size
        early = min(here, size - 1)  # as the parser does it
        place[:early] = stream[at : at + early]
        place, at = place[early:], at + early
        while at < end:
            assert place.nbytes == end - at
            if isinstance(place, Scatter):
                got = place.receive()
            else:
                got = len(place)
                place[:] = stream[at:end]
            place, at = place[got:], at + got
        posted.landed(size)
    assert ended == [True]
    assert b"".join(views) == content


def test_pieces_that_do_not_fit_are_refused() -> None:
    arrivals = Arrivals()
    posted = arrivals.expect(ANSWER | 1, 100, [memoryview(bytearray(100))], lambda whole: None)
    for offset, nbytes in ((0, 0), (1, 10), (0, 101)):
        with pytest.raises(ProtocolError, match="piece"):
            arrivals.get(ANSWER | 1, offset, nbytes)
    with pytest.raises(ProtocolError, match="nobody asked for"):
        arrivals.get(ANSWER | 2, 0, 1)
    with pytest.raises(ProtocolError, match="asked for twice"):
        arrivals.expect(ANSWER | 1, 1, None, lambda whole: None)
    assert not posted.discarded


def test_a_sender_that_gives_up() -> None:
    ended: list[bool] = []
    arrivals = Arrivals()
    arrivals.expect(ANSWER | 1, 100, None, ended.append)
    arrivals.aborted(ANSWER | 1)
    arrivals.aborted(ANSWER | 1)
    assert ended == [False]


def test_a_cursor_makes_views_only_when_they_are_needed() -> None:
    made: list[int] = []

    def views() -> object:
        for at in range(100_000):
            made.append(at)
            yield memoryview(b"x" * 4096)

    Cursor(views()).next_piece(1 << 20)  # type: ignore[arg-type]  # an iterator is enough
    assert len(made) < 1000

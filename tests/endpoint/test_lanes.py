"""Which frame goes next: precedence, turns, splits at every byte, and memory that is no longer to be read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.endpoint.lanes import COMMIT_BUFFERS, COMMIT_BYTES, Cursor, Frame, Lane, OutQueue, Piece, Series
from rankmesh.wire.header import DATA_LIMIT, HEADER, HEADER_BYTES, Kind, pack


@dataclass(eq=False)
class Owner:
    """Counts what it is told. As a transfer it hands out its parts."""

    ident: int = 0
    parts: list[bytearray] = field(default_factory=list)
    sent: int = 0
    times: int = 0

    def __post_init__(self) -> None:
        self._cursor = Cursor([memoryview(part) for part in self.parts])

    def next_piece(self, limit: int) -> Piece:
        return self._cursor.next_piece(limit)

    @property
    def left(self) -> int:
        return sum(map(len, self.parts)) - self.sent

    def frame_sent(self, nbytes: int) -> None:
        self.sent += nbytes
        self.times += 1


def frame(ident: int, payload: bytes | bytearray = b"", owner: Owner | None = None) -> Frame:
    header = pack(Kind.EAGER, ident=ident, nbytes=len(payload))
    return Frame([header, memoryview(payload)], HEADER_BYTES + len(payload), owner, len(payload))


def send(queue: OutQueue, nbytes: int) -> bytes:
    """Do as a link does that takes at most `nbytes`."""
    taken = b"".join(queue.commit())[:nbytes]
    queue.advance(len(taken))
    return taken


def drain(queue: OutQueue, step: int = 2**40) -> bytes:
    stream = b""
    while taken := send(queue, step):
        stream += taken
    assert not queue, "the queue has something and gives nothing"
    return stream


def frames(stream: bytes) -> Iterator[tuple[int, int, bytes, int]]:
    """Kind, ident, payload and offset of every frame."""
    at = 0
    while at < len(stream):
        _, kind, _, _, _, ident, nbytes, extra = HEADER.unpack_from(stream, at)
        at += HEADER_BYTES
        assert at + nbytes <= len(stream), "the stream is cut"
        yield kind, ident, stream[at : at + nbytes], extra
        at += nbytes


def test_lanes_go_in_order_of_precedence() -> None:
    queue = OutQueue()
    queue.push_bulk(Owner(9, [bytearray(5)]))
    for ident, lane in ((1, Lane.MESSAGE), (2, Lane.RPC), (3, Lane.CONTROL), (4, Lane.MESSAGE), (5, Lane.CONTROL)):
        queue.push(lane, frame(ident))
    assert [ident for _, ident, _, _ in frames(drain(queue))] == [3, 5, 2, 1, 4, 9]


def test_bulk_transfers_take_turns() -> None:
    queue = OutQueue()
    for ident, pieces in ((1, 3), (2, 1), (3, 2)):
        queue.push_bulk(Owner(ident, [bytearray(pieces * DATA_LIMIT)]))
    assert [(ident, offset // DATA_LIMIT) for _, ident, _, offset in frames(drain(queue))] == [
        (1, 0), (2, 0), (3, 0), (1, 1), (3, 1), (1, 2),
    ]  # fmt: skip


def test_control_waits_for_one_batch_at_most() -> None:
    """Whatever is being moved, a control frame comes after the frame that has begun."""
    queue = OutQueue()
    queue.push_bulk(Owner(1, [bytearray(10 * DATA_LIMIT)]))
    queue.push(Lane.MESSAGE, frame(2, bytes(100)))
    first = send(queue, 50)
    queue.push(Lane.CONTROL, frame(3))
    idents = [ident for _, ident, _, _ in frames(first + drain(queue))]
    assert idents[:3] == [2, 3, 1]
    queue.push_bulk(Owner(4, [bytearray(3 * DATA_LIMIT)]))
    first = send(queue, 50)
    queue.push(Lane.CONTROL, frame(5))
    assert [ident for _, ident, _, _ in frames(first + drain(queue))] == [4, 5, 4, 4]


def test_batch_is_bounded() -> None:
    queue = OutQueue()
    for ident in range(1000):
        queue.push(Lane.MESSAGE, frame(ident, bytes(10_000)))
    while queue:
        buffers = queue.commit()
        assert len(buffers) <= COMMIT_BUFFERS
        assert sum(map(len, buffers)) <= COMMIT_BYTES
        queue.advance(sum(map(len, buffers)))


def test_what_was_begun_elsewhere_comes_first() -> None:
    queue = OutQueue()
    queue.push(Lane.CONTROL, frame(2))
    begun = frame(1, b"payload")
    begun.advance(10)
    queue.resume(begun)
    whole = pack(Kind.EAGER, ident=1, nbytes=7) + b"payload"
    assert [ident for _, ident, _, _ in frames(whole[:10] + drain(queue))] == [1, 2]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from(list(Lane)), st.integers(0, 200)),
        st.tuples(st.just("bulk"), st.lists(st.integers(0, DATA_LIMIT), max_size=4)),
        st.tuples(st.just("send"), st.integers(1, 2 * DATA_LIMIT)),
        st.tuples(st.just("send"), st.integers(1, 90)),
        st.tuples(st.just("withdraw"), st.integers(0, 100)),
    ),
    max_size=25,
)


class Traffic:
    """A queue under random use, and what must come out of it."""

    def __init__(self) -> None:
        self.queue = OutQueue()
        self.stream = b""
        self.owners: list[Owner] = []
        self.contents: list[bytes] = []
        self.lanes: dict[int, Lane] = {}
        self.withdrawn: set[int] = set()
        self.forgotten: set[int] = set()

    def push(self, lane: Lane, size: int) -> None:
        owner = self._new([size])
        self.lanes[owner.ident] = lane
        self.queue.push(lane, frame(owner.ident, owner.parts[0], owner))

    def bulk(self, sizes: list[int]) -> None:
        self.queue.push_bulk(self._new(sizes))

    def _new(self, sizes: list[int]) -> Owner:
        fill = bytes([len(self.owners) + 1])
        owner = Owner(len(self.owners), [bytearray(fill * size) for size in sizes])
        self.owners.append(owner)
        self.contents.append(fill * sum(sizes))
        return owner

    def send(self, nbytes: int) -> None:
        self.stream += send(self.queue, nbytes)

    def withdraw(self, at: int) -> None:
        """Give up one that waits; its memory is overwritten at once."""
        waiting = [owner for owner in self.queue.owners() if isinstance(owner, Owner)]
        if waiting:
            owner = waiting[at % len(waiting)]
            self.withdrawn.add(owner.ident)
            if self.queue.withdraw(owner):
                self.forgotten.add(owner.ident)
            for part in owner.parts:
                part[:] = bytes(len(part))
            assert owner not in self.queue.owners()

    def check(self) -> None:
        seen: dict[int, bytes] = {}
        order: dict[Lane, list[int]] = {lane: [] for lane in Lane}
        for kind, ident, payload, offset in frames(self.stream + drain(self.queue, 100_000)):
            if kind == Kind.DATA:
                assert offset == len(seen.get(ident, b"")), "pieces of a transfer out of order"
                assert 0 < len(payload) <= DATA_LIMIT
            else:
                order[self.lanes[ident]].append(ident)
            seen[ident] = seen.get(ident, b"") + payload
        assert all(idents == sorted(idents) for idents in order.values()), "a lane lost its order"
        assert not self.forgotten & seen.keys()
        for ident, (owner, content) in enumerate(zip(self.owners, self.contents, strict=True)):
            got = seen.get(ident, b"")
            assert content.startswith(got), "withdrawn memory was read"
            assert ident in self.withdrawn or (got == content and owner.sent == len(content))


@given(steps)
def test_stream_is_whole_however_it_is_split_and_whatever_is_withdrawn(steps: list[tuple[Any, ...]]) -> None:
    traffic = Traffic()
    for verb, *arguments in steps:
        getattr(traffic, verb)(*arguments)
    traffic.check()


def test_withdrawn_transfer_ends_after_the_piece_that_has_begun() -> None:
    data = bytearray(b"x" * (3 * DATA_LIMIT))
    queue, owner = OutQueue(), Owner(1, [data])
    queue.push_bulk(owner)
    stream = send(queue, DATA_LIMIT + HEADER_BYTES + 100)
    stream += send(queue, 100)
    assert queue.withdraw(owner) is False
    data[:] = bytes(len(data))
    assert [len(payload) for _, _, payload, _ in frames(stream + drain(queue))] == [DATA_LIMIT, DATA_LIMIT]
    assert owner.times == 1, "an owner that withdrew was told of a later frame"


def test_owners_and_clear() -> None:
    queue = OutQueue()
    one, two, three = Owner(1, [bytearray(10)]), Owner(2, [bytearray(10)]), Owner(3, [bytearray(10)])
    queue.push(Lane.MESSAGE, frame(1, one.parts[0], one))
    send(queue, 5)
    queue.push(Lane.RPC, frame(2, two.parts[0], two))
    queue.push(Lane.RPC, frame(0))
    queue.push_bulk(three)
    assert queue.owners() == [one, two, three]
    queue.clear()
    assert not queue
    assert queue.owners() == []
    assert queue.commit() == []


@given(st.lists(st.integers(0, 50), max_size=10), st.integers(1, 40))
def test_cursor_walks_over_parts_as_if_they_were_one(sizes: list[int], limit: int) -> None:
    parts = [bytes([at]) * size for at, size in enumerate(sizes)]
    cursor = Cursor([memoryview(part) for part in parts])
    whole, got = b"".join(parts), b""
    while pieces := cursor.next_piece(limit):
        offset, views, nbytes = pieces
        if not views:
            break
        assert offset == len(got)
        piece = b"".join(views)
        assert len(piece) == nbytes
        assert len(piece) == min(limit, len(whole) - offset)
        got += piece
    assert got == whole


def test_cursor_hands_out_no_more_buffers_than_a_batch_holds() -> None:
    cursor = Cursor([memoryview(b"x")] * 1000)
    assert len(cursor.next_piece(10_000)[1]) < COMMIT_BUFFERS


@pytest.mark.parametrize("count", [1, 39, 40, 41, 46])
def test_frame_forgets_what_is_gone(count: int) -> None:
    one = frame(1, b"payload")
    whole = b"".join(one.buffers)
    one.advance(count)
    assert b"".join(one.buffers) == whole[count:]
    assert one.nbytes == len(whole) - count


@given(st.integers(0, 700), st.sampled_from([1, 64, 4096, Series.LARGEST]), st.integers(0, 1 << 20))
def test_a_series_is_walked_over_like_any_parts(count: int, each: int, more: int) -> None:
    """In pieces of whole buffers, not more of them than a system call takes."""
    buffers = [bytes([at % 256]) * each for at in range(count)]
    series = Series(buffers, each)
    got: list[object] = []
    while (piece := series.next_piece(each + more))[1]:
        offset, pieces, nbytes = piece
        assert offset == len(got) * each
        assert nbytes == each * len(pieces) <= each + more
        assert len(pieces) < COMMIT_BUFFERS
        got += pieces
    assert got == buffers
    assert series.next_piece(each + more) == (count * each, [], 0)


def test_a_cursor_steps_over_any_number_of_empty_buffers() -> None:
    cursor = Cursor([memoryview(b"")] * 300_000 + [memoryview(b"ab")] + [memoryview(b"")] * 300_000)
    offset, pieces, nbytes = cursor.next_piece(10)
    assert (offset, b"".join(pieces), nbytes) == (0, b"ab", 2)
    assert cursor.next_piece(10) == (2, [], 0)

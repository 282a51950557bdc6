"""The ring: bytes in are bytes out, and nothing that the other side writes there leads out of bounds."""

from __future__ import annotations

import mmap
import os
import random
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forked import Child
from rankmesh.transport.ring import (
    DIRECTION_BYTES,
    FREED,
    HEAD,
    INLINE,
    INLINE_MOST,
    LINE,
    MASK,
    RING_BYTES,
    SLOT,
    SLOT_BYTES,
    SLOTS,
    TAIL,
    WORD,
    RingReader,
    RingWriter,
    begin,
)

RANDOM = random.Random(1).randbytes(3 * SLOT_BYTES)


def ends() -> tuple[RingWriter, RingReader]:
    memory = memoryview(bytearray(DIRECTION_BYTES))
    return RingWriter(memory), RingReader(memory)


def content(at: int, nbytes: int) -> memoryview:
    """Bytes that differ from place to place in the stream."""
    at %= len(RANDOM) - nbytes
    return memoryview(RANDOM)[at : at + nbytes]


def drain(reader: RingReader, most: int = 1 << 24) -> bytes:
    """All there is, and tell."""
    out = memoryview(bytearray(SLOT_BYTES))
    got = bytearray()
    while len(got) < most and (count := reader.read(out)):
        got += out[:count]
    reader.tell()
    return bytes(got)


@pytest.mark.parametrize(
    "nbytes",
    [1, 7, 55, 56, 57, 63, 64, 65, INLINE_MOST - 1, INLINE_MOST, INLINE_MOST + 1, SLOT_BYTES, SLOT_BYTES + 1],
)
def test_a_buffer_of_any_size_comes_out_as_it_went_in(nbytes: int) -> None:
    writer, reader = ends()
    assert not reader.ready()
    assert writer.write([content(0, nbytes)]) == nbytes
    assert reader.ready()
    assert drain(reader) == bytes(content(0, nbytes))
    assert not reader.ready()
    assert reader.read(memoryview(bytearray(1))) == 0


def test_the_memory_has_its_size() -> None:
    for nbytes in (DIRECTION_BYTES - 1, DIRECTION_BYTES + 1):
        with pytest.raises(ValueError, match=str(DIRECTION_BYTES)):
            RingWriter(memoryview(bytearray(nbytes)))


def test_several_buffers_are_one_stream() -> None:
    writer, reader = ends()
    buffers = [content(0, 40), content(40, 0), content(40, 100_000), content(100_040, 3)]
    assert writer.write(buffers) == 100_043
    assert drain(reader) == bytes(content(0, 100_043))


def test_a_large_record_is_not_mixed_with_others() -> None:
    """Whoever reads the small one first can have the large one put where it belongs."""
    writer, reader = ends()
    writer.write([content(0, 40), content(40, INLINE_MOST + 1), content(0, 5)])
    out = memoryview(bytearray(SLOT_BYTES))
    assert [reader.read(out) for _ in range(4)] == [40, INLINE_MOST + 1, 5, 0]


def test_a_full_ring_takes_nothing_until_the_reader_tells() -> None:
    writer, reader = ends()
    taken = writer.write([content(0, 1000)] * 1000)
    assert 0 < taken < RING_BYTES
    assert writer.write([content(0, 1)]) == 0
    assert not writer.has_room()
    out = memoryview(bytearray(taken))
    assert reader.read(out) == taken
    assert not writer.has_room(), "it was not told yet"
    reader.tell()
    assert writer.has_room()
    assert writer.write([content(0, 1000)]) == 1000


def test_all_slots_taken_is_no_room_for_what_is_large_only() -> None:
    writer, reader = ends()
    large = content(0, SLOT_BYTES)
    assert writer.write([large] * (SLOTS + 1)) == SLOTS * SLOT_BYTES
    assert not writer.has_room()
    assert writer.write([content(0, 10)]) == 10
    out = memoryview(bytearray(SLOT_BYTES))
    assert reader.read(out[: SLOT_BYTES - 1]) == SLOT_BYTES - 1
    assert not writer.has_room(), "the slot is not read to its end"
    assert reader.read(out) == 1
    assert writer.has_room()
    assert writer.write([large]) == SLOT_BYTES


def test_put_writes_one_record_or_nothing() -> None:
    writer, reader = ends()
    header = bytes(range(40))
    count = 0
    while writer.put(begin(header, 1000), content(count, 1000)):
        count += 1
    record = (40 + 1000 + WORD + LINE - 1) // LINE * LINE
    assert count == RING_BYTES // record
    for number in range(count):
        at = reader.front()
        assert reader.size == 1040
        assert reader.data[at : at + 1040] == header + content(number, 1000)
        reader.pop()
    assert reader.front() == -1
    assert not writer.put(begin(header, 1000), content(0, 1000)), "it does not ask how far the reader is: write does"
    reader.tell()
    assert writer.write([memoryview(header), content(0, 1000)]) == 1040
    assert drain(reader) == header + content(0, 1000)


def test_a_small_and_a_large_record_are_written_and_taken_together() -> None:
    writer, reader = ends()
    for number in range(3 * SLOTS):
        header, data = b"header%d" % number, content(number, SLOT_BYTES - number)
        assert writer.has_slot()
        assert writer.put_both(header, data)
        at = reader.front()
        assert reader.data[at : at + reader.size] == header
        assert reader.slot_behind(len(data) + 1) is None
        slot = reader.slot_behind(len(data))
        assert slot == data
        reader.pop_both()
        assert not reader.ready()
        reader.tell()
    for _ in range(SLOTS):
        assert writer.put_both(b"header", content(0, 100_000))
    assert not writer.has_slot()
    assert not writer.put_both(b"header", content(0, 100_000))
    assert drain(reader) == SLOTS * (b"header" + content(0, 100_000))
    assert writer.put_both(b"header", content(0, 1))


def test_it_is_time_to_tell_before_the_writer_could_be_short_of_room() -> None:
    writer, reader = ends()
    told = 0
    for _ in range(1000):
        if not writer.put(begin(b"", 5000), content(0, 5000)):
            assert writer.write([content(0, 5000)]) == 5000, "the writer is short of room although all was read"
        while reader.front() >= 0:
            if reader.pop():
                reader.tell()
                told += 1
    assert 10 < told < 200


Op = tuple[str, int]
SIZES = st.one_of(
    st.integers(1, 200),
    st.integers(1, INLINE_MOST),
    st.sampled_from([56, 57, INLINE_MOST + 1]),
    st.integers(1, 300_000),
)
OPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["write", "read", "read"]), SIZES),
        st.tuples(st.just("put"), st.integers(0, INLINE_MOST)),
        st.tuples(st.just("put_both"), st.integers(1, SLOT_BYTES)),
        st.tuples(st.just("front_both"), st.sampled_from([1, INLINE_MOST, SLOT_BYTES])),
        st.tuples(st.sampled_from(["front", "tell", "room"]), st.just(0)),
    ),
    min_size=1,
    max_size=60,
)


class Model:
    """Both ends, and the bytes that are in between."""

    def __init__(self) -> None:
        self.writer, self.reader = ends()
        self.between = b""
        self.sent = 0
        #: What write did not take when it was last tried.
        self.rest: memoryview | None = None

    def write(self, nbytes: int) -> None:
        self._write(content(self.sent, nbytes))

    def _write(self, data: memoryview) -> None:
        taken = self.writer.write([data[: len(data) // 3], data[len(data) // 3 :]])
        self._went(data[:taken])
        self.rest = data[taken:] if taken < len(data) else None
        # the buffers are cut at a third: what is left of the second is what has_room() is about
        if taken < len(data) // 3:
            self.rest = data[taken : len(data) // 3]

    def put(self, nbytes: int) -> None:
        data = content(self.sent, nbytes)
        if self.writer.put(begin(b"header", nbytes), data):
            self._went(memoryview(b"header" + data))

    def put_both(self, nbytes: int) -> None:
        data, had_slot = content(self.sent, nbytes), self.writer.has_slot()
        if self.writer.put_both(b"header", data):
            assert had_slot
            self._went(memoryview(b"header" + data))

    def front_both(self, nbytes: int) -> None:
        """Take a small record and a large one behind it, of whatever size that has, if they are there."""
        if self.reader.front() < 0:
            return
        size = self.reader.size
        sizes = {nbytes, *(len(self.between) - size - other for other in (0, 1))}
        for expected in sorted(size for size in sizes if 0 < size <= SLOT_BYTES):
            slot = self.reader.slot_behind(expected)
            if slot is not None:
                assert slot == self.between[size : size + expected]
                self.between = self.between[size + expected :]
                self.reader.pop_both()
                self.reader.tell()
                return

    def _went(self, data: memoryview) -> None:
        self.between += data
        self.sent += len(data)

    def read(self, nbytes: int) -> None:
        out = memoryview(bytearray(nbytes))
        count = self.reader.read(out)
        assert bool(count) == bool(self.between), "nothing is withheld"
        assert out[:count] == self.between[:count]
        self.between = self.between[count:]

    def front(self, _: int) -> None:
        at = self.reader.front()
        if at >= 0:
            size = self.reader.size
            assert self.reader.data[at : at + size] == self.between[:size]
            self.between = self.between[size:]
            if self.reader.pop():
                self.reader.tell()

    def tell(self, _: int) -> None:
        self.reader.tell()

    def room(self, _: int) -> None:
        if self.rest is not None:
            room = self.writer.has_room()
            taken = self.writer.write([self.rest])
            assert bool(taken) == room, "has_room() said otherwise"
            self._went(self.rest[:taken])
            self.rest = None

    def check(self) -> None:
        control = self.writer.control
        assert control[TAIL] == self.writer.tail
        assert control[TAIL] % LINE == control[HEAD] % LINE == 0
        assert control[HEAD] <= self.reader.head <= control[TAIL] <= control[HEAD] + RING_BYTES
        assert self.reader.ready() == bool(self.between)


@settings(max_examples=150)
@given(OPS)
def test_any_sequence_of_calls_keeps_the_stream(ops: list[Op]) -> None:
    model = Model()
    for name, nbytes in ops:
        getattr(model, name)(nbytes)
        model.check()
    assert drain(model.reader) == model.between
    model.between = b""
    model.check()
    assert model.writer.write([content(0, 1000)]) == 1000, "an empty ring takes something"


def test_counters_go_on_beyond_the_first_turn() -> None:
    """Thousands of turns of the ring, at every offset that records can have."""
    writer, reader = ends()
    rng = random.Random(5)
    for _ in range(300):
        data = content(rng.randrange(1000), rng.randrange(1, 60_000))
        assert writer.write([data]) == len(data)
        assert drain(reader) == data
    assert writer.tail > 20 * RING_BYTES


# ---------------------------------------------------------------------- what a wrong peer writes


def record_at(end: RingReader, word: int) -> None:
    end.words[(end.head & MASK) >> 3] = word


Corruption = Callable[[RingReader], None]
WRONG_RECORDS: dict[str, int] = {
    "no kind": 100,
    "empty": INLINE,
    "beyond the end of the ring": INLINE + RING_BYTES - WORD + 1,
    "huge": INLINE + (1 << 32) - 1,
    "an empty slot": SLOT,
    "more than a slot": SLOT + SLOT_BYTES + 1,
    "an unknown kind": 5 << 32,
    "all bits": (1 << 64) - 1,
}


@pytest.mark.parametrize("word", WRONG_RECORDS.values(), ids=WRONG_RECORDS)
@pytest.mark.parametrize("before", [0, 100])
def test_a_wrong_record_is_an_error(word: int, before: int) -> None:
    writer, reader = ends()
    if before:
        writer.write([content(0, before)])
        drain(reader)
    writer.write([content(0, 10)])
    record_at(reader, word)
    assert reader.front() == -1 or reader.size == 0
    out = bytearray(2 * RING_BYTES)
    with pytest.raises(OSError, match="corrupt"):
        reader.read(memoryview(out))
    assert not any(out)


@pytest.mark.parametrize("tail", [1, LINE - 1, LINE + 1, RING_BYTES + LINE, 1 << 63, (1 << 64) - LINE])
def test_a_wrong_tail_is_an_error(tail: int) -> None:
    _, reader = ends()
    record_at(reader, INLINE + 8)
    reader.control[TAIL] = tail
    with pytest.raises(OSError, match="corrupt: tail"):
        reader.read(memoryview(bytearray(100)))


def test_a_tail_that_turns_back_is_an_error() -> None:
    writer, reader = ends()
    writer.write([content(0, 1000)])
    drain(reader)
    reader.control[TAIL] = 0
    with pytest.raises(OSError, match="corrupt: tail"):
        reader.read(memoryview(bytearray(100)))


@pytest.mark.parametrize("head", [1 << 40, 1 << 63, (1 << 64) - 1])
def test_a_head_beyond_the_tail_is_an_error(head: int) -> None:
    writer, _ = ends()
    writer.write([content(0, 100)])
    writer.control[HEAD] = head
    with pytest.raises(OSError, match="corrupt: head"):
        writer.has_room()
    with pytest.raises(OSError, match="corrupt: head"):
        writer.write([content(0, 1000)] * 1000)


def test_a_head_that_turns_back_is_an_error() -> None:
    writer, reader = ends()
    writer.write([content(0, 1000)])
    drain(reader)
    assert writer.has_room()
    writer.control[HEAD] = 0
    with pytest.raises(OSError, match="corrupt: head"):
        writer.has_room()


@pytest.mark.parametrize("freed", [1, SLOTS + 1, 1 << 63, (1 << 64) - 1])
def test_a_wrong_count_of_freed_slots_is_an_error(freed: int) -> None:
    writer, _ = ends()
    writer.control[FREED] = freed
    with pytest.raises(OSError, match="slots freed of 0"):
        writer.write([content(0, SLOT_BYTES)])


def test_freed_slots_that_turn_back_are_an_error() -> None:
    writer, reader = ends()
    for _ in range(2):
        writer.write([content(0, SLOT_BYTES)] * SLOTS)
        drain(reader)
    writer.control[FREED] = SLOTS - 1
    with pytest.raises(OSError, match="slots freed of 8"):
        writer.write([content(0, SLOT_BYTES)])


WORDS = st.one_of(
    st.integers(0, 1 << 20), st.integers(0, (1 << 64) - 1), st.sampled_from([INLINE, SLOT]).map(lambda k: k + 100)
)


def _read(reader: RingReader) -> None:
    out = bytearray(b"\xdd") * 10_000
    count = reader.read(memoryview(out)[:5000])
    assert 0 <= count <= 5000
    assert out[5000:] == b"\xdd" * 5000


def _front(reader: RingReader) -> None:
    at = reader.front()
    assert at == -1 or WORD <= at <= at + reader.size <= RING_BYTES
    if at >= 0:
        reader.pop()


def _behind(reader: RingReader, nbytes: int) -> None:
    slot = reader.slot_behind(nbytes) if reader.front() >= 0 else None
    assert slot is None or slot.nbytes == nbytes <= SLOT_BYTES


ACTIONS: dict[str, Callable[[st.DataObject, RingWriter, RingReader], object]] = {
    "write": lambda data, writer, reader: writer.write([content(0, 5000)]),
    "large": lambda data, writer, reader: writer.write([content(0, INLINE_MOST + 1)]),
    "put": lambda data, writer, reader: writer.put(begin(b"", 5000), content(0, 5000)),
    "both": lambda data, writer, reader: writer.put_both(bytes(40), content(0, SLOT_BYTES)),
    "room": lambda data, writer, reader: writer.has_room(),
    "read": lambda data, writer, reader: _read(reader),
    "front": lambda data, writer, reader: _front(reader),
    "behind": lambda data, writer, reader: _behind(
        reader, data.draw(st.sampled_from([100, SLOT_BYTES, SLOT_BYTES + 1]))
    ),
    "control": lambda data, writer, reader: reader.control.__setitem__(
        data.draw(st.sampled_from([TAIL, HEAD, FREED])), data.draw(WORDS)
    ),
    "record": lambda data, writer, reader: record_at(reader, data.draw(WORDS)),
}


@settings(max_examples=80)
@given(st.data())
def test_rubbish_in_the_control_words_and_records_never_leads_out_of_bounds(data: st.DataObject) -> None:
    """Guards around the memory stay as they were, and nothing but OSError is raised."""
    guard = 4096
    backing = bytearray(b"\xee") * (DIRECTION_BYTES + 2 * guard)
    memory = memoryview(backing)[guard:-guard]
    memory[:] = bytes(DIRECTION_BYTES)
    writer, reader = RingWriter(memory), RingReader(memory)
    found = "nothing corrupt"
    for _ in range(data.draw(st.integers(1, 12))):
        try:
            ACTIONS[data.draw(st.sampled_from(sorted(ACTIONS)))](data, writer, reader)
        except OSError as error:
            found = str(error)
            break
    assert "corrupt" in found
    assert backing[:guard] == backing[-guard:] == b"\xee" * guard


def test_a_released_end_lets_the_memory_go() -> None:
    memory = mmap.mmap(-1, DIRECTION_BYTES)
    view = memoryview(memory)
    writer, reader = RingWriter(view), RingReader(view)
    writer.release()
    reader.release()
    view.release()
    memory.close()


# ---------------------------------------------------------------------- two processes


def plan(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice([rng.randrange(1, 100), rng.randrange(1, 5000), rng.randrange(1, 200_000)]) for _ in range(2000)]


def pin(cores: tuple[int, ...]) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[core % len(allowed)] for core in cores})


@pytest.mark.parametrize("cores", [((0, 1), (0, 1)), ((0,), (1,)), ((0,), (0,))], ids=["free", "apart", "together"])
def test_two_processes_on_one_ring(cores: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Both poll without a bell; every byte is looked at."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    with mmap.mmap(-1, DIRECTION_BYTES) as memory, memoryview(memory) as view:

        def write() -> None:
            pin(cores[0])
            writer = RingWriter(view)
            at = 0
            for nbytes in plan(seed):
                if nbytes < 1000 and writer.put(begin(b"", nbytes), content(at, nbytes)):
                    at += nbytes
                    continue
                rest = content(at, nbytes)
                while rest:
                    rest = rest[writer.write([rest]) :]
                    if rest:
                        os.sched_yield()
                at += nbytes

        before = os.sched_getaffinity(0)
        with Child(write):
            reader = RingReader(view)
            expected = got = 0
            at = 0
            out = memoryview(bytearray(100_000))
            rng = random.Random(seed)
            pin(cores[1])
            try:
                for nbytes in plan(seed):
                    expected = zlib.crc32(content(at, nbytes), expected)
                    at += nbytes
                    while nbytes:
                        count = reader.read(out[: min(nbytes, rng.randrange(1, 100_000))])
                        got = zlib.crc32(out[:count], got)
                        nbytes -= count
                        reader.tell()
                        if not count:
                            os.sched_yield()
                    assert got == expected, f"wrong bytes before {at}, seed {seed}"
            finally:
                os.sched_setaffinity(0, before)
                reader.release()

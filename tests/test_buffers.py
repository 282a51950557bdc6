"""Views of callers' memory: of everything that has bytes in a row, without a copy, and of nothing else."""

from __future__ import annotations

import array
import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.buffers import BufferPool, RecyclingPool, copy, overlap, readable, writable
from rankmesh.config import MIB
from rankmesh.errors import UsageError

Array = np.ndarray[Any, np.dtype[Any]]

DTYPES = [
    "?", "i1", "u1", "i2", "u4", "i8", "f2", "f4", "f8", "g", "c8", "c16", ">f8", ">i2",
    "M8[ns]", "m8[s]", "U3", "S5", "V7",
    [("step", "i4"), ("loss", "f8")],
    [("Offset", "u2"), ("Tensor", "f2", (2, 2))],
]  # fmt: skip
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (3, 4), (2, 0, 5), (2, 3, 4)]


class Exporter:
    """Another library's array, which offers DLPack and nothing else."""

    def __init__(self, source: Array, device: int = 1) -> None:
        self._source = source
        self._device = device

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._source.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self._device, 0)


class Interfaced:
    """Another library's array, which offers numpy's array interface and nothing else."""

    def __init__(self, source: Array) -> None:
        self.__array_interface__ = source.__array_interface__
        self._source = source


def filled(dtype: Any, shape: tuple[int, ...]) -> Array:
    blank = np.zeros(shape, dtype)
    raw = np.arange(blank.nbytes, dtype=np.uint8).tobytes()
    return np.frombuffer(bytearray(raw), dtype).reshape(shape) if raw else blank


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_array_is_viewed_where_it_lies(dtype: Any, shape: tuple[int, ...]) -> None:
    source = filled(dtype, shape)
    view = readable(source)
    assert (view.format, view.ndim, view.nbytes) == ("B", 1, source.nbytes)
    assert bytes(view) == source.tobytes()
    if source.nbytes:
        into = writable(source)
        assert not into.readonly
        into[:] = bytes(reversed(source.tobytes()))
        assert bytes(view) == source.tobytes() == bytes(reversed(filled(dtype, shape).tobytes()))


@pytest.mark.parametrize(
    "source",
    [
        bytearray(b"abcdefgh"),
        memoryview(bytearray(b"abcdefgh")),
        memoryview(bytearray(b"abcdefgh")).cast("i"),
        np.arange(4, dtype="f2").reshape(2, 2).data,
        array.array("d", [1.0, 2.0]),
        (ctypes.c_int * 3)(1, 2, 3),
        Exporter(np.arange(6, dtype="f4").reshape(2, 3)),
        Interfaced(np.arange(5)),
    ],
    ids=lambda source: type(source).__qualname__,
)
def test_other_libraries_memory_is_viewed_where_it_lies(source: Any) -> None:
    view, into = readable(source), writable(source)
    assert (view.format, view.ndim, into.nbytes) == ("B", 1, view.nbytes)
    assert view.nbytes > 0
    into[0] = 0xA5
    assert view[0] == readable(source)[0] == 0xA5


def test_mapped_memory_is_viewed_where_it_lies() -> None:
    with mmap.mmap(-1, 4096) as mapped:
        with writable(mapped) as view:
            view[:3] = b"abc"
        assert mapped[:3] == b"abc"


@pytest.mark.parametrize("source", [b"abc", bytearray(), memoryview(b""), np.float64(1.5)], ids=repr)
def test_bytes_are_readable(source: Any) -> None:
    assert bytes(readable(source)) == bytes(memoryview(source).cast("B"))


NOT_CONTIGUOUS = {
    "every other": np.zeros(8)[::2],
    "a column": np.zeros((3, 4))[:, 1],
    "transposed": np.zeros((3, 4)).T,
    "reversed": np.zeros(4, "u1")[::-1],
    "broadcast": np.broadcast_to(np.zeros(3), (2, 3)),
    "dates": np.zeros(8, "M8[s]")[::2],
    "structured": np.zeros(4, [("a", "i4"), ("b", "i4")])["b"],
    "a memoryview": memoryview(bytearray(8))[::2],
    "DLPack": Exporter(np.zeros((3, 4), "f4").T),
}


@pytest.mark.parametrize("name", NOT_CONTIGUOUS)
@pytest.mark.parametrize(
    "verb, way_out",
    [
        (readable, r"Pass numpy\.ascontiguousarray\(x\), which copies it\.$"),
        (writable, r"Pass memory that lies together, and copy from it afterwards\.$"),
    ],
)
def test_what_is_not_contiguous_is_refused_with_the_way_out(verb: Any, way_out: str, name: str) -> None:
    with pytest.raises(UsageError, match=r"is not contiguous\. " + way_out):
        verb(NOT_CONTIGUOUS[name])


def frozen() -> Array:
    source = np.zeros(3, [("a", "i1"), ("b", "f8")])
    source.flags.writeable = False
    return source


@pytest.mark.parametrize("source", [b"abc", memoryview(b"abc"), frozen(), np.float64(1)], ids=type)
def test_read_only_memory_is_sent_but_not_received_into(source: Any) -> None:
    assert readable(source).nbytes > 0
    with pytest.raises(UsageError, match=r"is read-only .* Pass a writable array or bytearray\.$"):
        writable(source)


@pytest.mark.parametrize("source", [b"", np.zeros(0), np.zeros((3, 0), "M8[s]"), memoryview(b"")], ids=repr)
def test_nothing_can_be_received_into_anything_empty(source: Any) -> None:
    view = writable(source)
    assert view.nbytes == 0
    view[:] = b""


@pytest.mark.parametrize(
    "source",
    [
        np.array([object(), None]),
        np.array([], dtype=object),
        np.array({"a": 1}),
        np.zeros(2, [("step", "i4"), ("extra", "O")]),
        np.array(["a", 1], dtype=object).data,
    ],
    ids=["array", "empty", "0-d", "structured", "memoryview"],
)
@pytest.mark.parametrize("verb", [readable, writable])
def test_references_to_objects_are_never_bytes(verb: Any, source: Any) -> None:
    with pytest.raises(UsageError, match=r"holds references to Python objects.* Use send_object\(\)\.$"):
        verb(source)


@pytest.mark.parametrize("source", [None, 3, 2.5, [1, 2], {"a": 1}, object(), int], ids=type)
def test_what_has_no_memory_is_refused(source: Any) -> None:
    with pytest.raises(UsageError, match=r"is not a buffer\. .*send_object\(\) for other objects\.$"):
        readable(source)


def test_text_is_refused_with_its_own_advice() -> None:
    with pytest.raises(UsageError, match=r"^a str is not a buffer\. Use send_object\(\), or encode it to bytes\.$"):
        readable("text")


def test_memory_of_a_device_is_refused() -> None:
    with pytest.raises(UsageError, match=r"is not in CPU memory\. Copy it to the CPU first\.$"):
        readable(Exporter(np.zeros(3), device=2))


def test_exporter_that_fails_is_named_with_its_reason() -> None:
    class Refuses:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **arguments: Any) -> Any:
            raise BufferError("it requires grad")

    with pytest.raises(UsageError, match="Refuses offers no view of its memory: it requires grad") as caught:
        readable(Refuses())
    assert isinstance(caught.value.__cause__, BufferError)


@pytest.mark.parametrize(
    "nbytes, expected",
    [(0, 4096), (1, 4096), (4095, 4096), (4096, 4096), (4097, 8192), (65536, 65536), (65537, 131072), (2**32, 2**32)],
)
def test_size_classes_are_powers_of_two(nbytes: int, expected: int) -> None:
    assert BufferPool.size_class(nbytes) == expected


def test_pool_gives_a_returned_buffer_again_to_its_size_class_only() -> None:
    pool = BufferPool(limit=1 << 20)
    first = pool.take(5000)
    assert len(first) == 8192
    pool.give(first)
    assert pool.held == 8192
    assert pool.take(100) is not first
    assert pool.take(8192) is first
    assert pool.held == 0
    assert pool.take(8192) is not first


def test_pool_lets_go_of_what_exceeds_its_bound() -> None:
    pool = BufferPool(limit=3 * 4096)
    buffers = [pool.take(1) for _ in range(4)]
    for buffer in buffers:
        pool.give(buffer)
    assert pool.held == 3 * 4096
    again = [pool.take(1) for _ in range(4)]
    assert sum(any(new is old for old in buffers) for new in again) == 3
    assert pool.held == 0


def test_pool_does_not_keep_foreign_sizes() -> None:
    pool = BufferPool(limit=1 << 20)
    for size in (0, 100, 5000):
        pool.give(bytearray(size))
    assert pool.held == 0


@given(st.lists(st.one_of(st.integers(0, 100_000), st.none()), max_size=60), st.integers(0, 400_000))
def test_pool_never_holds_more_than_its_bound_nor_hands_a_buffer_out_twice(steps: list[int | None], limit: int) -> None:
    """A number takes a buffer of that size, None returns the one that has been out the longest."""
    pool = BufferPool(limit)
    out: list[bytearray] = []
    for step in steps:
        if step is not None:
            taken = pool.take(step)
            assert len(taken) == BufferPool.size_class(step) >= step
            assert all(taken is not other for other in out)
            out.append(taken)
        elif out:
            pool.give(out.pop(0))
        assert 0 <= pool.held <= limit


def test_recycled_memory_is_lent_once_at_a_time() -> None:
    """Whatever still refers to it keeps it: the view, a slice, an array over a slice, a view of that."""
    pool = RecyclingPool(64 * MIB)
    nbytes = RecyclingPool.SMALLEST
    keepers: list[Callable[[memoryview], object]] = [
        lambda view: view,
        lambda view: view[10:20],
        lambda view: np.ndarray((4,), np.uint8, view[64:68]),
        lambda view: np.ndarray((4,), np.uint8, view[64:68])[::2].reshape(1, 2),
        lambda view: np.frombuffer(view[8:], np.float32)[3:],
        lambda view: memoryview(view).toreadonly(),
    ]
    for keep in keepers:
        view = pool.take(nbytes)
        view[:] = bytes(nbytes)
        kept = keep(view)
        del view
        other = pool.take(nbytes)
        other[:] = b"x" * nbytes
        assert bytes(memoryview(kept).tobytes()[:1]) == b"\0"  # type: ignore[arg-type]
        del kept, other
        assert pool.held == 2 * nbytes


def test_recycling_pool_keeps_within_its_bound() -> None:
    pool = RecyclingPool(3 * MIB)
    views = [pool.take(MIB) for _ in range(6)]
    assert pool.held == 0
    del views
    assert pool.held == 3 * MIB
    small = pool.take(100)
    assert (small.nbytes, pool.held) == (100, 3 * MIB)
    again = [pool.take(MIB) for _ in range(2)]
    assert (len(again), pool.held) == (2, MIB)


@pytest.mark.parametrize("nbytes", [0, 16, 64 * 1024 - 48, 64 * 1024 + 48, 512 * 1024 + 48])
@pytest.mark.parametrize("dtype", ["u1", "?", "f2", "f4", "f8", "c16", "S3", "M8[s]", [("x", "f4"), ("y", "i8")]])
def test_copies_are_equal_to_the_last_bit(dtype: Any, nbytes: int) -> None:
    """Also where numpy copies instead of the C library: numbers that are none keep their bits."""
    count = nbytes // np.dtype(dtype).itemsize
    source = np.random.default_rng(nbytes).integers(0, 256, count * np.dtype(dtype).itemsize, np.uint8).view(dtype)
    target = np.zeros(count, dtype)
    copy(target, source)
    assert target.tobytes() == source.tobytes()


def test_copies_of_rows() -> None:
    table, target = np.arange(1 << 18, dtype=np.int32).reshape(4, 256, 256), np.zeros((4, 256, 256), np.int32)
    copy(target[2, ...], table[2, ...])
    assert np.array_equal(target[2], table[2])
    assert not target[[0, 1, 3]].any()
    numbers = np.zeros(4)
    copy(numbers[1, ...], np.ones(4)[1, ...])  # arrays without dimensions
    assert numbers.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(
    "one, other, expected",
    [
        (slice(0, 10), slice(0, 10), True),
        (slice(0, 10), slice(9, 20), True),
        (slice(5, 6), slice(0, 10), True),
        (slice(0, 10), slice(10, 20), False),
        (slice(5, 5), slice(0, 10), False),
        (slice(5, 5), slice(5, 5), False),
    ],
)
def test_overlap_is_a_byte_in_common(one: slice, other: slice, expected: bool) -> None:
    memory = np.zeros(20)
    assert overlap(readable(memory[one]), writable(memory[other])) is expected
    assert overlap(readable(memory[other].data.toreadonly()), writable(memory[one])) is expected
    assert not overlap(readable(memory[one]), writable(np.zeros(20)[other]))

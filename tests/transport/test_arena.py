"""The arena: arrays like numpy's, whose memory others can map, and which comes back when the last view is gone."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forked import shm_names
from peers import Call
from rankmesh.buffers import MID_PAGE, PAGE, readable
from rankmesh.config import KIB, MIB
from rankmesh.transport.arena import SEGMENT_BYTES, Arena, Spot

Array = np.ndarray[Any, Any]


def make() -> tuple[Arena, list[int]]:
    """An arena, and the segments it has forgotten."""
    forgotten: list[int] = []
    return Arena(forgotten.append), forgotten


def spot(arena: Arena, array: Array) -> Spot:
    found = arena.locate(readable(array))
    assert found is not None
    return found


def mapped() -> int:
    """Bytes of arenas that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if "memfd:rankmesh-arena" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


@pytest.mark.parametrize(
    "shape, dtype",
    [
        (100, "f8"),
        ((100,), np.float32),
        ((3, 5, 7), np.int16),
        ((), "f8"),
        ((), np.complex128),
        (1, bool),
        ((2, 2), [("x", "i4"), ("y", "f8")]),
        ((1000, 1001), "u1"),
        (7, "S13"),
        ((5, 1), "M8[ns]"),
    ],
)
def test_an_array_is_like_numpys(shape: int | tuple[int, ...], dtype: Any) -> None:
    arena, _ = make()
    array, like = arena.empty(shape, dtype), np.empty(shape, dtype)
    assert (array.shape, array.dtype, array.strides) == (like.shape, like.dtype, like.strides)
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert array.flags.aligned
    array[...] = like
    assert array.tobytes() == like.tobytes()


def test_what_is_written_can_be_read_by_descriptor() -> None:
    arena, _ = make()
    first, second = arena.empty(5000, "u1"), arena.empty((300, 300), "f8")
    second[:] = 3.25
    where = spot(arena, second)
    assert where.offset % PAGE == MID_PAGE
    assert where != spot(arena, first)
    fd, nbytes = arena.descriptor(where.segment)
    assert nbytes == SEGMENT_BYTES == os.fstat(fd).st_size
    assert np.frombuffer(os.pread(fd, second.nbytes, where.offset)).tolist() == second.ravel().tolist()


def test_views_are_located_where_they_begin() -> None:
    arena, _ = make()
    array = arena.empty(100_000, "f8")
    base = spot(arena, array)
    assert spot(arena, array[1000:2000]) == (base.segment, base.offset + 8000)
    assert spot(arena, array.view("u1")[7:]) == (base.segment, base.offset + 7)
    assert arena.locate(readable(array)[-1:]) == (base.segment, base.offset + 799_999)


def test_other_memory_is_not_located() -> None:
    arena, _ = make()
    assert arena.locate(memoryview(b"x")) is None
    array = arena.empty(100, "f8")
    for other in (b"x", bytearray(100), np.empty(MIB), array.copy(), make()[0].empty(100, "f8"), b""):
        assert arena.locate(readable(other)) is None


Keep = Callable[[Array], Any]
KEEPS: dict[str, Keep] = {
    "a slice": lambda array: array[10:20],
    "a slice of a slice": lambda array: array[10:200][5:10][1:],
    "another shape": lambda array: array.reshape(2, -1).T,
    "another type": lambda array: array.view("u1")[3:9],
    "a memoryview": lambda array: array.data,
    "a memoryview of a slice": lambda array: readable(array[5:6])[1:2],
    "an array of a memoryview": lambda array: np.frombuffer(array.data, "u1")[4:5],
    "the base": lambda array: array.base,
    "an iterator": lambda array: array.flat,
}


@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
def test_memory_comes_back_when_the_last_view_is_gone(keep: Keep) -> None:
    arena, _ = make()
    first = arena.empty(10_000, "f8")
    where = spot(arena, first)
    kept = keep(first)
    del first
    gc.collect()
    other = arena.empty(10_000, "f8")
    assert spot(arena, other) != where
    del kept
    gc.collect()
    assert spot(arena, arena.empty(10_000, "f8")) == where


def test_what_does_not_fit_gets_a_segment_of_its_own() -> None:
    arena, _ = make()
    small = arena.empty(10, "f8")
    large = arena.empty(SEGMENT_BYTES + 1, "u1")
    assert spot(arena, large) == (2, MID_PAGE)
    assert arena.descriptor(2)[1] == SEGMENT_BYTES + PAGE
    assert spot(arena, arena.empty(10, "f8")).segment == spot(arena, small).segment == 1


def test_segments_without_blocks_are_given_back_except_one() -> None:
    before = mapped()
    arena, forgotten = make()
    arrays = [arena.empty(40 * MIB, "u1") for _ in range(4)]
    assert mapped() - before == 4 * SEGMENT_BYTES
    del arrays[1:]
    gc.collect()
    extra = arena.empty(100, "u1")
    assert forgotten == [3, 4]
    assert mapped() - before == 2 * SEGMENT_BYTES
    del arrays, extra
    gc.collect()
    arena.empty(100, "u1")
    assert forgotten == [3, 4, 2]
    assert mapped() - before == SEGMENT_BYTES


def test_an_array_outlives_its_arena_and_nothing_else_does() -> None:
    before = mapped(), len(os.listdir("/proc/self/fd"))
    arena, _ = make()
    array = arena.empty(1000, "f8")
    array[:] = 7
    arena.empty(1000, "f8")
    del arena
    gc.collect()
    assert array.sum() == 7000
    del array
    gc.collect()
    assert (mapped(), len(os.listdir("/proc/self/fd"))) == before


def test_nobody_can_resize_a_segment() -> None:
    arena, _ = make()
    array = arena.empty(1000, "f8")
    fd, nbytes = arena.descriptor(spot(arena, array).segment)
    for size in (0, nbytes - PAGE, nbytes + PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)


def test_it_has_no_name() -> None:
    before = shm_names()
    arena, _ = make()
    arena.empty(MIB, "u1")[:] = 1
    assert shm_names() == before
    assert os.readlink(f"/proc/self/fd/{arena.descriptor(1)[0]}") == "/memfd:rankmesh-arena (deleted)"


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30 * MIB)), max_size=40))
def test_blocks_never_overlap(steps: list[tuple[int, int]]) -> None:
    """A model: each step replaces one of ten arrays. Marks at both ends of every array stay as they are."""
    arena, _ = make()
    held: dict[int, Array] = {}
    for number, (key, nbytes) in enumerate(steps):
        held.pop(key, None)
        held[key] = array = arena.empty(nbytes, "u1")
        array[0] = array[-1] = number % 251
        held_marks = {key: (held[key][0], held[key][-1]) for key in held}
        assert all(first == last for first, last in held_marks.values())
    spans = sorted((*spot(arena, array), array.nbytes) for array in held.values())
    for (segment, start, nbytes), (next_segment, next_start, _) in pairwise(spans):
        assert segment != next_segment or start + nbytes <= next_start
    held.clear()
    array = arena.empty(SEGMENT_BYTES - PAGE, "u1")
    assert spot(arena, array).offset == MID_PAGE, "free stretches grow together again"


def test_many_threads() -> None:
    arena, _ = make()

    def work(number: int) -> None:
        rng = random.Random(number)
        held: list[Array] = []
        for _ in range(200):
            array = arena.empty(rng.randrange(1, 300 * KIB), "u1")
            array[0] = array[-1] = number
            held.append(array)
            if len(held) > 5:
                gone = held.pop(rng.randrange(5))
                assert gone[0] == gone[-1] == number

    for call in [Call(work, number) for number in range(8)]:
        call.result()

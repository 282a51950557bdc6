"""Pieces of a region, as they are filled: pure functions over memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh import UsageError
from rankmesh.memory.layout import Later, Pages

REGION = 4096


@given(
    length=st.integers(1, 100),
    starts=st.lists(st.integers(0, REGION - 100), min_size=1, max_size=40),
    cuts=st.sets(st.integers(0, 4000), max_size=6),
)
def test_pages_are_filled_as_one_by_one(length: int, starts: list[int], cuts: set[int]) -> None:
    """However the stream is cut, and also where pages overlap: the bytes that come last count."""
    total = length * len(starts)
    data = np.random.default_rng(total).integers(0, 256, total, np.uint8)
    expected, region = np.zeros(REGION, np.uint8), np.zeros(REGION, np.uint8)
    for number, start in enumerate(starts):
        expected[start : start + length] = data[number * length : (number + 1) * length]
    pages = Pages(region.data, np.array(starts, np.intp), length)
    edges = sorted({0, total, *(cut for cut in cuts if cut < total)})
    for at, end in itertools.pairwise(edges):
        pages.put(at, data[at:end].data)
    assert np.array_equal(region, expected)
    assert [view.nbytes for view in pages] == [length] * len(starts)


@given(length=st.integers(1, 100), pages=st.lists(st.integers(0, 39), max_size=60), room=st.integers(0, 500))
def test_pages_at_multiples_of_their_size_are_copied_together(length: int, pages: list[int], room: int) -> None:
    region = np.random.default_rng(length).integers(0, 256, 40 * length + 7, np.uint8)
    run = Pages(region.data, np.array(pages, np.intp) * length, length)
    got, out = b"", memoryview(bytearray(room))
    while nbytes := run.take(len(got), out):
        got += out[:nbytes]
    assert got == (b"".join(run) if room >= length else b"")


def test_pages_elsewhere_are_not() -> None:
    assert Pages(memoryview(bytes(100)), np.array([0, 16, 33], np.intp), 16).take(0, memoryview(bytearray(64))) == 0


def test_views_are_made_when_they_are_asked_for() -> None:
    arrays = [np.full(8, number, np.float64) for number in range(5)]
    later = Later(arrays, 5 * 64, writes=True)
    for number, view in enumerate(later):
        assert view.nbytes == 64
        view[:] = bytes(64)
        assert not arrays[number].any()
    table = np.arange(12, dtype=np.int16).reshape(3, 4)
    assert b"".join(Later([table[:, 1], table[0]], 14, writes=False)) == table[:, 1].tobytes() + table[0].tobytes()


def test_of_arrays_that_are_only_read_views_are_made_one_by_one() -> None:
    """The first frame of a batch of thousands leaves before the last view is there."""
    table = np.arange(12, dtype=np.int16).reshape(3, 4)
    arrays = [
        table[0],
        np.empty((5, 0)),
        np.array(7, np.float32),
        np.array(["2026-11-17"], "datetime64[D]"),
        table,
        np.frombuffer(b"read-only", np.uint8),
    ]
    later = Later(arrays, sum(array.nbytes for array in arrays), writes=False)
    later.check()
    views = iter(later)
    assert next(views) == table[0].view(np.uint8)
    assert later._views is None
    assert b"".join(views) == b"".join(array.tobytes() for array in arrays[1:])
    strided = Later([*arrays, np.asfortranarray(table)], later._nbytes + table.nbytes, writes=False)
    strided.check()
    assert strided._views is None, "of rows there may be millions"
    assert b"".join(strided) == b"".join(array.tobytes() for array in (*arrays, table))


def test_what_is_no_memory_is_found_out_before_the_first_view() -> None:
    for first in (np.zeros(8, np.uint8), np.zeros(7, "V0")):
        for wrong in (np.array([object()]), np.zeros(8, np.uint8)[::-1], np.zeros((4, 4), np.int16)[::2, ::-2]):
            later = Later([first, wrong], first.nbytes + wrong.nbytes, writes=False)
            with pytest.raises(UsageError):
                later.check()


def test_rows_are_read_into_one_by_one_unless_some_are_read_only() -> None:
    table = np.zeros((1000, 4), np.int16)
    later = Later([table[:, 1], table[0]], 2008, writes=True)
    later.check(plain_from=1024)
    assert later._views is None
    for view in later:
        view[:] = b"\x01" * len(view)
    assert (table[:, 1] == 0x0101).all()
    assert (table[0] == 0x0101).all()
    assert not table[1:, 0].any()
    fixed = table[:, 2]
    fixed.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        Later([table[:, 1], fixed], 4000, writes=True).check(plain_from=1024)


@pytest.mark.parametrize(
    "data", [np.array([object()]), np.frombuffer(bytes(8), np.uint8)], ids=["references", "read-only"]
)
def test_memory_that_cannot_be_read_into_is_refused(data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    with pytest.raises(UsageError):
        Later([data], data.nbytes, writes=True).make()

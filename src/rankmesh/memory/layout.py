"""Where bytes lie: the caller's arrays as runs of views, and blocks of a region as pieces of a request. Pure.

An array is walked in C order. Its innermost axes that lie together make one stretch; the axes outside them say where
the stretches begin. The same goes for a numpy-style index into a region: it is put to an array of the region's shape
that has no memory, and the strides of the result tell which bytes are meant.
"""

from __future__ import annotations

import itertools
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from rankmesh.buffers import EMPTY, readable, writable
from rankmesh.errors import OutOfBounds, UsageError
from rankmesh.memory.protocol import Bit

#: (offset, length, stride, count): `count` stretches of `length` bytes of a region, `stride` apart.
Block = tuple[int, int, int, int]


class Stretches(NamedTuple):
    """How an array lies: stretches of `nbytes`, and the axes that say where they begin."""

    nbytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def starts(self) -> list[int]:
        """The beginnings, relative to the first."""
        at = np.zeros(1, np.int64)
        for extent, stride in zip(self.shape, self.strides, strict=True):
            at = (at[:, None] + np.arange(extent, dtype=np.int64) * stride).reshape(-1)
        return at.tolist()

    def blocks(self, offset: int) -> list[Block]:
        """The same in a region, from `offset` on."""
        if not self.shape:
            return [(offset, self.nbytes, 0, 1)]
        outer = Stretches(self.nbytes, self.shape[:-1], self.strides[:-1])
        stride, count = self.strides[-1], self.shape[-1]
        return [(offset + start, self.nbytes, stride, count) for start in outer.starts()]


def stretches(array: np.ndarray[Any, Any]) -> Stretches:
    """Raises UsageError for arrays that run backwards."""
    nbytes = array.itemsize
    axes = [(extent, stride) for extent, stride in zip(array.shape, array.strides, strict=True) if extent != 1]
    while axes and axes[-1][1] == nbytes:
        nbytes *= axes.pop()[0]
    if any(stride < 0 for _, stride in axes):
        raise UsageError("An array with a negative stride cannot be moved as it lies. Pass numpy.ascontiguousarray(x).")
    return Stretches(nbytes, tuple(extent for extent, _ in axes), tuple(stride for _, stride in axes))


class Rows:
    """Views of an array's stretches, made one by one when they are asked for."""

    __slots__ = ("_flat", "_nbytes", "_starts")

    def __init__(self, flat: memoryview, starts: Sequence[int], nbytes: int) -> None:
        self._flat = flat
        self._starts = starts
        self._nbytes = nbytes

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[memoryview]:
        flat, nbytes = self._flat, self._nbytes
        return (flat[start : start + nbytes] for start in self._starts)


Views = tuple[memoryview, ...] | Rows


def local(data: Any, *, writes: bool) -> Views:
    """The caller's memory, as views in C order: nothing is copied. `writes`: it will be written to."""
    try:
        view = memoryview(data)
        if not (writes and view.readonly) and view.format != "O":
            return (view.cast("B"),)
    except (TypeError, ValueError):  # no plain buffer: strided, empty, foreign, or of a dtype without a format
        pass
    if isinstance(data, np.ndarray) and not data.flags.c_contiguous and not data.dtype.hasobject:
        if writes and not data.flags.writeable:
            raise UsageError("This array is read-only and cannot be read into. Pass one that can be written to.")
        return _strided(data)
    return (writable(data) if writes else readable(data),)


def _strided(array: np.ndarray[Any, Any]) -> Views:
    if not array.size:
        return (EMPTY,)
    lie = stretches(array)
    starts = lie.starts()
    # all memory from the array's first byte to its last, as bytes: `as_strided` keeps the array alive
    first = array[(slice(0, 1),) * array.ndim].reshape(1).view(np.uint8)
    flat = np.lib.stride_tricks.as_strided(first, (starts[-1] + lie.nbytes,), (1,))
    return Rows(flat.data, starts, lie.nbytes)


def rows(data: Any, offset: int, stride: int) -> Block:
    """The place of an array's rows (along its first axis), `stride` apart."""
    shape = tuple(getattr(data, "shape", ()))
    if len(shape) < 2:
        raise UsageError(
            f"stride= places the rows of an array of two or more dimensions; this {type(data).__name__} has "
            f"{len(shape)}. Reshape it, or leave stride= out."
        )
    nbytes = data.nbytes if isinstance(data, np.ndarray | memoryview) else np.asarray(data).nbytes
    if not shape[0] or not nbytes:
        return offset, 0, 0, 1
    if stride < 0:
        raise OutOfBounds(f"A stride of {stride} bytes runs backwards.", hint="Pass a stride that is not negative.")
    return offset, nbytes // shape[0], stride, shape[0]


class Indexed(NamedTuple):
    """What a numpy-style index means: blocks of the region, the shape of the result, and whether that is an item."""

    blocks: list[Block]
    shape: tuple[int, ...]
    item: bool


def indexed(index: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Indexed:
    """Raises UsageError for an index that is not basic, OutOfBounds for one outside."""
    parts = index if isinstance(index, tuple) else (index,)
    for part in parts:
        if not (isinstance(part, slice) or part is Ellipsis or _is_int(part)):
            raise UsageError(
                f"A region is indexed by ints, slices and `...`, not by a {type(part).__name__}. Use read_batch() and "
                "write_batch() for anything else."
            )
    # `...` makes the result a view in any case: an item would be read, from memory that is not there
    asked = parts if Ellipsis in parts else (*parts, Ellipsis)
    whole = np.lib.stride_tricks.as_strided(
        np.empty(1, np.dtype((np.void, dtype.itemsize))), shape, _strides(shape, dtype)
    )
    try:
        chosen = whole[asked]
    except IndexError as error:
        raise OutOfBounds(f"{error}; the region has shape {shape}.") from error
    if not chosen.size:
        return Indexed([], chosen.shape, False)
    offset = chosen.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    blocks = stretches(chosen).blocks(offset)
    return Indexed(blocks, chosen.shape, item=not chosen.ndim and asked is not parts)


def _is_int(part: Any) -> bool:
    return hasattr(part, "__index__") and not isinstance(part, np.ndarray | bool | np.bool_)


def _strides(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[int, ...]:
    strides = [dtype.itemsize]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * max(extent, 1))
    return tuple(reversed(strides)) if shape else ()


class Batch:
    """The caller's memory and the region's, piece by piece, in the same order. `outside(what)` makes the error for a
    block that does not lie in the region's `most` bytes."""

    def __init__(self, most: int, outside: Callable[[str], OutOfBounds]) -> None:
        self.parts: list[memoryview] = []
        self.nbytes = 0
        self.strided = False
        self._most = most
        self._outside = outside
        #: (offset, length) of each piece; (offset, length, stride, count) once one is strided.
        self._table: list[int] = []

    def gather(self, pieces: Iterable[Sequence[Any]], *, writes: bool) -> Self:
        """Take the pieces of a batch, all at once where they are plain: thousands are common."""
        pieces = list(pieces)
        data: tuple[Any, ...] = ()
        offsets: tuple[int, ...] = ()
        try:
            data, offsets = zip(*pieces, strict=True)
            parts = [view.cast("B") for each in data if (view := memoryview(each)).format != "O"]
        except (TypeError, ValueError):  # some have strides, or are no plain buffers; or there are none
            parts = []
        if not parts or len(parts) < len(data) or (writes and any(view.readonly for view in parts)):
            for piece in pieces:
                self._take(*piece, writes=writes)
            return self
        sizes = list(map(len, parts))
        try:
            table = np.array([np.frombuffer(array("q", numbers), np.int64) for numbers in (offsets, sizes)])
        except OverflowError:
            raise self._outside(f"pieces at {min(offsets)} … {max(offsets)}") from None
        bad = (table[0] < 0) | (table[0] > self._most - table[1])
        if bad.any():
            at = int(bad.argmax())
            raise self._outside(f"{sizes[at]} bytes at {offsets[at]}")
        self.parts = parts
        self._table = table.T.ravel().tolist()
        self.nbytes = sum(sizes)
        return self

    def _take(self, data: Any, offset: int, stride: int | None = None, *, writes: bool) -> None:
        mine = local(data, writes=writes)
        self.parts += mine
        self.add((offset, sum(map(len, mine)), 0, 1) if stride is None else rows(data, offset, stride))

    def add(self, block: Block) -> None:
        """Take a block of the region; its memory here is in `parts`, or comes later."""
        offset, length, stride, count = block
        if offset < 0 or offset + length + stride * (count - 1) > self._most:
            raise self._outside(f"{count} × {length} bytes at {offset}, {stride} apart,")
        if count != 1 and not self.strided:
            plain = iter(self._table)
            self._table = [number for pair in zip(plain, plain, strict=True) for number in (*pair, 0, 1)]
            self.strided = True
        self._table += block if self.strided else block[:2]
        self.nbytes += length * count

    def blocks(self) -> Iterator[Block]:
        """What was taken, again."""
        table = self._table
        if self.strided:
            return zip(table[0::4], table[1::4], table[2::4], table[3::4], strict=True)
        return zip(table[0::2], table[1::2], itertools.repeat(0), itertools.repeat(1), strict=False)

    @property
    def bits(self) -> int:
        return Bit.BATCH | Bit.STRIDED if self.strided else Bit.BATCH

    def pack(self) -> tuple[int, bytes]:
        """How many pieces, and these as they travel."""
        table = self._table
        return len(table) // (4 if self.strided else 2), struct.pack(f"<{len(table)}Q", *table)

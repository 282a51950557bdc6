"""Where bytes lie: the caller's arrays as runs of views, and blocks of a region as pieces of a request. Pure.

An array is walked in C order. Its innermost axes that lie together make one stretch; the axes outside them say where
the stretches begin. The same goes for a numpy-style index into a region: it is put to an array of the region's shape
that has no memory, and the strides of the result tell which bytes are meant.
"""

from __future__ import annotations

import itertools
import operator
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Self

import numpy as np

from rankmesh.buffers import COPY_IT, EMPTY, FILL_ANOTHER, array_over, readable, writable
from rankmesh.endpoint.lanes import Series
from rankmesh.endpoint.posted import Run
from rankmesh.errors import OutOfBounds, UsageError
from rankmesh.memory.protocol import Bit

#: (offset, length, stride, count): `count` stretches of `length` bytes of a region, `stride` apart.
Block = tuple[int, int, int, int]

#: What to do about an index that runs backwards.
FORWARDS: Final = "Index with positive steps, and turn around what is read, or is to be written."

_dtype = operator.attrgetter("dtype")
_is_contiguous = operator.attrgetter("flags.c_contiguous")
_nbytes = operator.attrgetter("nbytes")
_format = operator.attrgetter("format")
_is_readonly = operator.attrgetter("readonly")
_strides_of = operator.attrgetter("strides")
_is_writable = operator.attrgetter("flags.writeable")
#: Of arrays that need no view: bytes, one beside the other.
_BYTES: Final = {np.dtype(np.uint8)}
_ONE_BY_ONE: Final = {(1,)}


def whole(number: Any, what: str = "An offset") -> int:
    """A caller's number as an int, since numpy's integers overflow. Raises UsageError."""
    try:
        return operator.index(number)
    except TypeError:
        raise UsageError(f"{what} is a whole number, and not {number!r}. Pass an int.") from None


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


def stretches(array: np.ndarray[Any, Any], hint: str) -> Stretches:
    """Raises UsageError for arrays that run backwards; `hint` says what to do about that."""
    nbytes = array.itemsize
    axes = [(extent, stride) for extent, stride in zip(array.shape, array.strides, strict=True) if extent != 1]
    while axes and axes[-1][1] == nbytes:
        nbytes *= axes.pop()[0]
    if any(stride < 0 for _, stride in axes):
        raise UsageError(f"What has a negative stride cannot be moved as it lies. {hint}")
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


class Pages(Run):
    """Pieces of one size in a region, filled and copied without a step in Python for each: pages of a cache."""

    #: It pays from so many on, and for pieces up to this size.
    FEWEST: Final = 8
    LARGEST: Final = 64 * 1024

    __slots__ = ("_flat", "_grid", "_numbers", "_starts", "each")

    def __init__(self, flat: memoryview, starts: np.ndarray[Any, np.dtype[np.intp]], nbytes: int) -> None:
        self._flat = flat
        self._starts = starts
        #: Bytes of a page.
        self.each = nbytes
        #: Where all begin at multiples of their size: the region as pages of that size, and which of them they are.
        self._grid: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self._numbers, within = np.divmod(starts, nbytes)
        if not within.any():
            self._grid = np.frombuffer(flat, np.uint8, len(flat) // nbytes * nbytes).reshape(-1, nbytes)

    def __iter__(self) -> Iterator[memoryview]:
        starts = self._starts
        return map(self._flat.__getitem__, map(slice, starts.tolist(), (starts + self.each).tolist()))

    def put(self, at: int, data: memoryview) -> None:
        """Put `data` at byte `at` of them all. The first and the last page may be met in part."""
        nbytes, flat = self.each, self._flat
        page, within = divmod(at, nbytes)
        if within:
            start = int(self._starts[page]) + within
            first = min(nbytes - within, len(data))
            flat[start : start + first] = data[:first]
            data, page = data[first:], page + 1
        whole, rest = divmod(len(data), nbytes)
        if whole:
            pages = np.frombuffer(data[: whole * nbytes], np.uint8).reshape(whole, nbytes)
            if self._grid is not None:
                self._grid[self._numbers[page : page + whole]] = pages
            else:  # every place where a page could begin, as a row: nothing is copied for it, but it takes longer
                source = np.frombuffer(flat, np.uint8)
                rows = np.lib.stride_tricks.as_strided(source, (len(flat) - nbytes + 1, nbytes), (1, 1))
                rows[self._starts[page : page + whole]] = pages
        if rest:
            start = int(self._starts[page + whole])
            flat[start : start + rest] = data[whole * nbytes :]

    def take(self, at: int, into: memoryview) -> int:
        """Copy whole pages from byte `at` of them all on. 0: they do not lie at multiples of their size, are too large
        for `into`, or there are no more."""
        nbytes = self.each
        page = at // nbytes
        numbers = self._numbers[page : page + len(into) // nbytes]
        if not len(numbers) or self._grid is None:
            return 0
        copied = into[: len(numbers) * nbytes]
        out = np.frombuffer(copied, np.uint8).reshape(-1, nbytes)
        np.take(self._grid, numbers, axis=0, out=out, mode="clip")  # they were checked; other modes copy twice
        return len(copied)


Views = tuple[memoryview, ...] | Rows


def local(data: Any, *, writes: bool) -> Views:
    """The caller's memory, as views in C order: nothing is copied. `writes`: it will be written to."""
    try:
        view = memoryview(data)
        if not (writes and view.readonly) and "O" not in view.format:
            return (view.cast("B"),)
    except (TypeError, ValueError):  # no plain buffer: strided, empty, foreign, or of a dtype without a format
        pass
    if isinstance(data, np.ndarray) or hasattr(data, "__dlpack__"):
        array = array_over(data)
        if not array.flags.c_contiguous and not array.dtype.hasobject:
            if writes and not array.flags.writeable:
                raise UsageError("This array is read-only and cannot be read into. Pass one that can be written to.")
            return _strided(array, FILL_ANOTHER if writes else COPY_IT)
    return (writable(data) if writes else readable(data),)


def _strided(array: np.ndarray[Any, Any], hint: str) -> Views:
    if not array.size:
        return (EMPTY,)
    lie = stretches(array, hint)
    starts = lie.starts()
    # all memory from the array's first byte to its last, as bytes: `as_strided` keeps the array alive
    first = array[(slice(0, 1),) * array.ndim].reshape(1).view(np.uint8)
    flat = np.lib.stride_tricks.as_strided(first, (starts[-1] + lie.nbytes,), (1,))
    return Rows(flat.data, starts, lie.nbytes)


def rows(data: Any, nbytes: int, offset: int, stride: int) -> Block:
    """The place of an array's rows (along its first axis), `nbytes` in all, `stride` apart."""
    shape = tuple(getattr(data, "shape", ()))
    if len(shape) < 2:
        raise UsageError(
            f"stride= places the rows of an array of two or more dimensions; this {type(data).__name__} has "
            f"{len(shape)}. Reshape it, or leave stride= out."
        )
    stride = whole(stride, "A stride")
    if not nbytes:
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
    blocks = stretches(chosen, FORWARDS).blocks(offset)
    return Indexed(blocks, chosen.shape, item=not chosen.ndim and asked is not parts)


def _is_int(part: Any) -> bool:
    return hasattr(part, "__index__") and not isinstance(part, np.ndarray | bool | np.bool_)


def _strides(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[int, ...]:
    strides = [dtype.itemsize]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * max(extent, 1))
    return tuple(reversed(strides)) if shape else ()


class Later:
    """Views of many arrays, which are made when they are asked for and not before: a request that says where their
    bytes lie in the region can leave first, and of what is written the first frame."""

    def __init__(self, data: Sequence[Any], nbytes: int, writes: bool, each: int = 0) -> None:
        """`each`: all have so many of the `nbytes`; 0: not all have as many."""
        self._data = data
        self._nbytes = nbytes
        self._each = each
        self._writes = writes
        self._arrays = {*map(type, data)} == {np.ndarray}
        self._views: list[memoryview] | None = None
        #: There will be a view of each: they are made one by one, by whoever asks for the next.
        self._sure = False
        #: They need none.
        self._are_bytes = False

    def check(self, *, plain_from: int | None = 0) -> None:
        """Raises UsageError for what is no memory, or cannot be written to. No views are made of arrays of bytes that
        have so many each (on average; None: never): these will do instead. Nor are they made now of other arrays, where
        that would take long: there are many, which are only read, or they have rows, of which there may be millions."""
        if self._arrays:
            data, writes = self._data, self._writes
            dtypes = {*map(_dtype, data)}
            plain = plain_from is not None and self._nbytes >= plain_from * len(data) and dtypes == _BYTES
            if plain and {*map(_strides_of, data)} == _ONE_BY_ONE:
                self._are_bytes = not writes or all(map(_is_writable, data))
            elif not any(dtype.hasobject for dtype in dtypes):
                odd = [*itertools.filterfalse(_is_contiguous, data)]
                for each in odd:
                    stretches(each, FILL_ANOTHER if writes else COPY_IT)  # raises for those that run backwards
                self._sure = all(map(_is_writable, data)) if writes and odd else not writes
        if not (self._sure or self._are_bytes):
            self.make()

    def make(self) -> list[memoryview]:
        """Raises UsageError for what is no memory, or cannot be written to."""
        if self._views is None:
            views = self._plain()
            if views is None:
                views = [view for each in self._data for view in local(each, writes=self._writes)]
            if sum(map(len, views)) != self._nbytes:
                raise UsageError("A piece's memory has not as many bytes as its nbytes says. Pass numpy arrays.")
            self._views, self._data = views, ()
        return self._views

    def _plain(self) -> list[memoryview] | None:
        """Where all are contiguous buffers, in few steps."""
        try:
            views = [each.data if self._arrays else memoryview(each) for each in self._data]
            if self._have_objects() if self._arrays else any("O" in each for each in {*map(_format, views)}):
                return None  # or they may: `local` knows
            views = [view.cast("B") for view in views]
        except (TypeError, ValueError):  # strided, empty, foreign, or of a dtype without a format
            return None
        return None if self._writes and any(map(_is_readonly, views)) else views

    def _have_objects(self) -> bool:
        """Of arrays: some hold references."""
        return any(dtype.hasobject for dtype in {*map(_dtype, self._data)})

    def series(self) -> Series | None:
        """They need no views, and are of one size."""
        alike = self._are_bytes and 0 < self._each <= Series.LARGEST
        return Series(self._data, self._each) if alike else None

    def __iter__(self) -> Iterator[Any]:
        """Views, or arrays of bytes, which serve as such: to make a view of each takes as long as to send a page. What
        is made is made when the first is asked for, and not before."""
        return itertools.chain.from_iterable(self._run())

    def _run(self) -> Iterator[Iterable[Any]]:
        yield self._data if self._are_bytes else self._one_by_one() if self._sure else self.make()

    def _one_by_one(self) -> Iterator[memoryview]:
        for each in self._data:
            try:
                view = each.data.cast("B")
            except (TypeError, ValueError):  # empty, or of a dtype without a format
                yield from local(each, writes=False)
            else:
                yield view


class Batch:
    """The caller's memory and the region's, piece by piece, in the same order. `outside(what)` makes the error for a
    block that does not lie in the region's `most` bytes."""

    def __init__(self, most: int, outside: Callable[[str], OutOfBounds]) -> None:
        self._parts: list[memoryview] = []
        #: The caller's memory and (offset, length) of each piece, where all are plain.
        self.later: Later | None = None
        self._pairs: np.ndarray[Any, np.dtype[np.int64]] | None = None
        self.nbytes = 0
        self.strided = False
        self._most = most
        self._outside = outside
        #: (offset, length) of each piece; (offset, length, stride, count) once one is strided.
        self._table: list[int] = []

    def gather(self, pieces: Iterable[Sequence[Any]], *, writes: bool) -> Self:
        """Take the pieces of a batch, all at once where they are plain: thousands are common. Views of them are made
        later, while the request is on its way."""
        pieces = list(pieces)
        count = len(pieces)
        try:
            data, offsets = [each for each, _ in pieces], [offset for _, offset in pieces]
            table = np.empty((count, 2), np.int64)
            table[:, 0] = np.fromiter(
                offsets if {*map(type, offsets)} == {int} else map(operator.index, offsets), np.int64, count
            )
            table[:, 1] = np.fromiter(map(_nbytes, data), np.int64, count)
        except OverflowError:
            raise self._outside("pieces at offsets beyond 64 bits") from None
        except (AttributeError, TypeError, ValueError):  # some have strides, or do not tell their size
            for piece in pieces:
                self._take(*piece, writes=writes)
            return self
        bad = (table[:, 0] < 0) | (table[:, 0] > self._most - table[:, 1])
        if bad.any():
            offset, nbytes = table[int(bad.argmax())]
            raise self._outside(f"{nbytes} bytes at {offset}")
        self._pairs = table
        self.nbytes = int(table[:, 1].sum())
        sizes = table[:, 1]
        self.later = Later(data, self.nbytes, writes, int(sizes[0]) if count and (sizes == sizes[0]).all() else 0)
        return self

    def _take(self, data: Any, offset: int, stride: int | None = None, *, writes: bool) -> None:
        offset = whole(offset)
        mine = local(data, writes=writes)
        self._parts += mine
        nbytes = sum(map(len, mine))
        self.add((offset, nbytes, 0, 1) if stride is None else rows(data, nbytes, offset, stride))

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

    @property
    def parts(self) -> list[memoryview]:
        """The caller's memory."""
        return self._parts if self.later is None else self.later.make()

    def blocks(self) -> Iterator[Block]:
        """What was taken, again."""
        if self._pairs is not None:
            return ((offset, length, 0, 1) for offset, length in self._pairs.tolist())
        table = self._table
        if self.strided:
            return zip(table[0::4], table[1::4], table[2::4], table[3::4], strict=True)
        return zip(table[0::2], table[1::2], itertools.repeat(0), itertools.repeat(1), strict=False)

    @property
    def bits(self) -> int:
        return Bit.BATCH | Bit.STRIDED if self.strided else Bit.BATCH

    def pack(self) -> tuple[int, bytes]:
        """How many pieces, and these as they travel."""
        if self._pairs is not None:
            return len(self._pairs), self._pairs.astype("<u8", copy=False).tobytes()
        table = self._table
        return len(table) // (4 if self.strided else 2), struct.pack(f"<{len(table)}Q", *table)

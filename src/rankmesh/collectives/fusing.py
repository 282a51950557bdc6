"""Lists of arrays as one collective: buckets, and plans over several arrays.

1. Arrays of one kind make a bucket, in the order in which they stand in the list; kinds come in the order of their
   first array. Every bucket is one collective; those of one call are under way at once, and are one Work.
2. An array that is large and contiguous stays where it lies: a message gathers its bytes from all arrays that it
   spans, and what is received goes there. Smaller ones that follow each other are copied into one piece of memory and
   back, which costs less than a view of each.
3. Where one long array would be reduced on the stage, the bucket is copied into one that is, and back: the same bits
   as from that array. A single array needs no copy; beyond _ON_STAGE copies of several cost more than they save.
4. Otherwise the plan is that of one array as long as all together, with its spans cut where an array ends (`refined`):
   the same messages, reduced in the same order, so the same bits as over messages from one long array.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

import numpy as np

from rankmesh.buffers import RecyclingPool, is_tensor
from rankmesh.collectives.arguments import Array, Operand, check_writable, operand, output
from rankmesh.collectives.joined import Joined
from rankmesh.collectives.kinds import Kind
from rankmesh.collectives.plan import Receive, Round, Send, Span
from rankmesh.collectives.reducing import Op, Reduction
from rankmesh.collectives.space import Part, Space, even
from rankmesh.collectives.starting import Job
from rankmesh.config import KIB, MIB
from rankmesh.errors import UsageError

if TYPE_CHECKING:
    from rankmesh.collectives.starting import Options, Running

#: Contiguous arrays of at least so many bytes stay where they lie.
_IN_PLACE: Final = 64 * KIB
#: Up to so many bytes of several arrays are copied for the stage. With 2 and 4 ranks on 2 cores that took a third to
#: two thirds of the time that messages took up to 10 MiB, as long at 40 MiB, and longer from 64 MiB on.
_ON_STAGE: Final = 32 * MIB
#: Up to so many arrays are named one by one in a call's signature.
_NAMED: Final = 8


def is_list(data: object) -> bool:
    """Whether it is a list of arrays, and not one array written as a list of numbers."""
    return isinstance(data, list | tuple) and all(isinstance(one, np.ndarray) or is_tensor(one) for one in data)


def all_reduce(group: Running, arrays: Sequence[Any], op: Op, out: Sequence[Any] | None, options: Options) -> Any:
    """See Collectives.all_reduce."""
    given = operands(arrays, "all_reduce")
    targets = outputs(out, given)
    for target, one in zip(targets, given, strict=True):
        if target is not one:
            np.copyto(target.array, one.array)
    buckets = bucketed(targets)
    reductions = [Reduction(op, bucket.kind, group.size) for bucket in buckets]  # refused before anything is sent

    def start(bucket: Bucket, reduction: Reduction, options: Options) -> Any:
        chosen = group._choose("all_reduce", bucket.nbytes, options)
        whole = chosen.staged and bucket.may_be_whole and group._may_be_staged(_job(bucket.arrays[0]), reduction)
        pieces = [bucket.whole(group._context.hub.large_pool)] if whole else bucket.pieces(filled=True)
        rounds, space = _laid_out(chosen.rounds, chosen.blocks, pieces)

        def conclude() -> list[Any]:
            for piece in pieces:
                reduction.finish(piece.flat)
                piece.spread()
            return [target.value for target in targets]

        job = _job(pieces[0].flat) if whole else None
        return group._run(chosen._replace(rounds=rounds), space, conclude, options, bucket.what, reduction, job=job)

    each = _each(options, buckets)
    return _together([start(*one, each) for one in zip(buckets, reductions, strict=True)], options)


def _job(array: Array) -> Job:
    """Of an all_reduce in place."""
    return Job("all_reduce", array, array, array.size)


def broadcast(group: Running, arrays: Sequence[Any], root: int, options: Options) -> Any:
    """See Collectives.broadcast."""
    given = operands(arrays, "broadcast")
    if group.rank != root:
        outputs(None, given, instead="")

    def start(bucket: Bucket, options: Options) -> Any:
        chosen = group._choose("broadcast", bucket.nbytes, options, root)
        pieces = bucket.pieces(filled=group.rank == root)
        rounds, space = _laid_out(chosen.rounds, chosen.blocks, pieces)

        def conclude() -> list[Any]:
            if group.rank != root:
                for piece in pieces:
                    piece.spread()
            return [one.value for one in given]

        return group._run(chosen._replace(rounds=rounds), space, conclude, options, bucket.what, root=root)

    buckets = bucketed(given)
    each = _each(options, buckets)
    return _together([start(bucket, each) for bucket in buckets], options)


def _each(options: Options, buckets: list[Bucket]) -> Options:
    return options if len(buckets) == 1 else options._replace(async_op=True)


def _together(started: list[Any], options: Options) -> Any:
    """The collectives of one call, each of which returns the whole result."""
    if len(started) == 1:
        return started[0]
    joined = Joined(started)
    return joined if options.async_op else joined.result()


# ---------------------------------------------------------------------- arrays


def operands(arrays: Sequence[Any], name: str) -> list[Operand]:
    if not arrays:
        raise UsageError(f"{name} was given a list without arrays. Pass at least one.")
    return [operand(array) for array in arrays]


def outputs(out: Sequence[Any] | None, given: list[Operand], instead: str = ", or out=") -> list[Operand]:
    """Where the results go: they may be of any strides, but can be written to. `instead`: see flat_output."""
    if out is not None and len(out) != len(given):
        raise UsageError(f"out has {len(out)} arrays for {len(given)}. Pass one for each.")
    targets = given if out is None else [output(o, g.array.shape, g.kind) for o, g in zip(out, given, strict=True)]
    for target in targets:
        check_writable(target.array, *(("out",) if out is not None else ("An array of the list", instead)))
    return targets


class Piece(NamedTuple):
    """A flat array that a bucket's plan runs over, and the arrays whose elements are in it by copy."""

    flat: Array
    copied: list[Array]

    def spread(self) -> None:
        """Back to where they belong."""
        at = 0
        for array in self.copied:
            np.copyto(array, self.flat[at : at + array.size].reshape(array.shape))
            at += array.size


class Bucket(NamedTuple):
    """Arrays of one kind."""

    kind: Kind
    arrays: list[Array]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @property
    def what(self) -> str:
        """How ranks call it: lists that are cut differently differ."""
        sizes = [array.size for array in self.arrays]
        each = str(sizes) if len(sizes) <= _NAMED else f"{len(sizes)} arrays, sizes {crc32(repr(sizes).encode()):08x}"
        return f"{sum(sizes)} {self.kind.name} in {each}"

    @property
    def may_be_whole(self) -> bool:
        """All ranks must find the same: it depends on nothing but sizes, which `what` says."""
        return self.nbytes <= _ON_STAGE or sum(array.size > 0 for array in self.arrays) == 1

    def whole(self, pool: RecyclingPool) -> Piece:
        """All in one piece, with what they hold now: where it lies, if it is a single one."""
        arrays = [array for array in self.arrays if array.size]
        if len(arrays) == 1 and arrays[0].flags.c_contiguous:
            return Piece(arrays[0].reshape(-1), [])
        flat: Array = np.frombuffer(pool.take(self.nbytes), self.kind.dtype)
        if arrays:
            np.concatenate([array.reshape(-1) for array in arrays], out=flat)
        return Piece(flat, arrays)

    def pieces(self, filled: bool) -> list[Piece]:
        """`filled`: with what the arrays hold now."""
        pieces: list[Piece] = []
        small: list[Array] = []

        def flush() -> None:
            if small:
                size = sum(array.size for array in small)
                flat = np.empty(size, self.kind.dtype)
                piece = Piece(flat, small.copy())
                if filled:
                    np.concatenate([array.reshape(-1) for array in small], out=flat)
                pieces.append(piece)
                small.clear()

        for array in self.arrays:
            if array.nbytes >= _IN_PLACE and array.flags.c_contiguous:
                flush()
                pieces.append(Piece(array.reshape(-1), []))
            elif array.size:
                small.append(array)
        flush()
        return pieces


def bucketed(given: list[Operand]) -> list[Bucket]:
    buckets: dict[tuple[type[Kind], str], Bucket] = {}
    for one in given:
        key = type(one.kind), one.kind.name
        buckets.setdefault(key, Bucket(one.kind, [])).arrays.append(one.array)
    return list(buckets.values())


# ---------------------------------------------------------------------- plans


def _laid_out(rounds: Iterable[Round], blocks: int, pieces: list[Piece]) -> tuple[tuple[Round, ...], Space]:
    lengths = [len(piece.flat) for piece in pieces]
    counts = even(sum(lengths), blocks)
    if len(pieces) == 1:
        return tuple(rounds), Space(Part(pieces[0].flat, counts))
    cut, parts = refined(rounds, counts, lengths)
    return cut, Space(*(Part(piece.flat, part) for piece, part in zip(pieces, parts, strict=True)))


def refined(
    rounds: Iterable[Round], counts: Sequence[int], lengths: Sequence[int]
) -> tuple[tuple[Round, ...], list[list[int]]]:
    """A plan over blocks of `counts` elements, as one over arrays of `lengths`: its rounds, and the counts of each
    array's blocks. Pure. The plan makes no copies."""
    ends, edges = [0, *accumulate(counts)], [0, *accumulate(lengths)]
    cuts = sorted({*ends, *edges})
    index = {cut: at for at, cut in enumerate(cuts)}

    def fine(span: Span) -> list[Span]:
        """Blocks between two cuts, no span beyond the end of an array."""
        first, last = ends[span[0]], ends[span[1]]
        inside = [edge for edge in edges if first < edge < last]
        bounds = [index[cut] for cut in (first, *inside, last)]
        return [(low, high) for low, high in pairwise(bounds) if low < high]

    def every(spans: tuple[Span, ...]) -> tuple[Span, ...]:
        return tuple(one for span in spans for one in fine(span))

    made = []
    for sends, receives, copies in rounds:
        assert not copies, "a plan over one array needs no copies"
        made.append(
            Round(
                tuple(Send(to, every(spans)) for to, spans in sends),
                tuple(Receive(source, every(spans), into) for source, spans, into in receives),
            )
        )
    within = [cuts[index[low] : index[high] + 1] for low, high in pairwise(edges)]
    return tuple(made), [[high - low for low, high in pairwise(here)] for here in within]

"""Plans for ranks that share memory, as data. Pure: no I/O, no clock, no arrays.

Idea. Every rank has slots that it alone writes and the others read (stage.py). A collective goes in chunks, and a chunk
in up to three steps, each of which every rank takes at its own pace:

1. stage:   copy what others need of this rank's array into a slot, and what it keeps of that to its place.
2. combine: when the others have staged, reduce this rank's part straight from everybody's slots.
3. fetch:   copy what this rank needs out of the others' slots: what they staged, or what they combined.

Cost, for B bytes and n ranks, in bytes that one rank copies or reduces: all_reduce `whole` B staged and (n-1)B reduced,
with one wait; `slices` B(n-1)/n staged, the same reduced, B/n put where others see it and B(n-1)/n fetched, with two
waits. broadcast B, all_gather, gather, scatter and all_to_all what they move, once in and once out. No message is sent.

A part is reduced in the order of ranks, whoever does it: bit-identical on all ranks, and for any number of chunks.

Offsets and counts are elements. `source` is what a rank brings, `target` what it gets; they do not overlap, except that
in all_reduce, reduce and broadcast they may be the same array, and in all_gather the source may be its own place in the
target. In a call of one chunk most may overlap as they like (`Recipe.may_overlap`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Final, NamedTuple

from rankmesh.collectives.space import even


class Move(NamedTuple):
    """source[start:stop] into the slot, or the target, at `at`."""

    start: int
    stop: int
    at: int


class Fetch(NamedTuple):
    """`rank`'s slot at `at` into target[start:stop]."""

    rank: int
    at: int
    start: int
    stop: int


class Combine(NamedTuple):
    """Reduce what all ranks have of one part: rank q's lies in its slot at `at[q]`; this rank's is source[start:stop],
    or in its slot like the others' (`staged`). The result goes to target[into:…] (-1: nowhere), and to this rank's slot
    at `publish` (-1: nowhere)."""

    start: int
    stop: int
    at: tuple[int, ...]
    staged: bool
    into: int
    publish: int


class Chunk(NamedTuple):
    stage: tuple[Move, ...] = ()
    #: Whose staging is waited for before what follows.
    staged_by: tuple[int, ...] = ()
    combine: Combine | None = None
    #: Whose combining is waited for before the fetches.
    combined_by: tuple[int, ...] = ()
    fetch: tuple[Fetch, ...] = ()
    #: Nobody waits for this rank to have staged.
    silent: bool = False
    #: What goes to the target from where it is staged: while it is in the cache.
    keep: Move | None = None


class Case(NamedTuple):
    """What a plan is made of. `part`: elements of one rank's part (of all, for all_reduce, reduce and broadcast).
    `room`: elements that a slot holds."""

    rank: int
    size: int
    root: int
    part: int
    room: int

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.size) if rank != self.rank)


Chunks = Iterator[Chunk]


def _stretches(count: int, width: int) -> Iterator[tuple[int, int]]:
    """At least one: ranks wait for each other also where there is nothing to move."""
    for start in range(0, max(count, 1), width):
        yield start, min(start + width, count)


def barrier(case: Case) -> Chunks:
    yield Chunk(staged_by=case.others)


def broadcast(case: Case) -> Chunks:
    for start, stop in _stretches(case.part, case.room):
        if case.rank == case.root:
            yield Chunk((Move(start, stop, 0),))
        else:
            yield Chunk(staged_by=(case.root,), fetch=(Fetch(case.root, 0, start, stop),), silent=True)


def all_reduce_whole(case: Case) -> Chunks:
    """The first two ranks take their own from the source, also where the result takes its place: it is read by the
    first operation. It was just staged, and yet to read it from there takes a tenth longer."""
    staged = case.rank > 1
    for start, stop in _stretches(case.part, case.room):
        combine = Combine(start, stop, (0,) * case.size, staged, start, -1)
        yield Chunk((Move(start, stop, 0),), case.others, combine)


def _sliced(case: Case, fetches: bool) -> Chunks:
    """A slot holds the chunk as the array does, so that everything is at its place in it."""
    for start, stop in _stretches(case.part, case.room):
        bounds = [start]
        for length in even(stop - start, case.size):
            bounds.append(bounds[-1] + length)
        low, high = bounds[case.rank], bounds[case.rank + 1]
        stage = tuple(Move(a, b, a - start) for a, b in ((start, low), (high, stop)) if b > a)
        combine = Combine(low, high, (low - start,) * case.size, False, low if fetches else -1, low - start)
        fetch = tuple(Fetch(q, bounds[q] - start, bounds[q], bounds[q + 1]) for q in case.others) if fetches else ()
        yield Chunk(stage, case.others, combine, case.others if fetches else (), fetch)


def all_reduce_slices(case: Case) -> Chunks:
    return _sliced(case, True)


def reduce(case: Case) -> Chunks:
    return _sliced(case, case.rank == case.root)


def all_gather(case: Case) -> Chunks:
    for start, stop in _stretches(case.part, case.room):
        fetch = tuple(Fetch(q, 0, q * case.part + start, q * case.part + stop) for q in case.others)
        keep = Move(start, stop, case.rank * case.part + start)
        yield Chunk((Move(start, stop, 0),), case.others, fetch=fetch, keep=keep)


def gather(case: Case) -> Chunks:
    for start, stop in _stretches(case.part, case.room):
        if case.rank != case.root:
            yield Chunk((Move(start, stop, 0),))
        else:
            fetch = tuple(Fetch(q, 0, q * case.part + start, q * case.part + stop) for q in case.others)
            yield Chunk(staged_by=case.others, fetch=fetch, silent=True)


def _place(owner: int, reader: int, width: int) -> int:
    """Where in `owner`'s slot the part for `reader` lies: all but the owner's own, side by side."""
    return (reader if reader < owner else reader - 1) * width


def _parts(case: Case, start: int, stop: int) -> tuple[Move, ...]:
    """Of every other rank's part, this stretch. Whole parts lie side by side in the source as in the slot: those before
    this rank's own move as one, and so do those behind it."""
    width, count, rank = stop - start, case.part, case.rank
    if width < count:
        return tuple(Move(q * count + start, q * count + stop, _place(rank, q, width)) for q in case.others)
    sides = (Move(0, rank * count, 0), Move((rank + 1) * count, case.size * count, rank * count))
    return tuple(move for move in sides if move.stop > move.start)


def _part_stretches(case: Case) -> Iterator[tuple[int, int]]:
    return _stretches(case.part, max(case.room // max(case.size - 1, 1), 1))


def scatter(case: Case) -> Chunks:
    for start, stop in _part_stretches(case):
        if case.rank == case.root:
            yield Chunk(_parts(case, start, stop))
        else:
            at = _place(case.root, case.rank, stop - start)
            yield Chunk(staged_by=(case.root,), fetch=(Fetch(case.root, at, start, stop),), silent=True)


def all_to_all(case: Case) -> Chunks:
    for start, stop in _part_stretches(case):
        fetch = tuple(
            Fetch(q, _place(q, case.rank, stop - start), q * case.part + start, q * case.part + stop)
            for q in case.others
        )
        own = case.rank * case.part + start
        keep = Move(own, own + stop - start, own)
        yield Chunk(_parts(case, start, stop), case.others, fetch=fetch, keep=keep)


def reduce_scatter(case: Case) -> Chunks:
    for start, stop in _part_stretches(case):
        at = tuple(0 if q == case.rank else _place(q, case.rank, stop - start) for q in range(case.size))
        own = case.rank * case.part
        combine = Combine(own + start, own + stop, at, False, start, -1)
        yield Chunk(_parts(case, start, stop), case.others, combine)


MAKERS: Final[dict[str, Callable[[Case], Chunks]]] = {
    "barrier": barrier,
    "broadcast": broadcast,
    "reduce": reduce,
    "all_reduce whole": all_reduce_whole,
    "all_reduce slices": all_reduce_slices,
    "all_gather": all_gather,
    "gather": gather,
    "scatter": scatter,
    "all_to_all": all_to_all,
    "reduce_scatter": reduce_scatter,
}


@lru_cache(maxsize=1024)
def chunks(name: str, case: Case) -> tuple[Chunk, ...]:
    """The plan, made once."""
    return tuple(MAKERS[name](case))

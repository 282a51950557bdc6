"""Large calls on the stage without slots: each rank says where its arrays lie, and the others read them there
(transport/pulling.py), with one copy instead of two, and a wait per call instead of one per chunk.

    publish   say in the words of the slot where source and target lie; the slot's memory is this rank's to use
    keep      copy what this rank itself gets of its source
    agree     whether all have said that theirs lies on large pages, or the leader that the call is pulled (leading.py);
              if not, it goes through slots after all
    pull      copy what others have for this rank in their sources
    reduce    this rank's part, of all sources: the others' are pulled into the slot, which stays in the cache
    combined  say that this rank's part of its target is reduced
    fetch     copy the others' parts out of their targets
    hold      wait until all others are done: then arrays that they read are the caller's again

In place, a rank's own part is written when it is reduced, which only its owner reads in the sources; any other part
when it is fetched, which is after its owner has reduced it. Parts are reduced in the order of ranks, as on slots.

Who gives a call up takes its words back before its caller can touch the arrays (`withdraw`). Who has copied looks at
the word afterwards: if it is still there, nothing was changed under the copy. Otherwise the call stalls, like any whose
partner does not go on, and agent.py finds out why. What others read stays as it is until they are done: a source that
overlaps with the target is copied before, unless it lies just where it is kept; and so is what they cannot reach.

Where the kernel is slow to find small pages (Copying.SLOWLY), slots are faster unless arrays lie on large ones. Which
they do is not known by their size (numpy asks for large pages from 4 MiB on, torch does not, and memory that was freed
may be of either kind), so each rank looks at its own, once per array, and says so when it publishes.

Of a broadcast, the root copies into slots while the other copies out of them. Where the kernel is quick, that is faster
than to have the other copy alone. Where it is not, it is not worth a second core's time, which may be no more than half
of one (hyperthreads).

The plans are data, as in staging.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from rankmesh.buffers import copy
from rankmesh.collectives.passage import strays
from rankmesh.collectives.space import even
from rankmesh.collectives.stage import CHUNK_BITS, COMBINED, DONE, SLOTS, STAGED
from rankmesh.collectives.staging import Case
from rankmesh.config import KIB, MIB
from rankmesh.transport.pulling import Copying, on_large_pages

if TYPE_CHECKING:
    from rankmesh.collectives.kinds import Array, Operation
    from rankmesh.collectives.stage import Stage

_NEVER: Final = sys.maxsize


class _Pays(NamedTuple):
    """Of up to so many ranks pulling pays from so many bytes of a rank's part on."""

    ranks: int
    #: Where the kernel copies quickly (Copying).
    quickly: int
    #: Where it copies slowly, if arrays lie on large pages.
    slowly: int


#: Below, two copies through the cache are faster than a system call that has to find the other's pages. A copy by the
#: kernel takes a third longer than our own, where it is quick: of all_to_all it spares one for each that is made, of
#: the others a single one, whatever the number of ranks. Of reduce_scatter and the rest it spares none. Where it is
#: slow, only what lies on large pages is pulled, as arrays of 4 MiB do; and on AMD's Zen 5 numpy's additions take up to
#: ten times as long where their result goes to lines that another core has read, as it does where that is fetched.
_PAYS: Final = {
    "all_gather": (_Pays(3, 256 * KIB, 4 * MIB), _Pays(sys.maxsize, 2 * MIB, 4 * MIB)),
    "all_to_all": (_Pays(2, 256 * KIB, 2 * MIB), _Pays(sys.maxsize, 256 * KIB, MIB)),
    "all_reduce": (_Pays(3, MIB, _NEVER),),
    "broadcast": (_Pays(2, _NEVER, 4 * MIB),),
}
#: What is copied in one step: nobody else has the engine meanwhile.
PIECE_BYTES: Final = 4 * MIB

#: What a step is.
PUBLISH, KEEP, PULL, REDUCE, SAY_COMBINED, FETCH, HOLD, AGREE = range(8)


class Act(NamedTuple):
    """A step, which waits for what `ranks` say, or for the slot.

    PUBLISH: the source's own place in the target is from element `at` on (-1: nowhere). `stop`: elements that others
    read of it.
    KEEP: source[start:stop] into target[at:…].
    PULL: the source of the one rank, from element `at` on, into target[start:stop].
    REDUCE: all sources' [start:stop] into target[at:…].
    FETCH: the target of the one rank, from element `at` on, into target[start:stop].
    """

    what: int
    ranks: tuple[int, ...] = ()
    at: int = 0
    start: int = 0
    stop: int = 0
    #: Nothing is read from others afterwards.
    last: bool = False


#: The words that a step waits for, by slot.
_WORDS: Final = {AGREE: STAGED, PULL: STAGED, REDUCE: STAGED, FETCH: COMBINED, HOLD: (DONE,) * SLOTS}
#: Of the word that says where a source lies: it, and the target if that is fetched, lie on large pages. No address has
#: this bit.
_ON_LARGE_PAGES: Final = 1 << 63


class Sizes(NamedTuple):
    """Elements that one step copies, and that one reduces."""

    copied: int
    reduced: int


def sizes(itemsize: int, ranks: int, slot_bytes: int) -> Sizes:
    """Of more than two ranks, what was reduced so far is in the slot beside what comes next."""
    return Sizes(PIECE_BYTES // itemsize, slot_bytes // itemsize // (1 if ranks == 2 else 2))


def _pieces(start: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    for begin in range(start, stop, width):
        yield begin, min(begin + width, stop)


def _following(case: Case) -> Iterator[int]:
    """The other ranks from the next one on: so that not all read the same one's."""
    for distance in range(1, case.size):
        yield (case.rank + distance) % case.size


def _exchange(case: Case, width: int, at: int) -> Iterator[Act]:
    """Keep a part, and pull one of each of the others': from `at` on in the source."""
    count = case.part
    for start, stop in _pieces(0, count, width):
        yield Act(KEEP, (), case.rank * count + start, at + start, at + stop)
    for rank in _following(case):
        for start, stop in _pieces(0, count, width):
            yield Act(PULL, (rank,), at + start, rank * count + start, rank * count + stop)


def all_gather(case: Case, width: Sizes) -> Iterator[Act]:
    yield Act(PUBLISH, at=case.rank * case.part, stop=case.part)
    yield from _exchange(case, width.copied, 0)


def all_to_all(case: Case, width: Sizes) -> Iterator[Act]:
    yield Act(PUBLISH, at=-1, stop=case.size * case.part)
    yield from _exchange(case, width.copied, case.rank * case.part)


def all_reduce(case: Case, width: Sizes) -> Iterator[Act]:
    yield Act(PUBLISH, stop=case.part)
    bounds = [0, *accumulate(even(case.part, case.size))]
    for start, stop in _pieces(bounds[case.rank], bounds[case.rank + 1], width.reduced):
        yield Act(REDUCE, case.others, start, start, stop)
    yield Act(SAY_COMBINED)
    for rank in _following(case):
        for start, stop in _pieces(bounds[rank], bounds[rank + 1], width.copied):
            yield Act(FETCH, (rank,), start, start, stop)


def reduce_scatter(case: Case, width: Sizes) -> Iterator[Act]:
    yield Act(PUBLISH, at=-1, stop=case.size * case.part)
    own = case.rank * case.part
    for start, stop in _pieces(own, own + case.part, width.reduced):
        yield Act(REDUCE, case.others, start - own, start, stop)


def broadcast(case: Case, width: Sizes) -> Iterator[Act]:
    """Source and target are one array."""
    yield Act(PUBLISH, stop=case.part if case.rank == case.root else 0)
    if case.rank != case.root:
        for start, stop in _pieces(0, case.part, width.copied):
            yield Act(PULL, (case.root,), start, start, stop)


MAKERS: Final[dict[str, Callable[[Case, Sizes], Iterator[Act]]]] = {
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "broadcast": broadcast,
}


def pays(name: str, size: int, nbytes: int) -> tuple[Copying, ...]:
    """How the kernel may copy for pulling to pay. `nbytes`: of the larger of source and target."""
    row = next((row for row in _PAYS.get(name, ()) if size <= row.ranks), None)
    if row is None:
        return ()
    bounds = {Copying.SLOWLY: row.slowly, Copying.QUICKLY: row.quickly}
    return tuple(copies for copies, least in bounds.items() if nbytes >= least * size)


@lru_cache(maxsize=1024)
def acts(name: str, case: Case, width: Sizes) -> tuple[Act, ...]:
    """The plan, made once. There is something in every part."""
    *but_one, last = MAKERS[name](case, width)
    plan = (*but_one, last._replace(last=True))
    return (*plan, Act(HOLD, case.others)) if plan[0].stop else plan


class _Call(NamedTuple):
    serial: int
    #: Behind all that other ways of the same call could have.
    last: int
    slot: int
    #: Lives as long as others may read it.
    source: Array
    target: Array
    #: Where they lie.
    source_at: int
    target_at: int


def _call(sequence: int, slot: int, source: Array, target: Array) -> _Call:
    serial, last = sequence + 1 << CHUNK_BITS, (sequence + 2 << CHUNK_BITS) - 1
    return _Call(serial, last, slot % SLOTS, source, target, source.ctypes.data, target.ctypes.data)


class Pulling:
    """All calls of one recipe in one group. As an Express it takes their steps as long as nobody is late. Methods need
    the engine's lock."""

    def __init__(
        self,
        stage: Stage,
        acts: Sequence[Act],
        digest: int,
        apply: Operation | None,
        source: Array,
        leader: int = -1,
        chunks: int = 1,
    ) -> None:
        """`source`: as those of its calls are. `leader`: it says whether they are pulled (-1: they are). `chunks`: as
        many as they have where they go through slots instead (leading.py)."""
        #: Ranks look at each other's pages before.
        self._looks = leader < 0 and stage.copying == Copying.SLOWLY
        whose = range(len(stage.words)) if self._looks else (leader,) if leader >= 0 else ()
        ranks = tuple(rank for rank in whose if rank != stage.rank)
        alone = next(at for at, act in enumerate(acts) if act.ranks)
        self.acts = (*acts[:alone], *((Act(AGREE, ranks),) if ranks else ()), *acts[alone:])
        self.steps = len(self.acts)
        self._chunks = chunks
        #: Others read the source; and the target, too.
        self._is_read = acts[0].stop > 0
        self._is_fetched = any(act.what == FETCH for act in acts)
        self.stage = stage
        self.digest = digest
        self._apply = apply
        self._slots = stage.slots(source.dtype)[stage.rank]
        self._slots_at = [slot.ctypes.data for slot in self._slots]
        #: Where arrays of the last call lay, which others could read; and _ON_LARGE_PAGES, if they did.
        self._reached: tuple[int, ...] = ()
        self._pages = 0
        stage.express.add(self)

    def close(self) -> None:
        """The stage is no more: let go of its memory."""
        self._slots = []

    def run(self, sequence: int, source: Array, target: Array) -> int:
        """How many steps were taken."""
        call = _call(sequence, sequence * self._chunks, source, target)
        if not (self.stage.free(call.slot) and self._stays(call) and self._is_reached(call)):
            return 0
        taken, contenders = 0, self.stage.contenders
        for act in self.acts:
            if (act.ranks and not self.ready(act, call, patient=True)) or not self.take(act, call):
                break
            if act.what == AGREE and not self.agreed(call):
                break
            taken += 1
            if contenders:
                break
        return taken

    def wanted(self, act: Act, call: _Call) -> tuple[int, int, Sequence[int]]:
        """What the step waits for: a word, up to which serial, of these ranks (none: of nobody)."""
        if act.what == PUBLISH:
            return DONE, self.stage.held(call.slot), self.stage.behind(call.slot)
        return (_WORDS[act.what][call.slot], call.serial, act.ranks) if act.ranks else (DONE, 0, ())

    def ready(self, act: Act, call: _Call, patient: bool = False) -> bool:
        """What the step waits for is there, or comes within a moment where one is `patient`."""
        what, ranks, *_ = act
        if what == PUBLISH:
            return self.stage.free(call.slot)
        if ranks:
            word, serial, words = _WORDS[what][call.slot], call.serial, self.stage.words
            for rank in ranks:
                its = words[rank]
                if its[word] < serial and not (patient and self.stage.comes(its, word, serial)):
                    return False
                if what != HOLD and (its[word] != serial or its[word + 1] != self.digest):
                    return False
        return True

    def take(self, act: Act, call: _Call) -> bool:
        """Take a step that is ready. False: somebody's memory could not be read: it is gone, or gave up."""
        what, ranks, at, start, stop, last = act
        itemsize = call.target.itemsize
        if what == PUBLISH:
            source = call.source_at | self._pages
            self.stage.publish(call.slot, call.serial, self.digest, source, call.target_at)
        elif what == KEEP:
            if call.source_at + start * itemsize != call.target_at + at * itemsize:  # else it is there
                copy(call.target[at : at + stop - start], call.source[start:stop])
        elif what == REDUCE:
            if not self._reduce(call, at, start, stop):
                return False
        elif what == SAY_COMBINED:
            self.stage.combined(call.slot, call.serial, self.digest)
        elif what not in (HOLD, AGREE):
            into, nbytes = call.target_at + start * itemsize, (stop - start) * itemsize
            if not self._pull(call, ranks[0], _WORDS[what][call.slot], what == FETCH, into, at * itemsize, nbytes):
                return False
        if last:
            self.stage.done(call.last)
        return True

    def _pull(self, call: _Call, rank: int, word: int, of_target: bool, into: int, at: int, nbytes: int) -> bool:
        """From byte `at` on of its source or target. `word` is its promise that it stays as it is."""
        stage = self.stage
        its = stage.words[rank]
        address = its[STAGED[call.slot] + (3 if of_target else 2)] & ~_ON_LARGE_PAGES
        return stage.pullers[rank].pull(into, address + at, nbytes) and its[word] == call.serial

    def _reduce(self, call: _Call, at: int, start: int, stop: int) -> bool:
        """In the order of ranks, whoever does it. In the slot one is reduced while the next comes beside it."""
        apply, slot, count, itemsize = self._apply, call.slot, stop - start, call.source.itemsize
        assert apply is not None, "a recipe that reduces has an operation"
        room, own, size = self._slots[slot], self.stage.rank, len(self.stage.words)
        left: Array | None = None
        first = room[:count]
        for rank in range(size):
            if rank == own:
                part = call.source[start:stop]
            else:
                beside = 0 if left is not first else len(room) // 2
                part = first if beside == 0 else room[beside : beside + count]
                into = self._slots_at[slot] + beside * itemsize
                if not self._pull(call, rank, STAGED[slot], False, into, start * itemsize, count * itemsize):
                    return False
            if left is None:
                left = part
            else:
                result = call.target[at : at + count] if rank == size - 1 else first
                apply(left, part, result)
                left = result
        return True

    def _stays(self, call: _Call) -> bool:
        """Nothing of the source is written before others have read it."""
        source, target, address, into = call.source, call.target, call.source_at, call.target_at
        if address >= into + target.nbytes or into >= address + source.nbytes:
            return True
        own_place: int = self.acts[0].at
        return own_place >= 0 and address == into + own_place * source.itemsize

    def _is_reached(self, call: _Call) -> bool:
        """Others can read what they read where it lies."""
        places = (call.source_at, call.target_at) if self._is_fetched else (call.source_at,)
        if places != self._reached:
            puller = self.stage.pullers[self.stage.rank]
            self._reached = places if all(map(puller.reaches, places)) else ()
            if self._looks:
                arrays = (call.source, call.target) if self._is_fetched else (call.source,)
                looks = (on_large_pages(at, array.nbytes) for at, array in zip(places, arrays, strict=True))
                self._pages = 0 if self._is_read and not all(looks) else _ON_LARGE_PAGES
        return self._reached == places

    def agreed(self, call: _Call) -> bool:
        """Nobody has a reason why it should not be pulled."""
        word = STAGED[call.slot] + 2
        return not self._looks or all(its[word] & _ON_LARGE_PAGES for its in self.stage.words)

    def call(self, sequence: int, source: Array, target: Array, taken: int) -> _Call:
        """Of whose steps so many were taken; if none, one whose arrays can be published: copies, where they must be."""
        begin = partial(_call, sequence, sequence * self._chunks)
        call = begin(source, target)
        if taken or (self._stays(call) and self._is_reached(call)):
            return call
        if call.source_at == call.target_at and source.nbytes == target.nbytes:
            both = source.copy()
            return begin(both, both)
        return begin(source.copy(), np.empty_like(target) if self._is_fetched else target)


class PulledPassage:
    """A call's way over the stage, as Passage is one. Methods need the engine's lock."""

    __slots__ = ("_at", "_call", "_failed", "_pulling", "_sequence", "_target", "refused")

    def __init__(self, pulling: Pulling, sequence: int, source: Array, target: Array, taken: int) -> None:
        """`taken`: so many steps were taken before."""
        #: It is to go through slots instead: not all arrays lie on large pages.
        self.refused = False
        self._pulling = pulling
        self._sequence = sequence
        self._at = taken
        #: Where the result belongs, which need not be where others read it.
        self._target = target
        self._call = pulling.call(sequence, source, target, taken)
        self._failed = False

    @property
    def ended(self) -> bool:
        return self._at == self._pulling.steps

    def may_step(self) -> bool:
        """What the next step waits for is there, or there is none."""
        return self.ended or (not self._failed and self._pulling.ready(self._pulling.acts[self._at], self._call))

    def step(self) -> bool:
        """Take the next step, if there is what it waits for."""
        if not self.may_step():
            return False
        act = self._pulling.acts[self._at]
        self.refused = act.what == AGREE and not self._pulling.agreed(self._call)
        if self.refused:
            return False
        self._failed = not self._pulling.take(act, self._call)
        if not self._failed:
            self._at += 1
            if self.ended and self._call.target is not self._target:
                copy(self._target, self._call.target)
        return not self._failed

    def wanted(self) -> tuple[int, int, Sequence[int]]:
        """What the next step waits for: a word, up to which serial, of these ranks (none: of nobody)."""
        return (DONE, 0, ()) if self.ended else self._pulling.wanted(self._pulling.acts[self._at], self._call)

    def awaited(self) -> list[int]:
        """Ranks whose word the next step waits for."""
        word, serial, ranks = self.wanted()
        said, strays = self._pulling.stage.words, self.strays()
        return [rank for rank in ranks if self._failed or said[rank][word] < serial or rank in strays]

    def strays(self) -> list[int]:
        """Those of them that have said another call instead."""
        word, serial, ranks = self.wanted()
        pulling = self._pulling
        return [] if word == DONE else strays(pulling.stage.words, ranks, word, serial, (pulling.digest,))

    def give_up(self) -> None:
        call, stage = self._call, self._pulling.stage
        stage.withdraw(call.slot, call.serial, self._pulling.digest)
        stage.give_up(self._sequence)

"""One-sided reads and writes of memory that rank 1 owns: small, large, in batches, and while the owner computes.

The owner's main thread is blocked in a Meeting (or computes, in `busy`): what serves is the library. Contents are
checked at both ends: who is going to read writes first, before the clock runs, and compares what comes; in the end all
tell the owner the checksums of what they wrote, and it compares them with its memory.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable

import numpy as np

from measures.base import SEED, Reply, WrongData, change, check_equal, latency_figures, random_bytes, warmup_of
from measures.meeting import MeetingRank
from subjects.base import Bytes, OneSided, Piece, Transfer

OWNER = 1
PAGE = 4096
DATA_BYTES = 64 * 1024 * 1024
#: Behind the data: set by a one-sided write when the owner may stop computing.
STOP = DATA_BYTES
REGION_BYTES = DATA_BYTES + PAGE
#: Pages of a batch come from here on; the one piece it is compared with lies at the beginning.
PAGES_FROM = DATA_BYTES // 2

#: (offset, number of bytes, checksum): what the owner has to find in its memory.
Claim = tuple[int, int, int]
Outcome = tuple[Reply, list[Claim]]
#: What those do who read and write, given the bytes and the number of repetitions.
Measure = Callable[[int, int], Outcome]
#: Makes so many transfers and takes the nanoseconds of each.
Loop = Callable[[Transfer, int], list[int]]
#: What the owner does meanwhile. It may add to the figures.
Owners = Callable[[], Reply | None]
#: Seconds before each read of `busy_sparse`: long enough for whoever serves to have gone to sleep.
SPARSE_PAUSE = 0.002


class OneSidedRank(MeetingRank):
    def __init__(self, subject: OneSided, rank: int, size: int) -> None:
        super().__init__(subject, rank, size)
        self.subject = subject
        self.region: Bytes | None = None
        #: Memory of this end, by name and size: it is registered once, where the library wants that.
        self._kept: dict[tuple[str, int], Bytes] = {}
        self._fillings = 0
        for measure in (self.read, self.write, self.large_read, self.large_write, self.batch_read, self.batch_write):
            self.add(measure, subject.attend)
        for measure in (self.busy, self.busy_sparse):
            self.add(measure, self._compute)

    def add(self, measure: Measure, owners: Owners) -> None:
        """A command of the measure's name: `measure` on all ranks but the owner, which does its own part meanwhile."""

        def command(nbytes: int, count: int) -> Reply:
            if self.rank == OWNER:
                self._owned()[STOP] = 0  # before they meet: who reads mapped memory may have finished before we begin
            self.meeting.exchange(None)
            if self.rank == OWNER:
                said = self.meeting.exchange(owners() or {})
                for claims in (*said[:OWNER], *said[OWNER + 1 :]):
                    self._check_claims(claims)
                return {}
            figures, claims = measure(nbytes, count)
            if self.rank == 0:
                self.subject.dismiss()
            return {**figures, **self.meeting.exchange(claims)[OWNER]}

        self.commands[measure.__name__] = command

    def open(self, port: int) -> Reply:
        answer = super().open(port)
        self.region = self.subject.share(REGION_BYTES, lambda said: self.meeting.exchange(said)[OWNER])
        self.meeting.exchange(None)
        return answer

    def read(self, nbytes: int, count: int) -> Outcome:
        """One at a time, of which the last is compared."""
        return self._reads(nbytes, count, time_transfers)

    def write(self, nbytes: int, count: int) -> Outcome:
        """One at a time. The owner compares the last."""
        data = self.filled("data", nbytes)
        return latency_of(time_transfers, self.subject.writing([(data, 0)]), nbytes, count), [claim(data, 0)]

    def large_read(self, nbytes: int, count: int) -> Outcome:
        """Every word is other than before each time, and every transfer is compared."""
        return self._large(nbytes, count, reading=True)

    def large_write(self, nbytes: int, count: int) -> Outcome:
        return self._large(nbytes, count, reading=False)

    def batch_read(self, nbytes: int, count: int) -> Outcome:
        """Pages from all over the region in one batch, in turn with one piece of as many bytes."""
        data, into, whole = self.filled("data", nbytes), self.local("into", nbytes), self.local("whole", nbytes)
        for pieces in (pages(data), [(data, 0)]):
            self.subject.writing(pieces)()
        for memory in (into, whole):
            memory.fill(0)
        figures = in_turn(self.subject.reading(pages(into)), self.subject.reading([(whole, 0)]), nbytes, count)
        check_equal(into, data)
        check_equal(whole, data)
        return figures, [claim(*piece) for piece in pages(data)]

    def batch_write(self, nbytes: int, count: int) -> Outcome:
        data = self.filled("data", nbytes)
        figures = in_turn(self.subject.writing(pages(data)), self.subject.writing([(data, 0)]), nbytes, count)
        return figures, [claim(*piece) for piece in (*pages(data), (data, 0))]

    def busy(self, nbytes: int, count: int) -> Outcome:
        """`read` from an owner whose main thread runs pure Python without a pause."""
        outcome = self.read(nbytes, count)
        self._stop_owner()
        return outcome

    def busy_sparse(self, nbytes: int, count: int) -> Outcome:
        """The same with a pause before each read: nobody at the owner expects it."""
        outcome = self._reads(nbytes, count, time_sparse_transfers)
        self._stop_owner()
        return outcome

    def local(self, name: str, nbytes: int) -> Bytes:
        key = name, nbytes
        if key not in self._kept:
            self._kept[key] = self.subject.local(nbytes)
        return self._kept[key]

    def filled(self, name: str, nbytes: int) -> Bytes:
        """`local`, with other contents each time: nothing an earlier round has left in the region will do."""
        memory = self.local(name, nbytes)
        self._fillings += 1
        np.bitwise_xor(random_bytes(nbytes), np.uint8(self._fillings % 256), out=memory)
        return memory

    def _reads(self, nbytes: int, count: int, loop: Loop) -> Outcome:
        data, into = self.filled("data", nbytes), self.local("into", nbytes)
        self.subject.writing([(data, 0)])()
        into.fill(0)
        figures = latency_of(loop, self.subject.reading([(into, 0)]), nbytes, count)
        check_equal(into, data)
        return figures, [claim(data, 0)]

    def _large(self, nbytes: int, count: int, *, reading: bool) -> Outcome:
        data, into = self.filled("data", nbytes), self.local("into", nbytes)
        put, get = self.subject.writing([(data, 0)]), self.subject.reading([(into, 0)])
        clock, samples = time.perf_counter_ns, []
        for _ in range(warmup_of(count) + count):
            change(data)
            began = clock()
            put()
            between = clock()
            get()
            samples.append(clock() - between if reading else between - began)
            check_equal(into, data)
        timed = samples[-count:]
        figures = {"gb_per_s": nbytes / float(np.median(timed)), "count": count, "seconds": sum(timed) / 1e9}
        return figures, [claim(data, 0)]

    def _compute(self) -> Reply:
        """Until a one-sided write says that it is enough; how much of its core this thread had."""
        memory = self._owned().data
        rounds = 0
        began, used = time.perf_counter(), time.thread_time()
        while memory[STOP] == 0:
            rounds += 1
        return {"owner_percent": 100 * (time.thread_time() - used) / (time.perf_counter() - began)}

    def _stop_owner(self) -> None:
        self.subject.writing([(self.local("flag", 1), STOP)])()

    def _owned(self) -> Bytes:
        if self.region is None:
            raise WrongData(f"{type(self.subject).__name__}.share() gave the owner no memory.")
        return self.region

    def _check_claims(self, claims: Iterable[Claim]) -> None:
        memory = self._owned()
        for offset, nbytes, checksum in claims:
            if zlib.crc32(memory[offset : offset + nbytes].data) != checksum:
                raise WrongData(f"{nbytes} bytes at {offset} in the owner's memory are not those that were written.")


def claim(data: Bytes, offset: int) -> Claim:
    return offset, data.nbytes, zlib.crc32(data.data)


def pages(memory: Bytes) -> list[Piece]:
    """Its pages, and places for them in the region in no order, as in a paged cache."""
    count = memory.nbytes // PAGE
    places = np.random.default_rng(SEED).permutation((DATA_BYTES - PAGES_FROM) // PAGE)[:count]
    return [
        (memory[number * PAGE : (number + 1) * PAGE], PAGES_FROM + int(place) * PAGE)
        for number, place in enumerate(places)
    ]


def time_transfers(transfer: Transfer, count: int) -> list[int]:
    """Nanoseconds of each of `count` transfers, one after the other."""
    clock, samples = time.perf_counter_ns, [0] * count
    for i in range(count):
        began = clock()
        transfer()
        samples[i] = clock() - began
    return samples


def time_sparse_transfers(transfer: Transfer, count: int) -> list[int]:
    samples = []
    for _ in range(count):
        time.sleep(SPARSE_PAUSE)
        samples += time_transfers(transfer, 1)
    return samples


def latency_of(loop: Loop, transfer: Transfer, nbytes: int, count: int) -> Reply:
    loop(transfer, warmup_of(count))
    began = time.perf_counter()
    samples = loop(transfer, count)
    figures = latency_figures(samples, time.perf_counter() - began, nbytes)
    return {**figures, "gb_per_s": nbytes / figures["p50_us"] / 1e3}  # one way only


def in_turn(batch: Transfer, one: Transfer, nbytes: int, count: int) -> Reply:
    """The batch's bandwidth, and its ratio to that of the one piece."""
    samples = [time_transfers(batch, 1) + time_transfers(one, 1) for _ in range(warmup_of(count) + count)]
    batches, ones = (float(np.median(column)) for column in np.transpose(samples[-count:]))
    seconds = float(np.sum(samples[-count:])) / 1e9
    return {"gb_per_s": nbytes / batches, "ratio": ones / batches, "count": count, "seconds": seconds}

"""The stage of a group: memory by which its ranks, all on one host, run collectives without a message.

Each rank has a segment that it writes and the others only read (it is sealed against their writing):

    page 0    words, each kind on a cache line of its own: SLEEP and WANT; DONE; STAGED and COMBINED by slot
    page 1 …  SLOTS slots of SLOT_BYTES, from the middle of the page on

Rules:
1. A serial number names a chunk of a call: the group's sequence number and the chunk's. Which slot it goes into
   follows from the call; chunks of calls that are alike take one after the other. A rank says STAGED (COMBINED) by
   writing the digest of its call, then the serial, after the bytes. x86 keeps stores in order, and loads: who sees the
   serial sees the rest.
2. Calls that differ have different digests, so their words never match, and they stall like calls whose messages do
   not match; agent.py finds out why.
3. DONE says up to which serial a rank no longer reads anybody's slots. A slot is written again when all are done with
   what it held. A rank that gives a call up is done with all of it. A rank that has staged in a small call leaves it to
   its next word to say that it is done with that call (`through`), and says so before it waits for a slot itself, or
   takes part in a call in which it stages nothing.
4. Who is about to sleep writes into WANT which word it waits for, up to which serial and of whom, makes SLEEP odd, and
   looks again. Who has written a word looks at SLEEP, with a full barrier between the two on both sides, and rings the
   sleeper once, if all that it waits for is there: of several who could, the last one does.
5. Calls use the stage in the order of their sequence numbers: the others wait in `queue`.
6. A call that is postponed is left alone, where background threads would only take the cores from those who compute:
   nobody takes its steps, nor asks to be rung for it, until somebody waits for it, or for one behind it, or for
   _POSTPONED seconds.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from os import sched_getaffinity
from threading import get_ident
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakSet

import numpy as np

from rankmesh.buffers import MID_PAGE, PAGE
from rankmesh.collectives.distance import Distance
from rankmesh.config import KIB
from rankmesh.endpoint.router import PeerRouter
from rankmesh.endpoint.timers import Timer
from rankmesh.endpoint.waiting import Look, Waited
from rankmesh.transport.pulling import Copying, Puller
from rankmesh.transport.segment import anonymous

if TYPE_CHECKING:
    from rankmesh.collectives.passage import Express
    from rankmesh.collectives.staged import StagedCollective
    from rankmesh.endpoint.progress import Engine
    from rankmesh.endpoint.requests import Lone
    from rankmesh.endpoint.router import Router

Array = np.ndarray[Any, Any]

SLOTS: Final = 4
#: Measured for 64 KiB to 64 MiB: slots of 128 and 256 KiB, and of 1 MiB, are slower.
SLOT_BYTES: Final = 512 * KIB
_SLOTS_AT: Final = PAGE + MID_PAGE
STAGE_BYTES: Final = _SLOTS_AT + SLOTS * SLOT_BYTES
#: Elements are not larger, so that a slot holds many.
MOST_ITEM_BYTES: Final = 4096
#: Words: where each kind is. The second word of STAGED and COMBINED is the digest; the third and fourth of STAGED say
#: where arrays lie that are pulled (and on which pages, see pulling.py). WANT is three: the index of a word, a serial,
#: and ranks, a bit for each (none: whatever comes).
SLEEP: Final = 0
WANT: Final = 1
DONE: Final = 8
STAGED: Final = tuple(16 + 16 * slot for slot in range(SLOTS))
COMBINED: Final = tuple(24 + 16 * slot for slot in range(SLOTS))
#: A serial number has so many bits for the chunk.
CHUNK_BITS: Final = 20
#: A word has a bit for each; of more, whatever comes wakes.
_MOST_RANKS_WANTED: Final = 64
_WORDS: Final = PAGE // 8
#: Looks without a pause, by how well that lately went; then others run in between, for so many times Config.spin.
_LOOKS: Final = tuple(range(count) for count in (1, 20, 100, 400))
_YIELDS: Final = range(16)
#: How often a small call lets others run before it is left to a Passage.
_TURNS: Final = range(8)
_PATIENCE: Final = 10
#: Seconds for which a call goes on where nobody waits for it here, before others, and its asynchronous caller, do.
_TURN: Final = 0.001
#: Seconds for which calls may be postponed.
_POSTPONED: Final = 1.0
#: Seconds in sched_yield that say that others wanted the core.
_CROWDED: Final = 5e-6


class Stepping(Protocol):
    def may_step(self) -> bool: ...


class Way(Stepping, Protocol):
    """How a call passes over the stage: Passage, PulledPassage."""

    @property
    def ended(self) -> bool: ...

    def step(self) -> bool:
        """Take the next step, if there is what it waits for."""
        ...

    def wanted(self) -> tuple[int, int, Sequence[int]]:
        """What the next step waits for: a word, up to which serial, of these ranks (none: of nobody)."""
        ...

    def awaited(self) -> list[int]:
        """Ranks whose word the next step waits for."""
        ...

    def strays(self) -> list[int]:
        """Those of them that have said another call instead."""
        ...

    def give_up(self) -> None: ...


def create() -> tuple[memoryview, int]:
    """This rank's segment and its descriptor, which is the caller's to pass on and close. Raises OSError where there
    is no such memory."""
    memory, fd = anonymous("rankmesh-stage", STAGE_BYTES, others_write=False)
    return memoryview(memory), fd


class Stage:
    """All segments of a group, as one rank sees them. Methods need the engine's lock."""

    #: A sleep here says nothing of the next: ranks compute in between, and where they outnumber cores, who polls takes
    #: the core from one who does.
    patience = 0

    def __init__(
        self,
        engine: Engine,
        key: int,
        rank: int,
        routers: Sequence[Router],
        segments: list[memoryview],
        pullers: Mapping[int, Puller],
        copying: Copying,
    ) -> None:
        """`pullers`: by rank, of all, this one's own included, unless somebody has none (`copying`)."""
        self._engine = engine
        #: Threads that wait for the engine's lock.
        self.contenders = engine.contenders
        self._key = key
        self.rank = rank
        self.pullers = pullers
        #: How the slowest of the ranks can pull.
        self.copying = copying
        self._segments = segments
        #: By rank.
        self.words = [segment[:PAGE].cast("Q") for segment in segments]
        self._own = self.words[rank]
        self._others: list[tuple[int, memoryview, PeerRouter]] = [
            (q, self.words[q], router) for q, router in enumerate(routers) if isinstance(router, PeerRouter)
        ]
        self._theirs = [words for _, words, _ in self._others]
        self._arrays: dict[np.dtype[Any], list[list[Array]]] = {}
        self._fence = threading.Lock()
        self._rung = [0] * len(segments)
        #: Up to which serial this rank is done, said or not.
        self.through = 0
        self._looks = 1
        #: The serial that each of this rank's slots holds, and up to which all are known to be done.
        self._held = [0] * SLOTS
        self._all_done = 0
        self.queue: deque[StagedCollective] = deque()
        #: This is in the engine's backlog.
        self._backlogged = False
        #: Calls behind the first that were given up.
        self._given_up: list[int] = []
        #: Background threads would take the cores from those who compute.
        self.crowded = len(segments) >= len(sched_getaffinity(0))
        #: Ends it, while anything is postponed.
        self._reminder: Timer | None = None
        #: Which way calls go that may go either way.
        self.distance = Distance(rank, len(segments))
        #: What holds slices of the memory.
        self.express: WeakSet[Express] = WeakSet()

    def close(self) -> None:
        """Let go of the memory. Nothing is under way."""
        self._engine.looks.pop(self._key, None)
        if self._reminder is not None:
            self._reminder.cancel()
        for express in self.express:
            express.close()
        self._arrays.clear()
        self._others.clear()
        self._theirs.clear()
        self.words.clear()
        self._segments.clear()
        del self._own

    # ------------------------------------------------------------------ memory

    def slots(self, dtype: np.dtype[Any]) -> list[list[Array]]:
        """[rank][slot], as arrays of that dtype."""
        arrays = self._arrays.get(dtype)
        if arrays is None:
            room = SLOT_BYTES // dtype.itemsize
            arrays = self._arrays[dtype] = [
                [np.frombuffer(segment, dtype, room, _SLOTS_AT + slot * SLOT_BYTES) for slot in range(SLOTS)]
                for segment in self._segments
            ]
        return arrays

    def free(self, slot: int) -> bool:
        """Nobody reads any more what this rank's slot holds."""
        held = self._held[slot]
        if held <= self._all_done:
            return True
        self._all_done = done = min([words[DONE] for words in self._theirs])
        if held > done:
            self.done(self.through)  # they may wait for the same
        return held <= done

    def held(self, slot: int) -> int:
        """The serial of what this rank's slot holds."""
        return self._held[slot]

    def behind(self, slot: int) -> list[int]:
        """Who may still read what this rank's slot holds."""
        return [rank for rank, words, _ in self._others if words[DONE] < self._held[slot]]

    def staged(self, slot: int, serial: int, digest: int) -> None:
        """This rank's slot holds what others wait for. `_say`, written out: the hot path of small calls."""
        self._held[slot] = serial
        own, word, fence = self._own, STAGED[slot], self._fence
        own[DONE] = self.through
        own[word + 1] = digest
        own[word] = serial
        fence.acquire()
        fence.release()
        for words in self._theirs:
            if words[SLEEP] & 1:
                self._ring()
                return

    def publish(self, slot: int, serial: int, digest: int, source: int, target: int) -> None:
        """Instead of the slot: a call's arrays lie at these addresses."""
        word = STAGED[slot]
        self._own[word + 2], self._own[word + 3] = source, target
        self.staged(slot, serial, digest)

    def withdraw(self, slot: int, serial: int, digest: int) -> None:
        """They are not to be read any more."""
        for word in (STAGED[slot], COMBINED[slot]):
            if self._own[word] == serial and self._own[word + 1] == digest:
                self._own[word] = 0

    def take_back(self, slot: int, serial: int) -> None:
        """Nobody reads that of this rank, if it was said: the call goes another way, and needs the slot again."""
        if self._held[slot] == serial:
            self._held[slot] = 0

    def combined(self, slot: int, serial: int, digest: int) -> None:
        self._say(COMBINED[slot], serial, digest)

    def _say(self, word: int, serial: int, digest: int) -> None:
        own = self._own
        own[DONE] = self.through
        own[word + 1] = digest
        own[word] = serial
        fence = self._fence  # as in _wake, for its speed
        fence.acquire()
        fence.release()
        for words in self._theirs:
            if words[SLEEP] & 1:
                self._ring()
                return

    def done(self, serial: int) -> None:
        """Nothing up to this serial is read here any more."""
        if serial > self.through:
            self.through = serial
        if serial > self._own[DONE]:
            self._own[DONE] = self.through
            self._wake()

    def give_up(self, sequence: int) -> None:
        """This rank reads nothing of that call any more. Where calls before it are under way, that is said when they
        have ended."""
        if self.queue and self.queue[0].call.sequence < sequence:
            self._given_up.append(sequence)
        else:
            self.done((sequence + 2 << CHUNK_BITS) - 1)

    def _wake(self) -> None:
        fence = self._fence
        fence.acquire()
        fence.release()
        for words in self._theirs:
            if words[SLEEP] & 1:
                self._ring()
                return

    def _ring(self) -> None:
        """Those who sleep, and can go on."""
        for rank, words, router in self._others:
            epoch = words[SLEEP]
            if epoch & 1 and self._rung[rank] != epoch and router.polled is not None and self._can_go_on(rank):
                self._rung[rank] = epoch
                router.polled.ring()

    def _can_go_on(self, sleeper: int) -> bool:
        """What it waits for is there."""
        word, serial, ranks = self.words[sleeper][WANT : WANT + 3]
        word %= _WORDS  # it is another's to write, and never to be trusted
        return all(its[word] >= serial for rank, its in enumerate(self.words) if ranks >> rank & 1)

    # ------------------------------------------------------------------ calls, in their order

    def enter(self, call: StagedCollective) -> None:
        self.queue.append(call)
        if self.queue[0] is call:
            self._go_on()

    def leave(self, call: StagedCollective) -> None:
        """It has ended, well or badly."""
        first = self.queue[0] is call
        self.queue.remove(call)
        for sequence in self._given_up[:]:
            if not self.queue or sequence < self.queue[0].call.sequence:
                self._given_up.remove(sequence)
                self.give_up(sequence)
        if not self.queue:
            self._engine.looks.pop(self._key, None)
        elif first:
            self.go_on_soon()

    def go_on_soon(self) -> None:
        """The first call has something to do: whoever leads goes on with it, and others come before."""
        engine = self._engine
        if not self._backlogged:
            self._backlogged = True
            engine.backlog.append(self)
            if engine.leader is not None and engine.leading_thread != get_ident():  # it may sleep
                engine.waker.release()

    def work_off(self) -> None:
        """From the engine's backlog."""
        self._backlogged = False
        if self.queue:
            self._go_on()

    def partner_gone(self) -> None:
        """A member has left, or is lost: who waits for its word waits in vain."""
        if self.queue:
            self.queue[0].forsaken()

    def _go_on(self) -> None:
        first, engine = self.queue[0], self._engine
        while not (first.step(_TURN) or first.forsaken()):
            engine.looks.setdefault(self._key, Look(self.ready, self.arm, self.serve))
            asleep = engine.leader is not None and engine.leading_thread != get_ident()
            if not (asleep and self.arm()):  # whoever leads sleeps, and knows nothing of this yet
                return

    def postpone(self, call: StagedCollective) -> None:
        """Its caller computes, and will wait for it then: until that, or for some time, nobody takes its steps."""
        if self.crowded:
            call.postponed = True
            if self._reminder is None:
                self._reminder = self._engine.call_at(monotonic() + _POSTPONED, self._hurry)

    def expect(self, call: StagedCollective) -> None:
        """Its caller waits for it now, and so for those before it."""
        if self._reminder is None:
            return
        idle = self.queue[0].postponed
        for earlier in self.queue:
            earlier.postponed = False
            if earlier is call:
                break
        if not any(later.postponed for later in self.queue):
            self._reminder.cancel()
            self._reminder = None
        if idle:
            self._go_on()

    def _hurry(self) -> None:
        """They were postponed for long enough."""
        self._reminder = None
        for call in self.queue:
            call.postponed = False
        self.serve()

    def may_run(self) -> bool:
        """Whether a caller that waits may take its call's steps itself."""
        if self.queue or not self._engine.may_look():
            return False
        own = self._own
        if own[SLEEP] & 1:
            own[SLEEP] += 1
        return True

    def comes(self, its: memoryview, word: int, serial: int) -> bool:
        """Whether somebody's word comes within a moment."""
        for _ in _LOOKS[self._looks]:
            if its[word] >= serial:
                return True
        if not self._looks:  # others want this core: perhaps the one who is to say it
            courtesy, now = self._engine.courtesy, perf_counter()
            for _ in _TURNS:
                if self.contenders or now < courtesy.resumes:
                    break
                now = courtesy.let_others_run(now)
                if its[word] >= serial:
                    return True
        return False

    def run(self, passage: Way) -> bool:
        """Take a call's steps on behalf of its caller, who `may_run` them. False: it takes longer; the call enters, and
        waits like any other."""
        engine = self._engine
        while not passage.ended:
            if not passage.step():
                for _ in _LOOKS[self._looks]:
                    if passage.may_step():
                        break
                else:
                    if not self._let_others_run(passage):
                        return False
            elif engine.contenders:
                return passage.ended
        return True

    # ------------------------------------------------------------------ waiting

    def ready(self) -> bool:
        return bool(self.queue) and not self.queue[0].postponed and self.queue[0].may_step()

    def arm(self) -> bool:
        """Have the others ring from now on. True: something can be done already."""
        own = self._own
        if self.queue:
            if self.queue[0].postponed:
                return False
            word, serial, ranks = self.queue[0].wanted()
            wanted = sum(1 << rank for rank in ranks) if len(self.words) <= _MOST_RANKS_WANTED else 0
            own[WANT], own[WANT + 1], own[WANT + 2] = word, serial, wanted
        own[SLEEP] += 2 if own[SLEEP] & 1 else 1  # whoever has rung may have to ring again
        with self._fence:
            pass
        return self.ready()

    def serve(self) -> None:
        self._awake()
        if self.queue:
            self._go_on()

    def _awake(self) -> None:
        if self._own[SLEEP] & 1:
            self._own[SLEEP] += 1

    def mark(self) -> int:
        return 0

    def attend(self, work: Waited) -> bool:
        """Look for a while, on behalf of a waiter. True: that was in vain, and long enough to go to sleep now."""
        engine = self._engine
        self._awake()
        while self.queue and not (work.finished or engine.deferred or engine.contenders or engine.backlog):
            first = self.queue[0]
            for _ in _LOOKS[self._looks]:
                if first.may_step():
                    break
            else:
                if not self._let_others_run(first):
                    return not engine.contenders
            first.step()
        return False

    def _let_others_run(self, first: Stepping) -> bool:
        """Look on, while whoever else could run on this core runs in between. False: in vain."""
        engine = self._engine
        courtesy, began = engine.courtesy, perf_counter()
        if began < courtesy.resumes:
            return False
        now = courtesy.let_others_run(began)
        self._looks = max(self._looks - 1, 0) if now - began > _CROWDED else min(self._looks + 1, len(_LOOKS) - 1)
        if first.may_step():
            return True
        end = began + _PATIENCE * engine.spin.seconds
        while courtesy.resumes <= now < end and not (engine.contenders or engine.poll(0, 1)):
            for _ in _YIELDS:
                now = courtesy.let_others_run(now)
                if first.may_step():
                    return True
        return False

    def await_reply(self, call: Lone) -> None:
        raise AssertionError("nobody waits for a reply here")

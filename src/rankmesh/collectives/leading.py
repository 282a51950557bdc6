"""Calls on the stage that go through slots or are pulled (pulling.py), as one of the ranks, their leader, says.

Which is better depends on where the ranks run. Whoever writes to a slot takes its lines back from the caches of those
who have read it. Where their cores share a cache that is quick; where they do not (another core complex or socket), it
takes ten times as long, while to read what another core has written takes only twice as long. So ranks that are far
apart had better read each other's arrays, and write to nothing that others have read. And the system moves processes
about: what was far may be near a second later.

1. The leader is whoever all others wait for anyway: rank 0, or the root of a broadcast. It goes by how long its own
   last writes into slots took. While it has calls pulled, it has one now and then go through slots, to see whether they
   still take as long.
2. The others do as that leader did the last time. What a call says first is in the same word and has the same serial
   number either way, but another digest; so who waits for the leader's finds out if it went the other way. Then it
   takes back what it has said, and begins anew that way.
3. Until it has seen which way the leader goes, nobody reads anything of others: neither slots, nor arrays.

So nothing has to be agreed on beforehand, and a rank that missed a call, because it gave it up, does no harm.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from rankmesh.collectives.distance import LEAST
from rankmesh.collectives.passage import Express, Passage, first_slot
from rankmesh.collectives.pulling import PulledPassage, Pulling
from rankmesh.collectives.stage import CHUNK_BITS, SLOTS, STAGED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankmesh.collectives.kinds import Array
    from rankmesh.collectives.recipe import Recipe
    from rankmesh.collectives.stage import Stage

#: Collectives for which every rank waits for the leader; and whether a rank stages a part for each of the others, or
#: the same for all.
_LED: Final = {"all_gather": False, "broadcast": False, "all_to_all": True, "reduce_scatter": True}
#: In the digest of a call that is pulled. Those of calls are shorter.
_PULLED: Final = 1 << 62


def leader_of(collective: str, root: int | None, size: int, nbytes: int) -> int:
    """-1: such a call has none. `nbytes`: of one rank's part. Where little is staged, a system call takes as long as
    that does where ranks are far apart."""
    parts_for_each = _LED.get(collective)
    if parts_for_each is None or nbytes * (size - 1 if parts_for_each else 1) < LEAST:
        return -1
    return root or 0


def withdraw(stage: Stage, recipe: Recipe, sequence: int) -> None:
    """A call that was given up: nothing of it is to be read where it lies."""
    slot = first_slot(sequence, recipe.steps) % SLOTS
    stage.withdraw(slot, sequence + 1 << CHUNK_BITS, recipe.digest ^ _PULLED)


class Led:
    """All calls of one recipe in one group, either way. As an Express it takes their steps as long as nobody is late.
    Methods need the engine's lock."""

    #: What `run` returns at the end, whichever way it went.
    steps = sys.maxsize

    def __init__(self, stage: Stage, recipe: Recipe, source: Array, slots: Express | None) -> None:
        """`source`: as those of its calls are. `slots`: takes the steps of those that go through slots."""
        self.stage = stage
        self.leader = recipe.leader
        self.recipe = recipe
        self.digests = (recipe.digest, recipe.digest ^ _PULLED)
        chunks = recipe.steps[-1].number + 1
        self.pulling = Pulling(stage, recipe.acts, self.digests[True], recipe.apply, source, self.leader, chunks)
        self._slots = slots
        #: The call that `run` has left unfinished, which way it goes, and how many of its steps were taken.
        self._begun = (-1, False, 0)

    def close(self) -> None:
        self.pulling.close()
        if self._slots is not None:
            self._slots.close()

    def run(self, sequence: int, source: Array, target: Array) -> int:
        pulled = self.stage.distance.pulls(self.leader)
        express, taken = self.pulling if pulled else self._slots, 0
        if express is not None:
            taken = express.run(sequence, source, target)
            if taken == express.steps:
                return self.steps
        self._begun = (sequence, pulled, taken)
        return taken

    def passage(self, sequence: int, source: Array, target: Array) -> LedPassage:
        """The way of a call that `run` has left unfinished, or of another."""
        begun, pulled, taken = self._begun
        if begun != sequence:
            pulled, taken = self.stage.distance.pulls(self.leader), 0
        return LedPassage(self, sequence, source, target, pulled, taken)


class LedPassage:
    """A call's way, which may turn out to be the other one. Methods need the engine's lock."""

    __slots__ = ("_arrays", "_led", "_other", "_pulled", "_sequence", "_serial", "_slot", "_way")

    def __init__(self, led: Led, sequence: int, source: Array, target: Array, pulled: bool, taken: int) -> None:
        self._led = led
        self._sequence = sequence
        self._arrays = (source, target)
        self._slot = first_slot(sequence, led.recipe.steps) % SLOTS
        self._serial = sequence + 1 << CHUNK_BITS
        self._go(pulled, taken)

    def _go(self, pulled: bool, taken: int) -> None:
        led, arrays = self._led, self._arrays
        self._pulled = pulled
        self._other = led.digests[not pulled]
        self._way: Passage | PulledPassage
        if pulled:
            self._way = PulledPassage(led.pulling, self._sequence, *arrays, taken)
        else:
            _, digest, steps, apply, *_ = led.recipe
            self._way = Passage(led.stage, steps, digest, apply, self._sequence, *arrays, taken, timed=True)

    def _differs(self, rank: int) -> bool:
        """That rank goes the other way, as far as it knows."""
        its, word = self._led.stage.words[rank], STAGED[self._slot]
        return its[word] == self._serial and its[word + 1] == self._other

    @property
    def ended(self) -> bool:
        return self._way.ended

    def may_step(self) -> bool:
        return self._way.may_step() or self._differs(self._led.leader)

    def step(self) -> bool:
        if self._way.step():
            return True
        if not self._differs(self._led.leader):
            return False
        stage = self._led.stage
        stage.distance.follow(self._led.leader, not self._pulled)
        stage.take_back(self._slot, self._serial)
        self._go(not self._pulled, 0)
        return True

    def wanted(self) -> tuple[int, int, Sequence[int]]:
        return self._way.wanted()

    def awaited(self) -> list[int]:
        return self._way.awaited()

    def strays(self) -> list[int]:
        """Those of them that have said another call instead: one that goes the other way is not another call."""
        return [rank for rank in self._way.strays() if not self._differs(rank)]

    def give_up(self) -> None:
        self._way.give_up()

"""What calls that are alike share, and which way a call goes over the stage: through slots (passage.py), pulled
(pulling.py), pulled if that pays for all, or as its leader says (leading.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from rankmesh.collectives.calls import Signature
from rankmesh.collectives.kinds import Array, Operation
from rankmesh.collectives.leading import Led, withdraw
from rankmesh.collectives.passage import Express, Passage, Step
from rankmesh.collectives.pulling import Act, PulledPassage, Pulling
from rankmesh.collectives.stage import CHUNK_BITS, SLOTS, Stage, Way
from rankmesh.transport.pulling import Copying


class Recipe(NamedTuple):
    """What calls that are alike share. `apply` reduces, where anything is reduced; `express` serves them while nobody
    is late; source and target `may_overlap` as they like. `acts`: how they are pulled instead, where that `pays`
    because of how the kernel copies, or their `leader` says so (-1: nobody does)."""

    signature: Signature
    digest: int
    steps: tuple[Step, ...]
    apply: Operation | None = None
    express: Express | None = None
    may_overlap: bool = False
    acts: tuple[Act, ...] = ()
    pays: tuple[Copying, ...] = ()
    leader: int = -1

    def passage(self, stage: Stage, sequence: int, source: Array, target: Array, taken: int = 0) -> Way:
        """A call's way. `taken`: so many steps were taken before."""
        if self.led(stage):
            led = self.express if isinstance(self.express, Led) else Led(stage, self, source, None)
            return led.passage(sequence, source, target)
        through_slots = partial(Passage, stage, self.steps, self.digest, self.apply, sequence, source, target)
        if not self.pulled(stage):
            return through_slots(taken)
        pulling = self.express
        if not isinstance(pulling, Pulling):
            pulling = Pulling(stage, self.acts, self.digest, self.apply, source)
        pulled = PulledPassage(pulling, sequence, source, target, taken)
        if stage.copying == Copying.QUICKLY:
            return pulled
        return EitherPassage(pulled, partial(through_slots, ahead=1))

    def give_up(self, stage: Stage | None, sequence: int) -> None:
        """A call of which there is no Passage."""
        if stage is None:
            return
        if self.led(stage):
            withdraw(stage, self, sequence)
        elif self.pulled(stage):
            stage.withdraw(sequence % SLOTS, sequence + 1 << CHUNK_BITS, self.digest)
        stage.give_up(sequence)

    def pulled(self, stage: Stage) -> bool:
        return stage.copying in self.pays

    def led(self, stage: Stage) -> bool:
        return self.leader >= 0 and stage.copying != Copying.NOT and not self.pulled(stage)


class EitherPassage:
    """A call that is pulled, unless its ranks find that it had better not be: then it goes through slots."""

    __slots__ = ("_make", "_pulled", "_way")

    def __init__(self, pulled: PulledPassage, make: Callable[[], Passage]) -> None:
        self._pulled = pulled
        self._make = make
        self._way: Way = pulled

    @property
    def ended(self) -> bool:
        return self._way.ended

    def may_step(self) -> bool:
        return self._way.may_step()

    def step(self) -> bool:
        if self._way.step():
            return True
        if self._way is self._pulled and self._pulled.refused:
            self._way = self._make()
            return True
        return False

    def wanted(self) -> tuple[int, int, Sequence[int]]:
        return self._way.wanted()

    def awaited(self) -> list[int]:
        return self._way.awaited()

    def strays(self) -> list[int]:
        return self._way.strays()

    def give_up(self) -> None:
        self._pulled.give_up()

"""A collective on the stage of its group, as a Work. Where there is no stage, it runs the plan that its algorithm has
for that, over messages (running.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from rankmesh.collectives.calls import Call
from rankmesh.collectives.kinds import Array
from rankmesh.collectives.plan import Round
from rankmesh.collectives.recipe import Recipe
from rankmesh.collectives.reducing import Reducer
from rankmesh.collectives.running import Collective, Partners
from rankmesh.collectives.space import Space
from rankmesh.collectives.stage import Stage, Way
from rankmesh.endpoint.work import Work

if TYPE_CHECKING:
    from rankmesh.collectives.context import GroupContext
    from rankmesh.endpoint.router import Router

#: How a collective goes over messages instead: the plan, its memory, what reduces, and what is done at its end.
Fallback = tuple[Sequence[Round], Space, Reducer | None, Callable[[], Any]]


class StagedCollective(Collective):
    """It begins when it is known whether there is a stage; `fallback` may be None once there is one. `passage`: the
    caller has taken the first steps itself."""

    context: GroupContext
    _stage: Stage | None = None
    _fell_back = False
    #: Nobody takes its steps: see Stage.postpone.
    postponed = False

    def __init__(
        self,
        context: GroupContext,
        call: Call,
        recipe: Recipe,
        source: Array,
        target: Array,
        conclude: Callable[[], Any],
        timeout: float,
        fallback: Fallback | None = None,
        passage: Way | None = None,
    ) -> None:
        super(Collective, self).__init__(
            context.hub.engine, f"{call.signature.collective} with", Partners(self), None, timeout
        )
        self.context = context
        self.call = call
        self._unasked()
        self._recipe = recipe
        self._source = source
        self._target = target
        self._conclude = conclude
        self._fallback = fallback
        self._passage = passage

    def founded(self, stage: Stage | None) -> None:
        """Begin, on the stage, or over messages where there is none."""
        if stage is None:
            assert self._fallback is not None, "there never was a stage"
            self._fell_back = True
            rounds, space, self._reduction, self._conclude = self._fallback
            self._prepare(rounds, space)
            self.advance()
            return
        self._stage = self.hint = stage
        if self._passage is None:
            self._passage = self._recipe.passage(stage, self.call.sequence, self._source, self._target)
        stage.enter(self)

    # ------------------------------------------------------------------ steps

    def may_step(self) -> bool:
        assert self._passage is not None, "it has begun on a stage"
        return self._passage.may_step()

    def wanted(self) -> tuple[int, int, Sequence[int]]:
        assert self._passage is not None, "it has begun on a stage"
        return self._passage.wanted()

    def step(self, turn: float = math.inf) -> bool:
        """Go on as far as it goes, or for so many seconds, or until others want the engine. False: it waits for other
        ranks."""
        passage, stage = self._passage, self._stage
        assert passage is not None, "it has begun on a stage"
        assert stage is not None, "it has begun on a stage"
        end = monotonic() + turn
        try:
            while not passage.ended:
                if not passage.step():
                    return False
                self.moved = monotonic()
                if stage.contenders or self.moved > end:
                    stage.go_on_soon()
                    return True
            self._succeed(leading=False)
        except Exception as error:  # noqa: BLE001  # what a reduction raised: it is the caller's to see
            self.stop(error)
        except BaseException as error:
            self.stop(error)
            raise
        return True

    def forsaken(self) -> bool:
        """Ends it if somebody whose word it waits for is gone (True). What a rank said before it left stays said."""
        gone = next(((rank, router) for rank, router in self.awaited().items() if router.gone), None)
        if gone is None:
            return False
        rank, router = gone
        if self._passage is not None and rank in self._passage.strays():
            self.context.disagree(self, rank, "called something else under that number, and has left")
            return False
        self.stop(router.lost_error(self.op, None))
        return True

    def postpone(self) -> None:
        with self._engine:
            if self._stage is not None and not self.finished:
                self._stage.postpone(self)

    def add_done_callback(self, callback: Callable[[Work[Any]], object]) -> None:
        """Who adds one after it was postponed waits for it, too: `await` does so."""
        super().add_done_callback(callback)
        if self.postponed:
            with self._engine:
                self._expect()

    def _expect(self) -> None:
        if self._stage is not None and not self.finished:
            self._stage.expect(self)

    # ------------------------------------------------------------------ what others see, and the end

    def awaited(self) -> dict[int, Router]:
        if self._fell_back:
            return super().awaited()
        if self._passage is None:
            return self.context.founding.awaited()
        return {rank: self.context.routers[rank] for rank in self._passage.awaited()}

    def _succeed(self, leading: bool) -> None:
        if self._stage is None:
            super()._succeed(leading)
            return
        value = self._conclude()
        self._passage = None
        self._stage.leave(self)
        self.context.ended(self)
        self.finish(value)

    def stop(self, error: BaseException) -> None:
        if self.finished or self._disagrees(error):
            return
        super().stop(error)
        if not self.finished or self._fell_back:
            return
        if self._stage is None or self._passage is None:
            self.context.founding.forget(self)
        else:
            self._passage.give_up()
            self._passage = None
            self._stage.leave(self)

    def closing(self) -> None:
        """The endpoint closes, which ends what waits for messages; this does not."""
        if not self._fell_back:
            self.stop(self.context.hub.closed_error(self.op, None))

    def _drive(self, deadline: float) -> None:
        self._expect()
        if not self._fell_back:
            self._engine.drive(self, deadline)
        if self._fell_back and not self.finished:
            super()._drive(deadline)

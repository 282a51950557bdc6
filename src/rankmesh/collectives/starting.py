"""How a collective is started: its algorithm chosen, its place in the group's sequence taken, and run by whoever runs
that algorithm: the executor of plans (running.py), or the stage (stage.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from rankmesh.collectives.arguments import Array
from rankmesh.collectives.calls import Signature, digest
from rankmesh.collectives.choosing import ALGORITHMS, World, rounds
from rankmesh.collectives.context import GroupContext
from rankmesh.collectives.express import FORMS
from rankmesh.collectives.founding import Founding, State
from rankmesh.collectives.leading import Led, leader_of
from rankmesh.collectives.passage import steps
from rankmesh.collectives.plan import Round
from rankmesh.collectives.pulling import Pulling, acts, pays, sizes
from rankmesh.collectives.recipe import Recipe
from rankmesh.collectives.reducing import Op, Reducer
from rankmesh.collectives.running import Collective
from rankmesh.collectives.space import Part, Space
from rankmesh.collectives.stage import MOST_ITEM_BYTES, SLOT_BYTES
from rankmesh.collectives.staged import Fallback, StagedCollective
from rankmesh.collectives.staging import Case
from rankmesh.config import KIB
from rankmesh.errors import UsageError


class Options(NamedTuple):
    """What every collective takes."""

    algorithm: str | None = None
    async_op: bool = False
    timeout: float | None = None


class Job(NamedTuple):
    """A collective on a stage (staging.py): its arrays, flat, and the elements of a rank's part."""

    collective: str
    source: Array
    target: Array
    part: int
    #: What is done at its end, where that differs from what is done after a plan.
    conclude: Callable[[], Any] | None = None


def like(collective: str, array: Any, out: Any, op: Op = "") -> tuple[Any, ...] | None:
    """The key of calls like this one; None: it is of a kind that is looked at anew each time."""
    if type(array) is np.ndarray and type(out) is np.ndarray:
        return collective, array.dtype, array.shape, out.dtype, out.shape, op
    return None


def _is_rank(root: Any, size: int) -> bool:
    return hasattr(root, "__index__") and 0 <= root < size


class Chosen(NamedTuple):
    """A collective's algorithm, on one rank."""

    collective: str
    algorithm: str
    rounds: tuple[Round, ...]
    blocks: int
    staged: bool = False

    @property
    def receives(self) -> bool:
        return any(this.receives for this in self.rounds)


_MOST_RECIPES: Final = 1024
#: Up to so many bytes every rank of an all_reduce on the stage reduces everything itself: one wait instead of two. Of
#: two ranks each always does, which moves no more bytes than if they shared the work.
_WHOLE: Final = 16 * KIB


class Running:
    """What the forms of collectives have in common. A group sets `rank`, `size` and `_context`."""

    rank: int
    size: int
    _context: GroupContext
    #: Of calls that may come again: collective, dtype, elements, operation.
    _recipes: dict[tuple[Any, ...], Recipe]

    @property
    def sequence(self) -> int:
        """How many collectives this rank has called in this group: the number of the next one."""
        return self._context.log.count

    def _choose(self, collective: str, nbytes: int, options: Options, root: int = 0) -> Chosen:
        if not _is_rank(root, self.size):
            raise UsageError(f"There is no rank {root} in a group of {self.size}. Correct root.")
        context = self._context
        name = self._algorithm(collective, nbytes, options)
        algorithm = ALGORITHMS[collective][name]
        world = World(self.size, context.hosts, root, algorithm.segments(nbytes, self.size))
        return Chosen(
            collective, name, rounds(collective, name, self.rank, world), algorithm.blocks(world), algorithm.staged
        )

    def _known(self, collective: str, array: Any, out: Any, op: Op = "") -> Recipe | None:
        """The recipe of a call like an earlier one, which was checked (`like` gave its key)."""
        if type(array) is np.ndarray and type(out) is np.ndarray:
            recipe = self._recipes.get((collective, array.dtype, array.shape, out.dtype, out.shape, op))
            if recipe is not None and array.flags.c_contiguous and out.flags.carray:
                return recipe
        return None

    def _is_staged(self, collective: str, nbytes: int, options: Options, itemsize: int = 1) -> bool:
        """Whether it runs on the group's stage, and that is there."""
        if self._founding.stage is None or not 0 < itemsize <= MOST_ITEM_BYTES:
            return False
        return ALGORITHMS[collective][self._algorithm(collective, nbytes, options)].staged

    def _algorithm(self, collective: str, nbytes: int, options: Options) -> str:
        context = self._context
        return context.agent.chooser.choose(
            collective, nbytes, self.size, context.hosts_count, options.algorithm, context.founding.possible
        )

    def _run(
        self,
        chosen: Chosen,
        space: Space,
        conclude: Callable[[], Any],
        options: Options,
        what: str = "",
        reduction: Reducer | None = None,
        root: int | None = None,
        name: str = "",
        job: Job | None = None,
    ) -> Any:
        """`what`: of what; it must be the same on all ranks. `job`: how it goes on a stage, if there is to be one."""
        context = self._context
        if job is not None and chosen.staged and self._may_be_staged(job, reduction):
            fallback = chosen.rounds, space, reduction, conclude
            return self._run_staged(job, job.conclude or conclude, options, what, reduction, root, fallback)
        op = "" if reduction is None else reduction.name
        signature = Signature(name or chosen.collective, what, op, root, chosen.algorithm)
        timeout = context.hub.config.timeout if options.timeout is None else options.timeout
        with context.hub.engine:
            call = context.next_call(signature)
            collective = Collective(context, call, chosen.rounds, space, reduction, conclude, timeout)
            if options.async_op and options.timeout is not None:
                collective.ends = collective.began + timeout
            context.begin(collective)
        return collective if options.async_op else collective.result()

    def _may_be_staged(self, job: Job, reduction: Reducer | None) -> bool:
        """There is a stage, or there may be one; and no user's code runs on it."""
        users = reduction is not None and reduction.is_users
        return self._founding.state is not State.NONE and not users and 0 < job.source.itemsize <= MOST_ITEM_BYTES

    @property
    def _founding(self) -> Founding:
        return self._context.founding

    def _run_staged(
        self,
        job: Job,
        conclude: Callable[[], Any],
        options: Options,
        what: str = "",
        reduction: Reducer | None = None,
        root: int | None = None,
        fallback: Fallback | None = None,
        key: tuple[Any, ...] | None = None,
    ) -> Any:
        """`key`: under which the next call that is alike finds the recipe sooner."""
        op = "" if reduction is None else reduction.name
        alike = (job.collective, job.source.dtype, job.part, what, op, root)
        recipe = self._recipes.get(alike)
        if recipe is None:
            recipe = self._recipe(job, what, reduction, root)
            if self._founding.stage is not None:
                self._remember(alike, recipe)
        if key is not None and options.algorithm is None:
            self._remember(key, recipe)
        return self._pass(recipe, job.source, job.target, None, options.timeout, options.async_op, conclude, fallback)

    def _remember(self, key: tuple[Any, ...], recipe: Recipe) -> None:
        if len(self._recipes) >= _MOST_RECIPES:
            self._recipes.clear()
        self._recipes[key] = recipe

    def _recipe(self, job: Job, what: str, reduction: Reducer | None, root: int | None) -> Recipe:
        plan = job.collective
        if plan == "all_reduce":
            whole = self.size == 2 or job.source.nbytes <= _WHOLE
            plan = "all_reduce whole" if whole else "all_reduce slices"
        stage, itemsize = self._founding.stage, job.source.itemsize
        op, apply = ("", None) if reduction is None else (reduction.name, reduction.apply)
        signature = Signature(job.collective, what, op, root, "shared")
        case = Case(self.rank, self.size, root or 0, job.part, SLOT_BYTES // itemsize)
        recipe = Recipe(signature, digest(signature), steps(plan, case), apply)
        paying = pays(job.collective, self.size, max(job.source.nbytes, job.target.nbytes))
        leader = leader_of(job.collective, root, self.size, job.part * itemsize)
        if paying or leader >= 0:
            pulled = acts(job.collective, case, sizes(itemsize, self.size, SLOT_BYTES))
            recipe = recipe._replace(acts=pulled, pays=paying, leader=leader)
        if stage is None:
            return recipe
        if recipe.pulled(stage):
            return recipe._replace(express=Pulling(stage, recipe.acts, recipe.digest, apply, job.source))
        led = recipe.led(stage)
        form = next((form for form in FORMS if form.serves(recipe.steps)), None)
        express = form and form(stage, recipe.steps, recipe.digest, apply, job.source, job.target, led)
        may_overlap = express is not None and express.may_overlap and not led
        return recipe._replace(
            express=Led(stage, recipe, job.source, express) if led else express, may_overlap=may_overlap
        )

    def _pass(
        self,
        recipe: Recipe,
        source: Array,
        target: Array,
        result: Any,
        timeout: float | None = None,
        async_op: bool = False,
        conclude: Callable[[], Any] | None = None,
        fallback: Fallback | None = None,
    ) -> Any:
        """Over the stage. Who waits anyway takes the steps itself, unless that takes long. It brings `result`, or what
        `conclude` returns at its end."""
        context = self._context
        hub, stage = context.hub, context.founding.stage
        engine, passage, staged = hub.engine, None, None
        if not engine.lock.acquire(False):
            engine.acquire()
        try:
            if context.unusable or hub.closed:
                context.refuse(recipe.signature)
            sequence = context.log.note(recipe.signature, recipe.digest, 3)
            try:
                if stage is not None and not async_op and stage.may_run():
                    express, taken = recipe.express, 0
                    if express is not None:
                        taken = express.run(sequence, source, target)
                        if taken == express.steps:
                            return result if conclude is None else conclude()
                    passage = recipe.passage(stage, sequence, source, target, taken)
                    if stage.run(passage):
                        return result if conclude is None else conclude()
                end = conclude or (lambda: result)
                call, within = context.log[sequence], hub.config.timeout if timeout is None else timeout
                staged = StagedCollective(context, call, recipe, source, target, end, within, fallback, passage)
                if async_op and timeout is not None:
                    staged.ends = staged.began + timeout
                context.begin(staged)
            except BaseException as error:
                if staged is not None:
                    staged.stop(error)
                else:
                    context.log[sequence].given_up = str(error) or type(error).__name__
                    recipe.give_up(stage, sequence)
                raise
        finally:
            engine.lock.release()
            if engine.deferred or engine.contenders:
                engine.after_release()
        return staged if async_op else staged.result()

    def _own_block(self, own: Array) -> Space:
        """n blocks, of which a rank that passes nothing on needs its own only."""
        nothing = np.empty(0, own.dtype)
        return Space(
            Part(nothing, [0] * self.rank), Part(own, [len(own)]), Part(nothing, [0] * (self.size - self.rank - 1))
        )

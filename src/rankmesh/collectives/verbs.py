"""The collectives as users call them: arguments checked, memory laid out in blocks, a plan chosen and run.

For all of them:

- Every member of the group calls the same collectives in the same order; where they do not, DesyncError says who
  called what. Threads that call independently use groups of their own: `dup()`.
- Arrays are numpy's or torch's on the CPU, C-contiguous where they are written to. `out=None` means in place where the
  result has the shape of the input, otherwise a new one of the same library. The result is returned.
- `algorithm` overrides the choice (choosing.py), on all ranks alike. `async_op=True` returns a Work at once, whose
  result is the collective's; the arrays belong to it until it is done. `timeout` is in seconds (None:
  Config.timeout).
- `op` is a name (sum prod min max avg band bor bxor land lor lxor) or a function of two arrays (reducing.py).
- If a member is lost, it fails on all others with PeerLost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rankmesh.collectives import fusing
from rankmesh.collectives.agent import GroupContext
from rankmesh.collectives.arguments import Array, Operand, by_rank, flat_input, flat_output, operand, output
from rankmesh.collectives.calls import Signature
from rankmesh.collectives.choosing import ALGORITHMS, World, rounds
from rankmesh.collectives.compression import Compressor, exchange
from rankmesh.collectives.fusing import is_list
from rankmesh.collectives.kinds import Kind
from rankmesh.collectives.plan import Round
from rankmesh.collectives.reducing import Op, Reducer, Reduction
from rankmesh.collectives.running import Collective
from rankmesh.collectives.space import Part, Space, even
from rankmesh.errors import UsageError


class Options(NamedTuple):
    """What every collective takes."""

    algorithm: str | None = None
    async_op: bool = False
    timeout: float | None = None


class Chosen(NamedTuple):
    """A collective's algorithm, on one rank."""

    collective: str
    algorithm: str
    rounds: tuple[Round, ...]
    blocks: int

    @property
    def receives(self) -> bool:
        return any(this.receives for this in self.rounds)


class Running:
    """What the forms of collectives have in common. A group sets `rank`, `size` and `_context`."""

    rank: int
    size: int
    _context: GroupContext

    def _choose(self, collective: str, nbytes: int, options: Options, root: int = 0) -> Chosen:
        if not 0 <= root < self.size:
            raise UsageError(f"There is no rank {root} in a group of {self.size}. Correct root.")
        context = self._context
        name = context.agent.chooser.choose(collective, nbytes, self.size, len({*context.hosts}), options.algorithm)
        algorithm = ALGORITHMS[collective][name]
        world = World(self.size, context.hosts, root, algorithm.segments(nbytes, self.size))
        return Chosen(collective, name, rounds(collective, name, self.rank, world), algorithm.blocks(world))

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
    ) -> Any:
        """`what`: of what; it must be the same on all ranks."""
        op = "" if reduction is None else reduction.name
        signature = Signature(name or chosen.collective, what, op, root, chosen.algorithm)
        context = self._context
        timeout = context.hub.config.timeout if options.timeout is None else options.timeout
        with context.hub.engine:
            call = context.next_call(signature)
            collective = Collective(context, call, chosen.rounds, space, reduction, conclude, timeout)
            context.begin(collective)
        return collective if options.async_op else collective.result()

    def _own_block(self, own: Array) -> Space:
        """n blocks, of which a rank that passes nothing on needs its own only."""
        nothing = np.empty(0, own.dtype)
        return Space(
            Part(nothing, [0] * self.rank), Part(own, [len(own)]), Part(nothing, [0] * (self.size - self.rank - 1))
        )


def _in_place_or(out: Any, given: Operand) -> tuple[Operand, Array]:
    """Where a result of the shape of its input goes, with the input in it; and that as a flat array."""
    target = given if out is None else output(out, given.array.shape, given.kind)
    flat = flat_output(target.array)
    if target is not given:
        np.copyto(target.array, given.array)
    return target, flat


class Collectives(Running):
    """The collectives over equal parts."""

    def barrier(self, timeout: float | None = None, *, async_op: bool = False) -> Any:
        """Wait until every rank has called it."""
        options = Options(None, async_op, timeout)
        return self._run(self._choose("barrier", 0, options), Space(), lambda: None, options)

    def broadcast(
        self,
        array: Any,
        root: int = 0,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """The root's array, in every rank's array of the same dtype and number of elements. A list of arrays travels
        as one (fusing.py)."""
        options = Options(algorithm, async_op, timeout)
        if is_list(array):
            return fusing.broadcast(self, array, root, options)
        given = operand(array)
        flat = flat_input(given.array) if self.rank == root else flat_output(given.array, "array")
        chosen = self._choose("broadcast", flat.nbytes, options, root)
        space = Space(Part(flat, even(flat.size, chosen.blocks)))
        return self._run(chosen, space, lambda: given.value, options, given.what, root=root)

    def reduce(
        self,
        array: Any,
        op: Op = "sum",
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """All ranks' arrays reduced, at the root: in `out`, or in place. None on the other ranks, whose arrays stay."""
        options = Options(algorithm, async_op, timeout)
        given = operand(array)
        reduction = Reduction(op, given.kind, self.size)
        chosen = self._choose("reduce", given.array.nbytes, options, root)
        target: Operand = given
        if self.rank == root:
            target, flat = _in_place_or(out, given)
        else:
            flat = flat_input(given.array)
            if chosen.receives and np.may_share_memory(flat, given.array):
                flat = flat.copy()

        def conclude() -> Any:
            if self.rank != root:
                return None
            reduction.finish(flat)
            return target.value

        space = Space(Part(flat, even(flat.size, chosen.blocks)))
        return self._run(chosen, space, conclude, options, given.what, reduction, root)

    def all_reduce(
        self,
        array: Any,
        op: Op = "sum",
        *,
        out: Any = None,
        compression: Compressor | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """All ranks' arrays reduced, on every rank: in `out`, or in place. A list of arrays travels as one, or as one
        for each dtype in it (fusing.py), and is returned as a list. `compression`: how a sum or an average of floating
        point numbers is sent in fewer bytes (compression/)."""
        options = Options(algorithm, async_op, timeout)
        if compression is not None:
            return exchange.all_reduce(self, array, op, out, compression, options)
        if is_list(array):
            return fusing.all_reduce(self, array, op, out, options)
        given = operand(array)
        target, flat = _in_place_or(out, given)
        return self._all_reduce_flat(flat, given.kind, op, options, lambda: target.value)

    def _all_reduce_flat(self, flat: Array, kind: Kind, op: Op, options: Options, conclude: Callable[[], Any]) -> Any:
        reduction = Reduction(op, kind, self.size)
        chosen = self._choose("all_reduce", flat.nbytes, options)

        def finish() -> Any:
            reduction.finish(flat)
            return conclude()

        space = Space(Part(flat, even(flat.size, chosen.blocks)))
        return self._run(chosen, space, finish, options, f"{flat.size} {kind.name}", reduction)

    def all_gather(
        self,
        array: Any,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """All ranks' arrays, of one shape and dtype, on every rank: an array whose first dimension is the ranks."""
        options = Options(algorithm, async_op, timeout)
        given = operand(array)
        own = given.array
        target = output(out, (self.size, *own.shape), given.kind)
        flat = flat_output(target.array)
        target.array[self.rank] = own
        chosen = self._choose("all_gather", own.nbytes, options)
        space = Space(Part(flat, [own.size] * self.size))
        return self._run(chosen, space, lambda: target.value, options, given.what)

    def gather(
        self,
        array: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """All ranks' arrays, of one shape and dtype, at the root: an array whose first dimension is the ranks. None on
        the others."""
        options = Options(algorithm, async_op, timeout)
        given = operand(array)
        own = given.array
        chosen = self._choose("gather", own.nbytes, options, root)
        result: Any = None
        if self.rank == root or chosen.receives:
            whole = output(out if self.rank == root else None, (self.size, *own.shape), given.kind)
            result = whole.value if self.rank == root else None
            whole.array[self.rank] = own
            space = Space(Part(flat_output(whole.array), [own.size] * self.size))
        else:
            space = self._own_block(flat_input(own))
        return self._run(chosen, space, lambda: result, options, given.what, root=root)

    def scatter(
        self,
        array: Any = None,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Each rank's part of the root's array, whose first dimension is the ranks: in `out`, which the root may
        leave out."""
        options = Options(algorithm, async_op, timeout)
        if self.rank == root:
            given = operand(array)
            target = output(out, by_rank(given.array, self.size, "scatter"), given.kind)
        elif out is None:
            raise UsageError(
                "Ranks other than the root do not know what scatter brings. Pass out=, of the right shape and dtype."
            )
        else:
            given = target = operand(out)
        own = flat_output(target.array)
        chosen = self._choose("scatter", own.nbytes, options, root)
        counts = [own.size] * self.size
        if self.rank != root:
            return self._take_part(chosen, own, counts, lambda: target.value, options, target.what, root)
        space = Space(Part(flat_input(given.array), counts))
        target.array[...] = given.array[root]
        return self._run(chosen, space, lambda: target.value, options, target.what, root=root)

    def _take_part(
        self,
        chosen: Chosen,
        own: Array,
        counts: list[int],
        conclude: Callable[[], Any],
        options: Options,
        what: str,
        root: int,
        name: str = "",
    ) -> Any:
        """The rest of a scatter, on a rank that is not its root: who passes parts on needs room for them."""
        if not any(this.sends for this in chosen.rounds):
            return self._run(chosen, self._own_block(own), conclude, options, what, root=root, name=name)
        room = np.empty(sum(counts), own.dtype)
        first = sum(counts[: self.rank])

        def take() -> Any:
            np.copyto(own, room[first : first + len(own)])
            return conclude()

        return self._run(chosen, Space(Part(room, counts)), take, options, what, root=root, name=name)

    def reduce_scatter(
        self,
        array: Any,
        op: Op = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Of all ranks' arrays, whose first dimension is the ranks: this rank's entry, reduced."""
        options = Options(algorithm, async_op, timeout)
        given = operand(array)
        target = output(out, by_rank(given.array, self.size, "reduce_scatter"), given.kind)
        return self._reduce_parts(given, op, target, [target.array.size] * self.size, options, "reduce_scatter")

    def _reduce_parts(
        self, given: Operand, op: Op, target: Operand, counts: list[int], options: Options, name: str
    ) -> Any:
        reduction = Reduction(op, given.kind, self.size)
        chosen = self._choose("reduce_scatter", given.array.nbytes, options)
        work, own = given.array.reshape(-1).copy(), flat_output(target.array)
        first = sum(counts[: self.rank])

        def take() -> Any:
            np.copyto(own, work[first : first + len(own)])
            reduction.finish(own)
            return target.value

        what = f"{counts if name.endswith('_v') else counts[0]} {given.kind.name}"
        return self._run(chosen, Space(Part(work, counts)), take, options, what, reduction, name=name)

    def all_to_all(
        self,
        array: Any,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Entry s of the result is what rank s had in the entry of this rank; the first dimension is the ranks."""
        options = Options(algorithm, async_op, timeout)
        given = operand(array)
        by_rank(given.array, self.size, "all_to_all")
        target = output(out, given.array.shape, given.kind)
        flat, came = flat_input(given.array), flat_output(target.array)
        if np.may_share_memory(flat, came):
            flat = flat.copy()
        each = flat.size // self.size
        counts = [each] * self.size
        chosen = self._choose("all_to_all", each * flat.itemsize, options)
        parts = [Part(flat, counts), Part(came, counts)]
        if chosen.algorithm == "bruck":
            parts.append(Part(np.empty_like(flat), counts))
        return self._run(chosen, Space(*parts), lambda: target.value, options, given.what)

    def scan(
        self, array: Any, op: Op = "sum", *, out: Any = None, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """The arrays of the ranks up to this one reduced, in the order of ranks: in `out`, or in place."""
        given = operand(array)
        reduction = self._scanning(op, given.kind)
        target, flat = _in_place_or(out, given)
        options = Options(None, async_op, timeout)
        chosen = self._choose("scan", flat.nbytes, options)
        space = Space(Part(flat, [flat.size]))
        return self._run(chosen, space, lambda: target.value, options, given.what, reduction)

    def exscan(
        self, array: Any, op: Op = "sum", *, out: Any = None, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """The same of the ranks below this one. Rank 0 has none: it gets None, and its array stays."""
        given = operand(array)
        reduction = self._scanning(op, given.kind)
        target = given if out is None else output(out, given.array.shape, given.kind)
        flat, own = flat_output(target.array), given.array.reshape(-1).copy()
        options = Options(None, async_op, timeout)
        chosen = self._choose("exscan", flat.nbytes, options)
        space = Space(Part(own, [own.size]), Part(flat, [flat.size]))
        result = target.value if self.rank else None
        return self._run(chosen, space, lambda: result, options, given.what, reduction)

    def _scanning(self, op: Op, kind: Kind) -> Reduction:
        if op == "avg":
            raise UsageError("A scan has no average: each rank's is over another number of ranks. Use sum, and divide.")
        return Reduction(op, kind, self.size)

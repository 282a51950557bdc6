"""The collectives as users call them: arguments checked, memory laid out in blocks, a plan chosen and run.

For all of them:

- Every member of the group calls the same collectives in the same order; where they do not, DesyncError says who
  called what. Threads that call independently use groups of their own: `dup()`.
- Arrays are C-contiguous where they are written to. `out=None` means in place where the result has the shape of the
  input, otherwise a new array. The result is returned.
- `algorithm` overrides the choice (choosing.py), on all ranks alike. `async_op=True` returns a Work at once, whose
  result is the collective's; the arrays belong to it until it is done. `timeout` is in seconds (None:
  Config.timeout).
- `op` is a name (sum prod min max avg band bor bxor land lor lxor) or a function of two arrays (reducing.py).
- If a member is lost, it fails on all others with PeerLost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rankmesh.collectives.agent import GroupContext
from rankmesh.collectives.arguments import Array, as_array, by_rank, flat_input, flat_output, output
from rankmesh.collectives.calls import Signature
from rankmesh.collectives.choosing import ALGORITHMS, rounds
from rankmesh.collectives.plan import Round
from rankmesh.collectives.reducing import Op, Reduction
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
        blocks = ALGORITHMS[collective][name].blocks(self.size)
        return Chosen(collective, name, rounds(collective, name, self.rank, self.size, root), blocks)

    def _run(
        self,
        chosen: Chosen,
        space: Space,
        conclude: Callable[[], Any],
        options: Options,
        what: str = "",
        reduction: Reduction | None = None,
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


def _of(array: Array) -> str:
    return f"{array.size} {array.dtype.name}"


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
        """The root's array, in every rank's array of the same dtype and number of elements."""
        options = Options(algorithm, async_op, timeout)
        array = as_array(array)
        flat = flat_input(array) if self.rank == root else flat_output(array, "array")
        chosen = self._choose("broadcast", flat.nbytes, options, root)
        return self._run(chosen, Space(Part(flat, [flat.size])), lambda: array, options, _of(array), root=root)

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
        array = as_array(array)
        reduction = Reduction(op, array.dtype, self.size)
        chosen = self._choose("reduce", array.nbytes, options, root)
        target: Array = array
        if self.rank == root:
            target = array if out is None else output(out, array.shape, array.dtype)
            flat = flat_output(target)
            if target is not array:
                np.copyto(target, array)
        else:
            flat = flat_input(array)
            if chosen.receives and np.may_share_memory(flat, array):
                flat = flat.copy()

        def conclude() -> Array | None:
            if self.rank != root:
                return None
            reduction.finish(flat)
            return target

        return self._run(chosen, Space(Part(flat, [flat.size])), conclude, options, _of(array), reduction, root)

    def all_reduce(
        self,
        array: Any,
        op: Op = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """All ranks' arrays reduced, on every rank: in `out`, or in place. A list of arrays of one dtype travels as
        one."""
        options = Options(algorithm, async_op, timeout)
        if isinstance(array, list | tuple) and all(isinstance(one, np.ndarray) for one in array):
            return self._all_reduce_list(array, op, out, options)
        array = as_array(array)
        target = array if out is None else output(out, array.shape, array.dtype)
        flat = flat_output(target)
        if target is not array:
            np.copyto(target, array)
        return self._all_reduce_flat(flat, op, options, lambda: target)

    def _all_reduce_flat(self, flat: Array, op: Op, options: Options, conclude: Callable[[], Any]) -> Any:
        reduction = Reduction(op, flat.dtype, self.size)
        chosen = self._choose("all_reduce", flat.nbytes, options)

        def finish() -> Any:
            reduction.finish(flat)
            return conclude()

        space = Space(Part(flat, even(flat.size, chosen.blocks)))
        return self._run(chosen, space, finish, options, _of(flat), reduction)

    def _all_reduce_list(self, arrays: Sequence[Array], op: Op, out: Sequence[Any] | None, options: Options) -> Any:
        arrays = [as_array(array) for array in arrays]
        if len({array.dtype for array in arrays}) > 1:
            raise UsageError("The arrays of one all_reduce have one dtype. Make a call for each dtype.")
        targets = arrays if out is None else [output(o, a.shape, a.dtype) for o, a in zip(out, arrays, strict=True)]
        if not arrays:
            raise UsageError("all_reduce was given a list without arrays. Pass at least one.")
        for target in targets:
            if not target.flags.writeable:
                flat_output(target)
        fused = np.concatenate([array.reshape(-1) for array in arrays])

        def spread() -> list[Array]:
            at = 0
            for target in targets:
                target[...] = fused[at : at + target.size].reshape(target.shape)
                at += target.size
            return list(targets)

        return self._all_reduce_flat(fused, op, options, spread)

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
        array = as_array(array)
        target = output(out, (self.size, *array.shape), array.dtype)
        flat = flat_output(target)
        target[self.rank] = array
        chosen = self._choose("all_gather", array.nbytes, options)
        return self._run(chosen, Space(Part(flat, [array.size] * self.size)), lambda: target, options, _of(array))

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
        array = as_array(array)
        chosen = self._choose("gather", array.nbytes, options, root)
        target: Array | None = None
        if self.rank == root or chosen.receives:
            whole = output(out if self.rank == root else None, (self.size, *array.shape), array.dtype)
            target = whole if self.rank == root else None
            whole[self.rank] = array
            space = Space(Part(flat_output(whole), [array.size] * self.size))
        else:
            space = self._own_block(flat_input(array))
        return self._run(chosen, space, lambda: target, options, _of(array), root=root)

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
            array = as_array(array)
            target = output(out, by_rank(array, self.size, "scatter"), array.dtype)
        elif out is None:
            raise UsageError(
                "Ranks other than the root do not know what scatter brings. Pass out=, of the right shape and dtype."
            )
        else:
            target = as_array(out)
        own = flat_output(target)
        chosen = self._choose("scatter", target.nbytes, options, root)
        counts = [target.size] * self.size
        if self.rank == root:
            space = Space(Part(flat_input(array), counts))
            target[...] = array[root]
            return self._run(chosen, space, lambda: target, options, _of(target), root=root)
        return self._take_part(chosen, own, counts, lambda: target, options, _of(target), root)

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
        array = as_array(array)
        target = output(out, by_rank(array, self.size, "reduce_scatter"), array.dtype)
        counts = [target.size] * self.size
        return self._reduce_parts(array, op, flat_output(target), counts, lambda: target, options, "reduce_scatter")

    def _reduce_parts(
        self,
        array: Array,
        op: Op,
        own: Array,
        counts: list[int],
        conclude: Callable[[], Any],
        options: Options,
        name: str,
    ) -> Any:
        reduction = Reduction(op, array.dtype, self.size)
        chosen = self._choose("reduce_scatter", array.nbytes, options)
        work = array.reshape(-1).copy()
        first = sum(counts[: self.rank])

        def take() -> Any:
            np.copyto(own, work[first : first + len(own)])
            reduction.finish(own)
            return conclude()

        what = f"{counts if name.endswith('_v') else counts[0]} {array.dtype.name}"
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
        array = as_array(array)
        by_rank(array, self.size, "all_to_all")
        target = output(out, array.shape, array.dtype)
        flat, came = flat_input(array), flat_output(target)
        if np.may_share_memory(flat, came):
            flat = flat.copy()
        each = flat.size // self.size
        counts = [each] * self.size
        chosen = self._choose("all_to_all", each * flat.itemsize, options)
        parts = [Part(flat, counts), Part(came, counts)]
        if chosen.algorithm == "bruck":
            parts.append(Part(np.empty_like(flat), counts))
        return self._run(chosen, Space(*parts), lambda: target, options, _of(array))

    def scan(
        self, array: Any, op: Op = "sum", *, out: Any = None, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """The arrays of the ranks up to this one reduced, in the order of ranks: in `out`, or in place."""
        array = as_array(array)
        reduction = self._scanning(op, array)
        target = array if out is None else output(out, array.shape, array.dtype)
        flat = flat_output(target)
        if target is not array:
            np.copyto(target, array)
        options = Options(None, async_op, timeout)
        chosen = self._choose("scan", flat.nbytes, options)
        return self._run(chosen, Space(Part(flat, [flat.size])), lambda: target, options, _of(array), reduction)

    def exscan(
        self, array: Any, op: Op = "sum", *, out: Any = None, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """The same of the ranks below this one. Rank 0 has none: it gets None, and its array stays."""
        array = as_array(array)
        reduction = self._scanning(op, array)
        target = array if out is None else output(out, array.shape, array.dtype)
        flat = flat_output(target)
        given = array.reshape(-1).copy()
        options = Options(None, async_op, timeout)
        chosen = self._choose("exscan", flat.nbytes, options)
        space = Space(Part(given, [given.size]), Part(flat, [flat.size]))
        result = target if self.rank else None
        return self._run(chosen, space, lambda: result, options, _of(array), reduction)

    def _scanning(self, op: Op, array: Array) -> Reduction:
        if op == "avg":
            raise UsageError("A scan has no average: each rank's is over another number of ranks. Use sum, and divide.")
        return Reduction(op, array.dtype, self.size)

"""The collectives as users call them: arguments checked, memory laid out in blocks, a plan chosen and run.

For all of them:

- Every member of the group calls the same collectives in the same order; where they do not, DesyncError says who
  called what. Threads that call independently use groups of their own: `dup()`.
- Arrays are numpy's or torch's on the CPU, C-contiguous where they are written to. `out=None` means in place where the
  result has the shape of the input, otherwise a new one of the same library. The result is returned.
- `algorithm` overrides the choice (choosing.py), on all ranks alike. `async_op=True` returns a Work at once, whose
  result is the collective's; the arrays belong to it until it is done. `timeout` is in seconds (None:
  Config.timeout); an asynchronous call that is given one ends by then, also if nobody waits for it.
- `op` is a name (sum prod min max avg band bor bxor land lor lxor) or a function of two arrays (reducing.py).
- If a member is lost, it fails on all others with PeerLost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from rankmesh.buffers import copy
from rankmesh.collectives import fusing
from rankmesh.collectives.arguments import (
    Array,
    Operand,
    by_rank,
    flat_input,
    flat_output,
    flat_target,
    operand,
    output,
    parts_apart,
    roots,
)
from rankmesh.collectives.compression import Compressor, exchange
from rankmesh.collectives.fusing import is_list
from rankmesh.collectives.kinds import Kind
from rankmesh.collectives.reducing import Op, Reduction
from rankmesh.collectives.space import Part, Space, even
from rankmesh.collectives.starting import Chosen, Job, Options, Running, like
from rankmesh.errors import UsageError

_NOTHING: Final = np.empty(0, np.uint8)
_BARRIER: Final = ("barrier",)


def _none() -> None:
    """What a barrier returns."""


def _in_place_or(out: Any, given: Operand, apart: bool = False) -> tuple[Operand, Array, Array]:
    """Where a result of the shape of its input goes; and, flat, what is read and what is written: one array with the
    input in it, or two where they may be `apart`, and are."""
    target = given if out is None else output(out, given.array.shape, given.kind)
    flat = flat_target(target, given)
    if target is given:
        return target, flat, flat
    if apart and given.array.flags.c_contiguous and not np.may_share_memory(given.array, flat):
        return target, flat_input(given.array), flat
    np.copyto(target.array, given.array)
    return target, flat, flat


def _wants_one(out: Any, array: Any) -> bool:
    """Of calls that may be known: the result is to be a new array."""
    return out is None and type(array) is np.ndarray


def _takes(out: Any, array: Array) -> bool:
    """`out` is a place for the result of calls that are known with `array`, and not in the same memory."""
    like = type(out) is np.ndarray and out.shape == array.shape and out.dtype == array.dtype and out.flags.carray
    return like and not np.may_share_memory(out, array)


class Collectives(Running):
    """The collectives over equal parts."""

    def barrier(self, timeout: float | None = None, *, algorithm: str | None = None, async_op: bool = False) -> Any:
        """Wait until every rank has called it."""
        recipe = self._recipes.get(_BARRIER)
        if recipe is not None and algorithm is None:
            return self._pass(recipe, _NOTHING, _NOTHING, None, timeout, async_op)
        options = Options(algorithm, async_op, timeout)
        job = Job("barrier", _NOTHING, _NOTHING, 0)
        if self._is_staged("barrier", 0, options):
            return self._run_staged(job, _none, options, key=_BARRIER)
        return self._run(self._choose("barrier", 0, options), Space(), _none, options, job=job)

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
        if type(array) is np.ndarray and algorithm is None and not async_op:
            recipe = self._recipes.get(("broadcast", array.dtype, array.size, root))
            if recipe is not None and array.flags.carray:
                flat = array if array.ndim == 1 else array.ravel()
                return self._pass(recipe, flat, flat, array, timeout)
        options = Options(algorithm, async_op, timeout)
        if is_list(array):
            return fusing.broadcast(self, array, root, options)
        given = operand(array)
        flat = flat_input(given.array) if self.rank == root else flat_output(given.array, "The array")
        job = Job("broadcast", flat, flat, flat.size)
        if self._is_staged("broadcast", flat.nbytes, options, flat.itemsize) and 0 <= root < self.size:
            key = ("broadcast", flat.dtype, flat.size, root) if type(given.kind) is Kind else None
            return self._run_staged(job, lambda: given.value, options, given.what, root=root, key=key)
        chosen = self._choose("broadcast", flat.nbytes, options, root)
        space = Space(Part(flat, even(flat.size, chosen.blocks)))
        return self._run(chosen, space, lambda: given.value, options, given.what, root=root, job=job)

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
        staged = not reduction.is_users and self._is_staged("reduce", given.array.nbytes, options, given.array.itemsize)
        target: Operand = given
        if self.rank == root:
            target, source, flat = _in_place_or(out, given, apart=staged)
        else:
            source = flat = flat_input(given.array)
            if not staged and chosen.receives and np.may_share_memory(flat, given.array):
                source = flat = flat.copy()  # a plan over messages works in it

        def conclude() -> Any:
            if self.rank != root:
                return None
            reduction.finish(flat)
            return target.value

        space = Space(Part(flat, even(flat.size, chosen.blocks)))
        job = Job("reduce", source, flat, flat.size)
        return self._run(chosen, space, conclude, options, given.what, reduction, root, job=job)

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
        """All ranks' arrays reduced, on every rank: in `out`, and the array stays, or in place. A list of arrays goes
        as one, or as one for each dtype in it (fusing.py), and is returned as a list. `compression`: how a sum or an
        average of floating point numbers is sent in fewer bytes (compression/)."""
        plain = compression is None and algorithm is None and not async_op
        if plain and type(array) is np.ndarray and type(op) is str:
            recipe = self._recipes.get(("all_reduce", array.dtype, array.size, op))
            if recipe is not None and array.flags.carray:  # the like was called before: this is the hot path
                if out is None or out is array:
                    flat = array if array.ndim == 1 else array.ravel()
                    return self._pass(recipe, flat, flat, array, timeout)
                if _takes(out, array):
                    return self._pass(recipe, array.ravel(), out.ravel(), out, timeout)
        options = Options(algorithm, async_op, timeout)
        if compression is not None:
            return exchange.all_reduce(self, array, op, out, compression, options)
        if is_list(array):
            return fusing.all_reduce(self, array, op, out, options)
        return self._all_reduce_one(operand(array), out, op, options)

    def _all_reduce_one(self, given: Operand, out: Any, op: Op, options: Options) -> Any:
        array, kind = given.array, given.kind
        reduction = Reduction(op, kind, self.size)
        staged = not reduction.is_users and self._is_staged("all_reduce", array.nbytes, options, array.itemsize)
        target, source, flat = _in_place_or(out, given, apart=staged)

        def finish() -> Any:
            reduction.finish(flat)
            return target.value

        job = Job("all_reduce", source, flat, flat.size)
        if staged:
            key = ("all_reduce", flat.dtype, flat.size, op) if type(kind) is Kind and op != "avg" else None
            return self._run_staged(job, finish, options, given.what, reduction, key=key)
        chosen = self._choose("all_reduce", flat.nbytes, options)
        space = Space(Part(flat, even(flat.size, chosen.blocks)))
        return self._run(chosen, space, finish, options, given.what, reduction, job=job)

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
        if algorithm is None and not async_op:
            made = np.empty((self.size, *array.shape), array.dtype) if _wants_one(out, array) else out
            recipe = self._known("all_gather", array, made)
            if recipe is not None and (made is not out or recipe.may_overlap or not np.may_share_memory(array, out)):
                flat = array if array.ndim == 1 else array.ravel()
                return self._pass(recipe, flat, made.ravel(), made, timeout)
        options = Options(algorithm, async_op, timeout)
        given = operand(array)
        own = given.array
        target = output(out, (self.size, *own.shape), given.kind)
        flat = flat_output(target.array)
        place = flat[self.rank * own.size : (self.rank + 1) * own.size]
        if self._is_staged("all_gather", own.nbytes, options, own.itemsize):
            source = flat_input(own)
            if np.may_share_memory(source, flat) and source.ctypes.data != place.ctypes.data:
                source = source.copy()
            job = Job("all_gather", source, flat, own.size)
            key = like("all_gather", array, target.value)
            return self._run_staged(job, lambda: target.value, options, given.what, key=key)
        chosen = self._choose("all_gather", own.nbytes, options)
        target.array[self.rank] = own
        job = Job("all_gather", place, flat, own.size)
        space = Space(Part(flat, [own.size] * self.size))
        return self._run(chosen, space, lambda: target.value, options, given.what, job=job)

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
            flat = flat_output(whole.array)
            space = Space(Part(flat, [own.size] * self.size))
        else:
            flat = flat_input(own)
            space = self._own_block(flat)
        job = Job("gather", flat_input(own), flat, own.size)
        return self._run(chosen, space, lambda: result, options, given.what, root=root, job=job)

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
            given = roots(array, "scatter")
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
        flat = parts_apart(given.array, own, counts, root)
        target.array[...] = given.array[root]
        job = Job("scatter", flat, flat, own.size)
        return self._run(
            chosen, Space(Part(flat, counts)), lambda: target.value, options, target.what, root=root, job=job
        )

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
            job = None if name else Job("scatter", own, own, own.size)
            return self._run(chosen, self._own_block(own), conclude, options, what, root=root, name=name, job=job)
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
        if algorithm is None and not async_op and type(op) is str and op != "avg":
            made = np.empty(array.shape[1:], array.dtype) if _wants_one(out, array) else out
            recipe = self._known("reduce_scatter", array, made, op)
            if recipe is not None and (made is not out or recipe.may_overlap or not np.may_share_memory(array, out)):
                flat = made if made.ndim == 1 else made.ravel()
                return self._pass(recipe, array.ravel(), flat, made, timeout)
        options = Options(algorithm, async_op, timeout)
        given = operand(array)
        target = output(out, by_rank(given.array, self.size, "reduce_scatter"), given.kind)
        return self._reduce_parts(given, op, target, [target.array.size] * self.size, options, "reduce_scatter")

    def _reduce_parts(
        self, given: Operand, op: Op, target: Operand, counts: list[int], options: Options, name: str
    ) -> Any:
        reduction = Reduction(op, given.kind, self.size)
        own = flat_output(target.array)
        even_parts = not name.endswith("_v")
        what = f"{counts[0] if even_parts else counts} {given.kind.name}"

        def finish() -> Any:
            reduction.finish(own)
            return target.value

        staged = self._is_staged("reduce_scatter", given.array.nbytes, options, own.itemsize)
        if staged and even_parts and not reduction.is_users:
            source = flat_input(given.array)
            if np.may_share_memory(source, own):
                source = source.copy()
            key = like("reduce_scatter", given.value, target.value, op)
            job = Job("reduce_scatter", source, own, own.size)
            return self._run_staged(job, finish, options, what, reduction, key=key)
        chosen = self._choose("reduce_scatter", given.array.nbytes, options)
        work = given.array.reshape(-1).copy()
        first = sum(counts[: self.rank])

        def take() -> Any:
            np.copyto(own, work[first : first + len(own)])
            return finish()

        later = Job("reduce_scatter", work, own, own.size, finish) if even_parts else None
        return self._run(chosen, Space(Part(work, counts)), take, options, what, reduction, name=name, job=later)

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
        if algorithm is None and not async_op:
            made = np.empty(array.shape, array.dtype) if _wants_one(out, array) else out
            recipe = self._known("all_to_all", array, made)
            if recipe is not None and (made is not out or recipe.may_overlap or not np.may_share_memory(array, out)):
                return self._pass(recipe, array.ravel(), made.ravel(), made, timeout)
        options = Options(algorithm, async_op, timeout)
        given = operand(array)
        by_rank(given.array, self.size, "all_to_all")
        target = output(out, given.array.shape, given.kind)
        flat, came = flat_input(given.array), flat_output(target.array)
        if np.may_share_memory(flat, came):
            flat = flat.copy()
        each = flat.size // self.size
        counts = [each] * self.size
        here = slice(each * self.rank, each * (self.rank + 1))
        job = Job("all_to_all", flat, came, each)
        if self._is_staged("all_to_all", each * flat.itemsize, options, flat.itemsize):
            key = like("all_to_all", array, target.value)
            return self._run_staged(job, lambda: target.value, options, given.what, key=key)
        copy(came[here], flat[here])
        chosen = self._choose("all_to_all", each * flat.itemsize, options)
        parts = [Part(flat, counts), Part(came, counts)]
        if chosen.algorithm == "bruck":
            parts.append(Part(np.empty_like(flat), counts))
        return self._run(chosen, Space(*parts), lambda: target.value, options, given.what, job=job)

    def scan(
        self,
        array: Any,
        op: Op = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """The arrays of the ranks up to this one reduced, in the order of ranks: in `out`, or in place."""
        given = operand(array)
        reduction = self._scanning(op, given.kind)
        target, _, flat = _in_place_or(out, given)
        options = Options(algorithm, async_op, timeout)
        chosen = self._choose("scan", flat.nbytes, options)
        space = Space(Part(flat, [flat.size]))
        return self._run(chosen, space, lambda: target.value, options, given.what, reduction)

    def exscan(
        self,
        array: Any,
        op: Op = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """The same of the ranks below this one. Rank 0 has none: it gets None, and its array stays."""
        given = operand(array)
        reduction = self._scanning(op, given.kind)
        target = given if out is None else output(out, given.array.shape, given.kind)
        flat, own = flat_target(target, given), given.array.reshape(-1).copy()
        options = Options(algorithm, async_op, timeout)
        chosen = self._choose("exscan", flat.nbytes, options)
        space = Space(Part(own, [own.size]), Part(flat, [flat.size]))
        result = target.value if self.rank else None
        return self._run(chosen, space, lambda: result, options, given.what, reduction)

    def _scanning(self, op: Op, kind: Kind) -> Reduction:
        if op == "avg":
            raise UsageError("A scan has no average: each rank's is over another number of ranks. Use sum, and divide.")
        return Reduction(op, kind, self.size)

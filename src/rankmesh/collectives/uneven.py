"""The uneven forms: parts of different numbers of rows. The object forms, which are uneven bytes. The exchange
among neighbours, which is as uneven as they like.

A row is an entry of an array's first dimension; all ranks' rows have one shape and dtype. `counts[r]` is rank r's
number of rows. Where it is optional and not given, ranks tell each other first, which an async_op cannot wait for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rankmesh import codec
from rankmesh.buffers import readable
from rankmesh.collectives.arguments import (
    Array,
    Operand,
    flat_input,
    flat_output,
    operand,
    output,
    parts_apart,
    roots,
    row_counts,
    rows_of,
)
from rankmesh.collectives.exchanging import exchange
from rankmesh.collectives.reducing import Op
from rankmesh.collectives.space import Part, Space
from rankmesh.collectives.starting import Options
from rankmesh.collectives.verbs import Collectives
from rankmesh.errors import UsageError


def _of_rows(data: Any) -> Operand:
    """A number is a row."""
    given = operand(data)
    if not given.array.ndim:
        given.array = given.array.reshape(1)
    return given


class UnevenCollectives(Collectives):
    """The collectives over parts of any size, and of objects."""

    def _told_counts(self, rows: int, counts: Sequence[int] | None, options: Options, name: str) -> list[int]:
        if counts is None:
            if options.async_op:
                raise UsageError(
                    f"{name} with async_op=True needs counts: telling them would be waited for. Pass counts=."
                )
            counts = self.all_gather(np.array(rows, np.int64), timeout=options.timeout).tolist()
        return row_counts(counts, self.size, name)

    def all_gather_v(
        self,
        array: Any,
        counts: Sequence[int] | None = None,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """All ranks' rows one after the other, on every rank."""
        options = Options(algorithm, async_op, timeout)
        given = _of_rows(array)
        own = given.array
        rows = self._told_counts(own.shape[0], counts, options, "all_gather_v")
        each = rows_of(own, rows[self.rank], "all_gather_v")
        target = output(out, (sum(rows), *own.shape[1:]), given.kind)
        first = sum(rows[: self.rank])
        flat = flat_output(target.array)
        target.array[first : first + len(own)] = own
        chosen = self._choose("all_gather", max(rows) * each * own.itemsize, options)
        space = Space(Part(flat, [count * each for count in rows]))
        what = f"{rows} {given.rows}"
        return self._run(chosen, space, lambda: target.value, options, what, name="all_gather_v")

    def gather_v(
        self,
        array: Any,
        counts: Sequence[int] | None = None,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """All ranks' rows one after the other, at the root. None on the others."""
        options = Options(algorithm, async_op, timeout)
        given = _of_rows(array)
        own = given.array
        rows = self._told_counts(own.shape[0], counts, options, "gather_v")
        each = rows_of(own, rows[self.rank], "gather_v")
        chosen = self._choose("gather", max(rows) * each * own.itemsize, options, root)
        result: Any = None
        if self.rank == root or chosen.receives:
            whole = output(out if self.rank == root else None, (sum(rows), *own.shape[1:]), given.kind)
            result = whole.value if self.rank == root else None
            first = sum(rows[: self.rank])
            whole.array[first : first + len(own)] = own
            space = Space(Part(flat_output(whole.array), [count * each for count in rows]))
        else:
            space = self._own_block(flat_input(own))
        what = f"{rows} {given.rows}"
        return self._run(chosen, space, lambda: result, options, what, root=root, name="gather_v")

    def scatter_v(
        self,
        array: Any,
        counts: Sequence[int],
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Each rank's rows of the root's array: in `out`, which the root may leave out. All ranks pass the counts."""
        options = Options(algorithm, async_op, timeout)
        rows = row_counts(counts, self.size, "scatter_v")
        if self.rank != root and out is None:
            raise UsageError(
                "Ranks other than the root do not know what scatter_v brings. Pass out=, of the right shape and dtype."
            )
        given = roots(array, "scatter_v") if self.rank == root else operand(out)
        whole = given.array
        each = rows_of(whole, sum(rows) if self.rank == root else rows[self.rank], "scatter_v")
        target = output(out, (rows[self.rank], *whole.shape[1:]), given.kind)
        own, parts = flat_output(target.array), [count * each for count in rows]
        chosen = self._choose("scatter", max(rows) * each * whole.itemsize, options, root)
        what = f"{rows} {given.rows}"
        if self.rank != root:
            return self._take_part(chosen, own, parts, lambda: target.value, options, what, root, "scatter_v")
        flat, first = parts_apart(whole, own, parts, root), sum(rows[:root])
        target.array[...] = whole[first : first + rows[root]]
        space = Space(Part(flat, parts))
        return self._run(chosen, space, lambda: target.value, options, what, root=root, name="scatter_v")

    def reduce_scatter_v(
        self,
        array: Any,
        counts: Sequence[int],
        op: Op = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Of all ranks' arrays: this rank's rows, reduced. All ranks pass the counts."""
        options = Options(algorithm, async_op, timeout)
        given = operand(array)
        rows = row_counts(counts, self.size, "reduce_scatter_v")
        each = rows_of(given.array, sum(rows), "reduce_scatter_v")
        target = output(out, (rows[self.rank], *given.array.shape[1:]), given.kind)
        return self._reduce_parts(given, op, target, [count * each for count in rows], options, "reduce_scatter_v")

    def all_to_all_v(
        self,
        array: Any,
        counts: Sequence[int],
        out_counts: Sequence[int] | None = None,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """The rows that each rank has for this one, in the order of ranks. `counts`: rows of `array` for each rank;
        `out_counts`: rows from each."""
        options = Options(algorithm or "pairwise", async_op, timeout)
        if options.algorithm == "bruck":
            raise UsageError("bruck moves blocks of one size. Use pairwise or direct for all_to_all_v.")
        given = operand(array)
        rows = row_counts(counts, self.size, "all_to_all_v")
        each = rows_of(given.array, sum(rows), "all_to_all_v")
        if out_counts is None:
            if async_op:
                raise UsageError("all_to_all_v with async_op=True needs out_counts: telling them would be waited for.")
            out_counts = self.all_to_all(np.array(rows, np.int64), timeout=timeout).tolist()
        coming = row_counts(out_counts, self.size, "all_to_all_v")
        if coming[self.rank] != rows[self.rank]:
            raise UsageError(
                f"all_to_all_v keeps {rows[self.rank]} rows for this rank by counts, and {coming[self.rank]} by "
                "out_counts. Correct one of them."
            )
        target = output(out, (sum(coming), *given.array.shape[1:]), given.kind)
        flat, came = flat_input(given.array), flat_output(target.array)
        if np.may_share_memory(flat, came):
            flat = flat.copy()
        chosen = self._choose("all_to_all", flat.nbytes, options)
        space = Space(Part(flat, [count * each for count in rows]), Part(came, [count * each for count in coming]))
        return self._run(chosen, space, lambda: target.value, options, given.rows, name="all_to_all_v")

    def neighbor_exchange(
        self,
        sends: Mapping[int, Any],
        receives: Mapping[int, Any],
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Send an array to each rank of `sends`, and receive one from each of `receives` into the array given there;
        `receives` is returned. Every rank calls it, if need be with nothing ({}); what one sends, the other receives,
        as many elements of the same dtype. `Grid` finds the neighbours in a box."""
        return exchange(self, sends, receives, Options(None, async_op, timeout))

    # ------------------------------------------------------------------ objects

    def broadcast_object(self, obj: Any = None, root: int = 0, *, timeout: float | None = None) -> Any:
        """The root's object, on every rank. What travels, and how, is as for `send_object`."""
        data = self._encoded(obj) if self.rank == root else np.empty(0, np.uint8)
        nbytes = np.array(data.size, np.int64)
        self.broadcast(nbytes, root, timeout=timeout)
        if self.rank != root:
            data = np.empty(int(nbytes), np.uint8)
        self.broadcast(data, root, timeout=timeout)
        return obj if self.rank == root else self._decoded(data)

    def all_gather_object(self, obj: Any, *, timeout: float | None = None) -> list[Any]:
        """All ranks' objects, on every rank."""
        data = self._encoded(obj)
        counts = self.all_gather(np.array(data.size, np.int64), timeout=timeout).tolist()
        return self._split(self.all_gather_v(data, counts, timeout=timeout), counts)

    def gather_object(self, obj: Any, root: int = 0, *, timeout: float | None = None) -> list[Any] | None:
        """All ranks' objects, at the root. None on the others."""
        data = self._encoded(obj)
        counts = self.all_gather(np.array(data.size, np.int64), timeout=timeout).tolist()
        gathered = self.gather_v(data, counts, root, timeout=timeout)
        return None if gathered is None else self._split(gathered, counts)

    def scatter_object(
        self, objects: Sequence[Any] | None = None, root: int = 0, *, timeout: float | None = None
    ) -> Any:
        """Each rank's object of the root's list."""
        data, counts = np.empty(0, np.uint8), np.zeros(self.size, np.int64)
        if self.rank == root:
            if objects is None or len(objects) != self.size:
                raise UsageError(f"scatter_object takes a list of {self.size} objects at the root, one per rank.")
            encoded = [self._encoded(obj) for obj in objects]
            counts[:] = [len(one) for one in encoded]
            data = np.concatenate(encoded)
        self.broadcast(counts, root, timeout=timeout)
        rows = counts.tolist()
        out = np.empty(rows[self.rank], np.uint8)
        return self._decoded(self.scatter_v(data, rows, root, out=out, timeout=timeout))

    def _encoded(self, obj: Any) -> Array:
        allowed = self._context.hub.config.allow_pickle and all(
            router.peer.may_unpickle for router in self._context.routers
        )
        return np.frombuffer(b"".join(codec.encode(obj, allow_pickle=allowed)), np.uint8)

    def _decoded(self, data: Array) -> Any:
        return codec.decode(readable(data), allow_pickle=self._context.hub.config.allow_pickle)

    def _split(self, data: Array, counts: list[int]) -> list[Any]:
        ends = np.cumsum(counts)
        # each in memory of its own: the codec aligns arrays relative to the beginning of theirs
        return [self._decoded(data[end - count : end].copy()) for count, end in zip(counts, ends, strict=True)]

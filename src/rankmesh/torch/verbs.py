"""What c10d calls a process group for, on tensors, by the collectives and messages of a Group.

Names and arguments are c10d's, old and new. Lists of lists have one entry where c10d's have one per local device. For
all:

- `opts.asyncOp` false means that the caller waits at once: then the call itself is the wait, in the calling thread, and
  the Work that it returns is done. Otherwise it is under way.
- `opts.timeout` counts if it is set, else the process group's.
- Tensors are staged where need be (staging.py). What all ranks must call alike is rankmesh's to check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from rankmesh.endpoint import ANY_SOURCE
from rankmesh.errors import RankmeshError, UsageError
from rankmesh.group import Group
from rankmesh.torch import sparse
from rankmesh.torch.operations import name_of, options
from rankmesh.torch.staging import Conclude, Target, Targets, in_place, native, source, together
from rankmesh.torch.work import Failed, Part, Work, in_backward

_NO_TIME: Final = timedelta(0)
#: Of an all_reduce that the caller waited for in the call.
_DONE: Final = Work((), [])


def only(tensors: Sequence[Any], what: str = "tensors") -> Any:
    """The one entry of a list that c10d passes."""
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise UsageError(f"{what} has {len(tensors)} entries, one is taken: a rank has one device. Call once for each.")
    return tensors[0]


class Verbs:
    """The calls. A process group sets `group` and `seconds`."""

    group: Group
    #: How long an operation may take.
    seconds: float
    #: Works since `_start_coalescing`; None: it was not called.
    _coalesced: list[Work] | None = None

    def _timeout(self, opts: Any) -> float:
        timeout: timedelta = opts.timeout
        return timeout.total_seconds() if timeout > _NO_TIME else self.seconds

    def _run(
        self,
        verb: Callable[..., Any],
        *args: Any,
        opts: Any,
        outputs: Any,
        conclude: Conclude | None = None,
        **keywords: Any,
    ) -> Work:
        """Call a collective of the group now, or begin it."""
        timeout = self._timeout(opts)
        if self._coalesced is None and not getattr(opts, "asyncOp", True):  # before torch 2.8 it is not told
            verb(*args, **keywords, timeout=timeout)
            if conclude is not None:
                conclude()
            return Work((), outputs)
        try:
            part: Part = verb(*args, **keywords, timeout=timeout, async_op=True)
        except RankmeshError as error:
            if not in_backward():
                raise
            part = Failed(error)
        return self._begun(part, outputs, conclude)

    def _begun(self, part: Part, outputs: Any, conclude: Conclude | None = None) -> Work:
        work = Work((part,), outputs, () if conclude is None else (conclude,))
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    # ------------------------------------------------------------------ one tensor on each rank

    def broadcast(self, tensors: Any, opts: Any = None, **short: Any) -> Work:
        opts = options(c10d.BroadcastOptions, opts, short)
        tensor = only(tensors)
        root = opts.rootRank
        target = Target(tensor, filled=root == self.group.rank)
        conclude = None if root == self.group.rank else target.conclude
        return self._run(
            self.group.broadcast, native(target.flat), root, opts=opts, outputs=[tensor], conclude=conclude
        )

    def allreduce(self, tensors: Any, opts: Any = None, **short: Any) -> Work:
        if short or not isinstance(opts, c10d.AllreduceOptions):
            opts = options(c10d.AllreduceOptions, opts, short)
        tensor = tensors[0] if type(tensors) is list and len(tensors) == 1 else only(tensors)
        if self._coalesced is None and not getattr(opts, "asyncOp", True) and tensor.layout is torch.strided:
            array = in_place(tensor)
            if array is not None:  # the hot path: what `_run` does, with fewer calls
                self.group.all_reduce(array, name_of(opts.reduceOp), timeout=self._timeout(opts))
                return _DONE
        return self._all_reduce(tensor, opts)

    def _all_reduce(self, tensor: Tensor, opts: Any) -> Work:
        if tensor.layout is not torch.strided:
            return self._sparse(tensor, opts)
        op, conclude = name_of(opts.reduceOp), None
        array = in_place(tensor)
        if array is None:
            target = Target(tensor, filled=True)
            array, conclude = native(target.flat), target.conclude
        return self._run(self.group.all_reduce, array, op, opts=opts, outputs=[tensor], conclude=conclude)

    def _sparse(self, tensor: Tensor, opts: Any) -> Work:
        """At once: it takes several collectives, between which no other of this rank's may come."""
        sparse.all_reduce(self.group, tensor, name_of(opts.reduceOp), self._timeout(opts))
        return Work((), [tensor])

    def allreduce_sparse(self, tensors: Any, opts: Any = None) -> Work:
        return self.allreduce(tensors, opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Tensors of one dtype as one; others one by one."""
        opts = options(c10d.AllreduceCoalescedOptions, opts, {})
        if len({tensor.dtype for tensor in tensors}) != 1 or any(t.layout is not torch.strided for t in tensors):
            return self._each([self._all_reduce(tensor, opts) for tensor in tensors], list(tensors))
        target = Targets(tensors, filled=True)
        return self._run(
            self.group.all_reduce,
            native(target.flat),
            name_of(opts.reduceOp),
            opts=opts,
            outputs=list(tensors),
            conclude=target.conclude,
        )

    def reduce(self, tensors: Any, opts: Any = None, **short: Any) -> Work:
        opts = options(c10d.ReduceOptions, opts, short)
        tensor = only(tensors)
        target = Target(tensor, filled=True)
        root = opts.rootRank
        return self._run(
            self.group.reduce,
            native(target.flat),
            name_of(opts.reduceOp),
            root,
            opts=opts,
            outputs=[tensor],
            conclude=target.conclude if root == self.group.rank else None,
        )

    def barrier(self, opts: Any = None, **short: Any) -> Work:
        opts = options(c10d.BarrierOptions, opts, short)
        return self._run(self.group.barrier, opts=opts, outputs=[])

    # ------------------------------------------------------------------ gathered on all ranks, or on one

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **short: Any) -> Work:
        opts = options(c10d.AllgatherOptions, opts, short)
        outs = outputs if isinstance(outputs[0], Tensor) else only(outputs, "output_tensors")
        self._check_one_per_rank(outs, "all_gather")
        own = source(only(inputs, "input_tensors"))
        target = Targets(outs)
        keywords: dict[str, Any] = {"opts": opts, "outputs": outputs, "conclude": target.conclude}
        counts = [out.numel() for out in outs]
        if len({*counts}) == 1:
            out = native(target.flat, self.group.size, counts[0])
            return self._run(self.group.all_gather, native(own), out=out, **keywords)
        return self._run(self.group.all_gather_v, native(own), counts, out=native(target.flat), **keywords)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:  # noqa: A002  # c10d's name
        opts = options(c10d.AllgatherOptions, opts, {})
        size = self.group.size
        if output.numel() != input.numel() * size:
            raise UsageError(
                f"all_gather of {input.numel()} elements from {size} ranks needs an output of {input.numel() * size}, "
                f"not {output.numel()}. Correct its size."
            )
        target = Target(output)
        out = native(target.flat, size, input.numel())
        return self._run(
            self.group.all_gather, native(source(input)), out=out, opts=opts, outputs=output, conclude=target.conclude
        )

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._each([self.all_gather_single(output, input_, opts) for output, input_ in pairs], list(outputs))

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Entry [r][i] is entry i of rank r's list. All of one dtype."""
        opts = options(c10d.AllgatherOptions, opts, {})
        self._check_one_per_rank(output_lists, "all_gather_coalesced")
        own = together(inputs)
        target = Targets([tensor for one in output_lists for tensor in one])
        out = native(target.flat, self.group.size, own.numel())
        return self._run(
            self.group.all_gather, native(own), out=out, opts=opts, outputs=output_lists, conclude=target.conclude
        )

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, **short: Any) -> Work:
        opts = options(c10d.GatherOptions, opts, short)
        own = source(only(inputs, "input_tensors"))
        root = opts.rootRank
        if root != self.group.rank:
            if outputs and outputs[0]:
                raise UsageError("gather fills tensors at the root only. Pass none on other ranks.")
            return self._run(self.group.gather, native(own), root, opts=opts, outputs=[])
        outs = outputs if isinstance(outputs[0], Tensor) else only(outputs, "output_tensors")
        self._check_one_per_rank(outs, "gather")
        target = Targets(outs)
        out = native(target.flat, self.group.size, own.numel())
        return self._run(
            self.group.gather, native(own), root, out=out, opts=opts, outputs=outputs, conclude=target.conclude
        )

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, **short: Any) -> Work:
        opts = options(c10d.ScatterOptions, opts, short)
        tensor = only(outputs, "output_tensors")
        target = Target(tensor)
        root = opts.rootRank
        whole = None
        if root == self.group.rank:
            parts = inputs if isinstance(inputs[0], Tensor) else only(inputs, "input_tensors")
            self._check_one_per_rank(parts, "scatter")
            whole = native(together(parts), self.group.size, parts[0].numel())
        return self._run(
            self.group.scatter,
            whole,
            root,
            out=native(target.flat),
            opts=opts,
            outputs=[tensor],
            conclude=target.conclude,
        )

    # ------------------------------------------------------------------ a part for each rank

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, **short: Any) -> Work:
        opts = options(c10d.ReduceScatterOptions, opts, short)
        tensor = only(outputs, "output_tensors")
        parts = inputs if isinstance(inputs[0], Tensor) else only(inputs, "input_tensors")
        self._check_one_per_rank(parts, "reduce_scatter")
        target = Target(tensor)
        whole, counts = together(parts), [part.numel() for part in parts]
        keywords: dict[str, Any] = {"opts": opts, "outputs": [tensor], "conclude": target.conclude}
        out, op = native(target.flat), name_of(opts.reduceOp)
        if len({*counts}) == 1:
            array = native(whole, self.group.size, counts[0])
            return self._run(self.group.reduce_scatter, array, op, out=out, **keywords)
        return self._run(self.group.reduce_scatter_v, native(whole), counts, op, out=out, **keywords)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:  # noqa: A002  # c10d's name
        opts = options(c10d.ReduceScatterOptions, opts, {})
        size = self.group.size
        if input.numel() != output.numel() * size:
            raise UsageError(
                f"reduce_scatter to {output.numel()} elements on each of {size} ranks takes {output.numel() * size}, "
                f"not {input.numel()}. Correct its size."
            )
        target = Target(output)
        return self._run(
            self.group.reduce_scatter,
            native(source(input), size, output.numel()),
            name_of(opts.reduceOp),
            out=native(target.flat),
            opts=opts,
            outputs=output,
            conclude=target.conclude,
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._each([self.reduce_scatter_single(output, input_, opts) for output, input_ in pairs], list(outputs))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002  # c10d's name
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        **short: Any,
    ) -> Work:
        """Sizes are of rows; none on all ranks means equal parts."""
        opts = options(c10d.AllToAllOptions, opts, short)
        target = Target(output)
        flat = source(input)
        keywords: dict[str, Any] = {"opts": opts, "outputs": output, "conclude": target.conclude}
        if not output_split_sizes and not input_split_sizes:
            array, out = (native(one, self.group.size, self._share(one)) for one in (flat, target.flat))
            return self._run(self.group.all_to_all, array, out=out, **keywords)
        counts = self._elements(input, input_split_sizes)
        coming = self._elements(output, output_split_sizes)
        return self._run(self.group.all_to_all_v, native(flat), counts, coming, out=native(target.flat), **keywords)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None, **short: Any) -> Work:
        opts = options(c10d.AllToAllOptions, opts, short)
        for tensors in (outputs, inputs):
            self._check_one_per_rank(tensors, "all_to_all")
        target = Targets(outputs)
        counts, coming = ([tensor.numel() for tensor in tensors] for tensors in (inputs, outputs))
        return self._run(
            self.group.all_to_all_v,
            native(together(inputs)),
            counts,
            coming,
            out=native(target.flat),
            opts=opts,
            outputs=list(outputs),
            conclude=target.conclude,
        )

    def _share(self, flat: Tensor) -> int:
        """Elements of each rank's equal part."""
        share, rest = divmod(flat.numel(), self.group.size)
        if rest:
            raise UsageError(
                f"{flat.numel()} elements cannot be divided among {self.group.size} ranks. Pass split sizes."
            )
        return share

    def _elements(self, tensor: Tensor, rows: Sequence[int]) -> list[int]:
        """Of each rank's part."""
        size = self.group.size
        height = tensor.shape[0] if tensor.dim() else 0
        row = tensor.numel() // height if height else 0
        if not rows:
            return [self._share(tensor)] * size
        if len(rows) != size or sum(rows) != height:
            raise UsageError(
                f"all_to_all among {size} ranks was given split sizes {list(rows)} for {height} rows. "
                "Pass one for each rank, which add up to the rows."
            )
        return [count * row for count in rows]

    def _check_one_per_rank(self, given: Sequence[Any], what: str) -> None:
        if len(given) != self.group.size:
            raise UsageError(f"{what} takes a tensor for each of {self.group.size} ranks, not {len(given)}.")

    # ------------------------------------------------------------------ messages

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        tensor = only(tensors)
        return self._begun(self.group.isend(native_bytes(source(tensor)), dst, tag, self.seconds), [tensor])

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        tensor = only(tensors)
        target = Target(tensor)
        part = self.group.irecv(native_bytes(target.flat), src, tag, self.seconds)

        def conclude() -> None:
            status = part.result()
            if status.nbytes != target.flat.nbytes:
                raise UsageError(
                    f"Rank {status.source} sent {status.nbytes} bytes under tag {tag}, where this rank receives a "
                    f"tensor of {target.flat.nbytes}. Send and receive tensors of one size."
                )
            if target.conclude is not None:
                target.conclude()

        return self._begun(part, [tensor], conclude)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        return self.recv(tensors, ANY_SOURCE, tag)

    # ------------------------------------------------------------------ several calls as one

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return self._each(works, [])

    def _each(self, works: list[Work], outputs: Any) -> Work:
        """One Work of all."""
        return Work(
            [part for work in works for part in work.parts], outputs, [one for work in works for one in work.concludes]
        )

    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing

    # ------------------------------------------------------------------ older names

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def native_bytes(flat: Tensor) -> Any:
    """As messages take it."""
    return flat.view(torch.uint8).numpy() if flat.numel() else b""

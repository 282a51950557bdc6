"""all_reduce of compressed arrays: how payloads become a sum.

For n ranks and payloads of p bytes, sent by each rank:

    PARTS    2p(n-1)/n   Each rank is sent all payloads of its part of the array (direct, in one round), adds them up in
                         float32, compresses the sum again, and that is gathered by all (a ring, or Bruck's algorithm).
                         As an all_reduce of the payload's size; numbers are rounded twice, whatever n is.
    GATHER   p(n-1)      Everybody gets everything, and adds up.
    REDUCE   2p(n-1)/n   An all_reduce of the payload.

With PARTS, what compressing a sum leaves out is kept by the rank that did it, and added to the next sum.

All ranks decode the same bytes in the same order: results are bit-identical. `algorithm=` names one of all_gather's for
PARTS (ring, bruck, direct) and GATHER, one of all_reduce's for REDUCE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rankmesh.collectives import bruck, direct, fusing, ring
from rankmesh.collectives.arguments import Array, Operand, operand
from rankmesh.collectives.compression.base import Compressor, Exchange
from rankmesh.collectives.compression.halves import narrow, widen
from rankmesh.collectives.kinds import kind_of
from rankmesh.collectives.plan import Plan
from rankmesh.collectives.reducing import Op, Reduction
from rankmesh.collectives.space import Part, Space, even
from rankmesh.config import KIB
from rankmesh.errors import UsageError

if TYPE_CHECKING:
    from rankmesh.collectives.starting import Options, Running

_FLOATS: Final = frozenset(["float16", "bfloat16", "float32", "float64"])
_ALL_GATHER: Final[dict[str, Callable[[int, int], Plan]]] = {
    "ring": ring.all_gather,
    "bruck": bruck.all_gather,
    "direct": direct.all_gather,
}
#: Sums of up to so many bytes are gathered by Bruck's algorithm, of more by the ring.
_FEW: Final = 16 * KIB


def all_reduce(group: Running, array: Any, op: Op, out: Any, compressor: Compressor, options: Options) -> Any:
    """See Collectives.all_reduce."""
    if not isinstance(compressor, Compressor):
        raise UsageError(f"compression is a Compressor, such as TopK(0.01), not {compressor!r}.")
    if op not in ("sum", "avg"):
        raise UsageError(f"Compressed arrays have a sum and an avg, no {op}. Use one of them, or no compression.")
    listed = fusing.is_list(array)
    given = fusing.operands(array, "all_reduce") if listed else [operand(array)]
    wrong = next((one.kind.name for one in given if one.kind.name not in _FLOATS), None)
    if wrong is not None:
        raise UsageError(f"Arrays of {wrong} cannot be compressed, only {', '.join(sorted(_FLOATS))}.")
    targets = fusing.outputs(out if listed or out is None else [out], given)
    job = _Job(group, given, targets, listed, compressor, str(op))
    return _EXCHANGES[compressor.exchange](group, job, options)


class _Job:
    """One call, on one rank."""

    def __init__(
        self, group: Running, given: list[Operand], targets: list[Operand], listed: bool, by: Compressor, op: str
    ) -> None:
        self.by = by
        self.count = sum(one.array.size for one in given)
        self._memory = by.memory(group._context.number, self.count)
        self.seed = self._memory.steps
        self._memory.steps += 1
        kinds = ", ".join(bucket.what for bucket in fusing.bucketed(given)) if listed else given[0].what
        self.what = f"{kinds}, {op} by {by.signature}{f', call {self.seed}' if by.seeded else ''}"
        self._values = _joined(given, self.count)
        self._targets = targets
        self._listed = listed
        self._ranks = group.size if op == "avg" else 1

    def encode(self, counts: Sequence[int], payloads: Sequence[Array]) -> None:
        """The array, with what was left out before, in parts of `counts`."""
        values, memory = self._values, self._memory
        del self._values
        if memory.of_values is not None:
            np.add(values, memory.of_values, out=values)
        decoded = np.empty_like(values) if self.by.error_feedback else None
        with np.errstate(all="ignore"):
            for end, count, payload in zip(accumulate(counts), counts, payloads, strict=True):
                part = slice(end - count, end)
                self.by.encode(values[part], payload, self.seed)
                if decoded is not None:
                    self.by.decode(payload, decoded[part], self.seed)
        if decoded is not None:
            memory.of_values = _left_out(values, decoded)

    def encode_sum(self, total: Array, payload: Array) -> None:
        """The same for the sum of a part."""
        memory = self._memory
        with memory.lock, np.errstate(all="ignore"):
            if memory.of_sums is not None:
                np.add(total, memory.of_sums, out=total)
            payload.fill(0)
            self.by.encode(total, payload, self.seed)
            if self.by.error_feedback:
                decoded = np.empty_like(total)
                self.by.decode(payload, decoded, self.seed)
                memory.of_sums = _left_out(total, decoded)

    def deliver(self, total: Array) -> Any:
        """To where the results go."""
        if self._ranks > 1:
            np.divide(total, np.float32(self._ranks), out=total)
        at = 0
        for target in self._targets:
            _put(total[at : at + target.array.size], target)
            at += target.array.size
        values = [target.value for target in self._targets]
        return values if self._listed else values[0]


class _Adding:
    """Payloads of one part are added up, and the sum is compressed: the reduction of PARTS. Without the lock, since
    it may be a user's code."""

    is_users = True

    def __init__(self, job: _Job, count: int, others: int) -> None:
        self.name = ""
        self._job = job
        self._total = np.empty(count, np.float32)
        self._others = self._missing = others

    def apply(self, own: Array, came: Array, out: Array) -> None:
        """`own`, which is `out` too: this rank's payload until all have come."""
        by, seed = self._job.by, self._job.seed
        with np.errstate(all="ignore"):
            if self._missing == self._others:
                by.decode(own, self._total, seed)
            by.add(came, self._total, seed)
        self._missing -= 1
        if not self._missing:
            self._job.encode_sum(self._total, out)


def _in_parts(group: Running, job: _Job, options: Options) -> Any:
    by, rank, size = job.by, group.rank, group.size
    counts = _parts(job.count, by.block, size)
    lengths = [by.nbytes(count) for count in counts]
    payloads, each = _payloads(lengths)
    name = options.algorithm or ("bruck" if len(payloads) <= _FEW else "ring")
    if name not in _ALL_GATHER:
        raise UsageError(f"{by.signature} gathers sums by one of {', '.join(_ALL_GATHER)}, not by {name!r}.")
    job.encode(counts, each)
    plan = tuple(chain(direct.reduce_scatter(rank, size), _ALL_GATHER[name](rank, size)))
    chosen = group._choose("all_reduce", len(payloads), options._replace(algorithm="direct"))
    chosen = chosen._replace(algorithm=f"parts, {name}", rounds=plan, blocks=size)

    def conclude() -> Any:
        total = np.empty(job.count, np.float32)
        with np.errstate(all="ignore"):
            for end, count, payload in zip(accumulate(counts), counts, each, strict=True):
                by.decode(payload, total[end - count : end], job.seed)
            return job.deliver(total)

    adding = _Adding(job, counts[rank], size - 1)
    return group._run(chosen, Space(Part(payloads, lengths)), conclude, options, job.what, adding)


def _gathered(group: Running, job: _Job, options: Options) -> Any:
    by = job.by
    lengths = [by.nbytes(job.count)] * group.size
    payloads, each = _payloads(lengths)
    chosen = group._choose("all_gather", lengths[0], options)
    job.encode([job.count], [each[group.rank]])

    def conclude() -> Any:
        total = np.zeros(job.count, np.float32)
        with np.errstate(all="ignore"):
            for payload in each:
                by.add(payload, total, job.seed)
            return job.deliver(total)

    return group._run(chosen, Space(Part(payloads, lengths)), conclude, options, job.what, name="all_reduce")


def _reduced(group: Running, job: _Job, options: Options) -> Any:
    by = job.by
    payload = np.zeros(by.nbytes(job.count), np.uint8)
    numbers = payload.view(np.float32)
    chosen = group._choose("all_reduce", payload.nbytes, options)
    reduction = Reduction("sum", kind_of(numbers.dtype), group.size)
    job.encode([job.count], [payload])

    def conclude() -> Any:
        total = np.empty(job.count, np.float32)
        with np.errstate(all="ignore"):
            by.decode(payload, total, job.seed)
            return job.deliver(total)

    space = Space(Part(numbers, even(numbers.size, chosen.blocks)))
    return group._run(chosen, space, conclude, options, job.what, reduction)


_EXCHANGES: Final = {Exchange.PARTS: _in_parts, Exchange.GATHER: _gathered, Exchange.REDUCE: _reduced}


# ---------------------------------------------------------------------- arrays


def _parts(count: int, block: int, size: int) -> list[int]:
    """Numbers of each rank's part: whole blocks, but for the last."""
    ends = [min(end * block, count) for end in accumulate(even(-(-count // block), size))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _payloads(lengths: list[int]) -> tuple[Array, list[Array]]:
    """Room for them, one after the other; and each."""
    whole = np.zeros(sum(lengths), np.uint8)
    return whole, [whole[end - length : end] for end, length in zip(accumulate(lengths), lengths, strict=True)]


def _left_out(values: Array, decoded: Array) -> Array:
    """What is not finite leaves nothing behind: it would stay for ever."""
    with np.errstate(all="ignore"):
        np.subtract(values, decoded, out=decoded)
    np.copyto(decoded, np.float32(0.0), where=~np.isfinite(decoded))
    return decoded


def _joined(given: list[Operand], count: int) -> Array:
    """All elements as float32, in memory of our own."""
    values, at = np.empty(count, np.float32), 0
    for one in given:
        here = values[at : at + one.array.size]
        at += one.array.size
        if one.kind.name == "bfloat16":
            widen(np.ascontiguousarray(one.array).reshape(-1).view(np.uint16), "bfloat16", here)
        else:
            with np.errstate(all="ignore"):
                np.copyto(here.reshape(one.array.shape), one.array, casting="same_kind")
    return values


def _put(values: Array, target: Operand) -> None:
    if target.kind.name == "bfloat16":
        bits = np.empty(values.size, np.uint16)
        narrow(values, "bfloat16", bits)
        np.copyto(target.array, bits.view(target.array.dtype).reshape(target.array.shape))
    else:
        np.copyto(target.array, values.reshape(target.array.shape), casting="same_kind")

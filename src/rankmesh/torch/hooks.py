"""Communication hooks for DistributedDataParallel: gradients are averaged in fewer bytes.

    model = DistributedDataParallel(model)
    rankmesh.torch.compress(model, "int8")        # or "fp16", "bf16", "topk", "randomk": see KINDS

    # the same by torch's own call, for which a hook and its state are two things
    model.register_comm_hook(rankmesh.torch.Compression("topk", ratio=0.01), rankmesh.torch.compressed)

1. A bucket of gradients is one all_reduce of rankmesh's own with `compression=` (collectives/compression/), on the
   group of the process group. It goes on while autograd computes the next bucket.
2. What a compressor leaves out of a bucket is added to that bucket's next gradients (error feedback), on each rank.
3. DDP cuts its buckets anew once, after the first backward pass, in the order in which gradients came; what was left
   out of a parameter's gradient goes with the parameter to its new bucket. Buckets are reduced in the order of their
   indices. So when one is found to be cut anew, those before it in this pass are as they were, and all that follow are
   at rest: what they left out can be taken apart by parameter.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with its own types, not with their names.

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from rankmesh.collectives.compression import Cast, Compressor, Int8, RandomK, TopK
from rankmesh.errors import UsageError
from rankmesh.group import Group
from rankmesh.torch.staging import Target, native
from rankmesh.torch.work import Work

Array = np.ndarray[Any, Any]

_CPU: Final = torch.device("cpu")

#: By name: compressors, with settings that suit gradients. All have error feedback; any setting can be given.
KINDS: Final[Mapping[str, Callable[..., Compressor]]] = {
    "fp16": partial(Cast, "float16"),
    "bf16": partial(Cast, "bfloat16"),
    "int8": Int8,
    "topk": partial(TopK, ratio=0.01),
    "randomk": partial(RandomK, ratio=0.01),
}


class Compression:
    """The state of `compressed`: how gradients are compressed, and what was left out of them.

    Without `group` it is that of torch's default process group, which is rankmesh's."""

    def __init__(self, by: str | Compressor, group: Group | None = None, **settings: Any) -> None:
        self.compressor = _made(by, settings)
        self._group = group
        #: By index of the bucket: whose gradients are in it.
        self._buckets: dict[int, list[torch.Tensor]] = {}
        #: What was left out of gradients whose bucket is no more, by parameter.
        self._owed: dict[torch.Tensor, Array] = {}

    @property
    def group(self) -> Group:
        if self._group is None:
            self._group = _group_of(dist.group.WORLD)
        return self._group

    def reset(self) -> None:
        """Forget what was left out. On all ranks, as after a step that failed."""
        self.compressor.reset()
        self._buckets.clear()
        self._owed.clear()

    def reduce(self, bucket: GradBucket) -> Work:
        """Average a bucket's gradients, in place."""
        compressor = self._compressor_of(bucket.index(), bucket.parameters())
        buffer = bucket.buffer()
        target = Target(buffer, filled=True)
        part = self.group.all_reduce(native(target.flat), "avg", compression=compressor, async_op=True)
        return Work((part,), buffer, () if target.conclude is None else (target.conclude,))

    def _compressor_of(self, index: int, parameters: list[torch.Tensor]) -> Compressor:
        known = self._buckets.get(index)
        if known is None or [*map(id, known)] != [*map(id, parameters)]:
            if known is not None:
                self._take_apart(index)
            self._buckets[index] = parameters
            self._put_together(index)
        return self._named(index)

    def _named(self, index: int) -> Compressor:
        return self.compressor.named(f"bucket {index}")

    def _take_apart(self, first: int) -> None:
        for index in [index for index in self._buckets if index >= first]:
            parameters = self._buckets.pop(index)
            left_out = self._named(index).take(self.group._number)
            if left_out is not None:
                sizes = [parameter.numel() for parameter in parameters]
                parts = np.split(left_out, np.cumsum(sizes[:-1]))
                self._owed.update(zip(parameters, parts, strict=True))

    def _put_together(self, index: int) -> None:
        parameters = self._buckets[index]
        if any(parameter in self._owed for parameter in parameters):
            parts = [self._owed.pop(one, None) for one in parameters]
            whole = [
                np.zeros(one.numel(), np.float32) if part is None else part
                for one, part in zip(parameters, parts, strict=True)
            ]
            self._named(index).give(self.group._number, np.concatenate(whole))


def compressed(state: Compression, bucket: GradBucket) -> Future[torch.Tensor]:
    """The hook, for `register_comm_hook`."""
    return state.reduce(bucket).get_future()


def compress(
    model: DistributedDataParallel, by: str | Compressor, group: Group | None = None, **settings: Any
) -> Compression:
    """Average this model's gradients compressed, from now on. On all ranks alike, before the first backward pass.

    `by`: a name of KINDS, with `settings` such as `ratio=0.001` or `error_feedback=False`, or a compressor of yours.
    `group`: where the model's process group is not rankmesh's, the rankmesh group of the same ranks."""
    state = Compression(by, _group_of(model.process_group) if group is None else group, **settings)
    model.register_comm_hook(state, compressed)
    return state


def _made(by: str | Compressor, settings: dict[str, Any]) -> Compressor:
    if isinstance(by, Compressor):
        if settings:
            raise UsageError(f"{by} has its settings already. Pass {', '.join(settings)} where it is made.")
        return by
    if by not in KINDS:
        raise UsageError(f"Gradients are compressed by one of {', '.join(KINDS)}, or by a Compressor, not by {by!r}.")
    return KINDS[by](**settings)


def _group_of(process_group: Any) -> Group:
    backend = process_group._get_backend(_CPU) if isinstance(process_group, dist.ProcessGroup) else None
    group = getattr(backend, "group", None)
    if not isinstance(group, Group):
        raise UsageError(
            f"{process_group!r} is no process group of rankmesh, so compressed gradients have no way to go. Call "
            'init_process_group("rankmesh"), or pass group=, a rankmesh mesh of the same ranks.'
        )
    return group

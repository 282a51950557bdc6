"""The all_reduce of sparse tensors: everybody's entries on every rank, added where indices are the same.

Cost: three collectives, of shape and number of the entries, their indices and their values; n times the memory of a
rank's entries.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rankmesh.errors import UsageError
from rankmesh.group import Group
from rankmesh.torch.staging import native, source


def all_reduce(group: Group, tensor: Tensor, op: str, timeout: float) -> None:
    """In place. Entries (of dense dimensions too, which are alike on all ranks) are coordinates'."""
    if tensor.layout is not torch.sparse_coo or op not in ("sum", "avg"):
        raise UsageError(
            f"all_reduce of sparse tensors is a sum or an average of coordinate tensors, not {op} of {tensor.layout}. "
            "Pass x.to_sparse_coo(), or x.to_dense()."
        )
    entries = tensor.detach().coalesce()
    about = np.array([*entries.shape, entries.sparse_dim(), entries._nnz()], np.int64)
    of_all = group.all_gather(about, timeout=timeout)  # where dimensions differ, it is a DesyncError
    differing = np.flatnonzero((of_all[:, :-1] != about[:-1]).any(axis=1))
    if len(differing):
        other = int(differing[0])
        *shape, sparse = of_all[other, :-1].tolist()
        raise UsageError(
            f"Rank {other} passed a sparse tensor of shape {shape} with {sparse} sparse dimensions, rank {group.rank} "
            f"one of {[*entries.shape]} with {entries.sparse_dim()}. Pass tensors of one shape."
        )
    counts = of_all[:, -1].tolist()
    indices = _gathered(group, entries.indices().t(), counts, timeout).t()
    values = _gathered(group, entries.values(), counts, timeout)
    total = torch.sparse_coo_tensor(indices, values, entries.shape).coalesce()
    if op == "avg":
        total /= group.size
    with torch.no_grad():  # not into `tensor.detach()`, which shares entries, but not that there are others now
        tensor.copy_(total)


def _gathered(group: Group, rows: Tensor, counts: list[int], timeout: float) -> Tensor:
    """All ranks' rows."""
    each = rows[0].numel() if len(rows) else int(np.prod(rows.shape[1:]))
    out = torch.empty((sum(counts), *rows.shape[1:]), dtype=rows.dtype)
    elements = [count * each for count in counts]
    group.all_gather_v(native(source(rows)), elements, out=native(out.view(-1)), timeout=timeout)
    return out

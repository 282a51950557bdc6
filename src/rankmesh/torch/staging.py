"""Tensors as host memory that rankmesh sends from and receives into.

A tensor that lies contiguously in host memory is used where it lies. Any other (on a device, with strides, conjugated)
is staged: copied to host memory before, and back after. One path for all of these, so that a device needs no other.

Copies to and from a device block the calling thread until they are done: what is sent was computed, and what a
completed Work has written is there for every stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from rankmesh.errors import UsageError

#: Computed with by numpy under the same name; passed on as arrays, for which collectives have their shortest path.
#: Others are passed on as tensors.
_NUMPY: Final = frozenset(
    {
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32,
        torch.float64, torch.complex64, torch.complex128,
    }
)  # fmt: skip

#: What is done with staged tensors at the end.
Conclude = Callable[[], None]


def lies_flat(tensor: Tensor) -> bool:
    """Whether its elements are in host memory, one after the other, as they are."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def source(tensor: Tensor) -> Tensor:
    """Its elements, flat, to be read."""
    if tensor.layout is not torch.strided:
        raise UsageError(f"A tensor of layout {tensor.layout} cannot be sent as it is. Pass x.to_dense().")
    tensor = tensor.detach()
    if not lies_flat(tensor):
        tensor = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    return tensor.view(-1)


def in_place(tensor: Tensor) -> Any:
    """The array over its memory, of its shape; None: it is to be staged, or numpy does not have its dtype."""
    if tensor.dtype in _NUMPY and tensor.is_cpu and tensor.is_contiguous():
        try:
            return tensor.numpy()
        except RuntimeError:  # it requires gradients, or holds conjugates: seldom, and asking beforehand costs
            return None
    return None


class Target:
    """A tensor that is written to: `flat` is where, `conclude` puts it in place (None: it is there)."""

    __slots__ = ("conclude", "flat")

    def __init__(self, tensor: Tensor, filled: bool = False) -> None:
        """`filled`: with what it holds now."""
        self.conclude: Conclude | None = None
        if tensor.layout is not torch.strided:
            raise UsageError(f"A tensor of layout {tensor.layout} cannot be received into. Pass a dense one.")
        tensor = tensor.detach()
        if lies_flat(tensor):
            self.flat = tensor.view(-1)
            return
        if filled:
            self.flat = tensor.resolve_conj().resolve_neg().cpu().contiguous().view(-1)
            if self.flat.data_ptr() == tensor.data_ptr():
                self.flat = self.flat.clone()
        else:
            self.flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
        self.conclude = lambda: copy_into(tensor, self.flat)


def copy_into(tensor: Tensor, flat: Tensor) -> None:
    tensor.copy_(flat.view(tensor.shape))


class Targets:
    """Several tensors that are written to, one after the other: in place where they lie so, else by a copy."""

    __slots__ = ("conclude", "flat")

    def __init__(self, tensors: Sequence[Tensor], filled: bool = False) -> None:
        self.conclude: Conclude | None = None
        tensors = [tensor.detach() for tensor in tensors]
        whole = adjacent(tensors)
        if whole is not None:
            self.flat = whole
            return
        self.flat = (
            together(tensors) if filled else torch.empty(sum(map(Tensor.numel, tensors)), dtype=tensors[0].dtype)
        )

        def spread() -> None:
            parts = torch.split_with_sizes(self.flat, [tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                copy_into(tensor, part)

        self.conclude = spread


def together(tensors: Sequence[Tensor]) -> Tensor:
    """Their elements one after the other, flat, to be read; in new memory unless they lie so."""
    whole = adjacent(tensors)
    return torch.cat([source(tensor) for tensor in tensors]) if whole is None else whole


def adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """Pieces of one tensor, in order, as that: what `chunk` and `unbind` make."""
    first = tensors[0].detach()
    at = first.data_ptr()
    memory = first.untyped_storage().data_ptr()
    for tensor in tensors:
        if (
            tensor.dtype != first.dtype
            or not lies_flat(tensor)
            or tensor.data_ptr() != at
            or tensor.untyped_storage().data_ptr() != memory
        ):
            return None
        at += tensor.nbytes
    return first.as_strided((sum(map(Tensor.numel, tensors)),), (1,))


def native(flat: Tensor, *shape: int) -> Any:
    """As rankmesh takes it: the same memory."""
    shaped = flat.view(shape) if shape else flat
    return shaped.numpy() if flat.dtype in _NUMPY else shaped

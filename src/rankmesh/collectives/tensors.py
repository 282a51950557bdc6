"""torch's tensors as arguments, without a dependency on torch: who passes one has imported it."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, Final

import numpy as np

from rankmesh.buffers import is_tensor
from rankmesh.collectives.kinds import Array, Kind, Operation
from rankmesh.errors import UsageError

#: What is named the same in both libraries, and computed with by numpy (halves excepted, see kinds.py).
_SHARED: Final = frozenset(
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64 complex64 complex128".split()
)


class TensorKind(Kind):
    """Elements of tensors of one dtype."""

    def __init__(self, dtype: Any) -> None:
        name = str(dtype).removeprefix("torch.")
        self._torch = sys.modules["torch"]
        self._dtype = dtype
        #: The dtype as which numpy is shown the memory; None: its own.
        self._shown = None if name in _SHARED else getattr(self._torch, f"int{8 * dtype.itemsize}", None)
        if name not in _SHARED and self._shown is None:
            raise UsageError(f"Tensors of {name} cannot be viewed as bytes of their own. Pass x.to(another dtype).")
        super().__init__(np.dtype(name if self._shown is None else f"int{8 * dtype.itemsize}"), name)

    def _find(self, op: str) -> Operation:
        if self._shown is not None:  # numpy would compute with the integers
            raise self._none(op, "neither numpy nor torch computes with them")
        return super()._find(op)

    def value(self, array: Array) -> Any:
        tensor = self._torch.from_numpy(array)
        return tensor if self._shown is None else tensor.view(self._dtype)

    def memory(self, value: Any) -> Array:
        """Where it lies. Raises UsageError for what is not plain CPU memory."""
        if not is_tensor(value):
            value = self._torch.as_tensor(np.asarray(value))
        if value.dtype != self._dtype:  # of a user's function
            if not self._torch.can_cast(value.dtype, self._dtype):
                raise TypeError(f"{self.name} cannot hold {str(value.dtype).removeprefix('torch.')}")
            value = value.to(self._dtype)
        if value.device.type != "cpu":
            raise UsageError(f"This tensor is on {value.device}. Pass x.cpu().")
        if value.layout is not self._torch.strided or value.is_conj() or value.is_neg():
            raise UsageError(
                f"This tensor's memory does not hold its values as they are: layout {value.layout}, conjugate "
                f"{value.is_conj()}, negative {value.is_neg()}. Pass x.to_dense().resolve_conj().resolve_neg()."
            )
        plain = value.detach()
        if self._shown is not None:
            plain = plain.view(self._shown)
        found: Array = plain.numpy()
        return found


@lru_cache(maxsize=64)
def tensor_kind(dtype: Any) -> TensorKind:
    return TensorKind(dtype)

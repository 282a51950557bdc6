"""torch tensors, without a dependency on torch: who sends one has imported it, and who receives one needs it."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import Any, Final

from rankmesh.buffers import address_of, is_tensor
from rankmesh.codec.refusal import Unsupported
from rankmesh.errors import CodecError

_DTYPES: Final = re.compile(
    r"bool|u?int(?:8|16|32|64)|bfloat16|float(?:16|32|64)|complex(?:64|128)|float8_e(?:4m3fn|4m3fnuz|5m2|5m2fnuz)"
)

__all__ = ["is_tensor", "memory", "rebuild"]


def memory(tensor: Any) -> tuple[memoryview, bytes]:
    """The tensor's bytes, where they lie if it is contiguous, and the name of its dtype."""
    torch = sys.modules["torch"]
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.device.type != "cpu":
        raise Unsupported(f"it is on {tensor.device}", "Send x.cpu().")
    if tensor.layout is not torch.strided or not _DTYPES.fullmatch(name):
        why = f"a {name} tensor in layout {tensor.layout} is not plain memory"
        raise Unsupported(why, "Send x.to_dense() or x.dequantize().")
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # As bytes, since numpy has no bfloat16; flat first, since a tensor without dimensions cannot change its item size.
    return plain.reshape(-1).view(torch.uint8).numpy().data, name.encode()


def rebuild(view: memoryview, name: str, shape: tuple[int, ...], items: int) -> Any:
    """A tensor over `view`, or over a copy if torch could not write to it or it is not aligned."""
    if not _DTYPES.fullmatch(name):
        raise ValueError(f"a tensor's dtype is {name[:40]!r}, which is not accepted")
    try:
        torch = import_module("torch")
        dtype = getattr(torch, name)
    except (ImportError, AttributeError) as error:
        raise CodecError(
            f"The payload holds a torch tensor of dtype {name}, and there is no torch here that knows it.",
            hint="Install a recent torch here, or send x.numpy().",
        ) from error
    if items * dtype.itemsize != view.nbytes:
        raise ValueError(f"a tensor of shape {shape} and dtype {name} does not have {view.nbytes} bytes")
    if not items:
        return torch.empty(shape, dtype=dtype)
    if view.readonly or address_of(view) % dtype.itemsize:
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=dtype).reshape(shape)

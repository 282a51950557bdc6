"""Views of a caller's memory, and a pool of buffers of our own.

A view here is always a flat memoryview of bytes over memory that stays where it is: no copy is made of what a caller
passes, and what cannot be viewed that way is refused with the reason.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections import deque
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rankmesh.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Buffer as Buffer  # noqa: PLC0414  # `as` marks it as exported
else:
    Buffer: TypeAlias = Any

#: Writable, so that who receives nothing need not ask.
EMPTY = memoryview(bytearray())
PAGE = 4096
#: Where in a page bytes begin that are shared and copied from. The C library copies 2 KiB to 512 KiB by `rep movsb`,
#: which on AMD's Zen 3 is 4 times slower (in the cache, 10 times) where the destination lies 1 to 31 bytes behind the
#: source, modulo a page; and large arrays of numpy begin 16 bytes behind the start of one (bench/FINDINGS.md).
MID_PAGE = PAGE // 2
#: What to do with memory that does not lie together: if it is sent, and if it is received into.
COPY_IT = "Pass numpy.ascontiguousarray(x), which copies it."
FILL_ANOTHER = "Pass memory that lies together, and copy from it afterwards."
#: Bytes that the C library copies in that way, from where on it matters; and elements as which numpy copies without it.
_COPIED_BY_STRING = range(64 * 1024, 512 * 1024)
_UNSIGNED = {dtype.itemsize: dtype for dtype in map(np.dtype, (np.uint8, np.uint16, np.uint32, np.uint64))}
#: Up to this size a bytearray is made faster than an array; beyond it, clearing would cost more.
_SMALL = 4096


def copy(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
    """`target[...] = source`, for contiguous arrays of one dtype and shape which are both a user's. Those that were
    allocated one after the other often lie just so that `rep movsb` takes ten times as long (see MID_PAGE), and where
    they do not, numpy's own loop takes a few microseconds more: less than to ask numpy where they lie."""
    unsigned = _UNSIGNED.get(source.itemsize)
    if source.nbytes in _COPIED_BY_STRING and unsigned is not None:
        np.positive(source.view(unsigned), target.view(unsigned))
    else:
        target[...] = source


def readable(data: Any, hint: str = COPY_IT) -> memoryview:
    """The bytes of `data`, where they lie. Raises UsageError for what is not contiguous CPU memory; `hint` says what to
    do about that."""
    try:
        view = memoryview(data)
        if "O" not in view.format:
            return view.cast("B")
    except (TypeError, ValueError):
        pass
    return _unusual(data, hint)


def address_of(view: memoryview) -> int:
    """Where its bytes lie."""
    if not view.readonly and len(view):
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


def overlap(one: memoryview, other: memoryview) -> bool:
    """Whether two flat views of bytes have a byte in common."""
    if not (one.nbytes and other.nbytes):
        return False
    return np.may_share_memory(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))


def _unusual(data: Any, hint: str) -> memoryview:
    """What a plain cast does not take: empty and foreign arrays, formats memoryview does not know."""
    try:
        view = memoryview(data)
    except (TypeError, ValueError):  # no buffer; numpy says ValueError for a dtype the protocol has no format for
        array = array_over(data)
        if array.dtype.hasobject:
            raise _references(data) from None
        if not array.flags.c_contiguous:
            raise _scattered(data, array, hint) from None
        view = array.reshape(-1).view(np.uint8).data
    if not view.c_contiguous:
        raise _scattered(data, view, hint)
    if "O" in view.format and np.asarray(data).dtype.hasobject:
        raise _references(data)
    if view.nbytes == 0:
        return EMPTY
    return view.cast("B")


def _scattered(data: Any, lies: Any, hint: str) -> UsageError:
    return UsageError(f"{_name(data)} of shape {lies.shape} and strides {lies.strides} is not contiguous. {hint}")


def _references(data: Any) -> UsageError:
    """Received bytes would become pointers."""
    return UsageError(f"{_name(data)} holds references to Python objects, not their bytes. Use send_object().")


def writable(out: Any) -> memoryview:
    """Like `readable`, for memory that will be written to."""
    try:  # `readable`, written out: a call less for every receive
        view = memoryview(out)
        view = view.cast("B") if "O" not in view.format else _unusual(out, FILL_ANOTHER)
    except (TypeError, ValueError):
        view = _unusual(out, FILL_ANOTHER)
    if view.readonly:
        if view.nbytes:
            raise UsageError(
                f"{_name(out)} is read-only and cannot be received into. Pass a writable array or bytearray."
            )
        return EMPTY
    return view


def fresh(nbytes: int) -> memoryview:
    """New memory of our own, not cleared if it is large."""
    if nbytes <= _SMALL:
        return memoryview(bytearray(nbytes)) if nbytes else EMPTY
    return np.empty(nbytes, np.uint8).data


def _name(data: Any) -> str:
    return f"this {type(data).__module__}.{type(data).__qualname__}".replace("builtins.", "")


def is_tensor(value: object) -> bool:
    """Whether it is torch's. Who has one has imported torch."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(value, tensor)


def array_over(data: Any) -> np.ndarray[Any, Any]:
    """What offers no plain buffer, as an array where it lies, with its strides: numpy's own arrays, torch's tensors,
    what offers DLPack on the CPU or `__array_interface__`. Raises UsageError for what has no such memory."""
    if isinstance(data, str):
        raise UsageError("a str is not a buffer. Use send_object(), or encode it to bytes.")
    if isinstance(data, np.ndarray):  # strided, or of a dtype the buffer protocol has no format for
        return data
    try:
        if is_tensor(data):
            return _tensor(data)
        if hasattr(data, "__dlpack__"):
            device = data.__dlpack_device__()[0]
            if int(device) != 1:
                raise UsageError(f"{_name(data)} is not in CPU memory. Copy it to the CPU first.")
            return np.from_dlpack(data)
        if hasattr(data, "__array_interface__"):
            return np.asarray(data)
    except UsageError:
        raise
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"{_name(data)} offers no view of its memory: {str(error).rstrip('.')}.") from error
    raise UsageError(
        f"{_name(data)} is not a buffer. Pass a numpy array, bytes, a bytearray or a memoryview; use send_object() "
        "for other objects."
    )


def _tensor(tensor: Any) -> np.ndarray[Any, Any]:
    """Of dtypes that numpy does not have (bfloat16, float8) the elements look like integers of their size."""
    if tensor.device.type != "cpu":
        raise UsageError(f"{_name(tensor)} is not in CPU memory. Copy it to the CPU first.")
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        raise UsageError(
            f"{_name(tensor)} does not hold its values as they are: layout {tensor.layout}, conjugate "
            f"{tensor.is_conj()}, negative {tensor.is_neg()}. Pass x.to_dense().resolve_conj().resolve_neg()."
        )
    plain = tensor.detach()  # from gradients
    try:
        array: np.ndarray[Any, Any] = plain.numpy()
    except TypeError:
        array = plain.view(getattr(torch, f"int{8 * tensor.dtype.itemsize}")).numpy()
    return array


class BufferPool:
    """Reusable byte buffers in size classes (powers of two), bounded in bytes.

    `take(n)` gives a buffer of at least n bytes; `give(buffer)` returns it. What would exceed the bound is let go, so
    the pool never holds more than `limit` bytes. Callers serialise access (the engine's lock does).
    """

    SMALLEST = 4096

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._free: dict[int, list[bytearray]] = {}

    def take(self, nbytes: int) -> bytearray:
        size = self.size_class(nbytes)
        free = self._free.get(size)
        if free:
            self.held -= size
            return free.pop()
        return bytearray(size)

    def give(self, buffer: bytearray) -> None:
        size = len(buffer)
        if size != self.size_class(size) or self.held + size > self.limit:
            return
        self.held += size
        self._free.setdefault(size, []).append(buffer)

    @classmethod
    def size_class(cls, nbytes: int) -> int:
        return max(cls.SMALLEST, 1 << (nbytes - 1).bit_length()) if nbytes > 0 else cls.SMALLEST


class RecyclingPool:
    """Large buffers that come back by themselves once nothing refers to them any more, bounded in bytes.

    Fresh memory costs its pages: for tens of MiB as much as moving the bytes does. `take` gives a view; when the last
    slice of it and the last array over it are gone, its memory is kept for the next `take` of the size class, or let go
    where more than `limit` bytes would be kept. Small ones are not kept. May be used by all threads at once.
    """

    SMALLEST = 1024 * 1024

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free: dict[int, deque[mmap]] = {}

    @property
    def held(self) -> int:
        """Bytes kept for the next takes."""
        return sum(size * len(free) for size, free in list(self._free.items()))

    def take(self, nbytes: int) -> memoryview:
        if nbytes < self.SMALLEST:
            return fresh(nbytes)
        size = BufferPool.size_class(nbytes)
        try:
            memory = self._free.setdefault(size, deque()).pop()
        except IndexError:
            memory = mmap(-1, size, MAP_PRIVATE | MAP_ANONYMOUS)
        # Every slice of this array, and every array over it, keeps it alive. (Were the memory an array too, numpy would
        # make its views refer to that one, and not to what was lent.)
        lent = np.frombuffer(memory, np.uint8, nbytes)
        weakref.finalize(lent, self._give, memory).atexit = False
        return lent.data

    def _give(self, memory: mmap) -> None:
        """May run wherever an object dies, so it takes no lock: the bound may be overstepped by a buffer per thread."""
        size = len(memory)
        if self.held + size <= self.limit:
            self._free[size].append(memory)

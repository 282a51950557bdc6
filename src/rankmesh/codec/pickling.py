"""The only file that can pickle.

Unpickling runs code that the sender chose: `load` is called only where the receiver allowed it. Functions go by
cloudpickle where it is installed, which also takes lambdas, closures, and what a script defines; pickle itself only
takes functions that the other side can import.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from types import FunctionType, MethodType
from typing import Any

from rankmesh.codec.refusal import Unsupported
from rankmesh.errors import CodecError


def dump(obj: object, add: Callable[[memoryview], object]) -> bytes:
    """The pickle of `obj`; the memory of arrays in it is given to `add` and not copied."""

    def out_of_band(buffer: pickle.PickleBuffer) -> bool:
        try:
            add(buffer.raw())
        except BufferError:  # contiguous in neither order: into the pickle
            return True
        return False

    try:
        return _dumps_for(obj)(obj, protocol=5, buffer_callback=out_of_band)
    except Exception as error:  # __reduce__ and __getstate__ are the user's code and raise what they like
        raise Unsupported(f"pickle refuses it too ({type(error).__name__}: {error})") from error


def _dumps_for(obj: object) -> Callable[..., bytes]:
    if isinstance(obj, FunctionType | MethodType | partial):
        try:
            return import_module("cloudpickle").dumps  # type: ignore[no-any-return]  # an extra, without types
        except ImportError:
            pass
    return pickle.dumps


def load(data: memoryview, buffers: Iterable[memoryview]) -> Any:
    try:
        return pickle.loads(data, buffers=buffers)  # noqa: S301  # allowed explicitly, on both sides
    except Exception as error:  # unpickling runs the class's code, which raises what it likes
        raise CodecError(
            f"A pickled part of the payload could not be restored: {type(error).__name__}: {error}.",
            hint="Make the same classes importable on both sides, in the same versions.",
        ) from error

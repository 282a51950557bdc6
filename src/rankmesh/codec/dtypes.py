"""numpy dtypes as short descriptions that are safe to read.

    plain       numpy's own text, such as `<f4` or `<M8[ns]`, if it is on the list below
    ml_dtypes   the name, such as `bfloat16`; both sides need the ml_dtypes package
    structured  msgpack of (item size, [(field name, description, offset, shape of a sub-array), …]), without titles

Not on the list: Python objects (their memory is pointers), long doubles (their layout depends on the machine), and
items of no bytes (their count could not be checked against the buffer).
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import import_module
from typing import Any, Final

import msgspec
import numpy as np

from rankmesh.codec.refusal import Unsupported
from rankmesh.errors import CodecError

_PLAIN: Final = re.compile(
    r"[<>|](?:b1|[iu][1248]|f[248]|c8|c16|[SUV][1-9]\d{0,8}|[mM]8(?:\[\d{0,9}(?:[YMWDhms]|[munpfa]s)\])?)", re.ASCII
)
_ML_DTYPES: Final = re.compile(
    r"bfloat16|float8_(?:e3m4|e4m3|e4m3b11fnuz|e4m3fn|e4m3fnuz|e5m2|e5m2fnuz|e8m0fnu)|float6_(?:e2m3fn|e3m2fn)|float4_e2m1fn"
    r"|u?int[24]"
)
#: The size is a u16 where it stands before the description.
MAX_DESCRIPTION_BYTES: Final = (1 << 16) - 1
#: Structures within structures.
_MAX_DEPTH: Final = 8
#: Descriptions worth remembering; what a peer can make us remember is this times the next.
_REMEMBERED: Final = 256
_REMEMBERED_BYTES: Final = 256

_Fields = list[tuple[str, bytes, int, tuple[int, ...]]]
_pack_fields: Final = msgspec.msgpack.Encoder().encode
_unpack_fields: Final = msgspec.msgpack.Decoder(tuple[int, _Fields]).decode


@lru_cache(_REMEMBERED)
def describe(dtype: np.dtype[Any]) -> bytes:
    """The description of `dtype`; Unsupported if it has none."""
    if dtype.isbuiltin == 2 and _ML_DTYPES.fullmatch(dtype.name) and dtype.type.__module__ == "ml_dtypes":
        return dtype.name.encode()
    if dtype.names is not None and dtype.fields is not None and dtype.itemsize:
        fields = [(name, *_describe_field(*dtype.fields[name][:2])) for name in dtype.names]
        description = _pack_fields((dtype.itemsize, fields))
        if len(description) > MAX_DESCRIPTION_BYTES:
            raise Unsupported(f"its dtype takes {len(description)} bytes to describe, over {MAX_DESCRIPTION_BYTES}")
        return description
    if dtype.isbuiltin == 2 or not _PLAIN.fullmatch(dtype.str):
        raise Unsupported(f"its dtype {dtype.name!r} is not one that means the same on every machine")
    return dtype.str.encode()


def _describe_field(dtype: np.dtype[Any], offset: int) -> tuple[bytes, int, tuple[int, ...]]:
    return describe(dtype.base), offset, dtype.shape


def parse(description: bytes) -> np.dtype[Any]:
    """The dtype of a peer's description; CodecError, ValueError or TypeError if it is not acceptable."""
    return _remembered(description) if len(description) <= _REMEMBERED_BYTES else _parse(description, 0)


@lru_cache(_REMEMBERED)
def _remembered(description: bytes) -> np.dtype[Any]:
    return _parse(description, 0)


def _parse(description: bytes, depth: int) -> np.dtype[Any]:
    if description[:1] == b"\x92":
        return _parse_structured(description, depth)
    text = str(description, "ascii")
    if _PLAIN.fullmatch(text):
        return np.dtype(text)
    if _ML_DTYPES.fullmatch(text):
        return _ml_dtype(text)
    raise ValueError(f"an array's dtype is {text[:40]!r}, which is not accepted")


def _parse_structured(description: bytes, depth: int) -> np.dtype[Any]:
    itemsize, fields = _unpack_fields(description)
    if depth == _MAX_DEPTH or itemsize < 1 or not fields:
        raise ValueError("a structured dtype is empty or nested too deeply")
    return np.dtype(
        {
            "names": [name for name, *_ in fields],
            "formats": [(_parse(inner, depth + 1), shape) for _, inner, _, shape in fields],
            "offsets": [offset for _, _, offset, _ in fields],
            "itemsize": itemsize,
        }
    )


def _ml_dtype(name: str) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = np.dtype(getattr(import_module("ml_dtypes"), name))
    except (ImportError, AttributeError) as error:
        raise CodecError(
            f"The payload holds an array of dtype {name}, which numpy knows only with a recent ml_dtypes.",
            hint="Install it here: pip install -U ml_dtypes.",
        ) from error
    return dtype

"""Values for which plain msgpack is enough: the short way, without a walk, a prefix or extensions.

For the small messages of RPC. What `pack_plain` does not take goes through `encode`; both sides know which it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from rankmesh.codec.decoder import MALFORMED
from rankmesh.codec.layout import OUT_OF_BAND_BYTES
from rankmesh.errors import CodecError

#: msgpack brings these back as they were, all but integers beyond 64 bits and lone surrogates.
_PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes})

_pack: Final = msgspec.msgpack.Encoder().encode


def pack_plain(values: Sequence[Any]) -> bytes | None:
    """The values as bytes; None: at least one of them needs `encode`, or is large and better sent from where it is."""
    if not _PLAIN.issuperset(map(type, values)):
        return None
    try:
        packed = _pack(values)
    except (OverflowError, UnicodeEncodeError):
        return None
    return packed if len(packed) < OUT_OF_BAND_BYTES else None


def _no_extension(code: int, data: memoryview) -> Any:
    raise ValueError(f"extension {code} in plain values")


_decoder: Final = msgspec.msgpack.Decoder(list[Any], ext_hook=_no_extension)


def unpack_plain(payload: memoryview | bytes) -> list[Any]:
    """The values that `pack_plain` was given. Raises CodecError for anything else."""
    try:
        return _decoder.decode(payload)
    except (*MALFORMED, UnicodeDecodeError) as error:
        raise CodecError(
            f"These {len(payload)} bytes are not plain values: {error}.", hint="Use the same version on both sides."
        ) from error

"""Objects as bytes: msgpack with arrays out of band, validated on the way in.

`encode` gives a list of parts, whose concatenation is the payload; `decode` takes the payload back to an object.

What travels, and what it arrives as:

    None bool float complex str bytes list dict      the same; a dict's keys may be anything here that is hashable
    int                                              the same, up to 1 MiB
    tuple set frozenset range slice                  the same
    bytearray memoryview                             bytes
    datetime date time timedelta Decimal UUID        the same; a time zone arrives as its fixed offset from UTC
    numpy arrays and scalars                         the same dtype, shape and order (C or Fortran)
    torch CPU tensors                                the same dtype and shape, contiguous, without gradient
    dataclasses, msgspec Structs                     dict (list if array_like); with `decode(…, type=T)` a T again
    an Enum, as a field of these                     its value; elsewhere it is refused
    subclasses of str, int, float, a container       the plain type: OrderedDict → dict, a namedtuple → tuple
    anything else                                    refused, or pickled where both sides said `allow_pickle=True`

Rules:

- No array memory is copied by `encode`: the parts refer to it, so it must not change until they are sent. Only what is
  contiguous in neither order is copied, once. Bytes-likes of 16 KiB and more go out of band as arrays do.
- `decode` makes arrays as views into the payload, which they keep alive: writable if it is, and aligned to 64 bytes
  relative to its start. Bytes are copied out.
- There is no sharing: what occurs twice in an object travels twice, and what contains itself is refused.
- Nothing in a payload is trusted. Whatever is wrong with it, `decode` raises CodecError, and it never allocates more
  than a small multiple of the payload's size. A buffer is used once, so nothing small can be made to fill memory.
- Pickle runs code chosen by the sender. It is used when both sides allow it, which they may do only for authenticated
  peers, and only for what msgpack cannot carry: with it or without it, all types listed above arrive as listed.

The files: `layout` (the bytes), `refusal` (what cannot travel), `values` (small values and containers), `dtypes`,
`tensors` and `pickling` (one foreign thing each), then `encoder` and `decoder`, which use them, and `plain`, the short
way for small values.
"""

from __future__ import annotations

from rankmesh.codec.decoder import decode
from rankmesh.codec.encoder import encode, nbytes
from rankmesh.codec.plain import pack_plain, unpack_plain

__all__ = ["decode", "encode", "nbytes", "pack_plain", "unpack_plain"]

"""What is made of a peer's description of a region."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rankmesh.errors import ProtocolError
from rankmesh.memory.protocol import MOST, Description, info_of

BYTES = np.dtype(np.uint8)


def described(nbytes: int, dtype: bytes, shape: tuple[int, ...]) -> Description:
    return Description("kv", nbytes, dtype, shape, "rw", 77)


@pytest.mark.parametrize(
    "nbytes, dtype, shape, expected",
    [
        (96, b"<f4", (4, 6), (np.dtype(np.float32), (4, 6))),
        (8, b"<i8", (), (np.dtype(np.int64), ())),
        (96, b"", (96,), (BYTES, (96,))),
        # sizes that disagree: an index would mean bytes that are not there
        (95, b"<f4", (4, 6), (BYTES, (95,))),
        (96, b"<f4", (4, 7), (BYTES, (96,))),
        (96, b"<f8", (4, 6), (BYTES, (96,))),
        (8, b"<f4", (1 << 40,), (BYTES, (8,))),
        (8, b"<f4", (0,), (BYTES, (8,))),
        (8, b"<f4", (), (BYTES, (8,))),
    ],
)
def test_a_shape_that_does_not_fit_its_bytes_is_not_believed(
    nbytes: int, dtype: bytes, shape: tuple[int, ...], expected: Any
) -> None:
    info = info_of(described(nbytes, dtype, shape))
    assert (info.dtype, info.shape) == expected
    assert (info.name, info.nbytes, info.access, info.generation) == ("kv", nbytes, "rw", 77)


@pytest.mark.parametrize("shape", [(-1,), (-2, -4), (MOST + 1,), (1 << 40, 1 << 40), (8, -1, -1)])
def test_a_shape_that_is_none_breaks_the_protocol(shape: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError) as caught:
        info_of(described(8, b"|u1", shape))
    assert caught.value.reason == "malformed region"


@pytest.mark.parametrize("dtype", [b"O", b"nonsense", b"\xff", b"\x92\x00\x90"])
def test_a_dtype_that_is_none_breaks_the_protocol(dtype: bytes) -> None:
    with pytest.raises(ProtocolError, match="a dtype that is none"):
        info_of(described(8, dtype, (8,)))

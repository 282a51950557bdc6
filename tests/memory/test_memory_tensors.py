"""torch's tensors in one-sided memory and in messages: as they lie, of every dtype, without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from peers import SOON, Medium, pattern
from rankmesh import UsageError
from rankmesh.buffers import address_of, readable, writable
from regions import Sides, open_sides

#: And what numpy calls them: by ml_dtypes, by itself, or not at all.
DTYPES: list[tuple[torch.dtype, Any]] = [
    (torch.bfloat16, ml_dtypes.bfloat16),
    (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
    (torch.float8_e5m2, ml_dtypes.float8_e5m2),
    (torch.float16, np.float16),
    (torch.float32, np.float32),
    (torch.int64, np.int64),
    (torch.bool, np.bool_),
    (torch.complex64, np.complex64),
    (torch.complex32, None),
]
# torch says of complex32 that few operators support it: here none is used
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
KINDS = pytest.mark.parametrize("dtype, known_as", DTYPES, ids=[str(dtype) for dtype, _ in DTYPES])


def tensor_of(content: Any, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.from_numpy(content.copy()).view(dtype).reshape(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


@pytest.fixture
def near(inproc: Medium) -> Iterator[Sides]:
    with open_sides(inproc) as both:
        yield both


@KINDS
def test_memory_is_viewed_where_it_lies(dtype: torch.dtype, known_as: Any) -> None:
    tensor = torch.zeros(6, 4, dtype=dtype)
    for view in (readable(tensor), writable(tensor), readable(torch.nn.Parameter(tensor, requires_grad=False))):
        assert (address_of(view), view.nbytes) == (tensor.data_ptr(), tensor.nbytes)
    assert address_of(writable(tensor[3])) == tensor[3].data_ptr()
    assert writable(tensor[0, 0]).nbytes == tensor.itemsize
    assert writable(torch.empty(0, 3, dtype=dtype)).nbytes == 0


def test_weights_that_require_gradients_are_memory(near: Sides) -> None:
    layer = torch.nn.Linear(4, 4).to(torch.bfloat16)
    near.register(layer.weight)
    near.peer.open("kv").write(torch.full((4, 4), 2.5, dtype=torch.bfloat16))
    assert (layer.weight == 2.5).all()
    assert layer.weight.requires_grad


@KINDS
def test_regions_of_every_dtype(sides: Sides, dtype: torch.dtype, known_as: Any) -> None:
    content = pattern(8 * 64) & 1
    tensor = tensor_of(content, dtype, 8, -1)
    region = sides.register(tensor)
    remote = sides.peer.open("kv")
    described = (np.dtype(np.uint8), (512,)) if known_as is None else (np.dtype(known_as), tuple(tensor.shape))
    assert (remote.dtype, remote.shape) == (region.dtype, region.shape) == described
    assert region.array.tobytes() == content.tobytes()
    out = torch.zeros_like(tensor)
    assert remote.read(out) is out
    assert bytes_of(out) == content.tobytes()
    assert remote[...].tobytes() == content.tobytes()
    other = tensor_of(pattern(512, 1) & 1, dtype, 8, -1)
    remote.write(other[4:], 256)
    assert bytes_of(tensor) == content[:256].tobytes() + bytes_of(other[4:])
    remote.write_batch([(other[row], 64 * row) for row in range(8)])
    assert bytes_of(tensor) == bytes_of(other)
    out.zero_()
    remote.read_batch([(out[row], 64 * row) for row in range(8)])
    assert bytes_of(out) == bytes_of(other)


@KINDS
def test_strided_tensors(sides: Sides, dtype: torch.dtype, known_as: Any) -> None:
    """Columns of a tensor, as of a numpy array: the others are not touched."""
    cache = tensor_of(pattern(16 * 64) & 1, dtype, 16, -1)
    sides.register(cache)
    remote = sides.peer.open("kv")
    columns = cache.shape[1] // 2
    wide = torch.zeros_like(cache)
    remote.read(wide[:, :columns], 32, stride=64)
    assert bytes_of(wide[:, :columns]) == bytes_of(cache[:, columns:])
    assert not any(bytes_of(wide[:, columns:]))
    remote.read(wide[:8, columns:])
    assert bytes_of(wide[:8, columns:]) == bytes_of(cache[:4])
    remote.write(wide[:, columns:].t(), 0)
    assert bytes_of(cache[:8]) == bytes_of(wide[:, columns:].t())
    remote.read_batch([(wide[:, :columns], 0, 64), (wide[:2, columns:], 64)])
    assert bytes_of(wide[:, :columns]) == bytes_of(cache[:, :columns])
    assert bytes_of(wide[:2, columns:]) == bytes_of(cache[1])
    before = bytes_of(cache[:, :columns])
    remote.write_batch([(wide[:, :columns], 32, 64)])
    assert bytes_of(cache[:, columns:]) == bytes_of(cache[:, :columns]) == before


def test_tensors_are_written_by_index(near: Sides) -> None:
    weights = torch.zeros(4, 8, dtype=torch.bfloat16)
    near.register(weights)
    near.peer.open("kv")[1:3, ::2] = torch.arange(4, dtype=torch.bfloat16, requires_grad=True)
    assert weights[1:3, ::2].tolist() == [[0, 1, 2, 3]] * 2
    assert weights.count_nonzero() == 6


@KINDS
def test_messages(near: Sides, dtype: torch.dtype, known_as: Any) -> None:
    sent, out = tensor_of(pattern(512) & 1, dtype, 8, -1), tensor_of(np.zeros(512, np.uint8), dtype, 8, -1)
    receiving = near.back.irecv(out)
    near.peer.send(sent, timeout=SOON)
    assert receiving.result(SOON).nbytes == 512
    assert bytes_of(out) == bytes_of(sent)


@pytest.mark.parametrize(
    "tensor, message",
    [
        (torch.zeros(4, dtype=torch.complex64).conj(), "does not hold its values as they are"),
        (torch.zeros(4, dtype=torch.complex64).conj().imag, "does not hold its values as they are"),
        (torch.zeros(4, 4).to_sparse(), "does not hold its values as they are"),
        (torch.zeros(4, device="meta"), "is not in CPU memory"),
        (torch.zeros(4, 4, dtype=torch.bfloat16).t(), "not contiguous. Register the whole"),
    ],
    ids=["conjugate", "negative", "sparse", "meta", "strided"],
)
def test_what_is_no_memory_is_refused(near: Sides, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        near.register(tensor)
    assert near.owner.memory.regions == {}

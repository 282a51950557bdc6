"""What users pass to collectives: buffers of every format, matrices, places that overlap, and what is refused."""

from __future__ import annotations

import array
import ctypes
from typing import Any

import numpy as np
import pytest

from rankmesh import Config, Mesh, UsageError
from rankmesh.collectives.arguments import operand
from rankmesh.testing import run_world
from ranks import run_ranks
from timing import scaled

pytestmark = pytest.mark.usefixtures("nursery")

CONFIG = Config(timeout=scaled(30))
LIMIT = scaled(50)


@pytest.mark.parametrize(
    "data, dtype, shape",
    [
        (np.ones(2).data, "float64", (2,)),
        (np.ones((2, 3), ">i2").data, ">i2", (2, 3)),
        (np.ones((2, 3), "F").data[::-1], "complex64", (2, 3)),
        (np.zeros(2, "i4,f4").data, "i4,f4", (2,)),
        (memoryview(b"abc"), "uint8", (3,)),
        (memoryview(b"abc").cast("b"), "int8", (3,)),
        (bytearray(3), "uint8", (3,)),
        (b"abc", "uint8", (3,)),
        (array.array("d", [1, 2]), "float64", (2,)),
        (array.array("H", [1]), "uint16", (1,)),
        ((ctypes.c_int32 * 2)(), "int32", (2,)),
    ],
)
def test_the_elements_of_a_buffer_are_what_its_format_says(data: Any, dtype: str, shape: tuple[int, ...]) -> None:
    found = operand(data).array
    assert found.dtype == np.dtype(dtype)
    assert found.shape == shape
    view = memoryview(data)
    owner: Any = np.frombuffer(data, np.uint8) if view.c_contiguous else view.obj
    assert np.shares_memory(found, owner), "it lies where the buffer does"


def test_elements_that_numpy_does_not_know_are_refused() -> None:
    for data in (memoryview(b"12345678").cast("P"), memoryview((ctypes.c_wchar * 2)())):
        with pytest.raises(UsageError, match="are of no type of numpy's"):
            operand(data)
    with pytest.raises(UsageError, match="object forms"):
        operand(np.array([None]).data)


def _typed(mesh: Mesh) -> None:
    for count in (2, 5000):
        numbers = np.full(count, mesh.rank + 1.0)
        mesh.all_reduce(numbers.data)
        assert (numbers == 3).all()
        gathered = mesh.all_gather(np.full(count, mesh.rank + 0.5).data)
        assert gathered.dtype == np.float64
        assert (gathered == [[0.5] * count, [1.5] * count]).all()
        into = array.array("d", bytes(8 * count))
        mesh.all_reduce(array.array("d", [mesh.rank] * count), "max", out=into)
        assert into == array.array("d", [1] * count)
        out = np.zeros(count)
        mesh.all_reduce([np.ones(count)], out=[out.data])
        assert (out == 2).all()
    plain = bytearray(b"\1\2")
    assert mesh.all_reduce(plain).dtype == np.uint8
    assert plain == b"\2\4"
    with pytest.raises(UsageError, match="out is uint8 of shape"):
        mesh.all_reduce(np.ones(1), out=bytearray(8))
    mesh.barrier()


@pytest.mark.parametrize("shm", [True, False], ids=["shm", "tcp"])
def test_doubles_in_a_memoryview_were_added_as_bytes(shm: bool) -> None:
    run_ranks(2, _typed, CONFIG.override(shm=shm))


def _matrix(mesh: Mesh) -> None:
    for side in (2, 300):
        with pytest.warns(PendingDeprecationWarning):
            matrix = np.asmatrix(np.full((side, side), mesh.rank + 1.0))
        assert mesh.all_reduce(matrix) is matrix
        assert (matrix == 3).all()
        assert mesh.all_gather(matrix).shape == (2, side, side)
        assert (mesh.all_reduce([matrix], "avg")[0] == 3).all()
    mesh.barrier()


@pytest.mark.parametrize("shm", [True, False], ids=["shm", "tcp"])
def test_a_matrix_was_taken_for_another_length(shm: bool) -> None:
    run_ranks(2, _matrix, CONFIG.override(shm=shm))


def _overlapping(mesh: Mesh) -> None:
    """The root's own part goes where another's lies, and the other way round, and where it is already."""
    rank, size, at_root = mesh.rank, mesh.size, mesh.rank == 1
    for algorithm in (None, "direct", "binomial"):
        for place in range(size):
            whole = np.arange(2.0 * size).reshape(size, 2)
            out = whole[place] if at_root else np.empty(2)
            got = mesh.scatter(whole if at_root else None, 1, out=out, algorithm=algorithm)
            assert got.tolist() == [2.0 * rank, 2.0 * rank + 1], (algorithm, place)
            rows = np.arange(2.0 * size)
            out = rows[2 * place : 2 * place + 2] if at_root else np.empty(2)
            got = mesh.scatter_v(rows if at_root else None, [2] * size, 1, out=out, algorithm=algorithm)
            assert got.tolist() == [2.0 * rank, 2.0 * rank + 1], (algorithm, place)
    mesh.barrier()


@pytest.mark.parametrize("shm", [True, False], ids=["shm", "tcp"])
def test_a_root_whose_out_lies_in_anothers_part_scattered_its_own_there(shm: bool) -> None:
    run_ranks(3, _overlapping, CONFIG.override(shm=shm))


def _texts(mesh: Mesh) -> None:
    other, fortran, frozen = 1 - mesh.rank, np.ones((3, 4), order="F"), np.zeros(4)
    frozen.flags.writeable = False
    texts: list[tuple[str, Any]] = [
        (r"^The array of shape \(3, 4\) is not contiguous\. .* and copy back, or out=\.$", mesh.all_reduce),
        (r"^The array of shape \(3, 4\) is not contiguous\. .* and copy back, or out=\.$", mesh.exscan),
        (
            r"^The array of shape \(3, 4\) is not contiguous\. .* and copy back\.$",
            lambda x: mesh.broadcast(x, 1 - mesh.rank),
        ),
        (r"^out of shape \(3, 4\) is not contiguous\. .* and copy back\.$", lambda x: mesh.scan(x, out=x)),
    ]
    for text, call in texts:
        with pytest.raises(UsageError, match=text):
            call(fortran)
    with pytest.raises(UsageError, match=r"^The array is read-only, .* Pass a writable array, or out=\.$"):
        mesh.all_reduce(frozen)
    with pytest.raises(UsageError, match=r"^out is read-only, .* Pass a writable array\.$"):
        mesh.all_reduce(np.ones(4), out=frozen)
    with pytest.raises(UsageError, match=r"^An array of the list is read-only, .* Pass a writable array, or out=\.$"):
        mesh.all_reduce([np.ones(4), frozen])
    for one_or_list in (frozen, [frozen]):
        with pytest.raises(UsageError, match=r"is read-only, .* Pass a writable array\.$"):
            mesh.broadcast(one_or_list, other)
    for call in (lambda: mesh.scatter(None, mesh.rank), lambda: mesh.scatter_v(None, [1, 1], mesh.rank)):
        with pytest.raises(UsageError, match=r"^scatter(_v)? takes the array to scatter at its root, and this rank is"):
            call()
    mesh.barrier()


def test_errors_spoke_of_an_out_that_nobody_passed() -> None:
    run_world(2, _texts, config=CONFIG, timeout=LIMIT)

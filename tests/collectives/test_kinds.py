"""What elements are called among ranks: dtypes that hold their values differently are told apart."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from rankmesh import Config, DesyncError, Mesh
from rankmesh.collectives.kinds import kind_of
from ranks import run_ranks
from timing import scaled

pytestmark = pytest.mark.usefixtures("nursery")

CONFIG = Config(timeout=scaled(30))
FIRST: list[Any] = [("a", "i4"), ("b", "f4")]
SECOND: list[Any] = [("x", "f4"), ("y", "i4")]
#: Many of them of eight bytes.
DISTINCT: list[Any] = [
    FIRST,
    SECOND,
    [("b", "f4"), ("a", "i4")],
    [("a", ">i4"), ("b", "f4")],
    [("a", "i2", (2,)), ("b", "f4")],
    [("a", "i2"), ("", "V2"), ("b", "f4")],
    [("a", [("b", "i4")]), ("b", "f4")],
    {"names": ["a", "b"], "formats": ["i4", "f4"], "offsets": [4, 0]},
    {"names": ["a", "b"], "formats": ["i4", "f4"], "offsets": [0, 2]},
    {"names": ["a", "b"], "formats": ["i4", "f4"], "itemsize": 12},
    [("at", "M8[s]")],
    [("at", "M8[ms]")],
    [("text", "U2")],
    [("text", "S8")],
    "V8",
    "S8",
    "U2",
    ">U2",
    "M8[s]",
    "M8[25s]",
    ">M8[s]",
    "m8[s]",
    "f8",
    ">f8",
    "i8",
    [(f"f{at}", "i1") for at in range(100)],
    [(f"f{at}", "i1") for at in range(99)] + [("f99", "u1")],
]


def test_dtypes_that_differ_have_names_that_differ() -> None:
    for one, other in combinations(map(np.dtype, DISTINCT), 2):
        assert one != other
        assert kind_of(one).name != kind_of(other).name, (one, other)


def test_a_name_says_where_every_field_lies_and_is_bounded() -> None:
    assert kind_of(np.dtype(FIRST)).name == "{'a': int32 at 0, 'b': float32 at 4 in 8 bytes}"
    assert kind_of(np.dtype([("a", ">i2", (2, 3))])).name == "{'a': >i2 of (2, 3) at 0 in 12 bytes}"
    assert kind_of(np.dtype((np.record, FIRST))).name == kind_of(np.dtype(FIRST)).name
    for dtype in DISTINCT:
        assert len(kind_of(np.dtype(dtype)).name) <= 72
    assert kind_of(np.dtype(DISTINCT[-1])).name.startswith("{100 fields in 100 bytes, layout ")
    assert kind_of(np.dtype([("\ud800\n", "i4")])).name == r"{'\ud800\n': int32 at 0 in 4 bytes}"


def _broadcast_and_meet(mesh: Mesh, array: Any) -> None:
    mesh.broadcast(array)
    mesh.barrier()  # a root has done its part before the others look at it


def _disagree(mesh: Mesh) -> str:
    array = np.zeros(1, FIRST if mesh.rank == 0 else SECOND)
    with pytest.raises(DesyncError) as caught:
        _broadcast_and_meet(mesh, array)
    assert array.tobytes() == bytes(8), "nothing came from the other"
    return str(caught.value)


@pytest.mark.parametrize("shm", [True, False], ids=["shm", "tcp"])
def test_structures_of_one_size_were_taken_for_each_other(shm: bool) -> None:
    for text in run_ranks(2, _disagree, CONFIG.override(shm=shm)):
        assert "1 {'a': int32 at 0, 'b': float32 at 4 in 8 bytes}" in text
        assert "1 {'x': float32 at 0, 'y': int32 at 4 in 8 bytes}" in text


def _both(mesh: Mesh) -> None:
    one, other = np.zeros(2, FIRST), np.zeros(3, SECOND)
    if mesh.rank == 0:
        one[:], other[:] = (1, 2.5), (3.5, 4)
    mesh.broadcast([one, other, one[:1].copy()])
    assert one.tolist() == [(1, 2.5)] * 2
    assert other.tolist() == [(3.5, 4)] * 3
    mesh.barrier()


@pytest.mark.parametrize("shm", [True, False], ids=["shm", "tcp"])
def test_a_list_of_two_structures_of_one_size_was_taken_for_one_kind(shm: bool) -> None:
    run_ranks(2, _both, CONFIG.override(shm=shm))

"""The exchange among neighbours: on grids and graphs, against what each must get."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankmesh import Config, DeadlineError, DesyncError, Mesh, UsageError
from rankmesh.collectives import Grid
from rankmesh.collectives.exchanging import round_of
from rankmesh.collectives.simulator import simulate
from rankmesh.testing import run_world
from ranks import run_ranks
from timing import scaled

pytestmark = pytest.mark.usefixtures("nursery")

CONFIG = Config(timeout=scaled(30))
LIMIT = scaled(50)


def test_a_grid_numbers_its_ranks_as_numpy_does() -> None:
    grid = Grid((3, 4, 2), periodic=(True, False, False))
    assert grid.size == 24
    for rank in range(24):
        assert grid.coordinates(rank) == np.unravel_index(rank, (3, 4, 2))
        assert grid.rank(grid.coordinates(rank)) == rank
    assert grid.shift(0, 0, -1) == 16
    assert grid.shift(0, 1, -1) is None
    assert grid.shift(0, 1, 2) == 4
    assert grid.neighbors(0) == [16, 8, 2, 1]
    assert Grid([2], periodic=True).neighbors(0) == [1]
    assert Grid([1], periodic=True).neighbors(0) == []
    for bad in ((), (0,), (2, -1)):
        with pytest.raises(UsageError, match="A grid has lengths"):
            Grid(bad)
    with pytest.raises(UsageError, match="no rank 24"):
        grid.coordinates(24)


def _diffuse(mesh: Mesh, dims: tuple[int, int]) -> Any:
    """Each rank has a tile of a field, and averages it with its neighbours' edges, three times."""
    grid = Grid(dims, periodic=(False, True))
    tile = np.random.default_rng(mesh.rank).random((4, 5))
    for _ in range(3):
        padded = np.pad(tile, 1)
        up, down = grid.shift(mesh.rank, 0, -1), grid.shift(mesh.rank, 0, 1)
        sends, receives = {}, {}
        if up is not None:
            sends[up], receives[up] = tile[0], padded[0, 1:-1]
        if down is not None:
            sends[down], receives[down] = tile[-1], padded[-1, 1:-1]
        assert mesh.neighbor_exchange(sends, receives) is receives
        left, right = grid.shift(mesh.rank, 1, -1), grid.shift(mesh.rank, 1, 1)
        assert left is not None
        assert right is not None
        columns = np.empty((2, 4))
        mesh.neighbor_exchange({left: tile[:, 0]}, {right: columns[1]})
        mesh.neighbor_exchange({right: tile[:, -1]}, {left: columns[0]})
        padded[1:-1, 0], padded[1:-1, -1] = columns
        tile = (padded[1:-1, 1:-1] + padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]) / 5
    return tile


@pytest.mark.parametrize("dims", [(1, 1), (2, 1), (2, 3)])
def test_a_stencil_over_ranks_is_that_over_the_whole_field(dims: tuple[int, int]) -> None:
    tiles = run_world(dims[0] * dims[1], _diffuse, args=(dims,), config=CONFIG, timeout=LIMIT)
    ranks = [[row * dims[1] + at for at in range(dims[1])] for row in range(dims[0])]
    field = np.block([[np.random.default_rng(rank).random((4, 5)) for rank in row] for row in ranks])
    for _ in range(3):
        above, below = np.pad(field, ((1, 0), (0, 0)))[:-1], np.pad(field, ((0, 1), (0, 0)))[1:]
        field = (field + above + below + np.roll(field, 1, 1) + np.roll(field, -1, 1)) / 5
    got = np.block([[tiles[rank] for rank in row] for row in ranks])
    assert np.allclose(got, field)


def _graph(mesh: Mesh, edges: list[tuple[int, int, int]]) -> None:
    sends = {to: np.full(count, source * 10 + to) for source, to, count in edges if source == mesh.rank}
    receives = {source: np.empty(count, int) for source, to, count in edges if to == mesh.rank}
    work = mesh.neighbor_exchange(sends, receives, async_op=True)
    mesh.barrier()
    work.result()
    for source, got in receives.items():
        assert (got == source * 10 + mesh.rank).all()


@settings(max_examples=15)
@given(st.integers(1, 5), st.dictionaries(st.tuples(st.integers(0, 4), st.integers(0, 4)), st.integers(0, 9)))
def test_any_graph(size: int, given_edges: dict[tuple[int, int], int]) -> None:
    edges = [(source, to, count) for (source, to), count in given_edges.items() if max(source, to) < size]
    plans = []
    for rank in range(size):
        sends = [to for source, to, _ in edges if source == rank]
        receives = [source for source, to, _ in edges if to == rank]
        plans.append(iter([round_of(rank, sends, receives)]))
    simulate(plans, [np.zeros(2 * sum(rank in edge[:2] for edge in edges)) for rank in range(size)])
    run_world(size, _graph, args=(edges,), config=CONFIG, timeout=LIMIT)


def _large(mesh: Mesh) -> None:
    after, before = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size
    tensor = torch.full((200_000,), mesh.rank, dtype=torch.bfloat16)
    mesh.neighbor_exchange({after: tensor}, {before: tensor})  # in place: what is sent is copied first
    assert (tensor == before).all()
    strided = np.full((3, 1000), mesh.rank)[:, ::2]
    out = np.empty((3, 500), int)
    mesh.neighbor_exchange({after: strided, mesh.rank: np.arange(3)}, {before: out, mesh.rank: np.empty(3, int)})
    assert (out == before).all()


def test_tensors_strides_and_large_arrays_in_processes() -> None:
    run_ranks(3, _large, CONFIG)


def _send_and_meet(mesh: Mesh, sent: int, expected: int) -> None:
    mesh.neighbor_exchange({0: np.zeros(sent)}, {0: np.zeros(expected)})
    mesh.barrier()


def _wrong_size(mesh: Mesh, sent: int, expected: int) -> str:
    """Who sent it may get what it expects, and learn of it in the next collective."""
    right = {1: np.zeros(expected)}
    with pytest.raises(DesyncError) as caught:
        _send_and_meet(mesh, sent, expected) if mesh.rank else mesh.neighbor_exchange(right, {1: np.zeros(expected)})
    return str(caught.value)


@pytest.mark.parametrize("sent, expected", [(4, 3), (0, 3), (3, 2036), (2037, 2036), (2036, 2037), (40_000, 2)])
def test_a_wrong_size_is_named(sent: int, expected: int) -> None:
    for text in run_world(2, _wrong_size, args=(sent, expected), config=CONFIG, timeout=LIMIT):
        first, second = text.split("; rank 1 called neighbor_exchange #0")
        assert "were expected" not in first
        assert f", and sent {sent} float64 where {expected} float64 were expected" in second


def _every_size(mesh: Mesh) -> None:
    """Around where a word goes ahead."""
    other = 1 - mesh.rank
    for nbytes in [0, 1, *range(16_286, 16_292), 16_384, 16_385]:
        got = np.empty(nbytes, np.uint8)
        mesh.neighbor_exchange({other: np.arange(nbytes).astype(np.uint8)}, {other: got})
        assert np.array_equal(got, np.arange(nbytes).astype(np.uint8))
    mesh.barrier()


@pytest.mark.parametrize("shm", [True, False], ids=["shm", "tcp"])
def test_messages_with_their_words_and_behind_them(shm: bool) -> None:
    run_ranks(2, _every_size, CONFIG.override(shm=shm))


def _other_dtype(mesh: Mesh, count: int) -> str:
    """Ranks 0 and 1 mean different things by as many bytes; rank 2 has nothing to do with it."""
    dtype, other = ["f4", "i4"][mesh.rank % 2], 1 - mesh.rank
    if mesh.rank == 2:
        mesh.neighbor_exchange({}, {})
    with pytest.raises(DesyncError) as caught:
        mesh.barrier() if mesh.rank == 2 else mesh.neighbor_exchange(
            {other: np.ones(count, dtype)}, {other: np.ones(count, dtype)}
        )
    return str(caught.value)


@pytest.mark.parametrize("shm", [True, False], ids=["shm", "tcp"])
@pytest.mark.parametrize("count", [2, 200_000])
def test_numbers_of_another_dtype_were_taken_for_those_expected(count: int, shm: bool) -> None:
    either = (
        f", and sent {count} float32 where {count} int32 were expected; rank 1 called neighbor_exchange #0",
        f", and sent {count} int32 where {count} float32 were expected; rank 2 called neighbor_exchange #0",
    )
    for text in run_ranks(3, _other_dtype, CONFIG.override(shm=shm), args=(count,)):
        assert any(one in text for one in either), text
        assert "test_exchanging.py:" in text


def _long_names(mesh: Mesh) -> None:
    other = 1 - mesh.rank
    for dtype in ([("\u00e9" * 40, "f8")], [(f"f{at}", "i1") for at in range(99)], "U1000"):
        got = np.zeros((5, 2), dtype)
        sent = np.full((2, 5), mesh.rank + 1).astype("U1000" if dtype == "U1000" else "f8").astype(dtype)
        mesh.neighbor_exchange({other: sent}, {other: got})
        assert got.reshape(2, 5).tolist() == np.full((2, 5), other + 1).astype(sent.dtype).tolist()
    mesh.barrier()


def test_elements_of_long_names_and_another_shape() -> None:
    run_world(2, _long_names, config=CONFIG, timeout=LIMIT)


def _many_at_once(mesh: Mesh) -> None:
    """Words and messages of several exchanges under way, eager and not, arrive in their order."""
    after, before = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size
    works = []
    for turn in range(20):
        count = [3, 100_000][turn % 2]
        into = {before: np.empty(count, int), after: np.empty(count, np.float32)}
        sends = {after: np.full(count, turn * 10 + mesh.rank), before: np.full(count, turn, np.float32)}
        works.append((turn, into, mesh.neighbor_exchange(sends, into, async_op=True)))
    for turn, into, work in works:
        assert work.result() is into
        assert (into[before] == turn * 10 + before).all()
        assert (into[after] == turn).all()
    mesh.barrier()


@pytest.mark.parametrize("config", [CONFIG, CONFIG.override(shm=False), CONFIG.override(eager_bytes=64, shm=False)])
def test_words_come_before_their_messages(config: Config) -> None:
    run_ranks(3, _many_at_once, config)


def _forgotten(mesh: Mesh) -> None:
    if mesh.rank:
        with pytest.raises(DeadlineError, match=r"neighbor_exchange with rank 0 .* did not complete within"):
            mesh.neighbor_exchange({}, {0: np.zeros(3)}, timeout=scaled(0.5))
    else:
        mesh.neighbor_exchange({}, {})
        mesh.recv(bytearray(1), source=1)
        return
    mesh.send(b"x", to=0)


def test_who_is_waited_for_in_vain_is_named() -> None:
    run_world(2, _forgotten, config=CONFIG, timeout=LIMIT)


def _refusals(mesh: Mesh) -> None:
    one = np.zeros(1)
    refused: dict[str, Any] = {
        "no rank 2 in a group of 2": lambda: mesh.neighbor_exchange({2: one}, {}),
        "not contiguous": lambda: mesh.neighbor_exchange({}, {1 - mesh.rank: np.zeros((4, 4))[:, 1]}),
        "sends to itself": lambda: mesh.neighbor_exchange({mesh.rank: one}, {}),
    }
    for text, call in refused.items():
        with pytest.raises(UsageError, match=text):
            call()
    mesh.barrier()


def test_what_cannot_be_right_is_refused_before_it_is_exchanged() -> None:
    run_world(2, _refusals, config=CONFIG, timeout=LIMIT)

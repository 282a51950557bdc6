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


def _wrong_size(mesh: Mesh) -> str:
    other = 1 - mesh.rank
    if mesh.rank:  # gets what it expects, and learns of it in the next collective
        mesh.neighbor_exchange({other: np.zeros(4)}, {other: np.zeros(3)})
    with pytest.raises(DesyncError) as caught:
        mesh.barrier() if mesh.rank else mesh.neighbor_exchange({other: np.zeros(3)}, {other: np.zeros(3)})
    return str(caught.value)


def test_a_wrong_size_is_named() -> None:
    for text in run_world(2, _wrong_size, config=CONFIG, timeout=LIMIT):
        assert "sent 32 bytes where 24 were expected" in text


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

"""More than 2 GiB in one call: nothing counts bytes in 31 or 32 bits.

`make soak` moves them by every way there is. A normal run broadcasts them, by shared memory and by messages.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from rankmesh import Config, Mesh
from rankmesh.collectives.fusing import refined
from rankmesh.collectives.kinds import kind_of
from rankmesh.collectives.plan import Round, Send
from rankmesh.collectives.reducing import Reduction
from rankmesh.collectives.space import Part, Space, even
from rankmesh.config import GIB
from rankmesh.testing import run_world
from timing import scaled

COUNT = 2 * GIB + 12345
#: Around which a count of 31 bits, or of 32 for two such arrays, would go wrong.
PLACES = [0, GIB, 2 * GIB - 1, 2 * GIB, COUNT - 1]
CONFIG = Config(timeout=scaled(60))


def needs(nbytes: int) -> pytest.MarkDecorator:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pytest.mark.skipif(available < nbytes, reason=f"needs {nbytes / GIB:g} GiB of free memory")


def test_blocks_beyond_2_gib_are_found() -> None:
    array = np.zeros(COUNT, np.uint8)
    counts = [COUNT - 1000, 1000]
    space = Space(Part(array, counts))
    assert space.nbytes == COUNT
    assert [len(space.memory(span)) for span in ((0, 2), (0, 1), (1, 2))] == [COUNT, *counts]
    last = space.array((1, 2))
    Reduction("sum", kind_of(array.dtype), 2).apply(last[-5:], np.arange(5, dtype=np.uint8), last[-5:])
    assert bytes(space.memory((1, 2))[-5:]) == bytes(range(5))
    assert array[-5:].tolist() == list(range(5))


def test_plans_are_cut_beyond_2_gib() -> None:
    rounds, parts = refined([Round((Send(1, ((0, 1), (1, 2))),))], even(COUNT, 2), [2 * GIB, 12345])
    assert parts == [[GIB + 6173, GIB - 6173], [12345]]
    assert rounds == (Round((Send(1, ((0, 1), (1, 2), (2, 3))),)),)


def _everything(mesh: Mesh) -> None:
    array: Any = np.zeros(COUNT, np.uint8)
    if mesh.rank == 0:
        array[PLACES] = 7
    mesh.broadcast(array)
    assert array[PLACES].tolist() == [7] * len(PLACES)
    array[PLACES] = range(1, len(PLACES) + 1)
    mesh.all_reduce(array)
    assert array[PLACES].tolist() == [2, 4, 6, 8, 10]
    assert np.count_nonzero(array) == len(PLACES)
    if mesh.rank == 0:
        mesh.send(array, to=1)
    else:
        array.fill(0)
        assert mesh.recv(array, source=0).nbytes == COUNT
        assert array[PLACES].tolist() == [2, 4, 6, 8, 10]
    gathered = mesh.all_gather(array[: COUNT // 2])
    assert gathered.nbytes > 2 * GIB
    assert gathered[:, [0, GIB]].tolist() == [[2, 4], [2, 4]]
    del gathered
    part = mesh.reduce_scatter(array[: COUNT // 2 * 2].reshape(2, -1))
    assert np.count_nonzero(part)
    mesh.all_reduce([array[:GIB], array[GIB:]], "max")
    assert array[PLACES].tolist() == [2, 4, 6, 8, 10]


def _one_of_each_way(mesh: Mesh) -> None:
    """Over slots or pulled, and by messages that are announced."""
    array: Any = np.zeros(COUNT, np.uint8)
    if mesh.rank == 0:
        array[PLACES] = range(1, len(PLACES) + 1)
    mesh.broadcast(array)
    assert array[PLACES].tolist() == [1, 2, 3, 4, 5]
    assert np.count_nonzero(array) == len(PLACES)


@needs(6 * GIB)
@pytest.mark.timeout(scaled(90))
@pytest.mark.parametrize("shm", [True, False], ids=["shm", "tcp"])
def test_a_broadcast_of_more_than_2_gib(shm: bool) -> None:
    run_world(2, _one_of_each_way, processes=True, config=CONFIG.override(shm=shm), timeout=scaled(80))


@pytest.mark.soak
@needs(14 * GIB)
@pytest.mark.timeout(scaled(200))
@pytest.mark.parametrize("shm", [True, False], ids=["shm", "tcp"])
def test_collectives_of_more_than_2_gib(shm: bool) -> None:
    run_world(2, _everything, processes=True, config=CONFIG.override(shm=shm), timeout=scaled(180))

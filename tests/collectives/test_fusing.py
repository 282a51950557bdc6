"""Lists of arrays as one collective: in place and packed, of many dtypes, against the same arrays one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from rankmesh import Config, DesyncError, Mesh, UsageError, Work
from rankmesh.collectives import fusing
from rankmesh.collectives.choosing import ALGORITHMS
from rankmesh.collectives.fusing import refined
from rankmesh.collectives.plan import Into, Receive, Round, Send
from rankmesh.testing import run_world
from ranks import Ranks, Talk, run_ranks
from timing import scaled

pytestmark = pytest.mark.usefixtures("nursery")

CONFIG = Config(timeout=scaled(30))
LIMIT = scaled(50)


def given_by(rank: int, count: int, dtype: Any = np.float32) -> Any:
    return ((np.arange(count) * 7 + rank * 3) % 5).astype(dtype)


def mixture(rank: int) -> list[Any]:
    """Large and small, contiguous or not, empty, without dimensions, of five kinds."""
    tensor = torch.from_numpy(given_by(rank, 50_000)).to(torch.bfloat16)
    return [
        given_by(rank, 40_000),
        given_by(rank, 3).reshape(3, 1),
        given_by(rank, 60_000, np.int64)[::2],
        np.array(rank, np.float32),
        given_by(rank, 100_000).reshape(100, 1000).T,
        np.empty((0, 4), np.float32),
        tensor,
        given_by(rank, 20_000, np.float64),
        tensor[:5].clone(),
        torch.full((3,), rank),
        given_by(rank, 30_000),
    ]


def total_of(size: int) -> list[Any]:
    everyone = [mixture(rank) for rank in range(size)]
    return [sum(each[1:], each[0] * 1) for each in zip(*everyone, strict=True)]


def check_equal(got: list[Any], wanted: list[Any]) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert isinstance(one, torch.Tensor) == isinstance(other, torch.Tensor)
        assert one.dtype == other.dtype
        assert np.array_equal(torch.as_tensor(one).double(), torch.as_tensor(other).double())


def _all_reduce(mesh: Mesh) -> None:
    total = total_of(mesh.size)
    for algorithm in (None, *ALGORITHMS["all_reduce"]):
        arrays = mixture(mesh.rank)
        result = mesh.all_reduce(arrays, algorithm=algorithm)
        assert all(one is other for one, other in zip(result, arrays, strict=True))
        check_equal(result, total)
    arrays = mixture(mesh.rank)
    out = [torch.zeros_like(one) if isinstance(one, torch.Tensor) else np.zeros_like(one) for one in arrays]
    work = mesh.all_reduce(arrays, out=out, async_op=True)
    assert isinstance(work, Work)
    check_equal(work.result(), total)
    check_equal(out, total)
    check_equal(arrays, mixture(mesh.rank))
    floats = [np.full(30_000, float(mesh.rank)), np.full(3, 1.0, np.float32)]
    averages = mesh.all_reduce(floats, "avg")
    assert [one[0] for one in averages] == [(mesh.size - 1) / 2, 1.0]
    empty = mesh.all_reduce([np.empty(0), np.empty((3, 0))])
    assert [one.shape for one in empty] == [(0,), (3, 0)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_list_of_all_kinds_in_threads(size: int) -> None:
    run_world(size, _all_reduce, config=CONFIG, timeout=LIMIT)


@pytest.mark.parametrize("shm", [True, False], ids=["shm", "tcp"])
def test_a_list_of_all_kinds_in_processes(shm: bool) -> None:
    run_ranks(3, _all_reduce, CONFIG.override(shm=shm))


def _broadcast(mesh: Mesh) -> None:
    for root in range(mesh.size):
        for algorithm in (None, *ALGORITHMS["broadcast"]):
            arrays = mixture(mesh.rank)
            check_equal(mesh.broadcast(arrays, root, algorithm=algorithm), mixture(root))


def test_a_list_is_broadcast() -> None:
    run_world(3, _broadcast, config=CONFIG, timeout=LIMIT)


def _same_as_one(mesh: Mesh, lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed + mesh.rank)
    arrays = [rng.standard_normal((length, 2)).astype(np.float32)[:, 0] for length in lengths]
    for algorithm in (None, *ALGORITHMS["all_reduce"]):
        whole = mesh.all_reduce(np.concatenate(arrays), algorithm=algorithm)
        for parts in ([array.copy() for array in arrays], [array * 1 for array in arrays]):
            mesh.all_reduce(parts, algorithm=algorithm)
            assert np.concatenate(parts).tobytes() == whole.tobytes(), (algorithm, lengths, seed)


SEEDS = st.integers(0, 1000)
LENGTHS = st.lists(st.sampled_from([0, 1, 3, 40, 3000, 100_000]), min_size=1, max_size=6)
#: Of arrays that are copied together; all are, some are, none is.
LIMITS = st.sampled_from([0, 40, 1 << 20])


@settings(max_examples=15)
@given(
    size=st.sampled_from([2, 3, 4, 5]),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    limit=LIMITS,
    seed=SEEDS,
)
def test_the_same_bits_as_from_one_long_array(size: int, lengths: list[int], limit: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fusing, "_IN_PLACE", limit)
        run_world(size, _same_as_one, args=(lengths, seed), config=CONFIG, timeout=LIMIT)


def _same_as_one_as_told(mesh: Mesh, talk: Talk) -> None:
    while (told := talk.recv()) is not None:
        lengths, limit, on_stage, seed = told
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fusing, "_IN_PLACE", limit)
            patch.setattr(fusing, "_ON_STAGE", on_stage)
            if on_stage:
                _same_as_one(mesh, lengths, seed)
            else:
                _stays_over_messages(mesh, lengths, seed)
        talk.send("right")


def _stays_over_messages(mesh: Mesh, lengths: list[int], seed: int) -> None:
    """What is too large for the stage has the bits of the plan that "shared" has without one."""
    rng = np.random.default_rng(seed + mesh.rank)
    arrays = [rng.standard_normal(length).astype(np.float32) for length in (*lengths, 1, 1)]
    whole = mesh.all_reduce(np.concatenate(arrays), algorithm="halving_doubling")
    mesh.all_reduce(arrays, algorithm="shared")
    assert np.concatenate(arrays).tobytes() == whole.tobytes(), (lengths, seed)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_list_had_other_bits_than_one_array_on_a_stage(size: int) -> None:
    """From the first call on, for which the stage is founded. Longer than slots, too."""
    with Ranks(size, _same_as_one_as_told, CONFIG) as ranks:

        @settings(max_examples=15, phases=[Phase.explicit, Phase.generate])
        @given(st.tuples(LENGTHS, LIMITS, st.sampled_from([1 << 30, 1 << 30, 0]), SEEDS))
        @example(([3000], 40, 1 << 30, 0))
        def check(told: tuple[list[int], int, int, int]) -> None:
            for rank in range(size):
                ranks.say(rank, told)
            assert ranks.hear_all() == ["right"] * size

        check()
        for rank in range(size):
            ranks.say(rank)


def test_spans_are_cut_where_an_array_ends() -> None:
    rounds = (Round((Send(1, ((0, 1),)),), (Receive(1, ((1, 2),), Into.LEFT),)), Round((Send(1, ((0, 2),)),)))
    cut, parts = refined(rounds, [5, 4], [3, 0, 4, 2])
    # elements 0-2 | 3-4, 5-6 | 7-8: blocks 0; 1, 2; 3
    assert parts == [[3], [], [2, 2], [2]]
    assert cut[0] == Round((Send(1, ((0, 1), (1, 2))),), (Receive(1, ((2, 3), (3, 4)), Into.LEFT),))
    assert cut[1] == Round((Send(1, ((0, 1), (1, 3), (3, 4))),))


def test_large_arrays_stay_where_they_lie() -> None:
    large, small = np.zeros(1 << 15), np.zeros(4)
    bucket = fusing.bucketed(fusing.operands([small, large, small, small], "all_reduce"))[0]
    pieces = bucket.pieces(filled=True)
    assert [piece.flat.size for piece in pieces] == [4, 1 << 15, 8]
    assert np.shares_memory(pieces[1].flat, large)


def _cut_differently(mesh: Mesh) -> str:
    sizes = (3, 5) if mesh.rank else (5, 3)
    with pytest.raises(DesyncError) as caught:
        mesh.all_reduce([np.zeros(size) for size in sizes])
    return str(caught.value)


def test_lists_that_are_cut_differently_are_no_match() -> None:
    for text in run_world(2, _cut_differently, config=CONFIG, timeout=LIMIT):
        assert "8 float64 in [5, 3]" in text
        assert "8 float64 in [3, 5]" in text


def _lost(mesh: Mesh) -> bool:
    arrays = [np.zeros(3), np.zeros(3, np.int8)]
    if mesh.rank == 0:
        mesh.recv(bytearray(1), source=1)
        return True
    work = mesh.all_reduce(arrays, async_op=True)
    assert not work.done()
    assert work.cancel()
    assert work.done()
    mesh.send(b"x", to=0)
    return True


def test_a_list_of_two_kinds_is_cancelled_as_one() -> None:
    assert all(run_world(2, _lost, config=CONFIG, timeout=LIMIT))


def _refusals(mesh: Mesh) -> None:
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    refused: dict[str, Any] = {
        "without arrays": lambda: mesh.all_reduce([]),
        "read-only": lambda: mesh.all_reduce([np.zeros(3), frozen]),
        "out has 1 arrays for 2": lambda: mesh.all_reduce([np.zeros(1)] * 2, out=[np.zeros(1)]),
        "a float32, which has no memory": lambda: mesh.all_reduce([np.zeros((), "f4")], out=[np.float32(1)]),
        "int64 have no avg": lambda: mesh.all_reduce([np.zeros(1), np.zeros(1, np.int64)], "avg"),
    }
    for text, call in refused.items():
        with pytest.raises(UsageError, match=text):
            call()
    mesh.barrier()


def test_lists_that_cannot_be_right_are_refused() -> None:
    run_world(2, _refusals, config=CONFIG, timeout=LIMIT)

"""all_reduce with compression: near the sum, right in the long run, the same bits on all ranks."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankmesh import Config, DesyncError, Mesh, UsageError
from rankmesh.collectives.compression import Cast, Compressor, Int8, RandomK, TopK
from rankmesh.collectives.compression.halves import narrow, widen
from rankmesh.testing import run_world
from ranks import run_ranks
from timing import scaled

pytestmark = pytest.mark.usefixtures("nursery")

CONFIG = Config(timeout=scaled(30))
LIMIT = scaled(50)
Array = np.ndarray[Any, Any]


class Whole(Compressor):
    """A user's own, which leaves nothing out."""

    signature = "whole()"

    def nbytes(self, count: int) -> int:
        return 4 * count

    def encode(self, values: Array, payload: Array, seed: int) -> None:
        payload.view(np.float32)[:] = values

    def decode(self, payload: Array, out: Array, seed: int) -> None:
        out[:] = payload.view(np.float32)


def all_kinds() -> list[Compressor]:
    return [Cast("float16"), Cast(), Int8(), Int8(block=7), TopK(0.1), RandomK(0.25), TopK(1.0), RandomK(1.0), Whole()]


def drawn(rank: int, count: int, step: int = 0) -> Any:
    return np.random.default_rng([rank, count, step]).standard_normal(count).astype(np.float32)


# ---------------------------------------------------------------------- what all have in common


def _long_run(mesh: Mesh, counts: list[int], steps: int) -> list[bytes]:
    """Sums of many steps, beside the exact ones: they differ by what is left, which does not grow."""
    made = []
    for compressor in all_kinds():
        for count in counts:
            by = compressor.named(str(count))
            results = [mesh.all_reduce(drawn(mesh.rank, count, step), compression=by) for step in range(steps)]
            made.append(np.concatenate(results).tobytes())
            wanted = sum(drawn(rank, count, step).astype(float) for rank in range(mesh.size) for step in range(steps))
            memory = by.memory(mesh._context.number, count)
            left = np.zeros(count) if memory.of_values is None else memory.of_values.astype(float)
            everyone = mesh.all_reduce(left)
            sums = mesh.all_gather_v(np.zeros(0) if memory.of_sums is None else memory.of_sums.astype(float))
            if len(sums):
                assert len(sums) == count
                everyone += sums
            got = sum(result.astype(float) for result in results) + everyone
            assert np.allclose(got, wanted, rtol=0, atol=1e-5 * steps * mesh.size), (by, count)
    return made


@pytest.mark.parametrize("size", [1, 2, 3, *(pytest.param(size, marks=pytest.mark.soak) for size in (5, 8))])
def test_nothing_is_lost_for_ever(size: int) -> None:
    """What came out and what is still kept add up to what went in; the same bits on all ranks."""
    made = run_world(size, _long_run, args=([0, 1, 5, 300, 1000], 4), config=CONFIG, timeout=LIMIT)
    assert made == [made[0]] * size


def test_nothing_is_lost_for_ever_in_processes() -> None:
    made = run_ranks(3, _long_run, CONFIG, ([3, 70_000], 3))
    assert made == [made[0]] * 3


#: The largest error of one call, as a part of the largest number of any rank, for 3 ranks.
BOUNDS = {
    "cast(dtype=float16)": 6 * 2**-11,
    "cast(dtype=bfloat16)": 6 * 2**-8,
    "int8(block=256)": 6 / 254,
    "topk(ratio=1)": 1e-6,
    "randomk(ratio=1, seed=0)": 1e-6,
    "whole()": 1e-6,
}


def _near(mesh: Mesh) -> None:
    everyone = [drawn(rank, 5000) for rank in range(mesh.size)]
    wanted, largest = sum(everyone), max(np.abs(one).max() for one in everyone)
    for compressor in [Cast("float16"), Cast(), Int8(), TopK(1.0), RandomK(1.0), Whole()]:
        got = mesh.all_reduce(everyone[mesh.rank].copy(), compression=compressor)
        worst = np.abs(got - wanted).max() / largest
        assert worst <= BOUNDS[compressor.signature], compressor
        plain = type(compressor)(error_feedback=False) if isinstance(compressor, Cast | Int8) else None
        if plain is not None:
            again = mesh.all_reduce(everyone[mesh.rank].copy(), compression=plain)
            assert np.abs(again - wanted).max() / largest <= BOUNDS[plain.signature], plain
            assert plain.memory(mesh._context.number, 5000).of_values is None


def test_a_single_call_is_near() -> None:
    run_world(3, _near, config=CONFIG, timeout=LIMIT)


def _forms(mesh: Mesh) -> None:
    size, rank = mesh.size, mesh.rank
    by = TopK(1.0)
    tensor = torch.full((4, 5), 0.5 + rank, dtype=torch.bfloat16)
    assert mesh.all_reduce(tensor, "avg", compression=by) is tensor
    assert torch.equal(tensor, torch.full((4, 5), size / 2, dtype=torch.bfloat16))
    out = np.zeros(20, np.float64)[::2]
    given_array = np.full(10, float(rank))
    assert mesh.all_reduce(given_array, out=out, compression=by.named("out")) is out
    assert out.tolist() == [sum(range(size))] * 10
    assert given_array.tolist() == [rank] * 10
    halves: list[Any] = [
        np.full(3, rank, np.float16),
        np.full((2, 2), 1.0),
        torch.ones(7),
        np.full(2, 1.5, ml_dtypes.bfloat16),
    ]
    result = mesh.all_reduce(halves, compression=by.named("list"))
    assert [one.dtype for one in result] == [one.dtype for one in halves]
    assert [float(np.ravel(one)[0]) for one in result] == [sum(range(size)), size, size, 1.5 * size]
    names = [f"layer {at}" for at in range(20)]
    pending = [
        mesh.all_reduce(drawn(rank, 100, at), compression=by.named(name), async_op=True)
        for at, name in enumerate(names)
    ]
    for at, work in enumerate(pending):
        wanted = sum(drawn(other, 100, at) for other in range(size))
        assert np.allclose(work.result(), wanted, atol=1e-5)
    half = mesh.split(rank % 2)
    assert half is not None
    with half:
        got = half.all_reduce(np.ones(33), compression=by)  # of another length: groups are kept apart
        assert got.tolist() == [half.size] * 33
    for algorithm in ("ring", "bruck", "direct"):
        for one in (Int8(), TopK(1.0)):
            got = mesh.all_reduce(np.full(10, 127.0), compression=one, algorithm=algorithm)
            assert np.allclose(got, 127 * size)
    got = mesh.all_reduce(np.ones(10), compression=RandomK(1.0), algorithm="recursive_doubling")
    assert got.tolist() == [size] * 10


@pytest.mark.parametrize("size", [1, 2, 5])
def test_tensors_lists_groups_and_asynchronous_calls(size: int) -> None:
    run_world(size, _forms, config=CONFIG, timeout=LIMIT)


# ---------------------------------------------------------------------- what is not finite


def _not_finite(mesh: Mesh) -> None:
    count = 600
    mine = np.ones(count, np.float32)
    if mesh.rank == 0:
        mine[3], mine[300], mine[5] = np.inf, np.nan, 1e30
    for by in (Cast("float16"), Cast(), Int8(), TopK(0.1), RandomK(1.0)):
        first = mesh.all_reduce(mine.copy(), compression=by)
        again = mesh.all_reduce(np.ones(count, np.float32), compression=by)
        assert np.isfinite(again).all(), by  # nothing of it stays
        if isinstance(by, Int8):
            assert np.isnan(first[:512]).all()  # two blocks, throughout
            assert np.allclose(first[512:], mesh.size, rtol=0.01)
        else:
            assert first[3] == np.inf, by
            assert np.isnan(first[300]), by
            assert np.isfinite(np.delete(first, [3, 300])).all(), by
    saturated = mesh.all_reduce(np.full(4, 1e6), compression=Cast("float16", error_feedback=False))
    assert saturated.tolist() == [65504.0] * 4  # the sum too


def test_inf_and_nan_arrive_and_do_not_stay() -> None:
    run_world(2, _not_finite, config=CONFIG, timeout=LIMIT)


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 3.4028235e38, -3.4028235e38])
def test_int8_of_extreme_blocks_is_finite(value: float) -> None:
    by, values = Int8(), np.full(300, value, np.float32)
    payload, out = np.zeros(by.nbytes(300), np.uint8), np.empty(300, np.float32)
    by.encode(values, payload, 0)
    by.decode(payload, out, 0)
    assert np.isfinite(out).all()
    assert np.abs(out - values).max() <= abs(value) / 100 + 1e-43


# ---------------------------------------------------------------------- each of them


@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=50))
def test_halves_are_rounded_to_nearest_even_by_whoever_does_it(values: list[float]) -> None:
    given_values = np.array(values, np.float32)
    for name, dtype in (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)):
        with np.errstate(all="ignore"):
            wanted = given_values.astype(dtype)
        for modules in ({}, {"torch": torch}):
            bits, back = np.empty(len(values), np.uint16), np.empty(len(values), np.float32)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("rankmesh.collectives.compression.halves.sys", type("sys", (), {"modules": modules}))
                narrow(given_values, name, bits)
                widen(bits, name, back)
            assert np.array_equal(bits.view(dtype).astype(float), wanted.astype(float), equal_nan=True)
            assert np.array_equal(back, wanted.astype(np.float32), equal_nan=True)


def test_top_k_keeps_the_largest() -> None:
    by, values = TopK(0.3), np.array([0.1, -5.0, 2.0, 0.0, 3.0, -0.2, 1.0, 1.0, 0.5, 0.1], np.float32)
    payload, out = np.zeros(by.nbytes(10), np.uint8), np.empty(10, np.float32)
    by.encode(values, payload, 0)
    by.decode(payload, out, 0)
    assert out.tolist() == [0, -5.0, 2.0, 0, 3.0, 0, 0, 0, 0, 0]


def test_random_k_draws_every_place_alike() -> None:
    by = RandomK(0.1, seed=5)
    drawn_often = np.zeros(100, int)
    for step in range(2000):
        places = by._places(100, step)
        assert len(set(places.tolist())) == 10
        drawn_often[places] += 1
    assert drawn_often.min() > 130  # 200 expected
    assert drawn_often.max() < 270
    assert by._places(100, 3).tolist() == by._places(100, 3).tolist()
    assert by._places(40, 7).tolist() == [3, 10, 22, 35]  # pinned: ranks of other versions draw the same


def test_random_k_without_feedback_is_right_on_average() -> None:
    by, values = RandomK(0.1, error_feedback=False), np.arange(50, dtype=np.float32)
    payload, out, total = np.zeros(by.nbytes(50), np.uint8), np.empty(50, np.float32), np.zeros(50)
    for step in range(5000):
        by.encode(values, payload, step)
        by.decode(payload, out, step)
        total += out
    assert np.allclose(total / 5000, values, rtol=0.2)


def test_payloads_are_small() -> None:
    million = 1 << 20
    assert Cast().nbytes(million) == 2 * million
    assert Int8().nbytes(million) == million + 4 * million // 256
    assert TopK(0.01).nbytes(million) == -(-8 * round(0.01 * million) // 8) * 8
    assert RandomK(0.01).nbytes(million) <= 4 * round(0.01 * million) + 7
    assert [by.nbytes(0) for by in all_kinds()] == [0] * len(all_kinds())


def test_a_name_has_a_memory_of_its_own() -> None:
    by = Int8()
    assert by.named("a") is by.named("a")
    assert by.named("a") is not by.named("b")
    by.named("a").memory(1, 3).of_values = np.ones(3, np.float32)
    with pytest.raises(UsageError, match="remembers what it left out of 3 numbers, and is given 4"):
        by.named("a").memory(1, 4)
    assert by.named("a").memory(2, 4).of_values is None
    by.reset()
    assert by.named("a").memory(1, 4).of_values is None
    copied = pickle.loads(pickle.dumps(by))
    assert repr(copied) == "<int8(block=256)>"
    assert repr(Cast(error_feedback=False)) == "<cast(dtype=bfloat16), no error feedback>"


# ---------------------------------------------------------------------- mistakes


def _different(mesh: Mesh, which: int) -> str:
    pairs: list[tuple[Compressor, Compressor]] = [
        (Int8(), Int8(block=128)),
        (TopK(0.5), RandomK(0.5)),
        (RandomK(0.5), RandomK(0.5, seed=1)),
        (RandomK(0.5), RandomK(0.5)),
    ]
    by = pairs[which][mesh.rank]
    if which == 3 and mesh.rank:
        by.memory(mesh._context.number, 10).steps = 4  # a rank that counts its calls differently
    with pytest.raises(DesyncError) as caught:
        mesh.all_reduce(np.ones(10), compression=by)
    return str(caught.value)


@pytest.mark.parametrize("which", range(4))
def test_ranks_that_compress_differently_are_no_match(which: int) -> None:
    texts = [("int8(block=256)", "int8(block=128)"), ("topk", "randomk"), ("seed=0", "seed=1"), ("call 0", "call 4")]
    for text in run_world(2, _different, args=(which,), config=CONFIG, timeout=LIMIT):
        assert all(part in text for part in texts[which]), text


def _refusals(mesh: Mesh) -> None:
    refused: dict[str, Any] = {
        "a sum and an avg, no max": lambda: mesh.all_reduce(np.ones(3), "max", compression=Int8()),
        "Arrays of int64 cannot be compressed": lambda: mesh.all_reduce(np.ones(3, int), compression=Int8()),
        "compression is a Compressor": lambda: mesh.all_reduce(np.ones(3), compression="fp16"),  # type: ignore[arg-type]
        "not by 'best'": lambda: mesh.all_reduce(np.ones(3), compression=Int8(), algorithm="best"),
        "no algorithm 'best'": lambda: mesh.all_reduce(np.ones(3), compression=TopK(0.1), algorithm="best"),
        "above 0 and up to 1": lambda: TopK(0.0),
        "cast to float16 or bfloat16, not to 'int8'": lambda: Cast("int8"),
        "at least one number": lambda: Int8(block=0),
    }
    for text, call in refused.items():
        with pytest.raises(UsageError, match=text):
            call()
    mesh.barrier()


def test_what_cannot_be_compressed_is_refused() -> None:
    run_world(2, _refusals, config=CONFIG, timeout=LIMIT)


class Broken(Whole):
    def encode(self, values: Array, payload: Array, seed: int) -> None:
        if seed:
            raise ZeroDivisionError("the user's")
        super().encode(values, payload, seed)


def _users_error(mesh: Mesh) -> bool:
    by = Broken()
    mesh.all_reduce(np.ones(3), compression=by)
    with pytest.raises(ZeroDivisionError, match="the user's"):
        mesh.all_reduce(np.ones(3), compression=by)
    mesh.barrier()
    return True


def test_what_a_users_compressor_raises_is_raised() -> None:
    assert all(run_world(2, _users_error, config=CONFIG, timeout=LIMIT))


def test_without_torch() -> None:
    program = """
import sys, numpy as np
from rankmesh.collectives.compression import Cast
from rankmesh.testing import run_world
for dtype in ("float16", "bfloat16"):
    print(run_world(3, lambda mesh: mesh.all_reduce(np.full(3, 1.5), compression=Cast(dtype)).tolist())[2])
assert "torch" not in sys.modules
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=scaled(30), check=True
    )
    assert ended.stdout == "[4.5, 4.5, 4.5]\n" * 2

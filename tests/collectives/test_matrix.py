"""Any sequence of collectives, drawn by hypothesis, against numpy: every algorithm × operation × dtype × root × place
of the result, waiting and not, in threads over inproc and in processes over tcp and shm. `make soak` draws many
more."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rankmesh import Config, Group, Mesh, Work
from rankmesh.collectives.choosing import ALGORITHMS
from rankmesh.collectives.reducing import OPERATIONS
from rankmesh.testing import run_world
from ranks import Ranks, Talk
from timing import scaled

pytestmark = pytest.mark.usefixtures("nursery")

CONFIG = Config(timeout=scaled(30))
LIMIT = scaled(50)
SIZES = [1, 2, 3, 4, 5, 7, 8, 16]
DTYPES = "int8 uint8 int16 uint32 int64 float16 float32 float64 complex64 complex128 bool".split()
#: Elements that travel by rendezvous and in several segments.
LARGE: Final = (70_000,)


def _operations(dtype: str) -> list[str]:
    """Those that arrays of this dtype have."""
    one = np.ones(1, dtype)
    found = []
    for name, ufunc in OPERATIONS.items():
        try:
            ufunc(one, one, out=one.copy())
        except TypeError:
            continue
        if name != "avg" or one.dtype.kind in "fc":
            found.append(name)
    return found


OPS = {dtype: _operations(dtype) for dtype in DTYPES}


class Drawn(NamedTuple):
    """A call; `root` and `algorithm` are reduced modulo what there is."""

    collective: str
    algorithm: int
    root: int
    shape: tuple[int, ...]
    dtype: str
    op: int
    #: The result goes into the input's memory where it can, otherwise into a given array; else where it goes of itself.
    in_place: bool
    async_op: bool


class Input:
    """What all ranks contribute to a call, and what numpy makes of it."""

    def __init__(self, drawn: Drawn, group: Group) -> None:
        self.drawn, self.group = drawn, group
        self.rank, self.size, self.root = group.rank, group.size, drawn.root % group.size
        found = [None, *ALGORITHMS[drawn.collective]]
        self.algorithm = found[drawn.algorithm % len(found)]
        self.op = OPS[drawn.dtype][drawn.op % len(OPS[drawn.dtype])]
        parted = drawn.collective in ("scatter", "reduce_scatter", "all_to_all")
        self.shape = (self.size, *drawn.shape) if parted else drawn.shape
        self.everyone = [self._of(rank) for rank in range(self.size)]
        self.mine = self.everyone[self.rank].copy()
        self.kept = self.mine.copy()

    def _of(self, rank: int) -> Any:
        """Small whole numbers, exact in every dtype and in any order; ones for products, with either sign."""
        numbers = (np.arange(int(np.prod(self.shape))) * 7 + rank * 3) % 5
        if self.op == "prod":
            numbers = 1 - 2 * (numbers % 2)
        return numbers.astype(self.drawn.dtype).reshape(self.shape)

    def reduced(self, count: int | None = None) -> Any:
        """Over the first `count` ranks."""
        ufunc, chosen = OPERATIONS[self.op], self.everyone[:count]
        total = reduce(lambda a, b: ufunc(a, b).astype(a.dtype), chosen)
        return (total / len(chosen)).astype(total.dtype) if self.op == "avg" else total

    def options(self) -> dict[str, Any]:
        return {"algorithm": self.algorithm, "async_op": self.drawn.async_op}

    def out(self, shape: tuple[int, ...]) -> Any:
        return np.empty(shape, self.drawn.dtype)


Made = tuple[Any, Any]


def _all_reduce(given: Input) -> Made:
    out = None if given.drawn.in_place else given.out(given.shape)
    return given.group.all_reduce(given.mine, given.op, out=out, **given.options()), given.reduced()


def _reduce(given: Input) -> Made:
    at_root = given.rank == given.root
    out = given.out(given.shape) if at_root and not given.drawn.in_place else None
    wanted = given.reduced() if at_root else None
    return given.group.reduce(given.mine, given.op, given.root, out=out, **given.options()), wanted


def _broadcast(given: Input) -> Made:
    return given.group.broadcast(given.mine, given.root, **given.options()), given.everyone[given.root]


def _all_gather(given: Input) -> Made:
    out, array = None, given.mine
    if given.drawn.in_place:
        out = given.out((given.size, *given.shape))
        out[given.rank] = array
        array = out[given.rank]
    return given.group.all_gather(array, out=out, **given.options()), np.array(given.everyone)


def _gather(given: Input) -> Made:
    at_root = given.rank == given.root
    out = given.out((given.size, *given.shape)) if at_root and given.drawn.in_place else None
    wanted = np.array(given.everyone) if at_root else None
    return given.group.gather(given.mine, given.root, out=out, **given.options()), wanted


def _scatter(given: Input) -> Made:
    at_root = given.rank == given.root
    out = None if at_root and given.drawn.in_place else given.out(given.drawn.shape)
    array = given.mine if at_root else None
    made = given.group.scatter(array, given.root, out=out, **given.options())
    return made, given.everyone[given.root][given.rank]


def _reduce_scatter(given: Input) -> Made:
    out = given.out(given.drawn.shape) if given.drawn.in_place else None
    return given.group.reduce_scatter(given.mine, given.op, out=out, **given.options()), given.reduced()[given.rank]


def _all_to_all(given: Input) -> Made:
    out = given.mine if given.drawn.in_place else None
    wanted = np.array([theirs[given.rank] for theirs in given.everyone])
    return given.group.all_to_all(given.mine, out=out, **given.options()), wanted


def _scan(given: Input) -> Made:
    op = "sum" if given.op == "avg" else given.op
    given.op = op
    out = None if given.drawn.in_place else given.out(given.shape)
    made = given.group.scan(given.mine, op, out=out, async_op=given.drawn.async_op)
    return made, given.reduced(given.rank + 1)


def _exscan(given: Input) -> Made:
    op = "sum" if given.op == "avg" else given.op
    given.op = op
    out = None if given.drawn.in_place else given.out(given.shape)
    made = given.group.exscan(given.mine, op, out=out, async_op=given.drawn.async_op)
    return made, given.reduced(given.rank) if given.rank else None


def _barrier(given: Input) -> Made:
    return given.group.barrier(async_op=given.drawn.async_op), None


CALLS: Final[dict[str, Callable[[Input], Made]]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "scan": _scan,
    "exscan": _exscan,
    "barrier": _barrier,
}
#: The others leave their input alone, whatever happens in between.
WRITES = {"broadcast"}


def perform(group: Group, calls: list[Drawn]) -> None:
    """Make all calls, then wait for those that are not done."""
    pending = []
    for drawn in calls:
        given = Input(drawn, group)
        made, wanted = CALLS[drawn.collective](given)
        pending.append((given, made, wanted))
    for given, made, wanted in pending:
        got = made.result() if isinstance(made, Work) else made
        about = (given.drawn, given.algorithm, given.op, got, wanted)
        assert (got is None) == (wanted is None), about
        if wanted is not None:
            assert got.dtype == wanted.dtype, about
            assert np.array_equal(got, wanted), about
        if given.drawn.collective not in WRITES and not given.drawn.in_place:
            assert np.array_equal(given.mine, given.kept), about
    group.barrier()  # nobody leaves before all have what they wait for


_SHAPES = st.one_of(st.lists(st.integers(0, 4), max_size=3).map(tuple), st.sampled_from([(1,), (300,), LARGE]))
#: Collectives with more algorithms are drawn more often.
_COLLECTIVES = st.sampled_from([name for name, found in ALGORITHMS.items() for _ in found])
_DRAWN = st.builds(
    Drawn,
    _COLLECTIVES,
    st.integers(0, 1000),
    st.integers(0, 15),
    _SHAPES,
    st.sampled_from(DTYPES),
    st.integers(0, 1000),
    st.booleans(),
    st.booleans(),
)
SEQUENCES = st.lists(_DRAWN, min_size=1, max_size=16)
#: How many sequences: of a normal run, and of a long one.
EXAMPLES = [6, pytest.param(150, marks=[pytest.mark.soak, pytest.mark.timeout(scaled(300))])]


def test_there_is_a_call_for_every_collective() -> None:
    assert CALLS.keys() == ALGORITHMS.keys()


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("size", SIZES)
def test_in_threads(size: int, examples: int) -> None:
    @settings(max_examples=examples if size < 16 else examples // 3)
    @given(SEQUENCES)
    def check(calls: list[Drawn]) -> None:
        run_world(size, perform, args=(calls,), config=CONFIG, timeout=LIMIT)

    check()


def _perform_as_told(mesh: Mesh, talk: Talk) -> None:
    while (calls := talk.recv()) is not None:
        perform(mesh, calls)
        talk.send("right")


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("shm", [True, False], ids=["shm", "tcp"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_in_processes(size: int, shm: bool, examples: int) -> None:
    """All sequences in one world: where one fails, the ranks are out of step, and the next cannot be told from it."""
    with Ranks(size, _perform_as_told, CONFIG.override(shm=shm)) as ranks:

        @settings(max_examples=3 * examples, phases=[Phase.generate])
        @given(SEQUENCES)
        def check(calls: list[Drawn]) -> None:
            for rank in range(size):
                ranks.say(rank, calls)
            assert ranks.hear_all() == ["right"] * size

        check()
        for rank in range(size):
            ranks.say(rank)

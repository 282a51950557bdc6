"""Any sequence of collectives, drawn by hypothesis, against numpy: every algorithm × operation or function × dtype ×
root × place of the result, in equal and uneven parts, of one array and of lists, waiting and not, in threads over
inproc and in processes over tcp and shm. `make soak` draws many more."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, Final, NamedTuple

import ml_dtypes
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
DTYPES.append(np.dtype(ml_dtypes.bfloat16).name)
#: Elements that travel by rendezvous and in several segments.
LARGE: Final = (70_000,)


#: What forms that are not in ALGORITHMS choose among.
ALGORITHM_OF: Final = {
    "all_gather_v": "all_gather",
    "gather_v": "gather",
    "scatter_v": "scatter",
    "reduce_scatter_v": "reduce_scatter",
    "all_to_all_v": "all_to_all",
    "all_reduce list": "all_reduce",
    "broadcast list": "broadcast",
}
#: Of a rank, in uneven parts.
MOST_ROWS: Final = 5000


def _operations(dtype: str) -> list[str]:
    """Those that arrays of this dtype have."""
    one = np.ones(1, dtype)
    found = []
    for name, ufunc in OPERATIONS.items():
        try:
            ufunc(one, one, out=one.copy())
        except TypeError:
            continue
        if name != "avg" or one.dtype.kind in "fcV":
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
    #: The operation is passed as a function.
    function: bool


class Input:
    """What all ranks contribute to a call, and what numpy makes of it."""

    def __init__(self, drawn: Drawn, group: Group) -> None:
        self.drawn, self.group = drawn, group
        self.rank, self.size, self.root = group.rank, group.size, drawn.root % group.size
        found = [None, *ALGORITHMS[ALGORITHM_OF.get(drawn.collective, drawn.collective)]]
        if drawn.collective == "all_to_all_v":
            found.remove("bruck")
        self.algorithm = found[drawn.algorithm % len(found)]
        self.name = OPS[drawn.dtype][drawn.op % len(OPS[drawn.dtype])]
        if drawn.collective in ("scan", "exscan") and self.name == "avg":
            self.name = "sum"
        self.op: Any = OPERATIONS[self.name] if drawn.function and self.name != "avg" else self.name
        base = min(drawn.shape[0] if drawn.shape else 2, MOST_ROWS)
        #: Rows by rank, of uneven parts; some have none.
        self.counts = [base * (1 + rank) // 2 % (base + 1) for rank in range(self.size)]
        self.everyone = [self._of(rank) for rank in range(self.size)]
        self.mine = self.everyone[self.rank].copy()
        self.shape = self.mine.shape
        self.kept = self.mine.copy()

    def sent(self, rank: int) -> list[int]:
        """Rows for each rank in all_to_all_v."""
        return [self.counts[(rank + 2 * to) % self.size] for to in range(self.size)]

    def _shape_of(self, rank: int) -> tuple[int, ...]:
        collective, shape = self.drawn.collective, self.drawn.shape
        if collective in ("scatter", "reduce_scatter", "all_to_all"):
            return (self.size, *shape)
        rows = {
            "all_gather_v": self.counts[rank],
            "gather_v": self.counts[rank],
            "scatter_v": sum(self.counts),
            "reduce_scatter_v": sum(self.counts),
            "all_to_all_v": sum(self.sent(rank)),
        }
        return (rows[collective], *shape[1:]) if collective in rows else shape

    def _of(self, rank: int) -> Any:
        """Small whole numbers, exact in every dtype and in any order; ones for products, with either sign."""
        shape = self._shape_of(rank)
        numbers = (np.arange(int(np.prod(shape))) * 7 + rank * 3) % 5
        if self.name == "prod":
            numbers = 1 - 2 * (numbers % 2)
        return numbers.astype(self.drawn.dtype).reshape(shape)

    def part(self, array: Any, rank: int) -> Any:
        """A rank's rows."""
        first = sum(self.counts[:rank])
        return array[first : first + self.counts[rank]]

    def reduced(self, count: int | None = None) -> Any:
        """Over the first `count` ranks."""
        ufunc, chosen = OPERATIONS[self.name], self.everyone[:count]
        total = reduce(lambda a, b: ufunc(a, b).astype(a.dtype), chosen)
        return (total / len(chosen)).astype(total.dtype) if self.name == "avg" else total

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
    out = None if given.drawn.in_place else given.out(given.shape)
    made = given.group.scan(given.mine, given.op, out=out, **given.options())
    return made, given.reduced(given.rank + 1)


def _exscan(given: Input) -> Made:
    out = None if given.drawn.in_place else given.out(given.shape)
    made = given.group.exscan(given.mine, given.op, out=out, **given.options())
    return made, given.reduced(given.rank) if given.rank else None


def _barrier(given: Input) -> Made:
    return given.group.barrier(async_op=given.drawn.async_op), None


def _all_gather_v(given: Input) -> Made:
    counts = given.counts if given.drawn.async_op or given.drawn.in_place else None
    return given.group.all_gather_v(given.mine, counts, **given.options()), np.concatenate(given.everyone)


def _gather_v(given: Input) -> Made:
    counts = given.counts if given.drawn.async_op or given.drawn.in_place else None
    wanted = np.concatenate(given.everyone) if given.rank == given.root else None
    return given.group.gather_v(given.mine, counts, given.root, **given.options()), wanted


def _scatter_v(given: Input) -> Made:
    at_root, wanted = given.rank == given.root, given.part(given.everyone[given.root], given.rank)
    out = None if at_root and given.drawn.in_place else given.out(wanted.shape)
    array = given.mine if at_root else None
    return given.group.scatter_v(array, given.counts, given.root, out=out, **given.options()), wanted


def _reduce_scatter_v(given: Input) -> Made:
    made = given.group.reduce_scatter_v(given.mine, given.counts, given.op, **given.options())
    return made, given.part(given.reduced(), given.rank)


def _all_to_all_v(given: Input) -> Made:
    coming = [given.sent(rank)[given.rank] for rank in range(given.size)]
    ends = [np.cumsum(given.sent(rank))[given.rank] for rank in range(given.size)]
    wanted = [given.everyone[rank][ends[rank] - coming[rank] : ends[rank]] for rank in range(given.size)]
    told = coming if given.drawn.async_op or given.drawn.in_place else None
    made = given.group.all_to_all_v(given.mine, given.sent(given.rank), told, **given.options())
    return made, np.concatenate(wanted)


def _list(array: Any) -> list[Any]:
    """Its elements in three arrays."""
    return np.array_split(array.reshape(-1), 3)


def _all_reduce_list(given: Input) -> Made:
    out = None if given.drawn.in_place else _list(given.out(given.shape))
    made = given.group.all_reduce(_list(given.mine), given.op, out=out, **given.options())
    return made, given.reduced().reshape(-1)


def _broadcast_list(given: Input) -> Made:
    made = given.group.broadcast(_list(given.mine), given.root, **given.options())
    return made, given.everyone[given.root].reshape(-1)


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
    "all_gather_v": _all_gather_v,
    "gather_v": _gather_v,
    "scatter_v": _scatter_v,
    "reduce_scatter_v": _reduce_scatter_v,
    "all_to_all_v": _all_to_all_v,
    "all_reduce list": _all_reduce_list,
    "broadcast list": _broadcast_list,
}
#: The others leave their input alone, whatever happens in between.
WRITES = {"broadcast", "broadcast list"}


def perform(group: Group, calls: list[Drawn]) -> None:
    """Make all calls, then wait for those that are not done."""
    pending = []
    for drawn in calls:
        given = Input(drawn, group)
        made, wanted = CALLS[drawn.collective](given)
        pending.append((given, made, wanted))
    for given, made, wanted in pending:
        got = made.result() if isinstance(made, Work) else made
        got = np.concatenate(got) if isinstance(got, list) else got
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
_COLLECTIVES = st.sampled_from([name for name in CALLS for _ in ALGORITHMS[ALGORITHM_OF.get(name, name)]])
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
    st.booleans(),
)
SEQUENCES = st.lists(_DRAWN, min_size=1, max_size=16)
#: How many sequences: of a normal run, and of a long one.
EXAMPLES = [6, pytest.param(150, marks=[pytest.mark.soak, pytest.mark.timeout(scaled(300))])]


def test_there_is_a_call_for_every_collective() -> None:
    assert CALLS.keys() == ALGORITHMS.keys() | ALGORITHM_OF.keys()
    assert ALGORITHMS.keys() >= {*ALGORITHM_OF.values()}


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

"""What reduces: operations that a dtype does not have, and what a user's function may return."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from rankmesh import Config, Mesh, TransferAborted, UsageError
from rankmesh.collectives.choosing import ALGORITHMS
from rankmesh.collectives.kinds import OPERATIONS
from rankmesh.testing import run_world
from ranks import Outcome, attempt, run_ranks
from timing import scaled

pytestmark = pytest.mark.usefixtures("nursery")

CONFIG = Config(timeout=scaled(30))
LIMIT = scaled(50)
Function = Callable[[Any, Any], Any]


def _no_operation(mesh: Mesh) -> None:
    calls: list[Function] = [
        mesh.all_reduce,
        mesh.reduce,
        mesh.scan,
        lambda array, op: mesh.reduce_scatter(np.stack([array] * 2), op),
        lambda array, op: mesh.all_reduce([array], op),
    ]
    for call in calls:
        for none in (None, 3, ["sum"]):
            with pytest.raises(UsageError, match=r"There is no operation .*\. Use one of sum, prod, .*, or a function"):
                call(np.ones(3), none)
        for text in (np.array(["ab", "c"]), np.array([b"ab"]), np.zeros(2, "V3"), np.zeros(2, "i4,f4")):
            for op in OPERATIONS:
                with pytest.raises(UsageError, match=f"Arrays of .* have no {op}: |has no average"):
                    call(text, op)
    assert mesh.sequence == 0, "nothing was begun"
    first = mesh.all_reduce(np.array(["ab", "cd"][mesh.rank]), lambda a, b: np.where(a < b, a, b))
    assert first == "ab", "a function can do what it likes"


def test_an_operation_that_there_is_not_ended_in_the_middle_or_cut_texts() -> None:
    run_world(2, _no_operation, config=CONFIG, timeout=LIMIT)


def _halves(left: Any, right: Any) -> Any:
    return (left + right) / 2


def _of_another_kind(mesh: Mesh, collective: str) -> list[Outcome]:
    ended = []
    for algorithm in ALGORITHMS[collective]:
        with mesh.dup() as group:
            call = getattr(group, collective)
            ended.append(attempt(partial(call, np.array([1, 2, 4]), _halves, algorithm=algorithm)))
            mesh.barrier()
    return ended


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce"])
def test_fractions_were_cut_to_whole_numbers(size: int, collective: str) -> None:
    """Whoever reduces refuses them, with every algorithm, and nobody waits for its deadline. Who has done its part of
    a reduce may have ended."""
    everyone = run_ranks(size, _of_another_kind, CONFIG, args=(collective,))
    for outcomes in zip(*everyone, strict=True):
        assert any(isinstance(outcome.error, UsageError) for outcome in outcomes)
        for rank, outcome in enumerate(outcomes):
            assert isinstance(outcome.error, UsageError | TransferAborted) or (collective == "reduce" and rank)
            assert outcome.error is None or "int64 cannot hold float64" in str(outcome.error)


HELD: list[tuple[Any, Function, Any]] = [
    (np.array([1.5, 2], np.float32), lambda a, b: a.astype(np.float64) + b, [3, 4]),
    (np.array([3, 4]), lambda a, b: (a + b).astype(np.int16), [6, 8]),
    (np.array([3, 4], np.float32), lambda a, b: a.astype(int) + b.astype(int), [6, 8]),
    (np.ones(2, ml_dtypes.bfloat16), lambda a, b: a.astype(np.float32) + b, [2, 2]),
    (np.array([True]), lambda a, b: a & b, [True]),
    (torch.ones(2, dtype=torch.bfloat16), lambda a, b: a.float() + b.float(), [2, 2]),
    (torch.ones(2, dtype=torch.bfloat16), lambda a, b: a.half() + b.half(), [2, 2]),
    (torch.ones(2), lambda a, b: (a + b).bfloat16(), [2, 2]),
    (torch.ones(2, dtype=torch.float64), lambda a, b: [0.1, 0.2], [0.1, 0.2]),
    (torch.ones(2, dtype=torch.int32), lambda a, b: (a + b).numpy(), [2, 2]),
]
REFUSED: list[tuple[Any, Function, str]] = [
    (np.array([1, 2]), lambda a, b: a + b * 0.5, "int64 cannot hold float64"),
    (np.array([1.0]), lambda a, b: a + 1j, "float64 cannot hold complex128"),
    (np.array([1], np.uint8), lambda a, b: a.astype(int) + b, "uint8 cannot hold int64"),
    (np.array(["ab"]), np.char.add, "str64 cannot hold str128"),
    (torch.ones(2, dtype=torch.int64), lambda a, b: a / b, "int64 cannot hold float32"),
    (torch.ones(2), lambda a, b: np.array([1j, 2j]), "float32 cannot hold complex128"),
]


def _functions(mesh: Mesh) -> None:
    for given, function, wanted in HELD:
        for collective in (mesh.all_reduce, mesh.scan):
            array = given.clone() if isinstance(given, torch.Tensor) else given.copy()
            got: Any = collective(array, function)
            assert got is array
            if mesh.rank or collective == mesh.all_reduce:
                assert got.tolist() == wanted
    for given, function, text in REFUSED:
        with mesh.dup() as group:
            with pytest.raises(UsageError, match=text):
                group.all_reduce(given, function, algorithm="recursive_doubling")
            mesh.barrier()


def test_what_a_function_returns_is_held_or_refused() -> None:
    run_world(2, _functions, config=CONFIG, timeout=LIMIT)

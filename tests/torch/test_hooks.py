"""Compressed gradients in DistributedDataParallel: they converge, and what is left out is never lost, only late."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import pytest

# ruff: noqa: E402  # torch is imported only where it is found to be there
torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'rankmesh[torch]'")

import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel

from rankmesh import Mesh, PeerLost, RankmeshError, UsageError
from rankmesh.collectives.compression import TopK
from rankmesh.membership.ports import free_port
from rankmesh.testing import run_world
from rankmesh.torch.hooks import KINDS, Compression, compress, compressed
from timing import scaled

RANKS = 2
STEPS = 60
#: Sparse compressors learn little in a few steps if they send 1 % of a small model.
SETTINGS: dict[str, dict[str, Any]] = {"topk": {"ratio": 0.05}, "randomk": {"ratio": 0.2}}
NONE = "none"
OVER_GLOO = "topk over gloo"


# ---------------------------------------------------------------------- in DDP, over processes


class Counting(Compression):
    """Counts how often buckets were cut anew."""

    cuts = 0

    def _take_apart(self, first: int) -> None:
        self.cuts += 1
        super()._take_apart(first)


class Trained(NamedTuple):
    """What one rank saw of a training."""

    losses: list[float]
    weights: bytes
    #: How many times buckets were found to be cut anew.
    cuts: int


def model() -> nn.Module:
    torch.manual_seed(7)
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(32, 1))


def train(kind: str, mesh: Mesh | None = None) -> Trained:
    """`mesh`: on a process group of gloo, with gradients over this."""
    group = None if mesh is None else dist.new_group(backend="gloo")
    parallel = DistributedDataParallel(model(), bucket_cap_mb=0.008, process_group=group)  # buckets of 8 KiB
    state = None
    if mesh is not None:
        compress(parallel, kind, mesh, **SETTINGS.get(kind, {}))
    elif kind != NONE:
        state = Counting(kind, **SETTINGS.get(kind, {}))
        parallel.register_comm_hook(state, compressed)
    optimiser = torch.optim.SGD(parallel.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(11 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        inputs = torch.randn(64, 32, generator=generator)
        loss: Any = nn.functional.mse_loss(parallel(inputs), inputs[:, :4].sum(1, keepdim=True))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in parallel.parameters())
    return Trained(losses, weights, state.cuts if state else 0)


class Uneven(nn.Module):
    """One weight has large gradients of alternating sign; those of the others are smaller than an eighth of a step of
    int8's beside them, and always lead the same way, to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(256))

    def forward(self, sign: float) -> Any:
        return 100.0 * sign * self.weights[0] + 0.05 * (self.weights[1:] - 1).square().sum()


def learn_small(error_feedback: bool) -> float:
    """How far the others have come, on average."""
    parallel = DistributedDataParallel(Uneven())
    compress(parallel, "int8", error_feedback=error_feedback)
    optimiser = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(STEPS):
        optimiser.zero_grad()
        parallel((-1.0) ** step).backward()
        optimiser.step()
    return float(parallel.module.weights.detach()[1:].mean())


class Seen(NamedTuple):
    """By a rank."""

    trained: dict[str, Trained]
    #: With error feedback, and without.
    small: dict[bool, float]
    #: What a backward pass raised when rank 1 had left; of rank 0.
    lost: RankmeshError | None


def train_each(mesh: Mesh, port: int) -> Seen:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, mesh.size, mesh.rank == 0, timedelta(seconds=scaled(30)))
    dist.init_process_group("rankmesh", store=store, rank=mesh.rank, world_size=mesh.size)
    try:
        small = {feedback: learn_small(feedback) for feedback in (True, False)}
        trained = {kind: train(kind) for kind in (NONE, *KINDS)}
        trained[OVER_GLOO] = train("topk", mesh)
        return Seen(trained, small, lose_a_rank())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def lose_a_rank() -> RankmeshError | None:
    parallel = DistributedDataParallel(model())
    compress(parallel, "bf16")
    loss: Any = parallel(torch.ones(1, 32)).sum()
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return None
    try:
        loss.backward()
    except RankmeshError as error:
        return error
    return None


@pytest.fixture(scope="module")
def seen() -> list[Seen]:
    """By rank: all in one world, since it takes longer to import torch than to train."""
    return run_world(RANKS, train_each, processes=True, args=(free_port(),), timeout=scaled(60))


@pytest.fixture
def trained(seen: list[Seen]) -> list[dict[str, Trained]]:
    return [rank.trained for rank in seen]


def end(trained: list[dict[str, Trained]], kind: str) -> float:
    """The loss, over all ranks and the last quarter of the steps."""
    return float(np.mean([rank[kind].losses[-STEPS // 4 :] for rank in trained]))


@pytest.mark.parametrize("kind", KINDS)
def test_training_converges(trained: list[dict[str, Trained]], kind: str) -> None:
    began = float(np.mean([rank[kind].losses[0] for rank in trained]))
    uncompressed = end(trained, NONE)
    assert uncompressed < began / 2, "this training shows nothing"
    sparse = kind in SETTINGS
    assert end(trained, kind) < uncompressed * (1.6 if sparse else 1.05)


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_have_the_same_weights(trained: list[dict[str, Trained]], kind: str) -> None:
    assert len({rank[kind].weights for rank in trained}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_ddp_cut_its_buckets_anew(trained: list[dict[str, Trained]], kind: str) -> None:
    assert [rank[kind].cuts for rank in trained] == [1] * RANKS


def test_error_feedback_matters(seen: list[Seen]) -> None:
    wanted = 1 - 0.99**STEPS
    for rank in seen:
        assert abs(rank.small[True] - wanted) < 0.1
        assert rank.small[False] == 0.0


def test_with_gloo_gradients_go_over_a_mesh(trained: list[dict[str, Trained]]) -> None:
    assert [rank[OVER_GLOO].losses for rank in trained] == [rank["topk"].losses for rank in trained]


def test_the_loss_of_a_rank_comes_out_of_backward(seen: list[Seen]) -> None:
    error = seen[0].lost
    assert isinstance(error, PeerLost)
    assert error.rank == 1


# ---------------------------------------------------------------------- buckets that are cut anew


class Bucket:
    """As DDP hands it to a hook."""

    def __init__(self, index: int, parameters: list[Any]) -> None:
        self._index = index
        self._parameters = parameters
        self._buffer = torch.empty(sum(one.numel() for one in parameters))

    def index(self) -> int:
        return self._index

    def parameters(self) -> list[Any]:
        return self._parameters

    def buffer(self) -> Any:
        return self._buffer


def averaged(state: Compression, layout: list[list[Any]], step: int, rank: int) -> dict[Any, tuple[Any, Any]]:
    """One backward pass over buckets: by parameter, its gradient on this rank, and what the hook made of it."""
    seen = {}
    for index, parameters in enumerate(layout):
        bucket: Any = Bucket(index, parameters)
        given = torch.randn(
            bucket.buffer().shape, generator=torch.Generator().manual_seed(100 * step + 10 * index + rank)
        )
        bucket.buffer().copy_(given)
        result = compressed(state, bucket).wait()
        at = 0
        for parameter in parameters:
            part = slice(at, at + parameter.numel())
            seen[parameter] = given[part].double(), result[part].double()
            at = part.stop
    return seen


def cut_anew(mesh: Mesh, kind: str) -> dict[int, Any]:
    """For each parameter: what this rank gave, what came of it on all ranks, and what is still owed."""
    one, two, three, four = parameters = [torch.zeros(size) for size in (700, 30, 260, 513)]
    first = [[one, two], [three, four]]
    layouts = [first, first, [[four, two], [one], [three]], [[four, two], [three], [one]], [[four], [two, three, one]]]
    state = Compression(kind, mesh, **({"ratio": 0.1} if kind in SETTINGS else {}))
    given = {parameter: torch.zeros(parameter.numel(), dtype=torch.float64) for parameter in parameters}
    came = {parameter: torch.zeros(parameter.numel(), dtype=torch.float64) for parameter in parameters}
    for step, layout in enumerate(layouts):
        for parameter, (gave, got) in averaged(state, layout, step, mesh.rank).items():
            given[parameter] += gave
            came[parameter] += got * mesh.size
    state._take_apart(0)
    owed = {parameter: torch.from_numpy(left.astype(np.float64)) for parameter, left in state._owed.items()}
    return {at: (given[one], came[one], owed[one]) for at, one in enumerate(parameters)}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_when_buckets_are_cut_anew(kind: str) -> None:
    by_rank = run_world(3, cut_anew, args=(kind,), timeout=scaled(30))
    for parameter in range(4):
        given = sum(rank[parameter][0] for rank in by_rank)
        owed = sum(rank[parameter][2] for rank in by_rank)
        assert owed.abs().max() > 1e-4, "nothing was left out: this shows nothing"
        for rank in by_rank:
            torch.testing.assert_close(rank[parameter][1] + owed, given, rtol=0, atol=2e-4)


# ---------------------------------------------------------------------- mistakes


def test_unknown_compressor() -> None:
    with pytest.raises(UsageError, match="fp16, bf16, int8, topk, randomk"):
        Compression("int4")


def test_settings_of_a_compressor_that_has_them() -> None:
    with pytest.raises(UsageError, match="ratio"):
        Compression(TopK(0.1), ratio=0.2)


def test_without_a_group_of_rankmesh() -> None:
    with pytest.raises(UsageError, match='init_process_group\\("rankmesh"\\)'):
        _ = Compression("int8").group

"""What to start: each rank's command and environment. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from rankmesh.errors import ConfigError
from rankmesh.transport.address import Address


@dataclass(frozen=True, slots=True)
class Program:
    """A script, or a module with `module=True`, and its arguments, which are passed on unchanged."""

    target: str
    args: tuple[str, ...] = ()
    module: bool = False

    def argv(self) -> list[str]:
        return [sys.executable, *(["-m"] if self.module else []), self.target, *self.args]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """How many ranks there are, and which of them are ours. Ranks are numbered node by node."""

    nproc: int
    nnodes: int = 1
    node_rank: int = 0
    #: Where the nodes meet, an address of node 0. None on one node.
    rendezvous: Address | None = None

    def __post_init__(self) -> None:
        if self.nproc < 1:
            raise ConfigError(f"There must be at least one rank, not {self.nproc}. Pass -n 1 or more.")
        if self.nnodes < 1:
            raise ConfigError(f"There must be at least one node, not {self.nnodes}. Pass --nnodes 1 or more.")
        if not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(
                f"--node-rank {self.node_rank} must be between 0 and {self.nnodes - 1} with --nnodes {self.nnodes}. "
                "Count nodes from 0."
            )
        if self.nnodes > 1 and self.rendezvous is None:
            raise ConfigError(
                f"{self.nnodes} nodes need a place to meet. Pass --rendezvous host:port on all of them, "
                "with an address of node 0 that the others can reach."
            )

    @property
    def size(self) -> int:
        return self.nproc * self.nnodes

    @property
    def ranks(self) -> range:
        return range(self.node_rank * self.nproc, (self.node_rank + 1) * self.nproc)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What all ranks must know to find each other."""

    #: The embedded store: tcp://host:port.
    store: str
    token: str
    run_id: str
    #: MASTER_ADDR and MASTER_PORT for programs that use torch.distributed: a place of its own, next to ours.
    torch_master: tuple[str, int]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One process to start."""

    rank: int
    argv: list[str]
    env: dict[str, str]


def plan_ranks(
    world: World, program: Program, meeting: Meeting, environ: Mapping[str, str], *, cores: int
) -> list[RankPlan]:
    """The processes to start on this node; `environ` is the launcher's own environment, which they inherit."""
    return [
        RankPlan(rank, program.argv(), _environment(world, local, rank, meeting, environ, cores))
        for local, rank in enumerate(world.ranks)
    ]


def _environment(
    world: World, local: int, rank: int, meeting: Meeting, environ: Mapping[str, str], cores: int
) -> dict[str, str]:
    # As torchrun does, but by the cores there are: n ranks with a thread pool for all cores each are slower than one.
    defaults = {"OMP_NUM_THREADS": str(max(1, cores // world.nproc))}
    inherited = {name: value for name, value in environ.items() if not name.startswith("TORCHELASTIC_")}
    ours = {
        "RANKMESH_RANK": rank,
        "RANKMESH_SIZE": world.size,
        "RANKMESH_LOCAL_RANK": local,
        "RANKMESH_LOCAL_SIZE": world.nproc,
        "RANKMESH_NODE_RANK": world.node_rank,
        "RANKMESH_STORE": meeting.store,
        "RANKMESH_RUN_ID": meeting.run_id,
        "RANKMESH_TOKEN": meeting.token,
        "RANK": rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": world.nproc,
        "GROUP_RANK": world.node_rank,
        "MASTER_ADDR": meeting.torch_master[0],
        "MASTER_PORT": meeting.torch_master[1],
        "PYTHONUNBUFFERED": 1,  # or a rank's output would appear late, and be lost if it is killed
    }
    return {**defaults, **inherited, **{name: str(value) for name, value in ours.items()}}

"""What to start: commands and environments."""

from __future__ import annotations

import sys

import pytest

from rankmesh.errors import ConfigError
from rankmesh.launch.plan import Meeting, Program, World, plan_ranks
from rankmesh.membership.environment import detect
from rankmesh.transport.address import Address

MEETING = Meeting(store="tcp://10.0.0.1:7000", token="secret", run_id="r1", torch_master=("10.0.0.1", 7001))
RENDEZVOUS = Address.parse("tcp://10.0.0.1:7000")


def test_ranks_are_numbered_node_by_node_and_find_themselves_by_detect() -> None:
    world = World(nproc=3, nnodes=2, node_rank=1, rendezvous=RENDEZVOUS)
    plans = plan_ranks(world, Program("x.py"), MEETING, {}, cores=8)
    assert [plan.rank for plan in plans] == [3, 4, 5]
    for local, plan in enumerate(plans):
        placement = detect(plan.env, parent_pid=1)
        assert placement is not None
        assert placement.source == "rankmesh run"
        assert (placement.rank, placement.size) == (3 + local, 6)
        assert (placement.local_rank, placement.local_size, placement.node_rank) == (local, 3, 1)
        assert placement.master == ("10.0.0.1", 7000)
        assert placement.run_id == "r1"


def test_a_torch_program_finds_its_variables_too() -> None:
    world = World(nproc=3, nnodes=2, node_rank=1, rendezvous=RENDEZVOUS)
    env = plan_ranks(world, Program("x.py"), MEETING, {}, cores=8)[2].env
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert [env[name] for name in names] == ["5", "6", "2", "3", "1", "10.0.0.1", "7001"]
    assert env["PYTHONUNBUFFERED"] == "1"
    assert env["RANKMESH_TOKEN"] == "secret"


def test_the_launchers_environment_is_inherited_but_not_an_outer_worlds() -> None:
    outer = {"PATH": "/bin", "RANK": "7", "WORLD_SIZE": "9", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    (plan,) = plan_ranks(World(nproc=1), Program("x.py"), MEETING, outer, cores=2)
    assert plan.env["PATH"] == "/bin"
    assert (plan.env["RANK"], plan.env["WORLD_SIZE"]) == ("0", "1")
    assert "TORCHELASTIC_USE_AGENT_STORE" not in plan.env


@pytest.mark.parametrize("cores, nproc, threads", [(8, 2, "4"), (8, 3, "2"), (2, 4, "1")])
def test_cores_are_shared_out_to_thread_pools(cores: int, nproc: int, threads: str) -> None:
    plans = plan_ranks(World(nproc=nproc), Program("x.py"), MEETING, {}, cores=cores)
    assert {plan.env["OMP_NUM_THREADS"] for plan in plans} == {threads}


def test_a_thread_count_set_by_the_user_stays() -> None:
    (plan,) = plan_ranks(World(nproc=1), Program("x.py"), MEETING, {"OMP_NUM_THREADS": "3"}, cores=8)
    assert plan.env["OMP_NUM_THREADS"] == "3"


def test_commands() -> None:
    assert Program("x.py", ("-m", "")).argv() == [sys.executable, "x.py", "-m", ""]
    assert Program("a.b", ("1",), module=True).argv() == [sys.executable, "-m", "a.b", "1"]


@pytest.mark.parametrize(
    "world, named",
    [
        ({"nproc": 0}, "-n 1"),
        ({"nproc": 1, "nnodes": 0}, "--nnodes"),
        ({"nproc": 1, "nnodes": 2, "node_rank": 2, "rendezvous": RENDEZVOUS}, "--node-rank 2"),
        ({"nproc": 1, "nnodes": 2, "node_rank": -1, "rendezvous": RENDEZVOUS}, "--node-rank -1"),
        ({"nproc": 1, "nnodes": 2}, "--rendezvous"),
    ],
)
def test_worlds_that_cannot_be(world: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        World(**world)  # type: ignore[arg-type]  # the table mixes types

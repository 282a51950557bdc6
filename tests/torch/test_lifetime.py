"""How process groups come to be, and end: init methods, stores, launchers; destroy, abort, fork, the interpreter's
end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rankmesh.errors import ClosedError, JoinError, PeerLost
from rankmesh.membership.ports import free_port
from timing import scaled
from torch_world import Nursery, Ranks, attempt, init, nursery

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'rankmesh[torch]'")
dist = torch.distributed

__all__ = ["nursery"]

SIZE = 3
SECONDS = timedelta(seconds=scaled(30))


def _sum() -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    found: float = tensor.item()
    return found


# ---------------------------------------------------------------------- the beginning


def _by_method(rank: int, talk: Any, method: str, environment: dict[str, str]) -> float:
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(SIZE))
    explicit = {} if method == "env://" else {"rank": rank, "world_size": SIZE}
    dist.init_process_group("rankmesh", init_method=method, timeout=SECONDS, **explicit)
    found = _sum()
    dist.destroy_process_group()
    return found


def _methods() -> None:
    with tempfile.TemporaryDirectory() as folder:
        master = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        for method in ("env://", f"tcp://127.0.0.1:{free_port()}", f"file://{folder}/meeting"):
            with Ranks(SIZE, _by_method, method, master) as ranks:
                assert [ranks.outcome(rank) for rank in range(SIZE)] == [3.0] * SIZE


def test_init_methods(nursery: Nursery) -> None:
    nursery.call(_methods)


#: To a process's end: a group of gloo that is freed while its thread frees the last work waits for it for ever.
_kept: list[Any] = []


def _again(rank: int, talk: Any, port: int) -> list[float]:
    """One store for several process groups, one after the other, as torchrun's agent keeps one."""
    store = dist.TCPStore("127.0.0.1", port, SIZE, rank == 0, timeout=SECONDS)
    found = []
    for _ in range(3):
        dist.init_process_group("rankmesh", store=store, rank=rank, world_size=SIZE, timeout=SECONDS)
        found.append(_sum())
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=SIZE, timeout=SECONDS)
    ours = dist.new_group([0, 2], backend="rankmesh")  # its own mesh, beside gloo's default group
    if rank != 1:
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=ours)
        found.append(tensor.item())
    _kept.append(dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()
    return found


def _one_store() -> list[Any]:
    with Ranks(SIZE, _again, free_port()) as ranks:
        return [ranks.outcome(rank) for rank in range(SIZE)]


def test_one_store_for_many_process_groups_and_beside_gloo(nursery: Nursery) -> None:
    assert nursery.call(_one_store) == [[3.0, 3.0, 3.0, 2.0], [3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 2.0]]


def _late(rank: int, talk: Any, port: int) -> Any:
    """Rank 1 comes too late for the first attempt, and all meet in the next. (By `init_process_group` they would not:
    it gives the second attempt another name.)"""
    from rankmesh.torch.meeting import meet_at

    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=SECONDS, wait_for_workers=False)
    first = attempt(meet_at, store, rank, 2, scaled(0.5)) if rank == 0 else None
    talk.send("tried")
    talk.recv()
    with meet_at(store, rank, 2, scaled(30)) as mesh:
        mesh.barrier()
    return first


def _lateness() -> Any:
    with Ranks(2, _late, free_port()) as ranks:
        for rank in (0, 1):
            assert ranks.hear(rank) == "tried"
        for rank in (0, 1):
            ranks.say(rank)
        return [ranks.outcome(rank) for rank in (0, 1)]


def test_who_does_not_come_is_named_and_may_come_later(nursery: Nursery) -> None:
    first, _ = nursery.call(_lateness)
    assert isinstance(first.error, JoinError)
    assert first.error.missing == (1,)
    assert "missing: rank 1" in str(first.error)


PROGRAM = """
import torch, torch.distributed as dist
import rankmesh.torch
dist.init_process_group("rankmesh")
tensor = torch.ones(1)
dist.all_reduce(tensor)
dist.new_group([0])
import os
os.write(1, b"sum %.1f\\n" % tensor.item())  # in one piece: two processes write to one file
{end}
"""


def launch(tmp_path: Path, end: str, *command: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(end=end))
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, *command, str(script)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=scaled(50),
        check=False,
    )


def test_torchrun_and_an_end_without_destroy(tmp_path: Path) -> None:
    """Nothing is destroyed, and a Work is under way: the interpreters end all the same, none by a signal."""
    end = "left = dist.irecv(torch.empty(1), 1 - dist.get_rank(), tag=9); future = left.get_future()"
    ended = launch(tmp_path, end, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("sum 2.0") == 2


def test_rankmesh_run_and_a_program_that_fails(tmp_path: Path) -> None:
    """The other rank learns why. It has written before: a launcher ends it when this one fails."""
    end = "dist.barrier()\nif dist.get_rank() == 1: raise KeyError('of mine')\ndist.barrier()"
    ended = launch(tmp_path, end, "-m", "rankmesh", "run", "-n", "2")
    assert ended.returncode not in (0, 134, 139), ended
    assert ended.stdout.count("sum 2.0") == 2
    assert "of mine" in ended.stdout + ended.stderr
    assert "terminate called" not in ended.stderr


# ---------------------------------------------------------------------- the end


def _ends(rank: int, talk: Any, folder: str, how: str) -> Any:
    init(rank, SIZE, folder)
    group = dist.group.WORLD
    assert _sum() == SIZE
    work = dist.irecv(torch.empty(1), (rank + 1) % SIZE, tag=4)
    talk.send("ready")  # all are past the sum
    talk.recv()
    if rank == 0:
        if how == "abort":
            group.abort()
        else:
            dist.destroy_process_group()
    talk.send("past")
    talk.recv()
    own = attempt(work.wait)
    later = attempt(lambda: group.barrier().wait())
    if rank != 0:
        group.abort()
    return own, later


def _endings(how: str) -> Any:
    with tempfile.TemporaryDirectory() as folder, Ranks(SIZE, _ends, folder, how) as ranks:
        for word in ("ready", "past"):
            for rank in range(SIZE):
                assert ranks.hear(rank) == word
            for rank in range(SIZE):
                ranks.say(rank)
        found = [ranks.outcome(rank) for rank in range(SIZE)]
        assert [ranks.exit_code(rank) for rank in range(SIZE)] == [0] * SIZE
        return found


@pytest.mark.parametrize("how", ["abort", "destroy"])
def test_end_on_one_rank(nursery: Nursery, how: str) -> None:
    """It is closed there; others that need that rank lose it, and nothing hangs."""
    (own, later), *others = nursery.call(_endings, how)
    assert isinstance(own.error, ClosedError)
    assert isinstance(later.error, ClosedError)
    receive, _ = others[1]  # rank 2 waits for rank 0
    assert isinstance(receive.error, PeerLost)
    assert "rank 0" in str(receive.error)


def _forks(rank: int, talk: Any, folder: str) -> str:
    """A worker of a DataLoader has a copy of the process group, which it must not use, and which ends with it."""
    init(rank, 2, folder)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        outcome = attempt(dist.barrier)
        os.write(writer, type(outcome.error).__name__.encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(reader, 100).decode()
    for descriptor in (reader, writer):
        os.close(descriptor)
    assert _sum() == 2.0
    dist.destroy_process_group()
    return said


def _forking() -> Any:
    with tempfile.TemporaryDirectory() as folder, Ranks(2, _forks, folder) as ranks:
        return [ranks.outcome(rank) for rank in (0, 1)]


def test_forked_children_leave_it_alone(nursery: Nursery) -> None:
    assert nursery.call(_forking) == ["ClosedError", "ClosedError"]

"""torchrun over rankmesh's store: nodes that come, fail, leave and are too many, in one process and with torchrun."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

# torch is imported only where it is found to be there
pytest.importorskip("torch", reason="torch is not installed: pip install 'rankmesh[torch]'")

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from rankmesh.membership.ports import free_port
from rankmesh.torch.elastic import BACKEND, Handler, handler, open_rendezvous
from timing import scaled, wait_until

SOON = 10.0
#: Nodes that are dead after 0.4 s (scaled), rounds that wait 0.2 s for more.
BRISK = {"keep_alive_interval": scaled(0.1), "keep_alive_max_attempt": 4, "last_call_timeout": scaled(0.2)}
Opened = Callable[..., Handler]

#: libuv, in which torch's stores are written, opens a pipe when it is first used in a process, and keeps it: that is
#: no leak of a test's.
TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@contextmanager
def agents() -> Iterator[Opened]:
    """Opens handlers of one rendezvous, each an agent of a node; the first hosts the store."""
    port, opened = free_port(), []

    def open_one(nodes: str = "2:2", **settings: Any) -> Handler:
        least, most = map(int, nodes.split(":"))
        settings = {**BRISK, "close_timeout": 0.1, **settings}
        opened.append(
            open_rendezvous(RendezvousParameters(BACKEND, f"127.0.0.1:{port}", "run", least, most, **settings))
        )
        return opened[-1]

    try:
        yield open_one
    finally:
        for one in reversed(opened):
            one.shutdown()


@pytest.fixture
def opened() -> Iterator[Opened]:
    with agents() as opened:
        yield opened


@pytest.fixture
def begin() -> Iterator[Callable[[Handler], Future[Any]]]:
    """Let an agent join in a thread."""
    with ThreadPoolExecutor() as pool:
        yield lambda one: pool.submit(one.next_rendezvous)


def ended(*joins: Future[Any]) -> list[Any]:
    return [join.result(scaled(SOON)) for join in joins]


# ---------------------------------------------------------------------- agents in threads


def test_a_full_round_begins_at_once(opened: Opened, begin: Any) -> None:
    one, two = opened(last_call_timeout=600), opened(last_call_timeout=600)
    infos = ended(begin(one), begin(two))
    assert sorted(info.rank for info in infos) == [0, 1]
    assert [info.world_size for info in infos] == [2, 2]
    masters = [(info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in infos]
    assert masters[0] == masters[1]
    infos[0].store.set("from 0", "x")
    assert infos[1].store.get("from 0") == b"x"


def test_one_of_one_to_three_begins_after_the_last_call(opened: Opened, begin: Any) -> None:
    (info,) = ended(begin(opened("1:3")))
    assert (info.rank, info.world_size) == (0, 1)


def test_a_late_node_is_let_in_by_the_next_round(opened: Opened, begin: Any) -> None:
    one, two = opened("1:2"), opened("1:2")
    (first,) = ended(begin(one))
    joining = begin(two)
    wait_until(lambda: one.num_nodes_waiting() == 1, SOON)
    infos = ended(begin(one), joining)
    assert sorted(info.rank for info in infos) == [0, 1]
    old = first.bootstrap_store_info.master_port
    ports = {info.bootstrap_store_info.master_port for info in infos}
    assert len(ports) == 1, "all workers find the same store"
    assert old not in ports, "which is not that of an earlier round"


def test_a_spare_disturbs_nobody_and_takes_the_place_of_the_dead(opened: Opened, begin: Any) -> None:
    one, two, spare = opened("2:2"), opened("2:2"), opened("2:2")
    ended(begin(one), begin(two))
    joining = begin(spare)
    state = one._rendezvous
    wait_until(lambda: state.state().waiting, SOON)
    assert one.num_nodes_waiting() == 0
    two._rendezvous.stop()  # its node is dead
    wait_until(lambda: one.num_nodes_waiting() == 1, SOON)
    infos = ended(begin(one), joining)
    assert [info.world_size for info in infos] == [2, 2]


def test_a_spare_leaves_quietly_when_the_run_ends(opened: Opened, begin: Any) -> None:
    one, spare = opened("1:1"), opened("1:1")
    ended(begin(one))
    joining = begin(spare)
    wait_until(lambda: one._rendezvous.state().waiting, SOON)
    one.set_closed()
    with pytest.raises(RendezvousGracefulExitError):
        ended(joining)
    assert one.is_closed()


def test_a_dead_node_is_not_waited_for(opened: Opened, begin: Any) -> None:
    one, two = opened("1:2"), opened("1:2")
    ended(begin(one), begin(two))
    two._rendezvous.stop()  # its process is killed
    (info,) = ended(begin(one))
    assert (info.rank, info.world_size) == (0, 1)


def test_a_member_that_begins_again_makes_the_others_do_so(opened: Opened, begin: Any) -> None:
    """As when a worker of it failed."""
    one, two = opened("2:2"), opened("2:2")
    before = ended(begin(one), begin(two))
    again = begin(one)
    wait_until(lambda: two.num_nodes_waiting() == 1, SOON)
    after = ended(again, begin(two))
    assert sorted(info.rank for info in after) == [0, 1]
    before[0].store.set("key", "of the round before")
    assert not after[0].store.check(["key"])


def test_too_few_nodes(opened: Opened) -> None:
    with pytest.raises(RendezvousTimeoutError, match=r"'run' did not complete .* 1 node.* --rdzv-endpoint"):
        opened("2:2", join_timeout=0.3).next_rendezvous()


def test_closed(opened: Opened) -> None:
    one = opened("1:1")
    one.set_closed()
    with pytest.raises(RendezvousClosedError, match="--rdzv-id"):
        one.next_rendezvous()


def test_the_host_of_the_store_is_gone(opened: Opened, begin: Any) -> None:
    host, other = opened("2:2"), opened("2:2")
    ended(begin(host), begin(other))
    assert host.shutdown()
    with pytest.raises(RendezvousConnectionError):
        other.next_rendezvous()
    assert not other.shutdown()


def test_nobody_hosts_the_store() -> None:
    params = RendezvousParameters(BACKEND, f"127.0.0.1:{free_port()}", "run", 1, 1, is_host=0, read_timeout=0.3)
    with pytest.raises(RendezvousConnectionError, match=r"the rendezvous at 127\.0\.0\.1"):
        open_rendezvous(params)


def test_off_loopback_a_token_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANKMESH_TOKEN", raising=False)
    with pytest.raises(RendezvousConnectionError, match="RANKMESH_TOKEN"):
        open_rendezvous(RendezvousParameters(BACKEND, "192.0.2.1:29400", "run", 1, 1, is_host=1))


def test_the_agents_store(opened: Opened, begin: Any) -> None:
    (info,) = ended(begin(opened("1:1")))
    store = PrefixStore("more", info.store)
    store.set("a", "1")
    assert store.multi_get(["a"]) == [b"1"]
    store.multi_set(["b", "c"], ["2", "3"])  # type: ignore[attr-defined]  # torch's stub leaves it out
    assert store.check(["b", "c"])
    assert not store.check(["b", "d"])
    assert store.add("n", 2) == 2
    assert store.compare_set("new", "", "x") == b"x"
    assert store.compare_set("new", "y", "z") == b"x"
    assert store.compare_set("new", "x", "z") == b"z"
    assert store.compare_set("none", "x", "z") == b"x"
    assert store.delete_key("a")
    assert not store.delete_key("a")
    assert store.num_keys() > 4
    with pytest.raises(DistStoreError, match="more/d did not appear"):
        store.wait(["b", "d"], timedelta(milliseconds=50))
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(DistStoreError):
        store.get("d")


def test_the_agents_store_is_gone(begin: Any) -> None:
    with agents() as opened:
        host, other = opened("2:2"), opened("2:2")
        infos = ended(begin(host), begin(other))
        host.shutdown()
        with pytest.raises(DistNetworkError):
            infos[1].store.set("a", "1")


# ---------------------------------------------------------------------- torchrun

#: A worker says which rank it is, and does what its test wants of it.
WORKER = """
    import os, sys, threading
    from pathlib import Path
    import rankmesh as rm

    folder, pause = Path(sys.argv[1]), threading.Event()

    def said():
        return (folder / "log").read_text() if (folder / "log").exists() else ""

    with rm.join(timeout=20) as mesh:
        line = f"rank {mesh.rank} of {mesh.size}\\n"
        with open(folder / "log", "a") as log:
            log.write(line)
"""
#: With another node: one of them fails, then both stay until one is alone.
BODY = """
        if mesh.size == 2:
            mesh.barrier()
            if mesh.rank == 1 and not (folder / "failed").exists():
                (folder / "failed").touch()
                sys.exit(3)
        while mesh.size == 2 or "of 2" not in said():
            mesh.barrier()
            pause.wait(0.05)
"""


class Torchrun:
    """Agents as processes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.program = folder / "worker.py"
        self.program.write_text(textwrap.dedent(WORKER + BODY))
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        conf = ",".join(f"{key}={value}" for key, value in BRISK.items())
        command = [sys.executable, "-m", "torch.distributed.run", f"--rdzv-backend={BACKEND}", "--max-restarts=3"]
        command += [f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-conf={conf}", "--rdzv-id=run", *options]
        self.processes.append(subprocess.Popen([*command, str(self.program), str(self.folder)]))
        return self.processes[-1]

    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Torchrun]:
    if not entry_points(group="torchrun.handlers", name=BACKEND):
        pytest.skip("rankmesh is not installed here since torchrun.handlers came to pyproject.toml: pip install -e .")
    made = Torchrun(tmp_path)
    try:
        yield made
    finally:
        for process in made.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # it ends its workers
            process.wait(scaled(SOON))


def test_the_entry_point() -> None:
    assert handler() is open_rendezvous


def test_a_node_comes_fails_and_leaves(torchrun: Torchrun) -> None:
    """One node with two workers: README.md, "PyTorch"."""
    stays = torchrun.start("--nnodes=1:2", "--nproc-per-node=1")
    wait_until(lambda: torchrun.log() == ["rank 0 of 1"], 30)
    leaves = torchrun.start("--nnodes=1:2", "--nproc-per-node=1")
    wait_until(lambda: sorted(torchrun.log()[1:]) == ["rank 0 of 2"] * 2 + ["rank 1 of 2"] * 2, 30)
    leaves.send_signal(signal.SIGTERM)
    assert stays.wait(scaled(40)) == 0
    assert torchrun.log()[5:] == ["rank 0 of 1"]
    assert leaves.wait(scaled(SOON)) != 0

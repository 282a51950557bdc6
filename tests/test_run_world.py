"""run_world: results by rank, errors with their rank, nothing left behind."""

from __future__ import annotations

import os
import threading

import pytest

from peers import SOON
from rankmesh import Config, DeadlineError, Mesh, PeerLost, TlsFiles
from rankmesh.cli import authority
from rankmesh.testing.world import WorldFailed, run_world
from timing import scaled


def _describe(mesh: Mesh, extra: str) -> tuple[int, int, str, int]:
    mesh.barrier(timeout=SOON)
    return mesh.rank, mesh.size, extra, os.getpid()


@pytest.mark.parametrize("transport", ["inproc://", "tcp://"])
def test_results_by_rank_in_threads(transport: str) -> None:
    assert run_world(3, _describe, transport, args=("x",)) == [(rank, 3, "x", os.getpid()) for rank in range(3)]


def test_results_by_rank_in_processes() -> None:
    results = run_world(2, _describe, processes=True, args=("x",))
    assert [result[:3] for result in results] == [(0, 2, "x"), (1, 2, "x")]
    assert len({os.getpid(), *(result[3] for result in results)}) == 3


def test_tls(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("certificates")
    authority.make_ca(directory)
    files: TlsFiles = authority.make_node(directory, "node")
    assert len(run_world(2, _describe, "tls://", args=("x",), config=Config(tls=files))) == 2


def test_world_of_one() -> None:
    assert run_world(1, _describe, args=("x",)) == [(0, 1, "x", os.getpid())]


def _fail_on_1(mesh: Mesh) -> None:
    if mesh.rank == 1:
        raise ZeroDivisionError("on purpose")
    mesh.recv(bytearray(1), source=1, timeout=SOON)


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
def test_first_failure_is_the_cause(processes: bool) -> None:
    with pytest.raises(WorldFailed) as caught:
        run_world(3, _fail_on_1, processes=processes)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "on purpose" in str(caught.value)
    assert "_fail_on_1" in caught.value.traces[1]
    assert PeerLost.__name__ in caught.value.traces[0]


def _die(mesh: Mesh) -> None:
    if mesh.rank == 1:
        os._exit(3)
    mesh.recv(bytearray(1), source=1, timeout=SOON)


def test_process_that_dies_is_told() -> None:
    with pytest.raises(WorldFailed) as caught:
        run_world(2, _die, processes=True)
    assert "exit code 3" in caught.value.traces[1]
    assert "rank 1" in caught.value.traces[0]


def _return_what_cannot_travel(mesh: Mesh) -> object:
    return threading.Lock()


def test_result_that_cannot_be_pickled_is_told() -> None:
    with pytest.raises(WorldFailed, match="cannot be pickled"):
        run_world(1, _return_what_cannot_travel, processes=True)


def _hang(mesh: Mesh, release: threading.Event) -> None:
    if mesh.rank == 0:
        release.wait(SOON)


def test_world_that_does_not_end() -> None:
    release = threading.Event()
    try:
        with pytest.raises(DeadlineError, match="Rank 0 did not end") as caught:
            run_world(2, _hang, args=(release,), timeout=scaled(0.5))
        assert caught.value.op == "run_world"
    finally:
        release.set()


def _hang_in_process(mesh: Mesh) -> None:
    if mesh.rank == 0:
        threading.Event().wait(SOON)


def test_processes_that_do_not_end_are_killed() -> None:
    with pytest.raises(DeadlineError, match="Rank 0 did not end"):
        run_world(2, _hang_in_process, processes=True, timeout=scaled(2))

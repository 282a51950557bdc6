"""join(): who is missing, who is in the way, and worlds of many ranks."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic
from uuid import uuid4

import pytest

from peers import BRIEFLY, SOON, Call
from rankmesh import Config, ConfigError, JoinError, Mesh, RankmeshError, join
from rankmesh.membership.ports import free_port
from rankmesh.membership.rendezvous import rendezvous_file
from rankmesh.membership.store import StoreServer
from rankmesh.testing.world import run_world
from timing import scaled


def fresh_url(scheme: str) -> str:
    return f"inproc://{uuid4().hex}" if scheme == "inproc" else f"{scheme}://127.0.0.1:{free_port()}"


@pytest.fixture(params=["inproc", "tcp"])
def url(request: pytest.FixtureRequest) -> str:
    """Tests that last until a deadline of some length name one: what carries the store makes no difference to them."""
    return fresh_url(request.param)


def outcomes(*calls: Call[Mesh]) -> list[Mesh | RankmeshError]:
    """The meshes, closed, or the errors."""
    ended: list[Mesh | RankmeshError] = []
    for call in calls:
        try:
            ended.append(call.result())
        except RankmeshError as error:
            ended.append(error)
    for mesh in ended:
        if isinstance(mesh, Mesh):
            Call(mesh.close)
    return ended


@pytest.mark.parametrize("url", ["tcp"], indirect=True)
def test_missing_ranks_are_named(url: str) -> None:
    calls = [Call(join, url, rank=rank, size=4, timeout=1.0) for rank in (0, 2)]
    for error in outcomes(*calls):
        assert isinstance(error, JoinError)
    errors = [error for error in outcomes(*calls) if isinstance(error, JoinError) and error.missing]
    assert errors, "nobody says who is missing"
    for error in errors:
        assert error.missing == (1, 3)
        assert error.size == 4
        assert "missing: rank 1, 3" in str(error)


def test_missing_rank_0_is_named(url: str) -> None:
    began = monotonic()
    with pytest.raises(JoinError) as caught:
        join(url, rank=1, size=2, timeout=5 * BRIEFLY)
    assert 5 * BRIEFLY <= monotonic() - began < SOON / 2
    assert url.partition("://")[2] in str(caught.value)


def test_late_ranks_are_waited_for(url: str) -> None:
    calls = [Call(join, url, rank=rank, size=3, timeout=SOON) for rank in (2, 1)]
    assert all(call.running for call in calls)
    with join(url, rank=0, size=3, timeout=SOON) as mesh:
        others = [call.result() for call in calls]
        assert sorted(other.rank for other in others) == [1, 2]
        closing = [Call(other.close) for other in others]
        assert mesh.size == 3
    for call in closing:
        call.result()


@pytest.mark.parametrize("url", ["inproc"], indirect=True)
def test_duplicate_rank_is_named(url: str) -> None:
    first = Call(join, url, rank=1, size=3, timeout=scaled(1))
    rank_0 = Call(join, url, rank=0, size=3, timeout=scaled(1))
    second = Call(join, url, rank=1, size=3, timeout=scaled(1))
    errors = [error for error in outcomes(first, second) if isinstance(error, JoinError) and "taken" in str(error)]
    assert len(errors) == 1
    assert "Rank 1 is taken by pid" in str(errors[0])
    (error,) = outcomes(rank_0)
    assert isinstance(error, JoinError)
    assert error.missing == (2,), "the rank that came first does not count"


def test_second_rank_0_cannot_host_the_store(url: str) -> None:
    with StoreServer(url, Config()), pytest.raises(JoinError, match="cannot host the store") as caught:
        join(url, rank=0, size=2, timeout=SOON)
    assert "in use" in str(caught.value)


def test_different_sizes_are_told(url: str) -> None:
    began = monotonic()
    calls = [Call(join, url, rank=0, size=2, timeout=SOON), Call(join, url, rank=1, size=3, timeout=SOON)]
    first, second = outcomes(*calls)
    assert monotonic() - began < SOON / 2, "it waited for ranks that nobody starts"
    assert isinstance(first, JoinError)
    assert "world of 3" in str(first)
    assert "this rank one of 2" in str(first)
    assert isinstance(second, JoinError)


@pytest.mark.parametrize("url", ["tcp"], indirect=True)
def test_wrong_token_is_told(url: str) -> None:
    rank_0 = Call(join, url, rank=0, size=2, timeout=scaled(1), token="right")
    with pytest.raises(JoinError, match="wrong or missing token") as caught:
        join(url, rank=1, size=2, timeout=SOON, token="wrong")
    assert "RANKMESH_TOKEN" in str(caught.value)
    (error,) = outcomes(rank_0)
    assert isinstance(error, JoinError)
    assert error.missing == (1,)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"rank": 0}, "needs rank= and size= together"),
        ({"size": 2}, "needs rank= and size= together"),
        ({"rank": 0, "size": 2}, "needs an address too"),
        ({"url": "tcp://127.0.0.1:7000", "rank": 2, "size": 2}, "do not fit"),
        ({"url": "tcp://127.0.0.1:7000", "rank": -1, "size": 2}, "do not fit"),
        ({"url": "tcp://127.0.0.1:7000", "rank": 0, "size": 0}, "do not fit"),
        ({"url": "tcp://127.0.0.1", "rank": 0, "size": 2}, "port"),
        ({"url": "carrier-pigeon://x", "rank": 0, "size": 2}, "carrier-pigeon"),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        join(**arguments)  # type: ignore[arg-type]


def test_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "RANKMESH_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(JoinError, match="rankmesh run"):
        join()


def _talk(mesh: Mesh) -> list[int]:
    mesh.barrier(timeout=SOON)
    for to in range(mesh.size):
        mesh.send(bytes([mesh.rank]), to=to, tag=1, timeout=SOON)
    out, seen = bytearray(1), []
    for source in range(mesh.size):
        mesh.recv(out, source=source, tag=1, timeout=SOON)
        seen.append(out[0])
    mesh.barrier(timeout=SOON)
    return seen


def test_16_ranks() -> None:
    assert run_world(16, _talk, config=Config(timeout=SOON)) == [list(range(16))] * 16


class TestRendezvousFile:
    """mpiexec on one host gives no address: rank 0 leaves it, with a token, in a file."""

    PROGRAM = "import rankmesh; mesh = rankmesh.join(); mesh.barrier(); print(mesh.rank, mesh.size); mesh.close()"

    @pytest.fixture(autouse=True)
    def _own_folder(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def environment(self, rank: int, size: int) -> dict[str, str]:
        """As MPICH's mpiexec sets it."""
        return {"PMI_RANK": str(rank), "PMI_SIZE": str(size), "MPI_LOCALNRANKS": str(size)}

    def test_processes_meet_and_the_file_goes(self, tmp_path: Path) -> None:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", self.PROGRAM],
                env={**os.environ, **self.environment(rank, 3), "TMPDIR": str(tmp_path)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in (1, 0, 2)
        ]
        try:
            results = [process.communicate(timeout=2 * SOON) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        assert results == [("1 3\n", ""), ("0 3\n", ""), ("2 3\n", "")]
        assert list(tmp_path.glob("*/*")) == [], "the file with the token is left behind"

    def test_file_is_private(self) -> None:
        path = rendezvous_file("run")
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    def test_folder_that_others_can_use_is_refused(self, tmp_path: Path) -> None:
        folder = rendezvous_file("run").parent
        folder.chmod(0o755)
        with pytest.raises(JoinError, match="other users"):
            rendezvous_file("run")

    def test_rank_0_that_never_comes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in self.environment(1, 2).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(JoinError, match="left no word") as caught:
            join(timeout=5 * BRIEFLY)
        assert caught.value.missing == (0,)

    def test_file_of_a_killed_run_is_not_believed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {**self.environment(1, 2), "RANKMESH_RUN_ID": "again"}.items():
            monkeypatch.setenv(name, value)
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        left = {"address": "tcp://127.0.0.1:1", "token": "old", "pid": dead.pid}
        rendezvous_file("again").write_text(json.dumps(left))
        with pytest.raises(JoinError, match="left no word"):
            join(timeout=5 * BRIEFLY)

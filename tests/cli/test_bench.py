"""`rankmesh bench p2p`: sizes, figures, checks of contents, where it runs, what it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from rankmesh import Mesh
from rankmesh.cli import measure, report
from rankmesh.cli.bench import BENCHES
from rankmesh.cli.main import main
from rankmesh.testing import run_world
from timing import scaled

RANKMESH = (sys.executable, "-m", "rankmesh")
QUICK = ("--sizes", "64,100K", "--seconds", "0.005")
IN_THREADS = ("bench", "p2p", "--transport", "inproc", *QUICK)
DEADLINE = 50.0


def rankmesh(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RANKMESH, *words],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=scaled(DEADLINE),
        check=False,
    )


def rows_of(table: str) -> list[list[float]]:
    return [list(map(float, line.split())) for line in table.splitlines() if not line.startswith("#")]


def check_rows(rows: list[list[float]]) -> None:
    assert [row[0] for row in rows] == [64, 100 * 1024]
    for size, count, p50, p99, algbw, stream_count, *_, wrong in rows:
        assert measure.LEAST <= count <= measure.MOST
        assert measure.LEAST <= stream_count <= measure.MOST
        assert 0 < p50 <= p99
        assert algbw == pytest.approx(size / p50 / 1e3, abs=0.001)
        assert wrong == 0


@pytest.mark.parametrize(
    "text, sizes",
    [
        ("64", [64]),
        ("64,4K,1M,1G", [64, 4096, 1 << 20, 1 << 30]),
        ("1kib, 2KB", [1024, 2048]),
        ("8:64", [8, 16, 32, 64]),
        ("8:100", [8, 16, 32, 64, 100]),
        ("1K:1M:32", [1 << 10, 1 << 15, 1 << 20]),
        ("10:20:1.5", [10, 15, 20]),
        ("5:5", [5]),
        ("0,1", [0, 1]),
    ],
)
def test_sizes(text: str, sizes: list[int]) -> None:
    assert report.parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5K", "4:2", "0:8", "1:8:1", "1:8:2:3", "1:8:x", "1T"])
def test_sizes_that_make_no_sense(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "p2p", f"--sizes={text}"])
    assert caught.value.code == 2
    assert "argument --sizes: " in capsys.readouterr().err


def test_there_are_never_more_rows_than_anybody_reads() -> None:
    assert len(report.parse_sizes("1:1G:1.0001")) <= 201


@pytest.mark.parametrize("transport", ["tcp", "tls", "inproc"])
def test_it_launches_itself(transport: str) -> None:
    result = rankmesh("bench", "p2p", "--transport", transport, "--pin", *QUICK)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"bench p2p over {transport}, " in result.stdout
    check_rows(rows_of(result.stdout))


def test_inside_a_launch_the_ranks_of_that_launch_measure() -> None:
    result = rankmesh("run", "-n", "3", "--no-prefix", "-m", "rankmesh", "bench", "p2p", *QUICK)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.count("bench p2p over tcp") == 1
    check_rows(rows_of(result.stdout))


def test_inside_a_launch_there_is_no_choice_of_transport() -> None:
    result = rankmesh("run", "-n", "2", "-m", "rankmesh", "bench", "p2p", "--transport", "tls")
    assert result.returncode == 2
    assert "Leave --transport out." in result.stderr


def test_tls_is_the_default_where_certificates_are_set(tmp_path: Path) -> None:
    assert rankmesh("certs", str(tmp_path), "--name", "n").returncode == 0
    variables = {
        "RANKMESH_TLS_CA": f"{tmp_path}/ca.pem",
        "RANKMESH_TLS_CERT": f"{tmp_path}/n.pem",
        "RANKMESH_TLS_KEY": f"{tmp_path}/n-key.pem",
    }
    assert "over tls, " in rankmesh("bench", "p2p", *QUICK, **variables).stdout
    assert "over tcp, " in rankmesh("bench", "p2p", "--transport", "tcp", *QUICK, **variables).stdout


@pytest.mark.parametrize("to_file", [True, False])
def test_json(to_file: bool, tmp_path: Path) -> None:
    target = str(tmp_path / "out.json") if to_file else "-"
    result = rankmesh("bench", "p2p", *QUICK, "--json", target)
    assert result.returncode == 0, result.stderr
    table, text = (result.stdout, Path(target).read_text()) if to_file else (result.stderr, result.stdout)
    document = json.loads(text)
    assert (document["bench"], document["transport"], document["pinned"]) == ("p2p", "tcp", False)
    assert [rank.split(" (")[0] for rank in document["ranks"]] == ["rank 0", "rank 1"]
    assert document["cores"] == len(os.sched_getaffinity(0))
    shown = rows_of(table)
    check_rows(shown)
    for row, line in zip(document["rows"], shown, strict=True):
        assert list(row) == [column.key for column in report.COLUMNS]
        assert line == [float(format(row[column.key], column.form)) for column in report.COLUMNS]


def test_a_file_that_cannot_be_written_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*IN_THREADS, "--json", "/nonexistent/out.json"]) == 2
    assert "/nonexistent/out.json cannot be written: No such file or directory." in capsys.readouterr().err


class Corrupting:
    """A mesh whose messages lose their way: one byte of each is changed when it is sent."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mesh, name)

    def send(self, data: Any, to: int) -> None:
        changed = np.array(data)
        changed[-1] ^= 255
        self._mesh.send(changed, to)


def test_wrong_bytes_are_counted() -> None:
    def rank(mesh: Mesh) -> int:
        if mesh.rank == 1:
            measure.follow(mesh, 0, scaled(20))
            return 0
        row = measure.lead(Corrupting(mesh), 1, 1000, 0.001)  # type: ignore[arg-type]  # as good as a Mesh here
        measure.dismiss(mesh, 1)
        return row.wrong

    # There, as rank 1 counts, and back: the last timed message and those compared.
    assert run_world(2, rank)[0] == 1 + 2 * measure.CHECKED


def test_wrong_bytes_give_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lead = measure.lead
    monkeypatch.setattr(measure, "lead", lambda *args: replace(lead(*args), wrong=3))
    assert main([*IN_THREADS]) == 1
    assert [row[-1] for row in rows_of(capsys.readouterr().out)] == [3, 3]


def test_pinned_ranks_keep_to_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: pinned.append(cores))
    assert main([*IN_THREADS, "--pin"]) == 0
    assert sorted(map(min, pinned)) == [4, 7]


def test_circumstances_that_spoil_figures_are_told() -> None:
    assert report.caveats({"load_before": 0.1, "cores": 2}) == []
    loaded, lonely = report.caveats({"load_before": 7.5, "cores": 1})
    assert "(load 7.5)" in loaded
    assert "only one core" in lonely


def test_a_plot_without_matplotlib_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*IN_THREADS, "--plot", "x.png"]) == 2
    captured = capsys.readouterr()
    assert "pip install 'rankmesh[plot]'" in captured.err
    assert captured.out == ""


def test_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    module, figure, axes = ModuleType("matplotlib.figure"), MagicMock(), (MagicMock(), MagicMock())
    figure.subplots.return_value = axes
    module.Figure = MagicMock(return_value=figure)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
    assert main([*IN_THREADS, "--plot", "x.png"]) == 0
    figure.savefig.assert_called_once_with("x.png", dpi=120)
    drawn = [call.args for one in axes for call in one.plot.call_args_list]
    assert len(drawn) == 4
    assert all(sizes == [64, 100 * 1024] and min(values) > 0 for sizes, values in drawn)


def test_no_benchmark_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench"])
    assert caught.value.code == 2
    assert "<benchmark>" in capsys.readouterr().err


@pytest.mark.parametrize("name", BENCHES)
def test_every_benchmark_describes_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", name, "--help"])
    assert caught.value.code == 0
    assert f"usage: rankmesh bench {name}" in capsys.readouterr().out

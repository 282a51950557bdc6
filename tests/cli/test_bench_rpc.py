"""`rankmesh bench rpc`: figures of its own, checks of results, where it runs, what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rankmesh.cli import rpc
from rankmesh.cli.main import main

IN_THREADS = ("bench", "rpc", "--transport", "inproc", "--seconds", "0.01")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "ARRAY_BYTES", 1 << 20)


def test_a_row_for_each_kind_of_handler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    assert main([*IN_THREADS, "--json", str(target)]) == 0
    out = capsys.readouterr().out
    assert "bench rpc over inproc" in out
    rows = [line.split() for line in out.splitlines() if not line.startswith("#")]
    assert [row[0] for row in rows] == list(rpc.HANDLERS)
    document: dict[str, Any] = json.loads(target.read_text())
    assert document["bench"] == "rpc"
    for row, shown in zip(document["rows"], rows, strict=True):
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert min(row["calls_per_s"], row["array_gb_per_s"]) > 0
        assert (row["wrong"], shown[-1]) == (0, "0")


def test_wrong_results_give_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def offer(mesh: Any) -> None:
        for name in rpc.HANDLERS:
            mesh.rpc.register(lambda value: value[:-1], name)

    monkeypatch.setattr(rpc, "_offer", offer)
    assert main([*IN_THREADS]) == 1
    assert all(int(line.split()[-1]) > 0 for line in capsys.readouterr().out.splitlines() if not line.startswith("#"))

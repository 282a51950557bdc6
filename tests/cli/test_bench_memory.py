"""`rankmesh bench memory`: its rows, its checks of contents, where it runs, what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankmesh import RemoteRegion
from rankmesh.cli import memory
from rankmesh.cli.main import main
from timing import scaled

QUICK = ("--sizes", "64,10K", "--seconds", "0.005")
IN_THREADS = ("bench", "memory", "--transport", "inproc", *QUICK)
PLACES = [(kind, nbytes) for kind in memory.KINDS for nbytes in (64, 10 * 1024)]
DEADLINE = 50.0


def rows_of(table: str) -> list[list[str]]:
    return [line.split() for line in table.splitlines() if not line.startswith("#")]


def test_a_row_for_each_kind_of_region_and_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    assert main([*IN_THREADS, "--json", str(target)]) == 0
    out = capsys.readouterr().out
    assert "bench memory over inproc" in out
    document: dict[str, Any] = json.loads(target.read_text())
    assert document["bench"] == "memory"
    assert [(row["region"], row["nbytes"]) for row in document["rows"]] == PLACES
    for row, shown in zip(document["rows"], rows_of(out), strict=True):
        assert shown == [format(row[column.key], column.form) for column in memory.COLUMNS]
        for verb in ("read", "write"):
            assert 0 < row[f"{verb}_p50_us"] <= row[f"{verb}_p99_us"]
            assert row[f"{verb}_gb_per_s"] == pytest.approx(row["nbytes"] / row[f"{verb}_p50_us"] / 1e3)
            assert row[f"{verb}_paged_gb_per_s"] > 0
        assert row["wrong"] == 0


def test_between_processes() -> None:
    command = [sys.executable, "-m", "rankmesh", "bench", "memory", *QUICK, "--json", "-"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=scaled(DEADLINE), check=False)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["transport"] == "tcp"
    assert [(row["region"], row["nbytes"], row["wrong"]) for row in document["rows"]] == [(*at, 0) for at in PLACES]
    assert [row[0] for row in rows_of(result.stderr)] == [kind for kind, _ in PLACES]


@pytest.mark.parametrize("verb", ["read", "read_batch"])
def test_wrong_bytes_are_counted_and_give_exit_code_1(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = getattr(RemoteRegion, verb)

    def corrupting(self: RemoteRegion, target: Any, *args: Any, **settings: Any) -> Any:
        result = honest(self, target, *args, **settings)
        changed: np.ndarray[Any, Any] = target if verb == "read" else target[0][0]
        changed[-1] ^= 255
        return result

    monkeypatch.setattr(RemoteRegion, verb, corrupting)
    assert main([*IN_THREADS]) == 1
    assert [row[-1] for row in rows_of(capsys.readouterr().out)] == ["1"] * len(PLACES)


def test_pages_lie_apart_and_within_the_region() -> None:
    data = np.arange(3 * memory.PAGE + 5, dtype=np.int64).view(np.uint8)[: 3 * memory.PAGE + 5]
    capacity = 8 * memory.PAGE
    pieces = memory._pages(data, capacity)
    assert np.array_equal(np.concatenate([piece for piece, _ in pieces]), data)
    offsets = [offset for _, offset in pieces]
    assert len(set(offsets)) == len(pieces) == 4
    assert all(offset % memory.PAGE == 0 and offset + memory.PAGE <= capacity for offset in offsets)

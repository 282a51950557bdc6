"""`rankmesh bench collectives`: its rows, its checks of contents, where it runs, what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from rankmesh import Config, Mesh
from rankmesh.cli import backends, collectives, svg, tune
from rankmesh.cli.collectives import COLUMNS, Row
from rankmesh.cli.exercise import KINDS, Exercise, Task
from rankmesh.cli.main import main
from rankmesh.collectives.choosing import ALGORITHMS
from rankmesh.collectives.reducing import OPERATIONS
from rankmesh.collectives.tuning import Chooser, read_table
from rankmesh.collectives.tuning import Row as Choice
from timing import scaled

QUICK = ("--sizes", "8,10K", "--iterations", "2")
BENCH = ("bench", "collectives", *QUICK)
IN_THREADS = (*BENCH, "--transport", "inproc")
DEADLINE = 50.0

ROW = Row("rankmesh", "all_reduce", "ring", 64, 16, "float32", "sum", -1, 64, 8.0, 1.0, 1.0, 0, 4.0, 2.0, 2.0, 0)


def lines_of(table: str) -> list[list[str]]:
    return [line.split() for line in table.splitlines() if not line.startswith("#")]


def rankmesh(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rankmesh", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=scaled(DEADLINE), check=False)


def check_row(row: dict[str, Any], ranks: int) -> None:
    kind = KINDS[row["collective"]]
    assert (row["root"] >= 0) == kind.rooted
    assert (row["op"] == "sum") == kind.reduces
    assert (row["out_us"] is not None) == kind.out_of_place
    for place in ("out", "in") if kind.out_of_place else ("in",):
        assert row[f"{place}_us"] > 0
        assert row[f"{place}_algbw_gb_per_s"] == pytest.approx(row["nbytes"] / row[f"{place}_us"] / 1e3)
        assert row[f"{place}_busbw_gb_per_s"] == pytest.approx(row[f"{place}_algbw_gb_per_s"] * kind.bus(ranks))
        assert row[f"{place}_wrong"] == 0


def test_a_row_for_each_collective_and_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    words = ("--ranks", "3", "--collectives", ",".join(KINDS), "--json", str(target), "--root", "2")
    assert main([*IN_THREADS, *words]) == 0
    document = json.loads(target.read_text())
    assert (document["bench"], document["ranks"], document["transport"]) == ("collectives", 3, "inproc")
    expected = [(name, nbytes) for name in KINDS for nbytes in ((8, 10240) if name != "barrier" else (0,))]
    got = [(row["collective"], row["nbytes"]) for row in document["rows"]]
    assert [name for name, _ in got] == [name for name, _ in expected]
    assert all(nbytes <= real < nbytes + 3 * 4 for (_, nbytes), (_, real) in zip(expected, got, strict=True))
    for row, shown in zip(document["rows"], lines_of(capsys.readouterr().out), strict=True):
        check_row(row, 3)
        assert row["algorithm"] == Chooser(Config()).choose(row["collective"], row["chosen_by"], 3, 1, None)
        values = ((row[column.key], column.form) for column in COLUMNS)
        assert shown == ["n/a" if value is None else format(value, form) for value, form in values]


def test_between_processes() -> None:
    result = rankmesh(
        *BENCH, "--collectives", "all_reduce,all_to_all", "--dtype", "int32", "--op", "max", "--json", "-"
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["transport"], document["hosts"], document["libraries"]) == ("shm", 1, [document["library"]])
    assert [(row["dtype"], row["op"], row["out_wrong"], row["in_wrong"]) for row in document["rows"]] == [
        *[("int32", "max", 0, 0)] * 2,
        *[("int32", "none", 0, 0)] * 2,
    ]
    assert len(lines_of(result.stderr)) == 4


def test_inside_a_launch_its_ranks_measure(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    result = rankmesh("run", "-n", "3", "--no-prefix", "-m", "rankmesh", *BENCH, "--plot", str(plot))
    assert (result.returncode, result.stderr) == (0, "")
    assert ", 3 ranks over shm, " in result.stdout
    assert len(lines_of(result.stdout)) == 2
    ElementTree.parse(plot)


@pytest.mark.parametrize("name, package", [(name, package) for name, (package, _) in backends.OTHERS.items()])
def test_beside_other_libraries(name: str, package: str, tmp_path: Path) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    target = tmp_path / "out.json"
    words = ("--collectives", "all_reduce,gather,reduce_scatter", "--compare", name, "--json", str(target))
    result = rankmesh(*BENCH, *words)
    assert result.returncode == 0, result.stderr
    assert "how many times as long as rankmesh" in result.stdout
    document = json.loads(target.read_text())
    assert len(document["libraries"]) == 2
    rows = [Row(**row) for row in document["rows"]]
    assert [row.backend for row in rows] == ["rankmesh"] * 6 + [name] * 6
    assert all(row.us is not None and row.wrong == 0 for row in rows)


def test_a_library_that_is_missing_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    assert main([*IN_THREADS, "--compare", "gloo"]) == 2
    captured = capsys.readouterr()
    assert "gloo cannot be measured: torch is not installed here. Install it with `pip install torch`" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    "words, message",
    [
        (["--ranks", "1"], "Collectives need two ranks at least, not 1."),
        (["--root", "2"], "There is no rank 2 in a world of 2."),
        (["--algorithm", "warp"], "all_reduce has no algorithm 'warp'. Use one of recursive_doubling"),
        (["--dtype", "float31"], "There is no dtype 'float31'"),
        (["--op", "band"], "Arrays of float32 have no band. Choose another --op or --dtype."),
        (["--op", "avg", "--dtype", "int8"], "Arrays of int8 have no avg."),
        (["--plot", "x.png"], "--plot draws SVG: name a file that ends in .svg, not 'x.png'."),
        (["--tune", "t.json", "--compare", "gloo"], "--tune is about rankmesh's own algorithms."),
        (["--tune", "/nonexistent/t.json"], "The folder of '/nonexistent/t.json' does not exist."),
        (["--tune", "/dev/null"], "'/dev/null' is not a table of algorithms"),
    ],
)
def test_what_cannot_work_is_told_at_once(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*IN_THREADS, *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("option", ["--collectives=sum", "--compare=nccl", "--op=mean", "--iterations=0"])
def test_options_that_make_no_sense(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*IN_THREADS, option])
    assert f"argument {option.partition('=')[0]}: " in capsys.readouterr().err


# ---------------------------------------------------------------------- contents


@pytest.mark.parametrize("collective", [name for name in KINDS if name != "barrier"])
@pytest.mark.parametrize("in_place", [False, True])
def test_what_did_not_come_is_wrong(collective: str, in_place: bool) -> None:
    """On every rank that is to get something else than it gave, nearly all elements are counted."""
    kind = KINDS[collective]
    for rank in range(3):
        exercise = Exercise(Task(collective, 3000, np.dtype("int32"), "sum", 1), rank, 3, in_place)
        exercise.fill()
        wrong = exercise.wrong()
        at_root = kind.rooted and rank == 1
        nothing_comes = (collective in ("reduce", "gather") and not at_root) or (collective == "exscan" and rank == 0)
        unchanged = in_place and (
            (collective == "scan" and rank == 0) or (at_root and collective in ("broadcast", "scatter"))
        )
        if nothing_comes or unchanged:
            assert wrong == 0
        else:
            assert wrong >= exercise.out.size // 2


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_operation_is_compared(op: str) -> None:
    dtype = np.dtype("float64" if op not in ("band", "bor", "bxor") else "int64")
    task = Task("all_reduce", 800, dtype, op, 0)
    ranks = [Exercise(task, rank, 2, in_place=False) for rank in range(2)]
    for exercise in ranks:
        exercise.fill()
    total = OPERATIONS[op](ranks[0].given, ranks[1].given).astype(dtype) / (2 if op == "avg" else 1)
    for exercise in ranks:
        np.copyto(exercise.out, total, casting="unsafe")
        assert exercise.wrong() == 0
        exercise.out[7] += 1
        assert exercise.wrong() == 1


def test_wrong_elements_are_counted_and_give_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = Mesh.all_reduce

    def corrupting(self: Mesh, array: Any, *args: Any, **settings: Any) -> Any:
        result = honest(self, array, *args, **settings)
        result[-1] += self.rank == 0
        return result

    monkeypatch.setattr(Mesh, "all_reduce", corrupting)
    assert main([*IN_THREADS]) == 1
    # One before the loop and one after it, on rank 0.
    assert [(line[9], line[-1]) for line in lines_of(capsys.readouterr().out)] == [("2", "2")] * 2


# ---------------------------------------------------------------------- what is made of the rows


def test_a_table_of_algorithms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "table.json")
    chosen = ("--collectives", "all_reduce,scatter")
    assert main([*IN_THREADS, *chosen, "--tune", target]) == 0
    assert main([*IN_THREADS, *chosen, "--tune", target, "--ranks", "3"]) == 0
    assert capsys.readouterr().out.count(f"# Written to {target}") == 2
    table = read_table(target)
    assert [(world.ranks, world.hosts, world.machine["transport"]) for world in table.worlds] == [
        (2, 1, "inproc"),
        (3, 1, "inproc"),
    ]
    for world in table.worlds:
        assert list(world.rows) == ["all_reduce", "scatter"]
        measured = {(one.collective, one.algorithm) for one in world.measured}
        assert measured <= {(name, one) for name in world.rows for one in ALGORITHMS[name]}
        assert measured >= {("all_reduce", "ring"), ("all_reduce", "direct"), ("scatter", "binomial")}
    chooser = Chooser(Config(collective_table=target))
    assert chooser.choose("all_reduce", 1 << 30, 3, 1, None) == table.worlds[1].rows["all_reduce"][-1].algorithm


@pytest.mark.parametrize(
    "times, rows",
    [
        ({8: {"a": 1.0, "b": 2.0}}, [Choice(None, "a")]),
        ({8: {"a": 1.0, "b": 2.0}, 32: {"a": 2.0, "b": 1.0}}, [Choice(16, "a"), Choice(None, "b")]),
        ({32: {"a": 2.0, "b": 1.0}, 8: {"a": 1.0, "b": 2.0}}, [Choice(16, "a"), Choice(None, "b")]),
        ({8: {"a": 1.0, "b": 2.0}, 32: {"a": 1.04, "b": 1.0}}, [Choice(None, "a")]),
        (
            {8: {"a": 1.0}, 32: {"b": 9.0}, 128: {"a": 1.0, "b": 2.0}},
            [Choice(16, "a"), Choice(64, "b"), Choice(None, "a")],
        ),
    ],
    ids=["one size", "two", "in no order", "as good as", "not everywhere"],
)
def test_the_fastest(times: dict[int, dict[str, float]], rows: list[Choice]) -> None:
    assert tune.fastest(times) == rows


def test_comparison() -> None:
    only_out = replace(ROW, backend="gloo", out_us=16.0, in_us=None)
    none = replace(ROW, backend="mpi4py", out_us=None, in_us=None)
    *_, line = collectives.comparison([ROW, only_out, none])
    assert line.split() == ["all_reduce", "64", "4.00", "16.00", "(2.00x)", "n/a"]


def test_plot(tmp_path: Path) -> None:
    rows = [
        replace(ROW, backend=backend, algorithm=algorithm, nbytes=nbytes, in_us=us)
        for backend, algorithm in (("rankmesh", "ring"), ("rankmesh", "direct"), ("gloo <&>", "-"))
        for nbytes, us in ((8, 1.0), (1 << 20, 100.0))
    ]
    target = tmp_path / "plot.svg"
    svg.write(str(target), "a title <&>", [*rows, replace(ROW, collective="barrier", nbytes=0)])
    root = ElementTree.parse(target).getroot()
    space = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in root.iter(f"{space}text")]
    assert "a title <&>" in texts
    assert [text for text in texts if text in ("rankmesh ring", "rankmesh direct", "gloo <&>")] == [
        "rankmesh ring",
        "rankmesh direct",
        "gloo <&>",
    ]
    assert "barrier" not in texts
    lines = [line.attrib["points"].split() for line in root.iter(f"{space}polyline")]
    assert len(lines) == 2 * 3
    first, last = (tuple(map(float, point.split(","))) for point in lines[0])
    assert first == (svg.LEFT, svg.TOP + svg.PLOT_HEIGHT)
    assert last[1] == svg.TOP


def test_a_plot_of_one_size_and_a_file_that_cannot_be_written_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*IN_THREADS, "--sizes", "8", "--plot", "x.svg"]) == 2
    captured = capsys.readouterr()
    assert "there is only one. Pass two --sizes or more." in captured.err
    assert captured.out == ""
    assert main([*IN_THREADS, "--plot", "/nonexistent/x.svg"]) == 2
    assert "/nonexistent/x.svg cannot be written: No such file or directory." in capsys.readouterr().err

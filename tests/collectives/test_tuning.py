"""Which algorithm is taken: the call's, Config's, the file's, the built-in one; and files that are no tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankmesh import Config, ConfigError, DesyncError, Mesh, UsageError, join
from rankmesh.collectives import tuning
from rankmesh.collectives.choosing import TABLE, Choice, choose
from rankmesh.collectives.tuning import Chooser, Measured, Row, TunedWorld, TuningTable, read_table, write_table
from rankmesh.testing import run_world
from timing import scaled

ROWS = {"all_reduce": [Row(1024, "direct"), Row(65536, "ring"), Row(None, "halving_doubling")]}
WORLD = TunedWorld(ranks=4, hosts=1, rows=ROWS, measured=[Measured("all_reduce", 8, "direct", 3.5)])


@pytest.fixture
def path(tmp_path: Path) -> str:
    target = str(tmp_path / "table.json")
    write_table(target, TuningTable(worlds=[WORLD]))
    return target


def test_what_is_written_is_read(path: str) -> None:
    assert read_table(path) == TuningTable(worlds=[WORLD])
    document = json.loads(Path(path).read_text())
    assert (document["format"], document["version"]) == ("rankmesh collective table", 1)


def test_a_world_takes_the_place_of_the_same_one() -> None:
    two, again = TunedWorld(ranks=2, rows=ROWS), TunedWorld(ranks=4, rows={})
    table = TuningTable(worlds=[WORLD]).with_world(two).with_world(again)
    assert table.worlds == [two, again]


@pytest.mark.parametrize(
    "nbytes, chosen",
    [(0, "direct"), (1024, "direct"), (1025, "ring"), (65536, "ring"), (1 << 40, "halving_doubling")],
)
def test_the_files_first_row_that_holds_is_taken(path: str, nbytes: int, chosen: str) -> None:
    assert Chooser(Config(collective_table=path)).choose("all_reduce", nbytes, 4, 1, None) == chosen


@pytest.mark.parametrize(
    "collective, size, hosts", [("all_reduce", 3, 1), ("all_reduce", 4, 2), ("all_gather", 4, 1), ("barrier", 4, 1)]
)
def test_the_file_counts_for_what_it_was_measured_with(path: str, collective: str, size: int, hosts: int) -> None:
    chosen = Chooser(Config(collective_table=path)).choose(collective, 8, size, hosts, None)
    assert chosen == choose(collective, 8, size, None, hosts)


def test_the_more_particular_setting_decides(path: str) -> None:
    config = Config(collective_table=path, algorithms="all_reduce=recursive_doubling,broadcast=direct")
    chooser = Chooser(config)
    assert chooser.choose("all_reduce", 8, 4, 1, None) == "recursive_doubling"
    assert chooser.choose("all_reduce", 8, 4, 1, "ring") == "ring"
    assert chooser.choose("broadcast", 8, 4, 1, None) == "direct"
    with pytest.raises(UsageError, match="all_reduce has no algorithm ''"):
        chooser.choose("all_reduce", 8, 4, 1, "")


def test_the_built_in_table_chooses_by_hosts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Choice(1 << 62, 1 << 62, "direct", hosts=1)
    monkeypatch.setitem(TABLE, "all_reduce", (row, *TABLE["all_reduce"]))
    assert choose("all_reduce", 8, 4) == "direct"
    assert choose("all_reduce", 8, 4, hosts=2) == "recursive_doubling"


def test_the_environment_names_algorithms() -> None:
    variables = {
        "RANKMESH_ALGORITHMS": "all_reduce=direct, broadcast=direct",
        "RANKMESH_ALGORITHM_ALL_REDUCE": "ring",
        "RANKMESH_ALGORITHM_ALL_GATHER": "",
        "RANKMESH_COLLECTIVE_TABLE": "/nowhere",
    }
    config = Config.from_env(variables)
    assert tuning.parse_algorithms(config.algorithms) == {"all_reduce": "ring", "broadcast": "direct"}
    assert config.collective_table == "/nowhere"


@pytest.mark.parametrize(
    "text, message",
    [
        ("all_reduce", r"has 'all_reduce', which is not COLLECTIVE=ALGORITHM\. Collectives are barrier, broadcast"),
        ("allreduce=ring", r"has 'allreduce=ring', which is not COLLECTIVE=ALGORITHM"),
        ("all_reduce=rign", r"wants 'rign' for all_reduce, which it has not\. Use one of recursive_doubling"),
    ],
)
def test_algorithms_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Chooser(Config(algorithms=text))


def wrong(**changes: Any) -> bytes:
    document = {"format": tuning.FORMAT, "version": 1, "worlds": [{"ranks": 2, "rows": {}}], **changes}
    return json.dumps(document).encode()


def with_rows(*rows: tuple[int | None, str], collective: str = "all_reduce") -> bytes:
    given = [{"up_to": up_to, "algorithm": algorithm} for up_to, algorithm in rows]
    return wrong(worlds=[{"ranks": 2, "rows": {collective: given}}])


@pytest.mark.parametrize(
    "contents, reason",
    [
        (b"", "Input data was truncated"),
        (b"\xff\xfe", "malformed"),
        (b"[" * 100_000, "not a table of algorithms"),
        (b"{}", "its format is not 'rankmesh collective table'"),
        (wrong(version=2), "it has version 2, and this rankmesh reads version 1"),
        (wrong(worlds=[{"ranks": 0, "rows": {}}]), "Expected `int` >= 1"),
        (wrong(worlds=[{"rows": {}}]), "missing required field `ranks`"),
        (wrong(worlds=[{"ranks": 2, "rows": {}}] * 257), "length <= 256"),
        (wrong(speed=1), "unknown field `speed`"),
        (with_rows((None, "warp")), "all_reduce has no algorithm 'warp', but recursive_doubling"),
        (with_rows((None, "ring"), collective="sum"), "there is no collective 'sum'"),
        (with_rows(), "the rows of all_reduce do not ascend"),
        (with_rows((8, "ring")), "the rows of all_reduce do not ascend"),
        (with_rows((None, "ring"), (None, "ring")), "the rows of all_reduce do not ascend"),
        (with_rows((16, "ring"), (8, "ring"), (None, "ring")), "the rows of all_reduce do not ascend"),
        (b" " * (tuning.MAX_FILE_BYTES + 1), "it has more than 4194304 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_is_no_table_is_refused(contents: bytes, reason: str, tmp_path: Path) -> None:
    target = tmp_path / "table.json"
    target.write_bytes(contents)
    with pytest.raises(ConfigError) as caught:
        Chooser(Config(collective_table=str(target)))
    assert reason in str(caught.value)
    assert str(caught.value).startswith(f"{str(target)!r} is not a table of algorithms: ")


def test_a_file_that_is_not_there_is_refused_before_anybody_waits() -> None:
    with pytest.raises(ConfigError, match=r"'/nowhere/t\.json' cannot be read: No such file or directory\. Correct"):
        join("tcp://127.0.0.1:1", rank=1, size=2, collective_table="/nowhere/t.json")


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "table.json").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be written: Is a directory\. Name another file\."):
        write_table(str(tmp_path / "table.json"), TuningTable(worlds=[]))
    assert [entry.name for entry in tmp_path.iterdir()] == ["table.json"]


def call_name(mesh: Mesh) -> str:
    """The algorithm of an all_reduce, as its signature has it."""
    work = mesh.all_reduce(np.ones(4, np.float32), async_op=True)
    work.wait()
    return str(work.call.signature.algorithm)


def test_a_mesh_takes_what_its_settings_say(path: str) -> None:
    assert run_world(4, call_name, config=Config(collective_table=path)) == ["direct"] * 4
    assert run_world(2, call_name, config=Config(algorithms="all_reduce=ring")) == ["ring"] * 2


def differing(mesh: Mesh) -> tuple[str, dict[int, str]]:
    """Rank 0 has been given another table than the others."""
    named = "ring" if mesh.rank == 0 else "direct"
    mesh._agent.chooser = Chooser(Config(algorithms=f"all_reduce={named}"))
    with pytest.raises(DesyncError) as caught:
        mesh.all_reduce(np.ones(4, np.float32), timeout=scaled(20))
    return str(caught.value), dict(caught.value.calls)


def test_ranks_with_different_tables_are_told_so_and_compute_nothing() -> None:
    for text, calls in run_world(3, differing):
        assert "Ranks of this group are in different collectives" in text
        assert "sum, ring)" in calls[0]
        others = [said for rank, said in calls.items() if rank != 0]
        assert others
        assert all("sum, direct)" in said for said in others)

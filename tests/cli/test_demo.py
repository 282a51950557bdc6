"""The demo: it shows what it promises, and its exit code is 0 only if everything happened as it should."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from launching import usual_signals
from rankmesh.cli import demo
from rankmesh.cli.demo_program import ACTS
from rankmesh.cli.main import main
from timing import scaled

DEMO = [sys.executable, "-m", "rankmesh", "demo"]
DEADLINE = 50.0


def test_everything_is_shown() -> None:
    result = subprocess.run(DEMO, capture_output=True, text=True, timeout=scaled(DEADLINE), check=False)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout
    shown = [line.removeprefix("✓ ") for line in result.stdout.splitlines() if line.startswith("✓ ")]
    assert shown == [*(act.title for act in ACTS), "the launcher reports it"]
    assert "address chosen: 127.0.0.1 on lo: the rendezvous is on the loopback interface" in result.stdout
    assert re.search(r"^    DeadlineError: recv from rank 1 \(host \S+, pid \d+\), tag 7 did not", result.stdout, re.M)
    lost = r"^    PeerLost: rank 2 \(host \S+, pid (\d+)\) is lost: .*, during recv from it, tag 7\."
    (pid,) = re.findall(lost, result.stdout, re.M)
    assert f"rankmesh: rank 2 (pid {pid}) failed first: it was ended by SIGKILL" in result.stdout
    assert [int(rank) for rank in re.findall(r"rank (\d) knew [\d.]+ ms after the SIGKILL", result.stdout)] == [0, 1, 3]
    assert "Everything happened as it should" in result.stdout


def run_instead(
    program: str, ranks: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """Let the demo run another program; its exit code and what it shows."""
    script = folder / "program.py"
    script.write_text(program)
    monkeypatch.setattr(demo, "LAUNCH", ("run", "-n", str(ranks), str(script)))
    return main(["demo"]), capsys.readouterr().out


def test_a_rank_that_finds_something_wrong_fails_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = """
from rankmesh.cli import demo_program

def spoilt(stage):
    demo_program.check(stage.mesh.rank != 3, "rank 3 got something else")
    stage.mesh.barrier()
    return []

demo_program.ACTS = (demo_program.ACTS[0], demo_program.Act("spoilt", spoilt))
demo_program.main()
"""
    code, shown = run_instead(program, 4, tmp_path, monkeypatch, capsys)
    assert code == 1
    assert f"✓ {ACTS[0].title}" in shown
    assert f"✗ {ACTS[1].title}\n    It did not end as it should; see below." in shown
    assert re.search(r"^    \[3\] .*The demo went wrong: rank 3 got something else\.", shown, re.MULTILINE)
    assert "The demo failed" in shown


@pytest.mark.parametrize(
    "ending, reason",
    [("", "exit code of `rankmesh run`: 0"), ("raise SystemExit(3)", "exit code of `rankmesh run`: 3")],
)
def test_all_acts_without_the_killed_rank_are_not_enough(
    ending: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = f"""
import json
for number in range({len(ACTS)}):
    print(json.dumps({{"begin": number}}))
    print(json.dumps({{"done": number, "lines": []}}))
{ending}
"""
    code, shown = run_instead(program, 1, tmp_path, monkeypatch, capsys)
    assert code == 1
    assert shown.count("✓") == len(ACTS)
    assert "✗ what the ranks and the launcher wrote" in shown
    assert reason in shown


def test_a_terminal_sees_what_is_going_on() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    programme = demo.Programme(console)
    with programme:
        programme.on_event({"begin": 4})
        programme.on_event({"progress": "3 of 8"})
        programme.on_event({"done": 4, "lines": ["a long line of words " * 5]})
    assert isinstance(console.file, io.StringIO)
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", console.file.getvalue())
    assert f"{ACTS[4].title}: 3 of 8" in text
    wrapped = [line for line in text.splitlines() if "long line" in line]
    assert wrapped
    assert all(line.startswith("    ") and len(line) <= 60 for line in wrapped)


def test_ctrl_c_ends_the_ranks() -> None:
    """That none is left is seen by the leak check around every test."""
    with usual_signals(), subprocess.Popen(DEMO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("$ rankmesh run")
        assert process.stdout.readline().startswith("✓")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=scaled(DEADLINE))
    assert (process.returncode, err) == (130, ""), out
    assert "Everything happened" not in out

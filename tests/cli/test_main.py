"""The dispatcher: lazy, quick, and one line for every error."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import subprocess
import sys
from importlib.metadata import version
from types import ModuleType

import pytest

from rankmesh.cli.main import COMMANDS, main
from rankmesh.errors import DeadlineError
from timing import scaled


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A command `fake` whose `run` a test may replace."""
    module = ModuleType("fake_command")
    module.add_parser = lambda subparsers: subparsers.add_parser("fake").add_argument("word")  # type: ignore[attr-defined]
    module.run = lambda args: len(args.word)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_command", module)
    monkeypatch.setitem(COMMANDS, "fake", ("fake_command", "for this test"))
    return module


def python(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=scaled(30), check=False)


def test_the_commands_exit_code_is_ours(fake: ModuleType) -> None:
    assert main(["fake", "four"]) == 4


def test_help_lists_every_command_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name, (_, summary) in COMMANDS.items():
        assert name in text
        assert summary in text
    code = (
        "import sys; from rankmesh.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: print(*sys.modules)"
    )
    loaded = python("-c", code).stdout.split()
    assert "rankmesh.cli.main" in loaded
    assert not {"rich", "rankmesh.launch", "rankmesh.cli.run", "rankmesh.cli.doctor"} & set(loaded)


def test_without_arguments_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "commands:" in capsys.readouterr().out


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["nonsense"])
    assert caught.value.code == 2
    assert "nonsense" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_describes_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert f"usage: rankmesh {name}" in capsys.readouterr().out
    assert callable(importlib.import_module(COMMANDS[name][0]).run)


def test_an_error_of_ours_is_one_line(
    fake: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise DeadlineError("Rank 1 did not join within 5 s.")

    monkeypatch.setattr(fake, "run", fail)
    assert main(["fake", "x"]) == 2
    expected = "rankmesh: error: Rank 1 did not join within 5 s. " + DeadlineError.hint
    assert capsys.readouterr().err == expected + "\n"


def test_a_defect_shows_its_traceback(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "run", lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["fake", "x"])


def test_ctrl_c_gives_130(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(fake, "run", interrupt)
    assert main(["fake", "x"]) == 130


@pytest.mark.parametrize("words, level", [([], logging.WARNING), (["-v"], logging.INFO), (["-vvv"], logging.DEBUG)])
def test_verbosity(fake: ModuleType, monkeypatch: pytest.MonkeyPatch, words: list[str], level: int) -> None:
    seen: list[object] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **options: seen.append(options["level"]))
    main([*words, "fake", "x"])
    assert seen == [level]


def test_python_dash_m_and_version() -> None:
    result = python("-m", "rankmesh", "--version")
    assert (result.returncode, result.stdout) == (0, f"rankmesh {version('rankmesh')}\n")


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    code = "import sys; from rankmesh.cli.main import main; sys.exit(main(['doctor']))"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=scaled(30), check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")

"""The README tells the truth: its programs run, its commands work, it shows the output that comes, its links lead on.

A python block that begins with `# name.py` is a file for the commands that follow; any other is run as it stands. A
text block shows (lines of) the output of the block before it; numbers and the host's name may differ.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from timing import scaled

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

#: Commands that are looked at instead of run: the tests run inside `make test`, and must not need the network.
LOOKED_AT = ("make demo", "make test", "pip install .")


@dataclass
class Block:
    line: int
    language: str
    text: str
    #: Lines that the README says come of it.
    shows: list[str] = field(default_factory=list)

    @property
    def file(self) -> str | None:
        name = re.match(r"# (\w+\.py)\n", self.text)
        return name[1] if self.language == "python" and name else None

    def commands(self) -> list[str]:
        lines = (line.partition(" # ")[0].strip() for line in self.text.splitlines())
        return [line for line in lines if line]


def blocks(text: str) -> list[Block]:
    found: list[Block] = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if match[1] == "text":
            found[-1].shows += match[2].splitlines()
        else:
            found.append(Block(text.count("\n", 0, match.start()) + 1, match[1], match[2]))
    return found


BLOCKS = blocks(README)
COMMANDS = [
    pytest.param(command, block.shows, id=f"line {block.line}: {command[-40:]}")
    for block in BLOCKS
    if block.language == "sh"
    for command in block.commands()
    if command not in LOOKED_AT
]


def normalised(line: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "N", re.sub(r"host [\w.-]+", "host H", line)).strip()


def run(command: str | list[str], folder: Path, shows: list[str]) -> None:
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(
        command,
        shell=isinstance(command, str),
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=scaled(50),
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    output = set(map(normalised, result.stdout.splitlines()))
    missing = [line for line in map(normalised, shows) if line not in output]
    assert missing == [], f"the README shows what does not come; this does:\n{result.stdout}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the README's files in it, and the certificates that an earlier command of the README makes."""
    for block in BLOCKS:
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("command, shows", COMMANDS)
def test_command(command: str, shows: list[str], folder: Path) -> None:
    if command.startswith("torchrun"):
        pytest.importorskip("torch", reason="torch is not installed: pip install 'rankmesh[torch]'")
    if "RANKMESH_TLS_CA" in command:
        run("rankmesh certs certs --name node0", folder, [])
    run(command, folder, shows)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=f"line {block.line}")
        for block in BLOCKS
        if block.language == "python" and block.file is None
    ],
)
def test_program(block: Block, folder: Path) -> None:
    path = folder / "program.py"
    path.write_text(block.text, encoding="utf-8")
    run([sys.executable, str(path)], folder, block.shows)


@pytest.mark.parametrize("target", ["demo", "test", "bench"])
def test_make_knows_what_the_readme_names(target: str) -> None:
    assert f"make {target}" in README
    plan = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=scaled(30), check=False
    )
    assert plan.returncode == 0, plan.stderr


def test_every_block_is_looked_at() -> None:
    assert {block.language for block in BLOCKS} == {"python", "sh"}
    named = {block.file for block in BLOCKS if block.file is not None}
    used = {word for param in COMMANDS for word in str(param.values[0]).split() if word.endswith(".py")}
    assert named == used
    assert len(COMMANDS) >= 5


def test_a_wrong_output_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="what does not come"):
        run("echo 1 apple", tmp_path, ["1 pear"])
    run(f"echo 1 apple on host {socket.gethostname()}", tmp_path, ["2 apple on host elsewhere"])


@pytest.mark.parametrize("page", sorted(path.name for path in ROOT.glob("*.md")))
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)]+)\)", text)
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    headings = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    for target in targets:
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif "://" not in target:
            assert (ROOT / target.partition("#")[0]).exists(), target

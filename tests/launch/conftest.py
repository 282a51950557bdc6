"""Real launchers, as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import pytest

from launching import DEADLINE, Launch, Launched, Script, usual_signals
from timing import scaled


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Write a rank's program; `rank` and a few modules are there for it."""

    def write(body: str) -> str:
        path = tmp_path / "program.py"
        head = "import os, signal, subprocess, sys, time\nrank = int(os.environ['RANK'])\n"
        path.write_text(head + textwrap.dedent(body))
        return str(path)

    return write


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Start `rankmesh run` with these words."""
    running: list[Launched] = []

    def start(
        *words: str, env: Mapping[str, str | None] | None = None, stdout: int | IO[bytes] = subprocess.PIPE
    ) -> Launched:
        process = subprocess.Popen(
            [sys.executable, "-m", "rankmesh", "run", *words],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd=tmp_path,
            env={name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None},
        )
        running.append(Launched(process))
        return running[-1]

    with usual_signals():
        yield start
    for launched in running:
        if launched.process.poll() is None:  # the test failed
            launched.process.kill()
        for pipe in (launched.process.stdout, launched.process.stderr):
            if pipe is not None:
                pipe.close()
        launched.process.wait(scaled(DEADLINE))

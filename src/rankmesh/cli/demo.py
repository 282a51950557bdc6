"""`rankmesh demo`: four ranks on this machine show what works, and what happens when something does not.

The ranks are started by `rankmesh run` like any program; what they do is in demo_program. This process shows their
events as they come.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from tempfile import TemporaryFile
from time import monotonic
from typing import IO, Any, Final

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from rankmesh.cli.demo_program import ACTS, SIZE, VICTIM
from rankmesh.cli.main import Subparsers
from rankmesh.errors import InternalError

#: Seconds after which the launcher ends the ranks: ten times what it takes on a slow machine.
LIMIT: Final = 60
#: What the launcher answers when a rank was ended by SIGKILL, as one is in the last act.
EXPECTED: Final = 128 + signal.SIGKILL
#: Seconds the launcher has to end once it was told to.
END_TIMEOUT: Final = 15.0
LAUNCH: Final = ("run", "-n", str(SIZE), "--timeout", str(LIMIT), "-m", "rankmesh.cli.demo_program")
#: With what the launcher begins the lines of rank 0, which tells the events.
PREFIX: Final = "[0] "


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    return subparsers.add_parser(
        "demo",
        description=f"{SIZE} ranks on this machine show what works: messages, their speed, and how failures look. "
        "Takes a few seconds; the exit code is 0 only if everything happened as it should.",
    )


def run(args: argparse.Namespace) -> int:
    began = monotonic()
    programme = Programme(Console(highlight=False))
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        code = _watch([sys.executable, "-m", "rankmesh", *LAUNCH], programme, errors)
        errors.seek(0)
        report = errors.read().splitlines()
    fits = code == EXPECTED and any(f"rank {VICTIM} " in line and "SIGKILL" in line for line in report)
    programme.show("the launcher reports it" if fits else "what the ranks and the launcher wrote", report, ok=fits)
    if not (fits and programme.complete):
        programme.console.print(f"\nThe demo failed (exit code of `rankmesh run`: {code}). `rankmesh doctor` may help.")
        return 1
    programme.console.print(f"\nEverything happened as it should, in {monotonic() - began:.1f} s.")
    programme.console.print("Next: the quickstarts in README.md, `rankmesh bench p2p`, `rankmesh doctor`.")
    return 0


class Programme:
    """Shows acts as they begin and end: a spinner on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._status = console.status("")
        self._running: int | None = None
        self._shown = 0

    @property
    def complete(self) -> bool:
        return self._shown == len(ACTS)

    def __enter__(self) -> None:
        self._status.update(f"starting {SIZE} ranks")
        self._status.start()

    def __exit__(self, *_: object) -> None:
        self._status.stop()
        if not self.complete:  # the ranks may fail before rank 0 could say that it began the next act
            self.show(ACTS[self._shown].title, ["It did not end as it should; see below."], ok=False)

    def on_event(self, event: dict[str, Any]) -> None:
        match event:
            case {"begin": int(number)}:
                self._running = number
                self._status.update(escape(ACTS[number].title))
            case {"progress": str(text)} if self._running is not None:
                self._status.update(escape(f"{ACTS[self._running].title}: {text}"))
            case {"done": int(number), "lines": list(lines)}:
                self._running = None
                self._shown += 1
                self.show(ACTS[number].title, lines)
                self._status.update("the launcher ends what is left" if self.complete else "")
            case _:
                raise InternalError(f"The demo's ranks tell of {event!r}.")

    def show(self, title: str, lines: Sequence[str], *, ok: bool = True) -> None:
        self.console.print("[bold green]✓[/]" if ok else "[bold red]✗[/]", f"[bold]{escape(title)}[/]")
        for line in lines:
            if self.console.is_terminal:
                self.console.print(Padding(Text(line), (0, 0, 0, 4)))
            else:
                self.console.print(Text(f"    {line}"), soft_wrap=True)  # whole lines for whoever reads them


def _watch(command: Sequence[str], programme: Programme, errors: IO[str]) -> int:
    """Run the launcher and show events as they come; its standard error goes to `errors`. Returns its exit code."""
    programme.console.print(f"[dim]$ rankmesh {' '.join(LAUNCH)}[/]", soft_wrap=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8")
    assert process.stdout is not None
    with process.stdout, programme:
        try:
            for line in process.stdout:
                programme.on_event(json.loads(line.removeprefix(PREFIX)))
            return process.wait(END_TIMEOUT)
        except BaseException:  # Ctrl-C above all: no rank outlives the demo
            process.terminate()
            process.wait(END_TIMEOUT)
            raise

"""A launcher that a test started, read with deadlines."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from timing import scaled

#: Seconds (scaled) a launcher in these tests may take for what takes it well under one.
DEADLINE = 20.0
#: A rank that says so and then waits to be ended.
WAIT = "print('ready', os.getpid(), flush=True)\nwhile True: signal.pause()\n"


@dataclass
class Launched:
    """A running `rankmesh run`. What it wrote so far is in `out` and `err`."""

    process: subprocess.Popen[bytes]
    out: bytearray = field(default_factory=bytearray)
    err: bytearray = field(default_factory=bytearray)

    def wait_for(self, *texts: str) -> None:
        """Read until each text has appeared on standard output."""
        self._read(lambda: all(text.encode() in self.out for text in texts), f"{texts} on standard output")
        missing = [text for text in texts if text.encode() not in self.out]
        assert not missing, f"the launcher ended without {missing}; it wrote: {self.out!r} {self.err!r}"

    def finish(self) -> int:
        """Read to the end; return the exit code."""
        self._read(lambda: False, "the end of the launcher")
        return self.process.wait(scaled(DEADLINE))

    def lines(self, rank: int | None = None) -> list[str]:
        """The lines on standard output, or those of one rank without its prefix."""
        return self._lines(self.out, rank)

    def error_lines(self, rank: int | None = None) -> list[str]:
        """The same for standard error."""
        return self._lines(self.err, rank)

    @staticmethod
    def _lines(text: bytearray, rank: int | None) -> list[str]:
        lines = text.decode(errors="replace").splitlines()
        return lines if rank is None else [line[4:] for line in lines if line.startswith(f"[{rank}] ")]

    @property
    def errors(self) -> str:
        return self.err.decode(errors="replace")

    def _read(self, enough: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + scaled(DEADLINE)
        with selectors.DefaultSelector() as selector:
            for pipe, text in ((self.process.stdout, self.out), (self.process.stderr, self.err)):
                if pipe is not None and not pipe.closed:
                    selector.register(pipe, selectors.EVENT_READ, text)
            while not enough() and selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                assert ready, f"{what} did not come within {scaled(DEADLINE):g} s; so far: {self.out!r} {self.err!r}"
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 20)
                    key.data.extend(data)
                    if not data:
                        selector.unregister(key.fileobj)
                        assert not isinstance(key.fileobj, int)
                        key.fileobj.close()  # type: ignore[attr-defined]  # typeshed knows only its fileno


Launch = Callable[..., Launched]
Script = Callable[[str], str]


def is_gone(pid: int) -> bool:
    """There is no such process, or only the record of its exit."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


@contextmanager
def usual_signals() -> Iterator[None]:
    """Programs started meanwhile heed signals: pytest itself may run where some are ignored (nohup, a background job),
    which they would inherit."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGTERM)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

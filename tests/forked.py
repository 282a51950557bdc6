"""For what two processes share: a forked child that runs beside the test, on the same memory and descriptors, and what
there is in /dev/shm."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Self

from timing import wait_until

#: Seconds (scaled) a child has to end.
PATIENCE = 20.0


def shm_names() -> list[str]:
    """The names in /dev/shm, but for those of MPICH, which may be measured beside the tests."""
    return sorted(name for name in os.listdir("/dev/shm") if not name.startswith("mpich"))


class Child:
    """`with Child(body):` runs `body()` in a forked child. Leaving the block waits for its end, and fails with its
    traceback if it raised."""

    def __init__(self, body: Callable[[], object]) -> None:
        self._report = tempfile.TemporaryFile()  # noqa: SIM115  # closed by __exit__
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                body()
                code = 0
            except BaseException:  # noqa: BLE001  # reported to the parent, and the child must end here
                os.write(self._report.fileno(), traceback.format_exc().encode())
            finally:
                sys.stdout.flush()
                os._exit(code)
        #: The test has it killed.
        self.killed = False
        self._status: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._report:
            try:
                if kind is None:
                    wait_until(self._ended, PATIENCE, "the end of the child")
            finally:
                if not self._ended():
                    os.kill(self.pid, 9)
                    self._status = os.waitpid(self.pid, 0)[1]
                self._report.seek(0)
                report = self._report.read().decode()
            assert kind is not None or self._status == (9 if self.killed else 0), (
                f"the child ended with status {self._status}:\n{report}"
            )

    def _ended(self) -> bool:
        if self._status is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self._status = status
        return self._status is not None

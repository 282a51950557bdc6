"""A process that ends what is left of the ranks if the launcher is killed.

The kernel ends a rank with the launcher (see stem_main), but not the rank's own children: data loaders, compilers,
shells. So the launcher starts this process first, and tells it by a pipe which process groups exist: a line `+<pgid>`
when a rank starts, `-<pgid>` when its group is gone. The pipe closes with the launcher, however that ends; then every
group still listed is killed.

Here is the launcher's side; guard_main is the process.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Self

from rankmesh.launch import guard_main

#: Without site-packages, which the guard does not need: twice as fast. And without this folder on the path.
BARE_PYTHON = (sys.executable, "-P", "-S")
#: Seconds the guard has to end once its pipe is closed.
END_TIMEOUT = 5.0


class Guard:
    """The launcher's side: a context manager; `add` and `remove` process groups."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [*BARE_PYTHON, guard_main.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",  # it keeps no file system busy
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def add(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
        except BrokenPipeError:
            # The ranks themselves are still tied to the launcher by the kernel: no reason to end a healthy run.
            logging.getLogger("rankmesh").warning(
                "The guard (pid %d) was killed: if the launcher is killed too, children of the ranks may stay behind.",
                self._process.pid,
            )

"""Where the processes of a world meet outside the library that is measured.

What is one-sided has no second side that could say "done": the owner of the memory learns here that the others have
finished, blocked in a `recv` that neither computes nor holds the interpreter's lock.
"""

from __future__ import annotations

import json
import socket
import time
from typing import IO, Any

from measures.base import Rank, Reply
from subjects.base import OPEN_TIMEOUT


class Meeting:
    """A star of Unix sockets with rank 0 in the middle. Their name is abstract, so no file is left behind."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        name = f"\0rankmesh-bench-{port}"
        self._rank = rank
        #: By rank: everybody else for rank 0, and rank 0 for everybody else.
        self._lines: dict[int, IO[str]] = {}
        if rank > 0:
            self._lines[0] = _connect(name).makefile("rw", encoding="utf-8")
            self._say(0, rank)
            return
        with socket.socket(socket.AF_UNIX) as listener:
            listener.settimeout(OPEN_TIMEOUT)
            listener.bind(name)
            listener.listen(size)
            for _ in range(size - 1):
                line = listener.accept()[0].makefile("rw", encoding="utf-8")
                self._lines[int(line.readline())] = line

    def exchange(self, said: Any) -> list[Any]:
        """Wait for everybody; what each rank said, in order of rank."""
        if self._rank > 0:
            self._say(0, said)
            everything: list[Any] = self._heard(0)
            return everything
        everything = [said, *(self._heard(rank) for rank in sorted(self._lines))]
        for rank in self._lines:
            self._say(rank, everything)
        return everything

    def close(self) -> None:
        for line in self._lines.values():
            line.close()

    def _say(self, rank: int, what: Any) -> None:
        self._lines[rank].write(json.dumps(what) + "\n")
        self._lines[rank].flush()

    def _heard(self, rank: int) -> Any:
        line = self._lines[rank].readline()
        if not line:
            raise ConnectionResetError(f"Rank {rank} has left.")
        return json.loads(line)


def _connect(name: str) -> socket.socket:
    give_up = time.monotonic() + OPEN_TIMEOUT
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(name)
        except ConnectionRefusedError:
            sock.close()
            if time.monotonic() > give_up:
                raise
            time.sleep(0.01)
        else:
            return sock


class MeetingRank(Rank):
    """One whose ranks also meet here, while the library is open."""

    def open(self, port: int) -> Reply:
        answer = super().open(port)
        self.meeting = Meeting(self.rank, self.size, port)
        return answer

    def close(self) -> Reply:
        self.meeting.close()
        return super().close()

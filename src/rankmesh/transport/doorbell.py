"""Readiness for what the kernel does not see: a descriptor that polls readable when it is told to."""

from __future__ import annotations

import os


class Doorbell:
    """A descriptor that polls readable while `set(True)` was the last call. Callers serialise the calls."""

    __slots__ = ("_fd", "_ringing")

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ringing = False

    def fileno(self) -> int:
        """-1 once it is closed, like a socket's."""
        return self._fd

    def set(self, ringing: bool) -> None:
        if ringing == self._ringing or self._fd < 0:
            return
        self._ringing = ringing
        if ringing:
            os.eventfd_write(self._fd, 1)
        else:
            os.eventfd_read(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

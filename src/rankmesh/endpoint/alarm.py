"""An alarm clock for one thread: others set it, put it off or stop it without waking who sleeps by it (timerfd).

A lock that is waited for with a timeout cannot do that: who waits has to be woken in order to sleep for longer. The
interpreter has these calls from Python 3.13 on; they are the C library's here. The GIL is kept around them (`PyDLL`):
they take less than giving it back and getting it again.
"""

from __future__ import annotations

import ctypes
import os
import time
from functools import lru_cache
from typing import Final

#: What is read when the alarm goes off: how many times it did.
_COUNT_BYTES: Final = 8
_NANOSECONDS: Final = 1_000_000_000


class _Time(ctypes.Structure):
    """struct itimerspec: how often from then on (0: once), and how long from now (0: never)."""

    _fields_ = (("every", ctypes.c_long * 2), ("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_library: Final = ctypes.PyDLL(None, use_errno=True)
_create: Final = _library.timerfd_create
_settime: Final = _library.timerfd_settime
_settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Time), ctypes.c_void_p)
_NEVER: Final = _Time((0, 0), 0, 0)
_AT_ONCE: Final = _Time((0, 0), 0, 1)


@lru_cache(maxsize=16)
def _from_now(seconds: float) -> _Time:
    """Few times are used again and again."""
    return _Time((0, 0), *divmod(max(int(seconds * _NANOSECONDS), 1), _NANOSECONDS))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


class Alarm:
    """Everything but `wait` is for any thread, and never waits."""

    def __init__(self) -> None:
        self.fd = _checked(_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC))

    def set(self, seconds: float) -> None:
        """It goes off so long from now, and not when it was to before."""
        self._set(_from_now(seconds))

    def ring(self) -> None:
        """It goes off now."""
        self._set(_AT_ONCE)

    def stop(self) -> None:
        """It does not go off. If it just did, and nobody has noticed yet, nobody will."""
        self._set(_NEVER)

    def _set(self, when: _Time) -> None:
        _checked(_settime(self.fd, 0, when, None))

    def wait(self) -> None:
        """Sleep until it goes off."""
        os.read(self.fd, _COUNT_BYTES)

    def close(self) -> None:
        os.close(self.fd)

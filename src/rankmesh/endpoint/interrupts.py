"""Ctrl-C where it does no harm.

Python runs a signal's handler between any two instructions of the main thread, and what it raises ends whatever was
going on there: a read whose bytes have come and are not accounted for yet, or a lock that was just taken. So while
there is an engine, SIGINT has a handler here, unless the program has one of its own:

1. In the program's code, and where a thread sleeps (`sleeps`), KeyboardInterrupt is raised at once, as ever.
2. Inside rankmesh, and what that calls, it is put off: until the lock of an engine is given back, when it is raised
   like what a callback of the program's raises, and at the latest until the signal, which a thread sends again every
   few milliseconds, meets the program's code or a sleep.

When the last engine is closed, Python's own handler is back.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from time import sleep
from types import CodeType, FrameType
from typing import Any, Final

import msgspec
import numpy as np

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
#: Parts of rankmesh that run the program, or are one.
_PROGRAMS: Final = tuple(os.path.join(_PACKAGE, part) for part in ("cli", "launch", "testing", "torch"))
#: What rankmesh calls that is written in Python.
_LIBRARIES: Final = tuple(
    os.path.join(os.path.dirname(os.path.abspath(str(library.__file__))), "") for library in (os, np, msgspec)
)
#: Seconds until the signal is sent again.
_LATER: Final = 0.002

_sleeps: set[CodeType] = set()
#: What open engines run without their lock, by identity.
_deferred: dict[int, deque[Callable[[], None]]] = {}
_counting = threading.Lock()
#: It is to be raised as soon as that may be.
_put_off = False
#: The process whose thread sends it again. (A forked child has no such thread.)
_sender = 0


def sleeps(function: Any) -> Any:
    """Marks a function that sleeps, and may be interrupted at any of its instructions."""
    _sleeps.add(function.__code__)
    return function


def guard(deferred: deque[Callable[[], None]]) -> None:
    """An engine is open, which runs these without its lock."""
    with _counting:
        _deferred[id(deferred)] = deferred
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler and _in_main_thread():
            signal.signal(signal.SIGINT, _interrupt)


def unguard(deferred: deque[Callable[[], None]]) -> None:
    """It is closed."""
    with _counting:
        _deferred.pop(id(deferred), None)
        if not _deferred and signal.getsignal(signal.SIGINT) is _interrupt and _in_main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _put_off, _sender  # noqa: PLW0603
    _put_off = not _may_raise(frame)
    if not _put_off:
        signal.default_int_handler(number, frame)
    if _sender != os.getpid():
        _sender = os.getpid()
        _thread.start_new_thread(_send, ())  # threading takes locks, which what was interrupted may hold


def _may_raise(frame: FrameType | None) -> bool:
    """Whether a thread is in the program's code there, or asleep: by the nearest code that is no library's."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE):
            return frame.f_code in _sleeps or path.startswith(_PROGRAMS)
        if not path.startswith(_LIBRARIES):
            return True
        frame = frame.f_back
    return True


def _raise_now() -> None:
    """A callback: whoever runs it holds no lock."""
    global _put_off  # noqa: PLW0603
    if _put_off and _in_main_thread():
        _put_off = False
        raise KeyboardInterrupt


def _send() -> None:
    """Send it until it is raised."""
    global _put_off, _sender  # noqa: PLW0603
    main = threading.main_thread()
    while main.is_alive():
        sleep(_LATER)
        if _put_off:
            if signal.getsignal(signal.SIGINT) is not _interrupt:  # the last engine was closed: once more, and for good
                _put_off = False
            with _counting:
                for deferred in _deferred.values():
                    deferred.append(_raise_now)
            signal.pthread_kill(main.ident or 0, signal.SIGINT)
            continue
        _sender = 0
        if not _put_off:  # else it was put off again just now, by one who has seen that there was a sender
            return
        _sender = os.getpid()

"""Ports for listeners that are opened later, by another process.

A port that the kernel gave, and got back, it may give to any connection of this host the next moment. So one is drawn
from those that it gives to nobody.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from typing import Final

#: Below it are those of well-known services.
_LOWEST: Final = 10_000
_FEWEST: Final = 1_000
_ATTEMPTS: Final = 100
_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago, and is nobody's but of whoever asks for it by number."""
    for _ in range(_ATTEMPTS):
        with suppress(OSError):  # it is taken
            return _bound(_draw())
    return _bound(0)


def _bound(port: int) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        return int(probe.getsockname()[1])


def _draw() -> int:
    """A number below the kernel's; 0 (one of the kernel's) where there are too few of them."""
    try:
        end = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
    return SystemRandom().randrange(_LOWEST, end) if end >= _LOWEST + _FEWEST else 0

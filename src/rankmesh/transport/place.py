"""Where this process is, as far as it matters for sharing memory: the running kernel, the network name space, the user.

Two processes in the same place can meet at a Unix socket of the abstract name space, which belongs to a network name
space, and pass each other memory. Containers usually differ in the second, so they keep to the network.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, Self


class Place(NamedTuple):
    boot: str
    network: str
    user: str

    @classmethod
    def here(cls) -> Self:
        """Raises OSError where the system does not tell."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.stat("/proc/self/ns/net")
        return cls(boot, f"{space.st_dev:x}.{space.st_ino:x}", str(os.geteuid()))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """What `str()` made; None for anything else."""
        parts = text.split("/")
        return cls(*parts) if len(parts) == len(cls._fields) else None

    def __str__(self) -> str:
        return "/".join(self)

    def difference(self, other: Place) -> str:
        """Why memory cannot be shared with a process there; empty if it can."""
        if self.boot != other.boot:
            return "another host"
        if self.network != other.network:
            return "another network namespace, such as another container's"
        if self.user != other.user:
            return f"another user (uid {other.user} there, {self.user} here)"
        return ""

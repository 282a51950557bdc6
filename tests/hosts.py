"""Two hosts on one machine: network namespaces joined by a veth pair, made with `ip netns` and always removed.

Each host has lo, one end of the pair, and a dummy: an interface that is up, has addresses of its own, is listed before
the pair's end, and leads nowhere. Names are random, so that runs beside each other do not meet.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any, Self

import pytest

from timing import scaled, wait_until

PROGRAM = Path(__file__).with_name("host_program.py")
PATIENCE = 40.0

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="network namespaces need root and the `ip` command (Debian: iproute2)",
)


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=scaled(PATIENCE), check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


class Host:
    """One namespace."""

    def __init__(self, number: int, run: str) -> None:
        self.name = f"rankmesh-{run}-{number}"
        self.link = f"rmv{run}{number}"
        self.dummy = f"rmd{run}{number}"
        self.ipv4, self.ipv6 = f"10.77.0.{number + 1}", f"fd77::{number + 1}"
        #: What must never be advertised.
        self.unreachable = (f"10.88.{number}.1", f"fd88:{number + 1}::1")

    def configure(self) -> None:
        self.ip("link", "set", "lo", "up")
        # First, so that whoever takes the first address of the list takes the wrong one. A pair whose ends are both
        # here leads nowhere, as an interface of type dummy would; but that one is not in every kernel.
        self.ip("link", "add", self.dummy, "type", "veth", "peer", "name", f"{self.dummy}x")
        self.ip("link", "set", f"{self.dummy}x", "up")
        self.ip("addr", "add", f"{self.unreachable[0]}/24", "dev", self.dummy)
        self.ip("addr", "add", f"{self.unreachable[1]}/64", "dev", self.dummy, "nodad")
        self.ip("link", "set", self.dummy, "up")

    def plug_in(self) -> None:
        self.ip("addr", "add", f"{self.ipv4}/24", "dev", self.link)
        self.ip("addr", "add", f"{self.ipv6}/64", "dev", self.link, "nodad")
        self.ip("link", "set", self.link, "up")

    def is_up(self) -> bool:
        """The kernel has noticed the carrier of both interfaces: it takes its time after `link set up`."""
        return all("state UP" in self.ip("link", "show", "dev", name) for name in (self.link, self.dummy))

    def ip(self, *words: str) -> str:
        return ip("-n", self.name, *words)

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """A Python program on this host."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )


class TwoHosts:
    """`with TwoHosts() as (a, b)`"""

    def __init__(self) -> None:
        run = secrets.token_hex(2)
        self.hosts = Host(0, run), Host(1, run)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        first, second = self.hosts
        with ExitStack() as stack:
            for host in self.hosts:
                ip("netns", "add", host.name)
                stack.callback(ip, "netns", "delete", host.name)  # its interfaces go with it
                host.configure()
            first.ip("link", "add", first.link, "type", "veth", "peer", "name", second.link, "netns", second.name)
            for host in self.hosts:
                host.plug_in()
            wait_until(lambda: all(host.is_up() for host in self.hosts), PATIENCE, "interfaces that are up")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def join(self, worlds: list[dict[str, Any]], token: str) -> list[list[Any]]:
        """Rank 0 on one host and rank 1 on the other join these worlds one after the other; what each of them says."""
        environment = {"RANKMESH_TOKEN": token} if token else {}
        programs = [
            host.start(str(PROGRAM), str(rank), json.dumps([world["ranks"][rank] for world in worlds]), **environment)
            for rank, host in enumerate(self.hosts)
        ]
        return [[json.loads(line) for line in out.splitlines()] for out in finish(*programs)]


def finish(*programs: subprocess.Popen[str]) -> list[str]:
    """What each wrote; all must have ended well. None is left behind."""
    deadline = monotonic() + scaled(PATIENCE)
    said = []
    for program in programs:
        try:
            said.append(program.communicate(timeout=max(0.0, deadline - monotonic())))
        except subprocess.TimeoutExpired:
            program.kill()
            said.append(program.communicate())
    report = "\n".join(
        f"{program.args!r} ended with {program.returncode}:\n{out}\n{err}"
        for program, (out, err) in zip(programs, said, strict=True)
    )
    assert not any(program.returncode for program in programs), report
    return [out for out, _ in said]

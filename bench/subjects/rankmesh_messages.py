"""rankmesh by the calls a user writes: `rm.join("tcp://…")`, `mesh.send` and `mesh.recv`.

Ranks of one host find shared memory by themselves, so that is what default settings measure; `Config(shm=False)` is
TCP. After each measure the mesh is asked what it used for every peer it talked to: a row never shows another transport
than its title says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

import rankmesh as rm

from subjects.base import HOST, OPEN_TIMEOUT, Bytes, Messenger, Verb

TAG = 7
#: Older versions of rankmesh have TCP only, and no setting to choose.
HAS_SHM = any(field.name == "shm" for field in fields(rm.Config))


class WrongTransport(Exception):
    """The library did not use what the row is about."""


def join(rank: int, size: int, port: int, **settings: Any) -> rm.Mesh:
    return rm.join(f"tcp://{HOST}:{port}", rank=rank, size=size, timeout=OPEN_TIMEOUT, **settings)


def rankmesh_version() -> str:
    try:
        return f"rankmesh {version('rankmesh')}"
    except PackageNotFoundError:  # run from the source tree by PYTHONPATH
        return "rankmesh (source tree)"


def transport_of(mesh: rm.Mesh, peer: int) -> str:
    """What the mesh says of the conversation with `peer`: the transport, and why. None: there was none yet."""
    return str(mesh.peers[peer].transport) if HAS_SHM else "tcp"


def check_transport(mesh: rm.Mesh, peer: int, expected: str) -> None:
    said = transport_of(mesh, peer)
    if re.match(r"\w*", said)[0] != expected:  # type: ignore[index]  # \w* always matches
        raise WrongTransport(f"rank {mesh.rank} talked to rank {peer} over {said}, not over {expected}")


class Rankmesh(Messenger):
    """What the two rows share."""

    expected: str
    settings: Mapping[str, Any]

    def open(self, rank: int, size: int, port: int) -> None:
        if self.expected == "shm" and not HAS_SHM:
            raise WrongTransport("this version of rankmesh has no shared memory (no Config.shm)")
        self.peers: set[int] = set()
        with ExitStack() as stack:
            self.mesh = stack.enter_context(join(rank, size, port, **self.settings))
            self.mesh.barrier()
            self.held = stack.pop_all()

    def close(self) -> None:
        self.held.close()

    def version(self) -> str:
        neighbour = (self.mesh.rank + 1) % self.mesh.size
        return f"{rankmesh_version()} over {transport_of(self.mesh, neighbour)}"

    def check(self) -> None:
        for peer in self.peers:
            check_transport(self.mesh, peer, self.expected)

    def sender(self, peer: int) -> Verb:
        self.peers.add(peer)
        return partial(self.mesh.send, to=peer, tag=TAG)

    def receiver(self, peer: int) -> Verb:
        self.peers.add(peer)
        return partial(self.mesh.recv, source=peer, tag=TAG)


class RankmeshTcp(Rankmesh):
    expected = "tcp"
    settings: Mapping[str, Any] = MappingProxyType({"shm": False} if HAS_SHM else {})


class RankmeshShm(Rankmesh):
    """Default settings: nobody asked for shared memory."""

    expected = "shm"
    settings: Mapping[str, Any] = MappingProxyType({})


class RankmeshArena(RankmeshShm):
    """Large messages lie in arrays the mesh has allocated, at both ends."""

    def allocate(self, nbytes: int) -> Bytes:
        array: Bytes = self.mesh.empty((nbytes,), dtype="uint8")
        array.fill(1)
        return array

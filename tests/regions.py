"""Two connected endpoints, one of which offers memory: what the tests of one-sided access use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from peers import SOON, Medium
from rankmesh import Config, Endpoint, Peer, Region, Work

GiveUp = Callable[[Work[Any]], None]
#: Things to do with a handle.
Uses = tuple[Callable[[], object], ...]


@dataclass
class Sides:
    """An owner, who uses it, and each as the other sees it."""

    owner: Endpoint
    user: Endpoint
    peer: Peer
    back: Peer

    def register(self, buffer: Any, name: str = "kv", **options: Any) -> Region:
        return self.owner.memory.register(name, buffer, **options)


@contextmanager
def open_sides(medium: Medium, **settings: Any) -> Iterator[Sides]:
    config: Config = medium.config.override(**settings)
    with (
        Endpoint(medium.address, name="owner", config=config) as owner,
        Endpoint(medium.address, name="user", config=config) as user,
    ):
        peer = user.connect(owner.address, timeout=SOON)
        yield Sides(owner, user, peer, owner.accept(timeout=SOON))

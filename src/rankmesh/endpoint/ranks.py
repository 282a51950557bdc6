"""Ranks: who the members of a mesh or a group are, by number. The one place where ranks become peers: for messages, for
calls, and for memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rankmesh.endpoint.router import Router
from rankmesh.errors import ClosedError, UsageError


class Ranks:
    """See the module's text. `kind` is what its mesh or group is called in messages."""

    def __init__(self, kind: str, routers: Sequence[Router]) -> None:
        self._kind = kind
        self._closed = ""
        self.routers = routers
        #: A router's index → its rank.
        self.numbers = {router.index: at for at, router in enumerate(routers)}
        #: Ranks that can be reached: none once the group is closed.
        self.reach = len(routers)

    def router(self, rank: int) -> Router:
        """Raises UsageError where there is no such rank, ClosedError where the group is closed."""
        if not 0 <= rank < self.reach:
            raise self.refusal(rank)
        return self.routers[rank]

    def refusal(self, rank: int) -> UsageError | ClosedError:
        if not self.reach:
            return ClosedError(self._closed)
        size = len(self.routers)
        return UsageError(
            f"There is no rank {rank} in a {self._kind} of {size}: ranks are 0 … {size - 1}. Correct the rank."
        )

    def everybody(self) -> range:
        """All ranks. Raises ClosedError."""
        self.check_open()
        return range(self.reach)

    def name(self, router: Router) -> Any:
        """How users know the one behind a router: by its rank, or as a Peer if it has none here."""
        return self.numbers.get(router.index, router.peer)

    def check_open(self) -> None:
        if not self.reach:
            raise ClosedError(self._closed)

    def close(self, reason: str) -> None:
        """No rank can be reached any more; `reason` is what callers are told."""
        self._closed = reason
        self.reach = 0

"""Mesh: a world of ranks over one Endpoint, and `join()`, which makes it. The composition root."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from time import monotonic
from typing import Any, Final, Self

import numpy as np
from numpy.typing import DTypeLike

from rankmesh.collectives import Chooser, CollectiveAgent
from rankmesh.config import Config
from rankmesh.endpoint.endpoint import leave
from rankmesh.endpoint.peer import Peer as BasePeer
from rankmesh.endpoint.router import PeerRouter
from rankmesh.errors import ConfigError, JoinError
from rankmesh.group import WORLD, Group, group_numbers
from rankmesh.membership.environment import detect
from rankmesh.membership.rendezvous import Meeting, Member, host_store, meet, open_endpoint, read_file
from rankmesh.membership.store import StoreServer
from rankmesh.node import Endpoint, Peer
from rankmesh.wire.messages import Control, Lost, plain

logger = logging.getLogger("rankmesh")

#: A tag of our own: the end of join().
_JOINED: Final = -2


def join(
    url: str | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    timeout: float | None = None,
    config: Config | None = None,
    **overrides: Any,
) -> Mesh:
    """Enter a world of ranks; return when all of them are there.

    Without arguments the launcher's environment counts: `rankmesh run`, torchrun, mpiexec, srun, a Kubernetes
    indexed job. With `url`, `rank` and `size`, rank 0 hosts the store at `url`, and the others find it there.
    `config` defaults to `Config.from_env()`; further keyword arguments override its fields. One without a token takes
    the launcher's. Raises JoinError, which names who is missing or in the way.
    """
    config = (config or Config.from_env()).override(**overrides)
    if rank is None and not config.token:
        config = config.override(token=os.environ.get("RANKMESH_TOKEN", ""))
    chooser = Chooser(config)  # a setting that cannot work is refused before others wait for this rank
    meeting = _meeting(url, rank, size, config)
    deadline = monotonic() + (config.timeout if timeout is None else timeout)
    server: StoreServer | None = None
    if meeting.hosts:
        server, meeting, config = host_store(meeting, config)
    elif meeting.file is not None:
        meeting, config = read_file(meeting, config, deadline)
    endpoint: Endpoint | None = None
    try:
        endpoint = open_endpoint(meeting, config, Endpoint)
        mesh = Mesh(endpoint, meeting.rank, meet(endpoint, meeting, deadline), chooser, server)
        mesh.gather_at_hub(deadline)
    except BaseException:
        if endpoint is not None:
            endpoint.abort()
        if server is not None:
            server.close()
        raise
    finally:
        if meeting.hosts and meeting.file is not None:
            meeting.file.unlink(missing_ok=True)
    logger.info("Joined as rank %d of %d at %s.", mesh.rank, mesh.size, endpoint.address)
    return mesh


def _meeting(url: str | None, rank: int | None, size: int | None, config: Config) -> Meeting:
    if (rank is None) != (size is None):
        raise ConfigError(
            "join() needs rank= and size= together, or neither. Pass both, or let the launcher's environment tell."
        )
    if rank is not None and size is not None:
        if url is None and size > 1:
            raise ConfigError(
                "join(rank=…, size=…) needs an address too, the same for all ranks: join('tcp://10.0.0.1:7000', "
                "rank=0, size=2)."
            )
        return Meeting.at(url or f"inproc://solo-{os.urandom(8).hex()}", rank, size)
    placement = detect(os.environ, parent_pid=os.getppid())
    if placement is None:
        raise JoinError(
            "No launcher told this process its rank. Start it with `rankmesh run -n 4 script.py`, torchrun, "
            "mpiexec or srun, "
            "or pass an address, rank= and size= to join()."
        )
    logger.info("%s says: rank %d of %d.", placement.source, placement.rank, placement.size)
    if url is not None:
        return Meeting.at(url, placement.rank, placement.size, placement.run_id)
    return Meeting.by_launcher(placement, "tls" if config.tls is not None else "tcp")


class Mesh(Group):
    """A world of ranks: messages between any two of them, collectives of all. `join()` makes it; use it as a context
    manager.

    All methods may be used from many threads. Every call that can wait takes `timeout` in seconds (None:
    Config.timeout).
    """

    _kind = "world"

    def __init__(
        self,
        endpoint: Endpoint,
        rank: int,
        members: Sequence[Member],
        chooser: Chooser,
        server: StoreServer | None = None,
    ) -> None:
        self.epoch = 0
        self._server = server
        hub = endpoint.hub
        with hub.engine:
            added = [endpoint.add_member(member.identity(), oneself=member.rank == rank) for member in members]
            peers = [peer for peer in added if isinstance(peer, Peer)]
            numbers = group_numbers(rank, len(members))
            places = {peer.router.index: member.place for peer, member in zip(peers, members, strict=True)}
            self._form(endpoint, CollectiveAgent(endpoint, chooser, places), WORLD, rank, peers, numbers)
            hub.on_lost = self._on_lost
            hub.on_control = self._on_control

    def gather_at_hub(self, deadline: float) -> None:
        """Every rank says hello to rank 0 and hears back: all have the table, and each keeps a connection over which
        it learns of losses."""
        timeout = max(deadline - monotonic(), 0.1)
        others = range(1, self.size) if self.rank == 0 else (0,)
        for rank in others:
            router = self._routers[rank]
            assert isinstance(router, PeerRouter)
            router.pinned = True
        if self.rank == 0:
            for rank in others:
                self._messages.await_signal("join of", self.peers[rank], self._routers[rank].index, _JOINED, timeout)
            for rank in others:
                self._messages.signal(self._routers[rank], _JOINED, timeout)
        else:
            self._messages.signal(self._routers[0], _JOINED, timeout)
            self._messages.await_signal("join of", self.peers[0], self._routers[0].index, _JOINED, timeout)

    @property
    def address(self) -> str:
        """Where the other ranks reach this one."""
        return self._endpoint.address

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = float) -> np.ndarray[Any, Any]:
        """An array that ranks on this host can map: sent, it crosses with a single copy. Otherwise it is like
        numpy.empty's, except that a forked child shares it instead of having a copy."""
        return self._hub.empty(shape, dtype)

    # ------------------------------------------------------------------ losses: whoever learns first tells the rest

    def _on_lost(self, router: PeerRouter, left: bool) -> None:
        if router.index not in self._ranks.numbers or self._hub.closed:
            return
        logger.log(logging.INFO if left else logging.WARNING, "%s is lost: %s.", router.peer, router.gone)
        if not left:
            self._agent.member_lost(router)
        if not left and router.peer.uid is not None:
            news = Lost(router.peer.uid, plain(router.gone))
            for other in self._routers:
                if isinstance(other, PeerRouter) and other.link is not None:
                    other.outbound.message(news)

    def _on_control(self, peer: BasePeer, message: Control) -> None:
        if isinstance(message, Lost) and peer in self.peers:
            lost = self._endpoint.member(message.uid)
            if lost is not None and isinstance(lost.router, PeerRouter):
                lost.router.lose(message.reason)

    # ------------------------------------------------------------------ the end

    def close(self, timeout: float | None = None) -> None:
        """Let what was sent leave, say goodbye to the others, and free everything."""
        try:
            self._endpoint.close(timeout)
        finally:
            if self._server is not None:
                self._server.close()

    def abort(self, reason: str = "") -> None:
        """Drop everything at once: the others see this rank as lost, and why."""
        self._endpoint.abort(reason)
        if self._server is not None:
            self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        leave(self, kind, error)

    def __repr__(self) -> str:
        lost = sum(bool(peer.router.gone) for peer in self.peers)
        state = self._hub.closed or (f"{lost} lost" if lost else "all well")
        return f"<Mesh rank {self.rank} of {self.size}, epoch {self.epoch}: {state}>"

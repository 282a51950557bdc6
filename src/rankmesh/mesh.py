"""Mesh: a world of ranks over one Endpoint, and `join()`, which makes it. The composition root."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from time import monotonic
from typing import Any, Final, Self

import numpy as np
from numpy.typing import DTypeLike

from rankmesh.buffers import writable
from rankmesh.config import Config
from rankmesh.endpoint import ANY_SOURCE, ANY_TAG, Status, Work
from rankmesh.endpoint.endpoint import leave
from rankmesh.endpoint.messages import MAX_TAG, Messages, bad_tag, new_status
from rankmesh.endpoint.peer import Peer as BasePeer
from rankmesh.endpoint.router import PeerRouter, Router
from rankmesh.errors import ConfigError, JoinError, PeerLost, UsageError
from rankmesh.membership.environment import detect
from rankmesh.membership.rendezvous import Meeting, Member, host_store, meet, open_endpoint, read_file
from rankmesh.membership.store import StoreServer
from rankmesh.memory import MemoryAgent
from rankmesh.node import Endpoint, Peer
from rankmesh.rpc import RpcAgent
from rankmesh.wire.messages import Control, Lost, plain

logger = logging.getLogger("rankmesh")

#: The world's tag space; 0 belongs to endpoints without ranks.
_WORLD: Final = 1
#: Tags of our own: the end of join(), and one per round of a barrier.
_JOINED: Final = -2
_BARRIER: Final = -16


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
    `config` defaults to `Config.from_env()`; further keyword arguments override its fields. Raises JoinError, which
    names who is missing or in the way.
    """
    config = (config or Config.from_env()).override(**overrides)
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
        mesh = Mesh(endpoint, meeting.rank, meet(endpoint, meeting, deadline), server)
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


class _AnyRank:
    """Any source, in the message of an error."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def known(self, now: float) -> str:
        lost = [str(peer) for peer in self._mesh.peers if peer.router.gone]
        return f"Lost are: {', '.join(lost)}." if lost else "No rank is lost; none has sent a fitting message."

    def __str__(self) -> str:
        return "any rank"


class Mesh:
    """A world of ranks: messages between any two of them. `join()` makes it; use it as a context manager.

    All methods may be used from many threads. Every call that can wait takes `timeout` in seconds (None:
    Config.timeout).
    """

    def __init__(
        self, endpoint: Endpoint, rank: int, members: Sequence[Member], server: StoreServer | None = None
    ) -> None:
        self.rank = rank
        self.size = len(members)
        self.epoch = 0
        self._endpoint = endpoint
        self._server = server
        #: The first rank that was lost (not one that left): there can be no barrier any more.
        self._broken: PeerRouter | None = None
        self._hub = hub = endpoint.hub
        self._ranks: dict[int, int] = {}
        self._messages = Messages(hub, _WORLD, self._ranks, _AnyRank(self))
        with hub.engine:
            added = [endpoint.add_member(member.identity(), oneself=member.rank == rank) for member in members]
            self.peers = [peer for peer in added if isinstance(peer, Peer)]
            self._routers: list[Router] = [peer.router for peer in self.peers]
            self._ranks.update((router.index, at) for at, router in enumerate(self._routers))
            if self.size > 1:
                hub.members[_WORLD] = {router.index for router in self._routers if isinstance(router, PeerRouter)}
            endpoint.number_ranks(self._routers)
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

    @property
    def rpc(self) -> RpcAgent:
        """Functions that other ranks may call, and calls of theirs."""
        return self._endpoint.rpc

    @property
    def memory(self) -> MemoryAgent:
        """Memory that other ranks may read and write, and theirs."""
        return self._endpoint.memory

    # ------------------------------------------------------------------ messages

    def send(self, data: Any, to: int, tag: int = 0, timeout: float | None = None) -> None:
        """Send a buffer (numpy array, bytes, memoryview …) from where it lies. On return it may be reused."""
        if not (0 <= to < self.size and 0 <= tag <= MAX_TAG):
            self._router(to)
            raise bad_tag(tag)
        self._routers[to].outbound.send_buffer(_WORLD, tag, data, timeout)

    def recv(self, out: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, timeout: float | None = None) -> Status:
        """Receive into a buffer. Raises TruncationError if it is too small, PeerLost if `source` is gone."""
        if not (0 <= source < self.size and 0 <= tag <= MAX_TAG):
            peer, _ = self._source(source)
            return self._messages.recv(peer, None if peer is None else peer.router, out, tag, timeout)
        router = self._routers[source]  # what Messages.recv does, with a call less
        view = writable(out)
        direct = router.inbound.direct
        if direct is not None and direct.receive(_WORLD, tag, view):
            return new_status(Status, (source, tag, len(view)))
        return self._messages.await_message(self.peers[source], router.index, view, tag, timeout)

    def isend(self, data: Any, to: int, tag: int = 0, timeout: float | None = None) -> Work[None]:
        """Like `send`, without waiting. The buffer belongs to the Work until it is done."""
        return self._messages.isend(self._router(to), data, tag, timeout)

    def irecv(
        self, out: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, timeout: float | None = None
    ) -> Work[Status]:
        """Like `recv`, without waiting."""
        peer, index = self._source(source)
        return self._messages.irecv(peer, index, out, tag, timeout)

    def send_object(self, obj: Any, to: int, tag: int = 0, timeout: float | None = None) -> None:
        """Send an object by the codec: msgpack, arrays out of band, no pickle unless Config allows it."""
        self._messages.send_object(self._router(to), obj, tag, timeout)

    def recv_object(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, timeout: float | None = None) -> Any:
        """Receive an object of any size."""
        peer, index = self._source(source)
        return self._messages.recv_object(peer, index, tag, timeout)

    def sendrecv(
        self,
        data: Any,
        out: Any,
        to: int,
        source: int | None = None,
        tag: int = 0,
        recv_tag: int | None = None,
        timeout: float | None = None,
    ) -> Status:
        """Send to one rank and receive from another (None: the same) at once; a ring of these does not deadlock."""
        peer, index = self._source(to if source is None else source)
        return self._messages.sendrecv(
            self._router(to), peer, index, data, out, tag, tag if recv_tag is None else recv_tag, timeout
        )

    def probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, timeout: float | None = None) -> Status:
        """Wait until a message could be received, and tell its source, tag and size."""
        peer, index = self._source(source)
        return self._messages.probe(peer, index, tag, timeout)

    def iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Status | None:
        """Like `probe`, without waiting: None when there is no message now."""
        return self._messages.iprobe(self._source(source)[1], tag)

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every rank has called it: by dissemination, in ceil(log2(size)) rounds. If a rank is lost, it
        fails on all others."""
        for router in self._routers:
            if router.gone:
                raise router.lost_error("barrier with", None)
        distance, tag = 1, _BARRIER
        while distance < self.size:
            ahead, behind = self._routers[(self.rank + distance) % self.size], (self.rank - distance) % self.size
            try:
                self._messages.signal(ahead, tag, timeout)
            except PeerLost:
                raise ahead.lost_error("barrier with", None) from None
            peer, index = self.peers[behind], self._routers[behind].index
            signal = self._messages.expect_signal("barrier with", peer, index, tag, timeout)
            if self._broken is not None:  # looked at once the receive is posted: later losses end it
                signal.cancel()
                raise self._broken.lost_error("barrier with", None)
            signal.result()
            distance, tag = 2 * distance, tag - 1

    def _router(self, rank: int) -> Router:
        if not 0 <= rank < self.size:
            raise _bad_rank(rank, self.size)
        return self._routers[rank]

    def _source(self, rank: int) -> tuple[Peer | None, int]:
        if rank == ANY_SOURCE:
            return None, ANY_SOURCE
        if not 0 <= rank < self.size:
            raise _bad_rank(rank, self.size)
        return self.peers[rank], self._routers[rank].index

    # ------------------------------------------------------------------ losses: whoever learns first tells the rest

    def _on_lost(self, router: PeerRouter, left: bool) -> None:
        if router.index not in self._ranks or self._hub.closed:
            return
        logger.log(logging.INFO if left else logging.WARNING, "%s is lost: %s.", router.peer, router.gone)
        if not left:
            self._broken = self._broken or router
            self._end_barriers(router)
        if not left and router.peer.uid is not None:
            news = Lost(router.peer.uid, plain(router.gone))
            for other in self._routers:
                if isinstance(other, PeerRouter) and other.link is not None:
                    other.outbound.message(news)

    def _end_barriers(self, lost: PeerRouter) -> None:
        """A barrier needs every rank: those who wait in it for another one, which cannot come either, need not wait."""
        for receive in self._hub.matcher.posted(group=_WORLD):
            if receive.match_tag <= _BARRIER:
                self._hub.matcher.unpost(receive)
                receive.fail(lost.lost_error(receive.op, receive.tag))

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


def _bad_rank(rank: int, size: int) -> UsageError:
    return UsageError(f"There is no rank {rank} in a world of {size}: ranks are 0 … {size - 1}. Correct the rank.")

"""Endpoint: a process's place in the network, without ranks. It owns the engine, the listener and the peers."""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike

from rankmesh.config import Config
from rankmesh.endpoint.connector import Connector
from rankmesh.endpoint.hub import Agent, Hub, Service
from rankmesh.endpoint.matching import ANY_SOURCE, ANY_TAG
from rankmesh.endpoint.messages import Messages
from rankmesh.endpoint.peer import Peer
from rankmesh.endpoint.refusals import CLOSED, CLOSING
from rankmesh.endpoint.requests import Reply
from rankmesh.endpoint.router import PeerRouter
from rankmesh.endpoint.transfers import Status
from rankmesh.endpoint.waiting import Until
from rankmesh.endpoint.work import Work
from rankmesh.errors import ConfigError, DeadlineError
from rankmesh.transport.address import Address
from rankmesh.wire.messages import Identity

logger = logging.getLogger("rankmesh")

#: Longest name: it is part of every handshake.
NAME_LIMIT = 256
#: The tag space of messages between endpoints without ranks.
_GROUP = 0


class _Anyone:
    """Any source, in the message of an error."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def known(self, now: float) -> str:
        return f"Connected are: {', '.join(map(str, self._endpoint.peers)) or 'none'}."

    def __str__(self) -> str:
        return "any source"


class Endpoint:
    """Listens on an address, connects to other endpoints, and exchanges messages with each of them.

    All methods may be used from many threads. After `fork()` the child's copy raises ClosedError.
    """

    def __init__(
        self,
        address: str | None = "tcp://127.0.0.1:0",
        *,
        name: str | None = None,
        config: Config | None = None,
        advertise: str | None = None,
        rank: int | None = None,
        run: str = "",
        services: Mapping[int, Service] | None = None,
        rail: bool = False,
        **overrides: Any,
    ) -> None:
        """`address` None: this endpoint only connects. `advertise` is the address given to others where it is not
        `address`. `rank`, `run`, `services` and `rail` are for meshes and the layers above. Other keyword arguments
        override fields of `config`."""
        self.config = (config or Config()).override(**overrides)
        self.uid = os.urandom(16)
        self.host = socket.gethostname()
        self.name = name or f"{self.host}:{os.getpid()}"
        if len(self.name) > NAME_LIMIT or not self.name.isprintable():
            raise ConfigError(
                f"An endpoint's name is printable and has at most {NAME_LIMIT} characters. Choose another."
            )
        if self.config.allow_pickle and not (self.config.token or self.config.tls) and not _in_process(address):
            raise ConfigError(
                "allow_pickle lets peers run code here, so they must prove who they are. "
                "Set a token (token=, RANKMESH_TOKEN) or use TLS, or leave allow_pickle off."
            )
        self._rank = rank
        self._run = run
        self._rail = rail
        self.hub = Hub(self.name, self.config)
        self.hub.services.update(services or {})
        self._peers: dict[bytes, Peer] = {}
        self._members: dict[bytes, Peer] = {}
        self._sources: dict[int, Any] = {}
        self.messages = Messages(self.hub, _GROUP, self._sources, _Anyone(self))
        #: Those that connected and were not accepted yet, in order.
        self._arrived: dict[Peer, None] = {}
        #: Peers that are gone, but of which messages are still to be received.
        self._remembered: set[Peer] = set()
        self._accepts: deque[Work[Peer]] = deque()
        self._connector = Connector(self.hub, self._identity, self._known, self._bind, self.objection)
        self.hub.want_link = self._want_link
        self.hub.dial_trouble = self._connector.trouble
        self.hub.departed = self._departed
        self._addresses: tuple[str, ...] = ()
        self._serve()
        try:
            if address is not None:
                self._addresses = (self._listen(Address.parse(address), advertise),)
        except BaseException:
            self.hub.engine.stop()
            raise
        self.hub.engine.start()
        with self.hub.engine:
            self.hub.start_heartbeat()

    def _serve(self) -> None:
        """What is put on top of endpoints attaches here what must be there for the first request."""

    def _listen(self, address: Address, advertise: str | None) -> str:
        if address.is_wildcard and advertise is None:
            raise ConfigError(
                f"{address} is every address of this host and none that others can connect to. Pass "
                "advertise='tcp://host:port' too, or listen on one address."
            )
        with self.hub.engine:
            listening = self._connector.listen(address)
        if advertise is None:
            return str(listening)
        public = Address.parse(advertise)
        return str(public if public.port else Address(public.scheme, public.host, listening.port))

    # ------------------------------------------------------------------ who is who

    @property
    def address(self) -> str:
        """The address others connect to; empty if this endpoint does not listen."""
        return self._addresses[0] if self._addresses else ""

    @property
    def peers(self) -> list[Peer]:
        """The peers that are connected."""
        return [peer for peer in list(self._peers.values()) if peer.connected and not peer.rail]

    def info(self) -> dict[str, Any]:
        """What another endpoint needs to connect: give it to its `connect()`."""
        return {
            "uid": self.uid.hex(),
            "name": self.name,
            "host": self.host,
            "pid": os.getpid(),
            "addresses": list(self._addresses),
            "place": self._connector.shared_place,
        }

    def objection(self, identity: Identity) -> str:
        """Why a peer that proved itself is not wanted all the same. Meshes refuse strangers here."""
        if identity.uid == self.uid:
            return "an endpoint cannot connect to itself"
        if identity.run and self._run and identity.run != self._run:
            return f"it belongs to another run ({identity.run or 'none'} instead of {self._run or 'none'})"
        member = self._members.get(identity.uid)
        if self._members and identity.rank != (member.rank if member is not None else None):
            return f"it claims to be rank {identity.rank}, which it is not in this world"
        if self.hub.closed:  # after what is wrong with it in any case: the connector makes exceptions from this one
            return CLOSING
        if member is not None and member.router.gone:
            return f"it was given up: {member.router.gone}"
        return ""

    def _identity(self) -> Identity:
        config = self.config
        return Identity(
            uid=self.uid,
            name=self.name,
            host=self.host,
            pid=os.getpid(),
            addresses=self._addresses,
            rank=self._rank,
            run=self._run,
            eager_bytes=config.eager_bytes,
            lane_credit=config.lane_credit_bytes,
            peer_credit=config.peer_credit_bytes,
            max_message=config.max_message_bytes,
            max_rpc=config.max_rpc_bytes,
            allow_pickle=config.allow_pickle,
            place=self._connector.place,
            no_shm=self._connector.no_shm,
            rail=self._rail,
        )

    def add_member(self, identity: Identity, *, oneself: bool) -> Peer:
        """A mesh makes its ranks known. One that was quicker may be connected already. With the engine's lock."""
        known = self._peers.get(identity.uid)
        if known is not None:
            self._members[identity.uid] = known
            return known
        addresses = tuple(map(Address.parse, identity.addresses))
        peer = self._make_peer(identity=identity, loopback=oneself, addresses=addresses)
        self._peers[identity.uid] = peer
        self._members[identity.uid] = peer
        self._sources[peer.router.index] = peer
        return peer

    def member(self, uid: bytes) -> Peer | None:
        return self._members.get(uid)

    def _known(self, uid: bytes) -> PeerRouter | None:
        peer = self._peers.get(uid)
        return peer.router if peer is not None and isinstance(peer.router, PeerRouter) else None

    def _bind(self, identity: Identity, dialed: PeerRouter | None) -> PeerRouter:
        """The router that a new connection belongs to."""
        peer = self._peers.get(identity.uid)
        if peer is None or peer.router.gone:
            peer = dialed.peer if dialed is not None else self._new_peer()
            self._peers[identity.uid] = peer
            if dialed is None and identity.rank is None and not (identity.rail or self.hub.closed):
                self._arrive(peer)
        elif dialed is not None and dialed.peer is not peer:
            self._forget(dialed)
        peer.identified(identity)
        assert isinstance(peer.router, PeerRouter)
        return peer.router

    def _new_peer(self, addresses: tuple[Address, ...] = ()) -> Peer:
        peer = self._make_peer(addresses=addresses)
        self._sources[peer.router.index] = peer
        return peer

    def oneself(self) -> Peer:
        """A peer that is this endpoint. With the engine's lock."""
        peer = self._make_peer(identity=self._identity(), loopback=True)
        self._sources[peer.router.index] = peer
        return peer

    def _make_peer(self, **about: Any) -> Peer:
        """What is put on top of endpoints has peers of its own kind."""
        return Peer(self.hub, self.messages, **about)

    def _forget(self, router: PeerRouter) -> None:
        """A peer made for connect() turned out to be one that is known already."""
        self.hub.routers.pop(router.index, None)
        self._sources.pop(router.index, None)

    def _arrive(self, peer: Peer) -> None:
        while self._accepts:
            work = self._accepts.popleft()
            if not work.finished:
                work.finish(peer)
                return
        self._arrived[peer] = None

    def _departed(self, router: PeerRouter) -> None:
        """A peer is gone. Ranks stay known as lost; others are forgotten once all they sent has been received."""
        peer = router.peer
        if peer.uid in self._members:
            return
        if peer.uid is not None and self._peers.get(peer.uid) is peer:
            del self._peers[peer.uid]
        self._remembered.add(peer)
        waited_for = {message.source for message in self.hub.matcher.unexpected()}
        for gone in [gone for gone in self._remembered if gone.router.index not in waited_for]:
            self._remembered.remove(gone)
            self._arrived.pop(gone, None)
            self.hub.routers.pop(gone.router.index, None)
            self._sources.pop(gone.router.index, None)

    def _want_link(self, router: PeerRouter) -> None:
        self._connector.dial(router, list(router.peer.addresses), monotonic() + self.config.timeout)

    # ------------------------------------------------------------------ connecting

    def connect(self, target: str | dict[str, Any], timeout: float | None = None) -> Peer:
        """Connect to an address, or to what another endpoint's `info()` returned; wait until it is there."""
        texts = [target] if isinstance(target, str) else target.get("addresses", [])
        addresses = tuple(map(Address.parse, texts))
        if not addresses:
            raise ConfigError(
                f"{target!r} has no address to connect to. Give an address, or the info() of an endpoint that listens."
            )
        for address in addresses:
            if address.is_wildcard:
                raise ConfigError(
                    f"{address} is an address to listen on, not to connect to. Use one of that host's addresses."
                )
        timeout = self.config.timeout if timeout is None else timeout
        if any(not address.is_loopback for address in addresses) and not self.config.token:
            raise ConfigError(
                f"Connecting to {texts[0]}, off this machine, needs a cluster token. Set RANKMESH_TOKEN or "
                "Config(token=…) on both sides."
            )
        with self.hub.engine:
            self.hub.check_open()
            peer = self._new_peer(addresses)
            work: Work[Peer] = Work(self.hub.engine, "connect to", peer, None, timeout)
            assert isinstance(peer.router, PeerRouter)
            self._connector.dial(peer.router, list(addresses), monotonic() + timeout, work)
        try:
            return work.result()
        except BaseException:
            with self.hub.engine:
                self._connector.forget(peer.router)
                self._forget(peer.router)
            raise

    def accept(self, timeout: float | None = None) -> Peer:
        """Wait for an endpoint that connects to this one and was not yet accepted."""
        with self.hub.engine:
            self.hub.check_open()
            if self._arrived:
                peer = next(iter(self._arrived))
                del self._arrived[peer]
                return peer
            timeout = self.config.timeout if timeout is None else timeout
            work: Work[Peer] = Work(self.hub.engine, "accept", None, None, timeout)
            self._accepts.append(work)
        try:
            return work.result()
        finally:
            with self.hub.engine:
                if work in self._accepts:  # it timed out
                    self._accepts.remove(work)

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = float) -> np.ndarray[Any, Any]:
        """An array that peers on this host can map: sent, it crosses with a single copy. Otherwise it is like
        numpy.empty's, except that a forked child shares it instead of having a copy."""
        return self.hub.empty(shape, dtype)

    # ------------------------------------------------------------------ services

    def attach(self, service: int, handler: Service, prompt: Service, agent: Agent) -> None:
        """Serve requests to `service` (those that come alone by `prompt`), and let `agent` know of peers that end. With
        the engine's lock."""
        self.hub.check_open()
        self.hub.services[service] = handler
        self.hub.prompt_services[service] = prompt
        self.hub.agents.append(agent)

    def request(self, peer: Peer, service: int, body: bytes, op: str, timeout: float | None = None) -> Reply:
        """Ask a peer's service and wait for the reply."""
        with self.hub.engine:
            self.hub.check_open()
            assert isinstance(peer.router, PeerRouter)
            parts = [memoryview(body)]
            request = peer.router.request(
                service, parts, len(body), op, self.config.timeout if timeout is None else timeout
            )
        return request.result()

    # ------------------------------------------------------------------ messages from anyone

    def recv(self, out: Any, tag: int = ANY_TAG, timeout: float | None = None) -> Status:
        """Receive into a buffer from whichever peer sends first; `status.source` is that Peer."""
        return self.messages.recv(None, None, out, tag, timeout)

    def irecv(self, out: Any, tag: int = ANY_TAG, timeout: float | None = None) -> Work[Status]:
        """Like `recv`, without waiting."""
        return self.messages.irecv(None, ANY_SOURCE, out, tag, timeout)

    def probe(self, tag: int = ANY_TAG, timeout: float | None = None) -> Status:
        """Wait until a message from anyone could be received; `status.source` is the Peer to receive it from."""
        return self.messages.probe(None, ANY_SOURCE, tag, timeout)

    def iprobe(self, tag: int = ANY_TAG) -> Status | None:
        """Like `probe`, without waiting: None when there is no message now."""
        return self.messages.iprobe(ANY_SOURCE, tag)

    def recv_object(self, tag: int = ANY_TAG, timeout: float | None = None) -> Any:
        """Receive an object from whichever peer sends first."""
        return self.messages.recv_object(None, ANY_SOURCE, tag, timeout)

    # ------------------------------------------------------------------ the end

    def close(self, timeout: float | None = None) -> None:
        """Let what was sent leave, say goodbye, and free everything. Raises DeadlineError if sends remained; all is
        freed then too."""
        engine = self.hub.engine
        deadline = monotonic() + (self.config.close_timeout if timeout is None else timeout)
        with engine:
            if self.hub.closed:
                return
            self.hub.closed = f"Endpoint {self.name!r} is closed."
            for agent in self.hub.agents:
                agent.closing()
            for work in self.hub.abandon():  # what has not come will not come any more
                work.fail(self.hub.closed_error(work.op, work.tag))
            for router in self._conversations():
                router.say_closing()
            engine.drive(Until(self._all_is_said), deadline)
            unsent = [str(router.peer) for router in self._conversations() if not router.all_is_said]
            for router in self._conversations():
                router.say_goodbye(CLOSED)
            engine.drive(Until(lambda: all(router.link is None for router in self._conversations())), deadline)
            self._free()
        self._stop()
        if unsent:
            raise DeadlineError(
                f"Endpoint {self.name!r} was closed before everything was sent to {', '.join(unsent)}.",
                op="close",
                peer=", ".join(unsent),
            )

    def _conversations(self) -> list[PeerRouter]:
        return [router for router in self.hub.routers.values() if isinstance(router, PeerRouter)]

    def _all_is_said(self) -> bool:
        """Nothing is unsent, and no connection is about to be made: where the other side has it already, it would take
        its end for a loss."""
        if any(admission.handshake.remote_uid is not None for admission in self._connector.dialing):
            return False
        return all(router.all_is_said for router in self._conversations())

    def abort(self, reason: str = "") -> None:
        """Drop everything at once: peers see a lost connection, and hear `reason` if they can be told right away."""
        with self.hub.engine:
            if self.hub.closed:
                return
            self.hub.closed = f"Endpoint {self.name!r} was aborted."
            for agent in self.hub.agents:
                agent.closing()
            for router in list(self.hub.routers.values()):  # one that cannot be told is lost, and forgotten
                if reason and isinstance(router, PeerRouter):
                    router.say_failed(reason)
            self._free()
        self._stop()

    def _stop(self) -> None:
        for agent in self.hub.agents:
            agent.closed()
        self.hub.engine.stop()
        self.hub.arena.close()

    def _free(self) -> None:
        connecting = self._connector.close()
        for router in self._conversations():
            router.free(self.hub.closed_error)
        for work in (*connecting, *self.hub.abandon(), *self._accepts):
            work.fail(self.hub.closed_error(work.op, work.tag))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        leave(self, kind, error)

    def __repr__(self) -> str:
        if self.hub.closed:
            return f"<Endpoint {self.name!r}: closed>"
        return f"<Endpoint {self.name!r} at {self.address or 'no address'}: {len(self.peers)} peers>"


def leave(owner: Any, kind: type[BaseException] | None, error: BaseException | None) -> None:
    """How a `with` block ends: in order, also by sys.exit(0); otherwise at once, and the peers hear why."""
    if kind is None or (isinstance(error, SystemExit) and not error.code):
        owner.close()
    else:
        said = f": {error}" if str(error) else ""
        owner.abort(f"it raised {kind.__name__}{said}".removesuffix("."))  # the reason stands within sentences


def _in_process(address: str | None) -> bool:
    return address is not None and address.startswith("inproc://")

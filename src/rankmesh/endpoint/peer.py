"""Peer: the other side of a conversation, as a user sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from rankmesh.endpoint.loopback import Loopback
from rankmesh.endpoint.matching import ANY_TAG
from rankmesh.endpoint.messages import MAX_TAG, Messages, bad_tag
from rankmesh.endpoint.router import PeerRouter, Router
from rankmesh.endpoint.shortcut import Carrier
from rankmesh.endpoint.transfers import Status
from rankmesh.endpoint.work import Work
from rankmesh.errors import ConfigError
from rankmesh.transport.address import Address
from rankmesh.wire.messages import Identity

if TYPE_CHECKING:
    from rankmesh.endpoint.hub import Hub

#: The tag of `Peer.barrier`, out of the users' range.
_BARRIER: Final = -2


class Peer:
    """Another endpoint: messages to and from it, without ranks. `Endpoint.connect()` and `Endpoint.accept()` make
    them."""

    def __init__(
        self,
        hub: Hub,
        messages: Messages,
        *,
        addresses: tuple[Address, ...] = (),
        identity: Identity | None = None,
        loopback: bool = False,
    ) -> None:
        index = hub.new_index()
        self.addresses = addresses
        self._messages = messages
        self._hub = hub
        self.identity = identity
        self.router: Router = Loopback(hub, self, index) if loopback else PeerRouter(hub, self, index)
        hub.routers[index] = self.router

    # ------------------------------------------------------------------ who it is

    @property
    def uid(self) -> bytes | None:
        return self.identity.uid if self.identity is not None else None

    @property
    def name(self) -> str:
        return self.identity.name if self.identity is not None else ""

    @property
    def rank(self) -> int | None:
        """Its rank in the world of this endpoint's mesh, if it has one."""
        return self.identity.rank if self.identity is not None else None

    @property
    def host(self) -> str:
        return self.identity.host if self.identity is not None else ""

    @property
    def pid(self) -> int | None:
        return self.identity.pid if self.identity is not None else None

    @property
    def rail(self) -> bool:
        """It is a further connection of another peer's process."""
        return self.identity is not None and self.identity.rail

    @property
    def may_unpickle(self) -> bool:
        """Whether it accepts pickled objects, as far as is known: it says so when it connects."""
        return self.identity is None or not self.connected or self.identity.allow_pickle

    @property
    def connected(self) -> bool:
        return not self.router.gone and getattr(self.router, "link", None) is not None

    @property
    def transport(self) -> Carrier | None:
        """What carries the conversation, and why; None before the first connection."""
        return self.router.carrier

    def stats(self) -> dict[str, Any]:
        """What carries the conversation and why, and counters since the beginning: frames (messages, requests,
        replies) and their bytes. A process does not count what it sends to itself."""
        carrier = self.router.carrier or Carrier("", "not connected yet")
        known = {"peer": str(self), "transport": carrier.transport, "reason": carrier.reason}
        if not isinstance(self.router, PeerRouter):
            return known
        with self.router.engine:
            return known | self.router.counters()

    def identified(self, identity: Identity) -> None:
        """It has proved who it is."""
        self.identity = identity
        self.addresses = tuple(self._usable(identity.addresses)) or self.addresses

    def _usable(self, texts: Iterable[str]) -> Iterator[Address]:
        """What it says of itself is not what we would connect to in any case: not to what is no address here, to a
        wildcard, or off this host without a token."""
        for text in texts:
            try:
                address = Address.parse(text)
            except ConfigError:  # of a scheme that this side does not have, or rubbish
                continue
            if not address.is_wildcard and (self._hub.config.token or address.is_loopback):
                yield address

    def attributes(self) -> dict[str, Any]:
        """What an error about it carries."""
        identity = self.identity
        if identity is None:
            return {"peer": str(self)}
        return {"peer": str(self), "rank": identity.rank, "host": identity.host, "pid": identity.pid}

    def known(self, now: float) -> str:
        return self.router.known(now)

    def __str__(self) -> str:
        identity = self.identity
        if identity is None:
            return f"the endpoint at {', '.join(map(str, self.addresses))}"
        who = f"rank {identity.rank}" if identity.rank is not None else f"peer {identity.name!r}"
        return f"{who} (host {identity.host}, pid {identity.pid})"

    def __repr__(self) -> str:
        state = f"lost: {self.router.gone}" if self.router.gone else "connected" if self.connected else "not connected"
        return f"<Peer {self}: {state}>"

    # ------------------------------------------------------------------ messages

    def send(self, data: Any, tag: int = 0, timeout: float | None = None) -> None:
        """Send a buffer from where it lies. On return it may be reused."""
        if not 0 <= tag <= MAX_TAG:
            raise bad_tag(tag)
        self.router.outbound.send_buffer(self._messages.group, tag, data, timeout)

    def recv(self, out: Any, tag: int = ANY_TAG, timeout: float | None = None) -> Status:
        """Receive into a buffer."""
        return self._messages.recv(self, self.router, out, tag, timeout)

    def isend(self, data: Any, tag: int = 0, timeout: float | None = None) -> Work[None]:
        """Like `send`, without waiting. The buffer belongs to the Work until it is done."""
        return self._messages.isend(self.router, data, tag, timeout)

    def irecv(self, out: Any, tag: int = ANY_TAG, timeout: float | None = None) -> Work[Status]:
        """Like `recv`, without waiting."""
        return self._messages.irecv(self, self.router.index, out, tag, timeout)

    def send_object(self, obj: Any, tag: int = 0, timeout: float | None = None) -> None:
        """Send an object by the codec: msgpack, arrays out of band."""
        self._messages.send_object(self.router, obj, tag, timeout)

    def recv_object(self, tag: int = ANY_TAG, timeout: float | None = None) -> Any:
        return self._messages.recv_object(self, self.router.index, tag, timeout)

    def sendrecv(
        self, data: Any, out: Any, tag: int = 0, recv_tag: int | None = None, timeout: float | None = None
    ) -> Status:
        """Send and receive at once: both sides may call it without a deadlock. `data` and `out` must not overlap."""
        recv_tag = tag if recv_tag is None else recv_tag
        return self._messages.sendrecv(self.router, self, self.router.index, data, out, tag, recv_tag, timeout)

    def probe(self, tag: int = ANY_TAG, timeout: float | None = None) -> Status:
        """Wait until a message could be received, and tell its tag and size."""
        return self._messages.probe(self, self.router.index, tag, timeout)

    def iprobe(self, tag: int = ANY_TAG) -> Status | None:
        """Like `probe`, without waiting: None when there is no message now."""
        return self._messages.iprobe(self.router.index, tag)

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until the peer has called it too."""
        self._messages.signal(self.router, _BARRIER, timeout)
        self._messages.await_signal("barrier with", self, self.router.index, _BARRIER, timeout)

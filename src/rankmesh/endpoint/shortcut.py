"""From the network to shared memory: whether an endpoint takes part, and why a connection is carried by what it is.

Every endpoint that listens on the network also listens on shm://, under a random name. Its handshake offers that name
to whoever is in the same place; who connects and understands the offer leaves that connection for one over shared
memory, and comes back, with the reason, if that fails. Authentication is the same handshake, over whichever connection.
"""

from __future__ import annotations

from typing import NamedTuple

from rankmesh.config import Config
from rankmesh.transport.address import Address
from rankmesh.transport.base import Link, Listener
from rankmesh.transport.place import Place
from rankmesh.transport.registry import transport_for
from rankmesh.wire.messages import Identity, plain

#: Carried by the network, and worth a shortcut where both sides are in one place.
NETWORKED = frozenset({"tcp", "tls"})


class Carrier(NamedTuple):
    """What carries the conversation with a peer, and why."""

    transport: str
    reason: str

    def __str__(self) -> str:
        return f"{self.transport} ({self.reason})"


class Shortcut:
    """An endpoint's own part. `place` is empty, and `trouble` says why, where it does not take part."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._listener: Listener | None = None
        self.place = ""
        self.trouble = ""
        if not config.shm:
            self.trouble = "switched off by Config.shm"
            return
        try:
            self.place = str(Place.here())
        except OSError as error:
            self.trouble = f"the system does not tell where this process is ({error.strerror or error})"

    @property
    def name(self) -> bytes:
        """What the handshake offers; empty: nothing."""
        return b"" if self._listener is None else bytes.fromhex(self._listener.address.host)

    def listen(self, beside: Address) -> Listener | None:
        """Listen on shared memory too, beside the first address of a network."""
        if not self.place or self._listener is not None or beside.scheme not in NETWORKED:
            return None
        if beside.scheme == "tls" and not self._config.token:
            self._off("tls:// without a token: shared memory could not tell who may connect")
            return None
        try:
            self._listener = transport_for(_ANY).listen(_ANY, self._config)
        except OSError as error:
            self._off(f"no shared memory to be had ({error.strerror or error})")
        return self._listener

    def _off(self, trouble: str) -> None:
        self.place, self.trouble = "", trouble

    def connect(self, name: bytes) -> Link:
        """Raises OSError."""
        address = Address("shm", name.hex())
        return transport_for(address).connect(address, self._config)


def carrier(link: Link, mine: Identity, theirs: Identity) -> Carrier:
    """What carries a conversation, and why it is not shared memory if it is not."""
    scheme = link.remote.partition("://")[0]
    if scheme not in NETWORKED:
        return Carrier(scheme, "same host" if scheme == "shm" else "as addressed")
    here, there = Place.parse(mine.place), Place.parse(theirs.place)
    if here is None:
        reason = f"no shared memory here: {mine.no_shm}"
    elif there is None:
        reason = f"no shared memory there: {theirs.no_shm or 'it does not say why'}"
    else:
        reason = here.difference(there) or mine.no_shm or theirs.no_shm or "it does not listen on shared memory"
    return Carrier(scheme, plain(reason))


_ANY = Address("shm", "")

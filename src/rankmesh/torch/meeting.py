"""A world of ranks by way of torch's store: what `rankmesh.join` does by way of its own.

The store that `init_process_group` was given (TCPStore, FileStore, HashStore; under prefixes) is where each rank leaves
its address. Everything after that is between the ranks: the store may go.

A store may outlive a process group: torchrun's agent keeps one for all that a worker does. So ranks count how often
they came to this place, and meet those who came as often. Who fails to meet takes its attempt back.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from time import monotonic
from typing import Any, Final
from uuid import uuid4

from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from rankmesh.collectives import Chooser
from rankmesh.config import Config
from rankmesh.errors import JoinError
from rankmesh.membership.environment import is_loopback
from rankmesh.membership.rendezvous import Meeting, meet_through, open_endpoint
from rankmesh.mesh import Mesh
from rankmesh.node import Endpoint
from rankmesh.transport.address import Address

#: Where no network leads to the store (a file, memory) ranks are taken to be on one host, unless Config.interface says
#: more. The port is needed to ask for a route; nothing is sent there.
_HERE: Final = ("127.0.0.1", 9)


class TorchStore:
    """A torch store, as `meet_through` uses one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._claimed = ""

    def claim(self, key: str, value: bytes, timeout: float | None = None) -> bytes:
        """Nobody else comes to this key: its rank has counted the attempt."""
        self._claimed = key
        self._store.set(key, value)  # type: ignore[arg-type]  # bytes are taken too
        return value

    def withdraw(self) -> None:
        """Nobody shall look for us where we were."""
        if self._claimed:
            self._store.delete_key(self._claimed)

    def get_many(self, keys: Iterable[str], timeout: float | None = None) -> dict[str, bytes]:
        """Those that are there by the deadline."""
        wanted = list(keys)
        try:
            self._store.wait(wanted, timedelta(seconds=timeout or 0.0))
        except RuntimeError:  # its time is over: DistStoreError, or what each store raised before there was one
            wanted = [key for key in wanted if self._store.check([key])]
        return {key: self._store.get(key) for key in wanted}


def meet_at(store: Store, rank: int, size: int, timeout: float) -> Mesh:
    """Enter the world whose ranks have this store; return when all of them are there."""
    config = Config.from_env()
    chooser = Chooser(config)
    deadline = monotonic() + timeout
    if size == 1:
        address = Address.parse(f"inproc://solo-{uuid4().hex}")
    else:
        address = Address("tls" if config.tls is not None else "tcp", *_place_of(store))
    attempt = f"rankmesh/attempts/{rank}"
    number = store.add(attempt, 1)
    meeting = Meeting(rank, size, (address,), hosts=False, run=f"rankmesh/{number}")
    registry = TorchStore(store)
    endpoint: Endpoint | None = None
    try:
        endpoint = open_endpoint(meeting, config, Endpoint)
        mesh = Mesh(endpoint, rank, meet_through(registry, endpoint, meeting, deadline), chooser)
        mesh.gather_at_hub(deadline)
    except BaseException as error:
        if endpoint is not None:
            endpoint.abort(str(error))
        if isinstance(error, dist.DistError):  # the store itself: its host is gone, or was never there
            raise JoinError(f"The store of the process group failed: {error}. See whether rank 0 runs.") from error
        registry.withdraw()
        store.add(attempt, -1)
        raise
    return mesh


def _place_of(store: Any) -> tuple[str, int]:
    """Host and port of a store that is reached over the network."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return _HERE
    return ("127.0.0.1" if is_loopback(store.host) else store.host), store.port

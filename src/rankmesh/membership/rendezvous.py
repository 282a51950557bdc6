"""How the ranks of a world find each other.

1. Somebody hosts the store: the launcher, or rank 0 at the address that everybody was given. Where mpiexec started
all ranks on one host
   and gave no address, rank 0 takes a free port and leaves it, with a fresh token, in a file that only this user can
   read.
2. Every rank opens its endpoint, claims its rank in the store, and waits until all ranks are claimed.
3. The result is the table of members. Connections are made later, on demand.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Final, Protocol, TypeVar

import msgspec

from rankmesh.config import Config
from rankmesh.endpoint import Endpoint
from rankmesh.errors import ConfigError, ConnectError, DeadlineError, JoinError, PeerLost
from rankmesh.membership.environment import Placement, is_loopback
from rankmesh.membership.interfaces import choose_address
from rankmesh.membership.store import StoreClient, StoreServer
from rankmesh.transport.address import Address
from rankmesh.wire.messages import Identity

E = TypeVar("E", bound=Endpoint)

#: Seconds between looks at the rendezvous file.
LOOK: Final = 0.02


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's entry in the table."""

    rank: int
    size: int
    uid: bytes
    name: str
    host: str
    pid: int
    addresses: tuple[str, ...]
    #: Where memory can be shared with it (transport/place.py); empty: nowhere.
    place: str = ""

    def identity(self) -> Identity:
        """As whom it is expected; what it allows is learnt when it connects."""
        return Identity(
            uid=self.uid,
            name=self.name,
            host=self.host,
            pid=self.pid,
            addresses=self.addresses,
            rank=self.rank,
            eager_bytes=0,
            lane_credit=0,
            peer_credit=0,
            max_message=0,
            max_rpc=0,
        )

    def __str__(self) -> str:
        return f"pid {self.pid} on host {self.host}"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where and as whom this process meets the others."""

    rank: int
    size: int
    #: Addresses under which the store may be found, in order.
    stores: tuple[Address, ...]
    #: Rank 0 hosts the store, unless the launcher does.
    hosts: bool
    run: str = ""
    #: Through this file rank 0 tells where its store is; `stores` is empty then.
    file: Path | None = None

    @classmethod
    def at(cls, url: str, rank: int, size: int, run: str = "") -> Meeting:
        """The world of explicit arguments."""
        if size < 1 or not 0 <= rank < size:
            raise ConfigError(f"rank={rank} and size={size} do not fit: ranks are 0 … size-1. Correct one of them.")
        address = _numeric_loopback(Address.parse(url))
        if address.scheme != "inproc" and not address.port:
            raise ConfigError(
                f"{url} has no port, so the other ranks cannot know it. Give all ranks the same address with a port."
            )
        return cls(rank, size, (address,), hosts=rank == 0, run=run)

    @classmethod
    def by_launcher(cls, placement: Placement, scheme: str) -> Meeting:
        """The world of a launcher's environment."""
        if placement.master is None:
            return cls(
                placement.rank,
                placement.size,
                (),
                placement.rank == 0,
                placement.run_id,
                rendezvous_file(placement.run_id),
            )
        host, port = placement.master
        stores = tuple(
            _numeric_loopback(Address(scheme, host, port + i)) for i in range(max(placement.candidates_ports, 1))
        )
        hosts = placement.rank == 0 and not placement.launcher_hosts
        return cls(placement.rank, placement.size, stores, hosts, placement.run_id)


def rendezvous_file(run: str) -> Path:
    """A file only this user can write to or read, named after the run."""
    folder = Path(tempfile.gettempdir()) / f"rankmesh-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    owner = folder.stat()
    if owner.st_uid != os.getuid() or owner.st_mode & 0o077:
        raise JoinError(
            f"{folder} can be used by other users, so it cannot hold a token. Remove it, or set MASTER_ADDR and "
            "MASTER_PORT."
        )
    return folder / f"{run}.json"


def host_store(meeting: Meeting, config: Config) -> tuple[StoreServer, Meeting, Config]:
    """Rank 0: host the store. The meeting and the configuration may have been completed by what was chosen."""
    if meeting.file is not None:
        config = config if config.token else config.override(token=secrets.token_hex(32))
        server = StoreServer("tcp://127.0.0.1:0", config)
        fresh = meeting.file.with_suffix(f".{os.getpid()}")
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            json.dump({"address": server.address, "token": config.token, "pid": os.getpid()}, out)
        fresh.replace(meeting.file)
        return server, replace(meeting, stores=(Address.parse(server.address),)), config
    if not config.token and not all(address.is_loopback for address in meeting.stores):
        raise ConfigError(
            f"A world that meets at {meeting.stores[0]}, which others can reach, needs a cluster token. "
            "Set RANKMESH_TOKEN or Config(token=…) to the same secret on all ranks."
        )
    problem: ConfigError | None = None
    for address in meeting.stores:
        for candidate in (address, _everywhere(address)):
            try:
                server = StoreServer(str(candidate), config, advertise=str(address))
            except ConfigError as error:
                problem = problem or error
            else:
                return server, replace(meeting, stores=(address,)), config
    raise JoinError(
        f"Rank 0 cannot host the store at {', '.join(map(str, meeting.stores))}: {problem}", size=meeting.size
    ) from problem


def _numeric_loopback(address: Address) -> Address:
    """MASTER_ADDR=localhost means this host alone, for which no token is needed; other names may mean any host."""
    return replace(address, host="127.0.0.1") if address.ip is None and is_loopback(address.host) else address


def _everywhere(address: Address) -> Address:
    """Behind a service name or NAT, the address everybody uses is not one of this host's: listen on all of them."""
    if address.is_loopback:
        return address
    family_any = "::" if address.ip is not None and address.ip.version == 6 else "0.0.0.0"
    return replace(address, host=family_any)


def read_file(meeting: Meeting, config: Config, deadline: float) -> tuple[Meeting, Config]:
    """The other ranks: wait for the file that rank 0 leaves."""
    assert meeting.file is not None
    pause = threading.Event()
    while monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError):  # not there yet, or of an older format
            found = json.loads(meeting.file.read_text())
            address = Address.parse(found["address"])
            if _runs(found["pid"]):
                return replace(meeting, stores=(address,)), config if config.token else config.override(
                    token=found["token"]
                )
        pause.wait(LOOK)
    raise JoinError(
        f"Rank 0 left no word of its store in {meeting.file}. Check that rank 0 runs on this host, or set "
        "MASTER_ADDR and MASTER_PORT.",
        missing=(0,),
        size=meeting.size,
    )


def _runs(pid: int) -> bool:
    """A file may be left over from an earlier run whose rank 0 was killed."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def open_endpoint(meeting: Meeting, config: Config, make: type[E]) -> E:
    """This rank's endpoint, of the kind `make`, on an address that its peers can reach."""
    store = meeting.stores[0]
    if store.scheme == "inproc":
        listen = "inproc://"
    else:
        choice = choose_address(config.interface, store.host, store.port)
        listen = str(Address(store.scheme, choice.address, 0))
    return make(listen, name=f"rank {meeting.rank}", config=config, rank=meeting.rank, run=meeting.run)


class Registry(Protocol):
    """What the ranks of a world find each other through: a StoreClient, or another system's store."""

    def claim(self, key: str, value: bytes, timeout: float | None = None) -> bytes: ...

    def get_many(self, keys: Iterable[str], timeout: float | None = None) -> dict[str, bytes]: ...


def meet(endpoint: Endpoint, meeting: Meeting, deadline: float) -> list[Member]:
    """Connect to the meeting's store, claim our rank there, and wait until all are claimed."""
    timeout = max(deadline - monotonic(), 0.1)
    try:
        peer = endpoint.connect({"addresses": [str(address) for address in meeting.stores]}, timeout)
    except ConnectError as error:
        raise JoinError(
            f"The store that rank 0 or the launcher hosts cannot be reached at {error.address}: {error.reason}. "
            f"{error.hint}",
            missing=(0,),
            size=meeting.size,
        ) from error
    try:
        return meet_through(StoreClient(endpoint, peer), endpoint, meeting, deadline)
    except (DeadlineError, PeerLost) as error:
        raise JoinError(
            f"The store ({peer}) stopped answering while the world came together. Look at that process's output.",
            size=meeting.size,
        ) from error


def meet_through(registry: Registry, endpoint: Endpoint, meeting: Meeting, deadline: float) -> list[Member]:
    """Claim our rank, and wait until all are claimed."""
    timeout = max(deadline - monotonic(), 0.1)
    info = endpoint.info()
    mine = Member(
        rank=meeting.rank,
        size=meeting.size,
        uid=endpoint.uid,
        name=info["name"],
        host=info["host"],
        pid=info["pid"],
        addresses=tuple(info["addresses"]),
        place=info["place"],
    )
    keys = [f"{meeting.run}/rank/{rank}" for rank in range(meeting.size)]
    holder = _read(registry.claim(keys[meeting.rank], msgspec.msgpack.encode(mine), timeout))
    if holder != mine:
        raise JoinError(
            f"Rank {meeting.rank} is taken by {holder}. Start each rank once, or give the runs different addresses "
            "or run ids.",
            size=meeting.size,
        )
    found = registry.get_many(keys, max(deadline - monotonic(), 0.1))
    missing = tuple(rank for rank, key in enumerate(keys) if key not in found)
    if missing:
        raise JoinError(
            f"{len(found)} of {meeting.size} ranks joined in {timeout:.1f} s; missing: rank "
            f"{', '.join(map(str, missing))}. "
            "Look at their output, or pass a larger timeout=.",
            missing=missing,
            size=meeting.size,
        )
    members = [_read(found[key]) for key in keys]
    for member in members:
        if member.size != meeting.size:
            raise JoinError(
                f"Rank {member.rank} ({member}) joined a world of {member.size}, this rank one of {meeting.size}. "
                "Give all ranks the same size.",
                size=meeting.size,
            )
    return members


def _read(value: bytes) -> Member:
    return msgspec.msgpack.decode(value, type=Member)

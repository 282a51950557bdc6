"""A rendezvous for torchrun: `torchrun --rdzv-backend=rankmesh --rdzv-endpoint=host:port --nnodes=1:4 train.py`.

1. torchrun runs an agent on each node, which starts that node's workers. Agents meet in rankmesh's store
   (membership/store.py). The agent on the endpoint's host hosts it: where there are several, the one that was first.
   `--rdzv-conf is_host=1` (or 0) says so where the host does not know itself by that name.
2. Settings come from the environment (`Config.from_env`): off loopback RANKMESH_TOKEN is needed, and certificates make
   it TLS. Who does not know the token cannot join, nor read what agents tell each other.
3. What agents agree on, round by round, is in rounds.py. A node is dead when its counter in the store has not moved for
   `heartbeat_timeout`, by the clock of the node that watches: clocks need not agree. A dead node, or one that left, is
   not waited for; a new one makes the others begin another round with it, if there is room.
4. Workers are told of a TCPStore (MASTER_ADDR, MASTER_PORT), as torch.distributed wants it. The agent with rank 0 makes
   one in each round and says where, so nobody finds the store of a round that is over, or of an agent that is gone.

`--rdzv-conf` takes what torch's own rendezvous takes, in seconds: join_timeout (600), last_call_timeout (30: how long a
round with enough nodes waits for more), keep_alive_interval, close_timeout (5: how long the store's host waits for the
others to leave), read_timeout (60); and keep_alive_max_attempt, a count.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from time import monotonic
from typing import Final, NoReturn

import msgspec
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from rankmesh.config import Config
from rankmesh.endpoint import Endpoint
from rankmesh.errors import JoinError, RankmeshError
from rankmesh.membership.interfaces import choose_address, list_interfaces
from rankmesh.membership.rendezvous import Meeting, host_store
from rankmesh.membership.store import StoreClient, StoreServer
from rankmesh.torch.agent_store import AgentStore
from rankmesh.torch.rounds import State, closed, completed, joined, late, left
from rankmesh.transport.address import Address

BACKEND: Final = "rankmesh"
#: Where torchrun's rendezvous is if its endpoint names no port: that of c10d.
DEFAULT_PORT: Final = 29400
#: Seconds between looks at the state while a node waits for others: the first, and the longest.
LOOKS: Final = (0.02, 0.5)
#: In a round's store: where its workers' TCPStore is.
_MASTER: Final = "rankmesh/master"


@dataclass(frozen=True, slots=True)
class Settings:
    """What torchrun was told. Times in seconds."""

    run: str
    least: int
    most: int
    join: float
    last_call: float
    close: float
    read: float
    beat: float
    #: Silent for so long, a node is dead.
    dead: float

    @classmethod
    def of(cls, params: RendezvousParameters, config: Config) -> Settings:
        def seconds(name: str, default: float) -> float:
            return float(params.get(name, default))

        beat = seconds("keep_alive_interval", config.heartbeat_interval)
        attempts = params.get_as_int("keep_alive_max_attempt", round(config.heartbeat_timeout / beat))
        return cls(
            run=params.run_id,
            least=params.min_nodes,
            most=params.max_nodes,
            join=seconds("join_timeout", 600.0),
            last_call=seconds("last_call_timeout", 30.0),
            close=seconds("close_timeout", 5.0),
            read=seconds("read_timeout", 60.0),
            beat=beat,
            dead=beat * max(attempts or 0, 2),
        )


def handler() -> Callable[[RendezvousParameters], Handler]:
    """The entry point of `torchrun.handlers`."""
    return open_rendezvous


def open_rendezvous(params: RendezvousParameters) -> Handler:
    """Host the store or find it, and make the handler that torchrun's agent uses."""
    config = Config.from_env()
    settings = Settings.of(params, config)
    host, port = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
    with ExitStack() as stack, _translated(f"the rendezvous at {host}:{port}"):
        meeting = Meeting(0, 1, (_address(host, port, config),), hosts=True, run=params.run_id)
        server = _host(meeting, config, params.get_as_bool("is_host"))
        if server is not None:
            stack.callback(server.close)
        endpoint = stack.enter_context(Endpoint(None, name="torchrun agent", config=config))
        where = server.address if server is not None else str(meeting.stores[0])
        client = StoreClient(endpoint, endpoint.connect(where, settings.read))
        address = params.local_addr or choose_address(config.interface, host, port).address
        made = Rendezvous(settings, client, address)
        return Handler(made, server, stack.pop_all())


def _address(host: str, port: int, config: Config) -> Address:
    host = "127.0.0.1" if host == "localhost" else host
    return Address("tcp" if config.tls is None else "tls", host, port)


def _host(meeting: Meeting, config: Config, asked: bool | None) -> StoreServer | None:
    """The store, if it is for this agent to host it."""
    if asked is False or (asked is None and not _is_here(meeting.stores[0].host)):
        return None
    try:
        return host_store(meeting, config)[0]
    except JoinError:
        if asked:
            raise
        return None  # an agent of this host was first; if it was not, connecting will tell


def _is_here(host: str) -> bool:
    ours = {interface.address for interface in list_interfaces()}
    found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    return any(address in ours or ip_address(address).is_loopback for address in found)


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """rankmesh's errors as the one that torchrun's agent expects."""
    try:
        yield
    except (RankmeshError, OSError) as error:
        raise RendezvousConnectionError(f"{what}: {error}") from error


class Rendezvous:
    """One node's part in the rounds."""

    def __init__(self, settings: Settings, client: StoreClient, address: str) -> None:
        self.settings = settings
        self.address = address
        self.client = client
        #: Held here, for a PrefixStore holds only the part of it that is C++'s.
        self._agents = AgentStore(client, settings.read)
        #: In the order of ranks nodes of one host are neighbours.
        self.node = f"{address}/{os.getpid()}/{secrets.token_hex(4)}"
        self._prefix = f"torchrun/{settings.run}"
        self._key = f"{self._prefix}/state"
        #: Counters of other nodes, and since when they have not moved.
        self._seen: dict[str, tuple[bytes, float]] = {}
        #: Before then, nobody is looked after again: an agent asks ten times a second, and there may be many.
        self._next_look = 0.0
        self._state = State()
        self._stopped = threading.Event()
        self._beat(0)
        self._heart = threading.Thread(target=self._keep_beating, name="rankmesh-torchrun-beat", daemon=True)
        self._heart.start()

    # ------------------------------------------------------------------ the state

    def state(self) -> State:
        """As it was not long ago, without nodes that are dead."""
        if monotonic() >= self._next_look:
            dead = self._dead(self._change(lambda state: state))
            self._change(lambda state: left(state, dead, self.settings.most))
        return self._state

    def _change(self, change: Callable[[State], State]) -> State:
        """Apply a change, and return what it led to. No change: the state as it is now."""
        raw = self._read()
        while True:
            state = msgspec.msgpack.decode(raw, type=State)
            changed = change(state)
            if changed == state:
                self._state = state
                return state
            wanted = msgspec.msgpack.encode(changed)
            found = self.client.swap(self._key, raw, wanted, self.settings.read)
            if found == wanted:
                self._state = changed
                return changed
            raw = found if found is not None else self._read()

    def _read(self) -> bytes:
        """The state, which is there from then on."""
        return self.client.claim(self._key, msgspec.msgpack.encode(State()), self.settings.read)

    def close(self) -> None:
        self._change(closed)

    # ------------------------------------------------------------------ who lives

    def stop(self) -> None:
        """No more beats."""
        self._stopped.set()
        self._heart.join(self.settings.read)

    def _beat(self, count: int) -> None:
        self.client.set(self._beat_key(self.node), b"%d" % count, self.settings.read)

    def _keep_beating(self) -> None:
        count = 0
        while not self._stopped.wait(self.settings.beat):
            count += 1
            try:
                self._beat(count)
            except RankmeshError:  # the agent's next call meets the same, and tells torchrun
                return

    def _beat_key(self, node: str) -> str:
        return f"{self._prefix}/beat/{node}"

    def _dead(self, state: State) -> set[str]:
        """Nodes whose counter has not moved for too long."""
        now = monotonic()
        if now < self._next_look:
            return set()
        self._next_look = now + self.settings.beat
        others = [node for node in state.nodes if node != self.node]
        found = self.client.get_many(map(self._beat_key, others), 0.0) if others else {}
        seen = {}
        for node in others:
            count = found.get(self._beat_key(node), b"")
            before, since = self._seen.get(node, (count, now))
            seen[node] = (count, since if count == before else now)
        self._seen = seen
        return {node for node, (_, since) in seen.items() if now - since > self.settings.dead}

    # ------------------------------------------------------------------ a round

    def join(self) -> State:
        """Leave the round of before, and wait until this node is a member of a complete one."""
        settings, began, enough_since = self.settings, monotonic(), 0.0
        pause, longest = LOOKS
        state = self._leave()
        while True:
            state = self._enter(self._dead(state))
            if state.closed:
                self._refuse(state)
            if state.complete and self.node in state.members:
                return state
            now = monotonic()
            enough = not state.complete and len(state.members) >= settings.least
            enough_since = (enough_since or now) if enough else 0.0
            if enough and now - enough_since >= settings.last_call:
                state = self._begin(state)
                continue
            if now - began > settings.join:
                self._leave()
                raise RendezvousTimeoutError(self._missing(state))
            self._stopped.wait(pause)
            pause = min(2 * pause, longest)

    def _leave(self) -> State:
        return self._change(lambda state: left(state, {self.node}, self.settings.most))

    def _enter(self, dead: set[str]) -> State:
        most = self.settings.most
        return self._change(lambda state: joined(left(state, dead, most), self.node, most))

    def _begin(self, seen: State) -> State:
        return self._change(lambda state: completed(state) if state == seen else state)

    def _refuse(self, state: State) -> NoReturn:
        if self.node in state.waiting:
            raise RendezvousGracefulExitError(
                f"The run {self.settings.run!r} ended while this node waited to take part in it. Nothing is to be done."
            )
        raise RendezvousClosedError(
            f"The rendezvous of the run {self.settings.run!r} is closed: the run has ended, or failed on another "
            "node. Look at that node's output; give a new run another --rdzv-id."
        )

    def _missing(self, state: State) -> str:
        settings = self.settings
        waits = "for a round that goes on without it" if state.complete else f"with {len(state.members)} node(s) there"
        return (
            f"The rendezvous of the run {settings.run!r} did not complete within {settings.join:g} s: this node "
            f"waited {waits}, and {settings.least} to {settings.most} take part. Start the missing agents with the "
            "same --rdzv-id and --rdzv-endpoint, or raise join_timeout by --rdzv-conf."
        )

    def forget(self, number: int) -> None:
        """A round that is long over: what its agents told each other."""
        for key in self.client.keys(self._round_prefix(number)):
            self.client.delete(key)

    def round_store(self, number: int) -> PrefixStore:
        """Where the agents of a round tell each other what torchrun wants them to."""
        return PrefixStore(self._round_prefix(number), self._agents)

    def _round_prefix(self, number: int) -> str:
        return f"{self._prefix}/round {number}/"


class Handler(RendezvousHandler):
    """What torchrun's agent calls."""

    def __init__(self, rendezvous: Rendezvous, server: StoreServer | None, held: ExitStack) -> None:
        self._rendezvous = rendezvous
        self._server = server
        self._held = held
        #: Of this round's workers, where this node has rank 0.
        self._workers: TCPStore | None = None

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._rendezvous.settings.run

    @property
    def use_agent_store(self) -> bool:
        """Workers find a store that is there already, in an agent."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        rendezvous = self._rendezvous
        with _translated("the rendezvous"):
            state = rendezvous.join()
            rank, store = state.members.index(rendezvous.node), rendezvous.round_store(state.round)
            if rank == 0:
                self._workers = TCPStore(rendezvous.address, 0, is_master=True, wait_for_workers=False)
                store.set(_MASTER, f"{rendezvous.address} {self._workers.port}")
                rendezvous.forget(state.round - 2)
            else:
                self._workers = None
            host, port = store.get(_MASTER).decode().split()
        return RendezvousInfo(store, rank, len(state.members), RendezvousStoreInfo(host, int(port)))

    def is_closed(self) -> bool:
        with _translated("the rendezvous"):
            return self._rendezvous.state().closed

    def set_closed(self) -> None:
        with _translated("the rendezvous"):
            self._rendezvous.close()

    def num_nodes_waiting(self) -> int:
        with _translated("the rendezvous"):
            return late(self._rendezvous.state(), self._rendezvous.settings.most)

    def shutdown(self) -> bool:
        """Close the rendezvous for all. The host of the store stays until the others have left it, for a while."""
        self._workers = None
        self._rendezvous.stop()
        try:
            self._rendezvous.close()
        except RankmeshError:
            return False  # its host is gone, and with it the run
        finally:
            with self._held:
                self._linger()
        return True

    def _linger(self) -> None:
        give_up, pause = monotonic() + self._rendezvous.settings.close, threading.Event()
        while self._server is not None and self._server.clients > 1 and monotonic() < give_up:
            pause.wait(LOOKS[0])

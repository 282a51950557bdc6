"""Group: ranks that exchange messages and run collectives among themselves, in a tag space of their own. A Mesh is
the group of all ranks."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Final, Self, SupportsIndex
from zlib import crc32

import numpy as np

from rankmesh.buffers import writable
from rankmesh.collectives import CollectiveAgent, GroupContext, UnevenCollectives
from rankmesh.collectives.space import Part, Space
from rankmesh.collectives.starting import Options
from rankmesh.endpoint import ANY_SOURCE, ANY_TAG, Status, Work
from rankmesh.endpoint.messages import MAX_TAG, Messages, bad_tag, new_status
from rankmesh.endpoint.ranks import Ranks
from rankmesh.endpoint.router import PeerRouter, Router
from rankmesh.errors import DeadlineError, UsageError
from rankmesh.memory import MemoryAgent
from rankmesh.node import Endpoint, Peer
from rankmesh.rpc import RpcAgent

#: The world's tag space; 0 belongs to endpoints without ranks.
WORLD: Final = 1
#: Group numbers are 32 bits on the wire.
_NUMBERS: Final = 2**32
#: Tags under which members of a new group are told its number; beyond those of collectives.
_FOUNDING: Final = -(2**62)
#: What to do where a new group's number does not come.
_ALIKE: Final = (
    "See that all its members call group() with the same ranks in the same order, or pass a larger timeout=."
)
#: Ranks of a group that messages of errors name; of more, these are the first.
_SHOWN: Final = 16


def _shown(members: Sequence[int]) -> str:
    more = f", … {len(members)} ranks" if len(members) > _SHOWN else ""
    return f"[{', '.join(map(str, members[:_SHOWN]))}{more}]"


def _whole(name: str, value: Any, of: str = "split") -> int:
    """An integer among the arguments that ranks tell each other. Raises UsageError."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or not -(2**63) <= number < 2**63:
        raise UsageError(f"{of}() takes integers of 64 bits as {name}=, not {value!r}. Pass such.")
    return number


def group_numbers(rank: int, size: int) -> Iterator[int]:
    """Numbers of groups that this rank founds: no other rank gives the same."""
    return itertools.count(WORLD + 1 + rank, size)


class _AnyRank:
    """Any source, in the message of an error."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def known(self, now: float) -> str:
        lost = [str(peer) for peer in self._group.peers if peer.router.gone]
        return f"Lost are: {', '.join(lost)}." if lost else "No rank is lost; none has sent a fitting message."

    def __str__(self) -> str:
        return "any rank"


class Group(UnevenCollectives):
    """Some ranks of a mesh, numbered from 0. `split`, `group` and `dup` of a mesh or a group make them; use it as a
    context manager, or close it.

    `peers[r]` is rank r of the group; `rpc` and `memory` take ranks of the group. Errors, and Peers (`peer.rank`,
    `rm.current_call().caller.rank`), name ranks of the mesh: `peers.index(caller)` is the caller's rank in the group.
    All methods may be used from many threads. Every call that can wait takes `timeout` in seconds (None:
    Config.timeout).
    """

    #: What this is called in messages.
    _kind = "group"
    _rpc: RpcAgent | None = None

    def _form(
        self,
        endpoint: Endpoint,
        agent: CollectiveAgent,
        number: int,
        rank: int,
        peers: list[Peer],
        numbers: Iterator[int],
    ) -> None:
        """Become the group of these peers. With the engine's lock."""
        hub = endpoint.hub
        self.rank = rank
        self.size = len(peers)
        #: One per rank, this one's own too.
        self.peers: Sequence[Peer] = peers
        self._number = number
        self._endpoint = endpoint
        self._hub = hub
        self._agent = agent
        self._numbers = numbers
        self._routers: list[Router] = [peer.router for peer in peers]
        self._ranks = ranks = Ranks(self._kind, self._routers)
        self._messages = Messages(hub, number, ranks.numbers, _AnyRank(self))
        self._memory = endpoint.memory.among(ranks)
        if self.size > 1:
            hub.members[number] = {router.index for router in self._routers if isinstance(router, PeerRouter)}
        self._recipes = {}
        self._context: GroupContext = agent.add(number, rank, self._routers)

    # ------------------------------------------------------------------ messages

    def send(self, data: Any, to: int, tag: int = 0, timeout: float | None = None) -> None:
        """Send a buffer (numpy array, bytes, memoryview …) from where it lies. On return it may be reused."""
        if not (0 <= to < self._ranks.reach and 0 <= tag <= MAX_TAG):
            self._ranks.router(to)
            raise bad_tag(tag)
        self._routers[to].outbound.send_buffer(self._number, tag, data, timeout)

    def recv(self, out: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, timeout: float | None = None) -> Status:
        """Receive into a buffer. Raises TruncationError if it is too small, PeerLost if `source` is gone."""
        if not (0 <= source < self._ranks.reach and 0 <= tag <= MAX_TAG):
            peer, _ = self._source(source)
            return self._messages.recv(peer, None if peer is None else peer.router, out, tag, timeout)
        router = self._routers[source]  # what Messages.recv does, with a call less
        view = writable(out)
        direct = router.inbound.direct
        if direct is not None and direct.receive(self._number, tag, view):
            return new_status(Status, (source, tag, len(view)))
        return self._messages.await_message(self.peers[source], router.index, view, tag, timeout)

    def isend(self, data: Any, to: int, tag: int = 0, timeout: float | None = None) -> Work[None]:
        """Like `send`, without waiting. The buffer belongs to the Work until it is done."""
        return self._messages.isend(self._ranks.router(to), data, tag, timeout)

    def irecv(
        self, out: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, timeout: float | None = None
    ) -> Work[Status]:
        """Like `recv`, without waiting."""
        peer, index = self._source(source)
        return self._messages.irecv(peer, index, out, tag, timeout)

    def send_object(self, obj: Any, to: int, tag: int = 0, timeout: float | None = None) -> None:
        """Send an object by the codec: msgpack, arrays out of band, no pickle unless Config allows it."""
        self._messages.send_object(self._ranks.router(to), obj, tag, timeout)

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
        """Send to one rank and receive from another (None: the same) at once; a ring of these does not deadlock. `data`
        and `out` must not overlap."""
        peer, index = self._source(to if source is None else source)
        return self._messages.sendrecv(
            self._ranks.router(to), peer, index, data, out, tag, tag if recv_tag is None else recv_tag, timeout
        )

    def probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, timeout: float | None = None) -> Status:
        """Wait until a message could be received, and tell its source, tag and size."""
        peer, index = self._source(source)
        return self._messages.probe(peer, index, tag, timeout)

    def iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Status | None:
        """Like `probe`, without waiting: None when there is no message now."""
        return self._messages.iprobe(self._source(source)[1], tag)

    def _source(self, rank: int) -> tuple[Peer | None, int]:
        ranks = self._ranks
        if rank == ANY_SOURCE and ranks.reach:
            return None, ANY_SOURCE
        index = ranks.router(rank).index
        return self.peers[rank], index

    # ------------------------------------------------------------------ calls and memory

    @property
    def rpc(self) -> RpcAgent:
        """Functions that others may call, and calls of theirs by rank: of this group, or of the mesh. Functions belong
        to the process: one registered here can be called by everybody who is connected, by whichever group."""
        if self._rpc is None or not self._ranks.reach:
            self._ranks.check_open()
            self._rpc = self._endpoint.rpc.among(self._ranks)
        return self._rpc

    @property
    def memory(self) -> MemoryAgent:
        """Memory that others may read and write, and theirs by rank: of this group, or of the mesh. Regions belong to
        the process: each name is used once, and everybody whom `allow=` admits can open it, by whichever group. The
        ranks in `allow=`, and those that a region's notifications come from, are ranks of the group it was registered
        by; a Peer stands for who is not in it."""
        self._ranks.check_open()
        return self._memory

    # ------------------------------------------------------------------ groups of this one's ranks

    def split(self, color: SupportsIndex | None, key: SupportsIndex = 0, timeout: float | None = None) -> Group | None:
        """A group of the ranks that pass the same `color`, in the order of `key`, then of rank. Every rank calls it;
        one that passes None is in no group, and gets None. Both are integers of 64 bits."""
        coloured, its_color = color is not None, 0 if color is None else _whole("color", color)
        its_key = _whole("key", key)
        options = Options(timeout=timeout)
        told = np.zeros((self.size, 4), np.int64)
        told[self.rank] = (coloured, its_color, its_key, self._found())
        chosen = self._choose("all_gather", told[0].nbytes, options)
        space = Space(Part(told.reshape(-1), [4] * self.size))
        self._run(chosen, space, lambda: None, options, name="split")
        if not coloured:
            return None
        alike = np.flatnonzero((told[:, 0] == 1) & (told[:, 1] == its_color)).tolist()
        members = sorted(alike, key=lambda rank: (int(told[rank, 2]), rank))
        return self._group(int(told[members[0], 3]), members)

    def group(self, ranks: Sequence[SupportsIndex], timeout: float | None = None) -> Group | None:
        """A group of these ranks, in this order. Only they need to call it, all with the same list; another rank gets
        None."""
        members = [_whole("ranks", rank, "group") for rank in ranks]
        if len(set(members)) != len(members) or not members:
            raise UsageError(f"A group is of different ranks, at least one, not {members}. Correct the list.")
        for rank in members:
            self._ranks.router(rank)
        if self.rank not in members:
            return None
        tag = _FOUNDING - crc32(repr(members).encode())
        founder = members[0]
        if self.rank == founder:
            number = self._found()
            for rank in members[1:]:
                self._routers[rank].outbound.send_buffer(self._number, tag, number.to_bytes(4, "little"), timeout)
        else:
            told = bytearray(4)
            op = f"group({_shown(members)}), whose number comes from"
            try:
                self._messages.await_message(
                    self.peers[founder], self._routers[founder].index, memoryview(told), tag, timeout, op
                )
            except DeadlineError as late:
                late.hint = _ALIKE
                raise
            number = int.from_bytes(told, "little")
        return self._group(number, members)

    def dup(self, timeout: float | None = None) -> Group:
        """A group of the same ranks: for a thread, or a library, that calls collectives independently of this one's."""
        made = self.split(0, self.rank, timeout)
        assert made is not None, "every rank has the same colour"
        return made

    def _found(self) -> int:
        """A number for a new group."""
        with self._hub.engine:
            number = next(self._numbers)
        if number >= _NUMBERS:
            raise UsageError("All numbers of groups are used up. Make fewer groups, and keep them.")
        return number

    def _group(self, number: int, members: list[int]) -> Group:
        made = Group()
        with self._hub.engine:
            self._hub.check_open()
            peers = [self.peers[rank] for rank in members]
            made._form(self._endpoint, self._agent, number, members.index(self.rank), peers, self._numbers)
        return made

    # ------------------------------------------------------------------ the end

    _closed_text = "This group is closed. Make another, or use the one it was made from."

    def close(self) -> None:
        """End what is under way in this group, on this rank, and drop what came for it and what still comes: to who
        goes on sending it seems received. Others are not disturbed."""
        hub = self._hub
        with hub.engine:
            if not self._ranks.reach:
                return
            self._ranks.close(self._closed_text)
            self._agent.remove(self._context, self._closed_text)
            hub.close_group(self._number, self._closed_text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self.close()

    def __repr__(self) -> str:
        lost = sum(bool(peer.router.gone) for peer in self.peers)
        state = "closed" if not self._ranks.reach else f"{lost} lost" if lost else "all well"
        return f"<Group {self._number}, rank {self.rank} of {self.size}: {state}>"

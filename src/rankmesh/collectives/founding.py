"""How the ranks of a group come by a stage (stage.py), or find out that there is none: when the first collective that
could use one is called, on whichever rank that is.

    Prepare   to all others, which makes a connection to each; whoever gets one founds too
    Offer     the answer to Prepare: this rank's segment, which was passed over the connection before
    Founded   to all others, once: whether this rank has mapped the segments of all, and how it reads the others' memory

There is a stage if all ranks say so, and large arrays are pulled on it (pulling.py) if all can, from sizes on that pay
for the slowest. One that cannot (another container, no memory, shm switched off) says no, to all: so all come to the
same end, and collectives called meanwhile begin then, with or without it. Who leaves says nothing more, unless it has
said yes; who has left without a word has said no.

Methods need the engine's lock.
"""

from __future__ import annotations

import logging
import os
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from rankmesh.collectives import stage
from rankmesh.endpoint.router import PeerRouter
from rankmesh.transport.pulling import Copying, Puller, copying

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankmesh.collectives.staged import StagedCollective
    from rankmesh.endpoint.hub import Hub
    from rankmesh.endpoint.router import Router
    from rankmesh.endpoint.transfers import Send

logger = logging.getLogger("rankmesh")

#: Larger groups have none: every rank connects to every other, and waits for all of them in turn.
MOST_RANKS: Final = 16
#: Segments are numbered apart from those of arenas and regions.
_SEGMENT: Final = 1 << 62


class Prepare(msgspec.Struct, tag="prepare", frozen=True):
    group: int


class Offer(msgspec.Struct, tag="offer", frozen=True):
    group: int
    segment: int


class Founded(msgspec.Struct, tag="founded", frozen=True):
    group: int
    #: Why not; empty if all is well.
    reason: str
    copying: Copying = Copying.NOT

    def __post_init__(self) -> None:
        if len(self.reason) > 200 or not self.reason.isprintable():
            raise ValueError("a reason is printable and has at most 200 characters")


class Members(Protocol):
    """What founding needs to know of its group."""

    hub: Hub
    number: int
    rank: int
    routers: Sequence[Router]
    places: list[str]


class State(Enum):
    UNTRIED = auto()
    UNDER_WAY = auto()
    STAGE = auto()
    NONE = auto()


class Founding:
    def __init__(self, group: Members, tell: Callable[[Router, Prepare | Offer | Founded], Send | None]) -> None:
        self._group = group
        self._tell = tell
        #: What is on its way to others.
        self._sends: list[Send] = []
        #: What found no room, and is sent again.
        self.unsent: list[tuple[Router, Prepare | Offer | Founded]] = []
        self.state = State.UNTRIED
        self.stage: stage.Stage | None = None
        #: Why there is none.
        self.reason = ""
        self._segments: dict[int, memoryview] = {}
        self._fd = -1
        self._pullers: dict[int, Puller] = {}
        #: What each rank said in the end, and how it can pull.
        self._said: dict[int, str] = {}
        self._copying: dict[int, Copying] = {}
        self._waiting: list[StagedCollective] = []
        if len(group.routers) == 1:
            self._without("the group has one rank")
        elif len(group.routers) > MOST_RANKS:
            self._without(f"the group has more than {MOST_RANKS} ranks")
        elif len({*group.places}) > 1 or not group.places[0]:
            self._without("its ranks cannot share memory")
        #: Whether there may be one, as far as all ranks know alike.
        self.possible = self.state is State.UNTRIED

    def begin(self, collective: StagedCollective) -> None:
        """Begin it now, or when it is known how."""
        if self.state is State.STAGE or self.state is State.NONE:
            collective.founded(self.stage)
            return
        self._waiting.append(collective)
        if self.state is State.UNTRIED:
            self._found()

    def forget(self, collective: StagedCollective) -> None:
        """It was given up while it waited."""
        if collective in self._waiting:
            self._waiting.remove(collective)

    def awaited(self) -> dict[int, Router]:
        return {rank: router for rank, router in self._others() if rank not in self._said}

    def left(self, router: Router) -> None:
        """A member is gone."""
        if self.state is State.UNDER_WAY and router in self._group.routers:
            rank = self._group.routers.index(router)
            if rank not in self._said:
                self.founded(rank, f"rank {rank} has left")

    def leave(self) -> None:
        """This rank is about to: what would only keep it is not sent."""
        if self._said.get(self._group.rank) != "":
            for send in self._sends:
                if not send.finished:
                    send.abandon()
        self._sends.clear()
        self.unsent.clear()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self.stage is not None:
            self.stage.close()
        self.stage, self.state = None, State.NONE
        self._segments.clear()

    # ------------------------------------------------------------------ what is said

    def prepare(self, rank: int) -> None:
        if self.state is State.UNTRIED:
            self._found()
        if self.state is State.UNDER_WAY:
            self._offer(rank)

    def offered(self, rank: int, offer: Offer) -> None:
        if self.state is State.UNTRIED:
            self._found()
        if self.state is not State.UNDER_WAY or rank in self._segments:
            return
        router = self._group.routers[rank]
        polled = router.polled if isinstance(router, PeerRouter) else None
        if polled is not None:
            polled.answer_bell()  # the descriptor was sent before the offer was
        memory = None if polled is None else polled.shared.pop(offer.segment, None)
        if memory is None or memory.nbytes != stage.STAGE_BYTES:
            self._say(f"the memory of {router.peer} cannot be mapped")
            return
        self._segments[rank] = memory
        if polled is not None and polled.puller is not None:
            self._pullers[rank] = polled.puller.twin()
        if len(self._segments) == len(self._group.routers):
            self._say("")

    def founded(self, rank: int, reason: str, copies: Copying = Copying.NOT) -> None:
        if self.state is State.UNTRIED:
            self._found()
        self._copying.setdefault(rank, copies)
        self._said.setdefault(rank, reason)
        self._resolve()

    # ------------------------------------------------------------------ what follows

    def _found(self) -> None:
        group = self._group
        self.state = State.UNDER_WAY
        if not group.hub.config.shm:
            self._say("shared memory is switched off on one of the ranks")
            return
        try:
            memory, self._fd = stage.create()
        except OSError as error:
            self._say(f"there is no memory to be shared: {error.strerror}")
            return
        self._segments[group.rank] = memory
        for _, router in self._others():
            self._send(router, Prepare(group.number))

    def _offer(self, rank: int) -> None:
        router = self._group.routers[rank]
        polled = router.polled if isinstance(router, PeerRouter) else None
        segment = _SEGMENT | self._group.number
        if self._fd < 0:
            return  # it said no already
        if polled is None or not polled.share(segment, self._fd, stage.STAGE_BYTES):
            self._say(f"no memory is shared with {router.peer}")
            return
        self._send(router, Offer(self._group.number, segment))

    def _say(self, reason: str) -> None:
        """Once."""
        if self._group.rank not in self._said:
            self._said[self._group.rank] = reason
            copies = copying() if len(self._pullers) == len(self._group.routers) - 1 else Copying.NOT
            self._copying[self._group.rank] = copies
            for _, router in self._others():
                self._send(router, Founded(self._group.number, reason[:200], copies))
            self._resolve()

    def _send(self, router: Router, word: Prepare | Offer | Founded) -> None:
        if not router.gone:
            send = self._tell(router, word)
            if send is None:
                self.unsent.append((router, word))
            else:
                self._sends.append(send)

    def send_again(self) -> None:
        """What found no room: called now and then while collectives wait."""
        unsent, self.unsent = self.unsent, []
        for router, word in unsent:
            self._send(router, word)

    def _resolve(self) -> None:
        if self.state is not State.UNDER_WAY:
            return
        against = next((reason for reason in self._said.values() if reason), "")
        if against:
            self._say(against)
            self._without(against)
        elif len(self._said) == len(self._group.routers):
            self._with()

    def _with(self) -> None:
        group = self._group
        segments = [self._segments.pop(rank) for rank in range(len(group.routers))]
        pullers = {**self._pullers, group.rank: Puller(os.getpid())}
        copies = min(self._copying.values())
        self.stage = stage.Stage(group.hub.engine, ~group.number, group.rank, group.routers, segments, pullers, copies)
        self._end(State.STAGE)

    def _without(self, reason: str) -> None:
        self.reason = reason
        logger.debug("collectives of group %d go over messages: %s", self._group.number, reason)
        self._end(State.NONE)

    def _end(self, state: State) -> None:
        self.state = state
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        waiting, self._waiting = self._waiting, []
        for collective in waiting:
            if not collective.finished:
                collective.founded(self.stage)

    def _others(self) -> list[tuple[int, Router]]:
        return [(rank, router) for rank, router in enumerate(self._group.routers) if rank != self._group.rank]

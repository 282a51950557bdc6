"""GroupContext: the collectives of one group on one rank: its numbers on the wire, what is under way, what was called,
and what comes of it where ranks disagree. agent.py has the rules. Methods need the engine's lock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rankmesh.collectives.asking import GAVE_UP, OTHER, Answer, Ask, Tell, answer
from rankmesh.collectives.calls import Call, CallLog, Signature, digest
from rankmesh.collectives.founding import Founded, Founding, Offer, Prepare
from rankmesh.collectives.running import Collective
from rankmesh.collectives.staged import StagedCollective
from rankmesh.errors import ClosedError, DesyncError, TransferAborted
from rankmesh.wire.messages import plain

if TYPE_CHECKING:
    from rankmesh.collectives.agent import CollectiveAgent
    from rankmesh.endpoint.hub import Hub
    from rankmesh.endpoint.router import PeerRouter, Router


class GroupContext:
    """See the module's text."""

    def __init__(self, agent: CollectiveAgent, number: int, rank: int, routers: Sequence[Router]) -> None:
        self.agent = agent
        self.hub: Hub = agent.hub
        self.number = number
        self.rank = rank
        self.routers = routers
        self.indices = {router.index for router in routers}
        names = [router.peer.host for router in routers]
        #: The host of each member, by the first member that is there: the same on all of them.
        self.hosts = tuple(names.index(name) for name in names)
        self.hosts_count = len({*self.hosts})
        #: Where memory can be shared with each member; empty: nowhere.
        self.places = [agent.places[router.index] for router in routers]
        self.founding = Founding(self, agent.request)
        self.under_way: dict[int, Collective] = {}
        self.log = CallLog()
        #: Why there can be no more collectives: what each rank called, or a member that was lost.
        self._desync: dict[int, str] | None = None
        self._lost: PeerRouter | None = None
        self._closed = ""
        self.unusable = False

    def next_call(self, signature: Signature) -> Call:
        if self.unusable or self.hub.closed:
            self.refuse(signature)
        return self.log[self.log.note(signature, digest(signature), 3)]

    def refuse(self, signature: Signature) -> None:
        """The group is unusable, or the endpoint closed: raise what says why."""
        self.hub.check_open()
        if self._closed:
            raise ClosedError(self._closed)
        if self._desync is not None:
            raise _desync_error(self._desync)
        if self._lost is not None:
            raise self._lost.lost_error(f"{signature.collective} with", None)

    def begin(self, collective: Collective) -> None:
        self.under_way[collective.call.sequence] = collective
        if isinstance(collective, StagedCollective):
            self.founding.begin(collective)
        else:
            collective.advance()
        if not collective.finished:
            self.agent.watch()

    def ended(self, collective: Collective) -> None:
        self.under_way.pop(collective.call.sequence, None)

    def answer(self, ask: Ask) -> Answer:
        """What this rank has to say of that sequence number."""
        return answer(self.log, ask, self.agent.whereabouts)

    def heard(self, collective: Collective, rank: int, said: Answer) -> None:
        if collective.finished:
            return
        if said.state == GAVE_UP:
            if not collective.doubts:  # else it has ended by a disagreement, and tells of that
                known = said.first != self.rank and said.first in range(len(self.routers))
                self._given_up(collective, said.first if known else rank, said.text)
            return
        collective.answers[rank] = said
        self.agent.compare(self, collective, differs=said.state == OTHER)

    def _given_up(self, collective: Collective, rank: int, reason: str) -> None:
        """Where a member has left, that is the reason, here as there."""
        gone = next((router for router in self.routers if router.gone), None)
        if gone is not None:
            collective.stop(gone.lost_error(collective.op, None))
            return
        peer = self.routers[rank].peer
        collective.stop(
            TransferAborted(
                f"{peer} gave up {collective.call}: {reason}",
                **peer.attributes(),
                op=collective.op,
                reason=reason,
            )
        )
        collective.call.given_up, collective.call.given_up_by = reason, rank  # whoever asks hears of the first one

    def disagree(self, collective: Collective, rank: int, did: str) -> None:
        """That rank did what does not fit: it, and all others, are asked what they called, and are told."""
        collective.doubts.setdefault(rank, did)
        self.agent.doubt(self, collective)

    def conclude(self, collective: Collective) -> None:
        """Somebody called something else, or did what does not fit: say so, with all that is known."""
        calls = {rank: said.called for rank, said in collective.answers.items()}
        for rank, did in collective.doubts.items():
            calls[rank] = f"{calls[rank]}, and {did}" if rank in calls else did
        self.declare({**calls, self.rank: f"called {collective.call}"})

    def declare(self, calls: dict[int, str]) -> None:
        """Ranks disagree: tell the others, and end here what is under way."""
        self._desynchronised({rank: plain(text) for rank, text in sorted(calls.items())}, list(self.routers))

    def told(self, calls: dict[int, str]) -> None:
        """It is passed on to who is connected: a rank that ends because of this says why before it says goodbye, and
        the others do not take it for the culprit."""
        own = next((f"called {collective.call}" for collective in self.under_way.values()), None)
        if own is not None:
            calls = {self.rank: plain(own), **calls}
        self._desynchronised(calls, [router for router in self.routers if router.link is not None])

    def _desynchronised(self, calls: dict[int, str], tell: list[Router]) -> None:
        if self._desync is not None:
            return
        self._desync = calls
        self.unusable = True
        for router in tell:
            if router is not self.routers[self.rank] and not router.gone:
                self.agent.request(router, Tell(self.number, calls), optional=True)
        for collective in list(self.under_way.values()):
            collective.stop(_desync_error(calls))

    def member_lost(self, router: PeerRouter) -> None:
        if router.index in self.indices:
            self._lost = self._lost or router
            self.unusable = True
            for collective in list(self.under_way.values()):
                collective.stop(router.lost_error(collective.op, None))

    def close(self, reason: str) -> None:
        self._closed = reason
        self.unusable = True
        for collective in list(self.under_way.values()):
            collective.stop(ClosedError(reason))
        self.founding.close()

    def said(self, rank: int, word: Prepare | Offer | Founded) -> None:
        """What another rank says of the stage."""
        if isinstance(word, Prepare):
            self.founding.prepare(rank)
        elif isinstance(word, Offer):
            self.founding.offered(rank, word)
        else:
            self.founding.founded(rank, word.reason, word.copying)


def _desync_error(calls: dict[int, str]) -> DesyncError:
    each = "; ".join(f"rank {rank} {text}" for rank, text in sorted(calls.items()))
    return DesyncError(f"Ranks of this group are in different collectives: {each}.", calls=calls)

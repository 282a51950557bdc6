"""The agent of collectives: the groups of one endpoint, and what ranks tell each other when a collective does not get
on.

Calls that differ never match (calls.py), so they stall. The rules from then on, the same on all ranks:

1. A collective that has not moved for STALL seconds asks: those it waits for, and, in a group of up to ASK_ALL, all
   others. The question says what was called here; the answer says whether the other has called the same under that
   sequence number, something else, nothing yet (and where it is instead), or has given up, or closed the group before
   it came to that. One that cannot be reached is lost if it is waited for; else it may have done its part, and left in
   order.
2. Where somebody called something else, the one that finds out waits for the other answers, GRACE seconds at most,
   and tells all members what each has called. Whoever is told, or finds out, fails all collectives under way in that
   group with DesyncError, and every later one: no rank could know any more which call belongs to which.
3. Where somebody gave up, there is nothing to wait for. Where somebody has not come, the deadline decides, and its
   error says what the answers said.

All methods need the engine's lock, unless they say that they take it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final

from rankmesh.collectives.asking import (
    ABSENT,
    SAME,
    Answer,
    Ask,
    Asked,
    Question,
    Tell,
    ago,
    answer,
    encode,
    question_of,
)
from rankmesh.collectives.calls import CallLog
from rankmesh.collectives.context import GroupContext
from rankmesh.collectives.founding import Founded, Offer, Prepare
from rankmesh.collectives.running import Collective
from rankmesh.collectives.staged import StagedCollective
from rankmesh.collectives.tuning import Chooser
from rankmesh.endpoint.router import PeerRouter
from rankmesh.endpoint.transfers import Send
from rankmesh.endpoint.work import Work
from rankmesh.errors import RankmeshError
from rankmesh.wire.header import Flag
from rankmesh.wire.messages import plain

if TYPE_CHECKING:
    from rankmesh.endpoint.endpoint import Endpoint
    from rankmesh.endpoint.router import Router
    from rankmesh.endpoint.timers import Timer

logger = logging.getLogger("rankmesh")

#: The number of this service on the wire.
SERVICE: Final = 4
#: Seconds between looks at what is under way.
LOOK: Final = 0.1
#: Seconds without progress after which a collective asks, and between two questions.
STALL: Final = 0.2
ASK_AGAIN: Final = 0.5
#: Seconds to wait for what the others called, once one is known to have called something else.
GRACE: Final = 0.2
#: Up to this many members all are asked; in larger groups only those that are waited for.
ASK_ALL: Final = 64
#: Words about stages of groups that are not made here yet.
EARLY: Final = 1024
#: Closed groups whose calls are remembered, for those who are still in them.
CLOSED: Final = 32
_NO_CALLS: Final = CallLog()


class CollectiveAgent:
    """See the module's text. One per endpoint."""

    def __init__(self, endpoint: Endpoint, chooser: Chooser, places: dict[int, str]) -> None:
        """`places`: by index of router, where memory can be shared with that rank."""
        self.hub = endpoint.hub
        self.places = places
        self.chooser = chooser
        self.contexts: dict[int, GroupContext] = {}
        self._timer: Timer | None = None
        #: When each stalled collective asked last, and since when it is known that somebody called something else.
        self._asked: dict[Collective, float] = {}
        self._mismatched: dict[Collective, float] = {}
        #: What was called in groups that this rank has closed, by number.
        self._closed: dict[int, CallLog] = {}
        #: What was said of the stage of a group that this rank has not made yet.
        self._early: dict[int, list[tuple[Router, Prepare | Offer | Founded]]] = {}
        endpoint.attach(SERVICE, self._on_request, self._on_request, self)

    def add(self, number: int, rank: int, routers: Sequence[Router]) -> GroupContext:
        context = self.contexts[number] = GroupContext(self, number, rank, routers)
        for router, word in self._early.pop(number, ()):
            if router.index in context.indices:
                context.said(context.routers.index(router), word)
        return context

    def remove(self, context: GroupContext, reason: str) -> None:
        context.close(reason)
        self.contexts.pop(context.number, None)
        self._closed[context.number] = context.log
        if len(self._closed) > CLOSED:
            del self._closed[next(iter(self._closed))]

    # ------------------------------------------------------------------ what the endpoint tells

    def needs(self, router: Router) -> bool:
        return any(context.under_way and router.index in context.indices for context in self.contexts.values())

    def peer_lost(self, router: Router) -> None:
        """What needs it directly is failed by its router; the mesh tells of those that are lost to all."""
        for context in list(self.contexts.values()):
            context.founding.left(router)
            if context.founding.stage is not None:
                context.founding.stage.partner_gone()

    def member_lost(self, router: PeerRouter) -> None:
        """A rank is lost that did not leave: no collective of its groups can end."""
        for context in list(self.contexts.values()):
            context.member_lost(router)

    def closing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for _, collective in list(self._under_way()):
            if isinstance(collective, StagedCollective):
                collective.closing()
        for context in self.contexts.values():
            context.founding.leave()

    def closed(self) -> None:
        """What was under way ended with its pieces."""
        for context in self.contexts.values():
            context.founding.close()

    # ------------------------------------------------------------------ asking

    def watch(self) -> None:
        """Something is under way: look after it."""
        if self._timer is None:
            self._timer = self.hub.engine.call_at(monotonic() + LOOK, self._look)

    def _look(self) -> None:
        self._timer = None
        if self.hub.closed:
            return
        now = monotonic()
        for context in list(self.contexts.values()):
            context.founding.send_again()
        for context, collective in list(self._under_way()):
            stalled = now - collective.moved >= STALL and now - self._asked.get(collective, 0.0) >= ASK_AGAIN
            if stalled or collective in self._mismatched:  # who had not come may have meanwhile
                self._asked[collective] = now
                self._ask(context, collective)
            if now - self._mismatched.get(collective, now) >= GRACE:
                context.conclude(collective)
            collective.end_if_late(now)
        live = {collective for _, collective in self._under_way()}
        self._asked = {collective: when for collective, when in self._asked.items() if collective in live}
        self._mismatched = {collective: when for collective, when in self._mismatched.items() if collective in live}
        if live or any(context.founding.unsent for context in self.contexts.values()):
            self.watch()

    def _under_way(self) -> Iterator[tuple[GroupContext, Collective]]:
        for context in list(self.contexts.values()):
            for collective in list(context.under_way.values()):
                yield context, collective

    def _ask(self, context: GroupContext, collective: Collective) -> None:
        awaited = collective.awaited()
        ask = Ask(context.number, collective.call.sequence, collective.call.digest)
        for rank in range(len(context.routers)) if len(context.routers) <= ASK_ALL else awaited:
            router = context.routers[rank]
            if rank == context.rank or router.gone:
                continue
            then = partial(context.heard, collective, rank)
            self.request(router, ask, then, optional=rank not in awaited)

    def request(
        self,
        router: Router,
        message: Question,
        then: Callable[[Answer], None] = lambda answer: None,
        optional: bool = False,
    ) -> Send | None:
        """Ask or tell. Who cannot be reached is lost, unless it is `optional` to reach it."""
        assert isinstance(router, PeerRouter), "nobody asks itself"
        body = memoryview(encode(message))
        question = Asked(router, router.outbound.new_ident(), then)
        timeout = self.hub.config.timeout
        send = Send(router, question.op, SERVICE, question.ident, int(Flag.REQUEST), [body], len(body), timeout)
        send.optional = optional
        router.requests[question.ident] = question  # before it is sent: a connection may be refused at once
        try:
            router.outbound.start(send)
        except RankmeshError as error:
            router.requests.pop(question.ident, None)
            logger.debug("%s cannot be asked about a collective: %s", router.peer, error)
            self.watch()
            return None
        return send

    def doubt(self, context: GroupContext, collective: Collective) -> None:
        """Somebody did what does not fit."""
        if collective not in self._mismatched:
            self._mismatched[collective] = monotonic()
            self._ask(context, collective)
            self.watch()

    def compare(self, context: GroupContext, collective: Collective, differs: bool) -> None:
        """An answer came. Once somebody called something else, who answers soon, or comes soon, is heard too."""
        if differs:
            self._mismatched.setdefault(collective, monotonic())
        came = [said for said in collective.answers.values() if said.state != ABSENT]
        if collective in self._mismatched and len(came) == len(context.routers) - 1:
            context.conclude(collective)

    # ------------------------------------------------------------------ answering

    def _on_request(self, router: Router, ident: int, payload: memoryview, owned: bool) -> None:
        question = question_of(payload)
        context = self.contexts.get(question.group)
        if context is None:
            said = self._of_another_group(router, question)
        elif router.index not in context.indices:
            said = Answer(ABSENT, "is not in that group")
        elif isinstance(question, Ask):
            said = context.answer(question)
        else:
            said = Answer(SAME, "")
            if isinstance(question, Tell):
                context.told(question.calls)
            else:
                context.said(context.routers.index(router), question)
        body = encode(said)
        router.reply(ident, [memoryview(body)], len(body), service=SERVICE)

    def _of_another_group(self, router: Router, question: Question) -> Answer:
        """It is not made here yet, or was closed."""
        if isinstance(question, Ask):
            log = self._closed.get(question.group)
            if log is not None:
                return answer(log, question, self.whereabouts, closed=True)
            where = self.whereabouts(_NO_CALLS)
            return Answer(ABSENT, plain(f"is not in that group yet, or closed it long ago{where and f': {where}'}"))
        if not isinstance(question, Tell):
            self._said_early(router, question)
        return Answer(SAME, "")

    def whereabouts(self, log: CallLog) -> str:
        """What this rank does, as far as it is known, that has not called what others wait for in that group: it is in
        a collective, or in another wait, or was somewhere else last. Empty: nothing is known but what the log says."""
        newest = max((it for _, it in self._under_way()), key=lambda it: it.began, default=None)
        if newest is not None:
            return f"it is in {newest.call} of {self._name(newest.context.number)}, for {ago(newest.began)}"
        waits = [work for work in self.hub.engine.waited() if isinstance(work, Work) and not work.finished]
        if waits:
            work = max(waits, key=lambda work: work.began)
            return f"it waits in {work.describe()}, for {ago(work.began)}"
        calls = [(its.log.last, its) for its in self.contexts.values()]
        call, its = max(calls, key=lambda pair: pair[0].when if pair[0] else 0.0, default=(None, None))
        if call is None or its is None or its.log is log:
            return ""
        return f"it was in {call} of {self._name(its.number)} {ago(call.when)} ago"

    def _name(self, number: int) -> str:
        return "the mesh" if number == min(self.contexts) else f"group {number}"

    def _said_early(self, router: Router, word: Prepare | Offer | Founded) -> None:
        """Bounded: a group that nobody makes here is forgotten after many others."""
        if word.group in self.hub.closed_groups:
            return
        self._early.setdefault(word.group, []).append((router, word))
        while sum(map(len, self._early.values())) > EARLY:
            del self._early[next(iter(self._early))]

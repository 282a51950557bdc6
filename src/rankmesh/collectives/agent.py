"""The agent of collectives: the groups of one endpoint, and what ranks tell each other when a collective does not get
on.

Calls that differ never match (calls.py), so they stall. The rules from then on, the same on all ranks:

1. A collective that has not moved for STALL seconds asks: those it waits for, and, in a group of up to ASK_ALL, all
   others. The question says what was called here; the answer says whether the other has called the same under that
   sequence number, something else, nothing yet (and what last, when), or has given up. One that cannot be reached is
   lost if it is waited for; else it may have done its part, and left in order.
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

import msgspec

from rankmesh.collectives.calls import Call, CallLog, Signature, digest
from rankmesh.collectives.founding import Founded, Founding, Offer, Prepare
from rankmesh.collectives.running import Collective
from rankmesh.collectives.staged import StagedCollective
from rankmesh.collectives.tuning import Chooser
from rankmesh.endpoint.router import PeerRouter
from rankmesh.endpoint.transfers import Send
from rankmesh.errors import ClosedError, DesyncError, ProtocolError, RankmeshError, TransferAborted
from rankmesh.wire.header import Flag
from rankmesh.wire.messages import TEXT_LIMIT, plain

if TYPE_CHECKING:
    from rankmesh.endpoint.endpoint import Endpoint
    from rankmesh.endpoint.hub import Hub
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


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """This side waits in a call; have you made the same?"""

    group: int
    sequence: int
    digest: int


class Tell(msgspec.Struct, tag="tell", frozen=True):
    """Ranks disagree: what each has called."""

    group: int
    calls: dict[int, str]

    def __post_init__(self) -> None:
        if any(len(text) > TEXT_LIMIT or not text.isprintable() for text in self.calls.values()):
            raise ValueError(f"a call's text is printable and has at most {TEXT_LIMIT} characters")


class Answer(msgspec.Struct, frozen=True):
    """`state`: "same", "other", "absent" or "gave up". `text`: the call, or what is to be said."""

    state: str
    text: str

    def __post_init__(self) -> None:
        if len(self.text) > TEXT_LIMIT or not self.text.isprintable():
            raise ValueError(f"an answer's text is printable and has at most {TEXT_LIMIT} characters")


Question = Ask | Tell | Prepare | Offer | Founded

_question = msgspec.msgpack.Decoder(Question)
_answer = msgspec.msgpack.Decoder(Answer)
_encode = msgspec.msgpack.Encoder().encode
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class _Question:
    """What was asked of a peer, until it has answered or is gone."""

    op = "question about a collective to"
    tag = None

    def __init__(self, router: PeerRouter, ident: int, then: Callable[[Answer], None]) -> None:
        self._router = router
        self.ident = ident
        self._then = then

    def replied(self, flags: int, service: int, payload: memoryview, owned: bool) -> None:
        self._router.requests.pop(self.ident, None)
        if flags & Flag.ERROR:  # it offers no collectives yet: it has not joined
            return
        try:
            answer = _answer.decode(payload)
        except _MALFORMED as error:
            raise ProtocolError(f"an answer about a collective cannot be read: {error}", reason="malformed") from error
        self._then(answer)

    def fail(self, error: BaseException) -> None:
        """It is lost, or this side closes: its collective learns of it by itself."""


class GroupContext:
    """The collectives of one group: its numbers on the wire, what is under way, what was called."""

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
        log = self.log
        if ask.sequence >= log.count:
            last = log[log.count - 1] if log.count else None
            where = "no collective yet" if last is None else f"last in {last}, {monotonic() - last.when:.1f} s ago"
            return Answer("absent", plain(f"has not called it: {where}"))
        try:
            call = log[ask.sequence]
        except KeyError:
            return Answer("same", "has long been through it")
        if call.digest != ask.digest:
            return Answer("other", plain(str(call)))
        if call.given_up:
            return Answer("gave up", plain(call.given_up))
        return Answer("same", plain(str(call)))

    def heard(self, collective: Collective, rank: int, answer: Answer) -> None:
        if collective.finished:
            return
        if answer.state == "gave up":
            self._given_up(collective, rank, answer.text)
            return
        said = {"same": "is in it", "other": f"called {answer.text}", "absent": answer.text}
        collective.answers[rank] = said.get(answer.state, "gave an answer that is not known here")
        self.agent.compare(self, collective, differs=answer.state == "other")

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

    def disagree(self, collective: Collective, rank: int, did: str) -> None:
        self.declare({self.rank: f"called {collective.call}", rank: did})

    def conclude(self, collective: Collective) -> None:
        """Somebody called something else: say so, with all that is known."""
        self.declare({**collective.answers, self.rank: f"called {collective.call}"})

    def declare(self, calls: dict[int, str]) -> None:
        """Ranks disagree: tell the others, and end here what is under way."""
        self._desynchronised({rank: plain(text) for rank, text in sorted(calls.items())}, list(self.routers))

    def told(self, calls: dict[int, str]) -> None:
        """It is passed on to who is connected: a rank that ends because of this says why before it says goodbye, and
        the others do not take it for the culprit."""
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
            if now - collective.moved >= STALL and now - self._asked.get(collective, 0.0) >= ASK_AGAIN:
                self._asked[collective] = now
                self._ask(context, collective)
            if now - self._mismatched.get(collective, now) >= GRACE:
                context.conclude(collective)
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
        body = memoryview(_encode(message))
        question = _Question(router, router.outbound.new_ident(), then)
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

    def compare(self, context: GroupContext, collective: Collective, differs: bool) -> None:
        """An answer came. Once somebody called something else, who answers soon is heard too."""
        if differs:
            self._mismatched.setdefault(collective, monotonic())
        if collective in self._mismatched and len(collective.answers) == len(context.routers) - 1:
            context.conclude(collective)

    # ------------------------------------------------------------------ answering

    def _on_request(self, router: Router, ident: int, payload: memoryview, owned: bool) -> None:
        try:
            question = _question.decode(payload)
        except _MALFORMED as error:
            raise ProtocolError(f"a question about a collective cannot be read: {error}", reason="malformed") from error
        context = self.contexts.get(question.group)
        member = context is not None and router.index in context.indices
        answer = Answer("absent", "is not in that group, or has closed it")
        if isinstance(question, Prepare | Offer | Founded):
            answer = Answer("same", "")
            if context is None:
                self._said_early(router, question)
            elif member:
                context.said(context.routers.index(router), question)
        elif context is not None and member:
            if isinstance(question, Tell):
                context.told(question.calls)
                answer = Answer("same", "")
            else:
                answer = context.answer(question)
        body = _encode(answer)
        router.reply(ident, [memoryview(body)], len(body), service=SERVICE)

    def _said_early(self, router: Router, word: Prepare | Offer | Founded) -> None:
        """Bounded: a group that nobody makes here is forgotten after many others."""
        if word.group in self.hub.closed_groups:
            return
        self._early.setdefault(word.group, []).append((router, word))
        while sum(map(len, self._early.values())) > EARLY:
            del self._early[next(iter(self._early))]

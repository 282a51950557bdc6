"""What ranks ask and tell each other about a collective that does not get on (agent.py has the rules), as it travels,
and what a rank has to say of a call by what it remembers of its own (calls.py)."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Final

import msgspec

from rankmesh.collectives.calls import CallLog
from rankmesh.collectives.founding import Founded, Offer, Prepare
from rankmesh.errors import ProtocolError
from rankmesh.wire.header import Flag
from rankmesh.wire.messages import TEXT_LIMIT, plain

if TYPE_CHECKING:
    from rankmesh.endpoint.router import PeerRouter

#: States of an answer: it has made the same call, another one, or none yet; it went through one so long ago that it
#: no longer knows which; it will not go on with it.
SAME: Final = "same"
OTHER: Final = "other"
ABSENT: Final = "absent"
PAST: Final = "past"
GAVE_UP: Final = "gave up"
NOBODY: Final = -1
#: What is said of who answered so, in the error of one that waits in vain.
_SAID: Final = {SAME: "is in it", OTHER: "called {}", ABSENT: "{}", PAST: "{}"}


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
    """`text`: the call, or what is to be said. `first`: the rank that gave up first, if it was another."""

    state: str
    text: str
    first: int = NOBODY

    def __post_init__(self) -> None:
        if len(self.text) > TEXT_LIMIT or not self.text.isprintable():
            raise ValueError(f"an answer's text is printable and has at most {TEXT_LIMIT} characters")

    def __str__(self) -> str:
        return _SAID.get(self.state, "gave an answer that is not known here").format(self.text)

    @property
    def called(self) -> str:
        """What is said of it where ranks disagree: each one's call."""
        return f"called {self.text}" if self.state == SAME else str(self)


Question = Ask | Tell | Prepare | Offer | Founded

_question: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answer = msgspec.msgpack.Decoder(Answer)
encode: Final = msgspec.msgpack.Encoder().encode
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def question_of(payload: memoryview) -> Question:
    try:
        return _question.decode(payload)
    except _MALFORMED as error:
        raise ProtocolError(f"a question about a collective cannot be read: {error}", reason="malformed") from error


class Asked:
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


def answer(log: CallLog, ask: Ask, whereabouts: Callable[[CallLog], str], closed: bool = False) -> Answer:
    """What a rank has to say of that call. `whereabouts`: what it does instead. `closed`: it has closed the group."""
    if ask.sequence >= log.count:
        if closed:
            return Answer(GAVE_UP, plain(f"it has closed this group, after {log.count} collectives"))
        last, elsewhere = log.last, whereabouts(log)
        where = "no collective yet" if last is None else f"last in {last}, {ago(last.when)} ago"
        return Answer(ABSENT, plain(f"has not called it: {where}{elsewhere and f'; {elsewhere}'}"))
    digest = log.digest(ask.sequence)
    try:
        call = log[ask.sequence]
    except KeyError:
        now = f"it is at {log.last} by now"
        if digest is None:
            return Answer(PAST, plain(f"has long been through #{ask.sequence}: {now}"))
        if digest != ask.digest:
            return Answer(OTHER, plain(f"something else as #{ask.sequence}: {now}"))
        return Answer(SAME, plain(f"the same as #{ask.sequence}: {now}"))
    if digest != ask.digest:
        return Answer(OTHER, plain(str(call)))
    if call.given_up:
        return Answer(GAVE_UP, plain(call.given_up), call.given_up_by)
    return Answer(SAME, plain(str(call)))


def ago(when: float) -> str:
    return f"{monotonic() - when:.1f} s"

"""The executor: one collective under way, as a Work. It runs any plan, round by round.

Methods need the engine's lock. Rules:

1. A round's receives are posted, then its sends are started; whatever ends one of them (`_ended`) counts it. The last
   one puts the collective into the engine's backlog, and whoever leads goes on with it: no thread belongs to a
   collective.
2. A thread that waits for it drives the pieces of the round that is under way one after the other, as if it had
   called recv() itself, and goes on with the plan itself.
3. What takes long (reducing much, a user's function) is done without the lock; `_busy` keeps others from going on
   meanwhile.
4. It ends once: well, or by `stop`, which gives up all pieces first, so that no buffer is touched afterwards. What
   comes while it is busy waits for the end of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from rankmesh.buffers import EMPTY, RecyclingPool, readable
from rankmesh.collectives.asking import SAME, Answer
from rankmesh.collectives.calls import Call
from rankmesh.collectives.plan import Into, Receive, Round, Send, touches
from rankmesh.collectives.reducing import Reducer
from rankmesh.collectives.space import Space
from rankmesh.config import KIB
from rankmesh.endpoint import transfers
from rankmesh.endpoint.router import PeerRouter
from rankmesh.endpoint.work import Work
from rankmesh.errors import DesyncError, PeerError, PeerLost, RankmeshError, TruncationError

if TYPE_CHECKING:
    from rankmesh.endpoint.hub import Hub
    from rankmesh.endpoint.router import Router

Array = np.ndarray[Any, Any]
#: More than this is reduced and copied without the lock.
_MUCH: Final = 128 * KIB
#: Up to this a message is sent at once if it can be, without a piece of its own.
_SMALL: Final = 16 * KIB
_FOREVER: Final = float("inf")


class Context(Protocol):
    """What a collective needs to know of its group."""

    number: int
    rank: int
    routers: Sequence[Router]
    hub: Hub

    def ended(self, collective: Collective) -> None: ...

    def disagree(self, collective: Collective, rank: int, did: str) -> None:
        """Another rank did what does not fit."""

    def conclude(self, collective: Collective) -> None:
        """Say so to all, with what is known by now."""


class _Sending(transfers.Send):
    """A message of a round on its way out."""

    def __init__(self, owner: Collective, router: Router, parts: list[memoryview]) -> None:
        nbytes = sum(part.nbytes for part in parts)
        super().__init__(router, owner.op, owner.context.number, owner.call.tag, 0, parts, nbytes, owner.timeout)
        self._owner = owner
        self.router = router

    def _end(self) -> None:
        super()._end()
        self._owner.piece_ended(self)

    def drop(self, error: BaseException) -> None:
        if self.router.gone:  # which fails it itself in a moment
            self.fail(error)
        elif isinstance(error, RankmeshError):
            self._give_up(error)
        else:
            self._give_up(RankmeshError(str(error)))


class _Receiving(transfers.Receive):
    """A message of a round that is to come, and where it belongs."""

    def __init__(self, owner: Collective, rank: int, router: Router, view: memoryview) -> None:
        context = owner.context
        super().__init__(
            context.hub,
            owner.op,
            router.peer,
            context.number,
            router.index,
            owner.call.tag,
            view,
            False,
            {},
            owner.timeout,
        )
        self._owner = owner
        self.rank = rank
        self.router = router
        self.expected = view.nbytes
        self.nbytes = -1

    def arrived(self, source: int, tag: int, nbytes: int) -> None:
        self.nbytes = nbytes
        super().arrived(source, tag, nbytes)
        self._owner.piece_ended(self)

    def fail(self, error: BaseException) -> None:
        if not self.finished:
            super().fail(error)
            self._owner.piece_ended(self)

    def drop(self, error: BaseException) -> None:
        if self.router.gone:
            self.fail(error)
        elif isinstance(error, RankmeshError):
            self._give_up(error)
        else:
            self._give_up(RankmeshError(str(error)))


Piece = _Sending | _Receiving


class Partners:
    """Whom a collective waits for, in the message of an error."""

    def __init__(self, owner: Collective) -> None:
        self._owner = owner

    def known(self, now: float) -> str:
        heard = [f"{self._owner.peers_name(rank)} {answer}." for rank, answer in sorted(self._owner.answers.items())]
        return " ".join(heard) or " ".join(router.known(now) for router in self._owner.awaited().values())

    def __str__(self) -> str:
        """Who has not come, as far as is known: whom the algorithm waits for may be waiting itself."""
        owner = self._owner
        absent = [rank for rank, answer in sorted(owner.answers.items()) if answer.state != SAME]
        names = [owner.peers_name(rank) for rank in absent]
        return ", ".join(names or [str(router.peer) for router in owner.awaited().values()]) or "its group"


class Collective(Work[Any]):
    """See the module's text."""

    _round: Round | None = None
    _pieces: Sequence[Piece] = ()
    _open = 0
    _queued = False
    _busy = False
    _doomed: BaseException | None = None
    #: When it ends by itself, if nobody waits for it: an asynchronous call whose caller has set it a time.
    ends = _FOREVER

    def __init__(
        self,
        context: Context,
        call: Call,
        plan: Iterable[Round],
        space: Space,
        reduction: Reducer | None,
        conclude: Callable[[], Any],
        timeout: float,
    ) -> None:
        super().__init__(context.hub.engine, f"{call.signature.collective} with", Partners(self), None, timeout)
        self.context = context
        self.call = call
        self._unasked()
        self._reduction = reduction
        self._conclude = conclude
        self._prepare(plan, space)

    def _unasked(self) -> None:
        #: By rank: what others answered when asked (agent.py), and what they did that does not fit.
        self.answers: dict[int, Answer] = {}
        self.doubts: dict[int, str] = {}
        self.moved = self.began

    def _prepare(self, plan: Iterable[Round], space: Space) -> None:
        self._rounds = iter(plan)
        self._space = space
        self._aside: list[tuple[Receive, Array]] = []

    # ------------------------------------------------------------------ what others see

    def awaited(self) -> dict[int, Router]:
        """Rank → router of those whose message, or whose taking of ours, is missing."""
        ranks = {id(router): rank for rank, router in enumerate(self.context.routers)}
        return {ranks[id(piece.router)]: piece.router for piece in self._pieces if not piece.finished}

    def peers_name(self, rank: int) -> str:
        return str(self.context.routers[rank].peer)

    def end_if_late(self, now: float) -> None:
        """Nobody may wait for it yet, and its time is over."""
        if now >= self.ends and not self.finished:
            self._give_up(self._late(self.timeout))

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if not self.finished:  # busy: the buffer is the caller's when that has ended
            with self._engine:
                self._engine.drive(self, _FOREVER)
        return cancelled

    # ------------------------------------------------------------------ rounds

    def work_off(self) -> None:
        """From the engine's backlog."""
        self._queued = False
        self.advance(leading=True)

    def advance(self, leading: bool = False) -> None:
        """Go on as far as it goes. `leading`: the calling thread leads the engine."""
        try:
            while not (self.finished or self._busy or self._open):
                following = next(self._rounds, None)
                if not self._end_round(following, leading):
                    return
                if following is None:
                    self._succeed(leading)
                    return
                if self._round is None:
                    self._begin_round(following)
        except Exception as error:  # noqa: BLE001  # also what a user's function raised: it is the caller's to see
            self.stop(error)

    def _succeed(self, leading: bool) -> None:
        if self._space.nbytes <= _MUCH:
            value = self._conclude()
        else:
            value = self._without_lock(self._conclude, leading)
            if self.finished:  # stopped meanwhile
                return
        self.context.ended(self)
        self.finish(value)

    def _begin_round(self, this: Round) -> None:
        self._round = this
        self.moved = monotonic()
        for copy in this.copies:
            np.copyto(self._space.array(copy.target), self._space.array(copy.source))
        pieces: list[Piece] = []
        self._pieces = pieces
        self._open = len(this.receives) + len(this.sends) + 1
        for receive in this.receives:
            incoming = self._receiving(receive)
            self.context.hub.post(incoming)
            pieces.append(incoming)
            if self.finished:
                return
        for send in this.sends:
            self._send(send, pieces)
            if self.finished:
                return
        self._open -= 1

    def _send(self, send: Send, pieces: list[Piece]) -> None:
        router = self.context.routers[send.to]
        if router.gone:
            raise router.lost_error(self.op, None)
        parts = [self._space.memory(span) for span in send.spans]
        nbytes = sum(map(len, parts))
        if nbytes <= _SMALL and isinstance(router, PeerRouter):
            whole = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
            try:
                sent = router.outbound.put(self.context.number, self.call.tag, whole, self.timeout)
            except PeerLost:
                raise router.lost_error(self.op, None) from None
            if sent:
                self._open -= 1
                return
        outgoing = _Sending(self, router, parts or [EMPTY])
        router.outbound.start(outgoing)
        pieces.append(outgoing)

    def _receiving(self, receive: Receive) -> _Receiving:
        router = self.context.routers[receive.source]
        if not receive.spans:
            return _Receiving(self, receive.source, router, EMPTY)
        if receive.into is Into.PLACE and len(receive.spans) == 1:
            return _Receiving(self, receive.source, router, self._space.memory(receive.spans[0]))
        places = [self._space.array(span) for span in receive.spans]
        aside = self._room(sum(map(len, places)), places[0].dtype)
        self._aside.append((receive, aside))
        return _Receiving(self, receive.source, router, readable(aside))

    def _room(self, count: int, dtype: np.dtype[Any]) -> Array:
        """New pages for what is large would cost as much as the bytes that come: it lies on used ones."""
        nbytes = count * dtype.itemsize
        if nbytes < RecyclingPool.SMALLEST:
            return np.empty(count, dtype)
        return np.frombuffer(self.context.hub.large_pool.take(nbytes), dtype)

    def piece_ended(self, piece: Piece) -> None:
        """From wherever in the endpoint it ended."""
        if self.finished:
            return
        if piece._error is not None:
            self._piece_failed(piece, piece._error)
            return
        if isinstance(piece, _Receiving) and piece.nbytes != piece.expected:
            self.context.disagree(self, piece.rank, f"sent {piece.nbytes} bytes where {piece.expected} were expected")
            return
        self._open -= 1
        if not self._open and not self._queued:
            self._queued = True
            self._engine.backlog.append(self)

    def _piece_failed(self, piece: Piece, error: BaseException) -> None:
        if isinstance(error, TruncationError) and isinstance(piece, _Receiving):
            self.context.disagree(self, piece.rank, f"sent {error.nbytes} bytes where {piece.expected} were expected")
        elif isinstance(error, PeerError) and piece.router.gone:
            self.stop(piece.router.lost_error(self.op, None))
        else:
            self.stop(error)

    def _end_round(self, following: Round | None, leading: bool) -> bool:
        """Put what was kept aside where it belongs. Where that takes long and the following round does not touch it,
        that round is begun before (rule 3 of plan.py). False: it was stopped meanwhile."""
        aside, self._aside = self._aside, []
        self._round = None
        if not aside:
            return True
        much = sum(came.nbytes for _, came in aside) > _MUCH
        if not much and not (self._reduction is not None and self._reduction.is_users):
            self._settle(aside)
            return True
        if following is not None and not touches(following, [span for receive, _ in aside for span in receive.spans]):
            self._begin_round(following)
            if self.finished:
                return False
        self._without_lock(lambda: self._settle(aside), leading)
        return not self.finished

    def _without_lock(self, what: Callable[[], Any], leading: bool) -> Any:
        """What stops it meanwhile, stops it afterwards."""
        engine = self._engine
        self._busy = True
        leader = engine.step_down() if leading else engine.lock.release()
        try:
            return what()
        finally:
            if leading:
                engine.step_up(leader)
            else:
                engine.acquire()
            self._busy = False
            if self._doomed is not None:
                self.stop(self._doomed)

    def _settle(self, aside: list[tuple[Receive, Array]]) -> None:
        for (_, spans, into), received in aside:
            at = 0
            for span in spans:
                place = self._space.array(span)
                came = received[at : at + len(place)]
                at += len(place)
                if into is Into.PLACE:
                    np.copyto(place, came)
                else:
                    assert self._reduction is not None, "a plan that reduces is given a reduction"
                    left, right = (came, place) if into is Into.LEFT else (place, came)
                    self._reduction.apply(left, right, place)

    # ------------------------------------------------------------------ the end

    def stop(self, error: BaseException) -> None:
        """End it badly: nothing of it is under way afterwards."""
        if self.finished or self._disagrees(error):
            return
        if self._busy:
            self._doomed = self._doomed or error
            return
        self.call.given_up = str(error) or type(error).__name__
        pieces, self._pieces = self._pieces, ()
        self.context.ended(self)
        self.fail(error)
        for piece in pieces:
            if not piece.finished:
                piece.drop(error)

    def _disagrees(self, error: BaseException) -> bool:
        """Somebody did what does not fit, and it ends because of that (True), whatever else came of it meanwhile: who
        was told sooner may have left."""
        if self.doubts and not isinstance(error, DesyncError):
            self.context.conclude(self)
        return self.finished

    def _give_up(self, error: RankmeshError) -> None:
        self.stop(error)

    def await_end(self, timeout: float | None) -> None:
        self.ends = _FOREVER  # who waits says for how long
        if timeout is None:
            deadline, timeout = self.began + self.timeout, self.timeout
        else:
            deadline = monotonic() + timeout
        try:
            self._drive(deadline)
        except BaseException:
            self._interrupted()
            raise
        if not self.finished:
            self._give_up(self._late(timeout))
            self._engine.drive(self, _FOREVER)  # at once, unless it is busy

    def _drive(self, deadline: float) -> None:
        """Drive the pieces one by one. Where another thread is busy with it, or has gone on with it, follow that."""
        while not self.finished:
            self.advance()
            if self.finished:
                return
            piece = next((piece for piece in self._pieces if not piece.finished), None)
            self._engine.drive(self if self._busy or piece is None else piece, deadline)
            if monotonic() >= deadline:
                self.advance()
                return

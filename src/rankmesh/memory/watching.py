"""RegionWatch: regions of another coming and going, as they do."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import msgspec

from rankmesh.endpoint.work import Work
from rankmesh.errors import BusyError, ClosedError, ProtocolError, RankmeshError
from rankmesh.memory.operations import Operation
from rankmesh.memory.protocol import DONE, REQUEST, SERVICE, Op, RegionInfo, decode_event, info_of
from rankmesh.wire.header import Flag

if TYPE_CHECKING:
    from rankmesh.memory.flow import Flow

#: Events that may wait for their watcher, who is behind otherwise, and must look at the list again.
MAX_EVENTS: Final = 65_536


class RegionEvent(NamedTuple):
    """A region came ("added") or went ("removed")."""

    kind: str
    info: RegionInfo


class _Awaited(Work[RegionEvent]):
    """Somebody waits for the next event."""

    def __init__(self, watching: Watching, timeout: float) -> None:
        super().__init__(watching.router.engine, "watch for regions of", watching.peer, None, timeout)
        self._watching = watching

    def _give_up(self, error: RankmeshError) -> None:
        self._watching.waiters.remove(self)
        self.fail(error)


class Watching(Operation):
    """The request: every event is another reply to it."""

    what = "watch"

    def __init__(self, flow: Flow, timeout: float) -> None:
        super().__init__(flow, "", REQUEST.pack(Op.WATCH, 0, 0, 0, 0, 0, 0), timeout)
        self.events: deque[RegionEvent] = deque()
        self.waiters: deque[_Awaited] = deque()
        #: Why there will be no more events.
        self.ended: BaseException | None = None

    def replied(self, flags: int, service: int, payload: memoryview, owned: bool) -> None:
        if not self.finished:
            if bytes(payload) != DONE:
                super().replied(flags, service, payload, owned)
            else:
                self._settle()
                self.conclude(None)
            return
        if flags & Flag.ERROR or service != SERVICE:  # the owner has no room for what this side does not read
            self.stop(BusyError(f"Events of {self.peer} come faster than they are read.", hint="Watch anew."))
            self.tell_cancelled()
            return
        try:
            told = decode_event(payload)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ProtocolError(f"an event that is none: {error}", reason="malformed event") from error
        if len(self.events) >= MAX_EVENTS:
            self.stop(BusyError(f"{MAX_EVENTS} events of {self.peer} wait already.", hint="Take them, or watch anew."))
            self.tell_cancelled()
            return
        self.events.append(RegionEvent(told.kind, info_of(told.region)))
        while self.waiters and self.events:
            awaited = self.waiters.popleft()
            if not awaited.finished:
                awaited.finish(self.events.popleft())

    def answered(self, payload: memoryview) -> None:
        raise ProtocolError("an event before the answer to its watcher", reason="unexpected reply")

    def fail(self, error: BaseException) -> None:
        """Also after the answer: the connection that brings events is gone."""
        self.stop(error)
        super().fail(error)

    def stop(self, error: BaseException) -> None:
        """There will be no more events."""
        if self.ended is None:
            self.ended = error
            self.router.requests.pop(self.ident, None)
            waiters, self.waiters = self.waiters, deque()
            for awaited in waiters:
                awaited.fail(error)

    def abandon(self) -> None:
        super().abandon()
        self.tell_cancelled()


class RegionWatch:
    """An iterator over the regions of another: first those that are there, then those that come and go. Close it, or
    use it as a context manager."""

    def __init__(self, watching: Watching, timeout: float) -> None:
        self._watching = watching
        self._timeout = timeout

    @classmethod
    def begin(cls, flow: Flow, timeout: float, wait: float) -> Self:
        watching = Watching(flow, timeout)
        watching.complete()
        return cls(watching, wait)

    def next(self, timeout: float | None = None) -> RegionEvent:
        """The next event, as soon as there is one. DeadlineError, PeerLost."""
        watching = self._watching
        with watching.router.engine:
            if watching.events:
                return watching.events.popleft()
            if watching.ended is not None:
                raise watching.ended
            awaited = _Awaited(watching, self._timeout if timeout is None else timeout)
            watching.waiters.append(awaited)
        return awaited.result()

    def close(self) -> None:
        """Watch no more."""
        watching = self._watching
        with watching.router.engine:
            if watching.ended is None:
                watching.abandon()
                said = f"The watch for regions of {watching.peer} was closed here."
                watching.stop(ClosedError(said, hint="Watch anew."))

    def __iter__(self) -> Iterator[RegionEvent]:
        return self

    def __next__(self) -> RegionEvent:
        return self.next()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""Work: the handle of an operation under way, for threads, callbacks and asyncio alike."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rankmesh.endpoint.waiting import Hint, Parker
from rankmesh.errors import CancelledError, DeadlineError, RankmeshError

if TYPE_CHECKING:
    from rankmesh.endpoint.progress import Engine

T = TypeVar("T")


class Work(Generic[T]):
    """An operation under way. Its buffer belongs to it until it is done.

    `wait()` and `result()` raise what the operation raised. One whose time runs out cancels the operation, and raises
    DeadlineError: from then on the buffer is the caller's again. `done()` looks without waiting. `await work` does not
    block the event loop; cancelling the awaiting task cancels the operation.
    """

    # Defaults on the class: an operation that ends at once never sets them, and setting attributes is what it costs.
    _callbacks: list[Callable[[Work[T]], object]] | None = None
    _error: BaseException | None = None
    _value: T | None = None
    finished = False
    parker: Parker | None = None
    look_every = threading.TIMEOUT_MAX
    hint: Hint | None = None
    yields = False

    def __init__(self, engine: Engine, op: str, peer: Any, tag: int | None, timeout: float) -> None:
        self._engine = engine
        self.op = op
        #: What the operation waits for: anything with `known(now)` and a `str`, or None.
        self.peer = peer
        self.tag = tag
        self.timeout = timeout
        self.began = monotonic()

    # ------------------------------------------------------------------ for users

    def done(self) -> bool:
        """Whether the operation has ended, well or badly."""
        return self.finished

    @property
    def error(self) -> BaseException | None:
        """What the operation failed with. None: nothing, or it has not ended."""
        return self._error

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end; raise what went wrong. Without `timeout`, the operation's own counts from its start."""
        self.result(timeout)

    def result(self, timeout: float | None = None) -> T:
        """Like `wait`, and return the operation's value (a Status for receives)."""
        if not self.finished:
            engine = self._engine
            engine.acquire()
            try:
                self.await_end(timeout)
            finally:
                engine.release()
        return self.outcome()

    def cancel(self) -> bool:
        """Give the operation up. False: it had ended already. Its buffer is not touched afterwards."""
        with self._engine:
            if self.finished:
                return False
            self._give_up(CancelledError(f"{self.describe()} was cancelled by this side."))
            return True

    def postpone(self) -> None:
        """Tell that the caller computes now, and waits for this soon: what would only keep it from computing may be
        left for then. Most operations know of no such thing."""

    def add_done_callback(self, callback: Callable[[Work[T]], object]) -> None:
        """Call `callback(work)` when the operation has ended: from the thread that ends it, or at once. It must not
        block."""
        with self._engine:
            if not self.finished:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                self._engine.background.wake()
                return
        callback(self)

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio  # a third of the time that `import rankmesh` would take, for those who await

        if not self.finished:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()

            def settle() -> None:
                if not future.done():
                    future.set_result(None)

            def wake(_: Work[T]) -> None:
                try:
                    loop.call_soon_threadsafe(settle)
                except RuntimeError:  # the loop was closed while the operation went on: nobody awaits it any more
                    pass

            self.add_done_callback(wake)
            remaining = max(self.began + self.timeout - monotonic(), 0.0)
            timer = loop.call_later(min(remaining, 1e6), self._expire)
            try:
                yield from future
            except asyncio.CancelledError:
                self.cancel()
                raise
            finally:
                timer.cancel()
        return self.outcome()

    def __repr__(self) -> str:
        cancelled = isinstance(self._error, CancelledError)
        state = "cancelled" if cancelled else "failed" if self._error else "done" if self.finished else "pending"
        return f"<Work {self.describe()}: {state}>"

    # ------------------------------------------------------------------ for the endpoint, with the engine's lock

    def finish(self, value: T) -> None:
        self._value = value
        self._end()

    def fail(self, error: BaseException) -> None:
        if not self.finished:
            self._error = error
            self._end()

    def _end(self) -> None:
        self.finished = True
        parker = self.parker
        if parker is not None and parker.locked():
            parker.release()
        if self._callbacks:
            for callback in self._callbacks:
                self._engine.defer(lambda callback=callback: callback(self))  # type: ignore[misc]
            self._callbacks = None

    def await_end(self, timeout: float | None) -> None:
        """Drive until the end; give up at the deadline."""
        if timeout is None:
            deadline, timeout = self.began + self.timeout, self.timeout
        else:
            deadline = monotonic() + timeout
        try:
            self._engine.drive(self, deadline)
        except BaseException:
            self._interrupted()
            raise
        if not self.finished:
            self._give_up(self._late(timeout))

    def _interrupted(self) -> None:
        """A signal's handler raised: nobody waits any more, and the buffer is the caller's."""
        if not self.finished:
            self._give_up(CancelledError(f"{self.describe()} was interrupted."))

    def _expire(self) -> None:
        with self._engine:
            if not self.finished:
                self._give_up(self._late(self.timeout))

    def outcome(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def _late(self, timeout: float) -> DeadlineError:
        now = monotonic()
        known = self.peer.known(now) if self.peer is not None else ""
        text = f"{self.describe()} did not complete within {timeout:g} s ({now - self.began:.2f} s since it began)."
        if known:
            text += f" {known}"
        return DeadlineError(
            text,
            op=self.op,
            peer=str(self.peer or ""),
            tag=self.tag,
            elapsed=now - self.began,
            timeout=timeout,
            known=known,
        )

    def describe(self) -> str:
        """What it is, in messages."""
        with_peer = f" {self.peer}" if self.peer is not None else ""
        return f"{self.op}{with_peer}" + (f", tag {self.tag}" if self.tag is not None else "")

    def _give_up(self, error: RankmeshError) -> None:
        """Detach the operation from its buffer and fail it. Subclasses undo what they did first."""
        self.fail(error)

"""Requests of others: from their bytes to a handler, and from its result to a reply.

With the lock, on the thread that leads, a request is only looked at: its function is found, its place in the queue
taken, its bytes copied out if they are not ours. Arguments are decoded, and handlers run, without it:

    inline     on the thread that leads, right after it has left the lock; several that came together are answered
               together, with one system call
    function   on a thread of the pool, which may be the one that has read it (see `pool`); several on one thread if
               they are brief (see `drain`)
    generator  likewise, as far as the caller's credit goes; then it is put aside, and takes no thread
    async      on the event loop

Whatever a handler does, its caller gets an answer: a result, or why there is none. What is under way, and may be
cancelled, is in `running` under (peer, ident) until it is answered; it counts for the queue's bounds until then.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from rankmesh.codec import pack_plain
from rankmesh.endpoint.frames import BRIEF_ANSWER
from rankmesh.endpoint.hub import Hub
from rankmesh.endpoint.lanes import Lane
from rankmesh.endpoint.outbound import JOIN_BYTES
from rankmesh.endpoint.router import Router
from rankmesh.endpoint.transfers import Send
from rankmesh.errors import BusyError, CodecError, InvalidMessage, UsageError
from rankmesh.rpc.answers import Answer, Parts, Refusal, describe, raised, type_name
from rankmesh.rpc.context import CallContext, current
from rankmesh.rpc.drain import BRIEF, Drain
from rankmesh.rpc.hooks import Hooks
from rankmesh.rpc.pool import Pool
from rankmesh.rpc.protocol import (
    ALIGNMENT,
    PLAIN_RESULT,
    SERVICE,
    Bit,
    Body,
    Kind,
    RequestHead,
    Why,
    item,
    read_arguments,
    read_request,
    reply,
)
from rankmesh.rpc.registry import Function, Registry
from rankmesh.wire.header import Flag
from rankmesh.wire.header import Kind as FrameKind

if TYPE_CHECKING:
    from rankmesh.rpc.loop import Loop

logger = logging.getLogger("rankmesh")

_REPLY: Final = int(FrameKind.REPLY)
_REPLY_FLAG: Final = int(Flag.REPLY)
#: Inline calls answered together.
BATCH: Final = 64
#: What a request counts for besides its bytes.
REQUEST_COST: Final = 1024


class Server:
    """See the module's text. `References` sets `keep` and `released`; `Streams` adds to `takes` and `about`."""

    def __init__(self, hub: Hub, hooks: Hooks) -> None:
        self.hub = hub
        self.engine = hub.engine
        self.config = hub.config
        self.hooks = hooks
        self.registry = Registry()
        self.pool = Pool(hub.engine, hub.config.rpc_threads)
        self._drain = Drain(self)
        self._loop: Loop | None = None
        self._loop_lock = threading.Lock()
        self.running: dict[tuple[int, int], CallContext] = {}
        self.items = 0
        self.nbytes = 0
        self._most_items = hub.config.rpc_queue_items
        self._most_bytes = hub.config.rpc_queue_bytes
        #: Calls that handlers ran for; and how those ended that were refused or raised.
        self.served = 0
        self.outcomes: Counter[str] = Counter()
        self._inline: deque[CallContext] = deque()
        self.keep: Callable[[CallContext, Any], int]
        #: Kind → what takes over a call of that kind, with the lock.
        self.takes: dict[int, Callable[[CallContext], None]] = {
            Kind.CALL: self._take_call,
            Kind.NOTIFY: self._take_call,
        }
        #: Kind → what a message about a call under way does, with the lock.
        self.about: dict[int, Callable[[CallContext, RequestHead, memoryview, bool], None]] = {
            Kind.CANCEL: lambda call, head, body, owned: self.cancel(call)
        }
        #: What a message of a peer's does that is about no call.
        self.released: Callable[[Router, memoryview], None]

    @property
    def loop(self) -> Loop:
        """Where `async def` handlers run."""
        if self._loop is None:
            from rankmesh.rpc.loop import Loop  # and with it asyncio, for those who use it

            with self._loop_lock:
                if self._loop is None:
                    self._loop = Loop(f"rankmesh-rpc-{self.engine.name}")
        return self._loop

    # ------------------------------------------------------------------ requests, with the lock

    def on_request(self, router: Router, ident: int, payload: memoryview, owned: bool) -> None:
        try:
            head = read_request(payload)
            if head[0] <= Kind.CHANNEL:
                self._admit(router, ident, head, payload, owned)
            else:
                self._aside(router, ident, head, payload, owned)
        except InvalidMessage as error:
            self.refuse(router, ident, Refusal(Why.INVALID, error.message))
        except Refusal as refusal:
            if payload[0] != Kind.NOTIFY:
                self.refuse(router, ident, refusal)

    def _admit(self, router: Router, ident: int, head: RequestHead, payload: memoryview, owned: bool) -> None:
        """A call that begins."""
        kind, flags, key, traced, body_at, seconds = head
        function = self.registry.functions.get(key)
        if flags & (Bit.SHIPPED | Bit.RETRY) or function is None:
            function = self._unusual(flags, key, function)
        nbytes = len(payload)
        items = self.items
        if items and (items >= self._most_items or self.nbytes + nbytes > self._most_bytes):
            raise self._full()
        body: Any = payload[body_at:] if owned else bytearray(payload[body_at:])
        name = function.name if function is not None else key.decode(errors="replace")
        call = CallContext(router, ident, name, function, monotonic() + seconds)
        call.kind, call.flags, call.body, call.trace = kind, flags, body, traced
        call.counted = nbytes = nbytes + REQUEST_COST
        self.items = items + 1
        self.nbytes += nbytes
        if function is not None and function.inline and kind <= Kind.NOTIFY:
            self._inline.append(call)
            if len(self._inline) == 1:
                self.engine.deferred.append(self._run_inline)
            return
        self._start(call)

    def _start(self, call: CallContext) -> None:
        """Hand a call that takes its time to whatever runs it."""
        place = (call.router.index, call.ident)
        take = self.takes.get(call.kind)
        try:
            if take is None or place in self.running:
                raise Refusal(Why.INVALID, f"Call {call.ident} is under way already, or of an unknown kind.")
            self.running[place] = call
            take(call)
        except Refusal as refusal:
            self.finish(call, refusal.answer(), refusal.why)

    def _unusual(self, flags: int, key: bytes, function: Function | None) -> Function | None:
        """A function that comes with the call, a second attempt, or a name that nobody registered."""
        if flags & Bit.SHIPPED:
            if not self.config.allow_pickle:
                raise Refusal(Why.REFUSED, "Functions are run for others only where Config.allow_pickle is set.")
            return None
        if function is None:
            name = key.decode(errors="replace")
            message = f"There is no function {name!r}."
            raise Refusal(Why.MISSING, message, names=self.registry.nearest(name))
        if flags & Bit.RETRY and not function.idempotent:
            raise Refusal(Why.NOT_IDEMPOTENT, f"{function.name!r} is not idempotent, so it is not tried again.")
        return function

    def _full(self) -> Refusal:
        why = Why.WAIT if self.config.rpc_when_full == "wait" else Why.BUSY
        return Refusal(
            why,
            f"{self.engine.name} has {self.items} calls of {self.nbytes} bytes waiting or running, as many as "
            f"Config.rpc_queue_items ({self.config.rpc_queue_items}) and rpc_queue_bytes "
            f"({self.config.rpc_queue_bytes}) allow.",
        )

    def _aside(self, router: Router, ident: int, head: RequestHead, payload: memoryview, owned: bool) -> None:
        """A message about a call under way; one that has ended is none of its business any more."""
        body = payload[head[4] :]
        if head[0] == Kind.RELEASE:
            self.released(router, body)
            return
        act = self.about.get(head[0])
        if act is None:
            raise InvalidMessage(f"A request of kind {head[0]} is unknown.")
        call = self.running.get((router.index, ident))
        if call is not None:
            act(call, head, body, owned)

    def refuse(self, router: Router, ident: int, refusal: Refusal) -> None:
        self.outcomes[refusal.why] += 1
        self.transmit(router, ident, *refusal.answer())

    def _take_call(self, call: CallContext) -> None:
        function = call.function
        if function is not None and (function.streams or function.channel):
            verb = "channel" if function.channel else "stream"
            raise Refusal(Why.INVALID, f"{call.name!r} is not called but opened: use {verb}().")
        if function is not None and function.is_async:
            self.engine.defer(lambda: self._spawn(call))
        elif function is not None and function.took < BRIEF:
            self._drain.add(call)
        else:
            self.pool.submit(lambda: self._run_pooled(call))

    def cancel(self, call: CallContext) -> None:
        """Nobody waits for it any more."""
        call.given_up = True
        if call.state is not None:
            call.state.cancelled()
        task, loop = call.task, call.loop
        if task is not None and loop is not None:
            self.engine.defer(lambda: _cancel_task(task, loop))

    def peer_lost(self, router: Router) -> None:
        """Its calls are not wanted any more; what it notified of is: nobody ever waited for that."""
        for call in [call for (index, _), call in self.running.items() if index == router.index]:
            if call.kind != Kind.NOTIFY:
                self.cancel(call)

    def closing(self) -> None:
        for call in list(self.running.values()):
            self.cancel(call)

    def close(self) -> None:
        """Without the lock."""
        if self._loop is not None:
            self._loop.close()
        self.pool.close()

    # ------------------------------------------------------------------ running, without the lock

    def _run_inline(self) -> None:
        queue = self._inline
        answers: list[tuple[CallContext, Answer | None]] = []
        try:
            while queue and len(answers) < BATCH:
                try:
                    call = queue.popleft()
                except IndexError:  # another thread took the last one
                    break
                answers.append((call, self.evaluate(call)))
        finally:
            if queue:
                self.engine.defer(self._run_inline)
            with self.engine:
                self.answer_all(answers)

    def answer_all(self, answers: list[tuple[CallContext, Answer | None]]) -> None:
        """Answer calls that have ended, those of one peer with one system call. With the lock."""
        if len(answers) == 1:
            self.finish(*answers[0])
            return
        for call, answer in answers:
            self.finish(call, answer, more=True)
        for router in {call.router for call, _ in answers}:
            router.outbound.flush()

    def timed(self, call: CallContext) -> Answer | None:
        """`evaluate`, and remember how long it took."""
        began = monotonic()
        answer = self.evaluate(call)
        if call.function is not None:
            call.function.took = monotonic() - began
        return answer

    def _run_pooled(self, call: CallContext) -> None:
        answer = self.timed(call)
        with self.engine:
            self.finish(call, answer)

    def _spawn(self, call: CallContext) -> None:
        from rankmesh.rpc.loop import serve

        self.spawn(call, lambda: serve(self, call))

    def spawn(self, call: CallContext, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `make()` on the event loop; it finishes the call. One that cannot run there is finished here."""
        try:
            self.loop.spawn(make)
        except Refusal as refusal:
            with self.engine:
                if call.state is not None:
                    call.state.cancelled()
                self.finish(call, refusal.answer(), refusal.why)

    def evaluate(self, call: CallContext) -> Answer | None:
        """Run the handler of a plain call. None: nobody waits for an answer."""
        if call.given_up:
            return None
        try:
            return self._evaluate(call)
        except Exception as error:  # handlers' errors are dealt with below: this is ours, and its caller must not wait
            logger.exception("A defect in rankmesh, in the %r.", call)
            return Refusal(Why.INTERNAL, describe(error)).answer()

    def _evaluate(self, call: CallContext) -> Answer:
        token = None
        try:
            function, args, kwargs = self.prepare(call)
            token = current.set(call)
            if self.hooks.active:
                value = self._hooked(call, lambda: function(*args, **kwargs))
            else:
                value = function(*args, **kwargs)
        except Refusal as refusal:
            return refusal.answer()
        except KeyboardInterrupt as error:
            # Ctrl-C reached the thread that happened to run an inline handler: it is that thread's.
            with self.engine:
                self.finish(call, self.raised(call, error))
            raise
        except BaseException as error:  # noqa: BLE001  # whatever a handler raises is told to its caller
            return self.raised(call, error)
        finally:
            if token is not None:
                current.reset(token)
        return self.result(call, value)

    def prepare(self, call: CallContext) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
        """The function and its arguments, checked. Raises Refusal."""
        if monotonic() >= call.deadline:
            raise Refusal(Why.LATE, f"its time was up before {call.name!r} was started")
        body, call.body = call.body, None  # the arguments keep alive what they need of it
        try:
            args, kwargs = read_arguments(call.flags, body, self.config.allow_pickle)
        except CodecError as error:
            raise Refusal(Why.INVALID, f"The arguments of {call.name!r} cannot be read: {error.message}") from None
        function = call.function
        if function is None:
            if not args or not callable(args[0]):
                raise Refusal(Why.INVALID, "A function was announced, and none came with the call.")
            return args[0], args[1:], kwargs
        try:
            function.check(args, kwargs)
        except InvalidMessage as error:
            raise Refusal(Why.INVALID, error.message) from None
        return function.fn, args, kwargs

    def begin(self, call: CallContext) -> Callable[[BaseException | None], None] | None:
        """Let the hooks see a call before its handler; what is returned is called with the outcome. Raises Refusal."""
        if not self.hooks.active:
            return None
        try:
            return self.hooks.serving(call)
        except Exception as error:  # a hook's way to refuse, or a hook that fails: either way the call is not served
            raise Refusal(Why.REFUSED, describe(error)) from error

    def _hooked(self, call: CallContext, run: Callable[[], Any]) -> Any:
        ended = self.begin(call)
        assert ended is not None
        try:
            value = run()
        except BaseException as error:
            ended(error)
            raise
        ended(None)
        return value

    # ------------------------------------------------------------------ answers

    def result(self, call: CallContext, value: Any) -> Answer:
        """The reply that carries a result, or says why it cannot be carried."""
        function = call.function
        flags = Bit.IDEMPOTENT if function is not None and function.idempotent else 0
        try:
            if call.flags & Bit.KEEP:
                value = self.keep(call, value)
            plain = pack_plain((value,))
            if plain is not None:
                plain = PLAIN_RESULT[flags] + plain
                return [plain], len(plain)
            return reply(Kind.RESULT, self.pack(call, value), flags)
        except Refusal as refusal:
            return refusal.answer()

    def pack(self, call: CallContext, value: Any) -> Body:
        """A result or an item, encoded. Raises Refusal for what cannot travel."""
        try:
            body = item(value, self.config.allow_pickle and call.router.peer.may_unpickle)
        except CodecError as error:
            raise Refusal(Why.RESULT, f"{error.message} {error.hint}".strip(), type_name="CodecError") from None
        except Exception as error:  # noqa: BLE001  # a result's conversions are the user's code; or memory ran out
            raise Refusal(Why.RESULT, describe(error), type_name=type_name(error)) from None
        limit = self._limit(call.router)
        if body.nbytes + ALIGNMENT > limit:
            text = f"it has {body.nbytes} bytes and the limit is {limit} (Config.max_rpc_bytes of both sides)."
            raise Refusal(Why.RESULT, text, type_name="BusyError")
        return body

    def _limit(self, router: Router) -> int:
        identity = router.peer.identity
        remote = identity.max_rpc if identity is not None else 0
        return min(self.config.max_rpc_bytes, remote or self.config.max_rpc_bytes)

    def raised(self, call: CallContext, error: BaseException, number: int = 0) -> Answer:
        """The reply that tells what a handler raised."""
        if call.kind == Kind.NOTIFY:
            logger.warning("The notification %r of %s raised %r.", call.name, call.caller, error)
        self.outcomes[Why.RAISED] += 1
        return raised(error, number)

    def finish(self, call: CallContext, answer: Answer | None, why: str = "", more: bool = False) -> None:
        """A call has ended: free its place, and tell its caller. With the lock."""
        place = (call.router.index, call.ident)
        if self.running.get(place) is call:
            del self.running[place]
        self.items -= 1
        self.nbytes -= call.counted
        if why:
            self.outcomes[why] += 1
        else:
            self.served += 1
        if answer is not None and call.kind != Kind.NOTIFY and not call.given_up:
            self.transmit(call.router, call.ident, *answer, more=more)

    def transmit(self, router: Router, ident: int, parts: Parts, nbytes: int, more: bool = False) -> None:
        """Send a reply. With the lock."""
        if router.gone or self.hub.closed:
            return
        outbound = router.outbound
        try:
            if nbytes <= JOIN_BYTES:
                body = parts[0] if len(parts) == 1 else b"".join(parts)
                if outbound.send_rpc(_REPLY, 0, SERVICE, ident, body, more):
                    if more or outbound.blocked:
                        outbound.check_unread(Lane.RPC)
                    return
                if router.gone:
                    return
            views = [memoryview(part) for part in parts]
            timeout = self.config.timeout
            outbound.start(Send(router, "reply to", SERVICE, ident, _REPLY_FLAG, views, nbytes, timeout))
        except (UsageError, BusyError) as error:
            if nbytes > BRIEF_ANSWER:
                self.refuse(router, ident, Refusal(Why.RESULT, error.message, type_name=type(error).__name__))
            else:
                logger.warning("Cannot answer %s: %s", router.peer, error.message)
        outbound.check_unread(Lane.RPC)


def _cancel_task(task: Any, loop: Any) -> None:
    try:
        loop.call_soon_threadsafe(task.cancel)
    except RuntimeError:  # the loop is closed, and the task with it
        pass

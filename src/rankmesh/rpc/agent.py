"""RpcAgent: functions that others may call, and calls of theirs. One per endpoint, made when it is first used; a mesh
and each of its groups address it by ranks of their own (`among`).

Who is called is a rank (of a mesh or a group) or a Peer; the endpoint itself, too: a call to oneself goes the same way,
but for the wire. Every wait takes `timeout` in seconds (None: Config.timeout), and inside a handler never more than
what is left of the call it serves. `timeout`, `out` and `returns` are therefore no names of arguments for the remote
function; pass such by place.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload
from weakref import WeakKeyDictionary

from rankmesh import trace
from rankmesh.codec import pack_plain
from rankmesh.endpoint import Endpoint, Peer, Work
from rankmesh.endpoint.ranks import Ranks
from rankmesh.endpoint.router import PeerRouter, Router
from rankmesh.errors import ConnectError, DeadlineError, InvalidMessage, PeerLost, UsageError
from rankmesh.rpc.broadcast import Broadcast
from rankmesh.rpc.client import Call, Notice, call_plain
from rankmesh.rpc.context import current, current_trace, outgoing_trace
from rankmesh.rpc.hooks import CallInfo, Hook, Hooks
from rankmesh.rpc.opening import Opened, OpenedChannel
from rankmesh.rpc.producing import Streams
from rankmesh.rpc.prompt import Prompt
from rankmesh.rpc.protocol import NAME_LIMIT, SERVICE, Bit, Body, Kind, Why, arguments, item, plain_prefix, request
from rankmesh.rpc.refs import Ref, References, RefHandle
from rankmesh.rpc.registry import Function
from rankmesh.rpc.server import Server
from rankmesh.rpc.streams import Channel, Stream

if TYPE_CHECKING:
    import asyncio

F = TypeVar("F", bound=Callable[..., Any])
#: Whom to call.
To = int | Peer | Endpoint

#: Seconds that a call whose server was lost may spend on reaching it again, out of its own time.
RECONNECT: Final = 5.0
#: Beginnings of calls that are kept: a program calls few functions, with few timeouts.
PREFIXES: Final = 1024


class RpcAgent:
    """Calls between this endpoint and others. All methods may be used from many threads."""

    #: Whom numbers mean. An endpoint has none.
    _ranks: Ranks | None = None

    def __init__(self, endpoint: Endpoint) -> None:
        """With the engine's lock."""
        self._endpoint = endpoint
        self._hub = endpoint.hub
        self._config = endpoint.config
        self._oneself: Router | None = None
        self._hooks = Hooks()
        self._server = Server(self._hub, self._hooks)
        self._refs = References(self._server)
        Streams(self._server)
        #: Functions whose results said that they are idempotent: only these are worth a second attempt.
        self._idempotent: set[str] = set()
        self._learn = self._idempotent.add
        #: (function, timeout) → how a plain call of it begins.
        self._prefixes: dict[tuple[str, float], bytes] = {}
        #: Peer that was lost → its successor, by which it was reached again; for as long as anybody has the lost one.
        self._successors: WeakKeyDictionary[Peer, Peer] = WeakKeyDictionary()
        endpoint.attach(SERVICE, self._server.on_request, Prompt(self._server).on_request, self)

    def among(self, ranks: Ranks) -> RpcAgent:
        """This agent, for whom numbers mean these ranks. Everything else is the same: functions, hooks, references."""
        agent = copy.copy(self)
        agent._ranks = ranks
        return agent

    # ------------------------------------------------------------------ offering functions

    @overload
    def register(
        self, fn: F, name: str | None = None, *, inline: bool = ..., idempotent: bool = ..., channel: bool = ...
    ) -> F: ...
    @overload
    def register(
        self,
        fn: None = None,
        name: str | None = None,
        *,
        inline: bool = ...,
        idempotent: bool = ...,
        channel: bool = ...,
    ) -> Callable[[F], F]: ...
    def register(
        self,
        fn: Callable[..., Any] | None = None,
        name: str | None = None,
        *,
        inline: bool = False,
        idempotent: bool = False,
        channel: bool = False,
    ) -> Any:
        """Let others call `fn`, under its own name or `name`. Also a decorator, with or without arguments.

        `fn` may be a function, a method, a generator (a stream), an `async def` or an async generator. Its type hints
        are checked against the arguments before it runs.

        `inline`: it takes microseconds, and runs on the thread that reads the network; while it runs, nothing else is
        read. That thread is whichever waits for something of this endpoint, or the endpoint's own. So the handler may
        use the endpoint, but must not take a lock that anybody holds around a call of rankmesh.

        `idempotent`: it may run twice for one call; then `call` tries once more after a lost connection. `channel`: it
        converses: its first argument is a Channel.
        """
        if fn is None:
            return lambda fn: self.register(fn, name, inline=inline, idempotent=idempotent, channel=channel)
        if not callable(fn):
            raise UsageError(f"{fn!r} is not a function. Use register_object() for the methods of an object.")
        chosen = name if name is not None else getattr(fn, "__name__", "")
        self._server.registry.add(Function(fn, chosen, inline=inline, idempotent=idempotent, channel=channel))
        return fn

    def register_object(self, obj: object, prefix: str, **options: Any) -> list[str]:
        """Let others call the public methods of `obj`, as `prefix.method`; the names. Options as for `register`."""
        methods = [(name, fn) for name, fn in inspect.getmembers(obj, callable) if not name.startswith("_")]
        names = [f"{prefix}.{name}" for name, _ in methods]
        for full, (_, fn) in zip(names, methods, strict=True):
            self.register(fn, full, **options)
        return names

    def unregister(self, name: str) -> None:
        """Take a function back. Calls of it that are under way go on."""
        self._server.registry.remove(name)

    @property
    def functions(self) -> list[str]:
        """The names that others may call."""
        return self._server.registry.names()

    def use_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run `async def` handlers on this event loop instead of one in a thread of the agent's."""
        self._server.loop.use(loop)

    def add_hook(self, hook: Hook) -> None:
        """Let `hook` see calls before and after, on both sides."""
        self._hooks.add(hook)

    def remove_hook(self, hook: Hook) -> None:
        self._hooks.remove(hook)

    # ------------------------------------------------------------------ calling

    def call(
        self,
        to: To,
        function: str,
        /,
        *args: Any,
        timeout: float | None = None,
        out: Any = None,
        returns: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Call a function and wait for its result.

        `out`: a buffer that the result, an array of its size, is copied into, and which is returned. `returns`: a
        dataclass, msgspec Struct or other type that the result is converted to and validated against.

        Raises what the function raised, as RemoteError and, where it was a builtin exception, as that;
        FunctionNotFound; InvalidMessage for arguments that do not fit; DeadlineError, PeerLost, NoConnection and
        BusyError.
        """
        router = self._router(to)
        if not kwargs and out is None and returns is None and function not in self._idempotent:
            seconds = self._config.timeout if timeout is None else timeout
            body = self._plain(function, args, seconds)
            if body is not None:
                return call_plain(router, function, body, seconds, self._learn)
        call = self._make(router, function, args, kwargs, timeout)
        if out is not None or returns is not None:
            call.out, call.returns = out, returns
        try:
            return call.complete()
        except PeerLost as lost:
            if function not in self._idempotent or isinstance(to, int):
                raise
            return self._retry(to, function, args, kwargs, call, lost)

    def call_async(
        self,
        to: To,
        function: str,
        /,
        *args: Any,
        timeout: float | None = None,
        out: Any = None,
        returns: Any = None,
        **kwargs: Any,
    ) -> Work[Any]:
        """Like `call`, without waiting: a Work, to wait for, await or cancel. Arrays among the arguments belong to it
        until it is done. It is not tried again after a lost connection."""
        call = self._make(self._router(to), function, args, kwargs, timeout)
        if out is not None or returns is not None:
            call.out, call.returns = out, returns
        call.begin()
        return call

    def notify(self, to: To, function: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> None:
        """Call a function without waiting for it, or hearing how it ended. Returns when the request has left: arrays
        among the arguments may be reused then."""
        router = self._router(to)
        notice = Notice(router, function, self._timeout(timeout))
        notice.complete(*self._request(Kind.NOTIFY, router, function, args, kwargs, notice.timeout))

    def stream(self, to: To, function: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Stream:
        """Iterate over what a remote generator yields. `timeout` is for each item. Closing the Stream, or letting go of
        it, stops the generator."""
        router = self._router(to)
        opened = Opened(router, function, self._timeout(timeout))
        self._open(Kind.STREAM, opened, args, kwargs)
        return Stream(opened.inbox, opened.abandon, opened.timeout)

    def channel(self, to: To, function: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Channel:
        """Converse with a function registered with `channel=True`: send items to it and iterate over those it sends.
        `timeout` is for each item."""
        router = self._router(to)
        opened = OpenedChannel(router, function, self._timeout(timeout))
        self._open(Kind.CHANNEL, opened, args, kwargs)

        def pack(value: Any) -> Body:
            return item(value, self._may_pickle(router))

        return Channel(opened.inbox, opened.outbox, pack, opened.end, opened.abandon, opened.timeout)

    def broadcast_call(
        self, to: Iterable[To] | None, function: str, /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Broadcast:
        """Call a function at many at once (None: at all ranks of the mesh or group, this one too). Iterate, with `for`
        or `async for`, over (whom, Work) as they end; `work.result()` gives the result or raises. Leaving early cancels
        the rest."""
        targets: list[To] = list(self._everybody() if to is None else to)
        calls = [(target, self._make(self._router(target), function, args, kwargs, timeout)) for target in targets]
        return Broadcast(self._hub.engine, calls)

    def _everybody(self) -> range:
        if self._ranks is None:
            raise UsageError("An endpoint without ranks has no 'everybody'. Pass the peers to call.")
        return self._ranks.everybody()

    def call_fn(
        self, to: To, fn: Callable[..., Any], /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Run a function of this side's there, and wait for its result. It travels by pickle (cloudpickle where that is
        installed), so both sides need Config.allow_pickle, and proof of who they are."""
        if not self._config.allow_pickle:
            raise UsageError("call_fn() sends a function by pickle. Set Config.allow_pickle on both sides.")
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        router = self._router(to)
        if not router.peer.may_unpickle:
            raise UsageError(f"{router.peer} does not take pickled functions. Set Config.allow_pickle there too.")
        return self._make(router, name, (fn, *args), kwargs, timeout, Bit.SHIPPED).complete()

    # ------------------------------------------------------------------ references

    def remote(self, to: To, function: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Ref:
        """Call a function and leave its result where it is: a reference to it, whose methods can be called, and whose
        value can be fetched. The object lives there until the last reference is let go of, or its holder is gone."""
        router = self._router(to)
        call = self._make(router, function, args, kwargs, timeout, Bit.KEEP)
        call.returns = int
        return Ref(self, router, call.complete())

    def adopt(self, handle: RefHandle, timeout: float | None = None) -> Ref:
        """A reference of one's own, from the `handle` of somebody else's. Its giver keeps his until then."""
        connected = (peer for peer in self._endpoint.peers if peer.uid == handle.owner)
        owner = self._endpoint.member(handle.owner) or next(connected, None)
        if owner is None:
            raise UsageError("The owner of this reference is not connected. Connect to it first.")
        self._make(owner.router, References.HOLD, (handle.number,), {}, timeout).complete()
        return Ref(self, owner.router, handle.number)

    def release(self, router: Router, number: int) -> None:
        """A reference was let go of. Takes the lock."""
        self._refs.tell_release(router, number)

    def handle_of(self, router: Router, number: int) -> RefHandle:
        uid = router.peer.uid if isinstance(router, PeerRouter) else self._endpoint.uid
        return RefHandle(uid or b"", number)

    # ------------------------------------------------------------------ what is going on

    def statistics(self) -> dict[str, int]:
        """Numbers: calls under way here and there, how those served ended, replies that came too late, references."""
        with self._hub.engine:
            server = self._server
            return {
                "calls_waiting": sum(len(router.requests) for router in self._hub.routers.values()),
                "serving": server.items,
                "serving_bytes": server.nbytes,
                "served": server.served,
                "threads": server.pool.threads,
                "late_replies": self._hub.late_replies,
                "references": len(self._refs),
                **{f"served_{how.replace(' ', '_')}": count for how, count in sorted(server.outcomes.items())},
            }

    def __repr__(self) -> str:
        return (
            f"<RpcAgent of {self._endpoint.name!r}: {len(self.functions)} functions, {self._server.items} served now>"
        )

    # ------------------------------------------------------------------ for the endpoint

    def needs(self, router: Router) -> bool:
        return self._refs.held_by(router) or any(index == router.index for index, _ in self._server.running)

    def peer_lost(self, router: Router) -> None:
        self._server.peer_lost(router)
        self._refs.peer_lost(router)

    def closing(self) -> None:
        self._server.closing()

    def closed(self) -> None:
        self._server.close()

    # ------------------------------------------------------------------ how a call is made

    def _router(self, to: To) -> Router:
        if isinstance(to, int):
            if self._ranks is None:
                raise UsageError("An endpoint without ranks calls a Peer, not a number. Pass what connect() returned.")
            return self._ranks.router(to)
        if isinstance(to, Peer):
            router = to.router
            if router.gone and to in self._successors:
                return self._router(self._successors[to])
            return router
        if to is self._endpoint:
            return self._to_oneself()
        raise UsageError(f"{to!r} cannot be called. Pass a rank, a Peer, or the endpoint itself.")

    def _to_oneself(self) -> Router:
        if self._oneself is None:
            with self._hub.engine:
                if self._oneself is None:
                    self._oneself = self._endpoint.oneself().router
        return self._oneself

    def _timeout(self, timeout: float | None) -> float:
        seconds = self._config.timeout if timeout is None else timeout
        call = current.get()
        if call is not None and call.deadline < math.inf:
            seconds = min(seconds, call.remaining)
        return seconds

    def _may_pickle(self, router: Router) -> bool:
        return self._config.allow_pickle and router.peer.may_unpickle

    def _request(
        self,
        kind: int,
        router: Router,
        function: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seconds: float,
        flags: int = 0,
    ) -> tuple[list[memoryview | bytes], int]:
        name = function.encode()
        if len(name) > NAME_LIMIT:
            raise UsageError(f"A function's name has at most {NAME_LIMIT} bytes. Correct the name.")
        body = arguments(args, kwargs, self._config.allow_pickle and router.peer.may_unpickle)
        return request(kind, body, name, seconds, flags, outgoing_trace())

    def _make(
        self,
        router: Router,
        function: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        flags: int = 0,
    ) -> Call:
        if timeout is None:
            timeout = self._config.timeout
        plain = None if kwargs or flags else self._plain(function, args, timeout)
        if plain is not None:
            return Call(router, function, [plain], len(plain), timeout, self._learn)
        seconds = self._timeout(timeout)
        if self._hooks.active:
            return self._make_hooked(router, function, args, kwargs, seconds, flags)
        if len(self._prefixes) < PREFIXES:
            self._prefixes[function, timeout] = plain_prefix(Kind.CALL, function.encode(), timeout)
        parts, nbytes = self._request(Kind.CALL, router, function, args, kwargs, seconds, flags)
        return Call(router, function, parts, nbytes, seconds, self._learn)

    def _plain(self, function: str, args: tuple[Any, ...], seconds: float) -> bytes | None:
        """The request, if that is one small piece: the arguments are plain values, no handler runs this code, no hook
        watches, no trace is carried on, and the function was called before."""
        if current.get() is not None or self._hooks.hooks or trace.active is not None or current_trace.get():
            return None
        prefix = self._prefixes.get((function, seconds))
        if prefix is None or (plain := pack_plain(args)) is None:
            return None
        return prefix + plain

    def _make_hooked(
        self,
        router: Router,
        function: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seconds: float,
        flags: int,
    ) -> Call:
        info = CallInfo(router.peer, function, seconds, outgoing_trace())
        ended = self._hooks.calling(info)
        try:
            body = arguments(args, kwargs, self._may_pickle(router))
            context = info.trace_context()
            parts, nbytes = request(Kind.CALL, body, function.encode()[:NAME_LIMIT], seconds, flags, context)
            call = Call(router, function, parts, nbytes, seconds, self._learn)
        except BaseException as error:
            ended(error)
            raise
        call.add_done_callback(lambda _: ended(call.exception()))
        return call

    def _open(self, kind: int, opened: Opened, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        serving = current.get()
        seconds = math.inf if serving is None else serving.remaining
        parts, nbytes = self._request(kind, opened.router, opened.name, args, kwargs, seconds)
        with self._hub.engine:
            opened.send(parts, nbytes)

    def _retry(
        self,
        to: Any,
        function: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Call,
        lost: PeerLost,
    ) -> Any:
        """Once more, over a new connection, if the function is idempotent there too."""
        remaining = call.began + call.timeout - monotonic()
        addresses = [str(address) for address in to.addresses] if isinstance(to, Peer) else []
        if not addresses or remaining <= 0:
            raise lost
        try:
            successor = self._endpoint.connect({"addresses": addresses}, min(remaining, RECONNECT))
        except (ConnectError, DeadlineError) as error:
            raise lost from error
        self._successors[to] = successor
        remaining = call.began + call.timeout - monotonic()
        again = self._make(successor.router, function, args, kwargs, remaining, Bit.RETRY)
        again.out, again.returns = call.out, call.returns
        try:
            return again.complete()
        except InvalidMessage as refused:
            if refused.reason == Why.NOT_IDEMPOTENT:
                raise lost from refused
            raise

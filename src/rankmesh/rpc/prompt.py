"""The hot path of the server, written out: a plain call that came alone runs on the thread that has read it.

That is for inline functions; and for those of the pool where a thread of the pool lingers and reads (see `pool`), as
long as their last run was quick. The thread steps down from the lead while the handler runs, so others may take it.
Everything else about a request, and whatever is wrong with one, goes the general way (`Server.on_request`).
"""

from __future__ import annotations

import struct
from time import monotonic
from typing import Final

from rankmesh import trace
from rankmesh.codec import unpack_plain
from rankmesh.endpoint.outbound import JOIN_BYTES
from rankmesh.endpoint.router import Router
from rankmesh.errors import BusyError, CodecError, InvalidMessage
from rankmesh.rpc.answers import Answer
from rankmesh.rpc.context import CallContext, current
from rankmesh.rpc.protocol import REQUEST, SERVICE, Kind
from rankmesh.rpc.registry import Function
from rankmesh.rpc.server import REQUEST_COST, Server
from rankmesh.wire.header import Kind as FrameKind

_CALL: Final = Kind.CALL
_REQUEST_BYTES: Final = REQUEST.size
_unpack_request: Final = REQUEST.unpack_from
_REPLY: Final = int(FrameKind.REPLY)
#: A handler of the pool whose last run took less than so many seconds may run on the pool's thread that reads.
QUICK: Final = 100e-6


class Prompt:
    """Serves requests that came alone. With the lock."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._engine = server.engine
        self._hub = server.hub
        self._hooks = server.hooks
        self._linger = server.pool.linger
        self._functions = server.registry.functions
        #: How the last request began: its bytes up to the arguments, which function it was for and for how long.
        self._head, self._key, self._start, self._seconds = b"", b"", 1, 0.0

    def on_request(self, router: Router, ident: int, payload: memoryview, owned: bool) -> None:
        try:
            start = self._start
            if bytes(payload[:start]) != self._head:
                start = self._read_head(payload)
            function = self._functions.get(self._key)
            if (
                function is None
                or not (function.inline or self._may_run_here(router, function, ident))
                or self._hub.closed
                or self._hooks.hooks
                or trace.active is not None
            ):
                self._server.on_request(router, ident, payload, owned)
                return
            args = unpack_plain(payload[start:])
            if function.hinted or not function.least <= len(args) <= function.most:
                function.check(args, {})
        except (struct.error, CodecError, InvalidMessage):
            self._server.on_request(router, ident, payload, owned)
            return
        began = monotonic()
        call = CallContext(router, ident, function.name, function, began + self._seconds)
        if not function.inline:
            self._enter(call)
        parts, nbytes = self._run(call, function, args)
        sent = call.given_up
        if nbytes <= JOIN_BYTES and len(parts) == 1 and not (router.gone or sent):
            try:
                sent = router.outbound.send_rpc(_REPLY, 0, SERVICE, ident, parts[0])
            except BusyError:
                pass  # the general way deals with it
        if not sent:
            self._server.transmit(router, ident, parts, nbytes)
        if not function.inline:  # what follows is nothing that the caller waits for
            function.took = monotonic() - began
            self._leave(call)
        self._server.served += 1

    def _read_head(self, payload: memoryview) -> int:
        """Read what comes before the arguments, and where they begin: the next request often begins with the same
        bytes. Raises for what is not a plain call."""
        kind, flags, name, traced, body_at, seconds = _unpack_request(payload)
        start: int = _REQUEST_BYTES + name
        if kind != _CALL or flags or traced or body_at != start or start > len(payload) or not seconds > 0:
            raise InvalidMessage("It is not a plain call.")  # which the general way deals with
        self._head, self._start = bytes(payload[:start]), start
        self._key, self._seconds = self._head[_REQUEST_BYTES:], seconds
        return start

    def _may_run_here(self, router: Router, function: Function, ident: int) -> bool:
        linger = self._linger
        if self._engine.leader is not linger:
            return False
        return function.plain and function.took < QUICK and (router.index, ident) not in self._server.running

    def _enter(self, call: CallContext) -> None:
        """It may be cancelled, and counts, like any other that takes its time."""
        server = self._server
        call.kind = _CALL
        call.counted = REQUEST_COST
        server.items += 1
        server.nbytes += REQUEST_COST
        server.running[call.router.index, call.ident] = call
        server.pool.begin_here()

    def _leave(self, call: CallContext) -> None:
        server = self._server
        server.running.pop((call.router.index, call.ident), None)
        server.items -= 1
        server.nbytes -= REQUEST_COST
        server.pool.end_here()

    def _run(self, call: CallContext, function: Function, args: list[object]) -> Answer:
        engine = self._engine
        leader = engine.step_down()
        token = current.set(call)
        try:
            return self._server.result(call, function.fn(*args))
        except KeyboardInterrupt as error:  # Ctrl-C reached the thread that happened to run it: it is that thread's
            with engine:
                self._server.transmit(call.router, call.ident, *self._server.raised(call, error))
            raise
        except BaseException as error:  # noqa: BLE001  # whatever a handler raises is told to its caller
            return self._server.raised(call, error)
        finally:
            current.reset(token)
            engine.step_up(leader)

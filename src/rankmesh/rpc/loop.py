"""The event loop that `async def` handlers run on: the user's, or one in a thread of its own, started when needed.

asyncio is loaded with this module, which is loaded with the first handler that needs it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from rankmesh.rpc.answers import Answer, Refusal
from rankmesh.rpc.context import CallContext, current
from rankmesh.rpc.pool import JOIN_SECONDS
from rankmesh.rpc.producing import PATIENCE, Conversing, Serving
from rankmesh.rpc.protocol import Why
from rankmesh.rpc.server import Server

logger = logging.getLogger("rankmesh")


class Loop:
    """The event loop of `async def` handlers: the user's, or one in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def use(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._loop = loop

    def spawn(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `make()` as a task there. From any thread, without the engine's lock. Raises Refusal if there is nobody
        to run it."""
        with self._lock:
            if self._closed:
                raise Refusal(Why.CANCELLED, "The endpoint is closed.")
            loop = self._loop or self._start()
        try:
            loop.call_soon_threadsafe(self._create, make)
        except RuntimeError:  # the user's loop was closed
            text = "The event loop given to use_loop() is closed: async handlers cannot run. Give it one that runs."
            logger.warning(text)
            raise Refusal(Why.RAISED, text, type_name="RuntimeError") from None

    def _create(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.get_running_loop().create_task(make())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _start(self) -> asyncio.AbstractEventLoop:
        self._loop = loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(loop,), name=f"{self._name}-loop", daemon=True)
        self._thread.start()
        return loop

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is None or loop.is_closed():
            return
        try:
            asyncio.run_coroutine_threadsafe(self._cancel_all(), loop)
        except RuntimeError:  # closed by its owner just now
            return
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)

    async def _cancel_all(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=JOIN_SECONDS / 2)
        if self._thread is not None:
            asyncio.get_running_loop().stop()


async def serve(server: Server, call: CallContext) -> None:
    """Run a coroutine function for a plain call, until its end, its cancellation or its deadline."""
    answer: Answer | None
    try:
        answer = server.result(call, await run(server, call))
    except Refusal as refusal:
        answer = refusal.answer()
    except asyncio.CancelledError:
        answer = Refusal(Why.CANCELLED, f"{call.name!r} was cancelled there.").answer()
    except BaseException as error:  # noqa: BLE001  # whatever a handler raises is told to its caller
        answer = server.raised(call, error)
    with server.engine:
        server.finish(call, answer)


async def run(
    server: Server, call: CallContext, *first: Any, make: Callable[[Any], Coroutine[Any, Any, Any]] | None = None
) -> Any:
    """What the handler returns; `first` are arguments before the caller's. `make`: what consumes it, if it is no
    coroutine."""
    call.loop, call.task = asyncio.get_running_loop(), asyncio.current_task()
    if call.given_up:
        raise asyncio.CancelledError  # it came between the request and the task
    function, args, kwargs = server.prepare(call)
    ended = server.begin(call)
    error: BaseException | None = None
    token = current.set(call)
    try:
        async with asyncio.timeout(None if call.remaining > 1e6 else call.remaining):
            made = function(*first, *args, **kwargs)
            return await (made if make is None else make(made))
    except TimeoutError as late:
        error = late
        if call.remaining:
            raise
        raise Refusal(Why.LATE, f"{call.name!r} was stopped when its time was up") from late
    except BaseException as raised:
        error = raised
        raise
    finally:
        current.reset(token)
        if ended is not None:
            ended(error)


async def produce(serving: Serving) -> None:
    """Run an async generator for a stream, or a coroutine function for a channel."""
    server, call = serving.server, serving.call
    try:
        if isinstance(serving, Conversing):
            await run(server, call, serving.channel())
        else:
            await run(server, call, make=_items(serving))
        answer = serving.ended()
    except Refusal as refusal:
        answer = refusal.answer(serving.outbox.number)
    except asyncio.CancelledError:
        answer = Refusal(Why.CANCELLED, f"{call.name!r} was cancelled there.").answer(serving.outbox.number)
    except BaseException as error:  # noqa: BLE001  # whatever a handler raises is told to its caller
        answer = server.raised(call, error, serving.outbox.number)
    with server.engine:
        serving.cancelled()
        server.finish(call, answer)


def _items(serving: Serving) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """A coroutine function that sends what an async generator yields."""

    async def consume(generator: AsyncGenerator[Any, None]) -> None:
        async with aclosing(generator):
            async for value in generator:
                body = serving.server.pack(serving.call, value)
                with serving.server.engine:
                    room = serving.outbox.queue(body, PATIENCE)
                await room

    return consume

"""Two connected endpoints, one of which offers functions: what the tests of RPC call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from peers import SOON, Medium
from rankmesh import Channel, Config, Endpoint, Peer, RpcAgent, current_call
from timing import wait_until


@dataclass
class Point:
    x: int
    y: float = 0.5


class Counter:
    """An object with methods."""

    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    def _hidden(self) -> None:
        raise AssertionError("nobody can call this")


class Functions:
    """What a server in the tests offers. `gate` holds `wait` back; `log` remembers what handlers want known."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.log: list[Any] = []

    def register(self, rpc: RpcAgent) -> None:
        for fn in (self.add, self.fail, self.wait, self.count, self.forever, self.typed, self.make, self.note):
            rpc.register(fn)
        for coroutine in (self.aecho, self.await_cancel, self.acount):
            rpc.register(coroutine)
        rpc.register(lambda value: value, "pooled")
        rpc.register(lambda value: value, "echo", inline=True)
        rpc.register(self.fail, "inline_fail", inline=True)
        rpc.register(self.chat, channel=True)
        rpc.register(self.achat, channel=True)

    @staticmethod
    def add(a: Any, b: Any = 1, *, c: Any = 0) -> Any:
        return a + b + c

    @staticmethod
    def fail(kind: str, text: str = "on purpose") -> None:
        raise {"ValueError": ValueError, "KeyError": KeyError, "Custom": Custom, "SystemExit": SystemExit}[kind](text)

    def wait(self, seconds: float = SOON) -> str:
        """Until the gate opens, or the caller no longer waits."""
        call = current_call()
        self.log.append("waiting")
        wait_until(lambda: self.gate.is_set() or call.cancelled, seconds)
        self.log.append("cancelled" if call.cancelled else "done")
        return "waited"

    def note(self, what: Any) -> None:
        self.log.append(what)

    def count(self, n: int) -> Iterator[int]:
        try:
            yield from range(n)
        finally:
            self.log.append("closed")

    def forever(self, nbytes: int) -> Iterator[Any]:
        number = 0
        try:
            while True:
                self.log.append(number)
                yield np.full(nbytes, number % 256, np.uint8)
                number += 1
        finally:
            self.log.append("closed")

    @staticmethod
    def typed(point: Point, names: list[str], scale: float = 1.0) -> dict[str, Any]:
        assert isinstance(point, Point)
        return {"x": point.x * scale, "names": names}

    @staticmethod
    def make(start: int) -> Counter:
        return Counter(start)

    @staticmethod
    async def aecho(value: Any) -> Any:
        await asyncio.sleep(0)
        return value

    async def await_cancel(self) -> None:
        self.log.append("waiting")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise

    async def acount(self, n: int) -> AsyncIterator[int]:
        try:
            for i in range(n):
                yield i
        finally:
            self.log.append("closed")

    @staticmethod
    def chat(channel: Channel, greeting: str) -> None:
        channel.send(greeting)
        for item in channel:
            channel.send([item, item])

    @staticmethod
    async def achat(channel: Channel, greeting: str) -> None:
        await channel.asend(greeting)
        async for item in channel:
            await channel.asend([item, item])


class Custom(Exception):
    """An exception that the caller's side does not know."""


@dataclass
class Served:
    """A client, its peer (the server as it sees it), and the server."""

    client: Endpoint
    peer: Peer
    server: Endpoint
    functions: Functions


@contextmanager
def serving(medium: Medium, server_settings: dict[str, Any] | None = None, **settings: Any) -> Iterator[Served]:
    config: Config = medium.config.override(**settings)
    functions = Functions()
    with (
        Endpoint(medium.address, name="server", config=config.override(**(server_settings or {}))) as server,
        Endpoint(medium.address, name="client", config=config) as client,
    ):
        functions.register(server.rpc)
        try:
            yield Served(client, client.connect(server.address, timeout=SOON), server, functions)
        finally:
            functions.gate.set()

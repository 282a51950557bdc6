"""gRPC for Python, threaded and asyncio, with `bytes` in and out: no protobuf message to build or parse.

Both sides of a row are of its kind: a threaded client calls a threaded server, an asyncio client an asyncio server.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio

from subjects.base import HOST, OPEN_TIMEOUT, Call, Caller, keep_in_flight

SERVICE, METHOD = "bench.Echo", "Echo"
#: As in gRPC's own examples.
SERVER_THREADS = 10
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class Grpc(Caller):
    """The threaded API."""

    def open(self, rank: int, size: int, port: int) -> None:
        self.server: grpc.Server | None = None
        address = f"{HOST}:{port}"
        if rank == 1:
            self.server = grpc.server(ThreadPoolExecutor(SERVER_THREADS), options=UNLIMITED)
            self.server.add_generic_rpc_handlers([handler(lambda request, _: request)])
            self.server.add_insecure_port(address)
            self.server.start()
        else:
            self.channel = grpc.insecure_channel(address, options=UNLIMITED)
            self.stub = self.channel.unary_unary(f"/{SERVICE}/{METHOD}")
            grpc.channel_ready_future(self.channel).result(OPEN_TIMEOUT)

    def close(self) -> None:
        if self.server is not None:
            self.server.stop(None).wait(OPEN_TIMEOUT)
        else:
            self.channel.close()

    def version(self) -> str:
        return f"grpcio {grpc.__version__}"

    def caller(self) -> Call:
        call: Call = self.stub
        return call

    def call_in_flight(self, payload: Any, count: int, window: int) -> Any:
        return keep_in_flight(self.stub.future, lambda future: future.result(), payload, count, window)


def handler(echo: Any) -> grpc.GenericRpcHandler:
    return grpc.method_handlers_generic_handler(SERVICE, {METHOD: grpc.unary_unary_rpc_method_handler(echo)})


class GrpcAio(Caller):
    """The asyncio API. The server's loop runs in a thread; the client's runs while a measure does."""

    def open(self, rank: int, size: int, port: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.serving: threading.Thread | None = None
        address = f"{HOST}:{port}"
        if rank == 1:
            self.loop.run_until_complete(self._start(address))
            self.serving = threading.Thread(target=self.loop.run_forever, name="grpc-aio-server")
            self.serving.start()
        else:
            self.loop.run_until_complete(self._connect(address))

    async def _start(self, address: str) -> None:
        async def echo(request: bytes, _: object) -> bytes:
            return request

        self.server = grpc.aio.server(options=UNLIMITED)
        self.server.add_generic_rpc_handlers([handler(echo)])
        self.server.add_insecure_port(address)
        await self.server.start()

    async def _connect(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=UNLIMITED)
        self.stub = self.channel.unary_unary(f"/{SERVICE}/{METHOD}")
        await asyncio.wait_for(self.channel.channel_ready(), OPEN_TIMEOUT)

    def close(self) -> None:
        if self.serving is not None:
            asyncio.run_coroutine_threadsafe(self.server.stop(None), self.loop).result(OPEN_TIMEOUT)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.serving.join()
        else:
            self.loop.run_until_complete(self.channel.close())
        self.loop.close()

    def version(self) -> str:
        return f"grpcio {grpc.__version__}"

    def caller(self) -> Call:
        return lambda payload: self.loop.run_until_complete(self._one(payload))

    async def _one(self, payload: bytes) -> Any:
        return await self.stub(payload)

    def time_calls(self, payload: bytes, count: int) -> tuple[list[int], Any]:
        async def loop() -> tuple[list[int], Any]:
            stub, clock = self.stub, time.perf_counter_ns
            samples, result = [0] * count, None
            for i in range(count):
                began = clock()
                result = await stub(payload)
                samples[i] = clock() - began
            return samples, result

        return self.loop.run_until_complete(loop())

    def call_in_flight(self, payload: bytes, count: int, window: int) -> Any:
        """`window` tasks that call one after the other: what an asyncio program does."""
        tickets = iter(range(count))

        async def lane() -> Any:
            result = None
            for _ in tickets:
                result = await self.stub(payload)
            return result

        async def lanes() -> Any:
            results = await asyncio.gather(*(lane() for _ in range(min(window, count))))
            return results[0]

        return self.loop.run_until_complete(lanes())

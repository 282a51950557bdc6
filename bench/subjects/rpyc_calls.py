"""RPyC: a service in a thread of the server, `bytes` in and out: an array would become a proxy, and cross by item."""

from __future__ import annotations

import socket
import threading
from typing import Any

import rpyc
from rpyc.core.channel import Channel
from rpyc.core.stream import SocketStream
from rpyc.utils.server import ThreadedServer

from subjects.base import HOST, OPEN_TIMEOUT, Call, Caller, keep_in_flight
from subjects.sockets import connect_when_listening

# As fast as it can be made from outside: random data is not compressed, and a large message is not cut into pieces of
# 64 KB, each of which copies the rest.
Channel.COMPRESSION_THRESHOLD = 1 << 32
SocketStream.MAX_IO_CHUNK = 1 << 30


class Echo(rpyc.Service):
    def exposed_echo(self, data: bytes) -> bytes:
        return data


class Rpyc(Caller):
    def open(self, rank: int, size: int, port: int) -> None:
        self.server: ThreadedServer | None = None
        if rank == 1:
            self.server = ThreadedServer(Echo, hostname=HOST, port=port)
            self.server.listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what it accepts inherits it
            self.serving = threading.Thread(target=self.server.start, name="rpyc-server")
            self.serving.start()
        else:
            sock = connect_when_listening(port)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connection = rpyc.connect_stream(SocketStream(sock), config={"sync_request_timeout": OPEN_TIMEOUT})
            self.start = rpyc.async_(self.connection.root.echo)

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
            self.serving.join()
        else:
            self.connection.close()

    def version(self) -> str:
        return f"rpyc {rpyc.__version__}"

    def caller(self) -> Call:
        call: Call = self.connection.root.echo
        return call

    def call_in_flight(self, payload: Any, count: int, window: int) -> Any:
        return keep_in_flight(self.start, lambda result: result.value, payload, count, window)

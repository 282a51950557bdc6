"""pyzmq as it is used for calls: REQ/REP for one at a time, DEALER/ROUTER for many.

No deadlines, no errors, no names of functions: what a library that has them is to be compared with.
"""

from __future__ import annotations

import threading
from typing import Any

import zmq

from subjects.base import HOST, Call, Caller


class ZmqCaller(Caller):
    """What both patterns share; the server answers in a thread of its own until the context is terminated."""

    client_type: int
    server_type: int

    def open(self, rank: int, size: int, port: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.server: threading.Thread | None = None
        address = f"tcp://{HOST}:{port}"
        if rank == 1:
            sock = self.context.socket(self.server_type)
            sock.bind(address)
            self.server = threading.Thread(target=self._serve, args=(sock,), name="zmq-server")
            self.server.start()
        else:
            self.sock = self.context.socket(self.client_type)
            self.sock.connect(address)

    def _serve(self, sock: zmq.Socket[bytes]) -> None:
        sock.linger = 0
        try:
            while True:
                sock.send_multipart(sock.recv_multipart(copy=False), copy=False)
        except zmq.ContextTerminated:
            sock.close()

    def close(self) -> None:
        if self.server is None:
            self.sock.close(linger=0)
        self.context.term()
        if self.server is not None:
            self.server.join()

    def version(self) -> str:
        return f"pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()}"

    def caller(self) -> Call:
        send, recv = self.sock.send, self.sock.recv

        def call(payload: Any) -> Any:
            send(payload, copy=False)
            return recv(copy=False)

        return call


class ZmqReqRep(ZmqCaller):
    client_type, server_type = zmq.REQ, zmq.REP


class ZmqDealerRouter(ZmqCaller):
    client_type, server_type = zmq.DEALER, zmq.ROUTER

    def call_in_flight(self, payload: Any, count: int, window: int) -> Any:
        send, recv = self.sock.send, self.sock.recv
        first = min(window, count)
        for _ in range(first):
            send(payload)
        for _ in range(count - first):
            recv()
            send(payload)
        result = None
        for _ in range(first):
            result = recv()
        return result

"""pyzmq: a PAIR of sockets, received into the caller's memory like everybody else's messages.

`copy=False` lets pyzmq send large buffers in place; below its own threshold of 64 KiB it copies, which is faster there.
"""

from __future__ import annotations

from functools import partial

import zmq

from subjects.base import HOST, Messenger, Verb


class ZmqPair(Messenger):
    """Over tcp."""

    def address(self, port: int) -> str:
        return f"tcp://{HOST}:{port}"

    def open(self, rank: int, size: int, port: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sock = self.context.socket(zmq.PAIR)
        self.sock.linger = 0
        if rank == 0:
            self.sock.bind(self.address(port))
        else:
            self.sock.connect(self.address(port))

    def close(self) -> None:
        self.sock.close()
        self.context.term()

    def version(self) -> str:
        return f"pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()}"

    def sender(self, peer: int) -> Verb:
        return partial(self.sock.send, copy=False)

    def receiver(self, peer: int) -> Verb:
        return self.sock.recv_into


class ZmqPairIpc(ZmqPair):
    """Over a Unix socket, what ZeroMQ has for processes of one host."""

    def address(self, port: int) -> str:
        return f"ipc://@rankmesh-bench-{port}"  # @: an abstract name, no file to leave behind

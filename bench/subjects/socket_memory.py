"""One-sided memory in bare sockets: a thread of the owner's that reads and writes its region for whoever asks.

What many at a time cost beside a few, where nobody looks at names, bounds or permissions: a request is what, where and
how many bytes; the answer to a write is one byte.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from subjects.base import HOST, OPEN_TIMEOUT, Bytes, OneSided, Piece, Transfer
from subjects.sockets import check_open, connect_when_listening

OWNER = 1
REQUEST = struct.Struct("<QQQ")
READ, WRITE = 1, 2
DONE = b"d"
PASSING_BYTES = 64 * 1024


class SocketMemory(OneSided):
    def open(self, rank: int, size: int, port: int) -> None:
        self.rank = rank
        if rank != OWNER:
            self.sock = connect_when_listening(port)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.sock.settimeout(None)
            return
        with socket.create_server((HOST, port), backlog=size) as listener:
            listener.settimeout(OPEN_TIMEOUT)
            self.server = Server([listener.accept()[0] for _ in range(size - 1)])

    def close(self) -> None:
        if self.rank == OWNER:
            self.server.stop()
        else:
            self.sock.close()

    def version(self) -> str:
        return "socket, TCP_NODELAY, default buffers; the owner serves by epoll"

    def share(self, nbytes: int, tell: Callable[[Any], Any]) -> Bytes | None:
        if self.rank != OWNER:
            return None
        return self.server.start(nbytes)

    def reading(self, pieces: Sequence[Piece]) -> Transfer:
        ((memory, offset),) = pieces
        return partial(self._read, REQUEST.pack(READ, offset, memory.nbytes), memory.data)

    def writing(self, pieces: Sequence[Piece]) -> Transfer:
        ((memory, offset),) = pieces
        return partial(self._write, REQUEST.pack(WRITE, offset, memory.nbytes), memory.data)

    def come_and_go(self) -> None:
        np.ones(PASSING_BYTES, np.uint8)  # nothing is registered here

    def _read(self, request: bytes, into: memoryview) -> None:
        self.sock.sendall(request)
        recv_into, missing = self.sock.recv_into, into
        while missing:
            missing = missing[check_open(recv_into(missing)) :]

    def _write(self, request: bytes, data: memoryview) -> None:
        sent = self.sock.sendmsg([request, data]) - len(request)
        self.sock.sendall(data[sent:])
        check_open(len(self.sock.recv(1)))


class Server:
    """The owner's thread."""

    def __init__(self, socks: Sequence[socket.socket]) -> None:
        self.clients = {sock.fileno(): Client(sock) for sock in socks}
        self.epoll = select.epoll()
        self.over = os.eventfd(0)
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self, nbytes: int) -> Bytes:
        region = np.ones(nbytes, np.uint8)
        self.epoll.register(self.over, select.EPOLLIN)
        for fd, client in self.clients.items():
            client.region = region.data
            self.epoll.register(fd, select.EPOLLIN)
        self.thread.start()
        return region

    def stop(self) -> None:
        os.eventfd_write(self.over, 1)
        self.thread.join(OPEN_TIMEOUT)
        for client in self.clients.values():
            client.sock.close()
        self.epoll.close()
        os.close(self.over)

    def _run(self) -> None:
        while True:
            for fd, _ in self.epoll.poll():
                if fd == self.over:
                    return
                client = self.clients[fd]
                was_sending = client.sending
                if not client.serve():
                    self.epoll.unregister(fd)
                elif was_sending != client.sending:
                    self.epoll.modify(fd, select.EPOLLOUT if client.sending else select.EPOLLIN)


class Client:
    """One connection, as the owner sees it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self.sock = sock
        self.region = memoryview(b"")
        self.request = memoryview(bytearray(REQUEST.size))
        self.got = 0
        #: What is still to come, or to be sent.
        self.rest = memoryview(b"")
        self.sending = False

    def serve(self) -> bool:
        """False: it has gone."""
        try:
            if self.sending:
                self._send()
            elif not self._receive():
                return False
        except BlockingIOError:
            pass
        return True

    def _receive(self) -> bool:
        if not self.rest:
            got = self.sock.recv_into(self.request[self.got :])
            self.got = (self.got + got) % REQUEST.size
            if self.got or not got:
                return got > 0
            what, offset, nbytes = REQUEST.unpack(self.request)
            self.rest = self.region[offset : offset + nbytes]
            if what == READ:
                self.sending = True
                self._send()
                return True
        got = self.sock.recv_into(self.rest)
        self.rest = self.rest[got:]
        if not self.rest:
            self.sock.send(DONE)
        return got > 0

    def _send(self) -> None:
        self.rest = self.rest[self.sock.send(self.rest) :]
        self.sending = bool(self.rest)

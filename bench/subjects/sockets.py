"""Bare Python TCP sockets: the reference. No framing, no matching, no error handling beyond the end of the stream.

The polled ones repeat their loop in full instead of calling a common function: at 10 µs a round trip, a Python call per
message would show, and a slow reference would flatter everybody else.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable

from subjects.base import HOST, OPEN_TIMEOUT, Bytes, Messenger, Verb

#: How much the receiver of the message-rate measure asks the kernel for at once.
DRAIN_BYTES = 64 * 1024
SMALL_EXCHANGE = 64


def connect_pair(rank: int, port: int) -> socket.socket:
    """Rank 0 accepts, rank 1 connects; no-delay, as rankmesh has it."""
    if rank == 0:
        with socket.create_server((HOST, port)) as listener:
            listener.settimeout(OPEN_TIMEOUT)
            sock, _ = listener.accept()
    else:
        sock = connect_when_listening(port)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(None)
    return sock


def connect_when_listening(port: int) -> socket.socket:
    give_up = time.monotonic() + OPEN_TIMEOUT
    while True:
        try:
            return socket.create_connection((HOST, port), timeout=OPEN_TIMEOUT)
        except ConnectionRefusedError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.01)


def check_open(nbytes: int) -> int:
    """`recv_into` answers 0 at the end of the stream; a loop that ignored it would poll forever."""
    if nbytes == 0:
        raise ConnectionResetError("The other process closed the connection.")
    return nbytes


class BlockingSocket(Messenger):
    """`sendall`, and `recv_into` until the message is complete."""

    def open(self, rank: int, size: int, port: int) -> None:
        self.sock = connect_pair(rank, port)

    def close(self) -> None:
        self.sock.close()

    def version(self) -> str:
        return "socket, TCP_NODELAY, default buffers"

    def buffer(self, array: Bytes) -> memoryview:
        return array.data

    def sender(self, peer: int) -> Verb:
        return self.sock.sendall

    def receiver(self, peer: int) -> Verb:
        recv_into = self.sock.recv_into

        def recv_exactly(view: memoryview) -> None:
            nbytes = len(view)
            got = check_open(recv_into(view))
            while got < nbytes:
                got += check_open(recv_into(view[got:]))

        return recv_exactly

    def send_each(self, peer: int, message: memoryview, count: int) -> None:
        send = self.sock.send  # blocking: the kernel takes a small message whole
        for _ in range(count):
            send(message)

    def receive_each(self, peer: int, into: memoryview, count: int) -> None:
        recv_into, chunk = self.sock.recv_into, bytearray(DRAIN_BYTES)
        missing = (count - 1) * len(into)
        while missing > 0:
            missing -= check_open(recv_into(chunk, min(missing, DRAIN_BYTES)))
        self.receiver(peer)(into)  # the last one where the caller can see it


class PolledSocket(BlockingSocket):
    """A non-blocking socket; subclasses say how it is polled, in `ping` and `echo`."""

    def open(self, rank: int, size: int, port: int) -> None:
        super().open(rank, size, port)
        self.sock.setblocking(False)

    def send_rest(self, view: memoryview, sent: int) -> None:
        """Finish a message the kernel did not take whole (the size sweep)."""
        while sent < len(view):
            try:
                sent += self.sock.send(view[sent:])
            except BlockingIOError:
                continue

    def recv_rest(self, view: memoryview, got: int) -> None:
        """Finish a message that came in pieces."""
        check_open(got)
        while got < len(view):
            try:
                got += check_open(self.sock.recv_into(view[got:]))
            except BlockingIOError:
                continue

    def sender(self, peer: int) -> Verb:
        return lambda view: self.send_rest(view, 0)

    def receiver(self, peer: int) -> Verb:
        def recv(view: memoryview) -> None:
            while True:
                try:
                    got = self.sock.recv_into(view)
                except BlockingIOError:
                    continue
                return self.recv_rest(view, got)

        return recv


class TryPolledSocket(PolledSocket):
    """Asks for the data until it is there: an exception per vain attempt."""

    def ping(self, peer: int, out: memoryview, into: memoryview, count: int) -> list[int]:
        send, recv_into, clock = self.sock.send, self.sock.recv_into, time.perf_counter_ns
        nbytes, samples = len(out), [0] * count
        for i in range(count):
            began = clock()
            if (sent := send(out)) < nbytes:
                self.send_rest(out, sent)
            while True:
                try:
                    got = recv_into(into)
                    break
                except BlockingIOError:
                    continue
            if got < nbytes:
                self.recv_rest(into, got)
            samples[i] = clock() - began
        return samples

    def echo(self, peer: int, into: memoryview, count: int) -> None:
        send, recv_into = self.sock.send, self.sock.recv_into
        nbytes = len(into)
        for _ in range(count):
            while True:
                try:
                    got = recv_into(into)
                    break
                except BlockingIOError:
                    continue
            if got < nbytes:
                self.recv_rest(into, got)
            if (sent := send(into)) < nbytes:
                self.send_rest(into, sent)


class EpollPolledSocket(PolledSocket):
    """Asks whether there is data until there is: a list per vain attempt."""

    def open(self, rank: int, size: int, port: int) -> None:
        super().open(rank, size, port)
        self.epoll = select.epoll()
        self.epoll.register(self.sock, select.EPOLLIN)

    def close(self) -> None:
        self.epoll.close()
        super().close()

    def ping(self, peer: int, out: memoryview, into: memoryview, count: int) -> list[int]:
        send, recv_into, clock = self.sock.send, self.sock.recv_into, time.perf_counter_ns
        poll: Callable[[float, int], object] = self.epoll.poll
        nbytes, samples = len(out), [0] * count
        for i in range(count):
            began = clock()
            if (sent := send(out)) < nbytes:
                self.send_rest(out, sent)
            while not poll(0, 1):
                pass
            if (got := recv_into(into)) < nbytes:
                self.recv_rest(into, got)
            samples[i] = clock() - began
        return samples

    def echo(self, peer: int, into: memoryview, count: int) -> None:
        send, recv_into = self.sock.send, self.sock.recv_into
        poll: Callable[[float, int], object] = self.epoll.poll
        nbytes = len(into)
        for _ in range(count):
            while not poll(0, 1):
                pass
            if (got := recv_into(into)) < nbytes:
                self.recv_rest(into, got)
            if (sent := send(into)) < nbytes:
                self.send_rest(into, sent)


class SmallTryPolledSocket(TryPolledSocket):
    """What the shortest question and answer take, where others move more."""

    exchanged_bytes = SMALL_EXCHANGE


class SmallEpollPolledSocket(EpollPolledSocket):
    exchanged_bytes = SMALL_EXCHANGE

"""What no collective of two ranks can beat: memory alone, and the bytes of an all_reduce over a bare socket."""

from __future__ import annotations

import select
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from subjects.base import AllReduceOnly, Transfer
from subjects.sockets import check_open, connect_pair


class MemoryBound(AllReduceOnly):
    """What a rank has to copy and to add, in each of two processes at once, if nobody had to be told of it. Of an
    all_reduce: half of the bytes fetched, added, and the other half brought back. Of all_gather and all_to_all: what it
    gets, once. Of a broadcast: the same, by the one that is not the root."""

    def open(self, rank: int, size: int, port: int) -> None:
        self.rank = rank

    def close(self) -> None:
        return None

    def version(self) -> str:
        return f"numpy {np.__version__}, both cores at once"

    def all_reduce(self, buffer: Any) -> Transfer:
        own, theirs = np.split(buffer, 2)
        fetched = np.ones_like(own)

        def pass_through() -> None:
            np.copyto(fetched, theirs)
            np.add(own, fetched, out=own)
            np.copyto(theirs, own)

        return pass_through

    def broadcast(self, buffer: Any) -> Transfer:
        return partial(np.copyto, buffer, np.ones_like(buffer)) if self.rank else lambda: None

    def all_gather(self, buffer: Any, out: Any) -> Transfer:
        return partial(np.copyto, out, np.concatenate([buffer, buffer]))

    def all_to_all(self, buffer: Any, out: Any) -> Transfer:
        return partial(np.copyto, out, buffer)


class Exchange(AllReduceOnly):
    """As many bytes both ways at once as an all_reduce of two ranks has to move: each sends half of what it has and
    half of the result, and receives as much."""

    def open(self, rank: int, size: int, port: int) -> None:
        self.sock = connect_pair(rank, port)

    def close(self) -> None:
        self.sock.close()

    def version(self) -> str:
        return "socket, TCP_NODELAY, default buffers"


class PolledExchange(Exchange):
    """One thread, a non-blocking socket: send what the kernel takes, receive what is there, whichever poll() names."""

    def open(self, rank: int, size: int, port: int) -> None:
        super().open(rank, size, port)
        self.sock.setblocking(False)

    def all_reduce(self, buffer: Any) -> Transfer:
        out, into = memoryview(buffer).cast("B"), memoryview(np.ones_like(buffer)).cast("B")
        send, recv_into, nbytes = self.sock.send, self.sock.recv_into, len(out)
        poller = select.poll()
        descriptor = self.sock.fileno()

        def exchange() -> None:
            sent = received = 0
            while sent < nbytes or received < nbytes:
                wanted = (select.POLLOUT if sent < nbytes else 0) | (select.POLLIN if received < nbytes else 0)
                poller.register(descriptor, wanted)
                ((_, ready),) = poller.poll()
                if ready & select.POLLOUT:
                    sent += send(out[sent:])
                if ready & ~select.POLLOUT:
                    received += check_open(recv_into(into[received:]))

        return exchange


class ThreadedExchange(Exchange):
    """A thread sends while this one receives."""

    def open(self, rank: int, size: int, port: int) -> None:
        super().open(rank, size, port)
        self.sender = ThreadPoolExecutor(1, "sender")

    def close(self) -> None:
        self.sender.shutdown()
        super().close()

    def all_reduce(self, buffer: Any) -> Transfer:
        out, into = memoryview(buffer).cast("B"), memoryview(np.ones_like(buffer)).cast("B")
        submit, sendall, recv_into = self.sender.submit, self.sock.sendall, self.sock.recv_into

        def exchange() -> None:
            sending, received = submit(sendall, out), 0
            while received < len(into):
                received += check_open(recv_into(into[received:]))
            sending.result()

        return exchange

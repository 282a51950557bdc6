"""Faults between processes: a TCP proxy in a thread, with its own sockets.

    with FaultProxy(server_address) as proxy:
        connect_to(proxy.address)
        proxy.freeze(after_bytes=10_000)
        proxy.resume()

Each verb holds for all connections, present and future, and may be called from any thread. Bytes are counted over all
connections and both directions. One thread does everything: it moves bytes through bounded queues, and polls only the
sockets that may move, so a frozen proxy uses no processor time.
"""

from __future__ import annotations

import os
import random
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rankmesh.transport.address import Address
from rankmesh.transport.tcp import address_of, close_in_order, open_listener, reset

#: Bytes a direction may hold; its source waits beyond.
QUEUE_BYTES = 256 * 1024
#: Bytes of one read.
READ_BYTES = 64 * 1024


class _Flow:
    """One direction of one connection."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source = source
        self.target = target
        self.queue: deque[tuple[float, memoryview]] = deque()  # when it may go on, and what
        self.held = 0
        self.source_ended = False
        self.done = False


class _Connection:
    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.flows = (_Flow(near, far), _Flow(far, near))

    def end(self, how: Callable[[socket.socket], None]) -> None:
        for flow in self.flows:
            how(flow.source)


class FaultProxy:
    """Listens on a loopback port and forwards to `target`, a tcp:// address with a numeric host."""

    def __init__(self, target: Address | str, *, seed: int = 0) -> None:
        self._target = Address.parse(target) if isinstance(target, str) else target
        self._rng = random.Random(seed)
        self._listener = open_listener(Address("tcp", "127.0.0.1", 0))
        self.address = address_of("tcp", self._listener.getsockname())
        self._connections: list[_Connection] = []
        self._lock = threading.Lock()  # guards what the verbs set
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._forwarded = 0
        self._cut_at: int | None = None
        self._freeze_at: int | None = None
        self._frozen = False
        self._closing = False
        self._longest = 0
        self._delay = 0.0
        self._thread = threading.Thread(target=self._run, name="rankmesh-fault-proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- faults -------------------------------------------------------------------------------------------------------

    def cut(self, after_bytes: int = 0) -> None:
        """Reset every connection once that many more bytes have passed; new ones are served."""
        with self._change():
            self._cut_at = self._forwarded + after_bytes

    def freeze(self, after_bytes: int = 0) -> None:
        """Once that many more bytes have passed, let nothing pass and nobody in until `resume`."""
        with self._change():
            self._freeze_at = self._forwarded + after_bytes

    def resume(self) -> None:
        with self._change():
            self._frozen, self._freeze_at = False, None

    def trickle(self, max_bytes: int) -> None:
        """Forward in pieces of 1 to `max_bytes`; 0 ends it."""
        with self._change():
            self._longest = max_bytes

    def delay(self, seconds: float) -> None:
        """Hold every byte that long, in each direction."""
        with self._change():
            self._delay = seconds

    def close(self) -> None:
        """Close everything and end the thread."""
        if self._thread.is_alive():
            with self._change():
                self._closing = True
            self._thread.join()
            os.close(self._wake)

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Around a change of what the thread goes by."""
        with self._lock:
            yield
        os.eventfd_write(self._wake, 1)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._strike()
                ready = self._poll()
                if not self._frozen and not self._closing:
                    self._serve(ready)
        finally:
            for connection in self._connections:
                connection.end(close_in_order)
            self._listener.close()

    def _strike(self) -> None:
        with self._lock:
            if self._cut_at is not None and self._forwarded >= self._cut_at:
                self._cut_at = None
                for connection in self._connections:
                    connection.end(reset)
                self._connections.clear()
            if self._freeze_at is not None and self._forwarded >= self._freeze_at:
                self._freeze_at = None
                self._frozen = True

    def _poll(self) -> set[int]:
        """Wait until something may move; the descriptors that are ready."""
        poll, masks, due = select.poll(), {self._wake: select.POLLIN}, None
        now = time.monotonic()
        if not self._frozen:
            masks[self._listener.fileno()] = select.POLLIN
            for flow in (flow for connection in self._connections for flow in connection.flows):
                if not flow.source_ended and flow.held < QUEUE_BYTES:
                    masks[flow.source.fileno()] = masks.get(flow.source.fileno(), 0) | select.POLLIN
                if flow.queue and flow.queue[0][0] <= now:
                    masks[flow.target.fileno()] = masks.get(flow.target.fileno(), 0) | select.POLLOUT
                elif flow.queue:
                    due = min(flow.queue[0][0], due or flow.queue[0][0])
        for fd, mask in masks.items():
            poll.register(fd, mask)
        ready = {fd for fd, _ in poll.poll(None if due is None else max(0.0, due - now) * 1000 + 1)}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        return ready

    def _serve(self, ready: set[int]) -> None:
        if self._listener.fileno() in ready:
            self._accept()
        for connection in list(self._connections):
            try:
                for flow in connection.flows:
                    if flow.source.fileno() in ready and not flow.source_ended and flow.held < QUEUE_BYTES:
                        self._read(flow)
                    self._write(flow)
            except OSError:  # one side broke: so does the other
                connection.end(reset)
                self._connections.remove(connection)
                continue
            if all(flow.done for flow in connection.flows):
                connection.end(close_in_order)
                self._connections.remove(connection)

    def _accept(self) -> None:
        try:
            near, _ = self._listener.accept()
        except BlockingIOError:
            return
        try:
            far = socket.create_connection((self._target.host, self._target.port), timeout=5.0)
        except OSError:  # the target is gone, and so it shall look from outside
            reset(near)
            return
        for sock in (near, far):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections.append(_Connection(near, far))

    def _read(self, flow: _Flow) -> None:
        try:
            data = flow.source.recv(READ_BYTES)
        except BlockingIOError:
            return
        flow.source_ended = not data
        if data:
            flow.queue.append((time.monotonic() + self._delay, memoryview(data)))
            flow.held += len(data)

    def _write(self, flow: _Flow) -> None:
        """Send on what is due, as far as the next planned fault; then the end of the stream."""
        if flow.queue and flow.queue[0][0] <= time.monotonic():
            due, data = flow.queue.popleft()
            limit = min((at for at in (self._cut_at, self._freeze_at) if at is not None), default=None)
            piece = data if limit is None else data[: max(0, limit - self._forwarded)]
            if self._longest:
                piece = piece[: self._rng.randint(1, self._longest)]
            try:
                count = flow.target.send(piece) if piece else 0
            except BlockingIOError:
                count = 0
            self._forwarded += count
            flow.held -= count
            if data[count:]:
                flow.queue.appendleft((due, data[count:]))
        if flow.source_ended and not flow.queue and not flow.done:
            flow.done = True
            flow.target.shutdown(socket.SHUT_WR)

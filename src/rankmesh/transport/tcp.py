"""tcp:// carries bytes over non-blocking sockets, IPv4 and IPv6. What the options are, and why:

- `recv_into` and `send` of a link are the socket's own C methods, with no Python frame in between: they are called for
  every message. (`sendmsg` needs a frame: the kernel refuses more than IOV_MAX buffers instead of taking a prefix.)
- TCP_NODELAY on both sides, accepted sockets too: a message must not wait for the acknowledgement of the one before.
- TCP_NOTSENT_LOWAT bounds what waits unsent in the kernel, in front of a control frame. See UNSENT_BYTES.
- TCP_CONGESTION inside one host: Reno, which every Linux has and lets everybody choose. Nothing is congested there, and
  what systems have as their default holds the sender back: BBR paces it at the rate that it once estimated, CUBIC takes
  a late acknowledgement for a queue. See SAME_HOST_CONGESTION. Between hosts the system's choice stands.
- No SO_KEEPALIVE: heartbeats of the endpoint find a silent peer in seconds, keep-alive in hours.
- `connect` to a free port of the ephemeral range may meet itself, and would then talk to itself. `finish_connect`
  treats that as refused, because nobody listens there.
- `close` first reads away what has arrived: the kernel resets a connection that is closed with bytes unread, and a
  reset destroys what was sent and is still on its way.
- `accept` raises OSError for EMFILE, ENFILE, ENOBUFS and ENOMEM: the connection stays in the queue and the listener
  stays readable, so the caller must back off before it polls again, or it burns a core.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from rankmesh.buffers import Buffer
from rankmesh.config import KIB, Config
from rankmesh.errors import UsageError
from rankmesh.transport.address import Address
from rankmesh.transport.base import Link, Transport

BACKLOG: Final = 1024
#: Most buffers the kernel takes in one call.
IOV_MAX: Final = 1024
#: Unsent bytes in the kernel beyond which it takes no more (its own bound is 4 MiB). Measured over loopback, two
#: processes, 64 MiB: 1 MiB is as fast as no bound, 256 KiB costs a third, because the sender must wake up too often.
UNSENT_BYTES: Final = 1024 * KIB
#: Measured over loopback, two processes, 64 MiB both ways at once: BBR 21-26 ms, CUBIC 18-23, Reno 13.5-14.
SAME_HOST_CONGESTION: Final = b"reno"
#: What `close` reads away at most, so that a peer which never stops sending cannot hold it.
DRAIN_BYTES: Final = 4096 * KIB

_LINGER_RESET: Final = struct.pack("ii", 1, 0)
#: `accept` met a connection that has failed meanwhile (see accept(2)); the next one may be fine.
_ACCEPT_AGAIN: Final = {
    errno.ECONNABORTED,
    errno.EPROTO,
    errno.EOPNOTSUPP,
    errno.ENOPROTOOPT,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENONET,
}


class TcpLink:
    """One connection. `connecting` says that `establish` still has to see it through."""

    channels = 1
    drained_on_short_read = True

    def __init__(self, sock: socket.socket, remote: Address, *, connecting: bool) -> None:
        self._sock = sock
        self._remote = remote
        self._connecting = connecting
        self._mask = select.POLLOUT if connecting else select.POLLIN
        self.local = str(address_of(remote.scheme, sock.getsockname()))
        self.remote = str(remote)
        self.loopback = is_same_host(sock, remote)
        self.fileno: Callable[[], int] = sock.fileno
        self.recv_into: Callable[[memoryview], int] = sock.recv_into
        self.send: Callable[[Buffer], int] = sock.send
        self._sendmsg: Callable[[Sequence[Buffer]], int] = sock.sendmsg

    def __repr__(self) -> str:
        state = " closed" if self.fileno() < 0 else " connecting" if self._connecting else ""
        return f"<TcpLink {self.local} → {self.remote}{state}>"

    def poll_mask(self) -> int:
        return self._mask

    def wants_write(self, wanted: bool) -> None:
        if not self._connecting:
            self._mask = select.POLLIN | select.POLLOUT if wanted else select.POLLIN

    def establish(self) -> None:
        if not self._connecting:
            return
        finish_connect(self._sock, self._remote)
        self._connecting = False
        self._mask = select.POLLIN
        self.local = str(address_of(self._remote.scheme, self._sock.getsockname()))
        self.loopback = is_same_host(self._sock, self._remote)

    def sendmsg(self, buffers: Sequence[Buffer], /) -> int:
        try:
            return self._sendmsg(buffers)
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise
            # Without the empty ones: a prefix of nothing but those would be 0 bytes, again and again.
            return self._sendmsg([buffer for buffer in buffers if memoryview(buffer).nbytes][:IOV_MAX])

    def recvmsg_into(self, buffers: Sequence[memoryview], /) -> int:
        return self._sock.recvmsg_into(buffers)[0]

    def shutdown_write(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        close_in_order(self._sock)

    def abort(self) -> None:
        reset(self._sock)


class TcpListener:
    """`address` has the port that was chosen for port 0."""

    def __init__(self, sock: socket.socket, scheme: str) -> None:
        self.address = address_of(scheme, sock.getsockname())
        self._sock = sock

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address}{' closed' if self.fileno() < 0 else ''}>"

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> Link:
        sock, remote = accept(self._sock, self.address.scheme)
        return TcpLink(sock, remote, connecting=False)

    def close(self) -> None:
        self._sock.close()


class TcpTransport:
    scheme = "tcp"

    def listen(self, address: Address, config: Config) -> TcpListener:
        return TcpListener(open_listener(address), self.scheme)

    def resolve(self, address: Address) -> list[Address]:
        return resolve(address)

    def connect(self, address: Address, config: Config) -> Link:
        return TcpLink(start_connect(address), address, connecting=True)


def transport() -> Transport:
    return TcpTransport()


def resolve(address: Address) -> list[Address]:
    """Numeric addresses in the resolver's order. May block; raises OSError when there are none."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise OSError(error.errno, f"the name {address.host!r} cannot be resolved: {error.strerror}") from error
    return list(dict.fromkeys(address_of(address.scheme, sockaddr) for *_, sockaddr in found))


def open_listener(address: Address) -> socket.socket:
    """`[::]` serves IPv4 as well. A host name is looked up, which may block."""
    family, _, _, _, sockaddr = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(sockaddr)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {address}: {error.strerror}") from error
    return sock


def accept(listener: socket.socket, scheme: str) -> tuple[socket.socket, Address]:
    """A tuned socket and who is at its other end."""
    try:
        sock, sockaddr = listener.accept()
    except OSError as error:
        if error.errno in _ACCEPT_AGAIN:
            raise BlockingIOError(errno.EAGAIN, "the connection failed before it was accepted") from error
        raise
    remote = address_of(scheme, sockaddr)
    try:
        _tune(sock)
        _hurry(sock, remote)
    except OSError:
        sock.close()
        raise
    return sock, remote


def start_connect(address: Address) -> socket.socket:
    """A tuned socket whose connection is on its way; `finish_connect` sees it through."""
    if address.is_wildcard:
        raise UsageError(f"{address} is an address to listen on, not to connect to. Use one of that host's addresses.")
    numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=numeric)
    except socket.gaierror as error:
        raise UsageError(
            f"{address} has no numeric host. Connect to one of the addresses that resolve() returns."
        ) from error
    family, _, _, _, sockaddr = found[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        _tune(sock)
        code = sock.connect_ex(sockaddr)
        if code not in (0, errno.EINPROGRESS):
            raise _connect_error(code, address)
    except OSError:
        sock.close()
        raise
    return sock


def finish_connect(sock: socket.socket, remote: Address) -> None:
    """Returns when the connection stands; raises BlockingIOError while it does not, OSError when it failed."""
    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise _connect_error(code, remote)
    try:
        peer = sock.getpeername()
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            raise BlockingIOError(errno.EAGAIN, f"still connecting to {remote}") from error
        raise
    if peer == sock.getsockname():
        raise _connect_error(errno.ECONNREFUSED, remote)
    _hurry(sock, remote)


def close_in_order(sock: socket.socket) -> None:
    """Close without destroying what was sent, as far as the kernel allows it (see above)."""
    if sock.fileno() < 0:
        return
    try:
        sock.shutdown(socket.SHUT_WR)
        for _ in range(DRAIN_BYTES // (64 * KIB)):
            if not sock.recv(64 * KIB):
                break
    except OSError:
        pass  # nothing left to read, or the connection is gone: what remains is to close it
    sock.close()


def reset(sock: socket.socket) -> None:
    """Close and drop everything: the other side gets a reset."""
    if sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
        sock.close()


def address_of(scheme: str, sockaddr: Any) -> Address:
    """The address of what the socket calls return; an IPv4 peer of an IPv6 socket is shown as IPv4."""
    address = Address(scheme, sockaddr[0], sockaddr[1])
    return address if address.ip is None or "%" in address.host else Address(scheme, str(address.ip), address.port)


def is_same_host(sock: socket.socket, remote: Address) -> bool:
    return remote.is_loopback or address_of(remote.scheme, sock.getsockname()).ip == remote.ip


def _tune(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def _hurry(sock: socket.socket, remote: Address) -> None:
    """Nothing is congested inside one host."""
    if is_same_host(sock, remote):
        with suppress(OSError):  # where a sandbox has no such choice, it is as quick as it is
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, SAME_HOST_CONGESTION)


def _connect_error(code: int, remote: Address) -> OSError:
    return OSError(code, f"cannot connect to {remote}: {os.strerror(code)}")

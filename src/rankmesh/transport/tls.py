"""tls:// is TCP inside TLS 1.3, where each side proves by its certificate that it belongs to the cluster.

Who is let in: both sides present a certificate, and both verify it against `Config.tls.ca`, the cluster's own CA and
the only one that counts. Names are not compared on purpose: ranks are reached by addresses that change from job to
job, so a certificate says "a node of this cluster", and no more. In TLS 1.3 the client is through before the server
has judged its certificate: a refused client learns it from its first read.

OpenSSL works on two memory buffers here, and the link moves bytes between them and the socket. Rules:

- A write is never retried: OpenSSL always takes the record it is given. What the socket does not take of the records
  stays in `_unsent`, at most BATCH_BYTES and their overhead, and goes out first: while there is some, `send` takes
  nothing. So the caller may come with other bytes after a BlockingIOError, and none of its buffers is referred to.
- Readiness is a doorbell, because the socket alone does not know: decrypted bytes may wait here while it is empty, and
  bytes taken by `send` may wait in `_unsent` while nobody wants to write. `fileno` is an epoll descriptor that watches
  the socket, for writing too while it must, and an eventfd that rings while there is something to read here. Every call
  moves `_unsent` on, so whoever answers the bell by reading, as one does, also lets it out.
- The end of the stream is a close_notify. A connection that ends without one was cut, and is an error.
- OpenSSL's objects are not thread-safe, so a lock is held in every call. It is never held across a wait.
"""

from __future__ import annotations

import errno
import select
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from rankmesh.buffers import EMPTY, Buffer, readable
from rankmesh.config import KIB, Config, TlsFiles
from rankmesh.errors import ConfigError
from rankmesh.transport import tcp
from rankmesh.transport.address import Address
from rankmesh.transport.base import Link, Transport
from rankmesh.transport.doorbell import Doorbell

#: Plain bytes in one record: the most TLS allows, because a record costs about 1 µs of Python besides its encryption.
RECORD_BYTES: Final = 16 * KIB
#: Plain bytes encrypted before the socket is tried, which bounds `_unsent`.
BATCH_BYTES: Final = 8 * RECORD_BYTES
#: Plain bytes that one call takes at most, so that it does not hold the lock for long.
SEND_BYTES: Final = 8 * BATCH_BYTES
#: Encrypted bytes read from the socket at once.
READ_BYTES: Final = 128 * KIB


class TlsLink:
    """One connection, on either side."""

    channels = 1
    drained_on_short_read = True

    def __init__(
        self, sock: socket.socket, remote: Address, context: ssl.SSLContext, linger: float, *, server: bool
    ) -> None:
        self.local = str(tcp.address_of(remote.scheme, sock.getsockname()))
        self.remote = str(remote)
        self.loopback = tcp.is_same_host(sock, remote)
        self._sock = sock
        self._remote = remote
        self._linger = linger
        self._lock = threading.Lock()
        self._connecting = not server
        self._established = False
        self._wants_write = False
        self._write_ended = False
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._spill = EMPTY  # decrypted before anybody asked, see _say_goodbye
        self._unsent = EMPTY
        self._read_ended = False  # by a close_notify
        self._failure = ""  # why nothing can be read any more
        self._watched = select.EPOLLIN
        try:
            self._epoll = select.epoll()
            self._bell = Doorbell()
        except OSError:  # no descriptors left
            sock.close()
            raise
        self._epoll.register(sock.fileno(), self._watched)
        self._epoll.register(self._bell.fileno(), select.EPOLLIN)
        self._watch()

    def __repr__(self) -> str:
        state = " closed" if self.fileno() < 0 else "" if self._established else " in handshake"
        return f"<TlsLink {self.local} → {self.remote}{state}>"

    def fileno(self) -> int:
        return -1 if self._epoll.closed else self._epoll.fileno()

    def poll_mask(self) -> int:
        return select.POLLIN

    def wants_write(self, wanted: bool) -> None:
        with self._lock:
            self._wants_write = wanted
            self._watch()

    def _watch(self) -> None:
        """Set what polling sees to what is true now. Every operation ends with it."""
        if self._epoll.closed:
            return
        writes = self._wants_write or self._unsent
        mask = select.EPOLLOUT if self._connecting else select.EPOLLIN | select.EPOLLOUT if writes else select.EPOLLIN
        if mask != self._watched:
            self._epoll.modify(self._sock.fileno(), mask)
            self._watched = mask
        buffered = self._spill or self._tls.pending() or self._incoming.pending
        self._bell.set(bool(buffered or self._read_ended or self._failure))

    # -- handshake ----------------------------------------------------------------------------------------------------

    def establish(self) -> None:
        with self._lock:
            if self._connecting:
                tcp.finish_connect(self._sock, self._remote)
                self._connecting = False
                self.local = str(tcp.address_of(self._remote.scheme, self._sock.getsockname()))
                self.loopback = tcp.is_same_host(self._sock, self._remote)
            try:
                while not self._established:
                    self._shake_hands()
                self._send_unsent()  # the other side waits for our part
            finally:
                self._watch()

    def _shake_hands(self) -> None:
        """Go on as far as possible; returns when there may be more to do."""
        try:
            self._tls.do_handshake()
            self._established = True
        except ssl.SSLWantReadError:
            self._send_unsent()
            self._read_handshake()
        except ssl.SSLError as error:
            self._failure = f"the TLS handshake with {self.remote} failed: {_explain(error)}"
            self._push()  # the alert that tells the other side why
            raise ConnectionAbortedError(errno.ECONNABORTED, self._failure) from error

    def _read_handshake(self) -> None:
        """What comes after it in the same read stays in memory, and rings the bell."""
        data = self._sock.recv(READ_BYTES)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, f"{self.remote} ended the connection within the TLS handshake")
        self._incoming.write(data)

    # -- reading ------------------------------------------------------------------------------------------------------

    def recv_into(self, view: memoryview, /) -> int:
        with self._lock:
            self._check_usable()
            try:
                if self._unsent:
                    self._push()
                if self._spill:
                    return self._take_spill(view)
                return self._read(view)
            finally:
                self._watch()

    def _read(self, view: memoryview) -> int:
        """Fill the view as far as possible. What stops it after the first byte is met again by the next call."""
        count = self._decrypt(view)
        while count < view.nbytes and not self._read_ended and not self._failure:
            try:
                data = self._sock.recv(READ_BYTES)
                if not data:
                    raise ConnectionResetError(errno.ECONNRESET, f"{self.remote} was cut off: no close_notify has come")
            except OSError:
                if count:
                    break
                raise
            self._incoming.write(data)
            count += self._decrypt(view[count:])
            if count and len(data) < READ_BYTES:
                break  # the socket is empty
        if not count:
            self._check_failure()
        return count

    def _decrypt(self, view: memoryview) -> int:
        """Fill the view from what was read; 0 if that is not even one record."""
        count = 0
        try:
            while count < view.nbytes and (self._tls.pending() or self._incoming.pending):
                step = int(self._tls.read(view.nbytes - count, view[count:]))  # a count, whatever typeshed says
                if not step:
                    self._read_ended = True
                    break
                count += step
        except ssl.SSLWantReadError:
            pass  # the rest of a record is still on its way
        except ssl.SSLZeroReturnError:
            self._read_ended = True  # and we have said goodbye before
        except ssl.SSLError as error:
            self._failure = f"the connection to {self.remote} broke: {_explain(error)}"
        if self._outgoing.pending:
            self._push()  # an answer to a key update, or an alert
        return count

    def _take_spill(self, view: memoryview) -> int:
        count = min(view.nbytes, self._spill.nbytes)
        view[:count] = self._spill[:count]
        self._spill = self._spill[count:]
        return count

    # -- writing ------------------------------------------------------------------------------------------------------

    def send(self, data: Buffer, /) -> int:
        return self.sendmsg((data,))

    def sendmsg(self, buffers: Sequence[Buffer], /) -> int:
        with self._lock:
            self._check_usable()
            if self._write_ended:
                raise BrokenPipeError(errno.EPIPE, f"the stream to {self.remote} is closed")
            try:
                self._send_unsent()
                return self._encrypt(buffers)
            finally:
                self._watch()

    def _encrypt(self, buffers: Sequence[Buffer]) -> int:
        taken = 0
        for record in _records(buffers):
            taken += self._tls.write(record)  # all of it: memory has room
            if self._outgoing.pending >= BATCH_BYTES:
                self._try_to_send_unsent()
                if self._unsent or taken >= SEND_BYTES:
                    break
        self._try_to_send_unsent()
        return taken

    def _send_unsent(self) -> None:
        """Raises BlockingIOError if something remains."""
        if self._outgoing.pending:
            fresh = self._outgoing.read()
            self._unsent = memoryview(b"".join((self._unsent, fresh)) if self._unsent else fresh)
        while self._unsent:
            self._unsent = self._unsent[self._sock.send(self._unsent) :]

    def _try_to_send_unsent(self) -> None:
        try:
            self._send_unsent()
        except BlockingIOError:
            pass  # the epoll descriptor watches for room until it is gone

    def _push(self) -> None:
        """While reading: a way out that is broken is no reason to drop what has come in; the next send tells of it."""
        try:
            self._send_unsent()
        except OSError:
            pass

    # -- the end ------------------------------------------------------------------------------------------------------

    def shutdown_write(self) -> None:
        with self._lock:
            self._check_usable()
            try:
                self._say_goodbye()
                self._try_to_send_unsent()
            finally:
                self._watch()

    def close(self) -> None:
        with self._lock:
            if self.fileno() < 0:
                return
            self._stop_watching()
            try:
                if self._established and not self._failure:
                    self._say_goodbye()
                self._send_unsent()
            except BlockingIOError:
                if self._established:
                    self._close_later()
            except OSError:
                pass  # the connection is gone, and nobody is there to be told
            tcp.close_in_order(self._sock)

    def abort(self) -> None:
        with self._lock:
            self._stop_watching()
            tcp.reset(self._sock)

    def _stop_watching(self) -> None:
        self._epoll.close()
        self._bell.close()

    def _say_goodbye(self) -> None:
        """Queue a close_notify. The stream of the other side goes on."""
        if self._write_ended:
            return
        self._write_ended = True
        # `unwrap` also looks for the other side's close_notify, and breaks the connection if it meets data instead.
        spill, chunk = bytearray(self._spill), memoryview(bytearray(RECORD_BYTES))
        while count := self._decrypt(chunk):
            spill += chunk[:count]
        self._spill = memoryview(spill)
        self._check_failure()
        try:
            self._tls.unwrap()
        except ssl.SSLWantReadError:
            pass  # the other side has not said goodbye yet

    def _close_later(self) -> None:
        """A thread waits until the socket takes what `send` has promised to deliver."""
        heir = socket.socket(fileno=self._sock.detach())
        threading.Thread(target=_deliver, args=(heir, self._unsent, self._linger), name="rankmesh-tls-close").start()

    def _check_usable(self) -> None:
        if self.fileno() < 0:
            raise OSError(errno.EBADF, f"this end of the connection to {self.remote} is closed")
        self._check_failure()
        if not self._established:
            raise BlockingIOError(errno.EAGAIN, f"still in the handshake with {self.remote}")

    def _check_failure(self) -> None:
        if self._failure:
            raise ConnectionAbortedError(errno.ECONNABORTED, self._failure)


class TlsListener(tcp.TcpListener):
    def __init__(self, sock: socket.socket, scheme: str, context: ssl.SSLContext, linger: float) -> None:
        super().__init__(sock, scheme)
        self._context = context
        self._linger = linger

    def accept(self) -> Link:
        sock, remote = tcp.accept(self._sock, self.address.scheme)
        return TlsLink(sock, remote, self._context, self._linger, server=True)


class TlsTransport:
    """Certificates are read when a listener is opened and for each connection made, so renewed files are seen."""

    scheme = "tls"

    def listen(self, address: Address, config: Config) -> TlsListener:
        context = make_context(config.tls, server=True)
        return TlsListener(tcp.open_listener(address), self.scheme, context, config.close_timeout)

    def resolve(self, address: Address) -> list[Address]:
        return tcp.resolve(address)

    def connect(self, address: Address, config: Config) -> Link:
        context = make_context(config.tls, server=False)
        return TlsLink(tcp.start_connect(address), address, context, config.close_timeout, server=False)


def transport() -> Transport:
    return TlsTransport()


def make_context(files: TlsFiles | None, *, server: bool) -> ssl.SSLContext:
    if files is None:
        raise ConfigError("tls:// needs certificates. Pass Config(tls=TlsFiles(...)); `rankmesh certs` makes a set.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # on purpose, see above
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        context.num_tickets = 0  # sessions are not resumed, and a ticket would be the first thing a client reads
    try:
        context.load_cert_chain(files.cert, files.key)
        context.load_verify_locations(files.ca)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{files} cannot be used: {error}. `rankmesh certs` makes a set.") from error
    return context


def _records(buffers: Sequence[Buffer]) -> Iterator[Buffer]:
    """The bytes of all buffers in full records, copied only where a record has parts of several buffers."""
    parts: list[memoryview] = []
    room = RECORD_BYTES
    for buffer in buffers:
        view = readable(buffer)
        while view.nbytes:
            part, view = view[:room], view[room:]
            parts.append(part)
            room -= part.nbytes
            if not room:
                yield part if len(parts) == 1 else b"".join(parts)
                parts, room = [], RECORD_BYTES
    if parts:
        yield parts[0] if len(parts) == 1 else b"".join(parts)


def _deliver(sock: socket.socket, unsent: memoryview, timeout: float) -> None:
    try:
        sock.settimeout(timeout)
        sock.sendall(unsent)
        sock.setblocking(False)
    except OSError:
        pass  # late or gone: the other side sees a stream without its close_notify, and knows
    tcp.close_in_order(sock)


#: What OpenSSL's reasons mean here.
_EXPLAINED: Final = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has shown no certificate; give it one that this cluster's CA has signed",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it requires a certificate of us; set Config.tls",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not know the CA of our certificate; use one CA for the whole cluster",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "our certificate has expired; make a new one with `rankmesh certs`",
    "UNSUPPORTED_PROTOCOL": "it does not offer TLS 1.3",
    "TLSV1_ALERT_PROTOCOL_VERSION": "it does not take TLS 1.3",
    "WRONG_VERSION_NUMBER": "it does not speak TLS; use the same scheme on both sides",
    "HTTP_REQUEST": "it does not speak TLS but HTTP",
}


def _explain(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused ({error.verify_message}); use one CA for the whole cluster"
    return _EXPLAINED.get(error.reason or "", f"{error.reason or error}")

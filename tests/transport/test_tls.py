"""Who is let in by tls://, and what a cut connection looks like."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rankmesh.config import Config, TlsFiles
from rankmesh.errors import ConfigError
from rankmesh.testing.pump import Pump, connect_pair, establish, is_ready, retry, run, transfer, wait_any
from rankmesh.transport import Address, Link
from rankmesh.transport.tls import TlsLink, TlsListener, TlsTransport, make_context
from timing import scaled

TLS = TlsTransport()
ADDRESS = Address.parse("tls://127.0.0.1:0")
TIMEOUT = scaled(10)


@contextmanager
def listening(files: TlsFiles) -> Iterator[TlsListener]:
    listener = TLS.listen(ADDRESS, Config(tls=files))
    try:
        yield listener
    finally:
        listener.close()


@contextmanager
def meeting(server: TlsFiles, client: TlsFiles) -> Iterator[tuple[Link, Link]]:
    """The connecting and the accepted link, before their handshake."""
    with listening(server) as listener:
        near = TLS.connect(listener.address, Config(tls=client))
        assert wait_any([listener], TIMEOUT)
        far = listener.accept()
        try:
            yield near, far
        finally:
            near.close()
            far.close()


def handshake(link: Link) -> OSError | None:
    """Try to get through, and then to read; the failure if there was one."""

    def go() -> int:
        link.establish()
        return link.recv_into(memoryview(bytearray(1)))

    try:
        retry(link, go, TIMEOUT)
    except OSError as error:
        return error
    return None


def handshake_both(near: Link, far: Link) -> tuple[OSError | None, OSError | None]:
    """Each side in its own thread, because one may fail while the other still waits."""
    failures: list[OSError | None] = [None]
    thread = threading.Thread(target=lambda: failures.__setitem__(0, handshake(near)))
    thread.start()
    failure = handshake(far)
    far.close()
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    return failures[0], failure


def test_a_node_of_another_cluster_is_refused(node: TlsFiles, stranger: TlsFiles) -> None:
    with meeting(server=node, client=stranger) as (near, far):
        client, server = handshake_both(near, far)
    assert isinstance(server, ConnectionAbortedError)
    assert isinstance(client, ConnectionAbortedError)
    assert "certificate is refused" in str(client), "the client does not trust the server either"


def test_a_server_of_another_cluster_is_refused(node: TlsFiles, stranger: TlsFiles) -> None:
    """The client finds the server's certificate wrong, and tells it."""
    with meeting(server=stranger, client=node) as (near, far):
        client, server = handshake_both(near, far)
    assert isinstance(client, ConnectionAbortedError)
    assert "use one CA for the whole cluster" in str(client)
    assert isinstance(server, ConnectionAbortedError)
    assert "does not know the CA of our certificate" in str(server)


def test_the_server_refuses_a_client_of_another_cluster(node: TlsFiles, stranger: TlsFiles) -> None:
    """A client that trusts our CA, but has its own certificate from elsewhere."""
    impostor = TlsFiles(cert=stranger.cert, key=stranger.key, ca=node.ca)
    with meeting(server=node, client=impostor) as (near, far):
        client, server = handshake_both(near, far)
    assert isinstance(server, ConnectionAbortedError)
    assert "its certificate is refused" in str(server)
    assert isinstance(client, ConnectionAbortedError)
    assert "does not know the CA of our certificate" in str(client)


def plain_connection(listener: TlsListener) -> socket.socket:
    return socket.create_connection((listener.address.host, listener.address.port), timeout=TIMEOUT)


def plain_client(listener: TlsListener, context: ssl.SSLContext) -> BaseException | None:
    """A client of the standard library; the failure it saw, if any."""
    context.check_hostname = False
    with plain_connection(listener) as sock:
        try:
            with context.wrap_socket(sock) as wrapped:
                wrapped.recv(1)
        except OSError as error:
            return error
    return None


def refused_by_server(node: TlsFiles, context: ssl.SSLContext) -> tuple[OSError | None, BaseException | None]:
    with listening(node) as listener:
        seen: list[BaseException | None] = []
        thread = threading.Thread(target=lambda: seen.append(plain_client(listener, context)))
        thread.start()
        assert wait_any([listener], TIMEOUT)
        far = listener.accept()
        failure = handshake(far)
        far.close()
        thread.join(TIMEOUT)
        return failure, seen[0]


def test_a_client_without_a_certificate_is_refused(node: TlsFiles) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(node.ca)
    server, client = refused_by_server(node, context)
    assert isinstance(server, ConnectionAbortedError)
    assert "has shown no certificate" in str(server)
    assert isinstance(client, ssl.SSLError)
    assert client.reason == "TLSV13_ALERT_CERTIFICATE_REQUIRED"


def test_tls_1_2_is_refused(node: TlsFiles) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(node.ca)
    context.load_cert_chain(node.cert, node.key)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    server, client = refused_by_server(node, context)
    assert isinstance(server, ConnectionAbortedError)
    assert "does not offer TLS 1.3" in str(server)
    assert isinstance(client, ssl.SSLError)


def test_what_does_not_speak_tls_is_refused(node: TlsFiles) -> None:
    with listening(node) as listener, plain_connection(listener) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        assert wait_any([listener], TIMEOUT)
        far = listener.accept()
        failure = handshake(far)
        far.close()
    assert isinstance(failure, ConnectionAbortedError)
    assert "HTTP" in str(failure)


def test_a_silent_client_holds_nobody_up(node: TlsFiles) -> None:
    with listening(node) as listener:
        with plain_connection(listener) as sock:
            assert wait_any([listener], TIMEOUT)
            far = listener.accept()
            with pytest.raises(BlockingIOError):
                far.establish()
            for piece in (b"\x16", b"\x03\x01"):  # the beginning of a record
                sock.sendall(piece)
                assert is_ready(far, TIMEOUT)
                with pytest.raises(BlockingIOError):
                    far.establish()
            for operation in (far.recv_into, far.send):
                with pytest.raises(BlockingIOError):
                    operation(memoryview(bytearray(1)))
            assert not is_ready(far), "the bytes were taken, and nothing is left to do"
        assert isinstance(handshake(far), ConnectionResetError)
        far.close()


def test_the_connection_is_encrypted_with_tls_1_3_and_without_tickets(node: TlsFiles) -> None:
    near, far = connect_pair(TLS, ADDRESS, Config(tls=node), TIMEOUT)
    assert isinstance(near, TlsLink)
    assert isinstance(far, TlsLink)
    assert near._tls.version() == far._tls.version() == "TLSv1.3"
    assert transfer(near, far, b"secret", TIMEOUT) == b"secret"
    assert not is_ready(near), "a ticket would be there to read"
    near.close()
    far.close()


def test_bytes_that_come_with_the_handshake_are_seen_by_polling(node: TlsFiles) -> None:
    """A client that speaks at once: its first bytes may come in one piece with the end of the handshake."""
    with meeting(server=node, client=node) as (near, far):
        while True:
            try:
                near.establish()
                break
            except BlockingIOError:
                pass
            try:
                far.establish()
            except BlockingIOError:
                pass
        run([Pump(near, outgoing=b"first")], TIMEOUT)  # before the server has read the client's last handshake message
        establish([far], TIMEOUT)
        assert is_ready(far, TIMEOUT)
        arrived = memoryview(bytearray(5))
        assert far.recv_into(arrived) == 5
        assert bytes(arrived) == b"first"


def test_a_cut_stream_is_not_an_orderly_end(node: TlsFiles) -> None:
    """An attacker, or a dying host, can end the TCP stream, but cannot sign its end."""
    near, far = connect_pair(TLS, ADDRESS, Config(tls=node), TIMEOUT)
    assert isinstance(near, TlsLink)
    run([Pump(near, outgoing=b"half a mess")], TIMEOUT)
    near._sock.shutdown(socket.SHUT_WR)  # below TLS
    arrived = memoryview(bytearray(11))
    run([Pump(far, incoming=arrived)], TIMEOUT)
    assert bytes(arrived) == b"half a mess"
    with pytest.raises(ConnectionResetError, match="was cut off: no close_notify has come"):
        retry(far, lambda: far.recv_into(memoryview(bytearray(1))), TIMEOUT)
    near.abort()
    far.close()


def test_bytes_changed_on_the_way_break_the_connection(node: TlsFiles) -> None:
    near, far = connect_pair(TLS, ADDRESS, Config(tls=node), TIMEOUT)
    assert isinstance(near, TlsLink)
    near._tls.write(b"pay 100")
    record = bytearray(near._outgoing.read())
    record[-1] ^= 1
    near._sock.send(record)
    with pytest.raises(ConnectionAbortedError, match="broke"):
        retry(far, lambda: far.recv_into(memoryview(bytearray(10))), TIMEOUT)
    with pytest.raises(ConnectionAbortedError, match="broke"):
        far.send(b"more")
    with pytest.raises(ConnectionAbortedError):
        retry(near, lambda: near.recv_into(memoryview(bytearray(10))), TIMEOUT)
    near.close()
    far.close()


def test_records_of_a_foreign_size_and_many_small_ones(node: TlsFiles) -> None:
    """Reads that end in the middle of a record, and records that end in the middle of a read."""
    near, far = connect_pair(TLS, ADDRESS, Config(tls=node), TIMEOUT)
    data = os.urandom(50_000)
    sizes = iter([1, 5, 16_384, 3, 20_000, 1, 1, 13_605])
    sent = 0
    for size in sizes:
        sent += near.send(data[sent : sent + size])
    assert sent == len(data)
    arrived = memoryview(bytearray(len(data)))
    run([Pump(near), Pump(far, incoming=arrived, chunks=iter([7] * 100 + [16_380] * 100))], TIMEOUT)
    assert bytes(arrived) == data
    near.close()
    far.close()


def test_certificates_are_required_and_checked_at_once(node: TlsFiles, stranger: TlsFiles) -> None:
    with pytest.raises(ConfigError, match="tls:// needs certificates"):
        TLS.listen(ADDRESS, Config())
    with pytest.raises(ConfigError, match="tls:// needs certificates"):
        TLS.connect(Address("tls", "127.0.0.1", 1), Config())
    mixed = TlsFiles(cert=node.cert, key=stranger.key, ca=node.ca)
    with pytest.raises(ConfigError, match="cannot be used"):
        make_context(mixed, server=True)

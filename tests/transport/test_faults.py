"""The fault injectors do what they say, at the byte they say."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from rankmesh.config import Config
from rankmesh.testing.faults import FaultLink, FaultTransport
from rankmesh.testing.proxy import FaultProxy
from rankmesh.testing.pump import Pump, connect_pair, establish, is_ready, run, transfer, wait_any
from rankmesh.transport import Address, Link, transport_for
from timing import scaled

TIMEOUT = scaled(10)
CONFIG = Config()
Pair = tuple[FaultLink, Link]


@pytest.fixture(params=["inproc://", "tcp://127.0.0.1:0"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A link with faults, and the other side of its connection."""
    address = Address.parse(request.param)
    faults = FaultTransport(transport_for(address), seed=1)
    near, far = connect_pair(faults, address.with_scheme(faults.scheme), CONFIG, TIMEOUT)
    assert [near, far] == faults.links
    assert isinstance(near, FaultLink)
    assert not near.accepted
    yield near, far
    near.close()
    far.close()


def receive(link: Link, nbytes: int) -> bytes:
    arrived = bytearray(nbytes)
    run([Pump(link, incoming=memoryview(arrived))], TIMEOUT)
    return bytes(arrived)


def test_cut_breaks_both_sides_at_that_byte(pair: Pair) -> None:
    near, far = pair
    near.cut(after_bytes=10)
    assert near.send(b"0123") == 4
    assert near.send(b"4567890123456789") == 6
    assert near.sent == 10
    assert is_ready(near), "the owner must be woken to see it"
    for operation in (near.send, near.recv_into):
        with pytest.raises(ConnectionResetError, match="was cut"):
            operation(memoryview(bytearray(1)))
    with pytest.raises(ConnectionError):
        receive(far, 11)


def test_stall_holds_everything_until_resume(pair: Pair) -> None:
    near, far = pair
    near.stall(after_bytes=4)
    assert near.send(b"0123456789") == 4
    assert receive(far, 4) == b"0123"
    run([Pump(far, outgoing=b"answer")], TIMEOUT)
    near.wants_write(True)
    assert not is_ready(near, 0.05), "a stalled link must not keep its owner busy"
    for operation in (near.send, near.recv_into):
        with pytest.raises(BlockingIOError):
            operation(memoryview(bytearray(1)))
    threading.Timer(0.05, near.resume).start()
    assert is_ready(near, TIMEOUT)
    assert receive(near, 6) == b"answer"
    assert transfer(near, far, b"456789", TIMEOUT) == b"456789"


def test_drop_is_silence(pair: Pair) -> None:
    near, far = pair
    near.drop(after_bytes=3)
    assert near.send(b"012345") == 3
    assert near.send(b"345") == 3
    assert near.sendmsg([b"6", b"78"]) == 3
    assert near.sent == 9
    assert receive(far, 3) == b"012"
    assert not is_ready(far, 0.05)
    run([Pump(far, outgoing=b"are you there?")], TIMEOUT)
    assert not is_ready(near, 0.05)
    with pytest.raises(BlockingIOError):
        near.recv_into(memoryview(bytearray(1)))
    far.close()
    assert not is_ready(near, 0.05), "not even the end of the connection comes through a dead network"


def test_the_same_seed_makes_the_same_short_calls() -> None:
    def sizes(seed: int) -> list[int]:
        faults = FaultTransport(
            transport_for(Address.parse("inproc://")), seed=seed, prepare=lambda link: link.trickle(50)
        )
        near, far = connect_pair(faults, Address("fault+inproc", ""), CONFIG, TIMEOUT)
        taken = [near.send(bytes(1000)) for _ in range(20)]
        near.close()
        far.close()
        return taken

    assert sizes(1) == sizes(1) != sizes(2)
    assert 1 <= min(sizes(1)) < max(sizes(1)) <= 50


def test_connections_are_handed_out_in_another_order() -> None:
    def order(seed: int) -> list[int]:
        faults = FaultTransport(transport_for(Address.parse("tcp://127.0.0.1:0")), seed=seed, reorder=8)
        with faults.installed():
            listener = faults.listen(Address.parse("fault+tcp://127.0.0.1:0"), CONFIG)
            near: list[Link] = []
            for number in range(8):
                with pytest.raises(BlockingIOError, match=f"{number} of 8"):
                    listener.accept()
                near.append(faults.connect(listener.address, CONFIG))
                establish(near[-1:], TIMEOUT)
                assert wait_any([listener], TIMEOUT)
            far = [listener.accept() for _ in near]
            assert not wait_any([listener], 0)
            places = [[link.local for link in near].index(link.remote) for link in far]
            for link in (*near, *far):
                link.close()
            listener.close()
        return places

    assert sorted(order(3)) == list(range(8))
    assert order(3) == order(3) != list(range(8))


class EchoServer:
    """Sends back what it gets, one connection after the other."""

    def __init__(self) -> None:
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.address = Address("tcp", *self.sock.getsockname())
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        while True:
            try:
                sock, _ = self.sock.accept()
            except OSError:
                return
            with sock:
                try:
                    while data := sock.recv(65536):
                        sock.sendall(data)
                except OSError:
                    pass

    def close(self) -> None:
        self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        self.thread.join(TIMEOUT)


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    server = EchoServer()
    with FaultProxy(server.address) as proxy:
        yield proxy
    server.close()


def client(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection((proxy.address.host, proxy.address.port), timeout=TIMEOUT)


def read_exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        piece = sock.recv(nbytes - len(data))
        assert piece, f"the stream ended after {len(data)} bytes"
        data += piece
    return data


def test_a_proxy_forwards_both_ways_and_the_end(proxy: FaultProxy) -> None:
    data = bytes(range(256)) * 8000
    with client(proxy) as sock:

        def send() -> None:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        assert read_exactly(sock, len(data)) == data
        assert sock.recv(1) == b""
        sender.join(TIMEOUT)


def test_a_proxy_cuts_after_that_many_bytes_and_serves_again(proxy: FaultProxy) -> None:
    with client(proxy) as sock:
        proxy.cut(after_bytes=3)
        sock.sendall(b"0123456789")
        with pytest.raises(ConnectionResetError):
            read_exactly(sock, 10)
    with client(proxy) as sock:
        sock.sendall(b"again")
        assert read_exactly(sock, 5) == b"again"


def test_a_proxy_freezes_and_resumes(proxy: FaultProxy) -> None:
    with client(proxy) as sock:
        sock.sendall(b"warm")
        assert read_exactly(sock, 4) == b"warm"
        proxy.freeze(after_bytes=2)
        sock.sendall(b"abcdef")
        sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            sock.recv(100)
        sock.settimeout(TIMEOUT)
        proxy.resume()
        assert read_exactly(sock, 6) == b"abcdef"


def test_a_proxy_trickles_and_delays(proxy: FaultProxy) -> None:
    with client(proxy) as sock:
        proxy.trickle(3)
        data = bytes(range(200))
        sock.sendall(data)
        assert read_exactly(sock, len(data)) == data
        proxy.trickle(0)
        proxy.delay(0.1)
        started = time.monotonic()
        sock.sendall(b"there and back")
        assert read_exactly(sock, 14) == b"there and back"
        assert time.monotonic() - started >= 0.2


def test_a_proxy_whose_target_is_gone_resets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = Address("tcp", *gone.getsockname())
    with FaultProxy(address) as lonely, pytest.raises(ConnectionResetError), client(lonely) as sock:
        sock.recv(1)

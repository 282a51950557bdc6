"""What is particular to tcp://."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rankmesh.config import Config
from rankmesh.errors import UsageError
from rankmesh.testing.pump import Pump, connect_pair, establish, run, transfer, wait_any
from rankmesh.transport import Address, Link, tcp
from rankmesh.transport.tcp import UNSENT_BYTES, TcpLink, TcpTransport
from timing import scaled

TCP = TcpTransport()
CONFIG = Config()


def pair(host: str = "127.0.0.1") -> tuple[Link, Link]:
    return connect_pair(TCP, Address("tcp", host, 0), CONFIG, scaled(10))


def options(link: Link) -> dict[str, int]:
    with socket.socket(fileno=os.dup(link.fileno())) as sock:
        return {
            "no delay": sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY),
            "unsent": sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT),
            "keep-alive": sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            "blocking": int(os.get_blocking(sock.fileno())),
            "inheritable": int(os.get_inheritable(link.fileno())),
        }


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_accepted_sockets_have_no_delay(host: str) -> None:
    """Mooncake: accepted sockets without no-delay, 48 ms p99 on a 4 KiB read. ferrotorch: Nagle on."""
    near, far = pair(host)
    expected = {"no delay": 1, "unsent": UNSENT_BYTES, "keep-alive": 0, "blocking": 0, "inheritable": 0}
    assert options(near) == options(far) == expected
    near.close()
    far.close()


def congestion_control(link: Link) -> str:
    with socket.socket(fileno=os.dup(link.fileno())) as sock:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_nothing_paces_a_connection_inside_one_host(host: str) -> None:
    """Found: where the system's default is BBR, 64 MiB both ways at once took 20 ms instead of 14."""
    near, far = pair(host)
    assert congestion_control(near) == congestion_control(far) == "reno"
    near.close()
    far.close()


def test_between_hosts_the_systems_choice_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "is_same_host", lambda sock, remote: False)
    default = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    near, far = pair()
    assert congestion_control(near) == congestion_control(far) == default
    near.close()
    far.close()


def test_a_system_that_has_no_choice_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "SAME_HOST_CONGESTION", b"unheard-of")
    near, far = pair()
    assert transfer(near, far, b"it connects all the same", scaled(10)) == b"it connects all the same"
    near.close()
    far.close()


def test_the_hot_path_is_the_sockets_own() -> None:
    near, far = pair()
    assert isinstance(near, TcpLink)
    for method in (near.recv_into, near.send, near.fileno):
        assert type(method).__name__ == "builtin_function_or_method"
    near.close()
    far.close()


def test_a_connection_to_itself_is_refused() -> None:
    """A port of the ephemeral range that nobody listens on can be picked as the source port of its own connection."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.bind(("127.0.0.1", 0))
    host, port = sock.getsockname()
    assert sock.connect_ex((host, port)) in (0, errno.EINPROGRESS)
    link = TcpLink(sock, Address("tcp", host, port), connecting=True)
    with pytest.raises(ConnectionRefusedError, match=f"cannot connect to tcp://127.0.0.1:{port}"):
        establish([link], scaled(5))
    link.abort()


def test_connecting_is_not_blocking_and_says_whom_it_did_not_reach() -> None:
    """A listener that accepts nobody and whose queue is full does not answer: the connection stays pending."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = Address("tcp", *full.getsockname())
        links = [TCP.connect(address, CONFIG) for _ in range(4)]
        stuck = links[-1]
        assert stuck.poll_mask() == select.POLLOUT
        assert "connecting" in repr(stuck)
        with pytest.raises(BlockingIOError, match=f"still connecting to {address}"):
            stuck.establish()
        for link in links:
            link.abort()
    refused = TCP.connect(address, CONFIG)
    with pytest.raises(ConnectionRefusedError, match=f"cannot connect to {address}"):
        establish([refused], scaled(5))
    refused.abort()


def test_names_are_resolved_to_numbers() -> None:
    found = TCP.resolve(Address.parse("tcp://localhost:7"))
    assert found
    assert len(set(found)) == len(found)
    assert all(address.is_loopback and address.port == 7 for address in found)
    assert TCP.resolve(Address.parse("tcp://[::1]:7")) == [Address("tcp", "::1", 7)]
    with pytest.raises(OSError, match=r"'no\.such\.host\.invalid' cannot be resolved"):
        TCP.resolve(Address.parse("tcp://no.such.host.invalid:7"))


def test_only_numbers_are_connected_to() -> None:
    with pytest.raises(UsageError, match="resolve"):
        TCP.connect(Address.parse("tcp://localhost:7"), CONFIG)
    with pytest.raises(UsageError, match="to listen on, not to connect to"):
        TCP.connect(Address.parse("tcp://0.0.0.0:7"), CONFIG)


def test_a_listener_on_every_interface_serves_both_families() -> None:
    listener = TCP.listen(Address.parse("tcp://[::]:0"), CONFIG)
    assert listener.address.is_wildcard
    assert listener.address.port > 0
    for host in ("127.0.0.1", "::1"):
        near = TCP.connect(Address("tcp", host, listener.address.port), CONFIG)
        assert wait_any([listener], scaled(5))
        far = listener.accept()
        establish([near, far], scaled(5))
        assert far.remote == near.local
        assert far.remote.startswith(f"tcp://{'[::1]' if ':' in host else host}:")
        assert far.loopback
        assert transfer(near, far, b"hello", scaled(5)) == b"hello"
        near.close()
        far.close()
    listener.close()


def test_a_port_in_use_is_named() -> None:
    listener = TCP.listen(Address.parse("tcp://127.0.0.1:0"), CONFIG)
    with pytest.raises(OSError, match=f"cannot listen on {listener.address}") as caught:
        TCP.listen(listener.address, CONFIG)
    assert caught.value.errno == errno.EADDRINUSE
    listener.close()


def test_a_port_can_be_listened_on_again_at_once() -> None:
    listener = TCP.listen(Address.parse("tcp://127.0.0.1:0"), CONFIG)
    near, far = connect_pair(TCP, listener.address, CONFIG, scaled(5), listener)
    listener.close()
    far.close()  # the side that closes first keeps the port in TIME_WAIT
    near.close()
    TCP.listen(listener.address, CONFIG).close()


def test_a_connection_that_failed_before_accept_is_skipped() -> None:
    listener = TCP.listen(Address.parse("tcp://127.0.0.1:0"), CONFIG)
    error = OSError(errno.ECONNABORTED, "Software caused connection abort")

    class Failing(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            raise error

    listener._sock.close()
    listener._sock = Failing()
    with pytest.raises(BlockingIOError):
        listener.accept()
    listener.close()


def test_running_out_of_descriptors_is_an_error_and_the_connection_waits() -> None:
    """EMFILE must reach the caller, who backs off: swallowed, it would spin, because the listener stays readable."""
    listener = TCP.listen(Address.parse("tcp://127.0.0.1:0"), CONFIG)
    near = TCP.connect(listener.address, CONFIG)
    assert wait_any([listener], scaled(5))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (near.fileno() + 1, hard))
    try:
        with pytest.raises(OSError, match="Too many open files") as caught:
            listener.accept()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not isinstance(caught.value, BlockingIOError)
    far = listener.accept()
    establish([near, far], scaled(5))
    assert transfer(near, far, b"after all", scaled(5)) == b"after all"
    for thing in (near, far, listener):
        thing.close()


def test_the_kernel_holds_little_that_is_unsent() -> None:
    """A control frame waits behind at most UNSENT_BYTES of bulk that has not left yet, not behind megabytes."""
    near, far = pair()
    siocoutqnsd = 0x894B  # bytes not yet sent, see tcp(7)

    near.wants_write(True)
    while wait_any([near], 0.05):
        try:
            near.send(bytes(1 << 20))
        except BlockingIOError:
            continue
    unsent = int.from_bytes(fcntl.ioctl(near.fileno(), siocoutqnsd, bytes(4)), sys.byteorder)
    assert 0 < unsent < 2 * UNSENT_BYTES
    near.abort()
    far.close()


def test_the_end_of_a_killed_process_is_seen() -> None:
    """The kernel closes for it; what it had sent arrives first."""
    listener = TCP.listen(Address.parse("tcp://127.0.0.1:0"), CONFIG)
    code = f"""
import socket, os, signal
sock = socket.create_connection(("127.0.0.1", {listener.address.port}))
sock.sendall(b"last words")
os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        assert wait_any([listener], scaled(20))
        link = listener.accept()
        arrived = memoryview(bytearray(10))
        run([Pump(link, incoming=arrived)], scaled(20))
        assert bytes(arrived) == b"last words"
        assert wait_any([link], scaled(20))
        assert link.recv_into(memoryview(bytearray(10))) == 0
        assert process.wait(scaled(20)) == -9
    link.close()
    listener.close()


def test_tls_is_not_loaded_for_tcp() -> None:
    code = """
import sys
from rankmesh.transport import Address, transport_for
transport_for(Address.parse("tcp://127.0.0.1:0"))
assert "rankmesh.transport.tls" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=scaled(30))

"""An endpoint in a process of its own that is attacked, a genuine pair beside the attack, and attackers' sockets.

The process is apart so that its memory and descriptors are its own; what it logs is fetched as text.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any, Self

import initiator
from rankmesh.config import Config
from rankmesh.endpoint import Endpoint
from rankmesh.errors import ClosedError, RankmeshError
from rankmesh.transport.address import Address
from rankmesh.wire.handshake import NONCE_BYTES, Handshake
from rankmesh.wire.messages import Identity
from timing import scaled, wait_until

TOKEN = "the cluster's token"
ECHO = 1
#: A handshake has this long: the attacks that end at the deadline take no longer.
HANDSHAKE = scaled(1.0)
CONFIG = Config(token=TOKEN, handshake_timeout=HANDSHAKE, timeout=scaled(20), max_message_bytes=1 << 20)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))

    def take(self) -> str:
        """What came since the last time."""
        self.acquire()  # as every emit() does
        try:
            lines, self._lines = self._lines, []
        finally:
            self.release()
        return "\n".join(lines)


def _serve(talk: Connection, config: Config) -> None:
    """The target: whoever sends it a message with the tag ECHO gets it back."""
    log = _Lines()
    logging.getLogger("rankmesh").addHandler(log)

    def echo(endpoint: Endpoint) -> None:
        message = bytearray(64)
        with suppress(ClosedError):
            while True:
                status = endpoint.recv(message, tag=ECHO, timeout=3600)
                with suppress(RankmeshError):  # an attacker that is gone by now
                    status.source.send(memoryview(message)[: status.nbytes], tag=ECHO)

    with Endpoint(name="target", config=config) as endpoint:
        endpoint._connector.refusals.quiet = 0.1  # what is refused is in the log soon, if only as a number
        thread = threading.Thread(target=echo, args=(endpoint,))
        thread.start()
        talk.send(endpoint.address)
        while talk.recv():
            talk.send(log.take())
        endpoint.abort()
        thread.join()


class Target:
    """The process under attack."""

    def __init__(self, config: Config = CONFIG) -> None:
        context = multiprocessing.get_context("forkserver")
        self._talk, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, config), daemon=True)
        self._process.start()
        theirs.close()
        assert self._talk.poll(scaled(30)), "the target did not start"
        self.address = Address.parse(self._talk.recv())
        self.log = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._talk.send(False)
        self._process.join(scaled(20))
        ended = self._process.exitcode
        self._process.kill()
        self._process.join()
        self._process.close()
        self._talk.close()
        assert ended == 0, f"the target ended with {ended}"

    def _entry(self, name: str) -> Path:
        return Path(f"/proc/{self._process.pid}", name)

    @property
    def memory(self) -> int:
        """Resident bytes."""
        return int(self._entry("statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    @property
    def descriptors(self) -> int:
        return len(os.listdir(self._entry("fd")))

    def look(self) -> str:
        """What it has logged since the last `forget`."""
        self._talk.send(True)
        assert self._talk.poll(scaled(20)), "the target does not answer"
        self.log += self._talk.recv() + "\n"
        return self.log

    def forget(self) -> None:
        self.look()
        self.log = ""

    def wait_for_refusals(self, count: int, reason: str = "", timeout: float = 10.0) -> None:
        try:
            wait_until(lambda: refused(self.look(), reason) >= count, timeout)
        except AssertionError:
            raise AssertionError(f"{count} × {reason!r} was not refused:\n{self.log[:5000]}") from None

    def wait_for_log(self, text: str, count: int = 1, timeout: float = 10.0) -> None:
        try:
            wait_until(lambda: self.look().count(text) >= count, timeout)
        except AssertionError:
            raise AssertionError(f"{count} × {text!r} is not in the log:\n{self.log[:5000]}") from None


def refused(log: str, reason: str = "") -> int:
    """How many connections were refused for this reason: those with a line of their own, and those in a number."""
    count = sum(reason in line for line in re.findall("Refused the connection from .*", log))
    for line in re.findall("Refused more connections from .*? s: (.*)", log):
        count += sum(int(number) for number, told in re.findall(r"(\d+) × (.*?)(?=, \d+ × |$)", line) if reason in told)
    return count


class Genuine(threading.Thread):
    """A peer that exchanges messages with the target all the time, and checks every one."""

    def __init__(self, target: Target, config: Config = CONFIG) -> None:
        super().__init__(name="genuine")
        self.endpoint = Endpoint(address=None, name="genuine", config=config)
        self.peer = self.endpoint.connect(str(target.address))
        self.trips: list[float] = []
        self.error: Exception | None = None
        self._enough = threading.Event()

    def run(self) -> None:
        try:
            while not self._enough.wait(0.001):
                self.trip()
        except Exception as error:  # noqa: BLE001  the test shows it, whatever it is
            self.error = error

    def trip(self) -> None:
        began, out = monotonic(), bytearray(64)
        message = b"message %d" % len(self.trips)
        self.peer.send(message, tag=ECHO)
        status = self.peer.recv(out, tag=ECHO)
        assert out[: status.nbytes] == message
        self.trips.append(monotonic() - began)

    def stop(self) -> None:
        self._enough.set()
        self.join(scaled(30))
        self.endpoint.abort()
        assert not self.is_alive()


@contextmanager
def undisturbed(target: Target) -> Iterator[Genuine]:
    """Around an attack: a genuine peer notices nothing of it, loses nothing, and gets its answers in time."""
    genuine = Genuine(target)
    genuine.start()
    try:
        wait_until(lambda: len(genuine.trips) > 5 or genuine.error, 10, "the first messages")
        yield genuine
        during = len(genuine.trips)
        wait_until(lambda: len(genuine.trips) > during + 5 or genuine.error, 10, "messages after the attack")
    finally:
        genuine.stop()
    assert genuine.error is None, repr(genuine.error)
    trips = sorted(genuine.trips)
    assert trips[int(0.99 * len(trips))] < scaled(1.0), f"p99 of {len(trips)} trips"


# --- attackers --------------------------------------------------------------------------------------------------------


def dial(target: Target) -> socket.socket:
    return socket.create_connection((target.address.host, target.address.port), timeout=scaled(10))


def identity(**changes: Any) -> Identity:
    """Who the attacker says it is."""
    usual: dict[str, Any] = {
        "uid": os.urandom(16), "name": "attacker", "host": "elsewhere", "pid": 1, "eager_bytes": 1 << 16,
        "lane_credit": 1 << 20, "peer_credit": 1 << 24, "max_message": 1 << 20, "max_rpc": 1 << 20,
    }  # fmt: skip
    return Identity(**usual | changes)


def shake(sock: socket.socket, token: str = TOKEN, who: Identity | None = None) -> Handshake:
    """Go through the handshake as the initiator. Raises what it raises there."""
    side = Handshake(initiator=True, token=token, identity=who or identity(), nonce=os.urandom(NONCE_BYTES))
    if not initiator.shake(sock, side, lambda _, words: sock.sendall(words)):
        raise ConnectionResetError("the target hung up during the handshake")
    return side


def admitted(target: Target, **changes: Any) -> socket.socket:
    """A connection of one that knows the token and went through the handshake."""
    sock = dial(target)
    shake(sock, who=identity(**changes))
    return sock


def wait_for_end(sock: socket.socket) -> bytes:
    """Read until the target ends the connection; what it said."""
    said = b""
    sock.settimeout(scaled(10))
    with suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            said += piece
    return said

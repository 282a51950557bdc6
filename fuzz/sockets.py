"""A seeded fuzzer against a live endpoint in a process of its own, over real sockets.

    python fuzz/sockets.py --seconds 180 --seed 7
    python fuzz/sockets.py --seed 7 --case 1234            one case again

A case is one connection: a handshake (genuine, or mutated at one place, or with a mutated identity that is proved
genuinely), then perhaps frames (valid, mutated, garbage), cut into pieces, and an end (orderly, reset, or silence).
The endpoint has receives posted and messages on their way to everybody who connects, so that grants, pieces and
credit find something to act on. Findings are:

- the endpoint's process dies, logs a traceback, or says that a defect of rankmesh ended a conversation;
- a genuine peer, which exchanges messages with it between the cases, gets none or a wrong answer;
- its memory or its descriptors grow.

A case draws everything from Random(f"{seed}/{number}"), but for the endpoint's nonces, which are fresh every time.
(The module is not called `socket`: a script's folder comes first on the path, and would hide the standard library's.)
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random, SystemRandom
from tempfile import TemporaryFile
from typing import Any, Final

import corpus
from initiator import shake
from rankmesh import ANY_TAG, Endpoint, Peer
from rankmesh.config import MIB, Config
from rankmesh.errors import ClosedError, ConnectError, RankmeshError
from rankmesh.wire.handshake import NONCE_BYTES, Handshake
from rankmesh.wire.messages import encode

CONFIG: Final = Config(
    token=corpus.TOKEN,
    eager_bytes=corpus.LIMITS.eager,
    max_message_bytes=corpus.LIMITS.message,
    max_rpc_bytes=corpus.LIMITS.rpc,
    handshake_timeout=1.0,
    timeout=20.0,
)
#: The tag of the genuine peer's messages; those of the corpus are others.
ECHO: Final = 1_000
#: Between two looks at the endpoint's health.
PERIOD: Final = 50
WARM_UP: Final = 500
#: What the endpoint may grow by once it has warmed up: what its peers may leave unreceived, and the allocator's slack.
GROWTH_BYTES: Final = 96 * MIB
#: Connections that may linger: their cases ended in silence, and the handshake's deadline has not passed.
LINGERING: Final = 64
ALARMS: Final = ("Traceback", "defect in rankmesh", "ResourceWarning")


class Finding(Exception):
    """What no input may do."""


# --- the endpoint, in a process of its own ----------------------------------------------------------------------------


def serve() -> None:
    """Print the address, and serve until standard input ends."""
    logging.basicConfig(level=logging.WARNING)
    with Endpoint(name="target", config=CONFIG) as endpoint:
        threads = [threading.Thread(target=work, args=(endpoint,)) for work in (_echo, _entertain)]
        for thread in threads:
            thread.start()
        print(endpoint.address, flush=True)
        sys.stdin.read()
        endpoint.abort()
        for thread in threads:
            thread.join()


def _echo(endpoint: Endpoint) -> None:
    message = bytearray(256)
    with suppress(ClosedError):
        while True:
            status = endpoint.recv(message, tag=ECHO, timeout=3600)
            with suppress(RankmeshError):
                status.source.send(memoryview(message)[: status.nbytes], tag=ECHO)


def _entertain(endpoint: Endpoint) -> None:
    """Give everybody who connects something to answer, and places for what it sends."""
    with suppress(ClosedError):
        while True:
            peer = endpoint.accept(timeout=3600)
            if peer.name != "genuine":
                with suppress(RankmeshError):
                    _entertain_one(peer)


def _entertain_one(peer: Peer) -> None:
    for tag in (0, 7, ANY_TAG, ANY_TAG):
        peer.irecv(bytearray(corpus.LIMITS.message), tag=tag)
    for nbytes in (0, 100, 50_000, 50_000):
        peer.isend(bytes(nbytes), tag=3)


class Target:
    """The process under fire."""

    def __init__(self, script: str = __file__) -> None:
        self._log = TemporaryFile("w+")  # noqa: SIM115  close() closes it
        self._process = subprocess.Popen(
            [sys.executable, "-X", "dev", script, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        host, port = self.address.removeprefix("tcp://").split(":")
        self.sockaddr = host, int(port)

    def _entry(self, name: str) -> Path:
        return Path(f"/proc/{self._process.pid}", name)

    @property
    def memory(self) -> int:
        return int(self._entry("statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    @property
    def descriptors(self) -> int:
        return len(os.listdir(self._entry("fd")))

    def check(self) -> None:
        """Raises Finding if it died, or complained."""
        if self._process.poll() is not None:
            raise Finding(f"the endpoint's process ended with {self._process.returncode}\n{self.log()[-4000:]}")
        self.check_log()

    def check_log(self) -> None:
        log = self.log()
        for alarm in ALARMS:
            if alarm in log:
                at = log.index(alarm)
                raise Finding(f"the endpoint complained:\n{log[max(0, at - 1000) : at + 4000]}")

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def close(self) -> None:
        """Let it end in order: what is still wrong shows now. Raises Finding."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            code = self._process.wait(30)
        except subprocess.TimeoutExpired:
            raise Finding(f"the endpoint does not close\n{self.log()[-4000:]}") from None
        if code:
            raise Finding(f"the endpoint ended with {code}\n{self.log()[-4000:]}")
        self.check_log()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            assert stream is not None
            stream.close()


# --- one case ---------------------------------------------------------------------------------------------------------


class Case:
    """One connection. `run()` tells how it went, in a word."""

    def __init__(self, random: Random, target: Target) -> None:
        self._random = random
        try:
            self._sock = socket.create_connection(target.sockaddr, timeout=5)
        except OSError as error:
            raise Finding(f"the endpoint takes no connection: {error}") from error

    def run(self) -> str:
        with self._sock:
            try:
                how = self._handshake()
                if how == "admitted":
                    how = self._frames()
            except (ConnectError, RankmeshError):
                return "refused"
            except (ConnectionError, TimeoutError):
                return "cut"
            self._end()
        return how

    def _handshake(self) -> str:
        random = self._random
        side = Handshake(
            initiator=True,
            token=corpus.TOKEN if random.random() < 0.97 else "another",
            identity=corpus.make_identity(random),
            nonce=random.randbytes(NONCE_BYTES),
        )
        bad = random.choice(("hello", "auth", "identity")) if random.random() < 0.4 else ""
        if bad:
            self._sock.settimeout(0.05)  # it may wait for more: do not wait with it until its deadline
        hello = b""

        def say(heard: bytes, words: bytes) -> None:
            nonlocal hello
            part = "auth" if heard else "hello"
            if part == "hello":
                hello = words
            elif bad == "identity":
                words = corpus.proof(hello, heard, corpus.mutate(random, encode(side.identity)))
            self._send(corpus.mutate(random, words) if bad == part else words)

        return "admitted" if shake(self._sock, side, say) else "hung up on"

    def _frames(self) -> str:
        random = self._random
        kinds: list[tuple[str, Callable[[], bytes]]] = [
            ("valid", lambda: corpus.frames(random)),
            ("mutated", lambda: corpus.mutate_frames(random, corpus.frames(random))),
            ("mutated", lambda: corpus.mutate_frames(random, corpus.frames(random))),
            ("garbage", lambda: corpus.garbage(random)),
        ]
        name, make = random.choice(kinds)
        for _ in range(random.randint(1, 6)):
            self._send(make())
            if random.random() < 0.5:
                self._look()
        return name

    def _send(self, data: bytes) -> None:
        """In one piece, or in several."""
        random = self._random
        cuts = sorted(random.randrange(len(data) + 1) for _ in range(random.choice((0, 0, 1, 5))))
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            self._sock.sendall(data[start:end])

    def _look(self) -> None:
        """Read what is there; the endpoint must not depend on it."""
        self._sock.settimeout(0.001)
        with suppress(TimeoutError):
            self._sock.recv(1 << 16)
        self._sock.settimeout(5)

    def _end(self) -> None:
        match self._random.choice(("close", "shutdown", "reset")):
            case "close":
                pass
            case "shutdown":
                with suppress(OSError):  # it is gone already, or says nothing
                    self._sock.shutdown(socket.SHUT_WR)
                    self._sock.settimeout(0.05)
                    self._sock.recv(1 << 16)
            case "reset":
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


# --- the loop ---------------------------------------------------------------------------------------------------------


class Genuine:
    """The peer that must notice nothing."""

    def __init__(self, target: Target) -> None:
        self._endpoint = Endpoint(address=None, name="genuine", config=CONFIG)
        self._peer = self._endpoint.connect(target.address)
        self._count = 0

    def check(self) -> None:
        """Raises Finding if it noticed something."""
        self._count += 1
        message, out = b"message %d" % self._count, bytearray(256)
        try:
            self._peer.send(message, tag=ECHO)
            status = self._peer.recv(out, tag=ECHO)
        except RankmeshError as error:
            raise Finding(f"the genuine peer noticed something: {error!r}") from error
        if out[: status.nbytes] != message:
            raise Finding(f"the genuine peer sent {message!r} and received {bytes(out[: status.nbytes])!r}")

    def close(self) -> None:
        self._endpoint.abort()


@dataclass(frozen=True)
class Plan:
    """Which cases are run: `only` that one, or the first `cases`, or as many as `seconds` allow."""

    seed: int
    seconds: float
    cases: int | None
    only: int | None

    def randoms(self, repetitions: int) -> Iterator[Random]:
        """What each case draws from; `only` is run that many times."""
        deadline = time.monotonic() + self.seconds
        limit = self.cases if self.only is None else repetitions
        for number in count():
            if time.monotonic() >= deadline if limit is None else number >= limit:
                return
            yield Random(f"{self.seed}/{self.case(number)}")

    def case(self, number: int) -> int:
        """The number of the case that is run as the `number`-th."""
        return number if self.only is None else self.only


def hunt(target: Target, genuine: Genuine, case: type[Case], plan: Plan) -> Counter[str]:
    """Run the plan's cases, a single one PERIOD times. How they went; raises Finding."""
    outcomes: Counter[str] = Counter()
    warm = descriptors = number = 0
    try:
        for number, random in enumerate(plan.randoms(PERIOD), start=1):
            outcomes[case(random, target).run()] += 1
            if number % PERIOD == 0:
                genuine.check()
                target.check()
            if number == WARM_UP:
                warm, descriptors = target.memory, target.descriptors
        genuine.check()
        target.check()
        check_growth(target, warm, descriptors)
        target.close()
    except Finding as finding:
        last = f"--seed {plan.seed} --case {plan.case(number - 1)}"
        raise Finding(f"{finding}\nafter {number} cases: {last}, or one of those before") from None
    finally:
        genuine.close()
        target.kill()
    return outcomes


def check_growth(target: Target, warm: int, descriptors: int) -> None:
    if warm and target.memory - warm > GROWTH_BYTES:
        raise Finding(f"the endpoint grew from {warm} to {target.memory} bytes")
    if warm and target.descriptors > descriptors + LINGERING:
        raise Finding(f"the endpoint's descriptors grew from {descriptors} to {target.descriptors}")


def read_plan(description: str, arguments: list[str] | None) -> Plan | None:
    """What the command line asks for, its seed printed; None: to be the target of another process' cases."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--cases", type=int, default=None, help="so many cases, however long they take")
    options.add_argument("--seed", type=int, default=None, help="default: a new one, printed")
    options.add_argument("--case", type=int, default=None, help="only this case")
    options.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given: Any = options.parse_args(arguments)
    if given.serve:
        return None
    seed = SystemRandom().randrange(2**32) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    return Plan(seed, given.seconds, given.cases, given.case)


def main(arguments: list[str] | None = None) -> int:
    plan = read_plan("Fuzz a live endpoint over sockets.", arguments)
    if plan is None:
        serve()
        return 0
    try:
        target = Target()
        outcomes = hunt(target, Genuine(target), Case, plan)
    except Finding as finding:
        print(f"FINDING with seed {plan.seed}\n{finding}", flush=True)
        return 1
    print(f"{outcomes.total():,} cases, no finding: " + ", ".join(f"{n:,} {how}" for how, n in outcomes.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

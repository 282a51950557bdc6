"""Two connected endpoints, and contents that tell one message from another."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from rankmesh import Config, Endpoint, Peer
from rankmesh.endpoint.router import PeerRouter
from rankmesh.testing.faults import FaultLink, FaultTransport
from rankmesh.transport import Address, transport_for
from timing import scaled

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]

#: Seconds that anything in these tests may take that is expected to happen.
SOON = scaled(20)
#: Seconds after which a test counts as "it did not happen": a wait that is expected to run out.
BRIEFLY = 0.1
#: Settings with which no timer wakes anybody within the time that a call has: who is not rung stays asleep.
PATIENT: dict[str, Any] = {"heartbeat_interval": scaled(100), "heartbeat_timeout": scaled(300), "idle_timeout": 1e6}


@dataclass(frozen=True)
class Medium:
    """What carries a pair: an address to listen on, and settings it needs."""

    address: str
    config: Config


#: Carried by what `faulty()` installs.
FAULTY = Medium("fault+tcp://127.0.0.1:0", Config())


@contextmanager
def faulty(prepare: Callable[[FaultLink], None] | None = None) -> Iterator[FaultTransport]:
    inner = transport_for(Address.parse("tcp://127.0.0.1:0"))
    with FaultTransport(inner, seed=random.randrange(2**32), prepare=prepare).installed() as transport:
        yield transport


@dataclass
class Pair:
    """Two endpoints. `there` is right as left sees it, `back` the other way round."""

    left: Endpoint
    right: Endpoint
    there: Peer
    back: Peer


@contextmanager
def open_pair(
    medium: Medium, through: Callable[[str], str] = lambda address: address, **settings: Any
) -> Iterator[Pair]:
    """Left connects to right; `through` may put something between them."""
    config = medium.config.override(**settings)
    with ExitStack() as stack:
        right = stack.enter_context(Endpoint(medium.address, name="right", config=config))
        left = stack.enter_context(Endpoint(medium.address, name="left", config=config))
        there = left.connect(through(right.address), timeout=SOON)
        back = right.accept(timeout=SOON)
        yield Pair(left, right, there, back)


def router_of(peer: Peer) -> PeerRouter:
    assert isinstance(peer.router, PeerRouter)
    return peer.router


def pattern(nbytes: int, seed: int = 0) -> Bytes:
    """Bytes that differ from those of every other seed, and from place to place."""
    return np.random.Generator(np.random.PCG64(seed)).integers(0, 256, nbytes, np.uint8)


def blank(nbytes: int) -> Bytes:
    """A buffer to receive into, full of what no test sends on purpose."""
    return np.full(nbytes, 0xA5, np.uint8)


def is_blank(buffer: Bytes) -> bool:
    return bool((buffer == 0xA5).all())


class Call(Generic[T]):
    """A call in a thread of its own. `result()` returns what it returned, or raises what it raised."""

    def __init__(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> None:
        self._outcome: list[T] = []
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._outcome.append(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  # carried to the thread that asks
                self._error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def result(self, timeout: float = SOON) -> T:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the call did not return"
        if self._error is not None:
            raise self._error
        return self._outcome[0]

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

"""The interfaces of subjects, and the loops that all subjects of a kind share.

Rules that make the figures comparable:
- The loops below and in measures/ are the measurement. A subject provides callables that lead into its library with as
  little Python in between as possible (a bound method or a `functools.partial`, not a wrapper function).
- Only bare sockets override a loop: they are the reference and shall be as fast as Python can be without a library.
- Every message lands in memory the caller named, which was written to before; contents are checked outside the timed
  part.
"""

from __future__ import annotations

import mmap
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Verb = Callable[[Any], object]
Call = Callable[[Any], Any]
#: A transfer with everything it needs to know: made once, then called and timed again and again.
Transfer = Callable[[], object]
#: (memory here, where it lies in the remote region, in bytes)
Piece = tuple[Bytes, int]

HOST = "127.0.0.1"
#: Seconds a subject may take to connect its processes to each other.
OPEN_TIMEOUT = 30.0


class Subject(ABC):
    """One process's side of a pair or a world. Used by one thread."""

    @abstractmethod
    def open(self, rank: int, size: int, port: int) -> None:
        """Connect all ranks; rank 0 listens on `port` of 127.0.0.1 where the library wants an address."""

    @abstractmethod
    def close(self) -> None:
        """Release everything `open` made."""

    @abstractmethod
    def version(self) -> str:
        """The library and its version, for the report. Asked after `open`."""

    def check(self) -> None:  # noqa: B027 - most subjects have nothing to be doubted
        """Asked after each measure: raise if what was measured is not what the row's title says."""


class Messenger(Subject):
    """Sends and receives messages."""

    #: Bytes each way of the ping-pong that a one-sided read or write is compared with; None: as many as that has.
    exchanged_bytes: int | None = None

    @abstractmethod
    def sender(self, peer: int) -> Verb:
        """A callable that sends one buffer to `peer`."""

    @abstractmethod
    def receiver(self, peer: int) -> Verb:
        """A callable that fills one buffer with the next message of `peer`."""

    def allocate(self, nbytes: int) -> Bytes:
        """Memory for a large message, written to."""
        return np.ones(nbytes, np.uint8)

    def buffer(self, array: Bytes) -> Any:
        """The same memory as the library likes to be given it."""
        return array

    def ping(self, peer: int, out: Any, into: Any, count: int) -> list[int]:
        """Nanoseconds of each of `count` round trips."""
        return time_round_trips(self.sender(peer), self.receiver(peer), out, into, count)

    def echo(self, peer: int, into: Any, count: int) -> None:
        """The other side of `ping`."""
        relay(self.receiver(peer), self.sender(peer), into, count)

    def send_each(self, peer: int, message: Any, count: int) -> None:
        """One call of the library per message, nothing awaited in between."""
        send = self.sender(peer)
        for _ in range(count):
            send(message)

    def receive_each(self, peer: int, into: Any, count: int) -> None:
        """The other side of `send_each`."""
        recv = self.receiver(peer)
        for _ in range(count):
            recv(into)


class Copier(Subject):
    """Copies memory inside one process: what moving data costs where nobody is to be told of it."""

    @abstractmethod
    def copy(self, out: Bytes, source: Bytes) -> object:
        """Copy all of `source` into `out`."""


class OneSided(Subject):
    """Reads and writes memory of rank 1, the owner, from other ranks. The owner takes no part: its main thread is
    blocked outside the library, or computes."""

    @abstractmethod
    def share(self, nbytes: int, tell: Callable[[Any], Any]) -> Bytes | None:
        """On every rank, after `open`: the owner makes its memory reachable and returns it, the others find it.

        `tell` carries the owner's argument to everybody and returns it there; what it says is the library's business.
        """

    @abstractmethod
    def reading(self, pieces: Sequence[Piece]) -> Transfer:
        """What fills each piece from the region: one operation of the library, or a batch if there are several."""

    @abstractmethod
    def writing(self, pieces: Sequence[Piece]) -> Transfer:
        """What writes each piece to the region."""

    def local(self, nbytes: int) -> Bytes:
        """Memory for this end of transfers, written to."""
        return np.ones(nbytes, np.uint8)

    def come_and_go(self) -> None:
        """The owner: register another region and unregister it."""
        raise NotImplementedError(f"{type(self).__name__} has one region.")

    def attend(self) -> None:
        """The owner of a library that serves only while it is called: serve until rank 0 calls `dismiss`.

        Most libraries serve by themselves.
        """

    def dismiss(self) -> None:
        """The other side of `attend`."""


#: numpy asks for pages of 2 MiB from so many bytes on; its large arrays begin so far behind the start of a page.
HUGE_FROM = 4 << 20
HUGE_PAGE = 2 << 20
HEAD = 16


def fresh(count: int) -> Floats:
    """An array on pages of its own, of the kind that numpy asks for: 2 MiB if it is large, else 4 KiB. One that is made
    of what was freed before lies on either, by what that was; and copies by the kernel differ by a factor of three."""
    nbytes = count * np.dtype(np.float32).itemsize
    memory = mmap.mmap(-1, nbytes + HEAD + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if nbytes >= HUGE_FROM else mmap.MADV_NOHUGEPAGE)
    pages = np.frombuffer(memory, np.uint8)
    start = -pages.ctypes.data % HUGE_PAGE + HEAD
    array = pages[start : start + nbytes].view(np.float32)
    array.fill(1)
    return array


class Collectives(Subject):
    """Collectives of all ranks. Buffers are the library's own kind of array, flat; each method names the call, which is
    made once and timed again and again."""

    #: What is exchanged has contents to be compared.
    checked = True

    def allocate(self, count: int) -> Any:
        """A buffer of so many elements, written to."""
        return fresh(count)

    def write(self, buffer: Any, values: Floats) -> None:
        """Fill a buffer."""
        np.copyto(buffer, values)

    def read(self, buffer: Any) -> Floats:
        """What is in a buffer."""
        floats: Floats = buffer
        return floats

    @abstractmethod
    def all_reduce(self, buffer: Any) -> Transfer:
        """The sum, in place."""

    @abstractmethod
    def broadcast(self, buffer: Any) -> Transfer:
        """From rank 0."""

    @abstractmethod
    def all_gather(self, buffer: Any, out: Any) -> Transfer:
        """All ranks' `buffer` in `out`."""

    @abstractmethod
    def reduce_scatter(self, buffer: Any, out: Any) -> Transfer:
        """This rank's part of the sum in `out`."""

    @abstractmethod
    def all_to_all(self, buffer: Any, out: Any) -> Transfer:
        """Part s of `out` is this rank's part of what rank s has."""

    @abstractmethod
    def barrier(self) -> Transfer:
        """All ranks have come."""


class AllReduceOnly(Collectives):
    """A bound: what cannot be beaten has no collectives but those it is a bound for."""

    checked = False

    def broadcast(self, buffer: Any) -> Transfer:
        raise self._none()

    def all_gather(self, buffer: Any, out: Any) -> Transfer:
        raise self._none()

    def reduce_scatter(self, buffer: Any, out: Any) -> Transfer:
        raise self._none()

    def all_to_all(self, buffer: Any, out: Any) -> Transfer:
        raise self._none()

    def barrier(self) -> Transfer:
        raise self._none()

    def _none(self) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} is no bound for that.")


class Trainer(Subject):
    """Trains a model on all ranks, each with data of its own."""

    @property
    @abstractmethod
    def parameters(self) -> int:
        """How many numbers the model has, in float32."""

    @abstractmethod
    def reset(self, learning: bool) -> None:
        """Begin again with the weights of the beginning; without `learning`, steps will leave them as they are."""

    @abstractmethod
    def step(self, number: int) -> float:
        """One step on batch `number`; its loss on this rank."""

    @abstractmethod
    def alone(self) -> AbstractContextManager[None]:
        """Steps within have no communication."""


class Caller(Subject):
    """Calls a function of another process that returns its argument. Rank 1 serves it in threads of its own from `open`
    to `close`; rank 0 calls."""

    @abstractmethod
    def caller(self) -> Call:
        """A callable that makes one call and returns its result."""

    def array(self, array: Bytes) -> Any:
        """A large array in the form in which the library carries it best. Small payloads are `bytes` for everybody."""
        return array.tobytes()

    def time_calls(self, payload: Any, count: int) -> tuple[list[int], Any]:
        """Nanoseconds of each of `count` calls, one after the other, and the last result."""
        call, clock = self.caller(), time.perf_counter_ns
        samples, result = [0] * count, None
        for i in range(count):
            began = clock()
            result = call(payload)
            samples[i] = clock() - began
        return samples, result

    def call_in_flight(self, payload: Any, count: int, window: int) -> Any:
        """Make `count` calls, of which up to `window` are under way at a time; return the last result."""
        raise NotImplementedError(f"{type(self).__name__} has one call at a time.")


def keep_in_flight(start: Call, finish: Call, payload: Any, count: int, window: int) -> Any:
    """`call_in_flight` for libraries whose call can be started and finished apart: the oldest is awaited first."""
    flying = deque(start(payload) for _ in range(min(window, count)))
    for _ in range(count - len(flying)):
        finish(flying.popleft())
        flying.append(start(payload))
    result = None
    while flying:
        result = finish(flying.popleft())
    return result


def time_round_trips(send: Verb, recv: Verb, out: Any, into: Any, count: int) -> list[int]:
    """Nanoseconds of each of `count` messages until an answer is there: from the same peer, or round a ring."""
    clock = time.perf_counter_ns
    samples = [0] * count
    for i in range(count):
        began = clock()
        send(out)
        recv(into)
        samples[i] = clock() - began
    return samples


def relay(recv: Verb, send: Verb, into: Any, count: int) -> None:
    """Pass on what comes, `count` times: back, or to the next in a ring."""
    for _ in range(count):
        recv(into)
        send(into)

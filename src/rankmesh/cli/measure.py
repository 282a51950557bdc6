"""Loops that time messages between two ranks, and a check of what arrives.

Rank 0 leads: it decides on counts, by time, and tells rank 1 what to do next (echo, drain, verify, end). Times are
taken on rank 0 alone. Contents are compared outside the timed loops, in messages of which each is different; the
comparison counts wrong bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, perf_counter_ns
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankmesh import Mesh
from rankmesh.errors import InternalError

Bytes = NDArray[np.uint8]

#: Untimed round trips before each timed loop; their time also tells how many fit into the loop.
WARMUP: Final = 10
#: Fewest and most repetitions of a timed loop, whatever the time.
LEAST: Final = 5
MOST: Final = 50_000
#: Messages compared byte by byte, each way.
CHECKED: Final = 3
SEED: Final = 20_240
#: Tag of what rank 0 tells rank 1; the messages measured have tag 0.
_ORDERS: Final = 1


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one size. A time is half of a round trip; a rate is over messages sent back to back."""

    nbytes: int
    count: int
    p50_us: float
    p99_us: float
    algbw_gb_per_s: float
    stream_count: int
    stream_gb_per_s: float
    stream_per_s: float
    wrong: int


def ping(mesh: Mesh, peer: int, out: Any, into: Any, count: int) -> list[int]:
    """Nanoseconds of each of `count` round trips."""
    send, recv, clock = mesh.send, mesh.recv, perf_counter_ns
    samples = [0] * count
    for i in range(count):
        began = clock()
        send(out, peer)
        recv(into, peer, 0)
        samples[i] = clock() - began
    return samples


def echo(mesh: Mesh, peer: int, into: Any, count: int) -> None:
    """The other side of `ping`."""
    for _ in range(count):
        mesh.recv(into, peer, 0)
        mesh.send(into, peer)


def stream(mesh: Mesh, peer: int, out: Any, count: int) -> float:
    """Seconds for `count` messages one way, until the peer has the last one."""
    send = mesh.send
    began = perf_counter()
    for _ in range(count):
        send(out, peer)
    mesh.recv(b"", peer, 0)
    return perf_counter() - began


def drain(mesh: Mesh, peer: int, into: Any, count: int) -> None:
    """The other side of `stream`."""
    for _ in range(count):
        mesh.recv(into, peer, 0)
    mesh.send(b"", peer)


def lead(mesh: Mesh, peer: int, nbytes: int, seconds: float) -> Row:
    """Rank 0: measure one size, about `seconds` for each of the two loops."""

    def order(what: str, count: int) -> None:
        mesh.send_object([what, nbytes, count], to=peer, tag=_ORDERS)

    out, into = contents(nbytes), np.zeros(nbytes, np.uint8)
    order("echo", WARMUP)
    one = float(np.median(ping(mesh, peer, out, into, WARMUP))) / 1e9
    count = _fitting(seconds, one)
    order("echo", count)
    samples = ping(mesh, peer, out, into, count)
    wrong = differences(into, out)
    stream_count = _fitting(seconds, one / 2)
    order("drain", stream_count)
    elapsed = stream(mesh, peer, out, stream_count)
    order("verify", CHECKED)
    wrong += _verify(mesh, peer, out, into)
    p50, p99 = (float(value) / 2e3 for value in np.percentile(samples, (50, 99)))
    return Row(
        nbytes=nbytes,
        count=count,
        p50_us=p50,
        p99_us=p99,
        algbw_gb_per_s=nbytes / p50 / 1e3,
        stream_count=stream_count,
        stream_gb_per_s=nbytes * stream_count / elapsed / 1e9,
        stream_per_s=stream_count / elapsed,
        wrong=wrong,
    )


def dismiss(mesh: Mesh, peer: int) -> None:
    """Rank 0: there is no more to do."""
    mesh.send_object(["end", 0, 0], to=peer, tag=_ORDERS)


def follow(mesh: Mesh, leader: int, timeout: float) -> None:
    """Rank 1: do what rank 0 says, until the end."""
    duties: dict[str, Callable[[Mesh, int, Bytes, int], None]] = {"echo": echo, "drain": drain, "verify": _answer}
    into = np.zeros(0, np.uint8)
    while True:
        what, nbytes, count = mesh.recv_object(source=leader, tag=_ORDERS, timeout=timeout)
        if what == "end":
            return
        if what not in duties:
            raise InternalError(f"Rank {leader} asks for {what!r}.")
        if into.nbytes != nbytes:
            into = np.zeros(nbytes, np.uint8)
        duties[what](mesh, leader, into, count)


def contents(nbytes: int) -> Bytes:
    """The same bytes on both ranks."""
    return np.random.default_rng(SEED).integers(0, 256, nbytes, np.uint8)


def _fitting(seconds: float, one: float) -> int:
    return min(max(int(seconds / one), LEAST), MOST)


def _verify(mesh: Mesh, peer: int, data: Bytes, into: Bytes) -> int:
    """Wrong bytes in messages there (counted by the peer) and back."""
    wrong = 0
    for number in range(CHECKED):
        expected = data + np.uint8(number)
        mesh.send(expected, peer)
        mesh.recv(into, peer, 0)
        wrong += differences(into, expected)
    return wrong + int(mesh.recv_object(source=peer, tag=_ORDERS))


def _answer(mesh: Mesh, peer: int, into: Bytes, count: int) -> None:
    """The other side of `_verify`."""
    data, wrong = contents(into.nbytes), 0
    for number in range(count):
        into.fill(0)
        mesh.recv(into, peer, 0)
        wrong += differences(into, data + np.uint8(number))
        mesh.send(into, peer)
    mesh.send_object(wrong, to=peer, tag=_ORDERS)


def differences(received: Bytes, expected: Bytes) -> int:
    """Bytes that are not as they should be."""
    return int(np.count_nonzero(received != expected))

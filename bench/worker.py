"""One process of a world: pins itself, loads its subject, then does what the harness asks for, one command at a time.

Commands and replies are JSON lines on a Unix socket, the same for a process started directly and for one started by
mpiexec. Between commands a worker blocks in `readline`: worlds that are not being measured take no CPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from subjects import load
from subjects.base import Bytes, Subject

Reply = dict[str, Any]
PR_SET_PDEATHSIG = 1
SEED = 20240
ACK_BYTES = 8
#: Untimed repetitions before each timed loop: a tenth of it, and at least this many.
MIN_WARMUP = 2


class WrongData(Exception):
    """A message arrived with other contents than were sent; its subject's figures mean nothing."""


def warmup_of(count: int) -> int:
    return max(MIN_WARMUP, count // 10)


def random_bytes(nbytes: int) -> Bytes:
    """The same on every rank, so that a receiver can compare without being told."""
    return np.frombuffer(bytearray(np.random.default_rng(SEED).bytes(nbytes)), dtype=np.uint8)


def check_equal(received: Bytes, expected: Bytes) -> None:
    if not np.array_equal(received, expected):
        raise WrongData(f"A message of {expected.nbytes} bytes arrived with other contents than were sent.")


def stamp(array: Bytes, number: int) -> None:
    """Make each large message differ from the one before it, at both ends."""
    array[:1] = array[-1:] = number % 251


class Rank:
    """The commands, as methods; each runs on all ranks of a world at once and answers with figures on rank 0."""

    def __init__(self, subject: Subject, rank: int, size: int) -> None:
        self.subject, self.rank, self.size = subject, rank, size
        self.commands: dict[str, Callable[..., Reply]] = {
            "open": self.open,
            "pingpong": self.pingpong,
            "bandwidth": self.bandwidth,
            "rate": self.rate,
            "idle": self.idle,
            "close": self.close,
        }

    def open(self, port: int) -> Reply:
        self.subject.open(self.rank, self.size, port)
        return {"version": self.subject.version()}

    def close(self) -> Reply:
        self.subject.close()
        return {}

    def pingpong(self, nbytes: int, count: int) -> Reply:
        """Ranks 0 and 1 play; all others wait in a receive until rank 0 is done."""
        if self.rank > 1:
            return self._wait_for_release()
        data, into = random_bytes(nbytes), np.ones(nbytes, np.uint8)
        peer, warmup = 1 - self.rank, warmup_of(count)
        if self.rank == 1:
            self.subject.echo(peer, self.subject.buffer(into), warmup + count)
            check_equal(into, data)
            return {}
        out, back = self.subject.buffer(data), self.subject.buffer(into)
        self.subject.ping(peer, out, back, warmup)
        check_equal(into, data)
        began = time.perf_counter()
        samples = self.subject.ping(peer, out, back, count)
        seconds = time.perf_counter() - began
        self._release()
        p50, p99 = (float(value) / 1e3 for value in np.percentile(samples, (50, 99)))
        return {"p50_us": p50, "p99_us": p99, "min_us": min(samples) / 1e3, "count": count, "seconds": seconds}

    def bandwidth(self, nbytes: int, count: int) -> Reply:
        """Rank 0 sends, rank 1 acknowledges each message when all of it lies in its memory."""
        data, ack, total = random_bytes(nbytes), np.ones(ACK_BYTES, np.uint8), count + warmup_of(count)
        message, small = self.subject.buffer(data), self.subject.buffer(ack)
        peer = 1 - self.rank
        send, recv, clock = self.subject.sender(peer), self.subject.receiver(peer), time.perf_counter_ns
        if self.rank == 1:
            self._acknowledge_each(data, small, total)
            return {}
        samples = []
        for number in range(total):
            stamp(data, number)
            began = clock()
            send(message)
            recv(small)
            samples.append(clock() - began)
        timed = samples[-count:]
        return {"gb_per_s": nbytes / float(np.median(timed)), "count": count, "seconds": sum(timed) / 1e9}

    def _acknowledge_each(self, expected: Bytes, ack: Any, total: int) -> None:
        into = np.ones(expected.nbytes, np.uint8)
        buffer, send, recv = self.subject.buffer(into), self.subject.sender(0), self.subject.receiver(0)
        for number in range(total):
            recv(buffer)
            send(ack)
            stamp(expected, number)
            if number == 0:
                check_equal(into, expected)  # slow, and rank 0 is still warming up
            check_equal(into[[0, -1]], expected[[0, -1]])

    def rate(self, nbytes: int, count: int) -> Reply:
        """Rank 0 sends one message after the other; rank 1 acknowledges once, after the last."""
        data, into = random_bytes(nbytes), np.ones(nbytes, np.uint8)
        message, ack = self.subject.buffer(data), self.subject.buffer(np.ones(ACK_BYTES, np.uint8))
        peer, seconds = 1 - self.rank, 0.0
        for repeats in (warmup_of(count), count):
            if self.rank == 1:
                self.subject.receive_each(peer, self.subject.buffer(into), repeats)
                self.subject.sender(peer)(ack)
                check_equal(into, data)
                into.fill(1)
            else:
                began = time.perf_counter()
                self.subject.send_each(peer, message, repeats)
                self.subject.receiver(peer)(ack)
                seconds = time.perf_counter() - began
        return {} if self.rank == 1 else {"per_s": count / seconds, "count": count, "seconds": seconds}

    def idle(self, seconds: float) -> Reply:
        """Rank 0 talks to every other rank once, then does nothing; the others wait in a receive meanwhile."""
        token = self.subject.buffer(np.ones(ACK_BYTES, np.uint8))
        if self.rank > 0:
            self.subject.receiver(0)(token)
            self.subject.sender(0)(token)
            return self._cpu_during(self._wait_for_release)
        for peer in range(1, self.size):
            self.subject.sender(peer)(token)
            self.subject.receiver(peer)(token)
        used = self._cpu_during(lambda: time.sleep(seconds))
        self._release(first=1)
        return used

    def _cpu_during(self, wait: Callable[[], object]) -> Reply:
        before, began = time.process_time(), time.perf_counter()
        wait()
        used, elapsed = time.process_time() - before, time.perf_counter() - began  # all threads, user and system
        return {"cpu_percent": 100 * used / elapsed, "seconds": elapsed}

    def _release(self, first: int = 2) -> None:
        for peer in range(first, self.size):
            self.subject.sender(peer)(self.subject.buffer(np.ones(ACK_BYTES, np.uint8)))

    def _wait_for_release(self) -> Reply:
        self.subject.receiver(0)(self.subject.buffer(np.ones(ACK_BYTES, np.uint8)))
        return {}


def describe(error: BaseException) -> str:
    if isinstance(error, ImportError):
        return f"not installed: pip install -r bench/requirements.txt ({error})"
    return f"{type(error).__name__}: {error}"


def serve(name: str, rank: int, size: int, control: socket.socket) -> None:
    """Load the subject, say hello, and answer commands until `close` or until the harness is gone."""
    stream = control.makefile("rw", encoding="utf-8")

    def reply(message: Reply) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    reply({"rank": rank, "pid": os.getpid()})
    member: Rank | None = None
    for line in stream:
        arguments = json.loads(line)
        command = arguments.pop("do")
        try:
            member = member or Rank(load(name), rank, size)
            answer = member.commands[command](**arguments)
        except Exception as error:  # noqa: BLE001 - whatever a library raises becomes the reason in its row, and the run goes on
            traceback.print_exc()
            reply({"error": describe(error)})
            return
        reply(answer)
        if command == "close":
            return


def main() -> None:
    parser = argparse.ArgumentParser(description="A process of bench/p2p.py; not to be started by hand.")
    parser.add_argument("--subject", required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--control", required=True, help="path of the harness's Unix socket")
    parser.add_argument("--rank", type=int, help="default: PMI_RANK, set by mpiexec")
    parser.add_argument("--cores", default="", help="comma-separated; rank r is pinned to the r-th, none: not pinned")
    arguments = parser.parse_args()
    rank = int(os.environ["PMI_RANK"]) if arguments.rank is None else arguments.rank
    # A measurement must not outlive its harness, not even when that is killed while this process spins.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if arguments.cores:  # before the library is imported: its threads inherit the core
        cores = [int(core) for core in arguments.cores.split(",")]
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(arguments.control)
        serve(arguments.subject, rank, arguments.size, control)


if __name__ == "__main__":
    main()

"""What the ranks of `rankmesh demo` do: one function per act. All ranks run it and check their part; rank 0 tells.

Rank 0 writes events as JSON lines to standard output, where `rankmesh demo` reads them: {"begin": n} when act n
begins, {"progress": text} within it, {"done": n, "lines": […]} when it ended as it should. What does not happen as it
should raises, and the launcher ends the demo.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np

import rankmesh as rm
from rankmesh.cli.measure import echo, ping

SIZE: Final = 4
#: The rank that is killed in the last act.
VICTIM: Final = 2
SURVIVORS: Final = tuple(rank for rank in range(SIZE) if rank != VICTIM)
#: Seconds for whatever takes milliseconds on an idle machine.
PATIENCE: Final = 20.0
MIB: Final = 1024 * 1024


@dataclass
class Stage:
    """What an act works with."""

    mesh: rm.Mesh
    joined_after: float
    #: What rankmesh logged about the address it advertises.
    choice: str

    def tell(self, **event: Any) -> None:
        """Rank 0 alone speaks."""
        if self.mesh.rank == 0:
            print(json.dumps(event), flush=True)


class Act(NamedTuple):
    title: str
    perform: Callable[[Stage], list[str]]


def check(condition: object, text: str) -> None:
    if not condition:
        raise rm.InternalError(f"The demo went wrong: {text}.")


def join(stage: Stage) -> list[str]:
    mesh = stage.mesh
    check(mesh.size == SIZE, f"{mesh.size} ranks instead of {SIZE}")
    me = mesh.peers[mesh.rank]
    mesh.send_object({"pid": os.getpid(), "address": str(me.addresses[0])}, to=0)
    if mesh.rank != 0:
        return []
    members = [mesh.recv_object(source=rank) for rank in range(SIZE)]
    check(len({member["pid"] for member in members}) == SIZE, "ranks share a process")
    return [
        f"after {stage.joined_after:.2f} s, each with the token that the launcher made for this run",
        *(f"rank {rank}: pid {member['pid']}, {member['address']}" for rank, member in enumerate(members)),
        f"address chosen: {stage.choice}",
    ]


def ring(stage: Stage) -> list[str]:
    mesh = stage.mesh
    ahead, behind = (mesh.rank + 1) % SIZE, (mesh.rank - 1) % SIZE
    array, incoming = np.full(1000, mesh.rank, np.float32), np.empty(1000, np.float32)
    total = array.copy()
    for hop in range(SIZE - 1):
        status = mesh.sendrecv(array, incoming, to=ahead, source=behind, tag=hop, timeout=PATIENCE)
        check(status == (behind, hop, array.nbytes), f"hop {hop} ended with {status}")
        array, incoming = incoming, array
        total += array
    check((total == sum(range(SIZE))).all(), f"the ring added up to {total[0]}")
    return [f"{SIZE - 1} hops of 1,000 float32, tag = hop: every rank has the sum {total[0]:g}"]


def wildcards(stage: Stage) -> list[str]:
    mesh = stage.mesh
    if mesh.rank != 0:
        mesh.send(bytes(16 * mesh.rank), to=0, tag=100 + mesh.rank)
        return []
    buffer = bytearray(64)
    came = [mesh.recv(buffer, source=rm.ANY_SOURCE, tag=rm.ANY_TAG, timeout=PATIENCE) for _ in range(SIZE - 1)]
    expected = [(rank, 100 + rank, 16 * rank) for rank in range(1, SIZE)]
    check(sorted(came) == expected, f"from anyone came {came}")
    order = "; ".join(f"rank {status.source}, tag {status.tag}, {status.nbytes} B" for status in came)
    return [f"in the order of arrival: {order}"]


def objects(stage: Stage) -> list[str]:
    mesh = stage.mesh
    weights = np.arange(512 * 512, dtype=np.float32).reshape(512, 512)
    if mesh.rank == 0:
        for rank in range(1, SIZE):
            mesh.send_object({"step": 7, "loss": 0.25, "weights": weights}, to=rank, timeout=PATIENCE)
        return [f"a dict with a float32 array of {weights.shape}: msgpack, the array's bytes beside it, no pickle"]
    got = mesh.recv_object(source=0, timeout=PATIENCE)
    check((got["step"], got["loss"], got["weights"].dtype) == (7, 0.25, np.float32), f"{got} is not what was sent")
    check(np.array_equal(got["weights"], weights), "the array arrived changed")
    return []


def bandwidth(stage: Stage) -> list[str]:
    mesh, repeats = stage.mesh, 8
    if mesh.rank > 1:
        return []
    data = np.random.default_rng(7).integers(0, 255, 64 * MIB, np.uint8)
    if mesh.rank == 1:
        out = np.zeros_like(data)
        for _ in range(repeats):
            mesh.recv(out, source=0, timeout=PATIENCE)
            mesh.send(b"", to=0)
        check(np.array_equal(out, data), "64 MiB arrived changed")
        return []
    rates = []
    for repeat in range(repeats):
        stage.tell(progress=f"{repeat} of {repeats}")
        began = perf_counter()
        mesh.send(data, to=1, timeout=PATIENCE)
        mesh.recv(bytearray(), source=1, timeout=PATIENCE)
        rates.append(data.nbytes / (perf_counter() - began) / 1e9)
    return [f"{np.median(rates):.2f} GB/s (median of {repeats}), out of and into numpy arrays, contents compared"]


def latency(stage: Stage) -> list[str]:
    mesh, rounds = stage.mesh, 2000
    message, out = bytes(range(64)), bytearray(64)
    if mesh.rank > 1:
        mesh.recv(bytearray(), source=0, timeout=PATIENCE)
        return []
    if mesh.rank == 1:
        echo(mesh, 0, out, rounds)
        return []
    samples = ping(mesh, 1, message, out, rounds)
    check(out == message, "64 bytes came back changed")
    for rank in range(2, SIZE):
        mesh.send(b"", to=rank)
    p50, p99 = np.percentile(samples, (50, 99)) / 1e3
    return [f"{p50:.0f} µs there and back (p99 {p99:.0f} µs, {rounds:,} times) while ranks 2 and 3 wait in recv"]


def deadline(stage: Stage) -> list[str]:
    mesh = stage.mesh
    if mesh.rank != 0:
        return []
    try:
        mesh.recv(bytearray(8), source=1, tag=7, timeout=0.3)
    except rm.DeadlineError as error:
        check((error.op, error.tag, error.timeout) == ("recv from", 7, 0.3), f"the error carries {error.__dict__}")
        return [f"DeadlineError: {error}"]
    raise rm.InternalError("A message came that nobody sent.")


def loss(stage: Stage) -> list[str]:
    """All wait for a rank, and rank 0 kills it. The launcher then tells the others to end; they finish first."""
    mesh = stage.mesh
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mesh.barrier(PATIENCE)
    if mesh.rank == VICTIM:
        _wait_for_death()
    work = mesh.irecv(bytearray(8), source=VICTIM, tag=7, timeout=PATIENCE)
    killed_at = 0.0
    if mesh.rank != 0:
        mesh.send(b"waiting", to=0, tag=8)  # to leave a barrier tells that all came, not that all have left
    else:
        for rank in SURVIVORS[1:]:
            mesh.recv(bytearray(7), source=rank, tag=8, timeout=PATIENCE)
        victim = mesh.peers[VICTIM].identity
        assert victim is not None
        killed_at = monotonic()
        os.kill(victim.pid, signal.SIGKILL)
    try:
        work.wait()
    except rm.PeerLost as error:
        heard_at = monotonic()  # the same clock in all processes of a host
        check((error.rank, error.op, error.tag) == (VICTIM, "recv from", 7), f"the error carries {error.__dict__}")
        mesh.send_object([heard_at, str(error)], to=0)
    else:
        raise rm.InternalError("A message of the dead came.")
    return _last_words(mesh, killed_at) if mesh.rank == 0 else []


def _wait_for_death() -> NoReturn:
    signal.alarm(int(PATIENCE))  # in case nobody comes
    while True:
        signal.pause()


def _last_words(mesh: rm.Mesh, killed_at: float) -> list[str]:
    heard = {rank: mesh.recv_object(source=rank, timeout=PATIENCE) for rank in SURVIVORS}
    lines = [f"PeerLost: {heard[SURVIVORS[-1]][1]}"]
    lines += [f"rank {rank} knew {(at - killed_at) * 1e3:.1f} ms after the SIGKILL" for rank, (at, _) in heard.items()]
    return [*lines, "and could still talk to each other: that is how rank 0 knows"]


ACTS: Final = (
    Act(f"{SIZE} processes join as ranks 0 … {SIZE - 1}", join),
    Act("tagged messages go around a ring", ring),
    Act("a receive from any rank with any tag", wildcards),
    Act("objects with arrays in them", objects),
    Act("an array of 64 MiB from rank 0 to rank 1", bandwidth),
    Act("ping-pong of 64 bytes", latency),
    Act("a message that never comes", deadline),
    Act(f"rank {VICTIM} is killed while all others wait for it", loss),
)


class _Choice(logging.Handler):
    """Keeps what rankmesh logs about the address it advertises; also keeps its warnings off standard error."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith("advertising "):
            self.text = message.removeprefix("advertising ")


def main() -> None:
    choice = _Choice()
    logging.getLogger("rankmesh").addHandler(choice)
    logging.getLogger("rankmesh").setLevel(logging.INFO)
    began = perf_counter()
    with rm.join(timeout=PATIENCE) as mesh:
        stage = Stage(mesh, perf_counter() - began, choice.text)
        for number, act in enumerate(ACTS):
            mesh.barrier(PATIENCE)  # nobody is ahead, and whoever failed in the last act is missed here
            stage.tell(begin=number)
            lines = act.perform(stage)
            stage.tell(done=number, lines=lines)


if __name__ == "__main__":
    main()

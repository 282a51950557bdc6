"""`rankmesh bench rpc`: calls between two ranks.

Rank 1 offers a function that returns its argument, in three ways: inline, on the pool, and on the event loop. Rank 0
calls it: one call after the other, many in flight at once, and with large arrays. Where it runs decides what it
measures: see `two_ranks`.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, perf_counter_ns
from typing import IO, Any, Final

import numpy as np

from rankmesh import Mesh
from rankmesh.cli import measure, report, two_ranks
from rankmesh.cli.two_ranks import LIMIT

EPILOG: Final = """\
examples:
  rankmesh bench rpc --pin
  rankmesh bench rpc --transport tls --seconds 1 --json rpc.json

A round trip is one call of 64 bytes and back, p50 and p99 of `count` of them. In flight: 64 calls at once from one
thread. The array goes there and back; the rate counts both ways. #wrong counts results that are not what was sent.
"""
#: How rank 1 runs its handler.
HANDLERS: Final = ("inline", "pooled", "async")
SMALL: Final = 64
IN_FLIGHT: Final = 64
ARRAY_BYTES: Final = 64 * 1024 * 1024
WARMUP: Final = 200


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one kind of handler."""

    handler: str
    count: int
    p50_us: float
    p99_us: float
    calls_per_s: float
    array_gb_per_s: float
    wrong: int


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    two_ranks.add_options(parser)


def run(args: argparse.Namespace) -> int:
    return two_ranks.run("rpc", args, two_ranks.options(args), _measure)


def _measure(args: argparse.Namespace, local_rank: int, enter: Callable[[], Mesh]) -> int:
    """What each rank does, in the mesh that `enter` joins; the exit code."""
    document: dict[str, object] = {"bench": "rpc", **report.environment(), "pinned": args.pin}
    two_ranks.pin(args, local_rank)
    with enter() as mesh:
        if mesh.rank == 1:
            _offer(mesh)
        mesh.barrier(LIMIT)
        rows = _table(args, mesh, document) if mesh.rank == 0 else []
        mesh.barrier(LIMIT)
    if args.json and mesh.rank == 0:
        report.write_json(args.json, document, rows)
    return int(any(row.wrong for row in rows))


def _offer(mesh: Mesh) -> None:
    async def echo(value: Any) -> Any:
        return value

    mesh.rpc.register(lambda value: value, "inline", inline=True)
    mesh.rpc.register(lambda value: value, "pooled")
    mesh.rpc.register(echo, "async")


def _table(args: argparse.Namespace, mesh: Mesh, document: dict[str, object]) -> list[Row]:
    """Rank 0: measure, and print each row when it is there."""
    report.describe_ranks(document, mesh)
    table: IO[str] = sys.stderr if args.json == "-" else sys.stdout
    remarks = [report.title(document), *report.caveats(document)]
    print(*(f"# {remark}" for remark in remarks), *report.titles(_COLUMNS), sep="\n", file=table, flush=True)
    rows = []
    for handler in HANDLERS:
        rows.append(_row(mesh, handler, args.seconds))
        print(report.line_of(rows[-1], _COLUMNS), file=table, flush=True)
    return rows


def _row(mesh: Mesh, handler: str, seconds: float) -> Row:
    payload = measure.contents(SMALL).tobytes()
    call = mesh.rpc.call
    wrong = sum(call(1, handler, payload) != payload for _ in range(WARMUP))
    samples = _round_trips(mesh, handler, payload, seconds)
    rate, bad = _in_flight(mesh, handler, payload, seconds)
    bandwidth, worse = _arrays(mesh, handler, seconds)
    p50, p99 = (float(value) / 1e3 for value in np.percentile(samples, (50, 99)))
    return Row(handler, len(samples), p50, p99, rate, bandwidth, wrong + bad + worse)


def _round_trips(mesh: Mesh, handler: str, payload: bytes, seconds: float) -> list[int]:
    """Nanoseconds of each of so many calls as fit into `seconds`."""
    call, clock = mesh.rpc.call, perf_counter_ns
    samples: list[int] = []
    end = clock() + int(seconds * 1e9)
    while (began := clock()) < end or len(samples) < measure.LEAST:
        call(1, handler, payload)
        samples.append(clock() - began)
    return samples


def _in_flight(mesh: Mesh, handler: str, payload: bytes, seconds: float) -> tuple[float, int]:
    """Calls per second with IN_FLIGHT of them under way, and wrong results."""
    begin = mesh.rpc.call_async
    works = deque(begin(1, handler, payload) for _ in range(IN_FLIGHT))
    count = wrong = 0
    began = perf_counter()
    while perf_counter() - began < seconds or count < measure.LEAST:
        wrong += works.popleft().result() != payload
        works.append(begin(1, handler, payload))
        count += 1
    elapsed = perf_counter() - began
    return count / elapsed, wrong + sum(work.result() != payload for work in works)


def _arrays(mesh: Mesh, handler: str, seconds: float) -> tuple[float, int]:
    """GB/s of an array there and back, and wrong results."""
    array = np.resize(measure.contents(4096), ARRAY_BYTES)
    samples: list[float] = []
    wrong = 0
    end = perf_counter() + seconds
    while perf_counter() < end or len(samples) < measure.LEAST:
        began = perf_counter()
        result = mesh.rpc.call(1, handler, array)
        samples.append(perf_counter() - began)
        wrong += result.nbytes != array.nbytes or not np.array_equal(result[::4093], array[::4093])
        del result  # its memory is used for the next
    return 2 * array.nbytes / float(np.median(samples)) / 1e9, wrong


_COLUMNS: Final = (
    report.Column("handler", "", "handler", 9, "s"),
    report.Column("count", "", "count", 8, "d"),
    report.Column("p50", "us", "p50_us", 10, ".2f"),
    report.Column("p99", "us", "p99_us", 10, ".2f"),
    report.Column("in flight", "calls/s", "calls_per_s", 11, ".0f"),
    report.Column("64 MiB", "GB/s", "array_gb_per_s", 9, ".3f"),
    report.Column("#wrong", "", "wrong", 8, "d"),
)

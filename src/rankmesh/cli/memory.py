"""`rankmesh bench memory`: one-sided reads and writes of another rank's memory, by size.

Rank 1 owns two regions, one registered and one allocated, and takes no part. Rank 0 reads and writes them: in one
piece, and in a batch of pages that lie scattered there. Where it runs decides what it measures: see `two_ranks`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter_ns
from typing import IO, Final

import numpy as np

from rankmesh import Mesh, RemoteRegion
from rankmesh.cli import measure, report, two_ranks
from rankmesh.cli.measure import Bytes
from rankmesh.cli.two_ranks import LIMIT

EPILOG: Final = """\
examples:
  rankmesh bench memory --pin
  rankmesh bench memory --sizes 4K:64M:4 --seconds 0.5 --json memory.json

A time is that of one read, or of one write until its bytes are at the owner: p50 and p99 of `count` reads, and of as
many writes as fit. Paged: as many bytes in one batch of 4 KiB pieces, scattered over the region. Ranks of one host map
an allocated region. #wrong counts bytes that came back changed; if there are any, the exit code is 1.
"""
#: How rank 1 offers its memory.
KINDS: Final = ("registered", "allocated")
PAGE: Final = 4096


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one kind of region and one size."""

    region: str
    nbytes: int
    count: int
    read_p50_us: float
    read_p99_us: float
    read_gb_per_s: float
    read_paged_gb_per_s: float
    write_p50_us: float
    write_p99_us: float
    write_gb_per_s: float
    write_paged_gb_per_s: float
    wrong: int


COLUMNS: Final = (
    report.Column("region", "", "region", 11, "s"),
    report.Column("size", "B", "nbytes", 11, "d"),
    report.Column("count", "", "count", 8, "d"),
    *(
        report.Column(title, unit, f"{verb}_{key}", width, form)
        for verb in ("read", "write")
        for title, unit, key, width, form in (
            (verb, "us", "p50_us", 12, ".2f"),
            ("p99", "us", "p99_us", 12, ".2f"),
            ("bw", "GB/s", "gb_per_s", 9, ".3f"),
            ("paged", "GB/s", "paged_gb_per_s", 9, ".3f"),
        )
    ),
    report.Column("#wrong", "B", "wrong", 8, "d"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    two_ranks.add_sizes(parser, "4K,64K,1M,64M")
    two_ranks.add_options(parser)


def run(args: argparse.Namespace) -> int:
    return two_ranks.run("memory", args, _options(args), _measure)


def _options(args: argparse.Namespace) -> Iterator[str]:
    yield from ("--sizes", ",".join(map(str, args.sizes)))
    yield from two_ranks.options(args)


def _measure(args: argparse.Namespace, local_rank: int, enter: Callable[[], Mesh]) -> int:
    """What each rank does, in the mesh that `enter` joins; the exit code."""
    document: dict[str, object] = {"bench": "memory", **report.environment(), "pinned": args.pin}
    two_ranks.pin(args, local_rank)
    with enter() as mesh:
        if mesh.rank == 1:
            _offer(mesh, _capacity(args.sizes))
        mesh.barrier(LIMIT)
        rows = _table(args, mesh, document) if mesh.rank == 0 else []
        mesh.barrier(LIMIT)
    if args.json and mesh.rank == 0:
        report.write_json(args.json, document, rows)
    return int(any(row.wrong for row in rows))


def _capacity(sizes: list[int]) -> int:
    """Whole pages for the largest size."""
    return max(1, -(-max(sizes) // PAGE)) * PAGE


def _offer(mesh: Mesh, nbytes: int) -> None:
    mesh.memory.register("registered", np.ones(nbytes, np.uint8))
    mesh.memory.allocate("allocated", (nbytes,), np.uint8).array.fill(1)


def _table(args: argparse.Namespace, mesh: Mesh, document: dict[str, object]) -> list[Row]:
    """Rank 0: measure, and print each row when it is there."""
    report.describe_ranks(document, mesh)
    table: IO[str] = sys.stderr if args.json == "-" else sys.stdout
    remarks = [report.title(document), *report.caveats(document)]
    print(*(f"# {remark}" for remark in remarks), *report.titles(COLUMNS), sep="\n", file=table, flush=True)
    rows = []
    for kind in KINDS:
        with mesh.memory.open(1, kind) as remote:
            for nbytes in args.sizes:
                rows.append(_row(remote, nbytes, args.seconds))
                print(report.line_of(rows[-1], COLUMNS), file=table, flush=True)
    return rows


def _row(remote: RemoteRegion, nbytes: int, seconds: float) -> Row:
    data, into = measure.contents(nbytes), np.zeros(nbytes, np.uint8)
    outgoing, incoming = _pages(data, remote.nbytes), _pages(into, remote.nbytes)
    writes = _times(lambda: remote.write(data), seconds)
    reads = _times(lambda: remote.read(into), seconds)
    wrong = measure.differences(into, data)
    data ^= 255
    paged_writes = _times(lambda: remote.write_batch(outgoing), seconds)
    paged_reads = _times(lambda: remote.read_batch(incoming), seconds)
    wrong += measure.differences(into, data)
    (read_p50, read_p99), (write_p50, write_p99) = (np.percentile(times, (50, 99)) / 1e3 for times in (reads, writes))
    return Row(
        region=remote.name,
        nbytes=nbytes,
        count=len(reads),
        read_p50_us=float(read_p50),
        read_p99_us=float(read_p99),
        read_gb_per_s=_bandwidth(nbytes, reads),
        read_paged_gb_per_s=_bandwidth(nbytes, paged_reads),
        write_p50_us=float(write_p50),
        write_p99_us=float(write_p99),
        write_gb_per_s=_bandwidth(nbytes, writes),
        write_paged_gb_per_s=_bandwidth(nbytes, paged_writes),
        wrong=wrong,
    )


def _pages(memory: Bytes, capacity: int) -> list[tuple[Bytes, int]]:
    """`memory` in pieces of a page, each with its place in a region of `capacity` bytes, in no order."""
    places = np.random.default_rng(measure.SEED).permutation(capacity // PAGE)
    starts = range(0, memory.nbytes, PAGE)
    return [(memory[at : at + PAGE], int(place) * PAGE) for at, place in zip(starts, places, strict=False)]


def _times(transfer: Callable[[], object], seconds: float) -> list[int]:
    """Nanoseconds of each of so many transfers as fit into `seconds`, after some that do not count."""
    clock, times = perf_counter_ns, list[int]()
    for _ in range(measure.LEAST):
        transfer()
    end = clock() + int(seconds * 1e9)
    while (began := clock()) < end or len(times) < measure.LEAST:
        transfer()
        times.append(clock() - began)
    return times


def _bandwidth(nbytes: int, times: list[int]) -> float:
    return nbytes / float(np.median(times))

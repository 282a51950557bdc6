"""`rankmesh bench p2p`: messages between two ranks, by size.

Where it runs decides what it measures: see `two_ranks`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import IO, Final

from rankmesh import Mesh
from rankmesh.cli import measure, report, two_ranks
from rankmesh.cli.two_ranks import LIMIT

EPILOG: Final = """\
examples:
  rankmesh bench p2p --pin
  rankmesh bench p2p --sizes 64,4K,1M --json - | jq .rows
  two hosts, on each of them with the same RANKMESH_TOKEN:
  rankmesh run -n 1 --nnodes 2 --node-rank 0 --rendezvous 10.0.0.1:7000 -m rankmesh bench p2p

A time is half of a round trip, p50 and p99 of `count` of them; algbw is size / p50. The columns to the right are
messages sent one way without waiting, until the last is received. #wrong counts bytes that arrived changed, in
messages compared outside the timed loops; if there are any, the exit code is 1.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    two_ranks.add_sizes(parser, "8:64M")
    two_ranks.add_options(parser)
    parser.add_argument("--plot", metavar="FILE.png", help="also draw time and bandwidth (needs rankmesh[plot])")


def run(args: argparse.Namespace) -> int:
    if args.plot:
        report.load_matplotlib()
    return two_ranks.run("p2p", args, _options(args), _measure)


def _options(args: argparse.Namespace) -> Iterator[str]:
    yield from ("--sizes", ",".join(map(str, args.sizes)))
    yield from two_ranks.options(args)
    if args.plot is not None:
        yield f"--plot={args.plot}"


def _measure(args: argparse.Namespace, local_rank: int, enter: Callable[[], Mesh]) -> int:
    """What each rank does, in the mesh that `enter` joins; the exit code."""
    document: dict[str, object] = {"bench": "p2p", **report.environment(), "pinned": args.pin}
    two_ranks.pin(args, local_rank)
    with enter() as mesh:
        if mesh.rank > 0:
            if mesh.rank == 1:
                measure.follow(mesh, 0, LIMIT)
            mesh.barrier(LIMIT)
            return 0
        report.describe_ranks(document, mesh)
        rows = _table(args, mesh, [report.title(document), *report.caveats(document)])
        mesh.barrier(LIMIT)
    if args.json:
        report.write_json(args.json, document, rows)
    if args.plot:
        report.write_plot(args.plot, report.title(document), rows)
    return int(any(row.wrong for row in rows))


def _table(args: argparse.Namespace, mesh: Mesh, remarks: list[str]) -> list[measure.Row]:
    """Rank 0: measure, and print each row when it is there."""
    table: IO[str] = sys.stderr if args.json == "-" else sys.stdout
    print(*(f"# {remark}" for remark in remarks), *report.heading(), sep="\n", file=table, flush=True)
    rows = []
    for nbytes in args.sizes:
        rows.append(measure.lead(mesh, 1, nbytes, args.seconds))
        print(report.line_of(rows[-1]), file=table, flush=True)
    measure.dismiss(mesh, 1)
    return rows

"""`rankmesh bench p2p`: messages between two ranks, by size.

Where it runs decides what it measures. Inside a launch (`rankmesh run`, torchrun, srun …) ranks 0 and 1 of that launch
measure, wherever they are; the others wait. Started alone it launches itself on two ranks of this host, or, for
inproc, on two threads.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Final
from uuid import uuid4

from rankmesh import Config, Mesh, join
from rankmesh.cli import measure, report
from rankmesh.errors import ConfigError
from rankmesh.launch.launcher import Options, launch
from rankmesh.launch.plan import Program, World
from rankmesh.membership.environment import detect

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
TRANSPORTS: Final = ("tcp", "tls", "inproc")
#: Seconds a rank that takes no part waits for the others.
LIMIT: Final = 3600.0
_TLS_VARIABLES: Final = ("RANKMESH_TLS_CERT", "RANKMESH_TLS_KEY", "RANKMESH_TLS_CA")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument(
        "--sizes", type=_sizes, default="8:64M", metavar="S", help="MIN:MAX[:FACTOR] or a list (default 8:64M, doubled)"
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=0.1, metavar="S", help="length of each timed loop (default 0.1)"
    )
    parser.add_argument("--pin", action="store_true", help="each rank keeps to a core of its own")
    parser.add_argument(
        "--transport", choices=TRANSPORTS, help="default: tcp, or tls where RANKMESH_TLS_CERT, _KEY and _CA are set"
    )
    parser.add_argument("--json", metavar="FILE", help="also write figures and circumstances; - is standard output")
    parser.add_argument("--plot", metavar="FILE.png", help="also draw time and bandwidth (needs rankmesh[plot])")


def run(args: argparse.Namespace) -> int:
    if args.plot:
        report.load_matplotlib()
    placement = detect(os.environ, parent_pid=os.getppid())
    if placement is not None and placement.size > 1:
        if args.transport is not None:
            raise ConfigError("Inside a launch the transport is that of the launch. Leave --transport out.")
        return _measure(args, placement.local_rank, join)
    if args.transport == "inproc":
        return _in_threads(args)
    with _environment(args.transport) as environ:
        program = Program("rankmesh", ("bench", "p2p", *_options(args)), module=True)
        return launch(program, World(nproc=2), Options(prefix=False), environ)


def _in_threads(args: argparse.Namespace) -> int:
    url = f"inproc://bench-{uuid4().hex}"

    def rank(number: int) -> int:
        return _measure(args, number, lambda: join(url, rank=number, size=2))

    with ThreadPoolExecutor(2) as threads:
        return max(threads.map(rank, range(2)))


@contextmanager
def _environment(transport: str | None) -> Iterator[Mapping[str, str]]:
    """The environment in which ranks choose this transport. For tls without certificates some are made, to be thrown
    away."""
    environ = dict(os.environ)
    if transport == "tcp":
        for name in _TLS_VARIABLES:
            environ.pop(name, None)
    if transport != "tls" or Config.from_env(environ).tls is not None:
        yield environ
        return
    try:
        from rankmesh.cli import authority
    except ImportError as error:
        raise ConfigError(
            f"--transport tls needs certificates: set {', '.join(_TLS_VARIABLES)}, or let it make some, which needs "
            f"the package cryptography ({error}): pip install 'rankmesh[certs]'"
        ) from error
    with TemporaryDirectory(prefix="rankmesh-bench-") as folder:
        authority.make_ca(Path(folder), days=1)
        files = authority.make_node(Path(folder), "bench", days=1)
        yield {**environ, **dict(zip(_TLS_VARIABLES, (files.cert, files.key, files.ca), strict=True))}


def _options(args: argparse.Namespace) -> Iterator[str]:
    """The command line for the ranks: where they run is decided by then."""
    yield from ("--sizes", ",".join(map(str, args.sizes)), "--seconds", str(args.seconds))
    yield from ("--pin",) * args.pin
    for option in ("json", "plot"):
        if (value := getattr(args, option)) is not None:
            yield f"--{option}={value}"


def _measure(args: argparse.Namespace, local_rank: int, enter: Callable[[], Mesh]) -> int:
    """What each rank does, in the mesh that `enter` joins; the exit code."""
    document: dict[str, object] = {"bench": "p2p", **report.environment(), "pinned": args.pin}
    if args.pin:  # before join(): the threads it starts stay on this core too
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[local_rank % len(cores)]})
    with enter() as mesh:
        if mesh.rank > 0:
            if mesh.rank == 1:
                measure.follow(mesh, 0, LIMIT)
            mesh.barrier(LIMIT)
            return 0
        document["transport"] = mesh.peers[0].addresses[0].scheme
        document["ranks"] = [str(peer) for peer in mesh.peers[:2]]
        rows = _table(args, mesh, [_title(document), *report.caveats(document)])
        mesh.barrier(LIMIT)
    if args.json:
        report.write_json(args.json, document, rows)
    if args.plot:
        report.write_plot(args.plot, _title(document), rows)
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


def _title(document: Mapping[str, object]) -> str:
    return (
        "rankmesh {rankmesh} bench p2p over {transport}, Python {python}, {system}, {cores} cores, load {load_before}, "
        "pinned: {pinned}, {date}"
    ).format_map(document)


def _sizes(text: str) -> list[int]:
    try:
        return report.parse_sizes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < LIMIT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and below {LIMIT:g}")
    return seconds

"""Where a benchmark between two ranks (collectives: some) runs, and its common options.

Inside a launch (`rankmesh run`, torchrun, srun …) ranks 0 and 1 of that launch measure, wherever they are; the others
wait. Started alone it launches itself on two ranks of this host, or, for inproc, on two threads.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from uuid import uuid4

from rankmesh import Config, Mesh, join
from rankmesh.cli import report
from rankmesh.errors import ConfigError
from rankmesh.launch.launcher import Options, launch
from rankmesh.launch.plan import Program, World
from rankmesh.membership.environment import detect

TRANSPORTS: Final = ("tcp", "tls", "inproc")
#: Seconds a rank that takes no part waits for the others.
LIMIT: Final = 3600.0
_TLS_VARIABLES: Final = ("RANKMESH_TLS_CERT", "RANKMESH_TLS_KEY", "RANKMESH_TLS_CA")

#: What a rank does: (arguments, rank on its host, what joins) → exit code.
Measure = Callable[[argparse.Namespace, int, Callable[[], Mesh]], int]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds", type=_seconds, default=0.1, metavar="S", help="length of each timed loop (default 0.1)"
    )
    parser.add_argument("--pin", action="store_true", help="each rank keeps to a core of its own")
    parser.add_argument(
        "--transport", choices=TRANSPORTS, help="default: tcp, or tls where RANKMESH_TLS_CERT, _KEY and _CA are set"
    )
    parser.add_argument("--json", metavar="FILE", help="also write figures and circumstances; - is standard output")


def add_sizes(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default=default,
        metavar="S",
        help=f"MIN:MAX[:FACTOR] (2 if left out) or a list (default {default})",
    )


def options(args: argparse.Namespace) -> Iterator[str]:
    """The common part of the command line for the ranks: where they run is decided by then."""
    yield from ("--seconds", str(args.seconds))
    yield from ("--pin",) * args.pin
    if args.json is not None:
        yield f"--json={args.json}"


def run(name: str, args: argparse.Namespace, words: Iterator[str], measure: Measure, size: int = 2) -> int:
    """Run benchmark `name` with the options `words`: `measure` on each rank. The exit code."""
    placement = detect(os.environ, parent_pid=os.getppid())
    if placement is not None and placement.size > 1:
        if args.transport is not None:
            raise ConfigError("Inside a launch the transport is that of the launch. Leave --transport out.")
        return measure(args, placement.local_rank, join)
    if args.transport == "inproc":
        return _in_threads(args, measure, size)
    with _environment(args.transport) as environ:
        program = Program("rankmesh", ("bench", name, *words), module=True)
        return launch(program, World(nproc=size), Options(prefix=False), environ)


def pin(args: argparse.Namespace, local_rank: int) -> None:
    """Before join(): the threads it starts stay on this core too."""
    if args.pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[local_rank % len(cores)]})


def _in_threads(args: argparse.Namespace, measure: Measure, size: int) -> int:
    url = f"inproc://bench-{uuid4().hex}"

    def rank(number: int) -> int:
        return measure(args, number, lambda: join(url, rank=number, size=size))

    with ThreadPoolExecutor(size) as threads:
        return max(threads.map(rank, range(size)))


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

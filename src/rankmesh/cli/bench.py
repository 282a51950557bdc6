"""`rankmesh bench <what>`: finds the benchmark's module and runs it.

A benchmark is a module with `add_options(parser)` and `run(args) -> int`. What is heavy it imports when it runs.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Final, Protocol, cast

from rankmesh.cli.main import Subparsers

#: benchmark → (module, what it measures)
BENCHES: Final = {
    "p2p": ("rankmesh.cli.p2p", "messages between two ranks: latency and bandwidth by size"),
    "rpc": ("rankmesh.cli.rpc", "calls between two ranks: latency, calls per second, bandwidth of arrays"),
    "collectives": ("rankmesh.cli.collectives", "collectives by size and algorithm, beside gloo and mpi4py"),
    "memory": ("rankmesh.cli.memory", "one-sided reads and writes of another rank's memory, by size"),
}


class Bench(Protocol):
    """A benchmark's module."""

    def add_options(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, args: argparse.Namespace) -> int: ...


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "bench", description="Measure this machine, or the machines of a launch.", allow_abbrev=False
    )
    benches = parser.add_subparsers(metavar="<benchmark>", title="benchmarks", dest="bench", required=True)
    for name, (_, summary) in BENCHES.items():
        bench_parser = benches.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        _bench(name).add_options(bench_parser)
    return parser


def run(args: argparse.Namespace) -> int:
    return _bench(args.bench).run(args)


def _bench(name: str) -> Bench:
    return cast("Bench", import_module(BENCHES[name][0]))

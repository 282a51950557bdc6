"""`rankmesh run -n 4 script.py args…`: start the ranks of a program."""

from __future__ import annotations

import argparse
from pathlib import Path

from rankmesh.cli.main import Subparsers
from rankmesh.errors import ConfigError
from rankmesh.launch.launcher import Options, launch
from rankmesh.launch.plan import Program, World
from rankmesh.transport.address import MAX_PORT, Address

EPILOG = """\
examples:
  rankmesh run -n 4 train.py --lr 0.1
  rankmesh run -n 4 -m package.train
  on each of two hosts, with the same RANKMESH_TOKEN:
  rankmesh run -n 4 --nnodes 2 --node-rank 0 --rendezvous 10.0.0.1:7000 train.py

Each line of output begins with its rank. The first rank that fails ends the others, and gives its exit code
(128 + n if it was ended by signal n). Ctrl-C is passed on; a second one kills. Beside its own variables each rank
has RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under torchrun.
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "run",
        description="Start the ranks of a program on this host, or on several.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="rankmesh run -n N [options] (script.py | -m module) [args…]",
    )
    parser.add_argument(
        "-n", "--nproc-per-node", "--nproc_per_node", type=int, required=True, metavar="N", help="ranks on this host"
    )
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="hosts in all (default 1)")
    parser.add_argument(
        "--node-rank", "--node_rank", type=int, default=0, metavar="R", help="number of this host, from 0"
    )
    parser.add_argument(
        "--rendezvous", type=_address, metavar="HOST:PORT", help="where hosts meet: an address of host 0"
    )
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="also write DIR/rank-0.out, rank-0.err …")
    parser.add_argument("--no-prefix", action="store_true", help="do not begin lines with the rank")
    parser.add_argument(
        "--grace", type=_seconds, default=5.0, metavar="S", help="seconds from SIGTERM to SIGKILL (default 5)"
    )
    parser.add_argument(
        "--timeout", type=_seconds, metavar="S", help="end the ranks after this many seconds (exit code 124)"
    )
    parser.add_argument(
        "--no-fork", action="store_true", help="start each rank as an interpreter of its own, not as a fork of one"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module, as in python -m")
    # One positional for all of it: argparse drops a `--` that stands between two.
    parser.add_argument("program", nargs=argparse.REMAINDER, help="script or module, and arguments passed on unchanged")
    return parser


def run(args: argparse.Namespace) -> int:
    world = World(nproc=args.nproc_per_node, nnodes=args.nnodes, node_rank=args.node_rank, rendezvous=args.rendezvous)
    words = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not words:
        raise ConfigError("There is no program to run. Name a script, or a module with -m.")
    program = Program(words[0], tuple(words[1:]), module=args.module)
    options = Options(
        log_dir=args.log_dir,
        prefix=not args.no_prefix,
        grace=args.grace,
        timeout=args.timeout,
        fork=not args.no_fork,
    )
    return launch(program, world, options)


def _address(text: str) -> Address:
    try:
        address = Address.parse(text if "://" in text else f"tcp://{text}")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if address.scheme == "inproc" or not 0 < address.port < MAX_PORT:  # the next port is for torch's own store
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port with a port from 1 to {MAX_PORT - 1}")
    return address


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds

"""`rankmesh <command>`: finds the command's module and runs it.

A command is a module with `add_parser(subparsers)`, which describes its options, and `run(args) -> int`, which returns
the exit code. Only the module of the command that was asked for is imported, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Final, Protocol, cast

from rankmesh.errors import RankmeshError

#: command → (module, what it does)
COMMANDS: Final = {
    "run": ("rankmesh.cli.run", "start the ranks of a program"),
    "demo": ("rankmesh.cli.demo", "four ranks on this machine show what works"),
    "bench": ("rankmesh.cli.bench", "measure latency and bandwidth"),
    "doctor": ("rankmesh.cli.doctor", "examine this machine and its network"),
    "certs": ("rankmesh.cli.certs", "make a certificate authority and node certificates"),
}

#: Exit code for errors that rankmesh itself reports, the same as argparse uses.
USAGE: Final = 2
#: What a shell says of programs ended by SIGINT and SIGPIPE.
INTERRUPTED: Final = 130
LOST_READER: Final = 141

#: -v, -vv
LEVELS: Final = (logging.WARNING, logging.INFO, logging.DEBUG)


class Subparsers(Protocol):
    """What `add_parser` gets; argparse's own class for it is private."""

    def add_parser(self, name: str, **options: object) -> argparse.ArgumentParser: ...


class Command(Protocol):
    """A command's module."""

    def add_parser(self, subparsers: Subparsers) -> object: ...
    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point of the `rankmesh` script; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    name = next((word for word in words if not word.startswith("-")), None)
    command = cast("Command", importlib.import_module(COMMANDS[name][0])) if name in COMMANDS else None
    try:
        args = _parser(name, command).parse_args(words)
        if command is None:  # no arguments at all: argparse has ended the process in all other cases
            _parser(None, None).print_help()
            return 0
        logging.basicConfig(
            level=LEVELS[min(args.verbose, len(LEVELS) - 1)], format="%(levelname)s %(name)s: %(message)s"
        )
        code = command.run(args)
        sys.stdout.flush()
        return code
    except RankmeshError as error:
        print(f"rankmesh: error: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone; without this the interpreter would complain while it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return LOST_READER


class _ShowVersion(argparse.Action):
    """argparse's own version action wants the text beforehand; reading the metadata takes longer than all the rest."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from importlib.metadata import version

        print(f"rankmesh {version('rankmesh')}")
        parser.exit()


def _parser(name: str | None, command: Command | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rankmesh",
        description="Communication between Python processes: ranks, messages, benchmarks.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log more; twice for everything")
    subparsers = parser.add_subparsers(metavar="<command>", title="commands")
    for other, (_, summary) in COMMANDS.items():
        if other != name or command is None:
            subparsers.add_parser(other, help=summary, add_help=False)
        else:
            command.add_parser(cast("Subparsers", subparsers))
    return parser


if __name__ == "__main__":
    sys.exit(main())

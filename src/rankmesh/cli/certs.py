"""`rankmesh certs DIR --name node0 --name node1`: a CA of one's own, and certificates for the nodes of a cluster."""

from __future__ import annotations

import argparse
from pathlib import Path

from rankmesh.errors import ConfigError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "certs",
        help="make a CA and node certificates for tls://",
        description="Make a CA, unless DIR has one already, and a certificate per node, for tls:// addresses.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="where the files are, or will be")
    parser.add_argument("--name", action="append", metavar="NODE", help="a node; repeat it for more (default: node0)")
    parser.add_argument("--days", type=int, default=365, help="how long certificates are valid (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="replace the certificates of nodes that have one")


def run(args: argparse.Namespace) -> int:
    """Prints the paths of what was made. Raises ConfigError for what cannot work."""
    try:
        from rankmesh.cli import authority
    except ImportError as error:
        raise ConfigError(
            f"`rankmesh certs` needs the package cryptography ({error}). Install it with: pip install 'rankmesh[certs]'"
        ) from error
    directory: Path = args.directory
    names: list[str] = args.name or ["node0"]
    if not args.force:
        authority.refuse_to_replace(directory, names)  # before anything is made
    if not authority.has_ca(directory):
        print(authority.make_ca(directory, days=args.days))
    for name in names:
        files = authority.make_node(directory, name, days=args.days, force=args.force)
        print(files.cert)
        print(files.key)
    print(
        "Give each node ca.pem and its own two files, and set RANKMESH_TLS_CA, RANKMESH_TLS_CERT and RANKMESH_TLS_KEY."
    )
    return 0

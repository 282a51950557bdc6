"""One process of a world: pins itself, loads its subject, then does what the harness asks for, one command at a time.

Commands and replies are JSON lines on a Unix socket, the same for a process started directly and for one started by
a launcher. Between commands a worker blocks in `readline`: worlds that are not being measured take no CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import traceback

from measures import measured
from measures.base import Rank, Reply
from subjects import ENTRIES, MPIEXEC, RUN, load

#: The variable in which a launcher tells the rank.
RANK_IN = {MPIEXEC: "PMI_RANK", RUN: "RANKMESH_RANK"}


def describe(error: BaseException) -> str:
    if isinstance(error, ImportError):
        return f"not installed: pip install -r bench/requirements.txt ({error})"
    return f"{type(error).__name__}: {error}"


def serve(name: str, rank: int, size: int, control: socket.socket) -> None:
    """Load the subject, say hello, and answer commands until `close` or until the harness is gone."""
    stream = control.makefile("rw", encoding="utf-8")

    def reply(message: Reply) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    reply({"rank": rank, "pid": os.getpid()})
    member: Rank | None = None
    for line in stream:
        arguments = json.loads(line)
        command = arguments.pop("do")
        try:
            member = member or measured(load(name), rank, size)
            answer = member.run(command, arguments)
        except Exception as error:  # noqa: BLE001 - whatever a library raises becomes the reason in its row, and the run goes on
            traceback.print_exc()
            reply({"error": describe(error)})
            return
        reply(answer)
        if command == "close":
            return


def main() -> None:
    parser = argparse.ArgumentParser(description="A process of a benchmark; not to be started by hand.")
    parser.add_argument("--subject", required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--control", required=True, help="path of the harness's Unix socket")
    parser.add_argument("--rank", type=int, help="default: what the launcher says")
    parser.add_argument("--cores", default="", help="comma-separated; rank r is pinned to the r-th, none: not pinned")
    arguments = parser.parse_args()
    rank = int(os.environ[RANK_IN[ENTRIES[arguments.subject].launcher]]) if arguments.rank is None else arguments.rank
    if arguments.cores:  # before the library is imported: its threads inherit the core
        cores = [int(core) for core in arguments.cores.split(",")]
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(arguments.control)
        serve(arguments.subject, rank, arguments.size, control)


if __name__ == "__main__":
    main()

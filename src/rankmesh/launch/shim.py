"""The first instructions of a rank: tie its life to the launcher's, then become the program.

Run by path with `python -P -S shim.py <pid of the launcher> <program> <args>…`: it must start in milliseconds, and so
imports nothing of rankmesh. The kernel kills the rank (PR_SET_PDEATHSIG, which survives exec) when the launcher's main
thread ends, however it ends. This cannot be done between fork and exec by the launcher itself (`preexec_fn`), which
has threads by then.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
#: What a shell answers for a command that cannot be executed.
CANNOT_EXECUTE = 126


def main(argv: list[str]) -> None:
    launcher, program = int(argv[1]), argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"rankmesh: prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}.")
    if os.getppid() != launcher:
        sys.exit("rankmesh: the launcher ended before this rank began.")  # no signal comes for a death before prctl
    try:
        os.execv(program[0], program)
    except OSError as error:
        print(f"rankmesh: {program[0]} cannot be executed: {error.strerror}.", file=sys.stderr)
        sys.exit(CANNOT_EXECUTE)


if __name__ == "__main__":
    main(sys.argv)

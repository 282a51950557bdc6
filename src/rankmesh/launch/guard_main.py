"""The guard itself: collect process groups until the launcher's pipe closes, then kill what is left (see guard).

Run by path, like the stem: it starts in milliseconds and imports nothing of rankmesh.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the kernel was quicker


if __name__ == "__main__":
    main()

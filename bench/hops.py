"""How far apart the two cores are, as far as Python can tell: how long a word takes from one to the other and back.

A virtual machine's cores are threads that its host moves about, by the second: onto one core (hyperthreads), onto two
that share a cache, or onto two that do not. Copies from one process to another take up to ten times as long on the
last, whoever makes them. So the report says how they lay while it measured.

    python bench/hops.py 0 1        # prints nanoseconds, the least of some rounds
"""

from __future__ import annotations

import mmap
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROUNDS, TRIPS = 10, 500
#: Words of the two, on cache lines of their own.
PING, PONG = 0, 64
WORDS_BYTES = 1024
OVER = 1 << 40
#: Seconds a look may take on a machine that is busy. Both processes end by then, whatever becomes of the other.
LOOK_TIMEOUT = 30
#: More than so many times the least is another place.
ELSEWHERE = 1.75


def look(cores: Sequence[int]) -> int:
    """Nanoseconds, between the two. By processes of its own: this one has threads."""
    command = [sys.executable, str(Path(__file__)), *map(str, cores)]
    return int(subprocess.run(command, capture_output=True, check=True, timeout=2 * LOOK_TIMEOUT).stdout)


def said(looks: Sequence[int]) -> str:
    """For the report."""
    least, median, most = min(looks), statistics.median(looks), max(looks)
    share = sum(nanoseconds > ELSEWHERE * least for nanoseconds in looks) / len(looks)
    return (
        f"A word took {median / 1e3:.2f} µs from core to core and back ({least / 1e3:.2f} – {most / 1e3:.2f}, "
        f"{len(looks)} looks, {share:.0%} of them over {ELSEWHERE} times the least)."
    )


def echo(words: memoryview) -> None:
    last = 0
    while last < OVER:
        while words[PING] == last:
            pass
        words[PONG] = last = words[PING]


def least_of_rounds(words: memoryview) -> float:
    trips = 0
    least = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter_ns()
        for _ in range(TRIPS):
            trips += 1
            words[PING] = trips
            while words[PONG] != trips:
                pass
        least = min(least, (time.perf_counter_ns() - began) / TRIPS)
    words[PING] = OVER
    return least


def main() -> None:
    here, there = int(sys.argv[1]), int(sys.argv[2])
    words = memoryview(mmap.mmap(-1, WORDS_BYTES)).cast("Q")
    child = os.fork()
    signal.alarm(LOOK_TIMEOUT)
    os.sched_setaffinity(0, {here if child else there})
    if not child:
        echo(words)
        os._exit(0)
    nanoseconds = least_of_rounds(words)
    os.waitpid(child, 0)
    print(round(nanoseconds))


if __name__ == "__main__":
    main()

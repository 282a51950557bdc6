"""rankmesh's messages over TCP beside bare sockets, gloo, MPI and ZeroMQ, in one run. See bench/README.md.

    python bench/p2p.py                     # everything but the sweep, some three minutes
    python bench/p2p.py --quick             # does it work: few repetitions, figures not to be quoted
    python bench/p2p.py --sweep --json out.json

It never fails because a figure is bad or a library is missing: the table says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness import Plan, Result
from report import BANDWIDTH, CPU, P50, P99, PER_SECOND, Column, Target
from scenarios import CROWD, IDLE, OVERSUBSCRIBED, PAIR, idle_cpu, oversubscribed_pingpong
from session import MIB, Bench, main

RANKMESH = "rankmesh-tcp"
POLLED = ("socket-try", "socket-epoll")
LIBRARIES = ("socket", RANKMESH, "gloo", "mpi", "mpi-tcp", "zmq")

PINGPONG = Plan("pingpong", "pingpong", 64, least=200, most=50_000)
LARGE = Plan("bandwidth", "bandwidth", 64 * MIB, least=2, most=50)
RATE = Plan("rate", "rate", 64, least=500, most=500_000)


def footnotes(results: Sequence[Result]) -> Iterator[str]:
    for result in results:
        if result.measure == IDLE and result.rounds:
            waiting = result.rounds[0]["waiting_cpu_percent"]
            yield f"CPU of the busiest of the 8 peers, waiting in recv meanwhile: {waiting:.2f} %"


BENCH = Bench(
    description=__doc__,
    issue=2,
    side_by_side={PINGPONG: POLLED + LIBRARIES, LARGE: LIBRARIES, RATE: LIBRARIES},
    sweep=POLLED + LIBRARIES,
    scenarios={IDLE: idle_cpu, OVERSUBSCRIBED: oversubscribed_pingpong},
    columns=(
        Column("64 B ping-pong\np50, µs", PINGPONG.measure, P50),
        Column("\np99, µs", PINGPONG.measure, P99),
        Column("64 MiB one way\nGB/s", LARGE.measure, BANDWIDTH),
        Column("64 B one way\nmessages/s", RATE.measure, PER_SECOND),
    ),
    targets=(
        Target("64 B ping-pong", PINGPONG.measure, P50, 2.0, RANKMESH, POLLED),
        Target("64 MiB one way", LARGE.measure, BANDWIDTH, 0.9, RANKMESH, ("socket",)),
        Target("64 B messages one way", RATE.measure, PER_SECOND, 0.5, RANKMESH, ("socket",)),
        Target("CPU, idle, 8 peers", IDLE, CPU, 1.0, RANKMESH),
        Target("64 B ping-pong, 4 ranks on 2 cores", OVERSUBSCRIBED, P50, 3.0, CROWD, (PAIR,)),
    ),
    footnotes=footnotes,
)

if __name__ == "__main__":
    main(BENCH)

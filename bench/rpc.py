"""rankmesh's RPC beside gRPC, RPyC, ZeroMQ, torch.distributed.rpc and bare sockets, in one run. See bench/README.md.

    python bench/rpc.py                     # everything but the sweep, some five minutes
    python bench/rpc.py --quick             # does it work: few repetitions, figures not to be quoted
    python bench/rpc.py --sweep --json out.json

It never fails because a figure is bad or a library is missing: the table says so.
"""

from __future__ import annotations

from harness import Plan
from report import BANDWIDTH, P50, P99, PER_SECOND, Column, Target
from session import MIB, Bench, main

POLLED = ("socket-try", "socket-epoll")
INLINE, POOLED = "rankmesh-inline", "rankmesh-pooled"
SHM_INLINE, SHM_POOLED = "rankmesh-shm-inline", "rankmesh-shm-pooled"
OURS = (INLINE, POOLED, SHM_INLINE, SHM_POOLED)
RPC_PEERS = ("grpc", "grpc-aio", "rpyc", "torch-rpc", "torch-rpc-tcp")
PEERS = (*RPC_PEERS, "zmq-req", "zmq-dealer")
#: Those that move the data over TCP.
TCP_PEERS = tuple(name for name in PEERS if name != "torch-rpc")

ECHO = Plan("echo", "pingpong", 64, least=50, most=50_000)
IN_FLIGHT = Plan("in-flight", "in_flight", 64, least=200, most=200_000)
LARGE = Plan("array", "pingpong", 64 * MIB, least=2, most=50)

BENCH = Bench(
    description=__doc__,
    issue=4,
    side_by_side={
        ECHO: POLLED + OURS + PEERS,
        IN_FLIGHT: (*OURS, *RPC_PEERS, "zmq-dealer"),
        LARGE: ("socket", *OURS, *PEERS),
    },
    sweep=("socket-try", *OURS, "grpc", "rpyc", "zmq-req", "torch-rpc"),
    columns=(
        Column("64 B echo\np50, µs", ECHO.measure, P50),
        Column("\np99, µs", ECHO.measure, P99),
        Column("64 B, 64 in flight\ncalls/s", IN_FLIGHT.measure, PER_SECOND),
        Column("64 MiB echo\nGB/s each way", LARGE.measure, BANDWIDTH),
    ),
    targets=(
        Target("64 B echo, inline, within 2.5× of a polled socket", ECHO.measure, P50, 2.5, INLINE, POLLED),
        Target("64 B echo, inline, 5× below the fastest peer", ECHO.measure, P50, 0.2, INLINE, PEERS),
        Target("64 B echo, pooled, 2× below the fastest peer", ECHO.measure, P50, 0.5, POOLED, PEERS),
        Target("64 B echo, inline, faster over shared memory", ECHO.measure, P50, 1.0, SHM_INLINE, (INLINE,)),
        Target("64 B echo, pooled, faster over shared memory", ECHO.measure, P50, 1.0, SHM_POOLED, (POOLED,)),
        *(
            Target(f"64 in flight, {title}, {rest}", IN_FLIGHT.measure, PER_SECOND, bound, subject, references)
            for title, subject in (("inline", INLINE), ("pooled", POOLED))
            for rest, bound, references in (
                ("2× the best RPC", 2.0, RPC_PEERS),
                ("0.7× of ZeroMQ", 0.7, ("zmq-dealer",)),
            )
        ),
        Target("64 MiB echo over TCP, beside a bare socket", LARGE.measure, BANDWIDTH, 0.8, POOLED, ("socket",)),
        Target("64 MiB echo over TCP, 1.3× the best peer over TCP", LARGE.measure, BANDWIDTH, 1.3, POOLED, TCP_PEERS),
        Target("64 MiB echo, 1.3× the best peer", LARGE.measure, BANDWIDTH, 1.3, SHM_POOLED, PEERS),
    ),
)

if __name__ == "__main__":
    main(BENCH)

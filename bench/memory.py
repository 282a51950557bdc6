"""rankmesh's one-sided memory beside Mooncake, MPI RMA, bare sockets and a plain copy, in one run. See bench/README.md.

    python bench/memory.py                  # some eight minutes
    python bench/memory.py --quick          # does it work: few repetitions, figures not to be quoted
    python bench/memory.py --json out.json

It never fails because a figure is bad or a library is missing: the table says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness import Plan, Result
from report import BANDWIDTH, OWNER_CPU, P50, P99, RATIO, Column, Target
from scenarios import PAIR_RANKS, crowd, crowd_title
from session import MIB, Bench, main

TCP, REGISTERED, ALLOCATED = OURS = ("rankmesh-memory-tcp", "rankmesh-registered", "rankmesh-allocated")
#: Ping-pongs of as much as is read or written, and of the least there is.
POLLED, POLLED_64 = ("socket-try", "socket-epoll"), ("socket-try-64", "socket-epoll-64")
MOONCAKE, MPI_TCP = "mooncake", "mpi-rma-tcp"
#: A server of bare sockets: what requests, and a crowd of those who make them, cost without a library.
SOCKETS = "socket-memory"
PEERS = (MOONCAKE, MPI_TCP, "mpi-rma", "mpi-rma-allocated")

SMALL, LARGE, PAGES = 4096, 64 * MIB, 1000
READ = Plan("read", "read", SMALL, least=200, most=50_000)
WRITE = Plan("write", "write", SMALL, least=200, most=50_000)
LARGE_READ = Plan("large-read", "large_read", LARGE, least=2, most=30)
LARGE_WRITE = Plan("large-write", "large_write", LARGE, least=2, most=30)
BATCH_READ = Plan("batch-read", "batch_read", PAGES * SMALL, least=3, most=500)
BATCH_WRITE = Plan("batch-write", "batch_write", PAGES * SMALL, least=3, most=500)
#: Fewer reads than this have no p99, and each may take a time slice of the interpreter.
BUSY = Plan("busy", "busy", SMALL, least=100, most=20_000)
BUSY_SPARSE = Plan("busy-sparse", "busy_sparse", SMALL, least=100, most=2_000)
CROWD = Plan("crowd", "crowd", MIB, least=8, most=2_000)
CROWD_RANKS = 1 + 16 + 16
CROWDED = (SOCKETS, TCP, REGISTERED, ALLOCATED)


def footnotes(results: Sequence[Result]) -> Iterator[str]:
    """What a crowd costs who has nothing but sockets."""
    medians = {result.subject: result.median(BANDWIDTH.key) for result in results if result.measure == CROWD.measure}
    crowded, pair = (medians.get(crowd_title(SOCKETS, ranks)) for ranks in (CROWD_RANKS, PAIR_RANKS))
    if crowded and pair:
        yield (
            f"Bare sockets, 16 readers and 16 writers: {crowded:.2f} GB/s, "
            f"{crowded / pair:.3g}× of one reader's and one writer's {pair:.2f}."
        )


SMALL_PLANS = {"read": READ, "write": WRITE}
LARGE_PLANS = {"read": LARGE_READ, "write": LARGE_WRITE}
BATCH_PLANS = {"read": BATCH_READ, "write": BATCH_WRITE}

BENCH = Bench(
    description=__doc__,
    issue=5,
    side_by_side={
        READ: (*POLLED, *POLLED_64, SOCKETS, *OURS, *PEERS),
        WRITE: (*POLLED, *POLLED_64, SOCKETS, *OURS, *PEERS),
        LARGE_READ: ("copyto", "socket", SOCKETS, *OURS, *PEERS),
        LARGE_WRITE: ("copyto", "socket", SOCKETS, *OURS, *PEERS),
        BATCH_READ: (*OURS, *PEERS),
        BATCH_WRITE: (*OURS, *PEERS),
        BUSY: (*OURS, MOONCAKE),  # an owner outside MPI does not serve
        BUSY_SPARSE: (*OURS, MOONCAKE),
    },
    scenarios={CROWD.measure: crowd(CROWD, CROWD_RANKS, CROWDED)},
    footnotes=footnotes,
    columns=(
        *(Column(f"4 KiB {verb}\np50, µs", plan.measure, P50) for verb, plan in SMALL_PLANS.items()),
        *(Column(f"64 MiB {verb}\nGB/s", plan.measure, BANDWIDTH) for verb, plan in LARGE_PLANS.items()),
    ),
    further_columns=(
        tuple(
            column
            for verb, plan in BATCH_PLANS.items()
            for column in (
                Column(f"1,000 × 4 KiB {verb}\nGB/s", plan.measure, BANDWIDTH),
                Column("beside one piece\n×", plan.measure, RATIO),
            )
        ),
        (
            Column("busy owner, 4 KiB reads\non end: p50, µs", BUSY.measure, P50),
            Column("\np99, µs", BUSY.measure, P99),
            Column("owner's loop had\n% of its core", BUSY.measure, OWNER_CPU),
            Column("now and then\np50, µs", BUSY_SPARSE.measure, P50),
            Column("\np99, µs", BUSY_SPARSE.measure, P99),
        ),
    ),
    targets=(
        *(
            Target(f"64 MiB {verb} over TCP, beside a bare socket", plan.measure, BANDWIDTH, 0.9, TCP, ("socket",))
            for verb, plan in LARGE_PLANS.items()
        ),
        *(
            Target(f"4 KiB read over TCP, beside a polled socket, {nbytes} each way", READ.measure, P50, 2.5, TCP, rows)
            for nbytes, rows in (("4 KiB", POLLED), ("64 B", POLLED_64))
        ),
        *(
            Target(f"1,000 × 4 KiB {verb} over TCP, beside one piece", plan.measure, RATIO, 0.5, TCP)
            for verb, plan in BATCH_PLANS.items()
        ),
        *(
            Target(f"4 KiB {verb} over TCP, {title}", plan.measure, P50, bound, TCP, (peer,))
            for title, bound, peer in (("3× faster than Mooncake", 0.333, MOONCAKE), ("faster than MPI", 1.0, MPI_TCP))
            for verb, plan in SMALL_PLANS.items()
        ),
        *(
            Target(f"64 MiB {verb} over TCP, {title}", plan.measure, BANDWIDTH, bound, TCP, (peer,))
            for title, bound, peer in (("1.3× Mooncake", 1.3, MOONCAKE), ("faster than MPI", 1.0, MPI_TCP))
            for verb, plan in LARGE_PLANS.items()
        ),
        *(
            Target(f"64 MiB {verb}, allocated, beside np.copyto", plan.measure, BANDWIDTH, 0.8, ALLOCATED, ("copyto",))
            for verb, plan in LARGE_PLANS.items()
        ),
        *(
            Target(
                f"16 readers and 16 writers, regions coming and going, {title}",
                CROWD.measure,
                BANDWIDTH,
                0.7,
                crowd_title(name, CROWD_RANKS),
                (crowd_title(name, PAIR_RANKS),),
            )
            for title, name in (("over TCP", TCP), ("same host", REGISTERED), ("same host, allocated", ALLOCATED))
        ),
        Target(
            "16 readers and 16 writers over TCP, beside bare sockets",
            CROWD.measure,
            BANDWIDTH,
            0.7,
            crowd_title(TCP, CROWD_RANKS),
            (crowd_title(SOCKETS, CROWD_RANKS),),
        ),
        *(
            Target(f"4 KiB reads from a busy owner, {title}, {way}, p99", plan.measure, P99, 20_000.0, name)
            for title, plan in (("on end", BUSY), ("now and then", BUSY_SPARSE))
            for way, name in (("over TCP", TCP), ("same host", REGISTERED), ("allocated", ALLOCATED))
        ),
    ),
)

if __name__ == "__main__":
    main(BENCH)

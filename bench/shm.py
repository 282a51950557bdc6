"""rankmesh's messages inside one host beside MPI, gloo, ZeroMQ and a plain copy, in one run. See bench/README.md.

    python bench/shm.py                     # everything but the sweep, some three minutes
    python bench/shm.py --quick             # does it work: few repetitions, figures not to be quoted
    python bench/shm.py --sweep --json out.json

It never fails because a figure is bad or a library is missing: the table says so.
"""

from __future__ import annotations

from harness import Plan
from report import BANDWIDTH, P50, P99, PER_HOP, Column, Target
from scenarios import ring
from session import MIB, Bench, main

SHM, TCP, ARENA = "rankmesh-shm", "rankmesh-tcp", "rankmesh-arena"
PAIRS = (SHM, TCP, "mpi", "gloo", "zmq-ipc")
RINGS = (SHM, TCP, "mpi")

PINGPONG = Plan("pingpong", "pingpong", 64, least=200, most=100_000)
LARGE = Plan("bandwidth", "bandwidth", 64 * MIB, least=2, most=50)
#: By number of ranks. A hop may take a time slice of the scheduler where ranks spin: few laps must do.
RING = {size: Plan(f"ring{size}", "ring", 64, least=10, most=20_000) for size in (4, 8)}

BENCH = Bench(
    description=__doc__,
    issue=3,
    side_by_side={PINGPONG: PAIRS, LARGE: ("copyto", SHM, ARENA, *PAIRS[1:])},
    sweep=PAIRS,
    scenarios={plan.measure: ring(plan, size, RINGS) for size, plan in RING.items()},
    columns=(
        Column("64 B ping-pong\np50, µs", PINGPONG.measure, P50),
        Column("\np99, µs", PINGPONG.measure, P99),
        Column("64 MiB one way\nGB/s", LARGE.measure, BANDWIDTH),
        *(Column(f"ring of {size}, unpinned\nµs per hop", plan.measure, PER_HOP) for size, plan in RING.items()),
    ),
    targets=(
        Target("64 B ping-pong, at most 2× of MPICH's", PINGPONG.measure, P50, 2.0, SHM, ("mpi",)),
        Target("64 B ping-pong, 10× faster than gloo", PINGPONG.measure, P50, 0.1, SHM, ("gloo",)),
        Target("64 MiB, beside np.copyto", LARGE.measure, BANDWIDTH, 0.7, SHM, ("copyto",)),
        Target("64 MiB, as fast as MPICH", LARGE.measure, BANDWIDTH, 1.0, SHM, ("mpi",)),
        Target("64 MiB, far ahead of gloo and ZeroMQ", LARGE.measure, BANDWIDTH, 2.0, SHM, ("gloo", "zmq-ipc")),
        Target("64 MiB, arrays of mesh.empty()", LARGE.measure, BANDWIDTH, 0.8, ARENA, ("copyto",)),
        *(
            Target(f"ring of {size} on 2 cores, {title}", plan.measure, PER_HOP, bound, SHM, (reference,))
            for size, plan in RING.items()
            for title, bound, reference in (("no slower than TCP", 1.0, TCP), ("at most 2× of MPICH's", 2.0, "mpi"))
        ),
    ),
)

if __name__ == "__main__":
    main(BENCH)

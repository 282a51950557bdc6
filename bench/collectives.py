"""rankmesh's collectives beside MPICH, gloo and what memory and sockets allow, in one run. See bench/README.md.

    python bench/collectives.py                  # some seven minutes
    python bench/collectives.py --quick          # does it work: few repetitions, figures not to be quoted
    python bench/collectives.py --measures all_reduce-2,all_reduce-4 --sizes 8B,64MiB --rounds 3

It never fails because a figure is bad or a library is missing: the table says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from harness import Effort, Plan, Result
from report import BUS, ELEMENTS, PER_CALL, Column, Target, number, size_text, with_spread
from session import MIB, QUICK, SWEEP_SIZES, Bench, main
from subjects import ENTRIES

KIB = 1024
OURS, TCP, MPI, GLOO = "rankmesh-collectives", "rankmesh-collectives-tcp", "mpi-collectives", "gloo-collectives"
BOUND = "memory-bound"
EXCHANGES = ("exchange-poll", "exchange-threads")
FLOAT32, HALVES = "rankmesh-float32", ("rankmesh-float16", "rankmesh-bfloat16")

WORLDS = (2, 4)
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
LARGE = 64 * MIB
#: Less than a round has a first and a last call; of what is large, two must do.
LEAST = {32 * KIB: 20, 2 * MIB: 5, LARGE: 2}
MOST = 50_000
#: A hundred measures of three subjects each: shorter rounds than elsewhere, and fewer.
EFFORT = Effort(rounds=5, seconds=0.08)


def plan(collective: str, ranks: int, nbytes: int) -> Plan:
    least = next(least for bound, least in LEAST.items() if nbytes <= bound)
    return Plan(f"{collective}-{ranks}", collective, nbytes, least, MOST, ranks)


SWEEPS = [plan(collective, ranks, nbytes) for ranks in WORLDS for collective in COLLECTIVES for nbytes in SWEEP_SIZES]
BARRIERS = [plan("barrier", ranks, 0) for ranks in WORLDS]
OVER_TCP = Plan("tcp", "all_reduce", LARGE, least=2, most=50)
TENSORS = Plan("tensors", "all_reduce", LARGE, least=2, most=50)


#: Of two ranks, those for which memory alone is measured too.
BOUNDED = ("all_reduce", "broadcast", "all_gather", "all_to_all")


def taking_part(plan: Plan) -> tuple[str, ...]:
    bounded = plan.command in BOUNDED and plan.ranks == 2 and plan.nbytes == LARGE
    return (OURS, MPI, GLOO, *([BOUND] if bounded else []))


#: By number of ranks: what, sizes, how many times a reference's time at most, the references. The bounds of two ranks
#: leave a gap between 4 and 64 KiB; those of four have none.
BOUNDS: dict[int, tuple[tuple[str, tuple[int, int], float, tuple[str, ...]], ...]] = {
    2: (
        ("64 MiB, 2× the faster", (LARGE, LARGE), 0.5, (MPI, GLOO)),
        ("64 KiB – 16 MiB, 0.9× MPICH", (64 * KIB, 16 * MIB), 1.11, (MPI,)),
        ("64 KiB – 16 MiB, 4× gloo", (64 * KIB, 16 * MIB), 0.25, (GLOO,)),
        ("under 4 KiB, at most 3× of MPICH's", (0, 4 * KIB - 1), 3.0, (MPI,)),
        ("under 4 KiB, 10× faster than gloo", (0, 4 * KIB - 1), 0.1, (GLOO,)),
    ),
    4: (
        ("from 64 KiB, faster than both", (64 * KIB, LARGE), 1.0, (MPI, GLOO)),
        ("below, at most 3× of MPICH's", (0, 64 * KIB - 1), 3.0, (MPI,)),
        ("below, 5× faster than gloo", (0, 64 * KIB - 1), 0.2, (GLOO,)),
    ),
}


def targets() -> Iterator[Target]:
    for ranks, bounds in BOUNDS.items():
        for collective in (*COLLECTIVES, "barrier"):
            for title, (least, most), bound, references in bounds:
                sizes = tuple(n for n in (SWEEP_SIZES if collective in COLLECTIVES else (0,)) if least <= n <= most)
                if sizes:
                    title = title if collective in COLLECTIVES else title.partition(", ")[2]
                    name = f"{collective}, {ranks} ranks, {title}"
                    yield Target(name, f"{collective}-{ranks}", PER_CALL, bound, OURS, references, sizes)
    for collective in BOUNDED:
        name = f"{collective}, 2 ranks, 64 MiB, beside memory alone"
        yield Target(name, f"{collective}-2", PER_CALL, 1.5, OURS, (BOUND,), (LARGE,))
    yield Target("all_reduce over TCP, 64 MiB, beside a bare exchange", OVER_TCP.measure, BUS, 0.7, TCP, EXCHANGES)
    yield Target("all_reduce over TCP, 64 MiB, 2× gloo", OVER_TCP.measure, BUS, 2.0, TCP, (GLOO,))
    for half in HALVES:
        yield Target(f"{ENTRIES[half].title}: elements", TENSORS.measure, ELEMENTS, 0.5, half, (FLOAT32,))


def tables(results: Sequence[Result], notes: Mapping[str, str]) -> Iterator[Table]:
    """Times by size, for each number of ranks; and who was measured."""
    for ranks in WORLDS:
        plans = {(plan.measure, plan.nbytes): plan for plan in (*SWEEPS, *BARRIERS) if plan.ranks == ranks}
        found: dict[Plan, dict[str, Result]] = {}
        for result in results:
            plan = plans.get((result.measure, result.nbytes))
            if plan is not None:
                found.setdefault(plan, {})[result.subject] = result
        if found:
            yield _by_size(ranks, found)
    subjects = Table(title="Subjects")
    for column in ("subject", "", "note"):
        subjects.add_column(column)
    for name, note in notes.items():
        subjects.add_row(name, ENTRIES[name].title, escape(note), style="bold" if ENTRIES[name].ours else "")
    yield subjects


def _by_size(ranks: int, found: Mapping[Plan, Mapping[str, Result]]) -> Table:
    names = [name for name in (OURS, MPI, GLOO, BOUND) if any(name in here for here in found.values())]
    table = Table(title=f"{ranks} ranks: µs a call, of the slowest rank; bus bandwidth of rankmesh")
    table.add_column("collective")
    for title in ("size", *names, "GB/s", "× mpi", "× gloo"):
        table.add_column(title, justify="right", no_wrap=True)
    last = {plan.measure: plan for plan in found}
    for plan, here in found.items():
        ours = here.get(OURS)
        table.add_row(
            plan.command,
            size_text(plan.nbytes) if plan.nbytes else "",
            *(with_spread(here.get(name), PER_CALL.key) for name in names),
            number(ours.median(BUS.key)) if ours is not None and plan.nbytes else "",
            *(number(_ratio(ours, here.get(name))) for name in (MPI, GLOO)),
            end_section=plan is last[plan.measure],
        )
    return table


def _ratio(ours: Result | None, theirs: Result | None) -> float | None:
    """Of two times."""
    if ours is None or theirs is None or not ours.rounds or not theirs.rounds:
        return None
    return (ours.median(PER_CALL.key) or 0.0) / (theirs.median(PER_CALL.key) or 1.0)


BENCH = Bench(
    description=__doc__,
    issue=6,
    side_by_side={
        **{plan: taking_part(plan) for plan in (*SWEEPS, *BARRIERS)},
        OVER_TCP: (TCP, GLOO, *EXCHANGES),
        TENSORS: (FLOAT32, *HALVES),
    },
    columns=(
        Column("64 MiB over TCP\nbus GB/s", OVER_TCP.measure, BUS),
        Column("16 Mi elements of torch\n10⁹ elements/s", TENSORS.measure, ELEMENTS),
    ),
    targets=tuple(targets()),
    tables=tables,
    effort=(EFFORT, QUICK[1]),
)

if __name__ == "__main__":
    main(BENCH)

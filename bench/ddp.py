"""torch.distributed over rankmesh beside gloo and beside rankmesh's own calls, in one run. See bench/README.md.

    python bench/ddp.py                          # some five minutes
    python bench/ddp.py --quick                  # does it work: few repetitions, figures not to be quoted
    python bench/ddp.py --measures ddp-2,ddp-4 --rounds 3

It never fails because a figure is bad or a library is missing: the table says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from rich.table import Table

from harness import Effort, Plan, Result
from report import PER_CALL, Column, Figure, Target, number, size_text, with_spread
from session import MIB, QUICK, Bench, main

KIB = 1024
TRAINING, GLOO_TRAINING = "rankmesh-ddp", "gloo-ddp"
BY_TORCH, NATIVE, GLOO = "rankmesh-torch", "rankmesh-float32", "gloo-collectives"
WORLDS = (2, 4)

STEP = Figure("step_ms", "ms", higher_is_better=False)
COMPUTING = Figure("computing_ms", "ms", higher_is_better=False)
COMMUNICATION = Figure("communication_ms", "ms", higher_is_better=False)

#: Gradients of the model in subjects/torch_training.py, in float32.
GRADIENTS = 4 * 25_176_064
#: Steps of a round, with communication and as many without.
STEPS = 6
TRAININGS = [Plan(f"ddp-{ranks}", "train", GRADIENTS, STEPS, STEPS, ranks) for ranks in WORLDS]
#: Losses are sums of float32 in another order.
SAME_LOSS = 1e-5

#: From here on what a call costs beside the native one counts; below, beside gloo's.
LARGE = 64 * KIB
SIZES = (8, 512, 4 * KIB, 32 * KIB, LARGE, 256 * KIB, 2 * MIB, 16 * MIB, 64 * MIB)
ALL_REDUCES = [
    Plan(f"all_reduce-{ranks}", "all_reduce", nbytes, 20 if nbytes < MIB else 3, 20_000, ranks)
    for ranks in WORLDS
    for nbytes in SIZES
]
EFFORT = Effort(rounds=5, seconds=0.1)


def targets() -> Iterator[Target]:
    for plan in TRAININGS:
        yield Target(f"DDP, {plan.ranks} ranks: a step", plan.measure, STEP, 0.8, TRAINING, (GLOO_TRAINING,))
    for ranks in WORLDS:
        measure = f"all_reduce-{ranks}"
        large = tuple(nbytes for nbytes in SIZES if nbytes >= LARGE)
        small = tuple(nbytes for nbytes in SIZES if nbytes < LARGE)
        named = f"all_reduce by torch, {ranks} ranks"
        yield Target(
            f"{named}, from 64 KiB, beside the native call", measure, PER_CALL, 1.3, BY_TORCH, (NATIVE,), large
        )
        yield Target(f"{named}, below, beside gloo", measure, PER_CALL, 1.0, BY_TORCH, (GLOO,), small)


def tables(results: Sequence[Result], notes: Mapping[str, str]) -> Iterator[Table]:
    """all_reduce by size."""
    found: dict[tuple[str, int], dict[str, Result]] = {}
    for result in results:
        if result.measure.startswith("all_reduce"):
            found.setdefault((result.measure, result.nbytes), {})[result.subject] = result
    if not found:
        return
    table = Table(title="all_reduce of a torch tensor: µs a call, of the slowest rank")
    for title in ("", "size", BY_TORCH, NATIVE, GLOO, "× native", "× gloo"):
        table.add_column(title, justify="right", no_wrap=True)
    for (measure, nbytes), here in found.items():
        table.add_row(
            measure.replace("all_reduce-", "ranks: "),
            size_text(nbytes),
            *(with_spread(here.get(name), PER_CALL.key) for name in (BY_TORCH, NATIVE, GLOO)),
            *(number(_ratio(here.get(BY_TORCH), here.get(name))) for name in (NATIVE, GLOO)),
            end_section=nbytes == SIZES[-1],
        )
    yield table


def _ratio(ours: Result | None, theirs: Result | None) -> float | None:
    if ours is None or theirs is None or not ours.rounds or not theirs.rounds:
        return None
    return (ours.median(PER_CALL.key) or 0.0) / (theirs.median(PER_CALL.key) or 1.0)


def losses(results: Sequence[Result]) -> Iterator[str]:
    """How far the losses of all rounds of both are from each other."""
    for plan in TRAININGS:
        runs = [reply["losses"] for result in results if result.measure == plan.measure for reply in result.rounds]
        subjects = {result.subject for result in results if result.measure == plan.measure and result.rounds}
        if len(subjects) < 2:
            continue
        apart = max(
            abs(one - other) / abs(other)
            for left, right in combinations(runs, 2)
            for one, other in zip(left, right, strict=True)
        )
        verdict = "PASS" if apart <= SAME_LOSS else "MISS"
        yield (
            f"Losses of DDP, {plan.ranks} ranks, {STEPS} steps, {runs[0][0]:.4f} to {runs[0][-1]:.4f}, all rounds of "
            f"{' and '.join(sorted(subjects))}: {apart:.1e} apart at most (target ≤ {SAME_LOSS:.0e}): {verdict}"
        )


BENCH = Bench(
    description=__doc__,
    issue=7,
    side_by_side={
        **dict.fromkeys(TRAININGS, (TRAINING, GLOO_TRAINING)),
        **dict.fromkeys(ALL_REDUCES, (BY_TORCH, NATIVE, GLOO)),
    },
    columns=tuple(
        Column(f"{what}\n{plan.ranks} ranks, ms", plan.measure, figure)
        for plan in TRAININGS
        for what, figure in (("a step", STEP), ("computing", COMPUTING), ("communication", COMMUNICATION))
    ),
    targets=tuple(targets()),
    tables=tables,
    effort=(EFFORT, QUICK[1]),
    footnotes=losses,
)

if __name__ == "__main__":
    main(BENCH)

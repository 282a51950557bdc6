"""From results to verdicts, tables and JSON. Nothing here raises because a figure is bad or missing: it says so."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table

from harness import Result
from scenarios import IDLE, OVERSUBSCRIBED
from subjects import BANDWIDTH, ENTRIES, PINGPONG, RANKMESH, RATE

SWEEP = "sweep"


@dataclass(frozen=True)
class Figure:
    """The figure by which a measure is judged."""

    key: str
    title: str
    unit: str
    higher_is_better: bool


FIGURES = {
    PINGPONG: Figure("p50_us", "64 B ping-pong", "µs", higher_is_better=False),
    BANDWIDTH: Figure("gb_per_s", "64 MiB one way", "GB/s", higher_is_better=True),
    RATE: Figure("per_s", "64 B messages one way", "1/s", higher_is_better=True),
    IDLE: Figure("cpu_percent", "CPU, idle, 8 peers", "%", higher_is_better=False),
    OVERSUBSCRIBED: Figure("p50_us", "64 B ping-pong, 4 ranks on 2 cores", "µs", higher_is_better=False),
}

#: Issue 2, "What it must show": rankmesh divided by its reference; for idle CPU, which has none, the percentage itself.
TARGETS = {PINGPONG: 2.0, BANDWIDTH: 0.9, RATE: 0.5, IDLE: 1.0, OVERSUBSCRIBED: 3.0}

COLUMNS_OF_VERDICTS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("measure", "left"),
    ("rankmesh", "right"),
    ("reference", "right"),
    ("which", "left"),
    ("value", "right"),
    ("target", "right"),
    ("verdict", "left"),
)
STYLES = {"PASS": "green", "MISS": "red", "—": "yellow"}


@dataclass(frozen=True)
class Verdict:
    """One target beside what was measured. `value` is compared; it is None when there was nothing to compare."""

    measure: str
    measured: float | None
    reference: float | None
    reference_subject: str
    value: float | None
    value_range: tuple[float, float] | None
    target: float
    verdict: str
    reason: str = ""


def judge(results: Sequence[Result]) -> list[Verdict]:
    """A verdict for each target whose measure was run."""
    verdicts = []
    for measure in TARGETS:
        of_measure = [result for result in results if result.measure == measure]
        if of_measure:
            subject, reference = _contenders(measure, of_measure)
            verdicts.append(_verdict(measure, subject, reference))
    return verdicts


def _contenders(measure: str, results: Sequence[Result]) -> tuple[Result | None, Result | None]:
    """rankmesh's result, and the fastest of those that count as its reference."""
    if measure == IDLE:
        return results[0], None
    if measure == OVERSUBSCRIBED:
        alone, crowded = results
        return crowded, alone
    figure = FIGURES[measure]
    subject = next((result for result in results if result.subject == RANKMESH), None)
    references = [result for result in results if result.rounds and measure in ENTRIES[result.subject].reference_in]
    sign = -1 if figure.higher_is_better else 1
    return subject, min(references, key=lambda result: sign * (result.median(figure.key) or 0.0), default=None)


def _verdict(measure: str, subject: Result | None, reference: Result | None) -> Verdict:
    figure, target = FIGURES[measure], TARGETS[measure]
    measured = subject.median(figure.key) if subject else None
    base = reference.median(figure.key) if reference else None
    value = measured if measure == IDLE else measured / base if measured and base else None
    if value is None:
        verdict, reason = "—", _why_missing(subject, reference)
    else:
        met = value >= target if figure.higher_is_better else value <= target
        verdict, reason = ("PASS" if met else "MISS"), ""
    return Verdict(
        measure=measure,
        measured=measured,
        reference=base,
        reference_subject=reference.subject if reference else "",
        value=value,
        value_range=_ratio_range(figure.key, subject, reference),
        target=target,
        verdict=verdict,
        reason=reason,
    )


def _why_missing(subject: Result | None, reference: Result | None) -> str:
    if subject is None:
        return "rankmesh was not among the subjects"
    if not subject.rounds:
        return f"rankmesh: {subject.failure}"
    return "no reference was measured" if reference is None else f"{reference.subject}: {reference.failure}"


def _ratio_range(key: str, subject: Result | None, reference: Result | None) -> tuple[float, float] | None:
    """Least and greatest ratio of rounds that ran next to each other."""
    if subject is None or reference is None or not subject.rounds or not reference.rounds:
        return None
    ratios = [ours / theirs for ours, theirs in zip(subject.figures(key), reference.figures(key), strict=False)]
    return min(ratios), max(ratios)


def number(value: float | None) -> str:
    """Three significant digits below 1,000; whole numbers with separators above."""
    if value is None:
        return "—"
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{digits}f}"


def with_unit(value: float | None, unit: str) -> str:
    return "—" if value is None else f"{number(value)} {unit}"


def with_spread(result: Result | None, key: str) -> str:
    """The median, and in brackets the least and the greatest round. Empty where the subject takes no part."""
    if result is None:
        return ""
    spread = result.spread(key)
    if spread is None:
        return "—"
    least, greatest = map(number, spread)
    return f"{number(result.median(key))} [dim]({least} – {greatest})[/dim]"


def subjects_table(results: Sequence[Result], notes: dict[str, str], rounds: int) -> Table:
    """A row per subject in `notes`: the three measures side by side, and its version or why it has no figures."""
    table = Table(title=f"Two processes pinned to two cores: medians of {rounds} interleaved rounds (least – greatest)")
    table.add_column("subject", no_wrap=True)
    for title in ("64 B ping-pong\np50, µs", "\np99, µs", "64 MiB one way\nGB/s", "64 B one way\nmessages/s"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("note")
    by_place = {(result.subject, result.measure): result for result in results}
    for name, note in notes.items():
        table.add_row(
            ENTRIES[name].title,
            with_spread(by_place.get((name, PINGPONG)), "p50_us"),
            with_spread(by_place.get((name, PINGPONG)), "p99_us"),
            with_spread(by_place.get((name, BANDWIDTH)), "gb_per_s"),
            with_spread(by_place.get((name, RATE)), "per_s"),
            escape(note),
            style="bold" if name == RANKMESH else "",
        )
    return table


def verdicts_table(verdicts: Iterable[Verdict]) -> Table:
    """rankmesh beside its reference, the ratio beside the target."""
    table = Table(title="rankmesh against the targets of issue 2")
    for title, justify in COLUMNS_OF_VERDICTS:
        table.add_column(title, justify=justify)
    for verdict in verdicts:
        figure = FIGURES[verdict.measure]
        relation = "≥" if figure.higher_is_better else "≤"
        unit = f" {figure.unit}" if verdict.measure == IDLE else "×"
        spread = "" if verdict.value_range is None else " ({} – {})".format(*map(number, verdict.value_range))
        table.add_row(
            figure.title,
            with_unit(verdict.measured, figure.unit),
            with_unit(verdict.reference, figure.unit) if verdict.reference_subject else "",
            verdict.reference_subject,
            "—" if verdict.value is None else f"{number(verdict.value)}{unit}[dim]{spread}[/dim]",
            f"{relation} {verdict.target:g}{unit}",
            f"[{STYLES[verdict.verdict]}]{verdict.verdict}[/] {escape(verdict.reason)}".strip(),
        )
    return table


def sweep_table(results: Sequence[Result]) -> Table:
    """Ping-pong at every size: round trip in µs, and GB/s of payload moved one way at a time."""
    table = Table(title="Ping-pong by size: median round trip, µs (GB/s in each direction)")
    table.add_column("bytes", justify="right")
    subjects = list(dict.fromkeys(result.subject for result in results))
    for name in subjects:
        table.add_column(name, justify="right")
    by_place = {(result.subject, result.nbytes): result for result in results}
    for nbytes in dict.fromkeys(result.nbytes for result in results):
        cells = []
        for name in subjects:
            microseconds = by_place[name, nbytes].median("p50_us")
            rate = None if microseconds is None else 2e-3 * nbytes / microseconds
            cells.append(f"{number(microseconds)} [dim]({number(rate)})[/dim]")
        table.add_row(f"{nbytes:,}", *cells)
    return table


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """Every round of every subject, and the verdicts."""
    return {
        "results": [asdict(result) for result in results],
        "targets": [asdict(verdict) for verdict in judge(results)],
    }

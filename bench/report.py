"""From results to verdicts, tables and JSON. Nothing here raises because a figure is bad or missing: it says so."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table

from harness import Result
from subjects import ENTRIES


@dataclass(frozen=True)
class Figure:
    """What is read from a round: its key in the reply, and how to take it."""

    key: str
    unit: str
    higher_is_better: bool


P50 = Figure("p50_us", "µs", higher_is_better=False)
P99 = Figure("p99_us", "µs", higher_is_better=False)
PER_HOP = Figure("hop_us", "µs", higher_is_better=False)
BANDWIDTH = Figure("gb_per_s", "GB/s", higher_is_better=True)
PER_SECOND = Figure("per_s", "1/s", higher_is_better=True)
RATIO = Figure("ratio", "×", higher_is_better=True)
OWNER_CPU = Figure("owner_percent", "%", higher_is_better=True)
PER_CALL = Figure("us", "µs", higher_is_better=False)
BUS = Figure("bus_gb_per_s", "GB/s", higher_is_better=True)
ELEMENTS = Figure("gelements_per_s", "10⁹/s", higher_is_better=True)
CPU = Figure("cpu_percent", "%", higher_is_better=False)


@dataclass(frozen=True)
class Column:
    """A column of the table of subjects."""

    title: str
    measure: str
    figure: Figure


@dataclass(frozen=True)
class Target:
    """One line of an issue's "What it must show": the subject's figure divided by the best of its references'.

    Without references the figure itself is compared with `bound`. Over several sizes the worst of those that were
    measured counts.
    """

    title: str
    measure: str
    figure: Figure
    bound: float
    subject: str
    references: tuple[str, ...] = ()
    #: Empty: the measure has one.
    sizes: tuple[int, ...] = ()

    @property
    def bound_text(self) -> str:
        relation = "≥" if self.figure.higher_is_better else "≤"
        return f"{relation} {self.bound:g}{self.value_unit}"

    @property
    def value_unit(self) -> str:
        return "×" if self.references else f" {self.figure.unit}"


COLUMNS_OF_VERDICTS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("what", "left"),
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

    target: Target
    measured: float | None
    reference: float | None
    reference_subject: str
    value: float | None
    value_range: tuple[float, float] | None
    verdict: str
    reason: str = ""


def judge(targets: Iterable[Target], results: Sequence[Result]) -> list[Verdict]:
    """A verdict for each target whose measure was run."""
    verdicts = []
    for target in targets:
        by_size: dict[int, dict[str, Result]] = {}
        for result in results:
            if result.measure == target.measure and (not target.sizes or result.nbytes in target.sizes):
                by_size.setdefault(result.nbytes, {})[result.subject] = result
        judged = {
            nbytes: _verdict(target, by_subject.get(target.subject), _best(target, by_subject))
            for nbytes, by_subject in by_size.items()
        }
        if judged:
            verdicts.append(_worst(judged) if len(judged) > 1 else next(iter(judged.values())))
    return verdicts


def _worst(judged: Mapping[int, Verdict]) -> Verdict:
    """That of several sizes, with the size, and those that miss."""

    def badness(nbytes: int) -> float:
        value, target = judged[nbytes].value, judged[nbytes].target
        return -math.inf if value is None else -value if target.figure.higher_is_better else value

    worst = max(judged, key=badness)
    missed = [size_text(nbytes) for nbytes, verdict in judged.items() if verdict.verdict == "MISS"]
    where = f"at {', '.join(missed)}" if missed else judged[worst].reason
    target = replace(judged[worst].target, title=f"{judged[worst].target.title}; worst at {size_text(worst)}")
    return replace(judged[worst], target=target, reason=where)


def _best(target: Target, by_subject: Mapping[str, Result]) -> Result | None:
    """The best of those that count as the reference."""
    references = [by_subject[name] for name in target.references if name in by_subject and by_subject[name].rounds]
    sign = -1 if target.figure.higher_is_better else 1
    return min(references, key=lambda result: sign * (result.median(target.figure.key) or 0.0), default=None)


def _verdict(target: Target, subject: Result | None, reference: Result | None) -> Verdict:
    figure = target.figure
    measured = subject.median(figure.key) if subject else None
    base = reference.median(figure.key) if reference else None
    value = measured if not target.references else measured / base if measured and base else None
    if value is None:
        verdict, reason = "—", _why_missing(target, subject)
    else:
        met = value >= target.bound if figure.higher_is_better else value <= target.bound
        verdict, reason = ("PASS" if met else "MISS"), ""
    return Verdict(
        target=target,
        measured=measured,
        reference=base,
        reference_subject=reference.subject if reference else "",
        value=value,
        value_range=_ratio_range(figure.key, subject, reference),
        verdict=verdict,
        reason=reason,
    )


def _why_missing(target: Target, subject: Result | None) -> str:
    if subject is None:
        return f"{target.subject} was not among the subjects"
    return subject.failure if not subject.rounds else f"not measured: {', '.join(target.references)}"


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


def size_text(nbytes: int) -> str:
    """8B, 32KiB, 64MiB"""
    unit, name = next(((unit, name) for unit, name in ((2**20, "MiB"), (2**10, "KiB")) if nbytes >= unit), (1, "B"))
    return f"{nbytes / unit:g}{name}"


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


def subjects_table(title: str, columns: Sequence[Column], results: Sequence[Result], notes: dict[str, str]) -> Table:
    """A row per subject in `notes` that took part: its figures, and its version or why it has none."""
    table = Table(title=title)
    table.add_column("subject", no_wrap=True)
    by_place = {(result.subject, result.measure): result for result in results}
    shown = [column for column in columns if any(column.measure == measure for _, measure in by_place)]
    for column in shown:
        table.add_column(column.title, justify="right", no_wrap=True)
    table.add_column("note")
    for name, note in notes.items():
        cells = [with_spread(by_place.get((name, column.measure)), column.figure.key) for column in shown]
        if not any(cells):
            continue
        table.add_row(ENTRIES[name].title, *cells, escape(note), style="bold" if ENTRIES[name].ours else "")
    return table


def verdicts_table(title: str, verdicts: Iterable[Verdict]) -> Table:
    """rankmesh beside its reference, the ratio beside the target."""
    table = Table(title=title)
    for name, justify in COLUMNS_OF_VERDICTS:
        table.add_column(name, justify=justify)
    for verdict in verdicts:
        target = verdict.target
        spread = "" if verdict.value_range is None else " ({} – {})".format(*map(number, verdict.value_range))
        table.add_row(
            target.title,
            with_unit(verdict.measured, target.figure.unit),
            with_unit(verdict.reference, target.figure.unit) if verdict.reference_subject else "",
            verdict.reference_subject,
            "—" if verdict.value is None else f"{number(verdict.value)}{target.value_unit}[dim]{spread}[/dim]",
            target.bound_text,
            f"[{STYLES[verdict.verdict]}]{verdict.verdict}[/] {escape(verdict.reason)}".strip(),
        )
    return table


def sweep_table(results: Sequence[Result]) -> Table:
    """Round trips at every size: in µs, and GB/s of payload moved one way at a time."""
    table = Table(title="Round trip by size: median, µs (GB/s in each direction)")
    table.add_column("bytes", justify="right")
    subjects = list(dict.fromkeys(result.subject for result in results))
    for name in subjects:
        table.add_column(name, justify="right")
    by_place = {(result.subject, result.nbytes): result for result in results}
    for nbytes in dict.fromkeys(result.nbytes for result in results):
        cells = []
        for name in subjects:
            result = by_place[name, nbytes]
            cells.append(f"{number(result.median('p50_us'))} [dim]({number(result.median('gb_per_s'))})[/dim]")
        table.add_row(f"{nbytes:,}", *cells)
    return table


def as_json(results: Sequence[Result], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Every round of every subject, and the verdicts."""
    return {
        "results": [asdict(result) for result in results],
        "targets": [asdict(verdict) for verdict in verdicts],
    }

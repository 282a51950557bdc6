"""One invocation of a benchmark: its command line, its worlds, the order of events, the report.

A benchmark (p2p.py, shm.py, rpc.py, memory.py, collectives.py) is a Bench: tables of what is measured, of whom, and
what it must show. Nothing here fails because a figure is bad or a library is missing: the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness import Effort, Plan, Result, SubjectFailed, World, run_interleaved
from hops import look, said
from report import Column, Target, as_json, judge, size_text, subjects_table, sweep_table, verdicts_table
from subjects import ENTRIES

SWEEP = "sweep"
MIB = 1024 * 1024
SWEEP_SIZES = (8, 64, 512, 4096, 32 * 1024, 256 * 1024, 2 * MIB, 16 * MIB, 64 * MIB)
SWEEP_PLAN = Plan(SWEEP, "pingpong", 0, least=3, most=5_000)
#: (measures, sweep)
FULL = (Effort(rounds=9, seconds=0.4), Effort(rounds=3, seconds=0.1))
QUICK = (Effort(rounds=3, seconds=0.03), Effort(rounds=1, seconds=0.01))
#: Load average above which the report warns that it was not alone on the machine.
QUIET_LOAD = 0.5
#: Width of a report that does not go to a terminal.
FILE_WIDTH = 180


@dataclass(frozen=True)
class Bench:
    """A benchmark as tables."""

    description: str
    issue: int
    #: Measured side by side in worlds of pinned processes, mostly pairs, with the subjects that take part.
    side_by_side: Mapping[Plan, tuple[str, ...]]
    columns: tuple[Column, ...]
    targets: tuple[Target, ...]
    #: Of more tables, where one would be too wide.
    further_columns: tuple[tuple[Column, ...], ...] = ()
    #: Who takes part in the sweep of sizes; none: there is no such option.
    sweep: tuple[str, ...] = ()
    #: Measured afterwards, in worlds of their own; a scenario returns nothing where its subjects were not asked for.
    scenarios: Mapping[str, Callable[[Session], Iterable[Result]]] = field(default_factory=dict)
    #: Tables of another kind than columns make.
    tables: Callable[[Sequence[Result], Mapping[str, str]], Iterator[Table]] = lambda results, notes: iter(())
    #: Of a run that is not quick: (measures, sweep).
    effort: tuple[Effort, Effort] = FULL
    #: Sentences below the tables.
    footnotes: Callable[[Sequence[Result]], Iterator[str]] = lambda _: iter(())

    @property
    def measures(self) -> tuple[str, ...]:
        return (*dict.fromkeys(plan.measure for plan in self.side_by_side), *self.scenarios)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the measures that there are in several sizes."""
        by_measure: dict[str, list[int]] = {}
        for plan in self.side_by_side:
            by_measure.setdefault(plan.measure, []).append(plan.nbytes)
        return tuple(sorted({nbytes for sizes in by_measure.values() if len(sizes) > 1 for nbytes in sizes}))

    @property
    def subjects(self) -> tuple[str, ...]:
        """In the order of the table."""
        named = {name for names in self.side_by_side.values() for name in names}
        return tuple(name for name in ENTRIES if name in named)


@dataclass
class Session:
    """What was asked for, and what came of it."""

    bench: Bench
    effort: Effort
    sweep_effort: Effort
    quick: bool
    measures: Sequence[str]
    subjects: Sequence[str]
    progress: Callable[[str], None]
    cores: Sequence[int]
    #: Of the measures that there are in several.
    sizes: Sequence[int] = ()
    results: list[Result] = field(default_factory=list)
    sweep: list[Result] = field(default_factory=list)
    #: How far apart the cores were, before each plan (hops.py).
    hops: list[int] = field(default_factory=list)
    #: By subject, in the order of the table: its version, or why it has no figures.
    notes: dict[str, str] = field(default_factory=dict)

    def measure(self) -> None:
        if any(plan.measure in self.measures for plan in self.bench.side_by_side) or SWEEP in self.measures:
            self._side_by_side()
        for name, scenario in self.bench.scenarios.items():
            if name in self.measures:
                self.results.extend(scenario(self))
        for result in reversed([*self.results, *self.sweep]):
            if result.failure and result.subject in self.notes:  # the first failure explains the others
                self.notes[result.subject] = f"{result.measure}: {result.failure}"

    def start_worlds(
        self, stack: ExitStack, plans: Iterable[Plan], names: Iterable[str], size: int, cores: Sequence[int]
    ) -> dict[str, World]:
        """Those of the worlds that start; the others get their failure as the result of each plan."""
        worlds = {}
        for name in names:
            self.progress(f"starting {name}, {size} ranks")
            try:
                worlds[name] = stack.enter_context(World(name, size, cores))
                self.notes.setdefault(name, worlds[name].version)
            except SubjectFailed as failure:
                self.notes.setdefault(name, str(failure))
                unmeasured = (Result(name, plan.measure, plan.nbytes, failure=str(failure)) for plan in plans)
                self.results.extend(unmeasured)
        return worlds

    def _side_by_side(self) -> None:
        for ranks in sorted({plan.ranks for plan in self.bench.side_by_side}):
            self._worlds_of(ranks)

    def _asked_for(self, plan: Plan) -> bool:
        return plan.measure in self.measures and (plan.nbytes in self.sizes or plan.nbytes not in self.bench.sizes)

    def _worlds_of(self, ranks: int) -> None:
        taking_part = {
            plan: [name for name in names if name in self.subjects]
            for plan, names in self.bench.side_by_side.items()
            if plan.ranks == ranks and self._asked_for(plan)
        }
        swept = [name for name in self.bench.sweep if name in self.subjects] if SWEEP in self.measures else []
        with ExitStack() as stack:
            worlds: dict[str, World] = {}
            for name in self.bench.subjects:
                plans = [plan for plan, names in taking_part.items() if name in names]
                if plans or name in swept:
                    worlds.update(self.start_worlds(stack, plans, [name], ranks, self.cores))
            for plan, names in taking_part.items():
                present = {name: worlds[name] for name in names if name in worlds}
                if len(self.cores) > 1:
                    self.hops.append(look(self.cores))
                self.results.extend(run_interleaved(plan, self.effort, present, self.progress))
            present = {name: worlds[name] for name in swept if name in worlds}
            for nbytes in SWEEP_SIZES if present else ():
                plan = replace(SWEEP_PLAN, nbytes=nbytes)
                self.sweep.extend(run_interleaved(plan, self.sweep_effort, present, self.progress))


def environment(cores: Sequence[int]) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "pinned_to": list(cores),
        "load_before": round(os.getloadavg()[0], 2),
    }


def pick_cores() -> list[int]:
    """The cores of ranks 0 and 1: the first two this process may use, or twice the only one."""
    return sorted(os.sched_getaffinity(0))[:2]


def print_report(console: Console, session: Session, about: dict[str, Any]) -> None:
    console.print("Python {python}, {system}, {cpus} CPUs, load before the run {load_before}".format_map(about))
    if len(session.cores) < 2:
        console.print("[yellow]Only one core: both processes share it, and no target means anything here.[/]")
    if about["load_before"] > QUIET_LOAD:
        console.print("[yellow]Other programs were running: trust the ratios more than the times, and neither much.[/]")
    if session.hops:
        console.print(said(session.hops))
    bench = session.bench
    title = f"Processes pinned to two cores: medians of {session.effort.rounds} interleaved rounds (least – greatest)"
    for columns in (bench.columns, *bench.further_columns):
        if any(column.measure in session.measures for column in columns):
            console.print(subjects_table(title, columns, session.results, session.notes))
    for table in bench.tables(session.results, session.notes):
        console.print(table)
    if session.sweep:
        console.print(sweep_table(session.sweep))
    verdicts = judge(bench.targets, session.results)
    if verdicts:
        console.print(verdicts_table(f"rankmesh against the targets of issue {bench.issue}", verdicts))
    for line in bench.footnotes(session.results):
        console.print(line)


def listed(known: Sequence[str]) -> Callable[[str], list[str]]:
    """An argument type: names from `known`, separated by commas."""

    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; choose from {', '.join(known)}")
        return names

    return parse


def parse_arguments(bench: Bench) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=bench.description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few repetitions, to see that it works")
    for option, default, known in (
        ("--measures", bench.measures, (*bench.measures, *([SWEEP] if bench.sweep else []))),
        ("--subjects", bench.subjects, bench.subjects),
    ):
        parser.add_argument(option, type=listed(known), default=default, help=f"comma-separated, of {', '.join(known)}")
    if bench.sweep:
        parser.add_argument("--sweep", action="store_true", help="add round trips at 8 B … 64 MiB")
    if bench.sizes:
        sizes = {size_text(nbytes): nbytes for nbytes in bench.sizes}
        parser.add_argument(
            "--sizes", type=listed(tuple(sizes)), default=list(sizes), help=f"comma-separated, of {', '.join(sizes)}"
        )
    parser.add_argument("--rounds", type=int, help="rounds of each measure")
    parser.add_argument("--seconds", type=float, help="length of a round")
    parser.add_argument(
        "--json", metavar="FILE", help="write all rounds and verdicts; '-' is stdout, with the table on stderr"
    )
    return parser.parse_args()


def main(bench: Bench) -> None:
    arguments = parse_arguments(bench)
    console = Console(stderr=arguments.json == "-")
    if not console.is_terminal:
        console.width = FILE_WIDTH
    effort, sweep_effort = QUICK if arguments.quick else bench.effort
    effort = replace(effort, rounds=arguments.rounds or effort.rounds, seconds=arguments.seconds or effort.seconds)
    measures = [*arguments.measures, *([SWEEP] if bench.sweep and arguments.sweep else [])]
    cores = pick_cores()
    about = environment(cores)
    with console.status("starting") as status:
        session = Session(
            bench, effort, sweep_effort, arguments.quick, measures, arguments.subjects, status.update, cores
        )
        if bench.sizes:
            session.sizes = [nbytes for nbytes in bench.sizes if size_text(nbytes) in arguments.sizes]
        session.measure()
    print_report(console, session, about)
    if arguments.json:
        recorded = as_json([*session.results, *session.sweep], judge(bench.targets, session.results))
        document = {"environment": {**about, "hops_ns": session.hops}, "subjects": session.notes, **recorded}
        text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
        if arguments.json == "-":
            sys.stdout.write(text)
        else:
            Path(arguments.json).write_text(text, encoding="utf-8")

"""rankmesh's point-to-point messages beside bare sockets, gloo, MPI and ZeroMQ, in one run. See bench/README.md.

    python bench/p2p.py                     # everything but the sweep, two to three minutes
    python bench/p2p.py --quick             # does it work: few repetitions, figures not to be quoted
    python bench/p2p.py --sweep --json out.json

It never fails because a figure is bad or a library is missing: the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from harness import Plan, Result, SubjectFailed, World, run_interleaved
from report import SWEEP, as_json, judge, subjects_table, sweep_table, verdicts_table
from scenarios import IDLE, OVERSUBSCRIBED, idle_cpu, oversubscribed_pingpong
from subjects import ALL_MEASURES, BANDWIDTH, ENTRIES, PINGPONG, RANKMESH, RATE

MIB = 1024 * 1024
SWEEP_SIZES = (8, 64, 512, 4096, 32 * 1024, 256 * 1024, 2 * MIB, 16 * MIB, 64 * MIB)
#: Load average above which the report warns that it was not alone on the machine.
QUIET_LOAD = 0.5
#: Width of a report that does not go to a terminal.
FILE_WIDTH = 180


@dataclass(frozen=True)
class Effort:
    """How long everything takes. Rounds are equal in time, not in repetitions: a slow subject does fewer."""

    rounds: int
    seconds: float
    sweep_rounds: int
    sweep_seconds: float
    idle_seconds: float


FULL = Effort(rounds=9, seconds=0.4, sweep_rounds=3, sweep_seconds=0.1, idle_seconds=10.0)
QUICK = Effort(rounds=3, seconds=0.03, sweep_rounds=1, sweep_seconds=0.01, idle_seconds=2.0)


def plans(effort: Effort) -> dict[str, Plan]:
    rounds, seconds = effort.rounds, effort.seconds
    return {
        PINGPONG: Plan(PINGPONG, 64, rounds, seconds, least=200, most=50_000),
        BANDWIDTH: Plan(BANDWIDTH, 64 * MIB, rounds, seconds, least=2, most=50),
        RATE: Plan(RATE, 64, rounds, seconds, least=500, most=500_000),
    }


@dataclass
class Run:
    """One invocation: what was asked for, and what came of it."""

    effort: Effort
    measures: Sequence[str]
    subjects: Sequence[str]
    cores: Sequence[int]
    progress: Callable[[str], None]

    def __post_init__(self) -> None:
        self.results: list[Result] = []
        self.sweep: list[Result] = []
        #: By subject, in the order of the table: its version, or why it has no figures.
        self.notes: dict[str, str] = {}

    def measure(self) -> None:
        if {*ALL_MEASURES, SWEEP} & set(self.measures):
            self._side_by_side()
        if IDLE in self.measures and RANKMESH in self.subjects:
            self.results.append(idle_cpu(self.effort.idle_seconds, self.progress))
        if OVERSUBSCRIBED in self.measures and RANKMESH in self.subjects:
            self.results.extend(oversubscribed_pingpong(plans(self.effort)[PINGPONG], self.progress))

    def _side_by_side(self) -> None:
        with ExitStack() as stack:
            worlds = self._start_worlds(stack)
            for measure, plan in plans(self.effort).items():
                if measure in self.measures:
                    taking_part = {name: world for name, world in worlds.items() if measure in ENTRIES[name].measures}
                    self.results.extend(run_interleaved(plan, taking_part, self.progress))
            if SWEEP in self.measures:
                self._sweep(worlds)
        for result in reversed([*self.results, *self.sweep]):
            if result.failure and result.subject in worlds:  # the first failure is the one that explains the others
                self.notes[result.subject] = f"{result.measure}: {result.failure}"

    def _start_worlds(self, stack: ExitStack) -> dict[str, World]:
        worlds = {}
        for name in self.subjects:
            self.progress(f"starting {name}")
            try:
                worlds[name] = stack.enter_context(World(name, 2, self.cores))
                self.notes[name] = worlds[name].version
            except SubjectFailed as failure:
                self.notes[name] = str(failure)
                unmeasured = (measure for measure in ENTRIES[name].measures if measure in self.measures)
                self.results.extend(Result(name, measure, 0, failure=str(failure)) for measure in unmeasured)
        return worlds

    def _sweep(self, worlds: dict[str, World]) -> None:
        base = Plan(PINGPONG, 0, self.effort.sweep_rounds, self.effort.sweep_seconds, least=3, most=5_000)
        for nbytes in SWEEP_SIZES:
            results = run_interleaved(replace(base, nbytes=nbytes), worlds, self.progress)
            self.sweep.extend(replace(result, measure=SWEEP) for result in results)


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


def print_report(console: Console, run: Run, about: dict[str, Any]) -> None:
    measured = [result for result in run.results if result.measure in ALL_MEASURES]
    console.print("Python {python}, {system}, {cpus} CPUs, load before the run {load_before}".format_map(about))
    if len(run.cores) < 2:
        console.print("[yellow]Only one core: both processes share it, and no target means anything here.[/]")
    if about["load_before"] > QUIET_LOAD:
        console.print("[yellow]Other programs were running: trust the ratios more than the times, and neither much.[/]")
    if measured:
        console.print(subjects_table(measured, run.notes, run.effort.rounds))
    if run.sweep:
        console.print(sweep_table(run.sweep))
        for name in run.notes.keys() - {result.subject for result in run.sweep}:
            console.print(f"Not in the sweep: {name}: {escape(run.notes[name])}")
    verdicts = judge(run.results)
    if verdicts:
        console.print(verdicts_table(verdicts))
    for result in run.results:
        if result.measure == IDLE and result.rounds:
            waiting = result.rounds[0]["waiting_cpu_percent"]
            console.print(f"CPU of the busiest of the 8 peers, waiting in recv meanwhile: {waiting:.2f} %")


def listed(known: Sequence[str]) -> Callable[[str], list[str]]:
    """An argument type: names from `known`, separated by commas."""

    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; choose from {', '.join(known)}")
        return names

    return parse


def parse_arguments() -> argparse.Namespace:
    measures = (*ALL_MEASURES, IDLE, OVERSUBSCRIBED)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repetitions, to see that it works")
    for option, default, known in (
        ("--measures", measures, (*measures, SWEEP)),
        ("--subjects", tuple(ENTRIES), tuple(ENTRIES)),
    ):
        parser.add_argument(option, type=listed(known), default=default, help=f"comma-separated, of {', '.join(known)}")
    parser.add_argument("--sweep", action="store_true", help="add ping-pong at 8 B … 64 MiB")
    parser.add_argument("--rounds", type=int, help="rounds of each measure")
    parser.add_argument("--seconds", type=float, help="length of a round")
    parser.add_argument(
        "--json", metavar="FILE", help="write all rounds and verdicts; '-' is stdout, with the table on stderr"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    console = Console(stderr=arguments.json == "-")
    if not console.is_terminal:
        console.width = FILE_WIDTH
    effort = QUICK if arguments.quick else FULL
    effort = replace(effort, rounds=arguments.rounds or effort.rounds, seconds=arguments.seconds or effort.seconds)
    measures = [*arguments.measures, *([SWEEP] if arguments.sweep else [])]
    cores = pick_cores()
    about = environment(cores)
    with console.status("starting") as status:
        run = Run(effort, measures, arguments.subjects, cores, status.update)
        run.measure()
    print_report(console, run, about)
    if arguments.json:
        document = {"environment": about, "subjects": run.notes, **as_json([*run.results, *run.sweep])}
        text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
        if arguments.json == "-":
            sys.stdout.write(text)
        else:
            Path(arguments.json).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
